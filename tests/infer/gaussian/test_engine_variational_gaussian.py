"""The variational Gaussian as an engine: bounds by name, refusals, and what it has from the common front."""

import json
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_ext.infer import VariationalGaussian, cross_validate
from numpyro_ext.models import cox_process
from numpyro_ext.structure import ModelStructureError
from tests.monte_carlo import assert_close_deviations, assert_close_means

KEY = jax.random.key(0)
REGRESSION = json.loads((Path(__file__).parents[2] / "reference" / "khan_lgm_small.json").read_text())["blr"]
INPUTS, LABELS = jnp.asarray(REGRESSION["X"]), jnp.asarray(REGRESSION["y"])


def regression(x, y=None):
    weights = numpyro.sample("weights", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


@pytest.fixture(scope="module")
def fitted(counts_case):
    engine = VariationalGaussian(counts_case.model, integrate="none", progress_bar=False)
    engine.run(KEY, counts_case.t, counts_case.y, mask=counts_case.mask)
    return engine


@pytest.mark.parametrize(
    "bound, num_pieces, reference",
    [
        ("exact", 20, "exact"),
        ("jaakkola", 20, "J"),
        pytest.param("bohning", 20, "B", marks=pytest.mark.slow),
        ("piecewise-quadratic", 20, "Q20"),
        pytest.param("piecewise-quadratic", 10, "Q10", marks=pytest.mark.slow),
        pytest.param("piecewise-quadratic", 5, "Q5", marks=pytest.mark.slow),
        pytest.param("piecewise-quadratic", 3, "Q3", marks=pytest.mark.slow),
        pytest.param("piecewise-linear", 10, "L10", marks=pytest.mark.slow),
    ],
)
def test_bounds_by_name_on_logistic_regression(bound, num_pieces, reference):
    engine = VariationalGaussian(regression, bound=bound, num_pieces=num_pieces, progress_bar=False)
    engine.run(KEY, INPUTS, LABELS)
    expected = REGRESSION["bounds"][reference]
    np.testing.assert_allclose(engine.log_evidence, expected["elbo"], atol=1e-6)
    np.testing.assert_allclose(engine.posterior["weights"].mean, expected["m"], atol=1e-4)
    np.testing.assert_allclose(engine.posterior["weights"].covariance(), expected["V"], atol=1e-4)
    assert engine.log_evidence.is_lower_bound and engine.diagnostics.converged
    assert np.all(np.diff(engine.diagnostics.objective_trace) > -1e-11)
    assert ("exact expectation" if bound == "exact" else f"local bound {bound}") in engine.describe()


@pytest.mark.slow
def test_the_tightest_of_several_bounds_is_between_them_and_the_truth():
    values = {}
    for bound in ("jaakkola", ("jaakkola", "piecewise-quadratic"), "exact"):
        engine = VariationalGaussian(regression, bound=bound, num_pieces=5, progress_bar=False)
        engine.run(KEY, INPUTS, LABELS)
        values[bound] = float(engine.log_evidence)
    assert values["jaakkola"] < values["jaakkola", "piecewise-quadratic"] < values["exact"]
    assert values["jaakkola", "piecewise-quadratic"] > REGRESSION["bounds"]["Q5"]["elbo"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["coordinate", "cholesky", "opper-archambeau"])
def test_other_methods_by_name(method):
    engine = VariationalGaussian(regression, method=method, progress_bar=False)
    engine.run(KEY, INPUTS, LABELS)
    np.testing.assert_allclose(engine.log_evidence, REGRESSION["bounds"]["exact"]["elbo"], atol=1e-6)
    assert engine.diagnostics.converged
    assert np.all(np.diff(engine.diagnostics.objective_trace) > -1e-11)


def test_options_are_checked():
    with pytest.raises(ValueError, match="bound must be one of"):
        VariationalGaussian(regression, bound="jensen")
    with pytest.raises(ValueError, match="method must be one of"):
        VariationalGaussian(regression, method="adam")


def test_likelihoods_that_a_bound_does_not_serve_are_refused_by_name(counts_case):
    arguments = (KEY, counts_case.t, counts_case.y)
    with pytest.raises(ModelStructureError, match="'jaakkola'.*logistic.*site 'y'.*PoissonExp"):
        VariationalGaussian(counts_case.model, bound="jaakkola").run(*arguments)
    with pytest.raises(ValueError, match="'z', which is no observed site"):
        VariationalGaussian(counts_case.model, bound={"z": "jaakkola"}).run(*arguments)


def test_a_factor_that_vanishes_is_refused_by_name():
    with pytest.raises(ModelStructureError, match="'counts'.*-inf.*Use EP"):
        VariationalGaussian(cox_process).run(KEY, jnp.arange(6.0), jnp.array([1, 0, 2, 1, 0, 3]))


def test_separated_classes_under_a_flat_prior_are_reported():
    def model(x, y):
        slope = numpyro.sample("slope", dist.ImproperUniform(dist.constraints.real, (), ()))
        numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)

    x = jnp.linspace(-1.0, 1.0, 8)
    engine = VariationalGaussian(model, num_steps=30, progress_bar=False)
    with pytest.warns(UserWarning, match="VariationalGaussian did not converge.*largest change"):
        engine.run(KEY, x, (x > 0).astype(int))
    assert not engine.diagnostics.converged


