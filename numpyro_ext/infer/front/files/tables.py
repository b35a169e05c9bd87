"""Columns, tables, indices and arrays of pandas as arrays, words and numbers that a file may hold, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .content import Content

if TYPE_CHECKING:
    import pandas as pd


def pandas_to_content(value: Any, where: str) -> Content:
    """Content of a table, a column, an index or an array of pandas.

    :param value: holds numbers, words, dates or categories; some may be missing.
    :param where: its name in messages.
    :return: what :func:`pandas_from_content` understands.
    :raises TypeError: for values of another kind, by the name of the column.
    """
    import pandas as pd

    if isinstance(value, pd.DataFrame):
        columns = [value.iloc[:, place] for place in range(value.shape[1])]
        cells = [_values_to_content(column.array, f"{where}[{column.name!r}]") for column in columns]
        labels = {"index": _index_to_content(value.index, where), "columns": _index_to_content(value.columns, where)}
        return {"kind": "table", "cells": cells, **labels}
    if isinstance(value, pd.Series):
        found = {"index": _index_to_content(value.index, where), "values": _values_to_content(value.array, where)}
        return {"kind": "column", "name": value.name, **found}
    if isinstance(value, pd.Index):
        return {"kind": "index", "values": _index_to_content(value, where)}
    return {"kind": "array", "values": _values_to_content(value, where)}


def pandas_from_content(content: Content) -> Any:
    """The object that :func:`pandas_to_content` took apart.

    :raises ValueError: if pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ValueError("The file holds a table of pandas, which is not installed: pip install pandas.") from error
    kind = content["kind"]
    if kind == "table":
        columns = dict(enumerate(_values_from_content(cells) for cells in content["cells"]))
        table = pd.DataFrame(columns, index=_index_from_content(content["index"]))
        table.columns = _index_from_content(content["columns"])
        return table
    if kind == "column":
        index = _index_from_content(content["index"])
        return pd.Series(_values_from_content(content["values"]), index, name=content["name"])
    return (_index_from_content if kind == "index" else _values_from_content)(content["values"])


def _index_to_content(index: pd.Index, where: str) -> Content:
    import pandas as pd

    if isinstance(index, pd.RangeIndex):
        return {"range": [index.start, index.stop, index.step], "name": index.name}
    if isinstance(index, pd.MultiIndex):
        levels = [index.get_level_values(place) for place in range(index.nlevels)]
        return {"levels": [_index_to_content(level, where) for level in levels]}
    return {"values": _values_to_content(index.array, f"labels of {where}"), "name": index.name}


def _index_from_content(content: Content) -> pd.Index:
    import pandas as pd

    if "range" in content:
        return pd.RangeIndex(*content["range"], name=content["name"])
    if "levels" in content:
        return pd.MultiIndex.from_arrays([_index_from_content(level) for level in content["levels"]])
    return pd.Index(_values_from_content(content["values"]), name=content["name"])


def _values_to_content(values: Any, where: str) -> Content:
    import pandas as pd

    if type(values) is pd.arrays.NumpyExtensionArray:  # and not of words, whose array is a subclass
        values = values.to_numpy()
    dtype = values.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        categories = _values_to_content(values.categories.array, where)
        return {"codes": np.asarray(values.codes), "categories": categories, "is_ordered": dtype.ordered}
    if isinstance(dtype, pd.DatetimeTZDtype):
        return {"dates": values.tz_convert("UTC").tz_localize(None).to_numpy(), "zone": str(dtype.tz)}
    if isinstance(dtype, np.dtype) and dtype.kind in "biufcmM":
        return {"values": np.asarray(values)}
    missing = np.asarray(pd.isna(values))
    if getattr(dtype, "kind", "O") in "biuf" and hasattr(dtype, "numpy_dtype"):  # with a place for missing numbers
        numbers = values.to_numpy(dtype.numpy_dtype, na_value=dtype.type(0))
        return {"numbers": numbers, "missing": missing, "dtype": str(dtype)}
    other = next((value for value in np.asarray(values, object)[~missing] if not isinstance(value, str)), None)
    if other is not None:
        raise TypeError(
            f"Cannot save {where}: values of type {type(other).__name__}, such as {other!r}. Files hold numbers, "
            "words, dates and categories: give the model a table without this column, or with its values as one of "
            "these."
        )
    codes, words = pd.factorize(np.asarray(values, object))
    if dtype == np.dtype(object):
        codes[[value is None for value in values]] = -2
    return {"words": list(words), "codes": codes, "dtype": str(dtype)}


def _values_from_content(content: Content) -> Any:
    import pandas as pd

    if "categories" in content:
        categories = pd.Index(_values_from_content(content["categories"]))
        return pd.Categorical.from_codes(content["codes"], categories, ordered=content["is_ordered"])
    if "dates" in content:
        return pd.DatetimeIndex(content["dates"]).tz_localize("UTC").tz_convert(content["zone"]).array
    if "numbers" in content:
        found = pd.array(content["numbers"], dtype=content["dtype"])
        found[content["missing"]] = pd.NA
        return found
    if "words" in content:
        words = np.array([*content["words"], None, np.nan], object)[content["codes"]]
        # pandas guesses the type of arrays of objects, and not of an index
        return (
            pd.Index(words, dtype=object) if content["dtype"] == "object" else pd.array(words, dtype=content["dtype"])
        )
    return content["values"]
