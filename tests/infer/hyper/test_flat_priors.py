"""Flat priors of what observations do not determine are refused, whatever rounding makes of them; others are not."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from tests.tiers import thorough

pytestmark = pytest.mark.float32
RNG = np.random.default_rng(0)
FIRST = RNG.integers(6, size=60)
WON = RNG.integers(2, size=60)


def flat(name, size):
    return numpyro.sample(name, dist.ImproperUniform(dist.constraints.real, (), (size,)))


@pytest.mark.parametrize("engine", [EP, *thorough(LaplaceApproximation, VariationalGaussian)])
def test_items_of_which_some_are_never_compared_with_the_others(engine):
    # Three items with each other, of which one is the reference, and three with each other.
    second = np.where(FIRST < 3, (FIRST + 1) % 3, 3 + (FIRST + 1) % 3)

    def model():
        f = jnp.concatenate([jnp.zeros(1), flat("strength", 5)])
        numpyro.sample("won", dist.Bernoulli(logits=f[FIRST] - f[second]), obs=WON)

    message = (
        "site 'strength' is flat, .* if the same is added to its elements 2, 3, 4, as where they are only compared"
    )
    with pytest.raises(ValueError, match=message):
        engine(model, progress_bar=False).run(random.key(0))


def test_an_intercept_and_effects_of_all_groups():
    def model():
        numpyro.sample("y", dist.Normal(flat("intercept", 1)[0] + flat("effect", 6)[FIRST], 1.0), obs=WON / 2)

    with pytest.raises(
        ValueError, match=r"sites \['intercept', 'effect'\] are flat, .* along a direction of them togeth"
    ):
        LaplaceApproximation(model, progress_bar=False).run(random.key(0))


def test_coefficients_of_covariates_in_other_units_are_determined():
    x = np.linspace(1.0, 2.0, 60)
    X = np.stack([np.ones(60), 1e5 * x, 1e-5 * x**2], axis=1)

    def model():
        numpyro.sample("y", dist.Normal(X @ flat("slopes", 3), 1.0), obs=np.sin(5.0 * x))

    engine = LaplaceApproximation(model, progress_bar=False)
    engine.run(random.key(0))
    assert "up to a constant (flat prior of 'slopes')" in repr(engine.log_evidence)
    expected = np.linalg.lstsq(X, np.sin(5.0 * x))[0]
    tol = 1e-6 if jax.config.jax_enable_x64 else 2e-2
    np.testing.assert_allclose(engine.posterior["slopes"].mean, expected, rtol=tol)
