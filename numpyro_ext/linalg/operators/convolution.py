"""Convolution of images with a known kernel, under several rules for what lies outside of the image."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..frozen_pytree import frozen_pytree
from ..saved_names import saved_as
from .operator import LinearOperator, image_shape

# rules by their names in numpy.pad
_PADDING = {"periodic": "wrap", "zero": "constant", "reflect": "symmetric", "replicate": "edge"}
# The sum over the kernel costs less than Fourier transforms below so many entries; and below so many products it is
# cheap and shows to whoever reads a model that each row has few entries.
_MAX_DIRECT_SIZE = 64
_MAX_DIRECT_PRODUCTS = 2**22


def convolution(shape: Sequence[int] | int, kernel: ArrayLike, boundary: str = "periodic") -> LinearOperator:
    r"""Blurring with a known kernel: the image convolved with it, of the same size.

    .. math:: (k * x)_i = \sum_j k_j \, x_{i + c - j}, \qquad c = \lfloor \text{kernel size} / 2 \rfloor,

    as ``scipy.ndimage.convolve`` has it.

    :param shape: sides of the image.
    :param ArrayLike kernel: point spread function, with as many axes as the image, of any sides, odd or even, also
        larger than the image. It may depend on hyperparameters.
    :param str boundary: what lies outside of the image: ``"periodic"``, the image itself again; ``"zero"``, nothing;
        ``"reflect"``, its mirror image (``d c b a | a b c d | d c b a``); ``"replicate"``, the nearest pixel.
    :return: a square operator on flattened images.

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.linalg import convolution
    >>> blur = convolution((4,), jnp.array([0.5, 0.5]), boundary="zero")
    >>> print(blur @ jnp.array([4.0, 0.0, 0.0, 2.0]))
    [2. 0. 1. 1.]

    Cost of a product: the sum over a kernel of up to 64 entries (more for small images), else Fourier transforms.
    """
    sides = image_shape(shape)
    kernel = jnp.asarray(kernel, jnp.result_type(float, kernel))
    if boundary not in _PADDING:
        raise ValueError(f"convolution: boundary must be one of {list(_PADDING)}, not {boundary!r}.")
    if kernel.ndim != len(sides) or kernel.size == 0:
        raise ValueError(
            f"convolution: a kernel of shape {kernel.shape} does not fit images of shape {sides}; it needs "
            "as many axes."
        )
    is_small = kernel.size <= _MAX_DIRECT_SIZE or kernel.size * np.prod(sides) <= _MAX_DIRECT_PRODUCTS
    return _DirectConvolution(kernel, sides, boundary) if is_small else _by_fourier(kernel, sides, boundary)


def _by_fourier(kernel: Array, sides: tuple[int, ...], boundary: str) -> LinearOperator:
    if boundary == "periodic":
        return _FourierConvolution(_transfer(_fold(kernel, sides), sides), sides, kernel.shape, boundary)
    padded = tuple(n + k - 1 for n, k in zip(sides, kernel.shape, strict=True))
    return _FourierConvolution(_transfer(kernel, padded), sides, kernel.shape, boundary)


def _pad(image: Array, kernel_shape: tuple[int, ...], boundary: str) -> Array:
    """The image with as much of its surroundings as the kernel reaches."""
    # the kernel is applied from its last entry to its first: element i reads i + c - (k - 1) .. i + c
    width = [(k - 1 - k // 2, k // 2) for k in kernel_shape]
    return jnp.pad(image, width, mode=_PADDING[boundary])


def _fold(kernel: Array, sides: tuple[int, ...]) -> Array:
    """The kernel around the origin of a periodic image."""
    places = [(np.arange(k) - k // 2) % n for k, n in zip(kernel.shape, sides, strict=True)]
    return jnp.zeros(sides, kernel.dtype).at[np.ix_(*places)].add(kernel)


def _transfer(kernel: Array, sides: tuple[int, ...]) -> Array:
    return jnp.fft.rfftn(kernel, s=sides)


@saved_as("DirectConvolution")
@frozen_pytree
class _DirectConvolution(LinearOperator):
    kernel: Array
    sides: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    boundary: str = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        size = int(np.prod(self.sides))
        return size, size

    def matvec(self, x: Array) -> Array:
        padded = _pad(x.reshape(self.sides), self.kernel.shape, self.boundary)
        dtype = jnp.result_type(padded, self.kernel)
        flipped = jnp.flip(self.kernel).astype(dtype)
        out = jax.lax.conv_general_dilated(
            padded.astype(dtype)[None, None], flipped[None, None], (1,) * len(self.sides), "VALID"
        )
        return out.reshape(-1)


@saved_as("FourierConvolution")
@frozen_pytree
class _FourierConvolution(LinearOperator):
    transfer: Array
    """Transform of the kernel on the (padded) image."""
    sides: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    kernel_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    boundary: str = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        size = int(np.prod(self.sides))
        return size, size

    def matvec(self, x: Array) -> Array:
        image = x.reshape(self.sides)
        if self.boundary == "periodic":
            return _filter(image, self.transfer).reshape(-1)
        padded = _filter(_pad(image, self.kernel_shape, self.boundary), self.transfer)
        # the first entries are those that wrapped around
        inside = tuple(slice(k - 1, None) for k in self.kernel_shape)
        return padded[inside].reshape(-1)


def _filter(image: Array, transfer: Array) -> Array:
    return jnp.fft.irfftn(jnp.fft.rfftn(image) * transfer, s=image.shape)
