"""Paths from a prior, or from a posterior on other data, to a posterior, and particles that are weighed along them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import logsumexp

from ....linalg import saved_as
from ..target import Target
from .moves import Movement
from .weights import (
    chain_errors,
    effective_sample_size,
    evidence_variance,
    furthest,
    genealogy_variance,
    increment,
    shares,
)

PathName = Literal["tempered", "data"]


@saved_as("numpyro_ext.StandardParticles")
class Particles(NamedTuple):
    """Weighted particles somewhere on the way from the prior to the posterior."""

    position: Array
    """Position on the path, from zero, the prior, to one, the posterior."""
    vectors: Array
    """In the coordinates of the target, shape ``(particles, size)``."""
    log_weights: Array
    log_evidence: Array
    """Log evidence of the distribution at the position."""
    ancestors: Array
    """For each particle the number of the draw from the prior that it comes from."""
    log_pairs: Array
    """See :func:`~numpyro_ext.infer.monte_carlo.kernels.weights.genealogy_variance`."""
    variance: Array
    """Variance of the log evidence, if two rounds of moves forget where they began: a sum over the weighings before
    resamplings."""
    parents: Array
    """The chain that each chain begins at: as many numbers as there are particles, or parents in waste-free runs."""
    parent_errors: Array
    """See :func:`~numpyro_ext.infer.monte_carlo.kernels.weights.evidence_variance`."""
    log_scale: Array
    """Log scale of the steps of the kernel."""
    log_likelihood: Array
    """Log likelihood of all data at the vectors, where the position is one: an update need not compute it again."""


class Ladder(NamedTuple):
    """Rules by which particles go along a path; static in compiled programs."""

    path: PathName
    threshold: float
    movement: Movement
    watch: tuple[str, ...]
    """Sites that moves are to forget; all of the vector if there are none."""
    num_parents: int
    """Number of particles that are chosen when resampling; fewer than there are particles in waste-free runs, which
    keep all places of their moves."""


class Way(NamedTuple):
    """Densities along the path to a model, from its prior or from the posterior on other data."""

    target: Target
    data: list[Array]
    before: Target | None
    """The model on the data that the path starts from, if it does."""
    old_data: list[Array]
    places: tuple[Array, Array] | None
    """Place of each term's datum on the path, and the number of data; ``None`` where all terms count alike."""

    def start(self, x: Array) -> Array:
        """Log likelihood where the path starts."""
        return jnp.zeros((), x.dtype) if self.before is None else self.before.log_likelihood(x, self.old_data)

    def change(self, x: Array, start: Array) -> Array:
        """Change of the log density along the path, beside the part that counts from its start."""
        if self.places is not None:
            found = self.target.densities(x, self.data).log_likelihood.values()
            terms = jnp.concatenate([jnp.ravel(term) for term in found])
            return jnp.where(jnp.isnan(terms), -jnp.inf, terms)
        new = self.target.log_likelihood(x, self.data)
        return jnp.reshape(jnp.where(jnp.isfinite(start), new - start, -jnp.inf), (1,))

    def shares(self, position: Array) -> Array:
        """Shares of the change that count at a position."""
        return shares(position, *(self.places or (None, None)))

    def log_likelihood_at(self, position: Array) -> Callable[[Array], Array]:
        """Log likelihood of a vector at a position."""
        at = self.shares(position)

        def log_likelihood(x: Array) -> Array:
            # where all that is new counts in full, what was before does not
            zero = jnp.zeros((), x.dtype)
            start = zero if self.before is None else lax.cond(at[0] >= 1.0, lambda _: zero, self.start, x)
            return start + increment(self.change(x, start)[None], jnp.zeros_like(at), at)[0]

        return log_likelihood


class Weighed(NamedTuple):
    """Particles that were weighed at their next position, where they are."""

    particles: Particles
    size: Array
    """Effective number of them."""
    num_alive: Array
    """Particles of positive weight."""
    variance: Array
    """Variance of the log evidence, as :attr:`Particles.variance`, with this weighing."""
    error: Array
    """The same by the genealogy, where that is larger."""
    has_moved: Array
    """False of draws from the prior, which are chains of one."""
    singles: Array
    """Errors of draws from the prior, ``(particles,)``; see :func:`chain_errors`."""
    chains: Array
    """Errors of chains, ``(chains,)``."""


def weigh(particles: Particles, way: Way, ladder: Ladder, batch_size: int) -> Weighed:
    """Go as far along a path as the effective number of particles allows.

    :param int batch_size: particles whose densities are computed at the same time.
    """
    from blackjax.smc.solver import dichotomy

    number, num_chains = len(particles.vectors), ladder.num_parents

    def starts(_: object) -> Array:
        found: Array = lax.map(way.start, particles.vectors, batch_size=batch_size)
        return found

    # an update begins where the log likelihoods of the data before are known
    is_begun, known = particles.position > 0.0, particles.log_likelihood
    start = starts(None) if way.before is None else lax.cond(is_begun, starts, lambda _: known, None)
    terms = lax.map(lambda xb: way.change(*xb), (particles.vectors, start), batch_size=batch_size)
    now = way.shares(particles.position)
    position = furthest(
        particles.log_weights,
        lambda at: increment(terms, now, way.shares(at)),
        particles.position,
        ladder.threshold,
        partial(dichotomy, eps=1e-6, max_iter=200),
    )
    log_weights = particles.log_weights + increment(terms, now, way.shares(position))
    log_weights = jnp.where(jnp.isnan(log_weights), -jnp.inf, log_weights)
    log_evidence = particles.log_evidence + logsumexp(log_weights) - logsumexp(particles.log_weights)
    has_moved = particles.log_pairs > np.log(number / (number - 1.0)) * 1.5
    singles, chains = chain_errors(log_weights, number), chain_errors(log_weights, num_chains)
    added = evidence_variance(chains, particles.parents, particles.parent_errors, number)
    is_waste_free = num_chains < number
    if is_waste_free:
        first = evidence_variance(singles, jnp.arange(number), jnp.zeros(number), number)
        added = jnp.where(has_moved, added, first)
    error = variance = particles.variance + added
    if not is_waste_free:
        error = jnp.maximum(variance, genealogy_variance(log_weights, particles.ancestors, particles.log_pairs))
    weighed = particles._replace(
        position=position,
        log_weights=log_weights,
        log_evidence=log_evidence,
        log_likelihood=start + jnp.sum(terms, -1),
    )
    num_alive = jnp.sum(jnp.isfinite(log_weights))
    size = effective_sample_size(log_weights)
    return Weighed(weighed, size, num_alive, variance, error, has_moved, singles, chains)
