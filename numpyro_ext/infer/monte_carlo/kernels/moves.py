"""Markov kernels that move all particles, most of them BlackJAX's, and how they are tuned while they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.scipy.linalg import solve_triangular

from ....compilation.pytree import PyTree
from .slices import elliptical_slices

KernelName = Literal["elliptical-slice", "pcn", "random-walk", "hmc", "nuts"]
AnyKernel = Literal["auto", "elliptical-slice", "pcn", "random-walk", "hmc", "nuts"]
_LARGEST_SLICED = 5
"""Dimensions up to which slices are the default."""
_PARTICLES_OF_A_COVARIANCE = 40
"""For each of the squared dimensions: with fewer, slices about the particles keep the errors of their covariance from
step to step, and in 20 dimensions the evidence of 4000 particles was a standard error too large."""

_ACCEPTANCE = {"elliptical-slice": 0.0, "pcn": 0.27, "random-walk": 0.27, "hmc": 0.8, "nuts": 0.8}
"""Wanted; the middle of 0.25 to 0.3 for random walks and pCN."""
_START = {"elliptical-slice": 1.0, "pcn": 0.5, "random-walk": 1.0, "hmc": 0.5, "nuts": 0.5}
_TRAJECTORY = float(np.pi / 2)
"""Length of HMC's trajectories, in standard deviations: a quarter of the period of a Gaussian."""
_MOST_LEAPFROGS = 32
_MOST_DOUBLINGS = 6
_MOST_CHANGE = 1.0
"""Largest change of the logarithm of a step size from one move to the next."""
_FIRST_MOVES = 4
_SLICES_AT_ONCE = 10


class Movement(NamedTuple):
    """Kernel, and the rule by which it has moved enough."""

    kernel: KernelName
    num_moves: int | None
    """So many, or as many as it takes."""
    most_moves: int
    correlation: float
    """Moves go on until no coordinate's correlation with its start, nor that of the log likelihood, is above this, or
    above what chance makes of it."""


class Moved(NamedTuple):
    """Particles after moves."""

    vectors: Array
    log_likelihood: Array
    """At the vectors."""
    log_scale: Array
    """Log scale of the steps, as tuned."""
    num_moves: Array
    acceptance: Array
    """Mean over all moves."""
    correlation: Array
    """The largest one of a coordinate, or of the log likelihood, with where it started."""
    num_evaluations: Array
    """Evaluations of the likelihood by all particles; a gradient counts as one."""
    path: Array
    """All places in their order, ``(moves, particles, size)``, where they were asked for, else empty."""
    path_levels: Array
    """Their log likelihoods, those before the first move in front: ``(moves + 1, particles)``, or empty."""


def kernel_for(asked: AnyKernel, num_particles: int, size: int, *, is_gaussian: bool) -> KernelName:
    """The kernel that moves particles of a model.

    :param str asked: by the user.
    :param int size: dimensions of a particle.
    :param bool is_gaussian: whether all priors are Gaussian, as pCN needs.
    :raises ValueError: if the one that was asked for does not serve: why, and what to do.
    """
    fewest = _PARTICLES_OF_A_COVARIANCE * size**2
    if asked == "auto":
        return "elliptical-slice" if size <= _LARGEST_SLICED and num_particles >= fewest else "hmc"
    if asked == "pcn" and not is_gaussian:
        raise ValueError(
            "kernel='pcn' needs Normal, LogNormal or MultivariateNormal priors: leave kernel out, or give "
            "'elliptical-slice' or 'hmc'."
        )
    if asked == "elliptical-slice" and num_particles < fewest:
        raise ValueError(
            f"kernel='elliptical-slice' draws about the particles, and {num_particles} of them tell too little of a "
            f"covariance in {size} dimensions: leave kernel out, or take at least {fewest} particles."
        )
    return asked


def chance_correlation(number: int, size: int) -> float:
    """About the largest correlation that so many coordinates of independent particles have by chance."""
    return 1.2 * float(np.sqrt(2.0 * np.log(size + 1.0) / number))


def start_scale(kernel: KernelName, size: int) -> float:
    """Logarithm of the first step size, in standard deviations of the particles."""
    walk = 2.38 / np.sqrt(size) if kernel == "random-walk" else 1.0
    return float(np.log(_START[kernel] * walk))


def spread(vectors: Array, weights: Array) -> Array:
    """Covariance of weighted particles, drawn to its diagonal where they are few: ``(size, size)``."""
    number, size = vectors.shape
    mean = weights @ vectors
    centred = vectors - mean
    covariance = (centred * weights[:, None]).T @ centred
    diagonal = jnp.diagonal(covariance)
    floor = jnp.finfo(vectors.dtype).eps * jnp.maximum(jnp.max(diagonal), jnp.finfo(vectors.dtype).tiny)
    share = min(1.0, size / number)
    return (1.0 - share) * covariance + jnp.diag(share * diagonal + jnp.maximum(1e-9 * diagonal, floor))


