"""Leave-one-out scores from cavities: against algebra, quadrature, and fits without the observation."""

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, norm, poisson

from numpyro_ext.infer import EP, INLA, LaplaceApproximation, VariationalGaussian, cross_validate, predictive_moments
from numpyro_ext.infer.gaussian.answers.leave_one_out import most_influential
from tests.tiers import few, thorough

KEY = jax.random.key(0)
X = np.linspace(-1.0, 1.0, 12)
Y = 0.5 + X + 0.6 * np.sin(9.0 * X)
COUNTS = np.array([3, 0, 1, 2, 5, 1, 0, 2, 4, 3, 1, 6])


def fit(engine, model, *args, **options):
    engine = engine(model, progress_bar=False, **options)
    engine.run(KEY, *args)
    return engine


def pointwise(found):
    return np.asarray(found["loo_i"] if az.__version__.startswith("0.") else found.elpd_i)


def total(found):
    return found["elpd_loo"] if az.__version__.startswith("0.") else found.elpd


def line(y, mask=True):
    level = numpyro.sample("level", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(level + slope * X, 0.5), obs=y)


@pytest.mark.float32
@pytest.mark.parametrize("engine", [EP, *thorough(LaplaceApproximation, VariationalGaussian, INLA)])
def test_gaussian_likelihoods_are_exact(engine):
    design = np.column_stack([2.0 * np.ones(12), X])
    covariance = design @ design.T + 0.25 * np.eye(12)
    inverse = np.linalg.inv(covariance)
    # Sundararajan and Keerthi (2001), eq. 6.
    variance = 1.0 / np.diag(inverse)
    exact = norm.logpdf(Y, Y - inverse @ Y * variance, np.sqrt(variance))
    found = fit(engine, line, Y).loo()
    if engine is VariationalGaussian:
        independent = fit(engine, line, Y, covariance="diagonal").loo()
        np.testing.assert_allclose(pointwise(independent), exact, rtol=1e-4)
    np.testing.assert_allclose(pointwise(found), exact, rtol=1e-4)
    np.testing.assert_allclose(total(found), exact.sum(), rtol=1e-4)


def test_masked_observations_are_no_data_points():
    """Points, total and its error are those of a model that has only the others."""
    mask = np.arange(12) != 4

    def without(y):
        level = numpyro.sample("level", dist.Normal(0, 2))
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(level + slope * X[mask], 0.5), obs=y)

    found, expected = fit(EP, line, Y, mask).loo(), fit(EP, without, Y[mask]).loo()
    np.testing.assert_allclose(pointwise(found), pointwise(expected), rtol=1e-6)
    assert found["n_data_points"] == 11
    np.testing.assert_allclose(found["se"], expected["se"], rtol=1e-6)
    points = found["loo_i"] if az.__version__.startswith("0.") else found.elpd_i
    assert points["y_dim_0"].values.tolist() == np.flatnonzero(mask).tolist()


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # of ArviZ itself
def test_masked_cells_of_a_table_are_compared_by_arviz():
    mask = np.arange(12).reshape(4, 3) % 5 != 0

    def cells(y, num_levels):
        level = numpyro.sample("level", dist.Normal(0, 2).expand([num_levels, 1]).to_event(2))
        with numpyro.handlers.mask(mask=mask):
            numpyro.sample("y", dist.Normal(level, 0.5).expand([4, 3]), obs=y)

    found = {str(num_levels): fit(EP, cells, Y.reshape(4, 3), num_levels).loo() for num_levels in (1, 4)}
    points = found["1"]["loo_i"] if az.__version__.startswith("0.") else found["1"].elpd_i
    assert np.array_equal(np.stack([points["y_dim_0"], points["y_dim_1"]]), np.nonzero(mask))
    assert set(az.compare(found).index) == set(found)


