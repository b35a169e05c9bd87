"""Results of a run, and the questions that it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from types import MappingProxyType
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import jax
from jax import Array
from jax.typing import ArrayLike
from numpyro.infer.autoguide import AutoMultivariateNormal

from ...structure.model.reading import ModelReading
from ..hyper.space import UnconstrainedSpace
from .answers.draws import with_predictive
from .answers.model_draws import model_draws, observed_leaves
from .answers.points import point_sites
from .answers.sites import PointPosterior, PosteriorSites, SitePosterior
from .columns import Columns
from .files.content import Content
from .files.saved_runs import fit_to_content
from .labels import Labels
from .results import Diagnostics, HyperEstimate, LogEvidence, OfHyperparameters
from .state import Fit

_Question = ParamSpec("_Question")
_Answer = TypeVar("_Answer")


@dataclass(eq=False, repr=False)
class FinishedRun(ABC):
    """The outcome of a run. An engine holds options; a run holds the form that was read and answers for it.

    So an engine that takes several forms makes the run of the form that it finds, and asks all of them alike. What only
    some forms can answer is refused here, and answered by the runs of those forms. What engines let users ask is
    described there, in :class:`~numpyro_ext.infer.front.engine.BaseEngine`.

    :ivar reading: of the model.
    :ivar space: of its hyperparameters.
    :ivar fit: where the algorithm ended.
    :ivar rng_key: of the run.
    :ivar num_samples: draws made for samples.
    """

    reading: ModelReading
    space: UnconstrainedSpace
    fit: Fit
    rng_key: Array
    num_samples: int
    has_warned_of_weights: ClassVar[bool] = False
    labels: ClassVar[Labels] = Labels()
    """Names of places as given by a person; a run that got some has them in the place of these."""
    columns: ClassVar[Columns] = MappingProxyType({})
    """Columns of the tables of pandas that the model was fitted to, likewise."""
    notes: ClassVar[tuple[str, ...]] = ()
    """Further lines of a summary; a run that was compared with the posterior has some in the place of these."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Sentences for a summary on what the approximation leaves out, which take further computation."""
        return ()

    @property
    @abstractmethod
    def posterior(self) -> PosteriorSites:
        """Marginals by name, of the field and what is affine in it."""

    @property
    def hyper_posterior(self) -> Mapping[str, SitePosterior]:
        """Marginals of the hyperparameters by name: points, where they are not integrated over."""
        return {name: PointPosterior(name, value) for name, value in self.fit.hyper.items()}

    @cached_property
    def all_posteriors(self) -> PosteriorSites:
        """Marginals of hyperparameters and field by name, with their labels."""
        return self.posterior.with_hyper(self.hyper_posterior, self.all_labels)

    @cached_property
    def all_labels(self) -> Labels:
        """The labels of a person, and the plates of the model, which name the dimensions of others."""
        plates = {name: site.dims for name, site in self.judged.sites.items() if site.dims}
        return Labels(plates=plates).updated(self.labels)

    @property
    def labelled_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all sites, whose places may have names."""
        shapes = {**self.reading.site_shapes, **{n: s.shape for n, s in self.reading.sites.items()}}
        return {name: tuple(shape) for name, shape in shapes.items()}

    def keep_labels(self, labels: Labels) -> list[str]:
        """Take over what a person calls the places of sites, and return what is to be said of what fits none."""
        kept, messages = Labels(plates=self.all_labels.plates).updated(labels).fitting(self.labelled_shapes)
        vars(self).pop("all_labels", None)
        vars(self)["labels"] = Labels(kept.coords, kept.dims)
        return messages

    def keep_columns(self, columns: Columns) -> None:
        """Take over the names of the columns of tables."""
        vars(self)["columns"] = columns

    def keep_draws(self, content: Content) -> None:
        """Take over the draws that belong to the run from its content, if these are there."""
        if "draws" in content:
            vars(self)["draws"] = content["draws"], content["log_density"]

    @abstractmethod
    def draw(self, rng_key: Array, num_samples: int | None = None) -> tuple[dict[str, Array], Array | None]:
        """Draws of all sites but the observed and the left-out ones, and the log density of each, or nothing where
        that is left to :attr:`log_densities`.

        :param int num_samples: how many; those of the run by default.
        """

    @property
    def is_lower_bound(self) -> bool:
        """True if the log evidence cannot exceed the exact one."""
        return False

    @property
    def log_evidence(self) -> LogEvidence:
        """Log evidence at the hyperparameters of the fit."""
        kind: OfHyperparameters = "optimum" if self.space.size else "none"
        error = self.fit.diagnostics.evidence_error
        return LogEvidence(self.fit.log_evidence, self.is_lower_bound, kind, error, flat_sites=self.flat_sites)

    @cached_property
    def flat_sites(self) -> tuple[str, ...]:
        """Latent sites whose prior is flat and has no integral."""
        sites = self.reading.sites
        latent = [name for name in (*self.reading.field, *self.space.names) if name in sites]
        return tuple(name for name in latent if sites[name].is_improper)

    @property
    def diagnostics(self) -> Diagnostics:
        """End of the run."""
        return self.fit.diagnostics

    @property
    def full_diagnostics(self) -> Diagnostics:
        """The same, with what takes further computation to know."""
        return self.diagnostics

    @property
    def is_at_hand(self) -> bool:
        """True if diagnostics and evidence are known without further computation, so that they may be shown."""
        return True

    @property
    def points(self) -> tuple[str, ...]:
        """Latent sites without a distribution in the posterior."""
        return point_sites(self.space)

    @cached_property
    def hyper(self) -> dict[str, HyperEstimate]:
        """For each hyperparameter its value and standard error, constrained and unconstrained."""
        return hyper_estimates(self.space, self.fit)

    @property
    def against_weights(self) -> tuple[str, ...]:
        """Reasons against leaving observations out by weights of draws, of engines that have another way."""
        return ()

    def describe(self) -> str:
        """Describe the reading of the model."""
        return self.reading.describe()

    def content(self) -> Content:
        """The outcome as plain containers."""
        return fit_to_content(self.fit, self.reading)

    @property
    def judged(self) -> ModelReading:
        """The reading by which the end of the run is judged."""
        return self.reading

    # Draws

    @cached_property
    def draws(self) -> tuple[dict[str, Array], Array | None]:
        """Draws that belong to the run: of all sites but the observed ones, and the log density of each, or nothing
        where that is left to :attr:`log_densities`."""
        return self.draw_all(self.rng_key)

    @cached_property
    def log_densities(self) -> Array:
        """Log density of each of :attr:`draws` with the data, by the model."""
        known = self.draws[1]
        assert known is not None  # runs whose draws may come without them have another way
        return known

    def draw_all(self, rng_key: Array, num_samples: int | None = None) -> tuple[dict[str, Array], Array | None]:
        """Draws with those of the missing values, given the others."""
        sites, log_density = self.draw(rng_key, num_samples)
        return with_predictive(self.reading, sites, rng_key), log_density

    @cached_property
    def resampled(self) -> dict[str, Array]:
        """The draws of :meth:`resample` that belong to the run."""
        return self.resample(self.rng_key)

    def resample(self, rng_key: Array, num_samples: int | None = None) -> dict[str, Array]:
        """Draws of all sites but the observed ones, by Pareto-smoothed importance weights.

        :param int num_samples: how many; those of the run by default.
        :raises RuntimeError: where the density of the draws is not known.
        """
        raise RuntimeError(
            "resample='psis' weights draws of a Gaussian posterior; those of this engine have no density that can be "
            "divided by. Leave it out for the draws of the engine, or give the model to NUTS."
        )

    @property
    def observed_values(self) -> dict[str, Any]:
        """The observed values by site."""
        return {name: site.value for name, site in self.reading.sites.items() if site.kind == "observed"}

    @cached_property
    def posterior_predictive(self) -> dict[str, Array]:
        """Draws of the observed sites at the arguments of the run, one for each of :attr:`draws`."""
        sites, reading = self.draws[0], self.reading
        latents = {name: sites[name] for name in (*reading.field, *reading.hyper)}
        drawn = model_draws(reading, latents, jax.random.fold_in(self.rng_key, 5), observed_leaves(reading))
        return {name: value for name, value in drawn.items() if reading.sites[name].kind == "observed"}

    # Further measurements

    def typical_noise(self) -> ArrayLike:
        """The average variance of Gaussian noise.

        :raises ValueError: for models that have none.
        """
        raise ValueError("Give the noise_variance of the measurements: the model does not say what it is.")

    # Answers of a Gaussian field

    def log_predictive(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
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

    @property
    def coordinates(self) -> Any:
        """Map from normal numbers to the sites of the model, for exact draws.

        :raises ValueError: where the posterior is no Gaussian field given the hyperparameters.
        """
        raise ValueError(
            "Exact draws in the coordinates of a fit need sites that are jointly Gaussian given the hyperparameters "
            "(EP, VariationalGaussian, LaplaceApproximation, INLA); those of this model are not. Take SMC or NUTS."
        )

    def predict(self, rng_key: Array, *args: Any, **kwargs: Any) -> Any:
        """The posterior at new arguments of the model, for engines on Gaussian fields.

        :raises RuntimeError: by others, saying what they have instead.
        """
        raise RuntimeError(
            "predict needs a Gaussian posterior; that of sparse coefficients is none. Give the model all inputs at "
            "once and mask the observations that are to be predicted; where the coefficients are the same at the new "
            "arguments, Predictive(model, engine.get_samples())(rng_key, *new_args) draws what is observed there."
        )

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


def hyper_estimates(space: UnconstrainedSpace, fit: Fit) -> dict[str, HyperEstimate]:
    """Value and standard error of each hyperparameter of a fit; no errors along directions without curvature."""
    vector, errors = fit.last_state.values, {}
    if fit.covariance is not None and fit.has_error.any():
        errors = space.standard_errors(vector, fit.covariance, fit.has_error)
    unconstrained = space.unpack_unconstrained(vector)
    out = {}
    for name, value in fit.hyper.items():
        is_fixed = name in space.fixed
        free = space.sites[name].transform.inv(value) if is_fixed else unconstrained[name]
        constrained_error, error = errors.get(name, (None, None))
        out[name] = HyperEstimate(value, constrained_error, free, error, is_fixed, space.sites[name].transform)
    return out


def ask(answer: Callable[Concatenate[Any, _Question], _Answer]) -> Callable[Concatenate[Any, _Question], _Answer]:
    """A method of an engine that asks the finished run.

    :param answer: the method of the run, whose signature and description it has; a class of runs may have its own.
    """

    @wraps(answer)
    def method(self: Any, *args: _Question.args, **kwargs: _Question.kwargs) -> _Answer:
        return getattr(self._finished(), answer.__name__)(*args, **kwargs)

    return method
