"""Predictions where hyperparameters are unknown, against reference values and sums over a fine grid of these."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import EP, INLA, VariationalGaussian, predictive_moments
from numpyro_ext.infer.gaussian.predictive_moments import hyper_covariance, local_moments
from tests.infer.front.answers.uncertain_process import CASE, DATA, EXACT, SEEN, X_NEW, X, Y, process
from tests.tiers import thorough


@pytest.fixture(scope="module")
def lattice():
    engine = INLA(process, integrate="grid", grid_step=1.0, log_density_drop=14.0)
    engine.run(jax.random.key(0), *DATA)
    return engine


@pytest.mark.parametrize("is_default, tol", thorough((True, 1e-2), (False, 1e-3)))
def test_lattices_converge_to_the_exact_mixture(is_default, tol, request):
    """The posterior of the hyperparameters has a tail that is far heavier than the Gaussian at its mode."""
    if is_default:
        engine = INLA(process, integrate="grid")
        engine.run(jax.random.key(0), *DATA)
    else:
        engine = request.getfixturevalue("lattice")
    f = engine.posterior["f"]
    np.testing.assert_allclose(float(engine.log_evidence), EXACT["log_evidence"], atol=0.15 * tol)
    np.testing.assert_allclose(f.variance[~SEEN], EXACT["var_f"], rtol=tol)
    np.testing.assert_allclose(f.mean[~SEEN], EXACT["mean"], atol=0.2 * tol)
    np.testing.assert_allclose(engine.hyper["xi"].mean, EXACT["xi_mean"], atol=0.2 * tol)


# Formulas at the optimum


@pytest.fixture(scope="module")
def at_optimum():
    engine = EP(process, hyper_tol=1e-9)
    engine.run(jax.random.key(0), *DATA)
    return engine


@pytest.mark.thorough
def test_the_optimum_and_its_curvature(at_optimum):
    np.testing.assert_allclose(at_optimum.hyper["xi"].mode, CASE["xi_map"], atol=1e-8)
    np.testing.assert_allclose(hyper_covariance(at_optimum, "mgp"), CASE["Sigma"], atol=1e-8)
    quick = EP(process)
    quick.run(jax.random.key(0), *DATA)
    np.testing.assert_allclose(quick.hyper["xi"].mode, CASE["xi_map"], atol=1e-5)


@pytest.mark.thorough
def test_derivatives_of_predictors(at_optimum):
    found = local_moments(at_optimum, (), {})["y"]
    names = "mu_hat", "var_f_hat", "dmu", "dvar_f"
    for values, name in zip((found.mean, found.variance, found.mean_slopes, found.variance_slopes), names, strict=True):
        np.testing.assert_allclose(values[~SEEN], CASE[name], atol=1e-8, err_msg=name)


@pytest.mark.parametrize(
    "hyper, target, name",
    [
        ("plug-in", "f", "var_f_hat"),
        ("plug-in", "y", "var_y_hat"),
        ("plug-in", "f_plus_noise", "var_y_hat"),
        ("linearised", "y", "linearised_var_y"),
        ("linearised", "f_plus_noise", "linearised_var_y"),
        ("mgp", "f", "mgp_var_f"),
        ("mgp", "y", "mgp_var_y"),
        ("mgp", "f_plus_noise", "mgp_var_y_reference_code"),
    ],
)
def test_variances_at_the_optimum(at_optimum, hyper, target, name):
    found = predictive_moments(at_optimum, hyper=hyper, target=target)["y"]
    np.testing.assert_allclose(found.variance[~SEEN], CASE[name], rtol=1e-7)
    np.testing.assert_allclose(found.sd, np.sqrt(found.variance))
    np.testing.assert_allclose(found.mean[~SEEN], CASE["mu_hat"], atol=1e-8)


@pytest.mark.parametrize("hyper, name", [("mgp", "U_xi_nats_mgp"), ("linearised", "U_xi_nats_linearised")])
def test_information_about_hyperparameters(at_optimum, hyper, name):
    for target, key in (("y", f"{name}_y"), ("f", f"{name}_f")) if hyper == "mgp" else (("y", name),):
        wide, narrow = (predictive_moments(at_optimum, hyper=h, target=target)["y"] for h in (hyper, "plug-in"))
        gain = 0.5 * np.log(wide.variance / narrow.variance)[~SEEN]
        np.testing.assert_allclose(gain, CASE[key], atol=1e-8)


@pytest.mark.thorough
def test_new_arguments_are_masked_observations(at_optimum):
    engine = EP(process, hyper_tol=1e-9)
    engine.run(jax.random.key(0), X[:, 0], Y)
    found = predictive_moments(engine, X_NEW[:, 0].tolist())["y"]
    expected = predictive_moments(at_optimum)["y"]
    np.testing.assert_allclose(found.mean, expected.mean[~SEEN], atol=1e-7)
    np.testing.assert_allclose(found.variance, expected.variance[~SEEN], rtol=1e-7)


def scaled(x, y=None):
    """Hyperparameters of several sites, some of them constrained, one without a prior; noise that differs."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.array([3.0, 2.0, 4.0])))
    noise = numpyro.param("noise", 0.4, constraint=dist.constraints.positive)
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("terms", 3):
        slopes = numpyro.sample("slopes", dist.Normal(0.0, weights))
    mean = level + jnp.stack([x, jnp.sin(2.0 * x), x**2], axis=-1) @ slopes
    numpyro.sample("y", dist.Normal(mean, noise * (1.0 + x**2)), obs=y)


