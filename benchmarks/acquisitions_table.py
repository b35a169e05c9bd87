"""Labels asked for one by one: ``python -m benchmarks.acquisitions_table WORK`` writes the table of learning curves.

``WORK`` is a folder that keeps the areas of each data set, so that a run that was ended goes on. Pools and protocol are
those of Houlsby (2014, section 3.2.1); three are generated, the others need ``NUMPYRO_EXT_DATA``. About half an hour.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_ext.datasets import data_path
from numpyro_ext.design import (
    compare_acquisitions,
    expected_information_gain,
    predictive_entropy,
    random_scores,
    vote_entropy,
)
from numpyro_ext.infer import EP

from .results_table import write_report

__all__ = ["main"]

ACQUISITIONS = {
    "information": expected_information_gain,
    "entropy": predictive_entropy,
    "100 votes": partial(vote_entropy, num_votes=100),
    "random": random_scores,
}
_REPEATS = {"noisy block": 50, "distracting block": 20, "checkerboard": 20}


def classifier(x: Any, y: Any = None, labelled: Any = True, noise: float = 1e-6) -> None:
    """A Gaussian process behind probit labels, with hyperparameters of its own."""
    scale = numpyro.sample("scale", dist.LogNormal(1.0, 1.0))
    length = numpyro.sample("length", dist.LogNormal(1.0, 1.0).expand([x.shape[1]]).to_event(1))
    z = x / length
    squares = jnp.maximum(jnp.sum(z**2, 1)[:, None] + jnp.sum(z**2, 1) - 2.0 * z @ z.T, 0.0)
    covariance = scale**2 * (jnp.exp(-0.5 * squares) + noise * jnp.eye(len(x)))
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(x)), covariance))
    with handlers.mask(mask=labelled):
        numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(f)), obs=y)


def _pools(rng_key: Any, other: str) -> dict[str, np.ndarray]:
    """Two classes to the left and right, and a block of noise or of one class; the pool first."""
    rng = np.random.default_rng(np.asarray(random.key_data(rng_key)))
    xs, ys = [], []
    for clean, block in ((114, 80), (225, 25)):
        x = rng.uniform(-3.0, 3.0, (6 * clean, 2))
        x = x[np.abs(x[:, 0]) >= 0.4][:clean]
        is_noise = other == "noise"
        low, high = ((-0.4, -0.4), (0.4, 0.4)) if is_noise else ((4.0, 2.0), (5.0, 3.0))
        xs += [x, rng.uniform(low, high, (block, 2))]
        ys += [x[:, 0] > 0.0, rng.integers(0, 2, block) if is_noise else np.ones(block)]
    return {"x": np.concatenate(xs), "y": np.concatenate(ys).astype(int)}


def _checkerboard(rng_key: Any) -> dict[str, np.ndarray]:
    """Sixteen clusters of fifty, labelled in turn."""
    rng = np.random.default_rng(np.asarray(random.key_data(rng_key)))
    cells = np.stack(np.meshgrid(np.arange(4), np.arange(4)), -1).reshape(-1, 2)
    centre = np.repeat(cells, 50, 0)
    return {"x": centre + rng.uniform(-0.3, 0.3, centre.shape), "y": centre.sum(1) % 2}


def _table(file: str) -> tuple[list[str], list[list[str]]]:
    with gzip.open(data_path("uci-classification") / file, "rt") as lines:
        names, *rows = csv.reader(lines)
    return names, [row for row in rows if all(value not in ("", "NA", "?") for value in row)]


def _standardised(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / np.where(x.std(0) > 0.0, x.std(0), 1.0)


def _crabs() -> dict[str, np.ndarray]:
    names, rows = _table("crabs.csv.gz")
    columns = [names.index(name) for name in ("FL", "RW", "CL", "CW", "BD")]
    x = np.array([[float(row[c]) for c in columns] for row in rows])
    return {"x": _standardised(x), "y": np.array([row[names.index("sex")] == "M" for row in rows]).astype(int)}


def _last_column(file: str, first: int, positive: Callable[[str], bool]) -> dict[str, np.ndarray]:
    _, rows = _table(file)
    x = np.array([[float(value) for value in row[first:-1]] for row in rows])
    return {"x": _standardised(x), "y": np.array([positive(row[-1]) for row in rows]).astype(int)}


GENERATED: dict[str, tuple[Callable[[Any], dict[str, np.ndarray]], Any, float, float]] = {
    # data, test observations, scale and length of the kernel
    "noisy block": (partial(_pools, other="noise"), np.arange(444) >= 194, 3.0, 1.0),
    "distracting block": (partial(_pools, other="block"), np.arange(444) >= 194, 3.0, 1.0),
    "checkerboard": (_checkerboard, 0.5, 3.0, 0.5),
}
REAL: dict[str, Callable[[], dict[str, np.ndarray]]] = {
    "crabs (sex)": _crabs,
    "cancer (Wisconsin)": lambda: _last_column(
        "breast-cancer-wisconsin-original.csv.gz", 1, lambda c: c == "malignant"
    ),
    "wine (first kind)": lambda: _last_column("wine.csv.gz", 0, lambda c: float(c) == 0.0),
    "vehicle (bus, saab)": lambda: _last_column("vehicle.csv.gz", 0, lambda c: c in ("bus", "saab")),
}


def _areas(name: str) -> dict[str, Any]:
    start = time.process_time()
    if name in GENERATED:
        data, test, scale, length = GENERATED[name]
        values, repeats = {"scale": scale, "length": length * np.ones(2)}, _REPEATS[name]
    else:
        found: dict[str, Any] = {**REAL[name](), "noise": 1e-3}
        # The mode given many labels, much as in the source: what is compared are the queries.
        subset = np.random.default_rng(0).permutation(len(found["y"]))[:200]
        whole = EP(classifier, integrate="none", progress_bar=False)
        whole.run(random.key(0), found["x"][subset], found["y"][subset], noise=1e-3)
        values = {key: np.asarray(estimate.value) for key, estimate in whole.hyper.items()}
        data, test, repeats = found, 0.5, 10
    engine = EP(classifier, hyper_values=values, progress_bar=False)
    compared = compare_acquisitions(
        engine, random.key(0), data, ACQUISITIONS, num_labels=60, num_repeats=repeats, test=test
    )
    return {
        "cpu": time.process_time() - start,
        "area": (100.0 * compared["area"]).values.tolist(),
        "last": (100.0 * compared["score"].isel(num_observed=-1)).values.tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    folder = parser.parse_args().work
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_x64", True)
    names = list(ACQUISITIONS)
    lines = [
        "# Labels asked for one by one",
        "",
        "`compare_acquisitions(EP(...))`: mean over 5 to 65 labels of the geometric mean of test probabilities, in",
        "per cent, with standard errors over repeats; in brackets after the last label. Hyperparameters are given: of",
        "generated pools round numbers, of real ones their mode given 200 of the labels.",
        "",
        "| data | repeats | " + " | ".join(names) + " | information - entropy | information - random | CPU-s |",
        "|---|---|" + "---|" * (len(names) + 3),
    ]
    for name in [*GENERATED, *REAL]:
        path = folder / f"{name.split(' (')[0].replace(' ', '-')}.json"
        if not path.exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                path.write_text(json.dumps(_areas(name)))
        found = json.loads(path.read_text())
        area, last = np.array(found["area"]), np.array(found["last"])
        root = np.sqrt(area.shape[1])
        cells = [
            f"{a.mean():.1f} ± {a.std(ddof=1) / root:.1f} ({b.mean():.1f})" for a, b in zip(area, last, strict=True)
        ]
        for other in ("entropy", "random"):
            gap = area[0] - area[names.index(other)]
            cells.append(f"{gap.mean():+.1f} ± {gap.std(ddof=1) / root:.1f}")
        lines.append(f"| {name} | {area.shape[1]} | {' | '.join(cells)} | {found['cpu']:.0f} |")
        print(lines[-1], flush=True)
    write_report("acquisitions", lines)


if __name__ == "__main__":
    main()
