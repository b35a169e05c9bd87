"""Vector factors laid out as rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.potentials.families.categorical import SoftmaxPotential
from numpyro_ext.potentials.vector_rows import VectorRows, row_directions


def directions(dimension):
    """Rows as vectors."""
    plus, minus = row_directions(dimension).T
    identity = np.eye(dimension)
    return identity[plus] - np.where(minus[:, None] < 0, 0.0, identity[minus])


@pytest.fixture
def rows():
    return VectorRows(SoftmaxPotential(jnp.array([1, 3]), 4, bound="delta"))


def moments_of_rows(mean, covariance):
    a = directions(4)
    return (mean @ a.T).reshape(-1), np.einsum("ri,nij,rj->nr", a, covariance, a).reshape(-1)


def random_moments():
    rng = np.random.default_rng(2)
    half = rng.standard_normal((2, 4, 4))
    return rng.standard_normal((2, 4)), half @ np.swapaxes(half, 1, 2)


def test_directions_are_a_basis_of_symmetric_matrices():
    outer = [np.outer(a, a).ravel() for a in directions(4)]
    assert np.linalg.matrix_rank(np.array(outer)) == len(outer) == 10


def test_joint_moments_come_back(rows):
    mean, covariance = random_moments()
    found = rows.joint_moments(*moments_of_rows(mean, covariance))
    np.testing.assert_allclose(found[0], mean)
    np.testing.assert_allclose(found[1], covariance, atol=1e-14)


def test_derivatives_are_those_of_the_vector_factor(rows):
    mean, covariance = random_moments()
    value, slope, curvature = rows.derivatives(moments_of_rows(mean, covariance)[0])
    expected_value, gradient, hessian = rows.base.derivatives(mean)
    a = directions(4)
    np.testing.assert_allclose(value.reshape(2, -1).sum(1), expected_value)
    np.testing.assert_allclose(slope.reshape(2, -1) @ a, gradient)
    np.testing.assert_allclose(np.einsum("nr,ri,rj->nij", curvature.reshape(2, -1), a, a), hessian, atol=1e-14)
    assert bool(jnp.all(curvature <= 1e-16))


@pytest.mark.slow
def test_slopes_of_expectations_are_derivatives_in_the_moments_of_the_rows(rows):
    mean, variance = moments_of_rows(*random_moments())

    def total(m, v):
        return jnp.sum(rows.expected_log_density(m, v).value)

    expected = rows.expected_log_density(mean, variance)
    np.testing.assert_allclose(jax.grad(total, 1)(mean, variance), expected.variance_slope, atol=1e-10)
    np.testing.assert_allclose(jax.grad(total, 0)(mean, variance), expected.mean_slope, atol=1e-10)


def test_log_normaliser_against_draws(rows):
    mean, covariance = random_moments()
    eta = np.random.default_rng(0).multivariate_normal(mean[0], covariance[0], 400_000)
    probability = jax.nn.softmax(eta, axis=-1)[:, 1].mean()
    found = rows.log_normaliser(*moments_of_rows(mean, covariance)).reshape(2, -1)[0, 0]
    np.testing.assert_allclose(np.exp(found), probability, rtol=5e-3)
