r"""Laplace's method on a latent-Gaussian form (Rasmussen and Williams 2006, §3.4; Ko 2017, §1 and §3.7).

The posterior is approximated by the Gaussian at its mode with the curvature there,
:math:`W_i = -\partial^2 \log t_i`. Newton's method works on the same coordinates as the conditioning: weights of the
observations, :math:`e = C A^T a`, so that no covariance is inverted, or whitened unknowns.

>>> import jax.numpy as jnp
>>> from numpyro_ext.infer.gaussian.algorithms.modes import laplace
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

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .....linalg.gaussian.conditioning import LinearGaussian, Space
from .....linalg.gaussian.prior import is_flat, is_valid_prior
from .....linalg.gaussian.spaces.border_space import BorderSpace
from .....linalg.gaussian.spaces.sparse_space import SparsePosterior, SparseSpace
from .....structure.latent_gaussian import LatentGaussian, joined
from ..fit_info import FitInfo
from ..posterior import GaussianPosterior, gaussian_prior
from ..supports import all_positive, may_vanish, sites_within_support
from .damped_newton import Info, State, Volume, has_constant_curvature, newton_step, only_step
from .iterated_modes import JudgedMode, judged_mode, only_solution
from .mode_derivative import HeldPosterior, at_point, derivatives, evidence_at_mode, holds_factor

_SLOWEST_DECREASE = 0.5
_BESIDE = 0.01
_LAST_CHORD = 0.01
"""Newton's decrement after which no further steps with one factor are taken, in the bound on it."""


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
    return newton_step(form, gaussian_prior(form, space), state)[:2]


def solve(
    form: LatentGaussian, state: State, *, num_steps: int = 100, tol: float = 1e-8, space: Space = "auto"
) -> tuple[State, FitInfo]:
    """:func:`solve_and_hold`, without what it holds."""
    return solve_and_hold(form, state, num_steps=num_steps, tol=tol, space=space)[:2]


def solve_and_hold(
    form: LatentGaussian, state: State, *, num_steps: int = 100, tol: float = 1e-8, space: Space = "auto"
) -> tuple[State, FitInfo, HeldPosterior | None]:
    """Newton's method to the mode, in one compiled loop.

    Near the mode further steps keep a factor where the space of the conditioning can (blocks with a border, sparse
    factors): they cost a gradient and a triangular solve each. There the posterior at the mode is returned, too, for
    who needs its factor again; where factors are Gaussian, it is that of the only step. In other spaces the factor of
    the last step serves the log evidence where factors are Gaussian or the step was below rounding.

    From a point at which factors of no known family are zero it starts at one at which none is, if one is found
    (:mod:`.supports`). A point whose log density overflows is no start: the mean of the prior takes its place.

    :param LatentGaussian form: the model.
    :param State state: where to start; may come from another form of the same shapes.
    :param int num_steps: the largest number of steps.
    :param float tol: bound on :attr:`Info.gradient_norm` before the last step, in posterior standard deviations. That
        step squares it, so nothing below the square root of the rounding error is asked for.
    :param str space: where to do the algebra.
    :return: the last point, how the run ended, and the posterior there, of a space with such a factor.
    """
    form = joined(form)
    prior = gaussian_prior(form, space)
    infinity = jnp.full_like(state.gradient_norm, jnp.inf)
    state = _started(form, prior, state)
    rounding = jnp.sqrt(jnp.finfo(infinity.dtype).eps)
    bound = jnp.maximum(tol, 2.0 * rounding)
    trace = jnp.full((num_steps,), jnp.nan, infinity.dtype)
    held: HeldPosterior | None = None
    solved: SparsePosterior | None = None
    if holds_factor(prior) and has_constant_curvature(form):
        state, first, held = only_step(form, prior, state, rounding)
        trace, count, log_volume = trace.at[0].set(first), jnp.asarray(1), held.log_volume()
    elif isinstance(prior, SparseSpace) and prior.is_iterative and has_constant_curvature(form):
        first, solved = only_solution(form, prior, state.coordinates, state.predictor)
        state = state._replace(coordinates=solved.coordinates, predictor=prior.predictor(solved.coordinates))
        trace, count = trace.at[0].set(first), jnp.asarray(1)
    else:
        target = jnp.maximum(rounding, _LAST_CHORD * bound)
        state, trace, count, volume = _steps(form, prior, state, trace, bound, target)
    value, slope, curvature = derivatives(form, state.predictor)
    objective = form.log_constant + jnp.sum(value) - 0.5 * prior.inner(state.coordinates, state.coordinates)
    objective = jnp.where(is_valid_prior(form.prior), objective, jnp.nan)
    judged: JudgedMode | None = None
    if isinstance(prior, SparseSpace) and prior.is_iterative:
        judged = judged_mode(prior, state.coordinates, slope, curvature, solved)
        log_volume = judged.log_volume
        if solved is not None:
            state = state._replace(gradient_norm=judged.distance)
    elif holds_factor(prior):
        if held is None:
            held = prior.condition(curvature, jnp.zeros_like(curvature))
            log_volume = held.log_volume()
        held = held.at_mode(state.coordinates, curvature * state.predictor + slope)
    else:
        log_volume = lax.cond(
            volume.distance < rounding,
            lambda: volume.log_volume,
            lambda: prior.condition(curvature, jnp.zeros_like(curvature)).log_volume(),
        )
    is_proper = jnp.isfinite(log_volume)
    if any(is_flat(block) for block in form.prior):
        # Newton's decrement also vanishes where factors saturate on the way to infinity (separated classes), but then
        # at the rate exp(-1/2) a step, and not quadratically as at a maximum.
        is_proper &= ~(state.gradient_norm > _SLOWEST_DECREASE * state.previous_norm)
    converged = (state.gradient_norm < bound) & jnp.isfinite(objective) & is_proper
    no_row = jnp.zeros((form.num_rows,), bool)
    info = FitInfo(converged, count, trace, state.gradient_norm, no_row, objective + log_volume)
    return state, info if judged is None else judged.added_to(info, bound), held


