"""Every model: sites and their shapes, agreement with its formula, and a density that a sampler can use."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats
import tinygp
from jax import random
from numpyro import handlers
from numpyro.infer import Predictive, init_to_median, init_to_value
from numpyro.infer.util import initialize_model, log_density

from numpyro_ext import models
from numpyro_ext.distributions import RectifiedLinearPoisson
from numpyro_ext.models.gaussian_process import squared_exponential
from tests.tiers import few

N, D = 12, 3
T = np.linspace(0.0, 30.0, N)
X = np.asarray(random.normal(random.key(0), (N, D)))
GROUP = np.repeat(np.arange(4), 3)
COLUMN = np.tile(np.arange(3), 4)
COUNTS = np.array([0, 1, 0, 2, 5, 3, 2, 1, 0, 0, 4, 1])
CLASSES = (COUNTS > 1).astype(int)
CATEGORIES = np.minimum(COUNTS, 3)
REALS = X @ np.array([1.0, -2.0, 0.5]) + 0.3

# name: model, positional arguments, observed site, its data, shapes of the latent sites
COX = {"scale": (), "length": (), "mean": (), "f": (N,)}
LINEAR = {"intercept": (), "coefficients": (D,)}
CASES = {
    "cox rectified": (models.cox_process, (T,), "counts", COUNTS, COX),
    "cox softplus": (partial(models.cox_process, nonlinearity="softplus"), (T,), "counts", COUNTS, COX),
    "cox exponential": (partial(models.cox_process, nonlinearity="exponential"), (T,), "counts", COUNTS, COX),
    "gp logit": (models.gp_classification, (X,), "y", CLASSES, {"scale": (), "length": (), "f": (N,)}),
    "gp probit": (
        partial(models.gp_classification, link="probit"),
        (X,),
        "y",
        CLASSES,
        {"scale": (), "length": (), "f": (N,)},
    ),
    "linear": (models.linear_regression, (X,), "y", REALS, {**LINEAR, "noise_scale": ()}),
    "robust": (models.robust_regression, (X,), "y", REALS, {**LINEAR, "noise_scale": ()}),
    "robust, learned": (
        partial(models.robust_regression, degrees_of_freedom=None),
        (X,),
        "y",
        REALS,
        {**LINEAR, "noise_scale": (), "degrees_of_freedom": ()},
    ),
    "logistic": (models.logistic_regression, (X,), "y", CLASSES, LINEAR),
    "probit": (models.probit_regression, (X,), "y", CLASSES, LINEAR),
    "poisson": (partial(models.poisson_regression, coefficient_scale=0.5), (X,), "y", COUNTS, LINEAR),
    "negative binomial": (
        partial(models.negative_binomial_regression, coefficient_scale=0.5),
        (X,),
        "y",
        COUNTS,
        {**LINEAR, "concentration": ()},
    ),
    "softmax": (
        partial(models.multinomial_regression, num_categories=4),
        (X,),
        "y",
        CATEGORIES,
        {"intercept": (4,), "coefficients": (D, 4)},
    ),
    "multiclass gp, sticks": (
        partial(models.multiclass_gp_classification, num_categories=4, likelihood="stick-breaking"),
        (X,),
        "y",
        CATEGORIES,
        {"scale": (), "length": (), "f": (3, N)},
    ),
    **{
        f"ordinal, {likelihood}": (
            partial(models.ordinal_regression, num_categories=4, likelihood=likelihood),
            (X,),
            "y",
            CATEGORIES,
            {"coefficients": (D,), "thresholds": (3,)},
        )
        for likelihood in ("cumulative-logit", "adjacent-category")
    },
    "random intercepts": (
        models.random_intercepts,
        (GROUP,),
        "y",
        REALS,
        {"intercept": (), "group_scale": (), "group_effect": (4,), "noise_scale": ()},
    ),
    "random intercepts, bernoulli": (
        partial(models.random_intercepts, X=X, family="bernoulli"),
        (GROUP,),
        "y",
        CLASSES,
        {**LINEAR, "group_scale": (), "group_effect": (4,)},
    ),
    "crossed": (
        partial(models.crossed_random_effects, family="poisson"),
        (GROUP, COLUMN),
        "y",
        COUNTS,
        {"intercept": (), "row_scale": (), "row_effect": (4,), "column_scale": (), "column_effect": (3,)},
    ),
    "count matrix": (
        lambda rows, cols, counts=None: models.poisson_factorization(
            rows, cols, counts, num_rows=4, num_cols=3, rank=2
        ),
        (GROUP, COLUMN),
        "counts",
        COUNTS,
        {
            **dict.fromkeys(("row_scale", "row_bias_scale", "col_bias_scale"), ()),
            "w": (4, 2),
            "row_bias": (4,),
            "z": (3, 2),
            "col_bias": (3,),
        },
    ),
    "binary matrix": (
        lambda rows, cols, x=None: models.binary_factorization(rows, cols, x, num_rows=4, num_cols=3, rank=2),
        (GROUP, COLUMN),
        "x",
        CLASSES,
        {"z": (), "u": (4, 2), "b": (4,), "v": (3, 2), "g": (3,)},
    ),
    **{
        f"real matrix, {'own' if own else 'one'} noise": (
            lambda rows, cols, values=None, own=own: models.gaussian_factorization(
                rows, cols, values, num_rows=4, num_cols=3, rank=2, heteroscedastic=own
            ),
            (GROUP, COLUMN),
            "values",
            REALS,
            {
                **{"z": (), "row_scale": (), "u": (4, 2), "v": (3, 2)},
                **({"row_noise": (4,), "column_noise": (3,)} if own else {"noise": ()}),
            },
        )
        for own in (False, True)
    },
    "types of people": (
        lambda user, item, rating=None: models.rating_types(
            user, item, rating, num_users=4, num_items=3, num_levels=3, num_types=2
        ),
        (GROUP, COLUMN),
        "rating",
        CLASSES,
        {"types": (2,), "chances": (2, 3, 3)},
    ),
    "ratings": (
        lambda user, item, rating=None: models.heteroscedastic_ratings(
            user, item, rating, num_users=4, num_items=3, rank=2, num_levels=3
        ),
        (GROUP, COLUMN),
        "rating",
        CLASSES,
        {
            **dict.fromkeys(("mean_of_users", "variance_of_users", "mean_of_items", "variance_of_items"), (2,)),
            **{"tastes": (4, 2), "row_noise": (4,), "traits": (3, 2), "column_noise": (3,)},
            **{"cuts": (3, 2), "typical_cuts": (2,)},
        },
    ),
    "count field": (
        lambda place, time, counts=None: models.low_rank_count_field(
            place, time, counts, num_places=4, num_times=3, rank=2
        ),
        (GROUP, COLUMN),
        "counts",
        COUNTS,
        {"place_scale": (), "w": (4, 2), "pattern": (2, 3)},
    ),
    "receptive field": (
        partial(models.receptive_field_counts, rank=2),
        (np.stack([X, X[::-1]], axis=-1) / 3.0,),
        "counts",
        COUNTS,
        {"space_scale": (), "w": (2, D), "z": (2, 2)},
    ),
}


@pytest.fixture(params=few(CASES, 10))
def case(request):
    return CASES[request.param]


def test_sites_and_shapes(case):
    model, arguments, observed, data, latent = case
    trace = handlers.trace(handlers.seed(model, random.key(1))).get_trace(*arguments, data)
    samples = {name: site for name, site in trace.items() if site["type"] == "sample"}
    assert {name: site["value"].shape for name, site in samples.items() if not site["is_observed"]} == latent
    assert [name for name, site in samples.items() if site["is_observed"]] == [observed]
    assert samples[observed]["fn"].shape() == (N,)
    np.testing.assert_array_equal(samples[observed]["value"], data)


def test_prior_predictive(case):
    model, arguments, observed, data, latent = case
    draws = Predictive(model, num_samples=50)(random.key(2), *arguments)
    assert draws[observed].shape == (50, N)
    assert {name: draws[name].shape[1:] for name in latent} == latent
    assert all(jnp.isfinite(value).all() for value in draws.values())
    if np.issubdtype(data.dtype, np.integer):
        assert jnp.issubdtype(draws[observed].dtype, jnp.integer)
        assert (draws[observed] >= 0).all()


@pytest.mark.float32
def test_density_and_gradient_are_finite_at_the_start_of_a_sampler(case):
    model, arguments, _, data, latent = case
    strategy = partial(initialize_model, dynamic_args=False)
    if model is models.cox_process:
        # Positive counts need a positive intensity, which random starting points do not give.
        strategy = partial(strategy, init_strategy=init_to_value(values={"f": jnp.asarray(1.0 + COUNTS)}))
    if "cuts" in latent:
        # Cut points are to be in order, which random starting points are not.
        strategy = partial(strategy, init_strategy=init_to_median)
    start = strategy(random.key(3), model, model_args=(*arguments, data)).param_info
    assert jnp.isfinite(start.potential_energy)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(start.z_grad))


@pytest.mark.parametrize(
    ("nonlinearity", "rate"),
    [
        ("rectified", lambda f: np.maximum(f, 0.0)),
        ("softplus", lambda f: np.logaddexp(f, 0.0)),
        ("exponential", np.exp),
    ],
)
def test_cox_process_density_is_its_formula(nonlinearity, rate):
    exposure = np.linspace(0.5, 2.0, N)
    f = 0.5 + 0.3 * COUNTS
    values = {"scale": 1.3, "length": 8.0, "mean": 0.7, "f": f}
    model = partial(models.cox_process, nonlinearity=nonlinearity, exposure=exposure, jitter=1e-3)
    log_joint, trace = log_density(model, (T, COUNTS), {}, values)
    covariance = 1.3**2 * (np.exp(-0.5 * ((T[:, None] - T) / 8.0) ** 2) + 1e-3 * np.eye(N))
    expected = (
        scipy.stats.halfnorm.logpdf(1.3, scale=2.0)
        + scipy.stats.lognorm.logpdf(8.0, 0.5, scale=np.exp(2.0))
        + scipy.stats.norm.logpdf(0.7, 1.0, 2.0)
        + scipy.stats.multivariate_normal.logpdf(f, np.full(N, 0.7), covariance)
        + scipy.stats.poisson.logpmf(COUNTS, exposure * rate(f)).sum()
    )
    np.testing.assert_allclose(log_joint, expected, rtol=1e-10)
    np.testing.assert_allclose(trace["intensity"]["value"], exposure * rate(f), rtol=1e-14)


def test_cox_process_mask_removes_counts():
    mask = np.arange(N) % 3 > 0
    values = {"scale": 1.3, "length": 8.0, "mean": 0.7, "f": 0.5 + 0.3 * COUNTS}
    masked, trace = log_density(models.cox_process, (T, COUNTS, mask), {}, values)
    full, _ = log_density(models.cox_process, (T, COUNTS), {}, values)
    removed = RectifiedLinearPoisson(values["f"]).log_prob(COUNTS)[~mask].sum()
    np.testing.assert_allclose(masked, full - removed, rtol=1e-12)
    assert trace["counts"]["fn"].batch_shape == (N,)


def test_cox_process_uncentered_is_the_same_model():
    values = {"scale": 1.3, "length": 8.0, "mean": 0.7}
    base = random.normal(random.key(4), (N,))
    model = partial(models.cox_process, nonlinearity="softplus", jitter=1e-3)
    uncentered, trace = log_density(partial(model, centered=False), (T, COUNTS), {}, {**values, "f_base": base})
    f = trace["f"]["value"]
    centered, _ = log_density(model, (T, COUNTS), {}, {**values, "f": f})
    covariance = 1.3**2 * (np.exp(-0.5 * ((T[:, None] - T) / 8.0) ** 2) + 1e-3 * np.eye(N))
    np.testing.assert_allclose(uncentered, centered + 0.5 * np.linalg.slogdet(covariance)[1], rtol=1e-10)


@pytest.mark.float32
@pytest.mark.parametrize("shape", [(7,), (7, 3)])
def test_squared_exponential_is_that_of_tinygp(shape):
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape))
    expected = 4.0 * (tinygp.kernels.ExpSquared(0.3)(x, x) + 1e-3 * jnp.eye(7))
    np.testing.assert_allclose(squared_exponential(x, 2.0, 0.3, 1e-3), expected, rtol=1e-12)


def test_covariance_of_a_long_grid_is_positive_definite():
    t = jnp.linspace(1851.0, 1963.0, 400)
    values = {"scale": 1.0, "length": 60.0, "mean": 0.5, "f": jnp.full(400, 0.5)}
    assert jnp.isfinite(log_density(models.cox_process, (t, np.zeros(400, int)), {}, values)[0])


def test_regressions_use_the_link_they_are_named_after():
    values = {"intercept": 0.2, "coefficients": np.array([0.5, -0.3, 0.1])}
    eta = 0.2 + X @ values["coefficients"]
    expected = {
        models.linear_regression: scipy.stats.norm.logpdf(REALS, eta, 0.7),
        models.robust_regression: scipy.stats.t.logpdf(REALS, 4.0, eta, 0.7),
        models.logistic_regression: scipy.stats.bernoulli.logpmf(CLASSES, 1.0 / (1.0 + np.exp(-eta))),
        models.probit_regression: scipy.stats.bernoulli.logpmf(CLASSES, scipy.stats.norm.cdf(eta)),
        models.poisson_regression: scipy.stats.poisson.logpmf(COUNTS, np.exp(eta)),
        models.negative_binomial_regression: scipy.stats.nbinom.logpmf(COUNTS, 1.5, 1.5 / (1.5 + np.exp(eta))),
    }
    for model, log_likelihood in expected.items():
        data = {models.linear_regression: REALS, models.robust_regression: REALS}.get(
            model, CLASSES if model in (models.logistic_regression, models.probit_regression) else COUNTS
        )
        conditioned = handlers.substitute(model, {**values, "noise_scale": 0.7, "concentration": 1.5})
        site = handlers.trace(conditioned).get_trace(X, data)["y"]
        np.testing.assert_allclose(site["fn"].log_prob(site["value"]), log_likelihood, rtol=1e-10, err_msg=str(model))


def test_random_effects_are_gathered():
    u, v = np.array([0.5, -1.0, 2.0, 0.1]), np.array([3.0, 0.0, -2.0])
    values = {"intercept": 0.4, "row_effect": u, "column_effect": v, "row_scale": 1.0, "column_scale": 1.0}
    values |= {"coefficients": np.array([1.0, 0.0, -1.0]), "noise_scale": 1.0}
    site = handlers.trace(handlers.substitute(models.crossed_random_effects, values)).get_trace(
        GROUP, COLUMN, REALS, X
    )["y"]
    base = site["fn"]
    assert isinstance(base, dist.Normal)
    np.testing.assert_allclose(base.loc, 0.4 + X[:, 0] - X[:, 2] + u[GROUP] + v[COLUMN], rtol=1e-12)
    values = {"intercept": 0.4, "group_effect": u, "group_scale": 1.0, "noise_scale": 1.0}
    site = handlers.trace(handlers.substitute(models.random_intercepts, values)).get_trace(GROUP, REALS)["y"]
    np.testing.assert_allclose(site["fn"].loc, 0.4 + u[GROUP], rtol=1e-12)


def test_groups_without_observations_keep_their_effect():
    draws = Predictive(partial(models.random_intercepts, num_groups=7), num_samples=2)(random.key(5), GROUP)
    assert draws["group_effect"].shape == (2, 7)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (partial(models.cox_process, nonlinearity="relu"), (T,), "nonlinearity must be 'rectified'.*got 'relu'"),
        (partial(models.gp_classification, link="cloglog"), (X,), "link must be 'logit' or 'probit'; got 'cloglog'"),
        (models.linear_regression, (X[:, 0],), r"X must have shape \(observations, columns\); got \(12,\)"),
        (partial(models.multinomial_regression, num_categories=3, likelihood="logit"), (X,), "one of .*; got 'logit'"),
        (partial(models.ordinal_regression, num_categories=3, likelihood="logit"), (X,), "one of .*; got 'logit'"),
        (partial(models.factor_analysis, num_factors=1), (), "needs a table with rows and columns, or its shape"),
        (partial(models.factor_analysis, num_factors=1, kinds="ordinal"), (X,), "kinds must be one of .*ordinal"),
        (partial(models.random_intercepts, family="gamma"), (GROUP,), "family must be .*; got 'gamma'"),
        (models.random_intercepts, (GROUP * 0.5,), "group must be a vector of integers; got float64"),
        (models.random_intercepts, (GROUP - 1,), r"group must lie in 0, ..., 2; got values from -1 to 2"),
        (partial(models.random_intercepts, num_groups=3), (GROUP,), r"group must lie in 0, ..., 2; got .* from 0 to 3"),
        (models.random_intercepts, (GROUP, None, X[:5]), r"X must have shape \(12, columns\); got \(5, 3\)"),
        (models.crossed_random_effects, (GROUP, COLUMN[:5]), r"same length; got \(12,\) and \(5,\)"),
    ],
)
def test_bad_arguments_are_explained(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        handlers.seed(model, random.key(0))(*arguments)
