"""Tables and choices: the densities are those of their formulas, and engines read what they can."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.special
import scipy.stats
from jax import random
from numpyro import handlers
from numpyro.infer import Predictive
from numpyro.infer.util import initialize_model, log_density

from numpyro_ext import models
from numpyro_ext.infer import LaplaceApproximation
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian

RNG = np.random.default_rng(0)
TABLE = np.column_stack([RNG.standard_normal(6), RNG.integers(0, 2, (6, 2)), [2, 0, 1, 1, 2, 0], RNG.poisson(2.0, 6)])
KINDS = ("real", "binary", "binary", 3, "count")
KEPT = RNG.random(TABLE.shape) < 0.8
NUM_PREDICTORS = 6  # two of them of the column with three categories
Z = RNG.standard_normal((6, 2))
LOADINGS, INTERCEPT = RNG.standard_normal((NUM_PREDICTORS, 2)), RNG.standard_normal(NUM_PREDICTORS)
ATTRIBUTES, CHOICES = RNG.standard_normal((5, 3, 4, 2)), RNG.integers(0, 4, (5, 3))
WORDS = RNG.integers(0, 4, (5, 6))


def log_cells(eta, noise):
    """Log densities of the cells of the table."""
    log_categories = scipy.special.log_softmax(np.pad(eta[:, 3:5], [(0, 0), (1, 0)]), axis=1)
    return np.column_stack(
        [
            scipy.stats.norm.logpdf(TABLE[:, 0], eta[:, 0], noise),
            scipy.stats.bernoulli.logpmf(TABLE[:, 1:3], scipy.special.expit(eta[:, 1:3])),
            log_categories[np.arange(6), TABLE[:, 3].astype(int)],
            scipy.stats.poisson.logpmf(TABLE[:, 4], np.exp(eta[:, 5])),
        ]
    )


@pytest.mark.parametrize(
    "arguments",
    [(TABLE, KEPT), (np.where(KEPT, TABLE, -99.0), KEPT), (np.where(KEPT, TABLE, np.nan),)],
    ids=["mask", "code", "NaN"],
)
def test_factor_analysis_density_is_its_formula(arguments):
    values = {"factors": Z, "loadings": LOADINGS, "intercept": INTERCEPT, "noise": np.array([0.7])}
    model = partial(models.factor_analysis, num_factors=2, kinds=KINDS)
    found, slope = jax.value_and_grad(lambda values: log_density(model, arguments, {}, values)[0])(values)
    expected = scipy.stats.norm.logpdf(Z).sum() + log_cells(Z @ LOADINGS.T + INTERCEPT, 0.7)[KEPT].sum()
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert all(np.isfinite(part).all() for part in slope.values())


@pytest.mark.thorough
def test_held_out_cells_are_scored_at_their_own_values():
    """The predictive probabilities of the two values of a hidden cell sum to one."""
    table, is_seen = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 0, 0]]), np.ones((4, 3), bool)
    is_seen[[0, 1, 2], [0, 1, 2]] = False
    values = {"loadings": LOADINGS[:3], "intercept": INTERCEPT[:3]}
    model = partial(models.factor_analysis, num_factors=2, kinds="binary")
    engine = LaplaceApproximation(model, hyper_values=values, progress_bar=False)
    found, evidence = [], []
    for cells in (table, 1 - table, -1):
        engine.run(random.key(0), np.where(is_seen, table, cells), is_seen)
        found.append(engine.log_predictive()["binary"][~is_seen])
        evidence.append(engine.log_evidence)
    np.testing.assert_allclose(evidence, evidence[0], rtol=1e-12)
    np.testing.assert_allclose(np.exp(found[0]) + np.exp(found[1]), 1.0, rtol=1e-6)
    assert np.abs(found[0] - found[1]).min() > 0.01


def test_priors_of_factor_analysis():
    values = {"factors": Z, "loadings": LOADINGS, "intercept": INTERCEPT, "noise": np.array([0.7])}
    model = partial(models.factor_analysis, num_factors=2, kinds=KINDS, priors=True)
    found, trace = log_density(model, (TABLE, KEPT), {}, values)
    assert not any(site["type"] == "param" for site in trace.values())
    normal = scipy.stats.norm.logpdf
    expected = normal(Z).sum() + log_cells(Z @ LOADINGS.T + INTERCEPT, 0.7)[KEPT].sum() + normal(LOADINGS).sum()
    expected += normal(INTERCEPT, 0.0, 5.0).sum() + scipy.stats.halfnorm.logpdf(0.7)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("num_factors", [1, 3, NUM_PREDICTORS])
def test_loadings_start_with_their_full_rank(num_factors):
    """From a lower rank no gradient leads away: the fit would end at a saddle, with fewer factors than asked for."""
    model = partial(models.factor_analysis, num_factors=num_factors, kinds=KINDS)
    start = np.asarray(handlers.trace(handlers.seed(model, 0)).get_trace(TABLE)["loadings"]["value"])
    np.testing.assert_allclose(np.linalg.svd(start, compute_uv=False), np.sqrt(0.5**2 * NUM_PREDICTORS / 2), rtol=1e-6)


def test_more_factors_than_predictors_are_refused():
    with pytest.raises(ValueError, match="7 factors.* have 6"):
        handlers.seed(partial(models.factor_analysis, num_factors=7, kinds=KINDS), 0)(TABLE)


@pytest.mark.thorough
def test_rows_are_blocks_and_parameters_are_hyperparameters():
    reading = read_latent_gaussian(partial(models.factor_analysis, num_factors=2, kinds=KINDS), (TABLE, KEPT))
    assert reading.field == ("factors",) and set(reading.hyper) == {"loadings", "intercept", "noise"}
    assert reading.form(reading.initial_hyper()).blocks.columns.shape == (6, 2)
    assert set(reading.factor_names) == {"real", "binary", "categorical_3", "count"}


def test_one_noise_level_is_probabilistic_principal_components():
    model = partial(models.factor_analysis, num_factors=2, shared_noise=True)
    assert read_latent_gaussian(model, (TABLE,)).hyper["noise"].shape == ()


@pytest.mark.parametrize("bad", [3, -1, 0.5])
def test_a_category_out_of_range_is_named(bad):
    table = TABLE.copy()
    table[2, 3] = bad
    model = partial(models.factor_analysis, num_factors=2, kinds=KINDS)
    with pytest.raises(ModelStructureError, match=r"'categorical_3': 1 value is outside.*at index \(2, 0\)"):
        read_latent_gaussian(model, (table,))


def test_graphical_model_density_is_its_formula():
    scale_tril = np.array([[1.2, 0.0], [-0.4, 0.9]])
    values = {"z": Z, "mean": np.array([0.3, -0.2]), "scale_tril": scale_tril}
    table = TABLE[:, 1:3].astype(int)
    found, _ = log_density(models.latent_gaussian_graphical_model, (table,), {}, values)
    prior = scipy.stats.multivariate_normal.logpdf(Z, values["mean"], scale_tril @ scale_tril.T).sum()
    expected = prior + scipy.stats.bernoulli.logpmf(table, scipy.special.expit(Z)).sum()
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.thorough
def test_graphical_model_of_mixed_columns_is_its_formula():
    z, scale = RNG.standard_normal((6, NUM_PREDICTORS)), np.linspace(0.5, 1.5, NUM_PREDICTORS)
    values = {"z": z, "mean": INTERCEPT, "scale": scale, "correlation": np.eye(NUM_PREDICTORS)}
    model = partial(models.latent_gaussian_graphical_model, kinds=KINDS, priors=True)
    found, _ = log_density(model, (TABLE, KEPT), {}, values)
    expected = scipy.stats.norm.logpdf(z, INTERCEPT, scale).sum() + log_cells(z, 0.1)[KEPT].sum()
    expected += scipy.stats.norm.logpdf(INTERCEPT, 0.0, 5.0).sum() + scipy.stats.halfnorm.logpdf(scale, scale=2.0).sum()
    expected += float(dist.LKJCholesky(NUM_PREDICTORS, 1.0).log_prob(np.eye(NUM_PREDICTORS)))
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    reading = read_latent_gaussian(partial(models.latent_gaussian_graphical_model, kinds=KINDS), (TABLE, KEPT))
    assert reading.field == ("z",) and set(reading.hyper) == {"mean", "scale_tril"}


def test_discrete_choice_density_is_its_formula():
    values = {"mean": np.array([0.5, -1.0]), "scale": np.array([0.7, 0.2]), "standardised": Z[:5]}
    found, trace = log_density(models.discrete_choice, (ATTRIBUTES, CHOICES), {}, values)
    tastes = values["mean"] + values["scale"] * Z[:5]
    utility = np.einsum("ndkl,nl->ndk", ATTRIBUTES, tastes)
    log_probs = utility - scipy.special.logsumexp(utility, axis=-1, keepdims=True)
    expected = np.take_along_axis(log_probs, CHOICES[..., None], -1).sum()
    expected += scipy.stats.norm.logpdf(values["mean"], 0.0, 2.0).sum() + scipy.stats.norm.logpdf(Z[:5]).sum()
    expected += scipy.stats.halfnorm.logpdf(values["scale"]).sum()
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    np.testing.assert_allclose(trace["tastes"]["value"], tastes)


CASES = {
    "factor analysis": (partial(models.factor_analysis, num_factors=2, kinds=KINDS, priors=True), (TABLE, KEPT)),
    "graphical, mixed": (
        partial(models.latent_gaussian_graphical_model, kinds=KINDS, priors=True),
        (np.where(KEPT, TABLE, np.nan),),
    ),
    "graphical": (models.latent_gaussian_graphical_model, (TABLE[:, 1:3].astype(int),)),
    "choice": (models.discrete_choice, (ATTRIBUTES, CHOICES)),
    "choice, maximum likelihood": (partial(models.discrete_choice, priors=False), (ATTRIBUTES, CHOICES)),
    "topics": (partial(models.correlated_topic_model, num_topics=3), (WORDS,)),
}


SAMPLERS = {"topics": pytest.mark.slow, "graphical, mixed": pytest.mark.thorough}


@pytest.mark.parametrize("name", [pytest.param(n, marks=SAMPLERS[n]) if n in SAMPLERS else n for n in CASES])
def test_samplers_can_start(name):
    model, arguments = CASES[name]
    start = initialize_model(random.key(3), model, model_args=arguments).param_info
    assert jnp.isfinite(start.potential_energy)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(start.z_grad))


def test_prior_draws():
    model = partial(models.factor_analysis, num_factors=2, kinds=KINDS, shape=(7, 5), loading_scale=1.0)
    draws = Predictive(model, num_samples=3)(random.key(0))
    assert draws["binary"].shape == (3, 7, 2) and draws["loadings"].shape == (3, 6, 2)
    with handlers.seed(rng_seed=0):
        models.latent_gaussian_graphical_model(shape=(3, 2))


def test_topics_are_refused_by_name():
    with pytest.raises(ModelStructureError, match="'counts'.*predictors"):
        read_latent_gaussian(*CASES["topics"])
