"""One piece of a model at a time: what the reader makes of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density

from numpyro_ext.distributions import RectifiedLinearPoisson, SoftplusPoisson
from numpyro_ext.linalg.gaussian.design import SparseRows
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior, FlatPrior, LowRankPrior, PrecisionPrior
from numpyro_ext.potentials.elementwise import TemperedPotential
from numpyro_ext.structure import read_latent_gaussian
from tests.tiers import few

N, P = 6, 2
rng = np.random.default_rng(3)
X = rng.normal(size=(N, P))
COUNTS = np.array([0, 2, 1, 4, 0, 3])
BINARY = np.array([0, 1, 1, 0, 1, 0])
REAL = rng.normal(size=N)


def _field() -> Any:
    return X @ numpyro.sample("b", dist.Normal(0.3, 1.0).expand([P]).to_event(1))


def _assert_same_density(reading: Any) -> None:
    """Against NumPyro's own log_density at values that the reading itself produces, outside of its own check."""
    hyper = reading.initial_hyper()
    form = reading.form(hyper)
    e = 0.3 * jax.random.normal(jax.random.key(5), (form.num_columns,))
    values = reading.values(hyper, e)
    latents = {n: values.get(n, hyper.get(n)) for n in (*reading.field, *reading.hyper)}
    seeded = handlers.seed(reading.model, jax.random.key(0))
    expected, _ = log_density(seeded, reading.args, reading.kwargs, latents)
    actual = form.log_density(e) + reading.log_prior(hyper)
    np.testing.assert_allclose(actual, expected, rtol=1e-11)


RECOGNISED = {
    "rectified by name": (lambda f: RectifiedLinearPoisson(f, 2.0, 3.0), COUNTS, "RectifiedLinearPoissonPotential"),
    "rectified by maximum": (
        lambda f: dist.Poisson(2.0 * jnp.maximum(f + 3.0, 0.0)),
        COUNTS,
        "RectifiedLinearPoissonPotential",
    ),
    "rectified by relu": (lambda f: dist.Poisson(jax.nn.relu(f + 3.0)), COUNTS, "RectifiedLinearPoissonPotential"),
    "rectified by clip": (lambda f: dist.Poisson(jnp.clip(f + 3.0, 0.0)), COUNTS, "RectifiedLinearPoissonPotential"),
    "rectified by where": (
        lambda f: dist.Poisson(jnp.where(f + 3.0 > 0.0, f + 3.0, 0.0)),
        COUNTS,
        "RectifiedLinearPoissonPotential",
    ),
    "softplus by name": (lambda f: SoftplusPoisson(f, 2.0, 0.1), COUNTS, "PoissonSoftplusPotential"),
    "softplus": (lambda f: dist.Poisson(2.0 * jax.nn.softplus(f)), COUNTS, "PoissonSoftplusPotential"),
    "softplus by log1p": (lambda f: dist.Poisson(jnp.log1p(jnp.exp(f))), COUNTS, "PoissonSoftplusPotential"),
    "exp": (lambda f: dist.Poisson(jnp.exp(f)), COUNTS, "PoissonExpPotential"),
    "exp with log exposure": (lambda f: dist.Poisson(jnp.exp(f + jnp.log(3.0))), COUNTS, "PoissonExpPotential"),
    "exp of minus": (lambda f: dist.Poisson(4.0 / jnp.exp(f)), COUNTS, "PoissonExpPotential"),
    "logits": (lambda f: dist.Bernoulli(logits=f), BINARY, "LogitPotential"),
    "sigmoid": (lambda f: dist.Bernoulli(jax.nn.sigmoid(f)), BINARY, "LogitPotential"),
    "one minus sigmoid": (lambda f: dist.Bernoulli(1.0 - jax.scipy.special.expit(f)), BINARY, "LogitPotential"),
    "probit": (lambda f: dist.Bernoulli(jax.scipy.special.ndtr(f)), BINARY, "ProbitPotential"),
    "probit by Normal.cdf": (lambda f: dist.Bernoulli(dist.Normal(0.0, 1.0).cdf(f)), BINARY, "ProbitPotential"),
    "complementary log-log": (
        lambda f: dist.Bernoulli(1.0 - jnp.exp(-jnp.exp(f))),
        BINARY,
        "ComplementaryLogLogPotential",
    ),
    "log-log": (lambda f: dist.Bernoulli(jnp.exp(-jnp.exp(-f))), BINARY, "ComplementaryLogLogPotential"),
    "binomial": (lambda f: dist.Binomial(9, logits=f), COUNTS, "BinomialLogitPotential"),
    "binomial of sigmoid": (lambda f: dist.Binomial(9, probs=jax.nn.sigmoid(f)), COUNTS, "BinomialLogitPotential"),
    "negative binomial": (lambda f: dist.NegativeBinomial2(jnp.exp(f), 3.0), COUNTS, "NegativeBinomialExpPotential"),
    "negative binomial logits": (lambda f: dist.NegativeBinomialLogits(3.0, f), COUNTS, "NegativeBinomialExpPotential"),
    "normal": (lambda f: dist.Normal(2.0 * f + 1.0, 0.5), REAL, "GaussianPotential"),
    "student t": (lambda f: dist.StudentT(4.0, f, 0.5), REAL, "StudentTPotential"),
    "log normal": (lambda f: dist.LogNormal(f, 0.5), REAL**2, "LogNormalPotential"),
    "laplace": (lambda f: dist.Laplace(f, 0.5), REAL, "LaplacePotential"),
    "scale of a normal": (lambda f: dist.Normal(0.0, jnp.exp(f)), REAL, "ElementwisePotential"),
    "floored rate": (lambda f: dist.Poisson(jnp.maximum(f, 0.0) + 0.01), COUNTS, "ElementwisePotential"),
    "rate that is almost exponential": (lambda f: dist.Poisson(jnp.exp(f) + 1e-3), COUNTS, "ElementwisePotential"),
    "gamma": (lambda f: dist.Gamma(2.0, jnp.exp(f)), REAL**2, "GammaExpPotential"),
    "gamma by its mean": (lambda f: dist.Gamma(2.5, 2.5 / jnp.exp(f)), REAL**2, "GammaExpPotential"),
    "exponential": (lambda f: dist.Exponential(3.0 * jnp.exp(-f)), REAL**2, "GammaExpPotential"),
    "weibull": (lambda f: dist.Weibull(jnp.exp(f), 1.7), REAL**2, "WeibullExpPotential"),
    "inverse gamma": (lambda f: dist.InverseGamma(2.0, jnp.exp(f)), REAL**2, "ElementwisePotential"),
}


