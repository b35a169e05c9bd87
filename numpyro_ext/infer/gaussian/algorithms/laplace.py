r"""Laplace's method on a latent-Gaussian form (Rasmussen and Williams 2006, §3.4; Ko 2017, §1 and §3.7).

The posterior is approximated by the Gaussian at its mode with the curvature there,
:math:`W_i = -\partial^2 \log t_i`. Newton's method works on the same coordinates as the conditioning: weights of the
observations, :math:`e = C A^T a`, so that no covariance is inverted, or whitened unknowns.

>>> import jax.numpy as jnp
>>> from numpyro_ext.infer.gaussian.algorithms import laplace
>>> from numpyro_ext.linalg.gaussian.design import DenseDesign
>>> from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
>>> from numpyro_ext.potentials import ProbitPotential
>>> from numpyro_ext.structure.latent_gaussian import Blocks, LatentGaussian
>>> form = LatentGaussian(
...     prior=(DiagonalPrior(jnp.ones(1)),), design=DenseDesign(jnp.ones((2, 1))), offset=jnp.zeros(2),
...     potentials=(ProbitPotential(jnp.array([1.0, 1.0])),), observed=(jnp.ones(2, bool),),
...     log_constant=jnp.zeros(()), blocks=Blocks(jnp.arange(2)[None], jnp.arange(1)[None]),
... )
>>> state, info = laplace.solve(form, laplace.init(form), num_steps=50, tol=1e-4)
>>> bool(info.converged), round(float(laplace.posterior(form, state).mean[0]), 3)
(True, 0.765)
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ....linalg.gaussian.conditioning import LinearGaussian, Space
from ....linalg.gaussian.prior import is_flat, is_valid_prior
from ....potentials import GaussianPotential
from ....structure.latent_gaussian import LatentGaussian, joined
from .fit_info import FitInfo
from .posterior import GaussianPosterior, gaussian_prior
from .supports import all_positive, may_vanish, sites_within_support

__all__ = ["Info", "State", "init", "log_evidence", "posterior", "solve", "step", "update"]

_MAX_HALVINGS = 50
_SUFFICIENT_INCREASE = 1e-4
_SLOWEST_DECREASE = 0.5
_BESIDE = 0.01


class State(NamedTuple):
    """A point on the way to the mode."""

    coordinates: Array
    """Coordinates in the space of the conditioning, shape ``(num_blocks, size)``."""
    predictor: Array
    """Values of ``eta - offset`` there, shape ``(num_rows,)``."""
    gradient_norm: Array
    """Newton's decrement before the step that led here; infinite at the start."""
    previous_norm: Array
    """Newton's decrement one step earlier."""


class Info(NamedTuple):
    """Outcome of one Newton step."""

    objective: Array
    """Log joint density (up to the constants of the prior) *before* the step."""
    gradient_norm: Array
    """Norm of the gradient before the step in the metric of the inverse curvature (Newton's decrement): no predictor
    is further from the mode than this many posterior standard deviations, to second order."""
    step_length: Array
    """Fraction of the Newton step taken; zero if no fraction increased the density."""


def init(form: LatentGaussian, *, space: Space = "auto") -> State:
    """The mean of the prior, or zero where it is flat.

    A mixture of two regressions with the same prior has a saddle there, from which no gradient leads: beside it.
    """
    form = joined(form)
    prior = gaussian_prior(form, space)
    infinity = jnp.asarray(jnp.inf, form.offset.dtype)
    start = prior.zeros()
    if any(getattr(getattr(potential, "base", None), "is_mixture", False) for potential in form.potentials):
        start += _BESIDE * jnp.cos(jnp.arange(start.size, dtype=start.dtype) ** 2).reshape(start.shape)
    return State(start, jnp.zeros_like(form.offset), infinity, infinity)


def step(form: LatentGaussian, state: State, *, space: Space = "auto") -> tuple[State, Info]:
    """One Newton step with a backtracking line search: one factorisation and a few evaluations of the factors.

    Where the curvature is not that of a maximum, or the direction does not ascend, the absolute curvature of the
    factors takes its place at the cost of a second factorisation.

    :param LatentGaussian form: the model.
    :param State state: a point that belongs to ``form``.
    :param str space: where to do the algebra; see :func:`~numpyro_ext.linalg.gaussian.conditioning.choose_space`.
    :return: the next point and what the step found.
    """
    return _step(form, gaussian_prior(form, space), state)


