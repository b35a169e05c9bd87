"""Logs become sequences, rules say what they took, and divisions are those of the source."""

import os

import numpy as np
import pandas as pd
import pytest

from numpyro_ext.datasets import load_movielens_events, load_wikipedia_edits
from numpyro_ext.datasets.external import DATA_VARIABLE
from numpyro_ext.sequences import EventSequences

needs_data = pytest.mark.skipif(not os.environ.get(DATA_VARIABLE), reason=f"{DATA_VARIABLE} names no downloaded data")


def lists_of(sequences):
    return [[str(sequences.item_labels[i]) for i in sequences[u]] for u in range(len(sequences))]


def test_events_are_grouped_by_user_and_sorted_by_time():
    users, items, time = ["b", "a", "b", "a", "b"], ["x", "y", "z", "x", "x"], [3.0, 1.0, 1.0, 0.0, 3.0]
    log = EventSequences.from_events(users, items)
    assert lists_of(log) == [["y", "x"], ["x", "z", "x"]] and log.notes == ()
    assert list(log.user_labels) == ["a", "b"] and list(log.positions) == [0, 1, 0, 1, 2]
    assert list(log.previous) == [-1, 1, -1, 0, 2] and list(log.starts) == [0, 2] and log.num_items == 3
    frame = pd.DataFrame({"user": users, "item": items, "time": pd.to_datetime(time, unit="s")})
    there, dates = frame["time"].dt.tz_localize("Europe/Zurich"), list(frame["time"].dt.to_pydatetime())
    spans = frame["time"] - frame["time"].min()
    for at in (time, np.array(time, np.float32), frame["time"], [3, 1, 1, 0, 3], there, dates, spans):
        dated = EventSequences.from_events(frame["user"], frame["item"].astype("category"), at)
        assert lists_of(dated) == [["x", "y"], ["z", "x", "x"]]
        assert "2 events came before" in dated.notes[0] and "1 events have the time" in dated.notes[1]
    same = EventSequences.from_lists({"a": ["y", "x"], "b": ["x", "z", "x"], "c": []})
    assert lists_of(same) == [["y", "x"], ["x", "z", "x"], []] and list(same.lengths) == [2, 3, 0]
    assert "2 users, 3 items, 5 events" in repr(log)


def test_labels_may_be_negative_numbers_and_counts_without_an_order_are_told():
    log = EventSequences.from_events(np.repeat([-1, 7], 8), np.tile(np.arange(8), 2) - 3)
    assert list(log.item_labels) == list(range(-3, 5)) and "counts, without an order?" in log.notes[0]


@pytest.mark.parametrize(
    ("users", "items", "time", "message"),
    [
        ([1, 2], ["a", np.nan], None, "items has 1 missing labels, the first in row 1"),
        (pd.Series(["a", pd.NA], dtype="string"), [1, 2], None, "users has 1 missing"),
        ([1.0, np.nan], [1, 2], None, "users has 1 missing"),
        ([1, 2], [1], None, "2 users but 1 items"),
        ([], [], None, "there are no events"),
        ([[1, 2]], [1, 2], None, "one column"),
        (np.array([1, "a"], object), [1, 2], None, r"no order \(int, str\)"),
        ([1, 2], [1, 2], [1.0, np.nan], "1 events have no time, the first in row 1"),
        ([1, 2], [1, 2], ["monday", "friday"], "pandas.to_datetime"),
        (
            [1, 2],
            [1, 2],
            pd.Series(pd.to_datetime(["2026-01-01", None])).dt.tz_localize("UTC"),
            "1 events have no time",
        ),
        ([1, 2], [1, 2], pd.Series([pd.Timestamp("2026-01-01"), 1], dtype=object), "no order"),
        ([1, 2], [1, 2], [1.0], "time has the shape"),
        (
            pd.Series([1, 2]),
            pd.Series([1, 2], index=[1, 0]),
            None,
            "items have the same labels as those of users",
        ),
        (pd.Series([1, 2]), [1, 2], pd.Series([1, 2], index=[1, 0]), "rows are taken by their places"),
    ],
)
def test_bad_columns_are_named(users, items, time, message):
    with pytest.raises(ValueError, match=message):
        EventSequences.from_events(users, items, time)