@pytest.mark.parametrize("name", few(RECOGNISED, 9))
def test_recognised_potential(name: str) -> None:
    make, data, expected = RECOGNISED[name]

    def model() -> None:
        numpyro.sample("y", make(_field()), obs=data)

    reading = read_latent_gaussian(model)
    form = reading.form({})
    assert type(form.potentials[0]).__name__ == expected
    assert form.observed[0].shape == (N,)
    _assert_same_density(reading)


PRIORS = {
    "normal": (lambda: dist.Normal(0.1, 1.0).expand([N]), DiagonalPrior),
    "covariance": (lambda: dist.MultivariateNormal(0.1, jnp.eye(N) + 0.2), CovariancePrior),
    "precision": (lambda: dist.MultivariateNormal(jnp.ones(N), precision_matrix=jnp.eye(N) + 0.2), PrecisionPrior),
    "scale_tril": (lambda: dist.MultivariateNormal(0.1, scale_tril=jnp.tril(jnp.eye(N) + 0.2)), CovariancePrior),
    "low rank": (lambda: dist.LowRankMultivariateNormal(jnp.ones(N), jnp.ones((N, 1)), jnp.ones(N)), LowRankPrior),
    "random walk": (lambda: dist.GaussianRandomWalk(0.7, N), DiagonalPrior),
    "flat": (lambda: dist.ImproperUniform(dist.constraints.real, (), (N,)), FlatPrior),
    "flat in a batch": (lambda: dist.ImproperUniform(dist.constraints.real, (N,), ()), FlatPrior),
    "autoregressive field": (
        lambda: dist.CAR(0.0, 0.4, 2.0, np.eye(N, k=1) + np.eye(N, k=-1)),
        PrecisionPrior,
    ),
}


@pytest.mark.parametrize("name", few(PRIORS, 4))
def test_priors_keep_their_parameterisation(name: str) -> None:
    make, expected = PRIORS[name]

    def model() -> None:
        numpyro.sample("y", dist.Poisson(jnp.exp(numpyro.sample("f", make()))), obs=COUNTS)

    reading = read_latent_gaussian(model)
    assert type(reading.form({}).prior[0]) is expected
    _assert_same_density(reading)


