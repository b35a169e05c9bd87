"""The store of compiled programs: what it takes for equal, and what it keeps alive."""

import gc
import weakref

import numpy as np
import pytest
from jax import ShapeDtypeStruct

from numpyro_ext.compilation import store
from numpyro_ext.compilation.content import Structure
from numpyro_ext.compilation.store import Found, clear, counts, shared


class Table:
    """Data with a structure."""

    def __init__(self, data):
        self.data = data

    @property
    def structure(self):
        return Structure(type(self)(ShapeDtypeStruct(self.data.shape, self.data.dtype)))


class OtherTable(Table):
    pass


def power(table, exponent, *, scale=1.0):
    assert isinstance(table.data, ShapeDtypeStruct)
    return lambda data: scale * data**exponent


def test_what_a_function_depends_on_is_its_key():
    clear(power)
    data = np.arange(3.0)
    squares = shared(power, Table(data), 2)
    assert shared(power, Table(data + 1.0), 2) is squares
    others = [
        shared(power, Table(np.arange(4.0)), 2),
        shared(power, Table(data), 3),
        shared(power, Table(data), 2, scale=2.0),
        shared(power, OtherTable(data), 2),
    ]
    assert len({id(found) for found in (squares, *others)}) == 5
    np.testing.assert_array_equal(others[2](data), [0.0, 2.0, 8.0])
    before = counts()[f"{__name__}.power"]
    clear(power)
    assert shared(power, Table(data), 2) is not squares
    assert counts()[f"{__name__}.power"] == before + 1


def test_functions_that_may_see_more_than_their_arguments_are_refused():
    number = 3
    with pytest.raises(TypeError, match="move it to the top of its module"):
        shared(lambda: number)


@pytest.mark.thorough
def test_no_data_are_kept():
    data = np.arange(5.0)
    table, is_alive = Table(data), weakref.ref(data)
    shared(power, table, 2)
    del table, data
    gc.collect()
    assert is_alive() is None


def test_what_is_asked_for_stays(monkeypatch):
    monkeypatch.setattr(store, "_kept", type(store._kept)())
    first = shared(Found, 0)
    for number in range(1, store._SIZE + 2):
        assert shared(Found, 0) is first
        shared(Found, number)
    assert shared(Found, 4).value is None and len(store._kept) == store._SIZE
    for number in range(store._SIZE):
        shared(Found, -1 - number)
    assert shared(Found, 0) is not first
