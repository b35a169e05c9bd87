"""The state of expectation propagation, the report of a sweep, and the sites from which sweeps start."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .....linalg.gaussian.conditioning import LinearGaussian
from .....linalg.gaussian.marginals import Marginals
from .....potentials.vector_rows import has_vector_factors
from .....structure.latent_gaussian import LatentGaussian, joined
from ..modes import laplace
from ..posterior import gaussian_prior
from .evidence_of_sites import has_flat
from .tilting import is_log_concave, without_sites

_BROAD = 1e12
"""Variance of a cavity that has no say in where a factor finds its datum, for data up to a million units."""


class State(NamedTuple):
    """Sites and the Gaussian that they make with the prior."""

    site_precision: Array
    """Shape ``(num_rows,)``; zero where a row has no factor."""
    site_shift: Array
    """Precision times mean of every site, shape ``(num_rows,)``."""
    marginals: Marginals
    """Marginals of ``eta - offset`` under prior and sites; see :func:`~.tilting.without_sites`."""
    step_size: Array
    """Fraction of the way to the proposed sites that the next sweep goes."""
    max_change: Array
    """Change in the sweep that led here; infinite at the start."""
    last_move: Array
    """Change of the marginals in that sweep, in their own units: means then variances, shape ``(2 num_rows,)``."""
    is_start: Array
    """True before the opening sweep, which finds the sites to start from; ``marginals`` are then its cavities."""


class Info(NamedTuple):
    """Outcome of one sweep."""

    objective: Array
    """Log evidence at the sites *before* the sweep; nan while a cavity is improper."""
    max_change: Array
    """Largest change of a marginal mean in standard deviations or of a marginal variance relative to itself, per
    unit of step size; infinite when the sweep was undone because its sites were improper."""
    num_skipped: Array
    """Factors whose cavity or tilted moments were improper, so that their site was kept."""
    skipped: Array
    """Mask of the skipped rows, shape ``(num_rows,)``."""
    step_size: Array
    """The step size that the sweep used."""


def init(form: LatentGaussian) -> State:
    """The state to start from: the sites of Laplace's method for factors of several predictors, if that finds a mode,
    and otherwise the state before the opening sweep.

    Under a broad prior a location far from its datum asks for a large scale, and all such factors together for one
    without end: they do not start from a sweep.
    """
    start = before_opening(form)
    if not has_vector_factors(form.potentials):
        return start
    form = joined(form)
    precision, shift = laplace.sites_near_mode(form, num_steps=50, tol=1e-3)
    marginals = refresh(form, gaussian_prior(form, "auto"), precision, shift)
    at_mode = start._replace(
        site_precision=precision, site_shift=shift, marginals=marginals, is_start=jnp.asarray(False)
    )
    return jax.tree.map(partial(jnp.where, is_proper(marginals)), at_mode, start)


def before_opening(form: LatentGaussian) -> State:
    """The state before the opening sweep, which gives sites to start from and is not counted as a step.

    A log-concave factor starts with the site that matches it under a cavity of variance one half at the offset, for
    which the cheap rules of tilted moments serve. The usual start without sites lets all factors answer a broad prior
    at once, and with many rows per coefficient the parallel sweeps then overshoot further each time. Other factors
    start without a site, unless some prior is flat and sites must make the posterior proper: then under a broad cavity,
    where a heavy-tailed factor finds its datum.

    The opening is a sweep like the others so that a compiled run holds the tilted moments once.
    """
    nowhere = jnp.zeros_like(form.offset)
    one = jnp.ones((), form.offset.dtype)
    # What starts without a site may be asked of any cavity.
    is_narrow = is_log_concave(form) | (not has_flat(form))
    variance = jnp.asarray(np.where(is_narrow, 0.5, _BROAD), form.offset.dtype)
    cavities = Marginals(nowhere, variance, jnp.ones_like(nowhere), 0.0 * one)
    no_move = jnp.zeros((2 * form.num_rows,), one.dtype)
    return State(nowhere, nowhere, cavities, one, jnp.inf * one, no_move, jnp.asarray(True))


def opened(form: LatentGaussian, state: State, precision: Array, shift: Array) -> tuple[Array, Array]:
    """Sites to start from, among those that match the factors under the cavities of :func:`before_opening`."""
    is_good = jnp.isfinite(precision) & jnp.isfinite(shift) & (precision > 0)
    broad = 1.0 / state.marginals.variance
    starts = jnp.concatenate(form.observed) & (is_log_concave(form) | has_flat(form))
    shift = jnp.where(is_good, shift, broad * form.offset)
    precision = jnp.where(is_good, precision, broad)
    return jnp.where(starts, precision, 0.0), jnp.where(starts, shift, 0.0)


def refresh(form: LatentGaussian, prior: LinearGaussian, precision: Array, shift: Array) -> Marginals:
    """Marginals of ``eta - offset`` under prior and sites."""
    return refresh_and_hold(form, prior, precision, shift)[0]


def refresh_and_hold(
    form: LatentGaussian, prior: LinearGaussian, precision: Array, shift: Array
) -> tuple[Marginals, Any]:
    """:func:`refresh`, and the posterior that has these marginals."""
    posterior: Any = prior.condition(precision, shift - precision * form.offset)
    return without_sites(form, posterior, posterior.marginals()), posterior


def is_proper(marginals: Marginals) -> Array:
    """True if all moments are finite."""
    # A variance that is not a number is in the sum, so one test covers all rows.
    total = marginals.log_partition + jnp.sum(marginals.mean) + jnp.sum(marginals.variance)
    return jnp.isfinite(total)


def sites_of(state: State) -> Array:
    """Precisions and shifts of all sites, one after the other."""
    return jnp.concatenate([state.site_precision, state.site_shift])


def in_deviations(form: LatentGaussian, marginals: Marginals, change: Array) -> Array:
    """Changes of sites in deviations of their predictors, which are what sweeps are compared by."""
    precision, shift = change[: form.num_rows], change[form.num_rows :]
    variance = marginals.variance
    slope = shift - precision * (marginals.mean + form.offset)
    return jnp.concatenate([precision * variance, slope * jnp.sqrt(variance)])


def change_of_sites(form: LatentGaussian, old: State, new: State) -> Array:
    """Change of the sites, in deviations of their predictors, squared and added up.

    Changes of sites that see the same unknowns may make up for one another: marginals then stand still while the
    evidence does not.
    """
    return jnp.sum(jnp.square(in_deviations(form, new.marginals, sites_of(new) - sites_of(old))))
