"""Tilted moments of many factors, of which a chunk at a time is computed, against those of few."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.potentials import ElementwisePotential, LogitPotential, PoissonExpPotential, StudentTPotential
from numpyro_ext.potentials.elementwise import TemperedPotential
from numpyro_ext.potentials.families.poisson import PoissonSoftplusPotential
from tests.tiers import thorough

SIZE, FEW = 5000, 500


def _potential(family):
    rng = np.random.default_rng(0)
    if family == "logit":
        return LogitPotential(jnp.asarray(rng.integers(2, size=SIZE), float))
    if family == "poisson_exp":
        return PoissonExpPotential(jnp.asarray(rng.poisson(2.0, SIZE), float))
    if family == "poisson":
        return PoissonSoftplusPotential(jnp.asarray(rng.poisson(2.0, SIZE), float))
    return StudentTPotential(jnp.asarray(rng.standard_t(3.0, SIZE)), jnp.asarray(rng.uniform(0.5, 2.0, SIZE)), 3.0)


@pytest.mark.thorough
@pytest.mark.parametrize("family", [*thorough("logit", "poisson", "poisson_exp"), "student"])
@pytest.mark.parametrize("power", [*thorough(1.0), 0.5])
def test_many_factors_are_as_few_of_them(family, power):
    potential = _potential(family)
    rng = np.random.default_rng(1)
    mean, variance = jnp.asarray(rng.normal(size=SIZE)), jnp.asarray(rng.uniform(0.1, 1.9, SIZE))
    variance = variance.at[4321].set(40.0)  # wide, in the last chunk

    def moments(potential, mean, variance):
        return potential.tilted_moments(mean, variance, power)

    def log_z(mean, variance):
        return jnp.sum(moments(potential, mean, variance).log_z)

    many = jax.jit(moments)(potential, mean, variance)
    slopes = jax.jit(jax.grad(log_z, argnums=(0, 1)))(mean, variance)
    for start in (0, SIZE - FEW):
        part = slice(start, start + FEW)
        few = jax.tree.map(lambda x, part=part: x[part] if x.ndim else x, jax.tree.map(jnp.asarray, potential))
        found = moments(few, mean[part], variance[part])
        for one, other in zip(many, found, strict=True):
            np.testing.assert_allclose(one[part], other, rtol=1e-9, atol=1e-10)
        # d log Z / dm = (tilted mean - m) / v, d log Z / dv = ((tilted mean - m)^2 + tilted variance - v) / 2 v^2
        m, v = mean[part], variance[part]
        np.testing.assert_allclose(slopes[0][part], (found.mean - m) / v, rtol=1e-8, atol=1e-9)
        expected = 0.5 * ((found.mean - m) ** 2 + found.variance - v) / v**2
        np.testing.assert_allclose(slopes[1][part], expected, rtol=1e-7, atol=1e-8)


def _all_at_once(eta, y):
    """A Student-t factor that takes as many predictors as there are observations."""
    return -2.0 * jnp.log1p(jnp.zeros(len(y)).at[jnp.arange(len(y))].set(eta - y) ** 2 / 3.0)


@pytest.mark.thorough
@pytest.mark.parametrize("weight", [None, 0.5])
def test_factors_of_a_fixed_shape_stay_whole(weight):
    rng = np.random.default_rng(2)
    y, mean = jnp.asarray(rng.standard_t(3.0, SIZE)), jnp.asarray(rng.normal(size=SIZE))
    potential = ElementwisePotential(_all_at_once, (y,))
    few = ElementwisePotential(_all_at_once, (y[:FEW],))
    if weight is not None:
        weights = jnp.full(SIZE, weight)
        potential, few = TemperedPotential(potential, weights), TemperedPotential(few, weights[:FEW])
    many, found = potential.tilted_moments(mean, jnp.ones(SIZE)), few.tilted_moments(mean[:FEW], jnp.ones(FEW))
    np.testing.assert_allclose(many.log_z[:FEW], found.log_z, rtol=1e-9)
    np.testing.assert_allclose(many.mean[:FEW], found.mean, rtol=1e-9, atol=1e-10)
