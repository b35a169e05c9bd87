"""First fits in a process of its own, in CPU-seconds: ``python -m benchmarks.runs.cold_once EP random-intercepts``.

Fits a small model to one data set, to three others, and to three whose indices of groups are others, each up to 1000
draws and the marginals in hand, or by NumPyro's NUTS or SVI, without a cache on disk unless ``--cache FOLDER`` names
one. Prints a JSON object: the CPU-seconds of the first fit and of the quickest of the three, and the programs compiled,
with the seconds of tracing, lowering and compiling; with ``--programs`` a table of them as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_ext import keep_compiled_programs

from ..harness import ProgramLog, make_nuts, run_chains
from ..harness.compilation import program_table

NUM_ROWS, NUM_GROUPS = 300, 20
NUM_PERSONS, NUM_ITEMS, NUM_LEVELS = 316, 24, 4


def few_rows(x: Any, y: Any = None) -> None:
    """Logistic regression."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=intercept + x @ slopes), obs=y)


def random_intercepts(group: Any, num_groups: int, y: Any = None) -> None:
    """Counts in groups, whose intercepts have a scale that is learned."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    with numpyro.plate("groups", num_groups):
        shift = numpyro.sample("shift", dist.Normal(0.0, scale))
    numpyro.sample("y", dist.Poisson(jnp.exp(mean + shift[group])), obs=y)


def graded_response(person: Any, item: Any, level: Any = None) -> None:
    """Answers on a scale, by abilities that are integrated over, with 96 numbers to learn."""
    ability = numpyro.sample("ability", dist.Normal(0.0, 1.0).expand([NUM_PERSONS]))
    slope = numpyro.sample("slope", dist.LogNormal(0.0, 0.5).expand([NUM_ITEMS]))
    thresholds = dist.Normal(0.0, 2.0).expand([NUM_ITEMS, NUM_LEVELS - 1]).to_event(1)
    ordered = dist.TransformedDistribution(thresholds, dist.transforms.OrderedTransform())
    kappa = numpyro.sample("kappa", ordered)
    numpyro.sample("y", dist.OrderedLogistic(slope[item] * ability[person], kappa[item]), obs=level)


def few_rows_data(seed: int, index_seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((10, 2))
    return x, rng.binomial(1, 1.0 / (1.0 + np.exp(-x[:, 0])))


def random_intercepts_data(seed: int, index_seed: int) -> tuple[Any, ...]:
    group = np.random.default_rng(index_seed).permutation(np.arange(NUM_ROWS) % NUM_GROUPS)
    rng = np.random.default_rng(seed)
    shift = 0.5 * rng.standard_normal(NUM_GROUPS)
    return group, NUM_GROUPS, rng.poisson(np.exp(1.0 + shift[group]))


def graded_response_data(seed: int, index_seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    person, item = np.divmod(np.arange(NUM_PERSONS * NUM_ITEMS), NUM_ITEMS)
    slope = np.exp(0.3 * rng.normal(size=NUM_ITEMS))
    kappa = np.sort(1.2 * rng.normal(size=(NUM_ITEMS, NUM_LEVELS - 1)), 1) + 0.3 * rng.normal(size=(NUM_ITEMS, 1))
    latent = slope[item] * rng.normal(size=NUM_PERSONS)[person] + rng.logistic(size=len(item))
    return person, item, (latent[:, None] > kappa[item]).sum(1)


PROBLEMS = {"few-rows": (few_rows, few_rows_data), "random-intercepts": (random_intercepts, random_intercepts_data)}
LARGE = {"graded-response": (graded_response, graded_response_data)}
ENGINES = ("EP", "LaplaceApproximation", "VariationalGaussian", "INLA")
PEERS = ("NUTS", "SVI")
NUM_WARMUP, NUM_SAMPLES, NUM_SVI_STEPS = 500, 1000, 2000


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def fit(engine: str, model: Callable[..., None], args: tuple[Any, ...], seed: int) -> Any:
    """From the model to draws and marginals."""
    from numpyro_ext import infer

    run = getattr(infer, engine)(model, progress_bar=False)
    run.run(jax.random.key(seed), *args)
    jax.block_until_ready(run.get_samples())
    for site in run.posterior.values():
        jax.block_until_ready((site.mean, site.sd))
    return run


def fit_peer(peer: str, model: Callable[..., None], args: tuple[Any, ...], seed: int) -> None:
    """From the model to draws with NumPyro's own engines, as its tutorials run them."""
    if peer == "NUTS":
        run_chains(make_nuts(model, NUM_WARMUP, NUM_SAMPLES), seed, *args)
        return
    guide = AutoMultivariateNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    fitted = svi.run(jax.random.key(seed), NUM_SVI_STEPS, *args, progress_bar=False)
    draws = guide.sample_posterior(jax.random.key(seed), fitted.params, sample_shape=(NUM_SAMPLES,))
    jax.block_until_ready(draws)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES + PEERS)
    parser.add_argument("problem", choices={**PROBLEMS, **LARGE})
    parser.add_argument("--programs", action="store_true", help="list what was compiled")
    parser.add_argument("--cache", help="folder of compiled programs, to see what a new process costs")
    arguments = parser.parse_args()
    import numpyro_ext.infer  # noqa: F401

    jax.config.update("jax_enable_x64", True)
    if arguments.cache is None:
        jax.config.update("jax_enable_compilation_cache", False)
    else:
        keep_compiled_programs(arguments.cache)
    result: dict[str, Any] = {"import": cpu_seconds()}
    jax.block_until_ready(jax.device_put(np.zeros(1)))
    model, data = {**PROBLEMS, **LARGE}[arguments.problem]
    # Indices are data: the last fits have those of other rows.
    kinds = {
        "first": [(0, 0)],
        "next": [(1, 0), (2, 0), (3, 0)],
        "other groups": [(4, 1), (5, 2), (6, 3)],
    }
    for name, seeds in kinds.items():
        seconds = []
        with ProgramLog() as log:
            for seed, index_seed in seeds:
                # What the fit before has left behind is its own.
                gc.collect()
                before = cpu_seconds()
                fit_one = fit if arguments.engine in ENGINES else fit_peer
                fit_one(arguments.engine, model, data(seed, index_seed), seed=seed)
                seconds.append(cpu_seconds() - before)
        result[name] = {"cpu": min(seconds), **log.totals()}
        if arguments.programs:
            print(f"{name}: {result[name]}\n{program_table(log)}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
