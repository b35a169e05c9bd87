"""One wavelet transform under several circular shifts of the signal."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..frozen_pytree import frozen_pytree
from ..saved_names import saved_as
from .operator import LinearOperator
from .wavelets import WaveletTransform


def shifted_transforms(transform: WaveletTransform, shifts: ArrayLike) -> ShiftedTransforms:
    r"""The coefficients of a signal in several shifted bases, one basis after another.

    With :math:`W` orthonormal and :math:`S_k` the shift by ``shifts[k]``, the rows are those of all :math:`W S_k^T`.
    They are a tight frame: :math:`B^T B = K I` for ``K`` shifts. With all shifts this would be the transform that is
    called undecimated or translation-invariant (Coifman and Donoho 1995); a few, odd ones too, come close.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.linalg import shifted_transforms, wavelet_transform
        >>> frame = shifted_transforms(wavelet_transform((8,), "haar"), [[0], [1], [3]])
        >>> x = jnp.arange(8.0)
        >>> frame.shape, bool(jnp.allclose(frame.T @ (frame @ x), 3 * x, atol=1e-5))
        ((24, 8), True)

    :param transform: an orthonormal transform (:func:`~numpyro_ext.linalg.wavelet_transform`).
    :param shifts: integers, shape ``(K, axes)``: how far a basis moves along each axis.
    :return: an operator of ``K`` times as many rows as columns.
    :raises ValueError: if the shifts have another shape, or are no integers.

    Cost of a product: ``K`` transforms.
    """
    shifts = np.asarray(shifts)
    axes = len(transform.shape_of_signal)
    if shifts.ndim != 2 or shifts.shape[1] != axes or not shifts.size or not np.issubdtype(shifts.dtype, np.integer):
        raise ValueError(
            f"shifts must be integers of shape (K, {axes}), one row per basis; got {shifts.dtype} of shape "
            f"{shifts.shape}."
        )
    return ShiftedTransforms(transform, tuple(tuple(int(step) for step in shift) for shift in shifts))


@saved_as("ShiftedTransforms")
@frozen_pytree
class ShiftedTransforms(LinearOperator):
    """Coefficients in several shifted bases; made by :func:`shifted_transforms`."""

    transform: WaveletTransform
    # Static: to roll by traced numbers takes longer than the transforms.
    shifts: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        size = self.transform.shape[1]
        return len(self.shifts) * size, size

    def _roll(self, signal: Array, shift: tuple[int, ...]) -> Array:
        return jnp.roll(signal, shift, tuple(range(signal.ndim)))

    def matvec(self, x: Array) -> Array:
        signal = x.reshape(self.transform.shape_of_signal)
        moved = jnp.stack([self._roll(signal, tuple(-step for step in shift)) for shift in self.shifts])
        return jax.vmap(self.transform.matvec)(moved.reshape(len(self.shifts), -1)).reshape(-1)

    def rmatvec(self, y: Array) -> Array:
        signals = jax.vmap(self.transform.rmatvec)(y.reshape(len(self.shifts), -1))
        signals = signals.reshape(len(self.shifts), *self.transform.shape_of_signal)
        moved = [self._roll(signal, shift) for signal, shift in zip(signals, self.shifts, strict=True)]
        return sum(moved[1:], moved[0]).reshape(-1)
