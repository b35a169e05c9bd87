"""Pictures of training, and of error against what is known of a person and how varied she is."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..infer.stochastic.fit import ChunkedFit
from ..optional import optional
from .scores import GroupScore, SequenceComparison


def plot_error_by_history(table: SequenceComparison, *, axis: Any = None) -> Any:
    """Error of each predictor by the number of events before the predicted one, with standard errors over users.

    :param SequenceComparison table: the scores.
    :param axis: of matplotlib; a new figure by default.
    :return: the axis.
    """
    return _plot_groups({name: scores.by_history for name, scores in table.scores.items()}, axis)


def plot_error_by_entropy(table: SequenceComparison, *, axis: Any = None) -> Any:
    """Error of each predictor for the thirds of users whose items are least, more and most varied.

    :param SequenceComparison table: the scores.
    :param axis: of matplotlib; a new figure by default.
    :return: the axis.
    """
    return _plot_groups({name: scores.by_entropy for name, scores in table.scores.items()}, axis)


def plot_training(fit: ChunkedFit, *, axis: Any = None) -> Any:
    """Loss of each epoch of a training, with the error on the validation and the epoch that was kept.

    :param ChunkedFit fit: the trained network.
    :param axis: of matplotlib; a new figure by default.
    :return: the axis.
    """
    axis = optional("matplotlib.pyplot", "demo").figure(layout="constrained").gca() if axis is None else axis
    axis.plot(np.arange(1, len(fit.losses) + 1), fit.losses, label="training")
    errors = fit.validation_errors
    if len(errors):
        axis.plot(np.arange(1, len(errors) + 1), errors, label="validation")
        axis.plot(fit.best_epoch, errors[fit.best_epoch - 1], "o", label="kept")
    axis.set_xlabel("epoch")
    axis.set_ylabel("nats per event" if fit.is_sequential else "nats per row")
    axis.legend(frameon=False, fontsize="small")
    return axis


def _plot_groups(scores: dict[str, dict[str, GroupScore]], axis: Any) -> Any:
    """A line for each predictor with a point for each group; an infinite error has no point."""
    axis = optional("matplotlib.pyplot", "demo").figure(layout="constrained").gca() if axis is None else axis
    groups = list(next(iter(scores.values())))
    for number, (name, of_group) in enumerate(scores.items()):
        errors = np.array([of_group[group].error for group in groups])
        spreads = np.array([of_group[group].standard_error for group in groups])
        at = np.arange(len(groups)) + 0.03 * (number - 0.5 * (len(scores) - 1))
        shown = np.isfinite(errors)
        axis.errorbar(at[shown], errors[shown], np.nan_to_num(spreads[shown]), marker="o", markersize=4, label=name)
    axis.set_xticks(range(len(groups)), [group.replace(" ", "\n", 1) for group in groups], fontsize="small")
    axis.set_ylabel("error (nats per event)")
    axis.legend(frameon=False, fontsize="x-small")
    return axis
