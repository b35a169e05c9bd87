"""Fields in space and time and receptive fields: what the engine finds again, beside NUTS at small size."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import MCMC, NUTS

from numpyro_ext.infer import BilinearVG
from numpyro_ext.models import low_rank_count_field, receptive_field_counts


def field_counts():
    rng = np.random.default_rng(0)
    place, time = np.divmod(np.arange(6 * 12), 12)
    pattern = np.stack([np.sin(np.arange(12) / 2.0), np.cos(np.arange(12) / 3.0)])
    eta = 1.0 + (rng.normal(size=(6, 2))[place] * pattern.T[time]).sum(-1)
    return place, time, rng.poisson(np.exp(eta)), eta


def stimuli():
    rng = np.random.default_rng(1)
    stimulus = rng.normal(size=(150, 5, 4))
    filters = np.array([0.0, 1.0, 2.0, 1.0, 0.0]) / 4.0, np.array([1.0, 0.5, 0.0, -0.5])
    return stimulus, rng.poisson(np.exp(0.5 + np.einsum("p,npl,l->n", filters[0], stimulus, filters[1]))), filters


@pytest.mark.slow
def test_temporal_patterns_are_one_smooth_vector():
    """The patterns are correlated in time, so that they are a single vector; predictors are found again."""
    place, time, counts, eta = field_counts()
    engine = BilinearVG(low_rank_count_field, covariance="full", progress_bar=False)
    engine.run(random.key(0), place, time, counts, num_places=6, num_times=12, rank=2, log_rate=1.0)
    assert "columns: 1 vectors of 24 components (pattern)" in engine.describe()
    pattern, w = engine.posterior["pattern"], engine.posterior["w"]
    found = 1.0 + (np.asarray(w.mean)[place] * np.asarray(pattern.mean).T[time]).sum(-1)
    assert np.corrcoef(found, eta)[0, 1] > 0.95
    neighbours = np.asarray(pattern.covariance())[0, 5, 0, 6] / float(pattern.sd[0, 5] * pattern.sd[0, 6])
    assert neighbours > 0.3


@pytest.mark.thorough
def test_filters_of_a_receptive_field():
    stimulus, counts, filters = stimuli()
    engine = BilinearVG(receptive_field_counts, covariance="full", progress_bar=False)
    engine.run(random.key(0), stimulus, counts, log_rate=0.5)
    found = np.outer(engine.posterior["w"].mean[0], engine.posterior["z"].mean[0])
    assert np.corrcoef(found.ravel(), np.outer(*filters).ravel())[0, 1] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", ["field", "neuron"])
def test_against_nuts(name):
    """Posterior means of the predictors, scales being given."""
    if name == "field":
        place, time, counts, _ = field_counts()
        model, args, given = low_rank_count_field, (place, time, counts), {"place_scale": 1.0}
        kwargs = {"num_places": 6, "num_times": 12, "rank": 2, "log_rate": 1.0}

        def predictor(draws):
            return (np.asarray(draws["w"])[:, place] * np.asarray(draws["pattern"]).swapaxes(1, 2)[:, time]).sum(-1)
    else:
        stimulus, counts, _ = stimuli()
        model, args, given = receptive_field_counts, (stimulus, counts), {"space_scale": 1.0}
        kwargs = {"rank": 1, "log_rate": 0.5}

        def predictor(draws):
            return np.einsum("skp,npl,skl->sn", draws["w"], stimulus, draws["z"])

    engine = BilinearVG(model, covariance="full", hyper_values=given, num_restarts=2, progress_bar=False, tol=1e-9)
    engine.run(random.key(0), *args, **kwargs)
    conditioned = handlers.condition(model, data={k: jnp.asarray(v) for k, v in given.items()})
    mcmc = MCMC(NUTS(conditioned), num_warmup=500, num_samples=1500, progress_bar=False)
    mcmc.run(random.key(1), *args, **kwargs)
    exact, ours = predictor(mcmc.get_samples()), predictor(engine.get_samples())
    gap = np.abs(ours.mean(0) - exact.mean(0)) / exact.std(0)
    assert gap.mean() < 0.15
