r"""Sweeps of expectation propagation that use the factorisation at hand once more.

A sweep of factors that change their sites with the mean takes two or three of the joint's factorisations to a digit or
two. Most of what is left after one is in the means, and these need no new factor: with the covariance :math:`\Sigma`
of the unknowns before the sweep they move by :math:`\Sigma` times the gradient of the log density under the new sites
(a chord step of Newton's method), cavities keep their variances, and factors are asked again.

The same step says beforehand what a sweep would change. Site precisions of log-concave factors are not negative, so
that variances change by no larger share than precisions do, or, of a few rows, by the sum of
:math:`v_j |\Delta\tau_j|`: :math:`\Delta\tau\, a a^T \le v\, \Delta\tau\, H` for :math:`v = a^T H^{-1} a`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from .....linalg.gaussian.conditioning import LinearGaussian
from .....linalg.gaussian.marginals import Marginals
from .....potentials.vector_rows import has_vector_factors
from .....structure.latent_gaussian import LatentGaussian
from ..modes.mode_derivative import HeldPosterior, joint_gradient
from .evidence_of_sites import evidence_at
from .opening import State
from .tilting import propose, tilt

_FIRST_CHORD = 0.5
"""Change of means, in deviations, below which factors are asked again."""


class Looked(NamedTuple):
    """Sites that a sweep proposes, and what it will change."""

    objective: Array
    """Log evidence at the sites before it."""
    precision: Array
    shift: Array
    skipped: Array
    """Rows that keep their sites for want of moments."""
    mean_change: Array
    """Largest change of a mean by the plain sweep, to first order and in deviations."""
    precision_change: Array
    """Precisions before and after the plain sweep, apart, shape ``(num_rows,)``."""

    def bound(self, state: State, share: ArrayLike) -> Array:
        """Bound on the changes of marginals by the plain sweep, as :func:`relative_change` has them, or a larger number
        than ``share`` where it is larger."""
        change = jnp.abs(self.precision_change)
        beyond = change > share * state.site_precision
        excess = jnp.sum(jnp.where(beyond, change * state.marginals.variance, 0.0))
        return jnp.maximum(self.mean_change, share + excess)


def may_look_ahead(form: LatentGaussian, power: ArrayLike) -> bool:
    """True if sites have no negative precisions, and factors are replaced as a whole."""
    is_plain = all(p.is_log_concave for p in form.potentials) and not has_vector_factors(form.potentials)
    return is_plain and isinstance(power, int | float) and power == 1


def without_space(posterior: Any) -> Any:
    """Results of conditioning, for the carry of a loop."""
    return dataclasses.replace(posterior, space=None)


def with_space(prior: LinearGaussian, held: Any) -> Any:
    """The posterior again; ``None`` of nothing."""
    return None if held is None else dataclasses.replace(held, space=prior)


def look_ahead(
    form: LatentGaussian, prior: LinearGaussian, held: HeldPosterior, state: State, power: ArrayLike, again: Array
) -> Looked:
    """Proposals of a sweep, from means that have moved once with the factor of the last where that is not far.

    :param LatentGaussian form: the model, for which :func:`may_look_ahead`.
    :param LinearGaussian prior: its prior.
    :param held: the posterior at the sites of the state.
    :param State state: sites and marginals.
    :param power: one.
    :param again: false for the plain proposals.
    """
    mean, variance, ratio, log_partition = state.marginals
    cavity = jnp.where(ratio > 0.0, variance / jnp.where(ratio > 0.0, ratio, 1.0), variance)
    deviation = jnp.sqrt(jnp.where(variance > 0.0, variance, 1.0))
    nothing = jnp.zeros_like(mean)
    none = jnp.zeros_like(log_partition)

    class Carry(NamedTuple):
        number: Array
        coordinates: Array
        marginals: Marginals
        found: Looked

    def proceed(carry: Carry) -> Array:
        is_near = again & (carry.found.mean_change < _FIRST_CHORD)
        return (carry.number == 0) | ((carry.number == 1) & is_near)

    def ask(carry: Carry) -> Carry:
        number, coordinates, marginals, found = carry
        is_first = number == 0
        sites = found.precision, found.shift
        tilted = tilt(form, marginals, *sites, power)
        objective = jnp.where(is_first, evidence_at(form, marginals, sites, tilted, power), found.objective)
        precision, shift, skipped = propose(form, *sites, tilted, power)
        slope = shift - precision * (marginals.mean + form.offset)
        move = held.covariance_product(joint_gradient(prior, coordinates, slope))
        coordinates = coordinates + move
        share = jnp.max(jnp.abs(jnp.where(variance > 0.0, prior.predictor(move), 0.0)) / deviation, initial=0.0)
        found = Looked(
            objective,
            precision,
            shift,
            jnp.where(is_first, skipped, found.skipped | skipped),
            jnp.where(is_first, share, found.mean_change),
            jnp.where(is_first, precision - state.site_precision, found.precision_change),
        )
        narrower = 1.0 / (1.0 + precision * cavity)
        moved = Marginals(prior.predictor(coordinates), cavity * narrower, narrower, log_partition)
        return Carry(number + 1, coordinates, moved, found)

    no_row = jnp.zeros(mean.shape, bool)
    before = Looked(none, state.site_precision, state.site_shift, no_row, none, nothing)
    start = Carry(jnp.asarray(0), held.coordinates, state.marginals, before)
    return jax.tree.map(jnp.asarray, lax.while_loop(proceed, ask, start).found)
