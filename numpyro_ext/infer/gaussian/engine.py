"""The front shared by all engines on latent Gaussian models: it reads, runs and reports, and holds no mathematics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Unpack

from jax import Array
from numpyro.infer.autoguide import AutoMultivariateNormal

from ...structure import LatentGaussianReading, ModelStructureError
from ...structure.latent_gaussian.read import LATENT_GAUSSIAN
from ...structure.model.search import Form
from ..front.engine import BaseEngine, EngineOptions, check_at_least, check_positive, default_tolerance
from ..front.files.saved_runs import fit_from_content
from ..front.many import Dataset
from ..front.run import FinishedRun
from ..front.running.progress import warn
from ..front.state import EngineState
from ..hyper.space import UnconstrainedSpace
from .algorithms.modes import explain_two_modes
from .fitting import RunOptions, check_skipped, fit
from .many import Begun, begin_together, check_alike
from .programs import Algorithm, Programs, compiled_programs
from .run import GaussianRun

__all__ = ["Engine", "GaussianOptions"]


class GaussianOptions(EngineOptions, total=False):
    """The keyword arguments of :class:`Engine`, for the constructors of its subclasses."""

    num_steps: int
    tol: float | None
    num_restarts: int
    hyper_tol: float | None
    max_hyper_steps: int


class Engine(BaseEngine[FinishedRun]):
    """Base class of the engines on latent Gaussian models: a subclass names its algorithm, in :meth:`algorithm`.

    :param model: a NumPyro model whose field is Gaussian given its hyperparameters.
    :param int num_steps: steps of one fit of the field at most.
    :param float tol: largest change in a step at which the field has converged; by default ``1e-8`` in float64 and
        ``1e-4`` in float32.
    :param int num_restarts: further searches for hyperparameters, from normal perturbations of where the first one
        starts; the best is kept.
    :param float hyper_tol: the search ends when no derivative of log evidence plus log prior with respect to an
        unconstrained hyperparameter exceeds this.
    :param int max_hyper_steps: steps of the search at most.
    :param options: those of every engine, see :class:`~numpyro_ext.infer.front.engine.BaseEngine`: ``field``,
        ``hyper_values``, ``init_values``, ``num_samples`` and ``progress_bar``.
    """

    forms: ClassVar[Sequence[Form[Any]]] = (LATENT_GAUSSIAN,)
    integrates_hyper: ClassVar[bool] = False
    """Whether hyperparameters are integrated over; otherwise they are set to their optimum."""

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        num_steps: int = 100,
        tol: float | None = None,
        num_restarts: int = 0,
        hyper_tol: float | None = None,
        max_hyper_steps: int = 100,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, **options)
        check_at_least(1, num_steps=num_steps, max_hyper_steps=max_hyper_steps)
        check_at_least(0, num_restarts=num_restarts)
        check_positive(tol=tol, hyper_tol=hyper_tol)
        self.num_steps = num_steps
        self.tol = tol
        self.num_restarts = num_restarts
        self.hyper_tol = hyper_tol
        self.max_hyper_steps = max_hyper_steps

    @abstractmethod
    def algorithm(self, reading: LatentGaussianReading) -> Algorithm:
        """The algorithm for a model, with the options of this engine bound.

        :raises ModelStructureError: if it cannot run on this form: which site, what was found, and what to do.
        """

    # Running

    def _start(
        self, rng_key: Array, args: tuple[Any, ...], kwargs: dict[str, Any], init_state: EngineState | None
    ) -> FinishedRun:
        return self._fit(self._read(rng_key, args, kwargs), rng_key, init_state)

    def _start_many(self, datasets: Sequence[Dataset]) -> Iterator[Callable[[], FinishedRun]]:
        readings: list[LatentGaussianReading] = []
        for number, (rng_key, args, kwargs) in enumerate(datasets):
            try:
                # What a check finds wrong it finds on the first: the others are of its structure.
                reading = self._read(rng_key, args, kwargs, check=not readings)
            except ModelStructureError as error:
                raise ModelStructureError(
                    f"datasets[{number}]: {error}", reason=error.reason, site=error.site
                ) from error
            if not isinstance(reading, LatentGaussianReading):
                yield from super()._start_many(datasets)
                return
            readings.append(reading)
        check_alike(readings)
        spaces = [UnconstrainedSpace(reading.hyper, self.hyper_values) for reading in readings]
        values = [space.initial(self.init_values) for space in spaces]
        steps = self.max_hyper_steps if spaces[0].size else self.num_steps
        begun = begin_together(readings, lambda reading: self._compile(reading)[2], spaces[0], values, steps)
        for data, reading, part in zip(datasets, readings, begun, strict=True):
            yield partial(self._fit, reading, data.rng_key, None, part)

    def _fit(
        self, reading: LatentGaussianReading, rng_key: Array, init_state: EngineState | None, begun: Begun | None = None
    ) -> GaussianRun:
        """Run the algorithm on a latent Gaussian model."""
        space, algorithm, programs = self._compile(reading)
        values = space.initial(self.init_values)
        result = fit(
            reading,
            programs,
            space,
            rng_key,
            self._options(),
            init_values=values,
            init_state=init_state,
            begun=begun or Begun(),
        )
        messages = explain_two_modes(reading, result.hyper)
        for message in messages:
            warn(f"{type(self).__name__}: {message}")
        diagnostics = result.diagnostics._replace(messages=(*result.diagnostics.messages, *messages))
        result = result._replace(diagnostics=diagnostics)
        return self._new_run(reading, space, result, rng_key, algorithm=algorithm, programs=programs)

    def _keep(self, run: FinishedRun) -> None:
        self._last_state = run.fit.last_state
        check_skipped(run.fit, run.reading, type(self).__name__)
        super()._keep(run)

    @property
    def _new_run(self) -> Callable[..., GaussianRun]:
        return partial(GaussianRun, num_samples=self.num_samples)

    def _options(self) -> RunOptions:
        return RunOptions(
            num_steps=self.num_steps,
            tol=default_tolerance(self.tol, 1e-8, 1e-4),
            hyper_tol=default_tolerance(self.hyper_tol, 1e-4, 1e-2),
            num_restarts=self.num_restarts,
            max_hyper_steps=self.max_hyper_steps,
            progress_bar=self.progress_bar,
            name=type(self).__name__,
        )

    def _compile(self, reading: LatentGaussianReading) -> tuple[UnconstrainedSpace, Algorithm, Programs]:
        algorithm = self.algorithm(reading)
        space = UnconstrainedSpace(reading.hyper, self.hyper_values)
        options = self._options()
        programs = compiled_programs(
            reading,
            algorithm,
            space,
            num_steps=options.num_steps,
            tol=options.tol,
            hyper_tol=options.hyper_tol,
            max_iterations=options.max_hyper_steps,
            is_density_unconstrained=self.integrates_hyper,
        )
        return space, algorithm, programs

    # Prediction

    def log_predictive(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Log predictive density of observations that the fit has not seen.

        Without arguments these are the masked observations of the fit; those whose value is missing (NaN, or outside
        the support, such as a count or category coded -1) score zero. With arguments the model is read on them and all
        its observations (that are not masked) are scored under the posterior of the fit, one by one; the field must
        have the same sites, shapes and prior. A Gaussian process at new inputs has another field: give the model all
        inputs at once and mask the ones to be predicted.

        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :return: for each observed site an array in the shape of its observations, zero where nothing was scored.
        :raises ValueError: if the field of the model on these arguments is another one.
        """
        run = self._finished()
        return run.log_predictive(self._read(run.rng_key, args, kwargs, check=False) if args or kwargs else None)

    # Interoperation

    @property
    def guide(self) -> AutoMultivariateNormal:
        """The posterior as a fitted autoguide over all latent sites, for ``Predictive``, ELBO or PSIS; see ``params``.

        Hyperparameters have in it the covariance given by the curvature (none in directions in which the evidence does
        not curve), and are independent of the field.
        """
        return self._finished().guide_and_params[0]

    @property
    def params(self) -> dict[str, Array]:
        """The parameters of :attr:`guide` and the values of the model's ``param`` sites."""
        return self._finished().guide_and_params[1]

    def psis_diagnostic(self, rng_key: Array, num_particles: int = 1000) -> float:
        """Pareto k-hat of the field's posterior, given the hyperparameters: below 0.7 the approximation can be trusted.

        :param rng_key: random number generator key.
        :param int num_particles: number of draws.
        :return: k-hat (Vehtari et al., 2024).
        """
        return self._finished().psis_diagnostic(rng_key, num_particles)

    # Persistence

    def _restore(
        self, content: dict[str, Any], rng_key: Array, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> FinishedRun:
        reading = self._read(rng_key, args, kwargs, check=False)
        space, algorithm, programs = self._compile(reading)
        result = fit_from_content(content, reading, space, programs.init_state, programs.init_search)
        return self._new_run(reading, space, result, rng_key, algorithm=algorithm, programs=programs)
