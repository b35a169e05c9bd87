"""Comparisons of an unknown with itself, ``f[i] - f[i]``, which say nothing of it.

They are told by what the model looks up, not by numbers: a row of zeros may as well come of a covariate that is zero,
of the absent level of a factor or of padding, and those are as meant. So are rows that see something else: the baseline
arms of a network meta-analysis tell of the level of their trial, catch trials of the preference for one side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ..program.dependence import moved
from ..program.equations import Atom, Equation
from ..program.program import Program
from ..program.questions import Questions

_LARGEST = 10_000_000
"""Elements of the largest value of which each place is followed; rows of whole vectors are not counted by these."""
_SUMMING = {"add": (1, 1), "add_any": (1, 1), "sub": (1, -1), "neg": (-1,)}
"""Signs of the inputs of what makes a sum."""
_REPEATING = ("convert_element_type", "copy", "name")
_MOVING = ("squeeze", "expand_dims", "reshape", "transpose", "broadcast_in_dim", "rev", "slice")


class SelfComparisons(NamedTuple):
    """Observations of a site that compare an unknown with itself, and see nothing else that is unknown."""

    site: str
    num: int
    num_observations: int
    first: tuple[int, ...]
    """Index of the first one."""

    def __str__(self) -> str:
        where = self.first[0] if len(self.first) == 1 else self.first
        return (
            f"{self.num} of {self.num_observations} observations of site '{self.site}' compare an unknown with itself "
            f"(the first at index {where}), as f[i] - f[i] does, which is zero whatever that is, and depend on nothing "
            "else that is unknown: they say nothing. Leave them out."
        )


def self_differences(questions: Questions, log_prob: Atom, shape: tuple[int, ...]) -> np.ndarray | None:
    """Mask of the observations that see the difference of an unknown with itself, ``None`` where none does.

    :param questions: the traced model and its data.
    :param log_prob: log factors of the observations.
    :param shape: of the observations.
    :return: boolean, of this shape.
    """
    found, program = None, questions.program
    for plus, minus in _differences(program, program.needed([log_prob], ())):
        same = _by_observation(_are_same(questions, plus, minus), shape)
        if same is not None and same.any():
            found = same if found is None else found | same
    return found


def _differences(program: Program, needed: Iterable[int]) -> Iterator[tuple[Atom, Atom]]:
    """Pairs of a value that is looked up in unknowns and added to a sum, and one that is taken off it, for all sums."""
    sums = [eqn for eqn in map(program.equations.__getitem__, sorted(needed)) if eqn.primitive.name in _SUMMING]
    parts = {atom for eqn in sums for atom in eqn.inputs if isinstance(atom, int)}
    for eqn in sums:
        if eqn.outputs[0] not in parts:
            terms = [term for term in _terms(program, eqn.outputs[0]) if _is_looked_up(program, term[1])]
            one, other = ([atom for sign, atom in terms if sign == wanted] for wanted in (1, -1))
            yield from itertools.product(one, other)


def _terms(program: Program, total: Atom) -> Iterator[tuple[int, Atom]]:
    """The terms of a sum, with their signs."""
    stack = [(1, total)]
    while stack:
        sign, atom = stack.pop()
        index = program.defined_by.get(atom) if isinstance(atom, int) else None
        equation = None if index is None else program.equations[index]
        if equation is None or equation.primitive.name not in _SUMMING:
            yield sign, atom
            continue
        signs = _SUMMING[equation.primitive.name]
        stack += [(sign * own, part) for own, part in zip(signs, equation.inputs, strict=True)]


def _by_observation(same: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray | None:
    """Mask by observation of elements, or of vectors all of whose components are the same."""
    if same is None:
        return None
    if same.shape[: len(shape)] == shape:
        return np.asarray(same.all(axis=tuple(range(len(shape), same.ndim))))
    if same.shape[same.ndim - len(shape) :] == shape:
        return np.asarray(same.all(axis=tuple(range(same.ndim - len(shape)))))
    return None


def _is_looked_up(program: Program, atom: Atom) -> bool:
    """True if a value is elements of one that is not known."""
    equations = list(_lookups(program, atom))
    if not any(equation.primitive.name == "gather" for equation in equations):
        return False
    return bool(program.ancestors([equations[-1].inputs[0]]) & set(program.inputs))


def _lookups(program: Program, atom: Atom) -> Iterator[Equation]:
    """The last equations before a value, as far as they look up or move elements of their first input."""
    while isinstance(atom, int) and atom in program.defined_by:
        equation = program.equations[program.defined_by[atom]]
        if equation.primitive.name not in ("gather", *_REPEATING, *_MOVING):
            return
        yield equation
        atom = equation.inputs[0]


def _are_same(questions: Questions, one: Atom, other: Atom) -> np.ndarray | None:
    """Mask of places where two values are the same element of the same value; ``None`` where that is not known, or
    all elements of one of them are the same, to which others are compared on purpose."""
    program = questions.program
    first, second = (next(_lookups(program, atom)) for atom in (one, other))
    names = {first.primitive.name, second.primitive.name}
    if names == {"gather"} and first.inputs[0] == second.inputs[0] and first.key[1] == second.key[1]:
        starts = [_starts(questions, equation) for equation in (first, second)]
        same = _same(*starts)
        if same is None:
            return None
        same = np.expand_dims(same, first.params["dimension_numbers"].offset_dims)
        return np.broadcast_to(same, program.shape(one))
    if math.prod(program.shape(one)) > _LARGEST:
        return None
    places = [_places(questions, atom) for atom in (one, other)]
    if places[0] is None or places[1] is None or places[0][0] != places[1][0]:
        return None
    return _same(places[0][1], places[1][1])


def _same(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    if one is None or other is None or any(x.size > 1 and np.ptp(x) == 0 for x in (one, other)):
        return None
    return np.asarray((one == other) & (one >= 0))


def _places(questions: Questions, atom: Atom) -> tuple[Atom, np.ndarray] | None:
    """The value of which another one is elements, and their flat places there, ``-1`` where there is none."""
    program = questions.program
    equations = list(_lookups(program, atom))
    while equations and equations[-1].primitive.name != "gather":
        equations.pop()  # what moves the whole value, before anything is looked up in it
    places: np.ndarray | None = None
    for equation in reversed(equations):
        shape = program.shape(equation.outputs[0])
        if equation.primitive.name == "gather":
            own = _places_in_operand(questions, equation)
            if own is None:
                return None
            places = own if places is None else np.where(own < 0, -1, places.reshape(-1)[own])
        elif equation.primitive.name in _MOVING:
            assert places is not None  # as a gather is the first
            found = moved(equation, places[..., None], shape)
            if found is None:
                return None
            places = found[..., 0]
    return None if places is None else (equations[-1].inputs[0], places)


def _places_in_operand(questions: Questions, equation: Equation) -> np.ndarray | None:
    program = questions.program
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    starts = _starts(questions, equation)
    if starts is None:
        return None
    strides = _strides(program.shape(equation.inputs[0]))
    places = np.expand_dims(starts, numbers.offset_dims)
    kept = [axis for axis in range(len(sizes)) if axis not in numbers.collapsed_slice_dims]
    offset = np.zeros((1,) * places.ndim, np.int64)
    for out_axis, axis in zip(numbers.offset_dims, kept, strict=True):
        steps = np.arange(sizes[axis]) * strides[axis]
        offset = offset + steps.reshape([-1 if k == out_axis else 1 for k in range(places.ndim)])
    return np.asarray(np.where(places < 0, -1, places + offset))


def _starts(questions: Questions, equation: Equation) -> np.ndarray | None:
    """Flat place of the first element of each slice that is looked up, ``-1`` where it is out of range."""
    program = questions.program
    numbers, operand = equation.params["dimension_numbers"], program.shape(equation.inputs[0])
    index = questions.decide(equation.inputs[1])
    if index is None or numbers.operand_batching_dims:
        return None
    axes = list(numbers.start_index_map)
    last = np.array([operand[axis] - equation.params["slice_sizes"][axis] for axis in axes], np.int64)
    index = np.asarray(index)
    is_there = ((index >= 0) & (index <= last)).all(axis=-1)
    return np.where(is_there, index @ _strides(operand)[axes], -1)


def _strides(shape: tuple[int, ...]) -> np.ndarray:
    return np.cumprod([1, *shape[:0:-1]])[::-1].astype(np.int64)
