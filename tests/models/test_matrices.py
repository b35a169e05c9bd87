"""Matrices of ratings: numbers that are no levels, and the types of people that other models are compared with."""

import numpy as np
import pytest

from benchmarks.baselines.rating_types import RatingTypes, entropy
from numpyro_ext.models import heteroscedastic_ratings

USER, ITEM = np.divmod(np.arange(12), 4)


@pytest.mark.parametrize(
    "rating, words",
    [
        (1 + np.arange(12) % 5, "2 of 12 are not, the first is 5 at index 4.*1 becomes 0, and 5 becomes 4"),
        (
            0.5 + 0.5 * (np.arange(12) % 4),
            "the first is 0.5 at index 0.*the 4 values .* 0.5 becomes 0, and 2 becomes 3",
        ),
    ],
)
def test_stars_are_told_how_they_become_levels(rating, words):
    with pytest.raises(ValueError, match=words):
        heteroscedastic_ratings(USER, ITEM, rating, num_users=3, num_items=4, rank=1, num_levels=5)


def test_types_of_people_are_found_and_asked_about():
    """Two groups that rate the first of two kinds of items the other way round."""
    rng = np.random.default_rng(0)
    person, item = np.divmod(np.arange(40 * 12), 12)
    group = np.arange(40) % 2
    level = np.where(item < 6, 2 * group[person], rng.integers(0, 3, person.size))
    types = RatingTypes.fitted(person, item, level, num_items=12, num_levels=3, num_types=2, seed=1)
    share = types.shares(person, item, level, 40)
    found = share.argmax(1)
    assert np.all(found == group) or np.all(found == 1 - group)
    np.testing.assert_allclose(np.exp(types.log_prior), 0.5, atol=0.02)

    # one answer of somebody new, by Bayes' rule
    one = types.shares(np.zeros(1, int), np.zeros(1, int), np.zeros(1, int), 1)[0]
    by_hand = np.exp(types.log_prior) * types.chance[0, 0]
    np.testing.assert_allclose(one, by_hand / by_hand.sum(), rtol=1e-12)

    # of somebody unknown, items of the first kind tell most
    nobody = np.tile(np.exp(types.log_prior), (12, 1))
    told = types.information(nobody, np.arange(12))
    assert told[:6].min() > 10.0 * told[6:].max() and told.min() >= 0.0
    joint = nobody[0] * types.chance[0]
    np.testing.assert_allclose(
        told[0], entropy(joint.sum(1)) + entropy(joint.sum(0)) - entropy(joint.ravel()), rtol=1e-9
    )
