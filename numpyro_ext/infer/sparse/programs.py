"""The compiled functions that runs on sparse linear models are questioned with, whatever the posterior."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import jax
from jax import Array, lax

from ...compilation.store import shared
from ...structure import SparseLinearReading
from ...structure.program.rows.affine_operator import OperatorMap
from ..hyper.space import UnconstrainedSpace

DRAWS_AT_A_TIME = 25


class Inputs(NamedTuple):
    """End of an algorithm: the first argument of every question."""

    data: Any
    """The arrays of a reading."""
    hyper: dict[str, Array]
    """Its hyperparameters, constrained."""
    prepared: Any
    """Quantities that the algorithm computes of these once."""
    state: Any
    """State of the algorithm."""


class SparsePrograms(ABC):
    """Compiled functions of :class:`Inputs` for one model structure; subclasses know the posterior of the coefficients.

    :param SparseLinearReading reading: any reading of the structure.
    :param UnconstrainedSpace space: of the hyperparameters that are learned.
    """

    def __init__(self, reading: SparseLinearReading, space: UnconstrainedSpace) -> None:
        self._reading, self._space = reading, space
        self.site_mean = jax.jit(self._site_mean, static_argnames="name")
        self.site_variance = jax.jit(self._site_variance, static_argnames="name")
        self.site_covariance = jax.jit(self._site_covariance, static_argnames="name")
        self.draw = jax.jit(self._draw, static_argnames="num_samples")
        self.site_at = jax.jit(self._site_at, static_argnames="name")
        self.sites_at = jax.jit(self._sites_at)
        self.state_probabilities = jax.jit(self._state_probabilities)

    @abstractmethod
    def has_exact_variance(self, name: str) -> bool:
        """True if the variance of a site is computed without draws."""

    @abstractmethod
    def _mean(self, inputs: Inputs) -> Array:
        """Mean of the coefficients, shape ``(n,)``."""

    @abstractmethod
    def _site_variance(self, inputs: Inputs, *, name: str) -> Array:
        """Variance of a site where it is exact, flattened."""

    @abstractmethod
    def _site_covariance(self, inputs: Inputs, *, name: str) -> Array: ...

    @abstractmethod
    def _draw(self, inputs: Inputs, rng_key: Array, *, num_samples: int) -> Array:
        """Draws of the coefficients, shape ``(num_samples, n)``."""

    @abstractmethod
    def _state_probabilities(self, inputs: Inputs) -> Array: ...

    def _map(self, inputs: Inputs, name: str) -> OperatorMap:
        return self._reading.maps(inputs.hyper, inputs.data, (name,))[name]

    def _site_mean(self, inputs: Inputs, *, name: str) -> Array:
        operator, offset = self._map(inputs, name)
        return operator @ self._mean(inputs) + offset

    def _site_at(self, inputs: Inputs, draws: Array, *, name: str) -> Array:
        operator, offset = self._map(inputs, name)
        values: Array = lax.map(operator.matvec, draws, batch_size=DRAWS_AT_A_TIME)
        return values + offset

    def _sites_at(self, inputs: Inputs, draws: Array) -> tuple[dict[str, Array], Array]:
        """Every site at draws of the coefficients, and the log density of each."""
        data, hyper, *_ = inputs
        form = self._reading.form(hyper, data)

        def at(s: Array) -> tuple[dict[str, Array], Array]:
            return self._reading.values(hyper, s, data), form.log_density(s)

        sites, log_density = lax.map(at, draws, batch_size=min(DRAWS_AT_A_TIME, draws.shape[0]))
        return sites, log_density + self._reading.log_constant(hyper, data) + self._reading.log_prior(hyper, data)


def compiled_form(reading: SparseLinearReading) -> Any:
    """``reading.form`` as a compiled function of hyperparameters and data, shared by readings of one structure.

    :param SparseLinearReading reading: of the model.
    """
    return shared(_form, reading)


def _form(reading: SparseLinearReading) -> Any:
    return jax.jit(reading.form)