def test_sequences_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="must add up to 2 events"):
        EventSequences([0, 1], [1], ["a", "b"], ["u"])
    with pytest.raises(ValueError, match="items are 0 to 0"):
        EventSequences([0, 1], [2], ["a"], ["u"])
    with pytest.raises(ValueError, match="from_events takes labels"):
        EventSequences([0.5], [1], ["a"], ["u"])
    with pytest.raises(ValueError, match="there are no events"):
        EventSequences.from_lists([[], []])


def test_rules_are_used_in_order_and_say_what_they_took():
    log = EventSequences.from_lists([list("aabbaabb"), list("aaaaaaaa"), list("abz"), list("bcbcbc")])
    kept = log.filter(min_item=2, min_user=3, min_entropy=0.1)
    assert lists_of(kept) == [list("aabbaabb"), list("bcbcbc")] and list(kept.item_labels) == ["a", "b", "c"]
    assert kept.notes == (
        "1 items with fewer than 2 events: 1 events",
        "1 users with fewer than 3 events: 2 events",
        "1 users with an entropy of at most 0.1 nats: 8 events",
    )
    np.testing.assert_allclose(kept.entropies(), np.log(2.0), rtol=1e-14)
    with pytest.raises(ValueError, match="no event is left. What went: 4 items with fewer than 99 events: 25 events"):
        log.filter(min_item=99)


def test_rules_are_repeated_until_nothing_goes_where_this_is_asked_for():
    log = EventSequences.from_lists([list("ac"), list("aaab"), list("aabc")])
    once = log.filter(min_item=2, min_user=3)
    assert lists_of(once) == [list("aaab"), list("aabc")]  # c has one event left
    assert lists_of(log.filter(min_item=2, min_user=3, until_stable=True)) == [list("aaab"), list("aab")]


def test_the_last_events_are_test_and_those_before_validation():
    log = EventSequences.from_lists([list("abababa") + list("bab") + list("cab"), list("abab"), list("bbbbbbddd")])
    split = log.split(share=0.1, least=3)
    parts = (split.train, split.validation, split.test, split.history, split.whole)
    assert [lists_of(part) for part in parts] == [
        [list(text)] for text in ("abababa", "bab", "ab", "abababababab"[:10], "abababababab")
    ]
    assert list(split.is_test) == [False] * 10 + [True] * 2 and list(split.whole.item_labels) == ["a", "b"]
    assert split.notes == (
        "1 users with too few events to divide: 4 events",
        "4 test events of items that training has not seen: 4 events",
        "1 users without test events: 6 events",
    )
    long = EventSequences.from_lists([list("ab") * 50, list("ab") * 10]).split(share=0.2, least=1, most=15)
    assert list(long.test.lengths) == list(long.validation.lengths) == [15, 4]
    np.testing.assert_allclose(long.mean_over_users(np.r_[np.ones(15), np.zeros(4)]), 0.5)


def test_a_division_that_leaves_nothing_says_which_rule_took_what():
    with pytest.raises(ValueError, match="2 users with too few events to divide: 9 events"):
        EventSequences.from_lists([list("abab"), list("ababa")]).split()
    with pytest.raises(ValueError, match="0 < share < 0.5"):
        EventSequences.from_lists([list("abab")]).split(share=0.7)


@needs_data
def test_editors_of_wikipedia_are_divided_as_in_the_source():
    users, items, *_ = load_wikipedia_edits()
    log = EventSequences.from_events(users, items)
    assert (log.num_users, log.num_items, log.items.size) == (8227, 1000, 157_474)
    split = log.filter(min_item=10, min_user=11, min_entropy=1.0).split()
    assert (split.history.num_users, split.history.num_items) == (567, 922)
    assert (split.history.items.size, split.test.items.size) == (45_997, 5_440)
    films = EventSequences.from_events(*load_movielens_events()[:3])
    assert films.items.size == 100_000 and "have the time of the one before" in films.notes[1]
    assert np.unique(films.users * films.num_items + films.items).size == 100_000
