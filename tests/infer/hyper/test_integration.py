"""Integration over hyperparameters by every engine on Gaussian fields, against quadrature where the field is exact."""

import re
import warnings
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import Predictive
from numpyro.infer.reparam import LocScaleReparam
from scipy.special import logsumexp
from scipy.stats import halfnorm, multivariate_normal, norm

from numpyro_ext.infer import EP, INLA, LaplaceApproximation, VariationalGaussian, cross_validate
from numpyro_ext.infer.gaussian.integration import exploration
from numpyro_ext.infer.gaussian.integration.interpolation import interpolated
from numpyro_ext.structure import ModelStructureError
from tests.readings import with_fit_costs
from tests.tiers import thorough

KEY = jax.random.key(0)
ENGINES = [EP, VariationalGaussian, LaplaceApproximation]
GROUP = np.arange(24) % 6
Y = np.array([0.9, -0.4, 1.6, 0.1, -1.1, 0.5])[GROUP] + 0.6 * np.sin(5.0 * np.arange(24))


def groups(y, group=GROUP):
    spread = numpyro.sample("spread", dist.HalfNormal(2))
    with numpyro.plate("groups", 6):
        effect = numpyro.sample("effect", dist.Normal(0, spread))
    numpyro.deterministic("difference", effect[0] - effect[1])
    numpyro.sample("y", dist.Normal(effect[group], 0.6), obs=y)


def counts(y):
    spread = numpyro.sample("spread", dist.HalfNormal(2))
    effect = numpyro.sample("effect", dist.Normal(0, spread).expand([6]))
    numpyro.sample("y", dist.Poisson(jnp.exp(effect[GROUP])), obs=y)


def masked(y, mask=True):
    spread = numpyro.sample("spread", dist.HalfNormal(2))
    effect = numpyro.sample("effect", dist.Normal(0, spread).expand([6]))
    with numpyro.handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(effect[GROUP], 0.6), obs=y)


def run(engine, model, *args, **options):
    engine = engine(model, progress_bar=False, **options)
    engine.run(KEY, *args)
    return engine


@pytest.fixture(scope="module")
def exact():
    """Evidence and moments by quadrature over the log of the scale."""
    values = np.linspace(-6.0, 4.0, 2001)
    spread, same = np.exp(values), GROUP[:, None] == GROUP
    log_density = np.array(
        [multivariate_normal.logpdf(Y, np.zeros(24), s**2 * same + 0.36 * np.eye(24)) for s in spread]
    )
    log_density += halfnorm.logpdf(spread, scale=2.0) + values
    weights = np.exp(log_density - logsumexp(log_density))
    total = np.bincount(GROUP, Y)
    precision = 4 / 0.36 + 1 / spread**2
    mean = (total / 0.36) / precision[:, None]
    average = weights @ mean
    variance = weights @ (1 / precision[:, None] + (mean - average) ** 2)
    evidence = logsumexp(log_density) + np.log(values[1] - values[0])
    spread_mean = weights @ spread
    return evidence, average, np.sqrt(variance), spread_mean, np.sqrt(weights @ (spread - spread_mean) ** 2)


@pytest.mark.thorough
@pytest.mark.float32
@pytest.mark.parametrize("engine", [ENGINES[0], *thorough(*ENGINES[1:])])
def test_a_grid_is_quadrature(engine, exact):
    evidence, mean, sd, spread, spread_sd = exact
    fitted = run(engine, groups, Y, integrate="grid", num_samples=4000)
    np.testing.assert_allclose(fitted.log_evidence, evidence, atol=3e-3)
    np.testing.assert_allclose(fitted.posterior["effect"].mean, mean, atol=2e-3)
    np.testing.assert_allclose(fitted.posterior["effect"].sd, sd, rtol=3e-3)
    np.testing.assert_allclose(fitted.hyper["spread"].value, spread, rtol=5e-3)
    np.testing.assert_allclose(fitted.hyper["spread"].standard_error, spread_sd, rtol=0.03)
    assert fitted.log_evidence.hyperparameters == "integrated" and not fitted.log_evidence.is_lower_bound
    assert fitted.diagnostics.points == () and fitted.diagnostics.converged
    draws = fitted.get_samples()
    np.testing.assert_allclose(draws["effect"].mean(0), mean, atol=5 * np.max(sd) / np.sqrt(4000))
    np.testing.assert_allclose(draws["spread"].std(), spread_sd, rtol=0.1)
    np.testing.assert_allclose(draws["difference"], draws["effect"][:, 0] - draws["effect"][:, 1], rtol=1e-5)


