r"""Orthonormal wavelet transforms of signals, images and volumes with periodic borders.

One level splits an axis of even length :math:`N` into averages and details of half the length,

.. math:: a_k = \sum_i h_i\, x_{2k + 1 - F/2 + i}, \qquad d_k = \sum_i g_i\, x_{2k + 1 - F/2 + i}
    \qquad (\text{indices modulo } N),

with filters :math:`h, g` of even length :math:`F`. The signal is taken apart into its even and its odd samples, so
that each filter becomes a sum of shifted contiguous arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...optional import optional
from ..frozen_pytree import frozen_pytree
from ..saved_names import saved_as
from .operator import LinearOperator, image_shape

_Filters = tuple[tuple[float, ...], tuple[float, ...]]

# Up to this side one level along an axis is a product with a matrix: as fast, and compiled in a fraction of the time.
_LARGEST_MATRIX = 128


def wavelet_transform(
    shape: Sequence[int] | int, wavelet: str = "db2", num_levels: int | None = None
) -> WaveletTransform:
    r"""Orthonormal wavelet transform of a flattened signal, image or volume: ``coefficients = transform @ x``.

    The coefficients stand in the layout of Mallat (1989), flattened in row-major order: averages of the coarsest level
    in the first corner, details around it from coarse to fine. They are those of ``pywt.wavedecn`` with
    ``mode="periodization"`` after ``pywt.coeffs_to_array``. The adjoint, ``transform.T``, is the inverse, to about
    1e-10 or better (the filters are published to so many digits; the finite ones of ``"dmey"`` to 1e-3 only).

    Cost: linear in the number of elements and in the length of the filter.

    :param shape: sides of the array, one, two or three of them.
    :param str wavelet: an orthogonal discrete wavelet of PyWavelets (``pywt.wavelist(kind="discrete")``): ``"haar"``,
        ``"db2"``, ``"sym4"``, ``"coif1"``, ...
    :param int num_levels: how often the averages are split again. Default: as often as the sides can be halved
        without becoming shorter than the filter.
    :return: an operator with the attributes ``shape_of_signal``, ``wavelet`` and ``num_levels``.
    :raises ValueError: for wavelets that are not orthogonal, and sides that cannot be halved so many times.

    **Example:**

    >>> transform = wavelet_transform((2, 2), "haar", 1)
    >>> print(transform @ jnp.array([1.0, 1.0, 1.0, 5.0]))
    [ 4. -2. -2.  2.]

    **References**

    1. Mallat, S. G. (1989), *A theory for multiresolution signal decomposition: the wavelet representation*, IEEE
       Transactions on Pattern Analysis and Machine Intelligence 11, 674-693.
    """
    sides = image_shape(shape)
    if len(sides) > 3:
        raise ValueError(f"wavelet_transform: arrays of one to three axes, not of {len(sides)} ({sides}).")
    length = len(_filters(wavelet)[0])
    halvings = min((side & -side).bit_length() - 1 for side in sides)
    if num_levels is None:
        longest = max(0, int(math.log2(min(sides) / (length - 1))))
        num_levels = min(halvings, longest)
        if num_levels == 0:
            raise ValueError(
                f"wavelet_transform: the sides {sides} cannot be halved before they are odd or shorter than the "
                f"filter of {wavelet} ({length}). Pad to sides divisible by a power of two, or set num_levels."
            )
    if not isinstance(num_levels, int) or isinstance(num_levels, bool) or num_levels < 0:
        raise ValueError(f"wavelet_transform: num_levels must be a whole number from 0, not {num_levels!r}.")
    if num_levels > halvings:
        block = 2**num_levels
        padded = tuple(-(-side // block) * block for side in sides)
        raise ValueError(
            f"wavelet_transform: with {num_levels} levels every side must be divisible by 2^{num_levels} = {block}; "
            f"the shape is {sides}. Pad to {padded} (numpy.pad with mode='symmetric'), or take {halvings} levels."
        )
    return WaveletTransform(sides, wavelet, num_levels)


@saved_as("WaveletTransform")
@frozen_pytree
class WaveletTransform(LinearOperator):
    """An orthonormal wavelet transform; made by :func:`wavelet_transform`."""

    shape_of_signal: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    wavelet: str = dataclasses.field(metadata={"static": True})
    num_levels: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        size = math.prod(self.shape_of_signal)
        return size, size

    def matvec(self, x: Array) -> Array:
        return self._apply(x, is_transposed=False)

    def rmatvec(self, y: Array) -> Array:
        return self._apply(y, is_transposed=True)

    def _apply(self, x: Array, is_transposed: bool) -> Array:
        array = x.reshape(self.shape_of_signal)
        out: Array = _transformed(array, self.wavelet, self.num_levels, is_transposed)
        return out.reshape(-1)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _transformed(array: Array, wavelet: str, num_levels: int, is_transposed: bool) -> Array:
    """Split along every axis, and again in the corner of the averages; transposed: merge from this corner on."""
    step, levels = (_merge, range(num_levels)[::-1]) if is_transposed else (_split, range(num_levels))
    for level in levels:
        corner = tuple(slice(0, side >> level) for side in array.shape)
        block = array[corner]
        for axis in range(block.ndim):
            block = step(block, axis, wavelet)
        array = block if level == 0 else array.at[corner].set(block)
    return array


@functools.cache
def _filters(wavelet: str) -> _Filters:
    """The filters :math:`h` and :math:`g` of an orthogonal wavelet."""
    pywt = optional("pywt", "images")
    known = pywt.wavelist(kind="discrete")
    if wavelet not in known:
        raise ValueError(f"wavelet_transform: {wavelet!r} is not a discrete wavelet of PyWavelets, such as 'db2'.")
    found = pywt.Wavelet(wavelet)
    if not found.orthogonal:
        raise ValueError(
            f"wavelet_transform: {wavelet} ({found.family_name}) is not orthogonal: its transform does not keep "
            "white noise white. Take 'haar', or a wavelet of the families db, sym, coif or dmey."
        )
    return tuple(reversed(found.dec_lo)), tuple(reversed(found.dec_hi))


@functools.cache
def _matrix(wavelet: str, side: int) -> np.ndarray:
    """The orthogonal matrix of one level along an axis: averages, then details."""
    filters = _filters(wavelet)
    half, length = side // 2, len(filters[0])
    row, tap = np.indices((half, length))
    column = (2 * row + tap + 1 - length // 2) % side
    matrix = np.zeros((2, half, side))
    for part, taps in zip(matrix, filters, strict=True):
        np.add.at(part, (row, column), np.broadcast_to(taps, row.shape))
    return matrix.reshape(side, side)


def _multiply(matrix: np.ndarray, x: Array, axis: int) -> Array:
    return jnp.moveaxis(jnp.tensordot(jnp.asarray(matrix, x.dtype), x, (1, axis)), 0, axis)


def _split(x: Array, axis: int, wavelet: str) -> Array:
    """Averages and details along an axis, one after the other."""
    if x.shape[axis] <= _LARGEST_MATRIX:
        return _multiply(_matrix(wavelet, x.shape[axis]), x, axis)
    filters = _filters(wavelet)
    half, length = x.shape[axis] // 2, len(filters[0])
    pairs = x.reshape(*x.shape[:axis], half, 2, *x.shape[axis + 1 :])
    # Filter tap i meets the samples 2 k + offset_i.
    offsets = [i + 1 - length // 2 for i in range(length)]
    before, after = max(0, -(offsets[0] // 2)), max(0, offsets[-1] // 2)
    samples = [_wrap(jax.lax.index_in_dim(pairs, parity, axis + 1, False), axis, before, after) for parity in (0, 1)]
    # Keeps XLA from computing the padding once more for every tap.
    samples = jax.lax.optimization_barrier(samples)

    def filtered(taps: tuple[float, ...]) -> Array:
        total = jnp.zeros((), x.dtype)
        for tap, offset in zip(taps, offsets, strict=True):
            start = before + offset // 2
            total = total + tap * jax.lax.slice_in_dim(samples[offset % 2], start, start + half, axis=axis)
        return total

    return jnp.concatenate([filtered(filters[0]), filtered(filters[1])], axis)


def _merge(x: Array, axis: int, wavelet: str) -> Array:
    """The transpose of :func:`_split`."""
    if x.shape[axis] <= _LARGEST_MATRIX:
        return _multiply(_matrix(wavelet, x.shape[axis]).T, x, axis)
    filters = _filters(wavelet)
    half, length = x.shape[axis] // 2, len(filters[0])
    offset = 1 - length // 2
    # The sample 2 q + parity gets tap i of the coefficient k where 2 q + parity = 2 k + i + offset.
    terms = [
        [(i, (parity - i - offset) // 2) for i in range(length) if (parity - i - offset) % 2 == 0] for parity in (0, 1)
    ]
    shifts = [shift for each in terms for _, shift in each]
    before, after = max(0, -min(shifts)), max(0, *shifts)
    parts = [_wrap(jax.lax.slice_in_dim(x, i * half, (i + 1) * half, axis=axis), axis, before, after) for i in (0, 1)]
    parts = jax.lax.optimization_barrier(parts)

    def sample(parity: int) -> Array:
        total = jnp.zeros((), x.dtype)
        for i, shift in terms[parity]:
            for part, taps in zip(parts, filters, strict=True):
                start = before + shift
                total = total + taps[i] * jax.lax.slice_in_dim(part, start, start + half, axis=axis)
        return total

    return jnp.stack([sample(0), sample(1)], axis + 1).reshape(x.shape)


def _wrap(x: Array, axis: int, before: int, after: int) -> Array:
    """The array continued periodically along an axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (before, after)
    return jnp.pad(x, widths, mode="wrap")
