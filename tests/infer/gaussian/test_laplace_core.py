"""The numerical core of Laplace's method: exact cases, modes found by another optimiser, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from numpyro_ext.infer.gaussian.algorithms.modes import laplace
from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation as ep
from numpyro_ext.linalg.gaussian.design import DenseDesign
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior, FlatPrior
from numpyro_ext.potentials import GaussianPotential, LogitPotential, PoissonExpPotential, StudentTPotential
from tests.infer.gaussian.gaussian_forms import (
    assert_gradient_of_refits,
    counts_in_single_precision,
    crossed_form,
    identity,
    kernel,
    make_form,
    mixed_prior,
    random_dense,
)
from tests.tiers import thorough

NUM = 12
SPACES = ["observation", "coefficient", "sparse"]
COUNTS = jnp.asarray(np.resize([3.0, 0.0, 1.0, 7.0, 2.0, 0.0], NUM))
DATA = jnp.asarray(np.random.default_rng(2).standard_t(2.0, size=NUM))


@functools.partial(jax.jit, static_argnames=("space", "num_steps", "tol"))
def fit(form, *, space="auto", num_steps=60, tol=1e-9):
    return laplace.solve(form, laplace.init(form, space=space), num_steps=num_steps, tol=tol, space=space)


@functools.partial(jax.jit, static_argnames="space")
def moments(form, state, *, space="auto"):
    """Of the unknowns the mean, of the predictors mean and variance."""
    posterior = laplace.posterior(form, state, space=space)
    return posterior.mean, *posterior.predictor_moments()


log_evidence = jax.jit(laplace.log_evidence, static_argnames="space")


def gaussian_process(potentials, scale=1.5, mean=0.3):
    prior = (CovariancePrior(kernel(NUM, scale, jitter=1e-4)[None]),)
    return make_form(prior, identity(NUM), potentials, offset=jnp.full(NUM, mean))


def test_sites_near_the_mode_are_those_of_the_mode():
    form = gaussian_process((PoissonExpPotential(COUNTS),))
    state, _ = fit(form)
    sites = laplace.posterior(form, state)
    near = jax.jit(functools.partial(laplace.sites_near_mode, num_steps=50, tol=1e-3))
    precision, shift = near(form)
    np.testing.assert_allclose(precision, sites.site_precision, rtol=2e-3)
    # at the mean of the posterior the slope is that of the factors
    eta = state.predictor + form.offset
    slope = form.potentials[0].derivatives(eta)[1]
    np.testing.assert_allclose(shift - precision * eta, slope, atol=2e-3)


@pytest.mark.parametrize("space", SPACES)
def test_exact_on_gaussian_likelihood(space):
    form = gaussian_process((GaussianPotential(DATA, 0.5),))
    state, info = fit(form, space=space)
    _, exact = jax.jit(lambda form: ep.solve(form, ep.init(form), space=space))(form)
    assert info.converged and info.num_steps <= 2
    np.testing.assert_allclose(log_evidence(form, state, space=space), exact.objective, rtol=1e-10)
    np.testing.assert_allclose(info.objective, exact.objective, rtol=1e-10)
    covariance = np.asarray(form.prior[0].covariance[0])
    gain = np.linalg.solve(covariance + 0.25 * np.eye(NUM), covariance).T
    _, mean, variance = moments(form, state, space=space)
    np.testing.assert_allclose(mean, 0.3 + gain @ (DATA - 0.3), atol=1e-10)
    np.testing.assert_allclose(variance, np.diag(covariance - gain @ covariance), atol=1e-10)


@pytest.mark.parametrize(
    "potential, width",
    [
        (PoissonExpPotential(COUNTS, 1.0), 0.0),
        (LogitPotential(jnp.minimum(COUNTS, 1.0)), 0.0),
        pytest.param(StudentTPotential(DATA, 0.3, 3.0), 0.0, marks=pytest.mark.slow),
        (PoissonExpPotential(COUNTS.at[4].set(1e6), 1.0), 0.0),
    ],
    ids=["counts", "labels", "heavy-tailed", "one-large-count"],
)
@pytest.mark.parametrize("space", [SPACES[0], *thorough(*SPACES[1:])])
def test_mode_is_that_of_another_optimiser(potential, width, space):
    form = gaussian_process((potential,))
    state, info = fit(form, space=space)
    assert info.converged
    assert np.all(np.diff(info.objective_trace[: info.num_steps]) > -1e-9)
    start, _, variance = map(np.asarray, moments(form, state, space=space))
    factor = jnp.linalg.cholesky(form.prior[0].covariance[0])

    def negative_density(white):
        return -form.log_density(factor @ white)

    loss, slope, hessian = map(jax.jit, (negative_density, jax.grad(negative_density), jax.hessian(negative_density)))
    white = np.linalg.solve(factor, start)
    gradient = np.asarray(slope(white))
    assert np.abs(gradient).max() < 1e-5 * max(1.0, float(np.max(np.abs(hessian(white)))) ** 0.5)
    near = white + 0.01 * np.random.default_rng(0).normal(size=NUM)
    result = minimize(loss, near, jac=slope, hess=hessian, method="trust-exact")
    np.testing.assert_allclose(factor @ result.x, start, atol=1e-5)
    covariance = factor @ np.linalg.inv(hessian(white)) @ factor.T
    np.testing.assert_allclose(variance, np.diag(covariance), rtol=1e-6, atol=1e-10)


@pytest.mark.thorough
def test_flat_prior_gives_the_maximum_likelihood_estimate():
    rng = np.random.default_rng(1)
    design = random_dense(rng, NUM, 3)
    form = make_form((FlatPrior(2), DiagonalPrior(jnp.array([4.0]))), design, (PoissonExpPotential(COUNTS, 2.0),))
    state, info = fit(form)
    assert info.converged
    mode = laplace.posterior(form, state).mean
    np.testing.assert_allclose(jax.grad(form.log_density)(mode), 0.0, atol=1e-8)
    hessian = -jax.hessian(form.log_density)(mode)
    expected = form.log_density(mode) + 1.5 * np.log(2 * np.pi) - 0.5 * np.linalg.slogdet(hessian)[1]
    np.testing.assert_allclose(laplace.log_evidence(form, state), expected, rtol=1e-10)


@pytest.mark.slow
def test_all_kinds_of_prior_against_the_dense_formula():
    rng = np.random.default_rng(6)
    form = make_form(mixed_prior(rng), random_dense(rng, NUM, 11), (PoissonExpPotential(COUNTS, 1.0),))
    values = []
    for space in ("observation", "coefficient"):
        state, info = fit(form, space=space)
        assert info.converged
        mode = laplace.posterior(form, state, space=space).mean
        hessian = -jax.hessian(form.log_density)(mode)
        expected = form.log_density(mode) + 5.5 * np.log(2 * np.pi) - 0.5 * np.linalg.slogdet(hessian)[1]
        values.append(laplace.log_evidence(form, state, space=space))
        np.testing.assert_allclose(values[-1], expected, rtol=1e-10)
    np.testing.assert_allclose(*values, rtol=1e-11)


def form_of_parameters(parameters, family):
    scale, mean, last = parameters
    if family == "counts":
        return gaussian_process((PoissonExpPotential(COUNTS, last),), scale, mean)
    if family == "Gaussian":
        return gaussian_process((GaussianPotential(DATA, last),), scale, mean)
    return gaussian_process((StudentTPotential(DATA, last, 3.0),), scale, mean)


@pytest.mark.thorough
def test_gaussian_evidence_and_its_derivatives_by_one_factorisation(monkeypatch):
    point = jnp.array([1.5, 0.3, 0.8])
    form = form_of_parameters(point, "Gaussian")
    start = laplace.init(form, space="observation")  # not the mode: the step from anywhere ends there

    def evidence(parameters):
        return laplace.log_evidence(form_of_parameters(parameters, "Gaussian"), start, space="observation")

    def marginal(parameters):
        scale, mean, noise = parameters
        covariance = kernel(NUM, scale, jitter=1e-4) + noise**2 * jnp.eye(NUM)
        return jax.scipy.stats.multivariate_normal.logpdf(DATA, jnp.full(NUM, mean), covariance)

    def derivatives(function):
        return jax.jit(lambda p: (*jax.value_and_grad(function)(p), jax.hessian(function)(p)))(point)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7), derivatives(evidence), derivatives(marginal))

    algebra, counts = type(laplace.gaussian_prior(form, "observation")), []
    condition = algebra.condition
    monkeypatch.setattr(algebra, "condition", lambda *args: counts.append(1) or condition(*args))
    jax.make_jaxpr(evidence)(point)
    assert len(counts) == 1


@pytest.mark.parametrize("family", ["counts", "heavy-tailed"])
@pytest.mark.parametrize("space", ["observation", "coefficient"])
def test_gradient_of_evidence_against_refitted_differences(family, space):
    point = jnp.array([1.5, 0.3, 0.8])

    @jax.jit
    def refit(parameters):
        form = form_of_parameters(parameters, family)
        state, info = laplace.solve(form, laplace.init(form, space=space), tol=1e-11, space=space)

        def evidence(p):
            return laplace.log_evidence(form_of_parameters(p, family), state, space=space)

        return *jax.value_and_grad(evidence)(parameters), info.converged

    assert_gradient_of_refits(refit, point)


@pytest.mark.parametrize("far", [800.0, jnp.nan])
def test_start_without_a_density_is_left(far):
    form = gaussian_process((PoissonExpPotential(COUNTS),), mean=0.5)
    start = laplace.init(form)
    ends = [_solve_from(form, start._replace(coordinates=start.coordinates + shift)) for shift in (0.0, far)]
    assert all(info.converged for _, info in ends)
    np.testing.assert_allclose(ends[1][0].predictor, ends[0][0].predictor, atol=1e-7)


_solve_from = jax.jit(laplace.solve)


def test_masked_rows_are_as_if_deleted():
    observed = jnp.asarray(np.resize([True, True, False], NUM))
    form = gaussian_process((PoissonExpPotential(COUNTS, 1.0),))._replace(observed=(observed,))
    kept = np.flatnonzero(observed)
    smaller = make_form(
        (CovariancePrior(form.prior[0].covariance[:, kept][:, :, kept]),),
        identity(kept.size),
        (PoissonExpPotential(COUNTS[kept], 1.0),),
        offset=jnp.full(kept.size, 0.3),
    )
    (state, _), (other, _) = fit(form), fit(smaller)
    np.testing.assert_allclose(log_evidence(form, state), log_evidence(smaller, other), rtol=1e-11)
    np.testing.assert_allclose(state.predictor[kept], other.predictor, atol=1e-9)


@pytest.mark.thorough
def test_stacked_forms_under_vmap():
    scales = jnp.array([0.8, 1.5])

    def evidence(scale):
        form = gaussian_process((StudentTPotential(DATA, 0.3, 3.0),), scale)
        state, info = fit(form)
        return laplace.log_evidence(form, state), info.converged

    values, converged = jax.jit(jax.vmap(evidence))(scales)
    assert np.all(converged)
    np.testing.assert_allclose(values, [evidence(scale)[0] for scale in scales], rtol=1e-10)


def test_unbounded_and_indefinite_problems_are_reported():
    separated = make_form((FlatPrior(1),), DenseDesign(jnp.ones((NUM, 1))), (LogitPotential(jnp.ones(NUM)),))
    _, info = fit(separated, num_steps=20)
    assert not info.converged
    covariance = jnp.array([[[1.0, 1.2], [1.2, 1.0]]])
    indefinite = make_form((CovariancePrior(covariance),), identity(2), (PoissonExpPotential(COUNTS[:2], 1.0),))
    state, info = fit(indefinite)
    assert not info.converged and np.isnan(log_evidence(indefinite, state))


@pytest.mark.float32
def test_single_precision():
    form = counts_in_single_precision(NUM, COUNTS)
    state, info = fit(form, tol=1e-5)
    assert info.converged and state.predictor.dtype == jnp.float32
    gradient = jax.jit(jax.grad(form.log_density))(moments(form, state)[0])
    factor = jnp.linalg.cholesky(form.prior[0].covariance[0])
    np.testing.assert_allclose(factor.T @ gradient, 0.0, atol=2e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["counts", "heavy-tailed", "Gaussian"])
def test_steps_with_one_factor_end_where_newton_does(family):
    form = crossed_form(jnp.array([0.7, 0.5, 0.3]), family)
    (state, info), (plain, other) = fit(form, space="border"), fit(form, space="coefficient")
    assert info.converged and other.converged
    assert info.num_steps < other.num_steps and (family != "Gaussian" or info.num_steps == 1)
    assert info.max_change < 1e-7
    np.testing.assert_allclose(state.predictor, plain.predictor, atol=1e-10)
    np.testing.assert_allclose(info.objective, other.objective, rtol=0.0, atol=1e-9)
    expected = log_evidence(form, plain, space="coefficient")
    np.testing.assert_allclose([info.objective, log_evidence(form, state, space="border")], expected, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["counts", "heavy-tailed"])
def test_derivatives_of_evidence_by_one_factor_against_refits(family, monkeypatch):
    @jax.jit
    def refit(parameters):
        form = crossed_form(parameters, family)
        state, info = laplace.solve(form, laplace.init(form, space="border"), tol=1e-11, space="border")
        return *jax.value_and_grad(evidence)(parameters, state), info.converged, state

    def evidence(parameters, state):
        return laplace.log_evidence(crossed_form(parameters, family), state, space="border")

    point = jnp.array([0.7, 0.5, 0.3])
    assert_gradient_of_refits(lambda parameters: refit(parameters)[:3], point)
    state = refit(point)[3]
    second = jax.jit(jax.hessian(evidence))(point, state)
    steps = 1e-4 * jnp.eye(3)
    differences = jnp.stack([(refit(point + step)[1] - refit(point - step)[1]) / 2e-4 for step in steps])
    np.testing.assert_allclose(second, differences, rtol=1e-5, atol=1e-6)

    algebra, counts = type(laplace.gaussian_prior(crossed_form(point, family), "border")), []
    condition = algebra.condition
    monkeypatch.setattr(algebra, "condition", lambda *args: counts.append(1) or condition(*args))
    jax.make_jaxpr(jax.grad(evidence))(point, state)
    assert len(counts) == 1


@pytest.mark.parametrize("family", ["counts", "Gaussian", pytest.param("heavy-tailed", marks=pytest.mark.thorough)])
def test_what_a_fit_holds_is_what_others_would_compute_again(family):
    @jax.jit
    def both(point):
        form = crossed_form(point, family)
        state, info, held = laplace.solve_and_hold(form, laplace.init(form, space="border"), tol=1e-9, space="border")

        def slopes(held):
            def evidence(parameters):
                return laplace.log_evidence(crossed_form(parameters, family), state, space="border", held=held)

            return jax.value_and_grad(evidence)(point)

        again = laplace.posterior(form, state, space="border").condition()
        answers = [(p.unknowns(), p.row_variance(), p.half_square_of_mean(), p.log_volume()) for p in (held, again)]
        return info, (slopes(held), answers[0]), (slopes(None), answers[1])

    info, found, expected = both(jnp.array([0.7, 0.5, 0.3]))
    assert info.converged
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10), found, expected)
    np.testing.assert_allclose(info.objective, expected[0][0], rtol=1e-10)
