"""Counts with more zeros than they would have: with a given probability an observation is zero whatever it counts."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..base import Potential, potential
from ..elementwise import DerivedPotential
from ..integrals.tilted.tilted_moments import broadcast_to_factors, tilted_moments
from ..integrals.tilted.tilted_site import with_site
from ..integrals.tilted.tilted_window import Cavity
from ..moments import TiltedMoments


@potential
class ZeroInflatedPotential(DerivedPotential):
    r"""Factors :math:`\pi [y = 0] + (1 - \pi) t(\eta)` made of factors ``t``, the density of ``y`` without the gate.

    Not log-concave where the observation is zero: whoever is known to be zero anyhow says nothing of the predictor.
    Tilted moments are those of a mixture of the cavity with what ``t`` makes of it.

    :param Potential base: the factors :math:`t`, elementwise.
    :param Array is_zero: whether the observation is zero, boolean.
    :param Array log_gate: :math:`\log \pi`.
    :param Array log_rest: :math:`\log(1 - \pi)`.
    """

    base: Potential
    is_zero: Array
    log_gate: Array
    log_rest: Array

    is_log_concave: ClassVar[bool] = False
    is_analytic: ClassVar[bool] = False

    def log_density(self, eta: ArrayLike) -> Array:
        return self._with_gate(self.base.log_density(eta))[0]

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        value, slope, curvature = self.base.derivatives(eta)
        mixed, share = self._with_gate(value)
        return mixed, share * slope, share * (curvature + (1.0 - share) * jnp.square(slope))

    def mean(self, eta: ArrayLike) -> Array | None:
        mean = self.base.mean(eta)
        return None if mean is None else jnp.exp(self.log_rest) * mean

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        if not (isinstance(power, int | float) and power == 1):
            return tilted_moments(self, mean, variance, power)
        mean, variance = broadcast_to_factors(self, mean, variance)
        found = self.base.tilted_moments(mean, variance)
        log_z, share = self._with_gate(found.log_z)
        # the mean slope of the log factor, as its site has it: without a difference of means that are nearly equal
        slope = found.site_shift - found.site_precision * found.mean
        pull = share * variance * jnp.square(slope)
        shrinkage = share * found.site_precision * found.variance - (1.0 - share) * pull
        spread = share * found.variance + (1.0 - share) * variance * (1.0 + pull)
        return with_site(log_z, share * variance * slope, spread, share * slope, shrinkage, Cavity(mean, variance))

    def log_normaliser(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> Array:
        if not (isinstance(power, int | float) and power == 1):
            return self.tilted_moments(mean, variance, power).log_z
        return self._with_gate(self.base.log_normaliser(mean, variance))[0]

    def logistic_terms(self) -> None:
        return None

    def _with_gate(self, log_value: Array) -> tuple[Array, Array]:
        """Log of the mixture for the log of its second part, and the share of that part in it."""
        value = self.log_rest + log_value
        mixed = jnp.where(self.is_zero, jnp.logaddexp(self.log_gate, value), value)
        return mixed, jnp.where(self.is_zero, jax.nn.sigmoid(value - self.log_gate), 1.0)
