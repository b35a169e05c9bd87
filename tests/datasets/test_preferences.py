"""Rankings and pairs of real data, where they are, and their simulated twin."""

import os

import numpy as np
import pytest

from numpyro_ext.datasets import load_best_worst_pairs, load_sushi, simulate_preferences
from numpyro_ext.datasets.external import DATA_VARIABLE

needs_data = pytest.mark.skipif(not os.environ.get(DATA_VARIABLE), reason=f"{DATA_VARIABLE} names no downloaded data")


@needs_data
def test_sushi_is_ranked_by_all():
    a, b = load_sushi(), load_sushi("b")
    for data, items in ((a, 10), (b, 100)):
        assert data.rankings.shape == (5000, 10) and data.num_items == items == len(data.item_names)
        assert all(len(set(ranking)) == 10 for ranking in data.rankings[:50])
        assert data.item_features.shape == (items, 18) and (data.item_features[:, 6:].sum(1) == 1).all()
    np.testing.assert_allclose(np.mean(a.rankings[:, 0] == 7), 0.343, atol=5e-4)
    with pytest.raises(ValueError, match="which must be 'a' or 'b'"):
        load_sushi("c")


@needs_data
def test_films_of_the_best_and_the_worst_rating_are_paired():
    data = load_best_worst_pairs()
    assert data.pairs.shape == (236_313, 3) and (data.num_users, data.num_items) == (943, 1682)
    assert data.item_features.shape == (1682, 19) and (data.item_features.sum(1) >= 1).all()
    assert not (data.pairs[:, 1] == data.pairs[:, 2]).any()


def test_simulated_preferences_are_consistent_in_the_mean():
    data = simulate_preferences(num_users=50, num_items=6, pairs_per_user=40)
    assert data.pairs.shape == (2000, 3) and data.pairs[:, 1:].max() == 5 and data.pairs[:, 0].max() == 49
    assert (data.pairs[:, 1] != data.pairs[:, 2]).all()
    wins = np.bincount(data.pairs[:, 1], minlength=6) / np.bincount(data.pairs[:, 1:].ravel(), minlength=6)
    assert wins.max() > 0.55 and wins.min() < 0.45
    np.testing.assert_array_equal(data.pairs, simulate_preferences(50, 6, 40).pairs)
