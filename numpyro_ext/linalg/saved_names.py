"""Names of classes in files: an object is written as its fields, under a name that stays when its class moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)
_CLASSES: dict[str, type] = {}
_NAMES: dict[type, str] = {}


def saved_as(name: str) -> Callable[[_Class], _Class]:
    """Class decorator: engines save and load arguments of this class, as their fields.

    For dataclasses (:func:`~numpyro_ext.linalg.frozen_pytree` makes them) and NamedTuples. The class must be known
    under the same name when the file is read, in whatever module it then lives.

    >>> from jax import Array
    >>> from numpyro_ext.linalg import LinearOperator, frozen_pytree, saved_as
    >>> @saved_as("my_project.Doubling")
    ... @frozen_pytree
    ... class Doubling(LinearOperator):
    ...     example: Array
    ...     shape = property(lambda self: 2 * self.example.shape)
    ...
    ...     def matvec(self, x):
    ...         return 2.0 * x

    :param str name: what files call the class; begin it with the name of your own project.
    :raises TypeError: if the class is neither a dataclass nor a NamedTuple.
    :raises ValueError: if another class has this name.
    """

    def register(cls: _Class) -> _Class:
        if field_names(cls) is None:
            raise TypeError(
                f"saved_as: {cls.__qualname__} must be a dataclass or a NamedTuple, which are their fields."
            )
        other = _CLASSES.get(name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"saved_as: {name!r} is the name of {other.__module__}.{other.__qualname__}.")
        _CLASSES[name], _NAMES[cls] = cls, name
        return cls

    return register


def class_of(name: str) -> type | None:
    """The class of this name in files, if there is one."""
    return _CLASSES.get(name)


def name_of(cls: type) -> str | None:
    """The name of a class in files, if it has one."""
    return _NAMES.get(cls)


def field_names(cls: type) -> tuple[str, ...] | None:
    """Names of the fields of a dataclass or NamedTuple, ``None`` for other classes."""
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    fields: Any = getattr(cls, "_fields", None)
    return fields if issubclass(cls, tuple) else None
