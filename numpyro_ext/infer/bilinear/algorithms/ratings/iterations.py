"""Iterations for ratings with latent noise until nothing changes, some of them extrapolated from those before."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from .....linalg.solvers.anderson import History, extrapolated, no_history, remember
from .....structure.bilinear.noisy.form import NoisyBilinear
from .. import hybrid
from ..messages import Message, Moments, as_message, divided, next_damping, times
from . import cuts as cut_points
from .noise import ALL_SWEEPS, FEW_SWEEPS, NoiseInfo, NoiseState, at_points, step
from .side_hyper import SidePosterior, prior_message
from .variances import GammaMessage, Rule, gamma_of

CHUNK = 20
"""Iterations of one call, each of which learns anew how to extrapolate."""
_PERIOD, _MEMORY = 4, 7
_SINGULAR = 1e-13
"""Slow iterations change by nearly the same again and again, and what differs is what says where they go."""


class Paced(NamedTuple):
    """Messages, and the pace at which they change: slower where an iteration moved further than the last."""

    messages: NoiseState
    damping: Array
    change: Array
    """Length of the last change of all means, in their deviations and without damping; infinite where the next may be
    longer."""
    num_steps: Array
    """Iterations so far."""
    num_sweeps: Array
    """Sweeps of variational Bayes in the last of them."""


def paced(messages: NoiseState, damping: Array | float, num_steps: int = 0) -> Paced:
    """A state from which iterations begin."""
    dtype = messages.factor.shift.dtype
    far = jnp.asarray(jnp.inf, dtype)
    return Paced(messages, jnp.asarray(damping, dtype), far, jnp.asarray(num_steps), jnp.asarray(0))


def has_settled(paced: Paced, info: NoiseInfo, warm_up: Array | int, tol: Array | float) -> Array:
    """True if an undamped iteration with all sweeps, in which all noise moves as it is told, would change next to
    nothing."""
    is_whole = (info.num_limited == 0) & (paced.num_sweeps == ALL_SWEEPS)
    return (info.change < tol) & is_whole & (paced.num_steps > warm_up)


@partial(jax.jit, static_argnames=("rule", "chunk"))
def iterate(
    form: NoisyBilinear,
    paced: Paced,
    num_steps: Array,
    damping: Array,
    warm_up: Array,
    tol: Array,
    *,
    rule: Rule,
    chunk: int,
) -> tuple[Paced, NoiseInfo, Array, Array]:
    """Iterations, at most ``chunk``, until one would change next to nothing.

    Few sweeps of variational Bayes each, and all of them once little changes: with all of them from the start vectors
    and factors may chase each other for ever, however much factors are damped.

    Every fourth is extrapolated from the last seven, if all of these had the same pace. Cut points and predictors
    have a common scale and place, which the priors hold loosely, and on which iterations alone go on for hundreds.

    :param NoisyBilinear form: the model.
    :param Paced paced: from where to go on.
    :param num_steps: how many iterations there may be.
    :param damping: largest share of new messages.
    :param warm_up: iterations, from the very first, in which noise keeps its prior.
    :param tol: change at which iterations end.
    :param str rule: see :func:`.noise.step`.
    :param int chunk: length of the trace.
    :return: the state, the last info, estimates of the log evidence padded with nan, and the number of iterations.

    Memory: some fifteen times that of all messages, three kilobytes for each cell with five levels.
    """
    Carry = tuple[Paced, NoiseInfo, History, Array, Array]

    def proceed(carry: Carry) -> Array:
        paced, info, _, _, count = carry
        goes_on: Array = (count < jnp.minimum(num_steps, chunk)) & ~has_settled(paced, info, warm_up, tol)
        return goes_on & ((count == 0) | jnp.isfinite(info.change))

    def advance(carry: Carry) -> Carry:
        paced, last, history, trace, count = carry
        learns_noise = paced.num_steps >= warm_up
        # all sweeps only to see that nothing is left
        num_sweeps = jnp.where(last.change < tol, ALL_SWEEPS, FEW_SWEEPS)
        messages, info = step(form, paced.messages, paced.damping, learns_noise, rule=rule, num_sweeps=num_sweeps)
        point, measure = _packed(paced.messages), partial(_in_deviations, form, paced.messages)
        residual = _packed(messages) - point
        length = jnp.linalg.norm(measure(residual))
        # Where noise begins to move, and with more sweeps, the change grows for once.
        may_grow = (paced.num_steps == warm_up) | (num_sweeps == ALL_SWEEPS)
        before = jnp.where(may_grow, jnp.inf, paced.change)
        pace = next_damping(paced.damping, length / paced.damping, before, damping)
        new = Paced(messages, pace, length / paced.damping, paced.num_steps + 1, num_sweeps)
        history = remember(history, point, residual, length)
        target, is_jump = extrapolated(
            history, measure, period=_PERIOD, largest_change=float("inf"), singular=_SINGULAR
        )
        ahead = _unpacked(form, messages, target)
        is_jump &= _is_sound(form, ahead) & (num_sweeps == FEW_SWEEPS)
        jumped = new._replace(messages=ahead, change=jnp.full_like(length, jnp.inf))
        new = jax.tree.map(partial(jnp.where, is_jump), jumped, new)
        # another pace is another iteration
        is_same = (pace == paced.damping) & (paced.num_steps != warm_up) & (num_sweeps == FEW_SWEEPS)
        history = history._replace(number=jnp.where(is_same, history.number, 0))
        value = hybrid.log_evidence(*at_points(form, messages))
        return new, info, history, trace.at[count].set(value), count + 1

    dtype = paced.messages.factor.shift.dtype
    blank = NoiseInfo(jnp.asarray(jnp.inf, dtype), jnp.asarray(0), jnp.asarray(0))
    start = no_history(_packed(paced.messages), _MEMORY)
    trace = jnp.full((chunk,), jnp.nan, dtype)
    paced, info, _, trace, count = lax.while_loop(proceed, advance, (paced, blank, start, trace, jnp.asarray(0)))
    return paced, info, trace, count


def _natural(state: NoiseState) -> Any:
    """All that determines a state, in natural parameters."""
    sides = tuple((as_message(side.mean), side.precision) for side in state.sides)
    vectors = as_message(state.rows.seen), as_message(state.columns.seen)
    return state.cuts, state.value, state.factor, state.product, vectors, state.scales, sides


def _packed(state: NoiseState) -> Array:
    return ravel_pytree(_natural(state))[0]


def _unpacked(form: NoisyBilinear, like: NoiseState, vector: Array) -> NoiseState:
    cuts, value, factor, product, vectors, scales, sides = ravel_pytree(_natural(like))[1](vector)
    posteriors = tuple(SidePosterior(_moments(mean), precision) for mean, precision in sides)
    blocks = []
    for side, posterior, own in zip(form.sides, posteriors, vectors, strict=True):
        prior = prior_message(side, posterior)
        blocks.append(hybrid.SideState(_moments(own), prior, divided(own, prior)))
    return NoiseState(cuts, value, factor, product, blocks[0], blocks[1], scales, (posteriors[0], posteriors[1]))


def _moments(message: Message) -> Moments:
    return Moments(message.shift / message.precision, 1.0 / message.precision)


def _totals(form: NoisyBilinear, natural: Any) -> tuple[list[Message], list[GammaMessage]]:
    """Posteriors of predictors, vectors, cut points and prior means, and of all precisions."""
    cuts, _, factor, product, vectors, scales, sides = natural
    gaussians = [times(factor, product), *vectors, *(mean for mean, _ in sides)]
    if form.cuts is not None:
        gaussians.append(times(cut_points.boundaries(form, cuts), cuts.prior))
    gammas = [gamma_of(scale, said, of_groups=True) for scale, said in zip(form.scales, scales, strict=True)]
    return gaussians, [*gammas, *(precision for _, precision in sides)]


def _in_deviations(form: NoisyBilinear, state: NoiseState, change: Array) -> Array:
    """Changes of all means in standard deviations, to first order in a change of the natural parameters."""
    natural = _natural(state)
    nothing = jax.tree.map(jnp.zeros_like, natural)
    moved = ravel_pytree(natural)[1](change)
    gaussians, gammas = _totals(form, natural)
    # totals are affine in the messages, and what is in them beside these cancels
    (more, more_gammas), (less, less_gammas) = _totals(form, moved), _totals(form, nothing)
    out = []
    for total, x, y in zip(gaussians, more, less, strict=True):
        own = divided(x, y)
        out.append((own.shift - total.shift / total.precision * own.precision) / jnp.sqrt(total.precision))
    for gamma, new, old in zip(gammas, more_gammas, less_gammas, strict=True):
        by_shape, by_rate = ((a - b) / c for a, b, c in zip(new, old, gamma, strict=True))
        out.append((by_shape - by_rate) * jnp.sqrt(gamma.shape))
    return jnp.concatenate([x.reshape(-1) for x in out])


def _is_sound(form: NoisyBilinear, state: NoiseState) -> Array:
    """True if all posteriors, and all that cells see of the noise, are densities."""
    gaussians, gammas = _totals(form, _natural(state))
    messages = [*gaussians, state.value, state.cuts.prior]
    cavities = [gamma_of(s, said, of_cavities=True) for s, said in zip(form.scales, state.scales, strict=True)]
    positive = [m.precision for m in messages] + [x for gamma in (*gammas, *cavities) for x in gamma]
    is_positive = jnp.stack([jnp.all(x > 0.0) for x in positive])
    return jnp.all(is_positive) & jnp.all(state.factor.precision >= 0.0)
