"""Observations of a pool: their places, their values, and which of them are seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from ..outcomes.outlooks import Outlook
from .single import Candidate


class Places(NamedTuple):
    """Observations by site, numbered in C order; values and marks change in place."""

    shapes: dict[str, tuple[int, ...]]
    values: dict[str, np.ndarray]
    """Value of each observation, seen or not, shape ``(n,)``."""
    seen: dict[str, np.ndarray]
    """True where it is in use, shape ``(n,)``."""

    @classmethod
    def of(cls, shapes: dict[str, tuple[int, ...]], values: Mapping[str, Any], masks: Mapping[str, Any]) -> Self:
        """Places of the observed sites of a model, from arrays of their shapes."""
        flat = {n: np.array(value, float).reshape(-1) for n, value in values.items()}
        return cls(shapes, flat, {n: np.array(mask).reshape(-1) for n, mask in masks.items()})

    @property
    def num_seen(self) -> int:
        """Number of observations in use."""
        return sum(int(seen.sum()) for seen in self.seen.values())

    @property
    def num_left(self) -> int:
        """Number of observations that can still be made."""
        return sum(int((~seen).sum()) for seen in self.seen.values())

    def numbers_seen(self, site: str | None) -> np.ndarray:
        """Numbers of the observations of a site that are in use; the site needs no name where there is one."""
        if site is None and len(self.seen) > 1:
            raise ValueError(f"Name one of the sites {list(self.seen)}.")
        return np.flatnonzero(self.seen[site or next(iter(self.seen))])

    def in_shapes(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Values and marks in the shapes of the sites."""
        first, second = (
            {site: part[site].reshape(shape) for site, shape in self.shapes.items()}
            for part in (self.values, self.seen)
        )
        return first, second

    def without_seen(self, site: str, scores: Any) -> Any:
        """Scores, minus infinity where an observation is in use; those of other shapes as they are."""
        if np.shape(scores) != self.shapes.get(site):
            return scores
        return np.where(self.seen[site].reshape(self.shapes[site]), -np.inf, np.asarray(scores))

    def number(self, site: str, place: object) -> int:
        """Number of a place, which is an index or a tuple of these."""
        return int(np.ravel_multi_index(place if isinstance(place, tuple) else (place,), self.shapes[site]))

    def candidate(self, place: object) -> tuple[str, int]:
        """Site and number of an observation that can still be made.

        :raises ValueError: if there is none at that place, or it has a value already.
        """
        if isinstance(place, Candidate):
            site, place = place.site, place.place
        elif len(self.shapes) == 1:
            (site,) = self.shapes
        elif isinstance(place, tuple) and place and place[0] in self.shapes:
            site, place = place[0], place[1]
        else:
            raise ValueError(f"Observations belong to one of {list(self.shapes)}: tell (site, place), got {place!r}.")
        index = place if isinstance(place, tuple) else (place,)
        try:
            index = tuple(int(i) for i in index if int(i) == i)
            number = self.number(site, index)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place!r} is no place in site {site!r} of shape {self.shapes[site]}.") from error
        if self.seen[site][number]:
            raise ValueError(f"The observation at {place!r} of site {site!r} has a value already.")
        return site, number

    def put(self, site: str, number: int, value: float, is_seen: bool = True) -> None:
        """Write a value and its mark."""
        self.values[site][number], self.seen[site][number] = value, is_seen

    def restore(self, values: Mapping[str, np.ndarray], seen: Mapping[str, np.ndarray]) -> list[tuple[str, int, float]]:
        """Take values and marks of the same pool, and list the observations that were not in use before.

        :raises ValueError: if they are those of another pool.
        """
        sizes, others = ({n: len(x) for n, x in part.items()} for part in (self.values, values))
        if sizes != others:
            raise ValueError(f"The saved design has observations {others} by site, and the engine's run {sizes}.")
        lost = sum(int((self.seen[site] & ~seen[site]).sum()) for site in seen)
        if lost:
            raise ValueError(f"{lost} observations of the engine's run are not among those of the saved design.")
        new = [(site, int(n)) for site in seen for n in np.flatnonzero(seen[site] & ~self.seen[site])]
        for site in seen:
            self.values[site][:], self.seen[site][:] = values[site], seen[site]
        return [(site, n, float(values[site][n])) for site, n in new]


def checked_value(outlook: Outlook, number: int, value: object) -> float:
    """Log predictive density of a value, which has to be one of the support.

    :raises ValueError: if it is none, or no finite number.
    """
    try:
        told = np.asarray(value, float)
    except (TypeError, ValueError):
        told = np.asarray(np.nan)
    if told.ndim != 0 or not np.isfinite(told):
        raise ValueError(f"The value of {outlook.name!r} must be one finite number, got {value!r}.")
    found = float(outlook.log_predictive(np.array([number]), told[None])[0])
    if found == -np.inf:
        raise ValueError(f"{value!r} is no value that observation {number} of site {outlook.name!r} could have.")
    return found
