"""What an engine reports, against closed forms: regression with known noise makes every engine exact."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.optimize
import scipy.stats

from numpyro_ext.design import linear_information_gain
from numpyro_ext.infer import EP, LaplaceApproximation
from numpyro_ext.infer.front.answers.draws import Draws, draw_inside_support
from numpyro_ext.infer.front.answers.sites import SitePosterior


def exact_line(case, scale, level):
    """Posterior of the slopes and log evidence of the observed rows."""
    x, y = np.asarray(case.x)[np.asarray(case.mask)], np.asarray(case.y)[np.asarray(case.mask)]
    precision = x.T @ x / 0.25 + np.eye(2) / scale**2
    covariance = np.linalg.inv(precision)
    mean = covariance @ x.T @ (y - level) / 0.25
    marginal = scale**2 * x @ x.T + 0.25 * np.eye(len(y))
    return mean, covariance, scipy.stats.multivariate_normal(np.full(len(y), level), marginal).logpdf(y)


def exact_objective(case, unconstrained):
    """Log evidence plus log prior as a function of (level, log scale), in JAX."""
    level, scale = unconstrained[0], jnp.exp(unconstrained[1])
    rows = np.flatnonzero(np.asarray(case.mask))
    x, y = case.x[rows], case.y[rows]
    marginal = dist.MultivariateNormal(level, scale**2 * x @ x.T + 0.25 * jnp.eye(len(rows)))
    return marginal.log_prob(y) + dist.HalfNormal(2.0).log_prob(scale)


@pytest.fixture(scope="module")
def optimum(line_case):
    value_and_grad = jax.jit(jax.value_and_grad(lambda u: -exact_objective(line_case, u)))
    found = scipy.optimize.minimize(value_and_grad, np.zeros(2), jac=True, tol=1e-12)
    return found.x, np.asarray(jax.hessian(lambda u: exact_objective(line_case, u))(jnp.asarray(found.x)))


@pytest.mark.thorough
def test_hyperparameters_maximise_evidence_and_prior(fitted_line, optimum):
    (level, log_scale), _ = optimum
    assert fitted_line.diagnostics.hyper.converged
    np.testing.assert_allclose(fitted_line.hyper["level"].value, level, atol=1e-4)
    np.testing.assert_allclose(fitted_line.hyper["scale"].value, np.exp(log_scale), rtol=1e-4)
    np.testing.assert_allclose(fitted_line.hyper["scale"].unconstrained_value, log_scale, atol=1e-4)


def test_standard_errors_come_from_the_curvature(fitted_line, optimum):
    (_, log_scale), hessian = optimum
    level_error, scale_error = np.sqrt(np.diag(np.linalg.inv(-hessian)))
    np.testing.assert_allclose(fitted_line.hyper["level"].standard_error, level_error, rtol=1e-3)
    np.testing.assert_allclose(fitted_line.hyper["scale"].unconstrained_standard_error, scale_error, rtol=1e-3)
    np.testing.assert_allclose(fitted_line.hyper["scale"].standard_error, np.exp(log_scale) * scale_error, rtol=1e-3)


def test_information_gain_of_further_measurements(line_case, fitted_line):
    hyper = {name: float(estimate.value) for name, estimate in fitted_line.hyper.items()}
    _, covariance, _ = exact_line(line_case, **hyper)
    rows = np.array([[1.0, 0.0], [1.0, -2.0], [0.5, 3.0]])
    expected = 0.5 * np.log1p(np.einsum("ri,ij,rj->r", rows, covariance, rows) / np.array([0.25, 1.0, 4.0]))
    gain = linear_information_gain(fitted_line, rows, np.array([0.25, 1.0, 4.0]))
    np.testing.assert_allclose(gain, expected, rtol=1e-8)
    named = linear_information_gain(fitted_line, rows, np.array([0.25, 1.0, 4.0]), site="slopes")
    np.testing.assert_allclose(named, expected, rtol=1e-8)
    own_noise = linear_information_gain(fitted_line, rows)
    np.testing.assert_allclose(own_noise, linear_information_gain(fitted_line, rows, 0.25), rtol=1e-12)
    with pytest.raises(ValueError, match="shape"):
        linear_information_gain(fitted_line, np.ones((1, 3)), 1.0)
    with pytest.raises(KeyError, match="'scale'"):
        linear_information_gain(fitted_line, rows, 1.0, site="scale")


def test_rows_on_a_site_too_large_for_a_matrix_are_judged_by_draws():
    """Independent elements of known deviations, whose matrix nobody may ask for."""
    size, num_samples = 2049, 1000
    deviations = np.linspace(0.5, 2.0, size)
    site = SitePosterior(
        "u",
        (size,),
        mean=lambda: np.zeros(size),
        variance=lambda: deviations**2,
        covariance=lambda: pytest.fail("asked for"),
        sample=lambda key, number: deviations * jax.random.normal(key, (number, size)),
    )
    rows = np.zeros((3, size))
    rows[0, 5], rows[1, 7], rows[2, [5, 2000]] = 2.0, -1.0, 1.0
    expected = (rows * deviations**2) @ rows.T
    five_errors = 5.0 * np.sqrt(2.0 / num_samples)
    found = site.row_variance(rows, num_samples=num_samples)
    np.testing.assert_allclose(found, np.diag(expected), rtol=five_errors)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    found = site.row_covariance(rows, num_samples=num_samples)
    np.testing.assert_allclose(found / scale, expected / scale, atol=five_errors)


def test_posterior_and_evidence_are_exact(line_case, fitted_line):
    hyper = {name: float(estimate.value) for name, estimate in fitted_line.hyper.items()}
    mean, covariance, log_evidence = exact_line(line_case, **hyper)
    site = fitted_line.posterior["slopes"]
    np.testing.assert_allclose(site.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(site.variance, np.diag(covariance), rtol=1e-9)
    np.testing.assert_allclose(site.sd, np.sqrt(np.diag(covariance)), rtol=1e-9)
    np.testing.assert_allclose(site.covariance(), covariance, rtol=1e-8)
    assert float(fitted_line.log_evidence) == pytest.approx(log_evidence, abs=1e-9)
    assert fitted_line.log_evidence.is_lower_bound is False

    fitted = fitted_line.posterior["fitted"]
    x = np.asarray(line_case.x)
    np.testing.assert_allclose(fitted.mean, hyper["level"] + x @ mean, rtol=1e-8)
    np.testing.assert_allclose(fitted.covariance(), x @ covariance @ x.T, rtol=1e-7, atol=1e-12)


def test_quantiles_and_intervals_are_gaussian(fitted_line):
    site = fitted_line.posterior["slopes"]
    exact = scipy.stats.norm(np.asarray(site.mean), np.asarray(site.sd))
    np.testing.assert_allclose(site.quantile(0.9), exact.ppf(0.9), rtol=1e-9)
    assert site.quantile(jnp.array([[0.1], [0.5]])).shape == (2, 1, 2)
    np.testing.assert_allclose(jnp.stack(site.interval(0.8)), [exact.ppf(0.1), exact.ppf(0.9)], rtol=1e-9)
    with pytest.raises(ValueError, match="inside"):
        site.quantile(1.0)


def test_draws_follow_the_posterior(fitted_line):
    draws = fitted_line.get_samples()
    assert set(draws) == {"scale", "level", "slopes", "fitted", "steepness"}
    site = fitted_line.posterior["slopes"]
    error = np.asarray(site.sd) / np.sqrt(4000)
    np.testing.assert_array_less(np.abs(draws["slopes"].mean(0) - site.mean), 4.0 * error)
    np.testing.assert_allclose(np.cov(draws["slopes"].T), site.covariance(), rtol=0.15, atol=4.0 * error.max() ** 2)
    np.testing.assert_allclose(draws["steepness"], draws["slopes"][:, 0] ** 2, rtol=1e-12)
    np.testing.assert_array_equal(draws["scale"], np.full(4000, fitted_line.hyper["scale"].value))
    fresh = site.sample(jax.random.key(5), 4000)
    assert fresh.shape == (4000, 2)
    np.testing.assert_array_less(np.abs(fresh.mean(0) - site.mean), 4.0 * error)


def test_draws_are_kept_and_grouped(fitted_line):
    flat, grouped = fitted_line.get_samples(), fitted_line.get_samples(group_by_chain=True)
    for name, value in flat.items():
        np.testing.assert_array_equal(value.reshape(4, 1000, *value.shape[1:]), grouped[name])
        np.testing.assert_array_equal(value, fitted_line.get_samples()[name])
    other = fitted_line.get_samples(seed=3)
    assert other.keys() == flat.keys()
    assert not np.array_equal(other["slopes"], flat["slopes"])


def test_potential_energy_is_that_of_the_draws(line_case, fitted_line):
    from numpyro.infer.util import log_density

    draws = {name: value[:5] for name, value in fitted_line.get_samples().items()}
    energy = fitted_line.get_extra_fields()["potential_energy"]
    assert energy.shape == (4000,)
    for i in range(5):
        point = {name: draws[name][i] for name in ("scale", "level", "slopes")}
        exact, _ = log_density(line_case.model, (line_case.x, line_case.y, line_case.mask), {}, point)
        assert float(energy[i]) == pytest.approx(-float(exact), rel=1e-9)


def test_other_names_say_why_they_have_no_posterior(fitted_line):
    assert list(fitted_line.posterior) == ["scale", "level", "slopes", "fitted"]
    for name, reason in {
        "steepness": "not affine",
        "y": "observed",
        "slope": "no site of this name",
    }.items():
        assert name not in fitted_line.posterior
        with pytest.raises(KeyError, match=reason) as error:
            fitted_line.posterior[name]
        assert "fitted, level, scale, slopes" in str(error.value)


def test_held_out_observations_are_scored_by_their_predictive_density(line_case, fitted_line):
    site = fitted_line.posterior["fitted"]
    exact = scipy.stats.norm(np.asarray(site.mean), np.sqrt(np.asarray(site.variance) + 0.25)).logpdf(line_case.y)
    exact = np.where(np.asarray(line_case.mask), 0.0, exact)
    np.testing.assert_allclose(fitted_line.log_predictive()["y"], exact, rtol=1e-8)
    again = fitted_line.log_predictive(line_case.x, line_case.y, mask=~line_case.mask)
    np.testing.assert_allclose(again["y"], exact, rtol=1e-8)


def test_new_observations_may_have_another_shape(line_case, fitted_line):
    x, y = line_case.x[:3] + 1.0, jnp.array([0.0, 1.0, 2.0])
    scores = fitted_line.log_predictive(x, y)["y"]
    hyper = {name: float(estimate.value) for name, estimate in fitted_line.hyper.items()}
    mean, covariance, _ = exact_line(line_case, **hyper)
    exact = scipy.stats.norm(hyper["level"] + x @ mean, np.sqrt(np.einsum("ni,ij,nj->n", x, covariance, x) + 0.25))
    np.testing.assert_allclose(scores, exact.logpdf(y), rtol=1e-8)


@pytest.mark.thorough
def test_observations_at_new_inputs_are_scored_as_masked_ones(counts_case):
    t, y, num_old = 0.3 + 2.0 * counts_case.t, counts_case.y, counts_case.t.size
    fitted, masked = (EP(counts_case.model, progress_bar=False, hyper_values={"scale": 0.7}) for _ in range(2))
    fitted.run(jax.random.key(0), counts_case.t, y, mask=counts_case.mask)
    mask = jnp.append(counts_case.mask, jnp.zeros(num_old, bool))
    masked.run(jax.random.key(0), jnp.append(counts_case.t, t), jnp.append(counts_case.y, y), mask=mask)
    expected = masked.log_predictive()["y"][num_old:]
    np.testing.assert_allclose(fitted.log_predictive(t, y)["y"], expected, rtol=1e-6)


def test_a_covariance_is_not_taken_for_a_precision():
    def model(y, parameter="covariance_matrix"):
        u = numpyro.sample("u", dist.MultivariateNormal(jnp.zeros(2), **{parameter: 2.0 * jnp.eye(2)}))
        numpyro.sample("y", dist.Normal(u, 1.0), obs=y)

    y = jnp.array([0.3, -0.8])
    engine = LaplaceApproximation(model, progress_bar=False)
    engine.run(jax.random.key(0), y)
    assert engine.log_predictive(y, parameter="covariance_matrix")["y"].shape == (2,)
    with pytest.raises(ValueError, match="prior of the field"):
        engine.log_predictive(y, parameter="precision_matrix")


@pytest.mark.parametrize("code", [np.nan, np.inf])
def test_missing_measurements_are_not_scored(line_case, fitted_line, code):
    """They were scored as if zero had been observed."""
    engine = EP(line_case.model, integrate="none", progress_bar=False)
    missing = jnp.arange(12) == 4
    assert not bool(line_case.mask[4])
    engine.run(jax.random.key(0), line_case.x, jnp.where(missing, code, line_case.y), mask=line_case.mask)
    expected = jnp.where(missing, 0.0, fitted_line.log_predictive()["y"])
    np.testing.assert_allclose(engine.log_predictive()["y"], expected, rtol=1e-8)


@pytest.mark.thorough
def test_missing_counts_are_not_scored(counts_case, fitted_counts):
    engine = EP(counts_case.model, progress_bar=False)
    missing = jnp.arange(12) == 8
    assert not bool(counts_case.mask[8])
    engine.run(jax.random.key(0), counts_case.t, jnp.where(missing, -1, counts_case.y), mask=counts_case.mask)
    expected = jnp.where(missing, 0.0, fitted_counts.log_predictive()["y"])
    np.testing.assert_allclose(engine.log_predictive()["y"], expected, rtol=1e-6)


def test_a_value_that_is_not_a_number_is_not_scored_silently(line_case, fitted_line):
    with pytest.raises((FloatingPointError, ValueError), match="y"):
        fitted_line.log_predictive(line_case.x, line_case.y.at[1].set(jnp.nan))


def test_summary_shows_field_hyperparameters_and_evidence(fitted_line, capsys):
    fitted_line.print_summary()
    text = capsys.readouterr().out
    for expected in ("slopes[0]", "slopes[1]", "scale", "level", "5.0%", "95.0%", "Log evidence", "converged after"):
        assert expected in text
    assert "fitted[0]" not in text
    assert f"{float(fitted_line.posterior['slopes'].mean[0]):.2f}" in text
    fitted_line.print_summary(exclude_deterministic=False)
    assert "fitted[0]" in capsys.readouterr().out


def test_laplace_agrees_where_both_are_exact(line_case, fitted_line):
    engine = LaplaceApproximation(line_case.model, integrate="none", progress_bar=False)
    engine.run(jax.random.key(0), line_case.x, line_case.y, mask=line_case.mask)
    assert float(engine.log_evidence) == pytest.approx(float(fitted_line.log_evidence), abs=1e-6)
    np.testing.assert_allclose(engine.posterior["slopes"].mean, fitted_line.posterior["slopes"].mean, rtol=1e-3)
    error = fitted_line.hyper["scale"].standard_error
    np.testing.assert_allclose(engine.hyper["scale"].standard_error, error, rtol=1e-3)


def test_fixed_hyperparameters_are_not_learned(line_case):
    engine = EP(line_case.model, hyper_values={"scale": 1.5, "level": 0.2}, progress_bar=False)
    engine.run(jax.random.key(0), line_case.x, line_case.y, mask=line_case.mask)
    mean, covariance, log_evidence = exact_line(line_case, 1.5, 0.2)
    assert engine.diagnostics.hyper is None
    assert engine.hyper["scale"].is_fixed
    assert engine.hyper["scale"].standard_error is None
    np.testing.assert_allclose(engine.posterior["slopes"].mean, mean, rtol=1e-9)
    np.testing.assert_allclose(engine.posterior["slopes"].variance, np.diag(covariance), rtol=1e-9)
    assert float(engine.log_evidence) == pytest.approx(log_evidence, abs=1e-9)


def test_draws_stay_where_the_model_has_density():
    # A Gaussian with half of its mass below zero: what remains is the half-normal.
    def draw(rng_key):
        value = jax.random.normal(rng_key, (2000,))
        return Draws({"x": value}, jnp.where(value > 0.0, -0.5 * value**2, -jnp.inf))

    sites, log_density, _ = draw_inside_support(draw, jax.random.key(0))
    assert bool(jnp.all(sites["x"] > 0.0))
    np.testing.assert_array_equal(log_density, -0.5 * sites["x"] ** 2)
    assert len(np.unique(sites["x"])) == 2000
    assert scipy.stats.kstest(np.asarray(sites["x"]), scipy.stats.halfnorm.cdf).pvalue > 1e-3


def test_draws_at_which_the_model_knows_no_density_are_replaced_and_counted():
    def draw(rng_key):
        value = jax.random.normal(rng_key, (2000,))
        return Draws({"x": value}, jnp.where(value > -0.5, -0.5 * value**2, jnp.nan))

    with pytest.warns(UserWarning, match=r"nan at \d+ of 2000 draws.*jitter.*enable_x64"):
        sites, log_density, _ = draw_inside_support(draw, jax.random.key(0))
    assert bool(jnp.all(sites["x"] > -0.5))
    np.testing.assert_array_equal(log_density, -0.5 * sites["x"] ** 2)
    assert len(np.unique(sites["x"])) == 2000


def test_draws_without_support_are_reported():
    def draw(rng_key):
        value = jax.random.normal(rng_key, (10,))
        return Draws({"x": value}, jnp.full((10,), -jnp.inf))

    with pytest.warns(UserWarning, match="10 of 10 draws"):
        draw_inside_support(draw, jax.random.key(0))
    with pytest.raises(FloatingPointError, match="nan at 3 of 3 draws.*jitter"):
        draw_inside_support(lambda key: Draws({}, jnp.full((3,), jnp.nan)), jax.random.key(0))


def _spread_by_group(group, y=None, seen=None):
    """Spreads of groups about a common one, whose prior is a factor on the field; ``seen`` sees no field at all."""
    level, log_spread = numpyro.sample("level", dist.Normal(0, 1)), numpyro.sample("log_spread", dist.Normal(-1, 0.5))
    with numpyro.plate("groups", 3):
        spread = numpyro.sample("spread", dist.LogNormal(log_spread, 0.3))
        effect = numpyro.sample("effect", dist.Normal(level, spread))
    share = numpyro.sample("share", dist.Beta(2, 2))
    with numpyro.plate("rows", len(group)):
        numpyro.sample("seen", dist.Bernoulli(share), obs=seen)
        numpyro.sample("y", dist.Normal(effect[group], 0.5), obs=y)


@pytest.mark.thorough
def test_hyperparameters_that_see_the_field_are_no_observations():
    rng = np.random.default_rng(0)
    group = np.arange(12) % 3
    engine = LaplaceApproximation(_spread_by_group, progress_bar=False)
    engine.run(jax.random.key(0), group, rng.normal(size=12) + group, np.arange(12) % 4 > 0)
    draws = engine.get_samples()
    assert draws["spread"].shape == (1000, 3)
    estimate = engine.hyper["spread"]
    np.testing.assert_allclose(draws["spread"].mean(0), estimate.mean, atol=5 * estimate.sd.max() / np.sqrt(1000))
    assert list(engine.log_predictive()) == ["y"]
    engine.loo()
    predicted = engine.predict(jax.random.key(1), group[:2]).get_samples()
    assert predicted["y"].shape == predicted["seen"].shape == (1000, 2)


@pytest.mark.thorough
def test_hyperparameters_may_have_observations_of_their_own():
    def groups_of_shares(group, y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("groups", 3):
            share = numpyro.sample("share", dist.Beta(9 * jax.nn.sigmoid(mean), 9 * jax.nn.sigmoid(-mean)))
        numpyro.sample("y", dist.Binomial(5, share[group]), obs=y)

    engine = LaplaceApproximation(groups_of_shares, progress_bar=False)
    engine.run(jax.random.key(0), np.arange(12) % 3, np.array([1, 3, 5] * 4))
    assert engine.diagnostics.converged
    # given the mean the shares are beta, and the counts beta-binomial
    mean, counts = np.linspace(-5, 5, 2001)[:, None], np.array([4, 12, 20])
    prior = 9 / (1 + np.exp(-mean)), 9 / (1 + np.exp(mean))
    weight = scipy.stats.norm.pdf(mean[:, 0]) * scipy.stats.betabinom.pmf(counts, 20, *prior).prod(-1)
    exact = weight @ ((prior[0] + counts) / 29) / weight.sum()
    np.testing.assert_allclose(engine.hyper["share"].mean, exact, atol=0.02)
