"""Models mean the same whatever kind of numbers they are written with: 0 and 1, lists, NumPy and float32 arrays.

Each model takes a function through which all its real parameters go. What is read has the dtype of the reading
everywhere, and the density of the model written with floating numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from numpyro_ext.distributions import (
    AdjacentCategory,
    ContinuationRatio,
    HiddenMarkovTree,
    MultinomialProbit,
    OrderedProbit,
    RectifiedLinearPoisson,
    SoftplusPoisson,
    StickBreakingCategorical,
)
from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from numpyro_ext.infer.hyper.space import UnconstrainedSpace
from numpyro_ext.potentials.trees.forest import Forest
from numpyro_ext.structure import read_bilinear, read_latent_gaussian, read_sparse_linear
from tests.tiers import thorough

IS_DOUBLE = jax.config.jax_enable_x64
KEY = jax.random.key(0)
KINDS = {
    "python": lambda x: int(x) if np.ndim(x) == 0 else np.asarray(x, int),
    "numpy": lambda x: np.int32(x) if np.ndim(x) == 0 else np.asarray(x, np.int32),
    "jax": lambda x: jnp.asarray(x, int),
    "float32": lambda x: np.asarray(x, np.float32),
}
COVARIANCE = np.array([[2.0, 1.0], [1.0, 3.0]])
ADJACENCY = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]])
Y = np.array([0.3, -1.2])


def gaussian_priors(number):
    """All priors of a field."""
    sites = {
        "normal": dist.Normal(number(1), number(2)).expand([2]).to_event(1),
        "normals": dist.Normal(number([0, 1]), number([1, 3])).to_event(1),
        "covariance": dist.MultivariateNormal(number([0, 1]), covariance_matrix=number(COVARIANCE)),
        "precision": dist.MultivariateNormal(number([0, 1]), precision_matrix=number(COVARIANCE)),
        "cholesky": dist.MultivariateNormal(number(0), scale_tril=number(np.tril(COVARIANCE))),
        "low_rank": dist.LowRankMultivariateNormal(number([1, 0]), number([[1], [2]]), number([1, 2])),
        "walk": dist.GaussianRandomWalk(number(2), num_steps=2),
        "areas": dist.CAR(number(0), number(0), number(2), ADJACENCY),
        "flat": dist.ImproperUniform(dist.constraints.real, (), (2,)),
    }
    for name, fn in sites.items():
        site = numpyro.sample(name, fn)
        mean = number(1) * site[:2] + number(1)
        with handlers.mask(mask=np.array([True, name != "walk"])):
            numpyro.sample(f"{name}_seen", dist.Normal(mean, number(2)).to_event(0), obs=Y)


def hyperpriors(number):
    """Priors of hyperparameters, and initial values of ``param`` sites."""
    total = numpyro.param("free", number(1)) + numpyro.param(
        "positive", number([1, 2]), constraint=dist.constraints.positive
    )
    sites = {
        "normal": dist.Normal(number(0), number(1)),
        "uniform": dist.Uniform(number(0), number(3)),
        "gamma": dist.Gamma(number(2), number(1)),
        "inverse_gamma": dist.InverseGamma(number(1), number(1)),
        "half_normal": dist.HalfNormal(number(2)),
        "half_cauchy": dist.HalfCauchy(number(2)),
        "exponential": dist.Exponential(number(2)),
        "log_normal": dist.LogNormal(number(0), number(1)),
        "beta": dist.Beta(number(2), number(1)),
        "student_t": dist.StudentT(number(3), number(0), number(1)),
        "laplace": dist.Laplace(number(1), number(2)),
        "cauchy": dist.Cauchy(number(1), number(2)),
        "truncated": dist.TruncatedNormal(number(1), number(2), low=number(0)),
        "dirichlet": dist.Dirichlet(number([1, 2, 3])),
        "masked": dist.Normal(number(1), number(2)).mask(True),
    }
    for name, fn in sites.items():
        total = total + jnp.sum(numpyro.sample(name, fn) ** 2)
    f = numpyro.sample("f", dist.Normal(number(0), number(1)).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(f * jnp.exp(-total), number(1)), obs=np.arange(5).reshape(5, 1) + Y)


def likelihoods(number):
    """All likelihoods that have closed forms, and one that has none."""
    f = numpyro.sample("f", dist.Normal(number(0), number(1)).expand([2]).to_event(1))
    g = jnp.stack([f, 0 * f, -f], -1)
    total, label = number(3), np.array([0, 2])
    sites = {
        "normal": (dist.Normal(f, number(2)), Y),
        "offset": (dist.Normal(f, number([1, 2])), number([1, 2])),
        "student_t": (dist.StudentT(number(4), f, number(2)), Y),
        "laplace": (dist.Laplace(f, number(2)), Y),
        "multivariate": (dist.MultivariateNormal(f, number(COVARIANCE)), Y),
        "poisson": (dist.Poisson(number(2) * jnp.exp(f)), label),
        "bernoulli": (dist.Bernoulli(logits=f), np.array([True, False])),
        "probit": (dist.Bernoulli(probs=jax.scipy.stats.norm.cdf(f)), number([1, 0])),
        "binomial": (dist.Binomial(3, logits=f), label),
        "binomial_probs": (dist.Binomial(total, probs=jax.nn.sigmoid(f)), label),
        "negative_binomial": (dist.NegativeBinomial2(jnp.exp(f), number(3)), label),
        "rectified": (RectifiedLinearPoisson(f + number(2), exposure=number(2), offset=number(1)), label),
        "softplus": (SoftplusPoisson(f, exposure=number(2), offset=number(1)), label),
        "softmax": (dist.Categorical(logits=g), label),
        "sticks": (StickBreakingCategorical(g[..., :2]), label),
        "ordered": (dist.OrderedLogistic(f, number([-1, 1])), label),
        "ordered_probit": (OrderedProbit(f, number([-1, 1])), label),
        "continuation": (ContinuationRatio(f, number([-1, 1])), label),
        "adjacent": (AdjacentCategory(f, number([-1, 1]), number([0, 1, 3])), label),
        "gumbel": (dist.Gumbel(f, number(2)), Y),
    }
    for name, (fn, value) in sites.items():
        numpyro.sample(name, fn, obs=value)
    numpyro.sample("chosen", MultinomialProbit(g), obs=label)


def sparse(number):
    """Coefficients with sparse priors seen through a matrix."""
    s = numpyro.sample("s", dist.StudentT(number(3), number(1), number(2)).expand([2]).to_event(1))
    t = numpyro.sample("t", dist.StudentT(number([3, 4]), number(0), number([1, 2])).to_event(1))
    numpyro.sample("y", dist.Normal(number([[1, 2], [0, 1]]) @ (s + t), number(2)).to_event(1), obs=Y)


def forest(number):
    """Coefficients with states on a forest."""
    low, high = (dist.Normal(number(0), number(scale)) for scale in ([1, 2], [3, 5]))
    parents = Forest.from_parents(np.array([-1, 0]), np.array([0, 1]))
    prior = HiddenMarkovTree(parents, low, high, number([0, 0]), number([[1, 0], [0, 1]]))
    numpyro.sample("y", dist.Normal(numpyro.sample("s", prior), number(2)).to_event(1), obs=Y)


def bilinear(number):
    """Two blocks of factors, and an intercept that is a hyperparameter."""
    mean = numpyro.sample("mean", dist.Normal(number(0), number(1)))
    with numpyro.plate("rows", 3):
        w = numpyro.sample("w", dist.Normal(number(0), number(1)).expand([2]).to_event(1))
    with numpyro.plate("columns", 2):
        z = numpyro.sample("z", dist.MultivariateNormal(number(1), number(COVARIANCE)))
    numpyro.sample("y", dist.Poisson(number(2) * jnp.exp(mean + w @ z.T)), obs=np.arange(6).reshape(3, 2))


MODELS = {
    gaussian_priors: read_latent_gaussian,
    hyperpriors: read_latent_gaussian,
    likelihoods: read_latent_gaussian,
    sparse: read_sparse_linear,
    forest: read_sparse_linear,
    bilinear: read_bilinear,
}


@pytest.fixture(scope="module")
def as_floats():
    """Readings of the models written with floating numbers, made once."""
    return {model: read(model, (jnp.asarray,), check=False) for model, read in MODELS.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["python", "numpy", "jax", "float32"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_all_kinds_of_numbers_are_read_as_floating_ones(model, kind, as_floats):
    number = KINDS[kind]
    # the comparison with NumPyro's density compiles, so it is left to the kind that rounds
    found, expected = MODELS[model](model, (number,), check=kind == "float32"), as_floats[model]
    assert found.field == expected.field
    assert tuple(found.hyper) == tuple(expected.hyper)
    floating = jnp.result_type(float)
    for name, site in found.hyper.items():
        assert jnp.result_type(site.init) == floating, name
        np.testing.assert_allclose(site.init, expected.hyper[name].init, rtol=1e-12 if IS_DOUBLE else 1e-5)
    form = jax.eval_shape(found.form, found.initial_hyper(), found.data)._asdict()
    form.pop("operator", None)  # it holds the covariates themselves
    for path, leaf in jax.tree.leaves_with_path(form):
        assert leaf.dtype == floating or not jnp.issubdtype(leaf.dtype, jnp.inexact), path
    e = 0.3 + 0.1 * jnp.arange(found.num_columns)
    hyper = {n: site.transform(site.transform.inv(jnp.asarray(site.init)) + 0.1) for n, site in found.hyper.items()}
    densities = [jax.jit(reading.log_joint)(hyper, e, reading.data) for reading in (found, expected)]
    np.testing.assert_allclose(*densities, rtol=1e-12 if IS_DOUBLE else 1e-4)


RNG = np.random.default_rng(1)
TRUTH = RNG.normal(size=50)
MEASURED = TRUTH + 0.3 * RNG.normal(size=50)
RESPONSE = 1.5 * TRUTH + 0.5 * RNG.normal(size=50)


def errors_in_variables():
    b = numpyro.sample("b", dist.Normal(0, 1))
    s = numpyro.sample("s", dist.HalfNormal(1))
    with numpyro.plate("rows", 50):
        t = numpyro.sample("t", dist.Normal(0, 1))
        numpyro.sample("measured", dist.Normal(t, 0.3), obs=MEASURED)
        numpyro.sample("response", dist.Normal(b * t, s), obs=RESPONSE)


def log_evidence(b, s):
    """Of slope and noise in closed form: measurement and response are jointly Gaussian, row by row."""
    covariance = np.array([[1.09, b], [b, b**2 + s**2]])
    rows = np.stack([MEASURED, RESPONSE], -1)
    quadratic = np.einsum("ni,ij,nj->", rows, np.linalg.inv(covariance), rows)
    return -0.5 * (quadratic + 50 * np.linalg.slogdet(2 * np.pi * covariance)[1])


@pytest.mark.thorough
@pytest.mark.parametrize("engine_class", [EP, *thorough(LaplaceApproximation, VariationalGaussian)])
def test_a_slope_whose_prior_has_an_integer_location_is_learned(engine_class):
    engine = engine_class(errors_in_variables, integrate="none", init_values={"b": 0.7}, progress_bar=False)
    engine.run(KEY)
    b, s = (float(engine.hyper[name].value) for name in "bs")

    def objective(b, s):
        return log_evidence(b, s) - 0.5 * b**2 - 0.5 * s**2

    slopes = [objective(b + d, s + e) - objective(b - d, s - e) for d, e in ((1e-4, 0.0), (0.0, 1e-4))]
    np.testing.assert_allclose(np.asarray(slopes) / 2e-4, 0.0, atol=1e-3 if IS_DOUBLE else 0.5)
    np.testing.assert_allclose(engine.log_evidence, log_evidence(b, s), rtol=1e-8 if IS_DOUBLE else 1e-4)
    assert b > 1.0


def test_the_search_starts_at_a_given_value_that_is_no_integer():
    reading = read_latent_gaussian(errors_in_variables, check=False)
    space = UnconstrainedSpace(reading.hyper)
    np.testing.assert_allclose(space.unpack(space.initial({"b": 0.7}))["b"], 0.7, rtol=1e-6)
