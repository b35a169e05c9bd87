"""NUTS on marginal models against NUTS on the whole ones: effective draws per CPU-second, and whether they agree.

Seconds are those of 2000 transitions after the warmup, and of drawing the field at each of them; compilation apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, init_to_median

from numpyro_ext.infer import EP, LaplaceApproximation, marginalize
from tests.gallery import MODELS

from .harness import at_least, at_most, cpu_seconds, make_nuts, run_chains

NUM_WARMUP, NUM_SAMPLES = 1000, 2000
REFERENCE_CHAINS, NUM_REFERENCE = 2, 10_000


class Case(NamedTuple):
    model: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]


def radon_slopes(county, floor, num_counties, y=None):
    """Intercepts and slopes that are correlated over counties, not centred, as full NUTS likes them here."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    scales = numpyro.sample("scales", dist.HalfNormal(1.0).expand([2]))
    correlation = numpyro.sample("correlation", dist.LKJCholesky(2, 2.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("counties", num_counties):
        white = numpyro.sample("white", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    total = mean + white @ (scales[:, None] * correlation).T
    numpyro.sample("y", dist.Normal(total[county, 0] + total[county, 1] * floor, noise), obs=y)


def radon_data():
    """In the shape of the Minnesota data: 919 houses in 85 counties, few of them in most."""
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.full(85, 0.8))
    county = np.concatenate([np.arange(85), rng.choice(85, 919 - 85, p=share)])
    floor = (rng.uniform(size=919) < 0.17).astype(float)
    effects = rng.multivariate_normal([1.4, -0.7], [[0.1, -0.03], [-0.03, 0.09]], 85)
    return county, floor, 85, effects[county, 0] + effects[county, 1] * floor + 0.75 * rng.normal(size=919)


def published(name: str, **options: Any) -> Case:
    return Case(MODELS[name].model, MODELS[name].data(), options)


CASES = {
    "eight schools": published("eight_schools_noncentered"),
    "radon, correlated slopes": Case(radon_slopes, radon_data(), {}),
    "radon, correlated slopes, means sampled": Case(radon_slopes, radon_data(), {"field": "white"}),
    "2PL, abilities integrated, EP": published("two_parameter_logistic", field="theta"),
    "2PL, abilities integrated, Laplace": published(
        "two_parameter_logistic", field="theta", engine=LaplaceApproximation
    ),
    "horseshoe": published("horseshoe"),
    "radon of four counties": published("radon"),
    "seeds": published("seeds"),
    "seeds, Laplace": published("seeds", engine=LaplaceApproximation),
    "Bradley-Terry": published("bradley_terry"),
}


class Chain(NamedTuple):
    draws: dict[str, np.ndarray]
    seconds: float
    first_seconds: float
    """CPU-seconds of the warmup in a new process, compilation included."""
    least_effective: float
    """Smallest effective sample size of all elements that vary."""
    divergent: int


def _effective(draws: dict[str, np.ndarray]) -> float:
    # constants, such as the diagonal of a correlation, have none
    flat = np.concatenate([value.reshape(len(value), -1) for value in draws.values()], axis=1).astype(float)
    return float(np.min(effective_sample_size(flat[None, :, flat.std(0) > 1e-9])))


def sample(model: Any, args: tuple[Any, ...], recover: Callable[..., Any] | None = None) -> Chain:
    """One chain of NUTS, and the CPU-seconds of its transitions after the warmup, compilation apart."""
    kernel = NUTS(model, init_strategy=init_to_median)
    mcmc = MCMC(kernel, num_warmup=NUM_WARMUP, num_samples=1, progress_bar=False)
    _, first = cpu_seconds(mcmc.run, jax.random.key(3), *args)

    @jax.jit
    def transitions(state: Any) -> Any:
        def once(state: Any, _: None) -> tuple[Any, Any]:
            state = kernel.sample(state, args, {})
            return state, (state.z, state.diverging)

        return jax.lax.scan(once, state, None, length=NUM_SAMPLES)[1]

    compiled = transitions.lower(mcmc.last_state).compile()
    (unconstrained, diverging), seconds = cpu_seconds(compiled, mcmc.last_state)
    draws = jax.vmap(kernel.postprocess_fn(args, {}))(unconstrained)
    if recover is not None:
        recover(jax.random.key(0), draws)
        draws, more = cpu_seconds(recover, jax.random.key(1), draws)
        seconds += more
    draws = {name: np.asarray(value) for name, value in draws.items()}
    return Chain(draws, seconds, first, _effective(draws), int(np.sum(diverging)))


def reference(model: Any, args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    options = {"init_strategy": init_to_median, "target_accept_prob": 0.95}
    chains = run_chains(make_nuts(model, 2000, NUM_REFERENCE, num_chains=REFERENCE_CHAINS, **options), 5, *args)
    return {name: np.concatenate(draws) for name, draws in chains.draws.items()}


def gaps(draws: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> tuple[float, float]:
    """Largest gap of a mean in standard deviations, and of a standard deviation relative to itself."""
    means, deviations = [], []
    for name, value in exact.items():
        if not np.issubdtype(value.dtype, np.floating):
            continue
        ours, theirs = (part.reshape(len(part), -1) for part in (draws[name], value))
        varies = theirs.std(0) > 1e-9
        ours, theirs = ours[:, varies], theirs[:, varies]
        means.append(np.abs(ours.mean(0) - theirs.mean(0)) / theirs.std(0))
        deviations.append(np.abs(ours.std(0) / theirs.std(0) - 1.0))
    return float(np.max(np.concatenate(means))), float(np.max(np.concatenate(deviations)))


@pytest.mark.parametrize("name", CASES)
def test_marginal_chain(benchmark, results, name):
    model, args, options = CASES[name]
    engine = options.get("engine", EP)
    marginal = marginalize(model, **{"engine": engine, **options})
    full = sample(model, args)
    ours: Chain = benchmark.pedantic(sample, args=(marginal, args, marginal.recover), rounds=1)
    exact = reference(model, args)
    mean_gap, deviation_gap = gaps(ours.draws, exact)
    ratio = (ours.least_effective / ours.seconds) / (full.least_effective / full.seconds)
    remark = (
        f"effective draws of 2000: {ours.least_effective:.0f} against {full.least_effective:.0f}; "
        f"divergent: {ours.divergent} against {full.divergent}; "
        f"compilation and warmup {ours.first_seconds:.1f} s against {full.first_seconds:.1f} s"
    )
    own_gap = gaps(full.draws, exact)
    for figure, value, target, more in (
        ("effective draws per CPU-second, times those of the whole", ratio, at_least(1.0), remark),
        ("largest gap of a mean, sd", mean_gap, at_most(0.1), f"of the short chain of the whole {own_gap[0]:.3f}"),
        ("largest gap of an sd, relative", deviation_gap, at_most(0.1), f"of that chain {own_gap[1]:.3f}"),
    ):
        results.record(
            f"marginal NUTS, {name}",
            peer="NUTS on the whole",
            times=(ours.seconds, full.seconds),
            figure=figure,
            value=value,
            target=target,
            remark=more,
        )
