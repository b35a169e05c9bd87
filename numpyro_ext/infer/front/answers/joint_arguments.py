"""The arguments of a fit and those of a prediction as one call of the model, with the rows of the fit first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....structure.model.running.execution import describe_value
from ....structure.model.running.pandas_arguments import is_pandas
from ..columns import labelled_as


class NotJoined(ValueError):
    """The arguments of the fit and the new ones do not go together, or the model on both is not that of the fit."""


class JointCall(NamedTuple):
    """A call of the model on old and new rows together."""

    arguments: dict[str, Any]
    """By the names of the parameters; what was left out is padded with values of the fit."""
    left_out: frozenset[int]
    """Numbers of the leaves of the arguments that were given in the fit and are left out in the new call."""
    appended: dict[int, int]
    """From lengths in the fit to the numbers of new rows behind them; what has these lengths is cut to the new rows."""
    is_new: bool
    """True if anything is another than in the fit, but for what was left out."""


def without(arguments: Mapping[str, object], numbers: frozenset[int]) -> dict[str, Any]:
    """The arguments with ``None`` for some of their leaves."""
    leaves, structure = jax.tree.flatten(dict(arguments), is_leaf=_is_leaf)
    found: dict[str, Any] = jax.tree.unflatten(structure, [None if n in numbers else v for n, v in enumerate(leaves)])
    return {name: found[name] for name in arguments}


def leaves_equal_to(arguments: Mapping[str, object], values: Sequence[np.ndarray]) -> frozenset[int]:
    """Numbers of the leaves of arguments that are one of some arrays."""
    arrays = enumerate(map(numbers_of, jax.tree.leaves(dict(arguments), is_leaf=_is_leaf)))
    return frozenset(n for n, found in arrays if found is not None and any(np.array_equal(found, v) for v in values))


def joint_calls(
    old: Mapping[str, object],
    new: Mapping[str, object],
    lengths: set[int],
    given: Mapping[str, object],
    *,
    fill: int = 0,
) -> Iterator[JointCall]:
    """The calls of a model on old and new rows together, the likeliest first.

    Arrays that differ along one axis are put one behind the other, or are the new one where it begins with the old one;
    what was left out is padded; whole numbers take the larger value, or the sum where they count rows that are put
    together. An argument that is equal in both calls stays; where it might count rows, the other way is tried as well.

    :param old: arguments of the fit, by name.
    :param new: those of the new call.
    :param lengths: of the axes of the observed sites in the fit.
    :param given: joint values of some arguments.
    :param int fill: which of two values pads what was left out: nothing may depend on it.
    :raises NotJoined: if an argument does not go together, naming it.
    """
    pairs = [pair for name in sorted(old) for pair in _pairs(name, old[name], new.get(name))]
    fixed = {n for n, pair in enumerate(pairs) if pair.argument in given}
    rows = _Rows.among([pair for n, pair in enumerate(pairs) if n not in fixed], lengths, fill)
    for name, value in given.items():
        rows.follow(_pairs(name, old[name], value))
    structure = jax.tree.structure(dict(old), is_leaf=_is_leaf)
    # Arguments of both kinds that are equal in both calls and could count rows, which are as many in both.
    unclear = {n: _is_integer(pair.old) for n, pair in enumerate(pairs) if n not in fixed and rows.may_count(pair)}
    missing = {n for n, pair in enumerate(pairs) if pair.new is None and pair.old is not None} - fixed
    for do_numbers, do_arrays in itertools.product(*((False, True) if kind in unclear.values() else (False,)
                                                     for kind in (True, False))):  # fmt: skip
        follow = {n for n, is_number in unclear.items() if (do_numbers if is_number else do_arrays)}
        leaves = [p.old if n in fixed else rows.joint(p, n in follow) for n, p in enumerate(pairs)]
        found: dict[str, Any] = jax.tree.unflatten(structure, leaves)
        is_new = bool(given) or any(leaf is not pair.old for leaf, pair in zip(leaves, pairs, strict=True))
        arguments = {name: {**found, **given}[name] for name in old}
        yield JointCall(arguments, frozenset(missing), dict(rows.appended), is_new)


class _Pair(NamedTuple):
    """One argument, or one element of an argument that is a container, in both calls."""

    argument: str
    name: str
    old: Any
    new: Any

    def refuse(self, what: str) -> NotJoined:
        return NotJoined(
            f"argument {self.name!r} is {describe_value(self.old)} in the fit and {describe_value(self.new)} in the "
            f"new call: {what}. Say in joint={{{self.argument!r}: ...}} what the argument is for old and new rows "
            "together, the old ones first; or give the model all inputs at once in run(...), and mask the observations "
            "that are to be predicted."
        )

    @property
    def arrays(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        return numbers_of(self.old), numbers_of(self.new)

    @property
    def is_equal(self) -> bool:
        if self.old is self.new:
            return True
        first, second = self.arrays
        if first is not None and second is not None:
            return np.array_equal(first, second) or (
                first.dtype.kind == second.dtype.kind == "f" and np.array_equal(first, second, equal_nan=True)
            )
        if first is not None or second is not None or self.old is None or self.new is None:
            return False
        try:
            return bool(np.all(self.old == self.new))
        except (TypeError, ValueError):
            return False

    def changed_axis(self, lengths: set[int]) -> int | None:
        """The axis along which two arrays differ; of arrays of one shape the first that may count observations."""
        first, second = self.arrays
        if first is None or second is None or self.is_equal:
            return None
        if first.ndim != second.ndim:
            raise self.refuse(f"they have {first.ndim} and {second.ndim} axes")
        found = [k for k in range(first.ndim) if first.shape[k] != second.shape[k]]
        if len(found) > 1:
            raise self.refuse("two axes have another length, so they cannot be put one behind the other")
        if not second.size:
            raise self.refuse("there is nothing to predict")
        counting = [k for k in range(first.ndim) if first.shape[k] in lengths]
        return found[0] if found else counting[0] if counting else None

    def begins_with_old(self, axis: int) -> bool:
        first, second = self.arrays
        assert first is not None and second is not None
        length = first.shape[axis]
        return second.shape[axis] > length and bool(np.all(np.take(second, range(length), axis) == first))


@dataclass
class _Rows:
    """Number of rows behind those of the fit."""

    lengths: set[int]
    appended: dict[int, int]
    """From a length of observed sites in the fit to the number of new rows put behind."""
    extended: dict[int, int]
    """From other lengths to what they grow by."""
    fill: int

    @classmethod
    def among(cls, pairs: list[_Pair], lengths: set[int], fill: int) -> _Rows:
        rows = cls(lengths, {}, {}, fill)
        axes = [(pair, pair.changed_axis(lengths)) for pair in pairs]
        changed = [(pair, axis, len(np.moveaxis(numbers_of(pair.old), axis, 0))) for pair, axis in axes
                   if axis is not None]  # fmt: skip
        by_row = [found for found in changed if found[2] in lengths]
        does_extend = all(pair.begins_with_old(axis) for pair, axis, _ in by_row)
        for pair, axis, before in changed:
            now = np.shape(pair.new)[axis]
            if before in lengths and not does_extend:
                kind, more = rows.appended, now
            else:
                kind, more = rows.extended, now - before if pair.begins_with_old(axis) else now
            if kind.setdefault(before, more) != more:
                raise pair.refuse(f"other arguments of {before} rows in the fit have {kind[before]} new ones")
        for pair in pairs:
            if not (_is_integer(pair.old) and _is_integer(pair.new)) or pair.old == pair.new:
                continue
            if pair.new > pair.old:
                rows.extended.setdefault(int(pair.old), int(pair.new - pair.old))
            elif not changed:
                raise pair.refuse(
                    "what is counted begins with that of the fit, so give the total: for as many more, "
                    f"{pair.name}={int(pair.old) + int(pair.new)}"
                )
        return rows

    def follow(self, pairs: list[_Pair]) -> None:
        """Take the number of new rows from arguments that are given for old and new rows together."""
        for pair in pairs:
            first, whole = pair.arrays
            if first is not None and whole is not None and first.ndim == whole.ndim:
                for before, now in zip(first.shape, whole.shape, strict=True):
                    if before in self.lengths and now > before:
                        self.appended.setdefault(before, now - before)

    def may_count(self, pair: _Pair) -> bool:
        """True if an argument that is equal in both calls could still count rows, which are as many in both."""
        if not pair.is_equal:
            return False
        first, _ = pair.arrays
        sizes = () if first is None else first.shape
        sizes = (int(pair.old),) if _is_integer(pair.old) else sizes
        return any(self.appended.get(size) == size for size in sizes)

    def joint(self, pair: _Pair, counts_rows: bool) -> Any:
        """The value for old and new rows together."""
        first, second = pair.arrays
        if pair.is_equal and not counts_rows:
            return pair.old
        if first is None and second is None:
            if _is_integer(pair.old) and _is_integer(pair.new):
                is_sum = self.appended.get(int(pair.old)) == int(pair.new)
                return int(pair.old) + int(pair.new) if is_sum else max(int(pair.old), int(pair.new))
            return pair.old if pair.new is None else pair.new
        if first is None:
            assert second is not None
            axes = [k for k in range(second.ndim) if second.shape[k] in self.appended.values()]
            if pair.old is None or not axes:
                return pair.new
            length = next(n for n, more in self.appended.items() if more == second.shape[axes[0]])
            return _joined(np.full(_with_length(second, axes[0], length), pair.old), pair.new, axes[0])
        if second is None:
            is_left_out = pair.new is None or isinstance(pair.new, bool)
            growth = {**self.extended, **self.appended}
            axes = [k for k in range(first.ndim) if first.shape[k] in self.appended]
            axes = axes or [k for k in range(first.ndim) if first.shape[k] in growth]
            if not axes and not is_left_out:
                raise pair.refuse("a number stands for rows only beside arrays that say how many there are")
            if not axes:
                return pair.old
            more = growth[first.shape[axes[0]]]
            if pair.new is None:
                return _joined(pair.old, _copies(first, axes[0], more, self.fill), axes[0])
            return _joined(pair.old, np.full(_with_length(first, axes[0], more), pair.new), axes[0])
        axis = pair.changed_axis(self.lengths)
        if axis is None and counts_rows:
            axis = next(k for k in range(first.ndim) if first.shape[k] in self.appended)
        if axis is None:
            return pair.new
        if first.shape[axis] not in self.appended and pair.begins_with_old(axis):
            return _like(pair.old, second)
        return _joined(pair.old, pair.new, axis)


def _pairs(argument: str, old: object, new: object) -> list[_Pair]:
    """Both values of an argument, leaf by leaf."""
    paths, structure = jax.tree_util.tree_flatten_with_path(old, is_leaf=_is_leaf)
    try:
        leaves: list[Any] = structure.flatten_up_to(_aligned(old, new))  # type: ignore[attr-defined]
    except ValueError as error:
        raise _Pair(argument, argument, old, new).refuse("they are containers of other structure") from error
    return [
        _Pair(argument, argument + jax.tree_util.keystr(path), value, leaf)
        for (path, value), leaf in zip(paths, leaves, strict=True)
    ]


def _aligned(old: Any, new: Any) -> Any:
    """The new value, with ``None`` for entries of dictionaries, and old values for columns of tables, left out."""
    if isinstance(old, dict) and (new is None or isinstance(new, dict)):
        given = new or {}
        extra = {key: value for key, value in given.items() if key not in old}
        return {key: _aligned(value, given.get(key)) for key, value in old.items()} | extra
    if hasattr(old, "columns") and hasattr(new, "columns") and is_pandas(old) and is_pandas(new):
        missing = [column for column in old.columns if column not in new.columns]
        return new.assign(**{column: old[column].iloc[0] for column in missing})[list(old.columns)]
    return new


def _is_numbers(value: object) -> bool:
    """True if a list (of lists) holds numbers alone, and stands for an array."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, bool | int | float | np.generic) or _is_numbers(item) for item in value)


