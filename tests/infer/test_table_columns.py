"""Tables of pandas whose columns stand in another order, or have other names, than those of the fit."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from jax import random

from numpyro_ext.infer import EP, AdaptiveQuadrature, BilinearVG
from numpyro_ext.models import item_response

RNG = np.random.default_rng(0)
X = pd.DataFrame(RNG.normal(size=(40, 3)), columns=["age", "height", "weight"])
Y = 2.0 * X["age"] - X["height"] + 0.1 * RNG.normal(size=40)


def regression(x, y=None):
    """Takes the table as an array: the order of the columns matters."""
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([3]).to_event(1))
    mean = numpyro.deterministic("mean", jnp.asarray(x) @ slopes)
    numpyro.sample("y", dist.Normal(mean, 0.1), obs=y)


def by_names(x, y=None):
    """Takes columns by their names: the order does not matter, and others may be there."""
    age, height = (numpyro.sample(name, dist.Normal(0, 1)) for name in ("age", "height"))
    mean = numpyro.deterministic("mean", age * jnp.asarray(x["age"]) + height * jnp.asarray(x["height"]))
    numpyro.sample("y", dist.Normal(mean, 0.1), obs=y)


def fitted(model):
    engine = EP(model, progress_bar=False)
    engine.run(random.key(0), X, Y)
    return engine


@pytest.fixture(scope="module")
def engine():
    return fitted(regression)


def test_columns_are_taken_by_their_names(engine, tmp_path):
    new, y = X.iloc[:4] + 1.0, Y[:4]
    engine.save(tmp_path / "fit")
    for ask in (engine, EP.load(tmp_path / "fit", regression)):
        want = ask.predict(random.key(1), new.to_numpy()).posterior["mean"].mean
        np.testing.assert_allclose(ask.predict(random.key(1), new).posterior["mean"].mean, want, rtol=1e-9)
        turned = new[["weight", "age", "height"]]
        np.testing.assert_allclose(ask.predict(random.key(1), turned).posterior["mean"].mean, want, rtol=1e-9)
        np.testing.assert_allclose(ask.predict(random.key(1), x=turned).posterior["mean"].mean, want, rtol=1e-9)
        scores = [ask.log_predictive(x, y)["y"] for x in (new.to_numpy(), turned)]
        np.testing.assert_allclose(scores[1], scores[0], rtol=1e-9)


def test_other_columns_are_refused_by_their_names(engine):
    other = X.rename(columns={"age": "years"})
    with pytest.raises(ValueError, match=r"table 'x' has the columns \['years'.*\['age'\] are missing.*in any order"):
        engine.predict(random.key(1), other)


def test_models_that_ask_for_names_may_get_more_columns():
    engine = fitted(by_names)
    more = X.iloc[:4].assign(shoe=40.0)[["shoe", "weight", "height", "age"]]
    want = engine.predict(random.key(1), X.iloc[:4]).posterior["mean"].mean
    with pytest.warns(UserWarning, match=r"columns \['shoe'\] of the table 'x' are not in that"):
        found = engine.predict(random.key(1), more).posterior["mean"].mean
    np.testing.assert_allclose(found, want)


def test_items_of_other_people_are_taken_by_their_names():
    answers = RNG.normal(size=(200, 1)) + RNG.logistic(size=(200, 4)) < [-1.5, -0.5, 0.5, 1.5]
    table = pd.DataFrame(answers.astype(int), columns=list("abcd"))
    engine = AdaptiveQuadrature(item_response, progress_bar=False)
    engine.run(random.key(0), table, family="rasch")
    others = table.iloc[:5]
    traits = [
        engine.fold_in(random.key(1), x, family="rasch").posterior["trait"].mean
        for x in (others.to_numpy(), others[list("dcba")])
    ]
    np.testing.assert_allclose(traits[1], traits[0], rtol=1e-9)
    with pytest.raises(TypeError, match=r"A random key comes first, as in fold_in"):
        engine.fold_in(others, family="rasch")


def test_cells_of_a_table_are_taken_by_their_names():
    def model(cells, value=None):
        cells = jnp.asarray(cells)
        u = numpyro.sample("u", dist.Normal(0, 1).expand([6, 1]).to_event(2))
        v = numpyro.sample("v", dist.Normal(0, 1).expand([5, 1]).to_event(2))
        mean = (u[cells[:, 0]] * v[cells[:, 1]]).sum(-1)
        numpyro.sample("value", dist.Normal(mean, 0.5), obs=value)

    cells = pd.DataFrame({"row": np.repeat(np.arange(5), 5), "column": np.tile(np.arange(5), 5)})
    value = RNG.normal(size=25)
    engine = BilinearVG(model, progress_bar=False)
    engine.run(random.key(0), cells, value)
    want, found = (engine.log_predictive(x, value)["value"] for x in (cells, cells[["column", "row"]]))
    np.testing.assert_allclose(found, want)
