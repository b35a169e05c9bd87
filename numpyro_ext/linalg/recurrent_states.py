"""States of recurrent networks, with derivatives that are products over all steps wherever they can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

Activation: TypeAlias = Literal["tanh", "logistic"]
Pair: TypeAlias = tuple[Array, Array]

_FUNCTIONS: dict[str, Callable[[Array], Array]] = {"tanh": jnp.tanh, "logistic": jax.nn.sigmoid}


def simple_states(activation: Activation, matrix: Array, inputs: Array, start: Array) -> Pair:
    r"""States :math:`h_t = \sigma(W h_{t-1} + x_t)` of many sequences (Elman 1990).

    >>> last, before = simple_states("tanh", jnp.eye(2), jnp.ones((3, 1, 2)), jnp.zeros((1, 2)))
    >>> before.shape, last.round(3).tolist()
    ((3, 1, 2), [[0.961, 0.961]])

    :param activation: name of :math:`\sigma`.
    :param matrix: :math:`W`, shape ``(D, D)`` or, one for each sequence, ``(N, D, D)``.
    :param inputs: :math:`x_t`, shape ``(steps, N, D)``.
    :param start: shape ``(N, D)``.
    :return: the last state and the states before each step, shape ``(steps, N, D)``.

    **Cost:** a derivative in the matrix is one product over all steps, and the way back through the steps has products
    with the state alone. Derivatives of any order and in both directions are defined.
    """
    return _simple(activation, _alone(matrix), inputs, start)


def gated_states(activation: Activation, matrices: Sequence[Array], inputs: Sequence[Array], start: Array) -> Pair:
    r"""States of gated recurrent units (GRU) of many sequences (Cho et al. 2014, eqs. 5 to 8).

    >>> matrices, inputs = 3 * [jnp.eye(2)], 3 * [jnp.ones((3, 1, 2))]
    >>> last, before = gated_states("tanh", matrices, inputs, jnp.zeros((1, 2)))
    >>> before.shape, bool(jnp.all(last > before[-1]))
    ((3, 1, 2), True)

    .. math::
        z_t = \text{logistic}(W_z h_{t-1} + x^z_t), \quad r_t = \text{logistic}(W_r h_{t-1} + x^r_t), \quad
        h_t = (1 - z_t) h_{t-1} + z_t \sigma(W (r_t h_{t-1}) + x_t)

    :param activation: name of :math:`\sigma`.
    :param matrices: :math:`W, W_z, W_r`, of the shape ``(D, D)`` or, one for each sequence, ``(N, D, D)``.
    :param inputs: :math:`x_t, x^z_t, x^r_t`, of the shape ``(steps, N, D)``.
    :param start: shape ``(N, D)``.
    :return: the last state and the states before each step, shape ``(steps, N, D)``.

    **Cost:** as of :func:`simple_states`.
    """
    gates, gate_inputs = jnp.concatenate(matrices[1:], -2), jnp.concatenate(inputs[1:], -1)
    return _gated(activation, _alone(matrices[0]), _alone(gates), inputs[0], gate_inputs, start)


def _alone(matrix: Array) -> Array:
    """Matrix without the axis of the sequences where there is one of these, as products with batches are slower."""
    return matrix[0] if matrix.ndim == 3 and len(matrix) == 1 else matrix


def _times(matrix: Array, states: Array) -> Array:
    """Product with each state, at one step or at all."""
    return states @ matrix.T if matrix.ndim == 2 else jnp.einsum("nij,...nj->...ni", matrix, states)


def _slope(activation: Activation, value: Array) -> Array:
    """Derivative of the activation where it has a value."""
    return 1.0 - value**2 if activation == "tanh" else value * (1.0 - value)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _simple(activation: Activation, matrix: Array, inputs: Array, start: Array) -> Pair:
    def step(state: Array, taken: Array) -> Pair:
        return _FUNCTIONS[activation](_times(matrix, state) + taken), state

    return lax.scan(step, start, inputs)


@_simple.defjvp
def _simple_slopes(activation: Activation, at: tuple[Array, ...], change: tuple[Array, ...]) -> tuple[Pair, Pair]:
    matrix, inputs, _ = at
    found = last, before = _simple(activation, *at)
    slope = _slope(activation, jnp.concatenate([before[1:], last[None]]))
    added = _times(change[0], before) + change[1]

    def step(moved: Array, given: Pair) -> Pair:
        slope, added = given
        return slope * (_times(matrix, moved) + added), moved

    return found, lax.scan(step, change[2], (slope, added))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gated(
    activation: Activation, matrix: Array, gates: Array, inputs: Array, gate_inputs: Array, start: Array
) -> Pair:
    def step(state: Array, taken: Pair) -> Pair:
        share, seen = jnp.split(jax.nn.sigmoid(_times(gates, state) + taken[1]), 2, -1)
        candidate = _FUNCTIONS[activation](_times(matrix, seen * state) + taken[0])
        return (1.0 - share) * state + share * candidate, state

    return lax.scan(step, start, (inputs, gate_inputs))


@_gated.defjvp
def _gated_slopes(activation: Activation, at: tuple[Array, ...], change: tuple[Array, ...]) -> tuple[Pair, Pair]:
    matrix, gates, inputs, gate_inputs, _ = at
    found = _, before = _gated(activation, *at)
    # at all steps at once, so that nothing is kept from one to the next
    both = jax.nn.sigmoid(_times(gates, before) + gate_inputs)
    share, seen = jnp.split(both, 2, -1)
    candidate = _FUNCTIONS[activation](_times(matrix, seen * before) + inputs)
    added = _times(change[0], seen * before) + change[2], _times(change[1], before) + change[3]
    slopes = _slope(activation, candidate), _slope("logistic", both)

    def step(moved: Array, given: tuple[Pair, Pair, tuple[Array, ...]]) -> Pair:
        (added, gates_added), (slope, gate_slopes), (before, share, seen, candidate) = given
        share_moved, seen_moved = jnp.split(gate_slopes * (_times(gates, moved) + gates_added), 2, -1)
        candidate_moved = slope * (_times(matrix, seen_moved * before + seen * moved) + added)
        new = (1.0 - share) * moved + share * candidate_moved + share_moved * (candidate - before)
        return new, moved

    return found, lax.scan(step, change[4], (added, slopes, (before, share, seen, candidate)))
