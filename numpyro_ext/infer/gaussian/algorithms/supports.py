"""Starting points at which no factor is zero, for algorithms that begin where some are.

A factor may vanish where its parameter is out of range (a rate that is linear in the field), or lose its digits there
(the logarithm of a difference of two distribution functions, for an interval). Only functions of which nothing is known
do; named families keep their digits.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ....linalg.gaussian.conditioning import LinearGaussian
from ....potentials import ElementwisePotential, Potential
from ....potentials.integrals.tilted.tilted_window import nearest_large
from ....structure.latent_gaussian import LatentGaussian

_MAX_ROUNDS = 20


def may_vanish(form: LatentGaussian) -> bool:
    """Tell whether a factor is a function of which nothing is known, that may be zero on a part of the line."""
    return any(map(_is_unknown, form.potentials))


def never_vanishes(form: LatentGaussian) -> bool:
    """Tell whether every factor is known to be positive at all finite predictors."""
    return all(getattr(potential, "is_analytic", False) for potential in form.potentials)


def all_positive(form: LatentGaussian, eta: Array) -> Array:
    """Tell whether no factor is zero, or not a number, at the predictors ``eta``; a scalar."""
    return jnp.all(jnp.isfinite(form.log_factors(eta)))


def sites_within_support(form: LatentGaussian, prior: LinearGaussian, eta: Array) -> tuple[Array, Array]:
    """Gaussian sites, one for each row, that draw the posterior to where no factor is zero.

    Every factor is replaced by its second-order expansion at a point where it is about as large as it gets, as near to
    ``eta`` as possible; the means under prior and sites are the next predictors, until no factor is zero there.

    Cost: in each round 6500 evaluations of the log factors, and a conditioning; one to three rounds are common.

    :param LatentGaussian form: the model; known families and factors of several predictors are expanded where they are.
    :param LinearGaussian prior: its prior, prepared for conditioning.
    :param Array eta: predictors to start from, offset included, shape ``(num_rows,)``.
    :return: precisions and shifts of shape ``(num_rows,)``, of functions of the predictor with its offset; those of the
        last of twenty rounds where none has found such predictors.
    """

    def sites(eta: Array) -> tuple[Array, Array]:
        parts = []
        for potential, own, observed in zip(form.potentials, form.split_rows(eta), form.observed, strict=True):
            precision, shift = _expansion(potential, own)
            parts.append((jnp.where(observed, precision, 0.0), jnp.where(observed, shift, 0.0)))
        precision, shift = (jnp.concatenate(terms) for terms in zip(*parts, strict=True))
        return precision, shift

    def proceed(carry: tuple[Array, Array, Array, Array]) -> Array:
        eta, _, _, count = carry
        return (count < _MAX_ROUNDS) & ((count == 0) | ~all_positive(form, eta))

    def advance(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        eta, _, _, count = carry
        precision, shift = sites(eta)
        found = prior.condition(precision, shift - precision * form.offset)
        moved = prior.predictor(found.coordinates) + form.offset
        return jnp.where(jnp.isfinite(moved), moved, eta), precision, shift, count + 1

    zero = jnp.zeros_like(eta)
    start = jnp.where(jnp.isfinite(eta), eta, 0.0)
    _, precision, shift, _ = lax.while_loop(proceed, advance, (start, zero, zero, jnp.asarray(0)))
    return precision, shift


def _is_unknown(potential: Potential) -> bool:
    return isinstance(getattr(potential, "base", potential), ElementwisePotential)


def _expansion(potential: Potential, eta: Array) -> tuple[Array, Array]:
    """Precision and shift of Gaussians in the place of the factors of a family."""
    point = nearest_large(potential.log_density, eta) if _is_unknown(potential) else eta
    _, slope, curvature = potential.derivatives(point)
    is_smooth = jnp.isfinite(slope) & jnp.isfinite(curvature)
    slope, size = jnp.where(is_smooth, slope, 0.0), jnp.where(is_smooth, jnp.abs(curvature), 0.0)
    # Where nothing bends, as within a box and at its edges, the move itself says how far to go.
    moved = jnp.square(point - eta)
    precision = jnp.maximum(size, jnp.where(moved > 0.0, 1.0 / moved, 0.0))
    return precision, jnp.where(precision > 0.0, slope, 0.0) + precision * point
