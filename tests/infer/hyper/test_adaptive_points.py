"""Points that follow a density of hyperparameters, against closed forms and quadrature."""

import itertools
import warnings
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import digamma, gammaln, logsumexp, polygamma
from scipy.stats import chi, halfcauchy, halfnorm, norm

from numpyro_ext.infer import EP
from numpyro_ext.infer.gaussian.integration.judgement import (
    highest_above_mode,
    judge_points,
    judge_ratios,
    judge_spreads,
)
from numpyro_ext.infer.gaussian.integration.mixture_marginals import MarginalMixture
from numpyro_ext.infer.hyper.density.adaptive import follow

KEY = jax.random.key(0)


def test_logs_of_scales_have_their_closed_form():
    """Four independent chi variables, two of them half-normal, by their logarithms: a turned normal knows none."""
    freedom = np.array([1.0, 1.0, 3.0, 8.0])
    mode, sd = 0.5 * np.log(freedom), 1.0 / np.sqrt(2.0 * freedom)
    turn = np.linalg.qr(np.eye(4) + 0.05 * np.random.default_rng(4).normal(size=(4, 4)))[0]

    def log_density(z):
        logs = mode + sd * (z @ turn.T)
        return np.sum(freedom * logs - 0.5 * np.exp(2.0 * logs), axis=1)

    found = follow(log_density, 4)
    exact = np.sum(gammaln(freedom / 2) + (freedom / 2 - 1) * np.log(2.0) - np.log(sd)) - log_density(np.zeros((1, 4)))
    assert abs(found.log_integral - exact[0]) < 0.1 and found.error < 0.1
    for points, weights in ((found.cloud.points, found.cloud.weights), (found.spread, found.spread_weights)):
        values = np.exp(mode + sd * (points @ turn.T))
        mean = weights @ values
        np.testing.assert_allclose((mean - chi.mean(freedom)) / chi.std(freedom), 0.0, atol=0.15)
        np.testing.assert_allclose(np.sqrt(weights @ (values - mean) ** 2), chi.std(freedom), rtol=0.12)
    assert judge_ratios(found.log_ratios) == ()


def test_many_coordinates_keep_masses_on_many_points():
    """Nineteen turned logarithms of chi variables, of which no few points have all means and variances."""
    generator, size = np.random.default_rng(7), 19
    freedom = generator.uniform(5.0, 20.0, size)
    mode, sd = 0.5 * np.log(freedom), 1.0 / np.sqrt(2.0 * freedom)
    turn = np.linalg.qr(generator.normal(size=(size, size)))[0]

    def log_density(z):
        logs = mode + sd * (z @ turn.T)
        return np.sum(freedom * logs - 0.5 * np.exp(2.0 * logs), axis=1)

    found = follow(log_density, size)
    assert 1.0 / np.sum(found.weights**2) > 8.0
    assert np.linalg.norm(found.weights @ found.points - found.cloud.weights @ found.cloud.points) < 0.1 * size**0.5
    mean = found.weights @ (mode + sd * (found.points @ turn.T))
    exact = 0.5 * (digamma(freedom / 2.0) + np.log(2.0))
    np.testing.assert_allclose((mean - exact) / (0.5 * np.sqrt(polygamma(1, freedom / 2.0))), 0.0, atol=0.25)


def test_a_density_that_cannot_be_followed_is_said():
    """Waves that are narrower than the points stand apart."""
    found = follow(lambda z: -0.5 * np.sum(z**2, axis=1) + 4.0 * np.sin(9.0 * z.sum(axis=1)), 3)
    assert "k-hat" in judge_ratios(found.log_ratios)[0]


def test_standard_deviations_are_known_as_well_as_is_said():
    """The error that is said, against how standard deviations by independent points of another draw differ."""
    rng, weights = np.random.default_rng(5), rng_weights(np.random.default_rng(6), 40)

    def mixture(between):
        means = between * rng.standard_t(9.0, (40, 4000))
        return MarginalMixture(weights, means, np.ones_like(means), np.zeros_like(means))

    found = np.sqrt(mixture(3.0).mean_and_variance()[1])
    actual = found.std() / found.mean()
    (message,) = judge_spreads({"told": mixture(3.0)._replace(means=mixture(3.0).means[:, :1]), "near": mixture(0.1)})
    said = 0.01 * float(message.split("'told' (known to ")[1].split(" %")[0])
    assert 0.4 * actual < said < 2.0 * actual and actual > 0.1
    assert "near" not in message and "engine.sample_exactly(key)" in message


def rng_weights(rng, number):
    weights = rng.gamma(2.0, size=number)
    return weights / weights.sum()


