"""Scores by hand, and tables of predictors."""

import numpy as np
import pytest

from numpyro_ext.sequences import (
    Bigram,
    EventSequences,
    PersonalMixture,
    SequencePredictor,
    Uniform,
    Unigram,
    compare_sequences,
    next_item_ranks,
    sequence_scores,
)
from numpyro_ext.sequences.mixtures import _weights


@pytest.fixture(scope="module")
def split():
    """Tests ``aac`` after nine ``ab``, and ``bcd`` of someone who did little else than ``b`` before."""
    rng = np.random.default_rng(1)
    more = [list(rng.choice(list("abcd"), size=n)) for n in (30, 60, 120, 400)]
    return EventSequences.from_lists(
        [list("abababababab") + list("aac"), list("bbbbbbbbb") + list("bcd"), *more]
    ).split()


def test_errors_are_means_over_users_of_means_over_events(split):
    logs = -np.arange(1.0, split.test.items.size + 1)
    scores = sequence_scores(logs, split)
    want = [-np.mean(logs[split.test.users == user]) for user in range(6)]
    np.testing.assert_allclose(scores.user_errors, want)
    np.testing.assert_allclose(scores.error, np.mean(want))
    np.testing.assert_allclose(scores.standard_error, np.std(want, ddof=1) / np.sqrt(6))
    np.testing.assert_allclose(scores.perplexity, np.exp(np.mean(want)))
    # of the first user a, a after b, and c; of the second b after b, then c and d
    kinds = {"seen before": {}, "repeats the last": {}, "new to the user": {}}
    place = 0
    for user in range(6):
        events = split.whole[user].tolist()
        for t in range(len(split.history[user]), len(events)):
            kind = "repeats the last" if events[t] == events[t - 1] else "seen before"
            kind = kind if events[t] in events[:t] else "new to the user"
            kinds[kind].setdefault(user, []).append(-logs[place])
            place += 1
    assert [kinds[kind][0] for kind in kinds] == [[1.0], [2.0], [3.0]] and kinds["new to the user"][1] == [5.0, 6.0]
    for kind, events in kinds.items():
        score, means = scores.by_kind[kind], [np.mean(values) for values in events.values()]
        np.testing.assert_allclose(score.error, np.mean(means))
        np.testing.assert_allclose(score.standard_error, np.std(means, ddof=1) / np.sqrt(len(means)))
        assert (score.num_users, score.num_events) == (len(events), sum(map(len, events.values())))
    assert {name: score.num_users for name, score in scores.by_entropy.items()} == {
        "low entropy": 2,
        "middle entropy": 2,
        "high entropy": 2,
    }
    assert scores.by_history["after 10-29 events"].num_users == 3
    assert sum(score.num_events for score in scores.by_history.values()) == logs.size
    assert "low entropy" in repr(scores) and "<table>" in scores._repr_html_()


class Fixed:
    """Prediction of the same probabilities for all."""

    def __init__(self, logs):
        self.logs = np.asarray(logs)

    def log_predictive(self, split):
        return self.logs[split.test.items]

    def next_log_probabilities(self, history, user=None):
        return self.logs


def test_ranks_of_ties_are_their_mean(split):
    ranks = next_item_ranks(Fixed(np.log([0.4, 0.2, 0.2, 0.2])), split)
    np.testing.assert_array_equal(ranks, np.where(split.test.items == 0, 1.0, 3.0))
    scores = sequence_scores(np.zeros(ranks.size), split, ranks)
    share = split.mean_over_users(split.test.items == 0)
    np.testing.assert_allclose(scores.recall(2), share)
    np.testing.assert_allclose(scores.mean_reciprocal_rank, share + (1 - share) / 3)
    with pytest.raises(ValueError, match="ranks=True"):
        sequence_scores(np.zeros(ranks.size), split).recall(1)


