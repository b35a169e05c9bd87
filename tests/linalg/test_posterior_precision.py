"""Solutions, draws, variances and log determinants of a posterior precision against dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.linalg import diagonal, from_matrix, identity, select, wavelet_transform
from numpyro_ext.linalg.solvers.conjugate_gradient import conjugate_gradient
from numpyro_ext.linalg.solvers.perturb_and_map import draw_perturbations, perturb_and_map
from numpyro_ext.linalg.solvers.posterior_precision import (
    _NUM_SIGNS,
    PosteriorPrecision,
    dense_moments,
    gram_diagonal,
    has_diagonal_gram,
    lanczos_log_determinant,
    lanczos_variance,
)
from tests.monte_carlo import log_determinant_error, trace_error

ROWS, COLUMNS = 24, 32


@pytest.fixture(scope="module")
def precision():
    """A quarter of the rows of an orthonormal matrix missing, noise of several sizes, widths over four decades."""
    rng = np.random.default_rng(5)
    basis, _ = np.linalg.qr(rng.normal(size=(COLUMNS, COLUMNS)))
    operator = select(np.arange(ROWS), COLUMNS) @ from_matrix(basis)
    noise = jnp.asarray(rng.uniform(0.5, 2.0, ROWS))
    return PosteriorPrecision(operator, noise, jnp.asarray(10.0 ** rng.uniform(-1.0, 3.0, COLUMNS)))


@pytest.fixture(scope="module")
def exact(precision):
    matrix = np.asarray(precision.operator.materialise())
    return np.diag(precision.precision) + matrix.T @ (matrix / np.asarray(precision.noise_variance)[:, None])


def test_is_its_own_adjoint_and_equals_the_matrix(precision, exact):
    x = jnp.linspace(-1.0, 2.0, COLUMNS)
    np.testing.assert_allclose(precision @ x, exact @ x, rtol=1e-12)
    np.testing.assert_allclose(precision.T @ x, exact @ x, rtol=1e-12)
    np.testing.assert_allclose(precision.dense(), exact, rtol=1e-12, atol=1e-12)


def test_conjugate_gradients_solve_several_systems_each_to_tolerance(precision, exact):
    b = jax.random.normal(jax.random.key(0), (3, COLUMNS)) * jnp.array([[1.0], [1e-6], [0.0]])
    result = jax.jit(lambda b: precision.solve(b, 0.75, tol=1e-10))(b)
    np.testing.assert_allclose(result.solution, np.linalg.solve(exact, b.T).T, rtol=1e-7, atol=1e-16)
    assert jnp.all(result.residual <= 1e-10) and jnp.all(result.solution[2] == 0.0)
    alone = precision.solve(b[0], 0.75, tol=1e-10)
    assert alone.solution.shape == (COLUMNS,) and alone.residual.shape == ()
    np.testing.assert_allclose(alone.solution, result.solution[0], rtol=1e-9)
    again = precision.solve(b, 0.75, tol=1e-9, initial=result.solution)
    assert again.num_iterations == 0


def test_preconditioning_saves_iterations_and_the_limit_is_kept(precision):
    b = jax.random.normal(jax.random.key(1), (COLUMNS,))
    plain = conjugate_gradient(precision.matvec, b, tol=1e-8)
    scaled = precision.solve(b, 0.75, tol=1e-8)
    assert scaled.num_iterations < 0.7 * plain.num_iterations
    stopped = precision.solve(b, 0.75, tol=1e-8, max_iterations=2)
    assert stopped.num_iterations == 2 and stopped.residual > 1e-8


def test_what_cannot_be_solved_shows_in_the_residual(precision):
    b = jnp.ones(COLUMNS)
    assert not jnp.isfinite(precision.solve(b.at[3].set(jnp.nan), 0.75).residual)
    indefinite = PosteriorPrecision(identity(2), jnp.asarray(1.0), jnp.array([-3.0, 1.0]))
    result = conjugate_gradient(indefinite.matvec, jnp.array([1.0, -1.0]), max_iterations=1)
    assert not result.residual <= 1e-6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_diagonal_gram_matrix_is_recognised(dtype):
    rng = np.random.default_rng(0)
    basis = from_matrix(jnp.asarray(np.linalg.qr(rng.normal(size=(COLUMNS, COLUMNS)))[0], dtype))
    quarter = jnp.asarray(0.25, dtype)
    assert has_diagonal_gram(basis, quarter)
    np.testing.assert_allclose(gram_diagonal(basis, quarter, True), 4.0, rtol=1e-5)
    entries, noise = jnp.asarray(rng.normal(size=COLUMNS), dtype), jnp.linspace(1.0, 2.0, COLUMNS, dtype=dtype)
    assert has_diagonal_gram(diagonal(entries), noise)
    np.testing.assert_allclose(gram_diagonal(diagonal(entries), noise, True), entries**2 / noise, rtol=1e-5)


def test_another_gram_matrix_is_averaged():
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(COLUMNS, COLUMNS)))[0]
    operator = select(np.arange(ROWS), COLUMNS) @ from_matrix(basis)
    assert not has_diagonal_gram(operator, jnp.asarray(0.25))
    assert not has_diagonal_gram(from_matrix(basis), jnp.linspace(1.0, 2.0, COLUMNS))
    gram = 4.0 * basis[:ROWS].T @ basis[:ROWS]
    error = trace_error(gram, _NUM_SIGNS) / COLUMNS
    found = gram_diagonal(operator, jnp.asarray(0.25), False)
    np.testing.assert_allclose(found, np.trace(gram) / COLUMNS, atol=4.0 * error)


def test_dense_moments(precision, exact):
    shift = jnp.linspace(0.0, 1.0, COLUMNS)
    moments = dense_moments(precision, shift)
    covariance, matrix = np.linalg.inv(exact), np.asarray(precision.operator.materialise())
    np.testing.assert_allclose(moments.mean, covariance @ shift, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(moments.variance, np.diag(covariance), rtol=1e-9)
    np.testing.assert_allclose(moments.half_log_determinant, 0.5 * np.linalg.slogdet(exact)[1], rtol=1e-12)
    np.testing.assert_allclose(moments.fitted_variance, np.diag(matrix @ covariance @ matrix.T), rtol=1e-9)


def test_variances_are_the_gradient_of_the_log_determinant(precision):
    def log_determinant(widths):
        return jnp.linalg.slogdet(PosteriorPrecision(precision.operator, precision.noise_variance, widths).dense())[1]

    gradient = jax.grad(log_determinant)(precision.precision)
    np.testing.assert_allclose(dense_moments(precision, jnp.zeros(COLUMNS)).variance, gradient, rtol=1e-9)


def test_perturb_and_map_has_the_exact_covariance(precision, exact):
    num_samples = 2000
    perturbations = draw_perturbations(jax.random.key(2), num_samples, precision.operator.shape)
    result = jax.jit(lambda p: perturb_and_map(precision, p, 0.75, tol=1e-8))(perturbations)
    covariance = np.linalg.inv(exact)
    error = np.sqrt(2.0 / num_samples)
    ratio = np.mean(np.square(result.solution), axis=0) / np.diag(covariance)
    assert np.all(np.abs(ratio - 1.0) < 5.0 * error)
    # Unbiased: the average over the coefficients, nearly independent, has a much smaller error still.
    assert abs(np.mean(ratio) - 1.0) < 5.0 * error / np.sqrt(COLUMNS / 4)
    scale = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    sample = np.asarray(result.solution).T @ np.asarray(result.solution) / num_samples
    assert np.max(np.abs(sample - covariance) / scale) < 6.0 / np.sqrt(num_samples)


def test_lanczos_variance_is_a_lower_bound_and_exact_on_the_whole_space(precision, exact):
    start = jax.random.normal(jax.random.key(3), (COLUMNS,))
    truth = np.diag(np.linalg.inv(exact))
    few, some = (lanczos_variance(precision, start, k) for k in (5, 15))
    assert np.all(few <= truth * (1 + 1e-8)) and np.all(some <= truth * (1 + 1e-8))
    assert np.sum(few) < np.sum(some) < np.sum(truth)
    np.testing.assert_allclose(lanczos_variance(precision, start, COLUMNS), truth, rtol=1e-4)


def test_lanczos_log_determinant(precision, exact):
    truth = 0.5 * np.linalg.slogdet(exact)[1]
    signs = jnp.sign(jax.random.normal(jax.random.key(4), (200, COLUMNS)))
    found = lanczos_log_determinant(precision, jnp.asarray(0.75), signs, COLUMNS)
    error = log_determinant_error(exact, 0.75 + np.asarray(precision.precision), 200)
    np.testing.assert_allclose(found, truth, atol=4.0 * error)
    # Fewer products than dimensions are enough.
    np.testing.assert_allclose(lanczos_log_determinant(precision, jnp.asarray(0.75), signs, 20), found, rtol=1e-6)


def test_lanczos_log_determinant_of_a_matrix_that_the_preconditioner_equals():
    widths = jnp.linspace(1.0, 9.0, COLUMNS)
    precision = PosteriorPrecision(identity(COLUMNS), jnp.asarray(0.5), widths)
    signs = jnp.sign(jax.random.normal(jax.random.key(5), (3, COLUMNS)))
    found = lanczos_log_determinant(precision, jnp.asarray(2.0), signs, 10)
    np.testing.assert_allclose(found, 0.5 * jnp.sum(jnp.log(2.0 + widths)), rtol=1e-10)


@pytest.mark.parametrize("wavelet", ["db2", "sym4", "coif3"])
def test_transforms_by_tabulated_filters_count_as_orthonormal(wavelet):
    transform = wavelet_transform((64, 64), wavelet, 4)
    assert has_diagonal_gram(transform.T, jnp.asarray(0.01))
    assert not has_diagonal_gram(select(np.arange(4096) % 3 > 0) @ transform.T, jnp.asarray(0.01))
