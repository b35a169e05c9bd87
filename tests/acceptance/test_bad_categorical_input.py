"""Categories and tables that are wrong or degenerate: what the user is told."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.distributions import OrderedProbit, StickBreakingCategorical
from numpyro_ext.infer import VariationalGaussian
from numpyro_ext.models import factor_analysis
from numpyro_ext.structure import ModelStructureError

KEY = jax.random.key(0)
X = np.random.default_rng(0).standard_normal((7, 2))
TABLE = np.random.default_rng(1).integers(0, 2, (12, 4))


def softmax(X, label):
    weights = numpyro.sample("W", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    numpyro.sample("y", dist.Categorical(logits=X @ weights), obs=label)


def sticks(X, label):
    weights = numpyro.sample("W", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
    numpyro.sample("y", StickBreakingCategorical(X @ weights), obs=label)


@pytest.mark.parametrize("model", [softmax, sticks])
@pytest.mark.parametrize("bad", [3, -1])
def test_category_out_of_range_is_named(model, bad):
    label = np.array([0, 1, 2, bad, 1, 0, 2])
    with pytest.raises(ModelStructureError, match=rf"'y': 1 value is outside the support.*{bad} at index \(3,\)"):
        VariationalGaussian(model).run(KEY, X, label)


@pytest.mark.parametrize("model", [softmax, sticks])
def test_categories_counted_from_one_are_told_so(model):
    label = np.array([1, 2, 3, 1, 2, 1, 3])
    with pytest.raises(ModelStructureError, match=r"the first is 3 at index \(2,\).*from zero, obs=y - 1"):
        VariationalGaussian(model).run(KEY, X, label)


@pytest.mark.parametrize("distribution", [dist.OrderedLogistic, OrderedProbit])
@pytest.mark.parametrize("thresholds", [[0.5, -0.5], [0.5, 0.5]], ids=["crossed", "equal"])
@pytest.mark.parametrize("label", [[0, 1, 2, 1, 1, 0, 2], [0, 0, 2, 0, 0, 0, 2]], ids=["between", "none between"])
def test_thresholds_that_do_not_increase_are_named(distribution, thresholds, label):
    """Also where no label falls between them, and the density is finite."""

    def model(X, label):
        weights = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", distribution(X @ weights, jnp.array(thresholds)), obs=label)

    with pytest.raises(ModelStructureError, match="'y': the cutpoints of Ordered.* must increase strictly"):
        VariationalGaussian(model).run(KEY, X, np.array(label))


def test_one_category_only_is_an_ordinary_posterior():
    engine = VariationalGaussian(softmax, bound="bohning", progress_bar=False)
    engine.run(KEY, X, np.zeros(7, int))
    assert engine.diagnostics.converged and np.all(np.isfinite(engine.posterior["W"].mean))


def test_rows_with_nothing_observed_keep_their_prior():
    mask = np.ones(TABLE.shape, bool)
    mask[3] = False
    model = partial(factor_analysis, num_factors=2, kinds="binary", loading_scale=1.0)
    hyper = {"loadings": np.full((4, 2), 0.7), "intercept": np.zeros(4)}
    engine = VariationalGaussian(model, bound="jaakkola", field=["factors"], hyper_values=hyper, progress_bar=False)
    engine.run(KEY, TABLE, mask)
    np.testing.assert_allclose(engine.posterior["factors"].mean[3], 0.0, atol=1e-12)
    np.testing.assert_allclose(engine.posterior["factors"].variance[3], 1.0, rtol=1e-12)


def test_constant_columns_run_away_and_this_is_reported():
    table = TABLE.copy()
    table[:, 1] = 1
    model = partial(factor_analysis, num_factors=1, kinds="binary")
    engine = VariationalGaussian(model, bound="jaakkola", progress_bar=False)
    with pytest.warns(UserWarning, match=r"'intercept' \(element 1\) would grow for ever"):
        engine.run(KEY, table)
    assert not engine.diagnostics.hyper.converged and float(engine.hyper["intercept"].value[1]) > 3.0


def test_separated_classes_under_a_flat_prior_say_that_the_prior_is_flat():
    def model(x, y):
        slope = numpyro.sample("slope", dist.ImproperUniform(dist.constraints.real, (), ()))
        numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)

    x = jnp.linspace(-1.0, 1.0, 8)
    with pytest.warns(UserWarning, match="prior of 'slope' is flat.*run away"):
        VariationalGaussian(model, num_steps=30, progress_bar=False).run(KEY, x, (x > 0).astype(int))
