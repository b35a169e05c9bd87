"""Engines on fields of a sparse precision: beside dense algebra on the same model, and what they compile and refuse."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_ext import EP, INLA, LaplaceApproximation
from numpyro_ext.distributions import GaussianMarkovRandomField, graph_precision, leroux
from numpyro_ext.infer.gaussian.algorithms.modes import laplace
from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation
from numpyro_ext.infer.gaussian.integration.simplified_laplace import simplified_laplace_marginals
from numpyro_ext.linalg.sparse_cholesky import numeric
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from tests.compilations import compiled_programs


def _data(side, seed=0):
    """A grid and an island, with expected counts, a covariate and counts."""
    node = np.arange(side**2).reshape(side, side)
    edges = [np.stack([a.ravel(), b.ravel()], axis=1) for a, b in ((node[1:], node[:-1]), (node[:, 1:], node[:, :-1]))]
    graph, rng = graph_precision(np.concatenate(edges), num_nodes=side**2 + 1), np.random.default_rng(seed)
    num_nodes = graph.num_nodes
    return graph, rng.gamma(3.0, 3.0, num_nodes), rng.normal(size=num_nodes), rng.poisson(6.0, num_nodes)


DATA = _data(15)
"""226 areas: sparse precisions are for fields of more than 200."""


def _field(kind, graph, tau):
    """Field of standard deviation ``tau``: outside of the site, within the precision, or with correlations traced."""
    if kind == "leroux":
        return GaussianMarkovRandomField(leroux(graph, 0.5 + 0.3 * jnp.tanh(tau)).scale_by(1 / tau**2))
    precision = graph.scaled if kind == "constant" else graph.scaled.scale_by(1 / tau**2)
    return GaussianMarkovRandomField(precision, null_space=graph.null_space, sum_to_zero=True)


def icar(graph, expected, x, y=None, kind="constant", is_dense=False):
    """Model of counts in areas.

    :param is_dense: the same field as the only one of a plate, whose precisions are dense.
    """
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    s = numpyro.sample("s", dist.HalfNormal(1))
    with numpyro.plate("fields", 1) if is_dense else contextlib.nullcontext():
        spatial = numpyro.sample("spatial", _field(kind, graph, tau)).reshape(-1)
    with numpyro.plate("areas", graph.num_nodes):
        noise = numpyro.sample("noise", dist.Normal(0, 1))
        f = numpyro.deterministic("f", (tau if kind == "constant" else 1.0) * spatial + s * noise)
        numpyro.sample("y", dist.Poisson(expected * jnp.exp(a + b * x + f)), obs=y)


def _answers(algorithm, kind, is_dense):
    """Moments of rows and sites, and the log evidence with its gradient in the hyperparameters."""
    reading = read_latent_gaussian(functools.partial(icar, kind=kind, is_dense=is_dense), DATA)

    @jax.jit
    def of(data, hyper):
        form = reading.form(hyper, data)
        state = algorithm.solve(form, algorithm.init(form), num_steps=60, tol=1e-10)[0]
        evidence = jax.value_and_grad(lambda hyper: algorithm.log_evidence(reading.form(hyper, data), state))(hyper)
        posterior = algorithm.posterior(form, state)
        maps = reading.maps(hyper, data)
        corrected = simplified_laplace_marginals(posterior, maps) if algorithm is laplace else None
        return evidence, posterior.predictor_moments(), posterior.moments(maps), corrected

    return reading, of(reading.data, {"tau": jnp.asarray(0.7), "s": jnp.asarray(0.4)})


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["constant", "scaled", "leroux"])
@pytest.mark.parametrize("algorithm", [laplace, expectation_propagation])
def test_sparse_algebra_agrees_with_dense(algorithm, kind):
    reading, dense = _answers(algorithm, kind, is_dense=True)
    assert reading.abstract_form.layout is None
    reading, sparse = _answers(algorithm, kind, is_dense=False)
    assert reading.abstract_form.layout is not None
    assert "sparse precision: 454 unknowns" in reading.describe()
    for found, expected in zip(jax.tree.leaves(sparse), jax.tree.leaves(dense), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["constant", "leroux"])
def test_what_a_fit_holds_is_what_others_would_compute_again(kind, monkeypatch):
    """The factor at the mode serves the posterior, and the evidence with its gradient, which make none."""
    reading = read_latent_gaussian(functools.partial(icar, kind=kind), DATA)
    factorise, made = numeric.factorise, []
    monkeypatch.setattr(numeric, "factorise", lambda *args: made.append(1) or factorise(*args))

    @jax.jit
    def hold(hyper):
        form = reading.form(hyper, reading.data)
        return laplace.solve_and_hold(form, laplace.init(form), tol=1e-9)

    @jax.jit
    def evidence(hyper, state, held):
        return jax.value_and_grad(
            lambda hyper: laplace.log_evidence(reading.form(hyper, reading.data), state, held=held)
        )(hyper)

    hyper = {"tau": jnp.asarray(0.7), "s": jnp.asarray(0.4)}
    state, info, held = jax.block_until_ready(hold(hyper))
    assert info.converged
    answers, counts = [], []
    for given in (held, None):
        made.clear()
        answers.append(jax.block_until_ready(evidence(hyper, state, given)))
        counts.append(len(made))
    # what is left are factors of a prior whose log determinant is not known
    assert counts[1] == counts[0] + 1
    assert kind != "constant" or counts[0] == 0
    found, expected = answers
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8), found, expected)
    np.testing.assert_allclose(info.objective, expected[0], rtol=1e-10)
    again = laplace.posterior(reading.form(hyper, reading.data), state).condition()
    for one, other in zip(held.marginals(), again.marginals(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(held.unknowns(), again.unknowns(), atol=1e-8)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [LaplaceApproximation, EP])
def test_other_data_on_the_same_map_compile_nothing(engine):
    graph, expected, *_ = DATA

    def fit(seed):
        rng = np.random.default_rng(seed)
        run = engine(icar, num_samples=10, progress_bar=False)
        x, y = rng.normal(size=graph.num_nodes), rng.poisson(6.0, graph.num_nodes)
        run.run(random.key(seed), graph, expected, x, y)
        draws = run.get_samples()
        np.testing.assert_allclose(draws["spatial"] @ graph.null_space, 0.0, atol=1e-10)
        assert run.diagnostics.converged
        assert all(np.all(site.sd >= 0) for site in run.posterior.values())
        assert "made by NumPy on the host, one after the other: a GPU or vmap does not speed" in run.describe()

    fit(0)
    with compiled_programs() as names:
        fit(1)
    assert not names


def levels_on_a_map(graph, level, y):
    """Groups of areas, which stand anywhere."""
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    u = numpyro.sample("u", dist.Normal(0, 1).expand([4]).to_event(1))
    spatial = numpyro.sample("spatial", _field("constant", graph, tau))
    with numpyro.plate("areas", graph.num_nodes):
        numpyro.sample("y", dist.Poisson(jnp.exp(1.0 + u[level] + tau * spatial)), obs=y)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [LaplaceApproximation, EP])
def test_another_graph_of_as_many_nodes_and_pairs_compiles_nothing(engine):
    """Areas under other numbers, of which the answers are the same, and levels in other places."""
    graph, _, _, y = DATA
    rng = np.random.default_rng(6)
    level, other_level, number = *rng.integers(4, size=(2, y.size)), rng.permutation(y.size)
    i, j = graph.precision.indices.T
    other = graph_precision(np.stack([number[i[i != j]], number[j[i != j]]], axis=1), num_nodes=y.size)

    def fit(*args):
        run = engine(levels_on_a_map, num_samples=10, progress_bar=False)
        run.run(random.key(0), *args)
        jax.block_until_ready((run.get_samples(), [(site.mean, site.sd) for site in run.posterior.values()]))
        return run

    before = fit(graph, level, y)
    moved = np.empty_like(level), np.empty_like(y)
    for new, old in zip(moved, (level, y), strict=True):
        new[number] = old
    with compiled_programs() as names:
        fit(graph, other_level, y)
        after = fit(other, *moved)
    assert names == []
    np.testing.assert_allclose(float(after.log_evidence), float(before.log_evidence), rtol=1e-8)
    for name in ("tau", "u", "spatial"):
        order = number if name == "spatial" else slice(None)
        for moment in ("mean", "sd"):
            found, expected = (np.asarray(getattr(run.posterior[name], moment)) for run in (after, before))
            np.testing.assert_allclose(found[order] if found.ndim else found, expected, rtol=1e-6, atol=1e-7)


def test_what_sparse_fields_do_not_answer_is_refused_by_name():
    """The latter of more than 2500 unknowns, which are the field, the noise and two coefficients."""
    graph, *data = _data(36)

    def sum_of_field(y):
        w = numpyro.sample("w", _field("constant", graph, 1.0))
        numpyro.sample("y", dist.Normal(jnp.cumsum(w), 1.0).to_event(1), obs=y)

    with pytest.raises(ModelStructureError, match="'w' is a field of a sparse precision, and predictors depend on so"):
        read_latent_gaussian(sum_of_field, (np.zeros(graph.num_nodes),))
    with pytest.raises(ModelStructureError, match="a solve for each of them. Use INLA\\(model, marginal='gaussian'\\)"):
        INLA(icar, progress_bar=False).run(random.key(0), graph, *data)
