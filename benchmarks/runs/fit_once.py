"""One engine on one problem in a process of its own: ``python -m benchmarks.runs.fit_once EP coal-mining``.

Prints a JSON object: CPU-seconds of the first and of a second run, both up to 1000 draws in hand; the memory that they
needed beyond the imports; and posterior means, standard deviations and effective sample sizes.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import init_to_median

from numpyro_ext.datasets import load_coal_mining_counts
from numpyro_ext.infer import EP
from numpyro_ext.models import cox_process, logistic_regression

from ..harness import ProgramLog, cpu_seconds, make_nuts, peak_bytes, run_chains

NUM_WARMUP, NUM_SAMPLES = 500, 1000
# Whitened, the coal-mining posterior still takes trajectories of 2^5 to 2^6 leapfrog steps; the bound is not reached.
MAX_TREE_DEPTH = 8
# A run longer than this, or with more samples, is not repeated: its warm time is its own less its compilation.
LONG_RUN_SECONDS = 60.0


class Problem(NamedTuple):
    """A model, its arguments, and the site that is compared."""

    model: Callable[..., None]
    args: tuple[Any, ...]
    site: str
    num_reference_samples: int
    """Length of the run of NUTS that says what the errors are."""


def coal_mining() -> Problem:
    """The softplus Cox process of the demonstration: 100 bins, kernel and mean unknown."""
    counts, centres = load_coal_mining_counts()
    model = functools.partial(cox_process, nonlinearity="softplus", centered=False)
    return Problem(model, (centres, counts), "f", NUM_SAMPLES)


def logistic() -> Problem:
    """2000 rows and 50 columns."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2000, 50))
    y = rng.binomial(1, 1.0 / (1.0 + np.exp(-0.2 - X @ (0.3 * rng.standard_normal(50)))))
    return Problem(logistic_regression, (X, y), "coefficients", 40 * NUM_SAMPLES)


PROBLEMS = {"coal-mining": coal_mining, "logistic": logistic}


def fit_ep(problem: Problem, num_samples: int) -> Callable[[int], tuple[Any, Any, Any]]:
    """Function of a seed that runs EP and returns mean and standard deviation of the site."""

    def run(seed: int) -> tuple[Any, Any, Any]:
        engine = EP(problem.model, num_samples=num_samples, progress_bar=False)
        engine.run(jax.random.key(seed), *problem.args)
        jax.block_until_ready(engine.get_samples())
        site = engine.posterior[problem.site]
        return np.asarray(site.mean), np.sqrt(np.asarray(site.variance)), ()

    return run


def fit_nuts(problem: Problem, num_samples: int) -> Callable[[int], tuple[Any, Any, Any]]:
    """The same as :func:`fit_ep` by NUTS, with the effective sample size of every element."""
    options = {"init_strategy": init_to_median(num_samples=1), "max_tree_depth": MAX_TREE_DEPTH}
    mcmc = make_nuts(problem.model, NUM_WARMUP, num_samples, **options)

    def run(seed: int) -> tuple[Any, Any, Any]:
        draws = run_chains(mcmc, seed, *problem.args).draws[problem.site]
        return draws.mean((0, 1)), draws.std((0, 1)), effective_sample_size(draws)

    return run


ENGINES = {"EP": fit_ep, "NUTS": fit_nuts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("problem", choices=PROBLEMS)
    parser.add_argument("--num-samples", type=int, default=NUM_SAMPLES)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    run = ENGINES[arguments.engine](PROBLEMS[arguments.problem](), arguments.num_samples)
    jax.block_until_ready(jax.numpy.zeros(1) + 1.0)

    before = peak_bytes()
    with ProgramLog() as log:
        moments, cold = cpu_seconds(run, 0)
    warm = cold - sum(seconds for stage, seconds in log.totals().items() if stage != "programs")
    if cold < LONG_RUN_SECONDS and arguments.num_samples == NUM_SAMPLES:
        moments, warm = cpu_seconds(run, 1)
    names = ("mean", "deviation", "effective_sample_size")
    found = {name: np.ravel(values).tolist() for name, values in zip(names, moments, strict=True)}
    print(json.dumps({"cold_seconds": cold, "warm_seconds": warm, "peak_bytes": peak_bytes() - before, **found}))


if __name__ == "__main__":
    main()
