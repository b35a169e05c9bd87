"""Images and signals seen through a linear operator.

Three of the four models share the transform and the tree of their prior, so they stand in one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_ext.distributions import RectifiedLinearPoisson
from numpyro_ext.linalg import (
    LinearOperator,
    convolution,
    identity,
    total_variation,
)

from .indices import checked_size
from .wavelet_images import (
    check_axes,
    continued,
    cut_back,
    filled_gaps,
    scale_of_noise,
    squares_between_seen,
    tree_image,
    tree_transform,
)

__all__ = ["compressed_sensing", "poisson_deblurring", "wavelet_denoising", "wavelet_inpainting"]


def poisson_deblurring(
    counts: ArrayLike,
    blur: LinearOperator | ArrayLike | None = None,
    *,
    noise: str = "poisson",
    smoothness: ArrayLike | None = None,
    mask: ArrayLike = True,
) -> None:
    r"""A picture behind photon counts, blurred, with few edges.

    .. math::
        y_j \sim \mathrm{Poisson}(\max(0, (h * u)_j)), \qquad
        p(u \mid \tau) \propto \tau^{N-1} \prod_k e^{-\tau |(Bu)_k|}

    where :math:`B` takes the differences of neighbouring pixels (Ko, 2017, section 2.1.4.1). The prior is flat along
    constant images. It has about two factors for each of the :math:`N` pixels; since the integral of their product over
    all images of a given mean is proportional to :math:`\tau^{-(N-1)}`, that power stands in place of the one that the
    densities of the factors would give, and :math:`\tau` can be learned by the evidence. Sites: ``smoothness``
    (:math:`\tau`), ``u`` (flat vector), ``gradients``, ``counts`` and the deterministic ``image``.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro_ext.infer import EP
        >>> from numpyro_ext.models import poisson_deblurring
        >>> counts = jnp.array([[1, 0, 9, 11], [2, 1, 8, 10], [0, 2, 10, 9]])
        >>> engine = EP(poisson_deblurring, progress_bar=False)
        >>> engine.run(random.key(0), counts, smoothness=0.5)
        >>> print(engine.posterior["image"].mean.shape)
        (3, 4)

    **References**

    1. Ko, Y. J. (2017), *Applications of Approximate Learning and Inference for Probabilistic Models*, EPFL.

    :param counts: photon counts, shape ``(rows, columns)``.
    :param blur: an operator on flattened images, or the kernel of a convolution whose image is continued by its nearest
        pixels; ``None`` for pictures that are noisy only.
    :param str noise: ``"poisson"``, or ``"gaussian"`` for a Gaussian likelihood whose variance is learned
        (site ``noise_variance``), for comparison.
    :param smoothness: the rate :math:`\tau` per unit of intensity between neighbours; ``None`` gives it a log-normal
        prior two wide around ten over the largest count.
    :param mask: false where a count is missing or held out, shape ``(rows, columns)``.
    :raises ValueError: if ``counts`` is no matrix, the mask keeps nothing, the shapes disagree or the noise is unknown.
    """
    if noise not in ("poisson", "gaussian"):
        raise ValueError(f"noise must be 'poisson' or 'gaussian'; got {noise!r}.")
    shape = np.shape(counts)
    if len(shape) != 2:
        raise ValueError(f"poisson_deblurring takes a matrix of counts; got an array of shape {shape}.")
    is_seen = _seen(mask, shape)
    size = int(np.prod(shape))
    if blur is None:
        operator: LinearOperator = identity(size)
    elif isinstance(blur, LinearOperator):
        operator = blur
    else:
        operator = convolution(shape, blur, boundary="replicate")
    differences = total_variation(shape)

    if smoothness is None:
        largest = np.max(np.where(is_seen, counts, 0))
        smoothness = numpyro.sample("smoothness", dist.LogNormal(jnp.log(10.0 / max(float(largest), 1.0)), 2.0))
    u = numpyro.sample("u", dist.ImproperUniform(dist.constraints.real_vector, (), (size,)))
    numpyro.deterministic("image", u.reshape(shape))
    num_factors = differences.shape[0]
    numpyro.sample("gradients", dist.Laplace(differences @ u, 1.0 / smoothness), obs=jnp.zeros(num_factors))
    # The power of the normalised prior, less the one that the factors bring with them.
    numpyro.factor("normaliser", (size - 1 - num_factors) * jnp.log(smoothness))
    predictor = (operator @ u).reshape(shape)
    likelihood: dist.Distribution = RectifiedLinearPoisson(predictor)
    if noise == "gaussian":
        level = np.mean(np.asarray(counts)[is_seen])
        variance = numpyro.sample("noise_variance", dist.LogNormal(jnp.log(1.0 + level), 1.0))
        likelihood = dist.Normal(predictor, jnp.sqrt(variance))
    with handlers.mask(mask=is_seen):
        numpyro.sample("counts", likelihood, obs=counts)


def wavelet_denoising(
    noisy: ArrayLike,
    noise_scale: ArrayLike | None = None,
    *,
    wavelet: str = "db2",
    num_levels: int | None = None,
    low: str = "laplace",
    high: str = "laplace",
    factorial: bool = False,
    per_orientation: bool = True,
    shift: ArrayLike | None = None,
    num_bases: int = 1,
    margin: int = 0,
) -> None:
    r"""An image or signal in white noise whose wavelet coefficients are sparse and persist from scale to scale.

    .. math:: y = W^T s + N(0, \sigma^2), \qquad s \sim \text{hidden Markov tree}

    with one quad-tree of states for each coarse coefficient (Ko, 2017, section 2.2). Sites: ``s``, the deterministic
    ``image``, ``noisy``, and the parameters ``low_scale``, ``high_scale``, ``root_probability``, ``transition``, one
    for each scale (and orientation). They start from the coefficients of the data and are learned by the engine; so is
    ``noise_scale`` if it is not given.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro_ext.infer import StructuredMeanField
        >>> from numpyro_ext.models import wavelet_denoising
        >>> waves = jnp.sin(jnp.arange(16.0))[:, None] * jnp.cos(jnp.arange(16.0) ** 2 / 20.0)
        >>> noisy = waves + 0.1 * random.normal(random.key(0), waves.shape)
        >>> engine = StructuredMeanField(wavelet_denoising, tol=0.2, progress_bar=False)
        >>> engine.run(random.key(1), noisy, 0.1, wavelet="haar")
        >>> print(engine.posterior["image"].mean.shape)
        (16, 16)

    **References**

    1. Ko, Y. J. (2017), *Applications of Approximate Learning and Inference for Probabilistic Models*, EPFL.

    :param noisy: the data, one to three axes of any sizes; colours are given one at a time. Sides that cannot be halved
        ``num_levels`` times are continued by reflection; the continuation counts as data, and ``image`` is cut back.
    :param noise_scale: standard deviation of the noise, or ``None`` to learn it, which EP does; the bound of
        :class:`~numpyro_ext.infer.StructuredMeanField` cannot.
    :param str wavelet: an orthogonal wavelet of PyWavelets.
    :param num_levels: scales; by default five, or as many as the sides allow.
    :param str low: component of the low state: ``"laplace"``, ``"gaussian"`` or ``"student"`` (2.1 degrees of freedom).
    :param str high: the same of the high state.
    :param bool factorial: whether the coefficients are independent instead, with the component ``high``.
    :param bool per_orientation: whether orientations have parameters of their own.
    :param shift: circular shift of the wavelet basis in pixels, one number per axis; engines average over some.
    :param int num_bases: how many shifted bases the prior speaks of, see :func:`wavelet_inpainting`.
    :param int margin: pixels by which the data are continued by reflection on every side, so that shifted bases do not
        join opposite sides. They count as data as well.
    :raises ValueError: if the data hold nan (missing pixels: :func:`wavelet_inpainting`) or are a colour image, a name
        is unknown, or the margin is negative or no integer.
    """
    if not isinstance(noisy, jax.core.Tracer) and np.isnan(np.asarray(noisy)).any():
        raise ValueError(
            "The image holds nan: mark these pixels as missing with wavelet_inpainting(image, ~isnan(image))."
        )
    noisy = jnp.asarray(noisy, float)
    margin = checked_size("margin", margin)
    if margin < 0:
        raise ValueError(f"margin must be at least 0; got {margin}.")
    shape = noisy.shape
    check_axes(shape)
    framed = jnp.pad(noisy, margin, mode="symmetric")
    transform, padded = tree_transform(framed.shape, wavelet, num_levels)
    extended = continued(framed, padded)
    image = tree_image(transform, extended, shift, low, high, factorial, per_orientation, num_bases)
    numpyro.deterministic("image", cut_back(image, shape, margin))
    if noise_scale is None:
        noise_scale = numpyro.param("noise_scale", scale_of_noise(noisy), constraint=constraints.positive)
    numpyro.sample("noisy", dist.Normal(image.reshape(-1), noise_scale).to_event(1), obs=extended.reshape(-1))


def wavelet_inpainting(
    observed: ArrayLike,
    mask: ArrayLike,
    noise_scale: ArrayLike = 0.01,
    *,
    wavelet: str = "sym5",
    num_levels: int | None = None,
    low: str = "laplace",
    high: str = "laplace",
    factorial: bool = False,
    per_orientation: bool = True,
    shift: ArrayLike | None = None,
    num_bases: int = 8,
) -> None:
    r"""An image of which only some pixels are seen; otherwise as :func:`wavelet_denoising`.

    A single basis fills gaps with its own blocks. So the prior is the geometric mean of the priors under ``num_bases``
    random shifts (:class:`~numpyro_ext.distributions.AnalysisPrior`), the latent site is the image itself, ``u``, and
    :class:`~numpyro_ext.infer.StructuredMeanField` is the engine. With ``num_bases=1`` it is ``s``, in one basis.
    The picture is found in the first steps, what follows is for the parameters and the bound: of photographs, the means
    after three steps (``num_steps=3``) of four bases are as good as those at the end with eight, in a fraction of the
    time, as scales start at what pairs of seen pixels say of the details. Such a run says that it has not converged and
    has no evidence to compare by; its bands of 80 % held 76 to 81 % of the missing pixels of three photographs.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro_ext.infer import StructuredMeanField
        >>> from numpyro_ext.models import wavelet_inpainting
        >>> picture = np.sin(np.arange(16.0))[:, None] * np.cos(np.arange(16.0) ** 2 / 20.0)
        >>> mask = np.random.default_rng(0).random(picture.shape) < 0.5
        >>> engine = StructuredMeanField(wavelet_inpainting, tol=0.5, num_variance_samples=8, progress_bar=False)
        >>> engine.run(random.key(1), np.where(mask, picture, np.nan), mask, num_bases=4, wavelet="haar")
        >>> print(engine.posterior["image"].mean.shape)
        (16, 16)

    :param observed: the image; what it holds at missing pixels is not looked at.
    :param mask: true where a pixel was seen; the shape of ``observed``.
    :param noise_scale: standard deviation of the noise of the seen pixels.
    :param str wavelet: an orthogonal wavelet of PyWavelets.
    :param num_levels: scales; by default five, or as many as the sides allow.
    :param str low: component of the low state.
    :param str high: component of the high state.
    :param bool factorial: whether the coefficients are independent instead, with the component ``high``.
    :param bool per_orientation: whether orientations have parameters of their own.
    :param shift: circular shift of the wavelet basis in pixels, one number per axis.
    :param int num_bases: how many shifted bases the prior speaks of; cost grows with it.
    :raises ValueError: if the mask keeps nothing or has another shape.
    """
    shape = np.shape(observed)
    is_seen = _seen(mask, shape)
    observed = jnp.where(is_seen, jnp.asarray(observed, float), 0.0)
    transform, padded = tree_transform(shape, wavelet, num_levels)
    filled = continued(filled_gaps(observed, is_seen), padded)
    noise_variance = jnp.mean(jnp.square(jnp.asarray(noise_scale, float)))
    extended = continued(observed, padded), continued(jnp.asarray(is_seen, float), padded)
    squared = jnp.maximum(squares_between_seen(transform, *extended, filled) - noise_variance, 0.0)
    options = shift, low, high, factorial, per_orientation, num_bases
    image = numpyro.deterministic("image", cut_back(tree_image(transform, filled, *options, squared), shape))
    seen = np.flatnonzero(is_seen)
    numpyro.sample(
        "observed", dist.Normal(image.reshape(-1)[seen], noise_scale).to_event(1), obs=observed.reshape(-1)[seen]
    )


def compressed_sensing(
    measurements: ArrayLike,
    operator: LinearOperator,
    shape: Sequence[int],
    noise_scale: ArrayLike | None = None,
    *,
    wavelet: str = "db2",
    num_levels: int | None = None,
    low: str = "laplace",
    high: str = "laplace",
    factorial: bool = False,
    per_orientation: bool = True,
    shift: ArrayLike | None = None,
    num_bases: int = 1,
) -> None:
    r"""An image seen through fewer linear measurements than it has pixels; otherwise as :func:`wavelet_denoising`.

    :param measurements: what was measured, shape ``(m,)``.
    :param operator: the operator on flattened images, ``m`` rows (:func:`~numpyro_ext.linalg.masked_fourier`,
        :func:`~numpyro_ext.linalg.from_matrix`).
    :param shape: sides of the image, which can be halved ``num_levels`` times.
    :param noise_scale: standard deviation of the noise of the measurements, or ``None`` to learn it, which EP does.
    :param str wavelet: an orthogonal wavelet of PyWavelets.
    :param num_levels: scales; by default five, or as many as the sides allow.
    :param str low: component of the low state.
    :param str high: component of the high state.
    :param bool factorial: whether the coefficients are independent instead, with the component ``high``.
    :param bool per_orientation: whether orientations have parameters of their own.
    :param shift: circular shift of the wavelet basis in pixels, one number per axis.
    :param int num_bases: how many shifted bases the prior speaks of, see :func:`wavelet_inpainting`.
    :raises ValueError: if the operator does not take images of this shape.
    """
    measurements = jnp.asarray(measurements, float)
    shape = tuple(int(side) for side in shape)
    if operator.shape[1] != int(np.prod(shape)):
        raise ValueError(
            f"The operator takes {operator.shape[1]} pixels, images of shape {shape} have {np.prod(shape)}."
        )
    transform, padded = tree_transform(shape, wavelet, num_levels)
    if padded != shape:
        raise ValueError(f"Sides of {shape} cannot be halved {transform.num_levels} times; give num_levels.")
    # The image that the adjoint draws is blurred, but has the scales of the coefficients.
    first = (operator.T @ measurements).reshape(shape)
    image = tree_image(transform, first, shift, low, high, factorial, per_orientation, num_bases)
    image = numpyro.deterministic("image", image)
    if noise_scale is None:
        noise_scale = numpyro.param("noise_scale", 0.1 * jnp.std(measurements), constraint=constraints.positive)
    numpyro.sample("measurements", dist.Normal(operator @ image.reshape(-1), noise_scale).to_event(1), obs=measurements)


def _seen(mask: Any, shape: tuple[int, ...]) -> Any:
    """The mask as booleans for every pixel; one that is traced as it is."""
    if isinstance(mask, jax.core.Tracer):
        return mask
    found = np.asarray(mask, bool)
    if found.shape not in ((), shape):
        raise ValueError(f"The mask has the shape {found.shape}, the image {shape}.")
    if not found.any():
        raise ValueError("The mask keeps no pixel: there is nothing to learn from.")
    return np.broadcast_to(found, shape)