@pytest.mark.thorough
def test_scores_of_an_integrated_run_are_over_hyperparameters():
    """The field is exact given the noise, so that quadrature over the noise is the truth."""

    def model(y):
        noise = numpyro.sample("noise", dist.LogNormal(-1, 0.7))
        level = numpyro.sample("level", dist.Normal(0, 2))
        numpyro.sample("y", dist.Normal(level + X, noise), obs=y)

    noise = np.exp(np.linspace(-4.0, 3.0, 301))

    def log_evidence(keep):
        size = int(keep.sum())
        parts = [
            multivariate_normal.logpdf((Y - X)[keep], np.zeros(size), 4.0 * np.ones((size, size)) + s**2 * np.eye(size))
            for s in noise
        ]
        return logsumexp(np.array(parts) + norm.logpdf(np.log(noise), -1.0, 0.7))

    exact = [log_evidence(np.ones(12, bool)) - log_evidence(np.arange(12) != i) for i in range(12)]
    integrated = pointwise(fit(EP, model, Y, integrate="grid").loo())
    np.testing.assert_allclose(integrated, exact, atol=5e-3)
    at_optimum = pointwise(fit(EP, model, Y, integrate="none").loo())
    assert np.max(np.abs(at_optimum - exact)) > 0.05


def rectified(y, mask=True):
    f = numpyro.sample(
        "f", dist.MultivariateNormal(1.0, jnp.exp(-0.5 * ((X[:, None] - X) / 0.7) ** 2) + 1e-6 * jnp.eye(12))
    )
    with numpyro.handlers.mask(mask=mask):
        numpyro.sample("y", dist.Poisson(jnp.maximum(f, 0.0)), obs=y)


@pytest.mark.thorough
def test_likelihoods_that_vanish():
    """Each observation masked, EP fitted again, and the observation scored: the other sites stay where they were."""
    found = fit(EP, rectified, COUNTS).loo()
    left_out = [fit(EP, rectified, COUNTS, np.arange(12) != i).log_predictive()["y"][i] for i in range(12)]
    assert np.all(np.abs(pointwise(found) - left_out) < 0.1)
    assert abs(total(found) - np.sum(left_out)) < 0.1 * found["se"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "engine, tolerance", few([(EP, 0.01), (VariationalGaussian, 0.01), (LaplaceApproximation, 0.05)], 1)
)
def test_one_unknown_by_quadrature(engine, tolerance):
    def model(y):
        level = numpyro.sample("level", dist.Normal(0, 2))
        numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)

    y = np.concatenate([COUNTS, COUNTS, COUNTS])
    level = np.linspace(-8.0, 6.0, 4001)
    factors = poisson.logpmf(y[:, None], np.exp(level))
    prior = norm.logpdf(level, 0.0, 2.0)
    exact = [logsumexp(prior + factors.sum(0)) - logsumexp(prior + factors.sum(0) - factors[i]) for i in range(36)]
    np.testing.assert_allclose(pointwise(fit(engine, model, y).loo()), exact, atol=tolerance)


@pytest.mark.thorough
@pytest.mark.parametrize(("engine", "tolerance"), [(VariationalGaussian, 0.03), (EP, 0.01)])
def test_categories_are_left_out_with_all_their_predictors(engine, tolerance):
    # The sites of the others are held, an error of second order in the influence of one: few observations have much.
    kinds = np.tile([0, 1, 2, 2, 1, 0, 1, 1, 2, 0, 2, 2], 4)
    design = jnp.stack([jnp.ones(48), jnp.tile(X, 4)], 1)

    def model(y, mask=True):
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([2, 3]))
        with numpyro.handlers.mask(mask=mask):
            numpyro.sample("y", dist.Categorical(logits=design @ weights), obs=y)

    full = fit(engine, model, kinds)
    found, within = pointwise(full.loo()), full.log_predictive()["y"]
    for i in (0, 5):
        left_out = fit(engine, model, kinds, np.arange(48) != i).log_predictive()["y"][i]
        np.testing.assert_allclose(found[i], left_out, atol=tolerance)
        assert within[i] - left_out > 2.0 * tolerance


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [EP, VariationalGaussian, LaplaceApproximation])
def test_influential_observations_are_left_out_of_fits(engine):
    """Each observation is masked and all others are fitted afresh, with half as many unknowns as observations."""
    generator = np.random.default_rng(0)
    design = np.column_stack([np.ones(12), generator.normal(size=(12, 5))])
    y = (generator.random(12) < 1 / (1 + np.exp(-design @ generator.normal(size=6)))).astype(int)

    def model(y, mask):
        weights = numpyro.sample("weights", dist.Normal(0, 3).expand([6]))
        with numpyro.handlers.mask(mask=mask):
            numpyro.sample("y", dist.Bernoulli(logits=design @ weights), obs=y)

    full = fit(engine, model, y, np.ones(12, bool))
    held, found = full._finished().leave_one_out[0], pointwise(full.loo())
    left_out = [fit(engine, model, y, np.arange(12) != i).log_predictive()["y"][i] for i in range(12)]
    assert np.max(np.abs(held - left_out)) > 0.03
    np.testing.assert_allclose(found, left_out, atol=0.02)
    influential = np.flatnonzero(found != held)
    assert 4 <= influential.size
    np.testing.assert_allclose(found[influential], np.array(left_out)[influential], atol=1e-4)


