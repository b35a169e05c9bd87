"""Labels asked for one by one on real data: ``python -m benchmarks.queries.acquisitions WORK`` writes learning curves.

Protocol of Houlsby (2014, section 3.2.1), twenty partings of each set below ``NUMPYRO_EXT_DATA``, hyperparameters at
their mode given two hundred labels: what is compared are the queries. About half an hour on one core.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jax import random

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

from ..harness import Study, blocks, cpu_seconds, mean_and_error, standardised, table
from .peers import classifier

ACQUISITIONS: dict[str, Callable[..., Any]] = {
    "information": expected_information_gain,
    "random": random_scores,
    "entropy": predictive_entropy,
    "2 votes": partial(vote_entropy, num_votes=2),
    "100 votes": partial(vote_entropy, num_votes=100),
    "entropy of the site": site_entropy_reduction,
}
_NUM_REPEATS, _NUM_INITIAL, _NUM_LABELS, _FIRST_SEED = 20, 5, 95, 20140701


class Setting(NamedTuple):
    """A data set, and the areas of table 3.3 of the thesis in the order of :data:`ACQUISITIONS`."""

    file: str
    label: str | int
    """Name or place of the column of labels."""
    positive: tuple[Any, ...]
    inputs: Any
    """Places or names of the columns of inputs."""
    thesis: tuple[float, ...]
    test: float = 0.5

    def data(self) -> dict[str, np.ndarray]:
        frame = pd.read_csv(data_path("uci-classification") / self.file, na_values=["", "NA", "?"]).dropna()
        labels = frame[self.label] if isinstance(self.label, str) else frame.iloc[:, self.label]
        x = frame[self.inputs] if isinstance(self.inputs, list) else frame.iloc[:, self.inputs]
        return {"x": standardised(x.to_numpy(float)), "y": labels.isin(self.positive).to_numpy(int)}


_ALL = slice(0, -1)
SETTINGS = {
    "crabs (sex)": Setting(
        "crabs.csv.gz", "sex", ("M",), ["FL", "RW", "CL", "CW", "BD"], (86.5, 84.9, 86.4, 86.3, 86.3, 81.2)
    ),
    "wine (first kind)": Setting("wine.csv.gz", -1, (0,), _ALL, (86.1, 85.1, 86.1, 85.9, 86.1, 84.5), 78 / 178),
    "cancer (Wisconsin)": Setting(
        "breast-cancer-wisconsin-original.csv.gz",
        -1,
        ("malignant",),
        slice(1, -1),
        (87.6, 87.4, 87.5, 87.5, 87.5, 71.8),
    ),
    "WDBC (malignant)": Setting("wdbc.csv.gz", -1, (0,), _ALL, (86.4, 86.1, 86.4, 86.8, 86.4, 69.7)),
    "Australian credit": Setting("australian-credit.csv.gz", -1, (1,), _ALL, (68.2, 67.6, 67.5, 68.2, 68.1, 49.5)),
    "letters (D, P)": Setting("letter-D-vs-P.csv.gz", 0, ("D",), slice(1, None), (93.4, 89.1, 93.4, 92.1, 93.4, 81.3)),
    "vehicle (bus, saab)": Setting("vehicle.csv.gz", -1, ("bus", "saab"), _ALL, (55.4, 58.1, 51.1, 55.7, 51.8, 29.9)),
}


@functools.cache
def hyper_values(name: str) -> dict[str, np.ndarray]:
    """Mode given two hundred labels."""
    data = SETTINGS[name].data()
    subset = np.random.default_rng(0).permutation(len(data["y"]))[:200]
    whole = EP(classifier, integrate="none", progress_bar=False)
    whole.run(random.key(0), data["x"][subset], data["y"][subset], noise=1e-3)
    return {key: np.asarray(estimate.value) for key, estimate in whole.hyper.items()}


def ask(number: int, name: str) -> dict[str, Any]:
    """One parting of one data set: areas below the learning curves of all acquisitions."""
    _, key = random.split(random.key(_FIRST_SEED + number))
    data, engine = SETTINGS[name].data(), EP(classifier, hyper_values=hyper_values(name), progress_bar=False)
    scores = ACQUISITIONS | {"entropy of the site": partial(site_entropy_reduction, labels=data["y"])}
    options = {"num_labels": _NUM_LABELS, "num_initial": _NUM_INITIAL, "test": SETTINGS[name].test}
    compare = partial(compare_acquisitions, engine, key, {**data, "noise": 1e-3}, scores, num_repeats=1)
    compared, seconds = cpu_seconds(lambda: compare(show_progress=False, **options))
    return {"cpu": seconds, "area": (100.0 * compared["area"]).values[:, 0].tolist()}


def _rows(found: dict[str, list[Any]]) -> Iterator[Iterable[Any]]:
    for name, repeats in found.items():
        if len(repeats) > 1:
            area, thesis = np.array([repeat["area"] for repeat in repeats]).T, SETTINGS[name].thesis
            gaps = [mean_and_error(area[0] - area[other], "+") for other in (1, 2)]
            yield (
                name,
                len(repeats),
                *map(mean_and_error, area),
                *gaps,
                f"{sum(repeat['cpu'] for repeat in repeats):.0f}",
            )
            yield "(thesis)", 50, *thesis, f"{thesis[0] - thesis[1]:+.1f}", f"{thesis[0] - thesis[2]:+.1f}", ""


def main() -> None:
    """Ask, and write the table."""
    study = Study(__doc__, {name: partial(ask, name=name) for name in SETTINGS}, draws=_NUM_REPEATS)
    heads = f"data | repeats | {' | '.join(ACQUISITIONS)} | information - random | information - entropy | CPU-s"
    lines = blocks(
        "# Labels asked for one by one",
        "`compare_acquisitions(EP(...))`: mean over the labels of the geometric mean of test probabilities, in per "
        f"cent, from {_NUM_INITIAL} labels to {_NUM_INITIAL + _NUM_LABELS}; standard errors over repeats, differences "
        "paired. Below stands table 3.3 of Houlsby (2014), whose hyperparameters, first labels and partings are "
        "others. Entropy of the site: the informative vector machine, which sees the labels of the candidates.",
        table(heads, _rows(study.run())),
    )
    study.write("acquisitions-real", lines)


if __name__ == "__main__":
    main()