def move(
    rng_key: Array,
    vectors: Array,
    log_prior: Callable[[Array], Array],
    log_likelihood: Callable[[Array], Array],
    mean: Array,
    covariance: Array,
    log_scale: Array,
    movement: Movement,
    watch: Callable[[Array], Array] | None = None,
    keep_path: bool = False,
    batch_size: int | None = None,
) -> Moved:
    """Move every particle by a kernel that leaves prior times likelihood invariant.

    :param rng_key: random number generator key.
    :param vectors: of positive density, shape ``(particles, size)``.
    :param log_prior: of one vector.
    :param log_likelihood: of one vector, at the present position of the path.
    :param mean: of the particles.
    :param covariance: of the particles.
    :param log_scale: of their steps.
    :param Movement movement: the kernel, and how long.
    :param watch: of one vector, the numbers that are to be forgotten; the vector itself by default.
    :param bool keep_path: return all places.
    :param int batch_size: particles that move at the same time, where not all fit into memory.
    """
    number, size = vectors.shape
    kernel = _kernel(movement.kernel, log_prior, log_likelihood, mean, covariance)
    # all places are kept one by one
    most_at_once = 1 if keep_path else kernel.most_at_once

    def over_particles(function: Callable[..., object], *args: object) -> Any:
        if batch_size is None or batch_size >= number:
            return jax.vmap(function)(*args)
        return lax.map(lambda arg: function(*arg), args, batch_size=batch_size)

    states = over_particles(kernel.begin, vectors)

    def levels_of(states: PyTree) -> Array:
        found: Array = states[1]
        return found if kernel.is_about_likelihood else found - over_particles(log_prior, states[0])

    def watched(states: PyTree) -> Array:
        # the evidence is made of likelihoods, which a kernel may keep that turns particles about their mean
        found = states[0] if watch is None else over_particles(watch, states[0])
        return jnp.concatenate([found, levels_of(states)[:, None]], 1)

    start = watched(states)
    deviation = jnp.std(start, 0)
    centred = (start - jnp.mean(start, 0)) / jnp.where(deviation > 0.0, deviation, 1.0)
    # no number of moves brings the largest of many estimates below their noise
    wanted = max(movement.correlation, chance_correlation(number, start[0].size))
    most = movement.most_moves if movement.num_moves is None else movement.num_moves
    path = jnp.zeros((most if keep_path else 0, number, size), vectors.dtype)
    path_levels = jnp.zeros((most + 1 if keep_path else 0, number), vectors.dtype)
    if keep_path:
        path_levels = path_levels.at[0].set(levels_of(states))

    def goes_on(at: _Moving) -> Array:
        if movement.num_moves is not None:
            return at.num_moves < movement.num_moves
        return (at.num_moves < most) & ((at.num_moves < min(_FIRST_MOVES, most)) | (at.worst > wanted))

    def once(at: _Moving) -> _Moving:
        now = jnp.minimum(most_at_once, most - at.num_moves)
        if movement.num_moves is None and most_at_once > 1:
            now = jnp.minimum(now, _moves_left(at.num_moves, at.worst, wanted))
        keys = random.split(random.fold_in(rng_key, at.num_moves), number)
        states, acceptance, used = over_particles(lambda k, s: kernel.advance(k, s, at.log_scale, now), keys, at.states)
        mean_acceptance, log_scale = jnp.mean(acceptance), at.log_scale
        goal = _ACCEPTANCE[movement.kernel]
        if goal:
            # in one dimension of many equal ones, acceptance falls with the logarithm of the step
            change = jnp.clip(4.0 * (mean_acceptance - goal) / (at.num_moves + 2.0) ** 0.5, -_MOST_CHANGE, _MOST_CHANGE)
            log_scale = jnp.minimum(log_scale + change, kernel.largest_scale)
        path, path_levels = at.path, at.path_levels
        if keep_path:
            path = path.at[at.num_moves].set(states[0])
            path_levels = path_levels.at[at.num_moves + 1].set(levels_of(states))
        accepted, evaluations = at.accepted + now * mean_acceptance, at.evaluations + jnp.sum(used)
        worst = _largest_correlation(centred, watched(states))
        return _Moving(at.num_moves + now, states, log_scale, accepted, evaluations, worst, path, path_levels)

    zero = jnp.zeros((), vectors.dtype)
    begun = _Moving(jnp.zeros((), int), states, log_scale, zero, zero, jnp.ones_like(zero), path, path_levels)
    end = lax.while_loop(goes_on, once, begun)
    acceptance, levels = end.accepted / jnp.maximum(end.num_moves, 1), levels_of(end.states)
    found = end.states[0], levels, end.log_scale, end.num_moves, acceptance, end.worst, end.evaluations
    return Moved(*found, end.path, end.path_levels)


class _Moving(NamedTuple):
    """Carry of the loop of :func:`move`."""

    num_moves: Array
    states: Any
    """States of the kernel, of all particles."""
    log_scale: Array
    accepted: Array
    """Sum over the moves of the mean acceptance."""
    evaluations: Array
    worst: Array
    """Largest correlation with the start."""
    path: Array
    path_levels: Array


