"""INLA against quadrature: where Laplace's method is exact, and where it is not."""

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import Predictive
from scipy.integrate import quad
from scipy.special import expit, logsumexp
from scipy.stats import halfnorm, lognorm, multivariate_normal, norm, poisson, skewnorm

from numpyro_ext.infer import INLA, cross_validate
from numpyro_ext.infer.gaussian.integration.mixture_marginals import MarginalMixture, SkewNormal
from numpyro_ext.infer.hyper.density.design import central_composite, explore_lattice
from numpyro_ext.structure import ModelStructureError
from tests.tiers import thorough

KEY = jax.random.key(0)


def run(model, *args, **options):
    engine = INLA(model, progress_bar=False, **options)
    engine.run(KEY, *args)
    return engine


# The design


@pytest.mark.parametrize("dimension, size", [(1, 3), (2, 9), (3, 15), (4, 25), (5, 27), (6, 45)])
def test_central_composite_integrates_cubics(dimension, size):
    points, log_volumes = central_composite(dimension)
    weights = np.exp(log_volumes + multivariate_normal.logpdf(points, np.zeros(dimension)).reshape(-1))
    assert len(points) == size and len(np.unique(points.round(9), axis=0)) == size
    np.testing.assert_allclose(weights.sum(), 1.0)
    np.testing.assert_allclose(weights @ points, 0.0, atol=1e-12)
    np.testing.assert_allclose(np.einsum("k,ki,kj->ij", weights, points, points), np.eye(dimension), atol=1e-12)
    np.testing.assert_allclose(np.einsum("k,ki,kj,kl->ijl", weights, points, points, points), 0.0, atol=1e-12)


def test_lattice_follows_a_curved_density():
    def log_density(z):
        return -0.5 * z[:, 0] ** 2 - 2.0 * (z[:, 1] - 0.8 * z[:, 0] ** 2) ** 2

    design, chosen, reach = explore_lattice(log_density, 2, 0.25, 12.0)
    assert reach == 12.0 and len(chosen) == len(design.points)
    np.testing.assert_allclose(logsumexp(log_density(design.points) + design.log_volumes), np.log(np.pi), atol=1e-4)
    assert design.points[:, 1].max() > 8.0
    counted: list[int] = []

    def flat(z):
        counted.append(len(z))
        return 0.0 * z[:, 0]

    assert explore_lattice(flat, 2, 1.25, 3.8).reach < 3.8
    assert sum(counted) < 300  # fits of a field, which may take seconds each


@pytest.mark.parametrize("step, drop, tolerance", [(1.25, 3.8, 0.15), (0.75, 10.0, 0.02)])
def test_lattice_follows_a_bent_ridge_that_is_narrower_than_its_steps(step, drop, tolerance):
    """Of two scales the data know the sum of squares; without its arms half of the integral is missing."""

    def log_density(z):
        logs = z @ np.array([[0.07, 0.07], [0.7, -0.7]])
        return -25.0 * np.log(np.mean(np.exp(2.0 * logs), axis=1)) ** 2 + logs.sum(1)

    found = explore_lattice(log_density, 2, step, drop)
    masses = np.exp(log_density(found.design.points) + found.design.log_volumes)
    x, y = np.arange(-200.0, 20.0, 0.25), np.arange(-15.0, 15.0, 0.03)
    exact = 0.0075 * np.exp(log_density(np.stack(np.meshgrid(x, y), -1).reshape(-1, 2))).reshape(len(y), len(x)).sum(1)
    assert found.reach == drop and len(masses) < 300
    np.testing.assert_allclose(masses.sum(), exact.sum(), rtol=tolerance)
    far = masses[np.abs(found.design.points[:, 1]) > 1.9].sum() / masses.sum()
    np.testing.assert_allclose(far, exact[np.abs(y) > 1.9].sum() / exact.sum(), atol=tolerance)


