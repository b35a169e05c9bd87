"""Priors of coefficients that are not Gaussian: integrated over, as quadrature and NUTS say, instead of maximised."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import mask
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

from numpyro_ext.infer import EP, INLA, LaplaceApproximation, VariationalGaussian, cross_validate
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from numpyro_ext.structure.model.verification import check_form
from tests.tiers import few, thorough

PRIORS = {
    "laplace": lambda: dist.Laplace(0, 1),
    "student t": lambda: dist.StudentT(4, 1, 0.5),
    "cauchy": lambda: dist.Cauchy(0, 1),
    "logistic": lambda: dist.Logistic(-1, 1),
    "soft laplace": lambda: dist.SoftLaplace(0, 2),
    "asymmetric laplace": lambda: dist.AsymmetricLaplace(0, 1, 2),
}
SMOOTH = {"logistic", "soft laplace"}
# The rest of the priors differ in their density only.
FEW = ["laplace", "cauchy", *thorough(*(name for name in PRIORS if name not in ("laplace", "cauchy")))]
Y = np.array([1.4, 0.2, 0.9])
GRID = np.linspace(-12.0, 13.0, 20_001)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((15, 2))
BINARY = (X @ [1.5, -0.5] + RNG.logistic(size=15) > 0).astype(int)
GROUP = np.repeat(np.arange(4), 3)
GROUPED = RNG.standard_normal(12) + GROUP


def single(prior, y):
    b = numpyro.sample("b", PRIORS[prior]())
    numpyro.sample("y", dist.Normal(b, 0.7), obs=y)


def logistic(prior, x, y):
    b = numpyro.sample("b", PRIORS[prior]().expand([2]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def groups(prior, y, number=6):
    """Two of the six groups were never seen."""
    a = numpyro.sample("a", prior.expand([number]))
    numpyro.sample("y", dist.StudentT(5, a[GROUP], 1), obs=y)


def run(engine, *args, **options):
    fitted = engine(args[0], progress_bar=False, **options)
    fitted.run(jax.random.key(0), *args[1:])
    return fitted


def moments(grid, log_joint):
    """Log integral, mean and variance of a density on a grid of one or two dimensions, by the trapezoidal rule."""
    step = grid[1] - grid[0]
    weight = np.exp(log_joint - log_joint.max())
    points = np.stack(np.meshgrid(*[grid] * log_joint.ndim, indexing="ij"))
    total = weight.sum() * step**log_joint.ndim
    mean, square = (np.tensordot(power, weight, log_joint.ndim) * step**log_joint.ndim / total
                    for power in (points, points**2))  # fmt: skip
    return log_joint.max() + np.log(total), np.squeeze(mean), np.squeeze(square - mean**2)


@pytest.mark.parametrize("prior", few(PRIORS, 3))
def test_one_coefficient_against_quadrature(prior):
    """All factors but one are Gaussian: matching moments is exact."""
    engine = run(EP, lambda y: single(prior, y), Y)
    likelihood = sum(dist.Normal(GRID, 0.7).log_prob(y) for y in Y)
    log_z, mean, variance = moments(GRID, np.asarray(PRIORS[prior]().log_prob(GRID) + likelihood))
    assert engine.diagnostics.converged and engine.diagnostics.points == ()
    np.testing.assert_allclose(engine.log_evidence, log_z, atol=1e-5)
    np.testing.assert_allclose(engine.posterior["b"].mean, mean, atol=1e-5)
    np.testing.assert_allclose(engine.posterior["b"].variance, variance, rtol=1e-4)


@pytest.fixture(scope="module")
def planes():
    grid = np.linspace(-12.0, 14.0, 521)
    points = np.stack(np.meshgrid(grid, grid, indexing="ij"), axis=-1)
    likelihood = sum(np.asarray(dist.Bernoulli(logits=points @ x).log_prob(y)) for x, y in zip(X, BINARY, strict=True))
    return {
        name: moments(grid, likelihood + np.asarray(make().log_prob(points)).sum(-1)) for name, make in PRIORS.items()
    }


@pytest.mark.thorough
@pytest.mark.parametrize("prior", FEW)
@pytest.mark.parametrize("engine", [EP, VariationalGaussian])
def test_two_coefficients_against_quadrature(prior, engine, planes):
    fitted = run(engine, lambda x, y: logistic(prior, x, y), X, BINARY)
    log_z, mean, variance = planes[prior]
    assert fitted.diagnostics.converged and not fitted.hyper
    deviation = np.sqrt(variance)
    assert np.all(np.abs(fitted.posterior["b"].mean - mean) < 0.06 * deviation)
    # skewed posteriors with heavy tails are wider than the Gaussian
    ratio = np.sqrt(fitted.posterior["b"].variance) / deviation
    assert np.all((ratio > 0.84) & (ratio < 1.01)), ratio
    assert abs(fitted.log_evidence - log_z) < 0.09
    if engine is VariationalGaussian:
        assert fitted.log_evidence.is_lower_bound and fitted.log_evidence < log_z


@pytest.mark.parametrize("prior", sorted(SMOOTH))
def test_laplaces_method_finds_the_mode_and_its_curvature(prior):
    engine = run(LaplaceApproximation, lambda x, y: logistic(prior, x, y), X, BINARY)
    mode = jnp.asarray(engine.posterior["b"].mean)

    def log_joint(b):
        return log_density(lambda: logistic(prior, X, BINARY), (), {}, {"b": b})[0]

    at_mode, slope, curvature = jax.jit(lambda b: (log_joint(b), jax.grad(log_joint)(b), jax.hessian(log_joint)(b)))(
        mode
    )
    np.testing.assert_allclose(slope, 0.0, atol=1e-6)
    precision = -curvature
    np.testing.assert_allclose(engine.posterior["b"].covariance(), np.linalg.inv(precision), rtol=1e-6)
    expected = at_mode + np.log(2.0 * np.pi) - 0.5 * np.linalg.slogdet(precision)[1]
    np.testing.assert_allclose(engine.log_evidence, expected, rtol=1e-8)


@pytest.mark.thorough
def test_laplaces_method_keeps_other_priors_as_points_and_says_so():
    def model(y):
        level = numpyro.sample("level", dist.Normal(0, 5))
        shift = numpyro.sample("shift", dist.StudentT(4, 0, 1))
        numpyro.sample("y", dist.Normal(level + shift * jnp.arange(3), 0.7), obs=y)

    fitted = run(LaplaceApproximation, model, Y, integrate="none")
    assert fitted.diagnostics.points == ("shift",)
    for prior in ("student t", "laplace"):
        with pytest.raises(ModelStructureError, match="EP and VariationalGaussian take"):
            run(LaplaceApproximation, lambda y, prior=prior: single(prior, y), Y)
        reading = read_latent_gaussian(lambda y, prior=prior: single(prior, y), (Y,))
        with pytest.raises(ModelStructureError, match="'b'.*(kink|not log-concave)"):
            LaplaceApproximation(single).algorithm(reading)


@pytest.mark.thorough
def test_the_scale_is_learned_at_the_maximum_of_the_exact_evidence():
    def model(y):
        tau = numpyro.sample("tau", dist.HalfCauchy(1))
        numpyro.sample("y", dist.Normal(numpyro.sample("b", dist.Laplace(0, tau)), 0.7), obs=y)

    engine = run(EP, model, 2.0 * Y, integrate="none")
    likelihood = sum(np.asarray(dist.Normal(GRID, 0.7).log_prob(2.0 * y)) for y in Y)
    scales = engine.hyper["tau"].value * np.exp(np.linspace(-0.3, 0.3, 61))
    values = [
        moments(GRID, likelihood + np.asarray(dist.Laplace(0, tau).log_prob(GRID)))[0]
        + dist.HalfCauchy(1).log_prob(tau)
        for tau in scales
    ]
    best = np.polyfit(np.log(scales), values, 4)
    peaks = np.roots(np.polyder(best))
    peaks = peaks[np.isreal(peaks) & (np.abs(peaks - np.log(engine.hyper["tau"].value)) < 0.3)].real
    assert engine.diagnostics.converged
    np.testing.assert_allclose(np.exp(peaks), engine.hyper["tau"].value, rtol=1e-3)
    assert set(engine.diagnostics.points) == {"tau"}


@pytest.mark.thorough
def test_locations_may_be_other_sites_of_the_field():
    """The centre and the coefficient about it, against quadrature of both."""

    def model(y):
        mu = numpyro.sample("mu", dist.Cauchy(0, 1))
        b = numpyro.sample("b", dist.Laplace(mu, 1))
        numpyro.sample("y", dist.Normal(b, 0.7), obs=y)

    engine = run(EP, model, Y)
    grid = np.linspace(-30.0, 32.0, 1241)
    mu, b = np.meshgrid(grid, grid, indexing="ij")
    log_joint = np.asarray(dist.Cauchy(0, 1).log_prob(mu) + dist.Laplace(mu, 1).log_prob(b))
    log_z, mean, _ = moments(grid, log_joint + sum(np.asarray(dist.Normal(b, 0.7).log_prob(y)) for y in Y))
    assert engine.diagnostics.converged and engine._run.reading.field == ("mu", "b")
    np.testing.assert_allclose(engine.log_evidence, log_z, atol=0.03)
    np.testing.assert_allclose([engine.posterior["mu"].mean, engine.posterior["b"].mean], mean, atol=0.05)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "prior", [dist.Laplace(0, 2), *thorough(dist.StudentT(4, 1, 2), dist.AsymmetricLaplace(1, 2, 2))]
)
def test_groups_without_data_have_the_moments_of_their_prior(prior):
    engine = run(EP, lambda y: groups(prior, y), GROUPED)
    assert engine.diagnostics.converged and engine.diagnostics.num_skipped == 0
    found = engine.posterior["a"]
    np.testing.assert_allclose(found.mean[4:], prior.mean, atol=1e-5)
    np.testing.assert_allclose(found.variance[4:], prior.variance, rtol=1e-5)
    # what integrates to one takes no part in the evidence
    seen = run(EP, lambda y: groups(prior, y, 4), GROUPED)
    np.testing.assert_allclose(engine.log_evidence, seen.log_evidence, atol=1e-6)


@pytest.mark.thorough
def test_a_prior_without_variance_needs_data_for_every_element_under_ep():
    with pytest.raises(ValueError, match="prior of site 'a' has no variance.*VariationalGaussian"):
        run(EP, lambda y: groups(dist.Cauchy(0, 2), y), GROUPED)
    fitted = run(VariationalGaussian, lambda y: groups(dist.Cauchy(0, 2), y), GROUPED)
    assert fitted.diagnostics.converged and np.all(np.isfinite(fitted.posterior["a"].variance))


@pytest.mark.thorough
@pytest.mark.float32
def test_more_coefficients_than_observations():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((6, 9)), float)
    y = 2.0 * x[:, 0] + 0.1 * jnp.arange(6)

    def model(x, y):
        level = numpyro.sample("level", dist.Normal(0, 3))
        b = numpyro.sample("b", dist.Laplace(0, 0.3), sample_shape=(9,))
        numpyro.sample("y", dist.Normal(level + x @ b, 0.3), obs=y)

    bounds = []
    for engine in (EP, VariationalGaussian):
        fitted = run(engine, model, x, y)
        assert fitted.diagnostics.converged and fitted.posterior["b"].variance.dtype == x.dtype
        assert np.argmax(np.abs(fitted.posterior["b"].mean)) == 0
        bounds.append(fitted.log_evidence)
    assert bounds[1] < bounds[0] < bounds[1] + 2.0


@pytest.mark.thorough
def test_a_heavy_tail_far_from_the_data_converges_or_says_that_it_has_not():
    """Prior and datum are sixty scales apart: three modes, of which no Gaussian is a good picture."""

    def model(y):
        b = numpyro.sample("b", dist.StudentT(2, 0, 0.1).expand([2]))
        numpyro.sample("y", dist.StudentT(2, b[0] - b[1], 0.1), obs=y)

    grid = np.linspace(-20.0, 20.0, 2001)
    first, second = np.meshgrid(grid, grid, indexing="ij")
    prior = np.asarray(dist.StudentT(2, 0, 0.1).log_prob(grid))
    exact, _, _ = moments(
        grid, prior + prior[:, None] + np.asarray(dist.StudentT(2, first - second, 0.1).log_prob(6.0))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it has not converged
        fitted = run(EP, model, jnp.array([6.0]))
        assert not fitted.diagnostics.converged or abs(fitted.log_evidence - exact) < 0.5
        bound = run(VariationalGaussian, model, jnp.array([6.0]))
    assert bound.log_evidence.is_lower_bound and exact - 5.0 < bound.log_evidence < exact


def plated(y, tau=1):
    with numpyro.plate("coefficients", 2):
        b = numpyro.sample("b", dist.Laplace(0, tau))
    level = numpyro.sample("level", dist.Normal(0, 3))
    with mask(mask=np.arange(15) != 3):
        numpyro.sample("y", dist.Bernoulli(logits=level + X @ b), obs=y)


@pytest.mark.thorough
def test_results_have_the_site_and_predictions_have_not():
    engine = run(VariationalGaussian, plated, BINARY)
    draws = engine.get_samples()
    assert draws["b"].shape == (1000, 2) and "y" not in draws
    np.testing.assert_allclose(draws["b"].mean(0), engine.posterior["b"].mean, atol=0.15)
    assert set(engine.log_predictive()) == {"y"} and np.sum(engine.log_predictive()["y"] != 0.0) == 1
    assert engine.log_predictive(BINARY)["y"].shape == (15,)
    with pytest.raises(ValueError, match="prior of the field"):
        engine.log_predictive(BINARY, tau=2)
    assert "factor: b (2,) (laplace)" in engine.describe()
    bounded = run(VariationalGaussian, plated, BINARY, bound="jaakkola")
    assert bounded.log_evidence < engine.log_evidence


@pytest.mark.thorough
def test_cross_validation_scores_observations_only():
    def model(x, y, mask=True):
        b = numpyro.sample("b", dist.Logistic(0, 1).expand([2]))
        with numpyro.handlers.mask(mask=mask):
            numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)

    engine = LaplaceApproximation(model, progress_bar=False)
    scores = cross_validate(engine, jax.random.key(0), X, BINARY, num_folds=3)
    assert scores.log_predictive.shape == (1, 15) and np.all(scores.log_predictive < 0.0)
    fold = np.asarray(scores.folds[0]) != 0
    engine.run(jax.random.key(0), X, BINARY, mask=fold)
    np.testing.assert_allclose(scores.log_predictive[0][~fold], engine.log_predictive()["y"][~fold], atol=1e-6)


@pytest.mark.parametrize("prior", FEW)
def test_planted_errors_are_found(prior):
    def model(scale, y):
        site = PRIORS[prior]()
        b = numpyro.sample("b", type(site)(**{n: getattr(site, n) for n in site.arg_constraints} | {"scale": scale}))
        numpyro.sample("y", dist.Normal(b @ jnp.eye(3), 0.7), obs=y)

    scales = np.array([0.5, 1.0, 2.0])
    right = read_latent_gaussian(model, (scales, Y), check=False)
    wrong = [
        read_latent_gaussian(model, args, check=False) for args in ((scales[::-1], Y), (scales, -Y), (2 * scales, Y))
    ]
    for key in jax.random.split(jax.random.key(0), 5):
        check_form(right, key)
        for reading in wrong:
            reading.args = right.args  # what was read is of other arguments than what NumPyro is given
            with pytest.raises(ModelStructureError, match="misread"):
                check_form(reading, key)


def test_sites_that_nothing_depends_on_are_still_left_out():
    def model(y=None):
        level = numpyro.sample("level", dist.Normal(0, 3))
        numpyro.sample("next", dist.StudentT(4, level, 1))
        numpyro.sample("y", dist.Normal(level, 0.7), obs=y)

    reading = read_latent_gaussian(model, (Y,))
    assert (reading.field, reading.predictive) == (("level",), ("next",))


def test_scales_that_depend_on_the_field_leave_it():
    def model(y):
        size = numpyro.sample("size", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Laplace(0, jnp.exp(size)).expand([3]))
        numpyro.sample("y", dist.Normal(b, 0.7), obs=y)

    reading = read_latent_gaussian(model, (Y,))
    assert (reading.field, tuple(reading.hyper)) == (("b",), ("size",))


@pytest.mark.slow
def test_hyperparameters_of_smooth_priors_are_integrated_over():
    def model(y):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        a = numpyro.sample("a", dist.Logistic(0, scale).expand([6]))
        numpyro.sample("y", dist.Normal(a[GROUP], 1), obs=y)

    engine = run(INLA, model, GROUPED)
    mcmc = MCMC(NUTS(model), num_warmup=1000, num_samples=4000, progress_bar=False)
    mcmc.run(jax.random.key(1), GROUPED)
    draws = mcmc.get_samples()["a"][:, :4]  # the others have the curvature of their prior, not its variance
    np.testing.assert_allclose(engine.posterior["a"].mean[:4], draws.mean(0), atol=0.08)
    np.testing.assert_allclose(np.sqrt(engine.posterior["a"].variance)[:4], draws.std(0), rtol=0.12)


@pytest.mark.slow
def test_a_regression_of_all_kinds_against_nuts():
    x = np.random.default_rng(4).standard_normal((60, 6))
    y = np.random.default_rng(5).poisson(np.exp(0.5 + x @ np.array([0.8, 0.0, 0.0, -0.5, 0.1, 0.7])))

    def model(y):
        level = numpyro.sample("level", dist.StudentT(3, 0, 2.5))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("first", 3):
            b = numpyro.sample("b", dist.Laplace(0, 0.3))
        c = numpyro.sample("c", dist.Cauchy(0, 0.5).expand([2]).to_event(1))
        d = numpyro.sample("d", dist.Normal(0, tau))
        numpyro.sample("y", dist.Poisson(jnp.exp(level + x @ jnp.concatenate([b, c, d[None]]))), obs=y)

    mcmc = MCMC(NUTS(model), num_warmup=1000, num_samples=4000, progress_bar=False)
    mcmc.run(jax.random.key(1), y)
    draws = mcmc.get_samples()
    for engine in (EP, VariationalGaussian):
        fitted = run(engine, model, y)
        assert fitted.diagnostics.converged and tuple(fitted.hyper) == ("tau",)
        for name in ("level", "b", "c"):
            deviation = np.asarray(draws[name].std(0))
            gap = np.abs(np.asarray(fitted.posterior[name].mean) - np.asarray(draws[name].mean(0))) / deviation
            assert np.all(gap < 0.12), (name, gap)
            np.testing.assert_allclose(np.sqrt(fitted.posterior[name].variance), deviation, rtol=0.12)


@pytest.mark.thorough
def test_scales_of_a_regression_are_integrated_over():
    """The default priors of many packages: no site is Gaussian, and noise has a posterior."""

    def model(x, y):
        b = numpyro.sample("b", dist.StudentT(3, 0, 2.5).expand([2]))
        noise = numpyro.sample("noise", dist.HalfCauchy(1))
        numpyro.sample("y", dist.Normal(x @ b, noise), obs=y)

    x = np.column_stack([np.ones(12), np.linspace(-1, 1, 12)])
    y = x @ np.array([1.0, -0.5]) + np.array([0.3, -0.5, 0.1, 0.4, -0.2, -0.1] * 2)
    engine = run(EP, model, x, y)
    assert engine.diagnostics.converged and engine.diagnostics.points == ()
    first, second, noise = np.meshgrid(np.linspace(0, 2, 81), np.linspace(-1.7, 0.7, 81), np.geomspace(0.1, 1.5, 80))
    density = dist.StudentT(3, 0, 2.5).log_prob(first) + dist.StudentT(3, 0, 2.5).log_prob(second)
    density += dist.HalfCauchy(1).log_prob(noise) + np.log(noise)
    for row, value in zip(x, y, strict=True):
        density += dist.Normal(row[0] * first + row[1] * second, noise).log_prob(value)
    weights = np.exp(density - density.max())
    mean, second_moment = (np.sum(weights * noise**k) / np.sum(weights) for k in (1, 2))
    np.testing.assert_allclose(engine.hyper["noise"].mean, mean, rtol=0.01)
    np.testing.assert_allclose(engine.hyper["noise"].sd, np.sqrt(second_moment - mean**2), rtol=0.05)
