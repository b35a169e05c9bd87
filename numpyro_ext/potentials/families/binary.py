"""Binary observations with probit, logit and complementary log-log links."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..base import Potential, potential
from ..integrals.normal import TruncatedNormal, log_ndtr, truncated_normal
from ..integrals.tilted.logistic_tilting import LogisticView, logistic_tilted_moments, sigmoid
from ..moments import LogisticTerms, Outcomes, TiltedMoments


def _signs(label: Array, dtype: jnp.dtype) -> Array:
    """+1 for a label that is true, -1 for one that is not."""
    return 2.0 * jnp.asarray(label).astype(dtype) - 1.0


@potential
class ProbitPotential(Potential):
    r"""Label one with probability :math:`\Phi(\eta)`.

    :param Array label: zeros and ones.
    """

    label: Array

    is_elementwise: ClassVar[bool] = True
    is_log_concave: ClassVar[bool] = True
    is_analytic: ClassVar[bool] = True

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        return log_ndtr(_signs(self.label, eta.dtype) * eta)

    def outcomes(self) -> Outcomes:
        return Outcomes("label", 2)

    def mean(self, eta: ArrayLike) -> Array:
        return jax.scipy.special.ndtr(jnp.asarray(eta))

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        sign = _signs(self.label, eta.dtype)
        part = truncated_normal(sign * eta)
        return part.log_mass, sign * part.ratio, -part.shrinkage

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        """Closed form (Rasmussen and Williams 2006, section 3.9) for the Python number one, else quadrature."""
        if not (isinstance(power, int | float) and power == 1):
            return super().tilted_moments(mean, variance, power)
        dtype = jnp.result_type(mean, variance, float)
        mean, variance = jnp.asarray(mean, dtype), jnp.asarray(variance, dtype)
        sign = _signs(self.label, dtype)
        total = 1.0 + variance
        scale = jnp.sqrt(total)
        part = truncated_normal(sign * mean / scale)
        alpha = sign * part.ratio / scale
        weight = variance / total
        # 1 - weight * shrinkage as a sum of positive terms.
        ratio = (1.0 + variance * part.variance) / total
        beta = part.shrinkage / total
        return TiltedMoments(
            log_z=part.log_mass,
            mean=jnp.where(weight < 0.5, mean + variance * alpha, _far_mean(mean, sign, scale, part, weight)),
            variance=variance * ratio,
            site_precision=beta / ratio,
            site_shift=(alpha + beta * mean) / ratio,
        )


def _far_mean(mean: Array, sign: Array, scale: Array, part: TruncatedNormal, weight: Array) -> Array:
    """``mean + variance * alpha`` without cancellation when the cavity is wide: the truncated mean, plus the rest."""
    return (1.0 - weight) * mean + weight * sign * scale * part.mean


@potential
class LogitPotential(Potential):
    r"""Label one with probability :math:`1 / (1 + e^{-\eta})`.

    :param Array label: zeros and ones.
    """

    label: Array

    is_elementwise: ClassVar[bool] = True
    is_log_concave: ClassVar[bool] = True
    is_analytic: ClassVar[bool] = True

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        return jax.nn.log_sigmoid(_signs(self.label, eta.dtype) * eta)

    def outcomes(self) -> Outcomes:
        return Outcomes("label", 2)

    def mean(self, eta: ArrayLike) -> Array:
        return jax.nn.sigmoid(jnp.asarray(eta))

    def _tilted_moments(
        self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike, *, only_log_z: bool
    ) -> TiltedMoments:
        """A short rule if no cavity variance exceeds 16 and the power is the Python number one, else quadrature."""
        return logistic_tilted_moments(self, mean, variance, power, only_log_z)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        sign = _signs(self.label, eta.dtype)
        right = sigmoid(sign * eta)
        return right.log, sign * right.complement, -right.value * right.complement

    def seen_from(self, eta: Array) -> LogisticView:
        """The factor as a function of the distance from ``eta``, for :func:`logistic_tilted_moments`."""
        sign = _signs(self.label, eta.dtype)
        right = sigmoid(sign * eta)
        rising, falling = (jnp.where(is_this, right.complement, 0.0) for is_this in (sign > 0.0, sign < 0.0))
        return LogisticView(right.log, right.value, falling, rising)

    def logistic_terms(self) -> LogisticTerms:
        sign = _signs(self.label, jnp.result_type(self.label, float))
        return LogisticTerms(
            jnp.zeros_like(sign),
            jnp.zeros_like(sign),
            jnp.ones_like(sign)[None],
            -sign[None],
            jnp.zeros_like(sign)[None],
        )


@potential
class ComplementaryLogLogPotential(Potential):
    r"""Label one with probability :math:`1 - \exp(-e^{\eta})`: whether a Poisson count of rate :math:`e^\eta` is any.

    :param Array label: zeros and ones.
    """

    label: Array

    is_log_concave: ClassVar[bool] = True

    def outcomes(self) -> Outcomes:
        return Outcomes("label", 2)

    def mean(self, eta: ArrayLike) -> Array:
        return -jnp.expm1(-jnp.exp(jnp.asarray(eta)))

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        rate = jnp.exp(eta)
        # Of a one: where the rate is none its logarithm is the predictor, and where it is large nothing is left.
        inside = jnp.exp(jnp.clip(eta, -30.0, 5.0))
        slope = inside / jnp.expm1(inside)
        curvature = slope * (1.0 - inside - slope)
        value = jnp.log(-jnp.expm1(-inside))
        is_small, is_large = eta < -30.0, eta > 5.0
        value = jnp.where(is_small, eta, jnp.where(is_large, 0.0, value))
        slope = jnp.where(is_small, 1.0, jnp.where(is_large, 0.0, slope))
        curvature = jnp.where(is_small | is_large, 0.0, curvature)
        is_one = jnp.asarray(self.label) > 0
        parts = (value, -rate), (slope, -rate), (curvature, -rate)
        value, slope, curvature = (jnp.where(is_one, one, zero) for one, zero in parts)
        return value, slope, curvature
