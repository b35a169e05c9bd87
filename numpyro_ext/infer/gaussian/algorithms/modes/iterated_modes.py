"""Modes of fields that are known by products: one solution of Gaussian factors, and how far a mode is from its end."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from .....linalg.gaussian.spaces.sparse_space import SparsePosterior, SparseSpace
from .....structure.latent_gaussian import LatentGaussian
from ..fit_info import FitInfo
from .mode_derivative import derivatives, joint_gradient

_LARGEST_RESIDUAL, _ROUNDINGS = 1e-6, 1e3
_CORRECTIONS = 2
"""Corrections of a solution in single precision, in which the sum of all shifts has few digits."""


def largest_residual(dtype: Any) -> float:
    """Relative residual up to which a system counts as solved by iterations, in the precision of the other numbers."""
    return max(_LARGEST_RESIDUAL, _ROUNDINGS * float(jnp.finfo(dtype).eps))


class JudgedMode(NamedTuple):
    """Judgement of a mode by its gradient, and of what iterations and probes say of it."""

    log_volume: Array
    distance: Array
    """Newton's decrement at the point."""
    error: Array
    """Standard error of the log volume."""
    residual: Array
    """Largest relative residual of solutions."""

    def added_to(self, info: FitInfo, bound: Array) -> FitInfo:
        """The end of a fit, which has not converged where systems were not solved or the gradient does not vanish.

        :param FitInfo info: of the iteration.
        :param bound: on Newton's decrement.
        """
        largest = largest_residual(self.residual.dtype)
        is_solved = (self.residual < largest) & (self.distance < jnp.maximum(bound, largest))
        return info._replace(
            converged=info.converged & is_solved, objective_error=self.error, solver_residual=self.residual
        )


def only_solution(
    form: LatentGaussian, prior: SparseSpace, coordinates: Array, predictor: Array
) -> tuple[Array, SparsePosterior]:
    """The log joint density at a point near the mode of Gaussian factors, and the posterior, whose mean is the mode as
    far as iterations find it."""
    value, slope, curvature = derivatives(form, predictor)
    current = form.log_constant + jnp.sum(value) - 0.5 * prior.inner(coordinates, coordinates)
    posterior = prior.condition(curvature, curvature * predictor + slope, near=coordinates)
    for _ in range(_CORRECTIONS if coordinates.dtype == jnp.float32 else 0):
        mode = posterior.coordinates
        gradient = joint_gradient(prior, mode, derivatives(form, prior.predictor(mode))[1])
        posterior = dataclasses.replace(posterior, coordinates=mode + posterior.covariance_product(gradient))
    return current, posterior


def judged_mode(
    prior: SparseSpace, coordinates: Array, slope: Array, curvature: Array, solved: SparsePosterior | None = None
) -> JudgedMode:
    """Judgement of a mode that was found.

    Decrements of Newton's steps are those of their directions, which must be solutions for that: here the gradient at
    the last point is taken, and what is left of it by its own solution.

    :param SparseSpace prior: of an iterative space.
    :param coordinates: the mode.
    :param slope: of the log factors there, shape ``(num_rows,)``.
    :param curvature: of these, likewise.
    :param SparsePosterior solved: with this curvature, if it is at hand.
    """
    posterior = solved or prior.condition(curvature, jnp.zeros_like(curvature))
    log_volume, estimate = posterior.estimated_log_volume()
    distance, residual = posterior.distance_to_mean(joint_gradient(prior, coordinates, slope))
    return JudgedMode(log_volume, distance, 0.5 * estimate.standard_error, jnp.maximum(residual, estimate.residual))
