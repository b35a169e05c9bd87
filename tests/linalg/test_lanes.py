"""Many positive definite systems at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_ext.linalg.cholesky import positive_solve
from numpyro_ext.linalg.lanes import suits_lanes


def _systems(number, size, dtype=float):
    rng = np.random.default_rng(size)
    root = rng.standard_normal((number, size, size + 3))
    return jnp.asarray(root @ root.swapaxes(1, 2), dtype), jnp.asarray(rng.standard_normal((number, size)), dtype)


@pytest.mark.parametrize(("number", "size"), [(16, 9), (37, 21), (40, 32), (3, 21), (40, 5), (20, 40)])
def test_solutions_are_those_of_one_system_at_a_time(number, size):
    matrix, x = _systems(number, size)
    expected = np.linalg.solve(np.asarray(matrix), np.asarray(x)[..., None])[..., 0]
    np.testing.assert_allclose(positive_solve(matrix, x), expected, rtol=1e-9, atol=1e-9)
    nested = positive_solve(matrix[None], x[None])
    np.testing.assert_allclose(nested[0], expected, rtol=1e-9, atol=1e-9)


def test_solutions_in_single_precision():
    matrix, x = _systems(50, 21, jnp.float32)
    matrix += 10.0 * jnp.eye(21, dtype=matrix.dtype)
    found = positive_solve(matrix, x)
    assert found.dtype == jnp.float32 and suits_lanes(matrix)
    expected = np.linalg.solve(np.asarray(matrix, float), np.asarray(x, float)[..., None])[..., 0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_matrix_that_is_not_positive_definite_gives_nan_in_its_own_system_alone():
    matrix, x = _systems(20, 12)
    matrix = matrix.at[7].set(-matrix[7])
    is_nan = np.isnan(np.asarray(positive_solve(matrix, x)))
    assert suits_lanes(matrix) and is_nan[7].all() and not np.delete(is_nan, 7, 0).any()


def test_derivatives_are_those_of_one_system_at_a_time():
    matrix, x = _systems(17, 9)
    direction = random.normal(random.key(0), x.shape)

    def value(solve):
        return lambda a, b: jnp.sum(direction * solve(0.5 * (a + a.swapaxes(1, 2)), b))

    found = jax.grad(value(positive_solve), argnums=(0, 1))(matrix, x)
    expected = jax.grad(value(lambda a, b: jnp.linalg.solve(a, b[..., None])[..., 0]), argnums=(0, 1))(matrix, x)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-8, atol=1e-10)
