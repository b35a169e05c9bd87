"""Values in an equation that its printed parameters do not show, so that no two are taken for one another; and numbers
that it shows and that change from run to run, which are data."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ...compilation.content import array_key
from ...compilation.store import shared

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SHOWN_IN_PART = ClosedJaxpr | Jaxpr | jax.Array | np.ndarray
"""Among the parameters of an equation; those with a derivative rule have a body beside it."""


class Fingerprint:
    """A key of many parts, of which hash and text are computed once.

    >>> Fingerprint(("add", 1)) == Fingerprint(("add", 1)), Fingerprint(("add", 1)) == Fingerprint(("add", 2))
    (True, False)
    """

    def __init__(self, parts: tuple[object, ...]) -> None:
        self.parts = parts

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.parts)

    @functools.cached_property
    def text(self) -> str:
        """See :func:`stable_text`."""
        return stable_text(self.parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Fingerprint) and self._hash == other._hash and self.parts == other.parts
        )

    def __repr__(self) -> str:
        return f"Fingerprint({self.parts})"


def captured(params: Mapping[str, object]) -> tuple[Any, ...]:
    """Arrays inside the bodies of an equation's loops and branches, and what derivative rules and callbacks hold.

    A function under ``jit`` keeps the arrays that it closes over in its body, which is printed without them; of a
    derivative rule and a function of the host nothing is printed. Globals that a rule reads are not seen, as ``jit``
    does not see them.

    :param params: of the equation.
    :return: hashable, equal where what was found is.
    """
    found: list[Any] = []
    if any(isinstance(value, _SHOWN_IN_PART) or callable(value) or _are_bodies(value) for value in params.values()):
        for name in sorted(params):
            _collect(params[name], found, {}, is_own=False)
    return tuple(found)


def _are_bodies(value: object) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and isinstance(value[0], _SHOWN_IN_PART)


def stable_text(key: object) -> str:
    """A key of programs as text that is the same in another process, for states on disk.

    :param key: of tuples, text, bytes and numbers; of anything else only its kind is written.
    """
    if isinstance(key, Fingerprint):
        return key.text
    if isinstance(key, tuple):
        return f"({','.join(map(stable_text, key))})"
    if isinstance(key, str):
        return _ADDRESS.sub("", key)
    if isinstance(key, types.CodeType):
        return stable_text((key.co_name, key.co_code, key.co_consts))
    return repr(key) if isinstance(key, bool | int | float | bytes | None) else type(key).__name__


def _collect(value: object, found: list[object], seen: dict[int, object], *, is_own: bool) -> None:
    """:param is_own: whether it is held by a function of a user, not by JAX, whose caches are let be."""
    if isinstance(value, jax.core.Tracer) or id(value) in seen:
        return
    if isinstance(value, jax.Array | np.ndarray):
        found.append(array_key(value))
        return
    if isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        if is_own:
            found.append(value)
        return
    seen[id(value)] = value  # which holds it, so that no other object gets its identity
    parts: Iterable[Any] = ()
    if isinstance(value, ClosedJaxpr | Jaxpr):  # the two are one in JAX 0.12
        parts = (*getattr(value, "consts", ()), *_inside(value))
    elif isinstance(value, types.FunctionType):
        is_own = not _is_of_jax(value)
        if is_own:
            found.append(value.__code__)
        parts = (*_contents(value), *(value.__defaults__ or ()))
    elif isinstance(value, types.MethodType):
        parts = (value.__func__,)
        if not _is_of_jax(value.__func__) and isinstance(value.__self__, Hashable):
            found.append(value.__self__)
    elif dataclasses.is_dataclass(value) and callable(value):  # a function of the host, as JAX keeps it
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
    elif hasattr(value, "transforms") and hasattr(value, "f"):  # a function with JAX's transformations around it
        parts = (value.f, *(part for transform in value.transforms for part in transform[1]))
    elif isinstance(value, tuple) and not hasattr(value, "_fields"):
        parts = value
    elif is_own and isinstance(value, list | dict):
        parts = value.values() if isinstance(value, dict) else value
    for part in parts:
        _collect(part, found, seen, is_own=is_own)


def _is_of_jax(function: object) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("jax.")


def _inside(jaxpr: ClosedJaxpr | Jaxpr) -> Iterable[object]:
    for eqn in jaxpr.eqns:
        yield from (atom.val for atom in eqn.invars if isinstance(atom, Literal) and np.shape(atom.val))
        yield from eqn.params.values()


def _contents(function: types.FunctionType) -> Iterable[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


ELEMENTWISE = frozenset(
    "abs add add_any broadcast_in_dim convert_element_type copy cos digamma div eq erf erfc erf_inv exp expm1 ge gt"
    " integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg reshape rsqrt select_n sign sin sqrt"
    " square sub tanh".split()
)
"""Primitives to which a number in a program and one among its data are the same. In others, such as powers, what an
operation is may depend on it."""


class _Seen:
    """The numbers that a program had when it was last made, and which of them have changed at any time."""

    def __init__(self, hash_without: int, number: int) -> None:
        self.values: Sequence[bytes] | None = None
        self.has_changed = np.zeros(number, bool)


def changing_literals(without_numbers: Hashable, values: Sequence[object]) -> np.ndarray:
    """Mask of the numbers that have had other values in earlier programs that are equal but for their numbers.

    A prior around ``y.mean()`` of an array of NumPy, or with a scale that is an argument, makes another program of
    every data set or scale. The first is compiled as it is, the second with the number among the data, and after that
    nothing is.

    :param without_numbers: equal for programs that are equal but for these numbers.
    :param values: the numbers.
    :return: shape ``(len(values),)``.
    """
    found = [np.asarray(value).tobytes() for value in values]
    # A hash is enough: it is never wrong to take a number for data.
    seen = shared(_Seen, hash(without_numbers), len(found))
    if seen.values is not None:
        seen.has_changed |= np.array([now != before for now, before in zip(found, seen.values, strict=True)], bool)
    seen.values = found
    return seen.has_changed