def _tells_what_few_points_miss(integrate):
    """A composite design has three points and 0.84 of the standard deviation of this scale, which it says."""
    return pytest.warns(UserWarning, match="'spread' .* times as large") if integrate == "ccd" else nullcontext()


@pytest.mark.thorough
@pytest.mark.parametrize("integrate", [*thorough("grid"), "ccd"])
def test_draws_of_hyperparameters_are_of_their_density(integrate):
    """Not of the points of the design: quantiles of draws are those of the density, by quadrature."""
    values = np.linspace(-6.0, 4.0, 2001)
    spread, same = np.exp(values), GROUP[:, None] == GROUP
    log_density = [multivariate_normal.logpdf(Y, np.zeros(24), s**2 * same + 0.36 * np.eye(24)) for s in spread]
    log_density = np.array(log_density) + halfnorm.logpdf(spread, scale=2.0) + values
    cdf = np.cumsum(np.exp(log_density - logsumexp(log_density)))
    q = np.array([0.03, 0.25, 0.5, 0.75, 0.97])
    with _tells_what_few_points_miss(integrate):
        draws = run(LaplaceApproximation, groups, Y, integrate=integrate, num_samples=2000).get_samples()
    # In probabilities, whose error for 64 even points is about 0.01; a lattice tells the density between them.
    found = np.interp(np.quantile(np.asarray(draws["spread"]), q), spread, cdf)
    np.testing.assert_allclose(found, q, atol=0.02 if integrate == "ccd" else 0.01)
    assert len(np.unique(draws["spread"])) > (50 if integrate == "ccd" else 600)
    # The field follows its own scale.
    wide = draws["spread"] > np.median(draws["spread"])
    assert np.mean(draws["effect"][wide] ** 2) > 1.02 * np.mean(draws["effect"][~wide] ** 2)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_between_the_points_of_a_lattice_states_are_those_of_fits(engine, monkeypatch):
    fitted = run(engine, counts, np.array([3, 0, 5, 2, 1, 2])[GROUP] + np.arange(24) % 3, num_samples=10)._run
    around, found = fitted._surroundings, fitted.exploration
    points = np.linspace(-2.6, 2.6, 12)[:, None]
    nearest = np.argmin(np.abs(points - found.points.T), axis=1)
    states = jax.tree.map(lambda leaf: leaf[nearest], found.fits.state)
    between, there = interpolated(around, found, points, states), around.fits(points, states, 1e-8)
    np.testing.assert_allclose(between.objective, there.objective, atol=0.02)
    np.testing.assert_allclose(between.hyper["spread"], there.hyper["spread"], rtol=1e-12)
    for k in range(len(points)):
        hyper, state = jax.tree.map(lambda leaf, k=k: leaf[k], (between.hyper, between.state))
        mean, variance = fitted.programs.moments(fitted.reading.data, hyper, state)["effect"]
        exact = there.marginals["effect"]
        np.testing.assert_allclose((mean - exact.mean[k]) / np.sqrt(exact.variance[k]), 0.0, atol=0.02)
        np.testing.assert_allclose(variance, exact.variance[k], rtol=0.02)
        assert np.max(np.abs(found.fits.marginals["effect"].mean[nearest[k]] - mean)) > 1e-4  # of another point

    # A point far beyond its ends is known once it is fitted, and the others are compared again.
    far, calls, fits = np.concatenate([points[:-1], [[-9.0]]]), [], type(around).fits
    monkeypatch.setattr(type(around), "fits", lambda self, *a, **k: calls.append(len(a[0])) or fits(self, *a, **k))
    between, exact = interpolated(around, found, far, states), fits(around, far, states, 1e-8)
    assert calls == [5, 5]
    np.testing.assert_allclose(between.objective, exact.objective, atol=0.02)

    # A lattice whose process is not that of the fits is told from one whose is.
    bent = found._replace(fits=found.fits._replace(objective=np.abs(found.points[:, 0])))
    assert interpolated(around, bent, points, states) is None
    effect = found.fits.marginals["effect"]
    moved = effect._replace(mean=effect.mean + 0.05 * np.sign(found.points) * np.sqrt(effect.variance))
    moved = found._replace(fits=found.fits._replace(marginals={**found.fits.marginals, "effect": moved}))
    assert interpolated(around, moved, points, states) is None


