"""The compiled functions that a bilinear run is made of, shared by all runs of the same structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...compilation.quick_jit import quick_jit
from ...compilation.store import shared
from ...structure.bilinear.form import Bilinear, GaussianSide, Side
from ...structure.bilinear.noisy.normal import NO_NOISE, NormalNoise, find_normal_noise
from ...structure.bilinear.reading import BilinearReading
from ...structure.errors import ModelStructureError
from ...structure.model.field_checks import check_hyper
from ..front.results import at_values
from ..front.running.iterations import Parts, StepInfo
from ..hyper.space import UnconstrainedSpace
from .algorithms import steps
from .algorithms import sweeps as core
from .algorithms.cells import Block, View
from .algorithms.incidence import CoupledBlock, SideBlock, draw_side, step_sizes, touched
from .algorithms.quadratic import ClosedUpdates, Options, fold_closed, with_side
from .algorithms.quadratic.draws import first_moments
from .algorithms.quadratic.normal_noise import best_noise, draw_noise
from .algorithms.schedules.devices import Division, OneDevice, RowPlaces, SeveralDevices
from .algorithms.schedules.loop import fit_side, iterate
from .algorithms.schedules.methods import Prepared, Steps
from .algorithms.selection import draw_shares
from .closed import ClosedChoice, Solver
from .learning import Learning
from .marginals.common_unknowns import absorb_common
from .marginals.prediction import log_predictive_counts

CHUNK = 10
_SHORT_STEP = 0.25

_SOLVERS = {"natural-gradient": steps.step_side, "lbfgs": steps.lbfgs_side}


class FoldInfo(NamedTuple):
    """End of the fit of new vectors."""

    converged: Array
    objective: Array
    """Objective of each new vector, shape ``(num,)``."""


def bilinear_programs(
    reading: BilinearReading,
    space: UnconstrainedSpace,
    families: tuple[core.Family, core.Family],
    tol: float,
    devices: tuple[object, ...] | None = None,
    solver: Solver = "natural-gradient",
    choice: ClosedChoice | None = None,
) -> BilinearPrograms:
    """Programs for a reading, those of an earlier one of the same structure if there was one; see the class.

    :param ClosedChoice choice: of closed updates, where these may take the place of steps.
    """
    # Which device has which cells is a part of what is compiled.
    division = (
        None if devices is None else Division(devices, reading.index[0], reading.index[1], len(reading.elements[0]))
    )
    options = None if choice is None else choice.options(reading, families)
    return shared(BilinearPrograms, reading, space, families, tol, division, solver, options, choice)


class BilinearPrograms:
    """Compiled functions of ``(data, hyper, state, ...)`` for one model structure.

    :param BilinearReading reading: any reading of the structure.
    :param UnconstrainedSpace space: of the hyperparameters that are learned.
    :param families: of rows and columns.
    :param float tol: relative change of the objective at which a run has converged.
    :param Division division: of the rows between the devices on which :attr:`solve` runs, if these are several.
    :param str solver: of the vectors of one side.
    :param Options closed: of closed updates, where these take the place of steps.
    :param ClosedChoice choice: that these are of.
    """

    def __init__(
        self,
        reading: BilinearReading,
        space: UnconstrainedSpace,
        families: tuple[core.Family, core.Family],
        tol: float,
        division: Division | None = None,
        solver: Solver = "natural-gradient",
        closed: Options | None = None,
        choice: ClosedChoice | None = None,
    ) -> None:
        self._reading, self._space, self.families, self._tol = reading, space, families, tol
        self.closed, self._choice = closed, choice
        method = Steps(_SOLVERS[solver]) if closed is None else ClosedUpdates(closed, reading.has_fixed_predictors)
        self.devices = OneDevice(method) if division is None else SeveralDevices(division, method)
        self.form = quick_jit(self._form, is_lean=True)
        self.priors = quick_jit(self._priors, is_small=True)
        self.init_state = quick_jit(self._init_state, is_lean=True)
        self._compiled_prepare = quick_jit(self._prepare, is_lean=True)
        self.solve = self.devices.compile_solve(self._solve)
        self.draws = jax.jit(self._draws, static_argnames="num_samples")
        self.scores = jax.jit(self._scores, static_argnames="num_samples")
        self.margin = jax.jit(self._margin)
        self.fold = jax.jit(self._fold, static_argnames=("side", "num_steps"))

    def like(self, reading: BilinearReading, space: UnconstrainedSpace) -> BilinearPrograms:
        """Programs for another reading, on one device."""
        return bilinear_programs(reading, space, self.families, self._tol, choice=self._choice)

    def _form(self, data: Sequence[object], hyper: dict[str, Array]) -> Bilinear:
        return self._reading.form(hyper, data)

    def _priors(self, data: Sequence[object], hyper: dict[str, Array]) -> tuple[Side, Side]:
        return self._reading.priors(hyper, data)

    def _init_state(self, data: Sequence[object], hyper: dict[str, Array], rng_key: Array | None = None) -> core.State:
        key = jax.random.key(0) if rng_key is None else rng_key
        state = core.init(self._reading.form(hyper, data), key, *self.families)
        if self._choice is None or not self._choice.measures_draws:
            return state
        return state._replace(moments=(first_moments(state.rows), first_moments(state.columns)))

    def prepare(
        self, data: Any, fixed: dict[str, Array], values: Array, noise: NormalNoise = NO_NOISE
    ) -> tuple[Prepared | None, Any, dict[str, Array], NormalNoise]:
        """The first arguments of :attr:`solve`: ordered cells, where they are the same in all sweeps, and the data."""
        prepared = None
        if self._reading.is_design_fixed or not self._space.size:
            prepared = self.devices.put_cells(self._compiled_prepare(data, fixed, values, self.devices.places))
        return prepared, *self.devices.put_shared((data, fixed, noise))

    def _prepare(
        self, data: Sequence[object], fixed: dict[str, Array], values: Array, places: RowPlaces | None = None
    ) -> Prepared:
        return self._prepare_at(data, self._space.unpack(values, fixed), places)

    def _prepare_at(self, data: Sequence[object], hyper: dict[str, Array], places: RowPlaces | None = None) -> Prepared:
        state = jax.eval_shape(self._init_state, data, hyper)
        return self.devices.prepare(self._reading.form(hyper, data), state.rows, state.columns, places)

    def _solve(
        self,
        prepared: Prepared | None,
        data: Sequence[object],
        fixed: dict[str, Array],
        noise: NormalNoise,
        values: Array,
        state: core.State,
        num_sweeps: Array,
        is_learning: Array,
    ) -> tuple[Array, core.State, StepInfo]:
        """Run at most :data:`CHUNK` sweeps, each with an update of noise and hyperparameters where there are any."""
        reading, space, devices = self._reading, self._space, self.devices

        def form_at(hyper: dict[str, Array]) -> Prepared:
            if prepared is None:
                return self._prepare_at(data, hyper)
            if not space.size:
                return prepared
            rows, columns = reading.priors(hyper, data)
            constant = reading.log_constant(hyper, data)
            form = prepared.form._replace(rows=devices.arrange(rows), columns=columns, log_constant=constant)
            return prepared._replace(form=form)

        learning = Learning(reading, space, devices, data, fixed, noise, form_at)

        def hold(values: Array, state: core.State) -> tuple[Array, Array, Array]:
            return values, state.objective, jnp.zeros(values.shape, bool)

        def learn(values: Array, state: core.State) -> tuple[Array, Array, Array]:
            return lax.cond(is_learning, learning.step, hold, values, state)

        values, state, info, moved = iterate(
            learning.make_form,
            values,
            state,
            devices=devices,
            num_sweeps=num_sweeps,
            trace_length=CHUNK,
            tol=self._tol,
            learn=learn if space.size else None,
            log_prior=learning.log_prior,
            may_end=is_learning,
        )
        return values, state, StepInfo(info, info.objective, learning.log_prior(values), moved)

    def _draws(
        self,
        data: Sequence[object],
        fitted: dict[str, Array],
        state: core.State,
        rng_key: Array,
        noise: NormalNoise,
        *,
        num_samples: int,
    ) -> tuple[dict[str, Array], Array]:
        """Sites and the log density of sites and data, at draws one after the other."""
        reading = self._reading
        form_fitted = reading.form(fitted, data)

        def one(key: Array) -> tuple[dict[str, Array], Array]:
            row_key, column_key = jax.random.split(key)
            hyper, form = fitted, form_fitted
            if noise.names:
                hyper = draw_noise(noise, fitted, jax.random.fold_in(key, 4))
                form = reading.form(hyper, data)
            u, v = draw_side(state.rows, form.rows, row_key), draw_side(state.columns, form.columns, column_key)
            log_prior, given, z, shares = reading.log_prior(hyper, data), hyper, None, None
            if state.common is not None and form.common is not None:
                common = draw_side(state.common, form.common.prior, jax.random.fold_in(key, 2))
                log_prior += jnp.sum(form.common.prior.log_density(common))
                z, given = common[0], reading.with_common(hyper, common[0])
            sites = reading.site_values(given, reading.unknowns(u, v), data)
            if state.selected is not None:
                shares = draw_shares(state.selected, jax.random.fold_in(key, 3))
                sites |= dict(zip(reading.share_sites, shares, strict=True))
            return sites, form.log_density(u, v, z, shares) + log_prior

        return lax.map(one, jax.random.split(rng_key, num_samples))

    def _scores(
        self,
        data: Sequence[object],
        hyper: dict[str, Array],
        noise: NormalNoise,
        rows: SideBlock,
        columns: SideBlock,
        rng_key: Array,
        *,
        num_samples: int,
    ) -> Array:
        """Log predictive density of each cell, averaged over draws of noise and of the vectors of one side.

        :param rows: with what is common to all cells.
        """

        def add(total: Array, key: Array) -> tuple[Array, None]:
            own_key, noise_key = jax.random.split(key)
            form = absorb_common(self._reading.form(draw_noise(noise, hyper, noise_key), data), "rows")
            return jnp.logaddexp(total, log_predictive_counts(form, rows, columns, own_key, num_samples=1)), None

        start = jnp.full_like(self._reading.form(hyper, data).offset, -jnp.inf)
        total, _ = lax.scan(add, start, jax.random.split(rng_key, num_samples))
        return total - jnp.log(num_samples)

    def _margin(self, data: Sequence[object], hyper: dict[str, Array], state: core.State) -> Array:
        return core.spectral_margin(self._reading.form(hyper, data), state)

    def _fold(
        self,
        data: Sequence[object],
        hyper: dict[str, Array],
        held: SideBlock,
        common: Block | None,
        rng_key: Array,
        noise: NormalNoise,
        *,
        side: Literal["rows", "columns"],
        num_steps: int,
    ) -> tuple[core.State, FoldInfo, dict[str, Array]]:
        """The optimum of the vectors of one side, and of noise that is theirs, while the others are held."""

        def vectors(hyper: dict[str, Array]) -> tuple[core.State, FoldInfo]:
            form = self._reading.form(hyper, data)
            return self._fold_vectors(form, held, common, rng_key, side=side, num_steps=num_steps)

        if not noise.names:
            return *vectors(hyper), hyper

        def proceed(carry: tuple[dict[str, Array], Array, Array]) -> Array:
            _, change, count = carry
            return (count < num_steps) & (change > tol)

        def advance(carry: tuple[dict[str, Array], Array, Array]) -> tuple[dict[str, Array], Array, Array]:
            hyper, _, count = carry
            state, _ = vectors(hyper)
            bound = self.devices.bound_of_form(self._prepare_at(data, hyper), state)
            new = best_noise(noise, hyper, lambda hyper: bound(self._prepare_at(data, hyper)))
            changes = [jnp.max(jnp.abs(jnp.log(new[name] / hyper[name])), initial=0.0) for name in noise.names]
            return new, jnp.max(jnp.stack(changes)), count + 1

        infinite = jnp.asarray(jnp.inf, self._reading.form(hyper, data).offset.dtype)
        tol = max(1e-8, 100 * float(jnp.finfo(infinite.dtype).eps))
        hyper, change, _ = lax.while_loop(proceed, advance, (hyper, infinite, jnp.asarray(0)))
        state, info = vectors(hyper)
        return state, info._replace(converged=info.converged & (change <= tol)), hyper

    def _fold_vectors(
        self,
        form: Bilinear,
        held: SideBlock,
        common: Block | None,
        rng_key: Array,
        *,
        side: Literal["rows", "columns"],
        num_steps: int,
    ) -> tuple[core.State, FoldInfo]:
        """The optimum of the vectors of one side, which is unique, while all else is held."""
        start = core.init(form, rng_key, *self.families)
        is_rows = side == "rows"
        if self.closed is not None:
            start = with_side(start, "columns" if is_rows else "rows", held)._replace(common=common)
            limit = 100 * float(jnp.finfo(start.objective.dtype).eps)
            state, values, change = fold_closed(form, start, side, self.closed, num_steps=num_steps, limit=limit)
            return state._replace(objective=jnp.sum(values)), FoldInfo(change < limit, values)
        own, prior = (start.rows, form.rows) if is_rows else (start.columns, form.columns)
        assert isinstance(own, Block) and isinstance(prior, GaussianSide)  # by BilinearRun.fold_in
        views = core.make_views(form, own, held) if is_rows else core.make_views(form, held, own)
        view = views.rows if is_rows else views.columns
        seen = touched(held, form.columns if is_rows else form.rows)
        feasible, _ = steps.make_feasible(view, own, seen, prior)
        assert isinstance(feasible, Block)

        def find_view(own: Block) -> View:
            best = core.with_tangents(views, *((own, held) if is_rows else (held, own)))
            return best.rows if is_rows else best.columns

        # The step is exact to second order near the optimum, so that the last gain is far above what is left.
        limit = 100 * float(jnp.finfo(own.mean.dtype).eps)
        num, dtype = own.mean.shape[0], own.mean.dtype
        own, _, values, change = fit_side(
            find_view,
            feasible,
            seen,
            prior,
            jnp.full((num,), 0.5, dtype),
            jnp.full((num,), -jnp.inf, dtype),
            num_steps=num_steps,
            tol=limit,
            measure=lambda gain, values: jnp.max(gain / (1.0 + jnp.abs(values))),
        )
        rows, columns = (own, held) if is_rows else (held, own)
        sizes = (jnp.ones_like(step_sizes(b)) for b in (rows, columns))
        state = core.State(rows, columns, next(sizes), next(sizes), jnp.sum(values), jnp.asarray(0))
        return state, FoldInfo(change < limit, values)


def noise_of(reading: BilinearReading, space: UnconstrainedSpace, programs: BilinearPrograms) -> NormalNoise:
    """Sites of noise variances that are integrated over; other free sites are points.

    :raises ModelStructureError: if other sites with gamma priors have too many elements to be points.
    """
    found, refusals = find_normal_noise(
        reading, lambda hyper: programs.form(reading.data, dict(hyper)), space.names, space.fixed
    )
    try:
        check_hyper(reading, reading.sites, True, held={*space.fixed, *found.names})
    except ModelStructureError as refusal:
        raise refusals.get(refusal.site or "", refusal) from None
    return found


def parts(state: core.State) -> Parts:
    """Arrays that determine the objective, for the judge; see
    :class:`~numpyro_ext.infer.front.running.iterations.Iterations`."""
    blocks = _blocks(state)
    sizes = [float(np.sqrt(np.mean(np.square(b.mean)) + np.mean(_variances(b)))) or 1.0 for b in blocks]
    # The covariances of vectors that depend on each other follow from all else in a full step.
    found = [_covariances(b) for b in blocks]
    covariances = tuple(covariance for own in found for covariance in own)
    squares = [size**2 for size, own in zip(sizes, found, strict=True) for _ in own]
    return Parts(tuple(b.mean for b in blocks), covariances, (*sizes, *squares))


def _blocks(state: core.State) -> tuple[SideBlock, ...]:
    return (state.rows, state.columns, *(() if state.common is None else (state.common,)))


def _covariances(block: SideBlock) -> tuple[Array, ...]:
    return (block.covariance,) if isinstance(block, Block) and block.covariance is not None else ()


def _variances(block: SideBlock) -> Any:
    if isinstance(block, CoupledBlock):
        return 1.0 / np.diagonal(np.asarray(block.precision), axis1=1, axis2=2)
    covariance = np.zeros(1) if block.covariance is None else np.asarray(block.covariance)
    return covariance if covariance.ndim < 3 else np.diagonal(covariance, axis1=1, axis2=2)


def with_parts(state: core.State, means: tuple[Array, ...], covariances: tuple[Array, ...]) -> core.State:
    """The state with other such arrays."""
    left = iter(covariances)
    rows, columns, *common = (
        Block(mean, next(left)) if _covariances(block) else block._replace(mean=mean)
        for block, mean in zip(_blocks(state), means, strict=True)
    )
    if common:
        assert isinstance(common[0], Block)
        state = state._replace(common=common[0])
    # Short steps are not refused: near a point the sweep is then a smooth map.
    row_step, column_step = (jnp.minimum(step, _SHORT_STEP) for step in (state.row_step, state.column_step))
    return state._replace(rows=rows, columns=columns, row_step=row_step, column_step=column_step)


def explain(form: Bilinear, hyper: dict[str, Array], value: float) -> str:
    """Explain why an objective is not finite, from the form, its hyperparameters and the value."""
    where = at_values(hyper)
    for what, side in (("rows", form.rows), ("columns", form.columns)):
        if not bool(jnp.all(jnp.isfinite(side.log_determinant()))):
            return f"The prior of the {what} is not that of a Gaussian{where}: a scale is zero or not finite."
    if not bool(jnp.all(jnp.isfinite(form.offset))):
        return f"The predictor is not finite{where}: check covariates and exposures for NaN and infinity."
    return (
        f"The objective is {value}{where}, although data and priors are finite: the rates overflow. Center the "
        "predictor with an intercept or exposures, give other starting values (init_values), or use float64 "
        "(numpyro.enable_x64())."
    )
