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
from ..moments import Outcomes

__all__ = ["StudentTPotential"]


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
