"""Labels asked for one by one: ``python -m benchmarks.queries.acquisitions WORK`` writes the table of learning curves.

Pools and protocol are those of Houlsby (2014, section 3.2.1); three are generated, the others need
``NUMPYRO_EXT_DATA``. About half an hour on one core.
"""

from __future__ import annotations

import csv
import functools
import gzip
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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
    site_entropy_reduction,
    vote_entropy,
)
from numpyro_ext.infer import EP

from ..harness import Study, blocks, mean_and_error, standardised, summary, table

ACQUISITIONS: dict[str, Callable[..., Any]] = {
    "information": expected_information_gain,
    "random": random_scores,
    "entropy": predictive_entropy,
    "2 votes": partial(vote_entropy, num_votes=2),
    "100 votes": partial(vote_entropy, num_votes=100),
}
_KNOWS_LABELS = "entropy of the site"
NAMES = (*ACQUISITIONS, _KNOWS_LABELS)
_NUM_INITIAL, _FIRST_SEED = 5, 20140701
_NOISE = 1e-3
"""Noise of the field of real data, relative to its variance."""


def classifier(x: Any, y: Any = None, labelled: Any = True, noise: float = 1e-6) -> None:
    """A Gaussian process behind probit labels, with hyperparameters of its own."""
    # Of logarithms, so that their mode is not drawn to short lengths, where no point tells of another.
    log_scale = numpyro.sample("log_scale", dist.Normal(1.0, 1.0))
    center = 0.5 + 0.5 * np.log(x.shape[1])
    log_length = numpyro.sample("log_length", dist.Normal(center, 1.0).expand([x.shape[1]]).to_event(1))
    z = x / jnp.exp(log_length)
    squares = jnp.maximum(jnp.sum(z**2, 1)[:, None] + jnp.sum(z**2, 1) - 2.0 * z @ z.T, 0.0)
    covariance = jnp.exp(2.0 * log_scale) * (jnp.exp(-0.5 * squares) + noise * jnp.eye(len(x)))
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


def _crabs() -> dict[str, np.ndarray]:
    names, rows = _table("crabs.csv.gz")
    columns = [names.index(name) for name in ("FL", "RW", "CL", "CW", "BD")]
    x = np.array([[float(row[c]) for c in columns] for row in rows])
    return {"x": standardised(x), "y": np.array([row[names.index("sex")] == "M" for row in rows]).astype(int)}


def _letters() -> dict[str, np.ndarray]:
    _, rows = _table("letter-D-vs-P.csv.gz")
    x = np.array([[float(value) for value in row[1:]] for row in rows])
    return {"x": standardised(x), "y": np.array([row[0] == "D" for row in rows]).astype(int)}


def _last_column(file: str, first: int, positive: Callable[[str], bool]) -> dict[str, np.ndarray]:
    _, rows = _table(file)
    x = np.array([[float(value) for value in row[first:-1]] for row in rows])
    return {"x": standardised(x), "y": np.array([positive(row[-1]) for row in rows]).astype(int)}


class Setting(NamedTuple):
    """A data set and its protocol."""

    data: Callable[[Any], dict[str, np.ndarray]]
    """Function of a key, for those that are generated."""
    test: Any = 0.5
    num_repeats: int = 20
    num_labels: int = 95
    """Labels that are asked for: up to a hundred, as in the source; fewer where a difference is clear before."""
    kernel: tuple[float, float] | None = None
    """Scale and length, where these are not found from labels."""
    thesis: tuple[float, ...] = ()
    """Areas of table 3.3 for its pools and hyperparameters, in the order of ``NAMES``."""

    @property
    def is_real(self) -> bool:
        return self.kernel is None


_UCI = "breast-cancer-wisconsin-original.csv.gz", "australian-credit.csv.gz"
SETTINGS = {
    "noisy block": Setting(partial(_pools, other="noise"), np.arange(444) >= 194, 50, 60, (3.0, 1.0)),
    "distracting block": Setting(partial(_pools, other="block"), np.arange(444) >= 194, 20, 60, (3.0, 1.0)),
    "checkerboard": Setting(_checkerboard, 0.5, 20, 60, (3.0, 0.5)),
    "crabs (sex)": Setting(lambda _: _crabs(), thesis=(86.5, 84.9, 86.4, 86.3, 86.3, 81.2)),
    "wine (first kind)": Setting(
        lambda _: _last_column("wine.csv.gz", 0, lambda c: float(c) == 0.0),
        test=78 / 178,
        thesis=(86.1, 85.1, 86.1, 85.9, 86.1, 84.5),
    ),
    "cancer (Wisconsin)": Setting(
        lambda _: _last_column(_UCI[0], 1, lambda c: c == "malignant"), thesis=(87.6, 87.4, 87.5, 87.5, 87.5, 71.8)
    ),
    "WDBC (malignant)": Setting(
        lambda _: _last_column("wdbc.csv.gz", 0, lambda c: float(c) == 0.0),
        thesis=(86.4, 86.1, 86.4, 86.8, 86.4, 69.7),
    ),
    "Australian credit": Setting(
        lambda _: _last_column(_UCI[1], 0, lambda c: float(c) == 1.0), thesis=(68.2, 67.6, 67.5, 68.2, 68.1, 49.5)
    ),
    "letters (D, P)": Setting(lambda _: _letters(), thesis=(93.4, 89.1, 93.4, 92.1, 93.4, 81.3)),
    "vehicle (bus, saab)": Setting(
        lambda _: _last_column("vehicle.csv.gz", 0, lambda c: c in ("bus", "saab")),
        thesis=(55.4, 58.1, 51.1, 55.7, 51.8, 29.9),
    ),
}


