"""Loop over the steps of a chain in blocks, between which it can be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from tqdm import tqdm

from ...compilation.pytree import PyTree
from ...compilation.quick_jit import quick_jit

LARGEST_BLOCK = 100
"""Draws of a block."""
_FIRST_BLOCK = 10
_SECONDS = 0.3
"""Time of a block, about, within which Ctrl-C is heard."""
_NUMBERS_AHEAD = 100_000
"""Random numbers that are made at once."""

Fields = dict[str, PyTree]
Block = Callable[[PyTree, int], tuple[PyTree, Fields]]
Model = tuple[tuple[Any, ...], dict[str, Any]]


class Moving(Protocol):
    """State of chains."""

    @property
    def i(self) -> Array:
        """Number of transitions that were made."""

    @property
    def rng_key(self) -> Array:
        """Key of all of them."""


class Movable(Protocol):
    """Kernel that makes the random numbers of a transition apart from it."""

    def noise(self, rng_key: Array, i: Array) -> PyTree:
        """Random numbers of a transition."""

    def moved(self, state: Any, noise: Any, model_args: tuple[Any, ...], model_kwargs: dict[str, Any]) -> Any:
        """State after a transition."""


class Drawn(NamedTuple):
    """State of chains after some draws, and these; a block at a time, so that both always belong together."""

    state: PyTree
    blocks: tuple[Fields, ...] = ()
    number: int = 0

    @property
    def fields(self) -> Fields:
        """Fields of all draws, chains on the first axis and draws on the second."""
        joined = jax.tree.map(lambda *parts: np.concatenate(parts), *self.blocks)
        return dict(jax.tree.map(lambda x: np.swapaxes(x, 0, 1), joined))


def block_of(
    kernel: Movable, model: Model, names: tuple[str, ...], thinning: int, numbers_ahead: int = _NUMBERS_AHEAD
) -> Block:
    """Compiled function that makes so many draws, at most :data:`LARGEST_BLOCK`: the new state, and the fields of each.

    Random numbers are made for many transitions at once: a call of their generator is hundreds of operations, which for
    a small model take as long as its gradient.

    :param kernel: of the transitions.
    :param model: the arguments of the model, and those by name.
    :param names: fields that are kept.
    :param thinning: transitions to a draw.
    :param numbers_ahead: random numbers that are made at once, about.
    """

    def fields(state: Moving) -> Fields:
        return {name: getattr(state, name) for name in names}

    @quick_jit
    def block(state: Moving, number: int) -> tuple[Moving, Fields]:
        numbers_of_one = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(kernel.noise, state.rng_key, 0)))
        ahead = int(np.clip(numbers_ahead // numbers_of_one, 1, LARGEST_BLOCK))
        total = number * thinning

        def stretch(moving: tuple[Moving, Fields, Array]) -> tuple[Moving, Fields, Array]:
            state, kept, before = moving
            # each transition has one place among those whose numbers are made with its own, on which rounding depends
            begin = state.i // ahead * ahead
            noises = jax.vmap(kernel.noise, (None, 0))(state.rng_key, begin + jnp.arange(ahead))
            first = state.i - begin

            def draw(j: Array, moving: tuple[Moving, Fields]) -> tuple[Moving, Fields]:
                state, kept = moving
                state = kernel.moved(state, jax.tree.map(lambda leaf: leaf[j], noises), *model)
                place = (before + j - first) // thinning
                return state, jax.tree.map(lambda all_, one: all_.at[place].set(one), kept, fields(state))

            last = jnp.minimum(ahead, first + total - before)
            return *lax.fori_loop(first, last, draw, (state, kept)), before + last - first

        nothing = jax.tree.map(lambda x: jnp.zeros((LARGEST_BLOCK, *x.shape), x.dtype), fields(state))
        none = jnp.zeros_like(state.i)
        return lax.while_loop(lambda moving: moving[2] < total, stretch, (state, nothing, none))[:2]

    return block


def draw_in_blocks(block: Block, state: PyTree, num_warmup: int, number: int, bar: tqdm) -> tuple[Drawn, bool]:
    """Draws after a warm-up, and whether Ctrl-C has ended them early; how they are parted changes none.

    :param block: of :func:`block_of`.
    :param num_warmup: draws that are not kept.
    :param number: draws that are.
    :raises KeyboardInterrupt: if nothing was drawn yet.
    """
    drawn, size = Drawn(state), _FIRST_BLOCK
    try:
        while drawn.number < num_warmup + number:
            is_warming = drawn.number < num_warmup
            now = min(size, (num_warmup if is_warming else num_warmup + number) - drawn.number)
            start = time.perf_counter()
            state, found = block(drawn.state, now)
            found = _first(now, found)  # waits for the draws
            drawn = Drawn(state, drawn.blocks if is_warming else (*drawn.blocks, found), drawn.number + now)
            seconds = time.perf_counter() - start
            size = int(np.clip(now * _SECONDS / seconds, 1, min(2 * size, LARGEST_BLOCK)))
            bar.update(now)
    except KeyboardInterrupt:
        if not drawn.blocks:
            raise
        return drawn, True
    return drawn, False


def _first(number: int, fields: Fields) -> Fields:
    """The first draws of a block as arrays of their own; slices of JAX would compile for each number."""
    return dict(jax.tree.map(lambda x: np.asarray(x)[:number].copy(), fields))
