"""Recurrences of short states in stretches side by side, against plain loops on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.linalg.gaussian.conditioning import linear_gaussian
from numpyro_ext.linalg.gaussian.design import Dynamics, StateSpaceDesign
from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
from numpyro_ext.linalg.gaussian.recurrences import has_short_states, known_of_states, run_backward, run_forward
from tests.infer.gaussian.gaussian_forms import one_block

K = 70  # stretches are padded


def problem(size):
    """Stable transitions, and noise and precisions of rank one, some of them zero."""
    rng = np.random.default_rng(size)
    transition = 0.9 * np.linalg.qr(rng.normal(size=(K, size, size)))[0]
    noise, seen = rng.normal(size=(2, K, size, 1))
    seen[::3] = 0.0
    return transition, noise @ noise.swapaxes(-1, -2), 100.0 * seen @ seen.swapaxes(-1, -2)


@pytest.mark.parametrize("size", [1, 2])
def test_recurrences_are_those_of_a_loop(size):
    assert has_short_states(size, K)
    transition, noise, precision = problem(size)
    rng = np.random.default_rng(9)
    inflow, start = rng.normal(size=(K, size, 3)), rng.normal(size=(size, 3))
    states, after, known = [start], [np.zeros((size, 3))], [np.zeros((size, size))]
    for k in range(K):
        states.append(transition[k] @ states[-1] + inflow[k])
        last = K - 1 - k
        after.append(transition[last].T @ after[-1] + inflow[last])
        later = known[-1] @ np.linalg.inv(np.eye(size) + noise[last] @ known[-1])
        known.append(precision[last] + transition[last].T @ later @ transition[last])
    np.testing.assert_allclose(jax.jit(run_forward)(transition, inflow, start), states[:-1], atol=1e-12)
    first, follows = jax.jit(run_backward)(jnp.asarray(transition), jnp.asarray(inflow))
    np.testing.assert_allclose(first, after[-1], atol=1e-12)
    np.testing.assert_allclose(follows, after[-2::-1], atol=1e-12)
    found = jax.jit(known_of_states)(*map(jnp.asarray, (transition, noise, precision)))
    np.testing.assert_allclose(found, known[:0:-1], rtol=1e-9, atol=1e-9)


def test_long_states_and_few_blocks_are_left_to_the_loop():
    assert not has_short_states(3, 1000)
    assert not has_short_states(1, 10)
    assert not has_short_states(0, 1000)


def steps(scale, slope):
    """A local linear trend, with a row a step: states of two numbers, of which one unknown a step moves the second."""
    transition = jnp.broadcast_to(jnp.array([[1.0, slope], [0.0, 0.95]]), (K, 2, 2))
    gain = jnp.broadcast_to(jnp.array([[0.0], [1.0]]), (K, 2, 1))
    columns = jnp.arange(K)[:, None]
    dynamics = Dynamics(transition, gain, jnp.eye(2)[:, :1], columns, jnp.array([K]), K + 1, "steps")
    rows = jnp.asarray(np.random.default_rng(0).permutation(K))[:, None]
    design = StateSpaceDesign(dynamics, rows, jnp.ones((K, 1, 2)), jnp.full((K, 1, 1), 0.3), K)
    return (DiagonalPrior(scale * jnp.full(K, 0.2)), DiagonalPrior(jnp.array([4.0]))), design


@pytest.mark.thorough
def test_conditioning_all_blocks_together_is_that_in_turn_and_has_its_gradient():
    rng = np.random.default_rng(1)
    precision, shift = jnp.asarray(rng.gamma(1.0, size=K)).at[5].set(0.0), jnp.asarray(rng.normal(size=K))
    white = jnp.asarray(rng.normal(size=K + 1))

    def answers(scale, slope, is_signed):
        prior, design = steps(scale, slope)
        posterior = linear_gaussian(prior, design, *one_block(K, K + 1), is_signed=is_signed).condition(
            precision, shift
        )
        return posterior.from_white(white), posterior.unknowns(), posterior.log_volume(), posterior.row_variance()

    def total(scale, slope, is_signed):
        return sum(jnp.sum(jnp.sin(x)) for x in answers(scale, slope, is_signed))

    both = jax.jit(lambda scale, slope: [answers(scale, slope, is_signed) for is_signed in (False, True)])
    together, in_turn = both(1.0, 0.7)
    for found, wanted in zip(together, in_turn, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-10)
    prior, design = steps(1.0, 0.7)
    matrix = np.asarray(design.to_dense())
    variance = np.concatenate([np.full(K, 0.2), [4.0]])
    covariance = np.linalg.inv(np.diag(1.0 / variance) + matrix.T @ (np.asarray(precision)[:, None] * matrix))
    np.testing.assert_allclose(together[1], covariance @ matrix.T @ shift, atol=1e-9)
    half = 0.5 * (np.linalg.slogdet(covariance)[1] - np.sum(np.log(variance)))
    np.testing.assert_allclose(together[2], half, atol=1e-9)
    slopes = [jax.jit(jax.grad(total, (0, 1)), static_argnums=2)(1.3, 0.6, is_signed) for is_signed in (False, True)]
    np.testing.assert_allclose(*slopes, rtol=1e-8)
