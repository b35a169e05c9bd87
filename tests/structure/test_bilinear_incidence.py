"""Cells that touch several vectors of a side: what is read, against the program itself, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.stats import norm

from numpyro_ext.structure import ModelStructureError, read_bilinear
from numpyro_ext.structure.bilinear import CoupledSide
from numpyro_ext.structure.bilinear.read import read_like
from tests.compilations import compiled_programs
from tests.tiers import few

USERS, ITEMS, RANK = 4, 6, 2
RNG = np.random.default_rng(0)
USER = RNG.integers(0, USERS, 30)
FIRST = RNG.integers(0, ITEMS, 30)
SECOND = (FIRST + RNG.integers(1, ITEMS, 30)) % ITEMS
WON = RNG.integers(0, 2, 30)


def kernel(num, length=1.0):
    x = jnp.linspace(0.0, 3.0, num)
    return jnp.exp(-0.5 * (x[:, None] - x) ** 2 / length**2) + 1e-3 * jnp.eye(num)


def users():
    with numpyro.plate("users", USERS):
        return numpyro.sample("w", dist.Normal(0.0, 1.0).expand([RANK]).to_event(1))


def process(name, num, size=RANK):
    with numpyro.plate("components", size):
        return numpyro.sample(name, dist.MultivariateNormal(jnp.zeros(num), kernel(num)))


def answer(predictor, won=WON):
    numpyro.sample("won", dist.Bernoulli(logits=predictor), obs=won)


def gaussian_process():
    w, h = users(), process("h", ITEMS)
    answer(jnp.sum(w[USER] * (h[:, FIRST] - h[:, SECOND]).T, -1))


def whole_matrix_and_probit():
    h = process("h", ITEMS)
    f = users() @ h
    numpyro.sample("won", dist.Bernoulli(probs=norm.cdf(f[USER, FIRST] - f[USER, SECOND])), obs=WON)


def independent_items():
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("items", ITEMS):
        h = numpyro.sample("h", dist.Normal(0.0, scale).expand([RANK]).to_event(1))
    answer(jnp.sum(users()[USER] * (h[FIRST] - h[SECOND]), -1))


def shared_utility():
    w, h = users(), process("h", ITEMS)
    utility = numpyro.sample("utility", dist.MultivariateNormal(jnp.ones(ITEMS), kernel(ITEMS, 0.5)))
    answer(jnp.sum(w[USER] * (h[:, FIRST] - h[:, SECOND]).T, -1) + utility[FIRST] - utility[SECOND])


def processes_on_both_sides():
    w, h = process("w", USERS), process("h", ITEMS)
    answer(jnp.sum(w[:, USER] * (h[:, FIRST] - h[:, SECOND]), 0))


def single_items():
    h = process("h", ITEMS)
    answer(jnp.sum(users()[USER] * h[:, FIRST].T, -1))


def baskets():
    h = process("h", ITEMS)
    answer(0.5 * jnp.sum(users()[USER] * (h[:, FIRST] + 2.0 * h[:, SECOND] + h[:, FIRST[::-1]]).T, -1))


def scaled_cells():
    h, size = process("h", ITEMS), jnp.linspace(0.5, 2.0, USER.size)
    answer(size * jnp.sum(users()[USER] * (h[:, FIRST] - h[:, SECOND]).T, -1))


def itself():
    """The first cell compares an item with itself: it says nothing."""
    h, second = process("h", ITEMS), np.concatenate([FIRST[:1], SECOND[1:]])
    answer(jnp.sum(users()[USER] * (h[:, FIRST] - h[:, second]).T, -1))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "num_roots", "width"),
    [
        pytest.param(gaussian_process, 1, 2, marks=pytest.mark.thorough),
        pytest.param(whole_matrix_and_probit, 1, 2, marks=pytest.mark.thorough),
        pytest.param(independent_items, 1, 2, marks=pytest.mark.thorough),
        pytest.param(shared_utility, 2, 2, marks=pytest.mark.thorough),
        pytest.param(processes_on_both_sides, 1, 2, marks=pytest.mark.thorough),
        (single_items, 1, 1),
        pytest.param(baskets, 1, 3, marks=pytest.mark.thorough),
        pytest.param(scaled_cells, 1, 2, marks=pytest.mark.thorough),
        pytest.param(itself, 1, 2, marks=pytest.mark.thorough),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_ways_of_writing(model, num_roots, width):
    """The reading is checked against NumPyro's density; here against the predictor, at vectors that are drawn."""
    reading = read_bilinear(model, by_component=True)
    form = reading.form(reading.initial_hyper())
    item_side = 0 if "h" in reading.sides[0] else 1
    side = (form.rows, form.columns)[item_side]
    assert isinstance(side, CoupledSide) and side.root.shape == (num_roots, ITEMS, ITEMS)
    assert side.places.shape[1] == width and len(side.places) <= WON.size
    assert reading.is_coupled[item_side] and reading.is_coupled[1 - item_side] == (model is processes_on_both_sides)
    assert "cells see" in reading.describe()
    unknowns = jnp.asarray(np.random.default_rng(1).normal(size=reading.num_columns))
    predictor = reading.predictor_fn(reading._env(reading.initial_hyper(), None), reading.predictor_rows)
    tol = 1e-9 if jax.config.jax_enable_x64 else 1e-4
    np.testing.assert_allclose(form.predictor(*reading.vectors(unknowns)), predictor(unknowns), atol=tol)


