r"""Coordinate ascent to the variational Gaussian: one variance at a time, then all means (Khan 2012, algorithm 3).

With everything but its own site held, the variance :math:`v` of a predictor maximises
:math:`\tfrac12 \log v - \tfrac12 c\, v + f(m, v)`, where :math:`c` is the precision of the cavity. That is a scalar
equation, solved by bracketing; a rank-one update carries its solution to the whole covariance. After a sweep the means
are maximised by Newton's method with the variances held. State and results are those of
:mod:`~numpyro_ext.infer.gaussian.variational.natural_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....linalg.gaussian.marginals import relative_change
from ....linalg.gaussian.spaces.observation_space import ObservationSpace
from ....structure.latent_gaussian.form import LatentGaussian
from ..algorithms.fit_info import FitInfo
from ..algorithms.posterior import gaussian_prior
from . import natural_gradient as vg
from .bound import evaluate, expected_log_factors, is_finite, site_floor

_SCALAR_STEPS = 48
_LARGEST_LOG_RATIO = 40.0
_MEAN_STEPS = 30

# Coordinates, means, value, step length, decrement and count.
_Climb = tuple[Array, Array, Array, Array, Array, Array]


def step(form: LatentGaussian, state: vg.State) -> tuple[vg.State, vg.Info]:
    """One sweep over the variances and a maximisation over the means.

    It evaluates all factors for every scalar equation and uses one (one per block): ``O(M^2)`` expectations besides
    ``O(M^3)`` algebra, a reference for up to a few hundred rows. Where a sweep lowers the bound, which log-concave
    factors exclude, a natural-gradient step takes its place.

    :param LatentGaussian form: the model; all priors must be proper.
    :param State state: as of :func:`~numpyro_ext.infer.gaussian.variational.natural_gradient.init`.
    :return: the next state and what the step found.
    """
    return _step(form, _observation_space(form), state)


def solve(
    form: LatentGaussian, state: vg.State, *, num_steps: int = 100, tol: float = 1e-8
) -> tuple[vg.State, FitInfo]:
    """Sweep until no marginal changes by more than ``tol``, in one compiled loop.

    :param LatentGaussian form: the model.
    :param State state: where to start.
    :param int num_steps: the largest number of sweeps.
    :param float tol: largest change of a mean in standard deviations or of a variance relative to itself.
    :return: the final state and how the run ended.
    """
    step = partial(_step, form, _observation_space(form))
    bound = jnp.maximum(tol, 1e3 * jnp.finfo(state.max_change.dtype).eps)
    return vg.repeat(form, state._replace(is_mixed=jnp.asarray(True)), step, num_steps=num_steps, bound=bound)


def _observation_space(form: LatentGaussian) -> ObservationSpace:
    prior = gaussian_prior(form, "observation")
    assert isinstance(prior, ObservationSpace)  # asked for by name
    return prior


def _step(form: LatentGaussian, prior: ObservationSpace, state: vg.State) -> tuple[vg.State, vg.Info]:
    coordinates, precision = _sweep(form, prior, state)
    shift = _maximise_means(form, prior, coordinates, precision)
    trial = evaluate(form, prior, precision, shift)
    slack = 100 * jnp.finfo(precision.dtype).eps * (1.0 + jnp.abs(trial.bound)) * form.num_rows**0.5
    is_known = is_finite(state.point)
    accepted = is_finite(trial) & ((trial.bound >= state.point.bound - slack) | ~is_known)
    change = jnp.max(jnp.abs(relative_change(trial, state.point)))
    swept = state._replace(
        site_precision=precision,
        site_shift=shift,
        point=trial,
        max_change=jnp.where(is_known, change, jnp.inf),
    )
    state = lax.cond(accepted, lambda: swept, lambda: vg.step(form, state, space="observation")[0])
    return state, vg.Info(state.point.bound, state.max_change, accepted)


def _sweep(form: LatentGaussian, prior: ObservationSpace, state: vg.State) -> tuple[Array, Array]:
    """Visit the rows of every block in turn, all blocks side by side.

    :return: coordinates of the mean, which stays, and the new precisions.
    """
    joint = prior.condition(state.site_precision, state.site_shift - state.site_precision * form.offset)
    _, covariance = joint.sequential_moments()
    nowhere = jnp.zeros_like(state.site_precision)
    mean = prior.predictor(joint.coordinates) + form.offset
    floor = site_floor(form, nowhere.dtype)

    def visit(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        covariance, precision = carry
        index = prior.rows[:, i]

        def at_row(values: Array) -> Array:
            return values.at[index].get(mode="fill", fill_value=0.0)

        column = covariance[:, :, i]
        old = column[:, i]
        is_free = old > 0
        safe = jnp.where(is_free, old, 1.0)
        cavity = 1.0 / safe - at_row(precision)
        is_free &= cavity > 0
        cavity = jnp.where(is_free, cavity, 1.0)

        def slope_at(log_variance: Array) -> Array:
            variance = jnp.ones_like(nowhere).at[index].set(jnp.exp(log_variance), mode="drop")
            return at_row(expected_log_factors(form, mean, variance).variance_slope)

        wanted = _solve_for_precision(slope_at, cavity, at_row(floor))
        wanted = jnp.where(is_free, wanted, at_row(precision))
        ratio = 1.0 / (1.0 + (wanted - at_row(precision)) * safe)
        weight = jnp.where(is_free, (ratio - 1.0) / safe, 0.0)[:, None, None]
        covariance = covariance + weight * column[:, :, None] * column[:, None, :]
        return covariance, precision.at[index].set(wanted, mode="drop")

    _, precision = lax.fori_loop(0, prior.rows.shape[1], visit, (covariance, state.site_precision))
    return joint.coordinates, jnp.where(jnp.concatenate(form.observed), precision, 0.0)


def _solve_for_precision(slope_at: Callable[[Array], Array], cavity: Array, floor: Array) -> Array:
    r"""Precision :math:`\lambda` with :math:`v (c - 2 f_v(m, v)) = 1` at :math:`v = 1/(c + \lambda)`, by bisection.

    For a log-concave factor the left side increases in :math:`v`, and the variance is at most that of the cavity. A
    fixed number of halvings in :math:`\log v` finds it to rounding.
    """
    highest = -jnp.log(cavity)
    # Site precisions below zero widen the cavity; what is above the bracket is left at its end.
    highest = jnp.where(floor < 0, highest + 1.0, highest)

    def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        is_below = jnp.exp(middle) * (cavity - 2.0 * slope_at(middle)) < 1.0
        return jnp.where(is_below, middle, low), jnp.where(is_below, high, middle)

    low, high = lax.fori_loop(0, _SCALAR_STEPS, halve, (highest - _LARGEST_LOG_RATIO, highest))
    # At the root the precision is what the slope asks for, without the cancellation of 1/v - c.
    return jnp.maximum(-2.0 * slope_at(0.5 * (low + high)), floor)


def _maximise_means(form: LatentGaussian, prior: ObservationSpace, coordinates: Array, precision: Array) -> Array:
    """Newton's method on the bound as a function of the means, with the variances that ``precision`` gives held.

    :return: the shifts of the sites that have these precisions and the best means.
    """
    variance = prior.condition(precision, jnp.zeros_like(precision)).marginals().variance
    tolerance = jnp.finfo(precision.dtype).eps ** 1.5

    def value(coordinates: Array, mean: Array) -> Array:
        return jnp.sum(expected_log_factors(form, mean, variance).value) - 0.5 * prior.inner(coordinates, coordinates)

    def proceed(carry: _Climb) -> Array:
        _, _, _, length, decrement, count = carry
        return (count < _MEAN_STEPS) & (decrement > tolerance) & (length > 1e-6)

    def advance(carry: _Climb) -> _Climb:
        coordinates, mean, current, length, decrement, count = carry
        expected = expected_log_factors(form, mean, variance)
        # The curvature of an expectation in the mean is twice its slope in the variance.
        curvature = jnp.maximum(-2.0 * expected.variance_slope, 0.0)
        shift = expected.mean_slope + curvature * (mean - form.offset)
        direction = prior.condition(curvature, shift).coordinates - coordinates
        along = prior.predictor(direction)
        decrement = prior.inner(direction, direction) + jnp.sum(curvature * along**2)
        trial = coordinates + length * direction, mean + length * along
        new = value(*trial)
        slack = 100 * jnp.finfo(mean.dtype).eps * (1.0 + jnp.abs(new)) * form.num_rows**0.5
        accepted = (new >= current - slack) | ~jnp.isfinite(current)
        coordinates, mean, current = jax.tree.map(
            lambda x, y: jnp.where(accepted, x, y), (*trial, new), (coordinates, mean, current)
        )
        return (
            coordinates,
            mean,
            current,
            jnp.where(accepted, jnp.ones_like(length), 0.5 * length),
            decrement,
            count + 1,
        )

    mean = prior.predictor(coordinates) + form.offset
    one = jnp.ones((), mean.dtype)
    carry = (coordinates, mean, value(coordinates, mean), one, jnp.inf * one, jnp.asarray(0))
    coordinates, mean, *_ = lax.while_loop(proceed, advance, carry)
    return prior.to_rows(coordinates) + precision * mean
