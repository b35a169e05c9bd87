r"""Factors near a fixed point of EP, known by second derivatives of :math:`\log \hat Z`: no integral is made again.

The log evidence of EP is stationary in the sites, so its second derivatives in the hyperparameters need those of the
partition functions of the factors, :math:`\log \hat Z_i(\mu, v, \theta)` of cavity and parameters, and no more. With
quadratic functions in their place the sweeps and gradients near the fixed point are those of the model to first order,
and cost the algebra of the Gaussian alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .....potentials.base import Potential, potential
from .....potentials.moments import TiltedMoments
from .....potentials.vector_rows import has_vector_factors
from .....structure.latent_gaussian import LatentGaussian
from .expectation_propagation import State
from .tilting import cavities

_MOST_COORDINATES = 12
"""Largest number of coordinates of a factor: cavity mean and variance, and numbers among its parameters. Integrals
go with its square."""


@potential
class LocalFactors(Potential):
    """Factors whose log partition functions are quadratic in the mean and the variance of the cavity."""

    current: Potential
    """The factors themselves."""
    cavity: Array
    """Means and variances of the cavities at the reference, shape ``(2, num_rows)``."""
    log_z: Array
    """Value there, shape ``(num_rows,)``."""
    slope: Array
    """First derivatives in mean and variance, shape ``(2, num_rows)``."""
    curvature: Array
    """Second ones, shape ``(2, 2, num_rows)``."""

    @property
    def is_log_concave(self) -> bool:  # type: ignore[override]
        """True if the factors are log-concave: near the fixed point these have the same sites."""
        return self.current.is_log_concave

    def log_density(self, eta: ArrayLike) -> Array:
        return self.current.log_density(eta)

    def has_finite_variance(self) -> Array:
        return self.current.has_finite_variance()

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        """From the derivatives in the cavity; ``power`` is that of the reference."""
        mean, variance = jnp.asarray(mean), jnp.asarray(variance)
        move = mean - self.cavity[0], variance - self.cavity[1]
        turn = [_dot(row, move) for row in self.curvature]
        log_z = self.log_z + _dot(self.slope, move) + 0.5 * _dot(turn, move)
        # In the mean the second derivative is twice the first in the variance, less the square of the slope.
        slope, in_variance = self.slope[0] + turn[0], self.slope[1] + turn[1]
        bend = 2.0 * in_variance - slope**2
        ratio = 1.0 + variance * bend
        return TiltedMoments(
            log_z=log_z,
            mean=mean + variance * slope,
            variance=variance * ratio,
            site_precision=-bend / ratio,
            site_shift=(slope - bend * mean) / ratio,
        )


def localised(
    form: LatentGaussian, state: State, *, power: float = 1.0
) -> Callable[[LatentGaussian], LatentGaussian] | None:
    """Function that puts quadratic factors into forms near one whose fixed point is known.

    :param LatentGaussian form: the model.
    :param State state: a fixed point of :func:`~.expectation_propagation.step` for ``form``.
    :param float power: the power that the fixed point was found with.
    :return: a function from a form of the same structure to one with quadratic factors; ``None`` where a factor has
        parameters of too many numbers, or several predictors.
    """
    if not has_few_coordinates(form):
        return None
    at = cavities(form, state.marginals, state.site_precision, state.site_shift, power)
    means, variances = map(form.split_rows, at)
    parts = [_expand(*part, power) for part in zip(form.potentials, means, variances, strict=True)]

    def near(other: LatentGaussian) -> LatentGaussian:
        made = tuple(make(current) for make, current in zip(parts, other.potentials, strict=True))
        return other._replace(potentials=made)

    return near


def has_few_coordinates(form: LatentGaussian) -> bool:
    """True if all factors have one predictor and so few parameters that derivatives by all of them are made."""
    if has_vector_factors(form.potentials):
        return False
    sizes = [mask.shape[0] for mask in form.observed]
    parts = zip(form.potentials, sizes, strict=True)
    return all(2 + len(components(potential, size)) <= _MOST_COORDINATES for potential, size in parts)


def _expand(factors: Potential, mean: Array, variance: Array, power: float) -> Callable[[Potential], LocalFactors]:
    found = log_z_derivatives(factors, mean, variance, power)
    return partial(_near, factors, jnp.stack([mean, variance]), *found)


def log_z_derivatives(factors: Potential, mean: Array, variance: Array, power: float) -> tuple[Array, Array, Array]:
    """Log partition functions of factors, shape ``(n,)``, with first and second derivatives, ``(k, n)`` and
    ``(k, k, n)``, by mean and variance of the cavity and by :func:`components`."""
    num_rows = mean.shape[0]
    num_coordinates = 2 + len(components(factors, num_rows))

    def log_z(move: Array) -> Array:
        # All rows move alike, and no row depends on the move of another: a derivative has those of all of them.
        moved = _shifted(factors, move[2:], num_rows)
        return moved.log_normaliser(mean + move[0], variance + move[1], power)

    origin = jnp.zeros(num_coordinates, mean.dtype)

    def along(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        """First derivative along one direction, and second along that and another."""
        one, other = pair

        def first(move: Array) -> Array:
            return jax.jvp(log_z, (move,), (one,))[1]

        return jax.jvp(first, (origin,), (other,))

    axes = np.eye(num_coordinates, dtype=mean.dtype)
    i, j = np.triu_indices(num_coordinates)
    firsts, seconds = jax.lax.map(along, (jnp.asarray(axes[i]), jnp.asarray(axes[j])))
    place = np.zeros((num_coordinates, num_coordinates), int)
    place[i, j] = place[j, i] = np.arange(len(i))
    return log_z(origin), firsts[place[:, -1]], seconds[place]


def _near(
    reference: Potential, cavity: Array, log_z: Array, slope: Array, curvature: Array, current: Potential
) -> LocalFactors:
    """Local factors at other parameters, from the derivatives of the log partition functions in all coordinates: mean
    and variance of the cavity, and the numbers that a factor's parameters are made of, on the first axis."""
    old, new = (components(factors, len(log_z)) for factors in (reference, current))
    move = [jnp.broadcast_to(x - y, log_z.shape) for x, y in zip(new, old, strict=True)]
    turn = [_dot(row[2:], move, jnp.zeros_like(log_z)) for row in curvature]
    log_z = log_z + _dot(slope[2:], move) + 0.5 * _dot(turn[2:], move)
    return LocalFactors(current, cavity, log_z, slope[:2] + jnp.stack(turn[:2]), curvature[:2, :2])


