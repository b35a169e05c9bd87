"""One covariance for all rows: the same numbers as with one for each, and refusals where that would be wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import VariationalGaussian
from numpyro_ext.linalg.gaussian.conditioning import kl_divergence, linear_gaussian
from numpyro_ext.linalg.gaussian.design import DenseDesign
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior, FlatPrior, PrecisionPrior
from numpyro_ext.models import factor_analysis
from numpyro_ext.structure import ModelStructureError
from tests.tiers import few

KEY = jax.random.key(0)
ROWS, COLUMNS, FACTORS = 12, 5, 2
TABLE = np.random.default_rng(0).integers(0, 2, (ROWS, COLUMNS))
LOADINGS = np.random.default_rng(1).normal(size=(COLUMNS, FACTORS))
HYPER = {"loadings": LOADINGS, "intercept": np.linspace(-0.5, 0.5, COLUMNS)}
MIXING = np.array([[1.0, 0.4], [0.4, 0.7]])


def engine(covariance, model=factor_analysis, bound="bohning", **options):
    return VariationalGaussian(model, bound=bound, covariance=covariance, progress_bar=False, **options)


def fitted(covariance, *args, model=factor_analysis, bound="bohning", hyper_values=HYPER, **kwargs):
    found = engine(covariance, model, bound, hyper_values=hyper_values)
    found.run(KEY, *args, **kwargs)
    return found


def three_blocks(prior):
    """Three blocks of two unknowns and four predictors; unknowns of a block are neighbours."""
    matrix = np.random.default_rng(2).normal(size=(4, 2))
    design = DenseDesign(jnp.asarray(np.kron(np.eye(3), matrix)))
    return (prior,), design, jnp.arange(12).reshape(3, 4), jnp.arange(6).reshape(3, 2)


@pytest.mark.parametrize(
    "prior",
    few(
        [
            DiagonalPrior(jnp.tile(jnp.array([0.5, 2.0]), 3)),
            CovariancePrior(jnp.tile(jnp.asarray(MIXING), (3, 1, 1))),
            PrecisionPrior(jnp.tile(jnp.asarray(MIXING), (3, 1, 1))),
        ],
        1,
    ),
    ids=["diagonal", "covariance", "precision"],
)
def test_conditioning_is_that_of_separate_blocks(prior):
    form = three_blocks(prior)
    precision = jnp.tile(jnp.array([0.3, 0.0, 1.0, 0.2]), 3)
    shift = jnp.asarray(np.random.default_rng(3).normal(size=12))
    shared, separate = (linear_gaussian(*form, space=space) for space in ("shared", "coefficient"))
    one, other = shared.condition(precision, shift), separate.condition(precision, shift)
    a, b = one.marginals(), other.marginals()
    for field in ("mean", "variance", "cavity_ratio", "log_partition"):
        np.testing.assert_allclose(getattr(a, field), getattr(b, field), atol=1e-12)
    np.testing.assert_allclose(one.unknowns(), other.unknowns(), atol=1e-12)
    np.testing.assert_allclose(kl_divergence(shared, one, a.variance), kl_divergence(separate, other, b.variance))
    outputs = DenseDesign(jnp.asarray(np.random.default_rng(4).normal(size=(3, 6))))
    np.testing.assert_allclose(one.map_variance(outputs), other.map_variance(outputs), atol=1e-12)
    np.testing.assert_allclose(one.map_covariance(outputs), other.map_covariance(outputs), atol=1e-12)
    draws = one.sample(KEY, 20_000)
    np.testing.assert_allclose(np.cov(draws.T), one.map_covariance(DenseDesign(jnp.eye(6))), atol=0.05)


def test_blocks_that_differ_are_nan():
    prior = DiagonalPrior(jnp.ones(6))
    space = linear_gaussian(*three_blocks(prior), space="shared")
    assert np.all(np.isnan(space.condition(jnp.ones(12).at[5].set(2.0), jnp.ones(12)).unknowns()))
    space = linear_gaussian(*three_blocks(DiagonalPrior(jnp.ones(6).at[2].set(2.0))), space="shared")
    assert np.all(np.isnan(space.condition(jnp.ones(12), jnp.ones(12)).unknowns()))
    with pytest.raises(ValueError, match="flat prior"):
        linear_gaussian(*three_blocks(FlatPrior(6)), space="shared")


@pytest.mark.slow
def test_fit_is_the_full_one():
    """A column that no row has is no obstacle."""
    options = {"num_factors": FACTORS, "kinds": "binary", "mask": np.arange(COLUMNS) != 3}
    full, shared = (fitted(name, TABLE, **options) for name in ("full", "shared"))
    np.testing.assert_allclose(shared.log_evidence, full.log_evidence, rtol=1e-12)
    assert shared.log_evidence.is_lower_bound
    a, b = shared.posterior["factors"], full.posterior["factors"]
    np.testing.assert_allclose(a.mean, b.mean, atol=1e-10)
    np.testing.assert_allclose(a.variance, b.variance, atol=1e-10)
    np.testing.assert_allclose(a.covariance(), b.covariance(), atol=1e-10)


@pytest.mark.thorough
def test_learning_is_the_full_one():
    """The gradient of the bound in what all rows share, from the first row alone."""
    results = []
    for name in ("full", "shared"):
        found = engine(name, hyper_values={"intercept": HYPER["intercept"]}, max_hyper_steps=4, hyper_tol=1e-12)
        with pytest.warns(UserWarning, match="hyperparameters did not converge"):
            found.run(KEY, TABLE, num_factors=FACTORS, kinds="binary")
        results.append((np.asarray(found.hyper["loadings"].value), float(found.log_evidence)))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-8)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-10)


def choices(labels, scale=None):
    """A category for each row, whose softmax has a correlated prior; rows may have scales of their own."""
    scale = numpyro.param("scale", jnp.ones(len(labels))) if scale is None else scale
    with numpyro.plate("rows", len(labels)):
        z = numpyro.sample("z", dist.MultivariateNormal(0.0, jnp.asarray(MIXING)))
        numpyro.sample("y", dist.Categorical(logits=jnp.outer(scale, jnp.ones(3)) * (z @ LOADINGS[:3].T)), obs=labels)


@pytest.mark.slow
def test_categories_share_too():
    labels = jnp.array([0, 1, 2, 1, 0, 0])
    full, shared = (fitted(name, labels, jnp.ones(6), model=choices, hyper_values=None) for name in ("full", "shared"))
    np.testing.assert_allclose(shared.log_evidence, full.log_evidence, rtol=1e-12)
    np.testing.assert_allclose(shared.posterior["z"].mean, full.posterior["z"].mean, atol=1e-10)


def unequal(table, levels=False):
    with numpyro.plate("rows", len(table)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), ())) if levels else 0.0
    numpyro.sample("first", dist.Bernoulli(logits=z + level), obs=table[:, 0])
    numpyro.sample("second", dist.Bernoulli(logits=2.0 * z[:3] + level), obs=table[:3, 1])


@pytest.mark.parametrize(
    "arguments, message",
    few(
        [
            ({"bound": "jaakkola"}, "bound='bohning'"),
            ({"bound": "exact"}, "bound='bohning'"),
            ({"mask": np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) != 7}, "same cells"),
            ({"model": unequal}, "of one size"),
            ({"model": unequal, "levels": True}, "proper priors"),
            ({"model": choices, "table": jnp.array([0, 1, 2])}, "same linear map"),  # only while all scales are one
        ],
        1,
    ),
)
def test_refusals(arguments, message):
    arguments = {"table": TABLE, "model": factor_analysis, **arguments}
    table, model = arguments.pop("table"), arguments.pop("model")
    if model is factor_analysis:
        arguments |= {"num_factors": FACTORS, "kinds": "binary", "hyper_values": HYPER}
    with pytest.raises(ModelStructureError, match=message):
        fitted("shared", table, model=model, **{"hyper_values": None, **arguments})


def test_options():
    with pytest.raises(ValueError, match="one of 'full', 'diagonal', 'shared'"):
        engine("equal")
    with pytest.raises(ValueError, match="natural-gradient"):
        engine("shared", method="cholesky")