def test_masks_and_missing_data() -> None:
    mask = np.array([True, True, False, True, False, True])

    def model(y: Any) -> None:
        f = _field()
        with handlers.mask(mask=mask):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    reading = read_latent_gaussian(model, (np.where(mask, COUNTS, np.nan),))
    np.testing.assert_array_equal(reading.form({}).observed[0], mask)
    _assert_same_density(reading)


def test_obs_mask_leaves_the_unobserved_part_out() -> None:
    mask = np.array([True, True, False, True, False, True])

    def model() -> None:
        numpyro.sample("y", dist.Normal(_field(), 1.0), obs=REAL, obs_mask=mask)

    reading = read_latent_gaussian(model)
    assert reading.predictive == ("y_unobserved",)
    assert reading.factor_names == ("y_observed",)
    np.testing.assert_array_equal(reading.form({}).observed[0], mask)


def test_scale_weights_the_factor() -> None:
    def model() -> None:
        f = _field()
        with handlers.scale(scale=2.5):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=COUNTS)

    reading = read_latent_gaussian(model)
    assert type(reading.form({}).potentials[0]) is TemperedPotential
    _assert_same_density(reading)


def test_factor_statements_that_sum_by_themselves() -> None:
    def model() -> None:
        f = _field()
        numpyro.factor("likelihood", jnp.sum(COUNTS * f) - jnp.sum(jnp.exp(f)) - 3.0)
        numpyro.factor("penalty", -0.5 * (f**4).sum() / 2.0)

    reading = read_latent_gaussian(model)
    assert reading.factor_names == ("likelihood", "penalty")
    _assert_same_density(reading)


def test_several_sites_share_the_field() -> None:
    def model() -> None:
        f = _field()
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=COUNTS)
        numpyro.sample("z", dist.Bernoulli(logits=2.0 * f - 1.0), obs=BINARY)

    reading = read_latent_gaussian(model)
    form = reading.form({})
    assert (form.num_rows, form.num_columns) == (2 * N, P)
    _assert_same_density(reading)


def test_deterministic_sites() -> None:
    def model() -> None:
        f = numpyro.deterministic("f", _field())
        numpyro.deterministic("rate", jnp.exp(f))
        numpyro.deterministic("difference", f[1:] - f[:-1])
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=COUNTS)

    reading = read_latent_gaussian(model)
    assert reading.affine_sites == ("b", "f", "difference")
    e = jax.random.normal(jax.random.key(0), (P,))
    values, maps = reading.values({}, e), reading.maps({})
    np.testing.assert_allclose(values["rate"], np.exp(X @ (0.3 + e)), rtol=1e-12)
    for name in reading.affine_sites:
        mapped = maps[name].design.matvec(e) + maps[name].offset
        np.testing.assert_allclose(mapped.reshape(reading.site_shapes[name]), values[name], rtol=1e-12)


@pytest.mark.thorough
def test_condition_do_and_reparam_around_the_model() -> None:
    def model() -> None:
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        b = numpyro.sample("b", dist.Normal(a, tau).expand([P]).to_event(1))
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=REAL)

    conditioned = read_latent_gaussian(handlers.condition(model, {"tau": jnp.array(0.5)}))
    assert (conditioned.field, tuple(conditioned.hyper)) == (("a", "b"), ())
    done = read_latent_gaussian(handlers.do(model, {"a": jnp.array(0.5)}))
    # an intervention leaves the site in the model, with its prior, and cuts what follows from it
    assert (done.field, tuple(done.hyper)) == (("a", "b"), ("tau",))
    np.testing.assert_array_equal(done.maps({"tau": 1.0})["b"].design.to_dense()[:, 0], 0.0)
    reparam = handlers.reparam(model, config={"b": numpyro.infer.reparam.LocScaleReparam(0.0)})
    reading = read_latent_gaussian(reparam)
    assert (reading.field, tuple(reading.hyper)) == (("a", "b_decentered"), ("tau",))
    assert "b" in reading.affine_sites
    _assert_same_density(reading)


def test_param_sites_are_hyperparameters_without_prior() -> None:
    def model() -> None:
        sigma = numpyro.param("sigma", 0.7, constraint=dist.constraints.positive)
        numpyro.sample("y", dist.Normal(_field(), sigma), obs=REAL)

    reading = read_latent_gaussian(model)
    assert reading.hyper["sigma"].is_param
    assert float(reading.log_prior(reading.initial_hyper())) == 0.0


