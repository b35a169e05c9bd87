"""Labels for hyperparameters first, for the field then: ``python -m benchmarks.queries.phases WORK`` writes the table.

The protocol of Houlsby (2014, section 3.3.3) in small: of 120 observations a third each for the first phase, for the
second, whose labels alone are in its fit, and for the test. Four data sets are generated, the others need
``NUMPYRO_EXT_DATA``. ``WORK`` is a folder that keeps each repeat, so that a run that was ended goes on: ``--minutes``
ends it, ``--only`` names data sets, ``--write`` writes what is there. Two minutes of one core for a repeat of all.
"""

from __future__ import annotations

import csv
import gzip
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro import handlers
from scipy.stats import ttest_1samp

from numpyro_ext.datasets import data_path
from numpyro_ext.design import Phase, compare_acquisitions, expected_information_gain, predictive_entropy, random_scores
from numpyro_ext.infer import EP

from ..harness import mean_and_error, standardised, summary, table_head, write_report
from ..harness.repeats import begin, make_repeats, parser_of_repeats, read_repeats

ABOUT_HYPER = partial(expected_information_gain, focus=["log_length", "log_scale", "log_noise"], hyper="mgp")
FIRST = {"information about hyperparameters": ABOUT_HYPER, "random": random_scores, "entropy": predictive_entropy}
SIZE, NUM_LABELS, NUM_INITIAL, NUM_REPEATS = 120, 20, 5, 30


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
    return {"x": standardised(u), "y": standardised(y) + 0.1 * rng.normal(size=SIZE)}


def _table(
    rng_key: Any, file: str, inputs: Sequence[int], target: int, folder: str = "uci-regression"
) -> dict[str, np.ndarray]:
    """Inputs and target standardised over all rows, of which some are taken."""
    with gzip.open(data_path(folder) / file, "rt") as lines:
        _, *rows = csv.reader(lines)
    codes = [sorted({row[c] for row in rows}) for c in range(len(rows[0]))]

    def column(number: int) -> np.ndarray:
        try:
            return np.array([float(row[number]) for row in rows])
        except ValueError:  # of names their place in the alphabet
            return np.array([float(codes[number].index(row[number])) for row in rows])

    chosen = _generator(rng_key).permutation(len(rows))[:SIZE]
    x = standardised(np.stack([column(c) for c in inputs], -1))
    return {"x": x[chosen], "y": standardised(column(target))[chosen]}


class Setting(NamedTuple):
    data: Callable[[Any], dict[str, np.ndarray]]
    thesis: tuple[float, ...] = ()
    """Log densities of its table 3.7, of fifty labels and pools of hundreds, over the number of tests: after the first
    phase by information, at random and by entropy, by information in the second."""


SETTINGS: Mapping[str, Setting] = {
    "GP, one input": Setting(partial(_of_process, dimension=1), (1.98, 1.98, 1.99)),
    "GP, two inputs": Setting(partial(_of_process, dimension=2), (2.01, 2.00, 2.01)),
    "GP, five inputs": Setting(partial(_of_process, dimension=5), (1.55, 1.50, 1.51)),
    "Branin": Setting(_branin, (0.053, -0.013, 0.041)),
    "servo": Setting(
        partial(_table, file="servo.csv.gz", inputs=range(4), target=4), (-34.5 / 34, -64.6 / 34, -50.2 / 34)
    ),
    "yacht": Setting(
        partial(_table, file="yacht.csv.gz", inputs=range(6), target=6), (92.6 / 77, 59.9 / 77, 73.6 / 77)
    ),
    "machine": Setting(
        partial(_table, file="machine-cpus.csv.gz", inputs=range(1, 7), target=7), (-0.93 / 52, -16.2 / 52, -2.09 / 52)
    ),
    "auto": Setting(
        partial(_table, file="auto-mpg-392.csv.gz", inputs=range(1, 8), target=0, folder="categorical"),
        (-51.4 / 99, -63.9 / 99, -52.8 / 99),
    ),
    "concrete": Setting(
        partial(_table, file="concrete.csv.gz", inputs=range(8), target=8), (-205 / 258, -222 / 258, -259 / 258)
    ),
    "energy": Setting(
        partial(_table, file="energy.csv.gz", inputs=range(8), target=8), (206 / 192, 131 / 192, 11 / 192)
    ),
}


