"""Factors given by any function of the predictor, and powers of factors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .base import Potential, potential
from .moments import ExpectedLogDensity, LogisticTerms, TiltedMoments


@potential
class ElementwisePotential(Potential):
    r"""Factors :math:`\log t_i(\eta_i)` computed by one function of all predictors.

    No concavity or smoothness is assumed. The result must depend on ``eta`` elementwise, which is not checked here.

    :param Callable function: ``function(eta, *args)`` maps ``eta`` of shape ``(num_rows,)``, and no other shape, to log
        factors of that shape. It must be hashable, and what it computes must depend on arrays only through ``args``.
    :param tuple args: pytree of arrays, in which results are differentiable.

    **Example:**

    >>> cauchy = ElementwisePotential(lambda eta, y: -jnp.log1p((eta - y) ** 2), (jnp.array([1.0, 3.0]),))
    >>> cauchy.tilted_moments(jnp.zeros(2), jnp.ones(2)).mean[1].item()
    0.715
    """

    has_fixed_shape: ClassVar[bool] = True

    function: Callable[..., Array] = dataclasses.field(metadata={"static": True})
    args: tuple[object, ...] = ()

    def log_density(self, eta: ArrayLike) -> Array:
        return self.function(jnp.asarray(eta), *self.args)


class DerivedPotential(Potential):
    """Factors made of those of another potential, :attr:`base`, and the same in all that is not said otherwise."""

    base: Potential

    # What is a fact of the class elsewhere is one of the base here.
    @property
    def is_log_concave(self) -> bool:  # type: ignore[override]
        return self.base.is_log_concave

    @property
    def is_smooth(self) -> bool:  # type: ignore[override]
        return self.base.is_smooth

    @property
    def is_analytic(self) -> bool:  # type: ignore[override]
        return self.base.is_analytic

    @property
    def has_fixed_shape(self) -> bool:  # type: ignore[override]
        return self.base.has_fixed_shape

    @property
    def has_exponential_mean(self) -> bool:  # type: ignore[override]
        return self.base.has_exponential_mean

    def mean(self, eta: ArrayLike) -> Array | None:
        return self.base.mean(eta)

    def log_density(self, eta: ArrayLike) -> Array:
        return self.base.log_density(eta)

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        return self.base.tilted_moments(mean, variance, power)

    def log_normaliser(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> Array:
        return self.base.log_normaliser(mean, variance, power)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        return self.base.derivatives(eta)

    def has_finite_expectation(self) -> Array:
        return self.base.has_finite_expectation()

    def has_finite_variance(self) -> Array:
        return self.base.has_finite_variance()

    def logistic_terms(self) -> LogisticTerms | None:
        return self.base.logistic_terms()


@potential
class TemperedPotential(DerivedPotential):
    r"""``weight`` times the log density of another potential: a scaled or subsampled observation.

    :param Potential base: the factors.
    :param Array weight: positive exponents.
    """

    base: Potential
    weight: Array | float

    def log_density(self, eta: ArrayLike) -> Array:
        return self.weight * self.base.log_density(eta)

    def tilted_moments(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> TiltedMoments:
        return self.base.tilted_moments(mean, variance, self.weight * power)

    def log_normaliser(self, mean: ArrayLike, variance: ArrayLike, power: ArrayLike = 1.0) -> Array:
        return self.base.log_normaliser(mean, variance, self.weight * power)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        value, slope, curvature = self.base.derivatives(eta)
        return self.weight * value, self.weight * slope, self.weight * curvature

    def expected_log_density(self, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
        value, mean_slope, variance_slope = self.base.expected_log_density(mean, variance)
        return ExpectedLogDensity(self.weight * value, self.weight * mean_slope, self.weight * variance_slope)

    def has_finite_variance(self) -> Array:
        # a power of a heavy tail may be too heavy
        return self.base.has_finite_variance() & jnp.asarray(self.is_log_concave)

    def logistic_terms(self) -> LogisticTerms | None:
        terms = self.base.logistic_terms()
        if terms is None:
            return None
        constant, linear, weights = (self.weight * part for part in terms[:3])
        return terms._replace(constant=constant, linear=linear, weights=weights)