def saturation(spend, y=None):
    """A media mix: what is known of base and coefficients rests on how saturated three channels are."""
    base = numpyro.sample("base", dist.Normal(0, 3))
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([3]).to_event(1))
    decay = numpyro.sample("decay", dist.Beta(2, 2).expand([3]).to_event(1))
    gamma = numpyro.sample("gamma", dist.HalfNormal(1).expand([3]).to_event(1))
    weights = decay ** jnp.arange(8)[:, None]
    padded = jnp.concatenate([jnp.zeros((7, 3)), spend])
    carried = sum(w * padded[7 - k : 7 - k + len(spend)] for k, w in enumerate(weights / weights.sum(0)))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(base + carried / (carried + gamma) @ beta, noise), obs=y)


@pytest.mark.thorough
def test_heavy_tails_of_the_field_are_told(capsys):
    """Against chains of 30,000 draws the standard deviation of draws of such a base is 0.77 (benchmarks/results)."""
    rng = np.random.default_rng(13)
    spend = rng.gamma(2.0, 0.5, (104, 3)) * (rng.random((104, 3)) < 0.7)
    y = 2.0 + spend / (spend + [0.5, 1.0, 1.0]) @ [1.0, 1.5, 0.8] + 0.2 * rng.normal(size=104)
    engine = EP(saturation, progress_bar=False)
    engine.run(KEY, spend, y)
    (message,) = engine.diagnostics.messages
    assert "'beta' (known to" in message and "sample_exactly" in message
    engine.print_summary()
    assert message.split(",")[0] in " ".join(capsys.readouterr().out.split())


def test_a_point_above_the_mode_is_said():
    heights = np.array([0.0, -np.inf, np.nan, 0.5])
    assert highest_above_mode(heights) == 3 and highest_above_mode(np.array([0.0, -1.0, 0.05])) is None
    (message,) = judge_points(np.zeros(3), None, ("scale",), 0.5)
    assert "0.5 above the mode" in message and "several modes. Use num_restarts or other init" in message
    assert judge_points(np.zeros(3), None, ("scale",)) == ()


GROUP, OTHER = np.arange(24) % 6, np.arange(24) // 8


def crossed(y):
    """Two scales and noise, of which the data know little."""
    first, second, noise = (numpyro.sample(name, dist.HalfNormal(1)) for name in ("first", "second", "noise"))
    effect = numpyro.sample("effect", dist.Normal(0, first).expand([6]))
    other = numpyro.sample("other", dist.Normal(0, second).expand([3]))
    numpyro.sample("y", dist.Normal(effect[GROUP] + other[OTHER], noise), obs=y)


def quadrature(y):
    """Log evidence, means and sds of the three scales, on a grid of their logarithms."""
    grid = np.linspace(-5.0, 2.0, 36)
    shared = [(index[:, None] == index).astype(float) for index in (GROUP, OTHER)]
    pairs = np.exp(list(itertools.product(grid, repeat=2)))[:, :, None, None]
    rest = pairs[:, 0] ** 2 * shared[1] + pairs[:, 1] ** 2 * np.eye(24)
    log_density = []
    for first in np.exp(grid):
        covariance = first**2 * shared[0] + rest
        value = -0.5 * np.einsum("i,nij,j->n", y, np.linalg.inv(covariance), y) - 12.0 * np.log(2.0 * np.pi)
        value -= 0.5 * np.linalg.slogdet(covariance)[1]
        scales = np.column_stack([np.full(len(pairs), first), pairs[:, :, 0, 0]])
        log_density.append(value + np.sum(halfnorm.logpdf(scales) + np.log(scales), axis=1))
    log_density = np.concatenate(log_density)
    total = logsumexp(log_density)
    weights, scales = np.exp(log_density - total), np.exp(list(itertools.product(grid, repeat=3)))
    mean = weights @ scales
    return total + 3.0 * np.log(grid[1] - grid[0]), mean, np.sqrt(weights @ (scales - mean) ** 2)


