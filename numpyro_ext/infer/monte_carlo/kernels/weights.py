"""Weights of particles along a path of distributions: how far the next step goes, what evidence it adds, its error."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp

_SMALLEST_STEP = 1e-12


def normalised(log_weights: Array) -> Array:
    """Weights that sum to one."""
    return jnp.exp(log_weights - logsumexp(log_weights))


def effective_sample_size(log_weights: Array) -> Array:
    """Squared sum of the weights over the sum of their squares, between one and their number (Kong et al. 1994)."""
    return jnp.exp(2.0 * logsumexp(log_weights) - logsumexp(2.0 * log_weights))


def shares(position: Array, places: Array | None, counts: Array | None) -> Array:
    """Share of each term of the log likelihood that counts at a position of the path, between zero and one.

    :param position: from zero, the prior, to one, the posterior.
    :param places: of the terms along their data, counted from zero; ``None`` for tempering, which takes equal shares of
        all of them. Else data come one after the other, the one at the position with a share of its own.
    :param counts: of data at the site of each term.
    """
    if places is None or counts is None:
        return jnp.reshape(position, (1,))
    return jnp.clip(position * counts - places, 0.0, 1.0)


def increment(terms: Array, before: Array, after: Array) -> Array:
    """Increment of the log weights, for shares that grow (or shrink, as where data are taken back).

    :param terms: of the log likelihood, shape ``(particles, terms)``; minus infinity is allowed.
    :param before: shares, shape ``(terms,)``.
    :param after: the same.
    """
    change = after - before
    # nothing times minus infinity is nothing
    return jnp.sum(jnp.where(change == 0.0, 0.0, change * terms), axis=-1)


def furthest(
    log_weights: Array, change: Callable[[Array], Array], position: Array, threshold: float, solve: Callable[..., Array]
) -> Array:
    """The furthest position of the path at which the effective sample size is still at the threshold.

    Particles that no step could keep, as the next datum is impossible there, are not counted.

    :param log_weights: at the present position, shape ``(particles,)``.
    :param change: from a position to the change of the log weights.
    :param position: the present one, below one.
    :param float threshold: share of the particles.
    :param solve: of BlackJAX's solvers, ``dichotomy``.
    """
    rest = 1.0 - position
    smallest = jnp.maximum(jnp.asarray(_SMALLEST_STEP, rest.dtype), 4.0 * jnp.finfo(rest.dtype).eps) * rest
    alive = jnp.isfinite(log_weights + change(position + smallest))
    number = jnp.sum(jnp.where(alive, 1, 0))
    # particles that weigh unequally already are worth less than their number
    least = jnp.minimum(threshold * number, 0.999 * effective_sample_size(jnp.where(alive, log_weights, -jnp.inf)))

    def spare(step: Array) -> Array:
        size = effective_sample_size(log_weights + change(position + step))
        return jnp.where(jnp.isnan(size), -1.0, size / least - 1.0)

    found = solve(spare, smallest, rest)
    return jnp.where(found >= rest * (1.0 - 1e-9), 1.0, position + jnp.where(jnp.isnan(found), smallest, found))


def chain_errors(log_weights: Array, num_chains: int) -> Array:
    """Mean weight of each chain over that of all, less one.

    :param log_weights: shape ``(particles,)``; the particles of a chain stand ``num_chains`` apart.
    :param int num_chains: particles, or in waste-free runs as many as there are parents.
    :return: shape ``(num_chains,)``.
    """
    return num_chains * jnp.sum(normalised(log_weights).reshape(-1, num_chains), 0) - 1.0


def evidence_variance(errors: Array, parents: Array, parent_errors: Array, most_parents: int) -> Array:
    r"""Contribution of one weighing to the relative variance of the evidence.

    The error of a weighing is the mean of those of its chains, and chains that begin at particles of one chain before
    remember it in part:

    .. math::

        \frac{1}{M (M - 1)} \sum_m e_m^2 + \frac{1}{M^2} \sum_{m \ne n, p_m = p_n} e_m e_n
        + \frac{2}{M} \sum_m e_m \frac{e'_{p_m}}{M'} .

    That is the estimate from the genealogy of a run (Chan and Lai 2013; Lee and Whiteley 2018) cut off after one
    generation (Olsson and Douc 2019), as moves let nothing through to the next: lines that are older are few, and what
    is told by them is noise. Holds for multinomial resampling.

    :param errors: :math:`e`, by :func:`chain_errors`, shape ``(chains,)``.
    :param parents: :math:`p`, the chain that each begins at; all different where they have none.
    :param parent_errors: :math:`e'_p / M'` of each chain; zeros where they have none.
    :param int most_parents: above the largest of ``parents``.
    """
    number, own = len(errors), jnp.sum(jnp.square(errors))
    families = jnp.zeros(most_parents, errors.dtype).at[parents].add(errors)
    siblings = jnp.sum(jnp.square(families)) - own
    return own / (number * (number - 1.0)) + siblings / number**2 + 2.0 * jnp.mean(errors * parent_errors)


def genealogy_variance(log_weights: Array, ancestors: Array, log_pairs: Array) -> Array:
    r"""Relative variance of the evidence from the genealogy of one run (Lee and Whiteley 2018, eqs. 9 to 11).

    It is :math:`1 - c \sum_{i, j: E_i \ne E_j} W_i W_j`, where :math:`E` are the draws from the prior that particles
    descend from, :math:`W` weights, and :math:`c = \prod_t N_t / (N_t - 1)` has a factor for the draws and one for
    every multinomial resampling. Other kinds of resampling make it too small.

    :param log_weights: at the end, shape ``(particles,)``.
    :param ancestors: :math:`E`.
    :param log_pairs: :math:`\log c`.
    """
    weights = normalised(log_weights)
    families = jnp.zeros_like(weights).at[ancestors].add(weights)
    return jnp.maximum(1.0 - jnp.exp(log_pairs) * (1.0 - jnp.sum(jnp.square(families))), 0.0)