@pytest.mark.thorough
@pytest.mark.parametrize("integrate, tolerance", [("ccd", 0.01), ("normal", 0.02)])
def test_designs_come_close(exact, integrate, tolerance):
    """The density of the scale is skewed, which a normal approximation does not know."""
    evidence, mean, sd, _, spread_sd = exact
    with _tells_what_few_points_miss(integrate):
        fitted = run(LaplaceApproximation, groups, Y, integrate=integrate)
    at_optimum = run(LaplaceApproximation, groups, Y, integrate="none")
    np.testing.assert_allclose(fitted.log_evidence, evidence, atol=3 * tolerance)
    np.testing.assert_allclose(fitted.posterior["effect"].mean, mean, atol=tolerance)
    np.testing.assert_allclose(fitted.posterior["effect"].sd, sd, rtol=2 * tolerance)
    np.testing.assert_allclose(fitted.hyper["spread"].standard_error, spread_sd, rtol=0.2)
    # What the optimum gives is another thing.
    assert at_optimum.log_evidence.hyperparameters == "optimum"
    assert at_optimum.log_evidence - evidence > 0.5 and np.ptp(at_optimum.get_samples()["spread"]) == 0.0


@pytest.mark.thorough
def test_auto_chooses_by_the_number_of_hyperparameters(exact):
    automatic = run(LaplaceApproximation, groups, Y)
    grid = run(LaplaceApproximation, groups, Y, integrate="grid")
    assert float(automatic.log_evidence) == float(grid.log_evidence)
    names = [exploration.Integration("auto").design(size, 100) for size in (1, 2, 3, 20, 21)]
    assert names == ["grid", "grid", "adaptive", "adaptive", "normal"]
    names = [exploration.Integration("auto").design(size, exploration.MANY_ROWS + 1) for size in (1, 2)]
    assert names == ["grid", "ccd"]


@pytest.mark.thorough
def test_a_scale_without_data_behind_it_keeps_its_group():
    """At the optimum the scale is zero and takes the effects with it; over its posterior they vary."""
    y = 0.6 * np.sin(5.0 * np.arange(24))  # no difference between the groups
    with pytest.warns(UserWarning, match="'spread' ended at the edge"):
        at_optimum = run(EP, groups, y, integrate="none")
    integrated = run(EP, groups, y, integrate="auto")
    assert float(at_optimum.posterior["effect"].sd[0]) < 0.01
    assert float(integrated.posterior["effect"].sd[0]) > 0.05
    assert integrated.diagnostics.edges == ()


@pytest.mark.parametrize("engine", thorough(*ENGINES))
def test_params_stay_at_their_optimum(engine):
    def model(y):
        level = numpyro.param("level", 0)
        spread = numpyro.sample("spread", dist.HalfNormal(2))
        effect = numpyro.sample("effect", dist.Normal(0, spread).expand([6]))
        numpyro.sample("y", dist.Normal(level + effect[GROUP], 0.6), obs=y)

    fitted = run(engine, model, Y, integrate="grid")
    level = float(fitted.hyper["level"].value)
    given = run(engine, model, Y, integrate="grid", hyper_values={"level": level})
    # Given the param site, the others are integrated over as if its value were known.
    np.testing.assert_allclose(fitted.log_evidence, given.log_evidence, atol=2e-3)
    np.testing.assert_allclose(fitted.posterior["effect"].sd, given.posterior["effect"].sd, rtol=2e-3)
    assert np.ptp(fitted.get_samples()["level"]) == 0.0 and fitted.get_samples()["spread"].std() > 0.1


