"""Searches are judged: saddles and plateaus are left, and what cannot be learned by a derivative is refused by name."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import biject_to, constraints

from numpyro_ext.infer import EP, LaplaceApproximation
from numpyro_ext.infer.front.running import learning
from numpyro_ext.infer.front.running.climbs import Climb
from numpyro_ext.infer.front.running.learning import learn
from numpyro_ext.infer.front.running.symmetries import names_of_directions
from numpyro_ext.infer.hyper.digits import field_tolerance
from numpyro_ext.infer.hyper.evaluation import evaluation_fn
from numpyro_ext.infer.hyper.search import EVALUATIONS_PER_CHUNK, init_search, search
from numpyro_ext.infer.hyper.space import UnconstrainedSpace
from numpyro_ext.structure import ModelStructureError

KEY = jax.random.key(0)
PAIR = {name: SimpleNamespace(shape=(), transform=biject_to(constraints.real), init=0.0) for name in ("a", "b")}


def climb(evidence, start, prior=lambda x: 0.0 * jnp.sum(x), sites=PAIR):
    """Learn two numbers from functions of them."""
    evaluate = evaluation_fn(lambda x: x, prior, lambda form, state: (state, ()), lambda form, state: evidence(form))
    return learned(evaluate, start, jnp.zeros(()), sites=sites)


def learned(evaluate, start, state, sites=PAIR, max_steps=50, may_be_coarse=False, **options):
    """Learn two numbers from evaluations that begin at a state of the field."""
    start = jnp.asarray(start)
    shapes = jax.eval_shape(evaluate, start, state)
    problem = Climb(
        begin=lambda x, _: init_search(shapes, x, state, may_be_coarse=may_be_coarse),
        advance=jax.jit(
            lambda search_state, limit, number: search(
                evaluate,
                search_state,
                num_evaluations=number,
                tol=1e-4,
                max_iterations=limit,
                trace_length=EVALUATIONS_PER_CHUNK,
                **options,
            )
        ),
        space=UnconstrainedSpace(sites),
        origin=jnp.zeros(2),
        units=jnp.ones(2),
        tol=1e-4,
        max_steps=max_steps,
    )
    return learn(problem, [start], KEY, bar=SimpleNamespace(n=0, update=lambda amount: None))


def test_a_saddle_is_left_for_a_maximum():
    found = climb(lambda x: jnp.square(x[0]) - x[0] ** 4 - jnp.square(x[1] - x[0]), [0.0, 0.0])
    assert found.diagnostics.converged and not found.messages and found.curvature.is_peak
    np.testing.assert_allclose(np.abs(found.search.values), np.sqrt(0.5), atol=1e-3)


def test_a_saddle_between_the_axes_is_left():
    found = climb(lambda x: x[0] * x[1] - 0.25 * jnp.sum(x**4), [0.0, 0.0])
    np.testing.assert_allclose(np.abs(found.search.values), 1.0, atol=1e-3)
    assert found.diagnostics.converged and float(found.search.values[0] * found.search.values[1]) > 0.0


def test_a_saddle_that_cannot_be_left_is_not_called_converged():
    def evidence(x):
        return jnp.where(jnp.sum(x**2) < 0.02**2, jnp.square(x[0]) - jnp.square(x[1]), -jnp.inf)

    found = climb(evidence, [0.0, 0.0])
    assert not found.diagnostics.converged and len(found.curvature.rising) == 1
    assert "not a maximum" in found.messages[0] and "('a')" in found.messages[0]


def test_a_plateau_far_below_the_maximum_is_left():
    # The evidence of a scale exp(a) is level where the scale is tiny, and highest at one.
    found = climb(_bump, [-12.0, 0.0])
    assert found.diagnostics.converged and found.curvature.is_peak
    np.testing.assert_allclose(found.search.values, 0.0, atol=1e-3)


@pytest.mark.parametrize(("rise", "is_left"), [(1e-7, False), (1e-3, True)])
def test_a_plateau_is_not_left_for_what_rounding_made(rise, is_left):
    height = 1e9
    climb = SimpleNamespace(tol=1e-9, space=UnconstrainedSpace(PAIR), coordinates=np.asarray)
    looked = SimpleNamespace(best=SimpleNamespace(objective=height + rise))
    run = SimpleNamespace(
        best=SimpleNamespace(values=np.array([-12.0, 0.0])),
        climb=climb,
        height=height,
        rounding=10 * np.finfo(float).eps * height,
        look=lambda point: looked,
    )
    found = learning._from_plateau(run, SimpleNamespace(wide_axes=np.array([True, False])))
    assert (found is not None) == is_left


@pytest.mark.parametrize("point", [[-11.0, 0.0], [0.0, 9.0]])
def test_a_search_that_stops_where_it_was_higher_before_is_not_called_converged(point, monkeypatch):
    """Whether the search from there ends where the first one did, or wherever it ends is not the end."""
    monkeypatch.setattr(learning, "_from_plateau", lambda run, curvature: np.asarray(point))
    found = climb(_bump, [-1.0, 0.0])
    assert not found.diagnostics.converged
    assert "did not come to an end" in found.messages[0]


def _bump(x):
    scale = jnp.exp(2.0 * x[0])
    return 10.0 * scale / jnp.square(1.0 + scale) - jnp.square(x[1])


@pytest.mark.parametrize("wall", [1.0, 0.7, 0.3])
def test_before_a_wall_the_best_trial_is_kept(wall):
    # Behind the wall nothing is finite, and no step to before it meets the condition on the slope.
    found = climb(lambda x: jnp.where(x[0] < wall, x[0], -jnp.inf) - jnp.square(x[1]), [0.0, 0.0])
    assert not found.diagnostics.converged
    assert wall - 1e-5 < float(found.search.values[0]) < wall


def test_before_a_pole_the_best_trial_is_kept():
    found = climb(lambda x: -jnp.log(1.0 - x[0]) - jnp.square(x[1]), [0.0, 0.0])
    assert not found.diagnostics.converged
    assert 10.0 < float(found.search.best.objective) == pytest.approx(-np.log1p(-float(found.search.values[0])))


def test_steps_are_refused_by_name():
    with pytest.raises(ModelStructureError, match="'b' cannot be learned.*hyper_values={'b'"):
        climb(lambda x: -jnp.square(x[0]) + jnp.floor(x[1]), [1.0, 0.3], prior=lambda x: -jnp.sum(x**2))


def test_what_only_the_prior_knows_is_learned_from_the_prior():
    found = climb(lambda x: -jnp.square(x[0] - 1.0), [0.0, 3.0], prior=lambda x: -jnp.square(x[1] + x[0]))
    assert found.diagnostics.converged and found.curvature.is_peak
    np.testing.assert_allclose(found.search.values, [1.0, -1.0], atol=1e-3)


def test_a_hyperparameter_without_slope_at_the_start_is_followed_where_it_has_one():
    # A hinge: level up to one, where the start lies; beyond, a hill.
    found = climb(lambda x: -jnp.square(jnp.maximum(x[0] - 1.0, 0.0) - 2.0) - x[1] ** 2, [0.0, 0.0])
    np.testing.assert_allclose(found.search.values, [3.0, 0.0], atol=1e-3)


def test_a_threshold_is_refused_by_name():
    t = np.arange(20.0)

    def model(y):
        switch = numpyro.sample("switch", dist.Uniform(0.0, 20.0))
        level = numpyro.sample("level", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(jnp.where(t < switch, level[0], level[1]), 0.3), obs=y)

    with pytest.raises(ModelStructureError, match="'switch' cannot be learned by its derivative"):
        EP(model, progress_bar=False).run(KEY, np.where(t < 13.0, 0.0, 2.0) + 0.1 * np.sin(t))


@pytest.mark.thorough
def test_loadings_of_a_factor_model_leave_zero_for_the_closed_form():
    """Probabilistic principal components: the maximum is known (Tipping and Bishop, 1999)."""
    generator = np.random.default_rng(0)
    num_rows, num_columns, rank = 12, 4, 2
    y = generator.normal(size=(num_rows, rank)) @ generator.normal(size=(rank, num_columns))
    y += 0.4 * generator.normal(size=y.shape)

    def model(y):
        loadings = numpyro.param("loadings", jnp.zeros((num_columns, rank)))
        noise = numpyro.param("noise", 1.0, constraint=constraints.positive)
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([num_rows, rank]).to_event(2))
        numpyro.sample("y", dist.Normal(z @ loadings.T, noise).to_event(2), obs=y)

    engine = LaplaceApproximation(model, field=["z"], progress_bar=False)
    engine.run(KEY, y)
    eigenvalues = np.sort(np.linalg.eigvalsh(y.T @ y / num_rows))[::-1]
    rest = np.mean(eigenvalues[rank:])
    log_det = np.sum(np.log(eigenvalues[:rank])) + (num_columns - rank) * np.log(rest)
    highest = -0.5 * num_rows * (num_columns * np.log(2.0 * np.pi) + log_det + num_columns)
    assert engine.diagnostics.converged
    np.testing.assert_allclose(float(engine.log_evidence), highest, atol=1e-5)
    np.testing.assert_allclose(float(engine.hyper["noise"].value), np.sqrt(rest), rtol=1e-4)
    # A rotation of the factors changes nothing: no standard errors of loadings, said with the name.
    assert "'loadings'" in engine.diagnostics.messages[0] and np.isnan(engine.hyper["loadings"].standard_error).all()

    def density(values):
        """Log density of the rows, the factors integrated out, by loadings and the log of the noise."""
        loadings = values[:-1].reshape(num_columns, rank)
        covariance = loadings @ loadings.T + jnp.exp(2.0 * values[-1]) * jnp.eye(num_columns)
        return dist.MultivariateNormal(0.0, covariance).log_prob(y).sum()

    noise = engine.hyper["noise"]
    at = jnp.append(engine.hyper["loadings"].value.reshape(-1), jnp.log(noise.value))
    of_log_noise = np.sqrt(np.linalg.pinv(-np.asarray(jax.hessian(density)(at)), rcond=1e-6)[-1, -1])
    np.testing.assert_allclose(noise.standard_error, float(noise.value) * of_log_noise, rtol=1e-3)


@pytest.mark.thorough
def test_a_wide_standard_error_is_the_closed_form_in_estimates_and_guide():
    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1000.0))
        f = numpyro.sample("f", dist.Normal(mean, 1.0).expand([4]).to_event(1))
        numpyro.sample("y", dist.Normal(f, 77.45), obs=y)

    engine = LaplaceApproximation(model, field=["f"], integrate="none", progress_bar=False)
    engine.run(KEY, np.array([30.0, -10.0, 5.0, 40.0]))
    exact = (4.0 / (1.0 + 77.45**2) + 1e-6) ** -0.5
    np.testing.assert_allclose(float(engine.hyper["mean"].standard_error), exact, rtol=1e-3)
    covariance = engine.guide.get_posterior(engine.params).covariance_matrix
    np.testing.assert_allclose(np.sqrt(np.diagonal(covariance)[0]), exact, rtol=1e-3)
    assert not engine.diagnostics.messages


def test_sites_that_share_a_direction_between_many_elements_are_named():
    loadings = SimpleNamespace(shape=(40,), transform=biject_to(constraints.real), init=np.zeros(40))
    space = UnconstrainedSpace({"loadings": loadings, "b": PAIR["b"]})
    even = np.concatenate([np.full(40, 1.0 / np.sqrt(40.0)), [0.0]])
    assert names_of_directions(space, even[None]) == "'loadings'"


@pytest.mark.thorough
def test_where_rounding_hides_a_fall_the_slopes_show_it():
    """Single precision knows ten millions to one: the first step goes far past the top, and loses four."""
    evaluate = evaluation_fn(
        lambda x: x,
        lambda x: 0.0 * jnp.sum(x),
        lambda x, state: (state, ()),
        lambda x, state: 1e7 - 5.0 * jnp.sum(x**2),
    )
    start = jnp.full((1,), 0.1, jnp.float32)
    state = init_search(jax.eval_shape(evaluate, start, ()), start, ())
    slopes = []
    for _ in range(6):
        state, _ = search(evaluate, state, num_evaluations=1, tol=1e-2, max_iterations=9, trace_length=1)
        slopes.append(float(jnp.max(jnp.abs(state.best.gradient))))
    assert slopes[1] <= slopes[0] and bool(state.converged), slopes
    np.testing.assert_allclose(state.values, 0.0, atol=1e-3)


class Digits(NamedTuple):
    """What a fit says of the digits of its field."""

    converged: jax.Array
    max_change: jax.Array
    skipped: jax.Array


FINE, OF_PROBES = 1e-9, 1e-6
"""Tolerances of the field where a search ends, and for differences of derivatives, where rows are few."""


def test_a_search_has_the_digits_that_its_last_step_is_taken_by():
    """With errors of the derivative as they are of many rows it takes as many evaluations as without."""
    num_rows = 100_000

    def num_evaluations(error):
        def evaluate(x, state, tol=FINE):
            found = evaluation_fn(
                lambda x: x,
                lambda x: 0.0 * jnp.sum(x),
                lambda form, state: (tol, Digits(jnp.asarray(True), tol, jnp.zeros(num_rows, bool))),
                lambda form, state: -0.1 * num_rows * jnp.sum(jnp.log(jnp.cosh(form - 1.0))),
            )(x, state)
            return found._replace(gradient=found.gradient + error * num_rows * tol)

        tol = jnp.asarray(FINE, jnp.result_type(float))
        found = learned(evaluate, [0.2, 0.5], tol, may_be_coarse=True, field_tol=tol)
        assert found.diagnostics.converged
        return found.diagnostics.num_evaluations

    assert num_evaluations(5e-4) == num_evaluations(0.0)


@pytest.mark.parametrize("num_rows", [3, 100_000])
def test_differences_of_derivatives_have_the_digits_that_they_use(num_rows):
    """Errors of derivatives grow with the rows: second derivatives are right where these have other signs on either
    side of the top, and the field has no more digits than that takes."""

    def evaluate(x, state, tol=FINE):
        found = evaluation_fn(
            lambda x: x,
            lambda x: 0.0 * jnp.sum(x),
            lambda form, state: (jnp.minimum(tol, state), Digits(jnp.asarray(True), tol, jnp.zeros(num_rows, bool))),
            lambda form, state: -0.5 * jnp.sum((form - 1.0) ** 2),
        )(x, state)
        error = 1e-3 * num_rows * tol * jnp.sign(x - 1.0)
        return found._replace(gradient=found.gradient + jnp.where(tol < 1e-4, error, 0.0))

    tol = jnp.asarray(FINE, jnp.result_type(float))
    found = learned(evaluate, [1.0, 1.0], tol, may_be_coarse=True, field_tol=tol)
    np.testing.assert_allclose(found.curvature.covariance, np.eye(2), atol=1e-3)
    search = found.search._replace(is_searching=jnp.asarray(False), is_coarse=jnp.asarray(False))
    of_probe = float(field_tolerance(search, tol, 1e-4, 10))
    assert FINE < of_probe <= min(1.01 * OF_PROBES, 1e-2 / num_rows)


def climb_with_few_digits(coarse, start, max_steps=50):
    """Learn two numbers from ``-|x - 1|^2``, in whose place stands another function where few digits are asked for."""

    def evaluate(x, state, tol=FINE):
        has_few = tol > 2.0 * OF_PROBES
        found = evaluation_fn(
            lambda x: x,
            lambda x: 0.0 * jnp.sum(x),
            lambda form, state: (tol, Digits(jnp.asarray(True), tol, jnp.zeros(3))),
            lambda form, state: jnp.where(has_few, coarse(form), -jnp.sum((form - 1.0) ** 2)),
        )
        return found(x, state)

    tol = jnp.asarray(FINE, jnp.result_type(float))
    return learned(evaluate, start, tol, max_steps=max_steps, may_be_coarse=True, field_tol=tol)


@pytest.mark.parametrize(
    "coarse",
    [
        lambda x: -jnp.sum((x - 1.0) ** 2),
        lambda x: -jnp.sum((x - 0.7) ** 2),  # whose top is elsewhere
        lambda x: 1e3 - jnp.sum((x - 0.7) ** 2),  # and much too high
        lambda x: jax.lax.stop_gradient(jnp.sum(x**2)) - 2.0 * jnp.sum(x**2),  # whose slopes are not its own
    ],
    ids=["the same", "elsewhere", "too high", "wrong slopes"],
)
def test_no_search_ends_where_the_field_has_few_digits(coarse):
    found = climb_with_few_digits(coarse, [-2.0, 0.5])
    np.testing.assert_allclose(found.search.values, 1.0, atol=1e-4)
    assert found.diagnostics.converged and not found.messages and found.curvature.is_peak
    assert not found.search.is_coarse
    np.testing.assert_allclose(found.search.best.info.max_change, FINE, rtol=1e-6)  # the last fit has all of them
    np.testing.assert_allclose(found.curvature.covariance, 0.5 * np.eye(2), rtol=1e-3)


@pytest.mark.parametrize("max_steps", [1, 2])
def test_a_search_without_steps_left_has_all_digits_where_it_stops(max_steps):
    found = climb_with_few_digits(lambda x: 1e3 - jnp.sum((x - 0.7) ** 4), [-2.0, 0.5], max_steps)
    assert not found.diagnostics.converged and found.diagnostics.num_iterations == max_steps
    best = found.search.best
    np.testing.assert_allclose(best.info.max_change, FINE, rtol=1e-6)
    np.testing.assert_allclose(best.objective, -np.sum((np.asarray(found.search.values) - 1.0) ** 2), rtol=1e-6)


def test_a_search_that_begins_at_the_top_has_all_digits_and_needs_no_step():
    found = climb_with_few_digits(lambda x: -jnp.sum((x - 1.0) ** 2), [1.0, 1.0], max_steps=0)
    assert found.diagnostics.converged and not found.messages and found.curvature.is_peak
    # a point with few digits has no curvature: it is looked for once
    assert found.diagnostics.num_evaluations <= 2 + 2 * 2


def rounded(of_value, of_slope):
    """A steep and a flat direction, with the noise of rounding in the objective and in its derivatives."""

    def noise(x, shift):
        return jnp.sin(jax.lax.stop_gradient(1e16 * x[0] + 3e16 * x[1] + shift))

    def evidence(x):
        value = -2000.0 * jnp.square(x[0] - 0.3) - 0.5 * jnp.square(x[1] + x[0] - 1.0)
        slopes = of_slope * (noise(x, 1.0) * x[0] + noise(x, 2.0) * x[1])
        return value + of_value * noise(x, 0.0) + slopes - jax.lax.stop_gradient(slopes)

    return evidence


def test_rounding_of_the_objective_that_trial_points_show_ends_no_search():
    found = climb(rounded(0.05, 0.0), [0.29, -4.0])
    assert found.diagnostics.converged
    np.testing.assert_allclose(found.search.values, [0.3, 0.7], atol=1e-4)


def test_derivatives_that_are_rounding_are_those_of_a_top():
    found = climb(rounded(0.0, 1e-3), [0.29, -4.0])
    assert 1e-4 < found.diagnostics.max_gradient < 5e-3 and found.diagnostics.converged
    # What is no rounding is no top, however little it promises.
    evaluate = evaluation_fn(
        lambda x: x,
        lambda x: 0.0 * jnp.sum(x),
        lambda form, state: (state, ()),
        lambda form, _: rounded(0.0, 0.0)(form),
    )
    found = learned(evaluate, [0.3 + 1e-7, 0.7], jnp.zeros(()), max_steps=0)
    assert found.diagnostics.max_gradient > 1e-4 and not found.diagnostics.converged
