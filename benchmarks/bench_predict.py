"""Predictions of two new rows of random intercepts, beside a fit of the same process, over hyperparameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import EP, LaplaceApproximation

from .harness import at_most

NUM_GROUPS = 300


def random_intercepts(group: Any, x: Any, num_groups: int, y: Any = None) -> None:
    mean, slope = (numpyro.sample(name, dist.Normal(0, 1)) for name in ("mean", "slope"))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("groups", num_groups):
        shift = numpyro.sample("shift", dist.Normal(0, scale))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Poisson(jnp.exp(mean + slope * x + shift[group])), obs=y)


@pytest.mark.parametrize("num_rows", [10_000, 100_000])
@pytest.mark.parametrize("engine", [EP, LaplaceApproximation])
def test_two_new_rows(race, results, engine, num_rows):
    rng = np.random.default_rng(0)
    group, x = rng.integers(0, NUM_GROUPS, num_rows), rng.standard_normal(num_rows)
    y = rng.poisson(np.exp(0.3 + 0.5 * x + 0.4 * rng.standard_normal(NUM_GROUPS)[group]))
    fitted = engine(random_intercepts, progress_bar=False)
    run = partial(fitted.run, jax.random.key(0), group, x, NUM_GROUPS, y)
    run()
    fitted.get_samples()

    def predict() -> Any:
        rows = rng.integers(0, NUM_GROUPS, 2), rng.standard_normal(2)
        found = fitted.predict(jax.random.key(0), *rows, NUM_GROUPS)
        return jax.block_until_ready((found.get_samples()["y"], found.posterior["shift"].mean))

    predict()
    found = fitted._finished()

    def fit_again() -> None:
        run()
        fitted._run = found  # whose draws are at hand

    seconds, peer_seconds = race(predict, fit_again, rounds=5)
    results.record(
        f"draws and marginals at two new rows, {engine.__name__}, {num_rows} rows, {NUM_GROUPS} groups",
        peer="a fit to the same shapes",
        times=(seconds, peer_seconds),
        target=at_most(1.0),
    )
