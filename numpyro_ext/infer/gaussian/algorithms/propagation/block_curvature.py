r"""Second derivatives of EP's log evidence where unknowns fall into small independent blocks: no fit is made again.

The log evidence is stationary in all sites: with the log partition function :math:`W(s, \theta)` of prior and sites,

.. math:: L(\theta) = \mathrm{ext}_s \Big[ W(s, \theta) + \sum_i \mathrm{ext}_{c_i}
    \big( \psi_i(c_i, p_i(\theta)) - A(c_i + s_i) \big) \Big],

where :math:`\psi_i` is the log integral of a factor times an unnormalised Gaussian with natural parameters
:math:`c_i`, and :math:`A` that of the Gaussian alone (Opper and Winther 2005). The sites of a block act on its unknowns
through the natural parameters of one Gaussian, :math:`n (n + 3) / 2` numbers. With covariances :math:`K` of its
statistics, those :math:`P_i` of a tilted density and :math:`G_i` of a marginal, the sites are eliminated by Woodbury's
identity:

.. math:: \nabla^2 L = \text{complete} + \sum_b Z_b^T (K_b^{-1} + N_b)^{-1} Z_b, \quad
    N_b = \sum_{i \in b} B_i^T (P_i^{-1} - G_i^{-1}) B_i.

The first part is sparse, as with the unknowns known; :math:`Z_b` says how the natural parameters would move with each
hyperparameter if the moments of all predictors were held. Statistics are about the means of the fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .....linalg.cholesky import cholesky, cholesky_inverse, solve_lower
from .....linalg.gaussian.spaces.coefficient_space import CoefficientSpace
from .....structure.latent_gaussian import LatentGaussian, joined
from ..posterior import gaussian_prior
from .expectation_propagation import State
from .local_factors import components, has_few_coordinates, log_z_derivatives
from .tilting import cavities

_MOST_NUMBERS = 30_000_000
"""Natural parameters of all blocks times hyperparameters, which are held at once."""


def has_block_curvature(form: LatentGaussian, num_hyper: int) -> bool:
    """True if :func:`block_curvature` serves such a form: independent blocks, factors of one predictor.

    :param LatentGaussian form: of shapes alone.
    :param int num_hyper: number of hyperparameters.
    """
    number, width = form.blocks.columns.shape
    is_small = number * _num_statistics(width) * num_hyper <= _MOST_NUMBERS
    return form.has_blocks_alone and number > 1 and is_small and has_few_coordinates(form)


def _num_statistics(width: int) -> int:
    return width * (width + 3) // 2


class _Numbers(NamedTuple):
    """Numbers of a form that depend on hyperparameters, block by block."""

    matrix: Array
    """Rows in whitened unknowns, shape ``(n, b, m)``."""
    precision: Array
    """Precision of these under the prior, shape ``(n, n, b)``."""
    constant: Array
    """Log constant of the form and log volume of the prior."""
    parameters: Array
    """Offset and parameters of each factor, shape ``(k, b, m)``."""


def block_curvature(form_fn: Callable[[Array], LatentGaussian], values: Array, state: State) -> tuple[Array, Array]:
    """Second derivatives of the log evidence by hyperparameters at a fixed point, as the sum of two arrays of shape
    ``(d, d)``: with the unknowns known, and what is lost as they are not.

    :param form_fn: form at unconstrained hyperparameters.
    :param values: these, shape ``(d,)``.
    :param State state: a fixed point of EP of power one there.
    :return: nan where the second is not that of a stable fixed point.
    """

    def numbers(x: Array) -> _Numbers:
        form = joined(form_fn(x))
        space = _space(form)
        constant = form.log_constant + space.whitened.half_log_determinant
        matrix, precision = jnp.moveaxis(space.matrix, -1, 0), jnp.moveaxis(space.precision, 0, -1)
        return _Numbers(matrix, precision, constant, _local(form, _parameters(form)))

    form, held = joined(form_fn(values)), numbers(values)
    rows = _rows(form, held, state)
    axes = jnp.eye(values.size, dtype=values.dtype)

    def along(axis: Array) -> tuple[Array, Array]:
        complete = jax.jvp(jax.grad(lambda x: rows.complete(numbers(x))), (values,), (axis,))[1]
        return complete, jax.jvp(lambda x: rows.natural(numbers(x)), (values,), (axis,))[1]

    complete, moves = jax.lax.map(along, axes)  # (d, d) and (d, s, b)
    white = jnp.einsum("bij,djb->dbi", rows.root(), moves).reshape(values.size, -1)
    return complete, white @ white.T


def _space(form: LatentGaussian) -> CoefficientSpace:
    space = gaussian_prior(form, "coefficient")
    assert isinstance(space, CoefficientSpace)
    return space


def _local(form: LatentGaussian, values: Array) -> Array:
    """Values of rows, on the last axis, as those of blocks, on the last two."""
    return values.at[..., form.blocks.rows].get(mode="fill", fill_value=0.0)


def _parameters(form: LatentGaussian) -> Array:
    """Offset and parameters of each factor, shape ``(k, num_rows)``, with zeros where families have fewer."""
    return jnp.concatenate([form.offset[None], _stacked(form, components)])


def _stacked(form: LatentGaussian, function: Callable[..., Any]) -> Array:
    parts = []
    for potential, mask in zip(form.potentials, form.observed, strict=True):
        found = [jnp.broadcast_to(part, mask.shape) for part in function(potential, mask.shape[0])]
        parts.append(jnp.stack(found) if found else jnp.zeros((0, *mask.shape), form.offset.dtype))
    most = max(len(part) for part in parts)
    return jnp.concatenate([jnp.pad(part, ((0, most - len(part)), (0, 0))) for part in parts], axis=1)


class _Rows(NamedTuple):
    """A fixed point, block by block: all that its second derivatives are made of."""

    held: _Numbers
    mean: Array
    """Means of the whitened unknowns, shape ``(n, b, 1)``."""
    covariance: Array
    """Shape ``(n, n, b, 1)``."""
    precision: Array
    """Precisions of the sites, shape ``(b, m)``."""
    shift: Array
    """Slopes of their logarithms at the means, shape ``(b, m)``."""
    slope: Array
    """Derivatives of the log partition functions of factors by their parameters, shape ``(k, b, m)``."""
    curvature: Array
    """Second ones, shape ``(k, k, b, m)``."""
    cross: Array
    """Derivatives of the tilted moments by the parameters, shape ``(2, k, b, m)``."""
    tilted: Array
    """Inverse covariance of the statistics under the tilted density, shape ``(2, 2, b, m)``; zero without factor."""
    marginal: Array
    """The same under the marginal."""

    def _moves(self, numbers: _Numbers) -> tuple[Array, Array, Array]:
        """Change of the parameters; that of the moments of predictors with the unknowns' held, and the latter less that
        of the tilted moments with the cavities held."""
        change = numbers.matrix - self.held.matrix
        of_square = -jnp.sum(_product(self.covariance, self.held.matrix) * change, axis=0)
        moments = jnp.stack([of_square, jnp.sum(change * self.mean, axis=0)])
        parameters = numbers.parameters - self.held.parameters
        return parameters, moments, moments - _product(self.cross, parameters)

    def complete(self, numbers: _Numbers) -> Array:
        """Function whose second derivatives are those with the unknowns known."""
        second = (self.covariance + self.mean[:, None] * self.mean)[..., 0]
        away = jnp.sum((numbers.matrix - self.held.matrix) * self.mean, axis=0)
        square = away**2 + _form(self.covariance, numbers.matrix)
        total = numbers.constant - 0.5 * jnp.sum(numbers.precision * second)
        total += jnp.sum(self.shift * away - 0.5 * self.precision * square)
        parameters, moments, rest = self._moves(numbers)
        total += jnp.sum(self.slope * parameters)
        squares = _form(self.curvature, parameters) + _form(self.marginal, moments) - _form(self.tilted, rest)
        return total + 0.5 * jnp.sum(squares)

    def natural(self, numbers: _Numbers) -> Array:
        """Natural parameters of blocks, shape ``(s, b)``, of which those that the sites answer with are taken off."""
        _, moments, rest = self._moves(numbers)
        answer = _product(self.tilted, rest) - _product(self.marginal, moments)
        away = jnp.sum((numbers.matrix - self.held.matrix) * self.mean, axis=0)
        i, j = np.triu_indices(len(self.mean))
        matrix, held = numbers.matrix, self.held.matrix
        of_pairs = jnp.sum(matrix[i] * matrix[j] * self.precision - held[i] * held[j] * answer[0], axis=-1)
        of_each = jnp.sum(matrix * (self.shift - self.precision * away) - held * answer[1], axis=-1)
        of_each -= _product(numbers.precision, self.mean[..., 0])
        return jnp.concatenate([of_pairs + numbers.precision[i, j], of_each])

    def root(self) -> Array:
        r"""Matrices whose squares are :math:`(K^{-1} + N)^{-1}`, shape ``(b, s, s)``."""
        i, j = np.triu_indices(len(self.mean))
        weight = jnp.asarray(np.where(i == j, -0.5, -1.0), self.mean.dtype)
        c = jnp.moveaxis(self.covariance[..., 0], -1, 0)
        pairs = c[:, i][:, :, i] * c[:, j][:, :, j] + c[:, i][:, :, j] * c[:, j][:, :, i]
        spread = cholesky(weight[:, None] * pairs * weight)
        empty = jnp.zeros((*spread.shape[:2], c.shape[1]), c.dtype)
        factor = jnp.block([[spread, empty], [empty.mT, cholesky(c)]])
        held, inner = self.held.matrix, self.tilted - self.marginal
        squares = held[i] * held[j]
        between = jnp.einsum("ibm,bm,jbm->bij", squares, inner[0, 1], held)
        of_squares = jnp.einsum("ibm,bm,jbm->bij", squares, inner[0, 0], squares)
        of_each = jnp.einsum("ibm,bm,jbm->bij", held, inner[1, 1], held)
        answers = jnp.block([[of_squares, between], [between.mT, of_each]])
        whole = jnp.eye(factor.shape[1], dtype=c.dtype) + factor.mT @ answers @ factor
        return solve_lower(cholesky(whole), factor.mT)


def _product(matrix: Array, vector: Array) -> Array:
    """Products of matrices ``(i, j, ...)`` and vectors ``(j, ...)``, written out: their batch is on the last axes."""
    return jnp.sum(matrix * vector, axis=1)


def _form(matrix: Array, vector: Array) -> Array:
    return jnp.sum(vector * _product(matrix, vector), axis=0)


def _rows(form: LatentGaussian, held: _Numbers, state: State) -> _Rows:
    precision, shift = state.site_precision, state.site_shift
    posterior = _space(form).condition(precision, shift - precision * form.offset)
    mean = posterior.coordinates.T[..., None]
    covariance = jnp.moveaxis(cholesky_inverse(posterior.factor), 0, -1)[..., None]
    center, variance = jnp.sum(held.matrix * mean, axis=0), _form(covariance, held.matrix)
    observed = _local(form, jnp.concatenate(form.observed).astype(mean.dtype)) > 0.0

    cavity_mean, cavity_variance = cavities(form, state.marginals, precision, shift, 1.0)
    parts = zip(form.potentials, form.split_rows(cavity_mean), form.split_rows(cavity_variance), strict=True)
    slope, curvature = _together(form, [log_z_derivatives(*part, 1.0)[1:] for part in parts])
    # an offset moves the mean
    order = np.array([0, *range(2, len(slope))])
    v = _local(form, cavity_variance)
    beyond = _local(form, cavity_mean - form.offset) - center
    tilted = _of_natural(v, beyond, slope, curvature)
    to_natural = jnp.stack([jnp.stack([-beyond * v, -(v**2)]), jnp.stack([v, jnp.zeros_like(v)])])
    cross = jnp.einsum("ij...,jk...->ik...", to_natural, curvature[:2][:, order])
    determinant = tilted[0, 0] * tilted[1, 1] - tilted[0, 1] ** 2
    adjugate = jnp.stack([jnp.stack([tilted[1, 1], -tilted[0, 1]]), jnp.stack([-tilted[0, 1], tilted[0, 0]])])
    safe = jnp.where(observed, variance, 1.0)
    zero = jnp.zeros_like(safe)
    marginal = jnp.stack([jnp.stack([2.0 / safe**2, zero]), jnp.stack([zero, 1.0 / safe])])
    tau = _local(form, precision)
    return _Rows(
        held,
        mean,
        covariance,
        jnp.where(observed, tau, 0.0),
        jnp.where(observed, _local(form, shift - precision * form.offset) - tau * center, 0.0),
        jnp.where(observed, slope[order], 0.0),
        jnp.where(observed, curvature[order][:, order], 0.0),
        jnp.where(observed, cross, 0.0),
        jnp.where(observed, adjugate / jnp.where(observed, determinant, 1.0), 0.0),
        jnp.where(observed, marginal, 0.0),
    )


def _together(form: LatentGaussian, parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """First and second derivatives of all families, with zeros where these have fewer parameters, block by block."""
    most = max(len(slope) for slope, _ in parts)
    slopes = [jnp.pad(slope, ((0, most - len(slope)), (0, 0))) for slope, _ in parts]
    seconds = [jnp.pad(part, ((0, most - len(part)), (0, most - len(part)), (0, 0))) for _, part in parts]
    return _local(form, jnp.concatenate(slopes, axis=-1)), _local(form, jnp.concatenate(seconds, axis=-1))


def _of_natural(v: Array, beyond: Array, slope: Array, curvature: Array) -> Array:
    """Covariance of minus half the square and of the distance from the mean of the marginal under tilted densities,
    from derivatives by the mean, ``beyond`` that of the marginal, and the variance of cavities: ``(2, 2, ...)``."""
    bend, mixed, of_variance = curvature[0, 0], curvature[0, 1], curvature[1, 1]
    square = (beyond * v) ** 2 * bend + 2.0 * beyond * v**3 * mixed + v**4 * of_variance
    square += 2.0 * v**2 * (beyond * slope[0] + v * slope[1]) + beyond**2 * v + 0.5 * v**2
    between = -(v**2) * (beyond * bend + v * mixed + slope[0]) - beyond * v
    return jnp.stack([jnp.stack([square, between]), jnp.stack([between, v**2 * bend + v])])
