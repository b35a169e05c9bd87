"""Indices beyond what they point into, which JAX takes for the last element without a word."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from ..errors import ModelStructureError
from ..program.equations import Atom, Equation
from ..program.program import Program
from ..program.questions import Questions


def check_indices(
    questions: Questions,
    values: Mapping[str, Atom],
    arguments: Mapping[str, object] | None = None,
) -> None:
    """Refuse lookups in unknown arrays at known indices that are out of range, or negative numbers of an argument.

    NumPy counts negative ones from the end. A model that makes some itself means that; who passes them has more likely
    the codes of pandas, which are -1 for labels that are missing.

    Modes that say what happens there (``x.at[i].get(mode="clip")``, or ``mode="fill"`` with a ``fill_value``) are
    left alone, and so are indices that depend on unknowns.

    :param questions: the traced model and its data.
    :param values: its unknown sites, by name.
    :param arguments: of the model, by name.
    :raises ModelStructureError: naming the site, the index and how many elements there are, or the argument.
    """
    program = questions.program
    negative = _with_negative_numbers(arguments or {})
    for equation in program.equations:
        if equation.primitive.name != "gather" or _says_what_happens(equation):
            continue
        operand, indices = equation.inputs
        if not program.ancestors([operand]) & set(program.inputs):
            continue
        found = questions.decide(indices)
        if found is None:
            continue
        shape, axes = program.shape(operand), equation.params["dimension_numbers"].start_index_map
        for position, axis in enumerate(axes):
            index, size = np.asarray(found)[..., position], shape[axis]
            bad = index[(index < 0) | (index > size - equation.params["slice_sizes"][axis])]
            if not bad.size:
                if negative:
                    _check_signs(_name_of(program, values, operand), index, size, negative)
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


def _check_signs(name: str, index: np.ndarray, size: int, negative: Mapping[str, np.ndarray]) -> None:
    """Refuse indices in range that are an argument with its negative numbers counted from the end."""
    for label, array in negative.items():
        if index.size == array.size and np.array_equal(index.ravel(), np.where(array < 0, array + size, array)):
            raise ModelStructureError(
                f"site '{name}' is indexed by '{label}', of which {np.sum(array < 0)} are negative, the first "
                f"{array[array < 0][0]}: NumPy counts them from the end of an axis of length {size}. Codes of pandas "
                "are -1 where a label is missing: leave such rows out, or give them an index in range and a mask. "
                "Where the last elements are meant, add the length.",
                site=name,
            )


def _with_negative_numbers(arguments: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Arrays of integers, and lists of them, that have negative ones, flattened."""
    arrays = {}
    for label, value in arguments.items():
        leaves = [value] if isinstance(value, list | tuple) else jax.tree.leaves(value)
        for leaf in leaves:
            if getattr(getattr(leaf, "dtype", None), "kind", "i") != "i":
                continue
            try:
                array = np.asarray(leaf)
            except Exception:  # lists of unequal ones, arrays that are traced
                continue
            if array.ndim and array.dtype.kind == "i" and array.size and array.min() < 0:
                arrays[label] = array.astype(np.int64).ravel()
    return arrays


def _says_what_happens(equation: Equation) -> bool:
    mode = str(equation.params["mode"])
    return mode.endswith("CLIP") or (mode.endswith("FILL_OR_DROP") and equation.params["fill_value"] is not None)


def _name_of(program: Program, values: Mapping[str, Atom], operand: Atom) -> str:
    """The site that a value is, or is made of: of those behind it the last one, since the others are behind that."""
    behind = program.ancestors([operand])
    made = {name: program.ancestors([value]) for name, value in values.items()}
    return max((name for name in made if made[name] <= behind), key=lambda n: len(made[n]), default="")
