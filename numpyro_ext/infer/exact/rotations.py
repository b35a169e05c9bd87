r"""Hamiltonian Monte Carlo whose flow is that of a standard normal, corrected by what the target has beyond it.

In the coordinates of a fit the posterior is nearly :math:`N(0, I)`, whose flow is a rotation of positions and momenta
without any error. Kicks by the slope of the log weight, target over normal, do the rest. One step, and one gradient, is
often a quarter of a turn, after which a draw of a normal target is independent of the one before. Leapfrog steps would
have to be short in many dimensions, and the trees of NUTS go several times as far.

Shahbaba, Lan, Johnson and Neal (2014), *Split Hamiltonian Monte Carlo*, Section 3.1; Beskos, Pinski, Sanz-Serna and
Stuart (2011), *Hybrid Monte Carlo on Hilbert spaces*. The number of steps is adapted by dual averaging (Hoffman and
Gelman 2014, Section 3.2).

Where the coordinates are hyperparameters alone, turns without kicks are tried at the end of the warm-up, which need the
density and no gradient (Neal 1999, *Regression and classification using Gaussian process priors*, eq. 15). Where enough
of them are accepted most trajectories are such; every twentieth keeps its kicks, by which a chain in a heavy tail
leaves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from numpyro.infer.mcmc import MCMCKernel

from ...linalg.library_calls import of_each
from .kernel import log_weight_and_sites
from .reparam import LATENT, PosteriorReparam, log_normal

_SHORTEST, _LONGEST = 1.2, 2.4
"""Angles of a trajectory, drawn evenly: about a quarter of a turn, and somewhat more for what is wider than normal."""
_MOST_STEPS = 1024
_LARGEST_ERROR = 1000.0
"""Error of the energy from which on a transition counts as divergent, as in NUTS."""
_EAGERNESS, _DELAY, _DECAY = 5.0, 10.0, 0.75
"""Constants of dual averaging."""
_FAR_MEAN, _FAR_SD = 0.5, 1.5
"""Mean and ratio of standard deviations from which on a coordinate is moved to what the warm-up has seen: noise would
cost more than it mends elsewhere."""
_FEWEST_SEEN = 50
_SHARE_FREE, _FEWEST_FREE, _ENOUGH_FREE, _KICKED_EVERY = 0.2, 30, 0.7, 20
"""Share of the warm-up in which turns without kicks are tried, how many of all chains there must be, the average
acceptance from which on they are taken, and the distance of those with kicks then. At 0.75 they have 1.1 to 2 times the
effective draws for the same work; at 0.6, of skewed hyperparameters of few data, a third."""


class Adaptation(NamedTuple):
    """Steps of a trajectory, and where coordinates are, as the warm-up has found."""

    log_steps: Array
    mean_log_steps: Array
    excess: Array
    """Average of the acceptance that is asked for over what was found."""
    center: Array
    """Shape ``(size,)``, as the three below."""
    scale: Array
    total: Array
    squares: Array
    free_accept_prob: Array
    """Average acceptance of turns without kicks."""


class Noise(NamedTuple):
    """Random numbers of a transition; arrays have the chains on their first axis, and the others none."""

    momentum: Array
    angle: Array
    share_of_step: Array
    choice: Array


class RotationState(NamedTuple):
    """State of all chains; arrays have the chains on their first axis, but for ``i`` and ``adaptation``."""

    i: Array
    z: dict[str, Array]
    log_weight: Array
    """Log density of the model over that of a standard normal; minus infinity before the first step."""
    slope: Array
    """Its gradient, at the end of the last trajectory that had kicks."""
    potential_energy: Array
    num_steps: Array
    """Gradients of the last trajectory."""
    accept_prob: Array
    diverging: Array
    adaptation: Adaptation
    rng_key: Array
    """The same in all steps, whose random numbers depend on it and on ``i``."""


class Rotations(MCMCKernel):
    """Kernel that moves chains side by side in the coordinates of a fit; they share what the warm-up adapts.

    :param PosteriorReparam reparam: the coordinates.
    :param num_chains: number of chains.
    :param target_accept_prob: average acceptance to which the number of steps is adapted.
    :param is_in_turn: gradients of chains one after the other, where these side by side would need too much memory;
        large factorisations are done so in any case.
    :param enough_free: average acceptance from which on turns without kicks are taken, where a field is integrated out.
    """

    sample_field = "z"
    default_fields = ("z", "diverging", "num_steps", "accept_prob", "potential_energy")
    is_ensemble_kernel = True

    def __init__(
        self,
        reparam: PosteriorReparam,
        num_chains: int,
        target_accept_prob: float,
        is_in_turn: bool = False,
        enough_free: float = _ENOUGH_FREE,
    ) -> None:
        self._reparam, self._num_chains = reparam, num_chains
        self._target_accept_prob, self.is_in_turn = target_accept_prob, is_in_turn
        self._enough_free = enough_free
        self._num_warmup = self._num_free = 0

    @property
    def model(self) -> Callable[..., Any]:
        """The model of the engine, which ArviZ asks for log likelihoods."""
        return self._reparam.whole_model

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: object = None,
        model_args: tuple[object, ...] = (),
        model_kwargs: dict[str, object] | None = None,
    ) -> RotationState:
        """State before the first step, which goes to a draw of the approximation and evaluates the model there."""
        num_free = 0 if self._reparam.coordinates.has_field else int(_SHARE_FREE * num_warmup)
        self._num_warmup = num_warmup
        self._num_free = num_free if num_free * self._num_chains >= _FEWEST_FREE else 0
        rng_key, key = random.split(rng_key)
        shape = self._num_chains, self._reparam.coordinates.size
        white = random.normal(key, shape)
        zeros, none = jnp.zeros(shape[0], white.dtype), jnp.zeros(shape[1], white.dtype)
        start = jnp.asarray(math.log(2.0), white.dtype)
        adaptation = Adaptation(start, start, start - start, none, none + 1.0, none, none, start - start)
        return RotationState(
            jnp.asarray(0),
            {LATENT: white},
            zeros - jnp.inf,
            jnp.zeros_like(white),
            zeros + jnp.inf,
            jnp.zeros(shape[0], int),
            zeros,
            jnp.zeros(shape[0], bool),
            adaptation,
            rng_key,
        )

    def sample(
        self, state: RotationState, model_args: tuple[object, ...], model_kwargs: dict[str, object] | None
    ) -> RotationState:
        """State after one trajectory of each chain."""
        return self.moved(state, self.noise(state.rng_key, state.i), model_args, model_kwargs or {})

    def noise(self, rng_key: Array, i: Array) -> Noise:
        """Random numbers of a trajectory of each chain.

        :param rng_key: of the chains.
        :param i: number of the trajectory.
        """
        shape = self._num_chains, self._reparam.coordinates.size
        dtype = jnp.result_type(float)
        key_momentum, key_others = random.split(random.fold_in(rng_key, i))
        others = random.uniform(key_others, (shape[0] + 2,), dtype)
        angle = _SHORTEST + (_LONGEST - _SHORTEST) * others[0]
        return Noise(random.normal(key_momentum, shape, dtype), angle, others[1], others[2:])

    def moved(
        self, state: RotationState, noise: Noise, model_args: tuple[Any, ...], model_kwargs: dict[str, Any]
    ) -> RotationState:
        """State after one trajectory of each chain, with given random numbers."""
        weigh = log_weight_and_sites(self._reparam, model_args, model_kwargs)
        found, white = state.adaptation, state.z[LATENT]
        evaluate = self._of_chains(jax.value_and_grad(lambda white: weigh(white)[0]))
        is_warming = state.i < self._num_warmup
        steps = jnp.exp(jnp.where(is_warming, found.log_steps, found.mean_log_steps))
        num_steps = jnp.clip(jnp.floor(steps + noise.share_of_step), 1, _MOST_STEPS).astype(int)
        whole, momentum = noise.angle, noise.momentum
        place = (white - found.center) / found.scale
        # Behind turns without kicks a trajectory begins with a look at the slope where it is, and no step.
        is_stale = self._is_free(found, state.i - 1)
        num_gradients = num_steps + is_stale
        # A chain without a density goes to a draw of the approximation: any place is taken, also one far out to which a
        # kick from one draw would lead.
        has_density = jnp.isfinite(state.log_weight)[:, None]

        def kicked(momentum: Array, angle: Array, place: Array, white: Array, slope: Array) -> Array:
            # the slope of the log weight over a normal about the center that the warm-up has found
            kick = 0.5 * angle * (found.scale * (slope - white) + place)
            return momentum + jnp.where(has_density, kick, 0.0)

        def turned(place: Array, momentum: Array, angle: Array) -> tuple[Array, Array, Array]:
            cos, sin = jnp.cos(angle), jnp.sin(angle)
            place, momentum = cos * place + sin * momentum, cos * momentum - sin * place
            return place, momentum, found.center + found.scale * place

        def step(number: Array, moving: tuple[Array, ...]) -> tuple[Array, ...]:
            place, momentum, white, _, slope, first_slope = moving
            is_look = is_stale & (number == 0)
            angle = jnp.where(is_look, 0.0, whole / num_steps)
            momentum = kicked(momentum, angle, place, white, slope)
            place, momentum, white = turned(place, momentum, angle)
            log_weight, slope = evaluate(white)
            momentum = kicked(momentum, angle, place, white, slope)
            return place, momentum, white, log_weight, slope, jnp.where(is_look, slope, first_slope)

        def with_kicks() -> tuple[Array, ...]:
            start = place, momentum, white, state.log_weight, state.slope, state.slope
            _, *reached = lax.fori_loop(0, num_gradients, step, start)
            return *reached, num_gradients

        def without() -> tuple[Array, ...]:
            _, end, reached = turned(place, momentum, whole)
            log_weight = self._of_chains(lambda white: weigh(white)[0])(reached)
            return end, reached, log_weight, state.slope, state.slope, jnp.zeros_like(num_gradients)

        is_free = self._is_free(found, state.i)
        end, *reached, first_slope, num_gradients = (
            lax.cond(is_free, without, with_kicks) if self._num_free else with_kicks()
        )
        log_density = jax.vmap(log_normal)
        before = state.log_weight + log_density(white) - 0.5 * jnp.sum(jnp.square(momentum), 1)
        after = reached[1] + log_density(reached[0]) - 0.5 * jnp.sum(jnp.square(end), 1)
        # A chain without a density takes the first place that has one.
        gain = jnp.where(jnp.isfinite(after), after - before, -jnp.inf)
        accept_prob = jnp.exp(jnp.minimum(gain, 0.0))
        is_taken = noise.choice < accept_prob
        is_finite = jnp.isfinite(after) & jnp.all(jnp.isfinite(reached[2]), 1)
        is_taken &= is_finite
        white, log_weight, slope = (
            jnp.where(is_taken if old.ndim == 1 else is_taken[:, None], new, old)
            for new, old in zip(reached, (white, state.log_weight, first_slope), strict=True)
        )
        return RotationState(
            state.i + 1,
            {LATENT: white},
            log_weight,
            slope,
            -(log_weight + log_density(white)),
            jnp.full_like(state.num_steps, num_gradients),
            jnp.where(is_finite, accept_prob, 0.0),
            ~(gain > -_LARGEST_ERROR),
            self._adapted(found, state.i, jnp.mean(jnp.where(is_finite, accept_prob, 0.0)), white),
            state.rng_key,
        )

    def get_diagnostics_str(self, state: RotationState) -> str:
        """Steps of the last trajectories and their acceptance."""
        return f"{int(state.num_steps[0])} steps, acc. prob={float(jnp.mean(state.accept_prob)):.2f}"

    def _of_chains(self, function: Callable[[Array], Any]) -> Callable[[Array], Any]:
        """A function of the coordinates of one chain for all of them."""
        function = jax.jit(function)
        return (lambda rows: lax.map(function, rows)) if self.is_in_turn else of_each(function)

    def _is_free(self, found: Adaptation, i: Array) -> Array:
        """True if the trajectory of a step has no kicks."""
        is_tried = (i >= self._num_warmup - self._num_free) & (i < self._num_warmup)
        is_taken = (found.free_accept_prob >= self._enough_free) & (i % _KICKED_EVERY != 0)
        return jnp.where(i < self._num_warmup, is_tried, is_taken & (self._num_free > 0))

    def _adapted(self, found: Adaptation, i: Array, accept_prob: Array, white: Array) -> Adaptation:
        """State of the warm-up after a step, unchanged behind the warm-up; at its end turns without kicks are tried."""
        num_kicked = self._num_warmup - self._num_free
        begin, middle = num_kicked // 5, num_kicked // 2
        is_seen = (i >= begin) & (i < middle)
        total = found.total + jnp.where(is_seen, jnp.sum(white, 0), 0.0)
        squares = found.squares + jnp.where(is_seen, jnp.sum(jnp.square(white), 0), 0.0)
        # a new count from the middle on, where coordinates move
        number = jnp.where(i >= middle, i - middle, i) + 1.0
        excess = jnp.where(i == middle, 0.0, found.excess)
        excess += (self._target_accept_prob - accept_prob - excess) / (number + _DELAY)
        log_steps = jnp.clip(_EAGERNESS * jnp.sqrt(number) * excess, 0.0, math.log(_MOST_STEPS))
        share = number**-_DECAY
        mean = share * log_steps + (1.0 - share) * found.mean_log_steps
        center, scale = found.center, found.scale
        seen = (middle - begin) * self._num_chains
        if seen >= _FEWEST_SEEN:
            seen_mean = total / seen
            seen_sd = jnp.sqrt(jnp.maximum(squares / seen - jnp.square(seen_mean), 1e-6))
            is_far = (jnp.abs(seen_mean) > _FAR_MEAN) | (jnp.abs(jnp.log(seen_sd)) > math.log(_FAR_SD))
            moves = is_far & (i == middle)
            center, scale = jnp.where(moves, seen_mean, center), jnp.where(moves, seen_sd, scale)
        new = Adaptation(log_steps, mean, excess, center, scale, total, squares, found.free_accept_prob)
        found = jax.tree.map(lambda new, old: jnp.where(i < num_kicked, new, old), new, found)
        free = found.free_accept_prob + accept_prob / max(1, self._num_free)
        is_tried = (i >= num_kicked) & (i < self._num_warmup)
        return found._replace(free_accept_prob=jnp.where(is_tried, free, found.free_accept_prob))
