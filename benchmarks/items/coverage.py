"""Coverage of traits, items drawn and as points: ``python -m benchmarks.items.coverage WORK`` writes the table.

Two-parameter logistic items and people are drawn from their priors, 200 people and 20 items in each of 200 data sets,
and ``calibrate`` ranks the true values among the draws of ``AdaptiveQuadrature``. Some six CPU-minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import chisquare

from numpyro_ext.infer import AdaptiveQuadrature
from numpyro_ext.infer.calibration import Calibration

from ..evidence.calibration import endings, shares, simulated, together
from ..harness import Study, blocks, table
from .many_people import two_parameter_logistic

_NUM_BATCHES, _BATCH, _NUM_SAMPLES = 8, 25, 399
_NUM_PEOPLE, _NUM_ITEMS, _NUM_BINS = 200, 20, 10
_KINDS = {"auto": "drawn", "none": "points"}
_LEAST, _MOST = 0.87, 0.93


def _fit(batch: int, integrate: str) -> dict[str, Any]:
    options = {"integrate": integrate, "num_samples": _NUM_SAMPLES, "progress_bar": False}
    model = partial(two_parameter_logistic, num_people=_NUM_PEOPLE, num_items=_NUM_ITEMS)
    return simulated(AdaptiveQuadrature(model, **options), batch, _BATCH)


def _rows(kind: str, found: Calibration) -> Iterator[Iterable[Any]]:
    """Coverage of each site; for traits also whether it is what was asked."""
    for name, held in found.coverage((0.5, 0.8, 0.9, 0.95)).items():
        if name == "trait":
            is_met = _LEAST <= held[0.9][0] <= _MOST
            wanted = f"{100 * _LEAST:.0f} to {100 * _MOST:.0f}: {'met' if is_met else 'missed'}"
            yield kind, "`trait`", *shares(held), wanted
        elif kind == "drawn":  # all draws of a point are equal
            yield kind, f"`{name}`", *shares(held), ""


def _uniformity(found: Calibration) -> list[str]:
    """Chi-squared tests of the ranks: of each item, the smallest p-value times their number, and of all together."""
    lines = []
    for name in ("discrimination", "intercept"):
        counts = np.stack([np.histogram(column, _NUM_BINS, (0.0, 1.0))[0] for column in found.places[name].T])
        p = np.array([chisquare(row).pvalue for row in counts])
        smallest, together_p = min(1.0, p.min() * p.size), chisquare(counts.sum(0)).pvalue
        total = ", ".join(f"{share:.3f}" for share in counts.sum(0) / counts.sum())
        lines.append(
            f"- Ranks of `{name}` in tenths, chi-squared: items one by one, smallest p-value times {p.size} "
            f"{smallest:.2g} ({'passes' if smallest >= 0.05 else 'does not pass'}); all together {together_p:.2g} "
            f"({'passes' if together_p >= 0.05 else 'does not pass'}), shares {total}."
        )
    return lines


def main() -> None:
    """Simulate, fit and write."""
    experiments = {kind: partial(_fit, integrate=integrate) for integrate, kind in _KINDS.items()}
    study = Study(__doc__, experiments, draws=_NUM_BATCHES)
    parts = {kind: found for kind, found in study.run().items() if found}
    joined = {kind: together(found, _NUM_SAMPLES) for kind, found in parts.items()}
    remarks = [f"- Items {kind}: {endings(joined[kind], parts[kind])} with simulation and ranks." for kind in parts]
    lines = blocks(
        "# How often intervals of traits hold the true value, with items drawn and as points",
        f"`calibrate(AdaptiveQuadrature(model))`: {_NUM_BATCHES * _BATCH} data sets of {_NUM_PEOPLE} people and "
        f"{_NUM_ITEMS} two-parameter logistic items, both from their priors, LogNormal(0, 0.5) and Normal(0, 3) of the "
        f"items, {_NUM_SAMPLES} draws of each fit. Shares in per cent, with standard errors over data sets. Items are "
        'drawn with `integrate="auto"`, points with `"none"`.',
        table(
            "items | site | 50 % | 80 % | 90 % | 95 % | wanted of 90 %",
            (row for kind, found in joined.items() for row in _rows(kind, found)),
        ),
        [*remarks, *(_uniformity(joined["drawn"]) if "drawn" in joined else [])],
    )
    study.write("item-coverage", lines)


if __name__ == "__main__":
    main()
