"""Factors of two predictors: integrals over the plane against a dense grid, derivatives against finite differences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy.special import logsumexp

from numpyro_ext.potentials import PairPotential
from numpyro_ext.potentials.pairs import PairKind, kind_of_pair
from numpyro_ext.potentials.vector_rows import VectorRows
from tests.tiers import thorough

IS_DOUBLE = jax.config.jax_enable_x64

FAMILIES = {
    "normal": (lambda e, y: dist.Normal(e[:, 0], jnp.exp(e[:, 1])).log_prob(y), [0.3, 2.5], PairKind(0, True, False)),
    "log-normal": (
        lambda e, y: dist.LogNormal(e[:, 1], jax.nn.softplus(e[:, 0])).log_prob(y),
        [0.3, 2.5],
        PairKind(1, True, False),
    ),
    "Student-t": (
        lambda e, y: dist.StudentT(4.0, e[:, 0], jnp.exp(e[:, 1])).log_prob(y),
        [0.3, 2.5],
        PairKind(0, False, False),
    ),
    "negative binomial": (
        lambda e, y: dist.NegativeBinomial2(jnp.exp(e[:, 0]), jnp.exp(e[:, 1])).log_prob(y),
        [0.0, 7.0],
        PairKind(0, False, False),
    ),
    "zero-inflated Poisson": (
        lambda e, y: dist.ZeroInflatedPoisson(jax.nn.sigmoid(e[:, 0]), jnp.exp(e[:, 1])).log_prob(y),
        [0.0, 3.0],
        PairKind(1, False, False),
    ),
    "mixture": (
        lambda e, y: jnp.logaddexp(dist.Normal(e[:, 0], 1.0).log_prob(y), dist.Normal(e[:, 1], 1.0).log_prob(y)),
        [0.2, 1.5],
        PairKind(0, False, True),
    ),
}
CAVITIES = [((0.0, 0.3), ((1.0, 0.2), (0.2, 0.3))), ((0.5, 0.5), ((0.04, 0.01), (0.01, 0.09)))]
NODES = np.linspace(-8.0, 8.0, 801)
GRID = np.stack(np.meshgrid(NODES, NODES, indexing="ij"), axis=-1).reshape(-1, 2)


def _cases(values):
    rows = [(y, mean, covariance) for y in values for mean, covariance in CAVITIES]
    return (jnp.asarray(np.array(part, float)) for part in zip(*rows, strict=True))


FEW = ("zero-inflated Poisson",)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*FEW, *thorough(*(name for name in FAMILIES if name not in FEW))])
def test_integrals_are_those_of_a_dense_grid(name):
    function, values, kind = FAMILIES[name]
    y, mean, covariance = _cases(values)
    factors = PairPotential(function, (y,))
    assert kind_of_pair(factors, y.size) == kind
    factors = PairPotential(function, (y,), *kind)
    tilted = jax.jit(lambda f: f.tilted_moments(mean, covariance))(factors)
    expected = jax.jit(lambda f: f.expected_log_density(mean, covariance).value)(factors)
    tolerance = {"rtol": 2e-6, "atol": 2e-6} if IS_DOUBLE else {"rtol": 1e-3, "atol": 1e-3}
    for i in range(y.size):
        eta = mean[i] + GRID @ np.linalg.cholesky(covariance[i]).T
        log_factor = np.asarray(function(jnp.asarray(eta), y[i]), float)
        log_gauss = -0.5 * np.sum(GRID**2, axis=-1)
        log_gauss -= logsumexp(log_gauss)
        log_z = logsumexp(log_factor + log_gauss)
        weight = np.exp(log_factor + log_gauss - log_z)
        center = weight @ eta
        away = np.asarray(eta - center)
        np.testing.assert_allclose(tilted.log_z[i], log_z, **tolerance)
        np.testing.assert_allclose(tilted.mean[i], center, **tolerance)
        np.testing.assert_allclose(tilted.covariance[i], (away.T * weight) @ away, **tolerance)
        np.testing.assert_allclose(expected[i], np.exp(log_gauss) @ log_factor, **tolerance)


@pytest.mark.thorough
def test_factors_that_ask_for_nested_integrals_have_no_brief_form():
    def weibull(e, y):
        return dist.Weibull(jnp.exp(e[:, 0]), jnp.exp(e[:, 1])).log_prob(y)

    y = jnp.array([0.3, 2.5])
    kind = kind_of_pair(PairPotential(weibull, (y,)), y.size)
    assert kind.is_steep
    steep = PairPotential(weibull, (y,), *kind)
    assert steep.in_brief() is steep
    for name, is_brief in (("negative binomial", True), ("normal", False), ("mixture", False)):
        function, _, kind = FAMILIES[name]
        assert PairPotential(function, (y,), *kind).in_brief().is_brief == is_brief


def test_a_location_far_away_under_a_vague_prior_of_the_scale():
    # given the scale the integral over the location is a normal density: one dimension is left
    function, _, kind = FAMILIES["normal"]
    y, mean, covariance = 30.0, np.array([0.0, 1.0]), np.array([[100.0, 3.0], [3.0, 9.0]])
    factors = PairPotential(function, (jnp.array([y]),), *kind)
    found = factors.tilted_moments(jnp.asarray(mean)[None], jnp.asarray(covariance)[None])
    outer = np.linspace(-30.0, 32.0, 200_001)
    slope = covariance[0, 1] / covariance[1, 1]
    rest = covariance[0, 0] - slope * covariance[0, 1]
    center, noise = mean[0] + slope * (outer - mean[1]), np.exp(2 * outer)
    log_inner = -0.5 * (y - center) ** 2 / (rest + noise) - 0.5 * np.log(2 * np.pi * (rest + noise))
    log_weight = log_inner - 0.5 * (outer - mean[1]) ** 2 / covariance[1, 1]
    log_weight += np.log(outer[1] - outer[0]) - 0.5 * np.log(2 * np.pi * covariance[1, 1])
    weight = np.exp(log_weight - logsumexp(log_weight))
    location = center + rest / (rest + noise) * (y - center)
    tolerance = 1e-6 if IS_DOUBLE else 1e-3
    np.testing.assert_allclose(found.log_z[0], logsumexp(log_weight), rtol=tolerance)
    np.testing.assert_allclose(found.mean[0], [weight @ location, weight @ outer], rtol=tolerance)


@pytest.mark.thorough
def test_derivatives_and_powers():
    function, values, kind = FAMILIES["zero-inflated Poisson"]
    y, mean, covariance = _cases(values)
    factors = PairPotential(function, (y,), *kind)
    value, slope, hessian = factors.derivatives(mean)
    np.testing.assert_allclose(value, function(mean, y))
    np.testing.assert_allclose(slope, jax.jacrev(lambda e: factors.log_density(e).sum())(mean), rtol=1e-5)
    whole = jax.hessian(lambda e: factors.log_density(e).sum())(mean)
    np.testing.assert_allclose(hessian, jnp.einsum("njnk->njk", whole), rtol=1e-5, atol=1e-6)
    tempered = PairPotential(lambda e, y: 0.5 * function(e, y), (y,), *kind)
    half, same = factors.tilted_moments(mean, covariance, 0.5), tempered.tilted_moments(mean, covariance)
    np.testing.assert_allclose(half.mean, same.mean, rtol=1e-5)

    # the nodes are held: derivatives in parameters are those of the integral
    @jax.jit
    def log_z(scale):
        made = PairPotential(lambda e, y, s: function(e * s, y), (y, scale), *kind)
        return made.tilted_moments(mean, covariance).log_z.sum()

    step = 1e-4 if IS_DOUBLE else 1e-2
    difference = (log_z(1.0 + step) - log_z(1.0 - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(log_z)(1.0), difference, rtol=1e-4 if IS_DOUBLE else 1e-2)


def test_sites_on_rows_are_sites_on_pairs():
    rows = VectorRows(PairPotential(FAMILIES["normal"][0], (jnp.zeros(3),)))
    draw = np.random.default_rng(0).normal
    precision, shift = draw(size=(3, 2, 2)), jnp.asarray(draw(size=(3, 2)))
    precision = jnp.asarray(precision + precision.swapaxes(-1, -2))
    found = rows.joint_site(*rows.row_sites(precision, shift))
    np.testing.assert_allclose(found[0], precision, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], shift, rtol=1e-5)
