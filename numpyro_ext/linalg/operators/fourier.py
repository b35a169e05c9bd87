"""The discrete Fourier transform of images in real, orthonormal rows, and measurements of a part of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from ..frozen_pytree import frozen_pytree
from ..saved_names import saved_as
from .operator import LinearOperator, image_shape


@saved_as("FourierOperator")
@frozen_pytree
class FourierOperator(LinearOperator):
    r"""Rows :math:`\sqrt{w_k}\,\mathrm{Re}\,F_k`, then :math:`\sqrt{w_k}\,\mathrm{Im}\,F_k`, with :math:`F` unitary.

    The spectrum of a real image is conjugate symmetric. Of each pair of frequencies one is kept, with
    :math:`w_k = 2`; the others are their own conjugates, with :math:`w_k = 1` and no imaginary part. So the rows are
    orthonormal. Made by :func:`fourier` and :func:`masked_fourier`.
    """

    frequencies: Array
    """Flat indices of the frequencies whose real parts are rows; those with an imaginary part come first."""
    sides: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    num_pairs: int = dataclasses.field(metadata={"static": True})
    """Number of frequencies with an imaginary part."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.frequencies.shape[0] + self.num_pairs, int(np.prod(self.sides))

    def _weights(self, dtype: DTypeLike) -> Array:
        is_pair = jnp.arange(self.frequencies.shape[0]) < self.num_pairs
        return jnp.where(is_pair, jnp.sqrt(jnp.asarray(2.0, dtype)), jnp.asarray(1.0, dtype))

    def rows_of(self, spectrum: ArrayLike) -> Array:
        """Measured values of the unitary spectrum ``numpy.fft.fftn(image, norm="ortho")`` as a vector of rows.

        :param spectrum: complex, with the sides of the image; values that are not measured are ignored.
        """
        spectrum = jnp.asarray(spectrum)
        if spectrum.shape != self.sides:
            raise ValueError(f"rows_of: the spectrum must have shape {self.sides}, not {spectrum.shape}.")
        kept = spectrum.reshape(-1)[self.frequencies]
        kept = self._weights(kept.real.dtype) * kept
        return jnp.concatenate([kept.real, kept.imag[: self.num_pairs]])

    def matvec(self, x: Array) -> Array:
        return self.rows_of(jnp.fft.fftn(x.reshape(self.sides), norm="ortho"))

    def rmatvec(self, y: Array) -> Array:
        count = self.frequencies.shape[0]
        imaginary = jnp.pad(y[count:], (0, count - self.num_pairs))
        kept = self._weights(y.dtype) * jax.lax.complex(y[:count], imaginary)
        spectrum = jnp.zeros((self.shape[1],), kept.dtype).at[self.frequencies].set(kept)
        return jnp.fft.ifftn(spectrum.reshape(self.sides), norm="ortho").real.reshape(-1)


def fourier(shape: Sequence[int] | int) -> FourierOperator:
    """The discrete Fourier transform of real images, as an orthonormal operator of as many real rows as pixels.

    :param shape: sides of the image.
    :return: the operator; its ``rows_of(spectrum)`` arranges a complex spectrum in its rows.

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.linalg import fourier
    >>> transform = fourier((3, 4))
    >>> x = jnp.arange(12.0)
    >>> bool(jnp.allclose(transform.T @ (transform @ x), x, atol=1e-5))
    True

    Cost of a product: one complex Fourier transform.
    """
    return masked_fourier(np.ones(image_shape(shape), bool))


def masked_fourier(mask: Any) -> FourierOperator:
    """Measurements of some frequencies of an image, as in magnetic resonance imaging: real, orthonormal rows.

    :param mask: boolean, with the sides of the image: true for frequencies that are measured, in the order of
        ``numpy.fft.fftn``. A frequency and its conjugate count once.
    :return: the operator; its ``rows_of(spectrum)`` arranges measured complex values in its rows.
    :raises ValueError: for a mask that keeps nothing.

    Source: A. K. Jain (1989), *Fundamentals of Digital Image Processing*, section 5.5 (unitary DFT of real images).
    """
    if isinstance(mask, jax.core.Tracer):
        raise ValueError("masked_fourier: the mask must be known when the model is compiled; pass a NumPy array.")
    kept = np.asarray(mask)
    if kept.dtype != bool or kept.ndim == 0:
        raise ValueError(f"masked_fourier: the mask must be a boolean array, not {kept.dtype} of shape {kept.shape}.")
    if not kept.any():
        raise ValueError("masked_fourier: the mask keeps nothing; True marks what is measured.")
    numbers = np.arange(kept.size)
    opposite = np.ix_(*(-np.arange(n) % n for n in kept.shape))
    conjugate = numbers.reshape(kept.shape)[opposite].reshape(-1)
    kept = kept.reshape(-1)
    # of a pair keep the measured one, of two measured ones the first
    chosen = kept & ((numbers <= conjugate) | ~kept[conjugate])
    pairs, single = (np.nonzero(chosen & which)[0] for which in (numbers != conjugate, numbers == conjugate))
    frequencies = jnp.asarray(np.concatenate([pairs, single]), jnp.int32)
    return FourierOperator(frequencies, np.shape(mask), len(pairs))
