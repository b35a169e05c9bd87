"""Damped Newton steps on the joint log density of field and data, as Laplace's method takes them to the mode."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .....linalg.gaussian.conditioning import LinearGaussian, LinearGaussianPosterior
from .....linalg.gaussian.spaces.border_space import BorderSpace
from .....linalg.gaussian.spaces.sparse_space import SparseSpace
from .....potentials import GaussianPotential
from .....structure.latent_gaussian import LatentGaussian
from .mode_derivative import HeldPosterior, derivatives, holds_factor, joint_gradient

_MAX_HALVINGS = 50
_SUFFICIENT_INCREASE = 1e-4
_MOST_CHORDS = 12
"""Steps with one factor, each of which must come nearer by the next constant."""
_LEAST_CONTRACTION = 0.2
_FIRST_CHORD = 0.5
"""Newton's decrement below which such steps are tried."""


class State(NamedTuple):
    """A point on the way to the mode."""

    coordinates: Array
    """Coordinates in the space of the conditioning, shape ``(num_blocks, size)``."""
    predictor: Array
    """Values of ``eta - offset`` there, shape ``(num_rows,)``."""
    gradient_norm: Array
    """Newton's decrement before the step that led here; infinite at the start. Of steps with one factor it is that
    before the last, by the curvature of this factor."""
    previous_norm: Array
    """Newton's decrement one step earlier, or before the first of those steps."""


class Info(NamedTuple):
    """Outcome of one Newton step."""

    objective: Array
    """Log joint density (up to the constants of the prior) *before* the step."""
    gradient_norm: Array
    """Norm of the gradient before the step in the metric of the inverse curvature (Newton's decrement): no predictor
    is further from the mode than this many posterior standard deviations, to second order."""
    step_length: Array
    """Fraction of the Newton step taken; zero if no fraction increased the density."""


def has_constant_curvature(form: LatentGaussian) -> bool:
    return all(type(potential) is GaussianPotential for potential in form.potentials)


class Volume(NamedTuple):
    """Log volume of the posterior at the point of a factorisation, and the factors to second order there."""

    log_volume: Array
    distance: Array
    """Bound on the distance to the point reached, in posterior standard deviations: zero where the curvature is the
    same everywhere, infinite where it was replaced."""
    curvature: Array
    """Minus the second derivatives of the log factors, shape ``(num_rows,)``."""
    shift: Array
    """With the curvature the sites that agree with the factors there, of the predictor less its offset."""


class _Direction(NamedTuple):
    coordinates: Array
    predictor: Array
    slope: Array
    """Derivative of the objective along Newton's direction: the square of Newton's decrement."""
    is_ascent: Array
    last_norm: Array
    """Newton's decrement before the last of the steps with one factor that the direction sums."""
    log_volume: Array


def _direction(
    form: LatentGaussian,
    prior: LinearGaussian,
    conditioned: LinearGaussianPosterior,
    state: State,
    curvature: Array,
    target: Array | None,
) -> _Direction:
    """Newton's direction at a point, from the posterior of the factors as they are expanded there."""
    coordinates = conditioned.coordinates - state.coordinates
    predictor = prior.predictor(coordinates)
    along = _square(prior, coordinates, predictor, curvature)
    is_ascent = jnp.isfinite(along) & (along >= 0)
    norm = jnp.sqrt(jnp.where(is_ascent, along, jnp.inf))
    if target is not None and holds_factor(prior):
        assert isinstance(conditioned, HeldPosterior)
        first = coordinates, predictor, norm
        coordinates, predictor, norm = _chords(form, prior, conditioned, state, first, curvature, target)
    is_iterative = isinstance(prior, SparseSpace) and prior.is_iterative
    # an estimate of a log volume takes as long as many directions
    log_volume = jnp.full_like(along, jnp.nan) if is_iterative else conditioned.log_volume()
    return _Direction(coordinates, predictor, along, is_ascent, norm, log_volume)


def _square(prior: LinearGaussian, coordinates: Array, predictor: Array, curvature: Array) -> Array:
    """Square of Newton's decrement, from its direction.

    The Newton equations turn gradient times direction into a sum of squares, which does not cancel at the mode.
    """
    return prior.inner(coordinates, coordinates) + jnp.sum(curvature * predictor**2)


