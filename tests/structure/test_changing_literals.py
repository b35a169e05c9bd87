"""Numbers of a model that change from run to run are data: nothing is compiled for them, and each run has its own."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import stats

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from numpyro_ext.structure.bilinear.read import read_bilinear
from numpyro_ext.structure.program.program import make_program
from tests.compilations import compiled_programs
from tests.tiers import few

pytestmark = pytest.mark.usefixtures("no_faults")

KEY = random.key(0)
NOISE = 0.5
RTOL = 1e-9 if jax.config.jax_enable_x64 else 1e-4


def around_the_mean(y, scale=1.0):
    """A prior around the mean of the data, as people write it, and a scale that is an argument."""
    a = numpyro.sample("a", dist.Normal(y.mean(), scale))
    numpyro.sample("y", dist.Normal(a, NOISE), obs=y)


def exact(y, scale):
    """Mean, and log evidence, of the same."""
    covariance = NOISE**2 * np.eye(y.size) + scale**2
    precision = 1 / scale**2 + y.size / NOISE**2
    mean = (y.mean() / scale**2 + y.sum() / NOISE**2) / precision
    return mean, stats.multivariate_normal(np.full(y.size, y.mean()), covariance).logpdf(y)


def check(engine, y, scale):
    mean, log_evidence = exact(y, scale)
    np.testing.assert_allclose(engine.posterior["a"].mean, mean, rtol=RTOL)
    np.testing.assert_allclose(engine.log_evidence, log_evidence, rtol=RTOL)


@pytest.mark.thorough
@pytest.mark.parametrize("make", few([EP, LaplaceApproximation, VariationalGaussian], 1))
def test_a_number_that_changed_once_compiles_nothing_again(make):
    engine = make(around_the_mean, progress_bar=False)
    rng = np.random.default_rng(0)
    for scale in (1.0, 2.0, np.float32(0.7), 3):
        y = 5.0 + rng.standard_normal(4)
        engine.run(KEY, y, scale)
        check(engine, y, float(scale))
    with compiled_programs() as names:
        for scale in (0.3, 11.0):
            engine.run(KEY, y, scale)
            check(engine, y, scale)
    assert not names


@pytest.mark.thorough
def test_models_that_are_equal_but_for_numbers_keep_their_own():
    def model_with(loc, scale):
        def model(y):
            a = numpyro.sample("a", dist.Normal(loc, scale))
            numpyro.sample("y", dist.Normal(a, NOISE), obs=y)

        return model

    y = np.array([1.0, 2.5, 3.0])
    models = {(loc, scale): model_with(loc, scale) for loc in (0.25, -3.5) for scale in (0.4, 1.7)}
    engines = {numbers: EP(model, progress_bar=False) for numbers, model in models.items()}
    for _ in range(2):
        for (loc, scale), engine in engines.items():
            engine.run(KEY, y)
            precision = 1 / scale**2 + y.size / NOISE**2
            expected = (loc / scale**2 + y.sum() / NOISE**2) / precision
            np.testing.assert_allclose(engine.posterior["a"].mean, expected, rtol=RTOL)


def test_states_are_of_the_numbers_that_were_written():
    engine = EP(around_the_mean, progress_bar=False)
    y = np.array([0.5, 1.5, 2.5])
    digests = []
    for scale in (0.6, 0.9, 1.3, 0.6, 0.9, 1.3):
        engine.run(KEY, y, scale)
        digests.append(engine.last_state.data_digest)
    assert digests[:3] == digests[3:]
    assert len(set(digests)) == 3


@pytest.mark.thorough
def test_hyperparameters_are_learned_under_each_number():
    def model(y, scale):
        tau = numpyro.sample("tau", dist.LogNormal(0.0, scale))
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(a, tau), obs=y)

    y = np.array([0.5, 1.5, -2.5, 0.7])
    engine = EP(model, progress_bar=False)
    again = [float(engine.run(KEY, y, scale) or engine.hyper["tau"].value) for scale in (0.2, 2.0, 0.05, 0.2)]
    assert again[0] == pytest.approx(again[3], rel=1e-4)
    # The narrower the prior, the nearer to its median.
    assert abs(again[2] - 1) < abs(again[0] - 1) < abs(again[1] - 1)


def test_programs_compute_the_same_whatever_has_become_of_their_numbers():
    def function(x, number):
        return number * x + jnp.sin(x) ** 2 / number, jnp.where(x > number, number, -x), number

    for number in (0.3, 1.9, -0.4, 0.3):
        program, (first, second, third) = make_program(lambda x, number=number: function(x, number), jnp.arange(3.0))
        env = dict(zip((*program.inputs, *program.constants), (jnp.arange(3.0), *program.data), strict=True))
        for found, expected in zip(
            program.evaluate([first, second, third], env), function(jnp.arange(3.0), number), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=1e-6)
            assert jnp.asarray(found).dtype == jnp.result_type(float)
    assert program.literals


SIDE = np.linspace(-2.0, 2.0, 12)
CHOICES = (SIDE > 0.3).astype(int)


def of_either_sign(x, y, level, slope):
    """Numbers decide the sign of the predictor: 1 - sigmoid(eta) is sigmoid(-eta)."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Bernoulli(probs=level + slope * jax.nn.sigmoid(w * x - 0.1)), obs=y)


@pytest.mark.thorough
@pytest.mark.parametrize("make", few([EP, LaplaceApproximation], 1))
def test_numbers_that_decide_the_sign_of_a_predictor(make):
    engine, found = make(of_either_sign, progress_bar=False), []
    for level, slope in ((0.0, 1.0), (1.0, -1.0), (0.0, 1.0), (1, -1)):
        engine.run(KEY, SIDE, CHOICES if slope > 0 else 1 - CHOICES, level, slope)
        found.append((engine.log_evidence, engine.posterior["w"].mean))
    # Opposite outcomes of the opposite probability are the same.
    np.testing.assert_allclose(found[1:], [found[0]] * 3, rtol=1e-5)


@pytest.mark.thorough
def test_numbers_that_decide_the_form_of_products():
    def model(y, level, slope):
        with numpyro.plate("rows", 4):
            u = numpyro.sample("u", dist.Normal(0.0, 1.0))
        with numpyro.plate("columns", 3):
            v = numpyro.sample("v", dist.Normal(0.0, 1.0))
        eta = u[:, None] * v + 1.0
        numpyro.sample("y", dist.Bernoulli(probs=level + slope * jax.nn.sigmoid(eta)), obs=y)

    y = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 0], [0, 0, 1]])
    for level, slope in ((0.0, 1.0), (1.0, -1.0), (0.0, 1.0), (1, -1)):
        # It compares the form with the log density of the model.
        reading = read_bilinear(model, (y, level, slope))
        assert "logistic" in reading.describe()


def test_exponents_stay_in_the_program():
    for exponent in (1.5, 2.5, 3.5):
        program, _ = make_program(lambda x, p=exponent: x**p, jnp.arange(3.0))
        assert not program.literals


def test_programs_that_are_compared_keep_their_numbers():
    for number in (0.3, 1.9, -0.4):
        program, _ = make_program(lambda x, n=number: n * x, jnp.arange(3.0), keep_literals=True)
        assert not program.literals