def _is_leaf(value: object) -> bool:
    return value is None or _is_numbers(value)


def numbers_of(value: object) -> Any:
    """The numbers of an array, a list or a pandas object with at least one axis, ``None`` of all else."""
    is_array = isinstance(value, jax.Array | np.ndarray) and not jnp.issubdtype(value.dtype, jax.dtypes.extended)
    found = np.asarray(value) if is_array or _is_numbers(value) or is_pandas(value) else None
    return found if found is not None and found.ndim else None


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _with_length(array: np.ndarray, axis: int, length: int) -> tuple[int, ...]:
    return (*array.shape[:axis], length, *array.shape[axis + 1 :])


def _copies(array: np.ndarray, axis: int, number: int, fill: int) -> np.ndarray:
    """A row of an array, the first of numbers alone, so many times; or the first that is another than this one."""
    rows = np.moveaxis(array, axis, 0)
    flat = rows.reshape(len(rows), -1)
    is_number = np.isfinite(flat).all(1) if array.dtype.kind == "f" else np.ones(len(rows), bool)
    first = int(np.argmax(is_number))
    is_other = is_number & (flat != flat[first]).any(1)
    chosen = int(np.argmax(is_other)) if fill and is_other.any() else first
    copies = np.repeat(np.take(array, [chosen], axis), number, axis)
    # Where all are alike another value is one that they do not have.
    return copies + 1 if fill and not is_other.any() and array.dtype.kind in "iuf" else copies


def _joined(old: object, new: object, axis: int) -> object:
    """Two arrays, lists or tables, one behind the other, of the kind of the old one."""
    if is_pandas(old) and is_pandas(new):
        import pandas

        # Labels that are new stand behind those of the fit.
        return pandas.concat([labelled_as(new, old), new], axis=axis, ignore_index=axis == 0)
    return _like(old, np.concatenate([numbers_of(old), numbers_of(new)], axis))


def _like(old: object, array: np.ndarray) -> object:
    return jnp.asarray(array) if isinstance(old, jax.Array) else array
