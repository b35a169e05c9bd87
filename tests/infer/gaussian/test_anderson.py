"""Extrapolation of slow fixed-point iterations, alone and in the sweeps of expectation propagation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation as ep
from numpyro_ext.linalg.gaussian.prior import CovariancePrior
from numpyro_ext.linalg.solvers.anderson import extrapolated, no_history, remember
from numpyro_ext.potentials import ProbitPotential, RectifiedLinearPoissonPotential
from tests.infer.gaussian.gaussian_forms import identity, kernel, make_form
from tests.tiers import few

SIZE = 6
MATRIX = np.diag([0.9, 0.7, 0.5, 0.3, 0.1, 0.0])  # of a steady iteration, its slowest direction a digit in 22 steps
NUM = 40


def iterate(matrix, num_steps, *, extrapolates, start=1.0):
    """Distances from the fixed point, which is zero, and which steps were extrapolations."""
    point = jnp.full(len(matrix), start)
    history, change = no_history(point), jnp.inf
    distances, jumps = [], []
    for _ in range(num_steps):
        plain = jnp.asarray(matrix) @ point
        history = remember(history, point, plain - point, change)
        target, is_jump = extrapolated(history, lambda residual: residual)
        is_jump = bool(is_jump) and extrapolates
        new = target if is_jump else plain
        change = jnp.inf if is_jump else jnp.max(jnp.abs(new - point))
        point = new
        distances.append(float(jnp.max(jnp.abs(point))))
        jumps.append(is_jump)
    return np.array(distances), np.array(jumps)


def test_a_slow_iteration_arrives_sooner():
    plain, _ = iterate(MATRIX, 18, extrapolates=False)
    sooner, jumps = iterate(MATRIX, 18, extrapolates=True)
    np.testing.assert_allclose(plain[-1], 0.9**18, rtol=1e-12)
    assert jumps.any() and not jumps[:2].any()
    assert np.diff(np.flatnonzero(jumps)).min() >= 3  # with plain steps between, which say how far it is
    assert sooner[-1] < 0.01 * plain[-1]


def test_more_points_than_steps_between_extrapolations():
    """Of four directions an iteration and six differences know everything."""
    matrix = jnp.diag(jnp.array([0.9, 0.8, 0.5, 0.2]))
    point, jumps = jnp.ones(4), []
    history = no_history(point, 7)
    for _ in range(8):
        plain = matrix @ point
        history = remember(history, point, plain - point, jnp.linalg.norm(plain - point))
        new, is_jump = extrapolated(history, lambda x: x, period=4, singular=1e-13)
        jumps.append(bool(is_jump))
        point = new
    assert jumps == [False, False, False, True] * 2
    np.testing.assert_allclose(point, 0.0, atol=1e-9)


def test_two_directions_are_found_exactly():
    matrix = np.diag([0.8, 0.4])
    distances, jumps = iterate(matrix, 3, extrapolates=True)
    assert jumps.tolist() == [False, False, True]
    assert distances[-1] < 1e-13 < distances[-2]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "matrix", [0.1 * np.eye(SIZE), 1.5 * np.eye(SIZE), np.zeros((SIZE, SIZE))], ids=["quick", "grows", "arrived"]
)
def test_other_iterations_are_left_alone(matrix):
    for start in (1.0, 1e-4):
        distances, jumps = iterate(matrix, 12, extrapolates=True, start=start)
        assert not jumps.any()
        np.testing.assert_array_equal(distances, iterate(matrix, 12, extrapolates=False, start=start)[0])


def test_one_direction_twice_is_no_division_by_zero():
    distances, jumps = iterate(0.5 * np.eye(SIZE), 6, extrapolates=True)
    assert jumps.any() and np.isfinite(distances).all()
    assert distances[2] < 1e-14


@functools.partial(jax.jit, static_argnames=("num_steps", "adapt_damping", "tol"))
def fit(form, *, num_steps=200, adapt_damping=True, tol=1e-9):
    return ep.solve(form, ep.init(form), num_steps=num_steps, tol=tol, adapt_damping=adapt_damping)


def process(potential, scale=3.0):
    """A smooth process, whose predictors are strongly correlated."""
    prior = (CovariancePrior(kernel(NUM, scale, 0.3)[None]),)
    return make_form(prior, identity(NUM), (potential,), offset=jnp.zeros(NUM))


@pytest.mark.parametrize(
    "potential",
    few(
        [
            ProbitPotential(jnp.where(jnp.arange(NUM) % 20 < 10, 1.0, 0.0)),
            RectifiedLinearPoissonPotential(jnp.where(jnp.arange(NUM) % 20 < 10, 3.0, 0.0), 1.0, 0.0),
        ],
        1,
    ),
    ids=["probit", "rectified"],
)
def test_sweeps_are_fewer_and_end_at_the_same_point(potential):
    form = process(potential)
    state, info = fit(form)
    plain, other = fit(form, adapt_damping=False)
    assert info.converged and other.converged
    assert info.num_steps < 0.85 * other.num_steps
    np.testing.assert_allclose(info.objective, other.objective, atol=1e-8)
    deviation = np.sqrt(plain.marginals.variance)
    np.testing.assert_allclose(state.marginals.mean / deviation, plain.marginals.mean / deviation, atol=1e-7)
    np.testing.assert_allclose(state.marginals.variance, plain.marginals.variance, rtol=1e-7)


@pytest.mark.thorough
def test_the_last_sweep_is_plain_wherever_it_is_cut_off():
    form = process(ProbitPotential(jnp.where(jnp.arange(NUM) % 20 < 10, 1.0, 0.0)))
    for num_steps in (4, 5, 6, 9):
        state, info = fit(form, num_steps=num_steps)
        assert not info.converged and info.num_steps == num_steps
        assert np.isfinite(info.max_change)
        moved, found = ep.step(form, state)  # a plain sweep from there
        assert np.isfinite(found.objective) and float(moved.max_change) < 1.0
