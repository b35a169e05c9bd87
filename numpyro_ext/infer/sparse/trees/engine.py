"""Expectation propagation on sparse linear models, and mixtures of it over arguments of the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.store import shared
from ....linalg.cholesky import LARGEST_DENSE
from ....linalg.solvers.posterior_precision import has_diagonal_gram
from ....potentials.trees.chunks import ForestCosts
from ....structure import ModelStructureError, SparseLinearReading, read_sparse_linear
from ...front.files.content import Content
from ...front.files.saved_runs import diagnostics_from_content, errors_from_content, state_from_content
from ...front.options import default_tolerance
from ...front.results import Diagnostics, at_values
from ...front.running.learning import Learned
from ...front.state import NO_ERRORS, EngineState, Fit, check_init_state, data_digest
from ...hyper.evaluation import Evaluation
from ...hyper.space import UnconstrainedSpace
from ..programs import compiled_form
from ..run import Member
from .mixtures import Pooling, TreeMember, TreeRun
from .programs import Searched, TreeOptions, TreePrograms
from .search import LARGEST_CURVATURE, TreeSearch


@dataclass(frozen=True)
class TreeFitter:
    r"""Expectation propagation in which the prior of all coefficients is one factor: what :class:`EP` runs on them.

    Takes sparse linear models (:class:`~numpyro_ext.distributions.HiddenMarkovTree`, Laplace, Student-t or Normal
    coefficients behind a linear map, Gaussian noise). Where the map has orthogonal columns in the metric of the noise,
    as orthonormal transforms have, one sum-product gives the exact posterior and the exact log evidence; images of
    256 x 256 pixels take seconds. Other maps of at most 2048 coefficients are iterated with damping, and the moments
    are those of the Gaussian at the fixed point. Hyperparameters are set to the maximum of log evidence plus log prior
    by L-BFGS, in units of about their standard errors; more than 20 of them with more than 65536 coefficients on
    samples of the trees first, and in units of where the search has come to.

    With ``num_shifts`` or ``average_over`` the posterior is the mixture, with equal weights, of the posteriors under
    all combinations of these arguments of the model, or their average (over shifts: Coifman and Donoho 1995).
    Hyperparameters are learned once for each combination without shift, or from the average of the log evidences under
    ``num_learning_shifts`` of the shifts, the first of them none: one basis is a small sample of what edges do to its
    coefficients. ``log_evidence`` is the log of the average evidence; that of each member is in ``members``. Of the
    sites only deterministic ones are reported, as the coefficients of different bases are different quantities.

    A mixture is what is known if one of its members is right and nobody knows which. The mean of all is a better
    picture than any member, and the bands of the mixture are too wide for it: those of 80 % held 88 to 91 % of the
    pixels of three photographs. ``pooling="average"`` gives the same mean the variance of its own error, which is that
    within members *less* that between them (Krogh and Vedelsby 1995): there they held 80 to 83 %, and of few photons
    too little, because members think themselves better than they are. ``pooling="risk"`` asks the data: Stein's (1981)
    estimate of the squared error of the mean needs no truth, and chooses between the variances of average and mixture
    as far as its standard error allows; ``engine.posterior[site].risk`` is what it found. It needs noise that is known
    (``.with_noise_variance`` where it is known to be another than the model's), and an observation of every element of
    the site. Either way draws and quantiles are those of the mixture, scaled about the mean by one factor for each
    site: medians lie nearer to the mean than those of the mixture.

    All options are those of :class:`EP`, but for these:

    :param float damping: least fraction of the old sites that is kept in a step.
    :param float hyper_tol: the search ends when no hyperparameter has a derivative above this, per about one standard
        error; by default ``1e-2`` in float64 and ``1e-1`` in float32, and 0.5 for more than 20 of them.
    :param int num_samples: draws made for samples, for quantiles, and for variances of sites other than coefficients
        where there are more than 2048 of these.
    """

    model: Callable[..., Any]
    num_steps: int
    tol: float | None
    damping: float
    field: Sequence[str] | None
    hyper_values: Mapping[str, Any]
    init_values: Mapping[str, Any]
    hyper_tol: float | None
    max_hyper_steps: int
    num_shifts: int | None
    num_learning_shifts: int
    average_over: Mapping[str, Sequence[Any]]
    pooling: Pooling
    num_samples: int
    progress_bar: bool
    _forest_costs: ForestCosts

    def run(
        self,
        rng_key: Array,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        init_state: EngineState | None = None,
        *,
        reading: SparseLinearReading | None = None,
    ) -> TreeRun:
        """Learn the hyperparameters of a model on these arguments and find the posterior.

        :param rng_key: random number generator key, for the check of the reading, the shifts and the draws.
        :param EngineState init_state: ``last_state`` of an earlier run, where the search starts.
        :param reading: of the model on these arguments, where nothing is averaged over.
        :raises ModelStructureError: if the model is not of the form, or has too many coefficients for its operator.
        :raises ValueError: if the evidence is not finite, or an argument is given and averaged over.
        """
        twice = [name for name in self._averaged() if name in kwargs]
        if twice:
            raise ValueError(f"{twice[0]!r} is averaged over, so it cannot be an argument of run as well.")
        names = list(self.average_over)
        learned: list[TreeMember] = []
        members: list[TreeMember] = []
        for values in itertools.product(*self.average_over.values()):
            choice = dict(zip(names, values, strict=True))
            # A shift of zero makes a model of the same structure as all others: they share compiled functions.
            first = {**kwargs, **choice, **({} if self.num_shifts is None else {"shift": self._no_shift(args, kwargs)})}
            if reading is None or self._averaged():
                reading = self._read(rng_key, args, first)
            space = UnconstrainedSpace(reading.hyper, self.hyper_values)
            options = self._options(reading, space)
            others = self._others(rng_key, reading, options, args, first)
            member = self._fit(rng_key, reading, space, options, choice, init_state, others)
            learned.append(member)
            if self.num_shifts is None:
                members.append(member)
                continue
            for shift in self._shifts(rng_key, member.reading, first["shift"].size):
                # The posterior of a shifted model at the hyperparameters that were learned without shift.
                given = member.reading.field, member.fit.hyper
                moved = self._read(rng_key, args, first | {"shift": shift}, *given, check=False)
                space = UnconstrainedSpace(moved.hyper, member.fit.hyper)
                options = member.programs.options
                members.append(self._fit(rng_key, moved, space, options, choice | {"shift": shift}))
        return self._finished(members, learned, rng_key)

    def _read(
        self,
        rng_key: Array,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        field: Sequence[str] | None = None,
        values: Mapping[str, object] | None = None,
        *,
        check: bool = True,
    ) -> SparseLinearReading:
        field = self.field if field is None else field
        values = {**self.init_values, **self.hyper_values} if values is None else values
        return read_sparse_linear(
            self.model, args, kwargs, field=field, init_values=values, rng_key=rng_key, check=check
        )

    def _finished(self, members: Sequence[TreeMember], learned: Sequence[TreeMember], rng_key: Array) -> TreeRun:
        averages = [f"{name}: {', '.join(map(str, values))}" for name, values in self.average_over.items()]
        averages += [] if self.num_shifts is None else [f"{self.num_shifts} shifts"]
        return TreeRun(members, learned, averages, rng_key, self.num_samples, self.pooling)

    def _averaged(self) -> list[str]:
        return [*self.average_over, *(() if self.num_shifts is None else ("shift",))]

    def _no_shift(self, args: tuple[object, ...], kwargs: dict[str, Any]) -> Array:
        """Zeros, one per axis of the first argument of the model that is an array."""
        for value in (*args, *kwargs.values()):
            if np.ndim(value) > 0:
                return jnp.zeros((np.ndim(value),), jnp.int32)
        raise ValueError("num_shifts needs an image or signal: no argument of the model is an array.")

    def _shifts(self, rng_key: Array, reading: SparseLinearReading, num_axes: int) -> Array:
        """Random shifts of all sizes; the first deterministic site with as many axes says how far they go."""
        shapes = [tuple(reading.site_shapes[n]) for n in reading.affine_sites if n not in reading.field]
        sides = next((s for s in shapes if len(s) == num_axes), None)
        if sides is None:
            raise ModelStructureError(
                f"num_shifts: the model has no deterministic site with {num_axes} axes that is linear in the "
                'coefficients. Mark the image with numpyro.deterministic("image", ...).'
            )
        assert self.num_shifts is not None
        key = jax.random.fold_in(rng_key, 2)
        return jax.random.randint(key, (self.num_shifts, num_axes), 0, jnp.asarray(sides), jnp.int32)

    def _others(
        self,
        rng_key: Array,
        reading: SparseLinearReading,
        options: TreeOptions,
        args: tuple[object, ...],
        kwargs: dict[str, Any],
    ) -> list[SparseLinearReading]:
        """The shifted models from which hyperparameters are learned, but for the first."""
        if self.num_learning_shifts == 1:
            return []
        if not options.is_exact:
            raise ModelStructureError(
                "num_learning_shifts is for transforms with orthogonal columns, under which the posterior is exact; "
                f"those of {list(reading.field)} are not, or depend on hyperparameters."
            )
        shifts = self._shifts(rng_key, reading, kwargs["shift"].size)[: self.num_learning_shifts - 1]
        return [self._read(rng_key, args, kwargs | {"shift": shift}, reading.field, check=False) for shift in shifts]

    def _fit(
        self,
        rng_key: Array,
        reading: SparseLinearReading,
        space: UnconstrainedSpace,
        options: TreeOptions,
        choice: dict[str, object],
        init_state: EngineState | None = None,
        others: Sequence[SparseLinearReading] = (),
    ) -> TreeMember:
        """Learn the hyperparameters of a model, find its posterior, and describe how the fit ended.

        :param others: readings of the same structure; hyperparameters are learned from all.

        :raises ValueError: if the log evidence is not finite, or ``init_state`` is of another model.
        """
        programs, values = shared(TreePrograms, reading, space, options), space.initial(self.init_values)
        data, fixed, hyper = reading.data, space.fixed, space.unpack(values)
        projection = programs.project(data, hyper)
        if init_state is None:
            state = programs.init_state(data, hyper)
        else:
            check_init_state(init_state, jax.eval_shape(programs.init_state, data, hyper), space.size)
            values, state = init_state.values, init_state.state
        covariance, has_error = None, NO_ERRORS
        found: Learned | None = None
        at = Searched(data, fixed, projection, values, jnp.ones_like(values))
        if space.size:
            found, at = self._learn(rng_key, programs, at, space, state, others, is_resumed=init_state is not None)
            best = found.search.best
            if others:
                best = programs.evaluate(at._replace(others=None), found.search.values, best.state)
            values = at.origin + at.units * found.search.values
            if found.curvature is not None:
                scale = np.asarray(at.units)
                covariance, has_error = scale[:, None] * found.curvature.covariance * scale, found.curvature.has_error
        else:
            best = programs.evaluate(at, jnp.zeros_like(values), state)
        hyper, info = space.unpack(values), best.info
        if not np.isfinite(float(best.log_evidence)):
            raise _not_finite(hyper)
        has_learned = found is None or (found.diagnostics.converged and not found.is_interrupted)
        diagnostics = Diagnostics(
            converged=bool(info.converged) and has_learned,
            num_steps=int(info.num_steps),
            objective_trace=np.asarray(best.log_evidence).reshape(1),
            max_change=float(info.max_change),
            num_skipped=0,
            skipped={},
            hyper=None if found is None else found.diagnostics,
            messages=_messages(found, best, options),
            edges=() if found is None else found.edges,
        )
        last = EngineState(
            values, best.state, None, int(info.num_steps), data_digest(reading.written_data, fixed, reading.key)
        )
        fit = Fit(last, hyper, covariance, has_error, float(best.log_evidence), diagnostics)
        return Member(choice, reading, space, programs, projection, fit)

    def _learn(
        self,
        rng_key: Array,
        programs: TreePrograms,
        at: Searched,
        space: UnconstrainedSpace,
        state: object,
        others: Sequence[SparseLinearReading],
        *,
        is_resumed: bool,
    ) -> tuple[Learned, Searched]:
        """The search for hyperparameters, and the coordinates in which it ended.

        :param Searched at: coordinates in which it begins, at the origin.
        :param state: of the algorithm there.
        :param others: further readings that hyperparameters are learned from.
        """
        if others:
            hyper = space.unpack(at.origin)
            pairs = [(other.data, programs.project(other.data, hyper)) for other in others]
            at = at._replace(others=jax.tree.map(lambda *parts: jnp.stack(parts), *pairs))
        most, bar = self.max_hyper_steps, self.progress_bar
        search = TreeSearch(programs, at, space, state, max_steps=most, progress_bar=bar)
        found = search.run(rng_key, is_resumed=is_resumed)
        if found is None:
            raise _not_finite(space.unpack(at.origin, space.fixed))
        return found, search.at

    def _options(self, reading: SparseLinearReading, space: UnconstrainedSpace) -> TreeOptions:
        """Static choices: whether the likelihood is a product over coefficients, whatever the hyperparameters."""
        if reading.is_analysis:
            raise ModelStructureError(
                f"EP takes priors of the coefficients themselves; that of {reading.field[0]!r} is one of coefficients "
                "in a frame. Use StructuredMeanField, or one basis."
            )
        learned_noise = sorted(set(reading.noise_hyper()) & set(space.names))
        if self.pooling == "risk" and learned_noise:
            raise ModelStructureError(
                f"pooling='risk' compares means with data, whose noise must be known, and {learned_noise[0]!r} is "
                "learned. Give it (an argument of the model, or hyper_values), or ask for pooling='average'."
            )
        form = compiled_form(reading)(space.unpack(space.initial()), reading.data)
        is_exact = has_diagonal_gram(form.operator, form.noise_variance)
        why = "are not orthogonal"
        if is_exact and space.size:
            is_noise_fixed = not set(reading.noise_hyper()) & set(space.names)
            is_exact = reading.is_design_fixed and (jnp.ndim(form.noise_variance) == 0 or is_noise_fixed)
            why = "depend on hyperparameters, or have several noise levels that do"
        if is_exact:
            sizes = jnp.square(form.operator.rmatvec(form.operator.matvec(jnp.ones((form.num_columns,)))))
            is_exact = bool(jnp.all(sizes > 0.0))
            why = "are zero for some coefficients"
        if not is_exact and reading.num_columns > LARGEST_DENSE:
            raise ModelStructureError(
                f"EP with dense matrices takes up to {LARGEST_DENSE} coefficients, and {list(reading.field)} has "
                f"{reading.num_columns}, behind an operator whose columns {why}. Use StructuredMeanField, which only "
                "multiplies with the operator."
            )
        # Many parameters are hardly determined by the data: to follow their ridges further changes no answer.
        is_large = space.size > LARGEST_CURVATURE
        return TreeOptions(
            is_exact=is_exact,
            num_steps=self.num_steps,
            tol=default_tolerance(self.tol, 1e-8, 1e-4),
            damping=self.damping,
            hyper_tol=default_tolerance(self.hyper_tol, *((0.5, 0.5) if is_large else (1e-2, 1e-1))),
            costs=self._forest_costs,
        )

    def restore(
        self, content: dict[str, Any], rng_key: Array, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> TreeRun:
        """The run from the ``"tree"`` of :meth:`TreeRun.content`."""
        learned, members = [], []
        for part in content["learned"]:
            reading = self._read(rng_key, args, {**kwargs, **part["arguments"]}, check=False)
            space = UnconstrainedSpace(reading.hyper, self.hyper_values)
            learned.append(self._restored(part, reading, space, self._options(reading, space)))
        for number, part in enumerate(content["shifted"]):
            # The shifted ones of the first choice of arguments come first.
            origin = learned[number * len(learned) // len(content["shifted"])]
            reading = self._read(rng_key, args, {**kwargs, **part["arguments"]}, origin.reading.field, check=False)
            space = UnconstrainedSpace(reading.hyper, origin.fit.hyper)
            members.append(self._restored(part, reading, space, origin.programs.options))
        return self._finished(members or learned, learned, rng_key)

    def _restored(
        self, content: Content, reading: SparseLinearReading, space: UnconstrainedSpace, options: TreeOptions
    ) -> TreeMember:
        """A member from its :meth:`Member.content`.

        :raises ValueError: if the model is not the one that was run.
        """
        programs, data, fixed = shared(TreePrograms, reading, space, options), reading.data, space.fixed
        values, state = state_from_content(content, reading, space, programs.init_state)
        hyper = space.unpack(values)
        projection = programs.project(data, hyper)
        at = Searched(data, fixed, projection, values, jnp.ones_like(values))
        found = float(programs.evaluate(at, jnp.zeros_like(values), state).log_evidence)
        if not np.isclose(found, content["log_evidence"], rtol=1e-4):
            raise ValueError("On the saved arguments this model has another density than the one that was run.")
        diagnostics = diagnostics_from_content(content)
        last = EngineState(
            values, state, None, diagnostics.num_steps, data_digest(reading.written_data, fixed, reading.key)
        )
        fit = Fit(
            last, hyper, content["covariance"], errors_from_content(content), content["log_evidence"], diagnostics
        )
        return Member(dict(content["arguments"]), reading, space, programs, projection, fit)


def _messages(found: Learned | None, last: Evaluation, options: TreeOptions) -> tuple[str, ...]:
    """Messages on the ends of a search for hyperparameters and of the last fit."""
    messages, info = [] if found is None else list(found.messages), last.info
    if found is not None:
        learning = found.diagnostics
        if not learning.converged and learning.max_gradient > options.hyper_tol:
            messages.append(
                f"The hyperparameters did not converge in {learning.num_iterations} steps: the largest derivative "
                f"is {learning.max_gradient:.2g} per standard error, the tolerance {options.hyper_tol:.2g}. Give "
                "more steps (max_hyper_steps)."
            )
    if not bool(info.converged):
        messages.append(
            f"Expectation propagation did not converge in {int(info.num_steps)} steps: moments disagree by "
            f"{float(info.max_change):.2g}, the tolerance is {options.tol:.2g}. Give more steps "
            "(num_steps) or damping, or use StructuredMeanField."
        )
    return tuple(messages)


def _not_finite(hyper: dict[str, Array]) -> ValueError:
    return ValueError(
        f"The log evidence is not finite{at_values(hyper)}: scales of prior or noise may be zero or not finite. Give "
        "other starting values (init_values), or use float64 (numpyro.enable_x64())."
    )
