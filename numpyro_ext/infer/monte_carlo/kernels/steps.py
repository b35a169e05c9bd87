"""One step of sequential Monte Carlo: weigh at the old particles, resample, move under the new distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.scipy.special import logsumexp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ....compilation.quick_jit import quick_jit
from ....linalg import saved_as
from ..target import Target
from .moves import Movement, chance_correlation, move, spread, start_scale
from .weights import (
    chain_errors,
    effective_sample_size,
    evidence_variance,
    furthest,
    genealogy_variance,
    increment,
    normalised,
    shares,
)

PathName = Literal["tempered", "data"]
_MOST_AT_ONCE = 2**23
"""Numbers that the particles which move at the same time may hold."""
_LARGEST_CORRELATION = 0.3
_EVEN = 0.9
"""Share of the particles that they are worth at the end of a run where they need no more moves."""


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


class StepInfo(NamedTuple):
    """Figures of a step."""

    effective_sample_size: Array
    """Effective number of particles before resampling."""
    num_moves: Array
    acceptance: Array
    correlation: Array
    """The largest one that a coordinate has with where it was before the moves."""
    num_evaluations: Array
    log_evidence: Array
    log_evidence_error: Array
    """Standard error by the weighings where moves forget, or by the genealogy if that is larger; see
    :attr:`~numpyro_ext.infer.SMC.log_evidence`."""
    num_alive: Array
    """Particles of positive weight."""


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


class Programs:
    """Compiled functions of a model whose sites and arguments have known shapes.

    :param Target target: the model; its data are arguments of the functions.
    :param Ladder ladder: how particles go.
    """

    def __init__(self, target: Target, ladder: Ladder) -> None:
        self.target, self.ladder = target, ladder
        self._between: dict[int, Any] = {}

    @property
    def largest_correlation(self) -> float:
        """With their start that coordinates may have after moves which were enough."""
        return max(_LARGEST_CORRELATION, chance_correlation(self.ladder.num_parents, self.target.size))

    def _term_shapes(self, data: list[Array]) -> list[tuple[int, ...]]:
        """Shapes of the log likelihoods of the observed sites."""
        vector = jax.ShapeDtypeStruct((self.target.size,), self.target.dtype)
        return [term.shape for term in jax.eval_shape(self.target.densities, vector, data).log_likelihood.values()]

    def _places(self, data: list[Array]) -> tuple[Array, Array]:
        """Place of each term's datum on the path, and the number of data, for every term of the log likelihood."""
        places, counts = [], []
        for shape in self._term_shapes(data):
            number, inner = (shape[0], int(np.prod(shape[1:]))) if shape else (1, 1)
            places.append(np.repeat(np.arange(number), inner))
            counts.append(np.full(number * inner, number))
        dtype = self.target.dtype
        return jnp.asarray(np.concatenate(places), dtype), jnp.asarray(np.concatenate(counts), dtype)

    @cached_property
    def draw(self) -> Callable[..., Particles]:
        """:meth:`from_prior`, compiled."""
        return quick_jit(self.from_prior, is_small=True)

    def from_prior(self, keys: Array, data: list[Array]) -> Particles:
        """Draws from the prior, one for each key."""
        vectors = jax.vmap(lambda key: self.target.draw_prior(key, data))(keys)
        number = len(keys)
        zero = jnp.zeros((), vectors.dtype)
        pairs = jnp.asarray(np.log(number / (number - 1.0)), vectors.dtype)
        scale = jnp.asarray(start_scale(self.ladder.movement.kernel, self.target.size), vectors.dtype)
        log_weights = jnp.zeros(number, vectors.dtype)
        parents = jnp.arange(self.ladder.num_parents)
        none = jnp.zeros(len(parents), vectors.dtype)
        return Particles(
            zero, vectors, log_weights, zero, jnp.arange(number), pairs, zero, parents, none, scale, log_weights
        )

    def step(
        self,
        rng_key: Array,
        number: int,
        particles: Particles,
        data: list[Array],
        old: tuple[Programs, list[Array]] | None = None,
        *,
        is_lazy: bool = False,
    ) -> tuple[Particles, StepInfo]:
        """The next step of the path.

        :param rng_key: of the run.
        :param int number: of the step, folded into the key.
        :param old: the model on the data that the path starts from, in the place of the prior.
        :param bool is_lazy: particles stay where they are if the end is reached and their weights are above the
            threshold; else only if they are worth nearly all of their number.
        """
        name = (id(old[0]) if old else 0) + int(is_lazy)
        if name not in self._between:
            before = old[0].target if old else None
            self._between[name] = (quick_jit(partial(self.advance, before, is_lazy)), old and old[0])
        run = self._between[name][0]
        return run(rng_key, number, particles, data, old[1] if old else [])

    def advance(
        self,
        before: Target | None,
        is_lazy: bool,
        rng_key: Array,
        step: Array,
        particles: Particles,
        data: list[Array],
        old_data: list[Array],
    ) -> tuple[Particles, StepInfo]:
        """Advance by one step; :meth:`step` compiles this."""
        from blackjax.smc.resampling import multinomial
        from blackjax.smc.solver import dichotomy

        target, ladder = self.target, self.ladder
        number = len(particles.vectors)
        batch = self._batch_size(number, data)
        is_tempered = before is not None or ladder.path == "tempered"
        places = None if is_tempered else self._places(data)

        def change_of(x: Array, base: Array) -> Array:
            """Change of the log density along the path, beside the part that counts from its start."""
            if not is_tempered:
                found = target.densities(x, data).log_likelihood.values()
                terms = jnp.concatenate([jnp.ravel(term) for term in found])
                return jnp.where(jnp.isnan(terms), -jnp.inf, terms)
            new = target.log_likelihood(x, data)
            return jnp.reshape(jnp.where(jnp.isfinite(base), new - base, -jnp.inf), (1,))

        def base_of(x: Array) -> Array:
            return jnp.zeros((), x.dtype) if before is None else before.log_likelihood(x, old_data)

        def share(position: Array) -> Array:
            return shares(position, *(places or (None, None)))

        def bases(_: object) -> Any:
            return lax.map(base_of, particles.vectors, batch_size=batch)

        # an update begins where the log likelihoods of the data before are known
        is_begun = particles.position > 0.0
        base = bases(None) if before is None else lax.cond(is_begun, bases, lambda _: particles.log_likelihood, None)
        terms = lax.map(lambda xb: change_of(*xb), (particles.vectors, base), batch_size=batch)
        now = share(particles.position)
        position = furthest(
            particles.log_weights,
            lambda at: increment(terms, now, share(at)),
            particles.position,
            ladder.threshold,
            partial(dichotomy, eps=1e-6, max_iter=200),
        )
        log_weights = particles.log_weights + increment(terms, now, share(position))
        log_weights = jnp.where(jnp.isnan(log_weights), -jnp.inf, log_weights)
        log_evidence = particles.log_evidence + logsumexp(log_weights) - logsumexp(particles.log_weights)
        size = effective_sample_size(log_weights)
        is_waste_free = ladder.num_parents < number
        has_moved = particles.log_pairs > np.log(number / (number - 1.0)) * 1.5
        num_chains = ladder.num_parents
        # draws from the prior are chains of one
        singles, chains = chain_errors(log_weights, number), chain_errors(log_weights, num_chains)
        added = evidence_variance(chains, particles.parents, particles.parent_errors, number)
        if is_waste_free:
            first = evidence_variance(singles, jnp.arange(number), jnp.zeros(number), number)
            added = jnp.where(has_moved, added, first)
        variance = particles.variance + added
        error = variance
        if not is_waste_free:
            error = jnp.maximum(variance, genealogy_variance(log_weights, particles.ancestors, particles.log_pairs))
        num_alive = jnp.sum(jnp.isfinite(log_weights))
        weighed = particles._replace(
            position=position,
            log_weights=log_weights,
            log_evidence=log_evidence,
            log_likelihood=base + jnp.sum(terms, -1),
        )
        nothing, zero = jnp.zeros((), log_weights.dtype), jnp.zeros((), int)
        info = StepInfo(size, zero, nothing, nothing, zero, log_evidence, jnp.sqrt(error), num_alive)

        def moved(_: object) -> tuple[Particles, StepInfo]:
            resample_key, move_key = random.split(random.fold_in(rng_key, step))
            weights = normalised(log_weights)
            chosen = multinomial(resample_key, weights, ladder.num_parents)
            at = share(position)
            zero_level = jnp.zeros((), log_weights.dtype)

            def log_likelihood(x: Array) -> Array:
                # where all that is new counts in full, what was before does not
                base = base_of(x) if before is None else lax.cond(at[0] >= 1.0, lambda _: zero_level, base_of, x)
                return base + increment(change_of(x, base)[None], jnp.zeros_like(at), at)[0]

            def watch(x: Array) -> Array:
                sites = target.constrained(x, data)
                return jnp.concatenate([jnp.ravel(sites[name]) for name in ladder.watch])

            found = move(
                move_key,
                particles.vectors[chosen],
                lambda x: target.log_prior(x, data),
                log_likelihood,
                weights @ particles.vectors,
                spread(particles.vectors, weights),
                particles.log_scale,
                ladder.movement,
                watch if ladder.watch else None,
                keep_path=is_waste_free,
                batch_size=batch,
            )
            ancestors, vectors, levels = particles.ancestors[chosen], found.vectors, found.log_likelihood
            if is_waste_free:
                vectors = jnp.concatenate([particles.vectors[chosen][None], found.path]).reshape(number, -1)
                ancestors = jnp.tile(ancestors, number // ladder.num_parents)
                levels = found.path_levels.ravel()
            parents = jnp.where(has_moved, chosen % num_chains, chosen).astype(particles.parents.dtype)
            parent_errors = jnp.where(has_moved, chains[chosen % num_chains] / num_chains, singles[chosen] / number)
            pairs = particles.log_pairs + np.log(ladder.num_parents / (ladder.num_parents - 1.0))
            new = weighed._replace(
                vectors=vectors,
                log_weights=jnp.zeros_like(log_weights),
                ancestors=ancestors,
                log_pairs=pairs,
                variance=variance,
                parents=parents,
                parent_errors=parent_errors,
                log_scale=found.log_scale,
                log_likelihood=levels,
            )
            more = number + found.num_evaluations
            return new, info._replace(
                num_moves=found.num_moves,
                acceptance=found.acceptance,
                correlation=found.correlation,
                num_evaluations=more.astype(info.num_evaluations.dtype),
            )

        least = ladder.threshold if is_lazy else max(_EVEN, ladder.threshold)
        stays = (num_alive == 0) | ((position >= 1.0) & (size >= least * number))
        return lax.cond(stays, lambda _: (weighed, info), moved, None)

    def _batch_size(self, number: int, data: list[Array]) -> int:
        observations = sum(int(np.prod(shape)) for shape in self._term_shapes(data))
        return max(1, min(number, _MOST_AT_ONCE // max(1, observations + self.target.size)))

    @cached_property
    def priors(self) -> Callable[..., dict[str, tuple[Array, Array]]]:
        """By site, log priors and values of all particles: ``priors(vectors, data)``."""
        return self._mapped(self.target.priors)

    @cached_property
    def log_likelihood(self) -> Callable[..., dict[str, Array]]:
        """By site, each observation for itself."""
        return self._mapped(lambda x, data: self.target.densities(x, data).log_likelihood)

    @cached_property
    def levels(self) -> Callable[..., tuple[Array, Array]]:
        """Log prior and log likelihood."""
        return self._mapped(lambda x, data: (self.target.log_prior(x, data), self.target.log_likelihood(x, data)))

    @cached_property
    def constrained(self) -> Callable[..., dict[str, Array]]:
        """All sites but the observed ones."""
        return self._mapped(self.target.constrained)

    def _mapped(self, function: Callable[[Array, list[Array]], object]) -> Callable[..., Any]:
        """A compiled function of many vectors, from one of a single vector."""

        def run(vectors: Array, data: list[Array]) -> Any:
            return lax.map(lambda x: function(x, data), vectors, batch_size=self._batch_size(len(vectors), data))

        return quick_jit(run)


class Compiled(NamedTuple):
    """Compiled functions, and the target whose data they are given."""

    programs: Programs
    target: Target


def divided(keys: Array, devices: Sequence[jax.Device] | None) -> Array:
    """Keys of particles, divided between devices if there are any."""
    if devices is None:
        return keys
    return jax.device_put(keys, NamedSharding(Mesh(np.array(devices), ("particles",)), PartitionSpec("particles")))
