"""Variational Gaussian fits: Gaussian-process classification against EP, SVI and NUTS; factor analysis per EM step."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from sklearn.decomposition import FactorAnalysis

from numpyro_ext.infer import EP, LatentGaussianRows, VariationalGaussian, variational_em
from numpyro_ext.models import gp_classification
from numpyro_ext.models.gaussian_process import squared_exponential
from numpyro_ext.potentials import GaussianPotential

from .results_table import Row, at_least

SIZES = (500, 1000, 2000)
HYPER = {"scale": 3.0, "length": 1.0}
# The guide of SVI has n (n + 3) / 2 parameters: it is stopped after some seconds (longer than the target asks for), and
# where it is then is reported.
SVI_CHUNK, SVI_SECONDS = 50, 40.0
NUTS_WARMUP, NUTS_SAMPLES = 300, 300
COLUMNS, FACTORS = 50, 5


def data(size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(size)
    X = rng.standard_normal((size, 2)) * np.sqrt(size / 100.0)
    score = 2.0 * np.sin(X[:, 0]) + np.cos(2.0 * X[:, 1])
    return X, (rng.random(size) < 1.0 / (1.0 + np.exp(-2.0 * score))).astype(int)


def run(engine: Any, X: np.ndarray, y: np.ndarray) -> float:
    start = time.perf_counter()
    engine.run(jax.random.key(0), X, y)
    jax.block_until_ready(engine.posterior["f"].mean)
    return time.perf_counter() - start


def test_whole_fit(benchmark, results):
    warm = {}
    for size in SIZES:
        X, y = data(size)
        engines = {
            "exact": VariationalGaussian(gp_classification, hyper_values=HYPER, progress_bar=False),
            "piecewise-quadratic": VariationalGaussian(
                gp_classification, bound="piecewise-quadratic", hyper_values=HYPER, progress_bar=False
            ),
            "jaakkola": VariationalGaussian(
                gp_classification, bound="jaakkola", hyper_values=HYPER, progress_bar=False
            ),
            "EP": EP(gp_classification, hyper_values=HYPER, progress_bar=False),
        }
        cold = {name: run(engine, X, y) for name, engine in engines.items()}
        warm[size] = {name: min(run(engine, X, y) for _ in range(2)) for name, engine in engines.items()}
        for name, engine in engines.items():
            if name == "EP":
                continue
            results.add(
                Row(
                    item=f"variational Gaussian, {name}, whole fit, n = {size}",
                    dtype="float64",
                    seconds=warm[size][name],
                    peer="EP, whole fit",
                    peer_seconds=warm[size]["EP"],
                    figure="time ratio",
                    value=warm[size][name] / warm[size]["EP"],
                    compile_seconds=cold[name] - warm[size][name],
                    remark=f"Bound {float(engine.log_evidence):.3f} after {engine.diagnostics.num_steps} steps;"
                    f" EP's evidence {float(engines['EP'].log_evidence):.3f}.",
                )
            )
    for name in warm[SIZES[0]]:
        slope = np.polyfit(np.log(SIZES), np.log([warm[size][name] for size in SIZES]), 1)[0]
        results.add(
            Row(
                item=f"whole fit, {name}, n = {SIZES[0]} to {SIZES[-1]}",
                dtype="float64",
                seconds=None,
                peer="none",
                peer_seconds=None,
                figure="exponent of growth",
                value=float(slope),
            )
        )
    X, y = data(SIZES[0])
    engine = VariationalGaussian(gp_classification, hyper_values=HYPER, progress_bar=False)
    benchmark.pedantic(run, args=(engine, X, y), rounds=2)


@pytest.mark.parametrize("size", SIZES)
def test_against_svi(benchmark, results, size):
    """Time of stochastic variational inference on the same Gaussian family, to within one nat of the bound."""
    X, y = data(size)
    engine = VariationalGaussian(gp_classification, hyper_values=HYPER, progress_bar=False)
    run(engine, X, y)
    ours = benchmark.pedantic(run, args=(engine, X, y), rounds=2)
    bound = float(engine.log_evidence)

    model = handlers.substitute(gp_classification, {name: jnp.asarray(value) for name, value in HYPER.items()})
    blocked = handlers.block(model, hide=list(HYPER))
    guide = AutoMultivariateNormal(blocked, init_scale=0.1)
    svi = SVI(blocked, guide, numpyro.optim.Adam(0.01), Trace_ELBO(num_particles=8))
    state = svi.init(jax.random.key(0), X, y)
    advance = (
        jax.jit(lambda state: jax.lax.fori_loop(0, SVI_CHUNK, lambda _, s: svi.update(s, X, y)[0], state))
        .lower(state)
        .compile()
    )
    judge = jax.jit(lambda params: -Trace_ELBO(num_particles=64).loss(jax.random.key(1), params, blocked, guide, X, y))
    seconds, reached, steps = 0.0, -np.inf, 0
    while seconds < max(SVI_SECONDS, 12.0 * ours) and reached < bound - 1.0:
        start = time.perf_counter()
        state = jax.block_until_ready(advance(state))
        seconds += time.perf_counter() - start
        steps += SVI_CHUNK
        reached = float(judge(svi.get_params(state)))
    results.add(
        Row(
            item=f"variational Gaussian against SVI, n = {size}",
            dtype="float64",
            seconds=ours,
            peer="SVI, AutoMultivariateNormal, Adam",
            peer_seconds=seconds,
            figure="speed-up",
            value=seconds / ours,
            target=at_least(10),
            remark=f"Bound {bound:.3f}; SVI reached {reached:.3f} in {steps} steps"
            + ("." if reached >= bound - 1.0 else ", short of it: the speed-up is a lower bound."),
        )
    )


def test_against_nuts(benchmark, results):
    """Time of NUTS on the whitened process, for as many effective draws as it makes."""
    size = SIZES[0]
    X, y = data(size)
    engine = VariationalGaussian(gp_classification, hyper_values=HYPER, progress_bar=False)
    run(engine, X, y)
    ours = benchmark.pedantic(run, args=(engine, X, y), rounds=2)

    factor = jnp.linalg.cholesky(squared_exponential(jnp.asarray(X), HYPER["scale"], HYPER["length"], 1e-6))

    def whitened() -> None:
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([size]).to_event(1))
        f = numpyro.deterministic("f", factor @ z)
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    mcmc = MCMC(NUTS(whitened), num_warmup=NUTS_WARMUP, num_samples=NUTS_SAMPLES, progress_bar=False)
    mcmc.warmup(jax.random.key(0))  # compiles, and adapts
    start = time.perf_counter()
    mcmc.run(jax.random.key(1))
    draws = np.asarray(mcmc.get_samples()["f"])
    seconds = time.perf_counter() - start
    effective = effective_sample_size(draws[None])
    error = (np.asarray(engine.posterior["f"].mean) - draws.mean(axis=0)) / draws.std(axis=0)
    results.add(
        Row(
            item=f"variational Gaussian against NUTS, n = {size}",
            dtype="float64",
            seconds=ours,
            peer=f"NUTS, {NUTS_SAMPLES} draws after adaptation",
            peer_seconds=seconds,
            figure="speed-up",
            value=seconds / ours,
            remark=f"Effective draws: {np.min(effective):.0f} at least, median {np.median(effective):.0f}. "
            f"Means differ by {np.sqrt(np.mean(error**2)):.3f} standard deviations (root mean square).",
        )
    )


@pytest.mark.parametrize("num_rows", [10_000, 100_000])
def test_factor_analysis(benchmark, results, num_rows):
    """One EM step of Gaussian factor analysis, against that of scikit-learn on the same data."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((num_rows, FACTORS)) @ rng.standard_normal((FACTORS, COLUMNS))
    table += rng.standard_normal(table.shape)
    rows = LatentGaussianRows(
        jnp.zeros(FACTORS),
        jnp.eye(FACTORS),
        jnp.asarray(rng.standard_normal((COLUMNS, FACTORS))),
        jnp.zeros(COLUMNS),
        (GaussianPotential(jnp.asarray(table), jnp.ones(COLUMNS)),),
        (jnp.ones(table.shape, bool),),
        jnp.ones(num_rows),
    )
    learn = ("loadings", "intercept", "noise")

    def seconds_of(fit: Callable[[int], Any]) -> float:
        """Of one step, from two lengths of the run: reading and starting drop out."""
        taken = {}
        for count in (5, 25):
            start = time.perf_counter()
            fit(count)
            taken[count] = time.perf_counter() - start
        return (taken[25] - taken[5]) / 20

    def ours(count: int) -> None:
        found = variational_em(rows, learn=learn, num_steps=count, tol=-1.0, progress_bar=False)
        jax.block_until_ready(found.posteriors.mean)

    def peer(count: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it has no tolerance for a given number of steps
            FactorAnalysis(n_components=FACTORS, tol=0.0, max_iter=count).fit(table)

    ours(1)
    seconds, peer_seconds = seconds_of(ours), seconds_of(peer)
    benchmark.pedantic(ours, args=(5,), rounds=1)
    results.add(
        Row(
            item=f"factor analysis, one EM step, {num_rows} x {COLUMNS}, {FACTORS} factors",
            dtype="float64",
            seconds=seconds,
            peer="FactorAnalysis of scikit-learn, one step",
            peer_seconds=peer_seconds,
            figure="time ratio",
            value=seconds / peer_seconds,
            remark="Rows share one covariance; missing cells, which the peer does not take, cost one for each pattern.",
        )
    )
