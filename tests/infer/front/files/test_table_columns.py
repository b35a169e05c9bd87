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
from numpyro_ext.structure import ModelStructureError

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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_labels_have_the_numbers_of_the_fit():
    """A ``Categorical`` of few people numbers the labels that it holds: one who says yes to all had said no to all."""
    words = np.array(["no", "yes"])
    answers = (RNG.normal(size=(200, 1)) + RNG.logistic(size=(200, 4)) < [-1.5, -0.5, 0.5, 1.5]).astype(int)
    engine = AdaptiveQuadrature(item_response, progress_bar=False)
    engine.run(random.key(0), pd.DataFrame(words[answers], columns=list("abcd")).astype("category"), family="rasch")
    for row in ([1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 1]):
        want = engine.fold_in(random.key(1), [row], family="rasch").posterior["trait"].mean
        person = pd.DataFrame(words[[row]], columns=list("abcd"))
        turned = person.astype(pd.CategoricalDtype(["yes", "no"], ordered=True))
        for table in (person.astype("category"), turned, person):
            found = engine.fold_in(random.key(1), table, family="rasch").posterior["trait"].mean
            np.testing.assert_allclose(found, want)
    numbered = AdaptiveQuadrature(item_response, progress_bar=False)
    numbered.run(random.key(0), pd.DataFrame(answers, columns=list("abcd")), family="rasch")
    ones = pd.DataFrame([[1, 1, 1, 1]], columns=list("abcd"))
    want, found = (
        numbered.fold_in(random.key(1), table, family="rasch").posterior["trait"].mean
        for table in (ones, ones.astype("category"))
    )
    np.testing.assert_allclose(found, want)


def of_labels(table, y=None):
    codes = jnp.asarray(table["shop"].cat.codes.to_numpy())
    with numpyro.plate("shops", len(table["shop"].cat.categories)):
        shop = numpyro.sample("shop", dist.Normal(0, 3))
    mean = numpyro.deterministic("mean", shop[codes])
    numpyro.sample("y", dist.Normal(mean, 1), obs=y)


@pytest.mark.thorough
def test_labels_of_new_rows_are_those_of_the_fit_and_new_ones_come_behind():
    shop = np.array(list("aabbcc"))
    engine = EP(of_labels, progress_bar=False)
    engine.run(random.key(0), pd.DataFrame({"shop": pd.Categorical(shop)}), np.array([0.0, 1, 4, 5, 8, 9]))
    level = np.asarray(engine.posterior["shop"].mean)
    for labels, mean in (("cc", level[[2, 2]]), ("ca", level[[2, 0]]), ("ncb", [0.0, *level[[2, 1]]])):
        found = engine.predict(random.key(1), pd.DataFrame({"shop": pd.Categorical(list(labels))})).posterior["mean"]
        np.testing.assert_allclose(found.mean, mean, atol=1e-9)
    np.testing.assert_allclose(found.variance[0], 9.0)


def test_rows_with_the_same_labels_in_another_order_are_refused():
    """A model takes rows by their places; tables in one order, and of other labels or sizes, are what they were."""
    turned = np.random.default_rng(1).permutation(40)
    message = "rows of argument 'y' have the same labels as those of 'x' in another order.*by their places: give 'y'"
    with pytest.raises(ModelStructureError, match=message):
        EP(regression, progress_bar=False).run(random.key(0), X, Y.iloc[turned])
    with pytest.raises(ModelStructureError, match="rows of argument 'y'"):
        EP(by_names, progress_bar=False).run(random.key(0), x=X, y=Y.iloc[turned])
    engines = [EP(regression, progress_bar=False) for _ in range(3)]
    engines[0].run(random.key(0), X.iloc[turned], Y.iloc[turned])
    engines[1].run(random.key(0), X.iloc[turned].to_numpy(), Y.iloc[turned].to_numpy())
    engines[2].run(random.key(0), X.iloc[turned].reset_index(drop=True), Y.iloc[turned].set_axis(np.arange(40, 80)))
    for engine in engines[1:]:
        np.testing.assert_array_equal(engine.posterior["slopes"].mean, engines[0].posterior["slopes"].mean)
    slopes = engines[0].posterior["slopes"].mean
    np.testing.assert_allclose(slopes, fitted(regression).posterior["slopes"].mean, rtol=1e-8)
