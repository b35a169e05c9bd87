"""Time of a next run on equal shapes besides its fit, where the model is called once and where it is called anew."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_ext.infer import EP, LaplaceApproximation, cross_validate
from numpyro_ext.infer.gaussian import engine as gaussian_engine
from numpyro_ext.structure.model import search

from .harness import at_most

KEY, RUNS, ROUNDS, FOLDS = random.key(0), 10, 5, 20


def intercepts(group, y, mask=True):
    level = numpyro.sample("level", dist.Normal(0, 2))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("groups", 20):
        effect = numpyro.sample("effect", dist.Normal(level, spread))
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Bernoulli(logits=effect[group]), obs=y)


def process(x, y, mask=True):
    kernel = jnp.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-4 * jnp.eye(len(x))
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(x)), kernel))
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(f)), obs=y)


def regression(x, y, mask=True):
    slope = numpyro.sample("slope", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Bernoulli(logits=x @ slope + intercept), obs=y)


def around_the_mean(x, y, mask=True):
    level = numpyro.sample("level", dist.Normal(x.mean(), 1))
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Bernoulli(logits=level + x), obs=y)


def data(model: Callable[..., Any], number: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    if model is intercepts:
        group = np.repeat(np.arange(20), 5)
        return group, rng.binomial(1, norm.cdf(rng.standard_normal(20))[group])
    x = rng.standard_normal((200, 4)) if model is regression else np.linspace(-3, 3, 40) + 0.01 * number
    return x, rng.integers(0, 2, len(x))


PROBLEMS = {
    "random intercepts, EP": (EP, intercepts),
    "probit process with masks, EP": (EP, process),
    "logistic regression, Laplace": (LaplaceApproximation, regression),
    "prior around the mean of the data, EP": (EP, around_the_mean),
}


class FitWatch:
    """Seconds of the processor in runs, and in their fits alone."""

    def __init__(self) -> None:
        self.fits, self._numbers = 0.0, itertools.count()

    @contextmanager
    def on_fits(self) -> Iterator[None]:
        fit = gaussian_engine.fit

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return fit(*args, **kwargs)
            finally:
                self.fits += time.process_time() - start

        with mock.patch.object(gaussian_engine, "fit", timed):
            yield

    def besides_fits(self, engine: Any, model: Any) -> float:
        runs = [(number, *data(model, number)) for number in itertools.islice(self._numbers, RUNS)]
        self.fits, start = 0.0, time.process_time()
        for number, x, y in runs:
            engine.run(KEY, x, y, mask=np.arange(len(y)) % 7 != number % 7)
        return (time.process_time() - start - self.fits) / RUNS


@pytest.mark.parametrize("problem", PROBLEMS)
def test_besides_the_fit(benchmark, results, problem):
    make, model = PROBLEMS[problem]
    engine, watch = make(model, integrate="none", progress_bar=False), FitWatch()
    once, before = [], []

    def turn() -> None:
        once.append(watch.besides_fits(engine, model))
        with mock.patch.object(search, "record", lambda call: None):
            before.append(watch.besides_fits(engine, model))

    with watch.on_fits():
        benchmark.pedantic(turn, rounds=ROUNDS, warmup_rounds=1)
    peer = "the model called for its sites, its program and the check"
    times = min(once), min(before)
    item, target = f"Next run besides its fit, {problem}", at_most(0.5)
    results.record(item, times, peer=peer, figure="ratio of CPU-seconds", target=target)


@pytest.mark.parametrize("problem", ["random intercepts, EP", "probit process with masks, EP"])
def test_cross_validation(benchmark, results, problem):
    make, model = PROBLEMS[problem]

    def looks_at_its_mask(x, y, mask=True):
        model(x, y, np.asarray(mask))

    def seconds(function: Callable[..., Any]) -> float:
        x, y = data(model, 0)
        start = time.process_time()
        cross_validate(make(function, progress_bar=False), KEY, x, y, num_folds=FOLDS)
        return time.process_time() - start

    once, each = [], []

    def turn() -> None:
        once.append(seconds(model))
        each.append(seconds(looks_at_its_mask))

    benchmark.pedantic(turn, rounds=ROUNDS, warmup_rounds=1)
    item, peer = f"{FOLDS} folds of cross_validate, {problem}", "the same, read once for each fold"
    results.record(item, (min(once), min(each)), peer=peer, figure="ratio of CPU-seconds")
