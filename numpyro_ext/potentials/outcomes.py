"""Outcomes that could be observed, and their probabilities under Gaussian predictors.

Arrays have an axis of mixture components in front, whose weights sum to one, as in :mod:`.information`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .base import Potential

_Factors = TypeVar("_Factors", bound=Potential)

_TAIL = 1e-10
"""Mass of counts that may be left out."""
_MOST_COUNTS = 16384


def with_outcome(potential: _Factors, value: ArrayLike) -> _Factors:
    """The factors of other observations.

    :param Potential potential: with known :meth:`~numpyro_ext.potentials.Potential.outcomes`.
    :param ArrayLike value: in the place of what was observed; broadcasts against it.

    **Example:**

    >>> from numpyro_ext.potentials import ProbitPotential
    >>> print(with_outcome(ProbitPotential(jnp.array([0, 1])), 1).label)
    [1 1]
    """
    known = potential.outcomes()
    if known is None:
        raise ValueError(f"{type(potential).__name__} does not say what its outcomes are.")
    old = jnp.asarray(getattr(potential, known.field))
    new = jnp.asarray(value, old.dtype)
    values = {known.field: jnp.broadcast_to(new, jnp.broadcast_shapes(new.shape, old.shape))}
    return dataclasses.replace(potential, **values)  # type: ignore[type-var]  # as every potential is one


def of_column(potential: _Factors, column: int | Array, num_columns: int) -> _Factors:
    """The factors of one column of a table, given those of all, whose leaves have one column where all are alike.

    :param num_columns: of the table.
    """
    return jax.tree.map(lambda leaf: leaf[:, column] if leaf.shape[1] == num_columns else leaf[:, 0], potential)


def num_outcomes(potential: Potential, mean: ArrayLike, variance: ArrayLike, weights: ArrayLike) -> int | None:
    """Number of outcomes ``0, 1, ...`` that hold all of the mass; none where outcomes are real numbers.

    Counts without end are added up until at most ``1e-10`` of the mass is missing at every factor.

    :param Potential potential: the factors, concrete, with leaves of any shape that broadcasts against ``mean``.
    :param ArrayLike mean: of the predictors, shape ``(components, ...)``.
    :param ArrayLike variance: of the predictors.
    :param ArrayLike weights: of the components.
    :raises ValueError: if they are not known, or 16384 counts are not enough.
    """
    known = potential.outcomes()
    if known is None:
        raise ValueError(f"{type(potential).__name__} does not say what its outcomes are.")
    if known.width is not None:
        return None
    if known.number is not None:
        return known.number
    if known.limit is not None:
        return int(np.max(np.asarray(known.limit), initial=0)) + 1
    number = 16
    while number <= _MOST_COUNTS:
        mass = jnp.sum(jnp.exp(log_predictive_probabilities(potential, mean, variance, weights, number)), axis=0)
        tail = _TAIL if mass.dtype == jnp.float64 else 1e-5
        if bool(jnp.all(mass > 1.0 - tail)):
            return number
        number *= 4
    raise ValueError(
        f"Counts up to {number // 4} hold only {float(jnp.min(mass)):.3g} of the mass of some observation: its "
        "predictor is too uncertain to add counts up. Give the model tighter priors, or leave such candidates out."
    )


@functools.partial(jax.jit, static_argnames="number")
def log_predictive_probabilities(
    potential: Potential, mean: ArrayLike, variance: ArrayLike, weights: ArrayLike, number: int
) -> Array:
    r"""Log of :math:`\bar p(y)` for the outcomes ``0, ..., number - 1``.

    :param Potential potential: the factors; leaves broadcast against ``mean``.
    :param ArrayLike mean: of the predictors, shape ``(components, ...)``.
    :param ArrayLike variance: of the predictors.
    :param ArrayLike weights: of the components, which sum to one; or of each component for each factor, in the shape
        of ``mean``.
    :param int number: of outcomes.
    :return: of shape ``(number, ...)``.

    **Example:**

    >>> from numpyro_ext.potentials import ProbitPotential
    >>> table = log_predictive_probabilities(ProbitPotential(0), jnp.array([[1.0]]), jnp.ones((1, 1)), jnp.ones(1), 2)
    >>> print(jnp.exp(table)[:, 0].round(4))
    [0.2398 0.7602]
    """
    mean, variance, log_weights = _prepared(mean, variance, weights)
    known = potential.outcomes()
    assert known is not None  # as whoever counts them has asked

    def of(value: Array) -> Array:
        parts = with_outcome(potential, value).log_normaliser(mean, variance)
        if known.limit is not None:
            parts = jnp.where(value <= known.limit, parts, -jnp.inf)
        return jax.nn.logsumexp(parts + log_weights, axis=0)

    return jax.lax.map(of, jnp.arange(number))


@functools.partial(jax.jit, static_argnames="number")
def log_probabilities(potential: Potential, eta: ArrayLike, number: int) -> Array:
    """Log probabilities of the outcomes ``0, ..., number - 1`` at known predictors, shape ``(number, ...)``."""
    known, eta = potential.outcomes(), jnp.asarray(eta)
    assert known is not None  # as whoever counts them has asked

    def of(value: Array) -> Array:
        log_p = with_outcome(potential, value).log_density(eta)
        return log_p if known.limit is None else jnp.where(value <= known.limit, log_p, -jnp.inf)

    return jax.lax.map(of, jnp.arange(number))


def _prepared(mean: ArrayLike, variance: ArrayLike, weights: ArrayLike) -> tuple[Array, Array, Array]:
    """Means, positive variances, and log weights that broadcast against them."""
    mean, variance = jnp.asarray(mean), jnp.asarray(variance)
    least = jnp.finfo(mean.dtype).eps ** 2 * (1.0 + jnp.square(mean))
    log_weights = jnp.log(jnp.asarray(weights, mean.dtype))
    log_weights = log_weights.reshape(log_weights.shape + (1,) * (mean.ndim - log_weights.ndim))
    return mean, jnp.maximum(variance, least), log_weights
