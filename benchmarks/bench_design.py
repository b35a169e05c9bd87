"""Choosing what to measure: what one acquisition costs beside the algebra that it cannot do without."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_ext.design import SequentialDesign, expected_information_gain, expected_risk, predictive_entropy
from numpyro_ext.infer import EP
from numpyro_ext.potentials import ProbitPotential
from numpyro_ext.potentials.information import expected_information

from .harness import at_most

_FIRST, _LAST, _SLOTS = 21, 100, 128


def classifier(x: Any, y: Any = None, labelled: Any = True) -> None:
    squares = jnp.sum(jnp.square(x[:, None] - x), -1)
    covariance = 9.0 * jnp.exp(-0.5 * squares) + 1e-6 * jnp.eye(len(x))
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(x)), covariance))
    with handlers.mask(mask=labelled):
        numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(f)), obs=y)


def _fitted(size: int, first: int) -> tuple[EP, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.uniform(-3.0, 3.0, (size, 2))
    y = (x[:, 0] > 0.0).astype(int)
    engine = EP(classifier, progress_bar=False)
    engine.run(random.key(0), x, y, np.arange(size) < first)
    return engine, x, y


def _design(size: int, score: Any, first: int) -> tuple[SequentialDesign, np.ndarray, np.ndarray]:
    engine, x, y = _fitted(size, first)
    return SequentialDesign(engine, score), x, y


def _acquire(design: SequentialDesign, labels: np.ndarray, number: int) -> float:
    """Seconds of the fastest acquisition among some."""
    best = np.inf
    for _ in range(number):
        start = time.perf_counter()
        place = design.propose()
        design.observe(place, labels[place])
        best = min(best, time.perf_counter() - start)
    return best


@pytest.mark.parametrize(("size", "seconds"), [(200, 0.005), (1000, 0.030)])
def test_one_acquisition(benchmark, results, size, seconds):
    design, x, labels = _design(size, expected_information_gain, _FIRST)
    for _ in range(2):  # compiles for the slots of 32, and others below
        _acquire(design, labels, 1)
    few = _acquire(design, labels, 8)
    while design.num_observed < _LAST - 20:
        _acquire(design, labels, 1)
    many = benchmark.pedantic(_acquire, args=(design, labels, 12), rounds=1)
    kernel = jnp.exp(-0.5 * jnp.sum(jnp.square(x[:_SLOTS, None] - x), -1))
    own = kernel[:, :_SLOTS] + jnp.eye(_SLOTS)
    floor = jax.jit(lambda own, cross: jnp.sum(jnp.square(jnp.linalg.cholesky(own) @ cross), 0))
    floor(own, kernel).block_until_ready()
    floors = []
    for _ in range(20):
        start = time.perf_counter()
        floor(own, kernel).block_until_ready()
        floors.append(time.perf_counter() - start)
    for labelled, found in ((_FIRST, few), (_LAST, many)):
        results.record(
            f"One acquisition (score, fit with a new label) of a probit pool of {size}, {labelled} labels",
            peer=f"a Cholesky of {_SLOTS} labels and one product with the pool",
            times=(found, min(floors)),
            figure="seconds",
            target=at_most(seconds),
            remark=f"{found / min(floors):.0f} times the floor, which holds no steps of EP and no dispatch.",
        )


def test_a_hundred_acquisitions(results):
    seconds = dict.fromkeys(("information", "entropy"), float("inf"))
    for _ in range(4):  # in turns, of which the first compiles
        for name, score in (("information", expected_information_gain), ("entropy", predictive_entropy)):
            design, _, labels = _design(400, score, 5)
            start = time.perf_counter()
            for _ in range(100):
                place = design.propose()
                design.observe(place, labels[place])
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    results.record(
        "100 acquisitions from a probit pool of 400, information",
        peer="the same by predictive entropy",
        times=(seconds["information"], seconds["entropy"]),
        figure="seconds",
        target=at_most(1.0),
        remark=f"{seconds['information'] / seconds['entropy']:.2f} times those by entropy (1.5 is meant).",
    )


def test_risks(results):
    """Acquisitions from a pool of 400 with 50 labels, beside those by information."""
    scores = {
        "information": expected_information_gain,
        "one-step risk": expected_risk,
        "risk by refits": functools.partial(expected_risk, refit="full"),
    }
    seconds = {}
    for name, score in scores.items():
        design, _, labels = _design(400, score, 50)
        _acquire(design, labels, 1)  # compiles
        seconds[name] = _acquire(design, labels, 2 if name == "risk by refits" else 20)
    for name, target in (("one-step risk", at_most(20.0)), ("risk by refits", None)):
        results.record(
            f"One acquisition from a probit pool of 400, 50 labels: {name}",
            peer="the same by information",
            times=(seconds[name], seconds["information"]),
            target=target,
        )


def test_scores_of_many_candidates(race, results):
    rng = np.random.default_rng(0)
    mean, variance = jnp.asarray(rng.normal(size=100_000)), jnp.asarray(rng.uniform(0.1, 5.0, 100_000))
    numbers = jnp.asarray(rng.normal(size=800_000))
    factors, exponential = ProbitPotential(jnp.zeros(100_000)), jax.jit(jnp.exp)
    ours, peer = race(
        lambda: jax.block_until_ready(expected_information(factors, mean, variance)),
        lambda: jax.block_until_ready(exponential(numbers)),
        rounds=30,
    )
    results.record(
        "Information of 100,000 probit candidates, twelve nodes",
        peer="exp of 800,000 numbers",
        times=(ours, peer),
        target=at_most(5.0),
    )
