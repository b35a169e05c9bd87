"""A model of many members, such as people, called on some of them: what it does is the same for all others.

The model is recorded on all members and on a part of them. Where both recordings are the same operations but for the
number of members, and the data of the second a slice of those of the first, so are the data of any other part, and
the model is not called again. The programs of the parts are small, and arrays beyond the data of all
members are made for one part at a time.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from ...program.equations import Constant
from ...program.program import Program
from .calling import record
from .execution import ModelCall
from .recording import RecordedSite, Recording


class _Sizes(NamedTuple):
    """Numbers of members of the whole and of a part."""

    whole: int
    part: int

    def are_of(self, whole: int, part: int) -> bool:
        """True if two numbers are equal, or in the ratio of the members."""
        return whole == part or whole * self.part == part * self.whole

    def stride(self, whole: tuple[int, ...], part: tuple[int, ...]) -> int:
        """Rows of each member in arrays of these shapes; zero if they are no arrays of members."""
        if whole == part or len(whole) != len(part) or whole[1:] != part[1:] or whole[0] % self.whole:
            return 0
        rows = whole[0] // self.whole
        return rows if part[0] == rows * self.part else 0


class MemberParts:
    """The calls of a model on parts of its members, of one size.

    :ivar example: the model called on one of them, recorded.
    :ivar number: all members.
    :ivar size: members of a part.
    """

    def __init__(self, example: ModelCall, whole: Recording, sizes: _Sizes) -> None:
        assert example.recording is not None  # as a part is found
        self.example, self.number, self.size = example, sizes.whole, sizes.part
        self._whole, self._recording = whole, example.recording
        pairs = zip(whole.data, example.recording.data, strict=True)
        self._strides = [sizes.stride(np.shape(own), np.shape(of_part)) for own, of_part in pairs]

    @property
    def starts(self) -> list[int]:
        """First member of each part; the last one overlaps the one before, so that all have one size."""
        return [*range(0, self.number - self.size, self.size), self.number - self.size]

    def calls(self) -> Iterator[tuple[int, ModelCall]]:
        """The first new member of each part, among its own, and the call on it."""
        done = 0
        for start in self.starts:
            yield done - start, self._call(self._slices(start))
            done = start + self.size

    def mixed(self) -> tuple[np.ndarray, ModelCall]:
        """Members evenly spread over all parts, and the call on them."""
        members = np.linspace(0, self.number - 1, self.size).round().astype(int)
        return members, self.call_on(members)

    def call_on(self, members: np.ndarray) -> ModelCall:
        """The call on members in any order, as many as a part has."""

        def rows(leaf: Any, stride: int) -> Any:
            return np.asarray(leaf)[(members[:, None] * stride + np.arange(stride)).reshape(-1)] if stride else leaf

        return self._call(list(map(rows, self._whole.data, self._strides)))

    @property
    def has_gaps(self) -> bool:
        """True if some data of all members are masks with places that are left out, whatever these are of."""
        return any(
            k and leaf.dtype == bool and not leaf.all() for k, leaf in zip(self._strides, self._whole.data, strict=True)
        )

    def has_members(self, name: str) -> bool:
        """True if a site has a part for each member, on its first axis."""
        site, shapes = self._whole.sites[name], []
        for recording, own in ((self._whole, site), (self._recording, self._recording.sites[name])):
            leaves = [leaf for leaf, known in zip(own.value.leaves, own.value.is_number, strict=True) if not known]
            shapes.append([recording.program.shape(leaf) for leaf in leaves])
        return any(w != f for w, f in zip(*shapes, strict=True))

    def _slices(self, start: int) -> list[Any]:
        pairs = zip(self._whole.data, self._strides, strict=True)
        return [leaf[start * k : (start + self.size) * k] if k else leaf for leaf, k in pairs]

    def _call(self, data: list[Any]) -> ModelCall:
        part = copy.copy(self._recording)
        part.data = tuple(data)
        return self.example._replace(recording=part)


def split_members(call: ModelCall, most_cells: int) -> MemberParts | None:
    """The parts of a call whose observations are many.

    :param ModelCall call: of a model, not recorded.
    :param int most_cells: observations of a part at most.
    :return: nothing where there are fewer than two parts, where no plate of latent sites has its members on the first
        axes of arguments, or where the model does something else on a part of the members.
    """
    whole = None if call.changing else record(call)
    if whole is None or whole.key is None:
        return None
    number = max((frame.size for site in _latent(whole) for frame in site.message["cond_indep_stack"]), default=0)
    cells = sum(whole.num_observations(name) for name, site in whole.sites.items() if site.is_observed)
    if not number or cells < 2 * most_cells:
        return None
    sizes = _Sizes(number, max(2, most_cells * number // cells))
    if sizes.part < 2 or number < 2 * sizes.part:
        return None
    # where masks are made of gaps alone, some parts have none
    for start in (0, (number - sizes.part) // 2, number - sizes.part):
        some = _Slice(sizes, slice(start, start + sizes.part))
        example = ModelCall(some.of(call.model), some.of(call.args), some.of(call.kwargs), call.rng_key)
        with warnings.catch_warnings():  # the model has said of all members what there is to say
            warnings.simplefilter("ignore")
            recorded = record(example)
        if recorded is not None and recorded.key is not None and _are_alike(whole, recorded, sizes, start):
            return MemberParts(example._replace(recording=recorded), whole, sizes)
    return None


def num_numbers(arguments: Any) -> int:
    """Numbers that arguments hold, in arrays and tables."""
    if isinstance(arguments, functools.partial):
        return num_numbers((arguments.args, arguments.keywords))
    if isinstance(arguments, dict):
        return num_numbers(tuple(arguments.values()))
    if type(arguments) in (tuple, list):
        return sum(map(num_numbers, arguments))
    return int(getattr(arguments, "size", 0))


def _latent(recording: Recording) -> list[RecordedSite]:
    return [site for site in recording.sites.values() if site.is_free and site.type == "sample"]


class _Slice(NamedTuple):
    """Some members that follow each other."""

    sizes: _Sizes
    places: slice

    def of(self, value: Any) -> Any:
        """Arguments with these members in the place of all."""
        number = self.sizes.whole
        if isinstance(value, functools.partial):
            return functools.partial(value.func, *self.of(value.args), **self.of(value.keywords))
        if isinstance(value, dict):
            return {name: self.of(item) for name, item in value.items()}
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            return type(value)(self.sizes.part) if value == number else value
        if hasattr(value, "iloc"):
            return value.iloc[self.places] if len(value) == number else value
        if isinstance(value, np.ndarray | jax.Array):
            return value[self.places] if np.shape(value)[:1] == (number,) else value
        if type(value) in (tuple, list):
            return value[self.places] if len(value) == number else type(value)(map(self.of, value))
        return value


def _are_alike(whole: Recording, part: Recording, sizes: _Sizes, start: int) -> bool:
    """True if two recordings are of the same operations but for the number of members, on the same data.

    :param int start: first member of the part.
    """
    if list(whole.sites) != list(part.sites):
        return False
    for one, other in zip(whole.sites.values(), part.sites.values(), strict=True):
        if (one.type, one.is_observed, one.scale.key) != (other.type, other.is_observed, other.scale.key):
            return False
        if one.value.key != other.value.key or not _same_key(one.fn.key, other.fn.key, sizes):
            return False
    if not _same_program(whole.program, part.program, sizes):
        return False
    for own, found in zip(whole.data, part.data, strict=False):
        stride = sizes.stride(np.shape(own), np.shape(found))
        expected = np.asarray(own[start * stride : (start + sizes.part) * stride] if stride else own)
        if not np.array_equal(expected, np.asarray(found), equal_nan=expected.dtype.kind == "f"):
            return False
    return len(whole.data) == len(part.data)


def _same_key(one: Any, other: Any, sizes: _Sizes) -> bool:
    """True if keys of distributions are the same but for the number of members among their integers."""
    if type(one) is not type(other):
        return False
    if not isinstance(one, tuple):
        return bool(one == other)
    if len(one) == 2 and one[0] == other[0] == "int":
        return sizes.are_of(*(int.from_bytes(number[1], sys.byteorder, signed=True) for number in (one, other)))
    return len(one) == len(other) and all(_same_key(a, b, sizes) for a, b in zip(one, other, strict=True))


def _same_program(whole: Program, part: Program, sizes: _Sizes) -> bool:
    """True if two programs are the same but for the sizes of what they compute."""
    if (whole.inputs, whole.constants, len(whole.equations)) != (part.inputs, part.constants, len(part.equations)):
        return False
    numbers = {*whole.inputs, *whole.constants}
    for one, other in zip(whole.equations, part.equations, strict=True):
        same = (one.primitive, one.outputs, len(one.inputs)) == (other.primitive, other.outputs, len(other.inputs))
        (text, held), (other_text, other_held) = one.key[1], other.key[1]
        if not (same and held == other_held and _same_text(text, other_text, sizes)):
            return False
        if not all(_same_atom(a, b, sizes) for a, b in zip(one.inputs, other.inputs, strict=True)):
            return False
        numbers.update(one.outputs)
    pairs = [(whole.avals[number], part.avals[number]) for number in numbers]
    return all(a.dtype == b.dtype and _same_text(a.shape, b.shape, sizes) for a, b in pairs)


def _same_atom(one: Any, other: Any, sizes: _Sizes) -> bool:
    if not (isinstance(one, Constant) and isinstance(other, Constant)):
        return bool(one == other)
    values = np.asarray(one.value), np.asarray(other.value)
    if values[0].dtype.kind in "iu" and values[0].ndim == values[1].ndim == 0:
        return sizes.are_of(int(values[0]), int(values[1]))
    return bool(np.array_equal(*values))


def _same_text(one: object, other: object, sizes: _Sizes) -> bool:
    """True if two descriptions are the same words, and their numbers equal or those of the members."""
    parts = [re.split(r"(\d+)", text if isinstance(text, str) else repr(text)) for text in (one, other)]
    if len(parts[0]) != len(parts[1]) or parts[0][::2] != parts[1][::2]:
        return False
    return all(sizes.are_of(int(a), int(b)) for a, b in zip(parts[0][1::2], parts[1][1::2], strict=True))