@pytest.mark.parametrize("step, drop", [(1.0, 8.0), (0.75, 10.0), (0.6, 14.0)])
def test_lattice_follows_heavy_tails(step, drop):
    """Of a normal density and a wider one, of which the curvature at the mode says little; the integral is one."""

    def log_density(z):
        parts = [norm.logpdf(z, scale=scale).sum(1) + np.log(weight) for scale, weight in ((1.0, 0.7), (1.8, 0.3))]
        return logsumexp(parts, axis=0)

    points, log_volumes = explore_lattice(log_density, 3, step, drop).design
    masses = np.exp(log_density(points) + log_volumes)
    # What is left out lies below the level.
    fine = np.stack(np.meshgrid(*3 * [np.linspace(-14.0, 14.0, 57)], indexing="ij"), -1).reshape(-1, 3)
    below = np.exp(log_density(fine))
    below = below[below < np.exp(-drop) * below.max()].sum() * 0.5**3
    assert 1.0 - 2.0 * below < masses.sum() < 1.0 + 1e-3


def test_a_lattice_that_is_cut_has_the_largest_densities():
    def ridge(z):
        return -0.5 * np.sum((z / np.array([5.0, 1.0, 1.0])) ** 2, axis=1)

    found = explore_lattice(ridge, 3, 0.5, 12.0)
    assert found.reach == 10.0
    axes = np.arange(-60, 61), np.arange(-10, 11), np.arange(-10, 11)
    points = 0.5 * np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    inside = {tuple(z) for z in points[ridge(points) > -found.reach].tolist()}
    assert len(inside) > 10_000 and inside <= {tuple(z) for z in found.design.points.tolist()}


# The marginals


def test_skew_normals_have_the_moments_asked_for():
    skewness = np.array([-0.9, -0.2, 0.0, 0.5])
    density = SkewNormal.from_moments(np.full(4, 0.7), np.full(4, 2.5), skewness)
    found = skewnorm.stats(density.shape, density.location, density.scale, moments="mvs")
    np.testing.assert_allclose(found, [np.full(4, 0.7), np.full(4, 2.5), skewness], atol=1e-12)
    x = np.linspace(-3.0, 4.0, 4)
    np.testing.assert_allclose(density.cdf(x), skewnorm.cdf(x, density.shape, density.location, density.scale))
    np.testing.assert_allclose(density.density(x), skewnorm.pdf(x, density.shape, density.location, density.scale))


def test_quantiles_invert_the_mixture():
    generator = np.random.default_rng(0)
    mixture = MarginalMixture(
        np.array([0.2, 0.5, 0.3]), generator.normal(size=(3, 4)), generator.gamma(2.0, size=(3, 4)),
        generator.uniform(-0.8, 0.8, size=(3, 4)),
    )  # fmt: skip
    q = np.array([0.001, 0.3, 0.99])
    np.testing.assert_allclose(mixture.cdf(mixture.quantile(q)), np.broadcast_to(q[:, None], (3, 4)), atol=1e-12)
    draws = np.concatenate(
        [
            skewnorm.ppf((np.arange(20000 * weight) + 0.5) / (20000 * weight), a, m, s)
            for weight, m, s, a in zip(
                mixture.weights, *(p[:, 0] for p in SkewNormal.from_moments(*mixture[1:4])), strict=True
            )
        ]
    )
    np.testing.assert_allclose(
        [part[0] for part in mixture.mean_and_variance()], [draws.mean(), draws.var()], rtol=1e-3
    )


def test_quantiles_of_parts_of_all_widths():
    """Narrow parts beside wide ones, where steps of Newton's method lead astray, far tails, and points."""
    weights, means = np.array([0.3, 0.3, 0.4]), np.array([[-3.0, 0.0], [5.0, 0.0], [0.1, 2.0]])
    variances = np.array([[1e-10, 0.0], [4.0, 0.0], [1e-4, 0.0]])
    mixture = MarginalMixture(weights, means, variances, np.zeros((3, 2)))
    q = np.array([[1e-12, 0.2, 0.3001], [0.69, 0.9, 1.0 - 1e-9]])
    found = mixture.quantile(q)
    assert found.shape == (2, 3, 2)
    np.testing.assert_allclose(mixture.cdf(found)[..., 0], q, rtol=1e-9)
    np.testing.assert_allclose(found[..., 1], np.where(q <= 0.6, 0.0, 2.0), atol=1e-12)
    single = MarginalMixture(*(np.asarray(part, np.float32) for part in mixture[:4]))
    found = single.quantile(q[1].astype(np.float32))  # among wide parts: in narrow ones it has no digits
    assert found.dtype == np.float32
    np.testing.assert_allclose(mixture.cdf(found.astype(float))[:, 0], q[1], atol=1e-6)


