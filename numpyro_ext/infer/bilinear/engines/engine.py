"""Bilinear models of counts as an inference engine for NumPyro models."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....structure.bilinear.factors import Unlisted
from ....structure.bilinear.noisy.normal import NormalNoise
from ....structure.bilinear.noisy.priors import GAMMA_FAMILIES
from ....structure.bilinear.read import read_bilinear
from ....structure.bilinear.reading import BilinearReading
from ...front.files.checkpoints import read_checkpoint, write_checkpoint
from ...front.files.saved_runs import fit_from_content
from ...front.labels import Labels
from ...front.options import (
    EngineOptions,
    check_at_least,
    check_one_of,
    check_positive,
    default_tolerance,
    device_tuple,
    plain_number,
)
from ...front.running.iterations import Iterations, judge
from ...front.state import EngineState, check_init_state, data_digest
from ...hyper.space import UnconstrainedSpace
from ..algorithms import sweeps as core
from ..algorithms.quadratic import Bound, Update
from ..algorithms.selection import SelectionRule
from ..answers import BilinearAnswers
from ..closed import MAX_CELLS, ClosedChoice, Solver, Zeros, check_together, has_closed_rule
from ..marginals.pairs import state_at
from ..programs import CHUNK, BilinearPrograms, bilinear_programs, explain, noise_of, parts, with_parts
from ..runs.run import BilinearRun
from ..sampling import Scheme, fit_sampled
from .families import Covariance, check_coupled, check_points, named_by_component, side_families
from .restarts import MOST_CELLS_RESTARTED, NUM_RESTARTS, ONE_START, best_of_starts

_ROUNDING = 1e3
"""Errors of the objective, in units of the last place."""


class BilinearVG(BilinearAnswers):
    r"""Gaussian posteriors for both blocks of a bilinear model of counts (Ko and Khan 2014; Ko 2017, section 3.1).

    For Poisson counts with the rate :math:`e^{\eta}` and a predictor that is affine in each of two Gaussian blocks
    given the other, such as Poisson factorisation with biases and side features. The posterior is a product over the
    vectors of both sides (rows and columns); the expected rates, and with them a lower bound of the log evidence, have
    closed forms. Each sweep moves all vectors of one side, then of the other, and never lowers the objective.

    Also for Poisson counts with a softplus rate, negative binomial counts, Bernoulli and binomial outcomes (logits, or
    probit) and ordered categories, whose log factors are concave. Their expectations are integrals over the
    distribution of the predictor of each cell, one-dimensional for vectors of any length and exact up to quadrature (a
    relative error of about ``1e-12``, in float32 ``1e-5``), at tens of microseconds per cell and pass.

    ``covariance`` chooses the family of each side. Gaussians on both sides make ``log_evidence`` a lower bound; points
    on both are the maximum a posteriori, and points on one side EM, whose objective, a log density at the points, is
    reported but is no bound. Hyperparameters (scales, an intercept, hierarchical means) are learned by raising the
    objective plus their log prior; a scale that goes to zero prunes its components. Noise variances of Normal
    observations with inverse gamma priors, or precisions with gamma priors, are no hyperparameters: one of each row,
    column or other group of cells, whose products are the variances of cells, have inverse gamma (or gamma) posteriors
    in :attr:`posterior`, by variational Bayes (Houlsby 2014, section 7.4.1).

    The objective has several maxima: ``num_restarts`` runs from further random starts keep the best, and
    ``diagnostics.messages`` says between which objectives they ended, or that there was one start by default. (Single
    runs from six keys on 659 cells, all of them converged, ended up to five nats apart.)

    A run that has converged is judged: iterations from beside its end show a saddle, which is left, and hyperparameters
    that end at the edge of their support, that run away, or on which the bound depends in steps are named.

    With ``devices`` the rows and their cells are divided between these, and the columns are on all. Under
    ``jax.distributed`` every process makes the same calls with the same arguments and ``devices=jax.devices()``, and
    has the whole result; only process 0 writes checkpoints, to a path that all can read. Each process reads the whole
    data on its host, and a predictor with hyperparameters to learn is evaluated for all cells on every device; a
    device keeps no other cells than its own otherwise.

    For data beyond memory, or rows that only their process has: :func:`~numpyro_ext.infer.fit_batches`.

    **Example:**

    .. code-block:: python

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import BilinearVG

        >>> def model(rows, cols, counts=None):
        ...     with numpyro.plate("row", 3):
        ...         w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        ...     with numpyro.plate("col", 2):
        ...         z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        ...     numpyro.sample("counts", dist.Poisson(jnp.exp((w[rows] * z[cols]).sum(-1))), obs=counts)

        >>> rows, cols = jnp.array([0, 0, 1, 2, 2]), jnp.array([0, 1, 0, 0, 1])
        >>> engine = BilinearVG(model, covariance="full", progress_bar=False)
        >>> engine.run(jax.random.key(0), rows, cols, jnp.array([9, 0, 6, 11, 1]))
        >>> bool(engine.log_evidence.is_lower_bound), engine.posterior["w"].mean.shape
        (True, (3, 1))

    :param model: a NumPyro model.
    :param covariance: ``"diagonal"``, ``"full"``, ``"component"`` or ``"point"``, or a dictionary from the name of a
        site, or of a plate with sites, to one of them, which holds for its side; sides that are not named are diagonal.
        Where cells touch several vectors of a side, as in ``w[u] @ (h[a] - h[b])``, or a Gaussian process correlates
        these, ``"component"`` keeps one Gaussian over all vectors for each component, at a cost of their number cubed
        (elsewhere it is the same as ``"diagonal"``); to the other families such a side is one vector, for small
        problems.
    :param int num_steps: sweeps at most.
    :param float tol: relative change of the objective at which a run has converged, by default ``1e-6`` in float64 and
        ``1e-5`` in float32.
    :param int num_restarts: further runs from other random starts; by default three up to 20,000 cells, where these
        take less time than compilation, and none beyond, with a checkpoint or with ``init_state``.
    :param str solver: how a sweep moves the vectors of one side: ``"natural-gradient"``, one step each, or
        ``"lbfgs"``, five iterations of L-BFGS each, as in the papers, which end at the same optima.
    :param str bound: ``"exact"`` expectations, or a quadratic bound of logistic factors, ``"jaakkola"`` or
        ``"bohning"``: then every vector moves to its optimum at once, at a cost per cell and sweep a hundred times
        lower, and the evidence is bounded from further below. The expectations of Normal observations are quadratic
        anyway. With either, Gaussian sites that all cells see, such as an intercept, have a posterior, in
        :attr:`posterior`; with other likelihoods they are hyperparameters.
    :param str update: of vectors with independent components where updates are closed: ``"joint"`` (all components of
        a vector at once), ``"bulk"`` (biases, then the others) or ``"coordinate"`` (one after the other).
    :param str unlisted_cells: ``"missing"``, or ``"zero"``: then all pairs of a row and a column that the model does
        not list are counts of zero, of which the model itself knows nothing (NUTS on it sees the listed ones). For
        Poisson counts with a softplus rate, by a quadratic bound (Seeger and Bouchard 2012) at a cost that does not
        depend on the number of zeros. The density of a draw in :meth:`get_samples` is exact, and visits all of them.
        With ``bound="jaakkola"`` also for Bernoulli outcomes, of which then the ones suffice.
    :param str zeros: tangents of the bound of unlisted Bernoulli zeros: ``"by_row"`` (one for each row, at the cost of
        the listed cells), ``"shared"`` (one for all rows) or ``"exact"`` (one for each zero, at the cost of all pairs).
        ``"sampled"`` draws cells with known probabilities in the place of sweeps, each with its own tangent (Houlsby
        2014, chapter 5), at a cost of the draws alone; hyperparameters must be given. Its trace has unbiased estimates
        of the bound, and it has converged once these changed by less than ``tol`` (by default ``1e-3``), with
        twice the standard error, while the number of minibatches doubled. With ``devices`` each draws the cells of its
        own rows, as many as one device would draw of these.
    :param str sampler: probabilities of ``zeros="sampled"``: ``"uniform"``, ``"balanced"`` (ones and zeros alike) or
        ``"biased"`` (zeros of rows and columns with many ones); see :class:`~numpyro_ext.infer.CellSampler`.
    :param batch_size: cells of a minibatch, of which ``num_steps`` are made at most. ``"auto"`` finds
        a size from the moments of the draws, at which the estimates of a vector have errors of about their own size in
        the mean, from one to twenty cells for each vector of the longer side. Small minibatches are noisy at first.
    :param int max_cells: pairs of a row and a column up to which ``zeros="exact"`` is taken, and up to which the
        evidence of ``zeros="sampled"`` has a tangent for each zero, beyond one for each row.
    :param str selection: of rows and columns in the pairs that :class:`~numpyro_ext.distributions.CensoredPairs` does
        not show: ``"learned"`` with all else, or ``"constant"``, which does not look at the vectors, so that rare ones
        are not pruned; the bound may then fall. Such pairs need ``bound="jaakkola"``.
    :param devices: between which sweeps divide the rows, such as ``jax.devices()``; by default JAX's default device.
        Not kept by :meth:`save`.
    :param options: those of every engine, see :class:`~numpyro_ext.infer.front.engine.BaseEngine`: ``field`` (the sites
        of both sides), ``hyper_values``, ``init_values``, ``num_samples`` and ``progress_bar``.
    :raises ValueError: if a covariance is unknown, or no device belongs to this process. :meth:`run` also raises it if
        scales of point estimates would have to be learned.
    """

    def __init__(
        self,
        model: Callable[..., object],
        *,
        covariance: Covariance = "diagonal",
        num_steps: int = 1000,
        tol: float | None = None,
        num_restarts: int | None = None,
        solver: Solver = "natural-gradient",
        bound: Bound = "exact",
        update: Update = "joint",
        unlisted_cells: Unlisted = "missing",
        zeros: Zeros = "by_row",
        sampler: Scheme = "balanced",
        batch_size: int | Literal["auto"] = "auto",
        max_cells: int = MAX_CELLS,
        selection: SelectionRule = "learned",
        devices: Sequence[jax.Device] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(model, **options)
        check_at_least(1, num_steps=num_steps)
        check_at_least(0, num_restarts=0 if num_restarts is None else num_restarts)
        check_positive(tol=tol)
        for family in covariance.values() if isinstance(covariance, Mapping) else [covariance]:
            check_one_of(core.Family, covariance=family)
        self.covariance = dict(covariance) if isinstance(covariance, Mapping) else covariance
        self.num_steps, self.tol, self.num_restarts = num_steps, tol, num_restarts
        check_one_of(Solver, solver=solver)
        check_one_of(Unlisted, unlisted_cells=unlisted_cells)
        self.solver: Solver = solver
        self.unlisted_cells: Unlisted = unlisted_cells
        self.devices = device_tuple(devices)
        check_one_of(Bound, bound=bound)
        check_one_of(Update, update=update)
        check_one_of(Zeros, zeros=zeros)
        check_one_of(Scheme, sampler=sampler)
        check_at_least(1, max_cells=max_cells, batch_size=1 if batch_size == "auto" else batch_size)
        check_one_of(SelectionRule, selection=selection)
        check_together(bound, zeros, update, unlisted_cells, solver, self.devices, bool(num_restarts))
        self.bound, self.update, self.zeros, self.max_cells = bound, update, zeros, max_cells
        self.batch_size, self._scheme = batch_size, sampler
        self.selection: SelectionRule = selection

    # Running

    writes_checkpoints = True
    _most_cells_restarted = MOST_CELLS_RESTARTED

    def start(self, *args: object, values: Mapping[str, object], **kwargs: object) -> EngineState:
        """State at stated moments, from which :meth:`run` starts if it is given as ``init_state``.

        :param args: arguments of the model.
        :param values: ``(mean, variance)`` by the names of sites of the two sides, each of the shape of the site or one
            that broadcasts to it. For the probabilities of selection of censored pairs the shares of rows, or of
            columns, in what is censored; for ``"tangent"`` the size of the predictor at which the bounds of pairs that
            are not listed touch. What is not named starts as it does by default.
        :param kwargs: keyword arguments of the model.
        :return: the state.
        :raises ValueError: if there is no such site, or shapes or values do not fit.
        """
        key = jax.random.key(0)
        reading, space, programs, _ = self._prepare(key, args, kwargs)
        first = self._first_values(reading, space)
        hyper = space.unpack(first)
        form = programs.form(reading.data, hyper)
        state = programs.init_state(reading.data, hyper, key)
        return EngineState(first, state_at(reading, form, (form.rows, form.columns), state, values), None, 0, "")

    def _start(
        self,
        rng_key: Array,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        init_state: EngineState | None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> BilinearRun:
        reading, space, programs, noise = self._prepare(rng_key, args, kwargs)
        check_points(reading, space, self._families(reading))
        digest = data_digest(reading.written_data, space.fixed, reading.key)
        if self.zeros == "sampled":
            if checkpoint is not None:
                raise ValueError("zeros='sampled' writes no checkpoint: go on with init_state=engine.last_state.")
            fit = fit_sampled(
                reading,
                space,
                programs,
                rng_key,
                init_state,
                digest=digest,
                scheme=self._scheme,
                batch_size=None if self.batch_size == "auto" else int(self.batch_size),
                num_steps=self.num_steps,
                tol=1e-3 if self.tol is None else self.tol,
                show_bar=self.progress_bar,
            )
            return BilinearRun(reading, space, fit, rng_key, self.num_samples, programs)
        starts: list[tuple[Array, core.State, int]] = []
        resumed: EngineState | None = None
        if checkpoint is not None or init_state is not None:  # shapes take a trace
            shapes = jax.eval_shape(programs.init_state, reading.data, space.unpack(space.initial()))
        if checkpoint is not None:
            if self.num_restarts:
                raise ValueError("A run with restarts has no checkpoint: give num_restarts=0.")
            resumed = read_checkpoint(checkpoint, shapes, digest)
            init_state = resumed or init_state
        notes: tuple[str, ...] = ()
        if init_state is not None:
            check_init_state(init_state, shapes, space.size)
            before = init_state.num_steps if init_state.data_digest == digest else 0
            starts.append((init_state.values, init_state.state, before))
        else:
            values, num_restarts = self._first_values(reading, space), self._num_restarts(reading, checkpoint)
            if self.num_restarts is None and not num_restarts:
                notes = (ONE_START,)
            for number in range(1 + num_restarts):
                key = jax.random.fold_in(rng_key, number)
                starts.append((values, programs.init_state(reading.data, space.unpack(values), key), 0))
        tol, first_arguments = self._tolerance(), programs.prepare(reading.data, space.fixed, starts[0][0], noise)
        problem = Iterations(
            solve=lambda *arguments: programs.solve(*first_arguments, *arguments),
            space=space,
            parts=parts,
            with_parts=with_parts,
            digest=digest,
            tol=tol,
            gain=tol,
            rounding=_ROUNDING * float(jnp.finfo(starts[0][0].dtype).eps),
            change="The relative change of the objective",
            explain=lambda hyper, value: explain(programs.form(reading.data, hyper), hyper, value),
            num_steps=self.num_steps,
            chunk=CHUNK,
            name=type(self).__name__,
            unit="sweeps",
            show_bar=self.progress_bar,
            most_escapes=self._most_escapes,
            put=programs.devices.put,
            get=programs.devices.get,
        )

        def keep(values: Array, state: core.State, done: int) -> None:
            reached = EngineState(*programs.devices.get(values, state), None, done, digest)
            if checkpoint is not None and jax.process_index() == 0:
                write_checkpoint(checkpoint, reached)

        best, info = best_of_starts(problem, starts, None if checkpoint is None else keep, goes_on=resumed is not None)
        best = judge(problem, best, info, rng_key)
        diagnostics = best.diagnostics._replace(messages=(*best.diagnostics.messages, *notes))
        best = best._replace(diagnostics=diagnostics)
        return BilinearRun(reading, space, best, rng_key, self.num_samples, programs, noise=noise)

    def _options_given(self) -> dict[str, Any]:
        # The attribute of that name is where ArviZ looks for the model.
        own = {"sampler": self._scheme}
        return {n: plain_number(own[n] if n in own else getattr(self, n)) for n in self._option_names()}

    def _keep(self, run: BilinearRun, labels: Labels | None = None) -> None:
        super()._keep(run, labels)
        run.check_widths()

    def _first_values(self, reading: BilinearReading, space: UnconstrainedSpace) -> Array:
        return space.initial({n: v for n, v in (self.init_values or {}).items() if n not in reading.common_sites})

    def _num_restarts(self, reading: BilinearReading, checkpoint: object) -> int:
        if self.num_restarts is not None:
            return self.num_restarts
        is_small = sum(cells.size for cells in reading.cells) <= self._most_cells_restarted
        return NUM_RESTARTS if is_small and checkpoint is None else 0

    def _read(
        self,
        rng_key: Array,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        *,
        check: bool = True,
        **options: object,
    ) -> BilinearReading:
        return read_bilinear(
            self.model,
            args,
            kwargs,
            unlisted_cells=self.unlisted_cells,
            by_component=named_by_component(self.covariance),
            takes_common=partial(has_closed_rule, bound=self.bound) if self._may_be_closed else None,
            given=tuple(self.hyper_values or {}),
            takes_pairs=self._may_be_closed,
            integrates=GAMMA_FAMILIES,
            field=self.field,
            init_values=self._start_values,
            held=self.hyper_values,
            rng_key=rng_key,
            check=check,
        )

    def _prepare(
        self, rng_key: Array, args: tuple[object, ...], kwargs: Mapping[str, object], **options: bool
    ) -> tuple[BilinearReading, UnconstrainedSpace, BilinearPrograms, NormalNoise]:
        reading = self._read(rng_key, args, kwargs, **options)
        # Common sites are no hyperparameters: zero stands for what the form does not ask for.
        common = {n: np.zeros(reading.hyper[n].shape) for n in reading.common_sites}
        space = UnconstrainedSpace(reading.hyper, {**(self.hyper_values or {}), **common})
        programs = self._programs(reading, space)
        return reading, space, programs, noise_of(reading, space, programs)

    @property
    def _may_be_closed(self) -> bool:
        return self.solver == "natural-gradient"

    def _programs(self, reading: BilinearReading, space: UnconstrainedSpace) -> BilinearPrograms:
        families, tol = self._families(reading), self._tolerance()
        is_plain = self._may_be_closed and self.devices is None and self.unlisted_cells == "missing"
        check_coupled(reading, is_plain)
        choice = None
        if self._may_be_closed:
            measures_draws = self.zeros == "sampled" and self.batch_size == "auto"
            choice = ClosedChoice(self.bound, self.update, self.zeros, self.max_cells, self.selection, measures_draws)
        return bilinear_programs(reading, space, families, tol, self.devices, self.solver, choice)

    def _tolerance(self) -> float:
        return default_tolerance(self.tol, 1e-6, 1e-5)

    def _families(self, reading: BilinearReading) -> tuple[core.Family, core.Family]:
        return side_families(self.covariance, reading)

    # Answers

    @property
    def distance_to_boundary(self) -> float:
        r"""One less the largest eigenvalue of :math:`\operatorname{Cov}(u) \operatorname{Cov}(v)` over all cells.

        Expected exponential rates grow without limit as it goes to zero; every accepted step keeps it positive. Other
        expectations always exist: then it is ``inf``.
        """
        run = self._finished()
        return 1.0 - run.widest_product if run.reading.has_boundary else np.inf

    # Persistence

    def _restore(
        self, content: dict[str, object], rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> BilinearRun:
        reading, space, programs, noise = self._prepare(rng_key, args, kwargs, check=False)
        result = fit_from_content(content, reading, space, programs.init_state)
        return BilinearRun(reading, space, result, rng_key, self.num_samples, programs, noise=noise)
