"""Labels for hyperparameters first, for the field then: ``python -m benchmarks.phases_table WORK`` writes the table.

The protocol of Houlsby (2014, section 3.3.3) on 150 observations: a third for the first phase, a third for the second,
whose labels alone are in its fit, the others for the test. ``WORK`` is a folder that keeps the scores of each data set,
so that a run that was ended goes on.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro import handlers

from numpyro_ext.datasets import data_path
from numpyro_ext.design import Phase, compare_acquisitions, expected_information_gain, predictive_entropy, random_scores
from numpyro_ext.infer import EP

from .results_table import write_report

__all__ = ["main"]

ABOUT_HYPER = partial(expected_information_gain, focus=["log_length", "log_scale", "log_noise"], hyper="mgp")
FIRST = {"information about hyperparameters": ABOUT_HYPER, "random": random_scores, "entropy": predictive_entropy}
SIZE, NUM_LABELS, NUM_INITIAL, NUM_REPEATS = 150, 15, 5, 6


def regression(x: Any, y: Any = None, labelled: Any = True) -> None:
    """A Gaussian process with a length of its own for each input."""
    log_length = numpyro.sample("log_length", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    log_scale = numpyro.sample("log_scale", dist.Normal(0.0, 1.0))
    log_noise = numpyro.sample("log_noise", dist.Normal(-2.0, 1.0))
    z = x / jnp.exp(log_length)
    squares = jnp.maximum(jnp.sum(z**2, 1)[:, None] + jnp.sum(z**2, 1) - 2.0 * z @ z.T, 0.0)
    covariance = jnp.exp(2.0 * log_scale) * (jnp.exp(-0.5 * squares) + 1e-6 * jnp.eye(len(x)))
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, covariance))
    with handlers.mask(mask=labelled):
        numpyro.sample("y", dist.Normal(f, jnp.exp(log_noise)), obs=y)


def _standardised(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / np.where(x.std(0) > 0.0, x.std(0), 1.0)


def _generator(rng_key: Any) -> np.random.Generator:
    return np.random.default_rng(np.asarray(random.key_data(rng_key)))


def _of_process(rng_key: Any, dimension: int) -> dict[str, np.ndarray]:
    """Draws of a process whose lengths are the first of the prior's, with noise of 0.03."""
    rng = _generator(rng_key)
    x = rng.normal(size=(SIZE, dimension))
    z = x / np.exp(rng.normal(-0.5, 0.5, dimension))
    covariance = np.exp(-0.5 * np.sum((z[:, None] - z) ** 2, -1)) + 1e-9 * np.eye(SIZE)
    return {"x": x, "y": np.linalg.cholesky(covariance) @ rng.normal(size=SIZE) + 0.03 * rng.normal(size=SIZE)}


def _branin(rng_key: Any) -> dict[str, np.ndarray]:
    rng = _generator(rng_key)
    u = rng.uniform(size=(SIZE, 2))
    a, b = 15.0 * u[:, 0] - 5.0, 15.0 * u[:, 1]
    y = (b - 5.1 / (4.0 * np.pi**2) * a**2 + 5.0 / np.pi * a - 6.0) ** 2 + 10.0 * (1.0 - 1.0 / (8.0 * np.pi)) * np.cos(
        a
    )
    return {"x": _standardised(u), "y": _standardised(y) + 0.1 * rng.normal(size=SIZE)}


def _table(rng_key: Any, file: str, inputs: list[int], target: int, is_log: bool = False) -> dict[str, np.ndarray]:
    with gzip.open(data_path("uci-regression") / file, "rt") as lines:
        _, *rows = csv.reader(lines)
    codes = [sorted({row[c] for row in rows}) for c in range(len(rows[0]))]

    def column(number: int) -> np.ndarray:
        try:
            return np.array([float(row[number]) for row in rows])
        except ValueError:  # of names their place in the alphabet
            return np.array([float(codes[number].index(row[number])) for row in rows])

    y = np.log(column(target)) if is_log else column(target)
    chosen = _generator(rng_key).permutation(len(rows))[:SIZE]
    return {"x": _standardised(np.stack([column(c) for c in inputs], -1))[chosen], "y": _standardised(y)[chosen]}


DATA: Mapping[str, Callable[[Any], dict[str, np.ndarray]]] = {
    "one input, generated": partial(_of_process, dimension=1),
    "two inputs, generated": partial(_of_process, dimension=2),
    "Branin": _branin,
    "servo": partial(_table, file="servo.csv.gz", inputs=[0, 1, 2, 3], target=4),
    "yacht": partial(_table, file="yacht.csv.gz", inputs=[0, 1, 2, 3, 4, 5], target=6),
}


def _scores(name: str) -> dict[str, Any]:
    """Mean log predictive densities of the test observations, after each phase."""
    started = time.process_time()
    found = compare_acquisitions(
        EP(regression, field=["f"], integrate="none", progress_bar=False),
        random.key(0),
        DATA[name],
        {key: [score, predictive_entropy] for key, score in FIRST.items()},
        phases=[Phase(NUM_LABELS, learns=True), Phase(NUM_LABELS)],
        num_initial=NUM_INITIAL,
        num_repeats=NUM_REPEATS,
        test=1.0 / 3.0,
        show_progress=False,
    )
    log_score = np.log(found["score"])
    first, last = (log_score.isel(step=k) for k in (NUM_LABELS, -1))
    return {"first": first.values.tolist(), "last": last.values.tolist(), "cpu": time.process_time() - started}


def main() -> None:
    """Print the table, and write it beside the other results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    folder = parser.parse_args().work
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    lines = [
        "# Labels for the hyperparameters first, for the field then",
        "",
        f"`compare_acquisitions(..., phases=[Phase({NUM_LABELS}, learns=True), Phase({NUM_LABELS})])`: mean log",
        "predictive density of a test observation (outputs standardised) after the second phase, whose labels are",
        "asked for by entropy with the hyperparameters that the first phase has left, by the score of the first phase;",
        f"with standard errors over {NUM_REPEATS} repeats, the differences paired.",
        "",
        f"| data | {' | '.join(FIRST)} | information - random | information - entropy | CPU-s |",
        "|---|" + "---|" * (len(FIRST) + 3),
    ]
    for name in DATA:
        path = folder / f"{name.split(',')[0].replace(' ', '-')}.json"
        if not path.exists():
            path.write_text(json.dumps(_scores(name)))
        found = json.loads(path.read_text())
        last = np.array(found["last"])
        cells = [_mean(values) for values in last]
        cells += [_mean(last[0] - last[k], "+") for k in (1, 2)]
        lines.append(f"| {name} | {' | '.join(cells)} | {found['cpu']:.0f} |")
        print(lines[-1], flush=True)
    write_report("phases", lines)


def _mean(values: np.ndarray, sign: str = "") -> str:
    return f"{values.mean():{sign}.2f} ± {values.std(ddof=1) / np.sqrt(len(values)):.2f}"


if __name__ == "__main__":
    main()