# Exact fields


def normal(y):
    """The field is Gaussian given the noise, so that nothing is approximated but the integral."""
    noise = numpyro.sample("noise", dist.LogNormal(-0.2, 0.8))
    level = numpyro.sample("level", dist.Normal(0.5, 2.0))
    numpyro.deterministic("twice", 2.0 * level)
    with numpyro.plate("observations", y.shape[0]):
        numpyro.sample("y", dist.Normal(level, noise), obs=y)


@pytest.fixture(scope="module")
def normal_case():
    y = np.random.default_rng(4).normal(1.0, 0.8, size=7)
    noise = np.exp(np.linspace(-4.0, 4.0, 4001))
    precision = 0.25 + len(y) / noise**2
    mean = (0.125 + y.sum() / noise**2) / precision
    log_joint = [multivariate_normal.logpdf(y, np.full(7, 0.5), 4.0 + s**2 * np.eye(7)) for s in noise[::10]]
    log_joint = np.interp(np.log(noise), np.log(noise[::10]), log_joint) + lognorm.logpdf(
        noise, 0.8, scale=np.exp(-0.2)
    )
    mass = np.exp(log_joint) * noise * np.diff(np.log(noise[:2]))
    return y, noise, mean, precision, mass


@pytest.fixture(scope="module")
def fitted(normal_case):
    return run(normal, jnp.asarray(normal_case[0]), num_samples=20000)


@pytest.mark.thorough
def test_field_with_unknown_noise(fitted, normal_case):
    _, noise, mean, precision, mass = normal_case
    weights = mass / mass.sum()
    np.testing.assert_allclose(fitted.log_evidence, np.log(mass.sum()), atol=1e-3)
    level, hyper = fitted.posterior["level"], fitted.hyper["noise"]
    expected = weights @ mean
    np.testing.assert_allclose(level.mean, expected, atol=1e-4)
    np.testing.assert_allclose(level.variance, weights @ (1 / precision + (mean - expected) ** 2), rtol=1e-3)
    for q in (0.025, 0.5, 0.9):
        at = float(level.quantile(q))
        np.testing.assert_allclose(weights @ norm.cdf(at, mean, precision**-0.5), q, atol=1e-3)
        np.testing.assert_allclose(level.cdf(at), q, atol=1e-12)
    np.testing.assert_allclose(hyper.mean, weights @ noise, rtol=1e-3)
    np.testing.assert_allclose(hyper.sd, np.sqrt(weights @ (noise - weights @ noise) ** 2), rtol=2e-3)
    cumulative = np.cumsum(weights)
    for q in (0.05, 0.5, 0.95):
        np.testing.assert_allclose(np.interp(hyper.quantile(q), noise, cumulative), q, atol=5e-3)
    np.testing.assert_allclose(fitted.posterior["twice"].sd, 2.0 * level.sd)
    np.testing.assert_allclose(level.covariance(), level.variance)


@pytest.mark.slow
def test_draws_show_the_uncertainty_of_hyperparameters(fitted):
    draws, level, hyper = fitted.get_samples(), fitted.posterior["level"], fitted.hyper["noise"]
    assert draws["noise"].shape == draws["level"].shape == (20000,)
    np.testing.assert_allclose(np.mean(draws["noise"]), hyper.mean, atol=0.01 * hyper.sd)
    np.testing.assert_allclose(np.std(draws["noise"]), hyper.sd, rtol=0.02)
    np.testing.assert_allclose(np.mean(draws["level"]), level.mean, atol=4 * level.sd / 20000**0.5)
    np.testing.assert_allclose(np.std(draws["level"]), level.sd, rtol=0.04)
    again = fitted.get_samples(seed=1)
    assert not np.array_equal(again["level"], draws["level"])
    assert np.abs(np.corrcoef(draws["level"][1:], draws["level"][:-1])[0, 1]) < 0.03
    sample = level.sample(jax.random.key(1), 5000)
    np.testing.assert_allclose(np.std(sample), level.sd, rtol=0.06)
    data = az.from_numpyro(fitted)
    np.testing.assert_allclose(np.std(np.asarray(data.posterior["noise"])), hyper.sd, rtol=0.05)
    predicted = Predictive(normal, draws)(jax.random.key(2), jnp.zeros(7))
    assert set(predicted) >= {"twice"}