@pytest.mark.thorough
def test_too_many_influential_observations_are_told(monkeypatch):
    engine = fit(EP, rectified, COUNTS)
    run = engine._finished()
    change, doubt = run.refit_without(most=4, small_change=0.0)
    influential = most_influential(*run.leave_one_out)
    np.testing.assert_array_equal(np.flatnonzero(change), np.sort(influential[:4]))
    assert doubt == f"4 of {influential.size} of them were left out of a fit"
    monkeypatch.setitem(run.__dict__, "refits_without", (change, doubt))
    with pytest.warns(UserWarning, match=rf"{doubt}\. cross_validate fits without each"):
        engine.loo()


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # of ArviZ itself
def test_arviz_prints_and_compares():
    engine = fit(EP, line, Y)
    found = engine.loo()
    assert "elpd_loo" in str(found) and "Pareto" not in str(found)
    by_draws = az.loo(engine.to_arviz())
    np.testing.assert_allclose(total(found), total(by_draws), atol=0.15)
    flat = fit(EP, lambda y: numpyro.sample("y", dist.Normal(numpyro.sample("m", dist.Normal(0, 2)), 0.5), obs=y), Y)
    table = az.compare({"line": found, "level": flat.loo()})
    assert list(table.index) == ["line", "level"]


@pytest.mark.thorough
def test_what_cannot_be_left_out_is_said():
    def two(y, z):
        level = numpyro.sample("level", dist.Normal(0, 2))
        numpyro.sample("y", dist.Normal(level, 0.5), obs=y)
        numpyro.sample("z", dist.Poisson(jnp.exp(level)), obs=z)
        numpyro.factor("held", -0.5 * level**2)

    engine = fit(EP, two, Y, COUNTS)
    with pytest.raises(ValueError, match="Give var_name, .* there are 'y', 'z'"):
        engine.loo()
    with pytest.raises(ValueError, match="'held' is a numpyro.factor, which has no observations"):
        engine.loo("held")
    assert pointwise(engine.loo("z")).shape == (12,)

    def together(y):
        level = numpyro.sample("level", dist.Normal(0, 2).expand([2]))
        numpyro.sample("y", dist.MultivariateNormal(level, jnp.array([[1.0, 0.5], [0.5, 1.0]])), obs=y)

    with pytest.raises(ValueError, match="'y' .MultivariateNormal. depend on each other"):
        fit(EP, together, Y.reshape(6, 2)).loo()

    def flat(y):
        level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (12,), ()))
        numpyro.sample("y", dist.Normal(level, 0.5), obs=y)

    with pytest.raises(FloatingPointError, match="12 of 12 predictors have no proper"):
        fit(LaplaceApproximation, flat, Y).loo()


class Errors(dist.Distribution):
    """A likelihood of the user's own, as the refusal of factors tells to write one."""

    support = dist.constraints.real
    arg_constraints = {"center": dist.constraints.real}

    def __init__(self, center):
        self.center = center
        super().__init__(jnp.shape(center))

    def log_prob(self, value):
        return jax.scipy.stats.norm.logpdf(value, self.center, 0.5)


