"""Blocks of a form of which equal ones are counted once: what one of each kind has, and sums over all."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from .....structure.latent_gaussian import BlockKinds, LatentGaussian


def kinds_of(form: LatentGaussian) -> BlockKinds | None:
    """Kinds of the blocks of the form, where equal ones are counted once."""
    return form.kinds if isinstance(form.kinds, BlockKinds) else None


def one_of_each_kind(form: LatentGaussian, values: Array) -> Array:
    """The parts of an array, with blocks as its first axis, that belong to one block of each kind."""
    kinds = kinds_of(form)
    return values if kinds is None else values[kinds.first]


def of_blocks(form: LatentGaussian, of_kinds: Array) -> Array:
    """The inverse of :func:`one_of_each_kind`."""
    kinds = kinds_of(form)
    return of_kinds if kinds is None else of_kinds[kinds.of_blocks]


def total(form: LatentGaussian, of_kinds: Array) -> Array:
    """Sum over all blocks of what one of each kind has."""
    kinds = kinds_of(form)
    return jnp.sum(of_kinds if kinds is None else kinds.number * of_kinds)
