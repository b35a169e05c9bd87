"""Probabilities of multinomial probit with their derivatives, by equidistant nodes around the mode of the integrand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp

from .normal import truncated_normal

_LOG_2PI = math.log(2.0 * math.pi)
_NUM_MODE_STEPS = 12


@jax.jit
def multinomial_probit_derivatives(eta: Array, indicator: Array) -> tuple[Array, Array, Array]:
    """Value, gradient and Hessian of the log probability of the categories that ``indicator`` marks by one."""
    difference = jnp.sum(indicator * eta, axis=-1, keepdims=True) - eta
    others = 1.0 - indicator
    nodes, log_step = _nodes(jax.lax.stop_gradient(difference), others)
    # Axes: node, factor, category.
    part = truncated_normal(nodes[..., None] + difference)
    log_integrand = -0.5 * jnp.square(nodes) + jnp.sum(others * part.log_mass, axis=-1)
    log_total = logsumexp(log_integrand, axis=0)
    weight = jnp.exp(log_integrand - log_total)[..., None]
    ratio = others * part.ratio
    slope = jnp.sum(weight * ratio, axis=0)
    centered = ratio - slope
    # In the differences: covariance of the slopes minus the mean curvature.
    identity = jnp.eye(eta.shape[-1], dtype=eta.dtype)
    curvature = jnp.sum(weight * others * part.shrinkage, axis=0)
    inner = jnp.einsum("n...i,n...j->...ij", weight * centered, centered) - curvature[..., None] * identity
    # In the predictors: that of the label enters all differences.
    contrast = indicator[..., None, :] - identity
    gradient = jnp.einsum("...j,...jk->...k", slope, contrast)
    hessian = jnp.einsum("...ji,...jl,...lk->...ik", contrast, inner, contrast)
    return log_total + log_step - 0.5 * _LOG_2PI, gradient, hessian


def _nodes(difference: Array, others: Array) -> tuple[Array, float]:
    """Nodes around the mode of the integrand on a new first axis, and the log of their distance."""
    size = difference.shape[-1]

    # The slope of the log integrand is convex and falls: Newton's method climbs to its root from zero.
    def climb(_: int, u: Array) -> Array:
        part = truncated_normal(u[..., None] + difference)
        slope = jnp.sum(others * part.ratio, axis=-1) - u
        return u + slope / (1.0 + jnp.sum(others * part.shrinkage, axis=-1))

    mode = jax.lax.fori_loop(0, _NUM_MODE_STEPS, climb, jnp.zeros_like(difference[..., 0]))
    # The integrand falls at least as fast as exp(-u^2 / 2), its Fourier transform about as fast as
    # exp(-w^2 / (2 size)).
    drop = -math.log(float(jnp.finfo(difference.dtype).eps)) + 1.0
    reach = math.sqrt(2.0 * drop)
    step = 2.0 * math.pi / math.sqrt(2.0 * drop * size)
    count = math.ceil(reach / step)
    grid = step * jnp.arange(-count, count + 1, dtype=difference.dtype)
    return mode + grid.reshape(-1, *(1,) * mode.ndim), math.log(step)
