"""Distributions that are Gaussian, or factors on flat unknowns, with their location and prior block."""

from __future__ import annotations

import copy
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import biject_to, constraints

from ...distributions.gaussian_markov_random_field import GaussianMarkovRandomField
from ...linalg.gaussian.block_diagonal import BlockDiagonal
from ...linalg.gaussian.prior import (
    CovariancePrior,
    DiagonalPrior,
    FlatPrior,
    LowRankPrior,
    PrecisionPrior,
    PriorBlock,
    SparsePrecisionPrior,
)
from ...potentials.base import Potential
from ..families import IDENTITY, Observations, family_of
from ..half_lines import half_line, has_half_line

LARGEST_DENSE_FIELD = 200
"""Unknowns of a field of a sparse precision up to which a dense one takes its place, and dense algebra is as fast."""
_ISLANDS = (
    "Islands are allowed in GaussianMarkovRandomField(graph.scaled, null_space=graph.null_space, sum_to_zero=True), "
    "which is zero on them, with graph = graph_precision(adjacency), and in leroux(graph, correlation)."
)
_LARGEST_FIELD = 1024
"""Unknowns of a field up to which a dense precision is all there is, as of several fields in a plate."""


def unwrap(fn: dist.Distribution) -> dist.Distribution:
    """The distribution below ``mask``, ``to_event`` and ``expand``."""
    while isinstance(fn, dist.Independent | dist.MaskedDistribution | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn


def mask_of(fn: dist.Distribution) -> Any:
    """The mask that a distribution carries, over the batch shape of :func:`unwrap`: True, False or a boolean array."""
    mask: Any = True
    while isinstance(fn, dist.Independent | dist.MaskedDistribution | dist.ExpandedDistribution):
        if isinstance(fn, dist.Independent) and not isinstance(mask, bool):
            mask = jnp.reshape(mask, jnp.shape(mask) + (1,) * fn.reinterpreted_batch_ndims)
        if isinstance(fn, dist.MaskedDistribution) and fn._mask is not None:
            mask = fn._mask if mask is True else jnp.logical_and(mask, fn._mask)
        fn = fn.base_dist
    return mask


def is_unweighted(fn: dist.Distribution) -> bool:
    """True if a mask takes all of the density of ``fn`` away, as imputation does before it gives a joint one."""
    return mask_of(fn) is False


def is_gaussian(fn: dist.Distribution) -> bool:
    """True if values of ``fn`` are jointly Gaussian (or flat on all of the real line) given its parameters."""
    base = unwrap(fn)
    if isinstance(base, dist.ImproperUniform):
        return _is_real(base.support)
    return type(base) in _GAUSSIAN


def why_not_read(fn: dist.Distribution) -> str | None:
    """Obstacle to reading a field on a graph, and what to do instead; ``None`` of all others."""
    base = unwrap(fn)
    if isinstance(base, dist.CAR):
        return _why_not_car(base.adj_matrix)
    if not isinstance(base, GaussianMarkovRandomField):
        return None
    size = base.event_shape[0]
    if not base.is_proper and not is_sparse_field(fn):
        return (
            "is a batch of fields that are flat along their null space, and engines take such fields one by one. Write "
            "each as a site of its own, or the same prior as two sites: sum_to_zero=True for this one, and "
            "null_space @ coefficients added to it, with the coefficients from dist.Normal(0, 10). NUTS and SVI take "
            "it as it is"
        )
    if size > _LARGEST_FIELD and not is_sparse_field(fn):
        return (
            f"is a batch of GaussianMarkovRandomFields of {size} unknowns each, and engines take up to "
            f"{_LARGEST_FIELD} in a batch, as dense precisions. Write each field as a site of its own, or one field of "
            "kronecker(...) for all of them, or sample the model by NUTS, which keeps the precision sparse"
        )
    return None


def _why_not_car(adjacency: Any) -> str | None:
    islands = "" if isinstance(adjacency, jax.core.Tracer) else islands_of(adjacency)
    if not islands:
        return None
    return f"is a CAR field of a graph with islands, which has no density. {islands.removesuffix('.')}"


def islands_of(adjacency: Any) -> str:
    """Sentences that name the nodes without neighbours of an adjacency matrix, dense or of SciPy, and say what to do;
    empty where there are none."""
    nodes = np.flatnonzero(np.asarray(adjacency.sum(axis=-1)).reshape(-1) == 0).tolist()
    if not nodes:
        return ""
    shown = ", ".join(map(str, nodes[:10])) + (", ..." if len(nodes) > 10 else "")
    return f"Nodes {shown} have no neighbours. {_ISLANDS}"


def is_sparse_field(fn: dist.Distribution) -> bool:
    """True if the innovation of a site keeps the sparse precision of its Gaussian Markov random field: it then has all
    values of the field, also where these add up to zero, and not coordinates of the space on which they do."""
    base = unwrap(fn)
    if not isinstance(base, GaussianMarkovRandomField) or is_unweighted(fn) or fn.batch_shape:
        return False
    return not base.is_proper or base.event_shape[0] > LARGEST_DENSE_FIELD


def is_factor(fn: dist.Distribution) -> bool:
    """True if a site of ``fn`` is its location plus innovations with a registered density each, other than a Gaussian.

    Such innovations are flat unknowns of a latent Gaussian form, and their densities factors on them, as those of
    observations are.
    """
    base = unwrap(fn)
    family = family_of(base)
    if family is None or family.predictor != "loc" or IDENTITY not in family.links or is_gaussian(fn):
        return False
    return not base.event_dim and _is_real(base.support) and not is_unweighted(fn)


def factor_potential(fn: dist.Distribution) -> Potential | None:
    """The potential of the innovations of ``fn`` with shapes in place of numbers, if they have one."""
    if not is_factor(fn):
        return None
    base, family = unwrap(fn), family_of(unwrap(fn))
    assert family is not None  # by is_factor
    parameters = {n: getattr(base, n) for n in family.parameters}
    observations = Observations(jnp.zeros(jnp.shape(base.loc)), parameters, jnp.ones(()), 1)
    return jax.eval_shape(lambda y: family.build(IDENTITY, y._replace(dimension=1)).potential, observations)


def is_one_sided(fn: dist.Distribution) -> bool:
    """True if a site of ``fn`` is a flat unknown with a density on a half line (half-normal, exponential) as factor."""
    return has_half_line(unwrap(fn)) and not is_unweighted(fn)


def density_of_innovation(fn: dist.Distribution, innovation: Array) -> dist.Distribution:
    """Distribution whose density at zero is that of an innovation of ``fn``, where its prior is a factor: the one below
    :func:`unwrap` at a location of minus the innovation."""
    if is_one_sided(fn):
        return half_line(unwrap(fn), -innovation)
    base = copy.copy(unwrap(fn))
    base.loc, base._validate_args = -innovation, False
    return base


def _is_real(support: constraints.Constraint) -> bool:
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return isinstance(support, type(constraints.real))


def location(fn: dist.Distribution) -> Array:
    """Location of a site of the field, of the shape of its values (zero for those that have none: flat ones, trees)."""
    base = unwrap(fn)
    shape = fn.batch_shape + fn.event_shape
    if isinstance(base, dist.GaussianRandomWalk) or not hasattr(base, "loc"):
        return jnp.zeros(shape)
    return jnp.broadcast_to(base.mode if isinstance(base, GaussianMarkovRandomField) else base.loc, shape)


def innovation_shape(fn: dist.Distribution) -> tuple[int, ...]:
    """Shape of the innovation of a Gaussian site: that of its values, less what a sum of zero takes away."""
    base = unwrap(fn)
    shape: tuple[int, ...] = fn.batch_shape + fn.event_shape
    if isinstance(base, dist.ZeroSumNormal):
        return *shape[: len(shape) - base.event_dim], *base.base_dist.event_shape
    if isinstance(base, GaussianMarkovRandomField) and not is_sparse_field(fn):
        return *shape[:-1], *biject_to(base.support).inverse_shape(base.event_shape)
    return shape


def shift_to_value(fn: dist.Distribution, innovation: Array) -> Array:
    """The value of a Gaussian site from its innovation, a map of unit Jacobian (onto sums of zero, an isometry)."""
    base = unwrap(fn)
    if isinstance(base, dist.GaussianRandomWalk):
        return jnp.cumsum(innovation, axis=-1)
    if isinstance(base, dist.ZeroSumNormal | dist.GaussianStateSpace):
        return jnp.asarray(base.transforms[0](innovation))
    if isinstance(base, GaussianMarkovRandomField) and not is_sparse_field(fn):
        return location(fn) + jnp.asarray(biject_to(base.support)(innovation))
    return location(fn) + innovation


def prior_block(fn: dist.Distribution) -> PriorBlock:
    """Distribution of the innovation of a Gaussian site, flattened in C order, as the model parameterised it."""
    base = unwrap(fn)
    shape = innovation_shape(fn)
    if isinstance(base, dist.ImproperUniform) or is_unweighted(fn) or is_factor(fn) or is_one_sided(fn):
        return FlatPrior(math.prod(shape))
    if isinstance(base, dist.Normal | dist.ZeroSumNormal):
        return DiagonalPrior(jnp.broadcast_to(jnp.square(base.scale), shape).reshape(-1))
    if isinstance(base, dist.GaussianRandomWalk):
        scale = jnp.broadcast_to(jnp.asarray(base.scale)[..., None], shape)
        return DiagonalPrior(jnp.square(scale).reshape(-1))
    if isinstance(base, dist.MatrixNormal):
        row, column = (tril @ jnp.swapaxes(tril, -1, -2) for tril in (base.scale_tril_row, base.scale_tril_column))
        width = math.prod(shape[-2:])
        joint = jnp.einsum("...ij,...kl->...ikjl", row, column)
        return CovariancePrior(*_stack(joint.reshape(*joint.shape[:-4], width, width), (*shape[:-2], width)))
    width = shape[-1]
    if isinstance(base, dist.CirculantNormal):
        lag = (np.arange(width)[:, None] - np.arange(width)) % width
        return CovariancePrior(*_stack(jnp.fft.irfft(base.covariance_rfft, width)[..., lag], shape))
    if isinstance(base, dist.GaussianStateSpace):  # the noise of each step
        return CovariancePrior(*_stack(base.covariance_matrix[..., None, :, :], shape))
    if isinstance(base, dist.CAR):
        return PrecisionPrior(*_stack(_car_precision(base), shape))
    if is_sparse_field(fn):
        return _sparse_block(base)
    if isinstance(base, GaussianMarkovRandomField):
        return PrecisionPrior(*_stack(base.dense_precision(), shape))
    if isinstance(base, dist.MultivariateNormal):
        given = vars(base)
        if "covariance_matrix" in given:
            return CovariancePrior(*_stack(base.covariance_matrix, shape))
        if "precision_matrix" in given:
            return PrecisionPrior(*_stack(base.precision_matrix, shape))
        tril = base.scale_tril
        return CovariancePrior(*_stack(tril @ jnp.swapaxes(tril, -1, -2), shape))
    factor = base.cov_factor
    factor = jnp.broadcast_to(factor, (*shape, factor.shape[-1])).reshape(-1, width, factor.shape[-1])
    return LowRankPrior(factor, jnp.broadcast_to(base.cov_diag, shape).reshape(-1, width))


def _sparse_block(field: GaussianMarkovRandomField) -> SparsePrecisionPrior:
    if (known := field.known_log_determinant) is not None:
        known = known + field.entries.rank * jnp.log(field.scale)
    return field.entries.block(field.precision.values, known).carried()


def dense_prior_block(fn: dist.Distribution) -> PriorBlock:
    """Prior block, as :func:`prior_block` has it, by its covariance where it is of low rank."""
    block = prior_block(fn)
    return block.dense() if isinstance(block, LowRankPrior) else block


def colour(block: PriorBlock, white: Array) -> Array:
    """A draw from the prior block made of standard normal numbers (themselves, where it is flat)."""
    if isinstance(block, FlatPrior):
        return white
    if isinstance(block, SparsePrecisionPrior):
        return block.draw(white)
    return block.draw(white) if isinstance(block, LowRankPrior) else BlockDiagonal((block.scale_part(),)).apply(white)


def _stack(matrix: Array, shape: tuple[int, ...]) -> tuple[Array, int]:
    """Matrices of the fields of a batch, ``(batch, width, width)``, and how many times they are taken in turn: axes of
    the batch in front of all along which matrices differ are not expanded."""
    while matrix.shape[0] == 1 and matrix.ndim > 2:
        matrix = matrix[0]
    own = len(shape) + 1 - matrix.ndim
    matrix = jnp.broadcast_to(matrix, (*shape[own:-1], *matrix.shape[-2:]))
    return matrix.reshape(-1, *matrix.shape[-2:]), math.prod(shape[:own])


def _car_precision(base: dist.CAR) -> Array:
    adjacency = base.adj_matrix.toarray() if base.is_sparse else base.adj_matrix
    adjacency = jnp.asarray(adjacency, jnp.result_type(float))
    degrees = jnp.eye(adjacency.shape[-1]) * adjacency.sum(-1)[..., None]
    correlation = jnp.asarray(base.correlation)[..., None, None]
    return jnp.asarray(base.conditional_precision)[..., None, None] * (degrees - correlation * adjacency)


_GAUSSIAN = {
    dist.Normal,
    dist.MultivariateNormal,
    dist.LowRankMultivariateNormal,
    dist.GaussianRandomWalk,
    dist.GaussianStateSpace,
    dist.CAR,
    dist.CirculantNormal,
    dist.MatrixNormal,
    dist.ZeroSumNormal,
    GaussianMarkovRandomField,
}
