"""Time against error: one point for each engine."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...optional import optional

_COLOURS = ("#1b6ca8", "#c0572b", "#5b8c3a", "#7a4fa3", "#a8821b", "#3a8c8c", "#8c3a62", "#555555")
_LABEL_HEIGHT = 13.0
"""Points between two labels."""


def draw_picture(rows: Sequence[Any], reference: str, axis: Any = None) -> Any:
    """Seconds of the next run (filled) and of the first (open) against the largest gap of means.

    :param rows: of a comparison.
    :param str reference: what the gaps are to.
    :param axis: of matplotlib, or ``None`` for a new figure.
    :return: the axis.
    :raises ValueError: if there is nothing to draw.
    """
    shown = [row for row in rows if np.isfinite(row.mean_gap) and np.isfinite(row.next_seconds)]
    if not shown:
        raise ValueError("No engine has both a time and a gap to a reference: there is nothing to draw.")
    if axis is None:
        plt = optional("matplotlib.pyplot", "demo")
        _, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    floor = min([row.mean_gap for row in shown if row.mean_gap > 0.0], default=1e-3)
    gaps = np.array([max(row.mean_gap, floor / 2.0) for row in shown])
    for number, (row, gap) in enumerate(zip(shown, gaps, strict=True)):
        colour = _COLOURS[number % len(_COLOURS)]
        axis.plot([row.next_seconds, row.first_seconds], [gap, gap], color=colour, lw=1, alpha=0.5)
        is_hollow = row.status != "converged"
        axis.plot(row.next_seconds, gap, "X" if is_hollow else "o", color=colour, ms=8 if is_hollow else 7)
        axis.plot(row.first_seconds, gap, "o", color="white", mec=colour, ms=7)
    axis.set(xscale="log", yscale="log", xlabel="seconds (● next run, ○ first run; ✕ not converged)")
    axis.set_ylabel("largest gap of a mean (sd of reference)")
    axis.margins(x=0.08, y=0.15)
    middle = float(np.sqrt(gaps.min() * gaps.max()))
    if gaps.max() < 3.0 * middle:  # a decade at least: gaps that are alike shall look alike
        axis.set_ylim(middle / 3.2, middle * 3.2)
    axis.set_title(textwrap.fill(f"Gaps to {reference}", 95), loc="left", fontsize=9)
    _spread_labels(axis, shown, gaps)
    axis.spines[["top", "right"]].set_visible(False)
    return axis


def _spread_labels(axis: Any, shown: Sequence[Any], gaps: np.ndarray) -> None:
    """Names to the right of all points, in the order of their gaps and moved apart where they would overlap."""
    axis.figure.canvas.draw()  # the layout decides where points are
    left, right = axis.get_xlim()
    axis.set(xlim=(left, right), ylim=axis.get_ylim())
    transform, scale = axis.get_yaxis_transform(), 72.0 / axis.figure.dpi
    heights = np.array([transform.transform((1.0, gap))[1] for gap in gaps]) * scale
    order = np.argsort(heights)
    placed = heights.copy()
    for lower, upper in zip(order[:-1], order[1:], strict=True):
        placed[upper] = max(placed[upper], placed[lower] + _LABEL_HEIGHT)
    placed -= np.mean(placed - heights)
    for number, (row, gap) in enumerate(zip(shown, gaps, strict=True)):
        colour = _COLOURS[number % len(_COLOURS)]
        axis.plot([row.first_seconds, right], [gap, gap], color=colour, lw=0.6, ls=":")
        axis.annotate(
            row.engine,
            (1.0, gap),
            xycoords=transform,
            xytext=(20.0, placed[number] - heights[number]),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)},
        )
