"""Messages from Gaussian differences to inverse gamma variances, by four rules (Houlsby 2014, chapter 7)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .....structure.bilinear.noisy.form import NoisyBilinear, Scale
from ..messages import Moments

__all__ = ["GammaMessage", "Rule", "gamma_of", "matched_gamma", "updated_gammas"]

Rule = Literal["quadrature", "variational", "mean", "mode"]
_NUM_NODES = 96
_REACH = 36.0
"""Logs below the maximum at which the tails of the tilted density are cut off."""


class GammaMessage(NamedTuple):
    """Shape and rate of a gamma density of a precision, or what a message adds to them."""

    shape: Array
    rate: Array


def gamma_of(
    scale: Scale, messages: GammaMessage, *, of_cavities: bool = False, of_groups: bool = False
) -> GammaMessage:
    """Gamma densities of the precisions, given messages of the cells to them.

    :param bool of_cavities: without the message of the cell.
    :param bool of_groups: one for each group of cells, and not for each cell.
    """
    num = scale.shape.shape[0]
    total = GammaMessage(
        *(
            prior + jax.ops.segment_sum(x, scale.group, num)
            for prior, x in zip((scale.shape, scale.rate), messages, strict=True)
        )
    )
    if of_groups:
        return total
    own = [x[scale.group] for x in total]
    if of_cavities:
        own = [x - y for x, y in zip(own, messages, strict=True)]
    return GammaMessage(*own)


def matched_gamma(difference: Array, spread: Array, factor: Array, cavity: GammaMessage, *, rule: Rule) -> GammaMessage:
    r"""The gamma density with the first two moments of
    :math:`\operatorname{Gamma}(\lambda; a, b)\, N(x; 0, s + k / \lambda)`, up to normalisation.

    :param difference: :math:`x`.
    :param spread: :math:`s`, variance of the difference beside that of the noise.
    :param factor: :math:`k`, known factor of the noise variance.
    :param GammaMessage cavity: shape ``a`` and rate ``b``.
    :param str rule: ``"quadrature"`` is exact to six digits for shapes of two or more; ``"mode"`` and ``"mean"`` put
        the variance of the noise at the mode, or at the mean, of the inverse gamma density.
    """
    a, b = cavity
    if rule == "quadrature":
        first, second = _exact_moments(difference, spread, factor, cavity)
    else:
        offset = 1.0 if rule == "mode" else -1.0

        def log_z(shape: Array) -> Array:
            variance = spread + factor * b / (shape + offset)
            return -0.5 * (jnp.log(variance) + difference**2 / variance)

        start = log_z(a)
        first = a / b * jnp.exp(log_z(a + 1.0) - start)
        second = a * (a + 1.0) / b**2 * jnp.exp(log_z(a + 2.0) - start)
    width = second - first**2
    return GammaMessage(first**2 / width, first / width)


def _exact_moments(x: Array, s: Array, k: Array, cavity: GammaMessage) -> tuple[Array, Array]:
    """First two moments of the precision by the trapezoid rule in its logarithm, whose error is exponentially small."""
    a, b = cavity
    # The tilted density lies between those with the shape a and the rate b + x**2 / (2 k), and with a + 1/2 and b.
    lower = jnp.log(a / (b + 0.5 * x**2 / k)) - _REACH / a - jnp.sqrt(2.0 * _REACH / a)
    upper = jnp.log((a + 0.5 + _REACH + jnp.sqrt(2.0 * _REACH * a)) / b)
    nodes = jnp.asarray((np.arange(_NUM_NODES) + 0.5) / _NUM_NODES, a.dtype)
    t = lower[..., None] + (upper - lower)[..., None] * nodes
    precision = jnp.exp(t)
    variance = s[..., None] + k[..., None] / precision
    log_density = a[..., None] * t - b[..., None] * precision
    log_density += -0.5 * (jnp.log(variance) + x[..., None] ** 2 / variance)
    weight = jax.nn.softmax(log_density, axis=-1)
    first = jnp.sum(weight * precision, -1)
    # Around the mean, where nothing cancels.
    return first, first**2 + jnp.sum(weight * (precision - first[..., None]) ** 2, -1)


def updated_gammas(
    form: NoisyBilinear,
    messages: tuple[GammaMessage, ...],
    above: Moments,
    below: Moments,
    noise: Array,
    has_said: Array,
    damping: Array,
    *,
    rule: Rule,
) -> tuple[tuple[GammaMessage, ...], Array]:
    """Messages of the noise factor of each cell to its variances, all from the same state.

    :param messages: before, for each site of variances.
    :param Moments above: what the category says of the value.
    :param Moments below: what the products say of the predictor.
    :param noise: variance at the modes of the cavities, shape ``(num_cells,)``.
    :param has_said: false for cells whose category says nothing yet.
    :param damping: share of new messages.
    :param str rule: see :func:`matched_gamma`; ``"variational"`` is a step of variational Bayes.
    :return: the messages, and how many of them stayed as they were.
    """
    difference, spread = above.mean - below.mean, above.variance + below.variance
    totals = [gamma_of(s, m) for s, m in zip(form.scales, messages, strict=True)]
    new, skipped = [], jnp.asarray(0)
    for number, (scale, old) in enumerate(zip(form.scales, messages, strict=True)):
        cavity = gamma_of(scale, old, of_cavities=True)
        # The mean of the variance is asked for by the rule of this name alone.
        is_sound = has_said & (cavity.shape > (1.0 if rule == "mean" else 0.0)) & (cavity.rate > 0.0)
        safe = GammaMessage(*(jnp.where(is_sound, x, 1.0) for x in cavity))
        if rule == "variational":
            share = noise / (spread + noise)
            squared = (difference * share) ** 2 + spread * share
            others = 1.0 / form.noise
            for other, total in enumerate(totals):
                others = others * jnp.where(other == number, 1.0, total.shape / total.rate)
            step = GammaMessage(jnp.full_like(squared, 0.5), 0.5 * squared * others)
        else:
            factor = noise / (safe.rate / (safe.shape + 1.0))
            found = matched_gamma(difference, spread, factor, safe, rule=rule)
            step = GammaMessage(found.shape - cavity.shape, found.rate - cavity.rate)
        total_shape, total_rate = cavity.shape + step.shape, cavity.rate + step.rate
        is_valid = is_sound & jnp.isfinite(step.shape) & jnp.isfinite(step.rate)
        is_valid &= (total_shape > 0.0) & (total_rate > 0.0)
        moved = GammaMessage(*(jnp.where(is_valid, x + damping * (y - x), x) for x, y in zip(old, step, strict=True)))
        # Messages that are sound one by one may together leave no density of their group.
        group = gamma_of(scale, moved)
        is_valid &= (group.shape > 1.0) & (group.rate > 0.0)
        new.append(GammaMessage(*(jnp.where(is_valid, x, y) for x, y in zip(moved, old, strict=True))))
        skipped += jnp.sum(~is_valid & has_said & (damping > 0.0))
    return tuple(new), skipped