def solve(
    form: LatentGaussian, state: State, *, num_steps: int = 100, tol: float = 1e-8, space: Space = "auto"
) -> tuple[State, FitInfo]:
    """Newton's method to the mode, in one compiled loop.

    From a point at which factors of no known family are zero it starts at one at which none is, if one is found
    (:mod:`.supports`). A point whose log density overflows is no start: the mean of the prior takes its place.

    :param LatentGaussian form: the model.
    :param State state: where to start; may come from another form of the same shapes.
    :param int num_steps: the largest number of steps.
    :param float tol: bound on :attr:`Info.gradient_norm` before the last step, in posterior standard deviations. That
        step squares it, so nothing below the square root of the rounding error is asked for.
    :param str space: where to do the algebra.
    :return: the last point and how the run ended.
    """
    form = joined(form)
    prior = gaussian_prior(form, space)
    infinity = jnp.full_like(state.gradient_norm, jnp.inf)
    coordinates = _with_density(form, prior, _within_support(form, prior, state.coordinates))
    state = State(coordinates, prior.predictor(coordinates), infinity, infinity)
    bound = jnp.maximum(tol, 2.0 * jnp.sqrt(jnp.finfo(infinity.dtype).eps))

    def proceed(carry: tuple[State, Array, Array, Array]) -> Array:
        state, _, count, moved = carry
        return (count < num_steps) & ~(state.gradient_norm < bound) & moved

    def advance(carry: tuple[State, Array, Array, Array]) -> tuple[State, Array, Array, Array]:
        state, trace, count, _ = carry
        state, info = _step(form, prior, state)
        return state, trace.at[count].set(info.objective), count + 1, info.step_length > 0

    trace = jnp.full((num_steps,), jnp.nan, infinity.dtype)
    state, trace, count, _ = lax.while_loop(proceed, advance, (state, trace, jnp.asarray(0), jnp.asarray(True)))
    value, _, curvature = _derivatives(form, state.predictor)
    objective = form.log_constant + jnp.sum(value) - 0.5 * prior.inner(state.coordinates, state.coordinates)
    objective = jnp.where(is_valid_prior(form.prior), objective, jnp.nan)
    log_volume = prior.condition(curvature, jnp.zeros_like(curvature)).log_volume()
    is_proper = jnp.isfinite(log_volume)
    if any(is_flat(block) for block in form.prior):
        # Newton's decrement also vanishes where factors saturate on the way to infinity (separated classes), but then
        # at the rate exp(-1/2) a step, and not quadratically as at a maximum.
        is_proper &= ~(state.gradient_norm > _SLOWEST_DECREASE * state.previous_norm)
    converged = (state.gradient_norm < bound) & jnp.isfinite(objective) & is_proper
    no_row = jnp.zeros((form.num_rows,), bool)
    return state, FitInfo(converged, count, trace, state.gradient_norm, no_row, objective + log_volume)


def log_evidence(form: LatentGaussian, state: State, *, space: Space = "auto") -> Array:
    """Laplace's approximation of the log evidence.

    The gradient with respect to ``form`` includes how the mode moves: the mode is held, one differentiable Newton
    step is taken from it (which moves it by nothing but carries its derivative), and the value is computed there. Two
    factorisations; one where all factors are Gaussian.

    :param LatentGaussian form: the model; differentiable.
    :param State state: the mode of ``form``.
    :param str space: where to do the algebra.
    :return: a scalar; nan where a prior is not positive definite or the curvature not that of a maximum.
    """
    form = joined(form)
    prior = gaussian_prior(form, space)
    predictor = lax.stop_gradient(prior.predictor(state.coordinates))
    _, slope, curvature = _derivatives(form, predictor)
    is_exact = all(type(potential) is GaussianPotential for potential in form.potentials)
    curvature = curvature if is_exact else lax.stop_gradient(curvature)
    conditioned = prior.condition(curvature, curvature * predictor + slope)
    coordinates = conditioned.coordinates
    value, _, curvature = _derivatives(form, prior.predictor(coordinates))
    if not is_exact:  # The curvature of Gaussian factors is the same everywhere, and is factorised already.
        conditioned = prior.condition(curvature, jnp.zeros_like(curvature))
    log_volume = conditioned.log_volume()
    total = form.log_constant + jnp.sum(value) - 0.5 * prior.inner(coordinates, coordinates) + log_volume
    return jnp.where(lax.stop_gradient(is_valid_prior(form.prior)), total, jnp.nan)


def update(form: LatentGaussian, precision: Array, shift: Array, *, space: Space = "auto") -> tuple[Array, Array]:
    """The factors to second order about the mean of the posterior that these sites make: at the mode, themselves."""
    predictor = GaussianPosterior(form, precision, shift, space).predictor_moments()[0] - form.offset
    _, slope, curvature = _derivatives(form, predictor)
    return curvature, curvature * (predictor + form.offset) + slope


