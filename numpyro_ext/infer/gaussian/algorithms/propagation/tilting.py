"""Cavities and tilted moments of the factors of a latent-Gaussian form, and the sites that match them.

The pieces of :mod:`~.expectation_propagation` that look at factors; the joint Gaussian is its business.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .....linalg.cholesky import cholesky, cholesky_inverse, inverse_lower
from .....linalg.gaussian.conditioning import LinearGaussianPosterior, log_partition_without_sites
from .....linalg.gaussian.marginals import Marginals
from .....linalg.short_axes import times_vector
from .....potentials import Potential
from .....potentials.vector_rows import VectorRows, vector_factors
from .....structure.latent_gaussian import LatentGaussian


class Tilted(NamedTuple):
    """Tilted moments of each row's factor, with safe numbers where there is no cavity."""

    log_z: Array
    """Log integral of the cavity times the factor; on the first row of a factor of several."""
    log_site: Array
    """The same with the site in the place of the factor, less the log of the site at the mean of the marginal, which is
    large where there are many rows or a mean far from zero, and would cancel."""
    site_precision: Array
    """Site precision by moment matching."""
    site_shift: Array
    observed: Array
    """False where a mask removes the factor."""
    is_pinned: Array
    """The prior leaves the predictor no freedom: the factor is a constant."""
    has_cavity: Array
    """The cavity is proper."""
    is_valid: Array
    """The moments are proper and finite, too."""


class _Rows(NamedTuple):
    """Arrays of the rows of a family."""

    observed: Array
    mean: Array
    """Mean of the predictor, without its offset."""
    variance: Array
    ratio: Array
    """Variance of the marginal over that of the cavity."""
    offset: Array
    precision: Array
    """Precision of the site."""
    shift: Array
    """Shift of the site, as a function of the predictor without its offset."""


def tilt(
    form: LatentGaussian,
    marginals: Marginals,
    precision: Array,
    shift: Array,
    power: ArrayLike,
    *,
    only_log_z: bool = False,
) -> Tilted:
    """Cavities, and the moments of the factors under them, at sites of these precisions and shifts.

    :param bool only_log_z: whether moments are not asked for, of factors of one predictor: the sites are then kept.
    """
    mean, variance, ratio, _ = marginals
    rows = _Rows(
        jnp.concatenate(form.observed), mean, variance, ratio, form.offset, precision, shift - precision * form.offset
    )
    parts = [
        _tilt_vectors(*vectors, _Rows(*family), power)
        if (vectors := vector_factors(potential)) is not None
        else _tilt_scalars(potential, _Rows(*family), power, only_log_z)
        for potential, family in zip(form.potentials, zip(*map(form.split_rows, rows), strict=True), strict=True)
    ]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)


def _tilt_scalars(potential: Potential, rows: _Rows, power: ArrayLike, only_log_z: bool) -> Tilted:
    r"""The cavity is written through :math:`c = 1 - \tau v`, with the site precision :math:`\tau` and the marginal
    variance ``v``, rather than through :math:`1/v - \tau`, which loses all digits where a site dominates.

    With the mean of the cavity times ``c``, :math:`\mu = m - v \nu`, and the slope of the site at the mean of the
    marginal, :math:`r = \nu - \tau m`, the log integral of cavity times site is
    :math:`\nu m - \frac12 \tau m^2 + \frac12 \log c - \frac12 v r^2 / c`, of which the first two terms are left out. A
    cavity that is narrower than :math:`c` says (:func:`with_broad_cavities`) has :math:`d = c + \tau v` other than one.
    """
    observed, mean, variance, ratio, offset, precision, shift = rows
    fraction = jnp.asarray(power)
    ratio = (1.0 - fraction) + fraction * ratio
    tau, nu = fraction * precision, fraction * shift
    is_pinned = observed & (variance <= 0)
    has_cavity = observed & ~is_pinned & (ratio > 0)
    c = jnp.where(has_cavity, ratio, 1.0)
    mu = mean - variance * nu
    d = jnp.where(has_cavity, c + tau * variance, 1.0)
    d = jnp.where(jnp.abs(d - 1.0) < 64 * jnp.finfo(d.dtype).eps, 1.0, d)
    slope = nu - tau * mean
    away = (1.0 - d) * mean - variance * slope  # how far the mean of the cavity is from that of the marginal, times c
    log_site = 0.5 * jnp.log(c / d) + (away * (slope - 0.5 * tau * away / c) + 0.5 * variance * slope**2) / d
    cavity_mean = jnp.where(has_cavity, mu / c + offset, 0.0)
    cavity_variance = jnp.where(has_cavity, variance / c, 1.0)
    if only_log_z:
        log_z = potential.log_normaliser(cavity_mean, cavity_variance, power)
        no_row = jnp.zeros_like(observed)
        return Tilted(log_z, log_site, precision, shift, observed, is_pinned, has_cavity, no_row)
    moments = potential.tilted_moments(cavity_mean, cavity_variance, power)
    is_valid = has_cavity & jnp.isfinite(sum(moments)) & (moments.variance > 0)
    return Tilted(
        moments.log_z,
        log_site,
        moments.site_precision,
        moments.site_shift,
        observed,
        is_pinned,
        has_cavity,
        is_valid,
    )