def _chords(
    form: LatentGaussian,
    prior: LinearGaussian,
    conditioned: HeldPosterior,
    state: State,
    first: tuple[Array, Array, Array],
    curvature: Array,
    target: Array,
) -> tuple[Array, Array, Array]:
    """Further steps with the factor of the first, as long as each comes nearer by a constant factor: their sum with the
    first, its predictor, and the decrement before the last of them."""

    def proceed(carry: tuple[Array, Array, Array, Array, Array]) -> Array:
        _, _, norm, is_nearer, count = carry
        return (norm > target) & is_nearer & (count < _MOST_CHORDS)

    def advance(carry: tuple[Array, Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array, Array]:
        coordinates, predictor, norm, _, count = carry
        slope = derivatives(form, state.predictor + predictor)[1]
        gradient = joint_gradient(prior, state.coordinates + coordinates, slope)
        step = conditioned.covariance_product(gradient)
        step_predictor = prior.predictor(step)
        new_norm = jnp.sqrt(_square(prior, step, step_predictor, curvature))
        is_nearer = new_norm <= _LEAST_CONTRACTION * norm  # nan is not
        return (
            jnp.where(is_nearer, coordinates + step, coordinates),
            jnp.where(is_nearer, predictor + step_predictor, predictor),
            jnp.where(is_nearer, new_norm, norm),
            is_nearer,
            count + 1,
        )

    is_near = jnp.isfinite(first[2]) if has_constant_curvature(form) else first[2] < _FIRST_CHORD
    coordinates, predictor, norm, _, _ = lax.while_loop(proceed, advance, (*first, is_near, jnp.asarray(0)))
    return coordinates, predictor, norm


def newton_step(
    form: LatentGaussian, prior: LinearGaussian, state: State, target: Array | None = None
) -> tuple[State, Info, Volume]:
    """One Newton step; with a target for the decrement also steps with its factor."""
    value, slope, curvature = derivatives(form, state.predictor)

    size = jnp.abs(curvature)
    floor = jnp.sqrt(jnp.finfo(size.dtype).eps) * jnp.max(size)
    absolute = jnp.where(jnp.concatenate(form.observed), jnp.maximum(size, floor), 0.0)

    def attempt(carry: tuple[Array, _Direction]) -> tuple[Array, _Direction]:
        number, _ = carry
        own = jnp.where(number == 0, curvature, absolute)
        shift = own * state.predictor + slope
        conditioned: LinearGaussianPosterior
        if isinstance(prior, SparseSpace):
            conditioned = prior.condition(own, shift, near=state.coordinates)
        else:
            conditioned = prior.condition(own, shift)
        return number + 1, _direction(form, prior, conditioned, state, own, target)

    # A loop, so that what is compiled holds the algebra once.
    zero = jnp.zeros_like(floor)
    none = _Direction(jnp.zeros_like(state.coordinates), jnp.zeros_like(slope), zero, jnp.asarray(False), zero, zero)
    number, direction = lax.while_loop(
        lambda carry: (carry[0] < 2) & ~carry[1].is_ascent, attempt, (jnp.asarray(0), none)
    )

    energy = 0.5 * prior.inner(state.coordinates, state.coordinates)
    energy_slope = prior.inner(state.coordinates, direction.coordinates)
    energy_curvature = 0.5 * prior.inner(direction.coordinates, direction.coordinates)
    current = form.log_constant + jnp.sum(value) - energy
    # Near the mode the increase is below rounding, and the step must still be taken.
    slack = 10 * jnp.finfo(current.dtype).eps * (jnp.abs(current) + jnp.sum(jnp.abs(value)))

    def is_increase(length: Array) -> Array:
        eta = state.predictor + length * direction.predictor + form.offset
        trial = form.log_constant + jnp.sum(form.log_factors(eta))
        trial -= energy + length * (energy_slope + length * energy_curvature)
        wanted: Array = current + _SUFFICIENT_INCREASE * length * direction.slope - slack
        return (trial >= wanted) | (jnp.isfinite(trial) & ~jnp.isfinite(current))

    def halve(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        length, _, count = carry
        return 0.5 * length, is_increase(0.5 * length), count + 1

    # The first one is the whole step, in the same loop: the program holds the factors once.
    start = 2.0 * jnp.ones_like(current), jnp.asarray(False), jnp.asarray(-1)
    length, accepted, _ = lax.while_loop(lambda carry: ~carry[1] & (carry[2] < _MAX_HALVINGS), halve, start)
    accepted &= direction.is_ascent
    length = jnp.where(accepted, length, 0.0)
    decrement = jnp.sqrt(jnp.where(direction.is_ascent, direction.slope, 0.0))
    first_norm = jnp.where(direction.is_ascent, decrement, jnp.inf)
    has_chords = (length == 1.0) & (direction.last_norm < first_norm)
    gradient_norm = jnp.where(has_chords, direction.last_norm, first_norm)
    previous_norm = jnp.where(has_chords, first_norm, state.gradient_norm)
    coordinates = jnp.where(accepted, state.coordinates + length * direction.coordinates, state.coordinates)
    predictor = jnp.where(accepted, state.predictor + length * direction.predictor, state.predictor)
    distance = jnp.zeros_like(first_norm) if has_constant_curvature(form) else first_norm
    distance = jnp.where(number == 1, distance, jnp.inf)
    volume = Volume(direction.log_volume, distance, curvature, curvature * state.predictor + slope)
    return State(coordinates, predictor, gradient_norm, previous_norm), Info(current, first_norm, length), volume


def only_step(
    form: LatentGaussian, prior: BorderSpace | SparseSpace, state: State, target: Array
) -> tuple[State, Array, HeldPosterior]:
    """The step to the mode of Gaussian factors, corrected with its factor until it is below rounding; the log joint
    density before it, and the conditioning that it has made."""
    value, slope, curvature = derivatives(form, state.predictor)
    current = form.log_constant + jnp.sum(value) - 0.5 * prior.inner(state.coordinates, state.coordinates)
    conditioned = prior.condition(curvature, curvature * state.predictor + slope)
    direction = _direction(form, prior, conditioned, state, curvature, target)
    coordinates = state.coordinates + jnp.where(direction.is_ascent, direction.coordinates, 0.0)
    predictor = state.predictor + jnp.where(direction.is_ascent, direction.predictor, 0.0)
    first = jnp.sqrt(jnp.where(direction.is_ascent, direction.slope, jnp.inf))
    has_chords = direction.last_norm < first
    previous = jnp.where(has_chords, first, state.gradient_norm)
    return State(coordinates, predictor, direction.last_norm, previous), current, conditioned
