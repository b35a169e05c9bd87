"""Mixtures whose weights move with the state of a network."""

import numpy as np
import optax
import pytest
from jax import random

from numpyro_ext.infer import ChunkedSVI
from numpyro_ext.models import collaborative_rnn
from numpyro_ext.sequences import EventSequences, PersonalMixture, Uniform, Unigram
from numpyro_ext.sequences.gates import Gate, _coefficients
from tests.sequences.test_scores import Fixed


def mixed_by_hand(logs, log_weights, z, coefficients):
    """Log of the mixture of each event, by sums of probabilities."""
    total = []
    for row in range(len(logs)):
        weights = np.exp(log_weights[row] + z[row] @ coefficients)
        total.append(np.log(np.sum(weights / weights.sum() * np.exp(logs[row]))))
    return np.array(total)


def simulated(seed, num_events=600):
    """Components of which the first knows the events where the first number of the state is positive."""
    rng = np.random.default_rng(seed)
    states = 3.0 + 2.0 * rng.normal(size=(num_events, 3))
    knows = np.stack([states[:, 0] > 3.0, states[:, 0] <= 3.0], axis=1)
    logs = np.log(np.where(knows, 0.9, 0.1))
    return logs, np.log(np.full((num_events, 2), 0.5)), states, np.arange(num_events) % 23


def test_the_coefficients_are_those_of_the_greatest_posterior_density():
    logs, log_weights, states, _ = simulated(0)
    found = _coefficients(logs, log_weights, states - 3.0, 5.0, np.zeros((3, 2)))

    def density(coefficients):
        return mixed_by_hand(logs, log_weights, states - 3.0, coefficients).sum() - 2.5 * np.sum(coefficients**2)

    best = density(found)
    for k in range(6):
        for step in (-1e-2, 1e-2):  # the objective is smooth, so that a step of h costs about h squared
            moved = found.ravel().copy()
            moved[k] += step
            assert best - 0.1 < density(moved.reshape(3, 2)) < best


def test_a_gate_is_learned_where_the_state_tells_and_left_alone_where_not():
    logs, log_weights, states, users = simulated(0)
    gate = Gate.learned(logs, log_weights, states, users)
    others = simulated(1)[:3]
    np.testing.assert_allclose(
        gate.mixed(*others),
        mixed_by_hand(*others[:2], (others[2] - gate.mean) / gate.deviation, gate.coefficients),
    )
    assert np.isfinite(gate.precision) and gate.mixed(*others).mean() > np.log(0.7) > np.log(0.5)
    # the other numbers say nothing: they are hardly listened to, which costs new events next to nothing
    gate = Gate.learned(logs, log_weights, states[:, 1:], users)
    assert gate.precision >= 100.0 and np.abs(gate.coefficients).max() < 0.05
    assert gate.mixed(*others[:2], others[2][:, 1:]).mean() > np.log(0.5) - 1e-3


@pytest.fixture(scope="module")
def split():
    rng = np.random.default_rng(0)
    lists = [[int(item) for item in rng.choice(5, size=12 + 2 * user)] for user in range(9)]
    return EventSequences.from_lists([[0, 1, 2, 3, 4], *lists]).split(least=2)


@pytest.mark.thorough
def test_a_mixture_with_a_gate_predicts_all_items_as_it_scores_them(split):
    engine = ChunkedSVI(
        collaborative_rnn, optim=optax.adam(0.05), plate="users", batch_size=4, chunk=8, progress_bar=False
    )
    network = engine.run(random.key(0), split, num_epochs=2, width=3, personal="none")
    mixture = PersonalMixture([Uniform(), Unigram(0.1)], network=network, gate=True).fit(split.train, split.validation)
    # where the state does not help, it must still be asked
    rng = np.random.default_rng(1)
    mixture.learned_gate = mixture.learned_gate._replace(coefficients=rng.normal(size=(3, 3)))
    scores, place = mixture.log_predictive(split), 0
    for user in (0, 4):
        place = int(split.test.lengths[:user].sum())
        for number in range(split.test.lengths[user]):
            history = split.whole[user][: split.history.lengths[user] + number]
            logs = mixture.next_log_probabilities(history, user)
            np.testing.assert_allclose(np.exp(logs).sum(), 1.0, rtol=1e-6)
            np.testing.assert_allclose(logs[split.test[user][number]], scores[place + number], rtol=1e-6)


def test_a_gate_needs_a_network_with_states(split):
    for network in (None, Fixed(np.log(np.full(5, 0.2)))):
        with pytest.raises(ValueError, match="give network= one that has states"):
            PersonalMixture(network=network, gate=True).fit(split.train, split.validation)
