"""The dates of 191 explosions in British coal mines, and their counts in bins."""

from __future__ import annotations

from importlib import resources
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..linalg.saved_names import saved_as


@saved_as("EventCounts")
class EventCounts(NamedTuple):
    """Numbers of events in adjacent bins."""

    counts: np.ndarray
    """Number of events in each bin, integers of shape ``(num_bins,)``."""
    centres: np.ndarray
    """Middle of each bin, shape ``(num_bins,)``."""


def load_coal_mining() -> np.ndarray:
    """Dates of the 191 coal-mining disasters in Britain, 1851 to 1962, that killed ten people or more.

    **Example:**

    .. doctest::

        >>> from numpyro_ext.datasets import load_coal_mining
        >>> dates = load_coal_mining()
        >>> print(dates.shape, dates.min(), dates.max())
        (191,) 1851.203 1962.22

    **References**

    1. Jarrett, R. G. (1979), *A note on the intervals between coal-mining disasters*, Biometrika 66(1), 191-193.

    :return: the dates as decimal years in increasing order, shape ``(191,)``.
    """
    with resources.files(__package__).joinpath("coal_mining.csv").open() as lines:
        return np.loadtxt(lines, skiprows=1)


def bin_events(dates: ArrayLike, edges: ArrayLike) -> EventCounts:
    """Count events between consecutive edges.

    A bin contains its left edge but not its right one; the last bin contains both.

    :param dates: when the events happened, shape ``(num_events,)``.
    :param edges: increasing edges of the bins, shape ``(num_bins + 1,)``.
    :return: the counts in the bins and the centres of the bins.
    :raises ValueError: if the edges do not increase, or an event lies outside them or is not finite.
    """
    dates, edges = np.asarray(dates, float), np.asarray(edges, float)
    if edges.ndim != 1 or edges.size < 2 or not np.all(np.diff(edges) > 0):
        raise ValueError(f"edges must be at least two increasing numbers; got an array of shape {edges.shape}.")
    outside = ~((dates >= edges[0]) & (dates <= edges[-1]))
    if outside.any():
        raise ValueError(
            f"{outside.sum()} of {dates.size} events, for example {dates[outside][0]}, lie outside "
            f"[{edges[0]}, {edges[-1]}]; widen the edges or drop the events."
        )
    counts, _ = np.histogram(dates, edges)
    return EventCounts(counts, 0.5 * (edges[:-1] + edges[1:]))


def load_coal_mining_counts(num_bins: int = 100, start: float = 1851.0, stop: float = 1963.0) -> EventCounts:
    """The coal-mining disasters counted in equal bins, as Ko (2017), section 2.1.4.2, does with 100 of them.

    **Example:**

    .. doctest::

        >>> from numpyro_ext.datasets import load_coal_mining_counts
        >>> counts, centres = load_coal_mining_counts()
        >>> print(centres.shape, counts.sum(), counts.max())
        (100,) 191 7

    :param num_bins: number of bins.
    :param start: left edge of the first bin.
    :param stop: right edge of the last bin.
    :return: the counts in the bins and the centres of the bins.
    """
    return bin_events(load_coal_mining(), np.linspace(start, stop, num_bins + 1))
