"""Curvature in many hyperparameters, by factors that cost little: equal to differences of the model's own gradients,
and never believed where it is not."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import biject_to, constraints

from numpyro_ext.infer import EP
from numpyro_ext.infer.front.running.climbs import Climb
from numpyro_ext.infer.front.running.learning import learn
from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation
from numpyro_ext.infer.gaussian.algorithms.propagation.local_factors import localised
from numpyro_ext.infer.hyper.curvature import curvature, hessian
from numpyro_ext.infer.hyper.evaluation import evaluation_fn
from numpyro_ext.infer.hyper.metric import in_metric, with_metric
from numpyro_ext.infer.hyper.search import init_search, search
from numpyro_ext.infer.hyper.space import UnconstrainedSpace
from numpyro_ext.structure import read_latent_gaussian
from tests.readings import with_fit_costs
from tests.tiers import few

KEY = jax.random.key(0)
RNG = np.random.default_rng(5)
GROUP = np.arange(40) % 5


def graded(level):
    """Thresholds of five items: the parameters of a factor are numbers of its own."""
    item = np.arange(40) // 8
    ability = numpyro.sample("ability", dist.Normal(0.0, 1.0).expand([8]))
    slope = numpyro.sample("slope", dist.LogNormal(0.0, 0.5).expand([5]))
    ordered = dist.transforms.OrderedTransform()
    prior = dist.TransformedDistribution(dist.Normal(0.0, 2.0).expand([5, 2]).to_event(1), ordered)
    kappa = numpyro.sample("kappa", prior)
    numpyro.sample("y", dist.OrderedLogistic(slope[item] * jnp.tile(ability, 5), kappa[item]), obs=level)


def overdispersed(count):
    """A dispersion that all factors share, and scales of the prior and of an offset."""
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    dispersion = numpyro.sample("dispersion", dist.LogNormal(1.0, 0.5))
    shift = numpyro.sample("shift", dist.Normal(0.0, scale).expand([5]))
    power = numpyro.sample("power", dist.Normal(0.0, 1.0))
    offset = jnp.sin(power * np.linspace(0.0, 1.0, 40))
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(level + shift[GROUP] + offset), dispersion), obs=count)


def robust(y):
    """Factors that are not log-concave, known by quadrature."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    shift = numpyro.sample("shift", dist.Normal(0.0, scale).expand([5]))
    numpyro.sample("y", dist.StudentT(4.0, shift[GROUP], noise), obs=y)


