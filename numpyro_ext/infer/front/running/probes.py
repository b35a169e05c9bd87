"""The gradients beside an end of a search that its curvature is made of, where something cheaper knows them as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...hyper.curvature import hessian, hessian_error
from ...hyper.digits import difference_step
from ...hyper.search import SearchState


def probed(run: Any, probe_locally: Callable[[SearchState, object], SearchState], search: SearchState) -> SearchState:
    """An ended search with its probes: the cheap ones if the model agrees with them, else its own.

    The second derivatives of the cheap ones are compared with the model's along a direction that all coordinates have a
    part in, so that an error in any of them is in the product, and along the one in which they curve downwards the
    least: what is judged is never a curvature of something else.

    :param run: the searches of the run, for evaluations of the model.
    :param probe_locally: ``(search, is_held)``: fills in cheap probes, or leaves the search as it is where there are
        none.
    :param SearchState search: without probes.
    :return: with probes, unless the run was interrupted.
    """
    found = probe_locally(search, np.asarray(False))
    if int(found.num_probes) == 2 * search.values.size and bool(np.all(np.isfinite(found.probes))):
        matrix = hessian(found, tol=run.climb.tol)
        if all(_agrees(run, search, matrix, direction) for direction in _directions(matrix)):
            return found
    return run.climb_from(search._replace(num_probes=jnp.zeros_like(jnp.asarray(search.num_probes))))


def _directions(matrix: np.ndarray) -> list[np.ndarray]:
    units = 1.0 / np.sqrt(np.maximum(np.abs(np.diagonal(matrix)), np.finfo(matrix.dtype).tiny))
    units = np.minimum(units, 1e3 * units.min())  # a plateau does not drown the others
    # The same direction in every run: what is judged should not depend on a key.
    noise = np.random.default_rng(0).normal(size=units.shape).astype(matrix.dtype)
    least = np.linalg.eigh(units[:, None] * matrix * units)[1][:, -1]
    return [units * x / np.linalg.norm(units * x) for x in (noise, least)]


def _agrees(run: Any, search: SearchState, matrix: np.ndarray, direction: np.ndarray) -> bool:
    step = difference_step(matrix.dtype, run.climb.tol)
    ahead, behind = (run.look(np.asarray(search.values) + side * direction).best for side in (step, -step))
    if not (np.isfinite(ahead.objective) and np.isfinite(behind.objective)):
        return False
    product = (np.asarray(ahead.gradient) - np.asarray(behind.gradient)) / (2.0 * step)
    return hessian_error(matrix, direction, product, tol=run.climb.tol) < 1.0
