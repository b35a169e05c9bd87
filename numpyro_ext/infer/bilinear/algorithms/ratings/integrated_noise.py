"""Posteriors of new vectors with their noise integrated out, by a sum over its precision."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import gammaln

from ..messages import Moments
from .cuts import level_probabilities
from .newcomers import Met, NewState, learned, log_evidence, seen_without_own
from .variances import GammaMessage, Rule, gamma_reach

_NUM_NODES = 16
_DROP = 12.0
"""Logs below the peak of the density of the precision that nodes reach."""
_NEGLIGIBLE = 1e-3
"""Share of the mass below which the first and the last node miss nothing, and a node need not have settled."""
_SETTLED = 1e-2
"""Change of a mean, in standard deviations, below which the messages at a node have settled."""


class Integrated(NamedTuple):
    """Posterior of new vectors, and what tells how good it is."""

    state: NewState
    """Without messages of cells."""
    log_evidence: Array
    """Estimates of the log probability of the levels of each new vector, shape ``(num_new,)``."""
    around: GammaMessage
    """Densities of the precisions, as far as the nodes reach."""
    is_missed: Array
    """New vectors whose nodes end where there is still mass, shape ``(num_new,)``."""
    is_at_mode: Array
    """New vectors whose noise is not integrated out, as nodes miss mass or messages do not settle at some of them."""


class _Sums(NamedTuple):
    """Sums over the nodes so far, in units of the largest weight."""

    top: Array
    total: Array
    vectors: Moments
    precision: Moments
    cuts: Moments | None


_Carry = tuple[NewState, Array, Array, _Sums]


@partial(jax.jit, static_argnames=("rule",))
def integrated(
    met: Met, state: NewState, around: GammaMessage, cells: Array, is_used: Array, tol: Array, *, rule: Rule
) -> Integrated:
    r"""Integrate out the first noise precision that each new vector has of its own.

    At each of some precisions the vectors and cut points are those of expectation propagation with the noise given.
    The log evidence as a function of the log precision is the integral of its derivative: that of the log probabilities
    of the levels, where messages are held, as they are stationary. Posteriors are mixtures over the nodes, given by
    their first two moments.

    :param Met met: the new vectors.
    :param NewState state: at the mode of the noise, from :func:`.newcomers.learned` with these cells.
    :param around: gamma densities of the precisions that say where nodes are, shape ``(num_new,)``.
    :param cells: in slots, shape ``(num_new, num_slots)``.
    :param is_used: in that shape.
    :param tol: see :func:`.newcomers.learned`.
    :param str rule: for further factors of the noise, which are met at their modes.

    Cost: sixteen times that of :func:`.newcomers.learned`, from near its end.
    """
    assert state.levels is not None
    left, right = gamma_reach(around, _DROP)
    width = (right - left) / (_NUM_NODES - 1)
    prior = met.own_noise[0]
    unit = around.shape / around.rate
    others = met._replace(own_noise=met.own_noise[1:])
    start = state._replace(noise=state.noise[1:], levels=state.levels._replace(scales=state.levels.scales[1:]))
    zeros = jnp.zeros_like(left)

    def visit(carry: _Carry, node: Array) -> tuple[_Carry, tuple[Array, Array, Array]]:
        before, last_slope, log_likelihood, sums = carry
        t = left + node * width
        given = others._replace(noise=others.noise * jnp.exp(-t)[met.person])
        found, change = learned(given, before, cells, is_used, tol, rule=rule)
        slope = _slope(given, found, cells, is_used)
        log_likelihood = jnp.where(node > 0, log_likelihood + 0.5 * width * (last_slope + slope), log_likelihood)
        log_weight = log_likelihood + prior.shape * t - prior.rate * jnp.exp(t)
        sums = _added(sums, log_weight, state, found, jnp.exp(t) / unit - 1.0, met.person)
        evidence = log_evidence(given, found, cells, is_used) - log_likelihood
        return (found, slope, log_likelihood, sums), (log_weight, evidence, change)

    blank = _Sums(
        jnp.full_like(left, -jnp.inf),
        zeros,
        jax.tree.map(jnp.zeros_like, state.vectors),
        Moments(zeros, zeros),
        None if met.own_cuts is None else jax.tree.map(jnp.zeros_like, state.cuts),
    )
    every = lax.scan(visit, (start, zeros, zeros, blank), jnp.arange(_NUM_NODES))
    (*_, sums), (log_weights, evidence, changes) = every
    own = _mixture(sums.vectors, sums.total)
    vectors = Moments(state.vectors.mean + own.mean, own.variance)
    first, spread = _mixture(sums.precision, sums.total, is_matrix=False)
    first = unit * (1.0 + first)
    spread = unit**2 * spread
    noise = GammaMessage(first**2 / spread, first / spread)
    cuts = state.cuts
    if sums.cuts is not None and cuts is not None:
        moved = _mixture(sums.cuts, sums.total[met.person][:, None], is_matrix=False)
        cuts = Moments(cuts.mean + moved.mean, moved.variance)

    mass = sums.top + jnp.log(sums.total * width) + prior.shape * jnp.log(prior.rate) - gammaln(prior.shape)
    shares = jnp.exp(log_weights - sums.top) / sums.total
    is_heard = jnp.any(is_used, axis=1)
    is_missed = is_heard & ~(jnp.maximum(shares[0], shares[-1]) < _NEGLIGIBLE)
    is_sound = ~is_missed & jnp.all((shares < _NEGLIGIBLE) | (changes < _SETTLED), axis=0)
    is_density = jnp.isfinite(noise.shape) & jnp.isfinite(noise.rate) & (spread > 0.0)
    is_sound &= is_density
    is_new = is_heard & is_sound
    next_around = GammaMessage(*(jnp.where(is_density, x, y) for x, y in zip(noise, around, strict=True)))

    def chosen(new: Array, old: Array, which: Array = is_new) -> Array:
        return jnp.where(which.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    if met.own_cuts is not None and cuts is not None and state.cuts is not None:
        cuts = Moments(*(chosen(new, old, is_new[met.person]) for new, old in zip(cuts, state.cuts, strict=True)))
    vectors, noise = jax.tree.map(chosen, (vectors, noise), (state.vectors, state.noise[0]))
    values = log_evidence(met, state, cells, is_used)
    return Integrated(
        NewState(vectors, (noise, *state.noise[1:]), cuts),
        chosen(mass + evidence[_NUM_NODES // 2], values),
        next_around,
        is_missed,
        is_heard & ~is_sound,
    )


def _slope(met: Met, state: NewState, cells: Array, is_used: Array) -> Array:
    """Derivatives of the log evidence by the log of the noise precision of each new vector."""
    cavity, cuts, noise, level = seen_without_own(met, state, cells)

    def log_chance(change: Array) -> Array:
        chance = level_probabilities(cavity, cuts, noise * jnp.exp(-change))
        return jnp.log(jnp.take_along_axis(chance, level[:, None], 1)[:, 0])

    each = jax.jvp(log_chance, (jnp.zeros_like(noise),), (jnp.ones_like(noise),))[1]
    return jnp.sum(jnp.where(is_used.reshape(-1), each, 0.0).reshape(is_used.shape), 1)


def _added(sums: _Sums, log_weight: Array, start: NewState, found: NewState, precision: Array, person: Array) -> _Sums:
    """Sums with one node more; means are added up as what they are more than at the start."""
    top = jnp.maximum(sums.top, log_weight)
    kept, new = jnp.exp(sums.top - top), jnp.exp(log_weight - top)

    def add(old: Array, value: Array) -> Array:
        by_vector = (-1, *(1,) * (value.ndim - 1))
        return kept.reshape(by_vector) * old + new.reshape(by_vector) * value

    away = found.vectors.mean - start.vectors.mean
    square = found.vectors.variance + away[:, :, None] * away[:, None, :]
    cuts = sums.cuts
    if cuts is not None:
        assert found.cuts is not None and start.cuts is not None
        moved = found.cuts.mean - start.cuts.mean
        old, share = kept[person][:, None], new[person][:, None]
        cuts = Moments(old * cuts.mean + share * moved, old * cuts.variance + share * (found.cuts.variance + moved**2))
    return _Sums(
        top,
        add(sums.total, jnp.ones_like(top)),
        Moments(add(sums.vectors.mean, away), add(sums.vectors.variance, square)),
        Moments(add(sums.precision.mean, precision), add(sums.precision.variance, precision**2)),
        cuts,
    )


def _mixture(sums: Moments, total: Array, *, is_matrix: bool = True) -> Moments:
    """Mean and variance from sums of values and of squares."""
    if not is_matrix:
        mean = sums.mean / total
        return Moments(mean, sums.variance / total - mean**2)
    mean = sums.mean / total[:, None]
    return Moments(mean, sums.variance / total[:, None, None] - mean[:, :, None] * mean[:, None, :])
