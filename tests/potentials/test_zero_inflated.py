"""Counts with more zeros than they would have, against quadrature, differentiation and NumPyro's densities."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_ext.infer import EP
from numpyro_ext.potentials import (
    BinomialLogitPotential,
    NegativeBinomialExpPotential,
    PoissonExpPotential,
    Potential,
    tilted_moments,
)
from numpyro_ext.potentials.families.zero_inflated import ZeroInflatedPotential
from numpyro_ext.structure.latent_gaussian.read import read_latent_gaussian

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="compares in double precision")

COUNTS = jnp.array([0.0, 0.0, 3.0, 0.0, 12.0, 1.0])
BASES = {
    "poisson": PoissonExpPotential(COUNTS, jnp.array(1.3)),
    "negative binomial": NegativeBinomialExpPotential(COUNTS, jnp.array(2.0)),
    "binomial": BinomialLogitPotential(COUNTS, jnp.full(6, 14.0)),
}
MEAN = jnp.array([0.3, -2.0, 1.0, 4.0, 2.0, -0.5])


def inflated(base, gate):
    return ZeroInflatedPotential(base, COUNTS == 0.0, jnp.log(gate), jnp.log1p(-gate))


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("gate", [1e-6, 0.3, 0.97])
def test_moments_and_derivatives(name, gate):
    factors = inflated(BASES[name], gate)
    for variance in (1e-4, 0.05, 1.0, 3.0):
        variances = jnp.full(6, variance)
        found = factors.tilted_moments(MEAN, variances)
        exact = tilted_moments(factors, MEAN, variances, num_nodes=160)
        scale = {
            "mean": np.sqrt(variance),
            "variance": variance,
            "site_precision": 1.0,
            "site_shift": 1.0,
            "log_z": 1.0,
        }
        for part, unit in scale.items():
            np.testing.assert_allclose(getattr(found, part), getattr(exact, part), rtol=1e-7, atol=1e-8 * unit)
        np.testing.assert_allclose(factors.log_normaliser(MEAN, variances), exact.log_z, rtol=1e-10)
        powered = factors.tilted_moments(MEAN, variances, 0.5)
        np.testing.assert_allclose(powered.mean, tilted_moments(factors, MEAN, variances, 0.5).mean, rtol=1e-7)
    for one, other in zip(factors.derivatives(MEAN), Potential.derivatives(factors, MEAN), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.thorough
def test_derivatives_in_the_gate():
    def total(gate):
        return inflated(BASES["poisson"], gate).log_normaliser(MEAN, jnp.full(6, 0.4)).sum()

    step = 1e-5 if jnp.zeros(()).dtype == jnp.float64 else 1e-2
    by_differences = (total(0.3 + step) - total(0.3 - step)) / (2.0 * step)
    np.testing.assert_allclose(jax.grad(total)(0.3), by_differences, rtol=1e-3)


X, Y = np.linspace(-1.0, 1.0, 40), np.random.default_rng(0).poisson(2.0, 40) * (np.arange(40) % 3 > 0)


def coefficients(x):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    return b[0] + b[1] * x


def known_gate(x):
    return dist.ZeroInflatedPoisson(np.where(x > 0, 0.2, 0.4), jnp.exp(coefficients(x)))


def learned_gate(x):
    gate = numpyro.sample("gate", dist.Beta(1, 1))
    return dist.ZeroInflatedDistribution(dist.Poisson(2 * jnp.exp(coefficients(x))), gate=gate)


def gate_by_odds(x):
    odds = numpyro.sample("odds", dist.Normal(0, 1.5))
    counts = dist.NegativeBinomial2(jnp.exp(coefficients(x)), 3.0)
    return dist.ZeroInflatedDistribution(counts, gate_logits=odds)


def successes(x):
    gate = numpyro.sample("gate", dist.Uniform(0.0, 1.0))
    return dist.ZeroInflatedDistribution(dist.Binomial(9, logits=coefficients(x)), gate=gate)


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize("counts", [known_gate, learned_gate, gate_by_odds, successes])
def test_models_are_read_by_name_and_mean_what_they_say(counts):
    """The same model with its density as a factor of the user's is integrated by quadrature of that function."""

    def by_name(x, y):
        numpyro.sample("y", counts(x), obs=y)

    def by_hand(x, y):
        numpyro.factor("y", counts(x).log_prob(y))

    assert "zero-inflated" in read_latent_gaussian(by_name, (X, Y)).describe()
    engines = [EP(model, progress_bar=False, integrate="none") for model in (by_name, by_hand)]
    for engine in engines:
        engine.run(random.key(0), X, Y)
    named, other = engines
    # NumPyro's gamma-Poisson density is off by a millionth where an argument of a logarithm of factorials is eight
    np.testing.assert_allclose(named.log_evidence, other.log_evidence, rtol=1e-7)
    np.testing.assert_allclose(named.posterior["b"].mean, other.posterior["b"].mean, atol=1e-5)
