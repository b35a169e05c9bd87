"""Engines that learn hyperparameters within their iterations: the loop of a run, and the judgement of its end.

Such iterations climb one objective, of hyperparameters and posterior together, and rest where its derivatives vanish,
on a saddle as well as on a maximum. Near such a point one iteration is a linear map of what is beside it, and the
objective curves upwards in some direction if and only if the map has an eigenvalue above one (it is :math:`I + M H`
with ``H`` the second derivatives and a positive ``M``). A few iterations from beside the end show its largest ones
(Arnoldi), and the objective itself, a little to either side, decides. All else is the judge of
:mod:`~numpyro_ext.infer.front.running.learning`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...hyper.curvature import Curvature
from ...hyper.evaluation import Evaluation
from ...hyper.search import SearchState
from ...hyper.space import UnconstrainedSpace
from ..results import Diagnostics
from ..state import NO_ERRORS, EngineState, Fit
from .chunks import run_in_chunks
from .climbs import Climb
from .learning import learn
from .progress import progress_bar

_KRYLOV = 8
_BESIDE = (0.5, 0.05)
_AHEAD = 2.0
_MOST_AHEAD = 5
_HELD = 5
_LEVEL = 0.02
"""Largest fall of the objective over the steps ahead on a plateau, as in :func:`~..hyper.curvature.curvature`."""


class StepInfo(NamedTuple):
    """Report after some iterations."""

    solved: Any
    """With ``num_steps``, ``converged``, ``max_change`` and ``objective_trace``."""
    log_evidence: Array
    """The bound where the iterations ended."""
    log_prior: Array
    """Log prior of the hyperparameters there."""
    moved: Array
    """Along which axes the bound has had a derivative other than zero in any update of them, shape ``(d,)``."""


class Parts(NamedTuple):
    """The arrays of a state that determine the objective, and a number that is about the size of each."""

    free: tuple[Array, ...]
    """Any values near those that they have are possible."""
    others: tuple[Array, ...]
    """Such as covariances: moved by iterations only."""
    units: tuple[float, ...]
    """Units of the free parts, then of the others."""


class Iterations(NamedTuple):
    """The iterations of an engine on its data."""

    solve: Callable[[Array, Any, Any, Any], tuple[Array, Any, StepInfo]]
    """``(values, state, num_steps, is_learning)``: unconstrained hyperparameters and state after at most ``chunk``
    iterations, or fewer if they converge; none of them, to have the objective. They may be told to learn nothing."""
    space: UnconstrainedSpace
    parts: Callable[[Any], Parts]
    """Function of a state that gives the parts that determine the objective."""
    with_parts: Callable[[Any, Any, Any], Any]
    """``(state, free, others)``: a state with other such arrays."""
    digest: str
    tol: float
    """For ``max_change``."""
    gain: float
    """By how much the objective, in units of one plus its size, has to be higher elsewhere to go there."""
    rounding: float
    """Its error, in these units."""
    change: str
    """Meaning of ``max_change``, in words."""
    explain: Callable[[dict[str, Array], float], str]
    """Function that explains a log evidence that is not finite, from hyperparameters and value."""
    num_steps: int
    chunk: int
    name: str
    unit: str
    show_bar: bool
    put: Callable[[Array, Any], tuple[Array, Any]] = lambda values, state: (values, state)
    """From the host to where the iterations are computed."""
    get: Callable[[Array, Any], tuple[Array, Any]] = lambda values, state: (values, state)
    most_escapes: int = 5


def fit_in_chunks(
    problem: Iterations,
    values: Array,
    state: Any,
    *,
    before: int,
    num_steps: int | None = None,
    chunk: int | None = None,
    warm_up: int = 0,
    keep: Callable[[Array, Any, int], None] = lambda values, state, done: None,
) -> tuple[Fit, StepInfo]:
    """Iterate until convergence, a value that is not finite, ``num_steps`` steps, or an interruption.

    :param Iterations problem: see there.
    :param values: unconstrained hyperparameters, to start from.
    :param state: to start from.
    :param int before: steps that an earlier run has taken.
    :param int num_steps: other than that of the problem.
    :param int chunk: other than that of the problem.
    :param int warm_up: steps before hyperparameters are learned.
    :param keep: called after each chunk with what was reached and the number of all steps.
    :return: the fit, and the info of the last chunk.
    :raises ValueError: if the log evidence is not finite.
    """
    moved = np.zeros(problem.space.size, bool)

    def advance(carry: tuple[Array, object, object], length: int, done: int) -> tuple[Any, Any, Array]:
        is_learning = not problem.space.size or done >= warm_up
        values, state, info = problem.solve(*carry[:2], np.asarray(length), np.asarray(is_learning))
        np.logical_or(moved, np.asarray(info.moved), out=moved)
        keep(values, state, done + int(info.solved.num_steps))
        return (values, state, info), info.solved, info.log_evidence

    result = run_in_chunks(
        advance,
        (*problem.put(values, state), None),
        num_steps=problem.num_steps if num_steps is None else num_steps,
        chunk=problem.chunk if chunk is None else chunk,
        before=before,
        name=problem.name,
        unit=problem.unit,
        show_bar=problem.show_bar,
    )
    values, state, info = result.carry
    values, state = problem.get(values, state)
    messages = result.messages
    hyper = problem.space.unpack(values)
    if not np.isfinite(result.objective):
        raise ValueError(problem.explain(hyper, result.objective))
    converged, last_change = bool(info.solved.converged) and not messages, float(info.solved.max_change)
    if not converged:
        messages.append(
            f"{problem.change} in the last of {result.num_steps} {problem.unit} is {last_change:.2g}, the tolerance "
            f"{problem.tol:.2g}. Give more {problem.unit} (num_steps) or go on with init_state=engine.last_state."
        )
    diagnostics = Diagnostics(converged, result.num_steps, result.trace, last_change, 0, {}, None, tuple(messages))
    last = EngineState(values, state, None, result.num_steps, problem.digest)
    return Fit(last, hyper, None, NO_ERRORS, result.objective, diagnostics), info._replace(moved=moved)


def judge(problem: Iterations, fit: Fit, info: StepInfo, rng_key: Array) -> Fit:
    """The fit, if it ended at a maximum; else the end of iterations that leave what is none.

    :param Iterations problem: that were made.
    :param Fit fit: their end. One that has not converged is returned as it is.
    :param StepInfo info: of the fit.
    :param rng_key: for the directions that are tried.
    :raises ModelStructureError: if the bound is a step function of a hyperparameter.

    Cost: some ten iterations, where the end is a maximum away from all edges.
    """
    before, last = fit.diagnostics, fit.last_state
    if not before.converged:
        return fit
    ends = _Ends(problem, last.state, bool(np.all(info.moved)), rng_key)
    end = ends.found(last.values, last.state, (), info, limit=1)
    scale = 1.0 + abs(float(end.best.objective))
    climb = Climb(
        begin=ends.begin,
        advance=ends.advance,
        space=problem.space,
        origin=jnp.zeros((), last.values.dtype),
        units=jnp.ones((), last.values.dtype),
        tol=problem.gain * scale,
        max_steps=problem.num_steps,
        find_curvature=ends.curvature,
        most_escapes=problem.most_escapes,
    )
    with progress_bar(None, problem.name, enabled=False) as bar:
        found = learn(climb, [], rng_key, resumed=end, bar=bar)
    assert found is not None
    best, messages = found.search, [*before.messages, *found.messages]
    state, traces = best.best.state
    values = jnp.asarray(best.values[: problem.space.size])
    num_steps = before.num_steps + sum(map(len, traces))
    if not bool(best.converged) and not found.messages:
        messages.append(
            f"A point that was no maximum was left, but the {problem.unit} from there on have not converged in "
            f"{problem.num_steps}. Give more (num_steps) or go on with init_state=engine.last_state."
        )
    diagnostics = before._replace(
        converged=found.diagnostics.converged and not found.is_interrupted,
        num_steps=num_steps,
        objective_trace=np.concatenate([before.objective_trace, *traces]),
        messages=tuple(messages),
        edges=found.edges,
    )
    return fit._replace(
        last_state=last._replace(values=values, state=state, num_steps=num_steps),
        hyper=problem.space.unpack(values),
        log_evidence=float(best.best.log_evidence),
        diagnostics=diagnostics,
    )


class _Ends:
    """Ends of iterations as the judge sees them: searches over one vector of hyperparameters and field.

    The field is in units of its size. States of searches are those of the algorithm, each with the traces of all
    iterations from the first end on.
    """

    def __init__(self, problem: Iterations, state: object, has_moved: bool, rng_key: Array) -> None:
        self._problem, self._has_moved, self._key = problem, has_moved, rng_key
        free, others, units = problem.parts(state)
        shapes = [np.shape(leaf) for leaf in (*free, *others)]
        self._layout = list(zip(units, shapes, strict=True))
        self._ends = np.cumsum([problem.space.size, *(int(np.prod(shape)) for shape in shapes)])
        self._num_free, self._free_size = len(free), int(self._ends[len(free)])

    def _pack(self, values: Array, state: object) -> np.ndarray:
        free, others, _ = self._problem.parts(state)
        parts = [np.ravel(x) / unit for x, (unit, _) in zip((*free, *others), self._layout, strict=True)]
        return np.concatenate([np.asarray(values), *parts])

    def _unpack(self, x: object, state: object) -> tuple[Array, object]:
        values, *parts = np.split(np.asarray(x), self._ends[:-1])
        arrays = [
            jnp.asarray(unit * part.reshape(shape)) for part, (unit, shape) in zip(parts, self._layout, strict=True)
        ]
        free, others = arrays[: self._num_free], arrays[self._num_free :]
        return jnp.asarray(values), self._problem.with_parts(state, tuple(free), tuple(others))

    def _solve(self, values: Array, state: object, num_steps: int, is_learning: bool) -> tuple[Array, Any, StepInfo]:
        arguments = np.asarray(num_steps), np.asarray(is_learning)
        values, state, info = self._problem.solve(*self._problem.put(values, state), *arguments)
        return *self._problem.get(values, state), info

    def begin(self, x: object, state: object) -> SearchState:
        """Before the first iteration from a point."""
        x = np.asarray(x)
        zero, count, no = (np.zeros((), dtype) for dtype in (x.dtype, np.int32, bool))
        best: Any = Evaluation(zero - np.inf, np.zeros_like(x), zero - np.inf, state, None)  # type: ignore[arg-type]
        blank: dict[str, Any] = {name: zero for name in SearchState._fields}  # of a line search, which there is not
        counts = dict.fromkeys(("num_iterations", "num_evaluations", "num_probes"), count)
        flags = {"is_searching": ~no, "converged": no, "moved": np.zeros(self._problem.space.size, bool)}
        return SearchState(**{**blank, **counts, **flags, "values": x, "best": best, "is_coarse": None, "noise": None})

    def found(
        self, values: Array, state: object, traces: tuple[np.ndarray, ...], info: StepInfo, *, limit: int
    ) -> SearchState:
        """State where iterations have ended, or after at most ``limit`` of them."""
        log_evidence, log_prior = float(info.log_evidence), float(info.log_prior)
        start = self.begin(self._pack(values, state), (state, traces))
        num_steps, converged = max(1, int(info.solved.num_steps)), bool(info.solved.converged)
        is_over = converged or num_steps >= limit or not np.isfinite(log_evidence)
        heights: Any = np.asarray(log_evidence + log_prior), np.asarray(log_evidence)
        ended: dict[str, Any] = {
            "best": start.best._replace(objective=heights[0], log_evidence=heights[1], info=info.solved),
            "num_iterations": np.asarray(num_steps),
            "num_evaluations": np.asarray(1),
            "is_searching": np.asarray(not is_over),
            "converged": np.asarray(converged),
            "num_probes": np.asarray(2 * start.values.size),
            "moved": np.asarray(info.moved),
        }
        return start._replace(**ended)

    def advance(self, search: SearchState, limit: int, num_evaluations: int) -> tuple[SearchState, Any]:
        """A chunk of iterations; with a ``limit`` of zero the field alone moves, to have the objective of a point."""
        state, traces = search.best.state
        values, state = self._unpack(search.values, state)
        done, chunk = int(search.num_iterations), self._problem.chunk
        if limit == 0:
            values, state, info = self._solve(values, state, min(chunk, _HELD), False)
            if not self._has_moved:
                info = info._replace(moved=self._solve(values, state, 1, True)[2].moved)
            return self.found(values, state, traces, info, limit=0), np.zeros(0)
        values, state, info = self._solve(values, state, min(chunk, limit - done), True)
        trace = np.asarray(info.solved.objective_trace)[: int(info.solved.num_steps)]
        found = self.found(values, state, (*traces, trace), info, limit=limit - done)
        moved: Any = np.asarray(search.moved) | np.asarray(info.moved)
        return found._replace(num_iterations=found.num_iterations + done, moved=moved), trace

    def curvature(self, run: Any) -> Curvature:
        """Curvature at the best point of a run: a direction in which the objective curves upwards, if one is found, and
        hyperparameters on a plateau.

        Where the objective is higher further on along a plateau, as where iterations crawl to the edge of a support,
        the run goes on from there.
        """
        size = self._problem.space.size
        reference = np.asarray(self._problem.space.initial())
        is_wide = np.zeros(size, bool)
        for axis in range(size):
            for number in range(_MOST_AHEAD):
                x = np.array(run.best.values)
                way = x[axis] - reference[axis]
                if abs(way) <= _AHEAD:
                    break
                x[axis] += np.sign(way) * _AHEAD * 2.0**number
                ahead = run.look(x)
                gain = float(ahead.best.objective) - run.height
                is_wide[axis] = gain >= -_LEVEL
                if gain <= run.climb.tol or not run.keep(run.climb_from(run.climb.begin(x, ahead.best.state))):
                    break
        rising = self._rising(run.best)
        nothing = np.zeros((0, rising.shape[1]))
        return Curvature(np.zeros((size, size)), rising, nothing, is_wide, np.zeros(size, bool))

    def _rising(self, search: SearchState) -> np.ndarray:
        """The direction in which iterations leave a point the fastest, if the objective curves upwards in it."""
        x, (state, _) = np.asarray(search.values), search.best.state

        def after(y: np.ndarray) -> np.ndarray:
            return self._pack(*self._solve(*self._unpack(y, state), 1, True)[:2])

        def height(y: np.ndarray) -> float:
            info = self._solve(*self._unpack(y, state), 0, True)[2]
            return float(info.log_evidence) + float(info.log_prior)

        here = height(x)
        least = 2.0 * self._problem.rounding * (1.0 + abs(here))

        def around(step: np.ndarray) -> np.ndarray:
            return np.array([height(x - step), height(x + step)]) - here

        direction, basis = self._fastest(after, x)
        for size in _BESIDE:
            sides = around(size * direction)
            if np.sum(sides) > least and np.max(sides) > least:
                near = _BESIDE[-1]  # further from there covariances may end
                steepest = _steepest(around, basis, near)
                is_steeper = np.sum(around(near * steepest)) > np.sum(around(near * direction))
                return (steepest if is_steeper else direction)[None]
        return np.zeros((0, x.size))

    def _fastest(self, after: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The direction of the largest eigenvalue of the iteration near ``x``, by Arnoldi from a random one, and the
        orthonormal directions that it is made of."""
        start = np.zeros_like(x)
        start[: self._free_size] = np.asarray(jax.random.normal(self._key, (self._free_size,)))
        step = float(np.sqrt(np.finfo(x.dtype).eps)) ** 0.5
        base, basis = after(x), [_unit(start)]
        columns: list[np.ndarray] = []
        for _ in range(min(_KRYLOV, x.size)):
            image = (after(x + step * basis[-1]) - base) / step
            if not np.all(np.isfinite(image)):
                break
            parts = np.zeros(_KRYLOV + 1)
            for _ in range(2):  # once more for what rounding left
                more = np.array([vector @ image for vector in basis])
                image = image - more @ np.array(basis)
                parts[: len(basis)] += more
            parts[len(basis)] = np.linalg.norm(image)
            columns.append(parts)
            if parts[len(basis)] <= step * np.max(np.abs(parts)):
                break
            basis.append(image / parts[len(basis)])
        size = len(columns)
        if not size:
            return basis[0], np.array(basis)
        eigenvalues, vectors = np.linalg.eig(np.array(columns).T[:size, :size])
        found = np.array(basis[:size])
        return _unit(vectors[:, np.argmax(eigenvalues.real)].real @ found), found


def _steepest(around: Callable[[np.ndarray], np.ndarray], basis: np.ndarray, size: float) -> np.ndarray:
    """In the span of ``basis``, the direction in which the objective curves upwards the most.

    The iteration itself need not know it: where its steps of hyperparameters are Newton's, it is far from linear
    beside a saddle. By second differences, as many as ``basis`` has pairs.
    """
    twice = np.diag([np.sum(around(size * vector)) for vector in basis])
    for i, j in zip(*np.tril_indices(len(basis), -1), strict=True):
        both = np.sum(around(size * (basis[i] + basis[j])))
        twice[i, j] = twice[j, i] = (both - twice[i, i] - twice[j, j]) / 2.0
    if not np.all(np.isfinite(twice)):
        return _unit(basis[0])
    return _unit(np.linalg.eigh(twice)[1][:, -1] @ basis)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x)
