r"""Scores of a committee: what weighted members that each give probabilities to outcomes say together, on arrays.

``log_p`` holds :math:`\log p(y \mid \theta_s)`, members on the first axis and outcomes on the last; candidates are in
between. Larger scores are better; nats throughout.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ...potentials import Potential
from ...potentials.information import entropy_term, excess_terms
from ...potentials.outcomes import log_predictive_probabilities, log_probabilities

_FURTHEST, _NUM_VOTE_NODES = 8.5, 401

BiasCorrection = Literal["none", "delta", "jackknife"]


def mixture(log_p: ArrayLike, weights: ArrayLike | None = None) -> Array:
    r"""Log of :math:`\bar p(y) = \sum_s w_s p(y \mid \theta_s)`, members on the first axis."""
    log_p = jnp.asarray(log_p)
    log_weights = jnp.log(_normalised(weights, log_p)).reshape(-1, *(1,) * (log_p.ndim - 1))
    return jax.nn.logsumexp(log_p + log_weights, axis=0)


def entropy(log_p: ArrayLike) -> Array:
    """Entropy of the last axis: of a mixture the score of maximum entropy sampling."""
    return jnp.sum(entropy_term(jnp.asarray(log_p)), axis=-1)


def committee_information(
    log_p: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    bias_correction: BiasCorrection = "none",
    effective_sample_size: float | None = None,
) -> Array:
    r"""Information in an outcome about which member is right: :math:`\sum_s w_s KL[p_s \| \bar p]`.

    Equal to the entropy of the mixture less the mean entropy (Houlsby 2014, eq. 2.12), and to the disagreement of a
    committee by its divergence (McCallum and Nigam 1998). Sums of terms that are not negative, so that small values
    keep their digits. Of a sample from the posterior it is below the information about the parameters by about
    :math:`\frac{1}{2S} \sum_y \operatorname{Var} p(y \mid \theta) / \bar p(y)`, which ``"delta"`` adds and
    ``"jackknife"`` takes from leaving members out; the results may be negative.

    :param log_p: shape ``(members, ..., outcomes)``.
    :param weights: of the members, shape ``(members,)``; equal if left out.
    :param str bias_correction: see above.
    :param float effective_sample_size: in the place of the number of members, as of draws from a chain; by default
        :math:`1 / \sum w^2`.
    :return: of the shape of the candidates; zero for one member.
    :raises ValueError: for weights that are negative or all zero, and corrections of a single member.

    **Example:**

    >>> p = jnp.array([[0.9, 0.1], [0.2, 0.8]])
    >>> print(committee_information(jnp.log(p)).round(4))
    0.2754
    """
    log_p = jnp.asarray(log_p)
    w = _normalised(weights, log_p)
    plain = _information(log_p, w)
    if bias_correction == "none":
        return plain
    size: Any = effective_sample_size
    if size is None:
        size = len(w) if weights is None else 1.0 / jnp.sum(w**2)
    if not isinstance(size, jax.core.Tracer) and not float(size) > 1.0:
        raise ValueError(f"A bias correction needs an effective sample size above one; this one is {float(size):.3g}.")
    if bias_correction == "delta":
        p, mean = jnp.exp(log_p), jnp.exp(mixture(log_p, w))
        variance = jnp.tensordot(w, jnp.square(p - mean), 1)
        return plain + 0.5 / (size - 1.0) * jnp.sum(jnp.where(mean > 0.0, variance / mean, 0.0), axis=-1)

    def without(number: Array) -> Array:
        left = jnp.where(jnp.arange(len(w)) == number, 0.0, w)
        return _information(log_p, left / jnp.sum(left))

    # of weighted members, each leaves with its weight
    others = jnp.tensordot(w, jax.lax.map(without, jnp.arange(len(w))), 1)
    return size * plain - (size - 1.0) * others


def nested_information(log_p: ArrayLike, weights: ArrayLike | None = None) -> Array:
    r"""Information about a part of the parameters, the rest being a nuisance (Houlsby 2014, eq. 2.15).

    :param log_p: shape ``(members, inner members, ..., outcomes)``: for each value of the part draws of the rest given
        it.
    :param weights: of the values of the part, shape ``(members,)``.
    :return: of the shape of the candidates.
    :raises ValueError: for an array without inner members.
    """
    log_p = jnp.asarray(log_p)
    if log_p.ndim < 3:
        raise ValueError(f"log_p must have shape (members, inner members, ..., outcomes); got {log_p.shape}.")
    inner = jax.nn.logsumexp(log_p, axis=1) - jnp.log(log_p.shape[1])
    return committee_information(inner, weights)


def least_confidence(log_mixture: ArrayLike) -> Array:
    """One minus the largest probability."""
    return 1.0 - jnp.exp(jnp.max(jnp.asarray(log_mixture), axis=-1))


def margin(log_mixture: ArrayLike) -> Array:
    """Minus the distance of the two largest probabilities."""
    two = jax.lax.top_k(jnp.exp(jnp.asarray(log_mixture)), 2)[0]
    return two[..., 1] - two[..., 0]


def gini(log_mixture: ArrayLike) -> Array:
    """One minus the sum of squared probabilities."""
    return 1.0 - jnp.sum(jnp.exp(2.0 * jnp.asarray(log_mixture)), axis=-1)


def vote_fractions(log_p: ArrayLike, weights: ArrayLike | None = None) -> Array:
    """Share of the members whose likeliest outcome it is, shape ``(..., outcomes)``; ties go to the first."""
    log_p = jnp.asarray(log_p)
    votes = jax.nn.one_hot(jnp.argmax(log_p, axis=-1), log_p.shape[-1], dtype=log_p.dtype)
    return jnp.tensordot(_normalised(weights, log_p), votes, 1)


@functools.partial(jax.jit, static_argnames="number")
def component_tables(potential: Potential, mean: Array, variance: Array, number: int) -> Array:
    """Log probabilities of outcomes by each component, shape ``(components, observations, number)``."""

    def of(component: tuple[Potential, Array, Array]) -> Array:
        one: Any = jax.tree.map(lambda leaf: leaf[None], component)
        return jnp.moveaxis(log_predictive_probabilities(*one, jnp.ones(1, mean.dtype), number), 0, -1)

    return jax.lax.map(of, (potential, mean, variance))


@functools.partial(jax.jit, static_argnames="number")
def vote_shares(potential: Potential, mean: Array, variance: Array, number: int) -> Array:
    """Probabilities that an outcome is the likeliest one, by where along the predictor one takes over from another.

    They are votes of infinitely many members, whose predictors are normal.
    """
    scale = jnp.sqrt(variance)
    nodes = jnp.linspace(-_FURTHEST, _FURTHEST, _NUM_VOTE_NODES, dtype=mean.dtype)

    def at(z: Array) -> Array:
        return log_probabilities(potential, mean + scale * z, number)

    def add(sums: tuple[Array, Array, Array], z: Array) -> tuple[tuple[Array, Array, Array], None]:
        total, before, log_p = sums
        new = at(z)
        old_vote, new_vote = jnp.argmax(log_p, axis=0), jnp.argmax(new, axis=0)

        def lead(table: Array) -> Array:
            first, second = (jnp.take_along_axis(table, vote[None], axis=0)[0] for vote in (old_vote, new_vote))
            return jnp.where(old_vote == new_vote, 0.0, first - second)

        start, end = lead(log_p), lead(new)
        fraction = jnp.where(start > end, start / jnp.where(start > end, start - end, 1.0), 1.0)
        split = jax.scipy.stats.norm.cdf(before + fraction * (z - before))
        ends = jax.scipy.stats.norm.cdf(before), jax.scipy.stats.norm.cdf(z)
        outcomes = jnp.arange(number).reshape(-1, *(1,) * mean.ndim)
        total = total + (outcomes == old_vote) * (split - ends[0]) + (outcomes == new_vote) * (ends[1] - split)
        return (total, z, new), None

    start = jnp.zeros((number, *mean.shape), mean.dtype), nodes[0], at(nodes[0])
    (total, *_), _ = jax.lax.scan(add, start, nodes[1:])
    return jnp.moveaxis(total / jnp.sum(total, axis=0), 0, -1)


def _information(log_p: Array, w: Array) -> Array:
    mean = mixture(log_p, w)
    per_outcome = jnp.tensordot(w, excess_terms(log_p - mean), 1)
    return jnp.sum(jnp.exp(mean) * per_outcome, axis=-1)


def _normalised(weights: ArrayLike | None, log_p: Array) -> Array:
    if weights is None:
        return jnp.full(log_p.shape[0], 1.0 / log_p.shape[0], log_p.dtype)
    w = jnp.asarray(weights, log_p.dtype)
    if w.shape != log_p.shape[:1]:
        raise ValueError(f"There are {log_p.shape[0]} members, and weights have the shape {w.shape}.")
    if isinstance(w, jax.core.Tracer):
        return w / jnp.sum(w)
    if not bool(jnp.all(w >= 0.0)) or not bool(jnp.sum(w) > 0.0):
        raise ValueError("Weights of members must not be negative, nor all zero.")
    return w / jnp.sum(w)
