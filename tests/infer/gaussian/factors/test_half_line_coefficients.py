"""Coefficients that cannot be negative: elements of EP's field, hyperparameters to other engines."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import log_density
from scipy import stats

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian, marginalize, recommend
from numpyro_ext.structure import ModelStructureError, read_first, read_latent_gaussian
from numpyro_ext.structure.latent_gaussian.read import ONE_SIDED_LATENT_GAUSSIAN
from numpyro_ext.structure.model.verification import check_form
from tests.tiers import thorough

# The last draws the data far below the bound.
PRIORS = {
    "half normal": (lambda: dist.HalfNormal(1), stats.halfnorm()),
    "exponential": (lambda: dist.Exponential(np.float32(2)), stats.expon(scale=0.5)),
    "truncated": (lambda: dist.TruncatedNormal(0.3, 1.0, low=-0.5), stats.truncnorm(-0.8, np.inf, 0.3, 1.0)),
    "far away": (lambda: dist.HalfNormal(jnp.array(0.2)), stats.halfnorm(scale=0.2)),
}
Y = {name: [0.4, -0.3, 0.5] for name in PRIORS} | {"far away": [-3.0, -4.0, -3.5]}
X = np.random.default_rng(0).standard_normal((12, 2)) @ [[1.0, 0.4], [0.0, 0.9]]
OUTCOMES = X @ [0.3, 0.2] + 0.5 * np.random.default_rng(1).standard_normal(12)


def single(prior, y):
    b = numpyro.sample("b", prior())
    numpyro.sample("y", dist.Normal(b, 0.7), obs=jnp.asarray(y))


def regression(x, y=None, prior=None):
    with numpyro.plate("columns", 2):
        b = numpyro.sample("b", dist.HalfNormal(1) if prior is None else prior)
    numpyro.deterministic("twice", 2.0 * b)
    numpyro.sample("y", dist.Normal(x @ b, 0.5), obs=y)


def run(model, *args, engine=EP, **options):
    fitted = engine(model, progress_bar=False, **options)
    fitted.run(jax.random.key(0), *args)
    return fitted


@pytest.fixture(scope="module")
def fitted():
    return run(regression, X, OUTCOMES)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["half normal", *thorough(*(name for name in PRIORS if name != "half normal"))])
def test_one_coefficient_is_exact(name):
    """Cavity times prior is the posterior: a normal distribution cut at the bound."""
    make, prior = PRIORS[name]
    engine = run(single, make, Y[name])
    assert engine._run.reading.field == ("b",) and not engine.hyper and engine.diagnostics.converged
    low = prior.support()[0]
    grid = low + np.concatenate([[0.0], np.geomspace(1e-7, 8.0, 40_001)])
    log_joint = prior.logpdf(np.maximum(grid, low + 1e-12)) + stats.norm.logpdf(
        np.array(Y[name])[:, None], grid, 0.7
    ).sum(0)
    density = np.exp(log_joint - log_joint.max())
    total, first = np.trapezoid(density, grid), np.trapezoid(density * grid, grid)
    variance = np.trapezoid(density * (grid - first / total) ** 2, grid) / total
    np.testing.assert_allclose(engine.log_evidence, log_joint.max() + np.log(total), atol=1e-5)
    found = engine.posterior["b"]
    np.testing.assert_allclose([found.mean, found.variance], [first / total, variance], rtol=1e-4)
    steps = 0.5 * (density[1:] + density[:-1]) * np.diff(grid)
    below = np.concatenate([[0.0], np.cumsum(steps)]) / total
    q = np.array([0.001, 0.05, 0.5, 0.999])
    np.testing.assert_allclose(found.quantile(q), np.interp(q, below, grid), rtol=2e-3, atol=1e-6)
    # Draws are of the posterior itself, so that all have one weight: the evidence.
    weights = engine._run._propose(jax.random.key(1), 50, is_weighted=True).log_weight
    np.testing.assert_allclose(weights, engine.log_evidence, atol=1e-4)


@pytest.mark.thorough
def test_two_coefficients_against_quadrature(fitted):
    grid = np.linspace(0.0, 2.5, 401)
    points = np.stack(np.meshgrid(grid, grid, indexing="ij"), axis=-1)
    log_joint = stats.halfnorm.logpdf(points).sum(-1)
    log_joint += stats.norm.logpdf(OUTCOMES, points @ X.T, 0.5).sum(-1)
    density = np.exp(log_joint - log_joint.max())

    def integral(values):
        return np.trapezoid(np.trapezoid(values, grid, axis=0), grid)

    total = integral(density)
    mean = np.array([integral(density * points[..., k]) for k in (0, 1)]) / total
    sd = np.sqrt([integral(density * (points[..., k] - mean[k]) ** 2) / total for k in (0, 1)])
    # EP is short by what second cumulants of correlated slopes say, and no Jacobian is left over.
    np.testing.assert_allclose(fitted.log_evidence, log_joint.max() + np.log(total), atol=0.03)
    np.testing.assert_allclose(fitted.corrected().log_evidence, log_joint.max() + np.log(total), atol=2e-3)
    assert np.all(np.abs(fitted.posterior["b"].mean - mean) < 0.03 * sd)
    np.testing.assert_allclose(fitted.posterior["b"].sd, sd, rtol=0.03)
    margin = np.trapezoid(density, grid, axis=1) / total
    below = np.concatenate([[0.0], np.cumsum(0.5 * (margin[1:] + margin[:-1]) * np.diff(grid))])
    found = np.asarray(fitted.posterior["b"].quantile(np.array([0.05, 0.95])))[:, 0]
    assert np.all(np.abs(found - np.interp([0.05, 0.95], below, grid)) < 0.05 * sd[0])


@pytest.mark.thorough
def test_draws_are_inside_and_have_the_moments_of_the_marginals(fitted):
    found = fitted.posterior["b"]
    draws = fitted.get_samples()
    assert np.all(draws["b"] > 0.0) and np.all(draws["twice"] > 0.0)
    for each in (draws["b"], found.sample(jax.random.key(3), 1000)):
        assert np.all(each > 0.0)
        np.testing.assert_allclose(each.mean(0), found.mean, atol=5.0 * float(found.sd.max()) / np.sqrt(1000))
        np.testing.assert_allclose(each.std(0), found.sd, rtol=0.15)
    assert found[[1]].quantile(0.01) > 0.0 and found[[1]].mean == found.mean[1]
    assert found.interval(0.9999)[0].min() > 0.0
    density, _ = log_density(regression, (X, OUTCOMES), {}, {"b": draws["b"][0]})
    assert np.isfinite(density)


@pytest.mark.thorough
def test_predictions_are_inside(fitted):
    new = fitted.predict(jax.random.key(4), X[:3])
    assert np.all(new.get_samples()["b"] > 0.0) and np.all(new.posterior["b"].quantile(0.001) > 0.0)


@pytest.mark.thorough
def test_the_guide_draws_inside_with_the_moments_of_the_posterior(fitted):
    draws = fitted.guide.sample_posterior(jax.random.key(0), fitted.params, sample_shape=(2000,))["b"]
    assert np.all(draws > 0.0)
    sd = np.asarray(fitted.posterior["b"].sd)
    assert np.all(np.abs(draws.mean(0) - fitted.posterior["b"].mean) < 0.15 * sd)
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.3)  # log-normal tails


@pytest.mark.thorough
@pytest.mark.float32
def test_scales_of_the_prior_and_of_noise_are_integrated_over():
    def model(x, y=None):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        noise = numpyro.sample("noise", dist.Exponential(1))
        b = numpyro.sample("b", dist.HalfNormal(tau).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ b, noise), obs=y)

    engine = run(model, X, OUTCOMES)
    assert set(engine.hyper) == {"tau", "noise"} and engine.diagnostics.converged
    found, draws = engine.posterior["b"], engine.get_samples()["b"]
    assert np.all(found.quantile(0.001) > 0.0) and np.all(draws > 0.0) and np.all(found[[0]].quantile(0.01) > 0.0)
    np.testing.assert_allclose(draws.mean(0), found.mean, atol=0.03)


# Reading

SCALES = {
    "noise": lambda x, s, z: dist.Normal(z, s),
    "a factor of the field": lambda x, s, z: dist.Normal(z * s, 1.0),
    "inside a link": lambda x, s, z: dist.Poisson(jnp.exp(z) * s),
    "a power": lambda x, s, z: dist.Normal(z + x[:, 0] ** 2 * s**2, 1.0),
    "a dispersion": lambda x, s, z: dist.StudentT(s, z, 1.0),
}


@pytest.mark.parametrize("name", SCALES)
def test_what_is_no_coefficient_stays_a_hyperparameter(name):
    def model(x, y):
        s = numpyro.sample("s", dist.Exponential(1.0))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([12]))
        numpyro.sample("y", SCALES[name](x, s, z), obs=y)

    counts = jnp.arange(12) % 3 if name == "inside a link" else OUTCOMES
    readings = [read_first([form], model, (X, counts)) for form in (ONE_SIDED_LATENT_GAUSSIAN, EP.forms[0])]
    plain = read_latent_gaussian(model, (X, counts))
    for reading in readings:
        assert (reading.field, tuple(reading.hyper)) == (plain.field, tuple(plain.hyper)) == (("z",), ("s",))
        assert reading.structure == plain.structure


def several(x, y=None):
    """A mean, a slope that multiplies another one, a scale, and a slope for its own."""
    center = numpyro.sample("center", dist.HalfNormal(1.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    a = numpyro.sample("a", dist.Normal(center, tau).expand([2]))
    first = numpyro.sample("first", dist.HalfNormal(1.0).expand([2]))
    second = numpyro.sample("second", dist.Exponential(1.0))
    own = numpyro.sample("own", dist.TruncatedNormal(1.0, 1.0, low=0.5))
    mean = x @ a + x @ first * second + own * x[:, 0]
    numpyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def test_coefficients_join_as_far_as_predictors_are_affine():
    def field(**options):
        reading = EP(several, **options)._read(jax.random.key(0), (X, OUTCOMES), {}, check=False)
        return reading.field, tuple(reading.hyper)

    expected = ("center", "a", "first", "own"), ("tau", "second")
    assert field() == expected == field()  # the second time by what is kept
    assert field(field=["a", "second"])[0] == ("a", "second")
    # What somebody gives a value to is a hyperparameter.
    assert "own" in field(hyper_values={"own": 1.0})[1] and "own" in field(init_values={"own": 1.0})[1]
    reading = read_latent_gaussian(several, (X, OUTCOMES))  # as other engines read it
    assert reading.field == ("a",) and set(reading.hyper) == {"center", "tau", "first", "second", "own"}


def test_numbers_too_many_to_maximise_over_are_coefficients_all_the_same():
    def model(x, y):
        numpyro.sample("y", dist.Normal(x @ numpyro.sample("b", dist.HalfNormal(1.0).expand([14])), 0.5), obs=y)

    x = np.random.default_rng(2).standard_normal((12, 14))
    reading = EP(model)._read(jax.random.key(0), (x, OUTCOMES), {})
    assert reading.field == ("b",) and "factor: b (14,) (half line)" in reading.describe()

    def counts(x, y):
        """Rates themselves: no known likelihood of one predictor that may be negative."""
        numpyro.sample("y", dist.Poisson(x @ numpyro.sample("b", dist.HalfNormal(1.0).expand([2]))), obs=y)

    with pytest.raises(ModelStructureError, match="no Gaussian latent site.*half line"):
        EP(counts)._read(jax.random.key(0), (np.abs(X), np.arange(12)), {})


def test_other_engines_name_ep():
    for engine in (VariationalGaussian, LaplaceApproximation):
        with pytest.raises(ModelStructureError, match="EP.* HalfNormal, Exponential and left-truncated"):
            run(regression, X, OUTCOMES, engine=engine)
        with pytest.raises(ModelStructureError, match="'first' is HalfNormal.*EP has coefficients with such a prior"):
            run(several, X, OUTCOMES, engine=engine, field=["a", "first"])

    def model(x, y):
        level = numpyro.sample("level", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(level + x @ numpyro.sample("b", dist.HalfNormal(1.0).expand([14])), 1), obs=y)

    with pytest.raises(ModelStructureError, match="'b'.*14 elements.*EP has coefficients with half-normal"):
        run(model, np.ones((12, 14)), OUTCOMES, engine=VariationalGaussian)


def test_recommendations_ask_each_engine():
    def model(x, y):
        level = numpyro.sample("level", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.HalfNormal(1.0).expand([2]))
        numpyro.sample("y", dist.Poisson(jnp.exp(level + x @ b)), obs=y)

    found = {each.engine: each.takes for each in recommend(model, X, np.arange(12) % 4).candidates}
    assert found["EP"] and found["VariationalGaussian"] and found["LaplaceApproximation"]


def test_marginal_models_leave_them_to_the_sampler():
    def model(x, y=None):
        level = numpyro.sample("level", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.HalfNormal(1.0).expand([2]))
        numpyro.sample("y", dist.Normal(level + x @ b, 0.5), obs=y)

    marginal = marginalize(model)
    trace = numpyro.handlers.trace(numpyro.handlers.seed(marginal, 0)).get_trace(X, OUTCOMES)
    assert "b" in trace and "level" not in trace


@pytest.mark.parametrize("prior", [dist.HalfNormal, *thorough(dist.Exponential)])
def test_planted_errors_are_found(prior):
    def model(scale, y):
        b = numpyro.sample("b", prior(scale))
        numpyro.sample("y", dist.Normal(b @ jnp.eye(3), 0.7), obs=y)

    scales, y = np.array([0.5, 1.0, 2.0]), np.array([1.4, 0.2, 0.9])

    def read(*args):
        return read_first([ONE_SIDED_LATENT_GAUSSIAN], model, args, check=False)

    right = read(scales, y)
    wrong = [read(scales[::-1], y), read(scales, -y), read(2 * scales, y)]
    for key in jax.random.split(jax.random.key(0), 2):
        check_form(right, key)
        for reading in wrong:
            reading.args = right.args  # what was read is of other arguments than what NumPyro is given
            with pytest.raises(ModelStructureError, match="misread"):
                check_form(reading, key)


def media_mix(spend, sales=None):
    """Two channels, each with a decay and a saturation, and noise."""
    total = numpyro.sample("level", dist.Normal(0, 2))
    for channel in range(2):
        decay = numpyro.sample(f"decay{channel}", dist.Beta(2, 2))
        effect = numpyro.sample(f"effect{channel}", dist.HalfNormal(1))
        carried = jnp.stack([jnp.pad(spend[:, channel], (lag, 0))[: len(spend)] for lag in range(6)], axis=-1)
        total = total + effect * jnp.tanh(carried @ decay ** jnp.arange(6) * (1 - decay))
    numpyro.sample("sales", dist.Normal(total, numpyro.sample("noise", dist.HalfNormal(1))), obs=sales)


def counts_of_eight(x, y=None):
    level = numpyro.sample("level", dist.Normal(0, 3))
    b = numpyro.sample("b", dist.HalfNormal(0.5).expand([8]))
    numpyro.sample("y", dist.Poisson(jnp.exp(level + x @ b)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["media mix", "counts"])
def test_models_of_many_parts_against_nuts(name):
    rng = np.random.default_rng(0)
    if name == "counts":
        x = rng.standard_normal((40, 8))
        model, args = counts_of_eight, (x, rng.poisson(np.exp(0.5 + x @ [0, 0.05, 0.25, 0.5, 0, 0.15, 0.01, 0.4])))
    else:
        spend = rng.gamma(1.0, 1.0, (104, 2))
        truth = {"level": 1.0, "decay0": 0.5, "decay1": 0.3, "effect0": 0.8, "effect1": 0.3, "noise": 0.4}
        drawn = numpyro.handlers.seed(numpyro.handlers.substitute(media_mix, data=truth), 0)
        sales = numpyro.handlers.trace(drawn).get_trace(spend)["sales"]["value"]
        model, args = media_mix, (spend, sales)
    engine = run(model, *args)
    kernel = numpyro.infer.NUTS(model, target_accept_prob=0.95)
    mcmc = numpyro.infer.MCMC(kernel, num_warmup=1000, num_samples=20_000, progress_bar=False)
    mcmc.run(jax.random.key(1), *args)
    assert engine.diagnostics.converged
    for site, draws in mcmc.get_samples().items():
        gap = np.abs(np.asarray(engine.posterior[site].mean) - draws.mean(0)) / draws.std(0)
        assert np.all(gap < 0.1), (site, gap)
        np.testing.assert_allclose(np.asarray(engine.posterior[site].sd), draws.std(0), rtol=0.1, err_msg=site)
