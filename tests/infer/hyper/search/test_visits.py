"""Visits in the loop of a search, against the search and the evaluations by themselves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.infer.hyper.evaluation import evaluation_fn
from numpyro_ext.infer.hyper.search import init_search, is_finished, search
from numpyro_ext.infer.hyper.visits import Visits, search_and_visit

TOL, LENGTH = 1e-5, 40


def evaluate(values, state, tol, with_gradient=True, *, is_known=False):
    """A curved valley; the state counts the fits that led to it, and says to which tolerance the last one was. The
    solver may know the height."""

    def height(x):
        return -((x[1] - x[0] ** 2) ** 2) - (x[0] - 1.0) ** 2

    def solve(form, state):
        return (state[0] + 1.0, jnp.asarray(tol, values.dtype)), height(form)

    found = evaluation_fn(
        form_fn=lambda x: x,
        log_prior_fn=lambda x: -0.5 * jnp.sum(x**2),
        solve_fn=solve,
        log_evidence_fn=lambda x, state: height(x),
        value_fn=lambda info: info if is_known else None,
    )
    return found(values, state, with_gradient)


@pytest.mark.parametrize("is_known", [True, False])
def test_visits_are_evaluations_and_leave_the_search_as_it_is(is_known):
    values, begun = jnp.array([-1.0, 2.0]), (jnp.zeros(()), jnp.zeros(()))
    own = partial(evaluate, is_known=is_known)
    begin = init_search(jax.eval_shape(own, values, begun, 0.1), values, begun)
    alone, trace = search(
        lambda values, state: own(values, state, 0.1),
        begin,
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
            lambda *place: (own(*place), place[1]),
            lambda values, found, held, is_visit: (
                values,
                found.objective,
                found.state,
                is_visit,
                found.gradient,
                held,
            ),
            start,
            visits,
            num_evaluations=num_evaluations,
            field_tol=np.asarray(0.1, values.dtype),
            tol=TOL,
            max_iterations=30,
            trace_length=LENGTH,
        )

    ended, objectives, (places, heights, (counts, tolerances), were_visits, slopes, held) = both(begin, visits, LENGTH)
    for here, there in zip(jax.tree.leaves((ended, objectives)), jax.tree.leaves((alone, trace)), strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-6, atol=1e-6)
    expected = [float(own(jnp.asarray(p), (0.0, 0.0), 0.1).objective) for p in points[:3]]
    np.testing.assert_allclose(heights, [*expected, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(places[:3], points[:3])
    # each from the state beside it, to the tolerance of visits; zeros where none was made
    np.testing.assert_array_equal(counts, [1.0, 2.0, 3.0, 0.0])
    np.testing.assert_array_equal(tolerances, [0.5, 0.5, 0.5, 0.0])
    np.testing.assert_array_equal(were_visits, [True, True, True, False])
    # of what the solver knows without a gradient none is made for a visit: what is left is that of the log prior
    with_gradient = [own(jnp.asarray(p), (0.0, 0.0), 0.1).gradient for p in points[:3]]
    np.testing.assert_allclose(slopes[:3], -points[:3] if is_known else with_gradient, rtol=1e-6, atol=1e-6)

    looked, none, (_, heights, *_) = both(ended, visits, 0)
    np.testing.assert_allclose(heights[:3], expected, rtol=1e-6)
    assert np.isnan(none).all()
    for here, there in zip(jax.tree.leaves(looked), jax.tree.leaves(ended), strict=True):
        np.testing.assert_array_equal(here, there)
