"""Frozen dataclasses of arrays that pass through ``jit``, ``vmap`` and ``grad``, and arrays in their static part."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np

from .saved_names import saved_as

_Class = TypeVar("_Class", bound=type)


@dataclass_transform(frozen_default=True)
def frozen_pytree(cls: _Class) -> _Class:
    """Class decorator: freeze as a dataclass and register as a pytree whose fields are all data.

    Fields with ``metadata={"static": True}`` are compared instead, and so is the class. With
    ``jax.tree_util.register_dataclass`` it would not be: the structures of two classes with as many fields are equal
    there (JAX 0.10 to 0.12), and ``jit`` now and then runs what it has compiled for the one on the other.
    """
    # The same class, with methods added to it.
    made: Any = dataclasses.dataclass(frozen=True, eq=False)(cls)
    names = [f.name for f in dataclasses.fields(made) if not f.metadata.get("static")]
    static = [f.name for f in dataclasses.fields(made) if f.metadata.get("static")]

    def flatten_with_keys(self: object) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children = tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names)
        return children, (made, *(getattr(self, name) for name in static))

    def flatten(self: object) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(self, name) for name in names), (made, *(getattr(self, name) for name in static))

    def unflatten(auxiliary: tuple[object, ...], children: Iterable[object]) -> Any:
        # Not by the constructor: the leaves may be placeholders.
        self = object.__new__(made)
        for name, value in (*zip(names, children, strict=True), *zip(static, auxiliary[1:], strict=True)):
            object.__setattr__(self, name, value)
        return self

    jax.tree_util.register_pytree_with_keys(made, flatten_with_keys, unflatten, flatten)
    return cls


@saved_as("numpyro_ext.FixedArray")
@dataclasses.dataclass(frozen=True, eq=False)
class FixedArray:
    """NumPy array that is compared and hashed by its content, so that ``jit`` takes it as a static value.

    The array is not copied; it must not be written to afterwards.
    """

    array: np.ndarray

    @functools.cached_property
    def digest(self) -> bytes:
        """Digest of dtype, shape and numbers."""
        digest = hashlib.blake2b(f"{self.array.dtype}{self.array.shape}".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.array).tobytes())
        return digest.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedArray) and (self is other or self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)