@functools.cache
def hyper_values(name: str) -> dict[str, np.ndarray]:
    """Round numbers, or the mode given two hundred labels, much as in the source: what is compared are the queries."""
    setting = SETTINGS[name]
    if setting.kernel is not None:
        scale, length = np.log(setting.kernel)
        return {"log_scale": np.asarray(scale), "log_length": np.full(2, length)}
    data = setting.data(None)
    subset = np.random.default_rng(0).permutation(len(data["y"]))[:200]
    whole = EP(classifier, integrate="none", progress_bar=False)
    whole.run(random.key(0), data["x"][subset], data["y"][subset], noise=_NOISE)
    return {key: np.asarray(estimate.value) for key, estimate in whole.hyper.items()}


def ask(number: int, name: str) -> dict[str, Any]:
    """One parting of one data set, for all acquisitions."""
    start, setting = time.process_time(), SETTINGS[name]
    key_data, key = random.split(random.key(_FIRST_SEED + number))
    data: dict[str, Any] = setting.data(key_data)
    compared = compare_acquisitions(
        EP(classifier, hyper_values=hyper_values(name), progress_bar=False),
        key,
        {**data, "noise": _NOISE} if setting.is_real else data,
        {**ACQUISITIONS, _KNOWS_LABELS: partial(site_entropy_reduction, labels=data["y"])},
        num_labels=setting.num_labels,
        num_initial=_NUM_INITIAL,
        num_repeats=1,
        test=setting.test,
        show_progress=False,
    )
    return {"cpu": time.process_time() - start, "area": (100.0 * compared["area"]).values[:, 0].tolist()}


def _rows(found: Mapping[str, list[Any]], names: Sequence[str]) -> Iterator[Iterable[Any]]:
    for name in names:
        setting, thesis = SETTINGS[name], SETTINGS[name].thesis
        area = areas_of(found[name])
        gaps = [mean_and_error(gap, "+") for gap in gaps_of(area)]
        cpu = f"{sum(repeat['cpu'] for repeat in found[name]):.0f}"
        yield name, _NUM_INITIAL + setting.num_labels, area.shape[1], *map(mean_and_error, area), *gaps, cpu
        if thesis:
            yield "(thesis)", 100, 50, *thesis, f"{thesis[0] - thesis[1]:+.1f}", f"{thesis[0] - thesis[2]:+.1f}", ""


def areas_of(repeats: list[dict[str, Any]]) -> np.ndarray:
    """Areas below the learning curves, acquisitions first."""
    return np.array([repeat["area"] for repeat in repeats]).T


def gaps_of(area: np.ndarray) -> list[np.ndarray]:
    """Area of information less those at random and by entropy."""
    return [area[0] - area[NAMES.index(other)] for other in ("random", "entropy")]


def _page(found: Mapping[str, list[Any]], names: Sequence[str]) -> list[str]:
    """The table of some of the data sets."""
    areas = {name: areas_of(found[name]) for name in names}
    real = [name for name in names if SETTINGS[name].is_real]
    below = [name for name in real if sum(summary(gaps_of(areas[name])[0]).values()) < 0.0]
    ahead = [name for name in real if np.sum(areas[name].mean(1) < areas[name][-1].mean()) > 1]
    fewer = [name for name in names if len(found[name]) < SETTINGS[name].num_repeats]
    checks = {f"Information at least random less one standard error: {len(real) - len(below)} of {len(real)}": below}
    checks[f"{_KNOWS_LABELS.capitalize()} last or next to last: {len(real) - len(ahead)} of {len(real)}"] = ahead
    notes = [f"- {text}{'; not ' if others else ''}{', '.join(others)}." for text, others in checks.items() if real]
    notes += [f"- Fewer repeats than are meant: {', '.join(fewer)}."] if fewer else []
    heads = f"data | labels | repeats | {' | '.join(NAMES)} | information - random | information - entropy | CPU-s"
    return blocks(
        "# Labels asked for one by one",
        "`compare_acquisitions(EP(...))`: mean over the labels of the geometric mean of test probabilities, in per "
        f"cent, from {_NUM_INITIAL} labels to the number given; standard errors over repeats, differences paired. "
        "Under real data stands table 3.3 of Houlsby (2014), whose hyperparameters, first labels and partings are "
        "others. Hyperparameters are given: of generated pools round numbers, of real ones their mode given 200 of the "
        "labels. "
        f"{_KNOWS_LABELS.capitalize()}: the informative vector machine, which sees the labels of the candidates.",
        table(heads, _rows(found, names)),
        notes,
    )


def main() -> None:
    """Ask, and write the tables of generated and of real data."""
    draws = {name: setting.num_repeats for name, setting in SETTINGS.items()}
    study = Study(__doc__, {name: partial(ask, name=name) for name in SETTINGS}, draws=draws)
    found = study.run()
    for page, is_real in (("acquisitions", False), ("acquisitions-real", True)):
        names = [name for name in SETTINGS if SETTINGS[name].is_real == is_real and len(found[name]) > 1]
        if names:
            study.write(page, _page(found, names))


if __name__ == "__main__":
    main()
