"""Equations of a program: a primitive applied to values by their numbers, and to constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ...compilation.content import array_key
from .known_values import known_result

_OPAQUE_CALLS = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


class Constant:
    """A value written into the program itself (a literal), and the dtype that it has there."""

    __slots__ = ("dtype", "value")

    def __init__(self, value: Any, dtype: Any = None):
        self.value = value
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Constant({self.value})"

    @property
    def content_key(self) -> tuple[object, ...]:
        """Value and dtype, by which constants are compared."""
        return array_key(self.value), self.dtype


Atom = int | Constant


def constant_of(literal: Literal) -> Constant:
    """A literal of a jaxpr."""
    return Constant(literal.val, literal.aval.dtype)  # type: ignore[attr-defined]


class Equation(NamedTuple):
    """One primitive applied to atoms, assigning its outputs."""

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    key: tuple[Any, ...]
    """Equal for equations that compute the same."""


def apply_equation(eqn: Equation, values: Sequence[object]) -> Sequence[Any]:
    """Results of one equation on the values of its inputs."""
    results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else (results,)


def apply_to_known(eqn: Equation, values: Sequence[object]) -> Sequence[Any]:
    """Apply an equation to values that are known; by NumPy, which compiles nothing, where it can be."""
    result = known_result(eqn.primitive.name, eqn.params, values)
    return apply_equation(eqn, values) if result is None else (result,)


def inner_jaxpr(params: Mapping[str, object]) -> ClosedJaxpr | None:
    """The jaxpr that a call-like equation carries, closed, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = params.get(name)
        if isinstance(inner, ClosedJaxpr):
            return inner
        if isinstance(inner, Jaxpr):
            return ClosedJaxpr(inner, ())
    return None


def is_opaque_call(eqn: Equation) -> bool:
    """True if an equation is a call with its own derivative rule: dependence sees through it, linearity does not."""
    return eqn.primitive.name in _OPAQUE_CALLS and inner_jaxpr(eqn.params) is not None


def atom_key(atom: Atom) -> object:
    """Equal for equal atoms."""
    if isinstance(atom, int):
        return atom
    return array_key(atom.value)


def params_key(params: Mapping[str, object]) -> str:
    """Text of parameters of a primitive, the same in other runs."""
    # callables print with addresses; a call with a derivative rule of its own is told apart by its body and name
    parts = []
    for name in sorted(params):
        value = params[name]
        parts.append(f"{name}={getattr(value, '__qualname__', type(value).__name__) if callable(value) else value}")
    return ";".join(parts)
