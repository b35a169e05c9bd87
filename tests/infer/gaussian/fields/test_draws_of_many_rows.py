"""Log densities of draws, which are left to who asks for them where there are many rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import log_density

from numpyro_ext.infer import EP, LaplaceApproximation
from numpyro_ext.infer.gaussian.fitting.costs import FIT_COSTS

GROUP = np.arange(60) % 6
SIGNS = (np.random.default_rng(0).random(60) < np.array([0.1, 0.3, 0.9, 0.5, 0.95, 0.2])[GROUP]).astype(int)


def logistic(group, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("groups", 6):
        effect = numpyro.sample("effect", dist.Normal(0.0, scale))
    numpyro.sample("y", dist.Bernoulli(logits=effect[group]), obs=y)


def rates(group, y=None):
    with numpyro.plate("groups", 6):
        effect = numpyro.sample("effect", dist.Normal(2.0, 2.0))
    numpyro.sample("y", dist.Poisson(jnp.maximum(effect[group], 0.0)), obs=y)


class LaplaceOfManyRows(LaplaceApproximation):
    _costs = FIT_COSTS._replace(most_densities=0)


class ExpectationPropagationOfManyRows(EP):
    _costs = FIT_COSTS._replace(most_densities=0)


def fitted(engine, model, **options):
    engine = engine(model, num_samples=200, progress_bar=False, **options)
    engine.run(jax.random.key(0), GROUP, SIGNS)
    return engine


@pytest.mark.thorough
@pytest.mark.parametrize("integrate", ["auto", "none"])
def test_densities_of_draws_are_those_of_the_model_when_asked_for(integrate):
    engine = fitted(LaplaceOfManyRows, logistic, integrate=integrate)
    draws = engine.get_samples()
    assert engine._run.draws[1] is None
    energy = engine.get_extra_fields()["potential_energy"]
    for number in (0, 57, 199):
        at = {name: value[number] for name, value in draws.items()}
        wanted, _ = log_density(logistic, (GROUP, SIGNS), {}, at)
        np.testing.assert_allclose(-energy[number], wanted, rtol=1e-10)
    usual = fitted(LaplaceApproximation, logistic, integrate=integrate)
    for name, value in usual.get_samples().items():
        np.testing.assert_array_equal(draws[name], value)
    np.testing.assert_allclose(energy, usual.get_extra_fields()["potential_energy"], rtol=1e-12)


@pytest.mark.thorough
def test_factors_that_may_be_zero_are_looked_at_in_any_case():
    engine = fitted(ExpectationPropagationOfManyRows, rates)
    draws, seen = np.asarray(engine.get_samples()["effect"]), np.bincount(GROUP, SIGNS) > 0
    moments = engine.posterior["effect"]
    assert (moments.mean[seen] < 3.0 * np.sqrt(moments.variance[seen])).any()  # the Gaussian reaches below zero
    assert (draws[:, seen] > 0.0).all() and engine._run.draws[1] is not None
