"""Unknowns made of normal numbers by a root of the posterior covariance: their derivatives in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.linalg.gaussian.design import DenseDesign, SparseRows
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior
from numpyro_ext.linalg.gaussian.spaces.observation_space import ObservationSpace
from tests.tiers import few

NUM_ROWS, SIZE = 6, 7
WHITE = jnp.asarray(np.random.default_rng(0).normal(size=SIZE))
DESIGNS = {
    "single": SparseRows(jnp.arange(NUM_ROWS)[:, None], jnp.linspace(0.5, 2.0, NUM_ROWS)[:, None], SIZE),
    "pairs": SparseRows(jnp.stack([jnp.arange(NUM_ROWS), jnp.full(NUM_ROWS, 6)], 1), jnp.ones((NUM_ROWS, 2)), SIZE),
    "dense": DenseDesign(jnp.asarray(np.random.default_rng(1).normal(size=(NUM_ROWS, SIZE)))),
}


def _parts(name, theta):
    """Prior covariance, design, precisions and shifts of the sites; all of them move with ``theta``, shape ``(3,)``."""
    distance = jnp.square(jnp.arange(6.0)[:, None] - jnp.arange(6.0))
    covariance = jnp.exp(theta[0] - distance * jnp.exp(theta[1])) + 0.1 * jnp.eye(6)
    prior = CovariancePrior(covariance[None]), DiagonalPrior(jnp.exp(theta[2:]))
    design = DESIGNS[name].scale_rows(1.0 + 0.1 * theta[1] * jnp.arange(NUM_ROWS))
    precision = jnp.exp(theta[2] * jnp.linspace(-1.0, 1.0, NUM_ROWS)) * jnp.linspace(0.0, 3.0, NUM_ROWS)
    return prior, design, precision, precision * theta[0] + jnp.arange(NUM_ROWS)


def _by_closed_form(name, theta, white):
    prior, design, precision, shift = _parts(name, theta)
    rows = jnp.arange(NUM_ROWS)[None], jnp.arange(SIZE)[None]
    return ObservationSpace.build(prior, design, *rows, False).condition(precision, shift).place(white)


def _by_inversion(name, theta, white):
    """The same by inverses and a Cholesky factor, whose derivatives are those of JAX."""
    (kernel, others), design, precision, shift = _parts(name, theta)
    prior = jax.scipy.linalg.block_diag(kernel.covariance[0], jnp.diag(others.variance))
    rows = design.to_dense()
    covariance = jnp.linalg.inv(jnp.linalg.inv(prior) + rows.T @ (precision[:, None] * rows))
    factor = jnp.linalg.cholesky(covariance)
    return covariance @ rows.T @ shift + factor @ white, jnp.sum(jnp.log(jnp.diagonal(factor)))


@pytest.mark.parametrize("name", few(DESIGNS, 1))
def test_derivatives_are_those_of_inverses_and_finite_differences(name):
    theta = jnp.array([0.3, -0.5, 0.2])

    def total(function, theta, white):
        unknowns, log_scale = function(name, theta, white)
        return jnp.sum(jnp.sin(unknowns)) + 0.7 * log_scale

    @jax.jit
    def everything(theta, white):
        return [
            (
                function(name, theta, white),
                jax.grad(lambda *at, f=function: total(f, *at), argnums=(0, 1))(theta, white),
                jax.jacfwd(lambda at, f=function: f(name, at, white))(theta),
            )
            for function in (_by_closed_form, _by_inversion)
        ]

    found, wanted = everything(theta, WHITE)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-8, atol=1e-9)
    value = jax.jit(lambda theta: total(_by_closed_form, theta, WHITE))
    steps = 1e-5 * jnp.eye(3)
    differences = [(value(theta + step) - value(theta - step)) / 2e-5 for step in steps]
    np.testing.assert_allclose(found[1][0], differences, rtol=1e-6, atol=1e-8)


def test_a_root_is_taken_where_the_difference_of_covariances_has_digits():
    def space(design, variance=1.0):
        prior, rows = (DiagonalPrior(jnp.full(design.num_columns, variance)),), jnp.arange(design.num_rows)[None]
        return ObservationSpace.build(prior, design, rows, jnp.arange(design.num_columns)[None], False)

    def suits(design, precision, **options):
        return (
            space(design, **options)
            .condition(jnp.full(design.num_rows, precision), jnp.ones(design.num_rows))
            .suits_root
        )

    assert suits(DESIGNS["dense"], 100.0)
    assert not suits(DESIGNS["dense"], 1e9)
    assert not suits(DESIGNS["dense"], 100.0, variance=1e7)
    assert not suits(DenseDesign(jnp.ones((2, 5))), 100.0)
