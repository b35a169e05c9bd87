"""Student-t observations."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..base import potential
from ..bounds.super_gaussian import ConvexifiedPenalty, SuperGaussianPotential
from ..integrals.tilted.nodes_around_mode import AroundMode, Nodes, moments_around_mode
from ..integrals.tilted.tilted_moments import tilted_moments_unless_wide
from ..moments import Outcomes, TiltedMoments

_WIDEST, _MOST_PAIRS, _REACH = 2.0, 88, 10.0
_LOG_ERROR = 34.0
_NUM_CHORDS = 14
"""Each takes two fifths or more of the distance from the mode away."""


@potential
class StudentTPotential(SuperGaussianPotential):
    r"""Density of ``observation`` under a Student-t with location :math:`\eta`.

    Not log-concave: the tilted density may have two modes, and the site a negative precision.

    :param Array observation: observed values.
    :param Array scale: scales of the noise.
    :param Array df: degrees of freedom.
    """

    observation: Array
    scale: Array | float
    df: Array | float

    @property
    def center(self) -> Array:
        """Place of the peak of the factor, for the quadrature."""
        return jnp.asarray(self.observation)

    is_elementwise: ClassVar[bool] = True
    is_log_concave: ClassVar[bool] = False

    def outcomes(self) -> Outcomes:
        return Outcomes("observation", width=self.scale)

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        df = jnp.asarray(self.df, eta.dtype)
        residual = (self.observation - eta) / self.scale
        return self._log_peak(df) - 0.5 * (df + 1.0) * jnp.log1p(jnp.square(residual) / df)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        df, away = jnp.asarray(self.df, eta.dtype), self.observation - eta
        square, total = jnp.square(away), df * jnp.square(self.scale) + jnp.square(away)
        slope = (df + 1.0) * away / total
        return self.log_density(eta), slope, (df + 1.0) * (2.0 * square / total - 1.0) / total

    def _tilted_moments(
        self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike, *, only_log_z: bool
    ) -> TiltedMoments:
        """A short rule if no cavity is much wider than the factor and the power is the Python number one, else
        quadrature."""
        return tilted_moments_unless_wide(self, _narrow, _widest, mean, variance, power, only_log_z)

    def mean(self, eta: ArrayLike) -> Array:
        """The location; ``nan`` for one degree of freedom or fewer."""
        return jnp.where(jnp.asarray(self.df) > 1.0, eta, jnp.nan)

    def has_finite_variance(self) -> Array:
        return jnp.asarray(self.df) > 2.0

    def _log_peak(self, df: Array) -> Array:
        return (
            jax.lax.lgamma(0.5 * (df + 1.0))
            - jax.lax.lgamma(0.5 * df)
            - 0.5 * jnp.log(math.pi * df)
            - jnp.log(self.scale)
        )

    def width(self, squared: ArrayLike) -> Array:
        return (self.df * jnp.square(self.scale) + squared) / (jnp.asarray(self.df) + 1.0)

    def width_penalty(self, width: ArrayLike) -> Array:
        """Constant below the width at the peak, with a convex part (``1 / width``) and a concave one above it."""
        df = jnp.asarray(self.df, jnp.result_type(width, float))
        ratio = jnp.maximum(width * (df + 1.0) / (df * jnp.square(self.scale)), 1.0)
        return (df + 1.0) * (1.0 / ratio - 1.0 + jnp.log(ratio)) - 2.0 * self._log_peak(df)

    def convexified_penalty(self, squared: ArrayLike, reference_width: ArrayLike) -> ConvexifiedPenalty:
        r"""With :math:`h_\cap = (\nu + 1) \log \gamma` linearised: Ko (2017), section 2.2.

        The minimum over the width of :math:`(\nu \sigma^2 + x)/\gamma + (\nu + 1)\gamma/\gamma_0` plus constants.
        """
        df = jnp.asarray(self.df, jnp.result_type(squared, float))
        variance = jnp.square(self.scale)
        total = df * variance + squared
        slope = (df + 1.0) / reference_width
        constant = (df + 1.0) * (jnp.log(reference_width * (df + 1.0) / (df * variance)) - 2.0)
        value = 2.0 * jnp.sqrt(total * slope) + constant - 2.0 * self._log_peak(df)
        return ConvexifiedPenalty(value, jnp.broadcast_to(jnp.sqrt(total / slope), value.shape))


def _widest(factor: StudentTPotential) -> Array:
    """The variance up to which a tilted density has one mode by far: log factors curve up by an eighth of what they
    curve down at their peak."""
    df = jnp.asarray(factor.df)
    return _WIDEST * df * jnp.square(factor.scale) / (df + 1.0)


def _narrow(factor: StudentTPotential, mean: Array, variance: Array, only_log_z: bool) -> TiltedMoments:
    fixed, fixed_mean, fixed_variance = jax.lax.stop_gradient((factor, mean, variance))
    df = jnp.asarray(fixed.df, mean.dtype)
    ratio = _WIDEST * fixed_variance / _widest(fixed)
    # The slope of the tilted density falls by 1 - ratio / 8 to 1 + ratio for each unit: chords close in on its root.
    distance = jnp.zeros_like(fixed_mean)
    for _ in range(_NUM_CHORDS):
        _, slope, _ = fixed.derivatives(fixed_mean + distance)
        distance = distance - (distance - fixed_variance * slope) / (1.0 + 7.0 / 16.0 * ratio)

    def nodes(variance: Array, curvature: Array) -> Nodes:
        r"""With nodes :math:`h \sigma` apart the error is about :math:`\exp(-2 \pi d / h)` times the integrand
        :math:`d \sigma` off the real line, for any ``d`` short of the poles."""
        worst, least_df = jnp.max(ratio, initial=0.0), jnp.min(df)
        poles = jnp.sqrt((least_df + 1.0) / jnp.maximum(worst, 1e-10))
        d = jnp.minimum(poles, 20.0) * jnp.linspace(0.1, 0.99, 32, dtype=mean.dtype)
        growth = 0.5 * d**2 - 0.5 * (least_df + 1.0) * jnp.log1p(-jnp.square(d / poles))
        spacing = jnp.max(2.0 * math.pi * d / (_LOG_ERROR + growth))
        return Nodes(spacing * jnp.sqrt(variance), _REACH / spacing, _MOST_PAIRS)

    def seen_from(center: Array) -> AroundMode:
        df = jnp.asarray(factor.df, center.dtype)
        away, derivatives = factor.observation - center, factor.derivatives(center)
        total = df * jnp.square(factor.scale) + jnp.square(away)

        def fall(x: Array) -> tuple[Array, Array]:
            grown = x * (x - 2.0 * away)
            # of slopes (df + 1) r / total, on one denominator: what is small is not a difference of what is not
            change = -(df + 1.0) * (x + away * grown / total) / (total + grown)
            return 0.5 * (df + 1.0) * jnp.log1p(grown / total), change

        return AroundMode(derivatives, 0.0, lambda x: (fall(x), fall(-x)))

    return moments_around_mode(mean, variance, distance, seen_from, nodes, only_log_z)
