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

from numpyro_ext.linalg.operators.wavelets import WaveletTransform
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

    Cost: per shift two transforms, two tilted moments per coefficient and one sum-product; for the variances a product
    with the squares of the transform as a matrix.

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
    squares = jnp.square(transform.materialise()).T
    axes = tuple(range(image.ndim))

    def posterior(shift: Array) -> tuple[Array, Array, Array]:
        moved = jnp.roll(image, tuple(shift), axes)
        moments: TreeMoments = tilted_moments(
            forest, parameters, transform.matvec(moved.reshape(-1)), jnp.asarray(noise_variance, image.dtype)
        )
        mean = transform.rmatvec(moments.mean).reshape(image.shape)
        variance = (squares @ moments.variance).reshape(image.shape)
        back = tuple(-shift)
        return jnp.roll(mean, back, axes), jnp.roll(variance, back, axes), moments.log_z

    means, variances, log_evidence = jax.lax.map(posterior, jnp.asarray(shifts), batch_size=batch_size)
    mean = jnp.mean(means, axis=0)
    return TreeDenoising(mean, jnp.mean(variances + jnp.square(means - mean), axis=0), log_evidence)


def _checked(transform: WaveletTransform, observed: ArrayLike) -> Array:
    image = jnp.asarray(observed)
    if image.shape != transform.shape_of_signal:
        raise ValueError(
            f"The transform is one of arrays of shape {transform.shape_of_signal}; the image has {image.shape}."
        )
    return image.astype(jnp.result_type(image, float))
