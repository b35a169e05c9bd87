"""The log evidence of expectation propagation at given sites."""

from __future__ import annotations

from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from .....linalg.gaussian.conditioning import Space
from .....linalg.gaussian.marginals import Marginals
from .....linalg.gaussian.prior import DiagonalPrior, FlatPrior, is_flat, is_valid_prior
from .....structure.latent_gaussian import LatentGaussian, joined
from ..posterior import gaussian_prior
from .tilting import Tilted, tilt, without_sites

_MOST_EXCESS = 1.0
"""Nats by which an approximate log probability may be above zero."""


class _Sites(Protocol):
    @property
    def site_precision(self) -> Array: ...

    @property
    def site_shift(self) -> Array: ...


def log_evidence(
    form: LatentGaussian,
    state: _Sites,
    *,
    power: float = 1.0,
    space: Space = "auto",
    held: tuple[Any, Marginals] | None = None,
) -> Array:
    r"""EP's approximation of the log evidence at the sites of ``state`` (Ko 2017, §2.1, in the form without
    differences of large terms; power EP as Minka 2004).

    At a fixed point it is stationary in the sites, so its gradient with respect to ``form`` (kernel, mean,
    parameters of the factors) is the explicit one with the sites held: no gradient flows through the iteration.

    :param LatentGaussian form: the model; differentiable.
    :param state: a fixed point of :func:`~.expectation_propagation.step` for ``form``.
    :param float power: the power that the fixed point was found with.
    :param str space: where to do the algebra.
    :param held: the posterior at these sites and the marginals of sweeps, where they are at hand: a factorisation and
        the variances of all rows are not made again. First derivatives alone are then right.
    :return: a scalar; nan where a prior is not positive definite or a cavity is improper.
    """
    form = joined(form)
    precision, shift = lax.stop_gradient((state.site_precision, state.site_shift))
    prior = gaussian_prior(form, space)
    local_shift = shift - precision * form.offset
    factor: Any = () if held is None else (held[0].factor,)
    posterior = prior.condition(precision, local_shift, *factor)
    known = posterior.marginals()
    # Stationary in the cavities as well, so they are held. The derivative of the partition function in the offset lacks
    # what the sites, which are on the predictors, have of it.
    here = without_sites(form, posterior, known) if held is None else held[1]
    here, offset = lax.stop_gradient((here, form.offset))
    tilted = tilt(form._replace(offset=offset), here, precision, shift, power, only_log_z=True)
    value = evidence_at(form, here, (precision, shift), tilted, power)
    of_offset = jnp.where(tilted.is_pinned, 0.0, shift * form.offset - 0.5 * precision * form.offset**2)
    of_prior = known.log_partition + jnp.sum(of_offset)
    value += of_prior - lax.stop_gradient(of_prior)  # the derivative alone: the value would lose digits
    return jnp.where(lax.stop_gradient(is_valid_prior(form.prior)), value, jnp.nan)


def evidence_at(
    form: LatentGaussian, marginals: Marginals, sites: tuple[Array, Array], tilted: Tilted, power: ArrayLike
) -> Array:
    """Log evidence: the partition function of prior and sites, with each site's part replaced by its factor's.

    The part of a site is the log integral of the cavity times the site. Both lack the log of the site at the mean.
    """
    mean, _, _, log_partition = marginals
    precision, shift = sites
    is_free = tilted.observed & ~tilted.is_pinned
    at_mean = (shift - precision * (form.offset + 0.5 * mean)) * mean
    terms = jnp.where(tilted.has_cavity, (tilted.log_z - tilted.log_site) / jnp.asarray(power), at_mean)
    # Not at zero, where a factor of an unknown function may be zero, and has no derivative that may be left out.
    pinned = form.log_factors(jnp.where(tilted.observed, mean + form.offset, 0.0))
    terms += jnp.where(tilted.is_pinned, pinned, 0.0)
    total = form.log_constant + log_partition + jnp.sum(terms)
    return jnp.where(jnp.any(is_free & ~tilted.has_cavity), jnp.nan, total)


def exceeds_one(form: LatentGaussian, log_evidence: Array) -> Array:
    """True if this is no log evidence of categories under a prior of mass one, as it is well above zero."""
    known = [potential.outcomes() for potential in form.potentials]
    is_category = all(outcomes is not None and outcomes.number is not None for outcomes in known)
    if not is_category or has_flat(form):
        return jnp.asarray(False)
    return log_evidence > form.log_constant + _MOST_EXCESS


def has_flat(form: LatentGaussian) -> bool:
    """True if some prior is flat."""
    return any(is_flat(block) for block in form.prior)


def is_coupled(form: LatentGaussian) -> bool:
    """True if the prior couples its unknowns, so that sweeps converge slowly. Effects that are independent take a
    few sweeps, of which none would be saved."""
    return not all(isinstance(block, DiagonalPrior | FlatPrior) for block in form.prior)
