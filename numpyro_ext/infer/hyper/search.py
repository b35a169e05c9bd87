r"""Learning hyperparameters: L-BFGS on log evidence plus log prior, one fit of the field per evaluation.

The search is a flat loop. Every turn makes one evaluation, at a trial point of the line search or, once the search has
ended, at a point of the finite differences that give the curvature. So a compiled search holds a single copy of the
algorithm that fits the field, and under ``vmap`` (cross-validation folds) every lane moves at its own pace.

The direction is that of L-BFGS (Liu and Nocedal, 1989; from optax). The step size is found by bisection on the weak
Wolfe conditions (Lewis and Overton, 2013, algorithm 2.6), of which the first few cuts are at the top of the cubic
through values and slopes; a trial point where the objective is not finite counts as one where it did not increase.
Where no step meets the conditions, the search ends at the longest that increased it. Where rounding hides a change of
the objective, its increase is judged by the slopes (Hager and Zhang, 2005, equation 4.1). What rounding may hide is ten
units in the last place of the objective, or what trial points show: where the slopes at both ends of a short step are
alike, their mean says what is gained, and what was gained instead is rounding.

Far from its end a search may ask for few digits of the field (:mod:`.digits`), but never where it converges.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import DTypeLike

from .digits import difference_step, field_tolerance, is_far_from_end, noise_of_field
from .evaluation import Evaluation
from .metric import in_metric

EVALUATIONS_PER_CHUNK = 10
"""Evaluations of a compiled chunk of a search, between which a bar moves and a person may interrupt."""
_MEMORY, _LARGEST_MEMORY = 10, 30
"""Past steps that a search remembers: as many as there are coordinates, within these."""
_SUFFICIENT_INCREASE = 1e-4
_CURVATURE = 0.9
_MAX_TRIALS = 25
_ALIKE = 0.1
"""Relative difference of slopes at both ends of a step that is short."""
_NOISE = 2.0
"""Allowance for rounding, in units of the largest that was seen."""
_MOST_GUESSES, _LEAST_SHARE = 3, 0.1
"""Trials whose values and slopes say where the next one is; it is this share of the bracket away from its ends."""


class SearchState(NamedTuple):
    """Everything that the search needs to go on exactly where it stopped."""

    values: Array
    """The best point so far, unconstrained, shape ``(d,)``."""
    best: Evaluation
    """The evaluation there; an objective of ``-inf`` says that none has been made yet."""
    memory: Any
    """L-BFGS: past differences of points and gradients."""
    direction: Array
    step_size: Array
    lower: Array
    """The largest step size known to be too short."""
    upper: Array
    """The smallest one known to be too long, infinite if none is."""
    num_trials: Array
    """Trial points of the current line search."""
    num_iterations: Array
    num_evaluations: Array
    is_searching: Array
    """False once the search has ended."""
    converged: Array
    """True if it ended because the gradient vanished."""
    num_probes: Array
    """Evaluations made for the curvature, of ``2 d``; more than that where the search is to make none."""
    probes: Array
    """Gradients at ``values`` plus and minus one difference step along each axis, shape ``(d, 2, d)``."""
    moved: Array | None = None
    """Along which axes the log evidence had a derivative other than zero in any evaluation, shape ``(d,)``."""
    metric: Array | None = None
    """Inverse curvature that L-BFGS takes before it remembers a step, shape ``(d, d)``, if that may be other than a
    multiple of the identity; zero as long as it is not. See :func:`~.metric.with_metric`."""
    is_coarse: Array | None = None
    """True if the field at the best point has few digits, or there is no best point; ``None`` where they are never
    few. No search converges at such a point."""
    noise: Array | None = None
    """Rounding of the objective, as far as short steps have shown more of it than its last places; ``None`` where it is
    not looked for."""


def _lbfgs(size: int) -> optax.GradientTransformation:
    return optax.scale_by_lbfgs(memory_size=min(max(size, _MEMORY), _LARGEST_MEMORY))


@functools.cache
def _blank_memory(size: int, dtype: DTypeLike) -> object:
    shapes = jax.eval_shape(_lbfgs(size).init, jax.ShapeDtypeStruct((size,), dtype))
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)


def init_search(
    shapes: Evaluation,
    values: Array,
    state: object,
    *,
    has_metric: bool = False,
    has_curvature: bool = True,
    may_be_coarse: bool = False,
) -> SearchState:
    """The state before the first evaluation, which is made at ``values`` itself.

    :param Evaluation shapes: shapes and dtypes of an evaluation, from ``jax.eval_shape(evaluate, values, state)``.
    :param values: where to start, shape ``(d,)``.
    :param state: of the algorithm, where the first fit of the field starts.
    :param bool has_metric: whether :func:`~.metric.with_metric` may be used.
    :param bool has_curvature: false leaves out the evaluations of the curvature, and the room for what they find.
    :param bool may_be_coarse: whether evaluations far from the end may have few digits; who asks for it sees to it that
        a search which ends at one goes on from it.
    :return: a state for :func:`search`.
    """
    # NumPy makes these constants without compiling anything.
    blank = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    blank = blank._replace(objective=blank.objective - np.inf, state=state)
    constant: Callable[..., Any] = np.full
    zero = constant((), 0.0, values.dtype)
    count = constant((), 0, np.int32)
    return SearchState(
        values=values,
        best=blank,
        memory=_blank_memory(values.size, np.dtype(values.dtype)),
        direction=constant(values.shape, 0.0, values.dtype),
        step_size=zero,
        lower=zero,
        upper=constant((), np.inf, values.dtype),
        num_trials=count,
        num_iterations=count,
        num_evaluations=count,
        is_searching=constant((), True),
        converged=constant((), False),
        num_probes=count if has_curvature else constant((), 2 * values.size + 1, np.int32),
        probes=constant((values.size if has_curvature else 1, 2, values.size), 0.0, values.dtype),
        moved=None if shapes.moves is None else constant(values.shape, False),
        metric=constant((values.size, values.size), 0.0, values.dtype) if has_metric else None,
        is_coarse=constant((), True) if may_be_coarse else None,
        noise=zero,
    )


def _select(condition: Array, new: object, old: object) -> Any:
    return jax.lax.cond(condition, lambda: new, lambda: old)


def _line_search(
    state: SearchState, trial: Array, new: Evaluation, tol: float, max_iterations: int | Array
) -> SearchState:
    """Judge a trial point: accept it and take a new direction, or shorten or lengthen the step."""
    old = state.best
    dtype = trial.dtype
    slope = jnp.dot(old.gradient, state.direction)
    rounding = 10.0 * jnp.finfo(dtype).eps * jnp.maximum(1.0, jnp.abs(new.objective))
    is_fine, best_is_fine = jnp.asarray(True), jnp.asarray(True)
    if state.is_coarse is not None:
        rounding += noise_of_field(old) + noise_of_field(new)
        is_fine, best_is_fine = ~is_far_from_end(state, tol, max_iterations), ~state.is_coarse
    finite = jnp.isfinite(new.objective) & jnp.all(jnp.isfinite(new.gradient))
    gain = new.objective - old.objective
    # Where a field does not settle its evidence may be any number: it is not believed to rise by more than the slope
    # promises.
    settled = jnp.asarray(getattr(new.info, "converged", True))
    finite &= settled | (gain <= state.step_size * slope + rounding) | (state.num_iterations == 0)
    new_slope = jnp.dot(new.gradient, state.direction)
    noise, is_noisier = state.noise, jnp.asarray(False)
    if noise is not None:
        # Of a slope that does not turn around on the way, the gain lies between those of the slopes at both ends.
        promised, bend = 0.5 * state.step_size * (slope + new_slope), 0.5 * state.step_size * jnp.abs(new_slope - slope)
        off = jnp.abs(gain - promised) - bend
        is_short = jnp.abs(new_slope - slope) <= _ALIKE * jnp.abs(slope)
        is_noisier = finite & settled & is_short & is_fine & best_is_fine & (off > rounding + noise)
        rounding += noise
        noise = jnp.asarray(jnp.where(is_noisier, _NOISE * off, noise), dtype)
    # Below rounding the slopes say whether it increased: they are then as steep behind the top as they were before it.
    wanted = _SUFFICIENT_INCREASE * state.step_size * slope
    is_before = (new_slope >= (2.0 * _SUFFICIENT_INCREASE - 1.0) * slope) | (gain >= wanted)
    increased = finite & (gain >= wanted - rounding) & is_before
    flattened = new_slope <= _CURVATURE * slope + tol**2
    # Out of trials, as before a wall behind which nothing is finite: the search ends at the longest step that helped.
    # At rounding level no step does: that is the top, if what the slope still promises is below any interest.
    exhausted = state.num_trials + 1 >= _MAX_TRIALS
    at_top = exhausted & (0.5 * slope <= tol)
    gives_up = exhausted & ~at_top
    accepted = increased & (flattened | gives_up)

    # The accepted branch. Inputs are replaced where they are not finite, so that nothing spreads into the memory.
    gradient = jnp.where(finite, new.gradient, old.gradient)
    direction, memory = _new_direction(state, trial, gradient)
    vanished = is_fine & (jnp.max(jnp.abs(gradient)) <= tol)

    # The rejected branch.
    lower = jnp.where(increased, state.step_size, state.lower)
    upper = jnp.where(increased, state.upper, state.step_size)
    guess = _top_of_cubic(gain, slope, new_slope, state.step_size)
    step_size = _between(lower, upper, guess, finite & (state.num_trials < _MOST_GUESSES))
    returns = gives_up & (lower > 0.0) & (state.num_trials < _MAX_TRIALS)  # the last trial is then made again
    step_size = jnp.where(returns, lower, step_size)
    refused_at_start = (state.num_iterations == 0) & ~finite

    one = jnp.ones((), dtype)
    first = one
    if state.metric is not None:  # which may be one of elsewhere: no coordinate moves by more than one at first
        longest = jnp.maximum(1.0, jnp.max(jnp.abs(direction)))
        first = jnp.asarray(jnp.where(jnp.any(state.metric != 0.0), 1.0 / longest, 1.0), dtype)
    # What was refused before was judged without knowing of the rounding.
    begins_anew = is_noisier & ~accepted
    num_iterations = state.num_iterations + accepted
    goes_on = ~vanished & ~gives_up & (num_iterations <= max_iterations)
    is_searching = jnp.where(accepted, goes_on, (~exhausted | returns | begins_anew) & ~refused_at_start)
    is_fresh = accepted | begins_anew
    return state._replace(
        values=jnp.where(accepted, trial, state.values),
        best=_select(accepted, new, old),
        memory=_select(accepted, memory, state.memory),
        direction=jnp.where(accepted, direction, state.direction),
        step_size=jnp.where(accepted, first, jnp.where(begins_anew, one, step_size)),
        lower=jnp.where(is_fresh, 0.0 * one, lower),
        upper=jnp.where(is_fresh, one * jnp.inf, upper),
        num_trials=jnp.where(is_fresh, 0, state.num_trials + 1),
        num_iterations=num_iterations,
        is_searching=is_searching,
        converged=jnp.where(accepted, vanished, at_top & best_is_fine & ~begins_anew),
        is_coarse=None if state.is_coarse is None else jnp.where(accepted, ~is_fine, state.is_coarse),
        noise=noise,
    )


def _new_direction(state: SearchState, trial: Array, gradient: Array) -> tuple[Array, object]:
    """Direction of the next steps from a trial point that is accepted, and the memory of the search there."""
    descent, memory = _lbfgs(trial.size).update(-gradient, state.memory, trial)
    if state.metric is not None:
        descent = jnp.where(jnp.any(state.metric != 0.0), in_metric(-gradient, memory, state.metric), descent)
    direction = -jnp.asarray(descent, trial.dtype)
    is_ascent = jnp.dot(direction, gradient) > 0.0
    return jnp.where(is_ascent, direction, gradient / jnp.maximum(1.0, jnp.linalg.norm(gradient))), memory


def _between(lower: Array, upper: Array, guess: Array, may_guess: Array) -> Array:
    """Next step size between two, of which the upper one may be infinite: a guess where it is well inside."""
    bounded = jnp.isfinite(upper)
    width = jnp.where(bounded, upper, 0.0) - lower
    step_size = jnp.where(bounded, lower + 0.5 * width, 2.0 * lower)
    guess = jnp.asarray(jnp.maximum(guess, lower + _LEAST_SHARE * width), lower.dtype)
    is_guess = bounded & may_guess & (guess <= upper - _LEAST_SHARE * width)
    return jnp.where(is_guess, guess, step_size)


def _top_of_cubic(gain: Array, slope: Array, new_slope: Array, step_size: Array) -> Array:
    """Maximum of the cubic that rises from zero with ``slope``, and at ``step_size`` has risen by ``gain`` and has
    the slope ``new_slope``; not a number if it has none."""
    mean_slope = gain / step_size
    bend = slope + new_slope - 3.0 * mean_slope
    square = bend**2 - slope * new_slope
    root = jnp.sqrt(jnp.maximum(square, 0.0))
    # of the two forms of the root the one without a difference of like numbers
    share = slope / (slope + bend + root)
    return jnp.where(square >= 0.0, share * step_size, jnp.nan)


def is_finished(state: SearchState) -> Array:
    """True if neither the search nor its curvature, of a point with all digits, has anything left to evaluate."""
    flags = (
        state.is_searching,
        state.num_probes,
        state.num_iterations,
        False if state.is_coarse is None else state.is_coarse,
    )
    if not any(isinstance(flag, jax.core.Tracer) for flag in flags):
        flags = jax.device_get(flags)  # NumPy compiles nothing
    is_searching, num_probes, num_iterations, is_coarse = flags
    is_probed = (num_probes >= 2 * state.values.size) | (num_iterations == 0)
    return ~is_searching & (is_probed | is_coarse)


def proposal(state: SearchState, tol: float) -> Array:
    """Place of the next evaluation of a search, shape ``(d,)``: a trial point, or a probe of the curvature.

    :param float tol: as given to :func:`search`.
    """
    step = difference_step(state.values.dtype, tol)
    axis, side = state.num_probes // 2, state.num_probes % 2
    probe = state.values.at[axis].add(jnp.where(side == 0, step, -step))
    return jnp.where(state.is_searching, state.values + state.step_size * state.direction, probe)


def take(state: SearchState, trial: Array, new: Evaluation, tol: float, max_iterations: int | Array) -> SearchState:
    """A search after the evaluation that it has asked for.

    :param trial: the point, from :func:`proposal`; other parameters are those of :func:`search`.
    """
    axis, side = state.num_probes // 2, state.num_probes % 2
    searched = _line_search(state, trial, new, tol, max_iterations)
    probed = state._replace(num_probes=state.num_probes + 1, probes=state.probes.at[axis, side].set(new.gradient))
    state = _select(state.is_searching, searched, probed)
    moved = None if new.moves is None or state.moved is None else state.moved | new.moves
    return state._replace(num_evaluations=state.num_evaluations + 1, moved=moved)


def search(
    evaluate: Callable[..., Evaluation],
    state: SearchState,
    *,
    num_evaluations: int | Array,
    tol: float,
    max_iterations: int | Array,
    trace_length: int | None = None,
    field_tol: object = None,
) -> tuple[SearchState, Array]:
    """Go on with a search for at most ``num_evaluations`` evaluations.

    :param evaluate: as made by :func:`~.evaluation.evaluation_fn`.
    :param SearchState state: from :func:`init_search` or an earlier call.
    :param int num_evaluations: the length of this chunk, at most ``trace_length``.
    :param float tol: the search has converged when no derivative of the objective exceeds this; also the accuracy
        that the curvature's difference step reckons with.
    :param int max_iterations: accepted steps of the search at most.
    :param int trace_length: of the trace, where ``num_evaluations`` is traced.
    :param field_tol: if given, ``evaluate`` takes the :func:`~.digits.field_tolerance` as a third argument.
    :return: the new state, and the objective at each evaluation of this chunk, of shape ``(trace_length,)``, ``nan``
        where none was made.
    """
    start = state.num_evaluations

    def unfinished(carry: tuple[SearchState, Array]) -> Array:
        state, _ = carry
        return ~is_finished(state) & (state.num_evaluations - start < num_evaluations)

    def advance(carry: tuple[SearchState, Array]) -> tuple[SearchState, Array]:
        state, trace = carry
        trial = proposal(state, tol)
        tols = () if field_tol is None else (field_tolerance(state, field_tol, tol, max_iterations),)
        new = evaluate(trial, state.best.state, *tols)
        trace = trace.at[state.num_evaluations - start].set(
            jnp.where(jnp.isfinite(new.objective), new.objective, -jnp.inf)
        )
        return take(state, trial, new, tol, max_iterations), trace

    length = num_evaluations if trace_length is None else trace_length
    trace = jnp.full((length,), jnp.nan, state.best.objective.dtype)
    return jax.lax.while_loop(unfinished, advance, (state, trace))


def maximise(
    evaluate: Callable[[Array, object], Evaluation],
    values: Array,
    state: object,
    *,
    tol: float = 1e-4,
    max_iterations: int = 100,
    with_curvature: bool = True,
) -> SearchState:
    """A whole search in one call: pure, and batched by ``vmap``.

    :param evaluate: as made by :func:`~.evaluation.evaluation_fn`.
    :param values: where to start, shape ``(d,)``.
    :param state: of the algorithm, where the first fit of the field starts.
    :param float tol: largest derivative of the objective at convergence.
    :param int max_iterations: accepted steps at most.
    :param bool with_curvature: false to leave out the ``2 d`` evaluations of the curvature.
    :return: the final state; ``values``, ``best`` and ``converged`` are what one looks for.

    **Example:**

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.infer.hyper.evaluation import evaluation_fn
    >>> from numpyro_ext.infer.hyper.search import maximise
    >>> evaluate = evaluation_fn(
    ...     form_fn=lambda x: x,
    ...     log_prior_fn=lambda x: -0.5 * jnp.sum(x**2),
    ...     solve_fn=lambda form, state: (state, ()),
    ...     log_evidence_fn=lambda x, state: -0.5 * jnp.sum((x - 2.0) ** 2),
    ... )
    >>> print(maximise(evaluate, jnp.zeros(1), ()).values.round(3))
    [1.]
    """
    start = init_search(jax.eval_shape(evaluate, values, state), values, state)
    if not with_curvature:
        start = start._replace(num_probes=jnp.asarray(2 * values.size, jnp.int32))
    limit = max_iterations * _MAX_TRIALS + 2 * values.size
    final, _ = search(evaluate, start, num_evaluations=limit, tol=tol, max_iterations=max_iterations, trace_length=1)
    return final
