"""Columns of the tables that a model was fitted to, so that later tables are taken by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...structure.model.running.pandas_arguments import is_pandas
from .running.progress import warn

__all__ = ["Columns", "columns_of", "in_columns"]

Columns = Mapping[str, list[Any]]
"""Names of the columns of each argument that is a table of pandas, by the name of the argument."""


def columns_of(model: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Columns:
    """Names of the columns of all arguments that are tables, where each column has a name of its own."""
    found = {name: _names(value) for name, value in _by_name(model, args, kwargs).items() if _is_table(value)}
    return {name: names for name, names in found.items() if len(set(names)) == len(names)}


def in_columns(
    columns: Columns, model: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """Arguments whose tables have the columns of the fit in their order, as a model may take tables for arrays.

    Columns that the fit has not seen are left out with a warning.

    :param columns: of the fit, from :func:`columns_of`.
    :raises ValueError: for a table of as many columns or more that lacks some of them.
    """
    places = {id(value): name for name, value in _by_name(model, args, kwargs).items() if _is_table(value)}

    def ordered(value: Any) -> Any:
        name = places.get(id(value))
        wanted = columns.get(name) if name is not None else None
        names = _names(value) if wanted is not None else None
        if wanted is None or names is None or names == wanted:
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

    return tuple(map(ordered, args)), {name: ordered(value) for name, value in kwargs.items()}


def _by_name(model: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the parameters that they are for."""
    try:
        return dict(inspect.signature(model).bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # which the model will say better
        return {}


def _is_table(value: Any) -> bool:
    return is_pandas(value) and np.ndim(value) == 2


def _names(table: Any) -> list[Any]:
    """Names of the columns, as a file may hold them."""
    return [name if isinstance(name, str) else str(name) for name in table.columns]
