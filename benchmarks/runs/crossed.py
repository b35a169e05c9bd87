"""Marks that students give lecturers: crossed effects of up to 4,114 levels, first and next runs of engines; a million
rows of 50,000 groups; and two crossed factors of up to 10,000 levels each.

``python -m benchmarks.runs.crossed`` writes ``results/<date>-crossed.md``. Each row has a process of its own, with one
thread for linear algebra, so that the first run compiles all of its programs. A run includes its draws; hyperparameters
are integrated over. ``real`` reads ``insteval/insteval.csv.gz`` (s, d, dept, service, y) below the folder of
``NUMPYRO_EXT_DATA``: its logistic marks are those of 4 or 5, and of 5 in the next run; its Gaussian ones are mirrored
there.
"""

from __future__ import annotations

import gc
import gzip
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random

from numpyro_ext.datasets import data_path
from numpyro_ext.infer import EP, LaplaceApproximation

from ..harness import COLD, Study, blocks, peak_bytes, table

ENGINES = {"Laplace": LaplaceApproximation, "EP": EP}
FAMILIES = ("logistic", "Gaussian")
SIZES = {
    "5000": (5_000, 200, 80),
    "20000": (20_000, 800, 300),
    "insteval": (73_421, 2_972, 1_128),
    "real": None,
    "million": (1_000_000, 50_000),
    "two of 3000": (100_000, 3_000, 3_000),
    "two of 10000": (1_000_000, 10_000, 10_000),
}
"""Rows, students and lecturers of simulated marks, beside 14 departments but in the last; or rows and groups alone."""
WITHOUT_DEPARTMENTS = "two of 3000", "two of 10000"
PEERS = {
    ("5000", "logistic"): "lme4 0.6, glmmTMB 1.5, GPBoost 0.8",
    ("20000", "logistic"): "glmmTMB 8.9, GPBoost 3.9",
    ("insteval", "logistic"): "lme4 179, glmmTMB 149, GPBoost 6.5",
    ("insteval", "Gaussian"): "lme4 44, glmmTMB 105, GPBoost 4.4",
    ("million", "logistic"): "glmmTMB 249",
    ("million", "Gaussian"): "lme4 21",
    ("two of 10000", "Gaussian"): "GPBoost 32 (0.8 GB), lme4 none in 900 s",
    ("two of 10000", "logistic"): "none in 400 s (GPBoost), 900 s (glmmTMB)",
}
"""CPU-seconds of lme4 1.1-31, glmmTMB 1.1.5 and GPBoost 1.8 on such data, measured earlier."""
WANTED = {
    ("5000", "logistic", "Laplace"): "8 / 1.5",
    ("insteval", "logistic", "Laplace"): "89 / 60",
    ("insteval", "logistic", "EP"): "– / 89",
    ("insteval", "Gaussian", "Laplace"): "– / 18",
    ("insteval", "Gaussian", "EP"): "– / 18",
    ("million", "logistic", "Laplace"): "– / 75",
    ("million", "Gaussian", "Laplace"): "– / 21",
    ("two of 10000", "Gaussian", "Laplace"): "320",
    ("two of 10000", "logistic", "Laplace"): "900 s wall",
}
"""CPU-seconds that a first and a next run should take at most."""


def marks(s: Any, d: Any, i: Any, x: Any, y: Any = None, *, num_levels: tuple[int, int, int], family: str) -> None:
    _observe(_mean(x, {"us": s, "ui": i, "ud": d}, num_levels), family, y)


def crossed(s: Any, i: Any, x: Any, y: Any = None, *, num_levels: tuple[int, int], family: str) -> None:
    _observe(_mean(x, {"us": s, "ui": i}, num_levels), family, y)


def grouped(g: Any, x: Any, y: Any = None, *, num_levels: tuple[int], family: str) -> None:
    _observe(_mean(x, {"u": g}, num_levels), family, y)


def _mean(x: Any, levels: dict[str, Any], num_levels: tuple[int, ...]) -> Any:
    """Intercept, slope and effects of the levels of some factors, each with a deviation of its own."""
    a, b = numpyro.sample("a", dist.Normal(0, 5)), numpyro.sample("b", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([len(levels)]).to_event(1))
    total = a + b * x
    for k, (name, level) in enumerate(levels.items()):
        with numpyro.plate(f"levels of {name}", num_levels[k]):
            effect = numpyro.sample(name, dist.Normal(0, scale[k]))
        total = total + effect[level]
    return total


def _observe(mean: Any, family: str, y: Any) -> None:
    noise = numpyro.sample("noise", dist.HalfNormal(1)) if family == "Gaussian" else None
    with numpyro.plate("rows", len(mean)):
        numpyro.sample("y", dist.Bernoulli(logits=mean) if noise is None else dist.Normal(mean, noise), obs=y)


