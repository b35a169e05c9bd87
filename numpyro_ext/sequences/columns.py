"""Columns of a log of events: labels as numbers, and times, refused where one is missing."""

from __future__ import annotations

from datetime import date
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def codes_of_labels(name: str, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """The different labels in order, and the number of each label among them."""
    values = np.asarray(labels)
    if values.ndim != 1:
        raise ValueError(f"from_events: {name} is one column; got the shape {values.shape}.")
    if (missing := _missing(labels)).any():
        raise ValueError(
            f"from_events: {name} has {missing.sum()} missing labels, the first in row {int(np.argmax(missing))}. "
            "Leave these events out, or give them a label."
        )
    if values.dtype == object and all(isinstance(value, str) for value in values):
        values = values.astype(str)
    try:
        found, codes = np.unique(values, return_inverse=True)
    except TypeError as error:
        kinds = sorted({type(value).__name__ for value in values})
        raise ValueError(f"from_events: {name} mixes labels that have no order ({', '.join(kinds)}).") from error
    return found, codes


def _missing(column: Any) -> np.ndarray:
    """True where a column has no value; a value that is missing is not equal to itself."""
    values = np.asarray(column)
    if values.dtype == object or isinstance(column, list | tuple):  # NumPy makes "nan" of a nan among strings
        return np.array([_is_missing(value) for value in column], np.bool_)
    return np.asarray(values != values)  # noqa: PLR0124


def _is_missing(value: object) -> bool:
    try:
        return value is None or bool(value != value)  # noqa: PLR0124
    except TypeError:  # pandas.NA has no truth value
        return True


def ordered_times(time: ArrayLike, number: int) -> np.ndarray:
    """Times of so many events, as an array that can be sorted."""
    at = np.asarray(time)
    if at.shape != (number,):
        raise ValueError(f"from_events: time has the shape {at.shape}; there are {number} events.")
    if (missing := _missing(time)).any():
        raise ValueError(
            f"from_events: {missing.sum()} events have no time, the first in row {int(np.argmax(missing))}."
        )
    if at.dtype.kind == "O" and all(isinstance(value, date | Real) for value in at):  # dates with a time zone as well
        try:
            return np.unique(at, return_inverse=True)[1]
        except TypeError as error:
            raise ValueError(f"from_events: time mixes kinds that have no order ({error}).") from error
    if at.dtype.kind not in "iufmM":
        raise ValueError("from_events: time is a column of numbers or of dates (numpy.datetime64, pandas.to_datetime).")
    return at
