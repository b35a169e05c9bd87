"""Visits in the loop of a search, against the search and the evaluations by themselves."""

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_ext.infer.hyper.search import evaluation_fn, init_search, is_finished, search
from numpyro_ext.infer.hyper.visits import Visits, search_and_visit

TOL, LENGTH = 1e-5, 40


def evaluate(values, state, tol):
    """A curved valley; the state counts the fits that led to it, and says to which tolerance the last one was."""

    def solve(form, state):
        return (state[0] + 1.0, jnp.asarray(tol, values.dtype)), ()

    found = evaluation_fn(
        form_fn=lambda x: x,
        log_prior_fn=lambda x: -0.5 * jnp.sum(x**2),
        solve_fn=solve,
        log_evidence_fn=lambda x, state: -((x[1] - x[0] ** 2) ** 2) - (x[0] - 1.0) ** 2,
    )
    return found(values, state)


def begin(values):
    state = (jnp.zeros(()), jnp.zeros(()))
    return init_search(jax.eval_shape(evaluate, values, state, 0.1), values, state)


def test_visits_are_evaluations_and_leave_the_search_as_it_is():
    values = jnp.array([-1.0, 2.0])
    alone, trace = search(
        lambda values, state: evaluate(values, state, 0.1),
        begin(values),
        num_evaluations=LENGTH,
        tol=TOL,
        max_iterations=30,
    )
    assert bool(is_finished(alone)) and int(alone.num_iterations) > 3
    points = np.random.default_rng(0).standard_normal((4, 2)).astype(values.dtype)
    visits = Visits(points, (np.arange(4.0, dtype=values.dtype),) * 2, 3, np.asarray(0.5, values.dtype))

    @jax.jit
    def both(start, visits, num_evaluations):
        return search_and_visit(
            evaluate,
            lambda values, found, is_visit: (values, found.objective, found.state, is_visit),
            start,
            visits,
            num_evaluations=num_evaluations,
            field_tol=np.asarray(0.1, values.dtype),
            tol=TOL,
            max_iterations=30,
            trace_length=LENGTH,
        )

    ended, objectives, (places, heights, (counts, tolerances), were_visits) = both(begin(values), visits, LENGTH)
    for here, there in zip(jax.tree.leaves((ended, objectives)), jax.tree.leaves((alone, trace)), strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-6, atol=1e-6)
    expected = [float(evaluate(jnp.asarray(p), (0.0, 0.0), 0.1).objective) for p in points[:3]]
    np.testing.assert_allclose(heights, [*expected, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(places[:3], points[:3])
    # each from the state beside it, to the tolerance of visits; zeros where none was made
    np.testing.assert_array_equal(counts, [1.0, 2.0, 3.0, 0.0])
    np.testing.assert_array_equal(tolerances, [0.5, 0.5, 0.5, 0.0])
    np.testing.assert_array_equal(were_visits, [True, True, True, False])

    looked, none, (_, heights, *_) = both(ended, visits, 0)
    np.testing.assert_allclose(heights[:3], expected, rtol=1e-6)
    assert np.isnan(none).all()
    for here, there in zip(jax.tree.leaves(looked), jax.tree.leaves(ended), strict=True):
        np.testing.assert_array_equal(here, there)
