"""The search for hyperparameters, on functions whose maximum and curvature are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.infer.hyper.curvature import curvature, hessian
from numpyro_ext.infer.hyper.evaluation import evaluation_fn
from numpyro_ext.infer.hyper.search import init_search, is_finished, maximise, search


def rosenbrock(x):
    return -jnp.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2)


def objective_of(function):
    """An objective in which the algorithm's state counts the fits."""
    return evaluation_fn(
        form_fn=lambda x: x,
        log_prior_fn=lambda x: jnp.zeros(()),
        solve_fn=lambda form, state: (state + 1, ()),
        log_evidence_fn=lambda form, state: function(form),
    )


valley = objective_of(rosenbrock)
climb_valley = jax.jit(lambda start: maximise(valley, start, jnp.array(0)))
climb_shifted_valley = jax.jit(
    lambda start, centre: maximise(
        objective_of(lambda x: rosenbrock(x - centre)), start, jnp.array(0), with_curvature=False
    )
)


@pytest.mark.parametrize("start", [[0.0, 0.0], [-1.2, 1.0], [2.0, -3.0]])
def test_finds_the_maximum_of_a_curved_valley(start):
    final = climb_valley(jnp.array(start))
    assert bool(final.converged)
    np.testing.assert_allclose(final.values, [1.0, 1.0], atol=1e-4)
    assert int(final.num_evaluations) < 100


def test_curvature_by_differences_of_the_gradient():
    def function(x):
        return -jnp.cosh(x[0] - 0.3) - 2.0 * x[1] ** 2 - 0.5 * x[0] * x[1]

    final = maximise(objective_of(function), jnp.array([1.0, 1.0]), jnp.array(0), tol=1e-6)
    exact = jax.hessian(function)(final.values)
    np.testing.assert_allclose(hessian(final, tol=1e-6), exact, rtol=1e-3, atol=1e-6)
    found = curvature(exact, tol=1e-6)
    assert found.is_peak
    np.testing.assert_allclose(found.covariance, -jnp.linalg.inv(exact), rtol=1e-9)


def test_wide_standard_errors_are_not_cut():
    found = curvature(-np.diag(np.array([38.73, 0.05]) ** -2.0), tol=1e-4)
    assert found.is_peak
    np.testing.assert_allclose(np.sqrt(np.diagonal(found.covariance)), [38.73, 0.05], rtol=1e-12)


def test_a_flat_direction_has_no_standard_error_and_no_variance():
    found = curvature(np.diag([-4.0, 0.0]), tol=1e-4)
    assert not found.is_peak and list(found.wide_axes) == [False, True]
    np.testing.assert_allclose(found.covariance, np.diag([0.25, 0.0]), rtol=1e-12)
    # A ridge across the axes, with the errors that differences of a gradient make.
    ridge = curvature(np.array([[-1000.0, 1000.0], [1000.0, -1000.0]]) + 0.05 * np.eye(2), tol=1e-4)
    assert len(ridge.flat) == 1 and not len(ridge.rising)
    np.testing.assert_allclose(np.abs(ridge.flat), np.sqrt(0.5), rtol=1e-12)


def test_axes_without_a_part_in_a_flat_direction_have_their_standard_errors():
    # Of the first two their difference alone is known, with precision 3, and a covariance with the third.
    found = curvature(np.array([[-3.0, 3.0, 0.3], [3.0, -3.0, -0.3], [0.3, -0.3, -3.0]]) + 1e-10, tol=1e-4)
    assert found.has_error.tolist() == [False, False, True] and len(found.flat) == 1
    of_the_difference = np.linalg.inv([[3.0, -0.3], [-0.3, 3.0]])
    np.testing.assert_allclose(found.covariance[2, 2], of_the_difference[1, 1], rtol=1e-6)


def test_a_small_part_in_a_flat_direction_leaves_no_standard_error():
    first, second = np.array([1.0, -1.0, 0.0]), np.array([0.1, 0.0, 1.0])  # flat along (1, 1, -0.1)
    assert not curvature(-np.outer(first, first) - np.outer(second, second), tol=1e-4).has_error.any()