@pytest.mark.thorough
def test_a_process_of_each_user_belongs_to_the_users():
    """Not to the items, at whose places it is seen too: to them it would be a component for each user."""

    def model():
        w = users()
        with numpyro.plate("users", USERS):
            own = numpyro.sample("own", dist.MultivariateNormal(jnp.zeros(ITEMS), kernel(ITEMS)))
        mean, h = numpyro.sample("mean", dist.Normal(0.0, 1.0).expand([ITEMS])), process("h", ITEMS)
        f = mean + w @ h + own
        answer(f[USER, FIRST] - f[USER, SECOND])

    reading = read_bilinear(model, by_component=True)
    assert reading.sides == (("w", "own"), ("mean", "h")) and reading.is_coupled == (False, True)
    assert [e.shape for e in reading.elements] == [(USERS, RANK + ITEMS), (ITEMS, 1 + RANK)]


@pytest.mark.thorough
def test_the_prior_of_vectors_that_depend_on_each_other():
    reading = read_bilinear(shared_utility, by_component={"h"})
    form = reading.form({})
    side = (form.rows, form.columns)[0 if "h" in reading.sides[0] else 1]
    x = jnp.asarray(np.random.default_rng(2).normal(size=side.mean.shape))
    utility = int(np.flatnonzero(np.asarray(side.group) == 1)[0])
    expected = [
        dist.MultivariateNormal(jnp.ones(ITEMS), kernel(ITEMS, 0.5)).log_prob(x[:, j])
        if j == utility
        else dist.MultivariateNormal(jnp.zeros(ITEMS), kernel(ITEMS)).log_prob(x[:, j])
        for j in range(RANK + 1)
    ]
    tol = 1e-9 if jax.config.jax_enable_x64 else 1e-2
    np.testing.assert_allclose(side.log_density(x), jnp.stack(expected), rtol=tol)
    white = jax.random.normal(jax.random.key(0), (20_000, *side.mean.shape))
    draws = jax.vmap(side.colour)(white)
    np.testing.assert_allclose(jnp.cov(draws[:, :, utility].T), kernel(ITEMS, 0.5), atol=0.05)
    np.testing.assert_allclose(draws.mean(0), side.mean, atol=0.05)


@pytest.mark.thorough
def test_other_cells_of_the_same_vectors():
    def model(user, first, second, won):
        h = process("h", ITEMS)
        answer(jnp.sum(users()[user] * (h[:, first] - h[:, second]).T, -1), won)

    reading = read_bilinear(model, (USER, FIRST, SECOND, WON), by_component={"components"})
    other = read_like(reading, (USER[:5], SECOND[:5], FIRST[:5], WON[:5]), {}, jax.random.key(3))
    assert other.is_coupled == reading.is_coupled
    unknowns = jnp.asarray(np.random.default_rng(1).normal(size=reading.num_columns))
    one, two = (r.form({}).predictor(*r.vectors(unknowns)) for r in (reading, other))
    np.testing.assert_allclose(two, -one[:5], atol=1e-9 if jax.config.jax_enable_x64 else 1e-4)


