"""Equality by content: two objects are equal where all that they hold is, arrays by their numbers.

What compiled functions are made of is compared in this way, so nobody writes down what a comparison has to look at.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

_Value = TypeVar("_Value")

dtype_name = functools.cache(str)
"""Name of a dtype: NumPy makes it anew each time, which takes longer than all else that an array of few numbers asks
for."""
_BY_THEMSELVES = str | bytes | type | types.FunctionType | types.BuiltinFunctionType | None


class ByContent:
    """Base of values that are equal where they are of one class and hold the same.

    They do not change once made; what is kept of a computation (a cached property) is no part of them.

    >>> class Rows(ByContent):
    ...     def __init__(self, numbers):
    ...         self.numbers = np.array(numbers)
    >>> Rows([1, 2]) == Rows([1, 2]), Rows([1, 2]) == Rows([1, 3]), len({Rows([1]), Rows([1])})
    (True, False, 1)
    """

    @functools.cached_property
    def content_key(self) -> Hashable:
        """All that it holds."""
        return _of_fields(self) if dataclasses.is_dataclass(self) else _of_attributes(self)

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and self.content_key == other.content_key)

    def __hash__(self) -> int:
        return hash(self.content_key)


class Structure(Generic[_Value]):
    """Structure of an object that has data beside it: the object without them, compared by all that is left.

    :param value: the object without its data.
    """

    def __init__(self, value: _Value) -> None:
        self.value = value

    @functools.cached_property
    def _content(self) -> Hashable:
        return content_of(self.value)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._content)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Structure) and self._hash == other._hash and self._content == other._content
        )

    def __hash__(self) -> int:
        return self._hash


def array_key(value: Any) -> tuple[Any, ...]:
    """Equal for arrays, and random keys, of the same dtype, shape and values."""
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(value) if is_key else value)
    values = array.tobytes()
    if len(values) > 64:
        values = hashlib.blake2b(values, digest_size=16).digest()
    return ("key" if is_key else dtype_name(array.dtype), array.shape, values)


def content_of(value: Any) -> Hashable:
    """Hashable that is equal for values which hold the same.

    Functions are themselves. Fields of dataclasses that are not compared are left out; an object may say itself what
    it is made of, by an attribute ``content_key``.

    >>> content_of({"a": [np.ones(2)]}) == content_of({"a": [np.ones(2)]}), content_of(1) == content_of(True)
    (True, False)
    """
    if isinstance(value, _BY_THEMSELVES):
        return value
    if isinstance(value, bool | int | float | complex):
        return type(value), value
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return array_key(value)
    kind = type(value)
    if isinstance(value, tuple | list):
        return kind, tuple(map(content_of, value))
    if isinstance(value, dict):
        return kind, tuple((name, content_of(part)) for name, part in value.items())
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(content_of, value))
    if isinstance(value, functools.partial):
        return kind, content_of(value.func), content_of(value.args), content_of(value.keywords)
    if isinstance(value, slice):
        return kind, value.start, value.stop, value.step
    if isinstance(value, jax.tree_util.PyTreeDef):  # NumPyro's distributions keep arrays beside their leaves
        return kind, content_of(value.node_data()), tuple(map(content_of, value.children()))
    if hasattr(kind, "content_key"):
        return kind, value.content_key
    if dataclasses.is_dataclass(value):
        return kind, _of_fields(value)
    if kind.__hash__ is object.__hash__ or kind.__hash__ is None:
        leaves, tree = jax.tree.flatten(value)
        if not (len(leaves) == 1 and leaves[0] is value):  # a tree, which may have no leaves
            return kind, content_of(tree), tuple(map(content_of, leaves))
        if hasattr(value, "__dict__") and not callable(value):
            return kind, _of_attributes(value)
    return value if _has_hash(value) else _Same(value)


def shapes_of(tree: Any) -> Any:
    """Tree with shapes and dtypes in the place of arrays, as a compiled function sees them."""

    def shape_of(leaf: Any) -> Any:
        seen = leaf if isinstance(leaf, np.ndarray) else jax.typeof(leaf)
        return _shape(seen.shape, seen.dtype, getattr(seen, "weak_type", False), str(jnp.result_type(float)))

    return jax.tree.map(shape_of, tree)


@functools.lru_cache(maxsize=4096)
def _shape(shape: tuple[int, ...], dtype: Any, weak_type: bool, precision: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype as JAX has them, which takes longer to make than to look up."""
    dtype = dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)


def _of_fields(value: Any) -> Hashable:
    return tuple(content_of(getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare)


def _of_attributes(value: object) -> Hashable:
    kind, found = type(value), vars(value).items()
    parts = {n: v for n, v in found if not isinstance(getattr(kind, n, None), functools.cached_property)}
    return tuple((name, content_of(parts[name])) for name in sorted(parts))


def _has_hash(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


class _Same:
    """An object that is equal to nothing but itself, as nobody knows what it holds."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)
