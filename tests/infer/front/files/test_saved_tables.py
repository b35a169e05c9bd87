"""Tables, columns and labels of pandas in files."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

from numpyro_ext.infer import EP
from numpyro_ext.infer.front.files.archive import read_archive, write_archive

CATEGORIES = pd.Categorical(["b", "a", None, "b"], categories=["a", "b", "never"], ordered=True)
WHEN = pd.to_datetime(["2024-01-01", "2024-06-01", None, "2025-01-01"])
COLUMNS = {
    "numbers": [1.5, np.nan, 3.0, -0.0],
    "halves": np.array([1, 2, 3, 4], np.float32),
    "counts": np.array([1, 2, 3, 4], np.int16),
    "flags": [True, False, True, True],
    "words": ["one", None, "two", "one"],
    "objects": pd.Series(["one", np.nan, None, "one"], dtype=object),
    "string": pd.array(["x", pd.NA, "", "é"], dtype="string"),
    "nullable": pd.array([1, pd.NA, 3, 4], dtype="Int64"),
    "boolean": pd.array([True, pd.NA, False, True], dtype="boolean"),
    "share": pd.array([0.5, pd.NA, 1.5, 2.0], dtype="Float32"),
    "category": CATEGORIES,
    "level": pd.Categorical([3, 1, 1, 2]),
    "when": WHEN,
    "zoned": WHEN.tz_localize("Europe/Zurich"),
    "span": pd.to_timedelta([1, 2, 3, 4], unit="h"),
}
INDICES = {
    "range": pd.RangeIndex(2, 10, 2, name="row"),
    "words": pd.Index(["p", "q", "r", "p"], name="person"),
    "integers": pd.Index([7, 3, 5, 1]),
    "dates": pd.to_datetime(["2024-01-02", "2024-01-01", "2024-01-04", "2024-01-03"]),
    "pairs": pd.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1), ("b", 2)], names=["group", None]),
    "categories": pd.CategoricalIndex(CATEGORIES),
}


def through_a_file(value, tmp_path):
    write_archive(tmp_path / "file.npz", {"value": value})
    return read_archive(tmp_path / "file.npz")["value"]


@pytest.mark.parametrize("index", INDICES)
def test_tables_come_back_as_they_were(index, tmp_path):
    table = pd.DataFrame(COLUMNS).set_axis(INDICES[index])
    pd.testing.assert_frame_equal(through_a_file(table, tmp_path), table)
    pd.testing.assert_index_equal(through_a_file(table.index, tmp_path), table.index)


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_and_arrays_come_back_as_they_were(name, tmp_path):
    column = pd.Series(COLUMNS[name], name=name)
    pd.testing.assert_series_equal(through_a_file(column, tmp_path), column)
    if isinstance(column.dtype, pd.api.extensions.ExtensionDtype):  # others come back as arrays of NumPy
        pd.testing.assert_extension_array_equal(through_a_file(column.array, tmp_path), column.array)


@pytest.mark.parametrize(
    "table",
    [
        pd.DataFrame(index=[1, 2]),
        pd.DataFrame({"a": []}),
        pd.DataFrame([[1, 2.0]], columns=["a", "a"]),
        pd.DataFrame([[1, 2.0]], columns=pd.MultiIndex.from_tuples([("a", 1), ("b", 2)])),
    ],
)
def test_empty_tables_and_repeated_names_come_back(table, tmp_path):
    pd.testing.assert_frame_equal(through_a_file(table, tmp_path), table)


def test_words_and_dates_of_numpy_come_back(tmp_path):
    for array in (np.array(["one", "é"]), np.array(["2024-01-01"], "datetime64[D]"), np.array([1], "timedelta64[s]")):
        found = through_a_file(array, tmp_path)
        assert found.dtype == array.dtype and np.array_equal(found, array)
    with pytest.raises(TypeError, match="value: an array of dtype object. Give words as .astype"):
        through_a_file(np.array(["one"], object), tmp_path)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pd.Series([{1}, {2}], dtype=object), "set, such as"),
        (pd.Series([1, "a"], dtype=object), "int, such as 1"),
        (pd.Series(pd.period_range("2024-01", periods=2, freq="M")), "Period, such as"),
    ],
)
def test_columns_that_no_file_holds_are_named(column, message, tmp_path):
    with pytest.raises(TypeError, match=rf"Cannot save value\['a'\]: values of type {message}"):
        through_a_file(pd.DataFrame({"a": column}), tmp_path)


def test_without_pandas_the_file_says_what_it_holds(tmp_path, monkeypatch):
    write_archive(tmp_path / "file.npz", {"value": pd.DataFrame({"a": [1]})})
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ValueError, match="pip install pandas"):
        read_archive(tmp_path / "file.npz")


def visits(table, num_groups, count=None):
    """Counts of groups that a table names by a category."""
    level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("groups", num_groups):
        effect = numpyro.sample("effect", dist.Normal(0, 0.5))
    rate = jnp.exp(level + effect[table["group"].cat.codes.to_numpy()] + 0.1 * table["x"].to_numpy())
    numpyro.sample("count", dist.Poisson(rate), obs=count)


def test_an_engine_that_ran_on_a_table_is_loaded_and_predicts(tmp_path):
    table = pd.DataFrame({"group": pd.Categorical(["b", "a", "c", "b"]), "x": [0.0, 1.0, 2.0, 3.0]})
    engine = EP(visits, progress_bar=False)
    engine.run(jax.random.key(0), table, 3, pd.Series([1, 2, 0, 3]))
    engine.save(tmp_path / "fit.npz")
    loaded = EP.load(tmp_path / "fit.npz", visits)
    np.testing.assert_array_equal(loaded.posterior["effect"].mean, engine.posterior["effect"].mean)
    # labels have the numbers that they had in the fit: b alone would be the first
    new = pd.DataFrame({"group": pd.Categorical(["b"]), "x": [0.0]})
    mean = loaded.predict(jax.random.key(1), new, 3).posterior["effect"].mean
    np.testing.assert_allclose(mean, engine.predict(jax.random.key(1), new, 3).posterior["effect"].mean)
