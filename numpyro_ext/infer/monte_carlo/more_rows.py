"""Updates with more rows: arrays filled up to a power of two and masked, so that one program serves many lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from numpyro.primitives import Messenger

from ...structure.model.running.recording import log_fault
from ...structure.model.verification import tolerance_of_densities
from .kernels.path import Particles
from .kernels.steps import Programs
from .target import Target

_FEWEST_ROWS = 32
_NUM_POINTS = 4


class FilledTargets(NamedTuple):
    """A model on the arguments before and after an update, in arrays of one length."""

    before: Target
    after: Target


class MoreRows:
    """Arguments of a model whose arrays grow along their leading axis, in arrays that seldom do.

    Rows that are filled up repeat the last one, and their likelihood is masked. Whether that is the same model, only
    its densities tell (it may take the mean of all rows, or their number): see :meth:`are_same`.

    :param model: a NumPyro model.
    """

    def __init__(self, model: Callable[..., object]) -> None:
        self._model = model
        self._length = _FEWEST_ROWS
        self._leaves: list[int] = []
        self._target: Target | None = None
        self._is_given_up = False

    def __call__(self, is_real: Array, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        """The model with its likelihood masked along the leading axis of observed sites.

        :param is_real: true for rows that count, shape ``(rows,)``.
        """
        with _MaskedRows(is_real):
            self._model(*args, **kwargs)

    def targets(self, before: Target, after: Target) -> FilledTargets | None:
        """Both in filled arrays; ``None`` if no array has grown, or the model does not run on filled ones.

        :param before: the model on the arguments before.
        :param after: on other arguments.
        """
        structure: Any
        old, structure = jax.tree.flatten((before.args, before.kwargs))
        new, other = jax.tree.flatten((after.args, after.kwargs))
        if self._is_given_up or structure != other or not self._find_rows(old, new):
            return None
        number_before, number = len(old[self._leaves[0]]), len(new[self._leaves[0]])
        while self._length < max(number_before, number):
            self._length *= 2

        def filled(leaves: list[Any], number: int) -> tuple[object, ...]:
            whole = [self._filled(leaf) if place in self._leaves else leaf for place, leaf in enumerate(leaves)]
            return np.arange(self._length) < number, *jax.tree.unflatten(structure, whole)

        try:
            args = filled(new, number)
            if self._target is None:
                self._target = Target(self, after.rng_key, args, {}, after.given)
            self._target = self._target.with_arguments(args, {})
            found = FilledTargets(self._target.with_arguments(filled(old, number_before), {}), self._target)
        except Exception:  # whatever a model does on arrays of another length
            log_fault("The model does not run on filled arrays, and updates compile for each number of rows")
            self._is_given_up = True
            return None
        is_alike = found.after.shapes == after.shapes and found.after.shares_programs_with(found.before)
        return found if is_alike else None

    def are_same(
        self, filled: FilledTargets, steps: Programs, programs: Programs, after: Target, at: Particles
    ) -> bool:
        """True if filled arrays change neither the prior nor the likelihood; if not, none are filled any more.

        :param filled: as :meth:`targets` gives it.
        :param steps: programs of filled arrays.
        :param programs: of the model itself.
        :param after: the model itself on the arguments after the update.
        :param at: particles of the arguments before it, the first few of which are looked at.
        """
        few, levels = at.vectors[:_NUM_POINTS], at.log_likelihood[:_NUM_POINTS]
        found, expected = steps.levels(few, filled.after.data), programs.levels(few, after.data)
        pairs = *zip(found, expected, strict=True), (steps.levels(few, filled.before.data)[1], levels)
        tolerance = float(tolerance_of_densities(levels.dtype))
        if not all(np.allclose(one, other, tolerance, tolerance) for one, other in pairs):
            self._is_given_up = True
        return not self._is_given_up

    def _find_rows(self, old: list[Any], new: list[Any]) -> bool:
        """Find the arrays that have another length; those of the last update where none has."""
        pairs = list(zip(old, new, strict=True))
        changed = [
            place for place, pair in enumerate(pairs) if all(map(_is_array, pair)) and pair[0].shape != pair[1].shape
        ]
        if any(not new[place].ndim or old[place].shape[1:] != new[place].shape[1:] for place in changed):
            return False
        self._leaves = changed or self._leaves
        lengths = {(len(old[place]), len(new[place])) for place in self._leaves}
        return len(lengths) == 1 and all(min(pair) > 0 for pair in lengths)

    def _filled(self, leaf: Any) -> np.ndarray:
        rows = np.asarray(leaf)
        return np.concatenate([rows, np.repeat(rows[-1:], self._length - len(rows), axis=0)])


class _MaskedRows(Messenger):
    """Masks observed sites along their leading axis."""

    def __init__(self, is_real: Array) -> None:
        super().__init__()
        self._is_real = is_real

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or not msg["is_observed"]:
            return
        event = len(msg["fn"].event_shape)
        values = np.shape(msg["value"])
        shape = jax.lax.broadcast_shapes(values[: len(values) - event], msg["fn"].batch_shape)
        if shape[:1] == self._is_real.shape:
            msg["fn"] = msg["fn"].mask(self._is_real.reshape(-1, *[1] * (len(shape) - 1)))


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)
