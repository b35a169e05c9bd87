"""Columns and labels of the tables that a model was fitted to, so that later tables are taken by these names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...structure.model.running.pandas_arguments import is_pandas
from .running.progress import warn

Columns = Mapping[str, list[Any]]
"""Names of the columns of each argument that is a table of pandas, by the name of the argument."""


def columns_of(model: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Columns:
    """Names of the columns of all arguments that are tables, where each column has a name of its own."""
    found = {name: _names(value) for name, value in _by_name(model, args, kwargs).items() if is_table(value)}
    return {name: names for name, names in found.items() if len(set(names)) == len(names)}


def in_columns(
    columns: Columns,
    fitted: tuple[tuple[object, ...], Mapping[str, object]],
    model: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, Any],
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """Arguments whose tables have the columns of the fit in their order, as a model may take tables for arrays, and
    whose labels have the numbers that they had in the fit.

    Columns that the fit has not seen are left out with a warning.

    :param columns: of the fit, from :func:`columns_of`.
    :param fitted: arguments of the fit.
    :raises ValueError: for a table of as many columns or more that lacks some of them.
    """
    places = {id(value): name for name, value in _by_name(model, args, kwargs).items() if is_pandas(value)}
    before = _by_name(model, *fitted)

    def as_fitted(value: Any) -> Any:
        name = places.get(id(value))
        return value if name is None else labelled_as(before.get(name), ordered(value, name))

    def ordered(value: Any, name: str) -> Any:
        wanted = columns.get(name) if is_table(value) else None
        if wanted is None or (names := _names(value)) == wanted:
            return value
        missing = [column for column in wanted if column not in names]
        if not missing:
            others = [column for column in names if column not in wanted]
            if others:
                warn(f"The columns {others} of the table {name!r} are not in that of the fit, and are left out.")
            return value.iloc[:, [names.index(column) for column in wanted]]
        if len(names) >= len(wanted):
            raise ValueError(
                f"The table {name!r} has the columns {names}, and that of the fit has {wanted}: {missing} are missing. "
                "Give the columns of the fit, in any order."
            )
        return value

    return tuple(map(as_fitted, args)), {name: as_fitted(value) for name, value in kwargs.items()}


def labelled_as(fitted: Any, value: Any) -> Any:
    """A column or table of pandas whose labels stand for the numbers that they have in another one.

    A ``Categorical`` numbers the labels that it happens to hold, so that one of fewer people, or in another order, has
    other numbers for the same labels. Labels that the other one lacks come behind its own.

    :param fitted: what the labels are compared with; anything but columns and tables of pandas leaves all as it is.
    :param value: column or table with the same columns.
    """
    if not is_pandas(fitted) or not is_pandas(value):
        return value
    if np.ndim(value) == 1:
        return _labelled(fitted, value) if np.ndim(fitted) == 1 else value
    if not (is_table(fitted) and fitted.columns.is_unique and value.columns.is_unique):
        return value
    columns = {name: _labelled(fitted[name], value[name]) for name in value.columns.intersection(fitted.columns)}
    changed = {name: column for name, column in columns.items() if column.dtype != value[name].dtype}
    if changed:
        value = value.copy(deep=False)
        for name, column in changed.items():
            value[name] = column
    return value


def _labelled(fitted: Any, column: Any) -> Any:
    known, labels = _categories(fitted), _categories(column)
    if known is None:
        is_number = labels is not None and labels.dtype.kind in "biuf" and fitted.dtype.kind in "biuf"
        return column.astype(float if column.isna().any() else labels.dtype) if is_number else column
    if labels is None:
        if column.dtype.kind in "biuf" and known.dtype.kind not in "biuf":  # codes
            return column
        column = column.astype("category")
        labels = _categories(column)
    if list(labels) == list(known):
        return column
    here = set(column.dropna().unique())
    others = [label for label in labels if label not in known and label in here]
    return getattr(column, "cat", column).set_categories([*known, *others], ordered=fitted.dtype.ordered)


def _categories(column: Any) -> Any:
    return getattr(column.dtype, "categories", None)


def _by_name(model: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the parameters that they are for."""
    try:
        return dict(inspect.signature(model).bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # which the model will say better
        return {}


def is_table(value: Any) -> bool:
    """True for a table of pandas."""
    return is_pandas(value) and np.ndim(value) == 2


def _names(table: Any) -> list[Any]:
    """Names of the columns, as a file may hold them."""
    return [name if isinstance(name, str) else str(name) for name in table.columns]