@pytest.mark.thorough
@pytest.mark.parametrize("integrate", ["normal", "auto"])
def test_many_hyperparameters_are_normal(integrate):
    """Fields that are flat in their hyperparameters: these have their own normal density, which is what comes back.

    The answers of ``auto`` are of weighted draws, of which a standard deviation is known to one in ``sqrt(2 n)``.
    """

    def model(y):
        shift = numpyro.sample("shift", dist.StudentT(10000, 0, 1).expand([8]))
        level = numpyro.sample("level", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(level + jnp.tile(jnp.arange(8) / 8 * shift, 2), 0.7), obs=y)

    y = np.linspace(-1.0, 1.5, 16)
    fitted = run(LaplaceApproximation, model, y, integrate=integrate, num_samples=4000)
    design, noise = np.column_stack([np.ones(16), np.tile(np.diag(np.arange(8) / 8), (2, 1))]), 0.49 * np.eye(16)
    covariance = np.linalg.inv(design.T @ np.linalg.solve(noise, design) + np.eye(9))
    rtol = 0.01
    if integrate == "auto":
        rtol = 3.5 / np.sqrt(2.0 / np.sum(np.square(fitted.hyper["shift"].weights)))
        assert rtol < 0.06
    np.testing.assert_allclose(fitted.posterior["level"].sd, np.sqrt(covariance[0, 0]), rtol=rtol)
    np.testing.assert_allclose(fitted.hyper["shift"].standard_error, np.sqrt(np.diag(covariance))[1:], rtol=rtol)
    marginal = multivariate_normal.logpdf(y, np.zeros(16), design @ design.T + noise)
    np.testing.assert_allclose(fitted.log_evidence, marginal, atol=0.02)


@pytest.mark.thorough
def test_answers_of_an_integrated_run(tmp_path, capsys, exact):
    fitted = run(EP, groups, Y, integrate="grid", num_samples=500)
    fitted.print_summary()
    assert "integrated over hyperparameters: a lattice of " in capsys.readouterr().out
    fitted.save(tmp_path / "run.npz")
    loaded = EP.load(tmp_path / "run.npz", groups)
    assert loaded.integrate == "grid" and float(loaded.log_evidence) == pytest.approx(float(fitted.log_evidence))
    np.testing.assert_allclose(loaded.posterior["effect"].sd, fitted.posterior["effect"].sd, rtol=1e-9)
    data = fitted.to_arviz()
    assert float(data["posterior"]["spread"].std()) > 0.1
    predicted = Predictive(groups, fitted.get_samples())(jax.random.key(1), None)["y"]
    assert predicted.shape == (500, 24)
    many = EP(groups, integrate="grid", progress_bar=False).run_many(KEY, [Y, Y[::-1].copy()])
    np.testing.assert_allclose(many.log_evidence[0], fitted.log_evidence, rtol=1e-8)
    _, mean, sd, _, _ = exact
    covariance = fitted.posterior["effect"].covariance()
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), sd, rtol=3e-3)


@pytest.mark.thorough
def test_predictions_are_mixtures():
    mask = GROUP != 5
    fitted = run(LaplaceApproximation, masked, Y, mask, integrate="grid")
    scores = fitted.log_predictive()["y"]
    spread = np.asarray(fitted.hyper["spread"].values)
    weights = fitted.hyper["spread"].weights
    expected = np.log(norm.pdf(Y[:, None], 0.0, np.sqrt(spread**2 + 0.36)) @ weights)
    np.testing.assert_allclose(scores[~mask], expected[~mask], rtol=1e-6)
    assert np.all(scores[mask] == 0.0)


@pytest.mark.thorough
def test_cross_validation_is_at_the_optimum():
    scores = [
        cross_validate(
            LaplaceApproximation(masked, integrate=integrate, progress_bar=False), KEY, Y, num_folds=3
        ).log_predictive
        for integrate in ("none", "grid")
    ]
    np.testing.assert_array_equal(*scores)


@pytest.mark.thorough
def test_what_cannot_be_integrated_is_said(monkeypatch):
    with pytest.raises(ValueError, match="one of 'auto', 'none', 'normal', 'grid', 'ccd', 'adaptive'"):
        EP(groups, integrate="lattice")

    def five(y):
        spread = numpyro.sample("spread", dist.HalfNormal(2).expand([5]).to_event(1))
        effect = numpyro.sample("effect", dist.Normal(0, spread).to_event(1))
        numpyro.sample("y", dist.Normal(effect[GROUP % 5], 0.6), obs=y)

    with pytest.raises(ModelStructureError, match=r"'grid' takes up to 4 .* has 5: 'spread' \(5\). Use .*'normal'"):
        run(EP, five, Y, integrate="grid")

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("numpyro_ext.infer.gaussian.runs.integrated_run.explore", interrupt)
    with pytest.warns(UserWarning, match="Interrupted: .* not integrated over"):
        fitted = run(EP, groups, Y, integrate="grid")
    assert fitted.posterior["effect"].mean.shape == (6,) and fitted.diagnostics.points == ("spread",)
    assert fitted.log_evidence.hyperparameters == "optimum"


