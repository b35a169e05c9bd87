"""Local rules: factors whose expectation, or a lower bound of it, is quadratic in the predictor at a given tangent.

For a Gaussian predictor with mean ``m`` and variance ``v`` a rule gives the expected log factor and its two slopes. At
the tangent that is best for these moments, the bound of the factor is the parabola with curvature
:math:`h = -2\\, \\partial f / \\partial v` and slope :math:`\\kappa = \\partial f / \\partial m + h m` at zero: the
Gaussian that takes its place.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from .....potentials.base import Potential
from .....potentials.bounds.logistic import BoundedPotential, JaakkolaBound, logistic_bound
from .....potentials.families.gaussian import GaussianPotential

Bound = Literal["exact", "jaakkola", "bohning"]


class Parabola(NamedTuple):
    """The bound of each factor at its best tangent, as arrays of one shape."""

    value: Array
    """Its expectation."""
    curvature: Array
    """Minus its second derivative."""
    slope: Array
    """Its slope where the predictor is zero."""


def has_rule(potential: Potential, bound: Bound) -> bool:
    """True if factors of this kind have a quadratic rule: Gaussian ones always, logistic ones by a bound."""
    return isinstance(potential, GaussianPotential) or (bound != "exact" and potential.logistic_terms() is not None)


def with_rule(potential: Potential, bound: Bound) -> Potential:
    """The potential whose expectations are those of the rule."""
    if isinstance(potential, GaussianPotential):
        return potential
    return BoundedPotential(potential, logistic_bound(bound))


def parabola(potential: Potential, mean: Array, variance: Array) -> Parabola:
    """The bounds of factors at their best tangents.

    :param Potential potential: from :func:`with_rule`, with arrays that broadcast against the moments.
    :param mean: means of the predictors.
    :param variance: their variances.
    """
    if isinstance(potential, GaussianPotential):
        precision = 1.0 / jnp.square(potential.scale)
        value = potential.log_density(mean) - 0.5 * precision * variance
        curvature = jnp.broadcast_to(precision, value.shape)
        return Parabola(value, curvature, precision * potential.observation)
    found = potential.expected_log_density(mean, variance)
    curvature = -2.0 * found.variance_slope
    return Parabola(found.value, curvature, found.mean_slope + curvature * mean)


def logit_negative(mean: Array, variance: Array) -> Parabola:
    """The bounds of the log probability of a zero, at their best tangents."""
    value, _, weight = JaakkolaBound()(mean, variance)
    return Parabola(-value, 2.0 * weight, jnp.full_like(mean, -0.5))