def test_a_table_fits_what_is_not_fitted_and_pairs_users(split):
    network = Fixed(np.log([0.4, 0.3, 0.2, 0.1]))
    fitted = Bigram(0.5).fit(split.train)
    table = compare_sequences([Uniform(), Unigram(0.1), fitted, Bigram(0.5), network], split, ranks=True)
    assert list(table.scores) == ["Uniform()", "Unigram(eps=0.1)", "Bigram(eps=0.5)", "Bigram(eps=0.5) again", "Fixed"]
    logs = Unigram(0.1).fit(split.history).log_predictive(split)
    np.testing.assert_allclose(table["Unigram(eps=0.1)"].error, -split.mean_over_users(logs))
    np.testing.assert_allclose(table["Bigram(eps=0.5)"].error, -split.mean_over_users(fitted.log_predictive(split)))
    assert table["Bigram(eps=0.5)"].error != table["Bigram(eps=0.5) again"].error
    difference, error = table.difference("Fixed", "Uniform()")
    np.testing.assert_allclose(difference, table["Fixed"].error - table["Uniform()"].error)
    gaps = [np.mean(np.log(4.0) + network.log_predictive(split)[split.test.users == user]) for user in range(6)]
    np.testing.assert_allclose(error, np.std(gaps, ddof=1) / np.sqrt(6))
    assert "recall@10" in repr(table)
    with pytest.raises(TypeError, match="object does not predict"):
        compare_sequences([object()], split)
    with pytest.raises(TypeError, match="type does not predict"):
        compare_sequences([Uniform], split)
    with pytest.raises(TypeError, match="takes a list of predictors"):
        compare_sequences(Uniform(), split)
    with pytest.raises(TypeError, match=r"log.split\(\); got an object of class EventSequences"):
        compare_sequences([Uniform()], split.train)


def test_values_that_are_no_log_probabilities_are_refused(split):
    number = split.test.items.size
    for values, message in ((np.zeros(3), "log probabilities of shape"), (np.full(number, np.nan), "are NaN"),
                            (np.ones(number), "positive")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            sequence_scores(values, split)
    scores = sequence_scores(np.where(np.arange(number) == 0, -np.inf, 0.0), split)
    assert scores.error == np.inf and scores.by_kind["repeats the last"].error == 0.0


def test_weights_of_a_mixture_are_at_the_maximum():
    rng = np.random.default_rng(2)
    logs, prior = np.log(rng.dirichlet(np.ones(50), size=4).T[rng.integers(50, size=300)]), np.full(4, 0.25)

    def objective(weights, events):
        return np.sum(np.log(np.exp(logs) @ weights)) + events * np.sum(prior * np.log(weights))

    for events in (0.0, 10.0):
        found = _weights(logs, prior, events)
        np.testing.assert_allclose(found.sum(), 1.0)
        # the objective is concave: no step towards a vertex may raise it by more than EM left
        for vertex in np.eye(4):
            step = 0.999 * np.maximum(found, 1e-12) + 0.001 * vertex
            assert objective(step / step.sum(), events) < objective(np.maximum(found, 1e-300), events) + 1e-4


def test_a_network_joins_the_mixture_where_it_helps(split):
    class Oracle(Fixed):
        """Knows a tenth of each event."""

        def __init__(self):
            self.asked = []

        def log_predictive(self, split):
            self.asked.append(split.test.items.size)
            return np.full(split.test.items.size, np.log(0.99))

    oracle = Oracle()
    mixture = PersonalMixture(network=oracle).fit(split.train, split.validation)
    alone = PersonalMixture().fit(split.train, split.validation)
    assert mixture.weights.shape == (4, 6) and (mixture.weights[:, -1] > 0.9).all()
    assert oracle.asked == [split.validation.items.size]
    error = -split.mean_over_users(mixture.log_predictive(split))
    assert error < 0.1 < -split.mean_over_users(alone.log_predictive(split))
    with pytest.raises(ValueError, match="give the validation as well"):
        PersonalMixture(network=oracle).fit(split.history)


def test_components_must_leave_no_event_without_probability(split):
    with pytest.raises(ValueError, match="add one that gives all items a probability"):
        PersonalMixture([_Impossible()]).fit(split.train, split.validation)


class _Impossible(SequencePredictor):
    def _fit(self, train, validation):
        pass

    def _log_probabilities(self, sequences):
        return np.full(sequences.items.size, -np.inf)
