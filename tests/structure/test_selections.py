"""Branches that a column of the data chooses: every observation sees the predictor of its own branch alone."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random

from numpyro_ext.infer import EP
from numpyro_ext.structure import read_latent_gaussian
from tests.tiers import few

RNG = np.random.default_rng(0)
X = RNG.normal(size=24)
GROUP = RNG.integers(2, size=24)
COUNT = RNG.poisson(2.0, size=24)


def lines(number=2):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([number]))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([number]))
    return [a[k] + b[k] * X for k in range(number)]


def count(rate):
    numpyro.sample("y", dist.Poisson(rate), obs=COUNT)


def two_rates(group):
    u, v = lines()
    count(jnp.where(group == 0, jnp.exp(u), jnp.exp(v)))


def two_predictors(group):
    u, v = lines()
    count(jnp.exp(jnp.where(group == 0, u, v)))


def two_rates_of_an_exposure(group):
    u, v = lines()
    count(jnp.where(group == 0, jnp.exp(u) * (1.0 + X**2), jnp.exp(v) * (1.0 + X**2)))


def two_numbers(group):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([2]))
    count(jnp.where(group == 0, jnp.exp(a[0]), jnp.exp(a[1])))


def three_rates(group):
    u, v, w = lines(3)
    count(lax.select_n(group + np.arange(24) % 2, jnp.exp(u), jnp.exp(v), jnp.exp(w)))


def two_softplus(group):
    u, v = lines()
    count(jnp.where(group == 0, jax.nn.softplus(u), jax.nn.softplus(v)))


def two_probabilities(group):
    u, v = lines()
    numpyro.sample("y", dist.Bernoulli(probs=jnp.where(group == 0, jax.nn.sigmoid(u), jax.nn.sigmoid(v))), obs=GROUP)


@pytest.mark.float32
@pytest.mark.parametrize(
    ("model", "label"),
    few(
        [
            (two_rates, "poisson, exp link"),
            (two_predictors, "poisson, exp link"),
            (two_rates_of_an_exposure, "poisson, exp link"),
            (two_numbers, "poisson, exp link"),
            (three_rates, "poisson, exp link"),
            (two_softplus, "poisson, softplus link"),
            (two_probabilities, "logistic link"),
        ],
        3,
    ),
)
def test_the_same_function_of_either_is_a_function_of_a_selection(model, label):
    """The reading is compared with NumPyro's density; blocks show that no row joins two branches."""
    reading = read_latent_gaussian(model, (GROUP,))
    assert label in reading.describe()
    assert f"blocks: {3 if model is three_rates else 2} independent" in reading.describe()


def stacked(group):
    count(jnp.stack([jnp.exp(u) for u in lines()])[group, np.arange(24)])


def by_choose(group):
    count(jnp.choose(group, [jnp.exp(u) for u in lines()], mode="clip"))


def by_select(group):
    u, v = lines()
    count(jnp.select([group == 0, group == 1], [jnp.exp(u), jnp.exp(v)]))


def two_links(group):
    u, v = lines()
    count(jnp.where(group == 0, jnp.exp(u), jax.nn.softplus(v)))


def a_link_with_a_pole(group):
    """The other branch is infinite where its predictor is zero, as nobody's predictor is."""
    u, v = lines()
    count(jnp.where(group == 0, jnp.exp(u), 1.0 / jnp.square(v)))


def two_densities(group):
    u, v = (dist.Poisson(jnp.exp(u)).log_prob(COUNT) for u in lines())
    numpyro.factor("y", jnp.where(group == 0, u, v))


@pytest.mark.parametrize("model", few([stacked, by_choose, by_select, two_links, a_link_with_a_pole, two_densities], 2))
def test_other_functions_have_one_predictor_each(model):
    reading = read_latent_gaussian(model, (GROUP,))
    assert "elementwise factor, by quadrature" in reading.describe()
    assert reading.rows_per_observation == (1,)
    assert "blocks: 2 independent" in reading.describe()
    form = reading.form({})

    # Slopes backwards do not see the branch that is not taken.
    def value(eta):
        return jnp.sum(form.log_factors(eta))

    assert bool(jnp.all(jnp.isfinite(jax.grad(value)(jnp.linspace(0.3, 1.0, form.num_rows)))))


def test_what_unknowns_choose_is_no_selection_of_predictors():
    def model():
        u, v = lines()
        count(jnp.where(u > v, jnp.exp(u), jnp.exp(v)))

    reading = read_latent_gaussian(model)
    assert reading.rows_per_observation == (3,)  # two predictors and their difference


def test_a_hyperparameter_may_choose():
    """A change point: given where it is, the selection is affine, of which no element is known."""

    def model():
        u, v = lines()
        count(jnp.where(X < numpyro.sample("change", dist.Normal(0.0, 1.0)), jnp.exp(u), jnp.exp(v)))

    reading = read_latent_gaussian(model)
    assert tuple(reading.hyper) == ("change",)
    assert "poisson, exp link" in reading.describe()


def test_branches_that_are_to_change_are_not_looked_up():
    reading = read_latent_gaussian(two_densities, (GROUP,), changing=("group",))
    assert reading.rows_per_observation == (3,)  # either may be seen


@pytest.mark.thorough
@pytest.mark.parametrize("model", [two_rates, two_links, by_select])
def test_a_fit_is_that_of_each_branch_alone(model):
    """Runs one after the other, of the same shapes, on other branches: each is that of one line on its own data."""

    def one(x, y, is_other_link):
        eta = numpyro.sample("a", dist.Normal(0.0, 1.0)) + numpyro.sample("b", dist.Normal(0.0, 1.0)) * x
        numpyro.sample("y", dist.Poisson(jax.nn.softplus(eta) if is_other_link else jnp.exp(eta)), obs=y)

    engine = EP(model, progress_bar=False)
    for group in (GROUP, np.roll(GROUP, 5)):
        engine.run(random.key(0), group)
        assert engine.diagnostics.converged
        for k in range(2):
            alone = EP(one, progress_bar=False)
            alone.run(random.key(0), X[group == k], COUNT[group == k], model is two_links and k == 1)
            for name in "ab":
                found, expected = engine.posterior[name], alone.posterior[name]
                np.testing.assert_allclose(found.mean[k], expected.mean, atol=2e-4)
                np.testing.assert_allclose(found.sd[k], expected.sd, rtol=2e-4)
