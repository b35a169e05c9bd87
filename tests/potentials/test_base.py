"""Potentials as pytrees."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_ext.potentials import (
    BinomialLogitPotential,
    ElementwisePotential,
    GaussianPotential,
    LaplacePotential,
    LogitPotential,
    NegativeBinomialExpPotential,
    PoissonExpPotential,
    Potential,
    ProbitPotential,
    RectifiedLinearPoissonPotential,
    StudentTPotential,
)
from numpyro_ext.potentials.elementwise import TemperedPotential
from numpyro_ext.potentials.families.binary import ComplementaryLogLogPotential
from numpyro_ext.potentials.families.log_normal import LogNormalPotential
from numpyro_ext.potentials.families.logit_counts import NegativeBinomialLogitPotential
from numpyro_ext.potentials.families.poisson import PoissonSoftplusPotential
from numpyro_ext.potentials.families.positive import GammaExpPotential, WeibullExpPotential

ONE = jnp.ones(3)
POTENTIALS = [
    *(family(ONE) for family in (ProbitPotential, LogitPotential, ComplementaryLogLogPotential)),
    *(family(ONE, ONE) for family in (BinomialLogitPotential, GaussianPotential, LaplacePotential)),
    *(family(ONE, ONE) for family in (NegativeBinomialLogitPotential, PoissonExpPotential, PoissonSoftplusPotential)),
    *(family(ONE, ONE, ONE) for family in (NegativeBinomialExpPotential, RectifiedLinearPoissonPotential)),
    StudentTPotential(ONE, ONE, ONE),
    LogNormalPotential(ONE, ONE),
    *(family(ONE, ONE, ONE) for family in (GammaExpPotential, WeibullExpPotential)),
    ElementwisePotential(jnp.sin, (ONE,)),
    ElementwisePotential(jnp.cos, (ONE,)),
    TemperedPotential(LogitPotential(ONE), ONE),
    TemperedPotential(ProbitPotential(ONE), ONE),
]


@pytest.mark.float32
def test_structures_of_different_families_differ():
    # A compiled function is looked up by the structure of its arguments: were two families equal there, one would now
    # and then be computed as the other.
    for first, second in itertools.combinations(POTENTIALS, 2):
        assert jax.tree.structure(first) != jax.tree.structure(second), (first, second)
    for potential in POTENTIALS:
        assert jax.tree.structure(potential) == jax.tree.structure(jax.tree.map(lambda x: 2 * x, potential))


@pytest.mark.float32
def test_potentials_pass_through_transformations():
    potential = TemperedPotential(StudentTPotential(jnp.array([0.0, 1.0]), 2.0, 3.0), 0.5)
    eta = jnp.array([0.3, 0.4])
    expected = potential.log_density(eta)
    np.testing.assert_allclose(jax.jit(lambda p, x: p.log_density(x))(potential, eta), expected, rtol=1e-6)
    copies = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), potential)
    np.testing.assert_allclose(jax.vmap(lambda p: p.log_density(eta))(copies), [expected] * 2, rtol=1e-6)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(potential)]
    assert paths == [".base.observation", ".base.scale", ".base.df", ".weight"]
    with pytest.raises(AttributeError):
        potential.weight = 1.0


POSITIVE, SHAPE = jnp.array([0.5, 2.0, 7.0, 0.01]), jnp.array([0.3, 1.0, 2.5, 40.0])
ON_THE_LINE_OF_LOGARITHMS = {
    "log normal": (LogNormalPotential(POSITIVE, SHAPE), lambda eta, y, a: dist.LogNormal(eta, a)),
    "gamma": (GammaExpPotential(POSITIVE, SHAPE, 2.0), lambda eta, y, a: dist.Gamma(a, 2.0 * jnp.exp(eta))),
    "weibull": (WeibullExpPotential(POSITIVE, SHAPE, 2.0), lambda eta, y, a: dist.Weibull(2.0 * jnp.exp(eta), a)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ON_THE_LINE_OF_LOGARITHMS)
def test_positive_observations_are_those_of_numpyro(name):
    factors, distribution = ON_THE_LINE_OF_LOGARITHMS[name]

    def log_density(eta, observation, shape):
        return distribution(eta, observation, shape).log_prob(observation)

    by_quadrature = ElementwisePotential(log_density, (POSITIVE, SHAPE))
    eta = jnp.array([0.1, -0.2, 0.3, 0.2])
    for variance, power in ((jnp.array([0.5, 0.1, 0.3, 0.4]), 1), (jnp.array([0.5, 1.0, 9.0, 0.01]), 0.7)):
        for exact, found in [
            (by_quadrature.tilted_moments(eta, variance, power), factors.tilted_moments(eta, variance, power)),
            (
                by_quadrature.expected_log_density(eta, 0.1 * variance),
                factors.expected_log_density(eta, 0.1 * variance),
            ),
            (by_quadrature.derivatives(eta), factors.derivatives(eta)),
        ]:
            for one, other in zip(exact, found, strict=True):
                np.testing.assert_allclose(other, one, rtol=1e-8, atol=1e-11)
    np.testing.assert_allclose(factors.log_density(eta), log_density(eta, POSITIVE, SHAPE), rtol=1e-12)
    np.testing.assert_allclose(factors.mean(eta), distribution(eta, POSITIVE, SHAPE).mean, rtol=1e-10)


@pytest.mark.float32
def test_complementary_log_log_factors_are_finite_and_exact_far_out():
    eta = jnp.array([-700.0, -80.0, -40.0, -29.0, -3.0, 0.0, 1.5, 4.0, 4.9, 5.2, 30.0, 80.0])
    exact = np.asarray(eta, np.longdouble)
    tail = -np.exp(exact)
    ones = np.where(exact < -35, exact, np.log(-np.expm1(tail)))
    for label, expected in ((0, tail), (1, ones)):
        factors = ComplementaryLogLogPotential(jnp.full(eta.shape, label))
        value, slope, curvature = factors.derivatives(eta)
        assert np.all(np.isfinite(slope)) and np.all(np.asarray(curvature) <= 0.0)
        rtol = 1e-13 if value.dtype == np.float64 else 1e-5
        np.testing.assert_allclose(value, np.asarray(expected, float), rtol=rtol, atol=rtol)
        by_differentiation = Potential.derivatives(ComplementaryLogLogPotential(jnp.full(6, label)), eta[3:9])
        for one, other in zip(by_differentiation[1:], (slope, curvature), strict=True):
            np.testing.assert_allclose(other[3:9], one, rtol=30 * rtol, atol=1e-12)
