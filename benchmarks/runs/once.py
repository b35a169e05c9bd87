"""One engine on one problem in a process of its own: ``python -m benchmarks.runs.once EP random-intercepts``.

Fits a model to one data set, to three others of small problems, and to three whose indices of groups are others, each
up to draws and marginals in hand, or by NumPyro's NUTS or SVI, without a cache on disk unless ``--cache FOLDER`` names
one. Prints a JSON object: the CPU-seconds of the first fit and of the quickest of the others, and the programs
compiled, with the seconds of tracing, lowering and compiling; the memory that fits needed beyond the imports; and of
larger problems posterior means, standard deviations and effective sample sizes. ``--programs`` prints a table of
programs as well.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import SVI, Trace_ELBO, init_to_median
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_ext.infer as engines
from numpyro_ext import keep_compiled_programs
from numpyro_ext.datasets import load_coal_mining_counts
from numpyro_ext.models import cox_process, logistic_regression

from ..harness import ProgramLog, cpu_seconds, make_nuts, peak_bytes, run_chains
from ..harness.compilation import program_table

NUM_ROWS, NUM_GROUPS = 300, 20
NUM_PERSONS, NUM_ITEMS, NUM_LEVELS = 316, 24, 4
NUM_WARMUP, NUM_SAMPLES, NUM_SVI_STEPS = 500, 1000, 2000
# Whitened, the coal-mining posterior still takes trajectories of 2^5 to 2^6 leapfrog steps; the bound is not reached.
MAX_TREE_DEPTH = 8
# A run longer than this, or with more samples, is not repeated: its warm time is its own less its compilation.
LONG_RUN_SECONDS = 60.0


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


def coal_mining_data(seed: int, index_seed: int) -> tuple[Any, ...]:
    """100 bins of the demonstration."""
    counts, centres = load_coal_mining_counts()
    return centres, counts


def logistic_data(seed: int, index_seed: int) -> tuple[Any, ...]:
    """2000 rows and 50 columns."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2000, 50))
    return X, rng.binomial(1, 1.0 / (1.0 + np.exp(-0.2 - X @ (0.3 * rng.standard_normal(50)))))


class Problem(NamedTuple):
    """A model with its data by two seeds, of which the second is that of indices."""

    model: Callable[..., None]
    data: Callable[[int, int], tuple[Any, ...]]
    site: str = ""
    """Site whose moments are compared, of larger problems; these have one data set."""
    num_reference_samples: int = NUM_SAMPLES
    """Length of the run of NUTS that says what the errors are."""


SMALL = {
    "few-rows": Problem(few_rows, few_rows_data),
    "random-intercepts": Problem(random_intercepts, random_intercepts_data),
}
LARGE = {
    "coal-mining": Problem(
        functools.partial(cox_process, nonlinearity="softplus", centered=False), coal_mining_data, "f"
    ),
    "logistic": Problem(logistic_regression, logistic_data, "coefficients", 40 * NUM_SAMPLES),
}
PROBLEMS = {**SMALL, **LARGE, "graded-response": Problem(graded_response, graded_response_data)}
ENGINES = ("EP", "LaplaceApproximation", "VariationalGaussian", "INLA")
PEERS = ("NUTS", "SVI")


def fit(by: str, problem: Problem, args: tuple[Any, ...], seed: int, num_samples: int) -> dict[str, Any]:
    """From the model to draws and marginals; moments of the site that is compared."""
    if by in ENGINES:
        run = getattr(engines, by)(problem.model, num_samples=num_samples, progress_bar=False)
        run.run(jax.random.key(seed), *args)
        jax.block_until_ready(run.get_samples())
        for site in run.posterior.values():
            jax.block_until_ready((site.mean, site.sd))
        site = run.posterior[problem.site] if problem.site else None
        return {} if site is None else {"mean": site.mean, "deviation": site.sd}
    if by == "NUTS":
        options = {"init_strategy": init_to_median(num_samples=1), "max_tree_depth": MAX_TREE_DEPTH}
        sampler = make_nuts(problem.model, NUM_WARMUP, num_samples, **(options if problem.site else {}))
        draws = run_chains(sampler, seed, *args).draws
        if not problem.site:
            return {}
        own = draws[problem.site]
        sizes = effective_sample_size(own)
        return {"mean": own.mean((0, 1)), "deviation": own.std((0, 1)), "effective_sample_size": sizes}
    guide = AutoMultivariateNormal(problem.model)
    svi = SVI(problem.model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    fitted = svi.run(jax.random.key(seed), NUM_SVI_STEPS, *args, progress_bar=False)
    jax.block_until_ready(guide.sample_posterior(jax.random.key(seed), fitted.params, sample_shape=(num_samples,)))
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES + PEERS)
    parser.add_argument("problem", choices=PROBLEMS)
    parser.add_argument("--num-samples", type=int, default=NUM_SAMPLES)
    parser.add_argument("--programs", action="store_true", help="list what was compiled")
    parser.add_argument("--cache", help="folder of compiled programs, to see what a new process costs")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if arguments.cache is None:
        jax.config.update("jax_enable_compilation_cache", False)
    else:
        keep_compiled_programs(arguments.cache)
    jax.block_until_ready(jax.device_put(np.zeros(1)))
    problem = PROBLEMS[arguments.problem]
    # Indices are data: the last fits have those of other rows.
    kinds = {"first": [(0, 0)], "next": [(1, 0), (2, 0), (3, 0)], "other groups": [(4, 1), (5, 2), (6, 3)]}
    if problem.site:
        kinds = {"first": [(0, 0)], "next": [(1, 0)]}
    before, result, moments = peak_bytes(), dict[str, Any](), dict[str, Any]()
    for name, seeds in kinds.items():
        if name == "next" and (
            problem.site and result["first"]["cpu"] > LONG_RUN_SECONDS or arguments.num_samples != NUM_SAMPLES
        ):
            stages = {key: seconds for key, seconds in result["first"].items() if key not in ("cpu", "programs")}
            result[name] = {"cpu": result["first"]["cpu"] - sum(stages.values())}
            break
        seconds = []
        with ProgramLog() as log:
            for seed, index_seed in seeds:
                gc.collect()  # what the fit before has left behind is its own
                args = problem.data(seed, index_seed)
                moments, spent = cpu_seconds(fit, arguments.engine, problem, args, seed, arguments.num_samples)
                seconds.append(spent)
        result[name] = {"cpu": min(seconds), **log.totals()}
        if arguments.programs:
            print(f"{name}: {result[name]}\n{program_table(log)}")
    found = {name: np.ravel(values).tolist() for name, values in moments.items()}
    print(json.dumps({**result, "peak_bytes": peak_bytes() - before, **found}))


if __name__ == "__main__":
    main()