def _tilt_vectors(potential: VectorRows, weight: ArrayLike | None, rows: _Rows, power: ArrayLike) -> Tilted:
    r"""The same for factors of several predictors, which have one cavity and one site on all their rows together.

    With the site precision ``T`` and shift ``h``, :math:`M = 1 - V T` takes the place of ``c``.
    """
    observed, offset = rows.observed, rows.offset
    cavity = _vector_cavities(potential, rows, power)
    log_site = cavity.half_log_determinant - 0.5 * jnp.sum(cavity.slope * cavity.move, axis=-1)
    away = potential.joint_moments(offset, jnp.zeros_like(offset))[0]
    center, covariance = cavity.mean + away, cavity.covariance
    # a number remains one: some rules are shorter where it is one
    exponent = power if weight is None else jnp.asarray(power) * potential.of_factors(weight)
    # at a fixed point the tilted density has the moments of the marginal
    near = center + cavity.move, cavity.marginal
    moments = potential.base.tilted_moments_near(center, covariance, exponent, *near)
    if moments.site_precision is None or moments.site_shift is None:
        before, after = (cholesky_inverse(cholesky(matrix)) for matrix in (covariance, moments.covariance))
        matching = after - before
        matched_shift = times_vector(after, moments.mean) - times_vector(before, center)
    else:
        matching, matched_shift = moments.site_precision, moments.site_shift
    row_precision, row_shift = potential.row_sites(0.5 * (matching + matching.mT), matched_shift)
    has_cavity = potential.to_rows(cavity.is_proper) & observed
    # A covariance that is not positive definite has made the sites nan.
    is_finite = jnp.isfinite(moments.log_z + jnp.sum(matching, (-2, -1)) + jnp.sum(matched_shift, -1))
    is_valid = has_cavity & potential.to_rows(is_finite)
    return Tilted(
        potential.on_first_row(moments.log_z),
        potential.on_first_row(log_site),
        row_precision,
        row_shift,
        observed,
        jnp.zeros_like(observed),
        has_cavity,
        is_valid,
    )


class _VectorCavities(NamedTuple):
    """Cavities of factors of several predictors, without their offsets."""

    mean: Array
    covariance: Array
    half_log_determinant: Array
    """Half the log determinant of ``1 - V T``, by which the marginal is narrower than the cavity."""
    slope: Array
    """Slope of the log site at the mean of the marginal."""
    move: Array
    """Covariance of the cavity times the slope: the mean of the marginal less that of the cavity."""
    marginal: Array
    """Covariance of the marginal."""
    is_proper: Array


def _vector_cavities(potential: VectorRows, rows: _Rows, power: ArrayLike) -> _VectorCavities:
    """From a root ``R`` of the marginal covariance, :math:`V = R R^T`: that of the cavity is
    :math:`R (1 - R^T T R)^{-1} R^T`, which asks for no inverse of ``V``."""
    means, marginal = potential.joint_moments(rows.mean, rows.variance)
    # what the prior leaves no freedom keeps next to none
    smallest = jnp.sqrt(jnp.finfo(marginal.dtype).eps) * (1e-4 + jnp.max(jnp.abs(marginal), axis=(-2, -1)))
    diagonal = jnp.diagonal(marginal, axis1=-2, axis2=-1)
    spread = jnp.where(diagonal > smallest[:, None] ** 2, diagonal, smallest[:, None] ** 2)
    identity = jnp.eye(marginal.shape[-1], dtype=marginal.dtype)
    rounding = 8.0 * jnp.finfo(marginal.dtype).eps * jnp.max(spread, axis=-1)
    marginal = marginal + (spread - diagonal + rounding[:, None])[..., None] * identity
    fraction = jnp.asarray(power)
    site, shift = potential.joint_site(fraction * rows.precision, fraction * rows.shift)
    root = cholesky(marginal)
    left = cholesky(identity - root.mT @ site @ root)
    is_proper = jnp.all(jnp.isfinite(jnp.diagonal(left, axis1=-2, axis2=-1)), axis=-1)
    is_proper &= jnp.all(jnp.isfinite(jnp.diagonal(root, axis1=-2, axis2=-1)), axis=-1)
    root, left = (jnp.where(is_proper[:, None, None], matrix, identity) for matrix in (root, left))
    half = inverse_lower(left) @ root.mT
    covariance = half.mT @ half
    slope = shift - times_vector(site, means)
    move = times_vector(covariance, slope)
    log_determinant = jnp.sum(jnp.log(jnp.diagonal(left, axis1=-2, axis2=-1)), axis=-1)
    return _VectorCavities(means - move, covariance, log_determinant, slope, move, marginal, is_proper)