def by_a_factor(y, mask=True):
    mean = numpyro.sample("level", dist.Normal(0, 2)) + numpyro.sample("slope", dist.Normal(0, 1)) * X
    numpyro.factor("fit", jnp.where(mask, Errors(mean).log_prob(y), 0.0))


def by_a_sum(y):
    mean = numpyro.sample("level", dist.Normal(0, 2)) + numpyro.sample("slope", dist.Normal(0, 1)) * X
    numpyro.factor("fit", jnp.sum(Errors(mean).log_prob(y)))


def by_a_factor_and_a_site(y):
    level = numpyro.sample("level", dist.Normal(0, 2))
    numpyro.factor("fit", jnp.sum(Errors(level + X).log_prob(y)))
    numpyro.sample("other", dist.Normal(level, 1), obs=0.5)


def by_a_distribution(y):
    mean = numpyro.sample("level", dist.Normal(0, 2)) + numpyro.sample("slope", dist.Normal(0, 1)) * X
    numpyro.sample("fit", Errors(mean), obs=y)


@pytest.mark.thorough
def test_factors_have_no_observations_and_distributions_do():
    reason = "'fit' is a numpyro.factor, which has no observations to leave out"
    remedy = r"numpyro.sample\('fit', Likelihood\(...\), obs=y\).*method log_prob\(y\)"
    engine = fit(LaplaceApproximation, by_a_factor, Y)
    for ask in (engine.loo, lambda: engine.loo("fit"), lambda: cross_validate(engine, KEY, Y, num_folds=3)):
        with pytest.raises(ValueError, match=f"{reason}.*{remedy}"):
            ask()
    beside = fit(LaplaceApproximation, by_a_factor_and_a_site, Y)
    with pytest.raises(ValueError, match=f"{reason}.*{remedy}"):
        beside.loo("fit")
    assert pointwise(beside.loo()).shape == ()
    with pytest.raises(ValueError, match=r"'fit' is a numpyro.factor that adds up.*distribution.*inside a plate"):
        fit(LaplaceApproximation, by_a_sum, Y).log_predictive(Y)
    found = fit(LaplaceApproximation, by_a_distribution, Y).loo()
    np.testing.assert_allclose(pointwise(found), pointwise(fit(LaplaceApproximation, line, Y).loo()), rtol=1e-6)


def own_level(y):
    """A level for each count: without its own observation a level has the prior, three times as broad."""
    level = numpyro.sample("level", dist.Normal(0, 2).expand([12]))
    numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)


@pytest.mark.parametrize(
    "model, what",
    few([(rectified, "vanishes at some draws"), (own_level, "varies so much that k-hat is above 0.7")], 1),
)
def test_a_warning_leads_from_arviz_to_cavities(model, what):
    engine = fit(EP, model, COUNTS)
    with pytest.warns(UserWarning, match=f"arviz.loo weights .* site 'y': .* of 12 .* {what}. Use EP.loo"):
        data = engine.to_arviz()
    engine.to_arviz()  # said once
    with pytest.warns(UserWarning, match="Pareto distribution is greater"):
        az.loo(data)
    if az.__version__.startswith("0."):
        again = fit(EP, model, COUNTS)
        again.to_arviz(log_likelihood=False)
        with pytest.warns(UserWarning, match="Use EP.loo"):
            az.from_numpyro(again)


@pytest.mark.thorough
def test_a_warning_leads_from_arviz_to_cavities_of_several_predictors():
    """Their factors had been left out of what is looked at, and the two scores differed without a word."""
    x = np.append(np.linspace(-1.0, 1.0, 11), 2.5)
    y = np.array([0.5, -0.3, 0.9, 1.4, -0.6, 0.2, 1.9, -1.1, 0.4, 2.2, -0.7, 5.0])

    def model(y, mask=True):
        a, b, c, d = (numpyro.sample(name, dist.Normal(0, 1)) for name in "abcd")
        with numpyro.handlers.mask(mask=mask):
            numpyro.sample("y", dist.Normal(a + b * x, jnp.exp(c + d * x)), obs=y)

    engine = fit(EP, model, y)
    found = pointwise(engine.loo())
    for i in (3, 11):
        left_out = fit(EP, model, y, np.arange(12) != i)
        np.testing.assert_allclose(found[i], left_out.log_predictive()["y"][i], atol=0.1)
    with pytest.warns(UserWarning, match="site 'y': of .* of 12 observations it .* Use EP.loo"):
        engine.to_arviz()