@pytest.mark.thorough
def test_summary_energy_and_persistence(fitted, normal_case, capsys, tmp_path):
    y = normal_case[0]
    fitted.print_summary()
    shown = capsys.readouterr().out
    assert "noise" in shown and f"Log evidence: {float(fitted.log_evidence):.3f}" in shown
    energy, draws = fitted.get_extra_fields()["potential_energy"], fitted.get_samples()
    density = norm.logpdf(y[:, None], draws["level"], draws["noise"]).sum(0) + norm.logpdf(draws["level"], 0.5, 2.0)
    density += lognorm.logpdf(draws["noise"], 0.8, scale=np.exp(-0.2))
    np.testing.assert_allclose(-energy, density, rtol=1e-9)
    fitted.save(tmp_path / "run")
    loaded = INLA.load(tmp_path / "run", normal)
    assert loaded.log_evidence == fitted.log_evidence
    np.testing.assert_array_equal(loaded.posterior["level"].quantile(0.3), fitted.posterior["level"].quantile(0.3))


def test_prediction_is_averaged(fitted, normal_case):
    _, noise, mean, precision, mass = normal_case
    new = np.array([0.4, 3.0])
    expected = (mass / mass.sum()) @ norm.pdf(new, mean[:, None], np.sqrt(noise**2 + 1 / precision)[:, None])
    np.testing.assert_allclose(fitted.log_predictive(jnp.asarray(new))["y"], np.log(expected), atol=1e-3)


def trend(x, y, mask=True):
    """Three hyperparameters over a Gaussian field: the evidence given them is known."""
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.5))
    centre = numpyro.sample("centre", dist.Normal(0.0, 1.0))
    slopes = numpyro.sample("slopes", dist.Normal(centre, scale).expand([3]).to_event(1))
    with numpyro.plate("observations", x.shape[0]), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(x @ slopes, noise), obs=y)


