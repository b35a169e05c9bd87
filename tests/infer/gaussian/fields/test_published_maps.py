"""Maps and meshes against what R-INLA and BUGS say of the same data.

``tests/reference`` has the numbers with their sources: lip cancer in the 56 districts of Scotland, of which three are
islands, and counts at 150 places with a Matérn field on a mesh.
"""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import constraints
from scipy.sparse import coo_array
from scipy.spatial import Delaunay

from numpyro_ext import EP, INLA, LaplaceApproximation
from numpyro_ext.distributions import GaussianMarkovRandomField, graph_precision, matern_precision, sparse_matmul

pytestmark = pytest.mark.thorough

REFERENCE = Path(__file__).parents[3] / "reference"
SCOTLAND = json.loads((REFERENCE / "lip_cancer_scotland.json").read_text())
MESH = json.loads((REFERENCE / "spde_poisson.json").read_text())
OBSERVED, EXPECTED, AFF = (np.asarray(SCOTLAND[name]) for name in ("observed", "expected", "aff"))
WEAK = dist.Normal(0, 1000**0.5)
PENALISED = dist.Exponential(-math.log(0.01))
"""Standard deviations above one have probability 0.01."""


def standardised(found, mean, sd):
    """Distances in standard deviations, and ratios of these."""
    mean, sd = np.asarray(mean), np.asarray(sd)
    return np.abs(np.asarray(found.mean) - mean) / sd, np.asarray(found.sd) / sd


@pytest.mark.parametrize("engine_class", [INLA, EP])
def test_islands_of_lip_cancer_agree_with_bugs(engine_class):
    """An intrinsic field whose precision is learned, zero on three islands, under a flat intercept.

    Chains of BUGS recentre the field in each sweep, where here it is conditioned: sigma is larger there by a sixth of a
    standard deviation, eight Monte Carlo errors. All else is to be as close.
    """
    graph = graph_precision(np.asarray(SCOTLAND["edges"]), num_nodes=56)
    assert np.flatnonzero(graph.is_island).tolist() == [5, 7, 10]

    def model(y):
        alpha0 = numpyro.sample("alpha0", dist.ImproperUniform(constraints.real, (), ()))
        alpha1 = numpyro.sample("alpha1", dist.Normal(0, 1e5**0.5))
        tau = numpyro.sample("tau", dist.Gamma(0.5, 0.0005))
        precision = graph.precision.scale_by(tau)
        b = numpyro.sample("b", GaussianMarkovRandomField(precision, null_space=graph.null_space, sum_to_zero=True))
        numpyro.sample("y", dist.Poisson(EXPECTED * jnp.exp(alpha0 + alpha1 * AFF + b)), obs=y)

    engine = engine_class(model, progress_bar=False)
    engine.run(random.key(0), OBSERVED)
    assert engine.diagnostics.converged
    bugs = SCOTLAND["bugs"]
    for name in ("alpha0", "alpha1"):
        mean, sd, _ = bugs[name]
        distance, ratio = standardised(engine.posterior[name], mean, sd)
        assert distance < 0.15
        assert ratio == pytest.approx(1.0, abs=0.05)
    sigma = np.asarray(engine.get_samples()["tau"]) ** -0.5
    mean, sd, _ = bugs["sigma"]
    assert abs(sigma.mean() - mean) < 0.2 * sd
    assert sigma.std() == pytest.approx(sd, rel=0.1)
    nodes = [int(node) for node in bugs["b"]]
    moments = np.asarray(list(bugs["b"].values()))
    found = engine.posterior["b"]
    distance = np.abs(np.asarray(found.mean)[nodes] - moments[:, 0]) / moments[:, 1]
    assert distance.max() < 0.2
    assert np.median(distance) < 0.05
    np.testing.assert_allclose(np.asarray(found.sd)[nodes] / moments[:, 1], 1.0, atol=0.05)
    assert not np.asarray(found.mean)[[5, 7, 10]].any()
    assert not np.asarray(found.sd)[[5, 7, 10]].any()


def penalised_share(graph):
    """Log density of the share of a scaled field, by its distance from none (Riebler et al. 2016); it is below a half
    with probability 2/3."""
    eigenvalues = np.linalg.eigvalsh(np.asarray(graph.scaled.to_dense()))
    variances = np.where(eigenvalues > 1e-9, 1.0 / np.where(eigenvalues > 1e-9, eigenvalues, 1.0), 0.0)

    def distance(phi):
        return jnp.sqrt(phi * np.sum(variances - 1.0) - jnp.sum(jnp.log1p(phi * (variances - 1.0))))

    rate = math.log(3.0) / distance(0.5)

    def log_density(phi):
        value, slope = jax.value_and_grad(distance)(phi)
        return jnp.log(rate) - rate * value + jnp.log(slope)

    return log_density


