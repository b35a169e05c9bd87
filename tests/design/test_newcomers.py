"""Questions for newcomers: which strategy learns fastest, and what a protocol needs."""

from functools import partial

import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_ext.design import (
    cold_start,
    empirical_entropy,
    expected_information_gain,
    plot_learning_curves,
    predictive_entropy,
    random_scores,
    vote_entropy,
)
from numpyro_ext.infer import BilinearEP, BilinearVG
from numpyro_ext.models import heteroscedastic_ratings

matplotlib.use("Agg")
NUM_USERS, NUM_ITEMS = 80, 24
SIZES = {"num_users": NUM_USERS, "num_items": NUM_ITEMS, "rank": 2, "num_levels": 5}


def simulated():
    """Half of the items tell tastes well; ratings of the others are anything, so that their entropy is the largest."""
    rng = np.random.default_rng(4)
    user, item = np.divmod(np.arange(NUM_USERS * NUM_ITEMS), NUM_ITEMS)
    taste, trait = 2.0 * rng.normal(size=(NUM_USERS, 2)), 2.0 * rng.normal(size=(NUM_ITEMS, 2))
    sd = np.where(np.arange(NUM_ITEMS) % 2, 0.5, 12.0)
    value = (taste[user] * trait[item]).sum(1) + sd[item] * rng.normal(size=user.size)
    return user, item, np.sum(value[:, None] > np.array([-6.0, -2.0, 2.0, 6.0]), axis=1)


@pytest.fixture(scope="module")
def fitted():
    engine = BilinearEP(heteroscedastic_ratings, damping=0.9, tol=1e-2, num_steps=300, progress_bar=False)
    engine.run(random.key(0), *simulated(), **SIZES)
    return engine


@pytest.mark.thorough
def test_information_learns_fastest_where_some_items_are_noise(fitted):
    asked = {}

    def watched(score, name):
        def found(source, **options):
            out = score(source, **options)
            asked.setdefault(name, []).append(out["rating"])
            return out

        return found

    acquisitions = {
        "gain": watched(expected_information_gain, "gain"),
        "points": partial(expected_information_gain, method="sigma-points", focus="tastes"),
        "mode": partial(expected_information_gain, method="mode"),
        "entropy": predictive_entropy,
        "empirical": empirical_entropy,
        "random": random_scores,
    }
    curves = cold_start(
        fitted,
        simulated(),
        new="tastes",
        num_queries=6,
        acquisitions=acquisitions,
        num_repeats=2,
        rng_key=random.key(1),
        show_progress=False,
    )
    area = curves["area"].mean("repeat")
    for informed in ("gain", "points"):
        for other in ("entropy", "empirical", "random"):
            assert area.sel(strategy=informed) > area.sel(strategy=other) + 1.0
    start = curves["log_likelihood"].isel(query=0)
    np.testing.assert_allclose(start, start.isel(strategy=[0]).values.repeat(6, 0))
    assert np.isfinite(curves["error"]).all() and np.all(curves["seconds"] > 0.0)
    assert [np.isfinite(values).sum() for values in asked["gain"][:6]] == [20 * (NUM_ITEMS - 4 - k) for k in range(6)]
    assert len(plot_learning_curves(curves).get_lines()) == 6
    matplotlib.pyplot.close("all")


@pytest.mark.thorough
def test_the_fit_of_all_and_newcomers_of_their_own(fitted):
    """Whose ratings the fit has not seen, and new items, which have cut points of their own."""
    user, item, rating = simulated()
    options = {"acquisitions": {"random": random_scores}, "show_progress": False}
    for name, size, chosen, num_held_out in (
        ("tastes", "num_users", range(6), 8),
        ("traits", "num_items", (1, 3, 5), 30),
    ):
        cells = [user, item]
        side = int(name == "traits")
        mine = np.isin(cells[side], chosen)
        cells = [x[mine] for x in cells]
        cells[side] = np.searchsorted(chosen, cells[side])
        sizes = {size: len(chosen), "num_held_out": num_held_out, "num_queries": 8}
        own = cold_start(fitted, (*cells, rating[mine]), new=name, share=None, **options, **sizes)
        share = np.bincount(rating[mine], minlength=5) / mine.sum()
        least = np.sum(share[share > 0.0] * np.log(share[share > 0.0]))
        found = own["log_likelihood"].squeeze() / (num_held_out * len(chosen))
        assert float(found[-1]) > max(least, float(found[0])) + 0.05
    options["num_queries"] = 2
    both = [cold_start(fitted, (user, item, rating), new="tastes", refit=how, **options) for how in ("new", "all")]
    gap = (both[0] - both[1])["log_likelihood"].isel(query=-1) / 60.0
    assert abs(float(gap.squeeze())) < 0.1