def binary(y):
    """Factors without parameters: only the cavities and the prior move."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    power = numpyro.sample("power", dist.Normal(0.0, 1.0))
    shift = numpyro.sample("shift", dist.Normal(0.0, scale).expand([5]))
    numpyro.sample("y", dist.Bernoulli(logits=shift[GROUP] + jnp.sin(power * np.linspace(0.0, 2.0, 40))), obs=y)


DATA = {
    graded: np.digitize(RNG.normal(size=8)[np.arange(40) % 8] + RNG.logistic(size=40), [-1.0, 1.0]),
    overdispersed: RNG.poisson(np.exp(1.0 + 0.5 * RNG.normal(size=5))[GROUP]),
    robust: RNG.normal(size=5)[GROUP] + 0.4 * RNG.standard_t(4.0, 40),
    binary: RNG.binomial(1, 0.4, 40),
}


@pytest.mark.thorough
@pytest.mark.parametrize("model", [graded, overdispersed, binary, pytest.param(robust, marks=pytest.mark.slow)])
def test_local_factors_have_the_curvature_of_the_model(model):
    engine = EP(model, progress_bar=False)
    engine.run(KEY, DATA[model])
    ended = engine.last_state.search
    reading = engine._read(KEY, (DATA[model],), {})
    _, _, compiled = engine._compile(reading)
    assert not compiled.probes_locally  # so that the run has differences of the gradients of the model
    expected = hessian(ended, tol=1e-4)
    found = hessian(compiled.probe_locally(reading.data, {}, ended), tol=1e-4)
    units = 1.0 / np.sqrt(np.abs(np.diagonal(expected)))
    np.testing.assert_allclose(units[:, None] * found * units, units[:, None] * expected * units, atol=2e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "expected"), few([(binary, True), (robust, False)], 1))
def test_local_factors_are_log_concave_where_the_factors_are(model, expected):
    """Sites that may be negative take other algebra, which costs hundreds of times as much where unknowns are many."""
    form = read_latent_gaussian(model, (DATA[model],), check=False).form({"scale": 1.0, "noise": 0.5, "power": 0.2})
    near = localised(form, expectation_propagation.init(form))
    assert [factors.is_log_concave for factors in near(form).potentials] == [expected]


@pytest.mark.thorough
def test_a_run_with_local_probes_answers_as_one_without(tmp_path):
    probing = with_fit_costs(EP, least_probes=0)
    plain, quick = (engine(graded, integrate="none", progress_bar=False) for engine in (EP, probing))
    plain.run(KEY, DATA[graded])
    quick.run(KEY, DATA[graded])
    assert quick.diagnostics.converged
    assert quick.diagnostics.hyper.num_evaluations < plain.diagnostics.hyper.num_evaluations - 2 * 15 + 6
    # The searches take other ways to one maximum, where the objective is stationary.
    objectives = [float(engine.last_state.search.best.objective) for engine in (quick, plain)]
    np.testing.assert_allclose(*objectives, rtol=1e-9)
    for name, site in plain.hyper.items():
        np.testing.assert_allclose(quick.hyper[name].standard_error, site.standard_error, rtol=1e-3)
    quick.save(tmp_path / "run.npz")
    again = probing.load(tmp_path / "run.npz", graded)
    np.testing.assert_array_equal(again.hyper["kappa"].standard_error, quick.hyper["kappa"].standard_error)
    again.run(KEY, DATA[graded], init_state=quick.last_state)
    assert again.diagnostics.hyper.num_evaluations == 0
    np.testing.assert_array_equal(again.hyper["kappa"].standard_error, quick.hyper["kappa"].standard_error)


SIZE = 100
BASIS = np.linalg.qr(np.random.default_rng(1).normal(size=(SIZE, SIZE)))[0]


def learned(evidence, probes, max_iterations, **options):
    """Learn a hundred numbers from zero; ``probes(values, is_held)`` is the Hessian that cheap factors claim."""
    evaluate = evaluation_fn(
        lambda x: x, lambda x: 0.0 * jnp.sum(x), lambda form, state: (state, ()), lambda x, s: evidence(x)
    )
    start = jnp.zeros(SIZE)
    shapes = jax.eval_shape(evaluate, start, jnp.zeros(()))
    advance = jax.jit(
        lambda state, limit, number: search(
            evaluate, state, num_evaluations=number, tol=1e-4, max_iterations=limit, trace_length=10
        )
    )

    def begin(x, state):
        return init_search(shapes, x, jnp.zeros(()), **options)._replace(num_probes=jnp.asarray(2 * SIZE + 1))

    def probe_locally(state, is_held):
        rows = 1e-2 * probes(state.values, is_held)
        return state._replace(probes=np.stack([rows, -rows], axis=1), num_probes=jnp.asarray(2 * SIZE))

    site = SimpleNamespace(shape=(SIZE,), transform=biject_to(constraints.real), init=jnp.zeros(SIZE))
    space = UnconstrainedSpace({"a": site})
    problem = Climb(begin, advance, space, start, jnp.ones(SIZE), 1e-4, max_iterations, probe_locally=probe_locally)
    return learn(problem, [start], KEY, bar=SimpleNamespace(n=0, update=lambda amount: None))


def planted(bend, claimed):
    """Learn a hundred numbers from a function that curves by ``bend`` in one direction, downwards in all others, with
    cheap probes that say ``claimed``."""
    weights = np.linspace(-3.0, -0.5, SIZE)

    def matrix(last):
        return (BASIS * np.append(weights[:-1], last)) @ BASIS.T

    def evidence(x):
        return 0.5 * x @ matrix(bend) @ x - 0.25 * jnp.sum((BASIS.T @ x) ** 4)

    def probes(values, is_held):
        return matrix(claimed) if np.allclose(values, 0.0) else jax.hessian(evidence)(values)

    return learned(evidence, probes, 50)


@pytest.mark.thorough
@pytest.mark.parametrize("claimed", [0.02, -0.02])
def test_a_faint_saddle_in_a_hundred_numbers_is_left_whatever_cheap_probes_say(claimed):
    found = planted(0.02, claimed)
    assert found.diagnostics.converged and found.curvature.is_peak
    # The maxima are where 0.02 x = x^3 along the planted direction.
    np.testing.assert_allclose(np.abs(BASIS.T @ found.search.values)[-1], np.sqrt(0.02), rtol=1e-2)
    assert (found.diagnostics.num_evaluations > 2 * SIZE) == (claimed < 0.0)  # only what is wrong is found out


@pytest.mark.parametrize("claimed", [0.02, -0.02])
def test_a_faint_maximum_in_a_hundred_numbers_is_kept_whatever_cheap_probes_say(claimed):
    found = planted(-0.02, claimed)
    assert found.diagnostics.converged and found.curvature.is_peak and not np.any(found.search.values)
    truth = curvature((BASIS * np.append(np.linspace(-3.0, -0.5, SIZE)[:-1], -0.02)) @ BASIS.T, tol=1e-4)
    np.testing.assert_allclose(found.curvature.covariance, truth.covariance, atol=0.02)


def steep_and_shallow(has_metric):
    """Learn a hundred numbers along which the objective curves between 1 and 10^4; the curvature measured is wrong by
    up to a third in every direction, and knows nothing of the quartic part."""
    weights = np.logspace(0.0, 4.0, SIZE)
    rough = (BASIS * (weights * np.random.default_rng(2).uniform(0.75, 1.33, SIZE))) @ BASIS.T

    def evidence(x):
        along = BASIS.T @ (x - 1.0)
        return -0.5 * jnp.sum(weights * along**2) - 0.25 * jnp.sum(along**4)

    def probes(values, is_held):
        return -rough if is_held else jax.hessian(evidence)(values)

    return learned(evidence, probes, 200, has_metric=has_metric)


@pytest.mark.thorough
def test_a_search_in_a_metric_needs_few_evaluations_where_a_plain_one_needs_hundreds():
    plain, quick = steep_and_shallow(False), steep_and_shallow(True)
    assert quick.diagnostics.converged
    np.testing.assert_allclose(quick.search.values, 1.0, atol=1e-4)
    assert quick.diagnostics.num_evaluations < 40
    assert plain.diagnostics.num_evaluations > 100


def test_steps_in_a_metric_are_those_of_the_inverse_hessian_updates():
    # BFGS by its own formula, from the metric, one remembered step after the other.
    rng = np.random.default_rng(3)
    root = rng.normal(size=(4, 4))
    metric, steps = root @ root.T + np.eye(4), rng.normal(size=(3, 4))
    changes = steps @ (root.T @ root + np.eye(4))
    inverse = metric
    for s, y in zip(steps, changes, strict=True):
        left = np.eye(4) - np.outer(s, y) / (s @ y)
        inverse = left @ inverse @ left.T + np.outer(s, s) / (s @ y)
    memory = SimpleNamespace(
        count=jnp.asarray(4),
        diff_params_memory=jnp.zeros((5, 4)).at[:3].set(steps),
        diff_updates_memory=jnp.zeros((5, 4)).at[:3].set(changes),
        weights_memory=jnp.zeros(5).at[:3].set(1.0 / np.sum(steps * changes, axis=1)),
    )
    gradient = rng.normal(size=4)
    np.testing.assert_allclose(in_metric(jnp.asarray(gradient), memory, metric), inverse @ gradient, rtol=1e-10)


@pytest.mark.parametrize("curvatures", [[-1.0, -1e4, -1e-9], [2.0, -3.0, 0.0]])
def test_a_metric_of_any_curvature_ascends_by_a_step_of_no_more_than_one(curvatures):
    turn = np.linalg.qr(np.random.default_rng(4).normal(size=(3, 3)))[0]
    began = init_search(
        jax.eval_shape(
            evaluation_fn(lambda x: x, jnp.sum, lambda form, state: (state, ()), lambda x, s: jnp.sum(x)),
            jnp.zeros(3),
            jnp.zeros(()),
        ),
        np.zeros(3),
        jnp.zeros(()),
        has_metric=True,
    )
    began = began._replace(best=began.best._replace(gradient=np.array([30.0, -20.0, 10.0])))
    found = with_metric(began, (turn * curvatures) @ turn.T)
    step = found.step_size * found.direction
    assert step @ began.best.gradient > 0.0 and np.max(np.abs(step)) <= 1.0 + 1e-12
    assert with_metric(began, np.full((3, 3), np.nan)) is began