@pytest.mark.parametrize("rank", [RANK - 1, RANK + 1])
def test_vectors_of_other_lengths_are_refused(rank):
    """Components in the order of the fit would leave some out."""

    def model(rank):
        with numpyro.plate("users", USERS):
            w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))
        h = process("h", ITEMS, rank)
        answer(jnp.sum(w[USER] * (h[:, FIRST] - h[:, SECOND]).T, -1))

    reading = read_bilinear(model, (RANK,), by_component=True, check=False)
    message = rf"\['w'\] make vectors of {rank} components, in the fit of {RANK}"
    with pytest.raises(ModelStructureError, match=message):
        read_like(reading, (rank,), {}, jax.random.key(3))


@pytest.mark.thorough
def test_other_pairs_of_equal_shapes_compile_nothing():
    """What is compiled for some pairs is given the others, and so are its functions of the data."""

    def model(user, first, second, won):
        h = process("h", ITEMS)
        answer(jnp.sum(users()[user] * (h[:, first] - h[:, second]).T, -1), won)

    reading = read_bilinear(model, (USER, FIRST, SECOND, WON), by_component=True)
    with compiled_programs() as names:
        other = read_bilinear(model, (USER[::-1], SECOND, (FIRST + 1) % ITEMS, WON), by_component=True)
    assert names == []
    assert other.structure == reading.structure
    one, two = (next(x for x in r.data[-1].combinations if x is not None) for r in (reading, other))
    assert one.places.shape == two.places.shape and not np.array_equal(one.places, two.places)
    expected, form = other.form({}), reading.structure.value.form({}, other.data)
    jax.tree.map(np.testing.assert_array_equal, form, expected)
    unknowns = jnp.asarray(np.random.default_rng(1).normal(size=reading.num_columns))
    exact = other.predictor_fn(other._env({}, None), other.predictor_rows)(unknowns)
    tol = 1e-9 if jax.config.jax_enable_x64 else 1e-4
    np.testing.assert_allclose(form.predictor(*other.vectors(unknowns)), exact, atol=tol)


@pytest.mark.thorough
def test_many_cells_take_memory_in_proportion():
    """As one vector this many cells are refused."""
    num = 30_000
    rng = np.random.default_rng(0)
    user, first, second = rng.integers(0, 50, num), rng.integers(0, 40, num), rng.integers(0, 40, num)
    won = rng.integers(0, 2, num)

    def model():
        h = process("h", 40, 10)
        with numpyro.plate("users", 50):
            w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([10]).to_event(1))
        answer(jnp.sum(w[user] * (h[:, first] - h[:, second]).T, -1), won)

    reading = read_bilinear(model, by_component=True, check=False)
    size = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: reading.form({}))))
    assert size < 15 * num
    with pytest.raises(ModelStructureError, match="component"):
        read_bilinear(model, check=False)


def test_names_of_no_side_are_refused_with_those_that_there_are():
    for name in ("h", "components", "users"):
        assert read_bilinear(gaussian_process, by_component={"h", name}, check=False).is_coupled == (False, True)
    message = r"covariance names 'items', .* \['w', 'h'\], and plates .*: \['users', 'components'\]"
    with pytest.raises(ModelStructureError, match=message):
        read_bilinear(gaussian_process, by_component={"items"}, check=False)


def learned_weights():
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    h = process("h", ITEMS)
    answer(jnp.sum(users()[USER] * (h[:, FIRST] - scale * h[:, SECOND]).T, -1))


def weights_of_components():
    h = process("h", ITEMS)
    answer(jnp.sum(users()[USER] * (h[:, FIRST].T - jnp.array([1.0, 2.0]) * h[:, SECOND].T), -1))


def missing_weights():
    h, weight = process("h", ITEMS), jnp.where(jnp.arange(USER.size) == 4, jnp.nan, 1.0)
    answer(jnp.sum(users()[USER] * (h[:, FIRST] - weight * h[:, SECOND]).T, -1))


def correlated_components():
    with numpyro.plate("items", ITEMS):
        h = numpyro.sample("h", dist.MultivariateNormal(jnp.zeros(RANK), kernel(RANK)))
    answer(jnp.sum(users()[USER] * (h[FIRST] - h[SECOND]), -1))


@pytest.mark.parametrize(
    ("model", "words"),
    few(
        [
            (learned_weights, "depend on hyperparameters"),
            (missing_weights, r"vectors of \['h'\] are not finite in 1 cells; the first is cell 4"),
            (weights_of_components, "same for all components"),
            (correlated_components, "component"),
        ],
        2,
    ),
    ids=lambda x: getattr(x, "__name__", None),
)
def test_refusals(model, words):
    with pytest.raises(ModelStructureError, match=words):
        read_bilinear(model, by_component=True)
