"""Tilted moments of log-concave factors of several predictors, of which some see differences only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from ..linalg.short_axes import times_vector
from .integrals.several_predictors.lattice_around_mode import LatticeMoments, lattice_moments
from .vector import VectorTiltedMoments

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
    size = factors.dimension
    contrast = np.eye(size)
    if sees_differences:
        contrast = contrast[:-1] - contrast[-1]
    shape = jnp.broadcast_shapes(jnp.shape(mean)[:-1], jnp.shape(covariance)[:-2], jnp.shape(power), batch_shape)
    flat = _flat(factors, batch_shape, shape)

    def derivatives(seen: Sequence[Array], index: Array) -> tuple[Array, Sequence[Array], Sequence[Array]]:
        chosen: SeenFactors = jax.tree.map(lambda leaf: leaf[index], flat)
        return chosen.derivatives_as_seen(seen)

    return moments_as_seen(partial(lattice_moments, derivatives, strip=strip), shape, mean, covariance, power, contrast)


def moments_as_seen(
    rule: Callable[[Array, Array, ArrayLike], LatticeMoments],
    shape: tuple[int, ...],
    mean: ArrayLike,
    covariance: ArrayLike,
    power: ArrayLike,
    contrast: ArrayLike,
) -> VectorTiltedMoments:
    """Moments under Gaussian cavities, and sites, of factors that see some combinations of their predictors.

    The normaliser has first derivatives in cavity and power; moments and sites have none.

    :param rule: moments of ``n`` factors by mean, covariance and power of what they see; a power that is a Python
        number is handed on as it is.
    :param tuple shape: of the factors.
    :param mean: cavity means, which broadcast to shape ``(*shape, K)``.
    :param covariance: cavity covariances, which broadcast to shape ``(*shape, K, K)``, positive semidefinite.
    :param power: exponents of the factors.
    :param contrast: from the predictors to what is seen, shape ``(M, K)`` or ``(n, M, K)``.
    """
    dtype = jnp.result_type(mean, covariance, float)
    number, (kept, size) = math.prod(shape), jnp.shape(contrast)[-2:]
    mean = jnp.broadcast_to(jnp.asarray(mean, dtype), (*shape, size)).reshape(number, size)
    covariance = jnp.broadcast_to(jnp.asarray(covariance, dtype), (*shape, size, size)).reshape(number, size, size)
    held_power: ArrayLike = power if isinstance(power, int | float) else lax.stop_gradient(_of_all(power, shape, dtype))
    held_mean, held_covariance = lax.stop_gradient((mean, covariance))
    across = jnp.asarray(contrast, dtype)
    seen = times_vector(across, held_mean), across @ held_covariance @ across.mT
    found = lax.stop_gradient(rule(*seen, held_power))
    gradient = times_vector(across.mT, found.gradient)
    curvature = across.mT @ found.curvature @ across
    second = gradient[:, :, None] * gradient[:, None, :] - curvature
    log_z = found.log_z + jnp.sum(gradient * (mean - held_mean), axis=-1)
    log_z += 0.5 * jnp.sum(second * (covariance - held_covariance), axis=(-2, -1))
    if not isinstance(power, int | float):
        log_z += found.log_factor * (_of_all(power, shape, dtype) - held_power)
    moved = held_covariance @ gradient[..., None]
    shrunk = held_covariance - held_covariance @ curvature @ held_covariance
    if kept == size and jnp.ndim(contrast) == 2:
        moved, shrunk = (found.mean - held_mean)[..., None], found.covariance
    parts = VectorTiltedMoments(
        log_z,
        held_mean + moved[..., 0],
        0.5 * (shrunk + shrunk.mT),
        across.mT @ found.site_precision @ across,
        times_vector(across.mT, found.site_shift),
    )
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), parts)


def _of_all(power: ArrayLike, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.broadcast_to(jnp.asarray(power, dtype), shape).reshape(-1)


def _flat(factors: _Factors, batch_shape: tuple[int, ...], shape: tuple[int, ...]) -> _Factors:
    """The factors, in one row."""
    num_axes = len(batch_shape)

    def flattened(leaf: ArrayLike) -> Array:
        leaf = jnp.asarray(leaf)
        own = leaf.shape[num_axes:]
        return jnp.broadcast_to(leaf, (*shape, *own)).reshape(-1, *own)

    return jax.tree.map(flattened, factors)