@pytest.mark.thorough
def test_an_evidence_that_did_not_settle_outweighs_nothing(monkeypatch, exact):
    # As that of EP where its iteration does not converge: 4000 above the mode, two standard deviations away from it.
    fits = exploration.Surroundings.fits

    def fits_with_a_peak(self, points, *args, **options):
        found, is_there = fits(self, points, *args, **options), points[:, 0] < -1.9
        objective = np.where(is_there, found.objective + 4000.0, found.objective)
        return found._replace(objective=objective, converged=found.converged & ~is_there)

    monkeypatch.setattr(exploration.Surroundings, "fits", fits_with_a_peak)
    with pytest.warns(UserWarning, match="did not converge and larger than at the mode; they are left out"):
        fitted = run(EP, groups, Y, integrate="grid")
    evidence, mean, sd, *_ = exact
    np.testing.assert_allclose(fitted.log_evidence, evidence, atol=0.2)
    np.testing.assert_allclose(fitted.posterior["effect"].mean, mean, atol=0.1 * np.max(sd))


@pytest.mark.parametrize(("end", "is_said"), [(-1.9, False), (-0.9, True)])
def test_fits_that_did_not_end_are_told_where_they_have_mass(monkeypatch, end, is_said):
    # Below -1.9 deviations of the log of the scale there is less than a hundredth.
    fits = exploration.Surroundings.fits

    def unfinished_fits(self, points, *args, **options):
        found = fits(self, points, *args, **options)
        return found._replace(converged=found.converged & (points[:, 0] > end))

    monkeypatch.setattr(exploration.Surroundings, "fits", unfinished_fits)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(EP, groups, Y, integrate="grid")
    said = [str(w.message) for w in caught]
    assert len(said) == is_said
    if is_said:
        assert re.search(r"At \d+ of \d+ points, which have [\d.]+ % of the mass, the field did not converge", said[0])


