"""Gaussian messages by their natural parameters, as expectation propagation multiplies and divides them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

_LEAST_DAMPING = 0.02
_FURTHER = 1.2


class Message(NamedTuple):
    """Gaussians by their natural parameters; all zero where nothing is said."""

    shift: Array
    """Mean over variance."""
    precision: Array


class Moments(NamedTuple):
    """Means and variances of independent Gaussians."""

    mean: Array
    variance: Array


def as_message(block: Moments) -> Message:
    """Natural parameters of Gaussians with these moments."""
    return Message(block.mean / block.variance, 1.0 / block.variance)


def nothing(like: Array) -> Message:
    """Messages that say nothing, in the shape of an array."""
    return Message(jnp.zeros_like(like), jnp.zeros_like(like))


def mean_of(message: Message) -> Array:
    """Means of Gaussians of positive precision."""
    return message.shift / message.precision


def times(one: Message, other: Message) -> Message:
    """Products of Gaussians."""
    return Message(one.shift + other.shift, one.precision + other.precision)


def divided(one: Message, other: Message) -> Message:
    """Quotients of Gaussians, which need be none."""
    return Message(one.shift - other.shift, one.precision - other.precision)


def damped(old: Message, new: Message, damping: Array | float, *, may_vanish: bool = False) -> Message:
    """Part of the way from old messages to new ones, where these are Gaussians; elsewhere the old ones.

    :param damping: share of the new messages.
    :param bool may_vanish: whether a new precision of zero counts as a Gaussian.
    """
    is_valid = (new.precision >= 0.0) if may_vanish else (new.precision > 0.0)
    mixed = (jnp.where(is_valid, damping * y + (1.0 - damping) * x, x) for x, y in zip(old, new, strict=True))
    return Message(*mixed)


def log_integral(message: Message) -> Array:
    """Logs of the integrals of ``exp(shift x - precision x**2 / 2)``."""
    return 0.5 * jnp.log(2.0 * jnp.pi / message.precision) + 0.5 * message.shift**2 / message.precision


def next_damping(damping: Array, change: Array, before: Array, largest: Array | float) -> Array:
    """Share of new messages in the next step: half after one that moved further than the one before, else a bit more.

    :param damping: share in the step that was taken.
    :param change: how far this moved, as it would have without damping.
    :param before: the same of the step before.
    :param largest: share that is never exceeded.
    """
    return jnp.where(
        change > _FURTHER * before, jnp.maximum(0.5 * damping, _LEAST_DAMPING), jnp.minimum(1.1 * damping, largest)
    )
