"""Student-t observations."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .base import Potential, potential

__all__ = ["StudentTPotential"]


@potential
class StudentTPotential(Potential):
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
        """Where the factor has its peak, for the quadrature."""
        return jnp.asarray(self.observation)

    is_log_concave: ClassVar[bool] = False

    def log_density(self, eta: ArrayLike) -> Array:
        eta = jnp.asarray(eta)
        df = jnp.asarray(self.df, eta.dtype)
        residual = (self.observation - eta) / self.scale
        half = 0.5 * (df + 1.0)
        constant = jax.lax.lgamma(half) - jax.lax.lgamma(0.5 * df) - 0.5 * jnp.log(math.pi * df) - jnp.log(self.scale)
        return constant - half * jnp.log1p(jnp.square(residual) / df)