@pytest.mark.slow
def test_three_hyperparameters_by_central_composite_design():
    generator = np.random.default_rng(5)
    x = generator.normal(size=(30, 3))
    y = x @ np.array([0.4, 1.3, -0.6]) + 0.6 * generator.normal(size=30)
    options = {"field": ["slopes"], "marginal": "gaussian"}
    engine = run(trend, jnp.asarray(x), jnp.asarray(y), design="central-composite", **options)
    lattice = run(trend, jnp.asarray(x), jnp.asarray(y), design="lattice", grid_step=1.0, **options)
    assert len(engine.hyper["scale"].weights) == 15 and len(lattice.hyper["scale"].weights) > 300

    # Quadrature: nodes of a normal with twice the width around the mode, in the unconstrained space.
    grid = np.stack(np.meshgrid(*[np.linspace(-4.5, 4.5, 25)] * 3, indexing="ij"), -1).reshape(-1, 3)
    mode = np.array([float(np.log(engine.hyper["scale"].mode)), float(np.log(engine.hyper["noise"].mode)),
                     float(engine.hyper["centre"].mode)])  # fmt: skip
    width = np.array([0.45, 0.16, 0.7])
    z = mode + grid * width
    gram, cross, total = x.T @ x, x.T @ y, y @ y
    s, n, c = np.exp(2 * z[:, 0]), np.exp(2 * z[:, 1]), z[:, 2]
    inner = np.eye(3) / s[:, None, None] + gram / n[:, None, None]
    shift = cross / n[:, None] + (c / s)[:, None]
    mean = np.linalg.solve(inner, shift[..., None])[..., 0]
    log_p = -15 * np.log(2 * np.pi * n) - 1.5 * np.log(s) - 0.5 * np.linalg.slogdet(inner)[1]
    log_p += 0.5 * np.sum(shift * mean, 1) - 0.5 * total / n - 1.5 * c**2 / s
    log_p += norm.logpdf(z[:, 0], 0.0, 0.5) + norm.logpdf(z[:, 1], -0.5, 0.5) + norm.logpdf(c)
    log_mass = log_p + np.sum(np.log(width * 9.0 / 24))
    weights = np.exp(log_mass - logsumexp(log_mass))
    assert weights.reshape(25, 25, 25)[[0, -1]].sum() < 1e-4

    variance = np.diagonal(np.linalg.inv(inner), axis1=1, axis2=2)
    exact_mean = weights @ mean
    exact_sd = np.sqrt(weights @ (variance + (mean - exact_mean) ** 2))
    np.testing.assert_allclose(lattice.log_evidence, logsumexp(log_mass), atol=1e-3)
    np.testing.assert_allclose(lattice.posterior["slopes"].mean, exact_mean, atol=1e-3)
    np.testing.assert_allclose(lattice.posterior["slopes"].sd, exact_sd, rtol=2e-3)
    np.testing.assert_allclose(lattice.hyper["noise"].mean, weights @ np.exp(z[:, 1]), rtol=1e-3)
    np.testing.assert_allclose(lattice.hyper["centre"].sd, np.sqrt(weights @ (c - weights @ c) ** 2), rtol=2e-3)
    # Fifteen points: the log density is not quadratic, and what is left is a matter of hundredths.
    np.testing.assert_allclose(engine.log_evidence, logsumexp(log_mass), atol=0.08)
    np.testing.assert_allclose(engine.posterior["slopes"].mean, exact_mean, atol=0.01)
    np.testing.assert_allclose(engine.posterior["slopes"].sd, exact_sd, rtol=0.02)
    np.testing.assert_allclose(engine.hyper["noise"].mean, weights @ np.exp(z[:, 1]), rtol=0.01)


# Fields that are not Gaussian


def groups(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    centre = numpyro.sample("centre", dist.Normal(1.0, 1.0))
    with numpyro.plate("groups", y.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(centre, scale))
        numpyro.sample("y", dist.Poisson(jnp.exp(effect)), obs=y)


@pytest.fixture(scope="module")
def exact_groups():
    """Brute force: two hyperparameters on a grid, and one-dimensional integrals over the effects."""
    y = np.array([3, 0, 8, 2, 1, 5])
    scales, centres = np.meshgrid(np.exp(np.linspace(-4.0, 1.3, 90)), np.linspace(-3.0, 4.0, 71), indexing="ij")
    nodes, node_weights = np.polynomial.hermite_e.hermegauss(60)
    effect = centres[..., None, None] + scales[..., None, None] * nodes
    terms = poisson.pmf(y[:, None], np.exp(effect)) * node_weights / np.sqrt(2 * np.pi)
    likelihood = terms.sum(-1)
    density = likelihood.prod(-1) * halfnorm.pdf(scales) * norm.pdf(centres, 1.0, 1.0) * scales
    mass = density * (5.3 / 89) * 0.1
    weights = mass / mass.sum()
    means = (terms * effect).sum(-1) / likelihood
    squares = (terms * effect**2).sum(-1) / likelihood
    mean = np.einsum("sc,scn->n", weights, means)
    sd = np.sqrt(np.einsum("sc,scn->n", weights, squares) - mean**2)
    moments = {n: (np.sum(weights * v), np.sqrt(np.sum(weights * v**2) - np.sum(weights * v) ** 2))
               for n, v in (("scale", scales), ("centre", centres))}  # fmt: skip
    return y, np.log(mass.sum()), mean, sd, moments


@pytest.mark.thorough
@pytest.mark.parametrize("marginal", ["simplified-laplace", *thorough("gaussian")])
def test_poisson_groups(exact_groups, marginal):
    y, log_evidence, mean, sd, moments = exact_groups
    engine = run(groups, jnp.asarray(y), field=["effect"], marginal=marginal)
    np.testing.assert_allclose(engine.log_evidence, log_evidence, atol=0.05)
    error = np.max(np.abs(engine.posterior["effect"].mean - mean) / sd)
    print(marginal, error)
    assert error < 0.05 if marginal == "simplified-laplace" else 0.05 < error < 0.3
    drawn = np.asarray(engine.get_samples(num_samples=8000)["effect"])
    assert np.max(np.abs(drawn.mean(0) - engine.posterior["effect"].mean) / sd) < 0.05
    if marginal == "simplified-laplace":
        np.testing.assert_allclose(engine.posterior["effect"].sd, sd, rtol=0.06)
    for name, (expected, deviation) in moments.items():
        assert abs(engine.hyper[name].mean - expected) < 0.06 * deviation
        np.testing.assert_allclose(engine.hyper[name].sd, deviation, rtol=0.05)


def logistic(x, y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 2.0))
    numpyro.deterministic("constant", 0.0 * slope + 1.0)
    numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)


