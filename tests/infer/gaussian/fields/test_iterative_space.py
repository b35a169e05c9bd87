"""Crossed effects by conjugate gradients and probes, beside the same models by factorisations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_ext.infer import EP, INLA, LaplaceApproximation, VariationalGaussian
from numpyro_ext.infer.gaussian.algorithms.modes import laplace
from numpyro_ext.infer.gaussian.fitting.costs import FIT_COSTS
from numpyro_ext.linalg.sparse_krylov import CarriedElimination, find_elimination
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from numpyro_ext.structure.latent_gaussian.costs import LayoutCosts
from tests.compilations import compiled_programs
from tests.readings import with_layouts
from tests.tiers import thorough

ROWS, LEVELS = 1200, (90, 70)
KEY = random.key(0)


def crossed(first, second, x, y=None, *, family="logistic"):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
    level, slope = numpyro.sample("level", dist.Normal(0.0, 5.0)), numpyro.sample("slope", dist.Normal(0.0, 5.0))
    with numpyro.plate("firsts", LEVELS[0]):
        of_first = numpyro.sample("of_first", dist.Normal(0.0, scale[0]))
    with numpyro.plate("seconds", LEVELS[1]):
        of_second = numpyro.sample("of_second", dist.Normal(0.0, scale[1]))
    mean = level + slope * x + of_first[first] + of_second[second]
    likelihoods = {
        "logistic": lambda: dist.Bernoulli(logits=mean),
        "Gaussian": lambda: dist.Normal(mean, numpyro.sample("noise", dist.HalfNormal(1.0))),
        "Poisson": lambda: dist.Poisson(jnp.exp(mean)),
        "Student": lambda: dist.StudentT(4.0, mean, 1.0),
    }
    numpyro.sample("y", likelihoods[family](), obs=y)


def data(family, rows=ROWS):
    draws = np.random.default_rng(0)
    first, second = (draws.integers(0, size, rows) for size in LEVELS)
    x = draws.normal(size=rows)
    mean = 0.2 + 0.5 * x + 0.5 * draws.normal(size=LEVELS[0])[first] + 0.7 * draws.normal(size=LEVELS[1])[second]
    y = {
        "logistic": lambda: (draws.random(rows) < 1.0 / (1.0 + np.exp(-mean))).astype(int),
        "Poisson": lambda: draws.poisson(np.exp(mean)),
    }.get(family, lambda: mean + draws.normal(size=rows))
    return first, second, x, y()


def fitted(family, space, engine=LaplaceApproximation, **options):
    made = engine(crossed, space=space, progress_bar=False, **options)
    made.run(KEY, *data(family), family=family)
    return made


def form_of(family, hyper, *, num_probes):
    """The form by iterations with some probes, and by a factorisation, as functions of unconstrained scales."""
    reading = read_latent_gaussian(
        crossed, data(family), {"family": family}, costs=LayoutCosts(largest_rest=0), check=False
    )
    layout = reading.looked_up.layout
    sites = reading._priors.sites
    order = CarriedElimination.of(find_elimination(layout.pattern.known(), sites, num_probes))

    def iterative(logs):
        form = reading.form({**hyper, "scale": jnp.exp(logs)})
        return form._replace(layout=dataclasses.replace(form.layout, elimination=order))

    return iterative, lambda logs: iterative(logs)._replace(layout=None)


HYPER = {"logistic": {}, "Gaussian": {"noise": jnp.asarray(1.1)}, "Poisson": {}}


@pytest.mark.parametrize("family", ["Gaussian", *thorough("logistic", "Poisson")])
def test_laplace_with_unit_vectors_for_probes_is_that_of_the_dense_matrix(family):
    logs = jnp.log(jnp.array([0.5, 0.7]))
    found = []
    for make in form_of(family, HYPER[family], num_probes=None):

        @jax.jit
        def fit(logs, make=make):
            form = make(logs)
            state, info = laplace.solve(form, laplace.init(form), num_steps=50, tol=1e-8)
            posterior = laplace.posterior(form, state)
            slope = jax.grad(lambda at: laplace.log_evidence(make(at), state))(logs)
            return info.converged, info.objective, slope, posterior.mean, *posterior.predictor_moments()

        found.append(fit(logs))
    (converged, *ours), (_, *dense) = found
    assert converged
    for a, b in zip(ours, dense, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("family", ["logistic", "Gaussian"])
def test_gradient_is_that_of_the_evidence_by_the_same_probes(family):
    iterative, dense = form_of(family, HYPER[family], num_probes=8)

    @jax.jit
    def evidence(logs):
        form = iterative(logs)
        state, info = laplace.solve(form, laplace.init(form), num_steps=50, tol=1e-8)
        slope = jax.grad(lambda at: laplace.log_evidence(iterative(at), state))(logs)
        return info.objective, slope, laplace.log_evidence(form, state), info.objective_error, info.converged

    logs, step = jnp.log(jnp.array([0.5, 0.7])), 1e-3
    value, slope, again, error, converged = evidence(logs)
    assert converged
    np.testing.assert_allclose(again, value, rtol=1e-12)
    for axis in range(2):
        ends = [evidence(logs + sign * step * jnp.eye(2)[axis])[0] for sign in (-2.0, -1.0, 1.0, 2.0)]
        difference = (ends[0] - 8.0 * ends[1] + 8.0 * ends[2] - ends[3]) / (12.0 * step)
        np.testing.assert_allclose(slope[axis], difference, rtol=1e-5)

    @jax.jit
    def exact(logs):
        form = dense(logs)
        return laplace.solve(form, laplace.init(form), num_steps=50, tol=1e-8)[1].objective

    assert 0.0 < error < 1.0
    assert 1e-6 < abs(value - exact(logs)) < 4.0 * error


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["Gaussian", "logistic"])
def test_engine_agrees_with_the_one_that_factorises(family):
    ours, dense = fitted(family, "iterative"), fitted(family, "direct")
    assert ours.diagnostics.converged and dense.diagnostics.converged
    error = ours.log_evidence.standard_error
    assert ours.diagnostics.evidence_error <= error
    assert abs(ours.log_evidence - dense.log_evidence) < 4.0 * error
    assert any(f"standard error of {ours.diagnostics.evidence_error:.2g}" in m for m in ours.diagnostics.messages)
    assert dense.diagnostics.evidence_error is None
    for name in ("scale", "of_first", "of_second", "level", "slope"):
        a, b = ours.posterior[name], dense.posterior[name]
        np.testing.assert_array_less(np.abs(a.mean - b.mean) / b.sd, 0.05)  # as the scales are elsewhere
        np.testing.assert_allclose(a.sd, b.sd, rtol=0.05)
    draws = ours.get_samples()["of_first"]
    gap = np.abs(draws.mean(axis=0) - ours.posterior["of_first"].mean) / ours.posterior["of_first"].sd
    assert np.all(gap < 5.0 / np.sqrt(len(draws)))


@pytest.mark.thorough
def test_given_scales_give_the_same_mode_to_rounding(capsys):
    options = {"hyper_values": {"scale": jnp.array([0.5, 0.7])}}
    ours, dense = (fitted("logistic", space, **options) for space in ("iterative", "direct"))
    for name in ("of_first", "of_second", "level", "slope"):
        np.testing.assert_allclose(ours.posterior[name].mean, dense.posterior[name].mean, rtol=0, atol=1e-9)
        np.testing.assert_allclose(ours.posterior[name].sd, dense.posterior[name].sd, rtol=0.02)
    ours.print_summary()
    assert "an estimate by fixed random probes, with a standard error of" in capsys.readouterr().out.replace("\n", " ")
    with pytest.raises(ValueError, match="space='direct'"):
        ours.sample_exactly(random.key(2))
    columns = [column[:3] for column in data("logistic")[:3]]
    columns[1] = (columns[1] + 1) % LEVELS[1]
    rates = [e.predict(random.key(1), *columns, family="logistic").probabilities()["y"] for e in (ours, dense)]
    np.testing.assert_allclose(*rates, rtol=0, atol=5e-4)  # of variances that are estimates


def test_systems_that_do_not_converge_are_told_and_the_run_has_not_converged():
    size = 400  # a chain of levels, each seen twice and hardly held by its prior

    def chain(y):
        with numpyro.plate("firsts", size):
            a = numpyro.sample("a", dist.Normal(0.0, 3000.0))
        with numpyro.plate("seconds", size):
            b = numpyro.sample("b", dist.Normal(0.0, 3000.0))
        i = np.arange(2 * size - 1)
        numpyro.sample("y", dist.Normal(a[(i + 1) // 2] + b[i // 2], 1.0), obs=y)

    y = np.random.default_rng(0).normal(size=2 * size - 1)
    ours = LaplaceApproximation(chain, space="iterative", num_steps=3, progress_bar=False)
    with pytest.warns(UserWarning, match="ended with a relative residual"):
        ours.run(KEY, y)
    assert not ours.diagnostics.converged
    assert any("ended with a relative residual" in message for message in ours.diagnostics.messages)


def test_automatic_choice_is_by_what_a_factorisation_leaves():
    columns = data("logistic")
    for largest, is_iterative in ((50, True), (500, False)):
        reading = read_latent_gaussian(crossed, columns, costs=LayoutCosts(largest_rest=largest), check=False)
        layout = reading.abstract_form.layout
        assert (layout is not None) == is_iterative
        assert ("by conjugate gradients" in reading.describe()) == is_iterative
    assert read_latent_gaussian(crossed, columns, check=False).abstract_form.layout is None
    for space, is_iterative in (("iterative", True), ("direct", False), ("auto", False)):
        reading = LaplaceApproximation(crossed, space=space)._read(KEY, columns, {}, check=False)
        assert (reading.abstract_form.layout is not None) == is_iterative
    # options of the engine change one threshold of its forms alone
    engine = with_layouts(LaplaceApproximation, border=np.inf)(crossed, space="direct")
    assert engine._read(KEY, columns, {}, check=False).abstract_form.border is None


def test_what_cannot_be_iterated_is_refused_by_site():
    with pytest.raises(ModelStructureError, match="site 'y'.*not log-concave.*space='direct'"):
        fitted("Student", "iterative")
    with pytest.raises(ValueError, match="space"):
        LaplaceApproximation(crossed, space="krylov")
    with pytest.raises(TypeError, match="LaplaceApproximation.*iterative"):
        EP(crossed, space="iterative")

    def process(y):
        distance = np.abs(np.arange(12.0)[:, None] - np.arange(12.0))
        f = numpyro.sample("f", dist.MultivariateNormal(0.0, jnp.exp(-distance)))
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    with pytest.raises(ModelStructureError, match="site 'f' correlates"):
        LaplaceApproximation(process, space="iterative").run(KEY, np.arange(12))

    def regression(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([12]).to_event(1))
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ w)), obs=y)

    with pytest.raises(ModelStructureError, match="depend on many unknowns"):
        x = np.random.default_rng(0).normal(size=(30, 12))
        LaplaceApproximation(regression, space="iterative").run(KEY, 0.1 * x, np.arange(30) % 3)


@pytest.mark.parametrize("engine", [EP, VariationalGaussian])
def test_what_engines_that_factorise_would_take_is_said_beforehand(engine):
    takes = r"dense matrix of 162 unknowns.* 0.002 GiB, and 0.00021 s .*LaplaceApproximation\(model\) iterates"
    columns = data("logistic")
    told = with_layouts(engine, large_rest=50)
    with pytest.warns(UserWarning, match=takes):
        told(crossed)._compile(told(crossed)._read(KEY, columns, {}, check=False))
    told._costs = FIT_COSTS._replace(most_memory=2**20)
    with pytest.raises(ModelStructureError, match=f"{takes}.* 0.00098 GiB are the most"):
        told(crossed).run(KEY, *columns)


@pytest.mark.thorough
def test_inla_has_corrected_marginals_by_solves():
    options = {"hyper_values": {"scale": jnp.array([0.5, 0.7])}}
    ours, dense = (fitted("logistic", space, INLA, **options) for space in ("iterative", "direct"))
    for name in ("of_first", "slope"):
        np.testing.assert_allclose(ours.posterior[name].mean, dense.posterior[name].mean, rtol=0, atol=5e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["logistic", "Gaussian"])
def test_another_design_of_like_size_compiles_nothing(family):
    """Other levels of each row, of which others meet, and as many of both."""

    def run(seed):
        first, second, x, y = data(family)
        if seed:
            draws = np.random.default_rng(seed)
            first, second = (draws.integers(0, size, ROWS) for size in LEVELS)
        engine = LaplaceApproximation(crossed, space="iterative", progress_bar=False, num_samples=20)
        engine.run(KEY, first, second, x, y, family=family)
        jax.block_until_ready((engine.get_samples(), [(site.mean, site.sd) for site in engine.posterior.values()]))
        engine.predict(KEY, first[:3], second[:3], x[:3], family=family)
        return engine

    one = run(0)
    entries = [engine._run.reading.looked_up.layout.pattern.known().num_entries for engine in (one,)]
    run(1)  # what runs of data that is at hand add to the first
    with compiled_programs() as names:
        other = run(2)
    assert names == []
    layout = other._run.reading.looked_up.layout
    entries.append(layout.pattern.known().num_entries)
    assert entries[0] != entries[1] and layout.pattern.num_entries <= 1.25 * entries[1]
    # the same data by itself, in programs that have seen nothing else
    jax.clear_caches()
    np.testing.assert_allclose(run(2).posterior["of_first"].mean, other.posterior["of_first"].mean, atol=1e-10)
