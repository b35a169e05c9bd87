"""The front shared by all engines: options, draws, summaries, ArviZ and files; it knows no form and no algorithm."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

import jax
from jax import Array

from ...compilation.disk_cache import keep_by_default
from ...structure.model.search import Form, field_names, read_first
from .answers.arviz import ArviZInterface, by_chain
from .answers.last_run import LastRun
from .answers.points import warn_of_points
from .answers.resampling import Resample
from .answers.sites import PosteriorSites
from .answers.summary import PrintsSummary, Summary
from .columns import columns_of, in_columns
from .display import ShownEngine
from .files.kept_run import KeptRun
from .labels import Coords, Dims, Labels, labels_of_call
from .many import Dataset, Fits, as_datasets, collect_fits
from .options import check_at_least, check_one_of, nearest_name, suggests
from .results import Diagnostics, HyperEstimate, LogEvidence, with_precision
from .run import FinishedRun, ask
from .running.progress import warn
from .state import EngineState

_Run = TypeVar("_Run", bound=FinishedRun)


class BaseEngine(ShownEngine, LastRun[_Run], PrintsSummary, ArviZInterface, KeptRun, Generic[_Run]):
    """Base of all engines: a model, options, and a run, which answers for itself.

    A subclass adds its own options, and says what models are read into (``forms``), how a run is made (:meth:`_start`)
    and how it is put together again from a file (:meth:`_restore`). The answers are those of the run, a
    :class:`~numpyro_ext.infer.front.run.FinishedRun`.

    :param model: a NumPyro model.
    :param field: names of the latent sites to be treated as the field, where two choices are possible.
    :param dict hyper_values: hyperparameters that are given and not learned.
    :param dict init_values: where the search for the others starts (constrained).
    :param int num_samples: draws made for :meth:`get_samples`.
    :param bool progress_bar: whether runs longer than a second show a bar.
    :param dict coords: labels of the places along a dimension, by its name, as ArviZ takes them: names of covariates,
        of groups. They stand in summaries, in ``posterior`` and in :meth:`to_arviz`. :meth:`run` takes them, too.
    :param dict dims: names of the dimensions of a site, by its name; those of plates have them by themselves.
    """

    options_elsewhere: ClassVar[Mapping[str, str]] = {}
    """Options of related engines that are asked of this one by mistake, with a sentence on what to write instead."""
    _most_escapes: ClassVar[int] = 5
    """Points that are no maximum which iterations leave at most."""

    def __init__(
        self,
        model: Callable[..., object],
        *,
        field: Sequence[str] | str | None = None,
        hyper_values: Mapping[str, object] | None = None,
        init_values: Mapping[str, object] | None = None,
        num_samples: int = 1000,
        progress_bar: bool = True,
        coords: Coords | None = None,
        dims: Dims | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            raise TypeError(_unknown_options(type(self), unknown))
        if not callable(model):
            hint = f": give the model itself, {type(self).__name__}(model)" if hasattr(model, "model") else ""
            raise TypeError(f"model must be a callable with NumPyro primitives, got {type(model).__name__}{hint}.")
        check_at_least(1, num_samples=num_samples)
        self.model = model
        self.field = field_names(field)
        self.hyper_values = dict(hyper_values or {})
        self.init_values = dict(init_values or {})
        self.num_samples = num_samples
        self.progress_bar = progress_bar
        labels = Labels.given(coords, dims)
        self.coords, self.dims = labels.coords, labels.dims
        self._run = None
        self._last_state: EngineState | None = None

    @property
    def _start_values(self) -> dict[str, object]:
        """Values at which a model is read: those that are given, to start from or to hold."""
        return {**self.init_values, **self.hyper_values}

    # Running

    writes_checkpoints: ClassVar[bool] = False
    """True if :meth:`_start` has the option ``checkpoint``."""
    forms: ClassVar[Sequence[Form[Any]]] = ()
    """Forms into which a model is read: the first of them that it has."""

    @property
    def _forms(self) -> Sequence[Form[Any]]:
        """:attr:`forms`, as the options of this engine have them."""
        return self.forms

    def _read(self, rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object], **options: Any) -> Any:
        keep_by_default()
        options = {"field": self.field} | options
        options |= {"init_values": self._start_values, "held": self.hyper_values, "rng_key": rng_key}
        return read_first(self._forms, self.model, args, kwargs, **options)

    def _as_fitted(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, Any]]:
        """Arguments with the columns of tables in the order of those of the fit, and labels by its numbers."""
        run = self._finished()
        return in_columns(run.columns, (run.reading.args, run.reading.kwargs), self.model, args, kwargs)

    def _sampled_model(self) -> Callable[..., Any]:
        """Model that has the density of the coordinates of the last run."""
        return self._finished().reading.model

    @abstractmethod
    def _start(
        self, rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object], init_state: EngineState | None
    ) -> _Run:
        """Read the model and run the algorithm for its form."""

    @abstractmethod
    def _restore(
        self, content: dict[str, object], rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> _Run:
        """The run from its :meth:`FinishedRun.content`."""

    def run(
        self,
        rng_key: Array,
        *args: object,
        init_state: EngineState | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        coords: Coords | None = None,
        dims: Dims | None = None,
        **kwargs: object,
    ) -> None:
        """Read the model on these arguments, learn its hyperparameters and fit its latent sites.

        A run that fails leaves no results, and not those of the run before; ``last_state`` stays that of the latter.

        :param rng_key: random number generator key, for the check of the reading, the restarts and the draws.
        :param args: arguments of the model.
        :param EngineState init_state: ``last_state`` of an earlier run. On the same data the run goes on exactly where
            that one stopped; on other data of the same shapes it starts from its values.
        :param checkpoint: for BilinearVG, the path of a file that is written after every sweep. If it exists, the run
            goes on from it, so that the same call, made again after the process was killed, loses at most one sweep.
            Sweeps in the file count towards ``num_steps``; when none are left, one is made.
        :param dict coords: labels of the places along a dimension, beside those of the constructor. A model that has an
            argument of this name gets it; give the labels to the constructor then.
        :param dict dims: names of the dimensions of a site, likewise.
        :param kwargs: keyword arguments of the model.
        :raises ModelStructureError: if the model is not of the form, or not one for this algorithm.
        :raises TypeError: if the first argument is no key, if called within ``jax.jit`` or ``vmap``, or for a
            checkpoint that the engine does not write.
        :raises ValueError: if the objective is not finite; the message names the likely cause. Also if a checkpoint is
            of other data or another model.
        :raises RuntimeError: if more than one factor in a hundred was refused in the last step.
        """
        kwargs, labels = labels_of_call(self.model, kwargs, coords, dims)
        with self._running(rng_key, args, kwargs):
            start: Callable[..., _Run] = self._start
            if checkpoint is not None:
                if not self.writes_checkpoints:
                    raise TypeError(
                        f"{type(self).__name__} writes no checkpoints: leave checkpoint out, and go on from the end of "
                        "a run with init_state=engine.last_state. A model's argument of this name goes by position."
                    )
                start = partial(start, checkpoint=checkpoint)
            run = start(rng_key, args, kwargs, init_state)
            run.keep_columns(columns_of(self.model, args, kwargs))
            self._keep(run, labels)

    def run_many(self, rng_key: Array, datasets: Sequence[object], **kwargs: object) -> Fits[Self]:
        """Fit many data sets of one structure: bootstrap samples, simulations from the prior, one series per shop.

        Engines on Gaussian fields read the model once for each and search for hyperparameters (or fit the field, where
        there are none) together, in compiled, batched loops; points of the hyperparameters, where these are integrated
        over, are fitted for one data set after the other, by one program. Other engines run one after the other. This
        engine itself stays as it is. What warnings say of several data sets
        is said once; a data set that cannot be fitted does not end the others (``fits.errors``), and Ctrl-C leaves
        those that have been fitted.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import EP
        >>> def model(y):
        ...     level = numpyro.sample("level", dist.Normal(0, 2))
        ...     numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)
        >>> fits = EP(model).run_many(jax.random.key(0), [jnp.array([3, 5, 2]), jnp.array([0, 1, 1])])
        >>> print(fits.mean["level"].round(2), fits.converged, fits[1].posterior["level"].sd.round(2))
        [ 1.13 -0.55] [ True  True] 0.67

        :param rng_key: random number generator key; every data set gets one of its own.
        :param datasets: for each of them a tuple with the arguments of the model, a dictionary of keyword arguments,
            or a single argument (an array, a list). Shapes, and what the model computes with in Python, are equal.
        :param kwargs: keyword arguments of the model that all have.
        :return: the fits: ``fits[i]`` is an engine as after :meth:`run`, and ``fits.log_evidence``, ``fits.hyper``,
            ``fits.mean``, ``fits.sd``, ``fits.converged`` and ``fits.get_samples()`` are of all.
        :raises ModelStructureError: if the model cannot be read, or no data set; as all below before any is fitted.
        :raises ValueError: if there are none, or one of them is of another structure: which, and in what.
        """
        return collect_fits(self, as_datasets(rng_key, datasets, kwargs))

    def _start_many(self, datasets: Sequence[Dataset]) -> Iterator[Callable[[], _Run]]:
        """For each data set a function that makes its run."""
        for rng_key, args, kwargs in datasets:
            yield partial(self._start, rng_key, args, kwargs, None)

    def _keep(self, run: _Run, labels: Labels | None = None) -> None:
        """Take over a run, and say what a person should know of how it ended."""
        self._last_state = run.fit.last_state
        diagnostics = with_precision(run.fit.diagnostics._replace(points=run.points), self._last_state)
        if not diagnostics.converged:
            warn(f"{type(self).__name__} did not converge. " + " ".join(diagnostics.messages))
        warn_of_points(diagnostics, run.space, type(self).__name__)
        if not _says_so_itself(self.model):
            for found in run.judged.self_comparisons():
                warn(str(found))
        run.fit = run.fit._replace(diagnostics=diagnostics)
        for message in run.keep_labels(Labels(self.coords, self.dims).updated(labels or Labels())):
            warn(f"{type(self).__name__}: {message}")
        self._run = run

    # Results

    @property
    def last_state(self) -> EngineState:
        """The state at the end of the last run, to be given to :meth:`run` as ``init_state``."""
        if self._last_state is None:
            raise self._not_run()
        return self._last_state

    @property
    def posterior(self) -> PosteriorSites:
        """Marginals by name, for hyperparameters, the sites of the field and the deterministic sites affine in it.

        Hyperparameters that are not integrated over are points, as in :meth:`get_samples`.
        """
        return self._finished().all_posteriors

    @property
    def is_lower_bound(self) -> bool:
        """True if the reported log evidence cannot exceed the exact one."""
        return self._finished().is_lower_bound

    @property
    def log_evidence(self) -> LogEvidence:
        """Log evidence at the reported hyperparameters: a float with the attribute ``is_lower_bound``."""
        return self._finished().log_evidence

    @property
    def diagnostics(self) -> Diagnostics:
        """Convergence, number of steps, objective trace, refused factors and messages of the last run, and which sites
        it set to a point (``points``)."""
        return self._finished().full_diagnostics

    @property
    def hyper(self) -> dict[str, HyperEstimate]:
        """For each hyperparameter its value and standard error, constrained and unconstrained.

        The errors come from the Hessian of log evidence plus log prior at the optimum, by central differences of its
        gradient in the unconstrained space; those of the constrained values follow by the delta method.
        """
        return self._finished().hyper

    def _draws(self, seed: int | None = None, num_samples: int | None = None) -> dict[str, Array]:
        run = self._finished()
        if seed is None and num_samples in (None, run.num_samples):
            return run.draws[0]
        return run.draw_all(run.rng_key if seed is None else jax.random.key(seed), num_samples)[0]

    @suggests
    def get_samples(
        self,
        group_by_chain: bool = False,
        seed: int | None = None,
        resample: Resample | None = None,
        num_samples: int | None = None,
    ) -> dict[str, Array]:
        """Independent draws from the posterior, every latent and deterministic site by name.

        Hyperparameters that are not integrated over, and ``param`` sites, are at their optimum in every draw, so that
        ``Predictive(model, draws)`` and ``log_likelihood(model, draws, ...)`` see the model that was fitted. Draws at
        which the model has density zero are drawn again. Missing values (sites that nothing depends on, such as those
        that ``obs_mask`` makes) are drawn given the others.

        :param bool group_by_chain: whether to put a chain dimension in front, of :attr:`num_chains` groups of draws.
        :param int seed: draw anew from this seed (as ArviZ may ask); the default are the draws that belong to the run.
        :param str resample: ``"psis"`` for draws nearer to the exact posterior, of engines on Gaussian fields: four
            times as many are made and resampled by Pareto-smoothed importance weights, the density of the model over
            that of the draws (Vehtari et al. 2024). Some then come more than once. A warning says where the weights
            cannot hold (Pareto k-hat above 0.7).
        :param int num_samples: how many draws; by default as many as the engine was told to make.
        :return: arrays of shape ``(num_samples, ...)``, or ``(num_chains, num_samples // num_chains, ...)``.
        :raises RuntimeError: if resampling is asked of an engine that has no Gaussian field.
        :raises TypeError: for an unknown argument; the message says which one was probably meant.
        """
        if num_samples is not None:
            check_at_least(1, num_samples=num_samples)
        run = self._finished()
        if resample is None:
            sites = self._draws(seed, num_samples)
        else:
            check_one_of(Resample, resample=resample)
            is_own = seed is None and num_samples in (None, run.num_samples)
            key = run.rng_key if seed is None else jax.random.key(seed)
            sites = run.resampled if is_own else run.resample(key, num_samples)
        return by_chain(sites) if group_by_chain else dict(sites)

    def get_extra_fields(self, group_by_chain: bool = False) -> dict[str, Array]:
        """Extra fields of each draw: ``potential_energy``, minus the log density of draw and data.

        :param bool group_by_chain: whether to put a chain dimension in front, as in :meth:`get_samples`.
        """
        fields = {"potential_energy": -self._finished().log_densities}
        return by_chain(fields) if group_by_chain else fields

    def _summary(self, exclude_deterministic: bool) -> Summary:
        run, posterior, hyper = self._finished(), self.posterior, self.hyper
        default = [n for n in posterior if n in hyper or not exclude_deterministic or n in run.judged.field]
        shown = default if len(default) > len(hyper) else list(posterior)
        return Summary(shown, run.all_labels, hyper, notes=(*run.left_out, *run.notes))

    def describe(self) -> str:
        """Describe the reading of the model: the field, the hyperparameters, the likelihood of each factor, the
        design."""
        return self._finished().describe()

    predict = ask(FinishedRun.predict)

    @property
    def _args(self) -> tuple[object, ...]:
        return self._finished().reading.args

    @property
    def _kwargs(self) -> dict[str, object]:
        return self._finished().reading.kwargs

    # Persistence

    def _content(self) -> dict[str, object]:
        run = self._finished()
        reading = run.reading
        return {
            "args": reading.args,
            "kwargs": dict(reading.kwargs),
            "rng_key": run.rng_key,
            "fit": run.content(),
            "labels": {"coords": dict(run.labels.coords), "dims": dict(run.labels.dims)},
            "columns": dict(run.columns),
        }

    def _with_content(self, content: Mapping[str, Any]) -> Self:
        made = self._with(self._restore(content["fit"], content["rng_key"], content["args"], content["kwargs"]))
        run = made._finished()
        run.keep_labels(Labels(**content.get("labels", {})))
        run.keep_columns(content.get("columns", {}))
        run.keep_draws(content["fit"])
        return made

    def _with(self, run: _Run) -> Self:
        """This engine, as if it had made a run."""
        self._run, self._last_state = run, run.fit.last_state
        return self


def _says_so_itself(model: object) -> bool:
    """True if it is a model of this package, which looks at the comparisons that it is given, whoever runs it."""
    while (inner := getattr(model, "func", getattr(model, "fn", None))) is not None:  # partial, and handlers
        model = inner
    return str(getattr(model, "__module__", "")).startswith("numpyro_ext.models")


def _unknown_options(engine: type[AnyEngine], unknown: Mapping[str, object]) -> str:
    sampler = {"num_warmup", "num_chains", "chain_method", "thinning"} & set(unknown)
    hint = ", which has neither warm-up nor chains," if sampler else ""
    options, first = sorted(engine._option_names()), next(iter(unknown))
    meant = nearest_name(first, options)
    more = "" if meant is None else f" Did you mean {meant!r}?"
    more = next((f" {engine.options_elsewhere[name]}" for name in unknown if name in engine.options_elsewhere), more)
    return f"{engine.__name__}{hint} has no option {first!r}; its options are {', '.join(options)}.{more}"


AnyEngine: TypeAlias = BaseEngine[Any]
"""An engine, whatever its runs answer."""
