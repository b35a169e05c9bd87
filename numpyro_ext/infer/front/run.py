"""What a run has found, and what can be asked of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

from jax import Array
from jax.typing import ArrayLike
from numpyro.infer.autoguide import AutoMultivariateNormal

from ..hyper.space import UnconstrainedSpace
from .engine import hyper_estimates
from .results import HyperEstimate
from .sites import PosteriorSites
from .state import Fit

__all__ = ["FinishedRun"]


class FinishedRun(ABC):
    """The outcome of a run. An engine holds options; a run holds the form that was read and answers for it.

    So an engine that takes several forms makes the run of the form that it finds, and asks all of them alike. What only
    some forms can answer is refused here, and answered by the runs of those forms.

    :ivar reading: of the model.
    :ivar space: of its hyperparameters.
    :ivar fit: where the algorithm ended.
    :ivar rng_key: of the run.
    :ivar num_samples: draws made for samples.
    """

    is_lower_bound = False
    """Whether the log evidence cannot exceed the exact one."""

    def __init__(self, reading: Any, space: UnconstrainedSpace, fit: Fit, rng_key: Array, num_samples: int) -> None:
        self.reading, self.space, self.fit = reading, space, fit
        self.rng_key, self.num_samples = rng_key, num_samples

    @property
    @abstractmethod
    def posterior(self) -> PosteriorSites:
        """Marginals by name."""

    @abstractmethod
    def draw(self, rng_key: Array) -> tuple[dict[str, Array], Array]:
        """``num_samples`` draws of all sites but the observed ones, and the log density of each."""

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """The outcome as plain containers."""

    @cached_property
    def hyper(self) -> dict[str, HyperEstimate]:
        """For each hyperparameter its value and standard error, constrained and unconstrained."""
        return hyper_estimates(self.space, self.fit)

    def describe(self) -> str:
        """How the model was read."""
        return self.reading.describe()

    def typical_noise(self) -> ArrayLike:
        """The average variance of Gaussian noise.

        :raises ValueError: for models that have none.
        """
        raise ValueError("Give the noise_variance of the measurements: the model does not say what it is.")

    # Answers of a Gaussian field

    def log_predictive(self, new: Any = None) -> dict[str, Array]:
        """Log predictive density of the masked observations, or of those of another reading.

        :raises RuntimeError: where the posterior is not Gaussian; as the two below.
        """
        raise self._not_gaussian("log_predictive")

    @property
    def guide_and_params(self) -> tuple[AutoMultivariateNormal, dict[str, Array]]:
        """The posterior as a fitted autoguide, and its parameters."""
        raise self._not_gaussian("guide")

    def psis_diagnostic(self, rng_key: Array, num_particles: int) -> float:
        """Pareto k-hat of the posterior of the field."""
        raise self._not_gaussian("psis_diagnostic")

    def _not_gaussian(self, what: str) -> RuntimeError:
        return RuntimeError(f"{what} needs a Gaussian posterior; that of sparse coefficients is none.")

    # Answers of sparse coefficients

    @property
    def members(self) -> tuple[Any, ...]:
        """The members of a mixture over arguments of the model.

        :raises RuntimeError: where there are no sparse coefficients; as the one below.
        """
        raise self._not_sparse()

    def state_probabilities(self) -> Array:
        """Probability that each coefficient is in the high state, of shape ``(n,)``."""
        raise self._not_sparse()

    def _not_sparse(self) -> RuntimeError:
        return RuntimeError("This model has a Gaussian field; there are no sparse coefficients.")
