"""Hidden Markov chains: enumeration of all paths, draws, padding, long sequences, derivatives."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer.util import log_density

from numpyro_ext.distributions import HiddenMarkov

MODELS, STEPS, STATES, CATEGORIES = 200, 5, 3, 4
TOLERANCE = 1e-12 if jax.config.jax_enable_x64 else 2e-5


@pytest.fixture(scope="module")
def models():
    """Probabilities of 200 models, some zero, sequences that each draws, their lengths, and all paths."""
    rng = np.random.default_rng(0)
    initial, transition, emission = (
        rng.dirichlet(np.ones(n), size=shape)
        for n, shape in ((STATES, MODELS), (STATES, (MODELS, STATES)), (CATEGORIES, (MODELS, STATES)))
    )
    transition[::3, 0] = [0.0, 1.0, 0.0]
    emission[::4, 1] = [0.0, 0.5, 0.0, 0.5]
    lengths = rng.integers(0, STEPS + 1, size=MODELS)
    chain = HiddenMarkov(initial, transition, emission, num_steps=STEPS, lengths=lengths)
    values = np.array(chain.sample(random.key(1)))
    values[np.arange(STEPS) >= lengths[:, None]] = 99  # padding may be anything
    paths = np.array(list(product(range(STATES), repeat=STEPS)))
    inside, every = np.arange(STEPS) < lengths[:, None], np.arange(MODELS)[:, None]
    weights = np.ones((MODELS, len(paths)))
    for t in range(STEPS):
        move = initial[:, paths[:, 0]] if t == 0 else transition[every, paths[:, t - 1], paths[:, t]]
        seen = emission[every, paths[:, t], np.where(inside, values, 0)[:, t, None]]
        # after the end one path is left of those that agree until then
        weights *= np.where(inside[:, t, None], move * seen, paths[:, t] == 0)
    return chain, values, inside, paths, weights


@pytest.mark.float32
def test_enumeration_of_all_paths(models):
    chain, values, inside, paths, weights = models
    total = weights.sum(1)
    np.testing.assert_allclose(chain.log_prob(values), np.log(total), rtol=TOLERANCE, atol=TOLERANCE)
    at = paths[:, :, None] == np.arange(STATES)
    posterior = np.einsum("mp,ptk->mtk", weights / total[:, None], at) * inside[..., None]
    np.testing.assert_allclose(chain.posterior_states(values), posterior, atol=10 * TOLERANCE)
    found = np.asarray(chain.most_probable_states(values))
    assert (found[~inside] == -1).all()
    chosen = weights[np.arange(MODELS), np.where(inside, found, 0) @ STATES ** np.arange(STEPS)[::-1]]
    np.testing.assert_allclose(chosen, weights.max(1), rtol=1e-12 if TOLERANCE < 1e-8 else 1e-5)


def test_probabilities_of_all_sequences_add_up_and_draws_have_them():
    transition, emission = np.array([[0.9, 0.1], [0.3, 0.7]]), np.array([[0.7, 0.2, 0.1], [0.0, 0.1, 0.9]])
    chain = HiddenMarkov([0.6, 0.4], transition.tolist(), emission, num_steps=3)
    values = np.array(list(product(range(3), repeat=3)))
    mass = np.exp(chain.log_prob(values))
    np.testing.assert_allclose(mass.sum(), 1.0, rtol=1e-12)
    draws = np.asarray(chain.sample(random.key(0), (20_000,)))
    share = np.bincount(draws @ [9, 3, 1], minlength=27) / 20_000
    assert (np.abs(share - mass) <= 4.5 * np.sqrt(mass * (1 - mass) / 20_000)).all()
    padded = HiddenMarkov(np.ones((4, 1, 2)) / 2, transition, emission, num_steps=np.int64(6), lengths=[2, 0, 6])
    draws = padded.sample(random.key(1), (5,))
    assert padded.batch_shape == (4, 3) and draws.shape == (5, 4, 3, 6)
    assert (np.asarray(draws)[..., 0, 2:] == 0).all() and (np.asarray(draws)[..., 1, :] == 0).all()
    # a padded sequence is as probable as it is alone
    alone = HiddenMarkov([0.5, 0.5], transition, emission, num_steps=2).log_prob(np.asarray(draws)[..., 0, :2])
    np.testing.assert_allclose(padded.log_prob(draws)[..., 0], alone, rtol=1e-13)


@pytest.mark.float32
def test_long_sequences_do_not_underflow():
    # each step moves to the other state, and the states do not overlap: the log probability is that of the emissions
    chain = HiddenMarkov([1.0, 0.0], [[0.0, 1.0], [1.0, 0.0]], [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]], num_steps=100_000)
    value = np.arange(100_000) % 2 * 2
    np.testing.assert_allclose(chain.log_prob(value), 100_000 * np.log(0.5), rtol=TOLERANCE)
    np.testing.assert_array_equal(chain.most_probable_states(value), np.arange(100_000) % 2)
    assert chain.log_prob(value[::-1]) == -np.inf


def test_what_is_impossible_or_no_category_is_said():
    transition, emission = np.eye(2), np.array([[1.0, 0.0], [0.0, 1.0]])
    chain = HiddenMarkov([0.5, 0.5], transition, emission, num_steps=2, validate_args=False)
    values = np.array([[0, 1], [0, 2], [0, -1], [1, 1]])
    np.testing.assert_array_equal(np.asarray(chain.log_prob(values))[[0, 3]], [-np.inf, np.log(0.5)])
    assert np.isnan(chain.log_prob(values)[1:3]).all() and not chain.support(values)[1:3].any()
    assert np.isnan(chain.posterior_states(values)[:3]).all() and (chain.most_probable_states(values)[:3] == -1).all()
    np.testing.assert_array_equal(chain.posterior_states(values)[3], [[0, 1], [0, 1]])
    for changes, message in (
        ({"transition": np.ones((2, 2))}, "transition holds probabilities that add up to one"),
        ({"emission": np.ones((3, 2)) / 2}, r"got \(2,\), \(2, 2\) and \(3, 2\)"),
        ({"lengths": [3]}, "lengths are 0 to num_steps = 2; got 3"),
        ({"lengths": [1.5]}, "lengths are integers"),
        ({"num_steps": 0}, "num_steps is an integer from 1"),
    ):
        arguments = {"initial": [0.5, 0.5], "transition": transition, "emission": emission, "num_steps": 2} | changes
        with pytest.raises(ValueError, match=message):
            HiddenMarkov(**arguments)
    with pytest.raises(ValueError, match="num_steps = 2 cells on their last axis"):
        chain.log_prob(np.zeros(3, int))


def test_derivatives_in_a_model_are_those_of_the_density():
    values = np.array([[0, 1, 2, 2, 1, 0], [2, 2, 2, 1, 7, 7]])

    def model(y):
        initial = numpyro.sample("initial", dist.Dirichlet(jnp.ones(2)))
        transition = numpyro.sample("transition", dist.Dirichlet(jnp.ones(2)).expand([2]).to_event(1))
        emission = numpyro.sample("emission", dist.Dirichlet(jnp.ones(3)).expand([2]).to_event(1))
        with numpyro.plate("people", 2):
            numpyro.sample(
                "y", HiddenMarkov(initial, transition, emission, num_steps=6, lengths=jnp.array([6, 4])), obs=y
            )

    def density(x):
        z = {
            "initial": jnp.stack([x[0], 1 - x[0]]),
            "transition": jnp.stack([x[1:3], 1 - x[1:3]], -1),
            "emission": jnp.stack([x[3:5], x[5:7], 1 - x[3:5] - x[5:7]], -1),
        }
        return log_density(model, (values,), {}, z)[0]

    at = jnp.array([0.3, 0.8, 0.4, 0.2, 0.5, 0.3, 0.2])
    compiled = jax.jit(density)
    slopes = jax.jit(jax.grad(density))(at)
    for i, slope in enumerate(slopes):
        ends = [compiled(at.at[i].add(sign * 1e-6)) for sign in (1.0, -1.0)]
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-6)
    # a chain that goes one way: what is impossible stays so, and nothing becomes NaN
    one_way = jax.grad(
        lambda a: HiddenMarkov(
            jnp.array([1.0, 0.0]), jnp.stack([jnp.stack([a, 1 - a]), jnp.array([0.0, 1.0])]), jnp.eye(2), num_steps=3
        ).log_prob(jnp.array([0, 0, 1]))
    )(0.4)
    np.testing.assert_allclose(one_way, 1 / 0.4 - 1 / 0.6, rtol=1e-12)