def data(size: str, family: str, seed: int) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
    """Columns of :func:`marks`, :func:`crossed` or :func:`grouped`, and numbers of levels."""
    shape = SIZES[size]
    if shape is None:
        return _real(family, seed)
    draws = np.random.default_rng(seed)
    if len(shape) == 2:
        rows, groups = shape
        g, x = draws.integers(0, groups, rows), draws.normal(size=rows)
        mean = 0.3 + 0.5 * x + 0.5 * draws.normal(size=groups)[g]
        return (g, x, _outcomes(mean, family, draws)), (groups,)
    rows, students, lecturers = shape
    s, i = draws.integers(0, students, rows), draws.integers(0, lecturers, rows)
    d, x = draws.integers(0, 14, lecturers)[i], draws.normal(size=rows)
    effects = 0.28 * draws.normal(size=students)[s] + 0.5 * draws.normal(size=lecturers)[i]
    if size in WITHOUT_DEPARTMENTS:
        return (s, i, x, _outcomes(0.3 + 0.5 * x + effects, family, draws)), (students, lecturers)
    mean = 0.3 + 0.5 * x + effects + 0.11 * draws.normal(size=14)[d]
    return (s, d, i, x, _outcomes(mean, family, draws)), (students, lecturers, 14)


def _outcomes(mean: np.ndarray, family: str, draws: np.random.Generator) -> np.ndarray:
    if family == "Gaussian":
        return mean + 1.2 * draws.normal(size=len(mean))
    return (draws.random(len(mean)) < 1.0 / (1.0 + np.exp(-mean))).astype(int)


def _real(family: str, seed: int) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
    with gzip.open(data_path("insteval", "insteval.csv.gz"), "rt", encoding="utf-8") as lines:
        names = next(lines).strip().split(",")
        columns = dict(zip(names, np.loadtxt(lines, int, delimiter=",").T, strict=True))
    levels = [np.unique(columns[name], return_inverse=True) for name in ("s", "d", "dept")]
    (_, s), (_, i), (_, d) = levels
    mark = columns["y"]
    y = (mark >= 3 + seed).astype(int) if family == "logistic" else (mark if seed == 1 else 6 - mark).astype(float)
    return (s, d, i, columns["service"].astype(float), y), (len(levels[0][0]), len(levels[1][0]), len(levels[2][0]))


def measure(draw: int, size: str, family: str, by: str) -> dict[str, Any]:
    """CPU-seconds of two runs and of a prediction of two rows in this process, and moments after the first."""
    found: dict[str, Any] = {}
    for name, seed in (("first", 1), ("next", 2)):
        columns, num_levels = data(size, family, seed)
        start = time.process_time()
        model: Any = {1: grouped, 2: crossed, 3: marks}[len(num_levels)]
        engine = ENGINES[by](model, progress_bar=False)
        engine.run(random.key(0), *columns, num_levels=num_levels, family=family)
        engine.get_samples()
        found[name] = time.process_time() - start
        if name == "first":
            found["converged"] = engine.diagnostics.converged
            found["error"] = engine.diagnostics.evidence_error
            scale = engine.posterior["scale"]
            found["moments"] = list(zip(np.asarray(scale.mean).tolist(), np.asarray(scale.sd).tolist(), strict=True))
            del scale, engine  # which hold the run and its draws, in a circle
            gc.collect()
    start = time.process_time()
    engine.predict(random.key(1), *(column[:2] for column in columns[:-1]), num_levels=num_levels, family=family)
    found["predict"] = time.process_time() - start
    found["memory"] = peak_bytes() / 2**30
    return found


CASES = {
    f"{size}, {family}, {by}": (size, family, by)
    for size in SIZES
    for family in FAMILIES
    for by in ENGINES
    if by != "EP" or size not in WITHOUT_DEPARTMENTS  # EP needs the variances of all rows, exactly
}


def _rows(found: dict[str, list[Any]]) -> Iterator[Iterable[Any]]:
    for name, (size, family, by) in CASES.items():
        for row in found[name]:
            moments = ", ".join(f"{mean:.3f} ± {sd:.3f}" for mean, sd in row["moments"])
            times = f"{row['first']:.1f}", f"{row['next']:.1f}"
            others = WANTED.get((size, family, by), ""), PEERS.get((size, family), "")
            rest = f"{row['predict']:.1f}", f"{row['memory']:.2f}", row["converged"], moments
            yield size, family, by, *times, *others, *rest


def main() -> None:
    experiments = {
        name: partial(measure, size=size, family=family, by=by) for name, (size, family, by) in CASES.items()
    }
    study = Study(__doc__, experiments, environment=COLD)
    found = study.run()
    lines = blocks(
        "# Crossed effects of students, lecturers and departments",
        "CPU-seconds of a run with its draws: in a new process, with compilation, and again on other marks of the same "
        "size; then of a prediction of two rows. Hyperparameters are integrated over; one thread for linear algebra. "
        "Peers were measured earlier on a machine of the same kind, on simulated data of these sizes. Deviations are "
        "means and standard deviations after the first run; simulated ones are 0.28, 0.50 and 0.11.",
        table(
            "data | family | engine | first | next | wanted | peers | predict | memory, GiB | converged | deviations",
            _rows(found),
        ),
    )
    study.write("crossed", lines)


if __name__ == "__main__":
    main()
