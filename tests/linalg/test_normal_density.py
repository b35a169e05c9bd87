"""Log density of a normal vector by a factor: its derivatives in closed form, against those of JAX and differences."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from scipy.stats import multivariate_normal

from numpyro_ext.linalg.gaussian.normal_density import normal_log_density

SIZE = 40  # more than a block
TIMES = jnp.arange(float(SIZE))


def covariance(theta):
    return jnp.exp(theta[0] - jnp.square(TIMES[:, None] - TIMES) * jnp.exp(theta[1])) + 0.1 * jnp.eye(SIZE)


def moved(theta):
    return jnp.sin(TIMES) + theta[2] * TIMES / SIZE


def closed_form(theta):
    own = covariance(theta)
    return normal_log_density(own, moved(theta), jnp.linalg.cholesky(own))


def by_numpyro(theta):
    return dist.MultivariateNormal(jnp.zeros(SIZE), covariance(theta)).log_prob(moved(theta))


def test_values_and_two_derivatives_are_those_of_others():
    theta, direction, step = jnp.array([0.3, -1.5, 0.2]), jnp.array([0.5, 1.0, -0.7]), 1e-5

    @jax.jit
    def everything(theta):
        return [(f(theta), *jax.jvp(jax.grad(f), (theta,), (direction,))) for f in (closed_form, by_numpyro)]

    own, other = everything(theta)
    for a, b in zip(own, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)
    exact = multivariate_normal.logpdf(moved(theta), np.zeros(SIZE), covariance(theta))
    np.testing.assert_allclose(own[0], exact, rtol=1e-9)
    for k in range(3):
        ends = [everything(theta.at[k].add(sign * step))[0][0] for sign in (1.0, -1.0)]
        np.testing.assert_allclose(own[1][k], (ends[0] - ends[1]) / (2.0 * step), rtol=1e-5, atol=1e-5)


def test_a_covariance_that_does_not_move_takes_no_inverse():
    own = covariance(jnp.array([0.3, -1.5, 0.2]))
    factor = jnp.linalg.cholesky(own)
    text = str(jax.make_jaxpr(jax.grad(lambda x: normal_log_density(own, x, factor)))(TIMES))
    assert text.count("triangular_solve") == 3  # of vectors
    slope = jax.grad(lambda x: normal_log_density(own, x, factor))(TIMES)
    np.testing.assert_allclose(slope, -jnp.linalg.solve(own, TIMES), rtol=1e-8)