@pytest.mark.thorough
def test_outliers_by_a_mixture_come_close_to_nuts():
    # EP does not converge where the noise is small, and its evidence may be any number there.
    rng = np.random.default_rng(0)
    x, is_outlier, noise = rng.normal(size=60), rng.random(60) < 0.1, rng.normal(size=(2, 60))
    effect = 0.5 * rng.normal(size=12)[np.repeat(np.arange(12), 5)]
    y = np.where(is_outlier, 10.0 * noise[0], 0.5 * x + effect + 0.4 * noise[1])

    def robust(y):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        scale, spread = (numpyro.sample(name, dist.HalfNormal(1)) for name in ("scale", "spread"))
        with numpyro.plate("groups", 12):
            effect = numpyro.sample("effect", dist.Normal(0, spread))
        parts = [dist.Normal(slope * x + jnp.repeat(effect, 5), scale), dist.Normal(jnp.zeros(60), 10)]
        numpyro.sample("y", dist.MixtureGeneral(dist.Categorical(probs=jnp.array([0.9, 0.1])), parts), obs=y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = run(EP, robust, y, num_samples=4000).get_samples()
    mcmc = numpyro.infer.MCMC(numpyro.infer.NUTS(robust), num_warmup=1000, num_samples=4000, progress_bar=False)
    mcmc.run(KEY, y)
    for name in ("slope", "scale", "spread"):
        draws = mcmc.get_samples()[name]
        np.testing.assert_allclose(found[name].mean(), draws.mean(), atol=0.25 * draws.std())
        np.testing.assert_allclose(found[name].std(), draws.std(), rtol=0.2)


def test_a_lattice_that_is_cut_is_said():
    with pytest.warns(UserWarning, match=r"\('spread'\) does not fall off within 3 points .* cut .* fallen by 0 in"):
        fitted = run(with_fit_costs(EP, most_points=3), groups, Y, integrate="grid")
    assert not fitted.diagnostics.converged


def one_each(y):
    """Of two scales the data know the sum of squares alone."""
    noise, spread = (numpyro.sample(name, dist.HalfNormal(2)) for name in ("noise", "spread"))
    effect = numpyro.sample("effect", dist.Normal(0, spread).expand([len(y)]))
    numpyro.sample("y", dist.Normal(effect, noise), obs=y)


@pytest.mark.thorough
def test_scales_of_which_the_data_know_one_sum_are_followed_into_both_arms():
    y = np.sqrt(2.0) * norm.ppf((np.arange(60) + 0.5) / 60)
    values = np.linspace(2e-3, 6.0, 1500)
    variance = values[:, None] ** 2 + values**2
    log_density = norm.logpdf(y).size * -0.5 * np.log(2.0 * np.pi * variance) - 0.5 * np.sum(y**2) / variance
    log_density += halfnorm.logpdf(values, scale=2.0)[:, None] + halfnorm.logpdf(values, scale=2.0)
    masses = np.exp(log_density - log_density.max())
    evidence = np.log(masses.sum()) + log_density.max() + 2.0 * np.log(values[1] - values[0])
    distribution = np.cumsum(masses.sum(1)) / masses.sum()
    probabilities = np.array([0.1, 0.5, 0.9])
    exact = np.interp(probabilities, distribution, values)

    fitted = run(EP, one_each, y, integrate="grid", num_samples=4000)
    assert fitted.diagnostics.converged
    np.testing.assert_allclose(fitted.log_evidence, evidence, atol=0.02)
    draws = fitted.get_samples()
    for name in ("noise", "spread"):
        np.testing.assert_allclose(fitted.hyper[name].mean, np.diff(distribution, prepend=0.0) @ values, rtol=0.01)
        for found in (np.quantile(draws[name], probabilities), fitted.hyper[name].quantile(probabilities)):
            # in probability: by 64 points, and by some fifty
            np.testing.assert_allclose(np.interp(found, values, distribution), probabilities, atol=0.06)
    assert exact[0] < 0.25

    with pytest.warns(UserWarning, match=r"\('noise', 'spread'\) falls off on both sides .* faster than its curvature"):
        fitted = run(EP, one_each, y, integrate="ccd")
    assert not fitted.diagnostics.converged


def alike(y):
    scale, correlation = numpyro.sample("scale", dist.Uniform(0, 10)), numpyro.sample("correlation", dist.Beta(2, 2))
    covariance = scale**2 * ((1 - correlation) * jnp.eye(len(y)) + correlation)
    effect = numpyro.sample("effect", dist.MultivariateNormal(0.0, covariance))
    numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


def one_scale(y):
    scale = numpyro.sample("scale", dist.Uniform(0, 10))
    effect = numpyro.sample("effect", dist.Normal(0, scale).expand([len(y)]))
    numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [EP, *thorough(INLA)])
@pytest.mark.parametrize("model", [one_scale, *thorough(alike)])
def test_quantiles_of_skewed_hyperparameters_on_a_lattice(model, engine):
    """Lattices of some ten points, whose masses stand on each other's places along one hyperparameter; and a scale that
    may be zero, whose log is more skewed than a skew normal."""
    y = np.array([1.6, -0.3, 2.1, 0.4, 1.2, -0.9]) * (1.3 if model is alike else 1.0)
    variances, correlations = np.linspace(0.02, 9.98, 250) ** 2, np.linspace(0.005, 0.995, 100)
    if model is one_scale:
        correlations = np.zeros(1)
    shared = 6.0 * variances[:, None] * correlations
    own = 1.0 + variances[:, None] * (1.0 - correlations)
    log_density = -0.5 * (5.0 * np.log(own) + np.log(own + shared))
    log_density -= 0.5 * (np.sum((y - y.mean()) ** 2) / own + 6.0 * y.mean() ** 2 / (own + shared))
    if model is alike:
        log_density += np.log(correlations * (1.0 - correlations))
    masses = np.exp(log_density - log_density.max())
    probabilities = np.array([0.025, 0.1, 0.5, 0.9, 0.975])
    fitted = run(engine, model, y)
    for name, values, mass in zip(
        ("scale", "correlation"), (np.sqrt(variances), correlations), (masses.sum(1), masses.sum(0)), strict=True
    ):
        if name in fitted.hyper:
            distribution = (np.cumsum(mass) - 0.5 * mass) / mass.sum()
            found = np.interp(fitted.hyper[name].quantile(probabilities), values, distribution)
            np.testing.assert_allclose(found, probabilities, atol=0.025)


