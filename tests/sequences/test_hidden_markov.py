"""Baum-Welch: against another library, the density of the distribution and its derivatives."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.distributions import HiddenMarkov
from numpyro_ext.sequences import EventSequences, HiddenMarkovBaseline, fit_hidden_markov
from numpyro_ext.sequences.events import hold_out
from numpyro_ext.sequences.hidden_markov import _Lanes

REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "hidden_markov.json").read_text())
START = tuple(np.array(REFERENCE[name]) for name in ("initial", "transition", "emission"))


@pytest.fixture(scope="module")
def sequences():
    lists = REFERENCE["sequences"]
    return EventSequences(np.concatenate(lists), [len(one) for one in lists], np.arange(5), np.arange(len(lists)))


def padded(sequences):
    table = np.zeros((len(sequences), sequences.lengths.max()), int)
    for user in range(len(sequences)):
        table[user, : sequences.lengths[user]] = sequences[user]
    return table


def test_iterations_are_those_of_another_library(sequences):
    fit = fit_hidden_markov(sequences, 3, start=START, max_iterations=8, tolerance=0.0)
    np.testing.assert_allclose(fit.objective[:8], REFERENCE["trace"], rtol=1e-12)
    for name, rows in REFERENCE["fitted"].items():
        np.testing.assert_allclose(getattr(fit, name), rows, atol=1e-10)
    assert not fit.converged and len(fit.objective) == 9


def test_other_labels_and_another_order_of_users_give_the_same_chain(sequences):
    other = EventSequences(4 - sequences.items, sequences.lengths, np.arange(5), np.arange(len(sequences)))
    turned = EventSequences.from_lists([sequences[user] for user in reversed(range(len(sequences)))])
    own, relabelled, reordered = (
        fit_hidden_markov(log, 3, max_iterations=20, tolerance=0.0) for log in (sequences, other, turned)
    )
    np.testing.assert_allclose(relabelled.transition, own.transition, atol=1e-9)
    np.testing.assert_allclose(relabelled.emission[:, ::-1], own.emission, atol=1e-9)
    np.testing.assert_allclose(reordered.emission, own.emission, atol=1e-9)


def test_expected_counts_are_derivatives_of_the_density(sequences):
    table, longest = padded(sequences), int(sequences.lengths.max())

    def total(initial, transition, emission):
        # rows that do not add up to one have a density all the same, and may be differentiated
        logs = HiddenMarkov(initial, transition, emission, num_steps=longest, lengths=sequences.lengths)
        return jnp.sum(logs.log_prob(table))

    value, slopes = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(*(jnp.asarray(part) for part in START))
    found = _Lanes.of(sequences).expected_counts(*START)
    np.testing.assert_allclose(found[0], value, rtol=1e-12)
    for counts, part, slope in zip(found[1:], START, slopes, strict=True):
        np.testing.assert_allclose(counts, part * np.asarray(slope), rtol=1e-10, atol=1e-12)
    split = hold_out(sequences)
    model = HiddenMarkovBaseline(2).fit(sequences)
    logs = model.result.distribution(longest, split.whole.lengths).log_prob(table)
    each = np.bincount(sequences.users, model._log_probabilities(sequences), minlength=len(sequences))
    np.testing.assert_allclose(each, logs, rtol=1e-12)


@pytest.mark.parametrize("pseudo_count", [0.0, 0.3])
def test_the_objective_rises_to_a_point_where_its_derivatives_are_zero(sequences, pseudo_count):
    fit = fit_hidden_markov(sequences, 2, pseudo_count=pseudo_count, max_iterations=20_000, tolerance=1e-14)
    assert fit.converged and (np.diff(fit.objective) > -1e-11).all()
    lanes = _Lanes.of(sequences)
    counts = lanes.expected_counts(*fit[:3])
    logs = sum(np.log(np.maximum(part, 1e-300)).sum() for part in fit[:3]) if pseudo_count else 0.0
    np.testing.assert_allclose(fit.objective[-1], counts[0] + pseudo_count * logs, rtol=1e-12)
    # along rows that add up to one the derivative by a probability is its count over it, equal in all that are positive
    for part, count in zip(fit[:3], counts[1:], strict=True):
        total = count + pseudo_count
        np.testing.assert_allclose(part, total / total.sum(-1, keepdims=True), atol=1e-5)
    # a further step leaves the objective where it is, a random one lowers it
    rng = np.random.default_rng(0)
    for _ in range(5):
        moved = [0.98 * part + 0.02 * rng.dirichlet(np.ones(part.shape[-1]), size=part.shape[:-1]) for part in fit[:3]]
        other = lanes.expected_counts(*moved)[0] + pseudo_count * sum(np.log(part).sum() for part in moved)
        assert other < fit.objective[-1]


def test_rows_of_a_person_are_the_mode_of_their_posterior(sequences):
    model = HiddenMarkovBaseline(2, personal=3.0).fit(sequences)
    pooled = model.result
    lanes = _Lanes.of(sequences)
    # with the rows of all for everyone the counts of the users add up to those of all
    same = [np.repeat(part[None], 6, axis=0) for part in pooled[:2]]
    each = lanes.expected_counts(*same, pooled.emission)
    together = lanes.expected_counts(*pooled[:3])
    np.testing.assert_allclose(each[0], together[0], rtol=1e-12)
    for own, all_ in zip(each[1:3], together[1:3], strict=True):
        np.testing.assert_allclose(own.sum(0), all_, rtol=1e-12)
    # each user alone, against the density of a distribution of her own: no change of her rows raises her posterior
    rng = np.random.default_rng(0)
    for user in (0, 3):
        alone = EventSequences(sequences[user], [sequences.lengths[user]], np.arange(5), ["u"])

        def posterior(initial, transition, alone=alone):
            likelihood = _Lanes.of(alone).expected_counts(initial, transition, pooled.emission)[0]
            prior = np.sum(pooled.initial * np.log(initial)) + np.sum(pooled.transition * np.log(transition))
            return likelihood + 3.0 * prior

        rows = [part[user] for part in model.rows]
        for _ in range(10):
            moved = [0.9 * part + 0.1 * rng.dirichlet(np.ones(2), size=part.shape[:-1]) for part in rows]
            assert posterior(*moved) < posterior(*rows) + 1e-4
        assert posterior(*rows) > posterior(pooled.initial, pooled.transition)
        # as someone new she has the same rows, to the tolerance of EM
        known, new = (model.next_log_probabilities(sequences[user], who) for who in (user, None))
        np.testing.assert_allclose(known, new, atol=0.02)
    # a prior that counts for very much leaves the rows of all
    strong = HiddenMarkovBaseline(2, personal=1e9).fit(sequences)
    np.testing.assert_allclose(
        strong.next_log_probabilities([1], 0),
        HiddenMarkovBaseline(2).fit(sequences).next_log_probabilities([1]),
        atol=1e-6,
    )
    with pytest.raises(ValueError, match="positive number of moves"):
        HiddenMarkovBaseline(2, personal=0.0).fit(sequences)


@pytest.mark.thorough
def test_states_of_simulated_sequences_are_found():
    transition, emission = np.array([[0.95, 0.05], [0.1, 0.9]]), np.array([[0.7, 0.25, 0.05], [0.05, 0.15, 0.8]])
    rng, lists = np.random.default_rng(1), []
    for length in rng.integers(1, 400, size=60):
        state, items = 0, []
        for _ in range(length):
            items.append(rng.choice(3, p=emission[state]))
            state = rng.choice(2, p=transition[state])
        lists.append(items)
    log = EventSequences.from_lists([*lists, []])
    fits = [fit_hidden_markov(log, 2, seed=seed, max_iterations=500) for seed in range(2)]
    best = max(fits, key=lambda fit: fit.objective[-1])
    order = np.argsort(best.emission[:, 2])
    np.testing.assert_allclose(best.emission[order], emission, atol=0.03)
    np.testing.assert_allclose(best.transition[np.ix_(order, order)], transition, atol=0.03)
    # what made the data is less likely than what was fitted to them
    assert _Lanes.of(log).expected_counts(np.array([1.0, 0.0]), transition, emission)[0] < best.objective[-1]
    assert HiddenMarkovBaseline([1, 2]).fit(log).result.emission.shape == (2, 3)


def test_what_cannot_be_fitted_is_named(sequences):
    cases = (
        ({"num_states": 0}, "num_states is an integer from 1"),
        ({"start": START[:2] + (np.ones((3, 4)),)}, r"emission holds probabilities of the shape \(3, 5\)"),
        ({"start": (START[0], -START[1], START[2])}, "transition holds"),
        ({"start": START[:2] + (np.eye(3, 5),)}, "a sequence is impossible under the start"),
        ({"pseudo_count": -1.0}, "pseudo_count is not negative"),
    )
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            fit_hidden_markov(sequences, **({"num_states": 3} | options))
    with pytest.raises(ValueError, match="pseudo_count is positive"):
        HiddenMarkovBaseline(2, pseudo_count=0.0).fit(sequences)
    with pytest.raises(ValueError, match="there are no events"):
        fit_hidden_markov(EventSequences([], [0], ["a"], ["u"]), 2)
