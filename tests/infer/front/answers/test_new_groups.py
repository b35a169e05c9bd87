"""New groups are folded in at the hyperparameters of a fit."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_ext.infer import EP, INLA, LaplaceApproximation
from tests.tiers import thorough

SHOP, SOLD = np.repeat(np.arange(3), 2), np.array([8, 9, 3, 2, 6, 5])


def shops(shop, sold, num_shops, noise_of_shops=False):
    level, scale = numpyro.sample("level", dist.Normal(0, 2)), numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("shops", num_shops):
        spread = numpyro.sample("spread", dist.HalfNormal(1)) if noise_of_shops else scale
        rate = numpyro.sample("rate", dist.Normal(level, spread))
    numpyro.sample("sold", dist.Poisson(jnp.exp(rate[jnp.asarray(shop)])), obs=sold)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [EP, *thorough(INLA)])
def test_a_new_group_is_what_it_is_in_a_fit_of_all_at_these_hyperparameters(kind):
    engine = kind(shops, field=["rate"], progress_bar=False)
    engine.run(random.key(0), SHOP, SOLD, 3)
    new = engine.fold_in(random.key(1), [0, 0, 1], np.array([4, 6, 1]), num_shops=2)
    hyper = {name: found.value for name, found in engine.hyper.items()}
    whole = kind(shops, field=["rate"], hyper_values=hyper, progress_bar=False)
    whole.run(random.key(0), [*SHOP, 3, 3, 4], np.array([*SOLD, 4, 6, 1]), 5)
    np.testing.assert_allclose(new.posterior["rate"].mean, whole.posterior["rate"].mean[3:], rtol=1e-7)
    np.testing.assert_allclose(new.posterior["rate"].sd, whole.posterior["rate"].sd[3:], rtol=1e-7)
    assert engine.posterior["rate"].shape == (3,) and new.get_samples()["rate"].shape == (1000, 2)


@pytest.mark.thorough
def test_hyperparameters_of_the_groups_are_learned_anew():
    engine = EP(shops, field=["rate"], progress_bar=False)
    engine.run(random.key(0), SHOP, SOLD, 3, noise_of_shops=True)
    new = engine.fold_in(random.key(0), SHOP, 10 * SOLD, 3, noise_of_shops=True)
    assert new.hyper["level"].value == engine.hyper["level"].value
    assert np.all(new.hyper["spread"].value > 1.5 * engine.hyper["spread"].value)


def test_what_all_groups_share_is_named():
    def with_slope(x, shop, sold, num_shops):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("shops", num_shops):
            rate = numpyro.sample("rate", dist.Normal(0, 1))
        numpyro.sample("sold", dist.Poisson(jnp.exp(rate[shop] + slope * x)), obs=sold)

    def without_plate(shop, sold, num_shops):
        rate = numpyro.sample("rate", dist.Normal(0, 1).expand([num_shops]).to_event(1))
        numpyro.sample("sold", dist.Poisson(jnp.exp(rate[shop])), obs=sold)

    for model, before, message in [
        (with_slope, (SOLD / 10,), "'slope' is not in plate 'shops'"),
        (without_plate, (), r"'rate' is not in a plate \(numpyro.plate\)"),
    ]:
        engine = LaplaceApproximation(model, progress_bar=False)
        with pytest.raises(RuntimeError, match="run"):
            engine.fold_in(random.key(0), *before, SHOP, SOLD, 3)
        engine.run(random.key(0), *before, SHOP, SOLD, 3)
        with pytest.raises(ValueError, match=message):
            engine.fold_in(random.key(0), *before, SHOP, SOLD, 3)
