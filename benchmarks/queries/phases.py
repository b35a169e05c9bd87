"""Labels for hyperparameters first, for the field then: ``python -m benchmarks.queries.phases WORK`` writes the table.

The protocol of Houlsby (2014, section 3.3.3) in small: of 120 observations a third each for the first phase, for the
second, whose labels alone are in its fit, and for the test. Four data sets are generated, the others need
``NUMPYRO_EXT_DATA``. Two minutes of one core for a repeat of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from jax import random
from numpyro import handlers
from scipy.stats import ttest_1samp

from numpyro_ext.datasets import data_path
from numpyro_ext.design import Phase, compare_acquisitions, expected_information_gain, predictive_entropy, random_scores
from numpyro_ext.infer import EP

from ..harness import Study, blocks, mean_and_error, standardised, table

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
    """Inputs and target standardised over all rows, of which some are taken; names are places in the alphabet."""
    frame = pd.read_csv(data_path(folder) / file)
    codes = frame.apply(lambda c: c if pd.api.types.is_numeric_dtype(c) else pd.factorize(c, sort=True)[0])
    chosen, values = _generator(rng_key).permutation(len(frame))[:SIZE], standardised(codes.to_numpy(float))
    return {"x": values[chosen][:, list(inputs)], "y": values[chosen, target]}


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


def ask(number: int, name: str) -> dict[str, Any]:
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
    last = found.isel(repeat=0, step=-1)
    return {
        "log_density": np.log(last["score"]).values.tolist(),
        "error": last["error"].values.tolist(),
        "cpu": time.process_time() - started,
    }


def _of(repeats: list[dict[str, Any]], key: str) -> list[np.ndarray]:
    """Values of the rules, and of the first less each other."""
    values = np.array([repeat[key] for repeat in repeats]).T
    return [*values, *(values[0] - values[1:])]


def _relative_gaps(repeats: list[dict[str, Any]], key: str) -> float:
    """Sum of the absolute gaps, in standard deviations over repeats."""
    _, *others, first, second = _of(repeats, key)
    return sum(abs(gap.mean()) / other.std(ddof=1) for gap, other in zip((first, second), others, strict=True))


def _cells(repeats: list[dict[str, Any]], key: str, digits: int) -> list[str]:
    signs = ["", "", "", "+", "+"]
    return [mean_and_error(each, sign, digits) for each, sign in zip(_of(repeats, key), signs, strict=True)]


def _page(found: Mapping[str, list[Any]]) -> list[str]:
    found = {name: repeats for name, repeats in found.items() if len(repeats) > 1}
    notes = []
    for place, other in enumerate(list(FIRST)[1:], len(FIRST)):
        gaps = {name: _of(repeats, "log_density")[place] for name, repeats in found.items()}
        below = [n for n, gap in gaps.items() if ttest_1samp(gap, 0.0, alternative="less").pvalue <= 0.05]
        notes.append(
            f"- Information about hyperparameters at least {other} in log density, by a paired one-sided test at five "
            f"per cent: {len(found) - len(below)} of {len(found)}{'; below: ' if below else ''}{', '.join(below)}."
        )
    smaller = sum(_relative_gaps(each, "error") <= _relative_gaps(each, "log_density") for each in found.values())
    notes.append(
        f"- Differences smaller in error than in log density, in standard deviations over repeats: {smaller} of "
        f"{len(found)}."
    )
    if any(len(repeats) < NUM_REPEATS for repeats in found.values()):
        notes.append(f"- Fewer repeats than the {NUM_REPEATS} that are meant: the test finds large differences only.")
    names = f"{' | '.join(FIRST)} | information - random | information - entropy"
    return blocks(
        "# Labels for the hyperparameters first, for the field then",
        f"`compare_acquisitions(..., phases=[Phase({NUM_LABELS}, learns=True), Phase({NUM_LABELS})])` on {SIZE} "
        f"observations, a third of them for the test, {NUM_INITIAL} labelled at first in each phase: mean log "
        "predictive density of a test observation (outputs standardised) after the second phase, by the score of the "
        "first. Its labels are asked for by entropy, with the hyperparameters that the first phase has left. Standard "
        "errors over repeats, differences paired. The thesis has fifty labels in each phase and larger pools (its "
        "table 3.7, divided by the number of tests).",
        table(
            f"data | repeats | {names} | thesis | CPU-s",
            (
                (
                    name,
                    len(repeats),
                    *_cells(repeats, "log_density", 2),
                    " / ".join(f"{value:.2f}" for value in SETTINGS[name].thesis),
                    f"{sum(repeat['cpu'] for repeat in repeats):.0f}",
                )
                for name, repeats in found.items()
            ),
        ),
        "Root mean squared errors in the same tests:",
        table(f"data | {names}", ((name, *_cells(repeats, "error", 3)) for name, repeats in found.items())),
        notes,
    )


def main() -> None:
    """Ask, and write the table."""
    study = Study(__doc__, {name: partial(ask, name=name) for name in SETTINGS}, draws=NUM_REPEATS)
    study.write("phases", _page(study.run()))


if __name__ == "__main__":
    main()
