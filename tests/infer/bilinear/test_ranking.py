"""Places of items from draws of their utilities."""

from itertools import permutations

import numpy as np
import pytest
import xarray as xr

from numpyro_ext.infer import expected_ranks, rank_summary, shortlist

DRAWS = np.random.default_rng(0).normal(size=(400, 2, 4)) + np.array([0.0, 1.0, 0.5, -1.0])


def test_places_are_counted_draw_by_draw():
    summary = rank_summary(DRAWS, k=2, probability=0.5)
    for user in range(2):
        counts = np.zeros((4, 4))
        above = np.zeros((4, 4))
        for draw in DRAWS[:, user]:
            order = sorted(range(4), key=lambda item: -draw[item])
            for place, item in enumerate(order):
                counts[item, place] += 1
            for i, j in permutations(range(4), 2):
                above[i, j] += order.index(i) < order.index(j)
        share = counts / len(DRAWS)
        np.testing.assert_allclose(summary.expected_rank[user], share @ np.arange(1, 5), rtol=1e-12)
        np.testing.assert_allclose(summary.best[user], share[:, 0])
        np.testing.assert_allclose(summary.among_first[user], share[:, :2].sum(1))
        np.testing.assert_allclose(summary.above[user], above / len(DRAWS))
        below = np.cumsum(share, axis=1)
        np.testing.assert_array_equal(summary.lower[user], np.argmax(below >= 0.25, axis=1) + 1)
        np.testing.assert_array_equal(summary.upper[user], np.argmax(below >= 0.75, axis=1) + 1)
    np.testing.assert_allclose(expected_ranks(DRAWS[:, 0], np.zeros(4)), summary.expected_rank[0])


def test_what_has_samples_serves_as_well_as_draws():
    class Sampler:
        def get_samples(self):
            return {"utility": DRAWS, "scale": DRAWS[:, 0, 0]}

    of_arviz = xr.DataArray(DRAWS.reshape(2, 200, 2, 4), dims=("chain", "draw", "user", "item"))
    for source in (Sampler(), Sampler().get_samples(), {"strength": DRAWS, "scale": DRAWS[:, 0, 0]}, of_arviz):
        found = rank_summary(source, users=[1], k=2)
        np.testing.assert_array_equal(found.best, rank_summary(DRAWS, k=2).best[[1]])
    named = rank_summary({"strength": DRAWS, "utility": -DRAWS}, "strength", k=2)
    np.testing.assert_array_equal(named.best, rank_summary(DRAWS, k=2).best)
    for call, message in [
        (lambda: rank_summary({"a": DRAWS, "b": DRAWS}), "one of 'a', 'b'; got None"),
        (lambda: rank_summary(Sampler(), "scale"), r"\(num_samples, ..., items\); got \(400,\)"),
        (lambda: rank_summary(DRAWS, k=5), "k must be in 1, ..., 4"),
        (lambda: rank_summary(DRAWS, k=1, probability=90), "between 0 and 1; got 90"),
        (lambda: shortlist(DRAWS, k=2, exclude=[True, True, True, False]), "fewer than k = 2 items"),
        (lambda: shortlist(DRAWS, k=1, exclude=[0, 1, 1, 0]), r"booleans that broadcast to \(2, 4\); got int64 of"),
        (lambda: shortlist(DRAWS, k=1, exclude=[0, 3]), r"Numbers of items are np.isin\(np.arange\(4\), numbers\)"),
        (lambda: rank_summary(Sampler(), users=[0, 2]), r"users must hold integers in 0, ..., 1; got \[0, 2\]"),
        (lambda: shortlist(DRAWS, users=[-1]), r"users must hold integers in 0, ..., 1; got \[-1\]"),
        (lambda: shortlist(DRAWS, users=[0.0]), r"users must hold integers in 0, ..., 1; got \[0.0\]"),
        (lambda: rank_summary(DRAWS[:, 0], users=[1]), r"shape \(400, 4\) have none"),
        (lambda: rank_summary(np.where(DRAWS > 2.0, np.nan, DRAWS)), "draws of the utilities are nan"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_shortlist_leaves_out_what_is_excluded_and_gives_its_places_to_others():
    np.testing.assert_array_equal(shortlist(DRAWS, k=3), [[1, 2, 0]] * 2)
    exclude = np.array([[False, True, False, False], [False, False, True, False]])
    np.testing.assert_array_equal(shortlist(DRAWS, k=2, exclude=exclude), [[2, 0], [1, 0]])
    np.testing.assert_array_equal(shortlist(DRAWS, users=0, k=1), [1])
    # of four items the first five are all
    np.testing.assert_array_equal(rank_summary(DRAWS).among_first, np.ones((2, 4)))
    assert shortlist(DRAWS).shape == (2, 4) and shortlist(DRAWS, exclude=exclude).shape == (2, 3)