@pytest.mark.thorough
def test_slopes_are_those_of_fits_with_other_hyperparameters():
    x = jnp.linspace(-1.0, 1.5, 12)
    y = 0.7 * x + jnp.cos(5.0 * x)
    engine = EP(scaled, field=["slopes"])
    engine.run(jax.random.key(0), x, y)
    found, space = local_moments(engine, (), {})["y"], engine._run.space
    values = np.asarray(engine.last_state.values)
    assert values.size == 4  # of a simplex one less than its elements

    def moments_at(values):
        other = EP(scaled, field=["slopes"], hyper_values=space.unpack(jnp.asarray(values)))
        other.run(jax.random.key(0), x, y)
        f, all_ = (predictive_moments(other, hyper="plug-in", target=target)["y"] for target in ("f", "y"))
        return np.stack([f.mean, f.variance, all_.variance - f.variance])

    for axis, shift in enumerate(1e-5 * np.eye(4)):
        expected = (moments_at(values + shift) - moments_at(values - shift)) / 2e-5
        slopes = np.stack([found.mean_slopes, found.variance_slopes, found.noise_slopes])[..., axis]
        np.testing.assert_allclose(slopes, expected, atol=1e-7)


# Mixtures


@pytest.mark.thorough
@pytest.mark.parametrize("target, name", [("f", "var_f"), ("y", "var_y")])
def test_mixtures_are_exact(lattice, target, name):
    found = predictive_moments(lattice, hyper="mixture", target=target)["y"]
    np.testing.assert_allclose(found.variance[~SEEN], EXACT[name], rtol=1e-3)
    np.testing.assert_allclose(found.mean[~SEEN], EXACT["mean"], atol=2e-4)
    noise = np.exp(2.0 * CASE["xi_map"][2])
    later = predictive_moments(lattice, hyper="mixture", target="f_plus_noise")["y"]
    np.testing.assert_allclose(later.variance[~SEEN], np.array(EXACT["var_f"]) + noise, rtol=1e-3)


# What is refused


def counts(x, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, scale))
    numpyro.sample("y", dist.Poisson(jnp.exp(slope * x)), obs=y)


@pytest.mark.thorough
def test_refusals(at_optimum):
    x = jnp.array([0.0, 1.0, 2.0])
    engine = EP(counts)
    engine.run(jax.random.key(0), x, jnp.array([1, 2, 5]))
    with pytest.raises(ValueError, match=r"site 'y' is not \(Poisson.*hyper='mixture'"):
        predictive_moments(engine)
    with pytest.raises(ValueError, match="site 'y' have no Gaussian noise .* target='f' is the predictor"):
        predictive_moments(engine, hyper="mixture")
    mixture = predictive_moments(engine, hyper="mixture", target="f")["y"]
    np.testing.assert_allclose(mixture.mean, x * engine.posterior["slope"].mean, rtol=1e-6)
    np.testing.assert_allclose(mixture.sd, x * engine.posterior["slope"].sd, rtol=1e-6)
    point = EP(process, integrate="none")
    with pytest.warns(UserWarning, match="set to a point"):
        point.run(jax.random.key(0), *DATA)
    with pytest.raises(ValueError, match="integrate='auto'"):
        predictive_moments(point, hyper="mixture")
    assert predictive_moments(point)["y"].variance.shape == SEEN.shape
    with pytest.raises(ValueError, match="'plug-in', 'linearised', 'mgp', 'mixture'"):
        predictive_moments(at_optimum, hyper="laplace")
    with pytest.raises(ValueError, match="target must be one of"):
        predictive_moments(at_optimum, target="g")
    with pytest.raises(RuntimeError, match="run"):
        predictive_moments(EP(process))
    with pytest.raises(TypeError, match="takes an engine on a Gaussian field"):
        predictive_moments(object())
    held = EP(process, hyper_values={"xi": CASE["xi_map"]})
    held.run(jax.random.key(0), *DATA)
    with pytest.raises(ValueError, match="this fit has none: hyper='plug-in'"):
        predictive_moments(held, hyper="mgp")
    np.testing.assert_array_equal(
        predictive_moments(held)["y"].variance, predictive_moments(held, hyper="plug-in")["y"].variance
    )
    np.testing.assert_allclose(
        predictive_moments(held, hyper="mixture", target="y")["y"].variance[~SEEN], CASE["var_y_hat"], rtol=1e-7
    )
    diagonal = VariationalGaussian(process, covariance="diagonal")
    diagonal.run(jax.random.key(0), *DATA)
    with pytest.raises(ValueError, match="approximates it even where all factors are Gaussian"):
        predictive_moments(diagonal)
