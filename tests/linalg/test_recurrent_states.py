"""States of recurrent networks and all their derivatives, against the recursion step by step."""

from functools import partial

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.linalg.recurrent_states import gated_states, simple_states
from tests.tiers import thorough

STEPS, WIDTH = 4, 2
FUNCTIONS = {"tanh": jnp.tanh, "logistic": jax.nn.sigmoid}


def times(matrices, states):
    """Product of each state with its own matrix, or with that of all."""
    return (jnp.broadcast_to(matrices, (len(states), WIDTH, WIDTH)) * states[:, None]).sum(-1)


def step_by_step(activation, matrices, inputs, start):
    """The definition, in a loop."""
    state, before = start, []
    for t in range(STEPS):
        before.append(state)
        share, seen = 1.0, 1.0
        if len(matrices) > 1:
            share, seen = (
                jax.nn.sigmoid(times(W, state) + x[t]) for W, x in zip(matrices[1:], inputs[1:], strict=True)
            )
        new = FUNCTIONS[activation](times(matrices[0], seen * state) + inputs[0][t])
        state = (1 - share) * state + share * new
    return state, jnp.stack(before)


@pytest.mark.parametrize(
    ("number", "is_shared", "num_gates", "activation"),
    [
        (2, False, 2, "tanh"),
        (1, False, 0, "logistic"),
        *thorough((2, True, 2, "logistic"), (1, False, 2, "tanh"), (2, False, 0, "tanh"), (2, True, 0, "tanh")),
    ],
)
def test_states_and_derivatives_are_those_of_the_recursion(number, is_shared, num_gates, activation):
    rng = np.random.default_rng(0)
    shape = (WIDTH, WIDTH) if is_shared else (number, WIDTH, WIDTH)
    matrices = [jnp.asarray(rng.normal(size=shape)) for _ in range(num_gates + 1)]
    inputs = [jnp.asarray(rng.normal(size=(STEPS, number, WIDTH))) for _ in range(num_gates + 1)]
    at = (matrices, inputs, jnp.asarray(rng.normal(size=(number, WIDTH))))
    weights = rng.normal(size=(STEPS + 1, number, WIDTH))

    def fast(matrices, inputs, start):
        if num_gates:
            return gated_states(activation, matrices, inputs, start)
        return simple_states(activation, matrices[0], inputs[0], start)

    def summed(states):
        return lambda *at: sum(jnp.vdot(w, s**2) for w, s in zip((weights[0], weights[1:]), states(*at), strict=True))

    def derivatives(states):
        """States, slopes backwards and along a direction, and products with the second derivatives."""
        flat, shaped = jax.flatten_util.ravel_pytree(at)
        direction = shaped(jnp.linspace(-1.0, 1.0, flat.size))
        slope, bend = jax.jvp(jax.grad(summed(states), argnums=(0, 1, 2)), at, direction)
        along = jax.grad(lambda *at: jax.jvp(summed(states), at, direction)[1], argnums=(0, 1, 2))(*at)
        return states(*at), jax.jvp(states, at, direction)[1], slope, bend, along

    found = jax.jit(lambda: derivatives(fast))()
    exact = jax.jit(lambda: derivatives(partial(step_by_step, activation)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, exact)