@pytest.mark.thorough
def test_ordinary_models_are_not_warned_of():
    """And the weights of ArviZ agree with cavities on them."""

    def schools(y):
        level = numpyro.sample("level", dist.Normal(0, 5))
        spread = numpyro.sample("spread", dist.HalfCauchy(5))
        effect = numpyro.sample("effect", dist.Normal(level, spread).expand([8]))
        numpyro.sample("y", dist.Normal(effect, jnp.array([15, 10, 16, 11, 9, 11, 10, 18])), obs=y)

    def intercepts(y):
        spread = numpyro.sample("spread", dist.HalfNormal(1))
        effect = numpyro.sample("effect", dist.Normal(0, spread).expand([3]))
        numpyro.sample("y", dist.Poisson(jnp.exp(1.0 + effect[np.arange(12) % 3])), obs=y)

    def logistic(y):
        slope = numpyro.sample("slope", dist.Normal(0, 2).expand([2]))
        numpyro.sample("y", dist.Bernoulli(logits=slope[0] + slope[1] * X), obs=y)

    for model, y in (
        (schools, np.array([28, 8, -3, 7, -1, 1, 18, 12])),
        (intercepts, COUNTS),
        (logistic, (X + 0.5 * np.sin(9.0 * X) > 0).astype(int)),
    ):
        engine = fit(EP, model, y)
        np.testing.assert_allclose(total(az.loo(engine.to_arviz())), total(engine.loo()), atol=0.3)


@pytest.mark.thorough
@pytest.mark.parametrize("of", [lambda eta: dist.Bernoulli(logits=eta), lambda eta: dist.StudentT(4, eta, 1.0)])
def test_a_known_predictor_is_scored_by_the_density_there(of):
    """Without an intercept, nobody learns anything where the dose is zero."""

    def model(dose, y):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        numpyro.sample("y", of(slope * dose), obs=y)

    data = np.array([0.0, 0.0, 1.0, 2.0, 3.0, 1.0]), np.array([1, 0, 1, 0, 1, 1])
    engine = EP(model, progress_bar=False)
    engine.run(jax.random.key(0), *data)
    known = of(0.0).log_prob(data[1][:2])
    np.testing.assert_allclose(engine.log_predictive(*data)["y"][:2], known, rtol=1e-6)
    folds = cross_validate(engine, jax.random.key(0), *data, num_folds=2)
    np.testing.assert_allclose(folds.log_predictive[0, :2], known, rtol=1e-6)
    np.testing.assert_allclose(pointwise(engine.loo())[:2], known, rtol=1e-6)


COVARIANCE = jnp.array([[1.0, 0.8], [0.8, 1.0]])


@pytest.mark.parametrize(
    "of",
    [
        lambda mean: dist.MultivariateNormal(mean, COVARIANCE).expand([4]),
        *thorough(lambda mean: dist.MatrixNormal(mean * jnp.ones((4, 2)), jnp.eye(4), jnp.linalg.cholesky(COVARIANCE))),
    ],
)
def test_coordinates_that_depend_on_each_other_are_not_scored_one_by_one(of):
    """The density of a vector is not the product of those of its whitened coordinates."""

    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0, 2).expand([2]).to_event(1))
        numpyro.sample("y", of(mean), obs=y)

    y = np.random.default_rng(0).normal(size=(4, 2))
    engine = fit(LaplaceApproximation, model, y)
    asked = (
        lambda: engine.log_predictive(y),
        engine.loo,
        lambda: cross_validate(engine, KEY, y, num_folds=2),
        lambda: predictive_moments(engine, hyper="plug-in"),
    )
    for ask in asked:
        with pytest.raises(ValueError, match="coordinates of an observation of .*'y' .M.*Normal. depend on each"):
            ask()
    assert not np.any(engine.log_predictive()["y"])  # none is masked
