"""Arguments of pandas as the arrays that JAX would make of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import numpy as np

from ...errors import ModelStructureError, Reason
from .execution import ModelCall

_Result = TypeVar("_Result")
_FAILURES = (AssertionError, IndexError, TypeError, ValueError)
"""Errors that models raise on arguments that they do not work with, and those that readings make of them."""


def is_pandas(value: object) -> bool:
    """True if a value is a column, an index or a table of pandas."""
    return type(value).__module__.split(".")[0] == "pandas" and hasattr(value, "to_numpy")


def with_arrays(call: ModelCall, *, most_axes: int = 2) -> ModelCall | None:
    """The call with arrays of NumPy in the place of columns and tables of numbers; ``None`` if it has none.

    :param int most_axes: 1 to leave tables as they are.
    :raises ModelStructureError: for a column of anything but numbers, by the name of the argument.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path((call.args, call.kwargs))
    arrays = [_as_array(value) if is_pandas(value) and np.ndim(value) <= most_axes else value for _, value in leaves]
    for array, (path, value) in zip(arrays, leaves, strict=True):
        if is_pandas(array) and np.ndim(value) == 1:
            raise ModelStructureError(
                f"argument {_name(call, path)} is a {type(value).__name__} of pandas of {value.dtype}, which is no "
                "type of numbers: give codes counted from zero for labels (.cat.codes, or pandas.factorize), and "
                "numbers for dates.",
                reason=Reason.DATA,
            )
    if all(array is value for array, (_, value) in zip(arrays, leaves, strict=True)):
        return None
    args, kwargs = jax.tree.unflatten(structure, arrays)
    return call._replace(args=args, kwargs=kwargs)


def check_rows(arguments: Iterable[tuple[str, object]]) -> None:
    """Refuse columns and tables whose rows have the same labels in another order, where rows are taken by their places.

    :param arguments: names in the message, and values, of pandas or not.
    :raises ModelStructureError: naming the two arguments.
    """
    seen: list[tuple[str, Any]] = []
    for argument, value in arguments:
        labels = getattr(value, "index", None) if is_pandas(value) else None
        if labels is None or not labels.is_unique:
            continue
        for name, others in seen:
            if len(labels) == len(others) and not labels.equals(others) and labels.isin(others).all():
                raise ModelStructureError(
                    f"the rows of argument {argument} have the same labels as those of {name} in another order, such "
                    f"as {list(labels[:3])} and {list(others[:3])}, and rows are taken by their places: give "
                    f"{argument} in the order of the other, .loc[its index], or .to_numpy() of both if they are in one "
                    "order already.",
                    reason=Reason.DATA,
                )
        if not any(labels.equals(others) for _, others in seen):
            seen.append((argument, labels))


def run_or_with_arrays(call: ModelCall, run: Callable[[ModelCall], _Result]) -> tuple[ModelCall, _Result]:
    """Run a call; where it fails on columns and tables of pandas, run it :func:`with_arrays`.

    A model may work with a table itself; where it does not, it may ask for what JAX would make of it. Where it takes
    covariates from a table by their names and outcomes as a column, columns alone become arrays.

    :param run: what is done with the call.
    :return: the call that ran, and what came of it.
    :raises ModelStructureError: if rows of two tables or columns have the same labels in another order.
    :raises Exception: that of the call with arrays, unless this fails for want of a table: then that of the call as it
        is, or with arrays in the place of its columns.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path((call.args, call.kwargs))
    check_rows((_name(call, path), value) for path, value in leaves)
    try:
        return call, run(call)
    except _FAILURES as error:
        plain = with_arrays(call)
        if plain is None:
            raise
        try:
            return plain, run(plain)
        except ModelStructureError as other:
            # Of the call as it is, JAX quotes whole columns.
            if other.reason is not Reason.EXECUTION or not _asks_for_a_table(other.__cause__):
                raise other from other.__cause__
        columns = with_arrays(call, most_axes=1)
        if columns is None:
            raise error from error.__cause__
        return columns, run(columns)


def _asks_for_a_table(error: BaseException | None) -> bool:
    """Tell whether a model asked for what arrays do not have: an attribute, or a column by its name."""
    return isinstance(error, AttributeError | KeyError | IndexError)


def _as_array(value: Any) -> object:
    """The numbers of a pandas object, or itself if it holds something else."""
    found = np.asarray(value)
    kinds = [getattr(dtype, "kind", "O") for dtype in np.ravel(value.dtypes if found.ndim == 2 else value.dtype)]
    if found.dtype == object and set(kinds) <= set("iufb"):  # of types with a place for missing numbers
        found = value.to_numpy(dtype=float, na_value=np.nan)
    return found if found.dtype.kind in "iufb" else value


def _name(call: ModelCall, path: Any) -> str:
    is_keyword, place = path[0].idx == 1, path[1]
    inner = jax.tree_util.keystr(tuple(path[2:]))
    if is_keyword:
        return f"{place.key!r}{inner}"
    names = list(inspect.signature(call.model).parameters)
    return f"{names[place.idx]!r}{inner}" if place.idx < len(names) else f"{place.idx + 1}{inner}"
