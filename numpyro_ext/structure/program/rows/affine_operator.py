"""Affine values of a program as a linear operator that is never materialised."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.content import ByContent
from ....linalg.frozen_pytree import frozen_pytree
from ....linalg.operators.operator import LinearOperator
from ..degrees import Degree, Degrees
from ..equations import Atom
from ..program import Program


class OperatorMap(NamedTuple):
    """A quantity ``operator @ s + offset`` of the unknowns ``s``, flattened in C order."""

    operator: LinearOperator
    offset: Array


class AffineValues(ByContent):
    """Selected elements of affine values of a program, one after another, as functions of the flat unknowns.

    :param program: the traced model.
    :param degrees: its classification.
    :param field: input value and size of each field site, in the order of the columns.
    :param parts: for each part a value, a value to subtract from it, and the flat indices of the elements to take of
        the difference (None for all).

    Equal ones are the same functions, and operators made of them share compiled functions.
    """

    def __init__(
        self,
        program: Program,
        degrees: Degrees,
        field: Mapping[str, tuple[int, int]],
        parts: Sequence[tuple[Atom, Atom | None, np.ndarray | None]],
    ):
        self.program = program
        self.inputs = tuple(field.values())
        self.parts = tuple(parts)
        self.num_columns = sum(size for _, size in self.inputs)
        sizes = [_size(program, plus) if rows is None else len(rows) for plus, _, rows in self.parts]
        self.num_rows = sum(sizes)
        self.known = self._known(degrees)

    def _known(self, degrees: Degrees) -> tuple[int, ...]:
        """Values that do not depend on the unknowns and from which the parts follow by affine operations alone."""
        wanted = [a for plus, minus, _ in self.parts for a in (plus, minus) if isinstance(a, int)]
        constant = {a for a in wanted if degrees.of(a) == Degree.CONSTANT}
        affine = [n for n, _ in self.inputs]
        for index in self.program.needed(wanted, affine):
            eqn = self.program.equations[index]
            if any(degrees.of(n) != Degree.CONSTANT for n in eqn.outputs):
                constant |= {a for a in eqn.inputs if isinstance(a, int) and degrees.of(a) == Degree.CONSTANT}
        return tuple(sorted(constant))

    def depends_on(self, atoms: set[int]) -> bool:
        """True if the map depends on any of the given inputs."""
        return bool(self.program.ancestors(self.known) & atoms)

    def evaluate(self, s: Array, known: Sequence[object]) -> Array:
        """The selected elements at the unknowns ``s``; shape ``(num_rows,)``."""
        env = dict(zip(self.known, known, strict=True))
        start = 0
        for number, size in self.inputs:
            env[number] = s[start : start + size].astype(self.program.avals[number].dtype)
            start += size
        out = []
        for plus, minus, rows in self.parts:
            value = self.program.evaluate([plus], env)[0]
            if minus is not None:
                value = value - self.program.evaluate([minus], env)[0]
            value = jnp.reshape(value, -1)
            out.append(value if rows is None else value[rows])
        return jnp.concatenate(out) if len(out) > 1 else out[0]

    def at(self, env: Mapping[int, object]) -> OperatorMap:
        """The map at given values of all other inputs and constants."""
        known = tuple(jnp.asarray(v) for v in self.program.evaluate(self.known, env))
        return OperatorMap(ProgramOperator(known, self), _at_zero(self, known))


@functools.partial(jax.jit, static_argnums=0)
def _at_zero(values: AffineValues, known: tuple[Array, ...]) -> Array:
    return values.evaluate(jnp.zeros((values.num_columns,), jnp.result_type(float)), known)


def _size(program: Program, atom: Atom) -> int:
    return int(np.prod(program.shape(atom)))


@frozen_pytree
class ProgramOperator(LinearOperator):
    """The linear part of :class:`AffineValues`: products are evaluations of the program, their transposes are JAX's."""

    known: tuple[Array, ...]
    values: AffineValues = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.num_rows, self.values.num_columns

    def matvec(self, x: Array) -> Array:
        return jax.jvp(lambda s: self.values.evaluate(s, self.known), (jnp.zeros_like(x),), (x,))[1]