def _largest_correlation(centred: Array, seen: Array) -> Array:
    """The largest of the correlations of coordinates with where they were, standardised; ``(particles, coordinates)``
    both."""
    now = seen - jnp.mean(seen, 0)
    scale = jnp.std(now, 0)
    return jnp.max(jnp.mean(centred * now, 0) / jnp.where(scale > 0.0, scale, 1.0))


def _moves_left(count: Array, worst: Array, wanted: float) -> Array:
    """Number of further moves, if correlations fall by the same factor with each."""
    factor = jnp.log(jnp.clip(worst, 1e-6, 0.999)) / jnp.maximum(count, 1)
    return jnp.where(count == 0, _FIRST_MOVES, jnp.clip(jnp.ceil(np.log(wanted) / factor) - count, 1, 1e6)).astype(int)


class _Kernel(NamedTuple):
    begin: Callable[[Array], Any]
    """From a vector to a state: a tuple with the vector first, then the log density or likelihood there."""
    advance: Callable[[Array, Any, Array, Array], tuple[Any, Array, Array]]
    """``advance(key, state, log_scale, num_moves) -> (state, acceptance, evaluations)``"""
    most_at_once: int = 1
    """Moves of one call."""
    is_about_likelihood: bool = False
    """Its states hold the log likelihood, and not the log density."""
    largest_scale: float = np.inf
    """Logarithm."""


def _kernel(
    name: KernelName,
    log_prior: Callable[[Array], Array],
    log_likelihood: Callable[[Array], Array],
    mean: Array,
    covariance: Array,
) -> _Kernel:
    from blackjax.mcmc import hmc, nuts, random_walk

    def log_density(x: Array) -> Array:
        return log_prior(x) + log_likelihood(x)

    if name == "pcn":
        return _crank_nicolson(log_likelihood)

    factor = jnp.linalg.cholesky(covariance)
    if name == "elliptical-slice":

        def cut(key: Array, state: PyTree, log_scale: Array, num_moves: Array) -> PyTree:
            vector, level, used = elliptical_slices(
                key,
                solve_triangular(factor, state[0] - mean, lower=True),
                state[1],
                lambda u: log_density(mean + factor @ u),
                _SLICES_AT_ONCE,
                num_moves,
            )
            return (mean + factor @ vector, level), jnp.ones_like(level), used

        return _Kernel(lambda x: (x, log_density(x)), cut, _SLICES_AT_ONCE)

    if name == "random-walk":
        walk_kernel = random_walk.build_additive_step()

        def walk(key: Array, state: PyTree, log_scale: Array, num_moves: Array) -> PyTree:
            def step(key: Array, position: Array) -> Array:
                return jnp.exp(log_scale) * (factor @ random.normal(key, position.shape, position.dtype))

            new, info = walk_kernel(key, random_walk.RWState(*state), log_density, step)
            return tuple(new), jnp.minimum(info.acceptance_rate, 1.0), 1

        return _Kernel(lambda x: (x, log_density(x)), walk)

    if name == "hmc":
        hmc_kernel = hmc.build_kernel()

        def leap(key: Array, state: PyTree, log_scale: Array, num_moves: Array) -> PyTree:
            jitter_key, key = random.split(key)
            step = jnp.exp(log_scale)
            number = jnp.clip(jnp.round(_TRAJECTORY / step), 1, _MOST_LEAPFROGS).astype(int)
            # trajectories of equal length come back where they were on some models
            step = step * random.uniform(jitter_key, (), step.dtype, 0.6, 1.0)
            new, info = hmc_kernel(key, hmc.HMCState(*state), log_density, step, covariance, number)
            return tuple(new), _number(info.acceptance_rate), number

        return _Kernel(lambda x: tuple(hmc.init(x, log_density)), leap)

    nuts_kernel = nuts.build_kernel()

    def turn(key: Array, state: PyTree, log_scale: Array, num_moves: Array) -> PyTree:
        new, info = nuts_kernel(key, hmc.HMCState(*state), log_density, jnp.exp(log_scale), covariance, _MOST_DOUBLINGS)
        return tuple(new), _number(info.acceptance_rate), info.num_integration_steps

    return _Kernel(lambda x: tuple(hmc.init(x, log_density)), turn)


def _crank_nicolson(log_likelihood: Callable[[Array], Array]) -> _Kernel:
    """Preconditioned Crank-Nicolson (Neal 1999; Cotter, Roberts, Stuart and White 2013) for a standard Gaussian prior,
    which it leaves as it is."""

    def crank(key: Array, state: PyTree, log_scale: Array, num_moves: Array) -> PyTree:
        vector, level = state
        draw_key, key = random.split(key)
        step = jnp.exp(log_scale)
        place = jnp.sqrt(1.0 - step**2) * vector + step * random.normal(draw_key, vector.shape, vector.dtype)
        found = log_likelihood(place)
        rate = _number(jnp.exp(found - level))
        is_accepted = random.uniform(key, (), vector.dtype) < rate
        return (jnp.where(is_accepted, place, vector), jnp.where(is_accepted, found, level)), rate, 1

    return _Kernel(lambda x: (x, log_likelihood(x)), crank, 1, True, 0.0)


def _number(rate: Array) -> Array:
    return jnp.where(jnp.isnan(rate), 0.0, jnp.minimum(rate, 1.0))
