"""Coverage of traits, items drawn and as points: ``python -m benchmarks.items.coverage WORK`` writes the table.

Two-parameter logistic items and people are drawn from their priors, 200 people and 20 items in each of 200 data sets,
and ``calibrate`` ranks the true values among the draws of ``AdaptiveQuadrature``. ``WORK`` keeps the ranks of each
batch, so that a run that was ended goes on. Some six CPU-minutes.
"""

from __future__ import annotations

import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.stats import chisquare

from numpyro_ext.infer import AdaptiveQuadrature
from numpyro_ext.infer.calibration import Calibration, calibrate

from ..evidence.calibration import content_of, together
from ..harness import table_head, write_report
from ..harness.repeats import begin, keep, kept_draws, parser_of_work

_NUM_BATCHES, _BATCH, _NUM_SAMPLES = 8, 25, 399
_NUM_PEOPLE, _NUM_ITEMS, _NUM_BINS = 200, 20, 10
_KINDS = {"auto": "drawn", "none": "points"}
_LEAST, _MOST = 0.87, 0.93


def two_parameter_logistic(response: Any = None) -> None:
    """Two hundred people and twenty items."""
    with numpyro.plate("items", _NUM_ITEMS):
        a = numpyro.sample("discrimination", dist.LogNormal(0, 0.5))
        d = numpyro.sample("intercept", dist.Normal(0, 3))
    with numpyro.plate("people", _NUM_PEOPLE):
        trait = numpyro.sample("trait", dist.Normal(0, 1))
    numpyro.sample("response", dist.Bernoulli(logits=a * trait[:, None] + d), obs=response)


def _simulated(integrate: str, batch: int) -> dict[str, Any]:
    engine = AdaptiveQuadrature(
        two_parameter_logistic, integrate=integrate, num_samples=_NUM_SAMPLES, progress_bar=False
    )
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found = calibrate(engine, jax.random.key(batch), num_simulations=_BATCH)
    messages = sorted({str(warning.message) for warning in caught})
    return {"seconds": time.process_time() - start, **content_of(found), "warnings": messages}


def _rows(kind: str, found: Calibration) -> list[str]:
    """Coverage of each site; for traits also whether it is what was asked."""
    rows = []
    for name, held in found.coverage((0.5, 0.8, 0.9, 0.95)).items():
        if kind == "points" and name != "trait":
            continue  # all draws of a point are equal
        shares = " | ".join(f"{100 * share:.1f} ± {100 * error:.1f}" for share, error in held.values())
        verdict = ""
        if name == "trait":
            is_met = _LEAST <= held[0.9][0] <= _MOST
            verdict = f"{100 * _LEAST:.0f} to {100 * _MOST:.0f}: {'met' if is_met else 'missed'}"
        rows.append(f"| {kind} | `{name}` | {shares} | {verdict} |")
    return rows


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
    work: Path = begin(parser_of_work(__doc__)).work
    rows, remarks = [], []
    for integrate, kind in _KINDS.items():
        for batch in range(_NUM_BATCHES):
            keep(work / f"{kind}-{batch}.json", partial(_simulated, integrate, batch))
        parts = kept_draws(work, kind)
        found = together(parts, _NUM_SAMPLES)
        rows += _rows(kind, found)
        remarks.append(
            f'- Items {kind} (`integrate="{integrate}"`): {len(found.converged)} fitted, '
            f"{int((~found.converged).sum())} not converged, {len(found.errors)} failed, "
            f"{sum(part['seconds'] for part in parts):.0f} CPU-seconds with simulation and ranks."
        )
        if kind == "drawn":
            remarks += _uniformity(found)
    lines = [
        "# How often intervals of traits hold the true value, with items drawn and as points",
        "",
        f"`calibrate(AdaptiveQuadrature(model))`: {_NUM_BATCHES * _BATCH} data sets of {_NUM_PEOPLE} people and "
        f"{_NUM_ITEMS} two-parameter logistic items, both from their priors, LogNormal(0, 0.5) and Normal(0, 3) of the "
        f"items, {_NUM_SAMPLES} draws of each fit. Shares in per cent, with standard errors over data sets.",
        "",
        *table_head("items | site | 50 % | 80 % | 90 % | 95 % | wanted of 90 %"),
        *rows,
        "",
        *remarks,
    ]
    write_report("item-coverage", lines, script="items.coverage", remarks=work / "remarks.md")


if __name__ == "__main__":
    main()
