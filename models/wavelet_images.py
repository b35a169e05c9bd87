"""Parts that models of pictures by wavelets share: transforms of any sides, priors and their starting values, filled
gaps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_ext.distributions import AnalysisPrior, HiddenMarkovTree
from numpyro_ext.linalg import WaveletTransform, shifted_transforms, wavelet_transform
from numpyro_ext.potentials import wavelet_forest

from .indices import checked_size

__all__ = [
    "check_axes",
    "continued",
    "cut_back",
    "filled_gaps",
    "scale_of_noise",
    "squares_between_seen",
    "tree_image",
    "tree_transform",
]

_MOST_CHANNELS = 4


def check_axes(shape: tuple[int, ...]) -> None:
    """Refuse what is no signal, image or volume."""
    if not 1 <= len(shape) <= 3 or min(shape) < 2:
        raise ValueError(f"Signals, images and volumes have one to three axes of two places or more; got {shape}.")
    short = [axis for axis in range(len(shape)) if shape[axis] <= _MOST_CHANNELS]
    if len(shape) == 3 and short in ([0], [2]):
        channel = "0, :, :" if short == [0] else ":, :, 0"
        raise ValueError(
            f"Three axes are a volume, but axis {short[0]} of {shape} is short like one of colours, along which "
            f"wavelet coefficients are not sparse. Give one channel at a time, such as image[{channel}], best along "
            "the principal axes of the colours. If these are slices of a volume, move this axis to the middle."
        )


def tree_transform(
    shape: tuple[int, ...], wavelet: str, num_levels: int | None
) -> tuple[WaveletTransform, tuple[int, ...]]:
    """The transform of images of at least this shape, and that shape."""
    check_axes(shape)
    if num_levels is None:
        num_levels = max(min(5, *(int(np.log2(max(side, 1))) - 1 for side in shape)), 1)
    num_levels = checked_size("num_levels", num_levels)
    step = 2**num_levels
    padded = tuple(-(-side // step) * step for side in shape)
    return wavelet_transform(padded, wavelet, num_levels), padded


def continued(image: Array, padded: tuple[int, ...]) -> Array:
    """The image, continued by reflection to larger sides."""
    return jnp.pad(image, [(0, more - side) for side, more in zip(image.shape, padded, strict=True)], mode="symmetric")


def cut_back(image: Array, shape: tuple[int, ...], margin: int = 0) -> Array:
    """Image without its continuation."""
    return image[tuple(slice(margin, margin + side) for side in shape)]


def tree_image(
    transform: WaveletTransform,
    data: Array,
    shift: ArrayLike | None,
    low: str,
    high: str,
    factorial: bool,
    per_orientation: bool,
    num_bases: int,
    expected_squares: Array | None = None,
) -> Array:
    """Sample coefficients ``s`` whose scales start at those of ``data``, or with several bases the image ``u``.

    :param expected_squares: of each coefficient, where those of ``data`` may be too small.
    """
    num_bases = checked_size("num_bases", num_bases)
    if num_bases < 1:
        raise ValueError(f"num_bases must be at least 1; got {num_bases}.")
    forest = wavelet_forest(transform, per_orientation)

    def by_group(values: Array) -> Array:
        return jnp.zeros(forest.num_groups).at[forest.groups].add(values)

    squares = by_group(jnp.square(transform @ data.reshape(-1)))
    if expected_squares is not None:
        squares = jnp.maximum(squares, by_group(expected_squares))
    scale = jnp.sqrt(squares / by_group(jnp.ones(data.size)) + 1e-12)

    def component(name: str, start: Array, groups: Array | slice = slice(None)) -> dist.Distribution:
        scale = numpyro.param(name, start, constraint=constraints.positive)[groups]
        family = {"low_scale": low, "high_scale": high, "scale": high}[name]
        if family not in _COMPONENTS:
            raise ValueError(f"A component is one of {', '.join(map(repr, _COMPONENTS))}; got {family!r}.")
        return _COMPONENTS[family](scale)

    whole = forest if num_bases == 1 else wavelet_forest(transform, per_orientation, num_bases)
    if factorial:
        prior = component("scale", scale, whole.groups).to_event(1)
    else:
        # Only the first groups, of the scaling coefficients and the coarsest details, hold nodes without parent.
        num_roots = 1 + (2 ** len(transform.shape_of_signal) - 1 if per_orientation else 1)
        is_root = np.arange(forest.num_groups) < num_roots
        root = numpyro.param("root_probability", jnp.full(is_root.sum(), 0.5), constraint=constraints.unit_interval)
        start = jnp.tile(jnp.array([0.1, 0.8]), (int((~is_root).sum()), 1))
        transition = numpyro.param("transition", start, constraint=constraints.unit_interval)
        prior = HiddenMarkovTree(
            whole,
            component("low_scale", 0.5 * scale),
            component("high_scale", 2.0 * scale),
            jnp.full(forest.num_groups, 0.5).at[np.flatnonzero(is_root)].set(root),
            jnp.full((forest.num_groups, 2), 0.5).at[np.flatnonzero(~is_root)].set(transition),
        )
    if num_bases == 1:
        image = (transform.T @ numpyro.sample("s", prior)).reshape(data.shape)
    else:
        # Fixed, so that equal calls are equal models.
        shifts = np.random.default_rng(0).integers(0, 2**transform.num_levels, (num_bases, data.ndim))
        frame = shifted_transforms(transform, shifts)
        image = numpyro.sample("u", AnalysisPrior(frame, prior, 1.0 / num_bases)).reshape(data.shape)
    return image if shift is None else jnp.roll(image, shift, tuple(range(image.ndim)))


_COMPONENTS = {
    "laplace": lambda scale: dist.Laplace(0.0, scale),
    "gaussian": lambda scale: dist.Normal(0.0, scale),
    "student": lambda scale: dist.StudentT(2.1, 0.0, scale),
}


def scale_of_noise(noisy: Array) -> Array:
    """Median of the finest differences over that of a standard normal variable (Donoho and Johnstone 1994)."""
    finest = noisy
    for axis in range(noisy.ndim):
        finest = jnp.diff(finest, axis=axis) / jnp.sqrt(2.0)
    return jnp.median(jnp.abs(finest)) / 0.6745


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
