"""Undo the sums at the end of a log probability that a model had summed up by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .degrees import Degree, Degrees
from .equations import Atom, Equation
from .program import Program


class Term(NamedTuple):
    """``sign * product(scalars) * sum(value)``."""

    atom: Atom
    scalars: tuple[tuple[Atom, bool], ...] = ()
    """Scalars that multiply the term, or divide it where the flag is set."""
    sign: float = 1.0

    def coefficient(self, program: Program, env: Mapping[int, object]) -> Any:
        """The number in front of the sum."""
        value: Any = self.sign
        for atom, divides in self.scalars:
            scalar = jnp.reshape(program.evaluate([atom], env)[0], ())
            value = value / scalar if divides else value * scalar
        return value


def sum_terms(program: Program, degrees: Degrees, atom: Atom) -> list[Term]:
    """Terms whose sum is the scalar ``atom``, found by walking back through sums, signs and scalar factors."""
    out: list[Term] = []
    stack = [Term(atom)]
    while stack:
        term = stack.pop()
        eqn = _equation(program, degrees, term.atom)
        parts = None if eqn is None else _step_back(program, degrees, term, eqn)
        if parts is None:
            out.append(term)
        else:
            stack.extend(parts)
    return out


def _equation(program: Program, degrees: Degrees, atom: Atom) -> Equation | None:
    index = program.defined_by.get(atom) if isinstance(atom, int) else None
    return None if index is None or degrees.of(atom) == Degree.CONSTANT else program.equations[index]


def _step_back(program: Program, degrees: Degrees, term: Term, eqn: Equation) -> list[Term] | None:
    name = eqn.primitive.name
    size = _size(program, eqn.outputs[0])
    keeps_size = all(_size(program, a) == size for a in eqn.inputs)
    first = eqn.inputs[0]
    if name == "reduce_sum" or (name in ("reshape", "squeeze", "expand_dims", "copy") and keeps_size):
        return [term._replace(atom=first)]
    if name == "neg":
        return [term._replace(atom=first, sign=-term.sign)]
    # A predictor is itself a sum, of which the parts are no predictors.
    is_predictor = size > 1 and degrees.of(eqn.outputs[0]) == Degree.AFFINE
    if name in ("add", "sub") and keeps_size and not is_predictor:
        second_sign = term.sign if name == "add" else -term.sign
        return [term._replace(atom=first), term._replace(atom=eqn.inputs[1], sign=second_sign)]
    if name in ("mul", "div"):
        candidates = [(first, eqn.inputs[1])] + ([(eqn.inputs[1], first)] if name == "mul" else [])
        for inner, scalar in candidates:
            if degrees.of(scalar) == Degree.CONSTANT and _size(program, scalar) == 1:
                return [Term(inner, (*term.scalars, (scalar, name == "div")), term.sign)]
    return None


def _size(program: Program, atom: Atom) -> int:
    return int(np.prod(program.shape(atom)))
