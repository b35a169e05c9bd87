"""One step of sequential Monte Carlo: weigh at the old particles, resample, move under the new distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ....compilation.quick_jit import quick_jit
from ..target import Target
from .moves import chance_correlation, move, spread, start_scale
from .path import Ladder, Particles, Way, Weighed, weigh
from .weights import normalised

_MOST_AT_ONCE = 2**23
"""Numbers that the particles which move at the same time may hold."""
_LARGEST_CORRELATION = 0.3
_EVEN = 0.9
"""Share of the particles that they are worth at the end of a run where they need no more moves."""


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
        number = len(particles.vectors)
        batch_size = self._batch_size(number, data)
        is_tempered = before is not None or self.ladder.path == "tempered"
        way = Way(self.target, data, before, old_data, None if is_tempered else self._places(data))
        found = weigh(particles, way, self.ladder, batch_size)
        weighed = found.particles
        nothing, zero = jnp.zeros((), weighed.log_weights.dtype), jnp.zeros((), int)
        error = jnp.sqrt(found.error)
        info = StepInfo(found.size, zero, nothing, nothing, zero, weighed.log_evidence, error, found.num_alive)
        least = self.ladder.threshold if is_lazy else max(_EVEN, self.ladder.threshold)
        stays = (found.num_alive == 0) | ((weighed.position >= 1.0) & (found.size >= least * number))

        def moved(_: object) -> tuple[Particles, StepInfo]:
            return self._moved(random.fold_in(rng_key, step), found, info, way, batch_size)

        return lax.cond(stays, lambda _: (weighed, info), moved, None)

    def _moved(
        self, rng_key: Array, found: Weighed, info: StepInfo, way: Way, batch_size: int
    ) -> tuple[Particles, StepInfo]:
        """Resample particles that were weighed, and move them."""
        from blackjax.smc.resampling import multinomial

        target, ladder, particles = self.target, self.ladder, found.particles
        number, num_chains = len(particles.vectors), ladder.num_parents
        resample_key, move_key = random.split(rng_key)
        weights = normalised(particles.log_weights)
        chosen = multinomial(resample_key, weights, num_chains)

        def watch(x: Array) -> Array:
            sites = target.constrained(x, way.data)
            return jnp.concatenate([jnp.ravel(sites[name]) for name in ladder.watch])

        is_waste_free = num_chains < number
        moves = move(
            move_key,
            particles.vectors[chosen],
            lambda x: target.log_prior(x, way.data),
            way.log_likelihood_at(particles.position),
            weights @ particles.vectors,
            spread(particles.vectors, weights),
            particles.log_scale,
            ladder.movement,
            watch if ladder.watch else None,
            keep_path=is_waste_free,
            batch_size=batch_size,
        )
        ancestors, vectors, levels = particles.ancestors[chosen], moves.vectors, moves.log_likelihood
        if is_waste_free:
            vectors = jnp.concatenate([particles.vectors[chosen][None], moves.path]).reshape(number, -1)
            ancestors = jnp.tile(ancestors, number // num_chains)
            levels = moves.path_levels.ravel()
        chain = chosen % num_chains
        new = particles._replace(
            vectors=vectors,
            log_weights=jnp.zeros_like(particles.log_weights),
            ancestors=ancestors,
            log_pairs=particles.log_pairs + np.log(num_chains / (num_chains - 1.0)),
            variance=found.variance,
            parents=jnp.where(found.has_moved, chain, chosen).astype(particles.parents.dtype),
            parent_errors=jnp.where(found.has_moved, found.chains[chain] / num_chains, found.singles[chosen] / number),
            log_scale=moves.log_scale,
            log_likelihood=levels,
        )
        return new, info._replace(
            num_moves=moves.num_moves,
            acceptance=moves.acceptance,
            correlation=moves.correlation,
            num_evaluations=(number + moves.num_evaluations).astype(info.num_evaluations.dtype),
        )

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
