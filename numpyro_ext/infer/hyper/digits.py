"""Few digits of the field far from the end of a search for hyperparameters, and all of them near it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

__all__ = ["field_tolerance", "is_far_from_end", "noise_of_field"]

_FAR, _COARSE = 100.0, 1.0
"""Derivatives above which a search is far from its end, and the tolerance of the field there, in what the search asks
of derivatives."""


def field_tolerance(state: Any, field_tol: Any, tol: float, max_iterations: int | Array) -> Any:
    """To what tolerance the field is fitted in the next evaluation of a search.

    :param state: a :class:`~.search.SearchState`.
    :param field_tol: of fits near the end of a search, and of probes.
    :param tol: as the last one, given to :func:`~.search.search`.
    :return: ``field_tol``, or a larger one while the best point is far from the end, in searches of one step or more.
    """
    if state.is_coarse is None:
        return field_tol
    return jnp.where(is_far_from_end(state, tol, max_iterations), jnp.maximum(field_tol, _COARSE * tol), field_tol)


def is_far_from_end(state: Any, tol: float, max_iterations: int | Array) -> Array:
    """Whether the next evaluation has few digits; parameters are those of :func:`field_tolerance`."""
    is_far = (state.num_iterations == 0) | (jnp.max(jnp.abs(state.best.gradient), initial=0.0) > _FAR * tol)
    found: Array = jnp.asarray(state.is_coarse) & is_far & state.is_searching & (max_iterations > 0)
    return found


def noise_of_field(evaluation: Any) -> Array | float:
    """What the objective may be off for want of digits of the field: it is stationary in them."""
    info = evaluation.info
    if not hasattr(info, "max_change"):
        return 0.0
    noise = info.skipped.size * jnp.square(info.max_change)
    return jnp.where(info.converged & jnp.isfinite(noise), noise, 0.0)