@pytest.mark.thorough
def test_frequencies_of_levels_are_counted():
    user, item = np.divmod(np.arange(12), 4)
    rating = np.array([0, 1, 2, 0, 0, 1, 0, 0, 0, 2, 1, 0])
    sizes = {"num_users": 3, "num_items": 5, "rank": 1, "num_levels": 3}
    engine = BilinearEP(heteroscedastic_ratings, tol=0.5, progress_bar=False)
    engine.run(random.key(0), user, item, rating, **sizes)
    there = np.zeros(5, int), np.arange(5)
    found = empirical_entropy(engine, *there, **sizes)["rating"]
    share = np.array([1.0, 2.0]) / 3.0
    one_of_three = -np.sum(share * np.log(share))
    np.testing.assert_allclose(found, [0.0, one_of_three, np.log(3.0), 0.0, np.log(3.0)], atol=1e-6)
    by_user = empirical_entropy(engine, np.arange(3), np.zeros(3, int), side="rows", **sizes)["rating"]
    np.testing.assert_allclose(by_user[1], -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)), atol=1e-6)
    with pytest.raises(ValueError, match="side must be"):
        empirical_entropy(engine, *there, side="users", **sizes)

    data = (user, item, rating)
    with pytest.raises(ValueError, match="'talents' is a site of neither side: name one of .*'tastes'.*'traits'"):
        cold_start(engine, data, new="talents")
    for options, message in (
        ({}, r"3 of 3 rows have fewer than 14 ratings \(1 known, 3 held out, 10 asked for\), such as \[0, 1, 2\]"),
        ({"acquisitions": {"best": "BALD"}}, r"acquisitions\['best'\] is 'BALD', which is no score"),
        ({"acquisitions": {}}, "acquisitions names no score"),
        ({"share": 2.0}, "share must be above 0 and below 1"),
        ({"share": None, "refit": "all"}, "refit='all' fits newcomers and all others together"),
        ({"num_queries": 0}, "num_queries must be an integer"),
        ({"refit": "some"}, "refit must be"),
        ({"rang": 3}, r"\['rang'\] are no arguments of the model"),
        ({"data": (user, item, rating[:5])}, "one length|one entry for each|shape"),
    ):
        with pytest.raises(ValueError, match=message):
            cold_start(engine, **{"data": data, "new": "tastes", **options})
    short = {"num_queries": 1, "num_held_out": 1, "share": None, "show_progress": False}
    with pytest.raises(ValueError, match="a cold start asks about the vectors of each newcomer"):
        focused = partial(expected_information_gain, focus="traits")
        cold_start(engine, data, new="tastes", acquisitions={"gain": focused}, **short)
    with pytest.raises(ValueError, match="A score by votes needs draws"):
        cold_start(engine, data, new="tastes", acquisitions={"votes": partial(vote_entropy, num_votes=5)}, **short)
    with pytest.raises(RuntimeError, match="run"):
        cold_start(BilinearEP(heteroscedastic_ratings), data, new="tastes")


@pytest.mark.thorough
def test_other_fits_are_refused_by_name():
    def counts(row, column, y=None):
        u = numpyro.sample("u", dist.Normal(0, 1).expand([3, 1]).to_event(2))
        v = numpyro.sample("v", dist.Normal(0, 1).expand([2, 1]).to_event(2))
        numpyro.sample("y", dist.Poisson(jnp.exp((u[row] * v[column]).sum(-1))), obs=y)

    row, column = np.divmod(np.arange(6), 2)
    engine = BilinearVG(counts, num_restarts=0, progress_bar=False)
    engine.run(random.key(0), row, column, np.array([1, 0, 2, 3, 1, 0]))
    with pytest.raises(ValueError, match="cold_start is for ratings .*BilinearVG here has a BilinearRun"):
        cold_start(engine, (row, column), new="u")
    with pytest.raises(ValueError, match="counts the levels of ordered ratings"):
        empirical_entropy(engine, row, column)