def test_a_saddle_has_no_standard_errors():
    assert not curvature(np.diag([-1.0, 1.0, 0.0]), tol=1e-4).has_error.any()


def test_a_flat_axis_has_no_variance_of_rounding():
    """It would stand in proportion to that of another axis, and explain all of it."""
    found = curvature(np.array([[-4.0, 1e-11], [1e-11, 0.0]]), tol=1e-4)
    np.testing.assert_array_equal(found.covariance, np.diag([0.25, 0.0]))


def test_a_saddle_rises_in_the_direction_of_its_slope():
    found = curvature(np.array([[0.0, 1.0], [1.0, 0.0]]), tol=1e-4)
    np.testing.assert_allclose(np.abs(found.rising @ np.ones(2)), np.sqrt(2.0), rtol=1e-12)


def test_backs_away_from_points_that_are_not_finite():
    def function(x):
        return jnp.where(x[0] < 1.5, jnp.sum(x) - 0.05 * jnp.sum(x**4), jnp.nan)

    final = maximise(objective_of(function), jnp.array([-30.0]), jnp.array(0), with_curvature=False)
    assert bool(jnp.isfinite(final.best.objective))
    assert float(final.values[0]) < 1.5
    bounded = maximise(objective_of(lambda x: jnp.log(1.0 - x[0] ** 2)), jnp.array([0.9]), jnp.array(0))
    np.testing.assert_allclose(bounded.values, 0.0, atol=1e-4)


def test_a_start_that_is_not_finite_ends_the_search_at_once():
    final = maximise(objective_of(lambda x: jnp.nan * x[0]), jnp.array([1.0]), jnp.array(0))
    assert not bool(final.converged)
    assert (int(final.num_iterations), int(final.num_evaluations)) == (0, 1)
    assert bool(is_finished(final))


def test_chunks_are_one_search():
    start = jnp.array([-1.2, 1.0])
    whole = climb_valley(start)
    chunk = jax.jit(lambda state: search(valley, state, num_evaluations=7, tol=1e-4, max_iterations=100))
    state = init_search(jax.eval_shape(valley, start, jnp.array(0)), start, jnp.array(0))
    traces = []
    for _ in range(30):
        state, trace = chunk(state)
        traces.append(trace)
    assert bool(is_finished(state))
    jax.tree.map(np.testing.assert_array_equal, state, whole)
    trace = np.concatenate(traces)
    assert np.sum(~np.isnan(trace)) == int(whole.num_evaluations)
    assert np.nanmax(trace) == pytest.approx(float(whole.best.objective), abs=1e-9)


@pytest.mark.thorough
def test_batched_searches_are_the_single_ones():
    starts = jnp.array([[0.0, 0.0], [-1.2, 1.0], [3.0, 3.0]])
    centres = jnp.array([[0.0, 0.0], [1.0, 0.5], [-1.0, 2.0]])
    batched = jax.vmap(climb_shifted_valley)(starts, centres)
    for i in range(3):
        single = climb_shifted_valley(starts[i], centres[i])
        np.testing.assert_allclose(batched.values[i], single.values, atol=1e-6)
        assert int(batched.num_evaluations[i]) == int(single.num_evaluations)


def test_single_precision():
    start = jnp.array([-1.2, 1.0], jnp.float32)
    final = jax.jit(lambda start: maximise(valley, start, jnp.array(0), tol=1e-2))(start)
    assert final.values.dtype == jnp.float32
    assert bool(final.converged)
    np.testing.assert_allclose(final.values, [1.0, 1.0], atol=0.02)


def test_keeps_the_state_of_the_best_point_only():
    final = climb_valley(jnp.array([0.0, 0.0]))
    # Each accepted step fits once from the state of the one before; refused points and the curvature leave no trace.
    assert int(final.best.state) == int(final.num_iterations)
