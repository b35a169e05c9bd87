"""The front shared by all engines on latent Gaussian models: it reads, runs and reports, and holds no mathematics."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
from jax import Array

from ...structure import LatentGaussianReading, ModelStructureError
from ...structure.latent_gaussian.read import LATENT_GAUSSIAN
from ...structure.model.running.changing import read_with_changing
from ...structure.model.running.execution import ModelCall
from ...structure.model.search import Form
from ...structure.model.validation import explain_masked_data
from ..front.files.content import Content
from ..front.files.saved_runs import fit_from_content
from ..front.labels import Labels
from ..front.many import Dataset
from ..front.options import EngineOptions, check_at_least, check_one_of, check_positive, default_tolerance, option_key
from ..front.run import FinishedRun
from ..front.running.progress import warn
from ..front.state import EngineState, Fit
from ..hyper.space import UnconstrainedSpace
from .algorithms.algorithm import Algorithm, GivenFunctions
from .engine_answers import GaussianAnswers
from .engine_program import EngineProgram
from .fitting.costs import FIT_COSTS, FitCosts
from .fitting.dense_rest import warn_of_dense_rest
from .fitting.fit import RunOptions, check_skipped, fit
from .fitting.flat_directions import explain_prior_alone
from .fitting.many import NOTHING_BEGUN, Begun, begin_together, read_all, refuse
from .fitting.modes import explain_two_modes
from .integration.exploration import Integrate, Integration, check_design
from .integration.simplified_laplace import gaussian_marginals
from .integration.surroundings import NoDesign
from .programs import Programs, compiled_programs
from .runs.integrated_run import IntegratedRun
from .runs.run import GaussianRun

_MOST_CLIMBS = 2  # searches that begin at a point above the mode of the last one


class GaussianOptions(EngineOptions, total=False):
    """The keyword arguments of :class:`Engine`, for the constructors of its subclasses."""

    num_steps: int
    tol: float | None
    num_restarts: int
    hyper_tol: float | None
    max_hyper_steps: int
    integrate: Integrate


class Engine(GaussianAnswers):
    """Base class of the engines on latent Gaussian models: a subclass names its algorithm, in :meth:`algorithm`.

    :param model: a NumPyro model whose field is Gaussian given its hyperparameters.
    :param int num_steps: steps of one fit of the field at most.
    :param float tol: largest change in a step at which the field has converged; by default ``1e-8`` in float64 and
        ``1e-4`` in float32.
    :param int num_restarts: further searches for hyperparameters, from perturbed starts; the best is kept.
    :param float hyper_tol: the search ends when no derivative of log evidence plus log prior with respect to an
        unconstrained hyperparameter exceeds this.
    :param int max_hyper_steps: steps of the search at most.
    :param str integrate: what becomes of the hyperparameters. With ``"none"`` they are set to their optimum, in draws,
        marginals and predictions. Otherwise these are integrated over them, by fits of the field at points around the
        mode of their posterior density in the unconstrained space:

        - ``"auto"``: a grid for one or two, adaptive points if a fifth of a variance lies beyond it and for three to
          twenty, else a normal approximation; at the mode, with a warning, where the density has no curvature;
        - ``"grid"``: a lattice in the eigenbasis of the curvature (7 and 25 points for one and two, at most for four),
          exact to two or three digits;
        - ``"adaptive"``: some 60 points that follow the shape of the density, by an emulator of it, and 128 more by
          which that is judged and from which draws are made, and further out as long as there is mass. The log evidence
          has a standard error; where the density could not be followed the run has not converged. Standard deviations
          were within 15 % of those of long chains on five models with 3 to 19 skewed hyperparameters (means within
          0.21 of these), and 0.9 to 1.0 of the truth of Student t densities with three degrees of freedom;
        - ``"ccd"``: a central composite design (up to six; 15 to 45 points), which costs least, exact where the log
          density is quadratic on each side of the mode; elsewhere it leaves errors of hundredths in the log evidence
          and in the moments of the field (in standard deviations), and of a tenth or more in the standard deviations
          of skewed hyperparameters. Draws have weights by the density itself, and other moments then: their mean was
          up to a third of a standard deviation from ``hyper`` for a scale of eight groups of three counts;
        - ``"normal"``: 64 points of a nearly normal density, for any number. Up to 128 have its skewness (gradients at
          two points on each axis) and a location and width of each axis (gradients at 64 to 128 points).
          Where the density is another one a warning says so and the run has not converged.

        With up to 5,000 rows and 20 hyperparameters all designs look beyond their points: where a standard deviation
        would be a seventh larger with what lies there, or is infinite, a warning says so and the run has not converged.
        ``param`` sites, which have no prior, and given values stay what they are.
    :param options: those of every engine, see :class:`~numpyro_ext.infer.front.engine.BaseEngine`: ``field``,
        ``hyper_values``, ``init_values``, ``num_samples`` and ``progress_bar``.
    """

    forms: ClassVar[Sequence[Form[Any]]] = (LATENT_GAUSSIAN,)
    must_integrate: ClassVar[bool] = False
    """True if there is no engine without integration over the hyperparameters."""
    options_elsewhere: ClassVar[Mapping[str, str]] = {
        "space": "Crossed effects of many levels are fitted by LaplaceApproximation(model, space='iterative') alone."
    }
    _costs: ClassVar[FitCosts] = FIT_COSTS
    _run_class: ClassVar[type[GaussianRun]] = GaussianRun
    _integrated_run_class: ClassVar[type[IntegratedRun]] = IntegratedRun

    def __init__(
        self,
        model: Callable[..., object],
        *,
        num_steps: int = 100,
        tol: float | None = None,
        num_restarts: int = 0,
        hyper_tol: float | None = None,
        max_hyper_steps: int = 100,
        integrate: Integrate = "auto",
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, **options)
        check_at_least(1, num_steps=num_steps, max_hyper_steps=max_hyper_steps)
        check_at_least(0, num_restarts=num_restarts)
        check_positive(tol=tol, hyper_tol=hyper_tol)
        check_one_of(Integrate, integrate=integrate)
        self.num_steps = num_steps
        self.tol = tol
        self.num_restarts = num_restarts
        self.hyper_tol = hyper_tol
        self.max_hyper_steps = max_hyper_steps
        self.integrate: Integrate = integrate

    @abstractmethod
    def algorithm(self, reading: LatentGaussianReading) -> Algorithm:
        """The algorithm for a model, with the options of this engine as its fields.

        Called on a copy of the engine. Compiled programs are shared by engines whose algorithms are equal.

        :raises ModelStructureError: if it cannot run on this form: which site, what was found, and what to do.
        """

    # Running

    def _start(
        self, rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object], init_state: EngineState | None
    ) -> FinishedRun:
        return self._fit(self._read(rng_key, args, kwargs), rng_key, init_state)

    def _start_many(self, datasets: Sequence[Dataset]) -> Iterator[Callable[[], FinishedRun]]:
        found = read_all(datasets, self._read)
        if found is None:
            yield from super()._start_many(datasets)
            return
        readings, refused = found
        spaces = [UnconstrainedSpace(reading.hyper, self.hyper_values) for reading in readings.values()]
        values = [space.initial(self.init_values) for space in spaces]
        steps = self.max_hyper_steps if spaces[0].size else self.num_steps
        begun = begin_together(
            list(readings.values()),
            lambda reading, runs_often: self._compile(reading, runs_often)[2],
            spaces[0],
            values,
            steps,
            self._costs,
        )
        for number, data in enumerate(datasets):
            if number in refused:
                yield partial(refuse, refused[number])
            else:
                yield partial(self._fit, readings[number], data.rng_key, None, next(begun))

    def _fit(
        self,
        reading: LatentGaussianReading,
        rng_key: Array,
        init_state: EngineState | None,
        begun: Begun = NOTHING_BEGUN,
    ) -> GaussianRun:
        """Run the algorithm on a latent Gaussian model."""
        if begun is NOTHING_BEGUN:
            reading = self._with_kinds(reading)
        space, algorithm, programs = self._compile(reading, begun.runs_often)
        make = partial(self._make_run, reading, space, rng_key=rng_key, algorithm=algorithm, programs=programs)

        def climbed(**start: Any) -> tuple[GaussianRun, list[str]]:
            found = fit(reading, programs, space, rng_key, self._options(), **start)
            told = self._explain(reading, found, algorithm)
            diagnostics = found.diagnostics._replace(messages=(*found.diagnostics.messages, *told))
            run, messages = self._integrated(make, found._replace(diagnostics=diagnostics), space)
            if messages and diagnostics.converged:  # of other runs all messages are said
                told = [*told, " ".join(messages)]
            return run, told

        run, told = climbed(init_values=space.initial(self.init_values), init_state=init_state, begun=begun)
        for _ in range(_MOST_CLIMBS):
            if not isinstance(run, IntegratedRun) or run.exploration.higher is None:
                break
            # there are several modes, or the search ended too early
            run, told = climbed(init_values=jnp.asarray(run.exploration.higher))
        for message in told:
            warn(f"{type(self).__name__}: {message}")
        return run

    def _with_kinds(self, reading: LatentGaussianReading) -> LatentGaussianReading:
        """The reading with the blocks that are alike, of an engine that counts them once."""
        return reading

    def _integrated(
        self, make: Callable[..., GaussianRun], result: Fit, space: UnconstrainedSpace
    ) -> tuple[GaussianRun, Sequence[str]]:
        """A run over the hyperparameters around the end of a search, and messages on it; at their mode, where that is
        asked for or no design is found."""
        if not self._integrates(space):
            return make(result), ()
        run = make(result, is_integrated=True)
        assert isinstance(run, IntegratedRun)  # as asked
        try:
            return run, run.exploration.messages
        except NoDesign as error:
            if run.is_strict:
                raise RuntimeError(
                    f"{type(self).__name__} integrates over the hyperparameters around their posterior mode, but "
                    f"{error}. Give tighter priors, other init_values or more max_hyper_steps, or give values to the "
                    "hyperparameters without information (hyper_values)."
                ) from error
            reason = f"The hyperparameters are at their mode and not integrated over: {error}."
        except KeyboardInterrupt:
            reason = "Interrupted: the hyperparameters are at their mode and not integrated over."
        diagnostics = result.diagnostics._replace(messages=(*result.diagnostics.messages, reason))
        return make(result._replace(diagnostics=diagnostics)), (reason,)

    def _integrates(self, space: UnconstrainedSpace) -> bool:
        return self.must_integrate or (self.integrate != "none" and len(space.integrable) > 0)

    def _explain(self, reading: LatentGaussianReading, found: Fit, algorithm: Algorithm) -> list[str]:
        """Explain the end of a fit by the factors of the model."""
        messages = [] if algorithm.sees_all_modes else explain_two_modes(reading, found.hyper)
        return [*messages, *explain_prior_alone(reading, found.hyper), *explain_masked_data(reading.sites)]

    def _keep(self, run: FinishedRun, labels: Labels | None = None) -> None:
        self._last_state = run.fit.last_state
        check_skipped(run.fit, run.judged, type(self).__name__)
        super()._keep(run, labels)

    def _make_run(
        self,
        reading: LatentGaussianReading,
        space: UnconstrainedSpace,
        result: Fit,
        is_integrated: bool = False,
        **parts: Any,
    ) -> GaussianRun:
        parts |= {"reading": reading, "space": space, "fit": result, "num_samples": self.num_samples}
        parts["costs"] = self._costs
        if not is_integrated:
            return self._run_class(**parts)
        is_strict = self.must_integrate or self.integrate != "auto"
        return self._integrated_run_class(
            **parts, options=self._integration, marginals_fn=self._marginals_fn, is_strict=is_strict
        )

    @property
    def _integration(self) -> Integration:
        return Integration(self.integrate, progress_bar=self.progress_bar, most_points=self._costs.most_points)

    @property
    def _marginals_fn(self) -> Callable[..., object]:
        """Function that makes the components of mixtures over hyperparameters."""
        return gaussian_marginals

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

    def bound_algorithm(self, reading: LatentGaussianReading) -> Algorithm:
        """:meth:`algorithm`; one of functions that are given has states known by this engine and its options.

        :raises ModelStructureError: if it cannot run on this form.
        """
        # Given functions that read an option where they are traced read that of the copy, which nobody sets anew.
        bound = copy.copy(self)
        bound._run = bound._last_state = None
        algorithm = bound.algorithm(reading)
        if not isinstance(algorithm, GivenFunctions):
            return algorithm.with_own_options()
        options = tuple((name, option_key(value)) for name, value in vars(bound).items() if name not in _ELSEWHERE)
        return algorithm.of_engine(type(self), options)

    def _compile(
        self, reading: LatentGaussianReading, runs_often: bool = False
    ) -> tuple[UnconstrainedSpace, Algorithm, Programs]:
        algorithm = self.bound_algorithm(reading)
        warn_of_dense_rest(reading, type(self).__name__, self._costs)
        space = UnconstrainedSpace(reading.hyper, self.hyper_values)
        check_design(self.integrate, space)
        options = self._options()
        programs = compiled_programs(
            reading,
            algorithm,
            space,
            num_steps=options.num_steps,
            tol=options.tol,
            hyper_tol=options.hyper_tol,
            max_iterations=options.max_hyper_steps,
            costs=self._costs,
            is_density_unconstrained=self.integrate != "none",
            marginals_fn=self._marginals_fn if self._integrates(space) else None,
            runs_often=runs_often,
        )
        return space, algorithm, programs

    def program(self, *args: object, changing: str | Sequence[str] | None = None, **kwargs: object) -> EngineProgram:
        """This engine as pure functions of some arguments of the model, to be mapped and differentiated.

        The model is read without the values of the arguments that change, so that other values of the same shapes
        compile nothing: observations, masks, inputs of a kernel, and indices, whose rows then may see any unknown of
        the sites that they point into. What needs their values (NumPy, lengths, branches, bounds of a prior) is
        refused by name. Masked rows change nothing, so that data of few shapes can stand for data of any.

        Hyperparameters are part of the state, and at one value: nothing is integrated over them, whatever
        ``integrate`` says.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import EP
        >>> def model(x, y):
        ...     slope = numpyro.sample("slope", dist.Normal(0, 1))
        ...     numpyro.sample("y", dist.Poisson(jnp.exp(slope * x)), obs=y)
        >>> program = EP(model).program(jnp.array([0.5, 1.0, 2.0]), jnp.array([1, 3, 5]))
        >>> program
        EngineProgram(x (3,), y (3,))
        >>> def evidence(x):
        ...     arrays = {"x": x}
        ...     return program.log_evidence(arrays, program.fit(arrays, program.init(arrays)))
        >>> [round(float(slope), 2) for slope in jax.grad(evidence)(jnp.array([0.5, 1.0, 2.0]))]
        [-0.38, 0.52, -0.36]

        :param args: arguments of the model; those that change as an example of their shapes.
        :param changing: their names; by default all that hold arrays of numbers and whose values the model does not
            need, which ``program.changing`` names. Indices are better left out where they stay: rows are then known to
            see few unknowns.
        :param kwargs: keyword arguments of the model.
        :return: with ``init``, ``fit``, ``learn``, ``predictors`` and ``log_evidence``.
        :raises ModelStructureError: if the model needs the values of an argument that changes, or is none of a
            Gaussian field.
        :raises ValueError: of an engine that cannot but integrate over hyperparameters.
        """
        if self.must_integrate:
            raise ValueError(
                f"{type(self).__name__} integrates over the hyperparameters, and a program has them at one value: take "
                "EP, LaplaceApproximation or VariationalGaussian."
            )
        call = ModelCall(self.model, args, kwargs, jax.random.key(0))
        reading = read_with_changing(
            call, changing, lambda names: self._read(call.rng_key, args, kwargs, changing=names)
        )
        if not isinstance(reading, LatentGaussianReading):
            raise ModelStructureError(
                "A program needs a Gaussian field, and the model was read as sparse coefficients "
                f"{list(reading.field)}."
            )
        space, algorithm, programs = self._compile(reading)
        start = space.initial(self.init_values)
        if self._run is not None and self._run.space.structure == space.structure:
            start = self._run.fit.last_state.values
        options = {"num_steps": self.num_steps, "max_iterations": self.max_hyper_steps}
        return EngineProgram(reading, space, algorithm, programs, start, **options)

    # Persistence

    def _restore(
        self, content: Content, rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> FinishedRun:
        plain = self._read(rng_key, args, kwargs, check=False)
        reading = self._with_kinds(plain)
        space, algorithm, programs = self._compile(reading)
        result = fit_from_content(content, plain, space, programs.init_state, programs.init_search)
        return self._make_run(
            reading,
            space,
            result,
            is_integrated=content.get("is_integrated", self.must_integrate),  # not said in files of earlier releases
            rng_key=rng_key,
            algorithm=algorithm,
            programs=programs,
        )


_ELSEWHERE = frozenset((*Engine._option_names(), "model", "_run", "_last_state", "_failure"))
"""Attributes of every engine, on which states of given functions do not depend."""