def test_a_density_that_does_not_curve_is_said(monkeypatch):
    def no_design(*args, **kwargs):
        raise exploration.NoDesign("there is no curvature")

    monkeypatch.setattr("numpyro_ext.infer.gaussian.runs.integrated_run.explore", no_design)
    with pytest.raises(RuntimeError, match="LaplaceApproximation integrates .* but there is no curvature. Give"):
        run(LaplaceApproximation, groups, Y, integrate="ccd")
    with pytest.warns(UserWarning, match="at their mode and not integrated over: there is no curvature"):
        fitted = run(LaplaceApproximation, groups, Y, integrate="auto")
    assert any("not integrated" in message for message in fitted.diagnostics.messages)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:LaplaceApproximation did not converge")
def test_directions_without_curvature_stay_at_the_mode():
    """Of two numbers the data know the product: the density of the pair is a ridge."""

    def model(y):
        shares = numpyro.sample("shares", dist.ImproperUniform(dist.constraints.real, (), (2,)))
        spread = numpyro.sample("spread", dist.HalfNormal(2))
        effect = numpyro.sample("effect", dist.Normal(0, spread).expand([6]))
        numpyro.factor("held", -20.0 * (shares[0] * shares[1] - 1.0) ** 2)
        numpyro.sample("y", dist.Normal(effect[GROUP], 0.6), obs=y)

    said = "Along 1 of 3 directions the density of the hyperparameters does not curve: .* take `BilinearVG`"
    with pytest.warns(UserWarning, match=said):
        fitted = run(LaplaceApproximation, model, Y, integrate="auto", init_values={"shares": [1, 1]})
    reference = run(LaplaceApproximation, groups, Y, integrate="auto")
    np.testing.assert_allclose(fitted.posterior["effect"].sd, reference.posterior["effect"].sd, rtol=0.01)
    shares = fitted.get_samples()["shares"]
    assert np.std(shares.sum(1)) > 0.1 and np.std(shares[:, 0] - shares[:, 1]) < 1e-6
    with pytest.raises(RuntimeError, match="does not curve downwards in every direction"):
        run(LaplaceApproximation, model, Y, integrate="grid", init_values={"shares": [1, 1]})


@pytest.mark.thorough
def test_a_param_that_changes_nothing_takes_no_variance_of_others(exact):
    """How far an effect is centred, as a reparameterisation learns it, is nothing that exact evidences depend on."""
    learned = numpyro.handlers.reparam(groups, config={"effect": LocScaleReparam()})
    engine = run(LaplaceApproximation, learned, Y)
    assert engine.diagnostics.converged and "effect_centered" in engine.hyper
    np.testing.assert_allclose(engine.log_evidence, exact[0], atol=0.02)
    np.testing.assert_allclose(engine.get_samples()["spread"].std(), exact[-1], rtol=0.2)


def test_nothing_to_integrate_over_changes_nothing():
    given = {"hyper_values": {"spread": 1}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted, plain = (run(EP, groups, Y, integrate=how, **given) for how in ("auto", "none"))
    assert float(fitted.log_evidence) == float(plain.log_evidence)
    assert fitted.log_evidence.hyperparameters == "none"


@pytest.mark.thorough
def test_draws_of_sites_without_elements():
    def model(y):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        shift = numpyro.sample("shift", dist.Normal(0.0, scale).expand([5]))
        numpyro.sample("none", dist.Normal(0.0, scale).expand([0]))
        numpyro.sample("y", dist.Poisson(jnp.exp(1.0 + shift)), obs=y)

    engine = EP(model, num_samples=7, progress_bar=False)
    engine.run(KEY, jnp.array([3, 1, 2, 6, 4]))
    assert {name: draws.shape for name, draws in engine.get_samples().items()} == {
        "scale": (7,),
        "shift": (7, 5),
        "none": (7, 0),
    }