def loses_cavity(
    form: LatentGaussian, old: Marginals, new: Marginals, sites: tuple[Array, Array], power: ArrayLike
) -> Array:
    """True if new marginals leave some factor without a proper cavity that had one: its site could never move again.

    :param sites: the site precisions that belong to each.
    """
    return jnp.any(
        _has_cavity(form, old, sites[0], power) & (new.variance > 0) & ~_has_cavity(form, new, sites[1], power)
    )


def _has_cavity(form: LatentGaussian, marginals: Marginals, precision: Array, power: ArrayLike) -> Array:
    mean, variance, ratio, _ = marginals
    nowhere = jnp.zeros_like(mean)
    rows = _Rows(jnp.concatenate(form.observed), mean, variance, ratio, nowhere, precision, nowhere)
    parts = []
    for potential, family in zip(form.potentials, zip(*map(form.split_rows, rows), strict=True), strict=True):
        part = _Rows(*family)
        vectors = vector_factors(potential)
        if vectors is not None:
            is_proper = vectors[0].to_rows(_vector_cavities(vectors[0], part, power).is_proper)
        else:
            is_proper = 1.0 - jnp.asarray(power) * (1.0 - part.ratio) > 0
        parts.append(is_proper & part.observed)
    return jnp.concatenate(parts)


def cavities(
    form: LatentGaussian, marginals: Marginals, precision: Array, shift: Array, power: ArrayLike
) -> tuple[Array, Array]:
    """Means and variances of the cavities of all rows, zero and one where there is none."""
    mean, variance, ratio, _ = marginals
    ratio = (1.0 - jnp.asarray(power)) + power * ratio
    is_proper = jnp.concatenate(form.observed) & (variance > 0) & (ratio > 0)
    shift = shift - precision * form.offset
    safe_ratio = jnp.where(is_proper, ratio, 1.0)
    cavity_variance = jnp.where(is_proper, variance / safe_ratio, 1.0)
    cavity_mean = jnp.where(is_proper, (mean - power * variance * shift) / safe_ratio + form.offset, 0.0)
    return cavity_mean, cavity_variance


def without_sites(form: LatentGaussian, posterior: LinearGaussianPosterior, marginals: Marginals) -> Marginals:
    """The marginals as sweeps know them: ``log_partition`` is less the logs of the sites at the means, and flat
    cavities are broad ones where the factor alone has a variance.

    :param posterior: under prior and sites.
    :param marginals: what it has of the predictors.
    """
    rest = log_partition_without_sites(posterior.space, posterior)
    return with_broad_cavities(form, marginals._replace(log_partition=rest))


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
    lower = least_precision(form, precision.dtype)
    matching = jnp.maximum(tilted.site_precision / power, lower)
    precision = jnp.where(tilted.is_valid, matching, precision)
    shift = jnp.where(tilted.is_valid, tilted.site_shift / power, shift)
    skipped = tilted.observed & ~tilted.is_pinned & ~tilted.is_valid
    return precision, shift, skipped


def least_precision(form: LatentGaussian, dtype: Any) -> Array:
    """Zero for rows of log-concave factors, whose sites have no negative precision but by rounding, minus infinity for
    others. A positive definite site of several predictors may have negative precisions on its rows."""
    sizes = [mask.shape[0] for mask in form.observed]
    is_alone = np.repeat([vector_factors(potential) is None for potential in form.potentials], sizes).astype(bool)
    return jnp.asarray(np.where(is_log_concave(form) & is_alone, 0.0, -np.inf), dtype)


def is_log_concave(form: LatentGaussian) -> np.ndarray:
    """True if the family of factors of each row is log-concave."""
    sizes = [mask.shape[0] for mask in form.observed]
    return np.repeat([potential.is_log_concave for potential in form.potentials], sizes).astype(bool)
