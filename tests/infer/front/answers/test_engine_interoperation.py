"""NumPyro's and ArviZ's own functions on a fitted engine."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import ELBO, Predictive, Trace_ELBO, log_likelihood, psis_diagnostic

from numpyro_ext.infer import EP

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    import arviz as az


@pytest.fixture(scope="module")
def inference_data(fitted_counts):
    if az.__version__.startswith("0."):
        return az.from_numpyro(fitted_counts)
    return az.from_numpyro(fitted_counts, log_likelihood=True)


@pytest.mark.thorough
def test_arviz_finds_every_group(inference_data, counts_case):
    groups = set(getattr(inference_data, "children", None) or inference_data.groups())
    assert {"posterior", "sample_stats", "log_likelihood", "observed_data"} <= groups
    posterior = inference_data["posterior"]
    assert {"f", "scale", "rate"} <= set(posterior.data_vars)
    assert "y" not in posterior.data_vars
    assert posterior["f"].shape[-1] == counts_case.t.size
    assert inference_data["log_likelihood"]["y"].dims[-1] == "time"
    np.testing.assert_array_equal(inference_data["observed_data"]["y"], counts_case.y)


@pytest.mark.thorough
def test_arviz_draws_are_those_of_the_engine(inference_data, fitted_counts, counts_case):
    draws = fitted_counts.get_samples()
    np.testing.assert_array_equal(
        np.asarray(inference_data["posterior"]["f"]).reshape(1000, -1), np.asarray(draws["f"])
    )
    exact = log_likelihood(counts_case.model, draws, counts_case.t, counts_case.y, mask=counts_case.mask)["y"]
    found = np.asarray(inference_data["log_likelihood"]["y"]).reshape(exact.shape)
    np.testing.assert_allclose(found, exact, rtol=1e-10)
    np.testing.assert_allclose(
        np.asarray(inference_data["sample_stats"]["lp"]).reshape(-1),
        -fitted_counts.get_extra_fields()["potential_energy"],
        rtol=1e-12,
    )


@pytest.mark.thorough
def test_arviz_compares_engines(counts_case, fitted_counts):
    fixed = EP(counts_case.model, hyper_values={"scale": 0.05}, progress_bar=False)
    fixed.run(jax.random.key(0), counts_case.t, counts_case.y)
    learned = EP(counts_case.model, progress_bar=False)
    learned.run(jax.random.key(0), counts_case.t, counts_case.y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a few of twelve Pareto shapes may be high
        warnings.filterwarnings("ignore", message="The inplace keyword in DataFrame.sort_values")
        data = {"fixed": fixed.to_arviz(), "learned": learned.to_arviz()}
        table = az.compare(data)
        loo = az.loo(data["learned"])
    assert list(table.index) == ["learned", "fixed"]
    assert np.isfinite(getattr(loo, "elpd_loo", getattr(loo, "elpd", np.nan)))


def test_predictive_replays_the_model_on_the_draws(fitted_counts, counts_case):
    draws = fitted_counts.get_samples()
    replicated = Predictive(counts_case.model, draws)(jax.random.key(1), counts_case.t)
    assert replicated["y"].shape == (1000, counts_case.t.size)
    gap = np.asarray(replicated["y"].mean(0) - draws["rate"].mean(0))
    assert np.all(np.abs(gap) < 5.0 * np.asarray(replicated["y"].std(0)) / np.sqrt(1000))


@pytest.mark.thorough
def test_learned_param_sites_reach_predictive_and_log_likelihood(fitted_line, line_case):
    draws = fitted_line.get_samples()
    level = float(fitted_line.hyper["level"].value)
    assert abs(level - 0.3) > 1e-3
    replicated = Predictive(line_case.model, draws, return_sites=["fitted"])(jax.random.key(1), line_case.x)
    np.testing.assert_allclose(replicated["fitted"], level + draws["slopes"] @ line_case.x.T, rtol=1e-9)
    found = log_likelihood(line_case.model, draws, line_case.x, line_case.y)["y"]
    exact = dist.Normal(level + draws["slopes"] @ line_case.x.T, 0.5).log_prob(line_case.y)
    np.testing.assert_allclose(found, exact, rtol=1e-9)


@pytest.mark.thorough
def test_guide_has_the_moments_of_the_posterior(fitted_line, line_case):
    guide, params = fitted_line.guide, fitted_line.params
    posterior = guide.get_posterior(params)  # over log(scale) and the slopes, in the order of the model
    site, scale = fitted_line.posterior["slopes"], fitted_line.hyper["scale"]
    np.testing.assert_allclose(posterior.mean[1:], site.mean, rtol=1e-9)
    np.testing.assert_allclose(posterior.covariance_matrix[1:, 1:], site.covariance(), rtol=1e-7)
    np.testing.assert_allclose(posterior.mean[0], scale.unconstrained_value, rtol=1e-9)
    np.testing.assert_allclose(posterior.covariance_matrix[0, 1:], 0.0, atol=1e-15)
    np.testing.assert_allclose(guide.median(params)["slopes"], site.mean, rtol=1e-9)
    assert params["level"] == fitted_line.hyper["level"].value


@pytest.mark.slow
def test_guide_orders_sites_as_the_model_does():
    def model(y):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        a = numpyro.sample("a", dist.Normal(jnp.array([5.0, 6.0, 7.0]), 0.1).to_event(1))
        m = numpyro.sample("m", dist.Normal(-3.0, 0.1))
        numpyro.sample("y", dist.Normal(jnp.sum(z) + jnp.sum(a) + m, 1.0), obs=y)

    engine = EP(model, progress_bar=False)
    engine.run(jax.random.key(0), 16.0)
    median = engine.guide.median(engine.params)
    for name in ("z", "a", "m"):
        np.testing.assert_allclose(median[name], engine.posterior[name].mean, rtol=1e-9)
    design = jnp.ones((1, 6))
    prior = jnp.diag(jnp.array([1.0, 1.0, 0.01, 0.01, 0.01, 0.01]))
    exact = jnp.linalg.inv(jnp.linalg.inv(prior) + design.T @ design)
    np.testing.assert_allclose(engine.guide.get_posterior(engine.params).covariance_matrix, exact, atol=1e-9)


@pytest.mark.thorough
def test_guide_works_where_guides_are_asked_for(fitted_line, line_case):
    guide, params = fitted_line.guide, fitted_line.params
    arguments = (line_case.x, line_case.y, line_case.mask)
    k_hat = psis_diagnostic(jax.random.key(3), params, line_case.model, guide, *arguments)
    assert np.isfinite(k_hat)
    predicted = Predictive(line_case.model, guide=guide, params=params, num_samples=20)(jax.random.key(0), line_case.x)
    assert predicted["y"].shape == (20, line_case.x.shape[0])
    elbo: ELBO = Trace_ELBO(num_particles=50)
    assert np.isfinite(elbo.loss(jax.random.key(4), params, line_case.model, guide, *arguments))


def test_k_hat_of_an_exact_field_is_low(fitted_line):
    assert fitted_line.psis_diagnostic(jax.random.key(0)) < 0.5


@pytest.mark.thorough
def test_missing_values_are_drawn_given_the_field(line_case):
    """Those that ``obs_mask`` leaves open stood at a constant in the draws, and ArviZ's conversion failed."""

    def model(x, y, mask):
        slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ slopes, 0.5), obs=y, obs_mask=mask)

    engine = EP(model, num_samples=4000, progress_bar=False)
    x, y, mask = (np.asarray(value) for value in (line_case.x, line_case.y, line_case.mask))
    engine.run(jax.random.key(0), x, np.where(mask, y, np.nan), mask)
    draws = engine.get_samples()
    assert set(draws) == {"slopes", "y", "y_unobserved"}
    np.testing.assert_array_equal(draws["y"][:, mask], np.broadcast_to(y[mask], (4000, mask.sum())))
    covariance = np.linalg.inv(np.eye(2) + x[mask].T @ x[mask] / 0.25)
    mean = x[~mask] @ covariance @ x[mask].T @ y[mask] / 0.25
    sd = np.sqrt(np.einsum("ni,ij,nj->n", x[~mask], covariance, x[~mask]) + 0.25)
    drawn = np.asarray(draws["y"][:, ~mask])
    assert np.all(np.abs(drawn.mean(0) - mean) < 4.0 * sd / np.sqrt(4000))
    assert np.all(np.abs(drawn.std(0) / sd - 1.0) < 4.0 / np.sqrt(2 * 4000))
    shifted = np.asarray(engine.get_samples(seed=1)["y"][:, ~mask])
    assert not np.array_equal(shifted, drawn)
    # Said once, by whichever asks first: ArviZ 1.x takes no log likelihoods in from_numpyro.
    with pytest.warns(UserWarning, match=r"of 1 of 12 observations .* Use EP.loo\(\)"):
        data = az.from_numpyro(engine)
        likelihood = engine.to_arviz()["log_likelihood"]["y_observed"]
    assert {"slopes", "y", "y_unobserved"} <= set(data["posterior"].data_vars)
    assert likelihood.shape == (4, 1000, 12) and np.all(np.asarray(likelihood)[..., ~mask] == 0.0)


