"""Counts against the reference file, hand counts, and the probabilities that they give to all items."""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from numpyro_ext.datasets import load_wikipedia_edits
from numpyro_ext.datasets.external import DATA_VARIABLE
from numpyro_ext.sequences import (
    Bigram,
    EventSequences,
    HiddenMarkovBaseline,
    KneserNey,
    MatrixFactorisation,
    OwnBigram,
    OwnFrequencies,
    PersonalMixture,
    RepeatLast,
    Uniform,
    Unigram,
)
from numpyro_ext.sequences.events import hold_out

REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "ko-crnn.json").read_text())


def sequences_of(lists, num_items):
    items = np.concatenate([np.asarray(one, int) for one in lists])
    return EventSequences(items, [len(one) for one in lists], np.arange(num_items), np.arange(len(lists)))


@pytest.fixture(scope="module")
def log():
    """Sequences of very different lengths, with repeats and a rare item."""
    rng = np.random.default_rng(0)
    lists = [rng.choice(7, size=n, p=[0.4, 0.2, 0.2, 0.1, 0.05, 0.03, 0.02]) for n in (40, 12, 160, 15, 9)]
    return EventSequences.from_lists([np.repeat(one, rng.integers(1, 3, size=one.size)) for one in lists])


def test_reference_values():
    lists, want = REFERENCE["sequences"], REFERENCE["baselines"]
    train, test = (sequences_of([one[part] for one in lists], 6) for part in (slice(-3), slice(-3, None)))
    split = hold_out(train, test)
    for name, predictor in (("uniform", Uniform()), ("unigram", Unigram(0.1)), ("bigram", Bigram(0.1))):
        error = -split.mean_over_users(predictor.fit(train).log_predictive(split))
        key = name if name == "uniform" else f"{name}_metric"
        np.testing.assert_allclose(error, want[key], rtol=1e-13)
        if name == "unigram":
            found = np.exp(predictor.next_log_probabilities([]))
            np.testing.assert_allclose(found, want["unigram_probs"], rtol=1e-13)
        elif name == "bigram":
            # the file has the next item in rows
            found = predictor.probabilities(np.arange(6)).T
            np.testing.assert_allclose(found, want["bigram_probs_row_next_col_prev"], rtol=1e-13)


PREDICTORS = [
    Uniform(),
    Unigram(0.2),
    Bigram(0.1),
    KneserNey(0.1),
    RepeatLast(),
    RepeatLast(1.0),
    OwnFrequencies(0.1),
    OwnFrequencies(0.0),
    OwnFrequencies(causal=False),
    OwnBigram(0.1),
    OwnBigram(0.0),
    PersonalMixture(),
    PersonalMixture(kneser_ney=True),
    HiddenMarkovBaseline(3),
    HiddenMarkovBaseline(3, personal=5.0),
]


@pytest.mark.parametrize("predictor", PREDICTORS, ids=repr)
def test_events_have_the_probability_that_all_items_share_out(predictor, log):
    split = log.split()
    predictor.fit(split.train, split.validation)
    found, place = predictor.log_predictive(split), 0
    for user in range(len(split.test)):
        events = split.whole[user]
        for number in range(len(events) - len(split.test[user]), len(events)):
            logs = predictor.next_log_probabilities(events[:number].tolist(), user)
            np.testing.assert_allclose(np.exp(logs).sum(), 1.0, rtol=1e-12)
            np.testing.assert_allclose(logs[events[number]], found[place], rtol=1e-12)
            place += 1
    assert place == found.size
    np.testing.assert_allclose(np.exp(predictor.next_log_probabilities([])).sum(), 1.0, rtol=1e-12)


def test_one_item_is_certain_and_a_single_event_is_too_few_to_choose_by():
    one = EventSequences.from_lists([["a"] * 10, ["a"], []])
    for predictor in [*PREDICTORS, MatrixFactorisation(2)]:
        logs = replace(predictor).fit(one).next_log_probabilities([0, 0])
        np.testing.assert_allclose(logs, [0.0], atol=1e-12)
    single = EventSequences.from_lists([["a"], ["b"]])
    for predictor in (Bigram(), PersonalMixture()):
        with pytest.raises(ValueError, match="no user has two events"):
            predictor.fit(single)


