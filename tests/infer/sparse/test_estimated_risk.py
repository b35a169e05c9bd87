"""Averages over bases whose deviations follow the error that the data tell of, by Stein's estimate."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import integrate, stats

from models.images import wavelet_denoising
from numpyro_ext.infer import EP
from numpyro_ext.infer.sparse.trees.risk import Risk, seen_elements
from numpyro_ext.structure import ModelStructureError

NOISE = 0.2
GIVEN = {
    "low_scale": jnp.full(7, 0.05),
    "high_scale": jnp.full(7, 1.0),
    "root_probability": jnp.full(4, 0.5),
    "transition": jnp.full((3, 2), 0.5),
}
IMAGE = np.zeros((8, 8))
IMAGE[2:6, 3:7] = 1.0


def averaged(data, pooling="risk"):
    engine = EP(
        wavelet_denoising, num_shifts=4, pooling=pooling, hyper_values=GIVEN, num_samples=400, progress_bar=False
    )
    engine.run(jax.random.key(0), data, NOISE, num_levels=2, wavelet="haar")
    return engine


def noisy(seed, noise=NOISE):
    return IMAGE + noise * np.random.default_rng(seed).normal(size=IMAGE.shape)


@pytest.fixture(scope="module")
def engine():
    return averaged(noisy(0))


@pytest.mark.thorough
def test_the_variance_within_members_is_the_derivative_of_the_mean_by_the_data(engine):
    """Along a random direction, by central differences; the estimate has the trace of the same matrix."""
    data, direction, step = noisy(0), np.random.default_rng(1).normal(size=64), 1e-4
    ends = [averaged(data + sign * step * direction.reshape(8, 8)).posterior["image"].mean for sign in (1.0, -1.0)]
    slope = np.asarray(ends[0] - ends[1]).reshape(-1) / (2.0 * step)
    within = np.mean([m.programs.site_covariance(m.inputs, name="image") for m in engine.members], axis=0)
    np.testing.assert_allclose(slope, within @ direction / NOISE**2, rtol=1e-5, atol=1e-6)
    site = engine.posterior["image"]
    expected = np.mean(np.square(data - site.mean)) - NOISE**2 + 2.0 * np.trace(within) / 64
    assert site.risk.estimate == pytest.approx(float(expected), rel=1e-6)
    assert site.risk.standard_error == pytest.approx(NOISE**2 * (2 / 64) ** 0.5)
    means = np.array([m.programs.site_mean(m.inputs, name="image") for m in engine.members])
    between = np.mean(np.var(means, axis=0))
    assert site.risk.highest == pytest.approx(np.trace(within) / 64 + between)
    assert site.risk.lowest == pytest.approx(np.trace(within) / 64 - between)


@pytest.mark.thorough
@pytest.mark.parametrize("noise", [NOISE, 0.75 * NOISE])
def test_the_estimate_is_right_on_the_average_over_noise(noise):
    """Beside the true error, of which it knows nothing, at the noise of the model and at less; off by what it says."""
    found = []
    for seed in range(40):
        site = averaged(noisy(seed, noise)).posterior["image"].with_noise_variance(noise**2)
        error = float(np.mean(np.square(np.asarray(site.mean) - IMAGE)))
        found.append((site.risk.estimate - error, error, site.risk.value))
    off, error, value = np.array(found).T
    deviation = site.risk.standard_error
    assert deviation == pytest.approx(noise**2 * (2 / 64) ** 0.5)
    assert abs(np.mean(off)) < 4.0 * deviation / len(off) ** 0.5
    # The standard error is that of noise alone: too large where means follow the data, as they do with 64 pixels, and
    # not too small but for chance (one in a thousand).
    high = np.sqrt(stats.chi2(len(off) - 1).ppf(0.999) / (len(off) - 1))
    assert 0.5 * deviation < np.std(off, ddof=1) < high * deviation
    # What is made of the estimate is nearer to the error than the variance of the mixture.
    assert np.mean(np.abs(value - error)) < np.mean(np.abs(site.risk.highest - error))


@pytest.mark.thorough
def test_noise_of_another_variance_than_the_model_has(engine):
    site = engine.posterior["image"]
    same = site.with_noise_variance(np.full((8, 8), NOISE**2))
    assert same.risk == pytest.approx(site.risk)
    less = site.with_noise_variance(0.9 * NOISE**2)
    slopes = float(np.mean(site._within)) / NOISE**2
    assert less.risk.estimate - site.risk.estimate == pytest.approx(0.1 * NOISE**2 * (1.0 - 2.0 * slopes))
    assert float(np.mean(less.variance)) == pytest.approx(less.risk.value)
    for wrong in (-1.0, np.nan, np.ones(3), 0.0):
        with pytest.raises(ValueError, match="noise_variance"):
            site.with_noise_variance(wrong)
    with pytest.raises(ValueError, match="this run has 'average'"):
        averaged(noisy(0), "average").posterior["image"].with_noise_variance(1.0)


@pytest.mark.thorough
def test_deviations_draws_and_quantiles_are_those_of_the_risk(engine):
    site, mixture = engine.posterior["image"], averaged(noisy(0), "mixture")
    assert float(np.mean(site.variance)) == pytest.approx(site.risk.value, rel=1e-6)
    np.testing.assert_array_equal(site.mean, mixture.posterior["image"].mean)
    factor = float(np.sqrt(site.risk.value / site.risk.highest))
    for of_mixture, found in (
        (mixture.get_samples()["image"], engine.get_samples()["image"]),
        (mixture.posterior["image"].quantile([0.1, 0.5, 0.9]), site.quantile([0.1, 0.5, 0.9])),
        (mixture.posterior["image"].sample(jax.random.key(3), 40), site.sample(jax.random.key(3), 40)),
    ):
        np.testing.assert_allclose(found, site.mean + factor * (of_mixture - site.mean), atol=1e-9)
    assert "average, its deviations by estimated risk, of 4 members" in engine.describe()
    assert "squared error" in str(site.risk)


@pytest.mark.parametrize("estimate", [-1.0, 0.05, 0.13, 0.4])
@pytest.mark.parametrize("error", [0.01, 0.1, 10.0])
def test_the_value_is_the_mean_of_a_cut_normal_variable(estimate, error):
    risk = Risk(estimate, error, 0.1, 0.2)
    middle = min(max(estimate, 0.1), 0.2)
    near = np.unique(np.clip(middle + error**2 / max(abs(middle - estimate), error) * np.linspace(-9, 9, 19), 0.1, 0.2))

    def weight(x):
        return np.exp(-0.5 * ((x - estimate) ** 2 - (middle - estimate) ** 2) / error**2)

    points = np.unique([0.1, *near, 0.2])
    parts = [
        [integrate.quad(lambda x, p=power: (x - 0.1) ** p * weight(x), *ends)[0] for power in (0, 1)]
        for ends in zip(points[:-1], points[1:], strict=True)
    ]
    mass, moment = np.sum(parts, axis=0)
    is_far = abs(middle - estimate) > 30.0 * error
    # Beyond thirty errors the nearer end, to a thirtieth of one.
    assert risk.value == pytest.approx(0.1 + moment / mass, abs=error / 30.0 if is_far else 1e-7)
    assert risk.is_between == (0.1 <= estimate <= 0.2)


@pytest.mark.parametrize(
    "risk", [Risk(0.3, 1e6, 0.1, 0.5), Risk(1.0, 0.1, 0.5, 0.5 + 1e-9), Risk(1.0, 0.1, 0.5, 0.5 + 1e-7)]
)
def test_values_are_between_the_ends_where_the_data_have_no_say(risk):
    assert risk.lowest <= risk.value <= risk.highest


def test_what_is_no_number_is_refused():
    with pytest.raises(FloatingPointError, match="not all of this is finite"):
        _ = Risk(np.nan, 0.1, 0.2, 0.5).value


@pytest.mark.thorough
def test_averages_go_to_arviz_without_a_log_likelihood(engine):
    assert engine.to_arviz()["posterior"]["image"].shape == (4, engine.num_samples // 4, 8, 8)
    with pytest.raises(ValueError, match=r"average over bases and have no values of \['s'\]"):
        engine.to_arviz(log_likelihood=True)


@pytest.mark.parametrize("noise_variance", [True, "a", [True] * 64, None])
def test_noise_that_is_no_number_is_refused(engine, noise_variance):
    with pytest.raises(ValueError, match="noise_variance must be a number"):
        engine.posterior["image"].with_noise_variance(noise_variance)


def test_one_basis_and_equal_ones_are_left_alone():
    assert Risk(0.5, 0.1, 0.2, 0.2).value == 0.2
    single = EP(wavelet_denoising, pooling="risk", hyper_values=GIVEN, progress_bar=False)
    single.run(jax.random.key(0), noisy(0), NOISE, num_levels=2, wavelet="haar")
    assert single.posterior["image"].shrinkage == 1.0


def several_sites(data, gain=1.0):
    """An image that is observed in another order and with an offset, beside a site that is not."""
    s = numpyro.sample("s", dist.Laplace(0.0, 1.0).expand([6]).to_event(1))
    image = numpyro.deterministic("image", 2.0 + s)
    numpyro.deterministic("total", s.sum(keepdims=True))
    numpyro.deterministic("few", image[1:3])
    order = np.array([3, 1, 0, 5, 4, 2])
    numpyro.sample("y", dist.Normal(image[order] - 7.0, 0.5).to_event(1), obs=gain * data)


@pytest.mark.thorough
def test_elements_are_found_among_the_data_and_what_is_not_is_refused():
    data = np.random.default_rng(0).normal(size=6) - 5.0
    engine = EP(several_sites, average_over={"gain": [1.0, 1.0]}, pooling="risk", progress_bar=False)
    engine.run(jax.random.key(0), data)
    of_image = np.empty(6)
    of_image[[3, 1, 0, 5, 4, 2]] = data + 7.0
    for name, expected in {"image": of_image, "few": of_image[1:3]}.items():
        seen = seen_elements(engine.members, name)
        np.testing.assert_allclose(seen.values, expected, rtol=1e-6)
        np.testing.assert_allclose(seen.noise_variance, 0.25, rtol=1e-6)
    with pytest.raises(ValueError, match="1 of the 1 elements of site 'total' are not what is observed"):
        _ = engine.posterior["total"].variance
    other = EP(several_sites, average_over={"gain": [1.0, 1.5]}, pooling="risk", progress_bar=False)
    other.run(jax.random.key(0), data)
    with pytest.raises(ValueError, match="members have different data or noise behind site 'image'"):
        _ = other.posterior["image"].sd


def test_noise_that_is_learned_is_refused():
    engine = EP(wavelet_denoising, num_shifts=2, pooling="risk", progress_bar=False)
    with pytest.raises(ModelStructureError, match="noise must be known, and 'noise_scale' is learned"):
        engine.run(jax.random.key(0), noisy(0), num_levels=2, wavelet="haar")
