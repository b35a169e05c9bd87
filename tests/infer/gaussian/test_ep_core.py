"""The numerical core of expectation propagation: exact cases, agreement of spaces and schedules, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate
from scipy.stats import multivariate_normal

from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation as ep
from numpyro_ext.linalg.gaussian.design import DenseDesign
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior, FlatPrior
from numpyro_ext.potentials import (
    GaussianPotential,
    LaplacePotential,
    LogitPotential,
    PoissonExpPotential,
    ProbitPotential,
    RectifiedLinearPoissonPotential,
    StudentTPotential,
)
from numpyro_ext.structure.latent_gaussian.form import AffineMap, Blocks
from tests.infer.gaussian.gaussian_forms import (
    assert_gradient_of_refits,
    identity,
    kernel,
    make_form,
    mixed_prior,
    random_dense,
    random_sparse,
)
from tests.tiers import few, thorough

NUM = 12
SPACES = ["observation", "coefficient", "sparse"]
LABELS = jnp.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
COUNTS = jnp.array([3.0, 0.0, 1.0, 7.0, 2.0, 0.0])
DATA = jnp.asarray(np.random.default_rng(2).standard_t(2.0, size=NUM))


@functools.partial(jax.jit, static_argnames=("tol", "power", "schedule", "space", "damping", "num_steps"))
def fit(form, *, tol=1e-11, num_steps=200, **options):
    return ep.solve(form, ep.init(form), tol=tol, num_steps=num_steps, **options)


log_evidence = jax.jit(ep.log_evidence, static_argnames=("space", "power"))


@functools.partial(jax.jit, static_argnames="space")
def predictor_moments(form, state, space="auto"):
    return ep.posterior(form, state, space=space).predictor_moments()


def gaussian_process(potentials, scale=1.5, mean=0.3, length=0.3, num=NUM):
    prior = (CovariancePrior(kernel(num, scale, length)[None]),)
    return make_form(prior, identity(num), potentials, offset=jnp.full(num, mean))


def probit_and_counts(scale=1.5, mean=0.3):
    return gaussian_process((ProbitPotential(LABELS), RectifiedLinearPoissonPotential(COUNTS, 1.0, 0.0)), scale, mean)


def heavy_tailed(scale=1.5, mean=0.3, width=0.3):
    return gaussian_process((StudentTPotential(DATA, width, 3.0),), scale, mean)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("options", [{}, {"power": 0.5}, {"schedule": "sequential"}], ids=str)
def test_exact_on_gaussian_likelihood(space, options):
    form = gaussian_process((GaussianPotential(DATA, 0.5),))
    state, info = fit(form, space=space, **options)
    covariance = np.asarray(form.prior[0].covariance[0])
    noisy = covariance + 0.25 * np.eye(NUM)
    expected = multivariate_normal.logpdf(DATA, np.full(NUM, 0.3), noisy)
    gain = np.linalg.solve(noisy, covariance).T
    assert info.converged and info.num_steps <= 2
    np.testing.assert_allclose(info.objective, expected, rtol=1e-10)
    mean, variance = predictor_moments(form, state, space=space)
    np.testing.assert_allclose(mean, 0.3 + gain @ (DATA - 0.3), atol=1e-10)
    np.testing.assert_allclose(variance, np.diag(covariance - gain @ covariance), atol=1e-10)
    power = options.get("power", 1.0)
    np.testing.assert_allclose(log_evidence(form, state, space=space, power=power), expected, rtol=1e-10)


@pytest.mark.parametrize("space", [SPACES[0], *thorough(*SPACES[1:])])
@pytest.mark.parametrize("power", [1.0, 0.5])
def test_evidence_is_exact_where_sites_dominate(space, power):
    form = gaussian_process((GaussianPotential(DATA, 3e-4),), length=0.05)
    state, info = fit(form, space=space, power=power)
    noisy = np.asarray(form.prior[0].covariance[0]) + 9e-8 * np.eye(NUM)
    expected = multivariate_normal.logpdf(DATA, np.full(NUM, 0.3), noisy)
    assert info.converged
    np.testing.assert_allclose(info.objective, expected, rtol=1e-8)
    np.testing.assert_allclose(log_evidence(form, state, space=space, power=power), expected, rtol=1e-8)


def test_exact_on_gaussian_likelihood_with_flat_prior():
    rng = np.random.default_rng(4)
    design, prior = random_dense(rng, NUM, 3), (FlatPrior(2), DiagonalPrior(jnp.array([2.0])))
    form = make_form(prior, design, (GaussianPotential(DATA, 0.5),), log_constant=-1.25)
    state, info = fit(form)
    matrix = np.asarray(design.matrix)
    precision = matrix.T @ matrix / 0.25 + np.diag([0.0, 0.0, 0.5])
    mean = np.linalg.solve(precision, matrix.T @ DATA / 0.25)
    posterior = ep.posterior(form, state)
    np.testing.assert_allclose(posterior.mean, mean, atol=1e-10)
    factor = posterior.scale_tril()
    np.testing.assert_allclose(factor @ factor.T, np.linalg.inv(precision), atol=1e-10)
    assert np.all(np.triu(factor, 1) == 0) and np.all(np.diag(factor) > 0)
    at_mode = float(form.log_density(jnp.asarray(mean)))
    laplace = at_mode + 1.5 * np.log(2 * np.pi) - 0.5 * np.linalg.slogdet(precision)[1]
    np.testing.assert_allclose(info.objective, laplace, rtol=1e-10)


@pytest.mark.parametrize(
    "potential",
    [
        PoissonExpPotential(jnp.array([3.0]), 1.0),
        *thorough(LogitPotential(jnp.array([1.0]))),
        StudentTPotential(jnp.array([2.0]), 0.7, 4.0),
        RectifiedLinearPoissonPotential(jnp.array([0.0]), 1.0, 0.0),
        *thorough(LaplacePotential(jnp.array([0.5]), 0.4)),
    ],
    ids=lambda p: type(p).__name__,
)
def test_evidence_of_one_factor_is_exact(potential):
    form = gaussian_process((potential,), scale=1.3, mean=0.4, num=1)
    variance = float(form.prior[0].covariance[0, 0, 0])
    density = jax.jit(lambda x: jnp.exp(form.log_factors(x[None])[0] - 0.5 * (x - 0.4) ** 2 / variance))
    total, _ = integrate.quad(density, -13, 14, points=[0.0, 0.5, 2.0], epsabs=1e-14, epsrel=1e-13, limit=400)
    _, info = fit(form)
    assert info.converged
    np.testing.assert_allclose(info.objective, np.log(total / np.sqrt(2 * np.pi * variance)), rtol=1e-9)


@pytest.mark.parametrize(
    "potential, approximate, exact",
    [
        (RectifiedLinearPoissonPotential, -3.7998310, -3.7983217),
        *thorough((PoissonExpPotential, -4.2107303, -4.2102152)),
    ],
)
def test_evidence_of_two_factors(potential, approximate, exact):
    """Reference values from two independent programs, to all digits given; EP is close to exact but is not it."""
    counts = jnp.array([3.0, 0.0])
    factors = potential(counts, 1.0, 0.0) if potential is RectifiedLinearPoissonPotential else potential(counts, 1.0)
    prior = (CovariancePrior(jnp.array([[[2.0, 1.2], [1.2, 1.5]]])),)
    _, info = fit(make_form(prior, identity(2), (factors,), offset=jnp.full(2, 0.8)))
    np.testing.assert_allclose(info.objective, approximate, atol=6e-8)
    assert 1e-4 < abs(float(info.objective) - exact) < 2e-3


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make, power", [(probit_and_counts, 1.0), pytest.param(heavy_tailed, 0.6, marks=pytest.mark.slow)]
)
def test_spaces_and_schedules_reach_one_fixed_point(make, power):
    form = make()
    state, info = fit(form, space="observation", power=power)
    assert info.converged and not info.skipped.any()
    np.testing.assert_allclose(log_evidence(form, state, power=power), info.objective, rtol=1e-12)
    if make is heavy_tailed:
        assert state.site_precision.min() < -0.1
    for options in ({"space": "coefficient"}, {"space": "sparse"}, {"space": "coefficient", "schedule": "sequential"}):
        other, other_info = fit(form, power=power, **options)
        assert other_info.converged
        np.testing.assert_allclose(other_info.objective, info.objective, rtol=1e-10)
        np.testing.assert_allclose(other.site_precision, state.site_precision, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(other.marginals.mean, state.marginals.mean, rtol=1e-8, atol=1e-9)
    swept, sweep = jax.jit(ep.step, static_argnames="power")(form, state, power=power)
    assert sweep.max_change < 1e-9


@pytest.mark.thorough
def test_fractional_powers_differ_and_tend_to_the_variational_bound():
    """Evidence decreases with the power towards that of variational Bayes, a lower bound."""
    values = [float(fit(heavy_tailed(), power=power)[1].objective) for power in (1.0, 0.6)]
    assert values[1] < values[0] - 1e-3


def evidence_of_parameters(parameters, family):
    scale, mean, last = parameters
    if family == "counts":
        return probit_and_counts(scale, mean)._replace(log_constant=last)
    if family == "heavy":
        return heavy_tailed(scale, mean, last)
    return gaussian_process((LaplacePotential(DATA, last),), scale, mean)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "space"),
    [
        ("counts", "coefficient"),
        pytest.param("heavy", "observation", marks=pytest.mark.thorough),
        pytest.param("laplace", "coefficient", marks=pytest.mark.thorough),
        pytest.param("counts", "observation", marks=pytest.mark.thorough),
        pytest.param("heavy", "coefficient", marks=pytest.mark.thorough),
        pytest.param("laplace", "observation", marks=pytest.mark.thorough),
    ],
)
def test_gradient_of_evidence_against_refitted_differences(family, space):
    point = jnp.array([1.5, 0.3, 0.4])

    @jax.jit
    def refit(parameters):
        form = evidence_of_parameters(parameters, family)
        state, info = ep.solve(form, ep.init(form), tol=1e-11, num_steps=300, space=space)
        gradient = jax.grad(lambda p: ep.log_evidence(evidence_of_parameters(p, family), state, space=space))
        return info.objective, gradient(parameters), info.converged

    assert_gradient_of_refits(refit, point)


@pytest.mark.thorough
def test_masked_rows_are_as_if_deleted_and_still_predicted():
    form = probit_and_counts()
    observed = jnp.array([True, True, False, True, False, True])
    state, info = fit(form._replace(observed=(observed, observed)))
    kept = np.flatnonzero(np.concatenate([observed, observed]))
    smaller = make_form(
        (CovariancePrior(form.prior[0].covariance[:, kept][:, :, kept]),),
        identity(kept.size),
        (ProbitPotential(LABELS[observed]), RectifiedLinearPoissonPotential(COUNTS[observed], 1.0, 0.0)),
        offset=jnp.full(kept.size, 0.3),
    )
    smaller_state, smaller_info = fit(smaller)
    np.testing.assert_allclose(info.objective, smaller_info.objective, rtol=1e-11)
    np.testing.assert_allclose(state.site_precision[kept], smaller_state.site_precision, rtol=1e-9)
    covariance = np.asarray(form.prior[0].covariance[0])
    mean, variance = predictor_moments(form, state)
    masked = np.flatnonzero(state.site_precision == 0)
    assert masked.size == 4
    gain = np.linalg.solve(covariance[np.ix_(kept, kept)], covariance[np.ix_(kept, masked)])
    np.testing.assert_allclose(mean[masked] - 0.3, (mean[kept] - 0.3) @ gain, atol=1e-7)
    assert np.all(variance[masked] > 0) and np.all(variance[masked] < np.diag(covariance)[masked])


def test_permuting_rows_permutes_the_answer():
    order = np.random.default_rng(0).permutation(NUM)
    counts = jnp.concatenate([COUNTS, COUNTS[::-1]])
    form = gaussian_process((PoissonExpPotential(counts, 1.0),))
    permuted = form._replace(
        prior=(CovariancePrior(form.prior[0].covariance[:, order][:, :, order]),),
        potentials=(PoissonExpPotential(counts[order], 1.0),),
    )
    (state, info), (other, other_info) = fit(form), fit(permuted)
    np.testing.assert_allclose(info.objective, other_info.objective, rtol=1e-11)
    np.testing.assert_allclose(state.site_precision[order], other.site_precision, rtol=1e-8)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", few(["parallel", "sequential"], 1))
def test_blocks_equal_the_whole(schedule):
    """Random intercepts: four groups of three rows, more rows than columns in a block."""
    group = np.repeat(np.arange(4), 3)
    order = np.random.default_rng(1).permutation(NUM)
    design = identity(4).__class__(jnp.asarray(group[order])[:, None], jnp.ones((NUM, 1)), 4)
    prior = (DiagonalPrior(jnp.array([1.0, 2.0, 0.5, 1.5])),)
    factors = (ProbitPotential(jnp.concatenate([LABELS, LABELS[::-1]])),)
    rows = jnp.asarray(np.stack([np.flatnonzero(group[order] == g) for g in range(4)]))
    whole = make_form(prior, design, factors)
    blocked = whole._replace(blocks=Blocks(rows, jnp.arange(4)[:, None]))
    (state, info), (other, other_info) = fit(whole), fit(blocked, schedule=schedule)
    assert info.converged and other_info.converged
    np.testing.assert_allclose(other_info.objective, info.objective, rtol=1e-11)
    np.testing.assert_allclose(other.site_shift, state.site_shift, rtol=1e-8)
    everything = AffineMap(DenseDesign(jnp.eye(4)), jnp.zeros(4))

    @jax.jit
    def roots(form, state):
        posterior = ep.posterior(form, state)
        return posterior.covariance(everything), posterior.scale_tril()

    (covariance, _), (of_blocks, factor) = roots(whole, state), roots(blocked, other)
    np.testing.assert_allclose(covariance, of_blocks, atol=1e-10)
    np.testing.assert_allclose(factor @ factor.T, covariance, atol=1e-10)


@pytest.mark.slow
def test_forms_stack_under_vmap_and_warm_starts_are_short():
    scales = jnp.array([0.8, 1.5])
    state, info = jax.jit(jax.vmap(lambda scale: fit(probit_and_counts(scale), tol=1e-9)))(scales)
    assert np.all(info.converged)
    single_state, single = fit(probit_and_counts(scales[1]), tol=1e-9)
    np.testing.assert_allclose(info.objective[1], single.objective, rtol=1e-12)
    solve = jax.jit(functools.partial(ep.solve, tol=1e-9))
    _, warm = solve(probit_and_counts(scales[1] * 1.001), single_state)
    _, cold = solve(probit_and_counts(scales[1] * 1.001), ep.init(probit_and_counts(scales[1])))
    assert warm.converged and warm.num_steps < cold.num_steps
    np.testing.assert_allclose(warm.objective, cold.objective, rtol=1e-11)
    assert np.all(np.isfinite(single.objective_trace[: single.num_steps]))
    assert np.all(np.isnan(single.objective_trace[single.num_steps :]))


@pytest.mark.thorough
def test_a_fit_with_more_factors_is_no_start_that_keeps_them():
    form = probit_and_counts()
    seen = tuple(mask & (np.arange(mask.size) != 2) for mask in form.observed)
    masked = form._replace(observed=tuple(map(jnp.asarray, seen)))
    solve = jax.jit(functools.partial(ep.solve, tol=1e-9))
    all_seen, _ = solve(form, ep.init(form))
    (warm, info), (cold, afresh) = solve(masked, all_seen), solve(masked, ep.init(masked))
    assert info.converged and np.all(warm.site_precision[~np.concatenate(seen)] == 0.0)
    np.testing.assert_allclose(info.objective, afresh.objective, rtol=1e-10)
    np.testing.assert_allclose(warm.site_shift, cold.site_shift, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [probit_and_counts, *thorough(heavy_tailed)])
def test_damping_changes_the_way_but_not_the_end(make):
    _, info = fit(make())
    state, damped = fit(make(), damping=0.3)
    assert damped.converged and state.step_size <= 0.7
    np.testing.assert_allclose(damped.objective, info.objective, rtol=1e-10)


@pytest.mark.parametrize("space", SPACES)
def test_indefinite_prior_is_reported(space):
    covariance = jnp.array([[[1.0, 1.2], [1.2, 1.0]]])
    form = make_form((CovariancePrior(covariance),), identity(2), (ProbitPotential(LABELS[:2]),))
    state, info = fit(form, space=space)
    assert np.isnan(info.objective) and not info.converged
    assert np.isnan(log_evidence(form, state, space=space))


def test_site_without_cavity_is_kept_and_reported():
    """A flat coefficient seen by one row only: that row has no cavity, the others are fitted."""
    design = DenseDesign(jnp.zeros((NUM, 2)).at[:, 0].set(1.0).at[4, 1].set(1.0))
    factors = (LogitPotential(jnp.concatenate([LABELS, LABELS[::-1]])),)
    form = make_form((DiagonalPrior(jnp.ones(1)), FlatPrior(1)), design, factors)
    state, info = fit(form)
    assert list(np.flatnonzero(info.skipped)) == [4]
    assert np.isnan(info.objective) and not info.converged
    assert np.all(np.isfinite(state.site_precision))


@pytest.mark.thorough
def test_pinned_predictor_contributes_its_constant():
    """A prior variance of zero leaves nothing to infer, and the factor is evaluated at the mean."""
    design = DenseDesign(jnp.eye(2))
    form = make_form((DiagonalPrior(jnp.array([1.0, 0.0])),), design, (ProbitPotential(LABELS[:2]),), jnp.full(2, 0.5))
    alone = make_form(
        (DiagonalPrior(jnp.ones(1)),), DenseDesign(jnp.ones((1, 1))), (ProbitPotential(LABELS[:1]),), jnp.full(1, 0.5)
    )
    (_, info), (_, expected) = fit(form), fit(alone)
    constant = form.potentials[0].log_density(jnp.full(2, 0.5))[1]
    np.testing.assert_allclose(info.objective, expected.objective + constant, rtol=1e-12)
    assert info.converged and not info.skipped.any()


def test_gradient_where_a_predictor_is_pinned():
    """Of the scale and of the offset of a Gaussian factor, one predictor free and one without freedom."""

    def form_at(x):
        prior = (DiagonalPrior(jnp.array([1.0, 0.0])),)
        return make_form(
            prior, DenseDesign(jnp.eye(2)), (GaussianPotential(DATA[:2], jnp.exp(x[0])),), jnp.full(2, x[1])
        )

    def exact(x):
        variance = jnp.array([1.0, 0.0]) + jnp.exp(2.0 * x[0])
        return -0.5 * jnp.sum(jnp.log(2.0 * jnp.pi * variance) + (DATA[:2] - x[1]) ** 2 / variance)

    x = jnp.array([-0.3, 0.4])
    state, _ = fit(form_at(x))
    value, gradient = jax.jit(jax.value_and_grad(lambda x: ep.log_evidence(form_at(x), state)))(x)
    expected, slope = jax.jit(jax.value_and_grad(exact))(x)
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    np.testing.assert_allclose(gradient, slope, rtol=1e-8)


@pytest.mark.thorough
def test_all_kinds_of_prior_and_a_flat_start():
    rng = np.random.default_rng(6)
    prior, design = mixed_prior(rng, is_flat=True), random_sparse(rng, 24, 11, 3)
    counts = jnp.asarray(rng.poisson(3.0, size=12).astype(float))
    data = jnp.asarray(rng.standard_t(3.0, size=12) * 3)
    form = make_form(
        prior,
        design,
        (RectifiedLinearPoissonPotential(counts, 1.0, 0.0), StudentTPotential(data, 1.0, 4.0)),
        offset=jnp.full(24, 2.0),
    )
    (state, info), (other, other_info) = fit(form, space="coefficient", tol=1e-10), fit(form, space="sparse", tol=1e-10)
    assert info.converged and other_info.converged and not info.skipped.any()
    np.testing.assert_allclose(other_info.objective, info.objective, rtol=1e-9)
    np.testing.assert_allclose(other.marginals.mean, state.marginals.mean, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("variance", [1.0, 1e8])
def test_many_rows_under_a_broad_prior_do_not_overshoot(variance):
    """Started without sites, parallel sweeps diverge here: every row answers the whole prior by itself."""
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(2000, 5))
    labels = (rng.logistic(size=2000) < matrix @ np.ones(5)).astype(float)
    prior = (DiagonalPrior(jnp.full(5, variance)),)
    form = make_form(prior, DenseDesign(jnp.asarray(matrix)), (LogitPotential(jnp.asarray(labels)),))
    state, info = fit(form, tol=1e-8)
    assert info.converged and info.num_steps < 20 and state.step_size == 1.0


def test_no_probability_above_one():
    """Of a prior so broad that its evidence is rounding alone, which would draw a search for hyperparameters there."""
    unguarded = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(40, 3))
        covariance = np.exp(-0.005 * np.sum((x[:, None] - x) ** 2, -1)) + 1e-3 * np.eye(40)
        # Which way rounding goes is a matter of the processor: either must be met.
        labels = jnp.asarray(x[:, 0] + 0.5 * rng.normal(size=40) > 0.0)
        prior = (CovariancePrior(1e60 * jnp.asarray(covariance)[None]),)
        form = make_form(prior, identity(40), (ProbitPotential(labels),))
        state, info = fit(form, tol=1e-8, num_steps=100)
        assert not info.objective > 1.0
        unguarded.append(float(log_evidence(form, state)))
    assert np.nanmax(np.abs(unguarded)) > 1e3  # what rounding makes of it


@pytest.mark.thorough
def test_heavy_tailed_regression_starts_at_its_data():
    """Flat prior, factors on a scale far from one: the start must carry the location and the scale of the data."""
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(2000, 5))
    data = 1e3 * (matrix @ np.arange(5.0) + rng.standard_t(2.0, size=2000))
    factors = (StudentTPotential(jnp.asarray(data), 1e3, 2.0),)
    _, info = fit(make_form((FlatPrior(5),), DenseDesign(jnp.asarray(matrix)), factors), tol=1e-8)
    assert info.converged and info.num_steps < 10


def test_unknown_schedule_is_refused():
    form = probit_and_counts()
    with pytest.raises(ValueError, match="Unknown schedule 'random'"):
        ep.step(form, ep.init(form), schedule="random")


@pytest.mark.float32
def test_single_precision():
    labels = jnp.asarray(np.resize(LABELS, NUM), jnp.float32)
    covariance = np.asarray(kernel(NUM, jitter=1e-3))

    def run(dtype):
        prior = (CovariancePrior(jnp.asarray(covariance, dtype)[None]),)
        design = DenseDesign(jnp.eye(NUM, dtype=dtype))
        form = make_form(prior, design, (ProbitPotential(labels.astype(dtype)),), jnp.zeros(NUM, dtype))
        return fit(form._replace(log_constant=jnp.zeros((), dtype)), tol=1e-6)

    state, info = run(jnp.float32)
    assert state.site_precision.dtype == jnp.float32 and info.objective.dtype == jnp.float32
    assert info.converged
    reference, _ = run(jnp.result_type(float))
    np.testing.assert_allclose(state.marginals.mean, reference.marginals.mean, atol=2e-4)


@pytest.mark.parametrize("tol", [1e-2, *thorough(1e-6)])
@pytest.mark.parametrize("weight", [0.6, 0.99])
def test_the_evidence_is_that_of_the_last_sites_where_marginals_stand_still(weight, tol):
    """Two equal measurements whose precisions add up to one, from sites of equal precisions: the posterior is the same,
    the evidence is not."""

    def form(weight):
        scale = 1.0 / jnp.sqrt(jnp.array([weight, 1.0 - weight]))
        design = DenseDesign(jnp.ones((2, 1)))
        return make_form((DiagonalPrior(jnp.array([100.0])),), design, (GaussianPotential(jnp.full(2, 0.7), scale),))

    state, _ = fit(form(0.5))
    found, info = jax.jit(functools.partial(ep.solve, tol=tol))(form(weight), state)
    covariance = 100.0 + np.diag([1.0 / weight, 1.0 / (1.0 - weight)])
    assert info.converged
    np.testing.assert_allclose(found.site_precision, [weight, 1.0 - weight], rtol=1e-9)
    expected = multivariate_normal(np.zeros(2), covariance).logpdf(np.full(2, 0.7))
    np.testing.assert_allclose(info.objective, expected, rtol=1e-9)


@pytest.mark.float32
@pytest.mark.parametrize("scale", [0.3, 0.0115, 1e-3])
def test_evidence_beside_a_precise_row(scale):
    """The cavity of a factor that outweighs all else is lost in rounding: its part of the evidence must not be."""
    values = jnp.array([1.0, 2.0, 3.0, -1.0, 0.0, 5.0])
    potentials = GaussianPotential(values + 0.3, 1.0), GaussianPotential(values, scale)
    design = np.vstack([np.eye(6), np.eye(6)])
    form = make_form((DiagonalPrior(jnp.full(6, 25.0)),), DenseDesign(jnp.asarray(design)), potentials)
    _, info = fit(form, tol=1e-5)
    covariance = 25.0 * design @ design.T + np.diag(np.repeat([1.0, scale**2], 6))
    data = np.concatenate([np.asarray(values) + 0.3, np.asarray(values)])
    expected = multivariate_normal.logpdf(data, np.zeros(12), covariance)
    # terms of the size of the squared values over the variance cancel
    rounding = 4.0 * np.finfo(info.objective.dtype).eps * np.sum(np.square(values)) / scale**2
    assert info.converged
    np.testing.assert_allclose(info.objective, expected, atol=1e-9 + rounding, rtol=1e-6)


@pytest.mark.float32
def test_evidence_of_many_rows_far_from_zero_in_single_precision():
    """The parts of sites that cancel are a million here, of which single precision holds a tenth."""
    rng = np.random.default_rng(5)
    design = np.column_stack([np.ones(800), rng.normal(size=(800, 2))]).astype(np.float32)
    values = (100.0 + design[:, 1:] @ [1.0, -2.0] + rng.normal(size=800)).astype(np.float32)
    variances = np.array([400.0, 1.0, 1.0])
    potential = GaussianPotential(jnp.asarray(values), jnp.asarray(1.0, jnp.float32))
    prior = DiagonalPrior(jnp.asarray(variances, jnp.float32))
    form = make_form((prior,), DenseDesign(jnp.asarray(design)), (potential,), jnp.zeros(800, jnp.float32))
    form = form._replace(log_constant=jnp.zeros((), jnp.float32))
    state, info = fit(form, tol=1e-5)
    wide = design.astype(float)
    expected = multivariate_normal(np.zeros(800), wide * variances @ wide.T + np.eye(800)).logpdf(values.astype(float))
    assert info.converged and info.objective.dtype == jnp.float32
    np.testing.assert_allclose(info.objective, expected, atol=0.02)
    np.testing.assert_allclose(log_evidence(form, state), expected, atol=0.02)