def _repeat(name: str, known: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Scores of the test observations after each phase, of all first phases."""
    started = time.process_time()
    found = compare_acquisitions(
        EP(regression, field=["f"], integrate="none", progress_bar=False),
        random.key(number),
        SETTINGS[name].data,
        {key: [score, predictive_entropy] for key, score in FIRST.items()},
        phases=[Phase(NUM_LABELS, learns=True), Phase(NUM_LABELS)],
        num_initial=NUM_INITIAL,
        num_repeats=1,
        test=1.0 / 3.0,
        show_progress=False,
    )
    log_score, error = np.log(found["score"]).isel(repeat=0), found["error"].isel(repeat=0)
    return {
        "log_density": log_score.isel(step=-1).values.tolist(),
        "error": error.isel(step=-1).values.tolist(),
        "after_first_phase": log_score.isel(step=NUM_LABELS).values.tolist(),
        "cpu": time.process_time() - started,
    }


def _relative_gap(values: np.ndarray, others: np.ndarray) -> float:
    """In standard deviations over repeats."""
    return float(abs(values.mean() - others.mean()) / others.std(ddof=1))


def _is_at_least(gap: np.ndarray) -> bool:
    """Whether a paired test does not find it below zero: Student's, one-sided, five per cent."""
    return bool(ttest_1samp(gap, 0.0, alternative="less").pvalue > 0.05)


def _report(folder: Path) -> None:
    two, three = partial(mean_and_error, digits=2), partial(mean_and_error, digits=3)
    lines = [
        "# Labels for the hyperparameters first, for the field then",
        "",
        f"`compare_acquisitions(..., phases=[Phase({NUM_LABELS}, learns=True), Phase({NUM_LABELS})])` on {SIZE}",
        f"observations, a third of them for the test, {NUM_INITIAL} labelled at first in each phase: mean log",
        "predictive density of a test observation (outputs standardised) after the second phase, by the score of the",
        "first. Its labels are asked for by entropy, with the hyperparameters that the first phase has left. Standard",
        "errors over repeats, differences paired. The thesis has fifty labels in each phase and larger pools (its",
        "table 3.7, divided by the number of tests).",
        "",
        *table_head(
            f"data | repeats | {' | '.join(FIRST)} | information - random | information - entropy | thesis | CPU-s"
        ),
    ]
    errors = [
        "",
        "Root mean squared errors in the same tests:",
        "",
        *table_head(f"data | {' | '.join(FIRST)} | information - random | information - entropy"),
    ]
    rows: list[dict[str, Any]] = []
    others = list(FIRST)[1:]
    for name, setting in SETTINGS.items():
        repeats = read_repeats(folder, name)["repeats"]
        if len(repeats) < 2:
            continue
        log_density, error = (np.array([repeat[key] for repeat in repeats]).T for key in ("log_density", "error"))
        gaps = [log_density[0] - log_density[k] for k in (1, 2)]
        cpu = sum(repeat["cpu"] for repeat in repeats)
        thesis = " / ".join(f"{value:.2f}" for value in setting.thesis)
        cells = [
            *map(two, log_density),
            *(two(gap, "+") for gap in gaps),
            thesis,
            f"{cpu:.0f}",
        ]
        lines.append(f"| {name} | {len(repeats)} | {' | '.join(cells)} |")
        cells = [
            *map(three, error),
            *(three(error[0] - error[k], "+") for k in (1, 2)),
        ]
        errors.append(f"| {name} | {' | '.join(cells)} |")
        rows.append(
            {
                "data": name,
                "repeats": len(repeats),
                "cpu_seconds": cpu,
                "log_density": dict(zip(FIRST, map(summary, log_density), strict=True)),
                "root_mean_squared_error": dict(zip(FIRST, map(summary, error), strict=True)),
                "information_less": dict(zip(others, map(summary, gaps), strict=True)),
                "is_at_least": dict(zip(others, map(_is_at_least, gaps), strict=True)),
                "relative_gaps": [_relative_gap(x[0], x[k]) for x in (log_density, error) for k in (1, 2)],
                "thesis": dict(zip(FIRST, setting.thesis, strict=True)),
            }
        )
    lines += [*errors, ""]
    for other in others:
        below = [row["data"] for row in rows if not row["is_at_least"][other]]
        said = f"; below: {', '.join(below)}." if below else "."
        lines.append(
            f"- Information about hyperparameters at least {other} in log density, by a paired one-sided test at five "
            f"per cent: {len(rows) - len(below)} of {len(rows)}{said}"
        )
    smaller = [row["data"] for row in rows if sum(row["relative_gaps"][2:]) <= sum(row["relative_gaps"][:2])]
    lines.append(
        f"- Differences smaller in error than in log density, in standard deviations over repeats: {len(smaller)} of "
        f"{len(rows)}."
    )
    if any(row["repeats"] < NUM_REPEATS for row in rows):
        lines.append(f"- Fewer repeats than the {NUM_REPEATS} that are meant: the test finds large differences only.")
    write_report("phases", lines, data={"rows": rows})


def main() -> None:
    """Ask, and write the table."""
    arguments = begin(parser_of_repeats(__doc__, SETTINGS))
    warnings.simplefilter("ignore")
    if not arguments.write:
        numbers = dict.fromkeys(arguments.only, arguments.repeats or NUM_REPEATS)
        make_repeats(arguments.work, numbers, arguments.minutes, _repeat)
    _report(arguments.work)


if __name__ == "__main__":
    main()
