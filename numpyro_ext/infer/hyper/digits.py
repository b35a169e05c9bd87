"""Few digits of the field far from the end of a search for hyperparameters, all of them near it, and for differences as
many as these can use."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ...compilation.pytree import PyTree

_FAR = 1000.0
"""Derivatives above which a search is far from its end, in what it asks of them."""
_OF_GOAL, _OF_GRADIENT = 200.0, 0.02
"""Tolerance of the field there times the number of its rows, in what the search asks of derivatives, and in what they
are: the error of a derivative is a thousandth or less of this, as sweeps that contract leave a small part of their last
change, and derivatives change by a small part of what predictors do."""
_OF_PROBES, _LARGEST_OF_PROBES = 10.0, 0.01
"""Tolerance of the field for differences of derivatives, times the number of its rows, and at most, in what the search
asks of derivatives: the step of the differences reckons with errors of a hundredth of that."""


def field_tolerance(state: Any, field_tol: Any, tol: float, max_iterations: int | Array) -> Any:
    """To what tolerance the field is fitted in the next evaluation of a search.

    Far from the end the gradient need not be known better than by a small part of itself, and by what the search asks
    of it: from the last gradient before the end the step is taken that is to end there. Errors of predictors add up.

    :param state: a :class:`~.search.SearchState`.
    :param field_tol: of fits near the end of a search.
    :param tol: as the last one, given to :func:`~.search.search`.
    :return: ``field_tol``, or a larger one while the best point is far from the end, in searches of one step or more,
        and for probes of the curvature.
    """
    if state.is_coarse is None:
        return field_tol
    gradient = jnp.where(state.num_iterations == 0, jnp.inf, jnp.max(jnp.abs(state.best.gradient), initial=0.0))
    num_rows = _num_rows(state.best)
    wanted = (_OF_GOAL * tol + _OF_GRADIENT * gradient) / num_rows
    few = jnp.clip(wanted, field_tol, jnp.maximum(field_tol, tol))
    of_probes = jnp.maximum(field_tol, min(_OF_PROBES / num_rows, _LARGEST_OF_PROBES) * tol)
    near = jnp.where(state.is_searching, field_tol, of_probes)
    return jnp.where(is_far_from_end(state, tol, max_iterations), few, near)


def difference_step(dtype: DTypeLike, tol: float) -> float:
    """The step of the curvature's differences: balances the error of the central difference against that of gradients,
    which are known to a small part of what the search asks of them.

    :param dtype: of the coordinates.
    :param float tol: as given to :func:`~.search.search`.
    """
    return float(max(1e-2 * tol, float(jnp.finfo(dtype).eps) ** 0.5) ** (1.0 / 3.0))


def is_far_from_end(state: PyTree, tol: float, max_iterations: int | Array) -> Array:
    """True if the next evaluation has few digits; parameters are those of :func:`field_tolerance`."""
    is_far = (state.num_iterations == 0) | (jnp.max(jnp.abs(state.best.gradient), initial=0.0) > _FAR * tol)
    return jnp.asarray(state.is_coarse) & is_far & state.is_searching & (max_iterations > 0)


def _num_rows(evaluation: Any) -> int:
    return evaluation.info.skipped.size if hasattr(evaluation.info, "skipped") else 1


def noise_of_field(evaluation: Any) -> Array | float:
    """Error of the objective for want of digits of the field: it is stationary in them."""
    info = evaluation.info
    if not hasattr(info, "max_change"):
        return 0.0
    noise = info.skipped.size * jnp.square(info.max_change)
    return jnp.where(info.converged & jnp.isfinite(noise), noise, 0.0)