def test_own_counts_are_those_of_the_past(log):
    split = log.split()
    own = OwnFrequencies(0.5).fit(split.history).log_predictive(split)
    pairs = OwnBigram(0.5).fit(split.history).log_predictive(split)
    want = []
    for user in range(len(split.test)):
        events = split.whole[user].tolist()
        for t in range(len(split.history[user]), len(events)):
            before, last = Counter(events[:t]), events[t - 1]
            followed = Counter(b for a, b in zip(events[: t - 1], events[1:t], strict=True) if a == last)
            number = split.whole.num_items
            want.append(
                [
                    (before[events[t]] + 0.5) / (t + 0.5 * number),
                    (followed[events[t]] + 0.5) / (followed.total() + 0.5 * number),
                ]
            )
    np.testing.assert_allclose(np.exp(np.stack([own, pairs], axis=1)), want, rtol=1e-12)


def test_kneser_ney_by_hand():
    # a b: 2, a c: 1, b a: 2; pairs that occur once 1, twice 2, so d = 1/5; b and c follow one item each, a one
    log = EventSequences.from_lists([list("abab"), list("ac"), list("ba")])
    found = KneserNey(0.0).fit(log).probabilities([0, 1])
    want = [[0.4 / 9, (1.8 + 0.4 / 3) / 3, (0.8 + 0.4 / 3) / 3], [(1.8 + 0.2 / 3) / 2, 0.2 / 6, 0.2 / 6]]
    np.testing.assert_allclose(found, want, rtol=1e-12)


def test_what_is_added_is_chosen_by_validation(log):
    split = log.split()
    chosen = Bigram().fit(split.train, split.validation)
    watch = hold_out(split.train, split.validation)
    errors = {
        eps: -watch.mean_over_users(Bigram(eps).fit(split.train).log_predictive(watch))
        for eps in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    }
    assert chosen.added == min(errors, key=errors.get)
    # and then all is counted
    both = Bigram(chosen.added).fit(split.history)
    np.testing.assert_allclose(chosen.log_predictive(split), both.log_predictive(split), rtol=1e-14)


def test_shares_of_repetitions_are_estimated():
    log = EventSequences.from_lists([list("aabb"), list("abcc")])
    found = np.exp(RepeatLast().fit(log).next_log_probabilities([1]))
    counts = np.array([3.01, 3.01, 2.01]) / 8.03
    np.testing.assert_allclose(found[1], (3 + 1) / (6 + 2), rtol=1e-12)
    np.testing.assert_allclose(found[[0, 2]], 0.5 * counts[[0, 2]] / (1 - counts[1]), rtol=1e-12)


def test_histories_may_come_in_many_kinds_and_wrong_ones_are_refused(log):
    fitted = Bigram(0.1).fit(log)
    want = fitted.next_log_probabilities(np.array([1, 2]))
    for history in ([1, 2], (1, 2), np.array([1, 2], np.int8), pd.Series([1, 2]), [np.int64(1), np.int32(2)]):
        np.testing.assert_array_equal(fitted.next_log_probabilities(history), want)
    for history, message in (([1, 7], "items are 0 to 6"), ([-1], "items are"), ([0.5], "indices"), ([[1]], "indices")):
        with pytest.raises(ValueError, match=message):
            fitted.next_log_probabilities(history)
    with pytest.raises(ValueError, match="knows nothing before fit"):
        Bigram().next_log_probabilities([])
    with pytest.raises(ValueError, match="other items than these: number 0 was 0 and is 'a'"):
        fitted.log_predictive(EventSequences.from_lists([list("ababababab")]).split())
    with pytest.raises(ValueError, match="is not negative"):
        Unigram(-1.0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        RepeatLast(2.0).fit(log)
    with pytest.raises(ValueError, match="same users and items"):
        Bigram(0.1).fit(log, EventSequences.from_lists([list("ab")]))


@pytest.mark.skipif(not os.environ.get(DATA_VARIABLE), reason=f"{DATA_VARIABLE} names no downloaded data")
def test_errors_on_edits_of_wikipedia():
    users, items, *_ = load_wikipedia_edits()
    log = EventSequences.from_events(users, items).filter(min_item=10, min_user=11, min_entropy=1.0)
    split = log.split()
    table = {Uniform(): 6.827, Unigram(0.01): 6.703, OwnFrequencies(causal=False): 4.112, Bigram(0.01): 3.893}
    for predictor, error in table.items():
        found = -split.mean_over_users(predictor.fit(split.history).log_predictive(split))
        np.testing.assert_allclose(found, error, atol=1e-3)
    mixture = PersonalMixture().fit(split.train, split.validation)
    assert -split.mean_over_users(mixture.log_predictive(split)) < 3.18
