"""Calls of NumPy from compiled programs, and sums by index that are made by them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.linalg.host_call import host_call
from numpyro_ext.linalg.sums_by_index import sums_by_index


def by_host(function, *args):
    return host_call(function, jax.eval_shape(lambda *a: a[0], *args), *args)


@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint32"])
def test_it_is_the_function_of_numpy(shape, dtype):
    x = jnp.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape), dtype)
    found = jax.jit(lambda x: by_host(lambda a: a * np.asarray(3, a.dtype), x))(x)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, 3 * np.asarray(x))


def test_it_takes_and_returns_trees():
    tree = {"a": jnp.arange(3.0), "b": (jnp.ones((2, 2)), jnp.asarray(2))}
    result = jax.eval_shape(lambda: tree)
    found = jax.jit(lambda tree: host_call(lambda t: jax.tree.map(lambda a: a + 1, t), result, tree))(tree)
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one, other + 1), found, tree)


def test_calls_are_made_in_loops_and_under_vmap():
    double = jax.jit(lambda x: by_host(lambda a: 2.0 * a, x))
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.vmap(double)(x), 2.0 * x)
    repeated = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, z: 0.5 * double(z), x))
    np.testing.assert_array_equal(repeated(x), x)


def test_large_arguments_are_whole_while_other_programs_run():
    x = jnp.asarray(np.random.default_rng(0).normal(size=200_000))
    total = jax.jit(lambda x, k: host_call(lambda a, k: np.sum(a) + k, jax.ShapeDtypeStruct((), x.dtype), x, k))
    found = [total(x, jnp.asarray(float(k))) for k in range(40)]
    np.testing.assert_allclose(found, np.sum(np.asarray(x)) + np.arange(40.0), rtol=1e-12)


def test_results_of_other_shapes_are_refused():
    with pytest.raises(Exception, match=r"returned an array of shape \(\) for \(3,\)"):
        jax.block_until_ready(jax.jit(lambda x: by_host(np.sum, x))(jnp.ones(3)))


def sums(terms, index, size):
    """The same sums by the program itself."""
    return jnp.zeros(size).at[index].add(terms, mode="drop")


def test_sums_by_index_and_their_derivatives_are_those_of_the_program():
    draws = np.random.default_rng(1)
    terms, index = jnp.asarray(draws.normal(size=(50, 4))), jnp.asarray(draws.integers(0, 8, (50, 4)))
    np.testing.assert_allclose(sums_by_index(terms, index, 7), sums(terms, index, 7), rtol=1e-13)

    def by(function):
        return lambda t: jnp.sum(jnp.sin(function(t * t, index, 7)))

    one, other = by(sums_by_index), by(sums)
    np.testing.assert_allclose(jax.jit(jax.grad(one))(terms), jax.grad(other)(terms), rtol=1e-12)
    along = jnp.asarray(draws.normal(size=terms.shape))
    for outer in (jax.jvp, lambda f, at, by: jax.jvp(jax.grad(f), at, by)):
        found, expected = outer(one, (terms,), (along,)), outer(other, (terms,), (along,))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)


def test_millions_of_terms_are_added_a_piece_at_a_time():
    number = np.arange(600_000)
    found = sums_by_index(jnp.asarray(number % 5.0), jnp.asarray(number % 9), 8)
    np.testing.assert_array_equal(found, np.bincount(number % 9, number % 5.0)[:8])


def test_sums_of_nothing_and_of_what_is_not_finite():
    np.testing.assert_array_equal(sums_by_index(jnp.zeros(0), jnp.zeros(0, int), 3), np.zeros(3))
    found = sums_by_index(jnp.array([jnp.nan, 1.0, jnp.inf]), jnp.array([0, 1, 2]), 3)
    np.testing.assert_array_equal(found, [np.nan, 1.0, np.inf])
