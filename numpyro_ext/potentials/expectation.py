r"""Gaussian expectations of log factors, :math:`E_{N(\eta \mid m, v)} \log t(\eta)`, by quadrature."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .base import ExpectedLogDensity, Potential

__all__ = ["expected_log_density"]


def expected_log_density(
    potential: Potential, mean: ArrayLike, variance: ArrayLike, *, num_nodes: int = 64
) -> ExpectedLogDensity:
    r"""Expectation of a smooth log factor and its slopes by the Gauss-Hermite rule.

    :param Potential potential: the factors; only ``derivatives`` is used.
    :param ArrayLike mean: means.
    :param ArrayLike variance: variances.
    :param int num_nodes: nodes of the rule.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    mean, variance = jnp.broadcast_arrays(jnp.asarray(mean), jnp.asarray(variance))
    dtype = jnp.result_type(mean, variance, float)
    scale = jnp.sqrt(variance)
    terms = jax.vmap(lambda z: potential.derivatives(mean + scale * z))(jnp.asarray(nodes, dtype))
    rule = jnp.asarray(weights / weights.sum(), dtype)
    value, slope, curvature = (jnp.tensordot(rule, term, axes=1) for term in terms)
    return ExpectedLogDensity(value, slope, 0.5 * curvature)
