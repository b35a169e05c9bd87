"""Dependence of a few elements of a large value on seeds: patterns pulled back through a program.

:func:`~.dependence.dependence` pushes the patterns of all elements forward. Here only what was asked for is followed,
so that the utilities of all users for all items cost nothing where a few of them were compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.lax import GatherScatterMode

from ..dependence import ELEMENTWISE, propagate
from ..equations import Atom, Constant, Equation
from ..patterns import as_array, check_size, deduplicate
from ..questions import Questions

KNOWN_MODES = (GatherScatterMode.CLIP, GatherScatterMode.FILL_OR_DROP, GatherScatterMode.PROMISE_IN_BOUNDS)
"""Modes of gathers that :func:`looked_up` knows."""


class SelectedDependence:
    """Patterns of chosen elements.

    :param questions: the traced model and its data.
    :param seeds: for values, which are not looked behind, the number of their first element; the others follow.
    """

    def __init__(self, questions: Questions, seeds: Mapping[int, int]):
        self._questions, self._program, self._seeds = questions, questions.program, dict(seeds)
        self._dependent = set(seeds)
        for eqn in self._program.equations:
            if self._dependent.intersection(a for a in eqn.inputs if isinstance(a, int)):
                self._dependent.update(eqn.outputs)
        self._known: dict[tuple[Atom, bool], Any] = {}

    def largest(self, wanted: Atom) -> int:
        """Elements of the largest value that depends on seeds, on the way to ``wanted``."""
        between = self._program.ancestors([wanted], self._seeds) & self._dependent
        return max((int(np.prod(self._program.shape(a))) for a in between), default=0)

    def at(self, atom: Atom, index: np.ndarray) -> np.ndarray:
        """Numbers of the seed elements behind chosen elements of a value, ``(len(index), k)`` padded with ``-1``.

        :param index: of the elements, flat.
        :raises TooLarge: if that is too much, or an operation is not known element by element.
        """
        if isinstance(atom, Constant) or atom not in self._dependent:
            return np.full((len(index), 1), -1, np.int64)
        if atom in self._seeds:
            return (self._seeds[atom] + index)[:, None]
        # patterns are concrete even where the caller is being compiled
        with jax.ensure_compile_time_eval():
            return self._behind(self._program.equations[self._program.defined_by[atom]], atom, index)

    def _behind(self, eqn: Equation, atom: int, index: np.ndarray) -> np.ndarray:
        shape = self._program.shape(atom)
        found: list[np.ndarray] = []
        for number in dict.fromkeys(a for a in eqn.inputs if isinstance(a, int) and a in self._dependent):
            if eqn.primitive.name in ELEMENTWISE:
                origin = _aligned(index, shape, self._program.shape(number))[:, None]
            elif eqn.primitive.name == "dot_general":
                sides = [side for side in (0, 1) if eqn.inputs[side] == number]
                origin = np.concatenate([self._of_product(eqn, side, index) for side in sides], axis=1)
            else:
                looked_up = self._of_gather(eqn, index) if eqn.primitive.name == "gather" else None
                origin = self._origin(eqn, atom, number, index) if looked_up is None else looked_up[:, None]
            check_size(origin.size)
            behind = self.at(number, np.maximum(origin, 0).reshape(-1))
            check_size(behind.size)
            behind = np.where(origin.reshape(-1, 1) < 0, -1, behind)
            found.append(behind.reshape(len(index), origin.shape[1] * behind.shape[1]))
        return deduplicate(np.concatenate(found, axis=1)) if len(found) > 1 or found[0].shape[1] > 1 else found[0]

    def _origin(self, eqn: Equation, atom: int, number: int, index: np.ndarray) -> np.ndarray:
        """Elements of one input on which chosen elements of the output depend."""
        shape = self._program.shape(number)
        numbers = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(*shape, 1)
        inputs = [numbers if a == number else None for a in eqn.inputs]
        out = propagate(eqn, inputs, self._program, self._concrete)[eqn.outputs.index(atom)]
        pattern = as_array(out)
        return pattern.reshape(-1, pattern.shape[-1])[index]

    def _of_gather(self, eqn: Equation, index: np.ndarray) -> np.ndarray | None:
        """Elements of an array that are looked up, without numbering all of it; ``None`` where that is not known."""
        numbers, where = eqn.params["dimension_numbers"], self._concrete(eqn.inputs[1])
        if where is None or numbers.operand_batching_dims or eqn.params["mode"] not in KNOWN_MODES:
            return None
        shape = self._program.shape(eqn.inputs[0])
        places = np.unravel_index(index, self._program.shape(eqn.outputs[0]))
        found, is_inside = looked_up(eqn, places, np.asarray(where), shape)
        if eqn.params["mode"] is not GatherScatterMode.FILL_OR_DROP:
            is_inside = np.asarray(True)
        return np.where(is_inside, np.ravel_multi_index(found, shape), -1)

    def _of_product(self, eqn: Equation, side: int, index: np.ndarray) -> np.ndarray:
        contract, batch = eqn.params["dimension_numbers"]
        shapes = [self._program.shape(a) for a in eqn.inputs[:2]]
        free = [[i for i in range(len(shapes[s])) if i not in (*contract[s], *batch[s])] for s in (0, 1)]
        places = np.unravel_index(index, self._program.shape(eqn.outputs[0]))
        shared, first = len(batch[0]), len(free[0])
        own = places[shared : shared + first] if side == 0 else places[shared + first :]
        lengths = tuple(shapes[side][axis] for axis in contract[side])
        check_size(len(index) * float(np.prod(lengths)))
        summed = np.unravel_index(np.arange(int(np.prod(lengths))), lengths) if lengths else ()
        coordinates: dict[int, Any] = {}
        coordinates |= {axis: place[:, None] for axis, place in zip(batch[side], places[:shared], strict=True)}
        coordinates |= {axis: place[:, None] for axis, place in zip(free[side], own, strict=True)}
        coordinates |= {axis: place[None] for axis, place in zip(contract[side], summed, strict=True)}
        arrays = np.broadcast_arrays(*(coordinates[axis] for axis in range(len(shapes[side]))))
        return np.ravel_multi_index(arrays, shapes[side])

    def _concrete(self, atom: Atom, *, only_zeros: bool = False) -> object:
        if (atom, only_zeros) not in self._known:
            known = None if atom in self._dependent else self._questions.decide(atom, only_zeros=only_zeros)
            self._known[atom, only_zeros] = known
        return self._known[atom, only_zeros]


def _aligned(index: np.ndarray, shape: tuple[int, ...], other: tuple[int, ...]) -> np.ndarray:
    """Elements of a value of another shape that meet these in an elementwise operation, which may repeat it."""
    if other == shape:
        return index
    if not other:
        return np.zeros_like(index)
    places = zip(np.unravel_index(index, shape)[len(shape) - len(other) :], other, strict=True)
    return np.ravel_multi_index([np.zeros_like(index) if length == 1 else place for place, length in places], other)


def looked_up(
    eqn: Equation, places: Sequence[object], where: Any, shape: tuple[int, ...]
) -> tuple[tuple[Any, ...], Any]:
    """Elements of an array that some elements of a gather are, and mask of those inside of it.

    :param eqn: a gather without batched dimensions.
    :param places: of the elements along each axis of its result, arrays of NumPy or of JAX.
    :param where: its indices.
    :param shape: of the array.
    :return: places along each axis of the array, clipped to be inside.
    """
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    starts = where[tuple(place for axis, place in enumerate(places) if axis not in numbers.offset_dims)]
    kept = [axis for axis in range(len(shape)) if axis not in numbers.collapsed_slice_dims]
    nowhere = 0 * starts.sum(-1)
    found: list[Any] = [nowhere] * len(shape)
    for axis, offset in zip(kept, numbers.offset_dims, strict=True):
        found[axis] = nowhere + places[offset]
    is_inside = nowhere == 0
    for column, axis in enumerate(numbers.start_index_map):
        start, last = starts[..., column], shape[axis] - sizes[axis]
        is_inside = is_inside & (start >= 0) & (start <= last)
        found[axis] = found[axis] + start.clip(0, last)
    return tuple(found), is_inside
