r"""Denoising with a hidden Markov tree on orthonormal wavelet coefficients: an exact posterior by one sum-product.

An image :math:`u` is seen in white noise, :math:`y = u + N(0, \sigma^2 I)`, and its coefficients :math:`s = W u` have a
:class:`~numpyro_ext.distributions.HiddenMarkovTree` as prior. Since :math:`W` is orthonormal the noise of the
coefficients is white as well, and the tree times it is one factor with exact moments
(:func:`~numpyro_ext.potentials.trees.mixture.tilted_moments`).

A wavelet basis is not invariant under shifts. The mixture of the posteriors of models whose basis is shifted is: its
mean is the average of the means, its variance the average of the variances plus the variance of the means.

Superseded by ``EP(wavelet_denoising, num_shifts=...)``, which reads a model.

**References**

1. Coifman, R. R. and Donoho, D. L. (1995), *Translation-invariant de-noising*, in Wavelets and Statistics, 125-150
   (averages over shifts).
2. Crouse, M. S., Nowak, R. D. and Baraniuk, R. G. (1998), *Wavelet-based statistical signal processing using hidden
   Markov models*, IEEE Transactions on Signal Processing 46, 886-902.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from numpyro_ext.linalg.operators.wavelets import WaveletTransform, wavelet_transform
from numpyro_ext.potentials.trees.forest import Forest
from numpyro_ext.potentials.trees.mixture import TreeMoments, TreeParameters, tilted_moments

from .tree_parameters import em_step


class TreeFit(NamedTuple):
    """Result of :func:`fit`."""

    parameters: TreeParameters
    noise_variance: Array
    log_evidence: Array
    """Log density of the data before each step. Shape ``(num_steps,)``."""


class TreeDenoising(NamedTuple):
    """Posterior of an image, or the mixture of several."""

    mean: Array
    """Mean of each pixel, of the shape of the image."""
    variance: Array
    """Variance of each pixel, of the shape of the image."""
    log_evidence: Array
    """Log density of the data under each member of the mixture. Shape ``(num_shifts,)``."""


@functools.partial(jax.jit, static_argnames=("num_steps", "learn_noise"))
def fit(
    transform: WaveletTransform,
    forest: Forest,
    parameters: TreeParameters,
    observed: ArrayLike,
    noise_variance: ArrayLike,
    num_steps: int = 60,
    learn_noise: bool = False,
) -> TreeFit:
    """Parameters of the tree, and the variance of the noise if asked for, by exact expectation-maximisation.

    Cost: ``num_steps`` times two tilted moments and one sum-product.

    :param WaveletTransform transform: the orthonormal transform.
    :param Forest forest: the forest over its coefficients (:func:`~numpyro_ext.potentials.wavelet_forest`).
    :param TreeParameters parameters: where to start
        (:func:`~benchmarks.baselines.tree_parameters.initial_parameters`).
    :param ArrayLike observed: the noisy image, of shape ``transform.shape_of_signal``.
    :param ArrayLike noise_variance: variance of the noise, or where to start.
    :param int num_steps: number of steps; none lowers the log evidence. The first 15 bring most of the gain.
    :param bool learn_noise: whether the variance of the noise is learned too; this takes hundreds of steps.
    """
    coefficients = _checked(transform, observed).reshape(-1)
    coefficients = transform.matvec(coefficients)
    start = jax.tree.map(lambda x: jnp.asarray(x, coefficients.dtype), parameters)
    # What has one value for all groups becomes one for each, as every step returns it.
    shape = jax.eval_shape(lambda p: em_step(forest, p, coefficients, 1.0)[0], start)
    start = jax.tree.map(lambda x, to: jnp.broadcast_to(x, to.shape).astype(to.dtype), start, shape)

    def step(state: tuple[TreeParameters, Array], _: None) -> tuple[tuple[TreeParameters, Array], Array]:
        parameters, noise = state
        parameters, moments = em_step(forest, parameters, coefficients, noise)
        if learn_noise:
            noise = jnp.mean(jnp.square(coefficients - moments.mean) + moments.variance)
        return (parameters, noise), moments.log_z

    noise = jnp.asarray(noise_variance, coefficients.dtype)
    (parameters, noise), log_evidence = jax.lax.scan(step, (start, noise), length=num_steps)
    return TreeFit(parameters, noise, log_evidence)


@functools.partial(jax.jit, static_argnames="batch_size")
def denoise(
    transform: WaveletTransform,
    forest: Forest,
    parameters: TreeParameters,
    observed: ArrayLike,
    noise_variance: ArrayLike,
    shifts: ArrayLike | None = None,
    batch_size: int = 4,
) -> TreeDenoising:
    """Posterior of an image seen in white noise, or the mixture of the posteriors of several shifted bases.

    The means are exact. In the variances the coefficients count as independent given the data: the covariances that
    the uncertainty about the states gives to those of a tree are left out.

    Cost: per shift two transforms, two tilted moments per coefficient and one sum-product; for the variances
    :func:`pixel_variance`.

    :param WaveletTransform transform: the orthonormal transform.
    :param Forest forest: the forest over its coefficients.
    :param TreeParameters parameters: the parameters, the same for all shifts.
    :param ArrayLike observed: the noisy image, of shape ``transform.shape_of_signal``.
    :param ArrayLike noise_variance: variance of the noise.
    :param ArrayLike shifts: circular shifts of the image, integers of shape ``(num_shifts, num_axes)``. Even and odd
        ones are needed. Default: no shift.
    :param int batch_size: how many shifts are worked on at a time; memory grows with it.
    """
    image = _checked(transform, observed)
    if shifts is None:
        shifts = jnp.zeros((1, image.ndim), jnp.int32)
    bases = _squared_bases(transform, image.dtype)
    axes = tuple(range(image.ndim))

    def posterior(shift: Array) -> tuple[Array, Array, Array]:
        moved = jnp.roll(image, tuple(shift), axes)
        moments: TreeMoments = tilted_moments(
            forest, parameters, transform.matvec(moved.reshape(-1)), jnp.asarray(noise_variance, image.dtype)
        )
        mean = transform.rmatvec(moments.mean).reshape(image.shape)
        variance = _pixel_variance(bases, moments.variance.reshape(image.shape))
        back = tuple(-shift)
        return jnp.roll(mean, back, axes), jnp.roll(variance, back, axes), moments.log_z

    means, variances, log_evidence = jax.lax.map(posterior, jnp.asarray(shifts), batch_size=batch_size)
    mean = jnp.mean(means, axis=0)
    return TreeDenoising(mean, jnp.mean(variances + jnp.square(means - mean), axis=0), log_evidence)


def pixel_variance(transform: WaveletTransform, variance: ArrayLike) -> Array:
    """Variances of the pixels of an image whose coefficients are independent: the diagonal of ``T' diag(v) T``.

    The square of a wavelet of several axes is the product of those of one axis, so that each sub-band needs one
    product with a matrix per axis. Cost: about ``num_pixels * side`` multiplications per axis.

    :param WaveletTransform transform: the transform.
    :param ArrayLike variance: variances of the coefficients, flat or of the shape of the image.
    :return: variances of the shape ``transform.shape_of_signal``.

    **Example:**

    >>> transform = wavelet_transform((2, 2), "haar", 1)
    >>> print(pixel_variance(transform, jnp.array([1.0, 0.0, 0.0, 0.0])))
    [[0.25 0.25]
     [0.25 0.25]]
    """
    variance = jnp.asarray(variance)
    return _pixel_variance(_squared_bases(transform, variance.dtype), variance.reshape(transform.shape_of_signal))


# For each level, from fine to coarse, and axis: squares of the averaging and of the detail wavelets, one per row.
_Bases = list[list[tuple[Array, Array]]]


def _squared_bases(transform: WaveletTransform, dtype: jnp.dtype) -> _Bases:
    bases: _Bases = []
    for level in range(1, transform.num_levels + 1):
        along = []
        for side in transform.shape_of_signal:
            one_axis = wavelet_transform(side, transform.wavelet, level)
            rows = jnp.square(one_axis @ jnp.eye(side, dtype=dtype))
            along.append((rows[: side >> level], rows[side >> level : side >> (level - 1)]))
        bases.append(along)
    return bases


def _pixel_variance(bases: _Bases, variance: Array) -> Array:
    if not bases:
        return variance
    sides = variance.shape

    def spread(block: Array, along: list[tuple[Array, Array]], axis: int) -> Array:
        """Sum over the sub-bands of a block of what each gives to the pixels, from this axis on."""
        if axis == variance.ndim:
            return block
        half = along[axis][0].shape[0]
        parts = (
            jnp.moveaxis(
                jnp.tensordot(
                    spread(jax.lax.slice_in_dim(block, i * half, (i + 1) * half, axis=axis), along, axis + 1),
                    along[axis][i],
                    ((axis,), (0,)),
                ),
                -1,
                axis,
            )
            for i in (0, 1)
        )
        return functools.reduce(jnp.add, parts)

    total = jnp.zeros(sides, variance.dtype)
    for level, along in enumerate(bases, 1):
        block = variance[tuple(slice(0, side >> (level - 1)) for side in sides)]
        if level < len(bases):
            block = block.at[tuple(slice(0, side >> level) for side in sides)].set(0.0)
        total = total + spread(block, along, 0)
    return total


def _checked(transform: WaveletTransform, observed: ArrayLike) -> Array:
    image = jnp.asarray(observed)
    if image.shape != transform.shape_of_signal:
        raise ValueError(
            f"The transform is one of arrays of shape {transform.shape_of_signal}; the image has {image.shape}."
        )
    return image.astype(jnp.result_type(image, float))
