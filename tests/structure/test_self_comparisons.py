"""Comparisons of an unknown with itself: those that are counted, and zeros that are as meant."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_ext.infer import EP, BilinearVG
from numpyro_ext.models import bradley_terry
from numpyro_ext.structure import read_bilinear, read_latent_gaussian

NUM_ITEMS, NUM_USERS = 6, 3
RNG = np.random.default_rng(0)
FIRST = RNG.integers(NUM_ITEMS, size=20)
OTHERS = (FIRST + RNG.integers(1, NUM_ITEMS, size=20)) % NUM_ITEMS
SECOND = np.where(np.isin(np.arange(20), [4, 9]), FIRST, OTHERS)
PAIRS = np.stack([FIRST, SECOND], axis=1)
USER = RNG.integers(NUM_USERS, size=20)
WON = RNG.integers(2, size=20)


def items(*shape):
    return numpyro.sample("f", dist.Normal(0.0, 1.0).expand([NUM_ITEMS, *shape]))


def answer(predictor, mask=True):
    with handlers.mask(mask=mask):
        numpyro.sample("won", dist.Bernoulli(logits=predictor), obs=WON)


def plain():
    f = items()
    answer(f[FIRST] - f[SECOND])


def columns_of_pairs():
    compared = items()[PAIRS]
    answer(compared[:, 0] - compared[:, 1])


def by_take():
    f = items()
    answer(jnp.take(f, FIRST) - jnp.take(f, SECOND))


def with_a_known_advantage_and_a_scale():
    f = numpyro.sample("scale", dist.HalfNormal(1.0)) * items()
    answer(0.3 * (-1.0) ** np.arange(20) + f[FIRST] - f[SECOND])


def scaled_afterwards():
    f, scale = items(), numpyro.sample("scale", dist.HalfNormal(1.0))
    answer(scale * (f[FIRST] - f[SECOND]))


def losers_first():
    f = items()
    answer(-f[SECOND] + f[FIRST])


def with_covariates():
    f = items(2)
    answer(jnp.sum((f[FIRST] - f[SECOND]) * jnp.linspace(0.1, 1.0, 40).reshape(20, 2), -1))


def of_many_users():
    with numpyro.plate("users", NUM_USERS):
        taste = numpyro.sample("taste", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        own = numpyro.sample("own", dist.MultivariateNormal(jnp.zeros(NUM_ITEMS), jnp.eye(NUM_ITEMS)))
    f = own + taste @ numpyro.param("V", jnp.ones((NUM_ITEMS, 2))).T
    numpyro.sample("won", dist.Bernoulli(probs=norm.cdf(f[USER, FIRST] - f[USER, SECOND])), obs=WON)


def with_ties():
    f = items()
    numpyro.sample("won", dist.OrderedLogistic(f[FIRST] - f[SECOND], jnp.array([-1.0, 1.0])), obs=WON)


@pytest.mark.parametrize(
    "model",
    [
        plain,
        columns_of_pairs,
        by_take,
        with_a_known_advantage_and_a_scale,
        scaled_afterwards,
        losers_first,
        with_covariates,
        of_many_users,
        with_ties,
    ],
)
def test_they_are_counted_however_they_are_written(model):
    (found,) = read_latent_gaussian(model, check=False).self_comparisons()
    assert found == ("won", 2, 20, (4,))


def products():
    with numpyro.plate("users", NUM_USERS):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("components", 2):
        h = numpyro.sample("h", dist.MultivariateNormal(jnp.zeros(NUM_ITEMS), jnp.eye(NUM_ITEMS)))
    answer(jnp.sum(w[USER] * (h[:, FIRST] - h[:, SECOND]).T, -1))


@pytest.mark.thorough
def test_they_are_counted_among_products():
    (found,) = read_bilinear(products, by_component=True, check=False).self_comparisons()
    assert found == ("won", 2, 20, (4,))


def none():
    f = items()
    answer(f[FIRST] - f[OTHERS])


def masked():
    f = items()
    answer(f[FIRST] - f[SECOND], FIRST != SECOND)


def against_a_reference():
    f = items()
    answer((f - f[0])[FIRST])


def against_a_looked_up_reference():
    f = items()
    answer(f[FIRST] - f[jnp.zeros(20, int)])


def zeros_in_covariates():
    answer(np.where(np.arange(20)[:, None] == 3, 0.0, RNG.normal(size=(20, NUM_ITEMS))) @ items())


def absent_level():
    answer(jax.nn.one_hot(FIRST, NUM_ITEMS + 1)[:, 1:] @ items())


def components_of_one_item():
    f = items(2)
    answer(f[FIRST][:, 0] - f[FIRST][:, 1])


def noisy_differences():
    f, scale = items(), numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(f[FIRST] - f[SECOND], scale), obs=WON / 2)


def a_table_of_contests():
    f, (first, second) = items(), np.indices((NUM_ITEMS, NUM_ITEMS)).reshape(2, -1)
    count = np.where(first == second, 0, 2)
    numpyro.sample("wins", dist.Binomial(count, logits=f[first] - f[second]), obs=count // 2)


TRIAL, NUM_TRIALS = np.repeat(np.arange(5), 4), 5
TREATMENT = np.array([0, 1, 2, 3] * 5)
BASELINE = np.zeros(20, int)
BASELINE[TRIAL == 2] = 1
BASELINE[TRIAL == 4] = 3


def network_meta_analysis():
    """Every trial has an arm of its own baseline, which tells of the level of the trial."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 3.0).expand([NUM_TRIALS]))
    d = numpyro.sample("d", dist.Normal(0.0, 1.0).expand([4]))
    numpyro.sample("r", dist.Binomial(30, logits=mu[TRIAL] + d[TREATMENT] - d[BASELINE]), obs=3 + TREATMENT + TRIAL)


