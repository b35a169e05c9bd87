"""Recurrences over the blocks of a state space, one block after the other or many stretches side by side.

Where states are short a block takes a few operations, and a loop over all of them takes most of its time to go from one
to the next. So long series are cut into as many stretches as each has blocks: the loop goes over the blocks of all
stretches at once, a second one over the stretches, and what comes before a stretch is added to all of its blocks. That
needs an operation that joins what two neighbouring stretches do (Särkkä and García-Fernández 2021, *Temporal
parallelization of Bayesian smoothers*).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

_LONGEST_STATE, _FEWEST_BLOCKS = 2, 64
_Elements = tuple[Array, ...]


def has_short_states(num_states: int, num_blocks: int) -> bool:
    """True if states are so short, and blocks so many, that stretches pay."""
    return 0 < num_states <= _LONGEST_STATE and num_blocks >= _FEWEST_BLOCKS


def _are_short(transition: Array) -> bool:
    return has_short_states(transition.shape[-1], transition.shape[0])


def run_forward(transition: Array, inflow: Array, start: Array) -> Array:
    """States before each block, ``c_{k+1} = transition c_k + inflow_k``: ``(K, s, r)`` for a start ``(s, r)``."""
    if _are_short(transition):
        first = inflow[:1] + transition[:1] @ start
        after = _joined(_then, (transition, jnp.concatenate([first, inflow[1:]])), is_backward=False)[1]
        return jnp.concatenate([start[None], after[:-1]])

    def go_on(state: Array, block: tuple[Array, Array]) -> tuple[Array, Array]:
        return block[0] @ state + block[1], state

    return lax.scan(go_on, start, (transition, inflow))[1]


def run_backward(transition: Array, inflow: Array) -> tuple[Array, Array]:
    """The adjoint, ``l_k = transition^T l_{k+1} + inflow_k``: that of the first block, and what follows each block."""
    if _are_short(transition):
        own = _joined(_then, (transition.mT, inflow), is_backward=True)[1]
        return own[0], jnp.concatenate([own[1:], jnp.zeros_like(own[:1])])

    def go_on(after: Array, block: tuple[Array, Array]) -> tuple[Array, Array]:
        return block[0].T @ after + block[1], after

    return lax.scan(go_on, jnp.zeros_like(inflow[0]), (transition, inflow), reverse=True)


def known_of_states(transition: Array, noise: Array, precision: Array) -> Array:
    r"""Precision of each short state by what is seen in its block and in all later ones.

    States go on as :math:`c_{k+1} = A_k c_k` plus noise of covariance :math:`P_k`, and a block sees its state with
    precision :math:`Q_k`: :math:`\Lambda_k = Q_k + A_k^T \Lambda_{k+1} (I + P_k \Lambda_{k+1})^{-1} A_k`.

    >>> print(known_of_states(jnp.ones((64, 1, 1)), jnp.ones((64, 1, 1)), jnp.ones((64, 1, 1)))[-2:, 0, 0])
    [1.5 1. ]

    :param transition: shape ``(K, s, s)``, of states that are short (:func:`has_short_states`).
    :param noise: positive semidefinite, shape ``(K, s, s)``.
    :param precision: positive semidefinite, shape ``(K, s, s)``.
    :return: shape ``(K, s, s)``.
    """
    return _joined(_also_known, (transition, noise, precision), is_backward=True)[2]


def _joined(operation: Callable[[_Elements, _Elements], _Elements], blocks: _Elements, is_backward: bool) -> _Elements:
    """Products of all blocks up to each one, or of all from each one on if backward.

    :param operation: of what is done first and what is done then; matrices have lanes on the axes behind them.
    :param blocks: arrays of shape ``(K, ., .)``; the first one is square.
    """
    number = blocks[0].shape[0]
    lanes = max(1, round(number**0.5))
    length = -(-number // lanes)
    nothing = tuple(_nothing(block, place) for place, block in enumerate(blocks))

    def fold(block: Array, one: Array) -> Array:
        filled = jnp.concatenate([block, jnp.broadcast_to(one, (lanes * length - number, *one.shape))])
        return jnp.moveaxis(filled.reshape(lanes, length, *one.shape), 0, -1)

    def unfold(block: Array) -> Array:
        return jnp.moveaxis(block, -1, 0).reshape(lanes * length, *block.shape[1:3])[:number]

    def add(done: _Elements, block: _Elements) -> tuple[_Elements, _Elements]:
        found = operation(done, block)
        return found, found

    def pass_on(done: _Elements, stretch: _Elements) -> tuple[_Elements, _Elements]:
        return operation(done, stretch), done

    folded = tuple(map(fold, blocks, nothing))
    start = tuple(jnp.broadcast_to(one[..., None], (*one.shape, lanes)) for one in nothing)
    whole, within = lax.scan(add, start, folded, reverse=is_backward)
    stretches = tuple(jnp.moveaxis(block, -1, 0) for block in whole)
    _, before = lax.scan(pass_on, nothing, stretches, reverse=is_backward)
    before = tuple(jnp.moveaxis(block, 0, -1) for block in before)
    return tuple(map(unfold, jax.vmap(operation, (None, 0))(before, within)))


def _nothing(block: Array, place: int) -> Array:
    return jnp.zeros_like(block[0]) if place else jnp.eye(block.shape[-1], dtype=block.dtype)


def _times(a: Array, b: Array) -> Array:
    """Products of short matrices ``(p, s, ...)`` and ``(s, r, ...)``, written out."""
    return sum((a[:, j, None] * b[None, j] for j in range(1, a.shape[1])), a[:, 0, None] * b[None, 0])


def _transposed(a: Array) -> Array:
    return a.swapaxes(0, 1)


def _then(first: _Elements, then: _Elements) -> _Elements:
    """One affine map after another: matrix and shift."""
    return _times(then[0], first[0]), _times(then[0], first[1]) + then[1]


def _also_known(later: _Elements, earlier: _Elements) -> _Elements:
    """Transition, noise and precision of two neighbouring stretches together."""
    (onward, noise_later, known_later), (transition, noise, known) = later, earlier
    between = _inverse_beside_one(noise, known_later)
    carried = _times(between, transition)
    back = _times(_transposed(transition), _times(known_later, carried))
    spread = _times(onward, _times(_times(between, noise), _transposed(onward)))
    return _times(onward, carried), noise_later + _symmetric(spread), known + _symmetric(back)


def _symmetric(a: Array) -> Array:
    return 0.5 * (a + _transposed(a))


def _inverse_beside_one(a: Array, b: Array) -> Array:
    """``(I + a b)^-1`` for positive semidefinite matrices of size one or two, by its cofactors."""
    product = _times(a, b)
    if product.shape[0] == 1:
        return 1.0 / (1.0 + product)
    # a sum of positive numbers, so that no digits are lost
    beside = 1.0 + product[0, 0] + product[1, 1]
    determinant = beside + jnp.maximum(_determinant(a), 0.0) * jnp.maximum(_determinant(b), 0.0)
    one = jnp.eye(2, dtype=a.dtype).reshape(2, 2, *(1,) * (a.ndim - 2))
    return (beside * one - product) / determinant


def _determinant(a: Array) -> Array:
    return a[0, 0] * a[1, 1] - a[0, 1] * a[1, 0]
