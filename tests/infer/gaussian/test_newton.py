"""Newton's method for the sites of EP: a few steps from a fit of almost the same data, to where sweeps end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation as ep
from numpyro_ext.infer.gaussian.algorithms.propagation.newton import newton_sites
from numpyro_ext.linalg.gaussian.design import DenseDesign
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior
from numpyro_ext.potentials import LogitPotential, ProbitPotential, StudentTPotential
from tests.infer.gaussian.gaussian_forms import identity, kernel, make_form
from tests.tiers import few

NUM = 60
LABELS = jnp.where(jnp.arange(NUM) % 20 < 10, 1.0, 0.0)


def process(potential, observed=None):
    """A smooth process, whose predictors are strongly correlated."""
    prior = (CovariancePrior(kernel(NUM, 3.0, 0.3)[None]),)
    form = make_form(prior, identity(NUM), (potential,), offset=0.3 * jnp.ones(NUM))
    return form if observed is None else form._replace(observed=(observed,))


@functools.partial(jax.jit, static_argnames="tol")
def fit(form, state, *, tol):
    return ep.solve(form, state, num_steps=200, tol=tol)


approach = jax.jit(ep.approach, static_argnames="power")


@pytest.mark.thorough
@pytest.mark.float32
@pytest.mark.parametrize(
    "potential", few([ProbitPotential(LABELS), LogitPotential(LABELS)], 1), ids=["probit", "logit"]
)
def test_after_one_datum_more_two_sweeps_are_left_of_many(potential):
    is_double = jnp.result_type(float) == jnp.float64
    tol = 1e-10 if is_double else 1e-4
    form = process(potential)
    before, _ = fit(process(potential, jnp.arange(NUM) != 29), ep.init(form), tol=tol)
    plain, many = fit(form, before, tol=tol)
    state, few = fit(form, approach(form, before), tol=tol)
    assert many.converged and few.converged
    assert few.num_steps <= 2 and (not is_double or many.num_steps > 8)
    bound = 1e-8 if is_double else 2e-3
    deviation = np.sqrt(plain.marginals.variance)
    np.testing.assert_allclose(state.marginals.mean / deviation, plain.marginals.mean / deviation, atol=bound)
    np.testing.assert_allclose(state.marginals.variance, plain.marginals.variance, rtol=bound)


@pytest.mark.thorough
def test_a_start_from_far_off_ends_where_sweeps_do():
    form = process(ProbitPotential(LABELS))
    plain, _ = fit(form, ep.init(form), tol=1e-10)
    wrong = plain._replace(site_precision=50.0 * plain.site_precision, site_shift=-30.0 * plain.site_shift)
    state, info = fit(form, approach(form, wrong), tol=1e-10)
    assert info.converged
    np.testing.assert_allclose(state.marginals.mean, plain.marginals.mean, atol=1e-8)
    unknown = plain._replace(site_shift=jnp.full(NUM, jnp.nan))  # no step comes nearer
    np.testing.assert_array_equal(approach(form, unknown).site_precision, plain.site_precision)


def test_sites_are_left_alone_where_this_has_nothing_to_offer():
    process_form = process(ProbitPotential(LABELS))
    start = ep.init(process_form)  # before the opening sweep
    np.testing.assert_array_equal(approach(process_form, start).site_precision, start.site_precision)
    heavy = process(StudentTPotential(LABELS, jnp.ones(NUM), 4.0 * jnp.ones(NUM)))
    rng = np.random.default_rng(0)
    few = make_form((DiagonalPrior(jnp.ones(3)),), DenseDesign(rng.normal(size=(NUM, 3))), (ProbitPotential(LABELS),))
    for form in (heavy, few):
        precision, shift = newton_sites(form, jnp.ones(NUM), jnp.zeros(NUM))
        np.testing.assert_array_equal((precision, shift), (jnp.ones(NUM), jnp.zeros(NUM)))
