"""Gaussian Markov random fields as priors of engines: against dense matrices and NUTS, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.sparse
import scipy.stats
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, Predictive

from numpyro_ext import EP, INLA, LaplaceApproximation
from numpyro_ext.distributions import GaussianMarkovRandomField, difference_precision, graph_precision, leroux
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from tests.map_models import bym2

IS_DOUBLE = jax.config.jax_enable_x64
GRAPH = graph_precision([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (4, 5), (5, 6)], num_nodes=8)
WALK = difference_precision(4, 1)


def _map_of_56():
    """A grid of 7 x 7, a path of 4 and three islands."""
    node = np.arange(49).reshape(7, 7)
    across = [np.stack([a.ravel(), b.ravel()], axis=1) for a, b in ((node[1:], node[:-1]), (node[:, 1:], node[:, :-1]))]
    graph = graph_precision(np.concatenate([*across, [(49, 50), (50, 51), (51, 52)]]), num_nodes=56)
    rng = np.random.default_rng(1)
    expected, x = rng.gamma(3.0, 3.0, 56), rng.normal(size=56)
    truth = {"a": 0.1, "b": 0.4, "sigma": 0.6, "rho": 0.7}
    truth = {name: jnp.array([value]) for name, value in truth.items()}
    y = Predictive(bym2, posterior_samples=truth)(random.key(3), graph, expected, x)["y"][0]
    return graph, expected, x, np.asarray(y)


@pytest.mark.slow
def test_engines_and_nuts_agree_on_a_map_with_islands():
    args = _map_of_56()
    mcmc = MCMC(NUTS(bym2), num_warmup=500, num_samples=4000, progress_bar=False)
    mcmc.run(random.key(0), *args)
    draws = mcmc.get_samples()
    sizes = {n: float(effective_sample_size(np.asarray(draws[n])[None])) for n in ("a", "b", "sigma", "rho")}
    for engine, shift in ((EP(bym2), 0.1), (INLA(bym2), 0.1), (LaplaceApproximation(bym2), 0.7)):
        engine.run(random.key(0), *args)
        assert engine.diagnostics.converged
        for name, size in sizes.items():
            mean, deviation = draws[name].mean(), draws[name].std()
            found = engine.posterior[name]
            assert abs(found.mean - mean) < (shift + 4.0 / np.sqrt(size)) * deviation, (type(engine), name)
            assert np.sqrt(found.variance) == pytest.approx(deviation, rel=0.1 + 4.0 / np.sqrt(2.0 * size)), name
        spatial, connected = engine.posterior["spatial"], ~args[0].is_island
        deviations = draws["spatial"].std(axis=0)[connected]
        gaps = np.abs(spatial.mean - draws["spatial"].mean(axis=0))[connected] / deviations
        assert gaps.max() < 0.2
        np.testing.assert_allclose(np.sqrt(spatial.variance)[connected], deviations, rtol=0.15)
        np.testing.assert_allclose(spatial.mean[args[0].is_island], 0.0, atol=1e-10)


def test_fields_in_plates_and_batches_are_read():
    """Reading compares the density with that of NumPyro."""

    def model(y):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
        field = GaussianMarkovRandomField(
            WALK.scale_by(1 / scale**2), jnp.arange(4.0), null_space=np.ones(4), sum_to_zero=True
        )
        with numpyro.plate("pairs", 2):
            w = numpyro.sample("w", field)
        numpyro.sample("y", dist.Poisson(jnp.exp(w)).to_event(2), obs=y)

    assert set(read_latent_gaussian(model, (np.ones((2, 4), int),)).field) == {"w"}


@pytest.mark.parametrize("is_zero", [True, False])
def test_engines_say_which_fields_they_do_not_take(is_zero):
    walk = difference_precision(1025, 1)

    def model(y):
        with numpyro.plate("fields", 2):
            w = numpyro.sample("w", GaussianMarkovRandomField(walk, null_space=np.ones(1025), sum_to_zero=is_zero))
        numpyro.sample("y", dist.Normal(w, 1.0).to_event(2), obs=y)

    told = r"site 'w' is a batch of .* of 1025 unknowns each, and engines take up to 1024 in a batch"
    with pytest.raises(ModelStructureError, match=told if is_zero else "site 'w' is a batch of fields that are flat"):
        read_latent_gaussian(model, (np.zeros((2, 1025)),))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, scipy.sparse.csr_matrix])
def test_islands_of_a_car_field_are_named(kind):
    """NumPyro refuses some of them itself, without their numbers."""
    adjacency = np.zeros((5, 5))
    adjacency[[0, 2], [2, 0]] = 1.0

    def model(y, is_beside=False):
        is_sparse = kind is scipy.sparse.csr_matrix
        if is_beside:
            f = numpyro.sample("f", dist.CAR(0.0, 0.5, 1.0, kind(adjacency), is_sparse=is_sparse))
        else:
            field = dist.CAR(0.0, 0.5, 1.0, kind(adjacency), is_sparse=is_sparse)
            f = numpyro.sample("f", field)
        numpyro.sample("y", dist.Poisson(jnp.exp(f)).to_event(1), obs=y)

    told = r"Nodes 1, 3, 4 have no neighbours. Islands are allowed in GaussianMarkovRandomField\(graph.scaled"
    with pytest.raises(ModelStructureError, match=rf"(?s)^site 'f'.*{told}") as refused:
        read_latent_gaussian(model, (np.ones(5, int), True))
    assert refused.value.site == "f"
    with pytest.raises(ModelStructureError, match=told) as refused:
        read_latent_gaussian(model, (np.ones(5, int),))
    if kind is jnp.asarray:
        assert refused.value.site == "f"


@pytest.mark.thorough
@pytest.mark.parametrize("is_zero", [False, True])
def test_an_intercept_beside_the_level_of_a_field_is_told(is_zero):
    """With a proper prior it runs, says so, and has the predictors of the field without it; with a flat one it has no
    posterior."""
    y = np.asarray([3, 4, 2, 6, 5])
    path = difference_precision(5, 1)

    def model(y, prior):
        a = 0.0 if prior is None else numpyro.sample("a", prior)
        w = numpyro.sample(
            "w", GaussianMarkovRandomField(path.scale_by(4.0), null_space=np.ones(5), sum_to_zero=is_zero)
        )
        eta = numpyro.deterministic("eta", a + w)
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)).to_event(1), obs=y)

    flat = dist.ImproperUniform(dist.constraints.real, (), ())
    engine = EP(model, progress_bar=False)
    if is_zero:  # the level is that of the intercept alone
        engine.run(random.key(0), y, flat)
        assert not engine.diagnostics.messages
        return
    with pytest.warns(
        UserWarning, match="The observations do not tell 'w' from 'a': .* the posterior is the prior of 'a'"
    ):
        engine.run(random.key(0), y, dist.Normal(0.0, 3.0))
    assert engine.diagnostics.converged
    np.testing.assert_allclose(engine.posterior["a"].sd, 3.0, rtol=1e-4)
    alone = EP(model, progress_bar=False)
    alone.run(random.key(0), y, None)
    for name in ("mean", "sd"):
        found, expected = (getattr(e.posterior["eta"], name) for e in (engine, alone))
        np.testing.assert_allclose(found, expected, rtol=1e-3)
    with pytest.raises(ValueError, match=r"The priors of sites \['a', 'w'\] are flat"):
        engine.run(random.key(0), y, flat)


@pytest.mark.thorough
@pytest.mark.float32
@pytest.mark.parametrize("is_zero", [False, True])
def test_a_field_with_gaussian_noise_is_exact(is_zero):
    """Posterior and evidence against dense matrices; the precision is of a traced number in the proper case."""

    def model(y):
        precision = GRAPH.precision if is_zero else leroux(GRAPH, jnp.asarray(0.4))
        null_space = GRAPH.null_space if is_zero else None
        field = GaussianMarkovRandomField(precision, jnp.ones(8), null_space=null_space, sum_to_zero=is_zero)
        w = numpyro.sample("w", field)
        numpyro.sample("y", dist.Normal(w, 0.5).to_event(1), obs=y)

    y = np.cos(np.arange(8.0))
    engine = LaplaceApproximation(model)
    engine.run(random.key(0), y)
    dense = np.asarray(GRAPH.precision.to_dense(), float)
    covariance = np.linalg.pinv(dense) if is_zero else np.linalg.inv(0.4 * dense + 0.6 * np.eye(8))
    loc = np.zeros(8) if is_zero else np.ones(8)
    total = covariance + 0.25 * np.eye(8)
    gain = covariance @ np.linalg.inv(total)
    digits = 1e-8 if IS_DOUBLE else 1e-4
    np.testing.assert_allclose(engine.posterior["w"].mean, loc + gain @ (y - loc), atol=digits)
    np.testing.assert_allclose(engine.posterior["w"].variance, np.diagonal(covariance - gain @ covariance), atol=digits)
    expected = scipy.stats.multivariate_normal.logpdf(y, loc, total)
    assert float(engine.log_evidence) == pytest.approx(expected, rel=10 * digits)