def test_tie_between_location_and_log_scale_prefers_the_closed_form() -> None:
    def model() -> None:
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        log_sigma = numpyro.sample("log_sigma", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu, jnp.exp(log_sigma)), obs=REAL)

    assert read_latent_gaussian(model).field == ("mu",)
    assert read_latent_gaussian(model, field=["log_sigma"]).field == ("log_sigma",)


def test_seeds_inside_the_model_and_random_features() -> None:
    def model() -> None:
        features = jax.random.normal(numpyro.prng_key(), (P, 3))
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(X @ features @ w, 1.0), obs=REAL)

    _assert_same_density(read_latent_gaussian(model))


def test_design_does_not_depend_on_how_the_predictor_is_written() -> None:
    def twice() -> None:
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([P]).to_event(1))
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=REAL)
        numpyro.sample("z", dist.Poisson(jnp.exp(jnp.stack([row @ b for row in X]))), obs=COUNTS)

    form = read_latent_gaussian(twice).form({})
    matrix = form.design.to_dense()
    np.testing.assert_allclose(matrix[:N], X, rtol=1e-14)
    np.testing.assert_allclose(matrix[N:], X, rtol=1e-14)


@pytest.mark.parametrize("side", ["left", "right"])
def test_zeros_of_known_designs_give_sparse_rows(side: str) -> None:
    """One column per group, and two groups that share their rows: as if the effects had been gathered."""
    rows, groups = 60, 40
    member = np.zeros((rows, groups))
    member[np.arange(rows), np.arange(rows) % groups] = 0.7
    member[np.arange(rows), (7 * np.arange(rows) + 3) % groups] += 0.2
    member[5] = 0.0

    def model() -> None:
        with numpyro.plate("groups", groups):
            u = numpyro.sample("u", dist.Normal(0.0, 1.0))
        eta = member @ u if side == "left" else (u[None] @ member.T)[0]
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=np.ones(rows, int))

    design = read_latent_gaussian(model).form({}).design
    assert isinstance(design, SparseRows)
    assert design.columns.shape[1] <= 2
    np.testing.assert_allclose(design.to_dense(), member, atol=1e-14)


def test_form_is_differentiable_and_batched_over_hyperparameters_and_data() -> None:
    def model(y: Any) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        b = numpyro.sample("b", dist.Normal(0.0, scale).expand([P]).to_event(1))
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ b)), obs=y)

    first, second = read_latent_gaussian(model, (COUNTS,)), read_latent_gaussian(model, (COUNTS[::-1].copy(),))
    assert first.structure == second.structure
    e = jnp.array([0.2, -0.4])

    def value(scale: Any, data: Any) -> Any:
        return first.form({"scale": scale}, data).log_density(e)

    stacked = jax.tree.map(lambda *a: jnp.stack(a), first.data, second.data)
    both = jax.jit(jax.vmap(value, in_axes=(None, 0)))(0.7, stacked)
    single = [r.form({"scale": 0.7}).log_density(e) for r in (first, second)]
    np.testing.assert_allclose(both, single, rtol=1e-12)
    step = 1e-6
    slope = (value(0.7 + step, first.data) - value(0.7 - step, first.data)) / (2 * step)
    np.testing.assert_allclose(jax.grad(value)(0.7, first.data), slope, rtol=1e-7)


def test_structure_tells_different_models_apart() -> None:
    def make(weight: float) -> Any:
        def model() -> None:
            numpyro.sample("y", dist.Normal(weight * _field(), 1.0), obs=REAL)

        return model

    assert read_latent_gaussian(make(1.5)).structure != read_latent_gaussian(make(2.5)).structure


def test_covariance_and_precision_of_equal_shape_in_one_process() -> None:
    """The check compares with NumPyro, and shares its program between readings of equal structure."""

    def make(prior: Any) -> Any:
        def model() -> None:
            numpyro.sample("y", dist.Normal(numpyro.sample("f", prior), 1.0), obs=REAL)

        return model

    # Made outside of the model, so that the factorisation, in which they differ, is no part of its program.
    matrix = 2.0 * np.eye(N)
    covariance = read_latent_gaussian(make(dist.MultivariateNormal(0.0, matrix)))
    precision = read_latent_gaussian(make(dist.MultivariateNormal(0.0, precision_matrix=matrix)))
    assert covariance.structure != precision.structure
