"""Factors that are Gaussian without saying so: quadratic functions of their predictors.

Such are intrinsic priors and sums to zero that are written down as ``numpyro.factor``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...potentials import GaussianPotential
from ..families import Built
from ..program.degrees import Degree, classify
from ..program.program import Program
from .elementwise import ElementwiseFactor

__all__ = ["as_gaussian", "is_gaussian"]

Env = Mapping[int, Any]


def is_gaussian(factor: ElementwiseFactor, probe: Env) -> bool:
    """Whether the log density is quadratic in its predictors, whatever these are, and bends downwards.

    It is quadratic if its derivative is affine, which the operations tell, and no values: a function may be quadratic
    wherever one looks and not further out.
    """
    probe = {**probe, **dict(zip(factor.program.constants, factor.program.data, strict=True))}
    values = factor.arguments(probe)
    eta = jnp.zeros(factor.num_factors)
    program = Program(jax.make_jaxpr(lambda eta, *values: _slope(factor, values, eta))(eta, *values))
    degrees = classify(program, {"eta": program.inputs[0]}, with_sources=False, is_finite=True)
    if degrees.of(program.outputs[0]) > Degree.AFFINE:
        return False
    bends = -_curvature(factor, values, eta)
    return bool(jnp.all((bends > 0.0) | ~factor.observed(probe)))


def as_gaussian(factor: ElementwiseFactor, env: Env) -> tuple[Built, Array]:
    """The Gaussian of each predictor, what its integral leaves of the factor, and which of them there are."""
    values, observed = factor.arguments(env), factor.observed(env)
    origin = jnp.zeros(factor.num_factors)
    precision = jnp.where(observed, -_curvature(factor, values, origin), 1.0)
    slope = jnp.where(observed, _slope(factor, values, origin), 0.0)
    potential = GaussianPotential(slope / precision, 1.0 / jnp.sqrt(precision))
    left = factor.log_density(origin, *values) - potential.log_density(origin)
    return Built(potential, log_constant=jnp.sum(jnp.where(observed, left, 0.0))), observed


def _slope(factor: ElementwiseFactor, values: tuple[Any, ...], eta: Array) -> Array:
    return _derivative(lambda eta: factor.log_density(eta, *values), eta)


def _curvature(factor: ElementwiseFactor, values: tuple[Any, ...], eta: Array) -> Array:
    return _derivative(lambda eta: _slope(factor, values, eta), eta)


def _derivative(function: Callable[[Array], Array], eta: Array) -> Array:
    """Of each element in its own predictor."""
    found: Array = jax.jvp(function, (eta,), (jnp.ones_like(eta),))[1]
    return found
