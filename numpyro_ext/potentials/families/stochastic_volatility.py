"""Returns with a stochastic log variance."""

from __future__ import annotations

import math
from typing import ClassVar

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..base import Potential, potential
from ..moments import ExpectedLogDensity

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


@potential
class StochasticVolatilityPotential(Potential):
    r"""Density of ``observation`` under :math:`N(0, e^{\eta})`: the predictor is the log variance.

    :param Array observation: observed values, such as returns less their mean.
    """

    observation: Array

    is_log_concave: ClassVar[bool] = True

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)
        half_square = 0.5 * jnp.square(self.observation) * jnp.exp(-eta)
        return -_HALF_LOG_2PI - 0.5 * eta - half_square, half_square - 0.5, -half_square

    def expected_log_density(self, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
        """Closed form: the precision is a log-normal variable (Khan 2012, section 1.4)."""
        mean = jnp.asarray(mean)
        half_square = 0.5 * jnp.square(self.observation) * jnp.exp(-mean + 0.5 * jnp.asarray(variance))
        value = -_HALF_LOG_2PI - 0.5 * mean - half_square
        return ExpectedLogDensity(value, half_square - 0.5, -0.5 * half_square)
