"""Remarks on cells that a bilinear model fits without complaint, although they tell less than they seem to.

Each remark has a reason, and words that say what was found, where, what becomes of it, and what to do. They are among
the messages of a run's diagnostics, and none of them is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from ...display import counted
from ...potentials.families.ordinal import CumulativeLogitPotential, CumulativeProbitPotential
from ...structure.bilinear.reading import BilinearReading
from .algorithms.messages import Moments

_MOST_NAMED = 5
_LEAST_SIGNAL = 0.02
"""Products of posterior means, in their posterior standard deviations, below which a component says nothing."""

Reason = Literal["no cell", "one level", "unseen level", "rank", "died"]


class Remark(NamedTuple):
    """Something that a user should know of the data of a fit.

    :param str reason: what it is, for code.
    :param str words: what it is, for people.
    """

    reason: Reason
    words: str


def remarks(reading: BilinearReading, vectors: tuple[Moments, Moments] | None) -> tuple[Remark, ...]:
    """Remarks on the cells of a reading, and on the vectors that were found.

    :param BilinearReading reading: of the fit.
    :param vectors: posterior moments of all components of rows and columns; ``None`` where a side has no such moments.
    """
    return (*_of_cells(reading), *_of_levels(reading), *_of_rank(reading, vectors))


def _of_cells(reading: BilinearReading) -> Iterator[Remark]:
    if reading.unlisted_cells == "zero" or reading.pair_sites is not None:
        return  # what is not listed is seen, too
    for side, what in enumerate(("row", "column")):
        if reading.is_coupled[side]:
            continue
        empty = np.flatnonzero(np.bincount(reading.index[side], minlength=len(reading.elements[side])) == 0)
        if empty.size:
            yield Remark(
                "no cell",
                f"{_named(what, empty)} of {list(reading.sides[side])} have no cell: their posterior is the prior. "
                "Leave them out, or keep them to have predictions for what nobody has seen.",
            )


def _of_levels(reading: BilinearReading) -> Iterator[Remark]:
    kind = reading.factor_kind
    if not isinstance(kind, CumulativeProbitPotential | CumulativeLogitPotential):
        return
    number = kind.thresholds.shape[-1] + 1
    values = [np.asarray(reading.sites[n].value).reshape(-1) for n in reading.factor_names]
    level = np.concatenate([v[cells] for v, cells in zip(values, reading.cells, strict=True)]).astype(int)
    unseen = np.setdiff1d(np.arange(number), level)
    if unseen.size:
        yield Remark(
            "unseen level",
            f"{_named('level', unseen)} of {number} never occur in {list(reading.factor_names)}, counted from zero: "
            "cut points around them follow their prior alone, or are not determined. Count levels from zero without "
            "gaps (5 half stars are level 4 of 0 ... 9), or lower the number of levels.",
        )
    for side, what in enumerate(("row", "column")):
        index, num = reading.index[side], len(reading.elements[side])
        if reading.is_coupled[side] or np.unique(level).size < 2:
            continue
        low, high = np.full(num, number), np.full(num, -1)
        np.minimum.at(low, index, level)
        np.maximum.at(high, index, level)
        constant = np.flatnonzero((low == high) & (np.bincount(index, minlength=num) > 1))
        if constant.size:
            yield Remark(
                "one level",
                f"{_named(what, constant)} of {list(reading.sides[side])} have several cells and one level alone: they "
                "tell of no difference, and noise or cut points of their own follow their priors. Leave them out if "
                "they were not answers in earnest.",
            )


def _of_rank(reading: BilinearReading, vectors: tuple[Moments, Moments] | None) -> Iterator[Remark]:
    rank, least = reading.num_products, min(len(elements) for elements in reading.elements)
    if not rank:
        return
    if rank >= least and not any(reading.is_coupled):
        yield Remark(
            "rank",
            f"The rank {rank} is no less than the smaller number of vectors, {least}: products fit any matrix of this "
            "size, and priors alone decide between them. Take a lower rank.",
        )
    if vectors is None:
        return
    # averages over vectors, in the place of those over cells
    own, other = (
        [np.asarray(x)[:, :rank] for x in (side.mean, np.broadcast_to(side.variance, side.mean.shape))]
        for side in vectors
    )
    u, s, v, t = (np.mean(x, 0) for x in (own[0] ** 2, own[1], other[0] ** 2, other[1]))
    signal, noise = u * v, u * t + s * v + s * t
    is_dead = signal <= np.where(noise > 0.0, _LEAST_SIGNAL**2 * noise, 1e-6 * signal.max())
    if is_dead.any():
        yield Remark(
            "died",
            f"{int(is_dead.sum())} of {rank} components have died: their products are zero as far as the posterior can "
            "tell. This is legitimate where the data hold no more of them, and a lower rank gives the same "
            "predictions; where more were expected, other starts (another key) or narrower priors may find them.",
        )


def _named(what: str, numbers: np.ndarray) -> str:
    shown = ", ".join(map(str, numbers[:_MOST_NAMED].tolist())) + (", ..." if numbers.size > _MOST_NAMED else "")
    return f"{counted(numbers.size, what)} ({shown})"
