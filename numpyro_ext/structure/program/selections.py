"""Selections that data decide, between the same function of two values: taken before the function.

``where(k == 0, exp(a), exp(b))`` is ``exp(where(k == 0, a, b))``: every element sees one of the two, and the selection
is affine where they are. Functions that differ stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

_LINEAR = frozenset("add add_any sub mul div neg convert_element_type copy".split())
_NONLINEAR = frozenset(
    "abs cbrt clamp cos cosh digamma erf erf_inv erfc exp exp2 expm1 integer_pow lgamma log log1p logistic max min pow"
    " rsqrt sign sin sinh sqrt square tan tanh".split()
)
_OTHERS = frozenset("and eq ge gt is_finite le lt ne not or select_n stop_gradient".split())
"""Functions of one element at a time that occur in others, such as that of ``softplus``."""
_CALLS = ("jit", "pjit", "custom_jvp_call")
_MOVING = ("broadcast_in_dim", "expand_dims", "reshape", "squeeze")

Apply = Callable[..., Sequence[Any]]
Atom = Any
Equation = Any
"""Equation of a program, as in :mod:`.program`, which asks for selections."""


class Equations(Protocol):
    """Interface of a program, as far as it is used here."""

    @property
    def equations(self) -> Sequence[Equation]: ...

    @property
    def defined_by(self) -> dict[int, int]: ...

    def shape(self, atom: Atom) -> tuple[int, ...]: ...

    def inline(self, function: Callable[..., Sequence[object]], *atoms: Atom) -> tuple[Atom, ...]: ...


def selected_before(program: Equations, which: Atom, cases: Sequence[Atom], apply: Apply) -> Atom | None:
    """The value of a selection as a function of selections; ``None`` where no function that is not linear is the same
    in all cases.

    :param program: to which equations are added.
    :param which: what decides: boolean, or the number of the case.
    :param cases: the values to select from, of one shape.
    :param Callable apply: results of one equation on the values of its inputs.
    """
    found = [_function(program, case) for case in cases]
    equations, moves = [f[0] for f in found if f], [f[1] for f in found if f]
    if len(equations) < len(cases) or len({(e.primitive.name, e.key[1]) for e in equations}) > 1:
        return None
    first, shape = equations[0], program.shape(cases[0])
    arguments, is_gained = [], first.primitive.name not in _LINEAR
    for atoms in zip(*(e.inputs for e in equations), strict=True):
        values = [_moved(program, atom, way, shape, apply) for atom, way in zip(atoms, moves, strict=True)]
        argument = values[0]
        if not _are_equal(values):
            (argument,) = program.inline(lambda which, *values: [_select(which, values, shape)], which, *values)
            is_gained |= program.equations[program.defined_by[argument]].primitive.name != "select_n"
        arguments.append(argument)
    if not is_gained:
        return None
    (value,) = program.inline(lambda *values: apply(first, _alike(values, shape)), *arguments)
    return value


def _function(program: Equations, atom: Atom) -> tuple[Equation, list[Equation]] | None:
    """The last function of single elements before a value, and what moves its elements to where they are."""
    moves: list[Equation] = []
    while isinstance(atom, int) and atom in program.defined_by:
        equation = program.equations[program.defined_by[atom]]
        if equation.primitive.name not in _MOVING:
            return (equation, moves[::-1]) if _is_pointwise(program, equation) else None
        moves.append(equation)
        atom = equation.inputs[0]
    return None


def _is_pointwise(program: Equations, equation: Equation) -> bool:
    name, shape = equation.primitive.name, program.shape(equation.outputs[0])
    if len(equation.outputs) > 1 or any(program.shape(a) not in ((), shape) for a in equation.inputs):
        return False
    if name == "custom_jvp_call":
        return _is_function_of_elements(equation.params["call_jaxpr"].jaxpr, shape)
    return name in _LINEAR or name in _NONLINEAR


def _is_function_of_elements(jaxpr: Any, shape: tuple[int, ...]) -> bool:
    for eqn in jaxpr.eqns:
        name, inner = eqn.primitive.name, eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if any(v.aval.shape not in ((), shape) for v in (*eqn.invars, *eqn.outvars)):
            return False
        if name in _CALLS and inner is not None:
            if not _is_function_of_elements(inner.jaxpr, shape):
                return False
        elif name == "broadcast_in_dim":  # of a number
            if eqn.invars[0].aval.shape not in ((), shape):
                return False
        elif not (name in _LINEAR or name in _NONLINEAR or name in _OTHERS):
            return False
    return True


def _moved(program: Equations, atom: Atom, moves: list[Equation], shape: tuple[int, ...], apply: Apply) -> Atom:
    """An argument of a function, moved as its results are; numbers are the same everywhere."""
    if not moves or (math.prod(program.shape(atom)) == 1 and not isinstance(atom, int)):
        return atom
    if program.shape(atom) != program.shape(moves[0].inputs[0]):  # a number among arrays
        (value,) = program.inline(lambda x: [jnp.broadcast_to(x, shape)], atom)
        return value

    def move(x: object) -> Sequence[Any]:
        for equation in moves:
            (x,) = apply(equation, [x])
        return [x]

    (value,) = program.inline(move, atom)
    return value


def _are_equal(values: Sequence[Atom]) -> bool:
    first = values[0]
    if isinstance(first, int):
        return all(value == first for value in values)
    return all(not isinstance(v, int) and v.dtype == first.dtype and bool(v.value == first.value) for v in values)


def _select(which: Any, values: Sequence[object], shape: tuple[int, ...]) -> jax.Array:
    dtype = jnp.result_type(*values)
    return jax.lax.select_n(which, *(jnp.broadcast_to(jnp.asarray(value, dtype), shape) for value in values))


def _alike(values: Sequence[Any], shape: tuple[int, ...]) -> list[object]:
    """Arguments of one shape, as functions of single elements take them."""
    return [value if len(values) == 1 else jnp.broadcast_to(value, shape) for value in values]
