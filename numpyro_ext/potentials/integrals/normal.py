"""The normal distribution far in its tails: log-cdf, Mills ratio and moments of a truncated normal.

Everything is built from two smooth functions of ``a >= 0``: the mean and the variance of the excess ``t - a`` of a
standard normal ``t`` given ``t > a``. Times ``a + 5/4`` and ``(a + 5/4)^2`` they tend to one in the tail, and
polynomials in ``(a - 7/2) / (a + 7/2)`` (in the manner of Shepherd and Laframboise 1981, *Mathematics of
Computation* 36, 249-253, for the error function) give both to full relative accuracy on the whole half line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)

# Powers of (a - 7/2) / (a + 7/2), lowest first: Chebyshev interpolants computed in 50-digit arithmetic.
_MEAN_COEFFICIENTS = (
    1.1941085080740736,
    -0.1332835606267208,
    -0.18809202917632248,
    0.17202950723151084,
    -0.018984962476819318,
    -0.04744743338987384,
    0.017019354295533203,
    0.012816264246268303,
    -0.007397189507121728,
    -0.0036283070025726672,
    0.0027120661039821683,
    0.001104537040485871,
    -0.0009014464961404414,
    -0.0003581871148595684,
    0.0002731845881167737,
    0.00011798779420339601,
    -7.416884418201433e-05,
    -3.688332936110376e-05,
    1.7505531718722623e-05,
    1.0157256715281226e-05,
    -3.459896009905388e-06,
    -2.2592651785660922e-06,
    5.493612624397578e-07,
    3.571573671793927e-07,
    -6.579044008635377e-08,
    -3.096211290136956e-08,
    4.7341397867763056e-09,
    4.623377239360076e-10,
)
_VARIANCE_COEFFICIENTS = (
    1.2845509242136341,
    0.07438292160302098,
    -0.7154875485106842,
    0.2869611443760061,
    0.2807616220998255,
    -0.2258773158809559,
    -0.08364265954461877,
    0.11783613780411592,
    0.02246316598465161,
    -0.052715381770406404,
    -0.006342727703207216,
    0.02150155427741251,
    0.002300205593046441,
    -0.008093712400820224,
    -0.0010583384968662862,
    0.002785398987935938,
    0.0004957933714202686,
    -0.00085760891815322,
    -0.00020141427872087263,
    0.0002295653442938144,
    6.470278066378383e-05,
    -5.195678950960923e-05,
    -1.476225441425952e-05,
    9.872974486395687e-06,
    1.8455977687609061e-06,
    -1.641437015107703e-06,
    2.521094004840862e-08,
    2.4199894110127273e-07,
    -3.1225612012344374e-08,
    -2.3007179405592303e-08,
)


class TruncatedNormal(NamedTuple):
    """A normal variable with mean ``x`` and variance one, given that it is positive."""

    log_mass: Array
    """Log probability of being positive, ``log Phi(x)``."""
    ratio: Array
    """Slope of the log probability, ``phi(x) / Phi(x)``."""
    mean: Array
    """Mean, ``x + ratio``."""
    variance: Array
    """Variance."""
    shrinkage: Array
    """One minus the variance, ``ratio * mean``."""


def horner(coefficients: Sequence[float], t: Array) -> Array:
    """A polynomial by Horner's rule, from the constant coefficient on."""
    total = jnp.full_like(t, coefficients[-1])
    for c in coefficients[-2::-1]:
        total = total * t + c
    return total


def _excess(a: Array) -> tuple[Array, Array]:
    """Mean and variance of ``t - a`` given ``t > a >= 0``, for a standard normal ``t``."""
    # Written without a - 7/2, so that infinity gives one and not nan.
    t = 1.0 - 7.0 / (a + 3.5)
    inverse = 1.0 / (a + 1.25)
    mean = inverse * horner(_MEAN_COEFFICIENTS, t)
    variance = inverse * inverse * horner(_VARIANCE_COEFFICIENTS, t)
    # Keeps XLA from evaluating the polynomials once more for every result that uses them.
    return jax.lax.optimization_barrier((mean, variance))


