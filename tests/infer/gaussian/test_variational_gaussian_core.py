"""The numerical core of the variational Gaussian: exact cases, reference optima, dense formulas, gradients."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.infer.gaussian.algorithms.posterior import gaussian_prior
from numpyro_ext.infer.gaussian.variational import coordinate_ascent as variational_coordinate
from numpyro_ext.infer.gaussian.variational import general_optimiser as variational_reference
from numpyro_ext.infer.gaussian.variational import natural_gradient as vg
from numpyro_ext.infer.gaussian.variational.bound import evaluate
from numpyro_ext.linalg.gaussian.design import DenseDesign
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior, FlatPrior
from numpyro_ext.potentials import GaussianPotential, LogitPotential, PoissonExpPotential, StudentTPotential
from numpyro_ext.potentials.bounds.logistic import BoundedPotential, logistic_bound
from numpyro_ext.structure.latent_gaussian.form import Blocks
from tests.infer.gaussian.gaussian_forms import (
    counts_in_single_precision,
    dense_prior_precision,
    identity,
    kernel,
    make_form,
    mixed_prior,
    random_dense,
    random_sparse,
)
from tests.tiers import thorough

REFERENCE = Path(__file__).parents[2] / "reference"
PROBLEM = json.loads((REFERENCE / "khan_gpc_elbo.json").read_text())
REGRESSION = json.loads((REFERENCE / "khan_lgm_small.json").read_text())["blr"]
# The four inputs at which predictions are known stand at the end, without observation.
INPUTS = np.concatenate([PROBLEM["X"], PROBLEM["xs"]])[:, 0]
LABELS = jnp.asarray(np.append(PROBLEM["y"], np.zeros(4)))
IS_OBSERVED = np.arange(24) < 20
SETTINGS = [(result["log_l"], result["log_sigma"]) for result in PROBLEM["results"]]

NUM = 12
COUNTS = jnp.asarray(np.resize([3.0, 0.0, 1.0, 7.0, 2.0, 0.0], NUM))
DATA = jnp.asarray(np.random.default_rng(2).standard_t(2.0, size=NUM))


@functools.partial(jax.jit, static_argnames=("space", "num_steps", "tol"))
def fit_from(form, state, *, space="auto", num_steps=200, tol=1e-9):
    return vg.solve(form, state, num_steps=num_steps, tol=tol, space=space)


def fit(form, *, space="auto", **options):
    return fit_from(form, jax.jit(vg.init, static_argnames="space")(form, space=space), space=space, **options)


def classification(log_length, log_scale, order=slice(None)):
    """Problem A of Khan (2012): a Gaussian process with a logit link on twenty points."""
    inputs = INPUTS[order]
    distance = jnp.asarray((inputs[:, None] - inputs) ** 2)
    covariance = jnp.exp(2 * log_scale - 0.5 * distance * jnp.exp(-2 * log_length))
    covariance += PROBLEM["jitter"] * jnp.eye(inputs.size)
    observed = (jnp.asarray(IS_OBSERVED[order]),)
    return make_form(
        (CovariancePrior(covariance[None]),), identity(24), (LogitPotential(LABELS[order]),), observed=observed
    )


def gaussian_process(potentials, scale=1.5, mean=0.3):
    prior = (CovariancePrior(kernel(NUM, scale, jitter=1e-4)[None]),)
    return make_form(prior, identity(NUM), potentials, offset=jnp.full(NUM, mean))


@pytest.mark.parametrize("setting", [0, *thorough(1, 2, 3), 4], ids=[f"{length}-{scale}" for length, scale in SETTINGS])
@pytest.mark.parametrize("space", ["observation", pytest.param("coefficient", marks=pytest.mark.slow)])
def test_reference_optima_of_classification(setting, space):
    expected = PROBLEM["results"][setting]["bounds"]["exact"]
    state, info = fit(classification(*SETTINGS[setting]), space=space)
    assert info.converged
    np.testing.assert_allclose(info.objective, expected["elbo"], atol=1e-8)
    trace = np.asarray(info.objective_trace)[: info.num_steps]
    assert np.all(np.diff(trace) > -1e-11)
    # The moments of the reference are those of a bound known to 1e-10: good to about the root of it.
    mean, variance = state.point.mean, state.point.variance
    np.testing.assert_allclose(mean[:20], expected["m"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(variance[:20], expected["v"], rtol=1e-4)
    np.testing.assert_allclose(state.site_precision[:20], expected["lam"], rtol=1e-3, atol=1e-8)
    assert np.all(state.site_precision[20:] == 0.0) and np.all(state.site_shift[20:] == 0.0)
    prediction = PROBLEM["results"][setting]["pred"]
    variance = variance[20:] - PROBLEM["jitter"]
    probability = jnp.exp(LogitPotential(jnp.ones(4)).tilted_moments(mean[20:], variance).log_z)
    np.testing.assert_allclose(probability, prediction["p"], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bound, num_pieces, reference",
    [
        ("jaakkola", 3, "J"),
        ("bohning", 3, "B"),
        ("piecewise-quadratic", 20, "Q20"),
        ("piecewise-quadratic", 10, "Q10"),
        ("piecewise-quadratic", 5, "Q5"),
        ("piecewise-quadratic", 3, "Q3"),
        ("piecewise-linear", 10, "L10"),
    ],
)
def test_reference_optima_with_local_bounds(bound, num_pieces, reference):
    bound = logistic_bound(bound, num_pieces)
    for setting, result in zip(SETTINGS, PROBLEM["results"], strict=True):
        form = classification(*setting)
        form = form._replace(potentials=(BoundedPotential(form.potentials[0], bound),))
        _, info = fit(form, space="observation")
        np.testing.assert_allclose(info.objective, result["bounds"][reference]["elbo"], atol=1e-6)
        assert np.all(np.diff(np.asarray(info.objective_trace)[: info.num_steps]) > -1e-11)
        if setting[1] < 2.0:
            assert info.converged


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [range(3), pytest.param(range(3, 5), marks=pytest.mark.slow)])
def test_coordinate_ascent_finds_the_same_optima(settings):
    solve = jax.jit(lambda form: variational_coordinate.solve(form, vg.init(form), num_steps=60))
    for k in settings:
        _, info = solve(classification(*SETTINGS[k]))
        expected = PROBLEM["results"][k]["bounds"]["exact"]
        assert info.converged
        np.testing.assert_allclose(info.objective, expected["elbo"], atol=1e-8)
        trace = np.asarray(info.objective_trace)[: info.num_steps]
        assert np.all(np.diff(trace) > -1e-11)
        # As many sweeps as an independent implementation needed, which started at the prior.
        assert np.argmax(trace > expected["elbo"] - 1e-3) <= expected["sweeps_1e3"]
        assert np.argmax(trace > expected["elbo"] - 1e-10) <= expected["sweeps_1e10"]


def climb(parameters, settings, num_steps):
    solve = jax.jit(
        lambda form: variational_reference.solve(
            form, variational_reference.init(form, parameters=parameters), parameters=parameters, num_steps=num_steps
        )
    )
    return [(solve(classification(*SETTINGS[k])), PROBLEM["results"][k]["bounds"]["exact"]["elbo"]) for k in settings]


def test_climbing_goes_on_from_a_place_that_only_says_that_it_is_the_top():
    """A state that was predicted from others has a bound as high as there, and their word that they have converged."""
    form = make_form(
        (DiagonalPrior(jnp.ones(1)),), DenseDesign(jnp.ones((2, 1))), (PoissonExpPotential(COUNTS[:2], 1.0),)
    )

    start = variational_reference.init(form, parameters="cholesky")

    @jax.jit
    def climb_from(search):
        begun = start._replace(search=search)
        return variational_reference.solve(form, begun, parameters="cholesky", num_steps=100, tol=1e-6)

    state, info = climb_from(start.search)
    assert info.converged and climb_from(state.search)[1].num_steps == 0
    # Beside the top the bound is as high, to rounding.
    again, found = climb_from(state.search._replace(values=state.search.values + 1e-4))
    assert found.converged and found.num_steps > 0
    np.testing.assert_allclose(again.search.values, state.search.values, atol=1e-5)
    np.testing.assert_allclose(found.objective, info.objective, rtol=1e-9)


def test_climbing_in_the_cholesky_factor_finds_the_same_optima():
    for (_, info), expected in climb("cholesky", range(5), 200):
        assert info.converged
        np.testing.assert_allclose(info.objective, expected, atol=1e-8)
        assert np.all(np.diff(np.asarray(info.objective_trace)[: info.num_steps]) >= 0.0)


def test_climbing_in_two_numbers_per_factor_finds_the_same_optima():
    for (_, info), expected in climb("opper-archambeau", range(5), 400):
        assert info.converged
        np.testing.assert_allclose(info.objective, expected, atol=1e-6)
        assert np.all(np.diff(np.asarray(info.objective_trace)[: info.num_steps]) >= 0.0)


def test_order_of_rows_does_not_matter():
    order = np.random.default_rng(0).permutation(24)
    _, info = fit(classification(*SETTINGS[2]), space="observation")
    _, permuted = fit(classification(*SETTINGS[2], order), space="observation")
    np.testing.assert_allclose(permuted.objective, info.objective, atol=1e-11)


@pytest.mark.parametrize("space", ["coefficient", pytest.param("observation", marks=pytest.mark.slow)])
def test_reference_optimum_of_regression(space):
    design, label = jnp.asarray(REGRESSION["X"]), jnp.asarray(REGRESSION["y"])
    form = make_form((DiagonalPrior(4.0 * jnp.ones(3)),), DenseDesign(design), (LogitPotential(label),))
    state, info = fit(form, space=space)
    expected = REGRESSION["bounds"]["exact"]
    assert info.converged and info.num_steps <= 20
    np.testing.assert_allclose(info.objective, expected["elbo"], atol=1e-8)
    mean, factor = jax.jit(lambda p: (p.mean, p.scale_tril()))(vg.posterior(form, state, space=space))
    np.testing.assert_allclose(mean, expected["m"], atol=1e-6)
    np.testing.assert_allclose(factor @ factor.T, expected["V"], atol=1e-6)


def dense_bound(form, precision, mean, covariance):
    """The bound of a Gaussian over the unknowns under a prior of this precision, by dense matrices."""
    design = form.design.to_dense()
    eta, variance = design @ mean + form.offset, jnp.sum(design @ covariance * design, axis=1)
    parts = zip(form.potentials, form.split_rows(eta), form.split_rows(variance), strict=True)
    expected = sum(jnp.sum(potential.expected_log_density(m, v).value) for potential, m, v in parts)
    proper = np.concatenate([np.full(block.size, not isinstance(block, FlatPrior)) for block in form.prior])
    log_prior = 0.5 * jnp.linalg.slogdet(precision[np.ix_(proper, proper)])[1] - 0.5 * proper.sum() * np.log(2 * np.pi)
    log_prior -= 0.5 * (mean @ precision @ mean + jnp.trace(precision @ covariance))
    entropy = 0.5 * jnp.linalg.slogdet(2 * np.pi * np.e * covariance)[1]
    return form.log_constant + expected + log_prior + entropy


@pytest.mark.parametrize(
    "space, is_flat",
    [
        pytest.param(space, is_flat, id=f"{'flat' if is_flat else 'proper'}-{space}")
        for space in ("observation", "coefficient", "sparse")
        for is_flat in (False, True)
        if not (is_flat and space == "observation")  # flat priors have no covariance
    ],
)
def test_bound_of_any_sites_is_that_of_the_dense_formula(space, is_flat):
    rng = np.random.default_rng(3)
    offset, potentials = jnp.asarray(rng.normal(size=NUM)), (PoissonExpPotential(COUNTS, 1.0),)
    form = make_form(mixed_prior(rng, is_flat), random_sparse(rng, NUM, 11, 3), potentials, offset, log_constant=0.7)
    precision, shift = jnp.asarray(rng.uniform(0.1, 2.0, NUM)), jnp.asarray(rng.normal(size=NUM))
    point = jax.jit(lambda form: evaluate(form, gaussian_prior(form, space), precision, shift))(form)
    design, prior_precision = np.asarray(form.design.to_dense()), dense_prior_precision(form.prior)
    covariance = np.linalg.inv(prior_precision + design.T @ (np.asarray(precision)[:, None] * design))
    mean = covariance @ design.T @ np.asarray(shift - precision * offset)
    expected = jax.jit(dense_bound)(form, prior_precision, mean, covariance)
    np.testing.assert_allclose(point.bound, expected, rtol=1e-11)


@pytest.mark.parametrize("space", ["coefficient", pytest.param("observation", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "potential",
    [
        pytest.param(StudentTPotential(DATA, 0.3, 3.0), id="heavy-tailed", marks=pytest.mark.slow),
        pytest.param(PoissonExpPotential(COUNTS, 1.0), id="counts"),
    ],
)
def test_optimum_is_stationary_in_the_dense_formula(space, potential):
    rng = np.random.default_rng(4)
    form = make_form(mixed_prior(rng), random_dense(rng, NUM, 11), (potential,), jnp.full(NUM, 0.2))
    state, info = fit(form, space=space)
    assert info.converged
    precision = dense_prior_precision(form.prior)

    @jax.jit
    def value_and_gradient(form, state):
        posterior = vg.posterior(form, state, space=space)
        center, factor = posterior.mean, posterior.scale_tril()

        def whitened(mean, root):
            root = factor @ (jnp.eye(11) + root)
            return dense_bound(form, precision, center + factor @ mean, root @ root.T)

        return jax.value_and_grad(whitened, argnums=(0, 1))(jnp.zeros(11), jnp.zeros((11, 11)))

    value, gradient = value_and_gradient(form, state)
    np.testing.assert_allclose(value, info.objective, rtol=1e-10)
    np.testing.assert_allclose(gradient[0], 0.0, atol=1e-6)
    np.testing.assert_allclose(gradient[1], 0.0, atol=1e-6)


@pytest.mark.parametrize("space", ["observation", "coefficient"])
def test_gaussian_likelihood_gives_the_exact_evidence_and_gradient(space):
    rng = np.random.default_rng(5)
    design, prior = random_dense(rng, NUM, 11), mixed_prior(rng)

    def evidence(parameters, exact):
        scale, offset, stretch = parameters
        form = make_form(prior, DenseDesign(stretch * design.matrix), (GaussianPotential(DATA, scale),))
        form = form._replace(offset=jnp.full(NUM, offset))
        if exact:
            total = form.design.matrix @ covariance @ form.design.matrix.T + scale**2 * jnp.eye(NUM)
            return jax.scipy.stats.multivariate_normal.logpdf(DATA, form.offset, total)
        state = jax.lax.stop_gradient(fit(jax.lax.stop_gradient(form), space=space)[0])
        return vg.log_evidence(form, state, space=space)

    covariance = np.linalg.inv(dense_prior_precision(prior))
    both = jax.jit(jax.value_and_grad(evidence), static_argnums=1)
    point = jnp.array([0.5, 0.3, 1.2])
    value, gradient = both(point, False)
    expected, expected_gradient = both(point, True)
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-10)


@pytest.mark.parametrize("space", ["observation", pytest.param("coefficient", marks=pytest.mark.slow)])
def test_gradient_of_the_bound_is_that_of_the_reoptimised_one(space):
    @jax.jit
    def evidence(point):
        form = classification(*point)
        state, info = vg.solve(form, vg.init(form, space=space), tol=1e-11, space=space)
        value, gradient = jax.value_and_grad(lambda p: vg.log_evidence(classification(*p), state, space=space))(point)
        return value, gradient, info.converged

    point, step = jnp.array([0.5, 1.0]), 1e-4
    _, gradient, converged = evidence(point)
    assert converged
    np.testing.assert_allclose(gradient, [-6.282226, 1.321381], atol=5e-6)
    for i in range(2):
        shift = step * jnp.eye(2)[i]
        difference = (evidence(point + shift)[0] - evidence(point - shift)[0]) / (2 * step)
        np.testing.assert_allclose(gradient[i], difference, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["counts", "heavy-tailed"])
def test_gradient_in_parameters_of_factors_and_offset(family):
    def form_of(parameters):
        mean, last = parameters
        if family == "counts":
            return gaussian_process((PoissonExpPotential(COUNTS, last),), mean=mean)
        return gaussian_process((StudentTPotential(DATA, last, 3.0),), mean=mean)

    @jax.jit
    def evidence(parameters):
        form = form_of(parameters)
        state, info = vg.solve(form, vg.init(form), tol=1e-11)
        return *jax.value_and_grad(lambda p: vg.log_evidence(form_of(p), state))(parameters), info.converged

    point, step = jnp.array([0.3, 0.8]), 1e-4
    _, gradient, converged = evidence(point)
    assert converged
    for i in range(2):
        shift = step * jnp.eye(2)[i]
        difference = (evidence(point + shift)[0] - evidence(point - shift)[0]) / (2 * step)
        np.testing.assert_allclose(gradient[i], difference, rtol=1e-6)


@pytest.mark.parametrize("space", ["observation", pytest.param("coefficient", marks=pytest.mark.slow)])
def test_blocks_of_a_plate_are_as_one_block(space):
    prior = (CovariancePrior(jnp.stack([kernel(3, s, jitter=1e-2) for s in (0.7, 1.0, 1.3, 1.6)])),)
    form = make_form(prior, identity(NUM), (PoissonExpPotential(COUNTS, 1.0),))
    batched = form._replace(blocks=Blocks(jnp.arange(NUM).reshape(4, 3), jnp.arange(NUM).reshape(4, 3)))
    state, info = fit(form)
    other, other_info = fit(batched, space=space)
    assert info.converged and other_info.converged
    np.testing.assert_allclose(other_info.objective, info.objective, rtol=1e-12)
    np.testing.assert_allclose(other.site_shift, state.site_shift, atol=1e-8)


def test_pinned_predictors_have_their_log_factor():
    form = make_form((DiagonalPrior(jnp.zeros(NUM)),), identity(NUM), (PoissonExpPotential(COUNTS, 1.0),))
    form = form._replace(offset=jnp.full(NUM, 0.4))
    state, info = fit(form)
    assert info.converged
    np.testing.assert_allclose(info.objective, jnp.sum(form.log_factors(form.offset)), rtol=1e-12)
    np.testing.assert_allclose(state.point.variance, 0.0)


@pytest.mark.slow
def test_a_large_count_and_a_broad_prior_need_no_care():
    counts = gaussian_process((PoissonExpPotential(COUNTS.at[4].set(1e6), 1.0),))
    _, info = fit(counts, tol=1e-6)
    assert info.converged
    rng = np.random.default_rng(7)
    design = DenseDesign(jnp.asarray(rng.normal(size=(NUM, 2))))
    label = (design.matrix[:, 0] > 0.3 * design.matrix[:, 1]).astype(float)
    separated = make_form((DiagonalPrior(1e2 * jnp.ones(2)),), design, (LogitPotential(label),))
    _, info = fit(separated)
    assert info.converged and np.all(np.diff(np.asarray(info.objective_trace)[: info.num_steps]) > -1e-11)


def test_flat_prior_against_a_broad_one():
    rng = np.random.default_rng(8)
    design, potential = random_dense(rng, NUM, 2), PoissonExpPotential(COUNTS, 1.0)
    state, info = fit(make_form((FlatPrior(2),), design, (potential,)))
    broad = make_form((DiagonalPrior(1e10 * jnp.ones(2)),), design, (potential,))
    other, other_info = fit(broad, space="coefficient")
    assert info.converged and other_info.converged
    np.testing.assert_allclose(info.objective, other_info.objective + np.log(2 * np.pi * 1e10), rtol=1e-8)
    np.testing.assert_allclose(state.point.mean, other.point.mean, rtol=1e-6)


def test_an_indefinite_prior_is_reported():
    covariance = jnp.full((1, NUM, NUM), 1.2).at[0].add(-0.2 * jnp.eye(NUM))
    indefinite = make_form((CovariancePrior(-covariance),), identity(NUM), (PoissonExpPotential(COUNTS, 1.0),))
    state, info = fit(indefinite)
    assert not info.converged and np.isnan(info.objective)
    assert np.isnan(jax.jit(vg.log_evidence)(indefinite, state))


@pytest.mark.slow
def test_separated_classes_under_a_flat_prior_do_not_converge():
    separated = make_form((FlatPrior(1),), DenseDesign(jnp.ones((NUM, 1))), (LogitPotential(jnp.ones(NUM)),))
    _, info = fit(separated, num_steps=50)
    assert not info.converged and info.max_change > 1e-2


def test_a_state_of_another_form_is_a_start_and_a_useless_one_is_replaced():
    form = classification(*SETTINGS[2])
    state, info = fit(form, space="observation")
    near, near_info = fit_from(classification(0.45, 1.05), state, space="observation")
    _, fresh_info = fit(classification(0.45, 1.05), space="observation")
    assert near_info.converged
    np.testing.assert_allclose(near_info.objective, fresh_info.objective, atol=1e-10)
    broken = state._replace(site_shift=jnp.full(24, jnp.nan))
    _, again = fit_from(form, broken, space="observation")
    assert again.converged
    np.testing.assert_allclose(again.objective, info.objective, atol=1e-10)


@pytest.mark.slow
def test_stacked_forms_under_vmap():
    points = jnp.asarray(SETTINGS[1:3])

    def evidence(point):
        form = classification(*point)
        state, info = vg.solve(form, vg.init(form))
        return vg.log_evidence(form, state), info.converged

    values, converged = jax.jit(jax.vmap(evidence))(points)
    assert np.all(converged)
    expected = [result["bounds"]["exact"]["elbo"] for result in PROBLEM["results"][1:3]]
    np.testing.assert_allclose(values, expected, atol=1e-8)


@pytest.mark.float32
def test_single_precision():
    form = counts_in_single_precision(NUM, COUNTS)
    state, info = fit(form, tol=1e-4)
    assert info.converged and state.site_shift.dtype == jnp.float32
    np.testing.assert_allclose(-2.0 * state.point.variance_slope, state.site_precision, rtol=1e-3)
