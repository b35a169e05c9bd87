"""Variational Gaussian fits: Gaussian processes against EP, SVI, NUTS and GPJax; factor analysis per EM step."""

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
import optax
import pytest
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from sklearn.decomposition import FactorAnalysis

from numpyro_ext.infer import EP, LatentGaussianRows, VariationalGaussian, variational_em
from numpyro_ext.models import gp_classification
from numpyro_ext.models.gaussian_process import squared_exponential
from numpyro_ext.potentials import GaussianPotential

from .harness import at_least

SIZES = (500, 1000, 2000)
HYPER = {"scale": 3.0, "length": 1.0}
# The guide of SVI has n (n + 3) / 2 parameters: it is stopped after some seconds (longer than the target asks for), and
# where it is then is reported.
SVI_CHUNK, SVI_SECONDS = 50, 40.0
# GPJax does not stop by itself: what counts are the steps to within so many nats of the optimum.
GPJAX_STEPS, GPJAX_NATS = 12, 0.1
NUTS_WARMUP, NUTS_SAMPLES = 300, 300
COLUMNS, FACTORS = 50, 5


def data(size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(size)
    X = rng.standard_normal((size, 2)) * np.sqrt(size / 100.0)
    score = 2.0 * np.sin(X[:, 0]) + np.cos(2.0 * X[:, 1])
    return X, (rng.random(size) < 1.0 / (1.0 + np.exp(-2.0 * score))).astype(int)


def whitened_model(X: np.ndarray, y: np.ndarray) -> Callable[[], None]:
    """The same process as a function of standard normals, which suits SVI and NUTS far better."""
    factor = jnp.linalg.cholesky(squared_exponential(jnp.asarray(X), HYPER["scale"], HYPER["length"], 1e-6))

    def model() -> None:
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([len(X)]).to_event(1))
        f = numpyro.deterministic("f", factor @ z)
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    return model


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
            results.record(
                f"variational Gaussian, {name}, whole fit, n = {size}",
                peer="EP, whole fit",
                times=(warm[size][name], warm[size]["EP"]),
                compile_seconds=cold[name] - warm[size][name],
                remark=f"Bound {float(engine.log_evidence):.3f} after {engine.diagnostics.num_steps} steps;"
                f" EP's evidence {float(engines['EP'].log_evidence):.3f}.",
            )
    for name in warm[SIZES[0]]:
        slope = np.polyfit(np.log(SIZES), np.log([warm[size][name] for size in SIZES]), 1)[0]
        results.record(
            f"whole fit, {name}, n = {SIZES[0]} to {SIZES[-1]}",
            peer="none",
            figure="exponent of growth",
            value=float(slope),
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

    model = whitened_model(X, y)
    # From the prior; at a larger rate it is faster at first and ends further away.
    guide = AutoMultivariateNormal(model, init_scale=1.0)
    svi = SVI(model, guide, numpyro.optim.Adam(0.003), Trace_ELBO(num_particles=8))
    state = svi.init(jax.random.key(0))
    advance = jax.jit(lambda state: jax.lax.fori_loop(0, SVI_CHUNK, lambda _, s: svi.update(s)[0], state))
    advance = advance.lower(state).compile()
    judge = jax.jit(lambda params: -Trace_ELBO(num_particles=64).loss(jax.random.key(1), params, model, guide))
    seconds, reached, steps = 0.0, -np.inf, 0
    while seconds < max(SVI_SECONDS, 12.0 * ours) and reached < bound - 1.0:
        start = time.perf_counter()
        state = jax.block_until_ready(advance(state))
        seconds += time.perf_counter() - start
        steps += SVI_CHUNK
        reached = float(judge(svi.get_params(state)))
    results.record(
        f"variational Gaussian against SVI, n = {size}",
        peer="SVI on the whitened process, AutoMultivariateNormal, Adam",
        times=(ours, seconds),
        figure="speed-up",
        target=at_least(10),
        remark=f"Bound {bound:.3f}; SVI reached {reached:.3f} in {steps} steps.",
        is_lower_limit=reached < bound - 1.0,
    )


@pytest.mark.parametrize("family", ["VariationalGaussian", "DualVariationalGaussian"])
@pytest.mark.parametrize("size", SIZES)
def test_against_gpjax(benchmark, results, size, family):
    """Time of the natural gradients of GPJax at the same kernel and likelihood, to the same distance of the optimum.

    Ours reads the model and stops by itself; theirs is compiled beforehand for as many full steps as it needs.
    """
    gpjax = pytest.importorskip("gpjax", reason="GPJax (jax < 0.11) comes with pip install -e '.[benchmark]' on 3.11")
    X, y = data(size)
    optimum = VariationalGaussian(gp_classification, hyper_values=HYPER, progress_bar=False)
    run(optimum, X, y)
    goal = float(optimum.log_evidence) - GPJAX_NATS
    engine = VariationalGaussian(gp_classification, hyper_values=HYPER, tol=1e-2, progress_bar=False)
    run(engine, X, y)
    ours = benchmark.pedantic(run, args=(engine, X, y), rounds=3)
    assert float(engine.log_evidence) > goal

    class Logistic(gpjax.likelihoods.Bernoulli):  # type: ignore[misc, name-defined]
        def link_function(self, f: jax.Array) -> dist.Distribution:
            return dist.Bernoulli(logits=f)

    variance = HYPER["scale"] ** 2
    prior = gpjax.gps.Prior(
        gpjax.kernels.RBF(lengthscale=HYPER["length"], variance=variance),
        gpjax.mean_functions.Zero(),
        jitter=1e-6 * variance,
    )
    start = getattr(gpjax.variational_families, family)(prior * Logistic(), jnp.asarray(X))
    bound = gpjax.objectives.dual_elbo if family == "DualVariationalGaussian" else gpjax.objectives.elbo
    table = gpjax.Dataset(X=jnp.asarray(X), y=jnp.asarray(y, float)[:, None])

    def compile_fit(count: int) -> Callable[[], Any]:
        def fit() -> Any:
            model, history = gpjax.fit_natgrads(
                model=start,
                objective=lambda q, table: -bound(q, table),
                train_data=table,
                optim=optax.set_to_zero(),  # the hyperparameters stay
                natgrad_lr=1.0,
                num_iters=count,
                verbose=False,
            )
            return jax.tree.leaves(model), history

        return jax.jit(fit).lower().compile()

    reached = -np.asarray(compile_fit(GPJAX_STEPS)()[1])  # before each step
    assert np.any(reached > goal), f"GPJax ends at {reached[-1]:.3f}, the goal is {goal:.3f}"
    count = int(np.argmax(reached > goal))
    begin = time.perf_counter()
    fit = compile_fit(count)
    compiling = time.perf_counter() - begin
    seconds = np.inf
    for _ in range(2):
        begin = time.perf_counter()
        jax.block_until_ready(fit())
        seconds = min(seconds, time.perf_counter() - begin)
    results.record(
        f"variational Gaussian against GPJax, {family}, n = {size}",
        peer=f"fit_natgrads of GPJax {gpjax.__version__}, {family}",
        times=(ours, seconds),
        figure="speed-up",
        target=at_least(1),
        remark=f"To within {GPJAX_NATS} nats of the optimum {goal + GPJAX_NATS:.3f}: ours in "
        f"{engine.diagnostics.num_steps} steps with the reading of the model, theirs in {count}, without the "
        f"compilation that each call of fit_natgrads repeats ({compiling:.1f} s).",
    )


@pytest.mark.parametrize("size", SIZES)
def test_against_nuts(benchmark, results, size):
    """Time of NUTS on the whitened process, for as many effective draws as it makes."""
    X, y = data(size)
    engine = VariationalGaussian(gp_classification, hyper_values=HYPER, progress_bar=False)
    run(engine, X, y)
    ours = benchmark.pedantic(run, args=(engine, X, y), rounds=2)

    mcmc = MCMC(NUTS(whitened_model(X, y)), num_warmup=NUTS_WARMUP, num_samples=NUTS_SAMPLES, progress_bar=False)
    mcmc.warmup(jax.random.key(0))  # compiles, and adapts
    start = time.perf_counter()
    mcmc.run(jax.random.key(1))
    draws = np.asarray(mcmc.get_samples()["f"])
    seconds = time.perf_counter() - start
    effective = effective_sample_size(draws[None])
    error = (np.asarray(engine.posterior["f"].mean) - draws.mean(axis=0)) / draws.std(axis=0)
    results.record(
        f"variational Gaussian against NUTS, n = {size}",
        peer=f"NUTS, {NUTS_SAMPLES} draws after adaptation",
        times=(ours, seconds),
        figure="speed-up",
        remark=f"Effective draws: {np.min(effective):.0f} at least, median {np.median(effective):.0f}. "
        f"Means differ by {np.sqrt(np.mean(error**2)):.3f} standard deviations (root mean square).",
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
        """Seconds of one step, from two lengths of the run: reading and starting drop out."""
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
    results.record(
        f"factor analysis, one EM step, {num_rows} x {COLUMNS}, {FACTORS} factors",
        peer="FactorAnalysis of scikit-learn, one step",
        times=(seconds, peer_seconds),
        remark="Rows share one covariance; missing cells, which the peer does not take, cost one for each pattern.",
    )
