"""Pictures with gaps: what fills them, and what pairs of seen pixels say of the details."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_ext.linalg import WaveletTransform
from numpyro_ext.potentials import wavelet_forest

__all__ = ["filled_gaps", "squares_between_seen"]


def filled_gaps(observed: Array, mask: np.ndarray) -> Array:
    """The image with missing pixels replaced by weighted means of seen ones, as near as there are enough of them."""
    image, is_open = observed, ~mask
    for width in 2.0 ** np.arange(-0.5, 2.0 + np.log2(max(mask.shape)), 0.5):
        kernels = []
        for side in mask.shape:
            distance = np.arange(side)[:, None] - np.arange(side)
            kernels.append(np.exp(-0.5 * (distance / width) ** 2) / width)
        total, weight = observed, mask.astype(float)
        for axis, kernel in enumerate(kernels):
            total = jnp.moveaxis(jnp.tensordot(jnp.asarray(kernel, float), total, (1, axis)), 0, axis)
            weight = np.moveaxis(np.tensordot(kernel, weight, (1, axis)), 0, axis)
        is_filled = is_open & (weight > 0.5)
        image = jnp.where(is_filled, total / np.where(is_filled, weight, 1.0), image)
        is_open = is_open & ~is_filled
    return jnp.where(is_open, jnp.sum(observed) / mask.sum(), image)


def squares_between_seen(transform: WaveletTransform, observed: Array, is_seen: Array, filled: Array) -> Array:
    r"""Expected squares of the details of a picture with gaps, noise included, for each coefficient; zero elsewhere.

    Filled gaps are smooth, so the details of what fills them are too small. Squared differences of pixels that are both
    seen are not: with :math:`\gamma(h)` half their mean over all pairs at the lag :math:`h`, the expected square of a
    detail with the filter :math:`w` is :math:`-\sum_h (w \star w)(h) \gamma(h)` (Mondal and Percival, 2010). Lags at
    which no pair is seen have the differences of the filled picture.

    **References**

    1. Mondal, D. and Percival, D. B. (2010), Wavelet variance analysis for gappy time series, *Annals of the Institute
       of Statistical Mathematics* 62, 943-966.

    :param transform: of pictures of this shape.
    :param observed: what is seen, zero elsewhere.
    :param is_seen: one where a pixel is seen, zero elsewhere.
    :param filled: the picture with its gaps filled.
    :return: shape ``(num_coefficients,)``.
    """
    size = observed.size

    def half_squares(image: Array, weight: Array) -> tuple[Array, Array]:
        """Sums over pairs at each lag, around the edges, and how many pairs there are."""
        image = weight * (image - jnp.sum(weight * image) / jnp.sum(weight))
        seen, first, second = (jnp.fft.fftn(x) for x in (weight, image, jnp.square(image)))
        sums = jnp.real(jnp.fft.ifftn(jnp.real(seen * jnp.conj(second)) - jnp.square(jnp.abs(first))))
        return sums, jnp.real(jnp.fft.ifftn(jnp.square(jnp.abs(seen))))

    sums, number = half_squares(observed, is_seen)
    everywhere = half_squares(filled, jnp.ones_like(filled))[0] / size
    variogram = jnp.fft.fftn(jnp.where(number > 0.5, sums / jnp.maximum(number, 0.5), everywhere))
    groups = wavelet_forest(transform, per_orientation=True).groups

    def square(group: Array) -> Array:
        basis = jnp.zeros(size).at[jnp.argmax(groups == group)].set(1.0)
        response = jnp.fft.fftn((transform.T @ basis).reshape(observed.shape))
        return -jnp.sum(jnp.real(variogram) * jnp.square(jnp.abs(response))) / size

    num_groups = 1 + transform.num_levels * (2**observed.ndim - 1)
    # The first group holds the averages, which are no details.
    squares: Array = jax.lax.map(square, jnp.arange(num_groups)).at[0].set(0.0)
    return squares[groups]
