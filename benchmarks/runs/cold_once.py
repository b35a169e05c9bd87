"""First fits in a process of its own, in CPU-seconds: ``python -m benchmarks.runs.cold_once EP random-intercepts``.

Fits a small model to one data set, to three others, and to three whose indices of groups are others, each up to 1000
draws and the marginals in hand, or by NumPyro's NUTS or SVI, or by PyMC's Laplace approximation or glmmTMB where
these are installed, without a cache on disk unless ``--cache FOLDER`` names one. Prints a JSON object: the
CPU-seconds of the first fit and of the quickest of the three, and the programs compiled, with the seconds of tracing,
lowering and compiling; with ``--programs`` a table of them as well.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import resource
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
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
R_PROGRAM = Path(__file__).parent / "glmmtmb.R"
PEERS = ("NUTS", "SVI", "PyMC", "glmmTMB")
NUM_WARMUP, NUM_SAMPLES, NUM_SVI_STEPS = 500, 1000, 2000


def cpu_seconds() -> float:
    """User and system time of this process so far, and of compilers that it started."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


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


def fit_pymc(problem: str, args: tuple[Any, ...], seed: int) -> None:
    """The same model by the Laplace approximation of PyMC, which is joint in field and hyperparameters, to draws."""
    import pymc
    from pymc_extras import fit_laplace

    *inputs, y = args
    with pymc.Model():
        if problem == "few-rows":
            (x,) = inputs
            slopes = pymc.Normal("slopes", 0.0, 1.0, shape=x.shape[1])
            pymc.Bernoulli("y", logit_p=pymc.Normal("intercept", 0.0, 2.0) + x @ slopes, observed=y)
        else:
            group, num_groups = inputs
            scale = pymc.HalfNormal("scale", 1.0)
            mean, shift = pymc.Normal("mean", 0.0, 2.0), pymc.Normal("shift", 0.0, scale, shape=num_groups)
            pymc.Poisson("y", pymc.math.exp(mean + shift[group]), observed=y)
        fit_laplace(progressbar=False, draws=NUM_SAMPLES, random_seed=seed)


@functools.cache
def has_fits(peer: str, problem: str) -> bool:
    """True if a peer is installed and has the model: glmmTMB has no priors, without which ten rows may have no
    estimate."""
    if peer == "PyMC":
        return find_spec("pymc_extras") is not None
    if peer != "glmmTMB":
        return True
    if problem != "random-intercepts" or not shutil.which("Rscript"):
        return False
    asked = "quit(status = !requireNamespace('glmmTMB', quietly = TRUE))"
    return subprocess.run(["Rscript", "-e", asked], capture_output=True, check=False).returncode == 0


def glmmtmb_seconds(all_args: list[tuple[Any, ...]]) -> list[float]:
    """Seconds of the processor for each data set, one after the other in a process of R that has loaded the package.

    The scale and the mean are at their maximum, the effects at their mode, all with standard errors; no draws.
    """
    lines = ["set,group,y"]
    for number, (group, _, y) in enumerate(all_args):
        lines += [f"{number},{g},{count}" for g, count in zip(group, y, strict=True)]
    command = ["Rscript", "--vanilla", str(R_PROGRAM)]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True)
    return [float(line) for line in done.stdout.split()]


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
    if arguments.engine == "glmmTMB":
        spent = iter(glmmtmb_seconds([data(*seeds) for kind in kinds.values() for seeds in kind]))
        for name, seeds in kinds.items():
            result[name] = {"cpu": min(next(spent) for _ in seeds)}
        print(json.dumps(result))
        return
    for name, seeds in kinds.items():
        seconds = []
        with ProgramLog() as log:
            for seed, index_seed in seeds:
                # What the fit before has left behind is its own.
                gc.collect()
                before = cpu_seconds()
                if arguments.engine == "PyMC":
                    fit_pymc(arguments.problem, data(seed, index_seed), seed)
                else:
                    fit_one = fit if arguments.engine in ENGINES else fit_peer
                    fit_one(arguments.engine, model, data(seed, index_seed), seed=seed)
                seconds.append(cpu_seconds() - before)
        result[name] = {"cpu": min(seconds), **log.totals()}
        if arguments.programs:
            print(f"{name}: {result[name]}\n{program_table(log)}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
