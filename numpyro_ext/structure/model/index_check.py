"""Indices beyond what they point into, which JAX takes for the last element without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ModelStructureError
from ..program.program import Atom, Equation, Program

__all__ = ["check_indices"]


def check_indices(program: Program, values: Mapping[str, Atom], given: Mapping[int, Any] | None = None) -> None:
    """Refuse lookups in unknown arrays at known indices that are out of range.

    Modes that say what happens there (``x.at[i].get(mode="clip")``, or ``mode="fill"`` with a ``fill_value``) are
    left alone, and so are indices that depend on unknowns.

    :param Program program: the traced model.
    :param values: its unknown sites, by name.
    :param given: values of data that may change.
    :raises ModelStructureError: naming the site, the index and how many elements there are.
    """
    for equation in program.equations:
        if equation.primitive.name != "gather" or _says_what_happens(equation):
            continue
        operand, indices = equation.inputs
        if not program.ancestors([operand]) & set(program.inputs):
            continue
        found = program.known_value(indices, given)
        if found is None:
            continue
        shape, axes = program.shape(operand), equation.params["dimension_numbers"].start_index_map
        for position, axis in enumerate(axes):
            index, size = np.asarray(found)[..., position], shape[axis]
            bad = index[(index < 0) | (index > size - equation.params["slice_sizes"][axis])]
            if not bad.size:
                continue
            # negative ones have had the size added: what the model wrote is that many less
            first = int(bad[0]) - size * int(bad[0] < 0)
            name = _name_of(program, values, operand)
            raise ModelStructureError(
                f"site '{name}' is indexed out of range: {bad.size} indices, the first {first}, along an axis of "
                f"length {size} (0 to {size - 1}); JAX would take another element in its place. Check the sizes of the "
                "plates. New members of a group need a larger number of members: give the model this number as an "
                "argument, or let it take it from the labels that it is given. Rows that stand for nothing need an "
                "index in range and a mask.",
                site=name,
            )


def _says_what_happens(equation: Equation) -> bool:
    mode = str(equation.params["mode"])
    return mode.endswith("CLIP") or (mode.endswith("FILL_OR_DROP") and equation.params["fill_value"] is not None)


def _name_of(program: Program, values: Mapping[str, Atom], operand: Atom) -> str:
    """The site that a value is, or is made of: of those behind it the last one, since the others are behind that."""
    behind = program.ancestors([operand])
    made = {name: program.ancestors([value]) for name, value in values.items()}
    return max((name for name in made if made[name] <= behind), key=lambda n: len(made[n]), default="")