def sites_near_mode(form: LatentGaussian, *, num_steps: int, tol: float) -> tuple[Array, Array]:
    """Precisions and shifts of the sites that agree with the factors next to the mode, or nan.

    They are those of the point before the last of Newton's steps from :func:`init`: what is compiled then holds the
    derivatives of the factors once.

    :param LatentGaussian form: the model.
    :param int num_steps: the largest number of steps.
    :param float tol: distance of the point from the mode, in posterior standard deviations.
    """
    form = joined(form)
    prior = gaussian_prior(form, "auto")
    state = _started(form, prior, init(form))
    trace = jnp.full((num_steps,), jnp.nan, state.predictor.dtype)
    near = _steps(form, prior, state, trace, jnp.asarray(tol, trace.dtype), None)[3]
    return near.curvature, near.shift + near.curvature * form.offset


def _started(form: LatentGaussian, prior: LinearGaussian, state: State) -> State:
    """A state, which may come from another form, as the first of this one."""
    infinity = jnp.full_like(state.gradient_norm, jnp.inf)
    coordinates = _with_density(form, prior, _within_support(form, prior, state.coordinates))
    return State(coordinates, prior.predictor(coordinates), infinity, infinity)


def _steps(
    form: LatentGaussian, prior: LinearGaussian, state: State, trace: Array, bound: Array, target: Array | None
) -> tuple[State, Array, Array, Volume]:
    """Newton's steps up to the length of the trace: the last point, the trace, the number of steps and the volume."""
    Carry = tuple[State, Array, Array, Array, Volume]

    def proceed(carry: Carry) -> Array:
        state, _, count, moved, _ = carry
        return (count < len(trace)) & ~(state.gradient_norm < bound) & moved

    def advance(carry: Carry) -> Carry:
        state, trace, count, _, _ = carry
        state, info, volume = newton_step(form, prior, state, target)
        return state, trace.at[count].set(info.objective), count + 1, info.step_length > 0, volume

    infinity = state.gradient_norm
    unknown = jnp.full_like(state.predictor, jnp.nan)
    start = state, trace, jnp.asarray(0), jnp.asarray(True), Volume(infinity, infinity, unknown, unknown)
    state, trace, count, _, volume = lax.while_loop(proceed, advance, start)
    return state, trace, count, volume


def log_evidence(
    form: LatentGaussian, state: State, *, space: Space = "auto", held: HeldPosterior | None = None
) -> Array:
    """Laplace's approximation of the log evidence.

    The gradient with respect to ``form`` includes how the mode moves: the mode is held, one differentiable Newton
    step is taken from it (which moves it by nothing but carries its derivative), and the value is computed there. Two
    factorisations; one where all factors are Gaussian, and where a factor is held, where that of the log volume
    solves for the derivative of the mode as well.

    :param LatentGaussian form: the model; differentiable.
    :param State state: the mode of ``form``.
    :param str space: where to do the algebra.
    :param held: the posterior at the mode, from :func:`solve_and_hold`, which saves a factorisation;
        first derivatives alone are then right.
    :return: a scalar; nan where a prior is not positive definite or the curvature not that of a maximum.
    """
    form = joined(form)
    prior = gaussian_prior(form, space)
    is_exact = has_constant_curvature(form)
    if isinstance(prior, BorderSpace | SparseSpace) and (held is not None or not is_exact or not holds_factor(prior)):
        mode = lax.stop_gradient(state.coordinates)
        factor: Any = None if held is None else held.factor
        # The curvature of Gaussian factors does not change as the mode moves, where the density does not either.
        total = at_point(space, form, mode, factor)[0] if is_exact else evidence_at_mode(space, form, mode, factor)
        return jnp.where(lax.stop_gradient(is_valid_prior(form.prior)), total, jnp.nan)
    predictor = lax.stop_gradient(prior.predictor(state.coordinates))
    _, slope, curvature = derivatives(form, predictor)
    curvature = curvature if is_exact else lax.stop_gradient(curvature)
    conditioned = prior.condition(curvature, curvature * predictor + slope)
    coordinates = conditioned.coordinates
    value, _, curvature = derivatives(form, prior.predictor(coordinates))
    if not is_exact:  # The curvature of Gaussian factors is the same everywhere, and is factorised already.
        conditioned = prior.condition(curvature, jnp.zeros_like(curvature))
    log_volume = conditioned.log_volume()
    total = form.log_constant + jnp.sum(value) - 0.5 * prior.inner(coordinates, coordinates) + log_volume
    return jnp.where(lax.stop_gradient(is_valid_prior(form.prior)), total, jnp.nan)


def update(form: LatentGaussian, precision: Array, shift: Array, *, space: Space = "auto") -> tuple[Array, Array]:
    """The factors to second order about the mean of the posterior that these sites make: at the mode, themselves."""
    predictor = GaussianPosterior(form, precision, shift, space).predictor_moments()[0] - form.offset
    _, slope, curvature = derivatives(form, predictor)
    return curvature, curvature * (predictor + form.offset) + slope


def posterior(form: LatentGaussian, state: State, *, space: Space = "auto") -> GaussianPosterior:
    """The Gaussian at the mode with the curvature there."""
    _, slope, curvature = derivatives(joined(form), state.predictor)
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

    return lax.cond(all_positive(form, eta), lambda: coordinates, search)