def _dot(first: Any, second: Any, start: Any = 0.0) -> Any:
    """Inner products along the first axis, which is short: faster one by one than as a sum over it."""
    return sum((x * y for x, y in zip(first, second, strict=True)), start=start)


def components(factors: Potential, num_rows: int) -> list[Array]:
    """The numbers in the parameters of each factor, as arrays that broadcast against the rows."""
    return [part for leaf in jax.tree.leaves(factors) if _may_move(leaf) for part in _split(leaf, num_rows)]


def _shifted(factors: Potential, moves: Array, num_rows: int) -> Potential:
    """The factors with a number added to each of their components."""
    leaves, structure = jax.tree.flatten(factors)
    start = 0
    for place, leaf in enumerate(leaves):
        if _may_move(leaf):
            shape = leaf.shape[1:] if _has_rows(leaf, num_rows) else leaf.shape
            size = len(_split(leaf, num_rows))
            leaves[place] = leaf + moves[start : start + size].reshape(shape)
            start += size
    return jax.tree.unflatten(structure, leaves)


def _may_move(leaf: Array) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def _has_rows(leaf: Array, num_rows: int) -> bool:
    # A table that all rows share may have as many entries: what comes of it is compared with the model by its user.
    return leaf.ndim > 0 and leaf.shape[0] == num_rows


def _split(leaf: Array, num_rows: int) -> list[Array]:
    if _has_rows(leaf, num_rows):
        return list(leaf.reshape(num_rows, -1).T)
    return list(leaf.reshape(-1))
