"""Mode of a log joint density as a function of the model, and the derivative of Laplace's log evidence by it.

A factorisation at the mode gives the log volume, its derivative by the point, and how the mode moves: by the posterior
covariance times the change of the gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import Array

from .....linalg.gaussian.border.arrow import ArrowFactor
from .....linalg.gaussian.conditioning import LinearGaussian, Space
from .....linalg.gaussian.spaces.border_space import BorderPosterior, BorderSpace
from .....linalg.gaussian.spaces.sparse_space import SparsePosterior, SparseSpace
from .....linalg.sparse_cholesky import SparseFactor
from .....structure.latent_gaussian import LatentGaussian
from ..posterior import gaussian_prior

HeldPosterior = BorderPosterior | SparsePosterior
"""Posterior whose factor serves again for what has the same precisions."""


def holds_factor(prior: LinearGaussian) -> TypeGuard[BorderSpace | SparseSpace]:
    """True if a posterior in this space is a :data:`HeldPosterior`, with a factor and not with iterations."""
    return isinstance(prior, BorderSpace) or (isinstance(prior, SparseSpace) and not prior.is_iterative)


def derivatives(form: LatentGaussian, predictor: Array) -> tuple[Array, Array, Array]:
    """Log factors, their slopes and their negative second derivatives at ``eta = predictor + offset``."""
    observed = jnp.concatenate(form.observed)
    eta = jnp.where(observed, predictor + form.offset, 0.0)
    parts = []
    for potential, part in zip(form.potentials, form.split_rows(eta), strict=True):
        value, slope, second = potential.derivatives(part)
        # A log-concave factor has no negative curvature but by rounding.
        parts.append((value, slope, jnp.maximum(-second, 0.0) if potential.is_log_concave else -second))
    value, slope, curvature = (jnp.where(observed, jnp.concatenate(terms), 0.0) for terms in zip(*parts, strict=True))
    return value, slope, curvature


def joint_gradient(prior: LinearGaussian, coordinates: Array, slope: Array) -> Array:
    """Gradient of the log joint density in the coordinates, from the slopes of the log factors."""
    if isinstance(prior, SparseSpace):
        return prior.joint_gradient(coordinates, slope)
    _, pull = jax.vjp(prior.predictor, coordinates)
    towards_prior = jax.grad(lambda at: 0.5 * prior.inner(at, at))(coordinates)
    return pull(slope)[0] - towards_prior


def at_point(
    space: Space, form: LatentGaussian, coordinates: Array, held: ArrowFactor | SparseFactor | None = None
) -> tuple[Array, HeldPosterior]:
    """Log joint density plus log volume at a point, and the posterior whose volume it is; by its factor, if that is at
    hand."""
    prior = gaussian_prior(form, space)
    value, _, curvature = derivatives(form, prior.predictor(coordinates))
    assert isinstance(prior, BorderSpace | SparseSpace)
    conditioned: HeldPosterior = prior.condition(curvature, jnp.zeros_like(curvature), held)  # type: ignore[arg-type]
    energy = 0.5 * prior.inner(coordinates, coordinates)
    total = form.log_constant + jnp.sum(value) - energy + conditioned.log_volume()
    return total, conditioned


def _gradient_change(space: Space, form: Any, coordinates: Array, form_change: Any) -> Array:
    """Change of the gradient of the log joint density, at a point that is held, with the form."""

    def gradient(form: LatentGaussian) -> Array:
        prior = gaussian_prior(form, space)
        return joint_gradient(prior, coordinates, derivatives(form, prior.predictor(coordinates))[1])

    return jax.jvp(gradient, (form,), (form_change,))[1]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _mode(space: Space, form: LatentGaussian, coordinates: Array) -> Array:
    """The mode that was found, as a function of the form."""
    return coordinates


@_mode.defjvp
def _mode_jvp(space: Space, primals: Any, tangents: Any) -> tuple[Array, Array]:
    form, coordinates = primals
    mode = _mode(space, form, coordinates)
    conditioned = at_point(space, form, mode)[1]
    return mode, conditioned.covariance_product(_gradient_change(space, form, mode, tangents[0]))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def evidence_at_mode(
    space: Space, form: LatentGaussian, coordinates: Array, held: ArrowFactor | SparseFactor | None = None
) -> Array:
    """Laplace's log evidence at the mode that was found, as a function of the form.

    Derivatives of derivatives need a factor that is not held.
    """
    return at_point(space, form, coordinates, held)[0]


@evidence_at_mode.defjvp
def _evidence_at_mode_jvp(space: Space, primals: Any, tangents: Any) -> tuple[Array, Array]:
    form, coordinates, held = primals
    mode = _mode(space, form, coordinates)  # for second derivatives
    total, linear, conditioned = jax.linearize(partial(at_point, space, held=held), form, mode, has_aux=True)
    move = conditioned.covariance_product(_gradient_change(space, form, mode, tangents[0]))
    return total, linear(tangents[0], move)