@pytest.mark.thorough
def test_guide_says_where_it_draws_other_points_than_those_asked_for():
    def process(inputs, y=None):
        distance = inputs[:, None] - inputs[None, :]
        covariance = jnp.exp(-0.5 * distance**2) + 1e-6 * jnp.eye(inputs.shape[0])
        f = numpyro.sample("f", dist.MultivariateNormal(0, covariance))
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    inputs = np.linspace(0.0, 3.0, 6)
    engine = EP(process, progress_bar=False)
    engine.run(jax.random.key(0), inputs, np.sin(inputs))
    predictive = Predictive(process, guide=engine.guide, params=engine.params, num_samples=3)
    assert predictive(jax.random.key(1), jnp.asarray(inputs))["y"].shape == (3, 6)  # without a warning
    with pytest.warns(UserWarning, match=r"prior of the latent site 'f' depends on arguments .* engine.predict"):
        predictive(jax.random.key(1), 2 * inputs)
    with pytest.warns(UserWarning, match=r"prior of the latent site 'f' depends"):
        predictive(jax.random.key(1), inputs + 0.3)  # of the same covariance
    with pytest.raises(ValueError, match=r"'f' has shape \(4,\) at these arguments and \(6,\) in the fit"):
        predictive(jax.random.key(1), inputs[:4])
