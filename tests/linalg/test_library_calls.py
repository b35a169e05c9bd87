"""Factorisations side by side, or one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.linalg.library_calls import most_together, of_each


def _half_log_determinant(scale, size):
    distances = jnp.abs(jnp.arange(size)[:, None] - jnp.arange(size))
    return jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(jnp.eye(size) + scale * jnp.exp(-distances)))))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="libraries of other devices take batches as they are")
@pytest.mark.parametrize("size", [8, 150])
def test_large_factorisations_are_found_in_loops_and_derivatives_and_done_in_turn(size):
    slope = jax.jit(
        jax.value_and_grad(lambda scale: jax.lax.fori_loop(0, 2, lambda _, x: _half_log_determinant(x, size), scale))
    )
    scales = jnp.array([0.5, 0.7, 0.9])
    number = most_together(slope, scales[0])
    assert number == 1 if size == 150 else number > 100
    values, slopes = jax.jit(of_each(slope))(scales)
    for scale, value, found in zip(scales, values, slopes, strict=True):
        wanted, wanted_slope = slope(scale)
        np.testing.assert_allclose([value, found], [wanted, wanted_slope], rtol=1e-12)
    # in turn, no factorisation has a batch
    text = str(jax.make_jaxpr(of_each(slope))(scales))
    assert (f"f64[3,{size},{size}] = cholesky" in text) == (size == 8)


def test_functions_without_libraries_have_no_bound():
    assert most_together(lambda x: x @ x, jnp.eye(500)) is None