def test_bym2_of_lip_cancer_agrees_with_r_inla():
    """Mode and curvature of both hyperparameters, and the field over them, which the tail of the share hardly moves."""
    inla = SCOTLAND["inla"]
    graph = graph_precision(np.asarray(inla["edges"]), num_nodes=56)
    log_share = penalised_share(graph)

    def bym2(y):
        a, b = numpyro.sample("a", WEAK), numpyro.sample("b", WEAK)
        sigma, phi = numpyro.sample("sigma", PENALISED), numpyro.sample("phi", dist.Uniform(0, 1))
        numpyro.factor("share", log_share(phi))
        field = GaussianMarkovRandomField(graph.scaled, null_space=graph.null_space, sum_to_zero=True)
        u = numpyro.sample("u", field)
        with numpyro.plate("areas", 56):
            v = numpyro.sample("v", dist.Normal(0, 1))
            f = numpyro.deterministic("f", sigma * (jnp.sqrt(phi) * u + jnp.sqrt(1 - phi) * v))
            numpyro.sample("y", dist.Poisson(EXPECTED * jnp.exp(a + b * AFF + f)), obs=y)

    engine = INLA(bym2, progress_bar=False)
    engine.run(random.key(0), OBSERVED)
    sigma, phi = (float(engine.hyper[name].mode) for name in ("sigma", "phi"))
    log_precision, logit = -2 * math.log(sigma), math.log(phi / (1 - phi))
    spread = np.sqrt(np.diag(inla["covariance"]))
    assert abs(log_precision - inla["mode"][0]) < 0.01 * spread[0]
    assert abs(logit - inla["mode"][1]) < 0.03 * spread[1]
    for name, (mean, sd) in {"a": inla["intercept"], "b": inla["slope"]}.items():
        distance, ratio = standardised(engine.posterior[name], mean, sd)
        assert distance < 0.1
        assert ratio == pytest.approx(1.0, abs=0.03)
    distance, ratio = standardised(engine.posterior["f"], inla["field_mean"], inla["field_sd"])
    assert distance.max() < 0.12
    np.testing.assert_allclose(ratio, 1.0, atol=0.05)
    assert float(engine.hyper["sigma"].quantile(0.5)) ** -2 == pytest.approx(inla["precision_median"], rel=0.03)


def test_matern_field_on_a_mesh_agrees_with_r_inla():
    """Mode of range and standard deviation, and the field, on R-INLA's own vertices."""
    mesh, places = Delaunay(np.asarray(MESH["vertices"])), np.asarray(MESH["places"])
    triangle = mesh.find_simplex(places)
    transform = mesh.transform[triangle]
    share = np.einsum("nij,nj->ni", transform[:, :2], places - transform[:, 2])
    share = np.concatenate([share, 1.0 - share.sum(axis=1, keepdims=True)], axis=1)
    at = np.repeat(np.arange(len(places)), 3), mesh.simplices[triangle].ravel()
    rows = coo_array((share.ravel(), at), shape=(len(places), len(mesh.points))).tocsr()

    def counts(y):
        intercept = numpyro.sample("intercept", WEAK)
        length = numpyro.sample("range", dist.InverseGamma(1, 0.3 * math.log(2.0)))
        sd = numpyro.sample("sd", PENALISED)
        w = numpyro.sample("w", GaussianMarkovRandomField(matern_precision(mesh, length, sd)))
        numpyro.sample("y", dist.Poisson(jnp.exp(intercept + sparse_matmul(rows, w))), obs=y)

    engine = LaplaceApproximation(counts, progress_bar=False)
    engine.run(random.key(0), np.asarray(MESH["counts"]))
    assert engine.diagnostics.converged
    mode = np.log([float(engine.hyper[name].mode) for name in ("range", "sd")])
    np.testing.assert_allclose(mode, MESH["mode"], atol=0.01 * math.sqrt(MESH["covariance"][1][1]))
    assert float(engine.hyper["sd"].quantile(0.5)) == pytest.approx(MESH["sd_median"], rel=0.05)
    mean, sd = MESH["intercept"]
    assert abs(float(engine.posterior["intercept"].mean) - mean) < 0.1 * sd
    field = np.asarray(engine.posterior["w"].mean)[: len(MESH["field_mean"])]
    np.testing.assert_allclose(field, MESH["field_mean"], atol=0.025)
