"""What observations tell of hyperparameters: against reference values, the chain rule and sums over a fine grid."""

import warnings

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers

from benchmarks.queries.hyper_information import NUM_LATTICES, losses
from numpyro_ext.design import draws_of, expected_information_gain
from numpyro_ext.infer import EP, INLA, predictive_moments
from tests.infer.front.answers.uncertain_process import CASE, DATA, EXACT, SEEN, X_NEW, X, Y, process


@pytest.fixture(scope="module")
def fitted():
    engine = EP(process, hyper_tol=1e-9)
    engine.run(random.key(0), *DATA)
    return engine


@pytest.mark.thorough
@pytest.mark.parametrize("hyper, name", [("mgp", "U_xi_nats_mgp_y"), ("linearised", "U_xi_nats_linearised")])
def test_reference_values(fitted, hyper, name):
    gain = expected_information_gain(fitted, focus="xi", hyper=hyper)["y"]
    assert np.all(gain[SEEN] == -np.inf)
    np.testing.assert_allclose(gain[~SEEN], CASE[name], atol=1e-8)
    bits = expected_information_gain(fitted, focus=["xi"], hyper=hyper, units="bits")["y"]
    np.testing.assert_allclose(bits[~SEEN], np.array(CASE[name]) / np.log(2.0), atol=1e-8)


@pytest.mark.thorough
def test_the_mixture_over_a_lattice_is_exact():
    engine = INLA(process, integrate="grid", grid_step=1.0, log_density_drop=14.0)
    engine.run(random.key(0), *DATA)
    gain = expected_information_gain(engine, focus="xi")["y"]
    np.testing.assert_allclose(gain[~SEEN], EXACT["U_xi_nats"], rtol=0.02)


@pytest.mark.thorough
def test_new_arguments(fitted):
    engine = EP(process, hyper_tol=1e-9)
    engine.run(random.key(0), X[:, 0], Y)
    found = expected_information_gain(engine, X_NEW[:, 0].tolist(), focus="xi", hyper="mgp")["y"]
    np.testing.assert_allclose(found, CASE["U_xi_nats_mgp_y"], atol=1e-6)


@pytest.mark.parametrize("hyper", ["mgp", "linearised"])
def test_parts_of_the_hyperparameters_and_everything(fitted, hyper):
    """The first-order posterior is Gaussian in the hyperparameters, so that parts of them are conditioned exactly."""

    def gain(focus):
        return expected_information_gain(fitted, focus=focus, hyper=hyper)["y"][~SEEN]

    everything = gain(None)
    np.testing.assert_allclose(gain(["f", "xi"]), everything)
    variance = predictive_moments(fitted, hyper=hyper, target="y")["y"].variance[~SEEN]
    np.testing.assert_allclose(everything, 0.5 * np.log(variance / np.exp(2.0 * CASE["xi_map"][2])), atol=1e-7)
    np.testing.assert_allclose(gain({"xi": [0, 1, 2]}), gain("xi"))
    part = gain({"xi": slice(0, 2)})
    assert np.all(0.0 <= part) and np.all(part <= gain("xi"))
    if hyper == "linearised":
        slopes, sigma = np.array(CASE["dmu"]), np.array(CASE["Sigma"])
        left = slopes[:, 2] ** 2 / np.linalg.inv(sigma)[2, 2]  # the conditional variance of a Gaussian
        expected = np.log(np.array(CASE["linearised_var_y"]) / (np.array(CASE["var_y_hat"]) + left)) / 2.0
        np.testing.assert_allclose(part, expected, atol=1e-8)


def counts(x, y=None, seen=True):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, scale))
    with handlers.mask(mask=seen):
        numpyro.sample("y", dist.Poisson(jnp.exp(slope * x)), obs=y)


@pytest.mark.thorough
def test_refusals(fitted):
    other = EP(counts)
    other.run(random.key(0), jnp.array([0.0, 1.0, 2.0]), jnp.array([1, 2, 0]), jnp.array([True, True, False]))
    held = EP(process, hyper_values={"xi": CASE["xi_map"]})
    held.run(random.key(0), *DATA)
    cases = [
        (fitted, {"hyper": "laplace"}, "hyper must be one of"),
        (fitted, {"hyper": "mgp", "focus": "f"}, r"focus on hyperparameters.* \['f'\] in it"),
        (fitted, {"hyper": "mgp", "focus": {"xi": 3}}, r"'xi'\[3\], whose shape is \(3,\)"),
        (fitted, {"hyper": "mgp", "focus": "y"}, "'y', which is an observed site"),
        (fitted, {"hyper": "mixture", "focus": {"xi": 0}}, "elements of a hyperparameter.*hyper='mgp'"),
        (fitted, {"hyper": "mgp", "bias_correction": "jackknife"}, "'y' has real ones"),
        (other, {"hyper": "mgp", "focus": "scale"}, r"site 'y' is not \(Poisson"),
        (held, {"hyper": "linearised"}, "this fit has none"),
        (draws_of(other), {"hyper": "mgp"}, "take an engine on a Gaussian field"),
    ]
    for source, options, message in cases:
        with pytest.raises(ValueError, match=message):
            expected_information_gain(source, **options)


@pytest.mark.slow
def test_information_that_is_lost_on_random_problems():
    """By taking the best candidate of a rule for the best one, in per cent; exact by sums over a fine grid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of densities with heavy tails
        lost = losses(NUM_LATTICES)
    mgp, linearised, composite, lattice, entropy = (values.mean() for values in lost.values())
    assert lattice < 0.5 and composite < 8.0
    assert max(mgp, linearised) < 0.3 * entropy
