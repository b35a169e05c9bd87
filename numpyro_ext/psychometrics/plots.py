"""Pictures of a test: curves of items, information, and people and items on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from ..optional import optional
from .curves import Response, category_probabilities, expected_score, item_numbers, test_information
from .fitted_model import FittedModel
from .responses import response_of

_TRAITS = np.linspace(-4.0, 4.0, 201)


def plot_curves(
    source: Any,
    items: Sequence[int | str] | None = None,
    *,
    theta: ArrayLike | None = None,
    draws: int | None = None,
    trait: str = "trait",
    axes: Any = None,
) -> Any:
    """Probabilities of the answers to each item along the trait, one panel for each item.

    Of binary items the curve of the answer 1, of others one curve for each answer.

    :param source: an engine or ``MCMC`` after its run, or a response (a function from traits to a distribution).
    :param items: items by number, or by name in the fit; the first six by default.
    :param theta: traits at which to draw; from -4 to 4 by default.
    :param int draws: draws of the items, shown as thin lines, where the source has these.
    :param str trait: name of the site of the traits.
    :param axes: of matplotlib, one for each item; a new figure by default.
    :return: the axes.
    :raises ValueError: for several traits, or an item that there is not.
    """
    response, names, at = _curves_of(source, theta, trait)
    probabilities = np.asarray(category_probabilities(response, at))
    shown = (
        list(range(min(6, probabilities.shape[1])))
        if items is None
        else item_numbers(response, items, probabilities.shape[1])
    )
    thin = None
    if draws is not None and not callable(source):
        thin = np.asarray(category_probabilities(response_of(source, draws=draws, trait=trait), at))
    if axes is None:
        columns = min(3, len(shown))
        rows = -(-len(shown) // columns)
        _, grid = optional("matplotlib.pyplot", "demo").subplots(
            rows,
            columns,
            figsize=(3.2 * columns, 2.4 * rows),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for spare in grid.flat[len(shown) :]:
            spare.set_visible(False)
        axes = grid.flat[: len(shown)]
        for axis in grid[:, 0]:
            axis.set_ylabel("probability")
        for axis in grid.flat[max(0, len(shown) - columns) : len(shown)]:  # nothing stands below
            axis.set_xlabel("trait")
            axis.tick_params(labelbottom=True)
    axes = np.atleast_1d(np.asarray(axes, object))
    for axis, item in zip(axes, shown, strict=True):
        used = np.flatnonzero(probabilities[:, item].max(0) > 0)
        for category in used[1:] if len(used) == 2 else used:
            (line,) = axis.plot(at, probabilities[:, item, category], label=str(category))
            for draw in thin if thin is not None else ():
                axis.plot(at, draw[:, item, category], color=line.get_color(), linewidth=0.5, alpha=0.3)
        axis.set_title(names[item] if names else f"item {item}", fontsize="medium")
        axis.set_ylim(-0.02, 1.02)
        if len(used) > 2 and item == shown[0]:
            axis.legend(frameon=False, fontsize="x-small", title="answer", title_fontsize="x-small")
    return axes


def plot_information(
    source: Any,
    items: Sequence[int | str] | None = None,
    *,
    theta: ArrayLike | None = None,
    trait: str = "trait",
    axis: Any = None,
) -> Any:
    """Information of a test along the trait, with the standard error that it leaves on a second axis.

    :param source: an engine or ``MCMC`` after its run, or a response (a function from traits to a distribution).
    :param items: items by number, or by name in the fit; all by default.
    :param theta: traits at which to draw; from -4 to 4 by default.
    :param str trait: name of the site of the traits.
    :param axis: of matplotlib; a new figure by default.
    :return: the axis of the information.
    :raises ValueError: for several traits, or an item that there is not.
    """
    response, _, at = _curves_of(source, theta, trait)
    information = np.asarray(test_information(response, at, items))
    axis = optional("matplotlib.pyplot", "demo").figure().gca() if axis is None else axis
    axis.plot(at, information, label="information")
    axis.set_xlabel("trait")
    axis.set_ylabel("information")
    axis.set_ylim(0.0, 1.15 * information.max())
    other = axis.twinx()
    with np.errstate(divide="ignore"):
        error = 1.0 / np.sqrt(information)
    other.plot(at, error, color="black", linestyle="--", linewidth=1.0)
    other.set_ylabel("standard error (dashed)")
    other.set_ylim(0.0, min(2.0, 1.1 * float(error.max())))
    return axis


def plot_person_item_map(source: Any, *, trait: str = "trait", axis: Any = None) -> Any:
    """People and items on one scale: how many people have a trait, and at which trait an item halves them.

    An item stands where the expected score crosses each half between two answers: at its difficulty if it is binary, at
    one place for each step otherwise.

    :param source: an engine or ``MCMC`` after its run.
    :param str trait: name of the site of the traits.
    :param axis: of matplotlib; a new figure by default.
    :return: the axis.
    :raises ValueError: for several traits.
    """
    response, names, at = _curves_of(source, np.linspace(-6.0, 6.0, 1201), trait)
    people = FittedModel.of(source).means(trait)
    score = np.asarray(expected_score(response, at))
    number = score.shape[1]
    if axis is None:
        _, axis = optional("matplotlib.pyplot", "demo").subplots(figsize=(6.0, 2.0 + 0.22 * number))
    order = []
    for item in range(number):
        rising = score[-1, item] > score[0, item]
        column = score[:, item] if rising else score[::-1, item]
        traits = at if rising else at[::-1]
        halves = np.arange(np.floor(column[0]), np.ceil(column[-1])) + 0.5
        halves = halves[(halves > column[0]) & (halves < column[-1])]
        order.append(np.interp(halves, column, traits))
    middle = [np.mean(places) if places.size else np.inf for places in order]
    for row, item in enumerate(np.argsort(middle, kind="stable")):
        axis.plot(order[item], np.full(len(order[item]), row), marker="|", color="black", linewidth=0.8, markersize=7)
    axis.set_yticks(range(number), [(names[k] if names else f"item {k}") for k in np.argsort(middle, kind="stable")])
    axis.tick_params(axis="y", labelsize="small")
    counts, edges = np.histogram(people, 40)
    height = 0.25 * number + 1.0
    axis.bar(
        edges[:-1], height * counts / counts.max(), np.diff(edges), bottom=number, align="edge", color="C0", alpha=0.7
    )
    axis.set_ylim(-0.7, number + 1.1 * height)
    finite = np.concatenate([people, *order])
    axis.set_xlim(finite.min() - 0.3, finite.max() + 0.6)
    axis.text(0.02, 0.97, "people", transform=axis.transAxes, va="top", fontsize="small")
    axis.set_xlabel("trait")
    return axis


def _curves_of(source: object, theta: ArrayLike | None, trait: str) -> tuple[Response, list[str] | None, np.ndarray]:
    """The response of a source, the names of its items if it knows them, and traits."""
    at = _TRAITS if theta is None else np.asarray(theta, float)
    if callable(source) and not hasattr(source, "get_samples"):
        return source, None, at
    response = response_of(source, trait=trait)
    if response.num_traits > 1:
        raise ValueError(
            f"Curves are of one trait; the model has {response.num_traits}. Give a response along a line of traits."
        )
    call = FittedModel.of(source).items
    return response, None if call is None else call.names, at