def _half_square_exp(x: Array) -> Array:
    """``exp(-x^2 / 2)`` without the rounding error of the square, which the exponential would amplify."""
    x = jnp.clip(x, -1e3, 1e3)
    head = jnp.round(16.0 * x) / 16.0
    return jnp.exp(-0.5 * head * head) * jnp.exp(-0.5 * (x - head) * (x + head))


@jax.custom_jvp
def _truncated_normal(x: Array) -> TruncatedNormal:
    tail_mean, tail_variance = _excess(jnp.abs(x))
    hazard = jnp.abs(x) + tail_mean
    # Positive x: everything follows from the small mass of the other tail.
    density = _half_square_exp(x) / math.sqrt(2.0 * math.pi)
    missing = density / hazard
    ratio = density / (1.0 - missing)
    # Capped where the ratio is zero, so that infinity gives zero and not nan.
    shrinkage = ratio * (jnp.minimum(jnp.abs(x), 1e3) + ratio)
    lower = x < 0.0
    log_tail = -0.5 * x * x - _HALF_LOG_2PI - jnp.log(hazard)
    return TruncatedNormal(
        log_mass=jnp.where(lower, log_tail, jnp.log1p(-missing)),
        ratio=jnp.where(lower, hazard, ratio),
        mean=jnp.where(lower, tail_mean, x + ratio),
        variance=jnp.where(lower, tail_variance, 1.0 - shrinkage),
        shrinkage=jnp.where(lower, 1.0 - tail_variance, shrinkage),
    )


@_truncated_normal.defjvp
def _truncated_normal_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[TruncatedNormal, TruncatedNormal]:
    (x,), (x_dot,) = primals, tangents
    out = _truncated_normal(x)
    skewness = _third_cumulant(x, out)
    return out, TruncatedNormal(
        log_mass=out.ratio * x_dot,
        ratio=-out.ratio * out.mean * x_dot,
        mean=out.variance * x_dot,
        variance=skewness * x_dot,
        shrinkage=-skewness * x_dot,
    )


def _third_cumulant(x: Array, moments: TruncatedNormal) -> Array:
    """Derivative of the variance; the closed form cancels in the tail, where its asymptotic series takes over."""
    far = x < -30.0
    w = 1.0 / jnp.square(jnp.where(far, x, -30.0))
    series = 2.0 * w * jnp.sqrt(w) * (1.0 + w * (-12.0 + w * (150.0 + w * (-2072.0 + w * 31770.0))))
    near = moments.ratio * (jnp.square(moments.mean) - moments.variance)
    return jnp.where(far, series, near)


def truncated_normal(x: ArrayLike) -> TruncatedNormal:
    r"""Mass and moments of :math:`N(x, 1)` restricted to the positive half line, elementwise.

    All entries keep full relative accuracy for any ``x``, also where the mass underflows, and have exact derivatives.

    :param ArrayLike x: means of the untruncated variables.
    :return: a :class:`TruncatedNormal` of arrays with the shape of ``x``.

    **Example:**

    >>> truncated_normal(-1e4).mean.item()
    0.0001
    """
    return _truncated_normal(_as_float(x))


def log_ndtr(x: ArrayLike) -> Array:
    r"""Log of the standard normal cumulative distribution function, with derivatives that do not cancel."""
    return truncated_normal(x).log_mass


def inverse_mills_ratio(x: ArrayLike) -> Array:
    r"""Density over cumulative distribution function of the standard normal, :math:`\phi(x) / \Phi(x)`."""
    return truncated_normal(x).ratio


def erfcx(x: ArrayLike) -> Array:
    r"""Scaled complementary error function :math:`e^{x^2}\,\mathrm{erfc}(x)`; infinite below about -26."""
    scaled = math.sqrt(2.0) * _as_float(x)
    upper = math.sqrt(2.0 / math.pi) / inverse_mills_ratio(-jnp.abs(scaled))
    positive = scaled > 0.0
    square = jnp.where(positive, 0.0, 0.5 * jnp.square(scaled))
    return jnp.where(positive, upper, 2.0 * jnp.exp(square) - upper)


def _as_float(x: ArrayLike) -> Array:
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))
