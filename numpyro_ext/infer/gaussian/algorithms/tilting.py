"""Cavities and tilted moments of the factors of a latent-Gaussian form, and the sites that match them.

The pieces of :mod:`~.expectation_propagation` that look at factors; the joint Gaussian is its business.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ....linalg.gaussian.marginals import Marginals
from ....potentials.moments import TiltedMoments
from ....structure.latent_gaussian import LatentGaussian

__all__ = ["Tilted", "cavities", "is_log_concave", "propose", "tilt", "with_broad_cavities"]


class Tilted(NamedTuple):
    """Cavities and tilted moments of all rows, safe numbers where there is none."""

    moments: TiltedMoments
    observed: Array
    """False where a mask removes the factor."""
    is_pinned: Array
    """The prior leaves the predictor no freedom: the factor is a constant."""
    is_valid: Array
    """The cavity and the moments are proper and finite."""


def _tilted_moments(form: LatentGaussian, mean: Array, variance: Array, power: ArrayLike) -> TiltedMoments:
    parts = [
        potential.tilted_moments(m, v, power)
        for potential, m, v in zip(form.potentials, form.split_rows(mean), form.split_rows(variance), strict=True)
    ]
    moments: TiltedMoments = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)
    return moments


def tilt(form: LatentGaussian, marginals: Marginals, precision: Array, shift: Array, power: ArrayLike) -> Tilted:
    r"""Tilted moments at sites of these precisions and shifts.

    The cavity is written through :math:`c = 1 - \tau v`, with the site precision :math:`\tau` and the marginal
    variance ``v``, rather than through :math:`1/v - \tau`, which loses all digits where a site dominates.
    """
    observed, is_pinned, is_proper = _which(form, marginals, power)
    moments = _tilted_moments(form, *cavities(form, marginals, precision, shift, power), power)
    is_finite = jnp.isfinite(sum(moments))
    return Tilted(moments, observed, is_pinned, is_proper & is_finite & (moments.variance > 0))


def _which(form: LatentGaussian, marginals: Marginals, power: ArrayLike) -> tuple[Array, Array, Array]:
    """The rows that are observed, those that are pinned, and those with a proper cavity."""
    observed = jnp.concatenate(form.observed)
    is_pinned = observed & (marginals.variance <= 0)
    return observed, is_pinned, observed & ~is_pinned & (_cavity_ratio(marginals, power) > 0)


def _cavity_ratio(marginals: Marginals, power: ArrayLike) -> Array:
    return (1.0 - jnp.asarray(power)) + power * marginals.cavity_ratio


def cavities(
    form: LatentGaussian, marginals: Marginals, precision: Array, shift: Array, power: ArrayLike
) -> tuple[Array, Array]:
    """Means and variances of the cavities of all rows, zero and one where there is none."""
    mean, variance, _, _ = marginals
    *_, is_proper = _which(form, marginals, power)
    shift = shift - precision * form.offset
    safe_ratio = jnp.where(is_proper, _cavity_ratio(marginals, power), 1.0)
    cavity_variance = jnp.where(is_proper, variance / safe_ratio, 1.0)
    cavity_mean = jnp.where(is_proper, (mean - power * variance * shift) / safe_ratio + form.offset, 0.0)
    return cavity_mean, cavity_variance


def with_broad_cavities(form: LatentGaussian, marginals: Marginals) -> Marginals:
    """The marginals with broad cavities in the place of flat ones, where the factor alone has a variance.

    That is a prior that is a factor, of a coefficient of which nothing else knows anything. Without its site nothing
    holds the predictor, and the ratio of variances is rounding; a cavity that is broader by the root of that changes
    the moments of the factor by as little.
    """
    floor = jnp.sqrt(jnp.finfo(marginals.variance.dtype).eps)
    parts = [
        jnp.broadcast_to(potential.has_finite_variance(), mask.shape)
        for potential, mask in zip(form.potentials, form.observed, strict=True)
    ]
    is_flat = jnp.concatenate(parts) & (jnp.abs(marginals.cavity_ratio) < floor)
    return marginals._replace(cavity_ratio=jnp.where(is_flat, floor, marginals.cavity_ratio))


def propose(
    form: LatentGaussian, precision: Array, shift: Array, tilted: Tilted, power: ArrayLike
) -> tuple[Array, Array, Array]:
    """Undamped sites that match the tilted moments, and the rows that keep theirs for want of such moments."""
    lower = jnp.asarray(np.where(is_log_concave(form), 0.0, -np.inf), precision.dtype)
    matching = jnp.maximum(tilted.moments.site_precision / power, lower)
    precision = jnp.where(tilted.is_valid, matching, precision)
    shift = jnp.where(tilted.is_valid, tilted.moments.site_shift / power, shift)
    skipped = tilted.observed & ~tilted.is_pinned & ~tilted.is_valid
    return precision, shift, skipped


def is_log_concave(form: LatentGaussian) -> np.ndarray:
    """Whether the family of factors of each row is log-concave."""
    sizes = [mask.shape[0] for mask in form.observed]
    return np.repeat([potential.is_log_concave for potential in form.potentials], sizes).astype(bool)
