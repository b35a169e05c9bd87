"""Table 2.3 and Fig. 2.6 of Ko (2017): 10-fold cross-validation of three non-linearities, five draws of the folds."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import jax
import numpy as np

from ..datasets import EventCounts, load_coal_mining_counts
from ..infer import EP, cross_validate
from ..models import cox_process
from .comparison import NONLINEARITIES
from .plots import plot_cross_validation

_PUBLISHED = {"rectified": "1.60 ± 0.02", "softplus": "1.61 ± 0.01", "exponential": "1.63 ± 0.01"}


def permuted_folds(size: int, num_folds: int, seeds: range) -> np.ndarray:
    """One random permutation per seed, cut into ``num_folds`` runs; the fold of each observation."""
    folds = np.empty((len(seeds), size), int)
    for row, seed in zip(folds, seeds, strict=True):
        row[np.random.default_rng(seed).permutation(size)] = np.arange(size) * num_folds // size
    return folds


def score(nonlinearity: str, data: EventCounts, folds: np.ndarray, *, progress_bar: bool = True) -> np.ndarray:
    """Mean negative log predictive density of held-out counts, one number per draw of the folds.

    Kernel and mean are set to the maximum of the evidence on each training set, as in the thesis.
    """
    model = partial(cox_process, nonlinearity=nonlinearity, priors=False)
    engine = EP(model, progress_bar=progress_bar)
    num_folds = int(folds.max()) + 1
    found = cross_validate(engine, jax.random.key(0), data.centres, data.counts, folds=folds, num_folds=num_folds)
    return -np.asarray(found.log_predictive).mean(axis=1)


def run(output: Path) -> None:
    """Score the three non-linearities, print the table, draw the picture into ``output``."""
    data = load_coal_mining_counts()
    folds = permuted_folds(data.counts.size, 10, range(5))
    scores = {}
    print("mean -log P(held-out count), 10 folds x 5 draws; in brackets the thesis, whose bins are not known")
    for nonlinearity in NONLINEARITIES:
        start = time.perf_counter()
        scores[nonlinearity] = score(nonlinearity, data, folds)
        seconds = time.perf_counter() - start
        values = scores[nonlinearity]
        each = " ".join(f"{v:.3f}" for v in values)
        print(
            f"{nonlinearity:<13} {values.mean():.3f} ± {values.std(ddof=1):.3f}  ({_PUBLISHED[nonlinearity]})"
            f"   draws: {each}   {seconds:.0f} s"
        )
    plot_cross_validation(scores, output / "cross_validation.png")
