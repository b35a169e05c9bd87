"""Two other ways to the tilted moments of a rectified-linear Poisson factor, kept as independent checks."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from ..integrals.normal import truncated_normal
from .rectified_linear_poisson_kernel import HalfLineMoments

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_NUM_NODES = 512


def recursion_moments(y: Array, mean: Array, variance: Array) -> tuple[Array, Array, Array]:
    r"""Log normaliser, mean and variance by the forward recursion of Ko (2017), eqs. (2.34)-(2.51), corrected.

    :math:`L_k = k / (m + v L_{k-1})` with :math:`m = \mu - v`, from which
    :math:`\log \hat Z = \log\Phi(m/\sigma) - \sum_k \log L_k + v/2 - \mu`, :math:`\alpha = L_y - 1` and
    :math:`\beta = L_y (L_y - L_{y-1})`. Reliable where ``variance <= mean``. For wider cavities rounding errors grow
    like :math:`\exp(2 \sqrt y (v - \mu) / \sigma)`, and the result loses its digits and then becomes ``nan``.

    Cost: the largest count, for every element (a loop whose length depends on the data: no reverse-mode derivative).
    """
    scale = jnp.sqrt(variance)
    m = mean - variance
    start = truncated_normal(m / scale)

    def body(k: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        slope, previous, log_sum = carry
        step = jnp.asarray(k, y.dtype)
        following = step / (m + variance * slope)
        active = step <= y
        return (
            jnp.where(active, following, slope),
            jnp.where(active, slope, previous),
            log_sum + jnp.where(active, jnp.log(following), 0.0),
        )

    carry = (start.ratio / scale, jnp.zeros_like(y), jnp.zeros_like(y))
    slope, previous, log_sum = jax.lax.fori_loop(1, 1 + jnp.max(y).astype(jnp.int32), body, carry)
    log_upper = start.log_mass - log_sum + 0.5 * variance - mean

    z = -mean / scale
    lower = truncated_normal(z)
    log_z = jnp.logaddexp(log_upper, lower.log_mass)
    p_upper, p_lower = jnp.exp(log_upper - log_z), jnp.exp(lower.log_mass - log_z)
    is_zero = y <= 0.0
    alpha = jnp.where(is_zero, -p_upper, slope - 1.0)
    beta = jnp.where(is_zero, p_lower * lower.ratio / scale - p_upper * p_lower, slope * (slope - previous))
    log_z = jnp.where(is_zero, log_z, log_upper)
    return log_z, mean + variance * alpha, variance - variance**2 * beta


def trapezoid_half_line_moments(y: Array, mean: Array, variance: Array) -> HalfLineMoments:
    r"""The moments of :func:`half_line_moments` by the trapezoidal rule in :math:`u = \log(t / t^*)`.

    :math:`t^*` is the mode in ``u``, where the integrand is :math:`e^{-\Delta(u)}` with
    :math:`\Delta = a(e^u - 1 - u) + b(e^u - 1)^2 / 2`, :math:`a = y + 1`, :math:`b = {t^*}^2`. Here ``y`` may be any
    real number that is not negative. Cost: 512 nodes per element.
    """
    scale = jnp.sqrt(variance)
    x = mean / scale - scale
    a = y + 1.0
    s = jnp.hypot(x, 2.0 * jnp.sqrt(a))
    larger = 0.5 * (s + jnp.abs(x))
    peak = jnp.where(x < 0.0, a / larger, larger)
    b = peak * peak

    drop = 20.0 if jnp.finfo(y.dtype).bits <= 32 else 40.0
    right = jnp.minimum(jnp.log1p(jnp.sqrt(2.0 * drop / b)), jnp.sqrt(2.0 * drop / (a + b)))
    left_count = 0.5 * (drop / a + jnp.sqrt((drop / a) ** 2 + 8.0 * drop / a))
    bounded = 2.0 * drop < b
    left_square = -jnp.log1p(-jnp.sqrt(jnp.where(bounded, 2.0 * drop / b, 0.5)))
    left = jnp.where(bounded, jnp.minimum(left_count, left_square), left_count)
    step = (left + right) / (_NUM_NODES - 1)

    def body(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        u = -left + i * step
        z = jnp.expm1(u)
        weight = jnp.exp(-a * (z - u) - 0.5 * b * z * z)
        inverse = weight / (1.0 + z)
        terms = (weight, weight * z, weight * z * z, inverse, inverse * z, inverse * z * z)
        return tuple(total + term for total, term in zip(sums, terms, strict=True))

    zeros = (jnp.zeros_like(y),) * 6
    total, first, second, *inverses = jax.lax.fori_loop(0, _NUM_NODES, body, zeros)
    first, second, inverse0, inverse1, inverse2 = (value / total for value in (first, second, *inverses))
    log_integral = jnp.log(total * step)

    mode = scale * peak
    distance = 0.5 * jnp.square(mode - mean) / variance
    log_z = y * jnp.log(mode) - mode - jax.lax.lgamma(a) - distance + jnp.log(peak) - _HALF_LOG_2PI + log_integral
    spread = second - first * first
    at_zero = jnp.exp(0.5 * b - x * peak - jnp.log(peak) - log_integral)
    standard_mean, standard_variance = peak * (1.0 + first), b * spread
    # Stein's identity gives E = y E[(t - R)^2 / (t R)] and G = y E[1 / t], sums of positive terms. For y < 1 their
    # integrands reach far beyond the window, unless x is large; then again, nothing cancels in the definitions.
    stein = y * (inverse2 - 2.0 * first * inverse1 + first * first * inverse0) / (1.0 + first)
    is_wide = x < 8.0
    return HalfLineMoments(
        log_z=log_z,
        mean=standard_mean,
        variance=standard_variance,
        shrinkage=jnp.where(is_wide, 1.0 - standard_variance, jnp.where(y > 0.0, stein, at_zero * standard_mean)),
        slope=jnp.where(is_wide, standard_mean - x, jnp.where(y > 0.0, y * inverse0 / peak, at_zero)),
    )
