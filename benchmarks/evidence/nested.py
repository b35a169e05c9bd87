"""SMC beside NumPyro's ``NestedSampler`` (jaxns): errors of log evidences and their price.

``python -m benchmarks.evidence.nested`` writes ``results/<date>-nested.md``. Eight models whose evidence is known in
closed form, and four whose evidence is that of 16 runs of SMC with 10,000 particles each. The price is CPU-seconds of
a run that a user who has run the model before waits for, times the squared error, so that a sampler which takes a
quarter of the time for twice the error costs the same. ``NestedSampler`` compiles in every run. Each sampler has a
process of its own for each model, which ends after ``--limit`` CPU-seconds.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from scipy import special, stats

from numpyro_ext.infer import SMC

from ..harness import blocks, table, write_report
from .four_models import MODELS

REPEATS, LONG_RUNS = 4, 16
OURS, NESTED = "SMC, 4000 particles", "NestedSampler"
RANDOM = np.random.default_rng(0)
TEN = RANDOM.normal(1.0, 1.0, 10)
DESIGN = {size: RANDOM.normal(size=(rows, size)) for size, rows in ((5, 40), (20, 60))}
RESPONSE = {size: x @ RANDOM.normal(size=size) + RANDOM.normal(size=len(x)) for size, x in DESIGN.items()}
GROUP = np.repeat(np.arange(10), 5)
GROUPED = RANDOM.normal(size=10)[GROUP] + RANDOM.normal(size=50)
WINS = RANDOM.binomial(1, 0.7, 40)
EVENTS = RANDOM.poisson(2.0, 30)
WALK = np.cumsum(RANDOM.normal(size=30) * 0.5) + RANDOM.normal(size=30) * 0.3
WALK_COVARIANCE = 0.25 * np.minimum(*np.meshgrid(np.arange(1, 31), np.arange(1, 31)))


def mean_of(scale: float) -> Callable[..., None]:
    def model(y: Any) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, scale))
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    return model


def regression(x: Any, y: Any) -> None:
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Normal(x @ slopes, 1), obs=y)


def group_means(y: Any) -> None:
    with numpyro.plate("groups", 10):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mean[GROUP], 1), obs=y)


def coin(y: Any) -> None:
    p = numpyro.sample("p", dist.Uniform(0, 1))
    numpyro.sample("y", dist.Bernoulli(probs=p), obs=y)


def events(y: Any) -> None:
    rate = numpyro.sample("rate", dist.Exponential(1.0))
    numpyro.sample("y", dist.Poisson(rate), obs=y)


def random_walk(y: Any) -> None:
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(30), jnp.asarray(WALK_COVARIANCE)))
    numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def gaussian(y: np.ndarray, covariance: np.ndarray) -> float:
    return float(stats.multivariate_normal(np.zeros(len(y)), covariance).logpdf(y))


def conjugate() -> dict[str, tuple[Callable[..., None], tuple[Any, ...], float]]:
    """By name the model, its data and the exact log evidence."""
    found: dict[str, tuple[Callable[..., None], tuple[Any, ...], float]] = {}
    for name, scale in (("a mean", 1.0), ("a mean, wide prior", 100.0)):
        found[name] = mean_of(scale), (TEN,), gaussian(TEN, np.eye(10) + scale**2)
    for size, x in DESIGN.items():
        exact = gaussian(RESPONSE[size], np.eye(len(x)) + x @ x.T)
        found[f"regression, {size} slopes"] = regression, (x, RESPONSE[size]), exact
    same = np.equal.outer(GROUP, GROUP)
    found["ten group means"] = group_means, (GROUPED,), gaussian(GROUPED, np.eye(50) + same)
    heads = WINS.sum()
    found["a coin"] = coin, (WINS,), float(special.betaln(1 + heads, 41 - heads))
    total = EVENTS.sum()
    exact = special.gammaln(1 + total) - (1 + total) * np.log(31.0) - special.gammaln(EVENTS + 1.0).sum()
    found["events"] = events, (EVENTS,), float(exact)
    found["a random walk"] = random_walk, (WALK,), gaussian(WALK, WALK_COVARIANCE + 0.09 * np.eye(30))
    return found


PROBLEMS = {name: (model, args) for name, (model, args, _) in conjugate().items()} | MODELS


def by_long_runs(model: Callable[..., None], args: tuple[Any, ...]) -> tuple[float, float]:
    """The log evidence and its standard error."""
    judge, found = SMC(model, num_particles=10_000, progress_bar=False), []
    for number in range(LONG_RUNS):
        judge.run(random.key(1000 + number), *args)
        found.append(float(judge.log_evidence))
    values = np.exp(np.array(found) - max(found))
    return float(np.log(values.mean()) + max(found)), float(values.std(ddof=1) / values.mean() / np.sqrt(LONG_RUNS))


def runs(name: str, way: str) -> None:
    """Print the log evidence, the error told and the CPU-seconds of run after run, the first one included."""
    model, args = PROBLEMS[name]
    for number in range(1 + REPEATS):
        start = time.process_time()
        if way == OURS:
            if not number:
                smc = SMC(model, num_particles=4000, progress_bar=False)
            smc.run(random.key(number), *args)
            found = float(smc.log_evidence), float(smc.log_evidence.standard_error or np.nan)
        else:
            from numpyro.contrib.nested_sampling import NestedSampler

            sampler = NestedSampler(model)
            sampler.run(random.key(number), *args)
            results: Any = sampler._results
            found = float(results.log_Z_mean), float(results.log_Z_uncert)
        print("run", *found, time.process_time() - start, flush=True)


def within(limit: int, name: str, way: str) -> np.ndarray:
    """Figures of :func:`runs` in a process that may take so many CPU-seconds, without the first run if others are."""
    call = [sys.executable, "-m", "benchmarks.evidence.nested", "--model", name, "--by", way]
    done = subprocess.run(
        call,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
    )
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("run ")]
    if not found and done.returncode > 0:
        raise RuntimeError(done.stderr)
    return np.array(found[1:] or found, float).reshape(-1, 3)


def compared(name: str, value: float, limit: int) -> Iterator[tuple[float, list[Any]]]:
    """Price and row of both on a model of known log evidence."""
    for way in (OURS, NESTED):
        found = within(limit, name, way)
        if not len(found):
            yield np.inf, [name, way, f"{value:.3f}", f"no run in {limit} s", "", "", "", 0]
            continue
        values, told, seconds = found.T
        mean_square = float(np.mean((values - value) ** 2))
        cost = seconds.mean() * mean_square
        errors = [f"{np.sqrt(mean_square):.3f}", f"{told.mean():.3f}", f"{seconds.mean():.2f}", f"{cost:.2g}"]
        yield cost, [name, way, f"{value:.3f}", *errors, len(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=180, help="CPU-seconds for a sampler on a model")
    parser.add_argument("--model")
    parser.add_argument("--by")
    options = parser.parse_args()
    numpyro.enable_x64()
    if options.model:
        runs(options.model, options.by)
        return
    exact = {name: value for name, (_, _, value) in conjugate().items()}
    notes = []
    for name, (model, args) in MODELS.items():
        exact[name], error = by_long_runs(model, args)
        notes.append(f"{name}: {exact[name]:.4f} ± {error:.4f} by {LONG_RUNS} runs of SMC with 10,000 particles")
    behind: list[str] = []

    def rows() -> Iterator[list[Any]]:
        for name, value in exact.items():
            (ours, first), (theirs, second) = compared(name, value, options.limit)
            behind.extend([name] * (ours > theirs))
            yield from (first, second)

    lines = blocks(
        "# Log evidences by SMC and by nested sampling",
        f"Root of the mean squared error of up to {REPEATS} runs, the standard error that they tell, CPU-seconds of a "
        "run after a first one (the first itself where there was time for no other), and seconds times squared error. "
        f"Each sampler had {options.limit} CPU-seconds for a model, so that some made fewer runs. NestedSampler "
        "compiles in every run.",
        table("model | by | log evidence | error | told | seconds | seconds x error² | runs", rows()),
        [
            *(f"- {note}" for note in notes),
            f"- SMC is behind on {len(behind)} of {len(exact)}{': ' if behind else ''}{', '.join(behind)}",
        ],
    )
    write_report("nested", lines)


if __name__ == "__main__":
    main()
