"""The results of the demo, engine by engine, and its pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from ..datasets import EventCounts


class Result(NamedTuple):
    """One engine under one non-linearity."""

    nonlinearity: str
    engine: str
    first_seconds: float = 0.0
    """Seconds of a run in a process that has compiled nothing for this engine and model."""
    next_seconds: float = 0.0
    """Seconds of a run on other data of the same shape."""
    draws: dict[str, Any] | None = None
    log_evidence: str = ""
    loo: float = 0.0
    mean_gap: float = 0.0
    """Largest difference of the means of the field to those of NUTS, in standard deviations of NUTS."""
    sd_gap: float = 0.0
    """Largest difference of a standard deviation of the field to that of NUTS, as a share of it."""
    remark: str = ""


_COLOURS = {"rectified": "#1b6ca8", "softplus": "#c0572b", "exponential": "#5b8c3a"}
_INK = "#333333"


def plot_engines(results: Sequence[Result], path: Path) -> None:
    """Plot the gap of each engine to NUTS against its seconds: a first fit and, at the other end of the line, the
    next."""
    figure, axes = plt.subplots(1, 3, figsize=(11.0, 3.8), sharex=True, sharey=True, layout="constrained")
    shown = [result for result in results if result.draws is not None]
    top = 0.05 + max(result.sd_gap for result in shown)
    for axis, (nonlinearity, colour) in zip(axes, _COLOURS.items(), strict=True):
        height = -np.inf
        for result in sorted(shown, key=lambda result: result.sd_gap):
            if result.nonlinearity != nonlinearity:
                continue
            first, later = result.first_seconds, result.next_seconds
            if result.engine == "NUTS":
                axis.axvline(first, color=_INK, lw=1, ls=":", label="NUTS, first fit")
                axis.axvline(later, color=_INK, lw=1, label="NUTS, next fit")
                continue
            axis.plot([later, first], [result.sd_gap] * 2, color=colour, lw=1, alpha=0.5)
            axis.plot(later, result.sd_gap, "o", color=colour, ms=6)
            axis.plot(first, result.sd_gap, "o", color="white", mec=colour, ms=6)
            # Names stand in a column of their own, one line apart at least.
            height = max(result.sd_gap, height + 0.05 * top)
            axis.annotate(
                result.engine,
                (later, result.sd_gap),
                (0.02, height),
                textcoords=axis.get_yaxis_transform(),
                arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "0.6"},
                fontsize=8,
                va="center",
            )
        axis.set(xscale="log", xlabel="seconds (● next fit, ○ first fit)")
        axis.set_title(f"{nonlinearity} link", loc="left", fontsize=11)
        _despine(axis)
    axes[0].set(xlim=(0.2 * min(result.next_seconds for result in shown), None), ylim=(0.0, top))
    axes[0].set_ylabel("largest gap to the sd of NUTS")
    axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_intensities(results: Sequence[Result], data: EventCounts, dates: np.ndarray, path: Path) -> None:
    """Posterior intensity with 90 % bands over the events, EP against NUTS (Ko, 2017, Fig. 2.4)."""
    figure, axes = plt.subplots(3, 1, figsize=(8.0, 8.0), sharex=True, sharey=True, layout="constrained")
    width = data.centres[1] - data.centres[0]
    for axis, nonlinearity in zip(axes, _COLOURS, strict=True):
        axis.bar(data.centres, data.counts, width=0.9 * width, color="#dddddd", label="events per bin")
        colour = _COLOURS[nonlinearity]
        draws = {r.engine: r.draws for r in results if r.nonlinearity == nonlinearity and r.draws is not None}
        ep, nuts = np.asarray(draws["EP"]["intensity"]), np.asarray(draws["NUTS"]["intensity"])
        low, high = np.quantile(ep, [0.05, 0.95], axis=0)
        axis.fill_between(data.centres, low, high, color=colour, alpha=0.25, lw=0, label="EP, 90 %")
        axis.plot(data.centres, ep.mean(0), color=colour, lw=2, label="EP, mean")
        for edge in np.quantile(nuts, [0.05, 0.95], axis=0):
            axis.plot(data.centres, edge, color=_INK, lw=0.8, ls=":")
        axis.plot(data.centres, nuts.mean(0), color=_INK, lw=1, ls="--", label="NUTS, mean and 90 %")
        axis.plot(dates, np.full(dates.shape, -0.25), "|", color=_INK, ms=6, alpha=0.6)
        axis.set_title(f"{nonlinearity} link", loc="left", fontsize=11)
        axis.set_ylabel("disasters per bin")
        _despine(axis)
    axes[0].legend(frameon=False, ncols=2, fontsize=9)
    axes[0].set_ylim(-0.5, None)
    axes[-1].set_xlabel("year")
    figure.suptitle("Coal-mining disasters: intensity of a Cox process", fontsize=12)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_predictive_check(replicated: np.ndarray, data: EventCounts, path: Path) -> None:
    """Plot the number of bins with so many events: replications from the posterior against the data."""
    largest = int(max(data.counts.max(), np.quantile(replicated, 0.9999)))
    values = np.arange(largest + 1)
    frequency = np.stack([(replicated == v).sum(axis=1) for v in values], axis=1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained")
    low, high = np.quantile(frequency, [0.05, 0.95], axis=0)
    left.bar(values, [(data.counts == v).sum() for v in values], color="#dddddd", label="data")
    middle = np.median(frequency, axis=0)
    left.errorbar(
        values,
        middle,
        yerr=[middle - low, high - middle],
        fmt="o",
        color=_COLOURS["rectified"],
        label="replications, median and 90 %",
    )
    left.set(xlabel="events in a bin", ylabel="number of bins")
    left.legend(frameon=False, fontsize=9)
    longest = _longest_gap(replicated)
    right.hist(longest, bins=np.arange(longest.max() + 2) - 0.5, density=True, color=_COLOURS["rectified"], alpha=0.5)
    right.axvline(_longest_gap(data.counts[None])[0], color=_INK, lw=1.5, label="data")
    right.set(xlabel="longest run of bins without an event", ylabel="share of replications")
    right.legend(frameon=False, fontsize=9)
    for axis in (left, right):
        _despine(axis)
    figure.suptitle("Predictive check of EP with the rectified-linear link", fontsize=12)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_cross_validation(scores: Mapping[str, np.ndarray], path: Path) -> None:
    """Mean negative log predictive density for each draw of the folds (Ko, 2017, Fig. 2.6)."""
    figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    for nonlinearity, values in scores.items():
        axis.plot(np.arange(1, len(values) + 1), values, "o-", color=_COLOURS[nonlinearity], label=nonlinearity)
    axis.set(xlabel="draw of the folds", ylabel="mean −log P(held-out count)")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(frameon=False, fontsize=9)
    _despine(axis)
    axis.set_title("10-fold cross-validation, lower is better", loc="left", fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _longest_gap(counts: np.ndarray) -> np.ndarray:
    longest = running = np.zeros(len(counts), int)
    for column in counts.T:
        running = np.where(column == 0, running + 1, 0)
        longest = np.maximum(longest, running)
    return longest


def _despine(axis: plt.Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
