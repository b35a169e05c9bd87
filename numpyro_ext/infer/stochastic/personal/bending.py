"""Second derivatives of the events of one person in her latent numbers, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....compilation.pytree import PyTree

Step: TypeAlias = Callable[[Array, PyTree, Array], tuple[PyTree, Array]]
"""Function of latent numbers, the carry before and an event: the carry after it, and the logits of the event."""


def weighted_bending(step: Step, start: PyTree, numbers: Array, items: Array, weights: Array) -> Array:
    r"""Second derivatives of the logits of a sequence in the latent numbers, summed with weights.

    With tangents :math:`v_t` of carry and numbers, and adjoints :math:`\lambda_t` of the carries :math:`h_t`, they are
    those of the steps :math:`h_{t+1} = F_t(h_t, c)` and of their logits :math:`a_t` alone,

    .. math:: \sum_t v_t' \nabla^2 (\lambda_{t+1}' F_t + w_t' a_t) v_t

    which are taken side by side. One pass goes through the sequence with ``K`` tangents, and one back without.

    :param step: one step of the sequence.
    :param start: carry before the first event; integers in it have no derivatives.
    :param numbers: shape ``(K,)``.
    :param items: shape ``(steps,)``.
    :param weights: of the logits, shape ``(steps, items)``.
    :return: shape ``(K, K)``.
    """

    def walk(numbers: Array) -> tuple[list[Array], list[Array]]:
        def body(carry: PyTree, item: Array) -> tuple[PyTree, PyTree]:
            return step(numbers, carry, item)[0], _parted(carry)

        states, rests = lax.scan(body, start, items)[1]
        return states, rests

    def along(direction: Array) -> PyTree:
        return jax.jvp(walk, (numbers,), (direction,), has_aux=True)

    directions = jnp.eye(numbers.size, dtype=numbers.dtype)
    states, tangents, rests = jax.vmap(along, out_axes=(None, 0, None))(directions)

    def after(numbers: Array, state: list[Array], rest: list[Array], item: Array) -> tuple[list[Array], Array]:
        carry, logits = step(numbers, _whole(start, state, rest), item)
        return _parted(carry)[0], logits

    def side_by_side(states: list[Array], numbers: Array) -> tuple[list[Array], Array]:
        found: tuple[list[Array], Array] = jax.vmap(after, in_axes=(None, 0, 0, 0))(numbers, states, rests, items)
        return found

    [of_logits] = jax.vjp(lambda states: side_by_side(states, numbers)[1], states)[1](weights)

    def back(adjoint: list[Array], given: PyTree) -> tuple[list[Array], list[Array]]:
        state, rest, item, of_logits = given
        [before] = jax.vjp(lambda state: after(numbers, state, rest, item)[0], state)[1](adjoint)
        return jax.tree.map(jnp.add, before, of_logits), adjoint

    nothing = jax.tree.map(jnp.zeros_like, _parted(start)[0])
    adjoints = lax.scan(back, nothing, (states, rests, items, of_logits), reverse=True)[1]

    def total(states: list[Array], numbers: Array) -> Array:
        ahead, logits = side_by_side(states, numbers)
        return sum((jnp.vdot(a, b) for a, b in zip(adjoints, ahead, strict=True)), jnp.vdot(weights, logits))

    def bent(tangents: list[Array], direction: Array) -> PyTree:
        return jax.jvp(jax.grad(total, argnums=(0, 1)), (states, numbers), (tangents, direction))[1]

    of_states, of_numbers = jax.vmap(bent)(tangents, directions)
    pairs = [(a.reshape(len(a), -1), b.reshape(len(b), -1)) for a, b in zip(of_states, tangents, strict=True)]
    return sum((a @ b.T for a, b in pairs), of_numbers)


def _is_smooth(leaf: Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _parted(carry: PyTree) -> tuple[list[Array], list[Array]]:
    """Arrays with derivatives, and those without."""
    leaves = jax.tree.leaves(carry)
    return [x for x in leaves if _is_smooth(x)], [x for x in leaves if not _is_smooth(x)]


def _whole(like: PyTree, state: list[Array], rest: list[Array]) -> PyTree:
    """Carry from its parts."""
    states, rests = iter(state), iter(rest)
    return jax.tree.map(lambda x: next(states if _is_smooth(x) else rests), like)