def test_hyperparameters_maximise_the_bound(fitted, counts_case):
    assert fitted.diagnostics.converged and fitted.log_evidence.is_lower_bound
    scale = float(fitted.hyper["scale"].value)

    def objective(value):
        engine = VariationalGaussian(counts_case.model, hyper_values={"scale": value}, progress_bar=False)
        engine.run(KEY, counts_case.t, counts_case.y, mask=counts_case.mask)
        return float(engine.log_evidence) + float(dist.HalfNormal(1.0).log_prob(value))

    best = objective(scale)
    assert objective(scale * 1.05) < best > objective(scale / 1.05)


def test_draws_and_held_out_densities(fitted, counts_case):
    draws = fitted.get_samples()
    assert_close_means(draws["f"], fitted.posterior["f"].mean)
    assert_close_deviations(draws["f"], fitted.posterior["f"].sd)
    held_out = fitted.log_predictive()["y"]
    assert np.all((np.asarray(held_out) < 0.0) == ~np.asarray(counts_case.mask))


@pytest.mark.slow
def test_adapters(fitted, counts_case):
    assert az.from_numpyro(fitted).posterior["rate"].shape[-1] == counts_case.t.size
    predictive = Predictive(counts_case.model, guide=fitted.guide, params=fitted.params, num_samples=3)
    assert predictive(KEY, counts_case.t)["y"].shape == (3, counts_case.t.size)
    assert fitted.psis_diagnostic(KEY) < 0.7


def test_a_saved_run_is_the_same_run_and_goes_on(fitted, counts_case, tmp_path):
    fitted.save(tmp_path / "run")
    again = VariationalGaussian.load(tmp_path / "run", counts_case.model)
    assert float(again.log_evidence) == float(fitted.log_evidence) and again.log_evidence.is_lower_bound
    np.testing.assert_array_equal(again.posterior["f"].mean, fitted.posterior["f"].mean)
    again.run(KEY, counts_case.t, counts_case.y, mask=counts_case.mask, init_state=fitted.last_state)
    np.testing.assert_allclose(again.posterior["f"].mean, fitted.posterior["f"].mean, atol=1e-5)


def test_a_fit_in_two_runs_is_the_fit_in_one():
    short = VariationalGaussian(regression, num_steps=4, progress_bar=False)
    with pytest.warns(UserWarning, match="did not converge in 4 steps"):
        short.run(KEY, INPUTS, LABELS)
    with pytest.warns(UserWarning, match="did not converge in 8 steps"):
        short.run(KEY, INPUTS, LABELS, init_state=short.last_state)
    long = VariationalGaussian(regression, progress_bar=False)
    long.run(KEY, INPUTS, LABELS)
    # The second run spends its first step on evaluating where the first one stopped.
    np.testing.assert_allclose(short.log_evidence, long.diagnostics.objective_trace[6], rtol=1e-12)
    assert long.diagnostics.objective_trace[7] > long.diagnostics.objective_trace[6] + 1e-9


@pytest.mark.slow
def test_cross_validation(counts_case):
    engine = VariationalGaussian(counts_case.model, hyper_values={"scale": 0.8}, progress_bar=False)
    scores = cross_validate(engine, KEY, counts_case.t, counts_case.y, num_folds=3)
    assert np.all(scores.converged) and np.all(np.isfinite(scores.log_predictive))
    assert np.all(np.asarray(scores.log_predictive) < 0.0)


@pytest.mark.slow
def test_against_stochastic_variational_inference():
    engine = VariationalGaussian(regression, progress_bar=False)
    engine.run(KEY, INPUTS, LABELS)
    guide = AutoMultivariateNormal(regression)
    svi = SVI(regression, guide, numpyro.optim.ClippedAdam(optax_schedule), Trace_ELBO(num_particles=32))
    result = svi.run(KEY, 6000, INPUTS, LABELS, progress_bar=False)
    posterior = guide.get_posterior(result.params)
    np.testing.assert_allclose(engine.posterior["weights"].mean, posterior.mean, atol=0.05)
    loss = Trace_ELBO(num_particles=200_000).loss(KEY, result.params, regression, guide, INPUTS, LABELS)
    assert -0.01 < float(engine.log_evidence) + float(loss) < 0.05


def optax_schedule(step):
    return 0.02 * 0.5 ** (step / 1000.0)
