"""The check of what was read where NumPyro has lost digits: sound models pass it, misread ones do not."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.stats import norm

from numpyro_ext.structure import ModelStructureError, Reason, read_latent_gaussian
from numpyro_ext.structure.model.verification import check_form
from tests.tiers import thorough

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3))
Y = np.arange(40) % 4 // 2
KEYS = [jax.random.key(number) for number in range(100)]


def probit(x, y, scale):
    b = numpyro.sample("b", dist.Normal(0, scale).expand([3]))
    numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(x @ b)), obs=y)


def logistic_counts(x, y, scale):
    b = numpyro.sample("b", dist.Normal(0, scale).expand([3]))
    numpyro.sample("y", dist.Binomial(50, jax.nn.sigmoid(x @ b)), obs=50 * y)


def flipped(x):
    return np.where(np.arange(3) == 1, -x, x)


def shuffled(x):
    return x[np.r_[2, 1, 0, 3 : len(x)]]  # rows of unlike outcomes


@pytest.mark.parametrize("model", [probit, logistic_counts])
@pytest.mark.parametrize(
    ("scale", "num_keys"),
    [(jnp.float32(0.3), 10), *thorough((3.0, 10), (5.0, 10), (10.0, 100), (20.0, 10)), (300.0, 10)],
)
def test_sound_models_pass_and_planted_errors_do_not(model, scale, num_keys):
    right = read_latent_gaussian(model, (X, Y, scale), check=False)
    wrong = [read_latent_gaussian(model, (change(X), Y, scale), check=False) for change in (flipped, shuffled)]
    for reading in wrong:  # what was read is of other arguments than what NumPyro is given
        reading.args = right.args
    for key in KEYS[:num_keys]:
        check_form(right, key)
        for reading in wrong:
            with pytest.raises(ModelStructureError) as caught:
                check_form(reading, key)
            assert caught.value.reason is Reason.MISREAD


def test_counts_by_year_are_compared_where_rates_do_not_overflow():
    """Most points of the prior have rates of zero or without end, whose log density is no number."""
    year, y = 1990.0 + np.arange(30), np.arange(30) % 4

    def counts(year, y):
        a, b = (numpyro.sample(name, dist.Normal(0, 10)) for name in "ab")
        numpyro.sample("y", dist.Poisson(jnp.exp(a + b * year)), obs=y)

    right = read_latent_gaussian(counts, (year, y), check=False)
    wrong = read_latent_gaussian(counts, (np.where(year == 2001.0, 2002.0, year), y), check=False)
    wrong.args = right.args
    for key in KEYS[:10]:
        check_form(right, key)
        with pytest.raises(ModelStructureError, match="misread"):
            check_form(wrong, key)


def test_a_sign_of_one_row_is_found_where_others_are_saturated():
    x = np.concatenate([X, [[0.0, 0.0, 0.02]]])
    y = np.append(Y, 1)
    reading = read_latent_gaussian(probit, (np.concatenate([X, -x[-1:]]), y, 5.0), check=False)
    reading.args = (x, y, 5.0)
    for key in KEYS[:10]:
        with pytest.raises(ModelStructureError, match="misread"):
            check_form(reading, key)


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_probabilities_below_the_smallest_number(seed):
    """NumPyro puts the smallest number in their place, and no other probability was near one."""

    def model(y):
        level = numpyro.sample("level", dist.Normal(0.0, 100.0))
        numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(level * jnp.ones(3))), obs=y)

    reading = read_latent_gaussian(model, (jnp.array([1, 1, 0]),), rng_key=jax.random.key(seed))
    assert reading.num_closed_forms == 1


@pytest.mark.parametrize("is_planted", [False, True])
def test_parameters_that_are_given_far_out(is_planted):
    """No point near the centre of the field is one of which NumPyro has digits, as the parameters alone saturate it."""

    def model(x, y):
        level = numpyro.param("level", jnp.array([60.0, -60.0, 30.0]))
        spread = numpyro.param("spread", 15.0, constraint=dist.constraints.positive)
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(x @ (level + spread * b))), obs=y)

    reading = read_latent_gaussian(model, (flipped(X) if is_planted else X, Y), check=False)
    reading.args = (X, Y)
    for key in KEYS[:10]:
        if not is_planted:
            check_form(reading, key)
            continue
        with pytest.raises(ModelStructureError) as caught:
            check_form(reading, key)
        assert caught.value.reason is Reason.MISREAD
