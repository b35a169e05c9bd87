"""Remarks on data that a bilinear model fits without complaint: by reason, with places and a remedy."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_ext.infer import BilinearEP, BilinearVG
from numpyro_ext.infer.bilinear.algorithms.messages import Moments
from numpyro_ext.infer.bilinear.remarks import remarks
from numpyro_ext.models import binary_factorization, heteroscedastic_ratings
from numpyro_ext.structure import read_bilinear

USER, ITEM = np.divmod(np.arange(24), 4)
RATING = np.array([0, 1, 2, 2, 1, 0, 2, 0, 2, 1, 0, 1, 1, 2, 0, 2, 0, 2, 1, 0, 2, 0, 1, 1])
SIZES = {"num_users": 6, "num_items": 4, "rank": 2, "num_levels": 3}


def said(rating=RATING, kept=slice(None), vectors=None, **sizes):
    model = partial(heteroscedastic_ratings, **{**SIZES, **sizes})
    arguments = USER[kept], ITEM[kept], np.asarray(rating)[kept]
    reading = read_bilinear(model, arguments, {}, by_component=True, takes_any_factor=True, learns_hyper=False)
    found = remarks(reading, vectors)
    return {remark.reason: remark.words for remark in found}


def test_plain_ratings_get_no_remark():
    assert said() == {}


@pytest.mark.parametrize(
    ("reason", "options", "words", "remedy"),
    [
        (
            "no cell",
            {"num_users": 8},
            r"2 rows \(6, 7\) of .*'tastes'.* have no cell: their posterior is the prior",
            "Leave",
        ),
        ("no cell", {"num_items": 5}, r"1 column \(4\) of .*'traits'", "Leave them out, or keep"),
        ("unseen level", {"num_levels": 5}, r"2 levels \(3, 4\) of 5 never occur in \['rating'\]", "half stars"),
        (
            "one level",
            {"rating": np.where(USER == 3, 2, RATING)},
            r"1 row \(3\) of .*'tastes'.* one level alone",
            "Leave",
        ),
        (
            "one level",
            {"rating": np.where(ITEM == 0, 1, RATING)},
            r"1 column \(0\) of .*'traits'.* priors",
            "Leave them",
        ),
        ("rank", {"rank": 4}, r"The rank 4 is no less than the smaller number of vectors, 4", "Take a lower rank"),
    ],
)
def test_what_tells_less_than_it_seems_is_named(reason, options, words, remedy):
    found = said(**options)
    assert set(found) == {reason}
    assert np.size(found[reason]) and remedy in found[reason]
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(found[reason])


def test_long_lists_are_cut_and_single_cells_are_no_constant_raters():
    found = said(num_users=30, kept=slice(0, 21))
    assert "24 rows (6, 7, 8, 9, 10, ...)" in found["no cell"] and "one level" not in found


def test_components_without_a_product_are_counted():
    rng = np.random.default_rng(0)
    sizes = (6, 4)
    means = [rng.normal(size=(n, 2)) * np.array([1.0, 1e-3]) for n in sizes]
    vectors = tuple(Moments(jnp.asarray(mean), jnp.full(mean.shape, 0.3)) for mean in means)
    found = said(vectors=vectors)
    assert found["died"].startswith("1 of 2 components have died") and "legitimate" in found["died"]
    assert "a lower rank gives the same predictions" in found["died"]
    # a mean that all users share is no product where items have none
    shared = Moments(vectors[0].mean.at[:, 1].set(1.0), vectors[0].variance)
    assert "died" in said(vectors=(shared, vectors[1]))
    alive = tuple(Moments(block.mean + 0.5, block.variance) for block in vectors)
    assert said(vectors=alive) == {}
    points = tuple(Moments(block.mean, jnp.zeros_like(block.mean)) for block in vectors)
    assert "1 of 2" in said(vectors=points)["died"]


@pytest.mark.thorough
def test_runs_say_it_and_converge_all_the_same():
    engine = BilinearEP(heteroscedastic_ratings, damping=0.9, tol=0.05, progress_bar=False)
    engine.run(random.key(0), USER, ITEM, np.where(USER == 3, 2, RATING), **{**SIZES, "num_users": 7})
    told = " ".join(engine.diagnostics.messages)
    assert engine.diagnostics.converged
    assert "1 row (3) of ['tastes'] have several cells" in told and "1 row (6) of ['tastes'] have no cell" in told


@pytest.mark.thorough
def test_unlisted_zeros_are_cells_and_binary_rows_may_be_constant():
    ones = np.array([0, 1, 3]), np.array([0, 1, 2])
    engine = BilinearVG(
        binary_factorization, bound="jaakkola", unlisted_cells="zero", num_restarts=0, progress_bar=False
    )
    engine.run(random.key(0), *ones, np.ones(3, int), num_rows=4, num_cols=4, rank=1)
    assert not any("no cell" in message or "level" in message for message in engine.diagnostics.messages)

    def graded(row, column, y=None):
        u = numpyro.sample("u", dist.Normal(0, 1).expand([4, 1]).to_event(2))
        v = numpyro.sample("v", dist.Normal(0, 1).expand([4, 1]).to_event(2))
        numpyro.sample("y", dist.OrderedLogistic((u[row] * v[column]).sum(-1), jnp.array([-1.0, 1.0, 3.0])), obs=y)

    row, column = np.divmod(np.arange(12), 4)
    engine = BilinearVG(graded, num_restarts=0, progress_bar=False)
    engine.run(random.key(0), row, column, np.array([0, 1, 2, 1] * 3))
    told = " ".join(engine.diagnostics.messages)
    assert "1 row (3) of ['u'] have no cell" in told and "1 level (3) of 4 never occur" in told
    assert "4 columns (0, 1, 2, 3) of ['v'] have several cells and one level alone" in told
