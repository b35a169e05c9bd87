"""Numbers written into programs that turn out to change from run to run: they are data, like arrays."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from ...compilation.store import shared

ELEMENTWISE = frozenset(
    "abs add add_any broadcast_in_dim convert_element_type copy cos digamma div eq erf erfc erf_inv exp expm1 ge gt"
    " integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg reshape rsqrt select_n sign sin sqrt"
    " square sub tanh".split()
)
"""Primitives to which a number in a program and one among its data are the same. In others, such as powers, what an
operation is may depend on it."""


class _Seen:
    """The numbers that a program had when it was last made, and which of them have changed at any time."""

    def __init__(self, hash_without: int, number: int) -> None:
        self.values: Sequence[bytes] | None = None
        self.has_changed = np.zeros(number, bool)


def changing_literals(without_numbers: Hashable, values: Sequence[object]) -> np.ndarray:
    """Mask of the numbers that have had other values in earlier programs that are equal but for their numbers.

    A prior around ``y.mean()`` of an array of NumPy, or with a scale that is an argument, makes another program of
    every data set or scale. The first is compiled as it is, the second with the number among the data, and after that
    nothing is.

    :param without_numbers: equal for programs that are equal but for these numbers.
    :param values: the numbers.
    :return: shape ``(len(values),)``.
    """
    found = [np.asarray(value).tobytes() for value in values]
    # A hash is enough: it is never wrong to take a number for data.
    seen = shared(_Seen, hash(without_numbers), len(found))
    if seen.values is not None:
        seen.has_changed |= np.array([now != before for now, before in zip(found, seen.values, strict=True)], bool)
    seen.values = found
    return seen.has_changed
