"""Sweeps of expectation propagation with the factor at hand: same end, fewer factorisations, and honest foresight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.infer.gaussian.algorithms.modes.mode_derivative import holds_factor
from numpyro_ext.infer.gaussian.algorithms.posterior import gaussian_prior
from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation as ep
from numpyro_ext.infer.gaussian.algorithms.propagation import held_factor
from numpyro_ext.infer.gaussian.algorithms.propagation.opening import refresh_and_hold
from numpyro_ext.linalg.gaussian.marginals import relative_change
from tests.infer.gaussian.gaussian_forms import crossed_form
from tests.tiers import thorough

POINT = jnp.array([0.7, 0.5, 0.3])
FAMILIES = ["binary", *thorough("counts", "Gaussian")]


@functools.partial(jax.jit, static_argnames=("space", "tol", "num_steps"))
def fit(form, state=None, *, space="auto", tol=1e-10, num_steps=100):
    return ep.solve(form, ep.init(form) if state is None else state, tol=tol, num_steps=num_steps, space=space)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_it_ends_where_plain_sweeps_do_in_fewer(family):
    form = crossed_form(POINT, family)
    assert holds_factor(gaussian_prior(form))
    (state, info), (plain, other) = fit(form), fit(form, space="coefficient")
    assert info.converged and other.converged and info.num_steps <= other.num_steps
    assert family == "Gaussian" or info.num_steps < other.num_steps
    for found, expected in zip(state.marginals[:3], plain.marginals[:3], strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-9)
    np.testing.assert_allclose(info.objective, other.objective, atol=1e-9)
    np.testing.assert_allclose(state.site_precision, plain.site_precision, atol=1e-8)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_held_at_the_end_is_what_would_be_made_again(family):
    @jax.jit
    def both(parameters):
        form = crossed_form(parameters, family)
        state, info, held = ep.solve_and_hold(form, ep.init(form), tol=1e-10)

        def slopes(held):
            def evidence(parameters):
                return ep.log_evidence(crossed_form(parameters, family), state, held=held)

            return jax.value_and_grad(evidence)(parameters)

        again = ep.posterior(form, state).condition()
        answers = [(p.unknowns(), p.row_variance(), p.half_square_of_mean(), p.log_volume()) for p in (held, again)]
        return info, (slopes((held, state.marginals)), answers[0]), (slopes(None), answers[1])

    info, found, expected = both(POINT)
    assert info.converged
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9), found, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("distance", [1e-2, 1e-4])
def test_a_sweep_changes_no_more_than_was_foreseen(family, distance):
    form, beside = crossed_form(POINT, family), crossed_form(POINT * (1.0 + distance), family)
    state, _ = fit(beside)

    @jax.jit
    def look(state):
        prior = gaussian_prior(form)
        marginals, held = refresh_and_hold(form, prior, state.site_precision, state.site_shift)
        state = state._replace(marginals=marginals)
        looked = held_factor.look_ahead(form, prior, held, state, 1, jnp.asarray(False))
        swept, found = ep.step(form, state)
        return looked.bound(state, 0.0), relative_change(swept.marginals, marginals), looked, swept, found

    bound, change, looked, swept, found = look(state)
    largest = float(jnp.max(jnp.abs(change)))
    # the linear part is what is foreseen, and the change of means by it is theirs
    assert largest <= bound * (1.0 + 5.0 * distance) + 1e-13
    means = float(jnp.max(jnp.abs(change[: form.num_rows])))
    np.testing.assert_allclose(looked.mean_change, means, rtol=20.0 * distance, atol=1e-13)
    # plain proposals are those of a plain sweep, and so is the evidence
    np.testing.assert_allclose(looked.precision, swept.site_precision, atol=1e-12)
    np.testing.assert_allclose(looked.objective, found.objective, rtol=1e-12)


def test_a_fit_that_is_at_its_end_takes_no_sweep():
    form = crossed_form(POINT, "binary")
    state, _ = fit(form, tol=1e-10)
    again, info = fit(form, state, tol=1e-6)
    assert info.converged and info.num_steps == 1 and info.max_change < 1e-6
    np.testing.assert_array_equal(again.site_shift, state.site_shift)
    np.testing.assert_allclose(info.objective, fit(form, tol=1e-10)[1].objective, atol=1e-10)


def test_a_fit_that_is_near_its_end_but_not_there_goes_on():
    form, beside = (crossed_form(POINT * scale, "binary") for scale in (1.0, 1.001))
    far, near = fit(form), fit(form, fit(beside)[0], tol=1e-9)
    assert near[1].converged and near[1].num_steps > 1
    np.testing.assert_allclose(near[0].marginals.mean, far[0].marginals.mean, atol=1e-9)


def test_sweeps_that_run_out_hold_the_posterior_of_their_last_sites():
    form = crossed_form(3.0 * POINT, "counts")

    @jax.jit
    def both():
        state, info, held = ep.solve_and_hold(form, ep.init(form), tol=1e-12, num_steps=1)
        again = ep.posterior(form, state).condition()
        return info, held.row_variance(), again.row_variance(), state.marginals.variance

    info, found, expected, own = both()
    assert not info.converged
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    np.testing.assert_allclose(own, expected, rtol=1e-10)


@pytest.mark.thorough
def test_sweeps_end_early_below_a_floor_alone():
    """Evidences at broad priors take many sweeps, and no digits are needed where they are far below a floor."""
    form = crossed_form(jnp.array([30.0, 20.0, 30.0]), "binary")

    @jax.jit
    def above(floor):
        return ep.solve_and_hold(form, ep.init(form), tol=1e-8, floor=floor)[:2]

    state, info = fit(form, tol=1e-8)
    assert info.converged and info.num_steps > 4
    for floor in (-jnp.inf, info.objective - 1.0):
        same, same_info = above(floor)
        assert same_info.converged
        np.testing.assert_allclose(same_info.objective, info.objective, rtol=1e-12)
        np.testing.assert_allclose(same.site_precision, state.site_precision, rtol=1e-9)
    floor = info.objective + 60.0
    _, low = above(floor)
    assert low.num_steps < info.num_steps and not low.converged
    assert low.objective < floor
    np.testing.assert_allclose(low.objective, info.objective, atol=0.5 * (floor - info.objective))
