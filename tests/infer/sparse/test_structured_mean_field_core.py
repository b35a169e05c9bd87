"""The numerical core of structured mean field: reference fixed points, exact evidence, monotone bounds, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.baselines import tree_parameters
from numpyro_ext.infer.sparse import mean_field as smf
from numpyro_ext.infer.sparse.gaussian_solver import gram_of
from numpyro_ext.linalg import from_matrix, identity, select
from numpyro_ext.linalg.solvers.posterior_precision import PosteriorPrecision
from numpyro_ext.potentials import Forest, GaussianPotential, LaplacePotential, StudentTPotential
from numpyro_ext.potentials.trees.mixture import TreeParameters, log_evidence, state_posterior, tilted_moments
from numpyro_ext.structure.sparse_linear.form import SparseLinear
from tests.monte_carlo import NUM_ERRORS, log_determinant_error
from tests.potentials.tree_cases import CASES, reference_model
from tests.tiers import thorough

NUM = 21
KINDS = ["laplace-tree", "student-tree", "student-product"]


@functools.partial(jax.jit, static_argnames=("options", "num_steps", "learns"))
def fit(form, workspace, state, options, num_steps=1000, tol=1e-9, learns=False):
    learn = tree_parameters.learn_prior if learns else None
    return smf.solve(form, workspace, state, options, num_steps=num_steps, tol=tol, learn=learn)


@functools.partial(jax.jit, static_argnames="options")
def begin(form, workspace, options):
    return smf.init(form, workspace, options)


fit_prior = jax.jit(tree_parameters.fit_prior)
fit_prior_to_noisy = jax.jit(tree_parameters.fit_prior_to_noisy)


def prepare(form, **choices):
    options = smf.choose_options(form, **choices)
    workspace = smf.make_workspace(form, jax.random.key(0), options)
    return workspace, begin(form, workspace, options), options


def reference_form(case):
    forest, prior = reference_model(case)
    data = jnp.asarray(case["given"]["y_tilde"])
    return SparseLinear(identity(data.size), data, jnp.asarray(case["sigma2"]), forest, prior)


def prior_of(kind, num_groups):
    scales = jnp.full(num_groups, 1.0)
    low = LaplacePotential(0.0, 0.2 * scales) if "laplace" in kind else GaussianPotential(0.0, 0.2 * scales)
    high = LaplacePotential(0.0, scales) if "laplace" in kind else StudentTPotential(0.0, scales, 2.1)
    if "product" in kind:
        return TreeParameters(high, high, 0.0 * scales, jnp.zeros((num_groups, 2)))
    return TreeParameters(low, high, 0.4 * scales, jnp.stack([0.1 * scales, 0.7 * scales], axis=-1))


def small_form(kind, num_rows=NUM - 5, seed=1):
    """Sparse coefficients behind a dense matrix with fewer rows than columns."""
    rng = np.random.default_rng(seed)
    parents = [-1, *np.repeat(np.arange(5), 4)]
    if "product" in kind:
        parents = [-1] * NUM
    levels = np.concatenate([[0], np.full(4, 1), np.full(16, 2)])
    basis = np.linalg.qr(rng.normal(size=(NUM, NUM)))[0]
    operator = select(np.arange(num_rows), NUM) @ from_matrix(basis)
    coefficients = rng.laplace(size=NUM) * rng.choice([0.1, 1.0], size=NUM)
    data = operator @ jnp.asarray(coefficients) + 0.2 * rng.normal(size=num_rows)
    return SparseLinear(operator, data, jnp.asarray(0.04), Forest.from_parents(parents, levels), prior_of(kind, 3))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_reference_fixed_points_of_denoising(case):
    form, expected = reference_form(case), case["vb_denoising_fixed_point"]
    workspace, state, options = prepare(form, num_rounds=1)
    assert options.solver == "diagonal" and options.variances == "exact"
    state, info = fit(form, workspace, state, options, tol=1e-12)
    # The start is the state after the first sweep of the reference; the trace has the bound before each step.
    np.testing.assert_allclose(info.objective_trace[:5], expected["first_bounds"], atol=1e-6)
    np.testing.assert_allclose(info.objective, expected["bound"], atol=1e-6)
    np.testing.assert_allclose(state.mean, expected["mean"], atol=1e-6)
    np.testing.assert_allclose(state.variance, expected["z"], atol=1e-6)
    evidence = log_evidence(form.forest, form.prior, jnp.sqrt(state.second_moment))
    states = state_posterior(form.forest, form.prior, evidence)
    np.testing.assert_allclose(states.marginals, expected["delta"], atol=1e-6)
    np.testing.assert_allclose(smf.posterior_precision(form, workspace, state).precision, expected["pi"], rtol=1e-6)
    assert info.objective <= case["exact_denoising"]["log_Z"]


@pytest.mark.parametrize("kind", [*KINDS[:2], *thorough(*KINDS[2:])])
def test_bound_is_monotone_and_stands_on_its_terms(kind):
    form = small_form(kind)
    workspace, state, options = prepare(form)
    assert options.solver == "dense"
    state, info = fit(form, workspace, state, options)
    trace = np.append(info.objective_trace[: info.num_steps], info.objective)
    assert info.converged and np.all(np.diff(trace) > -1e-9)
    # Every term from its definition: the penalties of the widths, the divergence of the states by enumeration of pairs.
    s, x = state.mean, state.second_moment
    evidence = log_evidence(form.forest, form.prior, jnp.sqrt(x))
    states = state_posterior(form.forest, form.prior, evidence)
    q = jnp.stack([1.0 - states.marginals, states.marginals], axis=-1)
    divergence = jnp.sum(q * evidence) - states.log_partition
    components = smf.components_of_nodes(form.forest, form.prior)
    widths = [component.width(x) for component in components]
    penalties = [component.width_penalty(width) for component, width in zip(components, widths, strict=True)]
    weight = q[:, 0] / widths[0] + q[:, 1] / widths[1]
    precision = PosteriorPrecision(form.operator, form.noise_variance, weight)
    mean = jnp.linalg.solve(precision.dense(), precision.project(form.observed))
    quadratic = jnp.sum((form.observed - form.operator @ mean) ** 2) / form.noise_variance + jnp.sum(weight * mean**2)
    log_determinant = jnp.linalg.slogdet(precision.dense())[1]
    m = form.num_rows
    log_integral = -0.5 * (
        log_determinant + m * jnp.log(2 * jnp.pi * form.noise_variance) - NUM * jnp.log(2 * jnp.pi) + quadratic
    )
    expected = log_integral - 0.5 * jnp.sum(q[:, 0] * penalties[0] + q[:, 1] * penalties[1]) - divergence
    np.testing.assert_allclose(info.objective, expected, rtol=1e-9)
    np.testing.assert_allclose(s, mean, atol=1e-7)


@pytest.mark.thorough
def test_bound_is_below_the_evidence_by_quadrature():
    rng = np.random.default_rng(3)
    matrix = jnp.asarray(rng.normal(size=(1, 2)))
    prior = jax.tree.map(lambda x: x[:1] if jnp.ndim(x) else x, prior_of("student-tree", 3))
    form = SparseLinear(from_matrix(matrix), jnp.array([0.7]), jnp.asarray(0.1), Forest.from_parents([-1, 0]), prior)
    grid = jnp.linspace(-12.0, 12.0, 601)
    points = jnp.stack(jnp.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
    density = jnp.exp(jax.lax.map(form.log_density, points, batch_size=10000))
    exact = float(jnp.log(jnp.sum(density) * (grid[1] - grid[0]) ** 2))
    workspace, state, options = prepare(form)
    state, info = fit(form, workspace, state, options)
    assert exact - 0.6 < info.objective < exact


@pytest.mark.parametrize("kind", ["laplace-tree", "student-product"])
def test_mode_is_stationary_and_rises(kind):
    form = small_form(kind)
    workspace, state, options = prepare(form, variances="none")
    state, info = fit(form, workspace, state, options)
    # Up to the floor of the squares, whose root is 1e-6 of their mean: five millionths of the smaller scale.
    assert np.all(np.diff(info.objective_trace[: info.num_steps]) > -5e-6)
    np.testing.assert_allclose(info.objective, form.log_density(state.mean), atol=5e-5)
    slope = jax.grad(form.log_density)(state.mean)
    if "student" in kind:
        np.testing.assert_allclose(slope, 0.0, atol=1e-5)
    else:
        is_moving = jnp.abs(state.mean) > 1e-3
        assert jnp.sum(is_moving) > 3
        np.testing.assert_allclose(jnp.where(is_moving, slope, 0.0), 0.0, atol=1e-4)


def test_mode_of_a_laplace_product_is_the_soft_threshold():
    data = jnp.array([1.5, -0.3, 0.1, -2.0])
    prior = jax.tree.map(lambda x: x[:1] if jnp.ndim(x) else x, prior_of("laplace-product", 3))
    form = SparseLinear(identity(4), data, jnp.asarray(0.25), Forest.from_parents([-1] * 4), prior)
    workspace, state, options = prepare(form, variances="none")
    state, info = fit(form, workspace, state, options)
    assert info.converged
    np.testing.assert_allclose(state.mean, jnp.sign(data) * jnp.maximum(jnp.abs(data) - 0.25, 0.0), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_fixed_point_is_that_of_penalised_least_squares(kind):
    """At a fixed point the mean is stationary for the penalty at fixed variances and states: finite differences."""
    form = small_form(kind)
    workspace, state, options = prepare(form)
    state, _ = fit(form, workspace, state, options, tol=1e-12)
    states = state_posterior(
        form.forest, form.prior, log_evidence(form.forest, form.prior, jnp.sqrt(state.second_moment))
    )
    q = jnp.stack([1.0 - states.marginals, states.marginals], axis=-1)

    def objective(s):
        residual = form.observed - form.operator @ s
        logs = log_evidence(form.forest, form.prior, jnp.sqrt(state.variance + s**2))
        return jnp.sum(residual**2) / form.noise_variance - 2.0 * jnp.sum(q * logs)

    step = 1e-5
    differences = jax.vmap(lambda e: (objective(state.mean + step * e) - objective(state.mean - step * e)) / (2 * step))
    # Of each of the two parts, which cancel.
    size = jnp.max(jnp.abs(form.operator.T @ form.observed)) / form.noise_variance
    np.testing.assert_allclose(differences(jnp.eye(NUM)) / size, 0.0, atol=1e-7)


def test_convexified_and_direct_treatment_share_their_fixed_points():
    form = small_form("student-tree")
    workspace, state, options = prepare(form)
    direct, _ = fit(form, workspace, state, options, tol=1e-10)
    convex, info = fit(form, workspace, state, options._replace(is_convexified=True), tol=1e-10)
    assert info.converged
    np.testing.assert_allclose(direct.mean, convex.mean, atol=1e-7)
    trace = np.append(info.objective_trace[: info.num_steps], info.objective)
    assert np.all(np.diff(trace) > -1e-9)


@pytest.mark.parametrize("kind", [*KINDS[:2], *thorough(*KINDS[2:])])
def test_learning_the_prior_raises_the_bound(kind):
    form = small_form(kind)
    workspace, state, options = prepare(form)
    _, before = fit(form, workspace, state, options)
    learned, state, info = fit(form, workspace, state, options, tol=1e-8, learns=True)
    trace = np.append(info.objective_trace[: info.num_steps], info.objective)
    assert np.all(np.diff(trace) > -1e-9) and info.objective > before.objective + 0.1
    if "laplace" in kind:
        # Closed form (2.135) at the end: the scale is the weighted mean of the root second moments.
        evidence = log_evidence(form.forest, learned.prior, jnp.sqrt(state.second_moment))
        q = state_posterior(form.forest, learned.prior, evidence).marginals
        q = q[5:]
        root = jnp.sqrt(state.second_moment)[5:]
        np.testing.assert_allclose(learned.prior.high.scale[2], jnp.sum(q * root) / jnp.sum(q), rtol=1e-5)


@pytest.mark.slow
def test_noisy_and_biased_variances_approach_the_exact_fixed_point():
    form = small_form("laplace-tree")
    exact_workspace, state, exact_options = prepare(form)
    exact, _ = fit(form, exact_workspace, state, exact_options)
    options = exact_options._replace(
        solver="conjugate-gradient", variances="perturb-and-map", num_samples=1000, mean_tol=1e-9, draw_tol=1e-5,
        num_determinant_products=NUM,
    )  # fmt: skip
    workspace = smf.make_workspace(form, jax.random.key(4), options)
    start = begin(form, workspace, options)
    sampled, info = fit(form, workspace, start, options, tol=1e-5)
    assert info.converged and info.residual <= 1.0 and info.num_iterations > 0
    # The end is a fixed point of its own noise: mean, variances and bound are those of the Gaussian that belongs to it.
    precision = smf.posterior_precision(form, workspace, sampled)
    dense, matrix = np.asarray(precision.dense()), np.asarray(form.operator.materialise())
    covariance = np.linalg.inv(dense)
    np.testing.assert_allclose(sampled.mean, covariance @ precision.project(form.observed), atol=1e-5)
    error = np.sqrt(2.0 / options.num_samples)
    np.testing.assert_allclose(sampled.variance, np.diag(covariance), rtol=NUM_ERRORS * error)
    np.testing.assert_allclose(
        sampled.fitted_variance, np.diag(matrix @ covariance @ matrix.T), rtol=NUM_ERRORS * error
    )
    at_end = smf.bound(form, exact_workspace, sampled._replace(draws=exact.draws), exact_options)
    scale = gram_of(form, options) + precision.precision
    error = log_determinant_error(dense, np.asarray(scale), len(workspace.signs))
    np.testing.assert_allclose(info.objective, at_end, atol=NUM_ERRORS * error)
    # A Krylov space of all dimensions has the exact variances.
    options = options._replace(variances="lanczos", num_products=NUM)
    workspace = smf.make_workspace(form, jax.random.key(4), options)
    lanczos, info = fit(form, workspace, begin(form, workspace, options), options, tol=1e-6)
    assert info.converged
    np.testing.assert_allclose(lanczos.mean, exact.mean, atol=1e-4)


def test_start_fitted_to_raw_coefficients():
    """Expectation-maximisation on exact coefficients raises their log density."""
    form = small_form("laplace-tree")
    coefficients = form.operator.T @ form.observed
    fitted = fit_prior(form, coefficients, 20)
    before = form._replace(prior=fitted).log_density(coefficients) - form.log_density(coefficients)
    assert before > 1.0
    again = fit_prior(form._replace(prior=fitted), coefficients, 300)
    more = fit_prior(form._replace(prior=again), coefficients, 1)
    np.testing.assert_allclose(more.high.scale, again.high.scale, rtol=1e-3)


@pytest.mark.thorough
def test_start_fitted_to_noisy_coefficients():
    """Second moments are those of the exact posterior, here by quadrature; the prior explains the data better."""
    form = small_form("laplace-tree")
    coefficients = form.operator.T @ form.observed
    prior, second_moment = fit_prior_to_noisy(form, coefficients, 0.04, 0, 0)
    np.testing.assert_array_equal(prior.high.scale, form.prior.high.scale)
    grid = jnp.linspace(-8.0, 8.0, 20001)
    weights, moments = [], []
    for scale in (0.2, 1.0):
        density = jnp.exp(-jnp.abs(grid) / scale - 0.5 * (coefficients[:, None] - grid) ** 2 / 0.04) / scale
        weights.append(jnp.log(jnp.sum(density, axis=1)))
        moments.append(jnp.sum(density * grid**2, axis=1) / jnp.sum(density, axis=1))
    q = state_posterior(form.forest, form.prior, jnp.stack(weights, axis=-1)).marginals
    np.testing.assert_allclose(second_moment, (1.0 - q) * moments[0] + q * moments[1], rtol=1e-5)
    evidence = [
        tilted_moments(form.forest, p, coefficients, 0.04).log_z
        for p in (form.prior, fit_prior_to_noisy(form, coefficients, 0.04, 20, 0)[0])
    ]
    assert evidence[1] > evidence[0] + 1.0


def test_what_is_not_finite_ends_the_loop():
    form = small_form("laplace-tree")
    workspace, state, options = prepare(form)
    broken = form._replace(observed=form.observed.at[2].set(jnp.nan))
    _, info = fit(broken, workspace, state, options)
    assert info.num_steps == 1 and not info.converged and jnp.isnan(info.objective)


def test_exact_variances_are_refused_where_there_are_none():
    n = 1100
    form = SparseLinear(
        from_matrix(jax.random.normal(jax.random.key(0), (3, n))), jnp.ones(3), jnp.asarray(1.0),
        Forest.from_parents([-1] * n), jax.tree.map(lambda x: x[:1] if jnp.ndim(x) else x, prior_of("laplace", 2)),
    )  # fmt: skip
    assert smf.choose_options(form).variances == "perturb-and-map"
    with pytest.raises(ValueError, match="perturb-and-map"):
        smf.choose_options(form, variances="exact")
