"""Fields of low rank are read as such, and answer as their covariances do."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import EP, INLA, LaplaceApproximation, VariationalGaussian
from numpyro_ext.infer.gaussian.algorithms.posterior import gaussian_prior
from numpyro_ext.linalg.gaussian.prior import LowRankPrior
from numpyro_ext.linalg.gaussian.spaces.low_rank_space import LowRankSpace
from numpyro_ext.linalg.inducing import fitc
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from numpyro_ext.structure.latent_gaussian.costs import LayoutCosts
from tests.readings import with_layouts

N, M = 170, 8
INDUCING = np.linspace(0.0, 10.0, M)


def sparse_process(x, y=None):
    """A common term, a sparse Gaussian process with inducing points among the others, Poisson counts."""
    length = numpyro.sample("length", dist.LogNormal(0.0, 0.3))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))

    def kernel(a, b):
        return jnp.exp(-0.5 * ((a[:, None] - b) / length) ** 2)

    cov_factor, cov_diag = fitc(kernel, x, INDUCING)
    f = numpyro.sample("f", dist.LowRankMultivariateNormal(level * jnp.ones(x.shape), cov_factor, cov_diag))
    numpyro.deterministic("step", f[1:4] - f[:3])
    numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = np.concatenate([INDUCING, np.sort(rng.uniform(0.0, 10.0, N - M))])
    return x, rng.poisson(np.exp(np.sin(x)))


def test_inducing_values_are_the_border(data):
    reading = read_latent_gaussian(sparse_process, data)
    form = reading.abstract_form
    assert [type(block) for block in form.prior][1] is LowRankPrior
    assert form.border.columns.shape == (N, 1) and form.border.shared.shape == (1 + M,)
    assert f"blocks: {N} independent, of up to 1 unknowns given 9 that they share" in reading.describe()
    assert isinstance(jax.eval_shape(gaussian_prior, form), LowRankSpace)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(EP, marks=pytest.mark.thorough),
        *(pytest.param(e, marks=pytest.mark.slow) for e in (LaplaceApproximation, VariationalGaussian, INLA)),
    ],
)
def test_engines_give_what_covariances_give(engine, data):
    results = []
    for is_dense in (False, True):
        options = {} if engine is INLA else {"integrate": "none"}
        chosen = with_layouts(engine, border=np.inf) if is_dense else engine
        fitted = chosen(sparse_process, hyper_values={"length": 1.0}, progress_bar=False, tol=1e-10, **options)
        fitted.run(jax.random.key(0), *data)
        assert (fitted._run.reading.abstract_form.border is None) == is_dense
        assert fitted.diagnostics.converged and set(fitted.posterior) >= {"f", "level", "step"}
        sites = {name: (site.mean, site.variance) for name, site in fitted.posterior.items()}
        assert sites["f"][0].shape == (N,)
        results.append((fitted.log_evidence, sites, fitted.posterior["step"].covariance()))
        if engine is EP:
            left_out = fitted.loo()
            pointwise = left_out.loo_i if hasattr(left_out, "loo_i") else left_out.elpd_i  # ArviZ 0.x, 1.x
            results[-1] += np.asarray(pointwise), fitted.log_predictive(*data)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9), *results)


@pytest.mark.slow
def test_hyperparameters_draws_and_files(data, tmp_path):
    """The length learned inside of the factor, draws of the field, held-out points, and a file."""
    x, y = data
    fitted = EP(sparse_process, integrate="none", progress_bar=False)
    fitted.run(jax.random.key(0), *data)
    draws = {n: np.asarray(v) for n, v in fitted.get_samples().items()}
    assert draws["f"].shape == (1000, N) and 0.6 < float(np.asarray(fitted.hyper["length"].value)) < 2.5
    variance = np.asarray(fitted.posterior["f"].variance)
    error = np.abs(draws["f"].mean(0) - fitted.posterior["f"].mean) / np.sqrt(variance / 1000)
    assert np.max(error) < 5.0
    np.testing.assert_allclose(draws["f"].var(0) / variance, 1.0, atol=6 * np.sqrt(2 / 1000))
    fitted.save(tmp_path / "fit.npz")
    loaded = EP.load(tmp_path / "fit.npz", sparse_process)
    np.testing.assert_allclose(loaded.posterior["f"].mean, fitted.posterior["f"].mean, rtol=1e-12)


def test_gradients_of_the_evidence(data):
    """With elements of the diagonal at their least value, and of a hyperparameter inside the factor."""
    found = []
    for costs in (LayoutCosts(), LayoutCosts(border=np.inf)):
        reading = read_latent_gaussian(sparse_process, data, check=False, costs=costs)

        def evidence(length, reading=reading):
            form = reading.form({"length": length})
            posterior = gaussian_prior(form).condition(jnp.ones(N), jnp.asarray(data[0]) / 5.0)
            return posterior.marginals().log_partition

        found.append(jax.jit(jax.value_and_grad(evidence))(1.2))
    np.testing.assert_allclose(*found, rtol=1e-8)


@pytest.mark.thorough
def test_a_field_for_each_user():
    """Under a plate, with a factor that all share or of each one's own."""
    rng = np.random.default_rng(0)
    users, items = 12, 20
    factor, diagonal = rng.normal(size=(users, items, 2)), rng.gamma(2.0, size=items)
    user, item = np.repeat(np.arange(users), 6), rng.integers(0, items, 6 * users)

    def model(own, y=None):
        cov_factor = jnp.asarray(factor if own else factor[0])
        with numpyro.plate("users", users):
            f = numpyro.sample("f", dist.LowRankMultivariateNormal(jnp.zeros(items), cov_factor, diagonal))
        numpyro.sample("y", dist.Bernoulli(logits=f[user, item]), obs=y)

    def dense(own, y=None):
        cov_factor = jnp.asarray(factor if own else factor[0])
        covariance = cov_factor @ cov_factor.swapaxes(-1, -2) + jnp.diag(diagonal)
        with numpyro.plate("users", users):
            f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(items), covariance))
        numpyro.sample("y", dist.Bernoulli(logits=f[user, item]), obs=y)

    y = rng.binomial(1, 0.5, user.size)
    for own in (False, True):
        found = []
        for which, costs in ((model, LayoutCosts()), (model, LayoutCosts(border=-1e30)), (dense, LayoutCosts())):
            reading = read_latent_gaussian(which, (own, y), costs=costs)
            form = reading.form({})
            assert (form.border is not None) == (costs.border < 0)
            posterior = gaussian_prior(form).condition(jnp.ones(len(y)), jnp.asarray(y - 0.5))
            marginals = posterior.marginals()
            maps = reading.maps({})["f"].design
            found.append((marginals, posterior.unknowns(), posterior.map_variance(maps)))
        for one in found[:2]:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), one, found[2])


def test_a_diagonal_with_zeros_is_refused():
    def model():
        f = numpyro.sample("f", dist.LowRankMultivariateNormal(jnp.zeros(3), jnp.ones((3, 1)), jnp.array([1.0, 0, 1])))
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=np.ones(3))

    with pytest.raises(ModelStructureError, match="covariance of site 'f' is not positive definite.*jitter"):
        read_latent_gaussian(model)
