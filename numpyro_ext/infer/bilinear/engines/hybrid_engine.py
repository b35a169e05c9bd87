"""Expectation propagation and variational Bayes together, as an inference engine for bilinear models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ....compilation.pytree import PyTree
from ....compilation.store import shared
from ....structure.bilinear.factors import has_bound
from ....structure.bilinear.form import Bilinear, GaussianSide
from ....structure.bilinear.read import read_bilinear
from ....structure.bilinear.reading import BilinearReading
from ....structure.errors import ModelStructureError
from ...front.files.saved_runs import fit_from_content
from ...front.options import EngineOptions, check_at_least, check_one_of, check_positive, default_tolerance
from ...front.running.iterations import Iterations, Parts, StepInfo, fit_in_chunks
from ...front.state import EngineState, check_init_state, data_digest
from ...hyper.space import UnconstrainedSpace
from ..algorithms import hybrid
from ..algorithms import sweeps as core
from ..algorithms.messages import Moments, next_damping
from ..algorithms.ratings.iterations import CHUNK as RATINGS_CHUNK
from ..algorithms.ratings.variances import Rule
from ..algorithms.schedules.loop import SolveInfo
from ..answers import BilinearAnswers
from ..programs import BilinearPrograms, bilinear_programs, explain
from ..runs.noise_run import NoiseRun, NoisyModel
from ..runs.run import BilinearRun

_CHUNK = 5
_UNSTABLE = (
    "The estimate of the log evidence is {} after these iterations: noise, or cut points that cross, run away. Take "
    "noise='quadrature' or 'variational', a longer warm_up, or a smaller damping."
)


class Paced(NamedTuple):
    """Messages, and the pace at which they change: slower where an iteration moved further than the last."""

    messages: hybrid.HybridState
    damping: Array
    change: Array


class HybridPrograms:
    """Compiled functions of ``(data, hyper, ...)`` for one model structure.

    :param BilinearReading reading: any reading of the structure.
    :param UnconstrainedSpace space: of the hyperparameters, which learns none.
    :param float tol: of a run.
    :param float damping: of messages.
    :param bool is_weighted: whether factors have other powers than one.
    """

    def __init__(
        self, reading: BilinearReading, space: UnconstrainedSpace, tol: float, damping: float, is_weighted: bool
    ) -> None:
        self._reading, self._space, self._is_weighted = reading, space, is_weighted
        self._tol, self._damping = tol, damping
        self.init_state = jax.jit(self._init_state)
        self.solve = jax.jit(self._solve)
        self.blocks = jax.jit(self._blocks)

    def _init_state(self, data: Sequence[object], hyper: dict[str, Array], rng_key: Array | None = None) -> Paced:
        key = jax.random.key(0) if rng_key is None else rng_key
        start = hybrid.spectral_start(self._reading.form(hyper, data), key)
        dtype = start.factor.shift.dtype
        return Paced(start, jnp.asarray(self._damping, dtype), jnp.asarray(jnp.inf, dtype))

    def _solve(self, data: PyTree, hyper: dict[str, Array], state: Paced, num_steps: Array) -> tuple[Paced, StepInfo]:
        """At most :data:`_CHUNK` iterations, until one would change next to nothing."""
        form = self._reading.form(hyper, data)

        def proceed(carry: PyTree) -> Array:
            _, info, _, count = carry
            is_sound = (count == 0) | jnp.isfinite(info.log_evidence)
            return (count < num_steps) & ~self._has_converged(info) & is_sound

        def advance(carry: PyTree) -> PyTree:
            state, _, trace, count = carry
            messages, info = hybrid.step(form, state.messages, state.damping, is_weighted=self._is_weighted)
            damping = next_damping(state.damping, info.change, state.change, self._damping)
            return Paced(messages, damping, info.change), info, trace.at[count].set(info.log_evidence), count + 1

        dtype = state.damping.dtype
        nothing, no = jnp.asarray(jnp.inf, dtype), jnp.asarray(False)
        value = hybrid.log_evidence(form, state.messages, is_weighted=self._is_weighted)
        blank = hybrid.HybridInfo(nothing, jnp.asarray(0), no, nothing, value)
        trace = jnp.full((_CHUNK,), jnp.nan, dtype)
        state, info, trace, count = lax.while_loop(proceed, advance, (state, blank, trace, jnp.asarray(0)))
        end = SolveInfo(self._has_converged(info), count, info.log_evidence, trace, info.change, info.num_skipped)
        return state, StepInfo(end, info.log_evidence, jnp.zeros((), dtype), jnp.zeros((0,), bool))

    def _has_converged(self, info: hybrid.HybridInfo) -> Array:
        return (info.change < self._tol) & info.is_settled

    def _blocks(self, data: Any, hyper: dict[str, Array], state: Paced) -> tuple[Any, Any]:
        form = self._reading.form(hyper, data)
        sides = (state.messages.rows, form.rows), (state.messages.columns, form.columns)
        rows, columns = (hybrid.posterior_block(side.cells, prior) for side, prior in sides)
        return rows, columns


@dataclass(eq=False, repr=False)
class HybridRun(BilinearRun):
    """Posteriors of the vectors of both sides, from the messages at the end.

    :param HybridPrograms messages: compiled functions of the messages; all else as in :class:`.run.BilinearRun`.
    """

    messages: HybridPrograms

    @cached_property
    def _posterior_state(self) -> core.State:
        rows, columns = self.messages.blocks(self.reading.data, self.fit.hyper, self.fit.last_state.state)
        return core.State.beginning_at(rows, columns, self.fit.log_evidence)

    @property
    def inputs(self) -> tuple[Any, dict[str, Array], core.State]:
        return self.reading.data, self.fit.hyper, self._posterior_state

    @property
    def blocks(self) -> tuple[Any, Any]:
        return self._posterior_state.rows, self._posterior_state.columns

    @property
    def vectors(self) -> tuple[Moments, Moments] | None:
        messages = self.fit.last_state.state.messages
        return None if any(self.reading.is_coupled) else (messages.rows.seen, messages.columns.seen)

    @property
    def is_lower_bound(self) -> bool:
        return False

    def fold_in(self, rng_key: Array, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> BilinearRun:
        potential = self.programs.form(self.reading.data, self.fit.hyper).potential
        if not has_bound(potential):
            raise ValueError(
                "fold_in finds the optimum of a bound that needs a likelihood that is log-concave and analytic, and "
                f"that of this model ({type(potential).__name__}) is not: fit old and new vectors together, from "
                "init_state=engine.last_state where shapes are the same."
            )
        return super().fold_in(rng_key, args, kwargs, **options)


class BilinearEP(BilinearAnswers):
    r"""Expectation propagation for the likelihood of a bilinear model, variational Bayes for its products.

    For models like those of :class:`~numpyro_ext.infer.BilinearVG`, whose predictors are sums of products
    :math:`\eta_c = \sum_d u_{r(c) d}\, v_{s(c) d}` and terms that are linear in either side, with *any* likelihood of
    one predictor, also such as are not log-concave (Student-t noise, robust outcomes). The factor of each cell is
    matched by its moments, products are separated by components, and Gaussian processes across either side are treated
    by expectation propagation; a cell may touch several vectors of a side (pairs of items). The posterior of each
    component is one Gaussian over all vectors that depend on each other, as by ``covariance="component"``.

    ``log_evidence`` is an estimate and **no bound**, and no objective is climbed: iterations are damped messages, which
    settle or, where the data contradict each other, may not; then the run says so. Hyperparameters are not learned:
    give their values, such as those that BilinearVG learns.

    Of ordered categories (OrderedProbit) it integrates over variances of noise that divide predictor and cut points
    by their roots, one for each row, column or other group of cells, with inverse gamma priors; over cut points with
    Gaussian priors, whose prior means may be latent as well; and over prior means and variances of the vectors of a
    side (:func:`~numpyro_ext.models.heteroscedastic_ratings` has all of these). They have posteriors like the vectors,
    and ``log_evidence`` is the estimate at their modes and means.

    Iterations start along the leading singular vectors of what each cell says alone, since zero is a fixed point of all
    products. Data in which no product is found end there, with components at zero.

    **Example:**

    .. code-block:: python

        >>> import jax
        >>> import numpy as np
        >>> from numpyro_ext.infer import BilinearEP
        >>> from numpyro_ext.models import preference_factorization

        >>> user, first = np.array([0, 0, 1, 1, 2, 2]), np.array([0, 1, 0, 1, 2, 0])
        >>> second = np.array([1, 2, 2, 2, 0, 1])
        >>> engine = BilinearEP(preference_factorization, progress_bar=False)
        >>> engine.run(jax.random.key(0), user, first, second, np.ones(6, int), num_users=3, kernel=np.eye(3), rank=1)
        >>> bool(engine.diagnostics.converged), engine.posterior["tastes"].mean.shape
        (True, (1, 3))

    **References**

    1. Houlsby, N., Hernández-Lobato, J. M., Huszár, F. and Ghahramani, Z. (2012), Collaborative Gaussian processes for
       preference learning, *NIPS*, section 3 and supplement.

    :param model: a NumPyro model.
    :param int num_steps: iterations at most.
    :param float tol: largest change of the mean of a predictor, in its standard deviations and without damping, at
        which a run has converged; by default ``1e-4``, in float32 ``1e-3``. With latent noise also of the means of
        noise, cut points and priors.
    :param float damping: share of new messages, above zero and at most one; it is halved, to a fiftieth at least, after
        an iteration that moves further than the one before, and grows again after others.
    :param str noise: how variances of noise hear of each cell: ``"quadrature"`` matches the first two moments of the
        precision exactly, ``"mean"`` and ``"mode"`` in closed form at a point of the variance, ``"variational"`` is a
        step of variational Bayes. Mean precisions by ``"mean"`` are off by up to a tenth and by ``"mode"`` by up to a
        third, mostly by one or two percent (Houlsby 2014, chapter 7); all four predict alike, also without a warm-up,
        since no variance goes all of a way that is too long.
    :param int warm_up: iterations in which latent noise keeps its prior.
    :param options: of every engine: ``field`` (the sites of both sides), ``hyper_values``, ``num_samples``,
        ``progress_bar``.

    Cost: for each iteration some tens of passes over the cells, and the cube of the number of vectors that depend on
    each other for each component. With latent noise some seven microseconds for each cell of five levels at rank ten,
    and three kilobytes, since iterations are extrapolated from the last seven.
    """

    def __init__(
        self,
        model: Callable[..., object],
        *,
        num_steps: int = 500,
        tol: float | None = None,
        damping: float = 0.5,
        noise: Rule = "quadrature",
        warm_up: int = 5,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, **options)
        check_at_least(1, num_steps=num_steps)
        check_positive(tol=tol)
        if not 0.0 < damping <= 1.0:
            raise ValueError(f"damping must be above 0 and at most 1; got {damping}.")
        check_one_of(Rule, noise=noise)
        check_at_least(0, warm_up=warm_up)
        self.num_steps, self.tol, self.damping = num_steps, tol, damping
        self.noise, self.warm_up = noise, warm_up

    def _start(
        self, rng_key: Array, args: tuple[object, ...], kwargs: Mapping[str, object], init_state: EngineState | None
    ) -> BilinearRun:
        reading, space, programs, answers = self._prepare(rng_key, args, kwargs)
        if isinstance(programs, NoisyModel):
            return self._start_noisy(programs, rng_key, init_state)
        digest, hyper = data_digest(reading.written_data, space.fixed, reading.key), space.unpack(space.initial())
        values, before = space.initial(), 0
        if init_state is None:
            state = programs.init_state(reading.data, hyper, rng_key)
        else:
            check_init_state(init_state, jax.eval_shape(programs.init_state, reading.data, hyper), space.size)
            state, before = init_state.state, init_state.num_steps if init_state.data_digest == digest else 0

        def solve(values: Array, state: Any, num_steps: Any, _: Any) -> tuple[Array, Any, StepInfo]:
            return values, *programs.solve(reading.data, hyper, state, num_steps)

        problem = self._iterations(
            solve, space, digest, lambda hyper, value: explain(answers.form(reading.data, hyper), hyper, value)
        )
        found, info = fit_in_chunks(problem, values, state, before=before)
        diagnostics = found.diagnostics._replace(num_skipped=int(info.solved.num_refused))
        found = found._replace(diagnostics=diagnostics)
        return HybridRun(reading, space, found, rng_key, self.num_samples, answers, programs)

    def _start_noisy(self, model: NoisyModel, rng_key: Array, init_state: EngineState | None) -> NoiseRun:
        """The run of a model whose noise, cut points or priors of the sides are latent."""
        reading, space = model.reading, model.space
        digest = data_digest(reading.written_data, space.fixed, reading.key, self.noise, self.warm_up)
        values, before = space.initial(), 0
        hyper = space.unpack(values)
        if init_state is None:
            state = model.start(hyper, self.damping, rng_key)
        else:
            check_init_state(init_state, model.shapes(), space.size)
            state, before = init_state.state, init_state.num_steps if init_state.data_digest == digest else 0

        def solve(values: Array, state: Any, num_steps: Any, _: Any) -> tuple[Array, Any, StepInfo]:
            pace = self.damping, self.warm_up, self._tolerance(), RATINGS_CHUNK
            return values, *model.solve(state, num_steps, *pace)

        def explain_unstable(_: object, value: float) -> str:
            return _UNSTABLE.format(value)

        problem = self._iterations(solve, space, digest, explain_unstable, of="a mean", chunk=RATINGS_CHUNK)
        found, info = fit_in_chunks(problem, values, state, before=before)
        number, last = int(info.solved.num_refused), found.last_state
        points = space.pack(model.points(last.state.messages))
        found = found._replace(
            last_state=last._replace(values=points),
            hyper=space.unpack(points),
            diagnostics=found.diagnostics._replace(num_skipped=number),
        )
        return NoiseRun(reading, space, found, rng_key, self.num_samples, model.answers, model)

    def _iterations(
        self,
        solve: Any,
        space: UnconstrainedSpace,
        digest: str,
        explain: Any,
        *,
        of: str = "the mean of a predictor",
        chunk: int = _CHUNK,
    ) -> Iterations:
        return Iterations(
            solve=solve,
            space=space,
            parts=lambda state: Parts((), (), ()),
            with_parts=lambda state, free, others: state,
            digest=digest,
            tol=self._tolerance(),
            gain=0.0,
            rounding=0.0,
            change=f"The largest change of {of}, in standard deviations and without damping,",
            explain=explain,
            num_steps=self.num_steps,
            chunk=chunk,
            name=type(self).__name__,
            unit="steps",
            show_bar=self.progress_bar,
        )

    def _prepare(
        self, rng_key: Array, args: tuple[object, ...], kwargs: Mapping[str, object], *, check: bool = True
    ) -> tuple[BilinearReading, UnconstrainedSpace, HybridPrograms | NoisyModel, BilinearPrograms]:
        reading = read_bilinear(
            self.model,
            args,
            kwargs,
            by_component=True,
            takes_any_factor=True,
            field=self.field,
            init_values=self._start_values,
            held=self.hyper_values,
            learns_hyper=False,
            rng_key=rng_key,
            check=check,
        )
        space = UnconstrainedSpace(reading.hyper, self.hyper_values)
        kinds: dict[bool, core.Family] = {True: "component", False: "diagonal"}
        families = kinds[reading.is_coupled[0]], kinds[reading.is_coupled[1]]
        answers = bilinear_programs(reading, space, families, self._tolerance())
        if space.size:
            return reading, space, self._noisy(reading, space, answers), answers
        form = answers.form(reading.data, space.unpack(space.initial()))
        _check_form(form, reading)
        is_weighted = bool(np.any(np.asarray(form.weight) != 1.0))
        programs = shared(HybridPrograms, reading, space, self._tolerance(), self.damping, is_weighted)
        return reading, space, programs, answers

    def _noisy(self, reading: BilinearReading, space: UnconstrainedSpace, answers: BilinearPrograms) -> NoisyModel:
        try:
            return NoisyModel(reading, space, answers, self.noise)
        except ModelStructureError as refusal:
            raise ModelStructureError(
                f"BilinearEP does not learn hyperparameters, as its log evidence is no bound: give values of "
                f"{list(space.names)} (hyper_values={{{space.names[0]!r}: ...}}), such as those that BilinearVG "
                f"learns. Of some it has posteriors, but {refusal}",
                site=refusal.site,
            ) from refusal

    def _tolerance(self) -> float:
        return default_tolerance(self.tol, 1e-4, 1e-3)

    # Persistence

    def _restore(
        self, content: dict[str, object], rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> BilinearRun:
        reading, space, programs, answers = self._prepare(rng_key, args, kwargs, check=False)
        if isinstance(programs, NoisyModel):
            found = fit_from_content(content, reading, space, lambda data, hyper: programs.shapes())
            return NoiseRun(reading, space, found, rng_key, self.num_samples, answers, programs)
        result = fit_from_content(content, reading, space, programs.init_state)
        return HybridRun(reading, space, result, rng_key, self.num_samples, answers, programs)


def _check_form(form: Bilinear, reading: BilinearReading) -> None:
    """Refuse what the messages have no room for."""
    if not form.is_paired:
        raise ValueError(
            f"BilinearEP takes products of single components, sum_d u[d] v[d], and that of {list(reading.sides[0])} "
            f"with {list(reading.sides[1])} has a matrix between them: multiply one side by it in the model, or take "
            "BilinearVG."
        )
    for names, side in zip(reading.sides, (form.rows, form.columns), strict=True):
        if isinstance(side, GaussianSide) and side.precision.ndim == 3:
            raise ValueError(
                f"The components of each vector of {list(names)} are correlated by the prior, and BilinearEP takes "
                "independent ones: take BilinearVG(covariance='full')."
            )