@pytest.mark.thorough
def test_simplified_laplace_without_hyperparameters():
    x = np.linspace(0.2, 2.8, 14)
    y = np.array([0, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1])

    def density(slope):
        return np.prod(expit((2 * y - 1) * x * slope)) * norm.pdf(slope, scale=2.0)

    evidence, first, second = (quad(lambda s, p=p: s**p * density(s), -10, 20)[0] for p in range(3))
    mean, sd = first / evidence, np.sqrt(second / evidence - (first / evidence) ** 2)
    errors = {}
    for marginal in ("gaussian", "simplified-laplace"):
        engine = run(logistic, jnp.asarray(x), jnp.asarray(y), marginal=marginal)
        slope = engine.posterior["slope"]
        quantiles = [quad(density, -10, float(slope.quantile(q)))[0] / evidence for q in (0.05, 0.5, 0.95)]
        drawn = engine.get_samples(num_samples=4000)["slope"]
        assert abs(drawn.mean() - slope.mean) < 4.0 * slope.sd / np.sqrt(4000), marginal
        errors[marginal] = abs(slope.mean - mean) / sd, np.max(np.abs(np.subtract(quantiles, [0.05, 0.5, 0.95])))
        np.testing.assert_allclose(engine.posterior["constant"].quantile(0.2), 1.0)
    print(errors)
    assert errors["simplified-laplace"][0] < 0.25 * errors["gaussian"][0]
    assert errors["simplified-laplace"][1] < 0.5 * errors["gaussian"][1]
    assert engine.hyper == {}


# Refusals


def without_prior(y):
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    level = numpyro.sample("level", dist.Normal(0.0, scale))
    numpyro.sample("y", dist.Bernoulli(logits=level), obs=y)


def many(y):
    scales = numpyro.sample("scales", dist.HalfNormal(1.0).expand([7]).to_event(1))
    level = numpyro.sample("level", dist.Normal(0.0, scales).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=level), obs=y)


def kinked(y):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Laplace(level, 1.0), obs=y)


@pytest.mark.thorough
def test_refusals(line_case):
    given = run(without_prior, jnp.array(1), hyper_values={"scale": 2.0}, num_samples=10)
    assert given.hyper["scale"].is_fixed and given.hyper["scale"].value == 2.0
    assert given.get_samples()["level"].shape == (10,)
    with pytest.raises(ValueError, match="was given"):
        given.hyper["scale"].quantile(0.5)
    with pytest.raises(ModelStructureError, match=r"up to 6 hyperparameters, and .* 7: 'scales' \(7\). Use .*'normal'"):
        run(many, jnp.zeros((30, 7), int), integrate="ccd")
    with pytest.raises(ValueError, match="LaplaceApproximation sets them to their optimum"):
        INLA(many, integrate="none")
    with pytest.raises(ModelStructureError, match="'y'.*has a kink"):
        run(kinked, jnp.array(0.3))
    with pytest.raises(ValueError, match="marginal must be one of"):
        INLA(kinked, marginal="laplace")
    with pytest.raises(ValueError, match="grid_step must be positive"):
        INLA(kinked, grid_step=0.0)
    with pytest.raises(ValueError, match="integrates over them"):
        cross_validate(INLA(line_case.model), KEY, line_case.x, line_case.y)
