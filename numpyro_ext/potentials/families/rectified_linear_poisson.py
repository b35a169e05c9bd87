r"""Rectified-linear Poisson factors: counts with rate :math:`c\,\max(0, \eta + b)`.

The factor is :math:`f^y e^{-f} / y!` with :math:`f = c(\eta + b)` where that is positive; elsewhere it is one for
``y = 0`` and zero otherwise. It is log-concave, and its tilted moments under a Gaussian have a closed form
(Ko 2017, section 2.1.3), which this module evaluates for any cavity to full accuracy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..base import Potential, potential
from ..integrals.normal import truncated_normal
from ..moments import ExpectedLogDensity, Outcomes, TiltedMoments
from .rectified_linear_poisson_kernel import HalfLineMoments, half_line_cumulants, half_line_moments
from .rectified_linear_poisson_reference import recursion_moments, trapezoid_half_line_moments

_HalfLine = Callable[[Array, Array, Array], HalfLineMoments]


class _Tilted(NamedTuple):
    """``log Z``, mean, variance, ``alpha = d log Z / d mean`` and ``beta = -d^2 log Z / d mean^2``."""

    log_z: Array
    mean: Array
    variance: Array
    alpha: Array
    beta: Array


def _without_counts(upper: HalfLineMoments, mean: Array, variance: Array) -> _Tilted:
    """Join the part on ``f > 0`` with the Gaussian tail on ``f <= 0``, which belongs to the factor when ``y = 0``."""
    scale = jnp.sqrt(variance)
    lower = truncated_normal(-mean / scale)
    log_z = jnp.logaddexp(upper.log_z, lower.log_mass)
    p_upper, p_lower = jnp.exp(upper.log_z - log_z), jnp.exp(lower.log_mass - log_z)
    # The means of the parts lie on both sides of zero, so every term of the joint variance is positive.
    gap = upper.mean + lower.mean
    ratio = p_upper * upper.variance + p_lower * lower.variance + p_upper * p_lower * gap * gap
    # N(0 | mean, variance) / Z by way of the lower part, whose density at zero is its mass times its ratio.
    boundary = scale * p_lower * lower.ratio - variance * p_upper * p_lower
    shrinkage = jnp.where(ratio < 0.5, 1.0 - ratio, jnp.maximum(boundary, 0.0))
    return _Tilted(
        log_z=log_z,
        mean=scale * (p_upper * upper.mean - p_lower * lower.mean),
        variance=variance * ratio,
        alpha=-p_upper,
        beta=shrinkage / variance,
    )


@functools.partial(jax.jit, static_argnums=0)
def _assemble(half_line: _HalfLine, y: Array, mean: Array, variance: Array) -> _Tilted:
    """Tilted moments from those of the part on ``f > 0``."""
    scale = jnp.sqrt(variance)
    upper = half_line(y, mean, variance)
    positive = _Tilted(
        log_z=upper.log_z,
        mean=scale * upper.mean,
        variance=variance * upper.variance,
        alpha=upper.slope / scale - 1.0,
        beta=upper.shrinkage / variance,
    )
    is_zero = y <= 0.0

    def with_zeros() -> _Tilted:
        zero = _without_counts(upper, mean, variance)
        return jax.tree.map(lambda a, b: jnp.where(is_zero, a, b), zero, positive)

    return jax.lax.cond(jnp.any(is_zero), with_zeros, lambda: positive)


@jax.jit
def _cumulants(tilted: _Tilted, y: Array, mean: Array, variance: Array) -> tuple[Array, Array]:
    """Third and fourth cumulants of the tilted density."""
    scale = jnp.sqrt(variance)
    x, z = mean / scale - scale, -mean / scale
    is_zero = y <= 0.0
    positive, lower = truncated_normal(x), truncated_normal(z)
    upper_mean = jnp.where(is_zero, positive.mean, tilted.mean / scale)
    upper_variance = jnp.where(is_zero, positive.variance, tilted.variance / variance)
    upper_third, upper_fourth = half_line_cumulants(y, x, upper_mean, upper_variance)
    lower_third, lower_fourth = half_line_cumulants(jnp.zeros_like(y), z, lower.mean, lower.variance)

    # For y = 0: the weights of the two parts, the distance of their means and their joint variance.
    p = jnp.where(is_zero, -tilted.alpha, 1.0)
    q = jnp.where(is_zero, jnp.exp(lower.log_mass - jnp.where(is_zero, tilted.log_z, 0.0)), 0.0)
    gap, ratio = jnp.where(is_zero, upper_mean + lower.mean, 0.0), tilted.variance / variance
    spread = 3.0 * (upper_variance - lower.variance) + (q - p) * gap**2
    third = p * upper_third - q * lower_third + p * q * gap * spread
    fourth = (
        p * (upper_fourth + 3.0 * upper_variance**2 + 4.0 * upper_third * (q * gap))
        + q * (lower_fourth + 3.0 * lower.variance**2 + 4.0 * lower_third * (p * gap))
        + p * q * gap**2 * (6.0 * (q * upper_variance + p * lower.variance) + (p**3 + q**3) * gap**2)
        - 3.0 * ratio**2
    )
    return scale**3 * jnp.where(is_zero, third, upper_third), scale**4 * jnp.where(is_zero, fourth, upper_fourth)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _tilted(half_line: _HalfLine, y: Array, mean: Array, variance: Array) -> _Tilted:
    return _assemble(half_line, y, mean, variance)


@_tilted.defjvp
def _tilted_jvp(
    half_line: _HalfLine, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[_Tilted, _Tilted]:
    """Every derivative is a cumulant, because ``Z`` solves the heat equation ``dZ/dv = (d^2 Z / d mean^2) / 2``."""
    y, mean, variance = primals
    _, mean_dot, variance_dot = tangents
    out = _tilted(half_line, y, mean, variance)
    third, fourth = _cumulants(out, y, mean, variance)
    alpha, beta = out.alpha, out.beta
    ratio = out.variance / variance
    third_v, fourth_v = third / variance**2, fourth / variance**2
    alpha_v = -alpha * beta + 0.5 * third_v / variance
    beta_v = -(beta**2) - (alpha * third_v + 0.5 * fourth_v / variance) / variance
    return out, _Tilted(
        log_z=alpha * mean_dot + 0.5 * (alpha**2 - beta) * variance_dot,
        mean=ratio * mean_dot + (alpha * ratio + 0.5 * third_v) * variance_dot,
        variance=third / variance * mean_dot + (ratio**2 + alpha * third / variance + 0.5 * fourth_v) * variance_dot,
        alpha=-beta * mean_dot + alpha_v * variance_dot,
        beta=-third_v / variance * mean_dot + beta_v * variance_dot,
    )


@functools.partial(jax.jit, static_argnums=3)
def _raw_moments(y: Array, mean: Array, variance: Array, order: int) -> list[Array]:
    """``E[f^k]``, k = 1 .. order (Ko 2017, corollary 1), as products of the means at ``y``, ``y + 1``, ..."""
    scale = jnp.sqrt(variance)
    tail = truncated_normal(-mean / scale).log_mass
    log_z = half_line_moments(y, mean, variance).log_z
    is_zero = y <= 0.0
    total = jnp.where(is_zero, jnp.logaddexp(log_z, tail), log_z)
    upper, lower = jnp.exp(log_z - total), jnp.where(is_zero, jnp.exp(tail - total), 0.0)
    # The part on f <= 0, mirrored, is a half line without the factor exp(-f): a cavity mean shifted by the variance.
    mirrored = variance - mean
    moments = []
    for k in range(order):
        upper = upper * scale * half_line_moments(y + k, mean, variance).mean
        lower = -lower * scale * half_line_moments(jnp.full_like(y, k), mirrored, variance).mean
        moments.append(upper + lower)
    return moments


def _broadcast(*values: ArrayLike) -> list[Array]:
    """Arrays of one shape, in the floating dtype of the arguments that have one."""
    # As arrays of JAX: without float64 those of NumPy are cut to float32.
    dtypes = [jnp.asarray(v).dtype for v in values if hasattr(v, "dtype")]
    floating = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    dtype = jnp.result_type(*floating) if floating else jnp.result_type(float)
    return jnp.broadcast_arrays(*(jnp.asarray(v, dtype) for v in values))


def _check_inputs(y: Array, variance: Array, exposure: Array, mean: Array) -> Array:
    """The cavity mean, ``nan`` where the arguments have no meaning, so that every output becomes ``nan`` there."""
    valid = (y >= 0.0) & (y == jnp.round(y)) & (variance > 0.0) & (exposure > 0.0)
    return jnp.where(valid, mean, jnp.nan)


def rectified_linear_poisson_moments(
    y: ArrayLike,
    mean: ArrayLike,
    variance: ArrayLike,
    exposure: ArrayLike = 1.0,
    offset: ArrayLike = 0.0,
    *,
    method: Literal["uniform", "recursion", "trapezoid"] = "uniform",
    order: int | None = None,
) -> tuple[Array, ...]:
    r"""Moments of :math:`\mathrm{Poisson}(y \mid c\max(0, \eta + b))\, N(\eta \mid \mu, v)`, elementwise.

    Arguments broadcast against each other, and the result has their floating dtype. Derivatives in ``mean``,
    ``variance``, ``exposure`` and ``offset`` are exact: with :math:`\alpha = (\hat\mu - \mu)/v` and
    :math:`\beta = (v - \hat v)/v^2`, those of ``log_z`` are :math:`\alpha` and :math:`(\alpha^2 - \beta)/2`. Entries
    whose arguments have no meaning (a negative or fractional count, a variance or exposure that is not positive) are
    ``nan``.

    Methods: ``"uniform"`` costs the same for every count and is accurate for every cavity; ``"recursion"`` is the
    algorithm of the thesis, which takes ``max(y)`` steps and is reliable only where
    ``exposure * variance <= mean + offset``, and otherwise returns wrong numbers or ``nan``; ``"trapezoid"`` is
    quadrature in ``log(eta + b)``, an independent check.

    :param ArrayLike y: counts.
    :param ArrayLike mean: means :math:`\mu` of the Gaussian.
    :param ArrayLike variance: variances :math:`v` of the Gaussian.
    :param ArrayLike exposure: factor :math:`c > 0` of the rate.
    :param ArrayLike offset: shift :math:`b` of the predictor.
    :param str method: see above.
    :param int order: if given, raw moments :math:`E[\eta^k]` for ``k = 1 .. order`` are returned as well (Ko 2017,
        corollary 1); with ``method="uniform"`` only.
    :return: ``(log_z, tilted_mean, tilted_variance)``, each of the broadcast shape; with ``order`` a fourth array of
        that shape followed by ``(order,)``.
    :raises ValueError: if ``method`` is unknown, or ``order`` is not positive or given with another method.

    **Example:**

    >>> log_z, mean, variance = rectified_linear_poisson_moments(jnp.array([0, 3, 1000]), 1.0, 4.0)
    >>> mean.tolist()
    [-0.482, 2.631, 61.78]

    **References**

    1. *Applications of Approximate Learning and Inference for Probabilistic Models*, Y. J. Ko, PhD thesis, EPFL 2017,
       section 2.1.
    """
    if method not in ("uniform", "recursion", "trapezoid"):
        raise ValueError(f"method must be 'uniform', 'recursion' or 'trapezoid', got {method!r}.")
    if order is not None and (order < 1 or method != "uniform"):
        raise ValueError(f"order must be a positive integer and needs method='uniform', got {order} and {method!r}.")
    y, mean, variance, exposure, offset = _broadcast(y, mean, variance, exposure, offset)
    mean = _check_inputs(y, variance, exposure, mean)
    rate_mean, rate_variance = exposure * (mean + offset), exposure**2 * variance
    if method == "recursion":
        log_z, tilted_mean, tilted_variance = recursion_moments(y, rate_mean, rate_variance)
    else:
        half_line = half_line_moments if method == "uniform" else trapezoid_half_line_moments
        log_z, tilted_mean, tilted_variance, _, _ = _tilted(half_line, y, rate_mean, rate_variance)
    result = (log_z, tilted_mean / exposure - offset, tilted_variance / exposure**2)
    if order is None:
        return result
    rates = [jnp.ones_like(mean), *_raw_moments(y, rate_mean, rate_variance, order)]
    powers = [
        sum(math.comb(k, j) * rates[j] / exposure**j * (-offset) ** (k - j) for j in range(k + 1))
        for k in range(1, order + 1)
    ]
    return (*result, jnp.stack(powers, axis=-1))


@potential
class RectifiedLinearPoissonPotential(Potential):
    r"""Counts :math:`y \sim \mathrm{Poisson}(c\max(0, \eta + b))`.

    Log-concave; its curvature does not describe it near the kink at :math:`\eta = -b`, so it is not smooth.

    :param Array count: counts ``y``.
    :param Array exposure: factors ``c`` of the rate.
    :param Array offset: shifts ``b`` of the predictor.
    """

    count: Array
    exposure: Array | float = 1.0
    offset: Array | float = 0.0

    is_log_concave: ClassVar[bool] = True
    is_smooth: ClassVar[bool] = False

    def log_density(self, eta: ArrayLike) -> Array:
        count, exposure, offset, eta = _broadcast(self.count, self.exposure, self.offset, eta)
        rate = exposure * (eta + offset)
        positive = rate > 0.0
        safe = jnp.where(positive, rate, 1.0)
        inside = count * jnp.log(safe) - safe - jax.lax.lgamma(count + 1.0)
        # Outside a nan of eta must stay one, and the slope be zero.
        outside = jnp.where(count == 0.0, 0.0, -jnp.inf)
        return jnp.where(positive, inside, jnp.where(jnp.isnan(rate), jnp.nan, outside))

    def outcomes(self) -> Outcomes:
        return Outcomes("count")

    def mean(self, eta: ArrayLike) -> Array:
        return self.exposure * jnp.maximum(jnp.asarray(eta) + self.offset, 0.0)

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        """Closed form for a ``power`` that is the Python number one, else quadrature in ``log(eta + offset)``."""
        count, exposure, offset, mean, variance, power_array = _broadcast(
            self.count, self.exposure, self.offset, mean, variance, power
        )
        mean = _check_inputs(count, variance, exposure, mean)
        if isinstance(power, int | float) and power == 1:
            slope, constant, half_line, order = exposure, jnp.zeros_like(mean), half_line_moments, count
        else:
            # f^(py) e^(-pf) is the factor of a real count p y at p f, up to a constant.
            slope, half_line, order = exposure * power_array, trapezoid_half_line_moments, count * power_array
            log_factorials = jax.lax.lgamma(order + 1.0) - power_array * jax.lax.lgamma(count + 1.0)
            constant = log_factorials - order * jnp.log(power_array)
        rate_mean, rate_variance = slope * (mean + offset), slope**2 * variance
        tilted = _tilted(half_line, order, rate_mean, rate_variance)
        ratio = tilted.variance / rate_variance
        rate_precision = tilted.beta / ratio
        # The second form keeps the digits of a factor that says little, the first those of one that says much.
        rate_shift = jnp.where(
            ratio < 0.5,
            tilted.mean / tilted.variance - rate_mean / rate_variance,
            (tilted.alpha + tilted.beta * rate_mean) / ratio,
        )
        return TiltedMoments(
            log_z=tilted.log_z + constant,
            mean=tilted.mean / slope - offset,
            variance=tilted.variance / slope**2,
            site_precision=slope**2 * rate_precision,
            site_shift=slope * rate_shift - slope**2 * offset * rate_precision,
        )

    def has_finite_expectation(self) -> Array:
        """True for zero counts; a positive one has density zero where the rate is zero."""
        return jnp.asarray(self.count) == 0

    def expected_log_density(self, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
        """Closed form for zero counts; for others the value is ``-inf``, and the slopes are ``nan``."""
        count, exposure, offset, mean, variance = _broadcast(self.count, self.exposure, self.offset, mean, variance)
        scale = jnp.sqrt(variance)
        shifted = mean + offset
        x = shifted / scale
        part = truncated_normal(x)
        mass = jnp.exp(part.log_mass)
        # E max(0, eta + offset) is its value at the mean plus what the smaller side adds, which cancels nothing.
        smaller = truncated_normal(-jnp.abs(x))
        added = scale * jnp.exp(smaller.log_mass) * smaller.mean
        finite = count == 0.0
        return ExpectedLogDensity(
            value=jnp.where(finite, -exposure * (jnp.maximum(shifted, 0.0) + added), -jnp.inf),
            mean_slope=jnp.where(finite, -exposure * mass, jnp.nan),
            variance_slope=jnp.where(finite, -0.5 * exposure * mass * part.ratio / scale, jnp.nan),
        )
