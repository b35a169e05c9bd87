"""Messages on coefficients with proper priors that the observations do not tell from one another."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from numpyro import handlers

from numpyro_ext.infer import EP, LaplaceApproximation
from tests.tiers import thorough

NUM = 40
DRAWS = np.random.default_rng(0)
X = DRAWS.normal(size=NUM)
GROUP = DRAWS.integers(3, size=NUM)
Y = (DRAWS.random(NUM) < 0.5).astype(int)


def run(model, *args, engine=LaplaceApproximation, y=Y, **options):
    """Messages of a run, which are warnings as well."""
    found = engine(model, progress_bar=False, num_samples=10, **options)
    found.run(jax.random.key(0), *args, y)
    return found, [message for message in found.diagnostics.messages if "collinear" in message]


def told(model, *args, **options):
    with pytest.warns(UserWarning, match="collinear"):
        found, messages = run(model, *args, **options)
    (message,) = messages
    assert found.diagnostics.converged
    return found, message


def two_sites(table, y=None):
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 1))
    c = numpyro.sample("c", dist.Normal(0, 1))
    numpyro.sample("y", dist.Bernoulli(logits=a + b * table["x"].to_numpy() + c * table["twice"].to_numpy()), obs=y)


def vector(matrix, y=None, *, in_plate=False, learned=False):
    a = numpyro.sample("a", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.HalfNormal(1)) if learned else 1.0
    if in_plate:
        with numpyro.plate("columns", matrix.shape[1]):
            b = numpyro.sample("b", dist.Normal(0, scale))
    else:
        b = numpyro.sample("b", dist.Normal(0, scale).expand([matrix.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=a + matrix @ b), obs=y)


def groups(group, y=None, *, learned=True):
    a = numpyro.sample("a", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.HalfNormal(1)) if learned else 1.0
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(0, scale))
    numpyro.sample("y", dist.Bernoulli(logits=a + u[group]), obs=y)


def wins(pairs, y=None):
    with numpyro.plate("players", 4):
        s = numpyro.sample("s", dist.Normal(0, 1))
    numpyro.sample("y", dist.Bernoulli(logits=s[pairs[:, 0]] - s[pairs[:, 1]]), obs=y)


@pytest.mark.parametrize("engine", [LaplaceApproximation, *thorough(EP)])
def test_two_columns_of_a_table_are_told_by_their_sites(engine):
    found, message = told(two_sites, pd.DataFrame({"x": X, "twice": 2.0 * X + 0.0}), engine=engine)
    assert "'b', 'c' from one another" in message and "'a'" not in message
    # along (2, -1) no predictor changes, and the posterior is the prior
    draws = found.posterior
    assert float(draws["a"].sd) < 1.0
    free = (2.0 * np.asarray(draws["b"].mean) - np.asarray(draws["c"].mean)) / np.sqrt(5.0)
    assert abs(float(free)) < 1e-6


EQUAL = np.stack([X, X**2, X], axis=1)


@pytest.mark.parametrize("options", [{}, *thorough({"in_plate": True}, {"learned": True})], ids=str)
def test_equal_columns_of_a_vector_are_told_by_their_elements(options):
    def model(matrix, y=None):
        vector(matrix, y, **options)

    assert "'b[0]', 'b[2]' from one another" in told(model, EQUAL)[1]


@pytest.mark.float32
def test_columns_are_compared_to_their_digits():
    matrix = np.stack([X, 0.1 * X, X**2], axis=1).astype(jnp.result_type(float))
    assert "'b[0]', 'b[1]' from one another" in told(vector, matrix)[1]
    matrix[:, 1] += 1e-3 * np.cos(np.arange(NUM))
    assert run(vector, matrix)[1] == []


def test_dummies_of_all_levels_beside_an_intercept_are_told():
    message = told(vector, np.eye(3)[GROUP])[1]
    assert "'a', 'b[0]', 'b[1]', 'b[2]' from one another" in message
    assert run(vector, np.eye(3)[GROUP][:, 1:])[1] == []


@pytest.mark.thorough
def test_effects_of_all_levels_beside_an_intercept_are_no_mistake():
    assert run(groups, GROUP)[1] == []
    assert run(groups, GROUP, hyper_values={"scale": 0.5})[1] == []
    assert run(lambda matrix, y=None: vector(matrix, y, learned=True), np.eye(3)[GROUP])[1] == []


def test_effects_that_are_multiplied_by_their_scale_are_no_mistake():
    def model(group, y=None):
        a = numpyro.sample("a", dist.Normal(0, 5))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=a + scale * z[group]), obs=y)

    assert run(model, GROUP)[1] == []


def test_many_levels_of_a_known_scale_are_no_mistake():
    assert run(vector, np.eye(12)[np.arange(NUM) % 12])[1] == []


@pytest.mark.thorough
def test_effects_of_a_known_scale_and_comparisons_are_no_mistake():
    assert run(lambda group, y=None: groups(group, y, learned=False), GROUP)[1] == []
    pairs = np.stack([np.arange(NUM) % 4, (np.arange(NUM) + 1 + np.arange(NUM) // 4 % 3) % 4], axis=1)
    assert run(wins, pairs)[1] == []


@pytest.mark.thorough
def test_nothing_is_told_where_rows_are_few_or_columns_unseen():
    assert run(vector, EQUAL[:2, :2], y=Y[:2])[1] == []
    unseen = EQUAL * [1.0, 1.0, 0.0]
    assert run(vector, unseen)[1] == []


@pytest.mark.thorough
def test_rows_that_are_masked_count_for_nothing():
    """Two columns that differ in masked rows alone."""
    is_seen = np.arange(NUM) < 30

    def model(matrix, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with handlers.mask(mask=is_seen):
            numpyro.sample("y", dist.Bernoulli(logits=matrix @ b), obs=y)

    apart = np.where(is_seen[:, None], EQUAL, jnp.cos(jnp.arange(3 * NUM).reshape(NUM, 3)))
    assert "'b[0]', 'b[2]'" in told(model, apart)[1]
    assert run(vector, apart)[1] == []


@pytest.mark.thorough
def test_flat_priors_are_refused_by_their_sites():
    def model(table, y=None):
        a = numpyro.sample("a", dist.Normal(0, 5))
        b = numpyro.sample("b", dist.ImproperUniform(dist.constraints.real, (), ()))
        c = numpyro.sample("c", dist.ImproperUniform(dist.constraints.real, (), ()))
        numpyro.sample("y", dist.Bernoulli(logits=a + b * table["x"].to_numpy() + c * table["twice"].to_numpy()), obs=y)

    with pytest.raises(ValueError, match=r"\['b', 'c'\] are flat"):
        run(model, pd.DataFrame({"x": X, "twice": 2.0 * X}))