@pytest.mark.thorough
def test_three_scales_against_quadrature():
    y = np.random.default_rng(1).normal(size=6)[GROUP] * 0.5 + np.random.default_rng(2).normal(size=24)
    evidence, mean, sd = quadrature(y)
    engine = EP(crossed, progress_bar=False, num_samples=4000)
    engine.run(KEY, y)
    assert engine.diagnostics.converged and abs(engine.log_evidence - evidence) < 0.1
    assert 0.0 < engine.log_evidence.standard_error < 0.1
    draws = engine.get_samples()
    for k, name in enumerate(("first", "second", "noise")):
        site = engine.hyper[name]
        assert abs(float(site.mean) - mean[k]) < 0.15 * sd[k] and abs(draws[name].mean() - mean[k]) < 0.15 * sd[k]
        assert abs(float(site.sd) / sd[k] - 1.0) < 0.12 and abs(draws[name].std() / sd[k] - 1.0) < 0.12
        assert len(np.unique(draws[name])) > 100
        # one posterior, one answer: draws are at 128 points
        assert abs(draws[name].mean() - float(site.mean)) < 0.02 * sd[k]
        assert abs(draws[name].std() / float(site.sd) - 1.0) < 0.02
    assert engine.diagnostics.messages == ()
    ends = engine.hyper["noise"].quantile(np.array([0.1, 0.9]))
    np.testing.assert_allclose(ends, np.quantile(draws["noise"], [0.1, 0.9]), atol=0.2 * sd[2])
    # the same, as if the last points had found a density of half the width, and few of them had mass
    run, explored = engine._run, engine._run.exploration
    followed = explored.followed
    wide = followed.earlier._replace(points=2.0 * followed.earlier.points)
    vars(run).pop("_said_of_spreads")
    vars(run)["exploration"] = explored._replace(followed=followed._replace(earlier=wide))
    assert engine.diagnostics.messages == ()
    vars(run).pop("_said_of_spreads")
    few = followed._replace(earlier=wide, log_ratios=np.where(np.arange(len(followed.log_ratios)) < 12, 0.0, -50.0))
    vars(run)["exploration"] = explored._replace(followed=few)
    said = engine.diagnostics.messages[0]
    assert "last look" in said and "'first' (mean by" in said and "engine.sample_exactly(key)" in said


SIGMA = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])


def run_schools(y, prior_scale, **options):
    """EP on the effects of eight schools; log evidence, and mean and standard deviation of the scale, by quadrature."""

    def schools(y):
        mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(prior_scale))
        theta = numpyro.sample("theta", dist.Normal(mu, tau).expand([8]))
        numpyro.sample("y", dist.Normal(theta, SIGMA), obs=y)

    grid = np.linspace(-8.0, 7.0, 2001)
    covariance = np.diag(SIGMA**2) + np.exp(2.0 * grid)[:, None, None] * np.eye(8) + 25.0
    log_density = -0.5 * np.linalg.slogdet(2.0 * np.pi * covariance)[1] - 0.5 * np.linalg.solve(covariance, y) @ y
    log_density += halfcauchy.logpdf(np.exp(grid), scale=prior_scale) + grid
    total = logsumexp(log_density)
    weights = np.exp(log_density - total)
    mean = weights @ np.exp(grid)
    sd = np.sqrt(weights @ (np.exp(grid) - mean) ** 2)
    engine = EP(schools, progress_bar=False, **options)
    engine.run(KEY, y)
    return engine, (total + np.log(grid[1] - grid[0]), mean, sd)


def fitted_schools(y, prior_scale, sd_tolerance=0.05, **options):
    """EP, which has converged with the scale that quadrature finds; and the log evidence by quadrature."""
    engine, (evidence, mean, sd) = run_schools(y, prior_scale, **options)
    assert engine.diagnostics.converged and engine.diagnostics.messages == ()
    tau = engine.hyper["tau"]
    assert abs(float(tau.mean) - mean) < 0.1 * sd and abs(float(tau.sd) / sd - 1.0) < sd_tolerance
    return engine, evidence


@pytest.mark.thorough
def test_a_normal_approximation_has_the_skewness_of_a_scale():
    fitted_schools(np.array([28.0, 8, -3, 7, -1, 1, 18, 12]), 5.0, integrate="normal")


def squared(y):
    """Data that know the square of a number."""
    m = numpyro.sample("m", dist.Normal(0, 1))
    f = numpyro.sample("f", dist.Normal(m**2, 0.5))
    numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


@pytest.mark.thorough
def test_a_normal_approximation_of_a_density_that_is_none_is_warned_of():
    with pytest.warns(UserWarning, match="density of the hyperparameters is not normal.*integrate='adaptive'"):
        engine = EP(squared, integrate="normal", progress_bar=False)
        engine.run(KEY, np.array(1.5))
    assert not engine.diagnostics.converged


def test_two_modes_that_are_both_integrated_over_are_not_told():
    engine = EP(squared, progress_bar=False)
    engine.run(KEY, np.array(1.5))
    grid = np.linspace(-6.0, 6.0, 4001)
    log_density = norm.logpdf(grid) + norm.logpdf(1.5, grid**2, np.sqrt(0.34))
    np.testing.assert_allclose(engine.log_evidence, logsumexp(log_density) + np.log(grid[1] - grid[0]), atol=1e-3)
    assert engine.diagnostics.messages == ()