def network_meta_analysis_of_random_effects():
    mu = numpyro.sample("mu", dist.Normal(0.0, 3.0).expand([NUM_TRIALS]))
    d = jnp.concatenate([jnp.zeros(1), numpyro.sample("d", dist.Normal(0.0, 1.0).expand([3]))])
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    effect = numpyro.sample("effect", dist.Normal(d[TREATMENT] - d[BASELINE], tau))
    numpyro.sample("r", dist.Binomial(30, logits=mu[TRIAL] + effect), obs=3 + TREATMENT + TRIAL)


def catch_trials():
    """The same thing on both sides tells of the preference for a side."""
    f, side = items(), numpyro.sample("side", dist.Normal(0.0, 1.0))
    answer(side + f[FIRST] - f[SECOND])


def ties_with_cut_points():
    """Ties of equals tell where the cut points are."""
    f, width = items(), numpyro.sample("width", dist.HalfNormal(1.0))
    numpyro.sample("won", dist.OrderedLogistic(f[FIRST] - f[SECOND], width * jnp.array([-1.0, 1.0])), obs=WON)


@pytest.mark.parametrize(
    "model",
    [
        network_meta_analysis,
        network_meta_analysis_of_random_effects,
        catch_trials,
        ties_with_cut_points,
        none,
        masked,
        against_a_reference,
        against_a_looked_up_reference,
        zeros_in_covariates,
        absent_level,
        components_of_one_item,
        noisy_differences,
        a_table_of_contests,
    ],
)
def test_zeros_that_are_as_meant_are_none(model):
    assert read_latent_gaussian(model, check=False).self_comparisons() == []


@pytest.mark.parametrize("engine", [EP, pytest.param(BilinearVG, marks=pytest.mark.thorough)])
def test_a_run_says_so_once(engine):
    model, options = (plain, {}) if engine is EP else (products, {"covariance": "component", "num_restarts": 0})
    with pytest.warns(UserWarning) as caught:
        engine(model, progress_bar=False, **options).run(random.key(0))
    (found,) = [str(w.message) for w in caught if "itself" in str(w.message)]
    assert "2 of 20 observations of site 'won' compare an unknown with itself (the first at index 4)" in found


def test_models_of_this_package_say_so_in_their_own_words():
    model = partial(bradley_terry, num_items=NUM_ITEMS)
    with pytest.warns(UserWarning) as caught:
        EP(model, hyper_values={"scale": 1.0}, progress_bar=False).run(random.key(0), FIRST, SECOND, WON)
    assert {str(w.message).split(" of an item")[0] for w in caught} == {"2 of 20 comparisons are"}
