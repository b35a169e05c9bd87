"""Softmax over some of the items in training: its density, its gradient and the network that it learns."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random

from numpyro_ext.distributions import LinearCategorical
from numpyro_ext.infer import ChunkedSVI
from numpyro_ext.infer.stochastic.chunks import Events
from numpyro_ext.infer.stochastic.sampled_softmax import draw_candidates, log_proposals
from numpyro_ext.models import collaborative_rnn

NUM_ITEMS = 12
RNG = np.random.default_rng(3)
INPUTS, WEIGHTS = RNG.normal(size=(4, 5, 3)), RNG.normal(size=(NUM_ITEMS, 3))
OFFSET = RNG.normal(size=(4, 1, NUM_ITEMS))
EVENTS = RNG.integers(0, NUM_ITEMS, (4, 5))
LOG = Events(np.minimum(RNG.geometric(0.3, 400) - 1, NUM_ITEMS - 1), np.array([0]), np.array([400]))


@pytest.mark.float32
@pytest.mark.parametrize("offset", [0.0, OFFSET[0, 0], OFFSET], ids=["none", "items", "people"])
def test_all_items_as_candidates_give_the_softmax(offset):
    fn = LinearCategorical(INPUTS, WEIGHTS, offset)
    wanted = dist.Categorical(logits=INPUTS @ WEIGHTS.T + offset).log_prob(EVENTS)
    np.testing.assert_allclose(fn.log_prob(EVENTS), wanted, rtol=1e-5)
    several = np.stack([EVENTS, EVENTS[::-1]])
    wanted_of_several = dist.Categorical(logits=INPUTS @ WEIGHTS.T + offset).log_prob(several)
    np.testing.assert_allclose(fn.log_prob(several), wanted_of_several, rtol=1e-5)
    sampled = fn.sampled_log_prob(EVENTS, np.arange(NUM_ITEMS), np.zeros(NUM_ITEMS))
    np.testing.assert_allclose(sampled, wanted, rtol=1e-5)


def test_the_sum_over_candidates_has_no_bias():
    fn, proposal = LinearCategorical(INPUTS, WEIGHTS, OFFSET), log_proposals(LOG.items, NUM_ITEMS)
    np.testing.assert_allclose(jnp.exp(proposal).sum(), 1.0, rtol=1e-12)

    def inverse_share(key):
        return jnp.exp(-fn.sampled_log_prob(EVENTS, *draw_candidates(key, 6, LOG, proposal)))

    found = jax.jit(jax.vmap(inverse_share))(random.split(random.key(0), 20_000))
    error = found.std(0) / np.sqrt(len(found))
    assert np.all(np.abs(found.mean(0) - jnp.exp(-fn.log_prob(EVENTS))) < 4.5 * error)


def test_candidates_that_all_are_the_event_have_a_finite_gradient():
    def loss(inputs):
        return LinearCategorical(inputs, WEIGHTS).sampled_log_prob(EVENTS, np.full(3, EVENTS[0, 0]), np.zeros(3)).sum()

    assert np.isfinite(jax.grad(loss)(jnp.asarray(INPUTS))).all()


def chains(num_items=40, num_users=24, length=30):
    """People who go round all items, or jump anywhere, one time in five."""
    rng, lists = np.random.default_rng(0), []
    for _ in range(num_users):
        item, own = rng.integers(num_items), []
        for _ in range(length):
            own.append(item)
            item = rng.integers(num_items) if rng.random() < 0.2 else (item + 1) % num_items
        lists.append(own)
    items, lengths = np.concatenate(lists), np.full(num_users, length)
    return SimpleNamespace(items=items, lengths=lengths, starts=np.cumsum(lengths) - lengths, num_items=num_items)


def split(log, last=5):
    """Training and validation of sequences of one length."""
    table = log.items.reshape(len(log.lengths), -1)

    def part(cells):
        lengths = np.full(len(cells), cells.shape[1])
        starts = np.cumsum(lengths) - lengths
        return SimpleNamespace(items=cells.reshape(-1), lengths=lengths, starts=starts, num_items=log.num_items)

    return SimpleNamespace(train=part(table[:, :-last]), validation=part(table[:, -last:]))


@pytest.mark.thorough
@pytest.mark.parametrize("number", [8, 20])
def test_a_network_trained_on_some_items_scores_all(number):
    options = {"optim": optax.adam(0.03), "plate": "users", "batch_size": 8, "chunk": 10, "progress_bar": False}
    data, run = split(chains()), {"num_epochs": 60, "width": 8, "personal": "none"}
    exact = ChunkedSVI(collaborative_rnn, **options).run(random.key(0), data, **run)
    fit = ChunkedSVI(collaborative_rnn, sampled_softmax=number, **options).run(random.key(0), data, **run)
    # chance has log(40) = 3.7, the chain itself 1.2
    assert min(fit.validation_errors) < min(exact.validation_errors) + 0.15 < 2.6
    assert abs(np.exp(fit.next_log_probabilities([3, 4, 5])).sum() - 1.0) < 1e-6
    again = ChunkedSVI(collaborative_rnn, sampled_softmax=number, **options).run(random.key(0), data, **run)
    np.testing.assert_array_equal(fit.params["W_out"], again.params["W_out"])


def plain(users, events, mask, carry, *, num_users, num_items):
    with numpyro.plate("users", num_users, subsample_size=len(users), dim=-2):
        logits = numpyro.param("logits", jnp.zeros(num_items))
        with numpyro.plate("steps", events.shape[1], dim=-1), numpyro.handlers.mask(mask=mask):
            numpyro.sample("event", dist.Categorical(logits=logits), obs=events)
    return carry


def test_bad_options_are_refused():
    options = {"optim": optax.adam(0.03), "plate": "users", "batch_size": 8, "progress_bar": False}
    with pytest.raises(ValueError, match=r"give chunk=, and no local="):
        ChunkedSVI(plain, sampled_softmax=5, **options)
    with pytest.raises(ValueError, match=r"sampled_softmax is a positive integer; got 0"):
        ChunkedSVI(plain, sampled_softmax=0, chunk=5, **options)
    engine = ChunkedSVI(plain, sampled_softmax=5, chunk=5, **options)
    with pytest.raises(ValueError, match=r"Write LinearCategorical\(states, W_out\) in the place"):
        engine.run(random.key(0), chains(), num_epochs=1, carry=jnp.zeros(1))
    with pytest.raises(ValueError, match=r"weights of shape \(K, D\)"):
        LinearCategorical(jnp.zeros((2, 3)), jnp.zeros((4, 5)))