@pytest.mark.thorough
def test_two_modes_of_opposite_sign_are_told():
    """The data know the square of a number: the evidence of one mode lacks log 2, by quadrature."""

    def squared(y):
        m = numpyro.sample("m", dist.Normal(0, 2))
        f = numpyro.sample("f", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(m**2 + f, 0.5), obs=y)

    y = np.full(6, 4.0)
    with pytest.warns(UserWarning, match="two modes: with the opposite sign of 'm'.* of two modes alike"):
        engine = EP(squared, progress_bar=False, init_values={"m": 1.5})
        engine.run(KEY, y)
    grid = np.linspace(-8.0, 8.0, 4001)
    covariance = np.ones((6, 6)) + 0.25 * np.eye(6)
    rest = y[:, None] - grid**2
    log_density = -0.5 * np.sum(rest * np.linalg.solve(covariance, rest), axis=0) + norm.logpdf(grid, scale=2.0)
    log_density -= 0.5 * np.linalg.slogdet(2.0 * np.pi * covariance)[1]
    evidence = logsumexp(log_density) + np.log(grid[1] - grid[0])
    np.testing.assert_allclose(engine.log_evidence + np.log(2.0), evidence, atol=0.03)
    told = engine.diagnostics.messages[-1].split("it would be ")[1].split(". A")[0]
    assert abs(float(told) - evidence) < 0.03

    def signed(y):
        m = numpyro.sample("m", dist.HalfNormal(2))
        f = numpyro.sample("f", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(m**2 + f, 0.5), obs=y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EP(signed, progress_bar=False).run(KEY, y)


def test_single_precision_follows_as_double():
    found = [follow(lambda z, t=t: np.asarray(-0.5 * np.sum(z**2, axis=1), t), 3) for t in (np.float32, np.float64)]
    np.testing.assert_allclose(found[0].log_integral, found[1].log_integral, atol=0.02)
    np.testing.assert_allclose(found[0].log_integral, 1.5 * np.log(2.0 * np.pi), atol=0.03)
    assert jnp.isfinite(found[0].error)


@pytest.mark.thorough
def test_a_search_goes_on_from_a_point_above_its_mode():
    """The search ends in the lower of two modes, at a scale near zero; a point of the lattice is above it."""
    engine, evidence = fitted_schools(np.array([28.0, 8, -3, 7, -1, 1, 18, 120]), 1.0)
    assert abs(engine.log_evidence - evidence) < 0.05


@pytest.mark.thorough
@pytest.mark.parametrize(("last", "prior_scale", "is_told"), [(120.0, 1.0, False), (400.0, 0.1, True)])
def test_a_search_goes_on_from_a_point_that_is_none_of_the_design(last, prior_scale, is_told):
    """A probe on an axis, or a look further out, is above the lower of two modes, and no point of the design is."""
    y = np.array([28.0, 8, -3, 7, -1, 1, 18, last])
    with pytest.warns(UserWarning, match="deviation of 'tau'") if is_told else nullcontext():
        engine, (evidence, _, sd) = run_schools(y, prior_scale, integrate="ccd")
    assert engine.diagnostics.converged is not is_told
    assert abs(engine.log_evidence - evidence) < 0.05
    # half normal densities on each side of the mode are not quite the shape of this one: 0.86 and, told, 0.84
    np.testing.assert_allclose(engine.hyper["tau"].sd, sd, rtol=0.2)


@pytest.mark.thorough
@pytest.mark.parametrize("integrate", ["normal", "ccd"])
def test_a_density_with_mass_far_from_its_mode_is_warned_of(integrate):
    y = np.array([28.0, 8, -3, 7, -1, 1, 18, 60])
    with pytest.warns(UserWarning, match="goes on far from its mode.*'tau'.*integrate='adaptive'"):
        engine, (_, _, sd) = run_schools(y, 0.1, integrate=integrate)
    assert not engine.diagnostics.converged
    assert float(engine.hyper["tau"].sd) < 0.5 * sd  # which would have been told as converged
    fitted_schools(y, 0.1)


@pytest.mark.thorough
def test_mass_among_the_outermost_points_of_a_design_is_warned_of():
    """A shoulder of the density ends before the look far out, and one point of 64 stands for it."""
    y = np.array([28.0, 8, -3, 7, -1, 1, 18, 80])
    with pytest.warns(UserWarning, match="goes on far from its mode.*'tau'.*integrate='adaptive'"):
        engine, (_, mean, _) = run_schools(y, 1.0, integrate="normal")
    assert not engine.diagnostics.converged
    assert float(engine.hyper["tau"].mean) < 0.75 * mean  # which would have been told as converged
    fitted_schools(y, 1.0, sd_tolerance=0.12)
