"""Regression of three categories, the first pinned at zero (Khan 2012, chapter 5): every bound at its optimum."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.distributions import StickBreakingCategorical
from numpyro_ext.infer import VariationalGaussian

CASE = json.loads((Path(__file__).parents[1] / "reference" / "khan_lgm_small.json").read_text())["mlr"]
INPUTS, LABELS = jnp.asarray(CASE["x"]), jnp.asarray(CASE["y"])


def predictors(x):
    weights = numpyro.sample("weights", dist.Normal(0.0, jnp.sqrt(2.0)).expand([2, 2]).to_event(2))
    return x @ weights.T


def softmax(x, label):
    numpyro.sample("y", dist.Categorical(logits=jnp.pad(predictors(x), ((0, 0), (1, 0)))), obs=label)


def sticks(x, label):
    numpyro.sample("y", StickBreakingCategorical(predictors(x)), obs=label)


def fit(name):
    bound = {"tilt": "tilted", "B": "bohning", "stick": "exact"}.get(name, name)
    engine = VariationalGaussian(sticks if name == "stick" else softmax, bound=bound, progress_bar=False)
    engine.run(jax.random.key(0), INPUTS, LABELS)
    return engine


@pytest.mark.parametrize(
    "name", ["log", "stick", *[pytest.param(n, marks=pytest.mark.slow) for n in ("exact", "tilt", "B", "delta")]]
)
def test_reference_optimum(name):
    engine = fit(name)
    value = float(engine.log_evidence)
    np.testing.assert_allclose(value, CASE["elbo"][name], atol=1e-6)
    np.testing.assert_allclose(np.ravel(engine.posterior["weights"].mean), CASE["m"][name], atol=1e-4)
    assert engine.diagnostics.converged
    assert engine.log_evidence.is_lower_bound == (name != "delta")
    if name != "delta":
        assert np.all(np.diff(engine.diagnostics.objective_trace) > -1e-11)
        assert value < CASE["true_logZ_stick" if name == "stick" else "true_logZ_logit"]
