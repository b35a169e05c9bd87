"""Gaussian priors beside Normal and MultivariateNormal: densities are NumPyro's, posteriors those of dense algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp
from numpyro.infer.util import log_density

from numpyro_ext.infer import EP
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from tests.tiers import few

IS_DOUBLE = jnp.zeros(()).dtype == jnp.float64
RNG = np.random.default_rng(0)
ROW = np.array([2.0, 0.7, 0.2, 0.2, 0.7])
TRIL_2 = np.array([[1.0, 0.0], [0.5, 0.8]])
TRIL_3 = np.array([[1.0, 0, 0], [0.3, 1.2, 0], [-0.2, 0.4, 0.7]])
X = np.linspace(0, 1, 5)


def kernel():
    return 1.5 * tinygp.kernels.Matern32(0.4)


CIRCULANT = ROW[(np.arange(5)[:, None] - np.arange(5)) % 5]
EVEN = np.array([2.0, 0.7, 0.2, 0.7])
MATRIX = np.kron(TRIL_2 @ TRIL_2.T, TRIL_3 @ TRIL_3.T)


def centred(size):
    return np.eye(size) - 1.0 / size


TRANSITION = np.array([[1.0, 1.0], [0.0, 0.9]])


def state_space_covariance(num_steps):
    """Of all states, from the map of the noise of all steps to them."""
    powers = [np.linalg.matrix_power(TRANSITION, k) for k in range(num_steps)]
    zero = np.zeros((2, 2))
    states = np.block([[powers[t - k] if k <= t else zero for k in range(num_steps)] for t in range(num_steps)])
    return states @ np.kron(np.eye(num_steps), TRIL_2 @ TRIL_2.T) @ states.T


# a distribution, and the covariance of its values
FAMILIES = {
    "circulant by row": (lambda: dist.CirculantNormal(np.arange(5), covariance_row=ROW), CIRCULANT),
    "circulant by transform, several": (
        lambda: dist.CirculantNormal(jnp.zeros(5), covariance_rfft=jnp.fft.rfft(ROW).real).expand([2]),
        np.kron(np.eye(2), CIRCULANT),
    ),
    "circulant, even": (
        lambda: dist.CirculantNormal(jnp.zeros(4), covariance_row=EVEN),
        EVEN[(np.arange(4)[:, None] - np.arange(4)) % 4],
    ),
    "matrix": (lambda: dist.MatrixNormal(np.ones((2, 3), int), TRIL_2, TRIL_3), MATRIX),
    "matrix, several": (
        lambda: dist.MatrixNormal(jnp.zeros((2, 3)), TRIL_2, TRIL_3).expand([2]).to_event(1),
        np.kron(np.eye(2), MATRIX),
    ),
    "state space": (
        lambda: dist.GaussianStateSpace(4, TRANSITION, covariance_matrix=TRIL_2 @ TRIL_2.T),
        state_space_covariance(4),
    ),
    "state space from a start": (
        lambda: dist.GaussianStateSpace(3, TRANSITION, scale_tril=TRIL_2, initial_value=np.array([1.0, -2.0])),
        state_space_covariance(3),
    ),
    "zero sum, several": (
        lambda: dist.ZeroSumNormal(2, event_shape=(4,)).expand([3]),
        4.0 * np.kron(np.eye(3), centred(4)),
    ),
    "zero sum of rows and columns": (
        lambda: dist.ZeroSumNormal(1.5, event_shape=(3, 4)),
        2.25 * np.kron(centred(3), centred(4)),
    ),
    "tinygp": (
        lambda: tinygp.GaussianProcess(kernel(), X, diag=0.01, mean=2.0).numpyro_dist(),
        np.asarray(kernel()(X, X)) + 0.01 * np.eye(5),
    ),
}


@pytest.mark.parametrize("family", few(FAMILIES, 4))
def test_density_and_covariance(family):
    make, covariance = FAMILIES[family]
    fn = make()
    y = RNG.normal(size=fn.batch_shape + fn.event_shape)

    def model(y):
        f = numpyro.sample("f", make())
        numpyro.sample("y", dist.Normal(f, 0.5).to_event(), obs=y)

    reading = read_latent_gaussian(model, (y,), check=False)
    assert reading.field == ("f",)

    @jax.jit
    def evaluate(e):
        value, map_ = reading.values({}, e)["f"], jax.jacfwd(lambda e: reading.values({}, e)["f"].reshape(-1))(e)
        factor = jax.jacfwd(lambda white: reading.draw({}, white, reading.data))(e)
        # that of the model itself, not of the plain sites that are read
        expected = log_density(model, (y,), {}, {"f": value})[0]
        return reading.form({}).log_density(e), expected, map_ @ factor

    density, expected, factor = evaluate(jnp.asarray(RNG.normal(size=reading.num_columns)))
    np.testing.assert_allclose(density, expected, rtol=1e-10 if IS_DOUBLE else 1e-4)
    np.testing.assert_allclose(factor @ factor.T, covariance, atol=1e-10 if IS_DOUBLE else 1e-4)


@pytest.mark.thorough
def test_a_guide_of_sums_of_zero_has_their_covariance():
    def model(y):
        f = numpyro.sample("f", dist.ZeroSumNormal(2, event_shape=(4,)))
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    engine = EP(model, progress_bar=False, num_samples=3)
    engine.run(jax.random.key(0), np.array([1, 2, 0, -1]))
    draws = engine.guide.sample_posterior(jax.random.key(1), engine.params, sample_shape=(4000,))["f"]
    np.testing.assert_allclose(draws.sum(-1), 0.0, atol=1e-5)
    np.testing.assert_allclose(draws.mean(0), engine.posterior["f"].mean, atol=0.05)
    np.testing.assert_allclose(draws.std(0), engine.posterior["f"].sd, rtol=0.1)
    np.testing.assert_allclose(engine.get_samples()["f"].sum(-1), 0.0, atol=1e-5)


def imputed(x, y):
    centre = numpyro.sample("centre", dist.Normal(0, 1))
    missing = np.nonzero(np.isnan(x))[0]
    unseen = numpyro.sample("unseen", dist.Normal(centre, 0.7).expand([len(missing)]).mask(False))
    x = jnp.asarray(x).at[missing].set(unseen)
    numpyro.sample("x", dist.Normal(centre, 0.7), obs=x)
    numpyro.sample("y", dist.Normal(0.5 * x, 0.4), obs=y)


@pytest.mark.thorough
def test_imputation_has_the_density_of_a_site_that_is_not_masked():
    x, y = np.array([0.3, np.nan, 1.2, np.nan, -0.5]), np.array([0.1, 0.9, 0.6, -0.4, -0.1])

    def plain(x, y):
        centre = numpyro.sample("centre", dist.Normal(0, 1))
        x_all = (
            jnp.nan_to_num(x).at[np.array([1, 3])].set(numpyro.sample("unseen", dist.Normal(centre, 0.7).expand([2])))
        )
        numpyro.sample("x", dist.Normal(centre, 0.7), obs=x[np.array([0, 2, 4])])
        numpyro.sample("y", dist.Normal(0.5 * x_all, 0.4), obs=y)

    engines = [EP(model, progress_bar=False, num_samples=2) for model in (imputed, plain)]
    for engine in engines:
        engine.run(jax.random.key(0), jnp.asarray(x), y)
        assert engine.diagnostics.converged
    for name in ("centre", "unseen"):
        one, other = (engine.posterior[name] for engine in engines)
        np.testing.assert_allclose(one.mean, other.mean, atol=1e-6 if IS_DOUBLE else 1e-3)
        np.testing.assert_allclose(one.sd, other.sd, rtol=1e-6 if IS_DOUBLE else 1e-3)
    np.testing.assert_allclose(engines[0].log_evidence, engines[1].log_evidence, rtol=1e-6 if IS_DOUBLE else 1e-3)


def test_a_masked_site_that_nothing_needs_is_left_out():
    def model(y):
        numpyro.sample("unused", dist.Normal(0, 1).mask(False))
        numpyro.sample("y", dist.Normal(numpyro.sample("f", dist.Normal(0, 1)), 0.5), obs=y)

    reading = read_latent_gaussian(model, (np.ones(3),))
    assert (reading.field, reading.predictive) == (("f",), ("unused",))


def test_a_half_masked_site_is_refused_by_name():
    def model(y):
        f = numpyro.sample("f", dist.Normal(0, 1).expand([3]).mask(np.array([True, False, True])))
        g = numpyro.sample("g", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(f + g, 0.5), obs=y)

    with pytest.raises(ModelStructureError, match="'f' .* is masked") as caught:
        read_latent_gaussian(model, (np.ones(3),))
    assert caught.value.site == "f"
