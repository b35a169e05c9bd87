"""The marginal model: density and gradient against closed forms and differences, chains, and the field after them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from jax.scipy.stats import multivariate_normal
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, log_likelihood
from numpyro.infer.autoguide import AutoLaplaceApproximation, AutoNormal
from numpyro.infer.util import log_density

from numpyro_ext.infer import EP, INLA, BilinearVG, LaplaceApproximation, VariationalGaussian, marginalize
from numpyro_ext.structure import ModelStructureError
from tests.infer.front.test_compiled_programs import compiled_programs
from tests.tiers import thorough

ENGINES = (EP, VariationalGaussian, LaplaceApproximation)
SIGMA = np.array([15, 10, 16, 11, 9, 11, 10, 18])
EFFECT = np.array([28, 8, -3, 7, -1, 1, 18, 12])
GROUP = np.arange(12) % 3
ROUNDING = 1e-9 if jnp.result_type(float) == np.float64 else 2e-4


def schools(sigma, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    numpyro.deterministic("log_tau", jnp.log(tau))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.deterministic("is_good", theta > 10)
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def intercepts(group, y=None):
    scales = numpyro.sample("scales", dist.HalfNormal(1.0).expand([2]))
    level = numpyro.sample("level", dist.Normal(0.0, scales[1]))
    shift = numpyro.sample("shift", dist.Normal(level, scales[0]).expand([3]))
    numpyro.sample("y", dist.Poisson(jnp.exp(shift[group])), obs=y)


COUNTS = np.random.default_rng(0).poisson(np.exp(1.0 + np.array([-0.7, 0.2, 0.9]))[GROUP])


def density(model, args, kwargs=None, **params):
    """As of a potential: in JAX, with parameters that may be traced."""
    value, _ = log_density(model, args, kwargs or {}, params)
    return value


def schools_exactly(tau):
    """Log density of tau and the data, mu and theta integrated out."""
    covariance = jnp.diag(SIGMA**2 + tau**2) + 25.0
    return multivariate_normal.logpdf(EFFECT, jnp.zeros(8), covariance) + dist.HalfCauchy(5).log_prob(tau)


def schools_posterior():
    """Posterior mean, deviation and log normaliser of log tau, by quadrature."""
    grid = jnp.linspace(-12.0, 8.0, 4001)
    log_mass = jax.vmap(schools_exactly)(jnp.exp(grid)) + grid
    mass = jnp.exp(log_mass - log_mass.max())
    mean = jnp.sum(mass * grid) / mass.sum()
    return mean, jnp.sqrt(jnp.sum(mass * (grid - mean) ** 2) / mass.sum())


@pytest.mark.thorough
@pytest.mark.float32
@pytest.mark.parametrize("engine", [EP, *thorough(*ENGINES[1:])])
def test_gaussian_likelihood_is_integrated_exactly(engine):
    marginal = marginalize(schools, engine)
    for tau in (1e-3, 0.5, 7.0, 300.0):
        ours = jax.value_and_grad(lambda t: density(marginal, (SIGMA, EFFECT), tau=t))(tau)
        np.testing.assert_allclose(ours, jax.value_and_grad(schools_exactly)(tau), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.float32
def test_rows_far_from_zero_keep_the_digits_of_single_precision():
    """The squares of these data over their variance are eight million, of which single precision holds half a unit."""

    def model(x, y):
        noise = numpyro.sample("noise", dist.HalfNormal(2.0))
        level = numpyro.sample("level", dist.Normal(0.0, 20.0))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(level + slope * x, noise), obs=y)

    rng = np.random.default_rng(3)
    x = rng.normal(size=800).astype(np.float32)
    y = (100.0 + x + rng.normal(size=800)).astype(np.float32)
    marginal = marginalize(model)
    evidence = jax.jit(lambda noise: density(marginal, (x, y), noise=noise))
    wide_x, wide_y = x.astype(float), y.astype(float)
    for noise in (0.7, 1.0, 1.3):
        covariance = 400.0 + np.outer(wide_x, wide_x) + noise**2 * np.eye(800)
        exact = scipy.stats.multivariate_normal(np.zeros(800), covariance).logpdf(wide_y)
        exact += scipy.stats.halfnorm(scale=2.0).logpdf(noise)
        np.testing.assert_allclose(evidence(jnp.asarray(noise, jnp.float32)), exact, atol=0.02)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [EP, *thorough(*ENGINES[1:])])
def test_gradients_are_those_of_the_density_by_both_modes(engine):
    marginal = marginalize(intercepts, engine)

    @jax.jit
    def at(scales):
        return density(marginal, (GROUP, COUNTS), scales=scales)

    scales, step = jnp.array([0.6, 1.7]), 1e-4
    differences = [(at(scales + d) - at(scales - d)) / (2 * step) for d in step * jnp.eye(2)]
    gradient = jax.jit(jax.grad(at))(scales)
    np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(at))(scales), gradient, rtol=1e-10)
    batch = scales * jnp.array([[0.5], [1.0], [3.0]])
    np.testing.assert_allclose(jax.vmap(at)(batch), [at(row) for row in batch], rtol=1e-7)


@pytest.mark.thorough
def test_second_derivatives_are_those_of_the_density():
    marginal = marginalize(schools)
    hessian = jax.hessian(lambda t: density(marginal, (SIGMA, EFFECT), tau=t))(4.0)
    np.testing.assert_allclose(hessian, jax.hessian(schools_exactly)(4.0), rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [EP, *thorough(*ENGINES[1:])])
def test_density_is_the_evidence_that_the_engine_reports(engine):
    fitted = engine(intercepts, hyper_values={"scales": [0.6, 1.7]}, progress_bar=False)
    fitted.run(jax.random.key(0), GROUP, COUNTS)
    prior = dist.HalfNormal(1.0).log_prob(jnp.array([0.6, 1.7])).sum()
    ours = density(marginalize(intercepts, engine), (GROUP, COUNTS), scales=jnp.array([0.6, 1.7]))
    np.testing.assert_allclose(ours, fitted.log_evidence + prior, rtol=1e-8)


@pytest.mark.float32
@pytest.mark.thorough
@pytest.mark.parametrize("chain_method", ["sequential", "vectorized"])
def test_chains_find_the_posterior_of_a_scale(chain_method):
    marginal = marginalize(schools)
    options = {"num_warmup": 300, "num_samples": 1000, "num_chains": 2, "progress_bar": False}
    mcmc = MCMC(NUTS(marginal), chain_method=chain_method, **options)
    mcmc.run(jax.random.key(0), SIGMA, EFFECT)
    mean, deviation = schools_posterior()
    draws = mcmc.get_samples()
    assert set(draws) == {"tau", "log_tau"}
    effective = numpyro.diagnostics.effective_sample_size(mcmc.get_samples(group_by_chain=True)["log_tau"])
    assert effective > 150
    np.testing.assert_allclose(draws["log_tau"].mean(), mean, atol=5 * deviation / effective**0.5)
    np.testing.assert_allclose(draws["log_tau"].std(), deviation, rtol=5 / effective**0.5)


@pytest.mark.thorough
def test_field_is_drawn_from_its_posterior_given_each_draw():
    marginal, num = marginalize(schools), 4000
    log_density(marginal, (SIGMA, EFFECT), {}, {"tau": 1.0})
    tau = jnp.tile(jnp.array([2.0, 20.0]), num // 2)
    draws = marginal.recover(jax.random.key(1), {"tau": tau})
    assert set(draws) == {"tau", "log_tau", "mu", "theta", "is_good"}
    np.testing.assert_array_equal(draws["tau"], tau)
    np.testing.assert_allclose(draws["log_tau"], jnp.log(tau))
    np.testing.assert_array_equal(draws["is_good"], draws["theta"] > 10)
    for number, scale in enumerate([2.0, 20.0]):
        prior = scale**2 * np.eye(8) + 25.0
        gain = np.linalg.solve(prior + np.diag(SIGMA**2.0), prior)
        mean, covariance = EFFECT @ gain, prior - prior @ gain
        theta = np.asarray(draws["theta"])[number::2]
        error = np.sqrt(np.diag(covariance) / (num // 2))
        np.testing.assert_allclose((theta.mean(0) - mean) / error, 0.0, atol=4.5)
        np.testing.assert_allclose(np.cov(theta.T), covariance, atol=0.12 * covariance.max())


@pytest.mark.thorough
def test_draws_serve_numpyro():
    marginal = marginalize(intercepts)
    hyper = {"scales": np.full((5, 2), 0.7, np.float32)}
    draws = marginal.recover(jax.random.key(0), hyper, GROUP, y=COUNTS)
    assert draws["shift"].shape == (5, 3)
    assert Predictive(intercepts, draws)(jax.random.key(1), GROUP)["y"].shape == (5, 12)
    assert bool(jnp.isfinite(log_likelihood(intercepts, draws, GROUP, y=COUNTS)["y"]).all())
    as_lists = {"scales": [[0.7, 0.7]] * 5}
    again = marginal.recover(jax.random.key(0), as_lists)
    np.testing.assert_allclose(again["shift"], draws["shift"], rtol=1e-5)


@pytest.mark.thorough
def test_guides_fit_it():
    marginal = marginalize(schools)
    for guide in (AutoNormal(marginal), AutoLaplaceApproximation(marginal)):
        svi = SVI(marginal, guide, numpyro.optim.Adam(0.05), Trace_ELBO(num_particles=4))
        found = svi.run(jax.random.key(0), 300, SIGMA, EFFECT, progress_bar=False)
        draws = guide.sample_posterior(jax.random.key(1), found.params, sample_shape=(50,))
        assert 1.0 < float(jnp.median(draws["tau"])) < 9.0
        assert marginal.recover(jax.random.key(2), draws)["theta"].shape == (50, 8)


def test_only_hyperparameters_are_seen_and_param_sites_stay_what_they_are():
    def model(x, y=None):
        level = numpyro.param("level", 0.3)
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        slope = numpyro.sample("slope", dist.Normal(level, scale))
        numpyro.factor("weight", -(scale**2))
        numpyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)

    x, y = np.array([1.0, 2.0, -1.0]), np.array([0.5, 1.5, -1.0])
    marginal = marginalize(model)
    trace = handlers.trace(handlers.seed(marginal, 0)).get_trace(x, y)
    assert {name: site["type"] for name, site in trace.items()} == {
        "level": "param",
        "scale": "sample",
        "log_evidence_of_field": "sample",
    }
    covariance = 0.49 * np.outer(x, x) + 0.25 * np.eye(3)
    exact = multivariate_normal.logpdf(y, 0.8 * x, covariance) - 0.49 + dist.HalfNormal(1.0).log_prob(0.7)
    np.testing.assert_allclose(density(marginal, (x, y), scale=0.7, level=0.8), exact, rtol=1e-9)
    held = marginalize(model, hyper_values={"level": 0.8})
    np.testing.assert_allclose(density(held, (x, y), scale=0.7), exact, rtol=1e-9)
    draws = held.recover(jax.random.key(0), {"scale": [0.7, 0.7]})
    np.testing.assert_allclose(draws["level"], [0.8, 0.8])
    assert "given: level = 0.8" in held.describe()


def test_prior_that_depends_on_the_field_is_a_factor_of_the_evidence():
    def model(y=None):
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
        rate = numpyro.sample("rate", dist.Normal(mean, 0.5))
        numpyro.sample("other", dist.Normal(mean, 1.0), obs=0.3)
        numpyro.sample("y", dist.Poisson(jnp.exp(rate) + 1.0 + rate**2), obs=y)

    marginal = marginalize(model, field="mean")
    y, rate = np.array([3, 1, 2]), 0.4
    joint = multivariate_normal.logpdf(
        jnp.array([rate, 0.3]), jnp.zeros(2), jnp.array([[4.25, 4.0], [4.0, 5.0]])
    ) + jnp.sum(dist.Poisson(jnp.exp(rate) + 1.0 + rate**2).log_prob(y))
    np.testing.assert_allclose(density(marginal, (y,), rate=rate), joint, rtol=1e-9)
    draws = marginal.recover(jax.random.key(0), {"rate": [rate]})
    np.testing.assert_allclose(draws["rate"], [rate])


def test_missing_values_are_drawn():
    def model(y, seen):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        level = numpyro.sample("level", dist.Normal(0.0, scale))
        numpyro.sample("y", dist.Normal(level, 0.1).expand([4]).mask(True), obs=y, obs_mask=seen)

    y, seen = np.array([1.0, 1.1, 0.9, 0.0]), np.array([True, True, True, False])
    marginal = marginalize(model)
    covariance = 0.64 + 0.01 * np.eye(3)
    exact = multivariate_normal.logpdf(y[:3], np.zeros(3), covariance) + dist.HalfNormal(1.0).log_prob(0.8)
    np.testing.assert_allclose(density(marginal, (y, seen), scale=0.8), exact, rtol=1e-9)
    draws = marginal.recover(jax.random.key(0), {"scale": jnp.full(400, 0.8)})
    assert abs(float(draws["y_unobserved"][:, 3].mean()) - 1.0) < 0.1


def test_more_scales_than_observations_may_be_sampled():
    def horseshoe(x, y):
        local = numpyro.sample("local", dist.HalfCauchy(1.0).expand([x.shape[1]]))
        slopes = numpyro.sample("slopes", dist.Normal(0.0, local))
        numpyro.sample("y", dist.Normal(x @ slopes, 1.0), obs=y)

    x, y = np.random.default_rng(0).normal(size=(3, 5)), np.array([1.0, -2.0, 0.5])
    with pytest.raises(ModelStructureError, match="too many to maximise over"):
        EP(horseshoe).run(jax.random.key(0), x, y)
    local = np.linspace(0.2, 3.0, 5)
    exact = multivariate_normal.logpdf(y, np.zeros(3), (x * local**2) @ x.T + np.eye(3))
    exact += dist.HalfCauchy(1.0).log_prob(local).sum()
    np.testing.assert_allclose(density(marginalize(horseshoe), (x, y), local=local), exact, rtol=1e-9)


@pytest.mark.thorough
def test_groups_of_very_different_sizes_are_blocks():
    """One group with most of the rows pads all others; the joint of all unknowns is dearer yet."""
    group = np.concatenate([np.zeros(60, int), np.arange(1, 21)])
    x, y = np.random.default_rng(0).normal(size=(2, 80))

    def slopes(x, y):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        level = numpyro.sample("level", dist.Normal(0.0, scale).expand([21]))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([21]))
        numpyro.sample("y", dist.Normal(level[group] + slope[group] * x, 0.5), obs=y)

    marginal = marginalize(slopes)
    assert "blocks: 21 independent, of up to 2 unknowns" in marginal.describe(x, y)
    same = group[:, None] == group
    covariance = same * (0.49 + np.outer(x, x)) + 0.25 * np.eye(80)
    exact = multivariate_normal.logpdf(y, np.zeros(80), covariance) + dist.HalfNormal(1.0).log_prob(0.7)
    np.testing.assert_allclose(density(marginal, (x, y), scale=0.7), exact, rtol=1e-9)


def correlated(y, jitter=0.0):
    correlation = numpyro.sample("correlation", dist.Uniform(0.0, 2.0))
    covariance = jnp.array([[1.0 + jitter, correlation], [correlation, 1.0 + jitter]])
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(2), covariance, validate_args=False))
    numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [EP, *thorough(*ENGINES[1:])])
def test_what_has_no_evidence_is_refused_and_counted(engine):
    marginal = marginalize(correlated, engine, init_values={"correlation": 0.5})
    value, slope = jax.value_and_grad(lambda r: density(marginal, (np.array([1, 4]),), correlation=r))(1.6)
    assert value == -jnp.inf and slope == 0.0
    assert np.isfinite(density(marginal, (np.array([1, 4]),), correlation=0.6))
    with pytest.warns(UserWarning, match=f"At 2 of 3 draws .* {engine.__name__} finds no finite evidence"):
        marginal.recover(jax.random.key(0), {"correlation": [0.6, 1.6, 1.5]})


@pytest.mark.thorough
def test_fits_that_do_not_converge_are_counted():
    marginal = marginalize(intercepts, EP, num_steps=2)
    with pytest.warns(UserWarning, match="At 3 of 3 draws .* did not converge in 2 steps of EP"):
        marginal.recover(jax.random.key(0), {"scales": [[0.5, 1.0]] * 3}, GROUP, COUNTS)


@pytest.mark.thorough
def test_fits_that_lead_nowhere_have_no_evidence():
    """EP has no fixed point where Student's distribution is narrower than its data: what it ends at was
    thousands of nats above the evidence."""

    def robust(x, y):
        scale = numpyro.sample("scale", dist.HalfNormal(2.0))
        weights = numpyro.sample("weights", dist.Normal(0.0, 5.0).expand([2]))
        numpyro.sample("y", dist.StudentT(2.0, weights[0] + weights[1] * x, scale), obs=y)

    rng = np.random.default_rng(2)
    x = rng.normal(size=20)
    y = 1.0 + x + rng.standard_t(2.0, 20)
    marginal = marginalize(robust, init_values={"scale": 1.0})
    evidence = jax.jit(lambda scale: density(marginal, (x, y), scale=scale))
    found = np.array([evidence(scale) for scale in (1.0, 0.03, 0.01)])
    assert np.isfinite(found[0])
    assert np.isneginf(found[1:]).all()


@pytest.mark.thorough
def test_draws_lie_inside_the_support():
    def model(y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        f = numpyro.sample("f", dist.Normal(0.3, scale).expand([3]))
        numpyro.sample("y", dist.Poisson(jnp.maximum(f, 0.0)), obs=y)

    marginal = marginalize(model)
    draws = marginal.recover(jax.random.key(0), {"scale": jnp.full(300, 0.8)}, np.array([1, 2, 1]))
    assert bool((draws["f"] > 0).all())


@pytest.mark.thorough
def test_second_data_set_compiles_nothing():
    other = np.random.default_rng(1).permutation(COUNTS)

    def run(y, seed):
        marginal = marginalize(intercepts)
        values = [density(marginal, (GROUP, y), scales=jnp.array([0.5 + seed, 1.0])) for _ in range(2)]
        draws = marginal.recover(jax.random.key(seed), {"scales": jnp.full((4, 2), 0.5 + seed)})
        return jax.block_until_ready((values, draws))

    run(COUNTS, 0)
    run(COUNTS, 1)
    with compiled_programs() as names:
        run(other, 2)
    assert names == []


@pytest.mark.thorough
def test_second_run_of_a_chain_compiles_nothing_but_what_numpyro_does():
    """NumPyro compiles the loop over the draws in every run, of any model; of ours nothing stands beside it."""
    mcmc = MCMC(NUTS(marginalize(schools)), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), SIGMA, EFFECT)
    with compiled_programs() as names:
        mcmc.run(jax.random.key(1), SIGMA, EFFECT)
    assert set(names) <= {"jit(_fori_collect_loop)"}


def test_model_is_read_once_for_equal_arguments():
    calls = []

    def model(y):
        calls.append(1)
        schools(SIGMA, y)

    marginal = marginalize(model)
    density(marginal, (EFFECT,), tau=3.0)
    first = len(calls)
    for same in (EFFECT.copy(), EFFECT):
        density(marginal, (same,), tau=3.0)
    # to tell whether it is the same model, and as a part of the marginal one
    assert len(calls) == first + 4
    assert density(marginal, (EFFECT + 1,), tau=3.0) != density(marginal, (EFFECT,), tau=3.0)


def test_model_is_read_again_where_it_reads_something_else():
    sigma = SIGMA

    def model(y):
        schools(sigma, y)

    marginal = marginalize(model)
    before = density(marginal, (EFFECT,), tau=3.0)
    sigma = 2.0 * SIGMA
    after = density(marginal, (EFFECT,), tau=3.0)
    assert after != before
    np.testing.assert_allclose(after, density(marginalize(model), (EFFECT,), tau=3.0), rtol=1e-12)


def test_first_call_may_be_within_a_compiled_function():
    args = (SIGMA.tolist(), None)

    def model(sigma, _):
        schools(np.array(sigma), EFFECT)

    value = jax.jit(lambda tau: density(marginalize(model), args, tau=tau))(7.0)
    np.testing.assert_allclose(value, schools_exactly(7.0), rtol=1e-9)


def test_words():
    marginal = marginalize(schools, partial(LaplaceApproximation, num_steps=20), tol=1e-5)
    assert repr(marginal) == "MarginalModel(schools, engine=LaplaceApproximation): not read yet"
    words = marginal.describe(SIGMA, y=EFFECT)
    assert words.startswith("sampled: tau\nintegrated out by LaplaceApproximation: mu, theta\n")
    assert repr(marginal).endswith("samples tau; integrates out mu, theta")
    of_theta = marginalize(schools, field="theta").describe(SIGMA, EFFECT)
    assert of_theta.startswith("sampled: mu, tau\nintegrated out by EP: theta\n")


def test_refusals_teach():
    with pytest.raises(TypeError, match="engine is a class"):
        marginalize(schools, EP(schools))
    with pytest.raises(TypeError, match="must be the class of an engine"):
        marginalize(schools, "EP")
    with pytest.raises(TypeError, match="BilinearVG gives no log evidence"):
        marginalize(schools, BilinearVG)
    for engine, options in ((INLA, {}), (EP, {"integrate": "ccd"})):
        with pytest.raises(TypeError, match="For a chain over them leave integrate out"):
            marginalize(schools, engine, **options)
    with pytest.raises(ModelStructureError, match="close over the data"):
        jax.jit(lambda y: density(marginalize(schools), (SIGMA, y), tau=1.0))(EFFECT)
    with pytest.raises(ModelStructureError, match=r"nothing to sample.*hyper_values \['tau'\]"):
        density(marginalize(schools, hyper_values={"tau": 2}), (SIGMA, EFFECT))
    marginal = marginalize(schools)
    marginal.describe(SIGMA, EFFECT)
    with pytest.raises(ValueError, match=r"samples lack the hyperparameters \['tau'\]"):
        marginal.recover(jax.random.key(0), {"mu": [1.0]})
    with pytest.raises(ValueError, match="without group_by_chain"):
        marginal.recover(jax.random.key(0), {"tau": [[1.0]]})

    def discrete(y):
        flag = numpyro.sample("flag", dist.Bernoulli(0.5))
        level = numpyro.sample("level", dist.Normal(flag, 1.0))
        numpyro.sample("y", dist.Normal(level, 1.0), obs=y)

    with pytest.raises(ModelStructureError, match="'flag' .* is discrete"):
        density(marginalize(discrete), (1.0,))

    def sparse(y):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        b = numpyro.sample("b", dist.Laplace(0.0, tau).expand([4]))
        numpyro.sample("y", dist.Normal(b, 0.5), obs=y)

    with pytest.raises(ModelStructureError, match="needs a Gaussian field, and EP reads this model as sparse"):
        marginalize(sparse).describe(np.array([1.0, 0.0, 3.0, 0.0]))


def inside(x, y=None):
    bound = numpyro.sample("bound", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.Uniform(0.0, bound))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    numpyro.sample("y", dist.Normal(slope[0] * x, noise + 0.1), obs=y)


INSIDE = np.linspace(-1.0, 1.0, 8), 0.5 * np.linspace(-1.0, 1.0, 8) + 0.4 * np.sin(9.0 * np.linspace(-1.0, 1.0, 8))


def test_supports_may_move_as_samplers_move_with_them():
    """Searches refuse them, and there is none here."""
    marginal, x, y = marginalize(inside), *INSIDE
    for bound, noise in ((2.5, 0.4), (0.6, 0.5), (2.5, 2.0)):  # the last beyond any start
        covariance = jnp.outer(x, x) + (noise + 0.1) ** 2 * jnp.eye(8)
        exact = multivariate_normal.logpdf(y, jnp.zeros(8), covariance)
        exact += dist.HalfNormal(1.0).log_prob(bound) - jnp.log(bound)
        found = density(marginal, (x, y), bound=bound, noise=noise)
        np.testing.assert_allclose(found, exact, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.thorough
def test_a_chain_moves_with_supports_that_move():
    marginal, x, y = marginalize(inside), *INSIDE
    chain = MCMC(NUTS(marginal), num_warmup=50, num_samples=50, progress_bar=False)
    chain.run(jax.random.key(0), x, y)
    draws = chain.get_samples()
    assert np.all(draws["noise"] < draws["bound"])
    assert np.ptp(draws["noise"]) > 0.1
