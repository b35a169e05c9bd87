"""Tilted moments of log-concave factors of several predictors, of which some see differences only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from .integrals.several_predictors.lattice_around_mode import lattice_moments
from .vector import VectorTiltedMoments

__all__ = ["SeenFactors", "log_concave_moments"]

_Factors = TypeVar("_Factors")


class SeenFactors(Protocol):
    """Log-concave factors of several predictors, or of the differences from the last of them."""

    @property
    def dimension(self) -> int: ...

    def derivatives_as_seen(self, seen: Sequence[Array]) -> tuple[Array, Sequence[Array], Sequence[Array]]:
        """Logarithms, first derivatives, and second ones for ``i <= j``, at predictors or differences of them that are
        arrays of their own."""
        ...


def log_concave_moments(
    factors: SeenFactors,
    batch_shape: tuple[int, ...],
    mean: ArrayLike,
    covariance: ArrayLike,
    power: ArrayLike,
    *,
    sees_differences: bool,
    strip: float,
) -> VectorTiltedMoments:
    """Moments under Gaussian cavities, and sites, by a lattice in as many dimensions as the factors see.

    The normaliser has first derivatives in cavity and power; moments and sites have none.

    :param SeenFactors factors: log-concave ones.
    :param tuple batch_shape: of the factors.
    :param mean: cavity means, shape ``(..., K)``.
    :param covariance: cavity covariances, shape ``(..., K, K)``, positive semidefinite.
    :param power: exponents of the factors.
    :param bool sees_differences: whether the factors depend on the differences of their predictors only.
    :param float strip: see :func:`~.integrals.lattice_around_mode.lattice_moments`.
    """
    dtype = jnp.result_type(mean, covariance, float)
    mean, covariance, power = (jnp.asarray(x, dtype) for x in (mean, covariance, power))
    size = factors.dimension
    shape = jnp.broadcast_shapes(mean.shape[:-1], covariance.shape[:-2], power.shape, batch_shape)
    number = math.prod(shape)
    flat = _flat(factors, batch_shape, shape)
    mean = jnp.broadcast_to(mean, (*shape, size)).reshape(number, size)
    covariance = jnp.broadcast_to(covariance, (*shape, size, size)).reshape(number, size, size)
    power = jnp.broadcast_to(power, shape).reshape(number)
    contrast = np.eye(size)
    if sees_differences:
        contrast = contrast[:-1] - contrast[-1]
    kept = len(contrast)

    def derivatives(seen: Sequence[Array], index: Array) -> tuple[Array, Sequence[Array], Sequence[Array]]:
        chosen: SeenFactors = jax.tree.map(lambda leaf: leaf[index], flat)
        return chosen.derivatives_as_seen(seen)

    held_mean, held_covariance, held_power = lax.stop_gradient((mean, covariance, power))
    across = jnp.asarray(contrast, dtype)
    seen = held_mean @ across.T, across @ held_covariance @ across.T
    found = lax.stop_gradient(lattice_moments(derivatives, *seen, held_power, strip=strip))
    gradient = found.gradient @ across
    curvature = across.T @ found.curvature @ across
    second = gradient[:, :, None] * gradient[:, None, :] - curvature
    log_z = found.log_z + jnp.sum(gradient * (mean - held_mean), axis=-1)
    log_z += 0.5 * jnp.sum(second * (covariance - held_covariance), axis=(-2, -1))
    log_z += found.log_factor * (power - held_power)
    moved = held_covariance @ gradient[..., None]
    shrunk = held_covariance - held_covariance @ curvature @ held_covariance
    if kept == size:
        moved, shrunk = (found.mean - held_mean)[..., None], found.covariance
    parts = VectorTiltedMoments(
        log_z,
        held_mean + moved[..., 0],
        0.5 * (shrunk + shrunk.mT),
        across.T @ found.site_precision @ across,
        found.site_shift @ across,
    )
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), parts)


def _flat(factors: _Factors, batch_shape: tuple[int, ...], shape: tuple[int, ...]) -> _Factors:
    """The factors, in one row."""
    num_axes = len(batch_shape)

    def flattened(leaf: ArrayLike) -> Array:
        leaf = jnp.asarray(leaf)
        own = leaf.shape[num_axes:]
        return jnp.broadcast_to(leaf, (*shape, *own)).reshape(-1, *own)

    return jax.tree.map(flattened, factors)