def posterior(form: LatentGaussian, state: State, *, space: Space = "auto") -> GaussianPosterior:
    """The Gaussian at the mode with the curvature there."""
    _, slope, curvature = _derivatives(joined(form), state.predictor)
    return GaussianPosterior(form, curvature, curvature * (state.predictor + form.offset) + slope, space)


def _with_density(form: LatentGaussian, prior: LinearGaussian, coordinates: Array) -> Array:
    """The same point, or the mean of the prior where the log density of the point is not finite.

    The mode of other hyperparameters, carried over, may give Poisson rates beyond the largest number.
    """
    has_density = all_positive(form, prior.predictor(coordinates) + form.offset)
    return jnp.where(has_density, coordinates, prior.zeros())


def _within_support(form: LatentGaussian, prior: LinearGaussian, coordinates: Array) -> Array:
    """The same point, or one at which no factor is zero."""
    if not may_vanish(form):
        return coordinates
    eta = prior.predictor(coordinates) + form.offset

    def search() -> Array:
        precision, shift = sites_within_support(form, prior, eta)
        found: Array = prior.condition(precision, shift - precision * form.offset).coordinates
        return jnp.where(jnp.all(jnp.isfinite(found)), found, coordinates)

    chosen: Array = lax.cond(all_positive(form, eta), lambda: coordinates, search)
    return chosen


def _derivatives(form: LatentGaussian, predictor: Array) -> tuple[Array, Array, Array]:
    """Log factors, their slopes and their negative second derivatives at ``eta = predictor + offset``."""
    observed = jnp.concatenate(form.observed)
    eta = jnp.where(observed, predictor + form.offset, 0.0)
    parts = []
    for potential, part in zip(form.potentials, form.split_rows(eta), strict=True):
        value, slope, second = potential.derivatives(part)
        # A log-concave factor has no negative curvature but by rounding.
        parts.append((value, slope, jnp.maximum(-second, 0.0) if potential.is_log_concave else -second))
    value, slope, curvature = (jnp.where(observed, jnp.concatenate(terms), 0.0) for terms in zip(*parts, strict=True))
    return value, slope, curvature


class _Direction(NamedTuple):
    coordinates: Array
    predictor: Array
    slope: Array
    """Derivative of the objective along the direction: the square of Newton's decrement."""
    is_ascent: Array


def _direction(prior: LinearGaussian, state: State, slope: Array, curvature: Array) -> _Direction:
    target = prior.condition(curvature, curvature * state.predictor + slope).coordinates
    coordinates = target - state.coordinates
    predictor = prior.predictor(coordinates)
    # The Newton equations turn gradient times direction into a sum of squares, which does not cancel at the mode.
    along = prior.inner(coordinates, coordinates) + jnp.sum(curvature * predictor**2)
    is_ascent = jnp.isfinite(along) & (along >= 0)
    return _Direction(coordinates, predictor, along, is_ascent)


def _step(form: LatentGaussian, prior: LinearGaussian, state: State) -> tuple[State, Info]:
    value, slope, curvature = _derivatives(form, state.predictor)

    size = jnp.abs(curvature)
    floor = jnp.sqrt(jnp.finfo(size.dtype).eps) * jnp.max(size)
    absolute = jnp.where(jnp.concatenate(form.observed), jnp.maximum(size, floor), 0.0)

    def attempt(carry: tuple[Array, _Direction]) -> tuple[Array, _Direction]:
        number, _ = carry
        return number + 1, _direction(prior, state, slope, jnp.where(number == 0, curvature, absolute))

    # A loop, so that what is compiled holds the algebra once.
    none = _Direction(
        jnp.zeros_like(state.coordinates), jnp.zeros_like(slope), jnp.zeros_like(floor), jnp.asarray(False)
    )
    _, direction = lax.while_loop(lambda carry: (carry[0] < 2) & ~carry[1].is_ascent, attempt, (jnp.asarray(0), none))

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

    one = jnp.ones_like(current)
    length, accepted, _ = lax.while_loop(
        lambda carry: ~carry[1] & (carry[2] < _MAX_HALVINGS), halve, (one, is_increase(one), jnp.asarray(0))
    )
    accepted &= direction.is_ascent
    length = jnp.where(accepted, length, 0.0)
    decrement = jnp.sqrt(jnp.where(direction.is_ascent, direction.slope, 0.0))
    gradient_norm = jnp.where(direction.is_ascent, decrement, jnp.inf)
    coordinates = jnp.where(accepted, state.coordinates + length * direction.coordinates, state.coordinates)
    predictor = jnp.where(accepted, state.predictor + length * direction.predictor, state.predictor)
    return State(coordinates, predictor, gradient_norm, state.gradient_norm), Info(current, gradient_norm, length)
