"""Messages from Gaussian differences to inverse gamma variances, by four rules (Houlsby 2014, chapter 7)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .....structure.bilinear.noisy.form import NoisyBilinear, Scale
from ..messages import Moments

Rule = Literal["quadrature", "variational", "mean", "mode"]
_COARSE, _NUM_NODES = 16, 48
_REACH = 25.0
"""Logs below the maximum at which the tails of the tilted density are cut off."""
_LARGEST_FACTOR = 3.0
"""By which a variance changes in one iteration."""


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
    total = GammaMessage(*(x + y for x, y in zip((scale.shape, scale.rate), _summed(scale, messages), strict=True)))
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
        first, width = _exact_moments(difference, spread, factor, cavity)
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
    """Mean and variance of the precision by the trapezoid rule in its logarithm, whose error is exponentially small.

    A coarse rule finds where the density is, a fine one integrates over that. One node of all cells comes after the
    other.
    """
    a, b = cavity
    half_square = 0.5 * x**2
    # The tilted density lies between those with the shape a and the rate b + x**2 / (2 k), and with a + 1/2 and b.
    lower = jnp.log(a / (b + half_square / k)) - _left(_REACH / a)
    upper = jnp.log((a + 0.5) / b) + _right(_REACH / (a + 0.5))
    width = (upper - lower) / (_COARSE - 1)

    def exponent(t: Array, precision: Array) -> tuple[Array, Array]:
        """Log density without its root, and what this is of: the precision of the difference."""
        found = precision / (s * precision + k)
        return a * t - b * precision - half_square * found, found

    def look(place: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], Array]:
        t, precision = place
        value, square = exponent(t, precision)
        return (t + width, precision * ratio), value + 0.5 * jnp.log(square)

    ratio = jnp.exp(width)
    values = lax.scan(look, (lower, jnp.exp(lower)), length=_COARSE)[1]
    top, is_inside = jnp.max(values, 0), values > jnp.max(values, 0) - _REACH
    peak = lower + width * jnp.argmax(values, 0)
    before, after = (jnp.argmax(x, 0) for x in (is_inside, is_inside[::-1]))
    lower, upper = lower + width * jnp.maximum(before - 1, 0), upper - width * jnp.maximum(after - 1, 0)
    width = (upper - lower) / _NUM_NODES
    ratio, unit = jnp.exp(width), jnp.exp(peak)

    def add(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        t, precision, total, first, second = carry
        value, square = exponent(t, precision)
        weight = jnp.exp(value - top) * jnp.sqrt(square)
        offset = precision / unit - 1.0
        return t + width, precision * ratio, total + weight, first + weight * offset, second + weight * offset**2

    zero = jnp.zeros_like(lower)
    start = lower + 0.5 * width
    _, _, total, first, second = lax.fori_loop(0, _NUM_NODES, add, (start, jnp.exp(start), zero, zero, zero))
    # Around the peak, where little cancels.
    first, second = first / total, second / total
    return unit * (1.0 + first), unit**2 * (second - first**2)


def gamma_reach(gamma: GammaMessage, drop: float) -> tuple[Array, Array]:
    """Ends of the log of a gamma variable, between which its log density is less than ``drop`` below its peak."""
    center = jnp.log(gamma.shape / gamma.rate)
    return center - _left(drop / gamma.shape), center + _right(drop / gamma.shape)


def _left(drop: Array) -> Array:
    """By how much at most the log of a gamma variable is below its peak where the log density has lost ``drop``, in
    units of the shape."""
    return drop + jnp.minimum(jnp.sqrt(2.0 * drop), 1.0)


def _right(drop: Array) -> Array:
    """The same above the peak."""
    return jnp.log1p(drop + jnp.sqrt(2.0 * drop))


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
) -> tuple[tuple[GammaMessage, ...], Array, Array]:
    """Messages of the noise factor of each cell to its variances, all from the same state.

    :param messages: before, for each site of variances.
    :param Moments above: what the category says of the value.
    :param Moments below: what the products say of the predictor.
    :param noise: variance at the modes of the cavities, shape ``(num_cells,)``.
    :param has_said: false for cells whose category says nothing yet.
    :param damping: share of new messages.
    :param str rule: see :func:`matched_gamma`; ``"variational"`` is a step of variational Bayes.
    :return: the messages, how many of them stayed as they were, and how many variances went a part of their way.
    """
    difference, spread = above.mean - below.mean, above.variance + below.variance
    totals = [gamma_of(s, m) for s, m in zip(form.scales, messages, strict=True)]
    new, skipped, limited = [], jnp.asarray(0), jnp.asarray(0)
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
        is_valid = is_sound & jnp.isfinite(step.shape) & jnp.isfinite(step.rate)
        is_valid &= (cavity.shape + step.shape > 0.0) & (cavity.rate + step.rate > 0.0)
        move = GammaMessage(*(jnp.where(is_valid, damping * (y - x), 0.0) for x, y in zip(old, step, strict=True)))
        share = share_of_way(gamma_of(scale, old, of_groups=True), _summed(scale, move))
        new.append(GammaMessage(*(x + share[scale.group] * y for x, y in zip(old, move, strict=True))))
        skipped += jnp.sum(~is_valid & has_said & (damping > 0.0))
        limited += jnp.sum(share < 1.0)
    return tuple(new), skipped, limited


def share_of_way(before: GammaMessage, move: GammaMessage) -> Array:
    """Share of its way that each group may go: messages that are sound one by one may together overshoot.

    No shape comes nearer to one than half of the way, no rate falls below its half, and no ratio of them changes by
    more than a factor.

    :param GammaMessage before: shape and rate of each group.
    :param GammaMessage move: what all messages would add to them.
    """
    shape, rate = before
    least = jnp.where(shape > 1.0, 0.5 * (shape + 1.0), 0.5 * shape)
    limits = [_until(move.shape, least - shape), _until(move.rate, -0.5 * rate)]
    for factor in (_LARGEST_FACTOR, 1.0 / _LARGEST_FACTOR):
        # linear in the share: rate + share * move of it, less the factor times the same of the shape
        limits.append(_until(move.rate - factor * rate / shape * move.shape, (factor - 1.0) * rate))
    return jnp.min(jnp.stack([jnp.ones_like(shape), *limits]), 0)


def _until(move: Array, end: Array) -> Array:
    """Share of a move after which the end is reached, if it goes towards it; else one."""
    goes_there = move * end > 0.0
    return jnp.where(goes_there, end / jnp.where(goes_there, move, 1.0), 1.0)


def _summed(scale: Scale, messages: GammaMessage) -> GammaMessage:
    num = scale.shape.shape[0]
    return GammaMessage(*(jax.ops.segment_sum(x, scale.group, num) for x in messages))
