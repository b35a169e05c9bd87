"""Pictures of learning by asking."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..optional import optional


def plot_learning_curves(comparison: Any, axis: Any = None) -> Any:
    """Mean test score of each acquisition against the number of observations, with standard errors over repeats.

    :param comparison: what :func:`~numpyro_ext.design.compare_acquisitions` or
        :func:`~numpyro_ext.design.cold_start` returns.
    :param axis: of matplotlib; a new figure by default.
    :return: the axis.
    """
    axis = _axis(axis)
    is_cold = "strategy" in comparison.dims
    kind, count, values = (
        ("strategy", "query", "log_likelihood") if is_cold else ("acquisition", "num_observed", "score")
    )
    score = comparison[values].transpose(kind, "repeat", ...)
    number = comparison[count].values
    for name in comparison[kind].values:
        curves = score.sel({kind: name}).values
        curves = curves[np.isfinite(curves).all(-1)]
        mean = curves.mean(0)
        (line,) = axis.plot(number, mean, label=str(name))
        if len(curves) > 1:
            error = curves.std(0, ddof=1) / np.sqrt(len(curves))
            axis.fill_between(number, mean - error, mean + error, color=line.get_color(), alpha=0.2, linewidth=0)
    axis.set_xlabel("answers" if is_cold else "observations")
    axis.set_ylabel("log likelihood of ratings held out" if is_cold else "geometric mean of test probabilities")
    axis.legend(frameon=False)
    return axis


def plot_queries(points: ArrayLike, design: Any, axis: Any = None) -> Any:
    """Plot the queries in a pool of two inputs: the pool, the first observations, and the queries in their order.

    :param points: inputs of the pool, shape ``(n, 2)``.
    :param design: a :class:`~numpyro_ext.design.SequentialDesign` with one observed site of ``n`` observations.
    :param axis: of matplotlib; a new figure by default.
    :return: the axis.
    :raises ValueError: if inputs have another number of columns.
    """
    points, axis = np.asarray(points, float), _axis(axis)
    if points.ndim != 2 or points.shape[1] != 2:
        raise ValueError(f"Queries are shown in the plane: points must have shape (n, 2), got {points.shape}.")
    places = design.history["place"].values
    first = np.setdiff1d(design.observed_places(), places)
    axis.scatter(*points.T, s=8, color="0.75", label="pool")
    axis.scatter(*points[first].T, s=30, marker="s", color="black", label="first observations")
    shown = axis.scatter(*points[places].T, s=40, c=np.arange(1, len(places) + 1), cmap="viridis", label="queries")
    axis.figure.colorbar(shown, ax=axis, label="order of queries")
    axis.set_xlabel("first input")
    axis.set_ylabel("second input")
    axis.legend(frameon=False, loc="best")
    return axis


def plot_information(x: ArrayLike, entropy: ArrayLike, information: ArrayLike, axis: Any = None) -> Any:
    """Uncertainty along one input, parted into what an observation would teach and what is noise.

    :param x: inputs, shape ``(n,)``.
    :param entropy: predictive entropies there.
    :param information: expected information gains there.
    :param axis: of matplotlib; a new figure by default.
    :return: the axis.
    """
    axis = _axis(axis)
    order = np.argsort(np.asarray(x))
    x, entropy, information = (np.asarray(value, float)[order] for value in (x, entropy, information))
    axis.fill_between(x, 0.0, information, alpha=0.8, linewidth=0, label="information (ignorance)")
    axis.fill_between(x, information, entropy, alpha=0.3, linewidth=0, label="expected conditional entropy (noise)")
    axis.plot(x, entropy, color="black", linewidth=1.0, label="predictive entropy")
    axis.set_xlabel("input")
    axis.set_ylabel("nats")
    axis.set_ylim(0.0, 1.35 * entropy.max())  # room for the legend
    axis.legend(frameon=False, fontsize="small", loc="upper left")
    return axis


def _axis(axis: object) -> Any:
    if axis is not None:
        return axis
    plt = optional("matplotlib.pyplot", "demo")
    return plt.subplots(layout="constrained")[1]
