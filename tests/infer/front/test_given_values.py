"""Values that a user gives reach the first run of a model: it need not have a density at the centres of its priors."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import (
    EP,
    INLA,
    BilinearVG,
    LaplaceApproximation,
    StructuredMeanField,
    VariationalGaussian,
    annealed_importance_sampling,
    cross_validate,
)
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from tests.tiers import thorough

KEY = jax.random.key(0)
Y = np.array([[0.9, 0.2], [-0.3, -0.8], [0.4, 1.3]])
OPTIONS = ("hyper_values", "init_values")


def correlated(y, mask=True):
    """The correlation must be below one; its prior has the median two."""
    correlation = numpyro.sample("correlation", dist.HalfNormal(3.0))
    covariance = jnp.array([[1.0, 0.0], [0.0, 1.0]]) + correlation * jnp.array([[0.0, 1.0], [1.0, 0.0]])
    with numpyro.plate("rows", 3):
        f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(2), covariance))
    with numpyro.handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(f, 0.5).to_event(0), obs=y)


def log_evidence(correlation):
    covariance = np.array([[1.25, correlation], [correlation, 1.25]])
    return float(dist.MultivariateNormal(jnp.zeros(2), jnp.asarray(covariance)).log_prob(jnp.asarray(Y)).sum())


def test_without_values_the_message_says_what_works():
    with pytest.raises(ModelStructureError, match=r"not positive definite at correlation=2[^?]*init_values"):
        EP(correlated).run(KEY, Y)


CASES = [(engine, option) for engine in (EP, LaplaceApproximation, VariationalGaussian) for option in OPTIONS]


@pytest.mark.thorough
@pytest.mark.parametrize(("engine_class", "option"), [CASES[0], *thorough(*CASES[1:], (INLA, "hyper_values"))])
def test_engines_read_the_model_where_it_has_a_density(engine_class, option, tmp_path):
    # The density of the correlation is highest at its wall: there is nothing to integrate around.
    options = {} if engine_class is INLA else {"integrate": "none"}
    engine = engine_class(correlated, **{option: {"correlation": 0.5}}, progress_bar=False, num_samples=3, **options)
    engine.run(KEY, Y)
    value = float(engine.hyper["correlation"].value)
    assert engine.hyper["correlation"].is_fixed == (option == "hyper_values")
    # what is integrated over keeps its prior density where it is given
    prior = dist.HalfNormal(3.0).log_prob(value) if engine_class is INLA else 0.0
    np.testing.assert_allclose(engine.log_evidence, log_evidence(value) + prior, rtol=1e-6)
    if option == "hyper_values":
        assert value == 0.5
    scores = engine.log_predictive(Y[:, ::-1])
    assert np.isfinite(scores["y"]).all()
    engine.save(tmp_path / "run")
    assert float(engine_class.load(tmp_path / "run", correlated).log_evidence) == float(engine.log_evidence)


@pytest.mark.thorough
def test_cross_validation_and_importance_sampling_read_at_the_given_values():
    found = cross_validate(EP(correlated, hyper_values={"correlation": 0.5}, progress_bar=False), KEY, Y, num_folds=2)
    assert np.isfinite(found.log_predictive).all()
    truth = annealed_importance_sampling(
        correlated, KEY, Y, hyper_values={"correlation": 0.5}, num_chains=1000, num_temperatures=10
    )
    assert truth.standard_error < 0.15
    np.testing.assert_allclose(truth.log_evidence, log_evidence(0.5), atol=3.0 * truth.standard_error)


def shrunk(y):
    """The scale must be below one; its prior has the median two."""
    scale = numpyro.sample("scale", dist.HalfNormal(3.0))
    s = numpyro.sample("s", dist.Laplace(0.0, jnp.sqrt(1.0 - scale)).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(s, 0.5).to_event(1), obs=y)


def factors(y):
    scale = numpyro.sample("scale", dist.HalfNormal(3.0))
    with numpyro.plate("rows", 3):
        w = numpyro.sample("w", dist.Normal(0.0, jnp.sqrt(1.0 - scale)))
    with numpyro.plate("columns", 2):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Poisson(jnp.exp(w[:, None] * z)), obs=y)


@pytest.mark.parametrize(
    ("engine_class", "model", "y"),
    [
        (EP, shrunk, Y[:, 0]),
        (StructuredMeanField, shrunk, Y[:, 0]),
        *thorough((BilinearVG, factors, np.arange(6).reshape(3, 2))),
    ],
)
def test_other_forms_are_read_at_the_given_values(engine_class, model, y):
    engine = engine_class(model, hyper_values={"scale": 0.5}, progress_bar=False, num_samples=3)
    engine.run(KEY, y)
    assert np.isfinite(engine.log_evidence)
    if engine_class is BilinearVG:
        assert np.isfinite(engine.log_predictive(y)["y"]).all()


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), jnp.array(0.5), np.array(0.5)])
def test_values_of_any_kind_are_taken(value):
    reading = read_latent_gaussian(correlated, (Y,), init_values={"correlation": value})
    assert reading.hyper["correlation"].init.dtype == jnp.result_type(float)


def test_values_outside_the_support_are_refused():
    with pytest.raises(ModelStructureError, match="'correlation' is outside or at the edge of its support"):
        read_latent_gaussian(correlated, (Y,), init_values={"correlation": -0.5})


def test_a_value_is_taken_for_a_parameter_whose_initial_value_is_a_function_of_a_key():
    def model(y):
        mean = numpyro.param("mean", lambda key: jax.random.normal(key, (3, 1)))
        numpyro.sample("y", dist.Normal(numpyro.sample("f", dist.Normal(mean, 1.0)), 0.5), obs=y)

    reading = read_latent_gaussian(model, (Y[:, :1],), init_values={"mean": 0.5})
    np.testing.assert_array_equal(reading.hyper["mean"].init, np.full((3, 1), 0.5))
    with pytest.raises(ModelStructureError, match=r"site 'mean' has shape \(2,\), the site has shape \(3, 1\)"):
        read_latent_gaussian(model, (Y[:, :1],), init_values={"mean": np.zeros(2)})
