"""What cumulants add to EP, against quadrature in two and three dimensions."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import logsumexp
from scipy.stats import halfnorm, norm, poisson

from numpyro_ext.infer import EP, VariationalGaussian
from numpyro_ext.infer.front.results import LogEvidence
from numpyro_ext.infer.gaussian.algorithms.propagation.cumulants import Correction, tilted_cumulants
from numpyro_ext.infer.gaussian.answers.corrected import corrected
from numpyro_ext.potentials import (
    LogitPotential,
    PoissonExpPotential,
    ProbitPotential,
    RectifiedLinearPoissonPotential,
    StudentTPotential,
)
from tests.infer.small_problems import PROBLEMS, by_quadrature
from tests.tiers import few, thorough

KEY = jax.random.key(0)


def run(model, *args, **options):
    engine = EP(model, progress_bar=False, **options)
    engine.run(KEY, *args)
    return engine


def errors(name):
    """Of log evidence and means, in standard deviations, without and with correction."""
    model, y = PROBLEMS[name]
    engine = run(model, y)
    exact, means = by_quadrature(engine)
    found, (site,) = engine.corrected(), engine.posterior
    plain = engine.posterior[site]
    gaps = [np.abs(mean - means) / plain.sd for mean in (plain.mean, found.mean[site])]
    evidence = [abs(engine.log_evidence - exact), abs(found.log_evidence - exact)]
    np.testing.assert_allclose(found.log_evidence - engine.log_evidence, found.change, atol=1e-12)
    return evidence, [float(np.max(gap)) for gap in gaps]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*thorough("logistic line"), "Bernoulli, correlation 0.98", *thorough("ordinal line")])
def test_evidence_and_means_come_closer(name):
    evidence, means = errors(name)
    assert evidence[1] < 0.25 * evidence[0] and means[1] < 0.5 * means[0], (evidence, means)


@pytest.mark.slow
def test_evidence_of_nearly_all_problems_comes_closer():
    found = [errors(name) for name in PROBLEMS]
    assert sum(evidence[1] < evidence[0] for evidence, _ in found) >= 11
    assert sum(means[1] < means[0] for _, means in found) >= 9


@pytest.mark.parametrize(
    "potential",
    few(
        [
            LogitPotential(jnp.array([1.0])),
            ProbitPotential(jnp.array([1.0])),
            PoissonExpPotential(jnp.array([2.0])),
            StudentTPotential(jnp.array([0.5]), 0.7, 4.0),
        ],
        2,
    ),
)
def test_cumulants_by_quadrature(potential):
    mean, variance = jnp.array([-0.7]), jnp.array([1.8])
    found = tilted_cumulants(potential, mean, variance)

    x = np.linspace(-13, 12, 4001)
    weights = np.array(jnp.exp(potential.log_density(jnp.asarray(x)))) * norm.pdf(x, -0.7, np.sqrt(1.8))
    weights /= weights.sum()
    centred = x - weights @ x
    third, fourth = weights @ centred**3, weights @ centred**4 - 3 * (weights @ centred**2) ** 2
    np.testing.assert_allclose(np.concatenate(found), [third, fourth], rtol=1e-7, atol=1e-9)


@pytest.mark.thorough
def test_cumulants_of_rectified_counts_are_exact():
    """Gauss-Legendre rules on both sides of the kink."""
    counts, mean, variance = np.array([0.0, 0.0, 1.0, 3.0]), np.array([-2.0, 1.0, 0.5, 2.0]), 1.7
    nodes, weights = np.polynomial.legendre.leggauss(80)
    x = np.concatenate([14.0 * (nodes - 1.0) / 2.0, 14.0 * (nodes + 1.0) / 2.0])[:, None]
    masses = np.tile(weights, 2)[:, None] * norm.pdf(x, mean, np.sqrt(variance)) * poisson.pmf(counts, np.maximum(x, 0))
    masses /= masses.sum(0)
    centred = x - np.sum(masses * x, axis=0)
    second, third, fourth = (np.sum(masses * centred**order, axis=0) for order in (2, 3, 4))
    factors = RectifiedLinearPoissonPotential(jnp.asarray(counts))
    found = tilted_cumulants(factors, jnp.asarray(mean), jnp.full(4, variance))
    np.testing.assert_allclose(found[0], third, rtol=1e-7)
    np.testing.assert_allclose(found[1], fourth - 3.0 * second**2, rtol=1e-6, atol=1e-9)


LINE = np.linspace(-2.0, 2.0, 16)
SEPARATED = (LINE > 0.1) | (np.arange(16) == 7)
MIXED = SEPARATED ^ np.isin(np.arange(16), [3, 6, 10, 13])


def wide_line(x, y):
    a, b = (numpyro.sample(name, dist.Normal(0, 10)) for name in "ab")
    numpyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y)


def exact_deviation(y):
    """Standard deviation of the slope, by quadrature."""
    a, b = np.linspace(-40.0, 40.0, 401)[:, None], np.linspace(-60.0, 60.0, 601)
    predictor = a[..., None] + b[:, None] * LINE
    log_density = (
        norm.logpdf(a, 0, 10) + norm.logpdf(b, 0, 10) - np.logaddexp(0.0, np.where(y, -1, 1) * predictor).sum(-1)
    )
    weights = np.exp(log_density - logsumexp(log_density)).sum(0)
    return np.sqrt(weights @ b**2 - (weights @ b) ** 2)


@pytest.mark.thorough
@pytest.mark.parametrize("engine_type", [EP, VariationalGaussian])
def test_standard_deviations_that_a_gaussian_has_too_small_are_told(engine_type, capsys):
    engine = engine_type(wide_line, progress_bar=False)
    engine.run(KEY, LINE, MIXED.astype(int))
    np.testing.assert_allclose(engine.posterior["b"].sd, exact_deviation(MIXED), rtol=0.08)
    engine.print_summary()
    assert "skewed" not in capsys.readouterr().out
    engine.run(KEY, LINE, SEPARATED.astype(int))
    exact = exact_deviation(SEPARATED) / engine.posterior["b"].sd
    engine.print_summary()
    message = " ".join(capsys.readouterr().out.split())
    told = float(message.split("of b is about ")[1].split(" ")[0])
    assert exact > 1.2 and abs(told / exact - 1.0) < 0.15 and "engine.sample_exactly(key)" in message
    assert engine.diagnostics.converged


def test_skewness_of_a_single_factor_is_in_its_moments(capsys):
    def model(y):
        level = numpyro.sample("level", dist.Normal(0, 10))
        numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)

    run(model, np.array([0])).print_summary()
    assert "skewed" not in capsys.readouterr().out


def test_gaussian_factors_need_no_correction():
    def model(y):
        level = numpyro.sample("level", dist.Normal(0, 2))
        numpyro.sample("y", dist.Normal(level, 0.5), obs=y)

    found = run(model, np.array([0.3, -0.4, 1.0])).corrected()
    np.testing.assert_allclose(found.change, 0.0, atol=1e-10)
    assert "by cumulants to order 2" in repr(found)


@pytest.mark.thorough
def test_hyperparameters_are_integrated_over():
    y = np.array([0, 1, 0, 0, 0, 0, 0, 0])

    def model(y):
        scale = numpyro.sample("scale", dist.HalfNormal(3))
        level = numpyro.sample("level", dist.Normal(0, scale))
        numpyro.sample("y", dist.Bernoulli(logits=2.0 * level), obs=y)

    u, level = np.linspace(-9, 4, 801)[:, None], np.linspace(-25, 15, 1601)
    log_density = halfnorm.logpdf(np.exp(u), scale=3.0) + u + norm.logpdf(level, 0, np.exp(u))
    log_density = log_density + 2.0 * level - len(y) * np.logaddexp(0.0, 2.0 * level)
    exact = logsumexp(log_density) + np.log((u[1, 0] - u[0, 0]) * (level[1] - level[0]))
    mean = np.sum(np.exp(log_density - logsumexp(log_density)) * level)
    engine = run(model, y, integrate="grid")
    found = engine.corrected()
    assert abs(found.log_evidence - exact) < 0.5 * abs(engine.log_evidence - exact)
    assert abs(found.mean["level"] - mean) < abs(engine.posterior["level"].mean - mean)
    assert found.log_evidence.hyperparameters == "integrated"


@pytest.mark.thorough
def test_what_cannot_be_corrected_is_refused():
    model, y = PROBLEMS["logistic line"]
    with pytest.raises(ValueError, match="power=0.5"):
        run(model, y, power=0.5).corrected()

    x = np.linspace(-1, 1, 40)

    def two(y):
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([2, 2]))
        location, log_scale = weights @ jnp.stack([jnp.ones(40), x])
        numpyro.sample("y", dist.Normal(location, jnp.exp(log_scale)), obs=y)

    with pytest.raises(ValueError, match="site 'y' have 2"):
        run(two, x + np.random.default_rng(0).standard_normal(40)).corrected()

    def sparse(y):
        x = numpyro.sample("x", dist.Laplace(0, 1).expand([4]))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=y)

    with pytest.raises(ValueError, match="sparse coefficients are one factor"):
        run(sparse, np.arange(4.0)).corrected()
    with pytest.warns(UserWarning, match="did not converge"):
        unfinished = run(model, y, num_steps=1)
    with pytest.raises(RuntimeError, match="fixed point of EP"):
        unfinished.corrected()


def test_a_corrected_evidence_has_the_constant_of_flat_priors_too():
    evidence = LogEvidence(-1.5, hyperparameters="integrated", flat_sites=("level",))
    found = corrected(evidence, np.ones(1), [Correction(jnp.asarray(0.25), {})]).log_evidence
    assert found == -1.25 and "up to a constant (flat prior of 'level')" in repr(found)
