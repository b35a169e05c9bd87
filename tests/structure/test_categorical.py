"""Observations of several categories: how they are read, and what follows from it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.special
from jax.flatten_util import ravel_pytree
from numpyro.handlers import mask
from numpyro.infer.util import log_density

from numpyro_ext.distributions import (
    AdjacentCategory,
    ContinuationRatio,
    MultinomialProbit,
    OrderedProbit,
    StickBreakingCategorical,
)
from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from numpyro_ext.potentials import log_sum_exp_bound
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from numpyro_ext.structure.model.verification import check_form
from tests.tiers import thorough

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((7, 2)))
LABEL = jnp.array([0, 2, 1, 1, 0, 2, 2])
KEPT = np.arange(7) != 2
GROUP = jnp.array([0, 0, 1, 1, 2, 2, 3])
THRESHOLDS = jnp.array([-0.5, 0.5])
COUNTS = np.random.default_rng(2).multinomial(12, [0.2, 0.3, 0.5], size=7)
ALTERNATIVES = np.random.default_rng(3).standard_normal((7, 3, 2))


def coefficients(*shape):
    return numpyro.sample("W", dist.Normal(0.0, 1.0).expand(list(shape)).to_event(len(shape)))


def softmax(X, label):
    intercept = numpyro.sample("b", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    logits = X @ coefficients(2, 3) + intercept
    with mask(mask=KEPT):
        numpyro.sample("y", dist.Categorical(logits=logits), obs=label)


def pinned(X, label):
    logits = jnp.concatenate([jnp.zeros((7, 1)), X @ coefficients(2, 2)], axis=1)
    numpyro.sample("y", dist.Categorical(logits=logits), obs=label)


def probabilities(X, label):
    numpyro.sample("y", dist.Categorical(jax.nn.softmax(X @ coefficients(2, 3))), obs=label)


def written_out(X, label):
    odds = jnp.exp((X @ coefficients(2, 3)).at[..., 0].set(0))
    with mask(mask=KEPT):
        numpyro.sample("y", dist.Categorical(probs=odds / odds.sum(-1, keepdims=True)), obs=label)


def categories_first(X, label):
    probs = jax.nn.softmax(coefficients(3, 2) @ X.T, axis=0)
    numpyro.sample("y", dist.Categorical(probs=probs.T), obs=label)


def log_probabilities(X, label):
    numpyro.sample("y", dist.Categorical(logits=jax.nn.log_softmax(X @ coefficients(2, 3))), obs=label)


def alternatives(X, label):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]))
    numpyro.sample("y", dist.Categorical(logits=ALTERNATIVES @ beta), obs=label)


def counts(X, label):
    logits = X @ coefficients(2, 3)
    with mask(mask=KEPT):
        numpyro.sample("y", dist.Multinomial(12, logits=logits), obs=COUNTS)


def counts_of_probabilities(X, label):
    probs = jax.nn.softmax(X @ coefficients(2, 3), -1)
    with numpyro.plate("tables", 7):
        numpyro.sample("y", dist.Multinomial(COUNTS.sum(-1), probs=probs), obs=COUNTS.astype(np.float32))


def weighted(X, label):
    logits = X @ coefficients(2, 3)
    with numpyro.handlers.scale(scale=2.5):
        numpyro.sample("y", dist.Categorical(logits=logits), obs=label)


def gaussian_processes(X, label):
    kernel = jnp.exp(-0.5 * (X[:, :1] - X[:, 0]) ** 2) + 0.1 * jnp.eye(7)
    with numpyro.plate("classes", 3):
        f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(7), kernel))
    numpyro.sample("y", dist.Categorical(logits=f.T), obs=label)


def varying_intercepts(X, label):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 4):
        a = numpyro.sample("a", dist.Normal(0.0, scale).expand([3]).to_event(1))
    numpyro.sample("y", dist.Categorical(logits=a[GROUP]), obs=label)


def probit(X, label):
    numpyro.sample("y", MultinomialProbit(X @ coefficients(2, 3)), obs=label)


def stick_breaking(X, label):
    logits = X @ coefficients(2, 2)
    with mask(mask=KEPT):
        numpyro.sample("y", StickBreakingCategorical(logits), obs=label)


def ordered_logistic(X, label):
    prior = dist.TransformedDistribution(
        dist.Normal(0.0, 1.0).expand([2]).to_event(1), dist.transforms.OrderedTransform()
    )
    cutpoints = numpyro.sample("cutpoints", prior)
    numpyro.sample("y", dist.OrderedLogistic(X @ coefficients(2), cutpoints), obs=label)


def ordered_probit(X, label):
    numpyro.sample("y", OrderedProbit(X @ coefficients(2), THRESHOLDS), obs=label)


def continuation_ratio(X, label):
    numpyro.sample("y", ContinuationRatio(X @ coefficients(2), THRESHOLDS), obs=label)


def adjacent_category(X, label):
    numpyro.sample("y", AdjacentCategory(X @ coefficients(2), THRESHOLDS), obs=label)


LINKED = [probabilities, written_out, categories_first, log_probabilities, counts_of_probabilities]
VECTOR = [softmax, pinned, weighted, gaussian_processes, varying_intercepts, probit, alternatives, counts, *LINKED]
SCALAR = [stick_breaking, ordered_logistic, ordered_probit, continuation_ratio, adjacent_category]
FAST = [softmax, weighted, varying_intercepts, stick_breaking, alternatives, counts, *LINKED]


@pytest.mark.parametrize(
    "model", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in VECTOR + SCALAR]
)
def test_density_is_that_of_numpyro(model):
    reading = read_latent_gaussian(model, (X, LABEL))
    assert "quadrature" not in reading.describe()
    assert reading.factor_shapes == ((7,),)
    hyper = reading.initial_hyper()
    e = jnp.asarray(np.random.default_rng(1).standard_normal(reading.form(hyper).num_columns))
    values = {name: value for name, value in reading.values(hyper, e).items() if name in reading.field}
    expected, _ = log_density(model, (X, LABEL), {}, {**values, **hyper})
    found = reading.form(hyper).log_density(e) + reading.log_prior(hyper)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("model", [probabilities, counts_of_probabilities])
@pytest.mark.parametrize("change", [lambda x: -x, lambda x: x[::-1], lambda x: x[:, ::-1]])
def test_a_planted_error_behind_a_softmax_is_found(model, change):
    right = read_latent_gaussian(model, (X, LABEL), check=False)
    wrong = read_latent_gaussian(model, (change(X), LABEL), check=False)
    wrong.args = right.args  # what was read is of other arguments than what NumPyro is given
    for key in jax.random.split(jax.random.key(0), 5):
        check_form(right, key)
        with pytest.raises(ModelStructureError, match="misread"):
            check_form(wrong, key)


@pytest.mark.parametrize(
    "probs",
    [
        lambda eta: 0.9 * jax.nn.softmax(eta) + 0.1 / 3,
        lambda eta: jax.nn.softmax(2.0 * jnp.tanh(eta)),
        lambda eta: jax.nn.softmax(eta)[:, jnp.array([0, 1, 1])],
        lambda eta: jax.nn.softmax(eta, axis=0),
    ],
)
def test_what_is_no_softmax_of_its_predictors_is_refused(probs):
    def model(label):
        numpyro.sample("y", dist.Categorical(probs=probs(X @ coefficients(2, 3))), obs=label)

    with pytest.raises(ModelStructureError, match="predictors, through 'W'"):
        read_latent_gaussian(model, (LABEL,))


@pytest.mark.parametrize("engine", [LaplaceApproximation, *thorough(VariationalGaussian)])
def test_probabilities_and_logits_are_one_model(engine):
    found = []
    for model in (probabilities, log_probabilities):
        fitted = engine(model, progress_bar=False)
        fitted.run(jax.random.key(0), X, LABEL)
        found.append((fitted.log_evidence, *np.ravel(fitted.posterior["W"].mean)))
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.thorough
def test_a_table_of_counts_is_that_of_its_observations():
    """Their densities differ by the number of orders in which observations can be counted."""
    table = np.bincount(LABEL, minlength=3)

    def one_by_one(label):
        numpyro.sample("y", dist.Categorical(logits=coefficients(3)).expand([7]), obs=label)

    def together(label):
        numpyro.sample("y", dist.Multinomial(7, logits=coefficients(3)), obs=table)

    engines = [VariationalGaussian(model, progress_bar=False) for model in (one_by_one, together)]
    for engine in engines:
        engine.run(jax.random.key(0), LABEL)
    apart, joint = engines
    arrangements = scipy.special.gammaln(8.0) - scipy.special.gammaln(table + 1.0).sum()
    np.testing.assert_allclose(joint.log_evidence - apart.log_evidence, arrangements, rtol=1e-7)
    np.testing.assert_allclose(joint.posterior["W"].mean, apart.posterior["W"].mean, atol=1e-6)


def test_counts_have_to_add_up():
    wrong = COUNTS + (np.arange(7) == 4)[:, None] * np.array([0, 1, 0])

    def model(counts, keep=True):
        logits = X @ coefficients(2, 3)
        with mask(mask=keep):
            numpyro.sample("y", dist.Multinomial(12, logits=logits), obs=counts)

    with pytest.raises(ModelStructureError, match=r"add up to the total_count of \[12\].*at index \(4,\)"):
        read_latent_gaussian(model, (wrong,))
    for missing in (np.nan, -1.0):
        table = np.where((np.arange(7) == 4)[:, None], missing, COUNTS)
        reading = read_latent_gaussian(model, (table, np.arange(7) != 4))
        np.testing.assert_array_equal(reading.has_value("y"), np.arange(7) != 4)


def test_groups_are_blocks():
    reading = read_latent_gaussian(varying_intercepts, (X, LABEL))
    assert reading.form(reading.initial_hyper()).blocks.columns.shape == (4, 3)


@pytest.mark.slow
@pytest.mark.parametrize("model", [softmax, probit])
def test_laplace_finds_the_mode_and_its_curvature(model):
    engine = LaplaceApproximation(model, tol=1e-8)
    engine.run(jax.random.key(0), X, LABEL)
    assert engine.diagnostics.converged
    sites = {name: engine.posterior[name].mean for name in ("W", "b") if name in engine.posterior}
    mode, unravel = ravel_pytree(sites)

    def negative_log_density(values):
        return -log_density(model, (X, LABEL), {}, unravel(values))[0]

    np.testing.assert_allclose(jax.grad(negative_log_density)(mode), 0.0, atol=1e-7)
    covariance = np.linalg.inv(jax.hessian(negative_log_density)(mode))
    variances, _ = ravel_pytree({name: engine.posterior[name].variance for name in sites})
    np.testing.assert_allclose(variances, np.diagonal(covariance), rtol=1e-6)


def test_ep_refuses_vector_factors_one_predictor_at_a_time():
    with pytest.raises(ModelStructureError, match=r"one predictor at a time.*'y' have 3 each.*updates all sites"):
        EP(softmax, schedule="sequential").run(jax.random.key(0), X, LABEL)


@pytest.mark.thorough
def test_ep_takes_stick_breaking():
    engine = EP(stick_breaking)
    engine.run(jax.random.key(0), X, LABEL)
    assert engine.diagnostics.converged
    assert engine.log_predictive(X, LABEL)["y"].shape == (7,)


@pytest.mark.thorough
def test_held_out_probabilities_of_stick_breaking_sum_to_one():
    def model(label):
        eta = numpyro.sample("eta", dist.Normal(0.5, 1.5).expand([7, 2]).to_event(2))
        with mask(mask=KEPT):
            numpyro.sample("y", StickBreakingCategorical(eta), obs=label)

    values = []
    for category in range(3):
        engine = VariationalGaussian(model, progress_bar=False)
        engine.run(jax.random.key(0), LABEL.at[2].set(category))
        held_out = engine.log_predictive()["y"]
        np.testing.assert_allclose(np.where(KEPT, held_out, 0.0), 0.0, atol=1e-14)
        values.append(held_out[2])
    np.testing.assert_allclose(np.exp(values).sum(), 1.0, rtol=1e-10)


@pytest.mark.thorough
@pytest.mark.parametrize("model", [softmax, *thorough(stick_breaking)])
def test_missing_categories_are_not_scored(model):
    engine = VariationalGaussian(model, progress_bar=False)
    engine.run(jax.random.key(0), X, jnp.where(KEPT, LABEL, -1))
    np.testing.assert_allclose(engine.log_predictive()["y"], 0.0, atol=1e-14)


def dense_bound(reading, bound, mean, scale_tril):
    """Expected log density plus entropy of a Gaussian on the unknowns, by the definition."""
    form = reading.form(reading.initial_hyper())
    covariance = scale_tril @ scale_tril.T
    prior = np.concatenate([np.ravel(block.variance) for block in form.prior])
    divergence = 0.5 * (
        np.sum((np.diagonal(covariance) + mean**2) / prior - 1.0)
        + np.sum(np.log(prior))
        - 2.0 * np.sum(np.log(np.diagonal(scale_tril)))
    )
    rows = form.potentials[0]
    design = form.design.to_dense().reshape(-1, rows.num_rows, form.num_columns)[:, : rows.base.dimension]
    eta = design @ mean
    moments = bound(eta, design @ covariance @ np.swapaxes(design, 1, 2))
    kept = np.asarray(form.observed[0]).reshape(-1, rows.num_rows)[:, 0]
    own = np.take_along_axis(eta, np.asarray(LABEL)[:, None], axis=1)[:, 0]
    return float(np.sum((own - moments.value)[kept]) - divergence)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "bound", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("bohning", "log", "tilted")), "exact"]
)
def test_variational_bound_is_that_of_the_definition_and_stationary(bound):
    engine = VariationalGaussian(softmax, bound=bound, progress_bar=False)
    engine.run(jax.random.key(0), X, LABEL)
    assert engine.diagnostics.converged and engine.log_evidence.is_lower_bound
    assert np.all(np.diff(engine.diagnostics.objective_trace) > -1e-11)
    reading = read_latent_gaussian(softmax, (X, LABEL))
    names = reading.field
    mean = np.concatenate([np.ravel(engine.posterior[name].mean) for name in names])
    _, half = engine._finished().programs.stacked_moments(*engine._finished().inputs, names=names)
    scale_tril = np.linalg.cholesky(half @ half.T)
    function = log_sum_exp_bound("quadrature" if bound == "exact" else bound)
    best = dense_bound(reading, function, mean, scale_tril)
    np.testing.assert_allclose(engine.log_evidence, best, atol=1e-8)
    rng = np.random.default_rng(3)
    for _ in range(4):
        shifted = mean + 1e-2 * rng.standard_normal(mean.size)
        wider = scale_tril * (1.0 + 1e-2 * np.tril(rng.standard_normal(scale_tril.shape)))
        assert dense_bound(reading, function, shifted, wider) < best


def test_what_is_no_bound_says_so():
    engine = VariationalGaussian(softmax, bound="delta", progress_bar=False)
    engine.run(jax.random.key(0), X, LABEL)
    assert not engine.log_evidence.is_lower_bound
    assert "no bound" in engine.describe()


def test_bounds_for_binary_sites_are_refused_for_categorical_ones():
    with pytest.raises(
        ModelStructureError, match=r"'jaakkola'.*'y' is categorical.*'tilted'.*StickBreakingCategorical"
    ):
        VariationalGaussian(softmax, bound="jaakkola").run(jax.random.key(0), X, LABEL)
