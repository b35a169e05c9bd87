"""One sweep of expectation propagation: sites that are proposed, the way to them, and the size of the next step."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from .....linalg.gaussian.conditioning import LinearGaussian
from .....linalg.gaussian.marginals import Marginals, relative_change
from .....linalg.solvers.anderson import History, extrapolated, remember
from .....structure.latent_gaussian import LatentGaussian
from .evidence_of_sites import evidence_at
from .held_factor import look_ahead, may_look_ahead, with_space, without_space
from .opening import Info, State, in_deviations, is_proper, opened, refresh_and_hold, sites_of
from .sequential import sweep_sequentially
from .tilting import least_precision, loses_cavity, propose, tilt

Schedule = Literal["parallel", "sequential"]

_MIN_STEP_SIZE = 1.0 / 64.0
"""Fraction of the way after six halvings: what does not settle then is not for want of damping."""
_SLOW_DECREASE = 0.8
"""Ratio of successive changes, ten sweeps to a digit, from which turning back costs more than damping."""
_OF_ROUNDING = 0.45
"""Power of the rounding unit below which moves to and fro may be rounding: shorter steps make it a larger part."""
_RECOVERY_OF_STEP = 1.25
"""Growth of the step size in a sweep that goes on in the direction of the last: three of them undo a halving."""


class AtHand(NamedTuple):
    """Findings of a loop of sweeps beyond the state."""

    held: Any
    """The posterior at the sites, without its space; ``None`` where it is not held."""
    is_taken: Array
    """False where the evidence at the sites is all that is asked for."""
    share: Array
    """Change of marginals, seen beforehand, below which the sweep is not taken."""


class Swept(NamedTuple):
    """Outcome of :func:`sweep_once`."""

    state: State
    info: Info
    history: History | None
    held: Any
    is_untaken: Array
    """True if the sweep was seen to change nothing, and was not taken."""


def sweep_once(
    form: LatentGaussian,
    prior: LinearGaussian,
    state: State,
    damping: float,
    adapt_damping: bool,
    power: ArrayLike,
    schedule: Schedule,
    history: History | None = None,
    at_hand: AtHand | None = None,
) -> Swept:
    """Sweep over all factors; parameters as of :func:`~.expectation_propagation.step`.

    :param History history: sweeps from which others are extrapolated, if they are.
    :param AtHand at_hand: what a loop knows of the state.
    """
    if schedule not in ("parallel", "sequential"):
        raise ValueError(f"Unknown schedule {schedule!r}: expected 'parallel' or 'sequential'.")
    is_start = state.is_start
    size = jnp.where(is_start, 1.0, jnp.minimum(state.step_size, 1.0 - damping))
    held, is_taken = (None, None) if at_hand is None else at_hand[:2]
    looks_ahead = held is not None and history is None and may_look_ahead(form, power)
    found = _propose(form, prior, state, size, power, at_hand if looks_ahead else None)
    precision, shift, skipped = found.precision, found.shift, found.skipped
    if is_taken is not None:
        is_taken &= ~found.is_untaken
    precision = state.site_precision + size * (precision - state.site_precision)
    shift = state.site_shift + size * (shift - state.site_shift)
    opening = (*opened(form, state, precision, shift), jnp.zeros_like(skipped))
    if schedule == "parallel":
        swept = precision, shift, skipped
        precision, shift, skipped = jax.tree.map(partial(jnp.where, is_start), opening, swept)
    else:
        sweep = partial(sweep_sequentially, form, prior, state.site_precision, state.site_shift, size, power)
        precision, shift, skipped = lax.cond(is_start, lambda: opening, sweep)
    is_jump = jnp.asarray(False)
    if history is not None:
        residual = jnp.concatenate([precision, shift]) - sites_of(state)
        history = remember(history, sites_of(state), residual, state.max_change)
        target, is_jump = extrapolated(history, partial(in_deviations, form, state.marginals))
        least = least_precision(form, precision.dtype)
        precision = jnp.where(is_jump, jnp.maximum(target[: form.num_rows], least), precision)
        shift = jnp.where(is_jump, target[form.num_rows :], shift)

    def settled() -> tuple[Marginals, Any]:
        marginals, posterior = refresh_and_hold(form, prior, precision, shift)
        return marginals, None if held is None else without_space(posterior)

    # A loop that wants no more than the evidence is spared the algebra.
    marginals, now_held = (
        settled() if is_taken is None else lax.cond(is_taken, settled, lambda: (state.marginals, held))
    )
    is_sound = is_proper(marginals)
    is_sound &= ~loses_cavity(form, state.marginals, marginals, (state.site_precision, precision), power)
    # There is nothing to go back to before the opening.
    is_sound |= is_start
    move = relative_change(marginals, state.marginals) / size
    # What an extrapolation changes is not how far it was from the fixed point.
    is_plain = ~(is_start | is_jump)
    max_change = jnp.where(is_sound & is_plain, jnp.max(jnp.abs(move)), jnp.inf)
    move = jnp.where(is_plain, move, 0.0)
    next_size = _adapted(state, size, damping, move, max_change) if adapt_damping else size
    next_size = jnp.maximum(jnp.where(is_sound | is_jump, next_size, 0.5 * size), _MIN_STEP_SIZE * (1.0 - damping))
    next_size = jnp.where(is_start, 1.0 - damping, next_size)
    moved = State(precision, shift, marginals, next_size, max_change, move, jnp.asarray(False))
    kept = state._replace(step_size=next_size, max_change=max_change)
    moved, held = jax.tree.map(partial(jnp.where, is_sound), (moved, now_held), (kept, held))
    known = state._replace(max_change=found.foreseen)
    state = jax.tree.map(partial(jnp.where, found.is_untaken), known, moved)
    if history is not None:  # another step size is another iteration
        is_same = is_sound & ~is_start & (next_size == size)
        history = history._replace(number=jnp.where(is_same, history.number, 0))
    max_change = jnp.where(found.is_untaken, found.foreseen, max_change)
    info = Info(found.objective, max_change, jnp.sum(skipped), skipped, size)
    return Swept(state, info, history, held, found.is_untaken)


class _Proposed(NamedTuple):
    """Sites that match the tilted moments, and what is known before the way to them is gone."""

    objective: Array
    """Log evidence at the sites of the state."""
    precision: Array
    shift: Array
    skipped: Array
    is_untaken: Array
    """True if the sweep is seen to change nothing."""
    foreseen: Array
    """Bound of what it changes."""


def _propose(
    form: LatentGaussian, prior: LinearGaussian, state: State, size: Array, power: ArrayLike, at_hand: AtHand | None
) -> _Proposed:
    """Proposals, with a look ahead where the posterior at the sites is at hand."""
    is_start, is_untaken, foreseen = state.is_start, jnp.asarray(False), state.max_change
    if at_hand is not None:
        is_whole = ~is_start & (size == 1.0)
        looked = look_ahead(form, prior, with_space(prior, at_hand.held), state, power, is_whole)
        objective, precision, shift, skipped = looked[:4]
        foreseen = looked.bound(state, at_hand.share)
        is_untaken = ~is_start & at_hand.is_taken & (foreseen < 2.0 * at_hand.share)
    else:
        sites = state.site_precision, state.site_shift
        tilted = tilt(form, state.marginals, *sites, power)
        objective = evidence_at(form, state.marginals, sites, tilted, power)
        precision, shift, skipped = propose(form, *sites, tilted, power)
    return _Proposed(jnp.where(is_start, jnp.nan, objective), precision, shift, skipped, is_untaken, foreseen)


def _adapted(state: State, size: Array, damping: float, move: Array, max_change: Array) -> Array:
    """Step size after a move: a sweep that turns back on the one before has overshot, which calls for damping unless
    the turns die out, or are rounding."""
    along = jnp.sum(move * state.last_move)
    overshoots = (along < 0) & (max_change > _SLOW_DECREASE * state.max_change)
    overshoots &= max_change > float(jnp.finfo(move.dtype).eps) ** _OF_ROUNDING
    longer = jnp.minimum(_RECOVERY_OF_STEP * size, 1.0 - damping)
    return jnp.where(overshoots, 0.5 * size, jnp.where(along > 0, longer, size))
