"""Expectation propagation and variational Bayes together, against its reference trace, EP and quadrature."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpyro import handlers
from scipy.stats import norm

from numpyro_ext.infer import EP, BilinearEP, BilinearVG
from numpyro_ext.infer.bilinear.algorithms import hybrid
from numpyro_ext.models import preference_factorization
from numpyro_ext.potentials import ProbitPotential
from numpyro_ext.structure import ModelStructureError
from numpyro_ext.structure.bilinear import Bilinear
from numpyro_ext.structure.bilinear.form import CoupledSide

REFERENCE = json.loads((Path(__file__).parents[2] / "reference" / "hm_cp_epvb_small.json").read_text())
RNG = np.random.default_rng(0)
USER, FIRST = np.repeat(np.arange(6), 6), RNG.integers(4, size=36)
SECOND = (FIRST + RNG.integers(1, 4, size=36)) % 4
WON = (RNG.normal(size=(6, 4))[USER, FIRST] > 0).astype(int)
KERNEL = np.exp(-0.5 * np.subtract.outer(np.arange(4.0), np.arange(4.0)) ** 2) + 0.1 * np.eye(4)
GIVEN = {"num_users": 6, "kernel": KERNEL, "rank": 2}


def squared_exponential(x, length):
    return np.exp(-0.5 * np.sum((x[:, None] - x) ** 2, -1) / length**2)


def test_iterations_follow_the_reference_trace():
    """In the space of pairs, with the damping that shrinks by a twentieth, as it was computed there."""
    items, pairs, features = (np.array(REFERENCE[name]) for name in ("items", "pairs", "user_features"))
    pick = np.eye(len(items))[pairs[:, 0]] - np.eye(len(items))[pairs[:, 1]]
    kernels = [
        squared_exponential(features, 1.5) + 1e-5 * np.eye(len(features)),
        pick @ squared_exponential(items, 1.0) @ pick.T + 1e-5 * np.eye(len(pairs)),
    ]
    size = REFERENCE["D"]

    def side(kernel):
        num = len(kernel)
        ones, root = jnp.ones((num, size)), jnp.asarray(np.linalg.cholesky(kernel))[None]
        return CoupledSide(0 * ones, ones, root, jnp.zeros(size, int), jnp.arange(num)[:, None], jnp.ones((num, 1)))

    user, pair = np.nonzero(np.array(REFERENCE["mask"]))
    num, none = user.size, jnp.zeros((1, 0))
    potential = ProbitPotential(jnp.asarray(1.0 * (np.array(REFERENCE["Y"])[user, pair] > 0)))
    cells = jnp.asarray(user), jnp.asarray(pair), jnp.ones((1, size)), none, none, jnp.zeros(num), potential
    form = Bilinear(*map(side, kernels), *cells, jnp.ones(num), jnp.zeros(()), jnp.arange(num), jnp.arange(num))
    starts = jnp.asarray(REFERENCE["vb_init"]["m_w"]), jnp.asarray(REFERENCE["vb_init"]["m_h"]).T
    state = hybrid.init(form, *(hybrid.Moments(mean, jnp.ones_like(mean)) for mean in starts))
    step = jax.jit(lambda state, damping: hybrid.step(form, state, damping))
    for number in range(1, 61):
        state, info = step(state, 0.5 * 0.95 ** (number - 1))
        expected = REFERENCE["snapshots"].get(str(number))
        if expected is None:
            continue
        np.testing.assert_allclose(info.log_evidence, expected["log_evidence"], rtol=1e-10)
        np.testing.assert_allclose(info.vb_bound, expected["vb_bound"], rtol=1e-10)
        own = np.divide(*(a + b for a, b in zip(state.factor, state.product, strict=True)))
        np.testing.assert_allclose(own, np.array(expected["g_mean"], float)[user, pair], atol=1e-10)
        mean, variance = hybrid.predictive_moments(form, state)
        wins = norm.cdf(mean / np.sqrt(1 + variance))
        np.testing.assert_allclose(wins, np.array(expected["p_pos"], float)[user, pair], atol=1e-10)


def process(likelihood, y):
    h = numpyro.sample("h", dist.MultivariateNormal(0.0, KERNEL))
    numpyro.sample("y", likelihood(h[FIRST] - h[SECOND]), obs=y)


def product(likelihood, y, sd=1e-4):
    """With one component of weights that are known the product is a Gaussian process."""
    with numpyro.plate("users", 6):
        w = numpyro.sample("w", dist.Normal(1.0, sd))
    h = numpyro.sample("h", dist.MultivariateNormal(0.0, KERNEL))
    numpyro.sample("y", likelihood(w[USER] * (h[FIRST] - h[SECOND])), obs=y)


def logit(f):
    return dist.Bernoulli(logits=f)


def student(f):
    return dist.StudentT(3.0, f, 0.5)


@pytest.mark.thorough
def test_with_known_weights_it_is_expectation_propagation():
    exact = EP(process, progress_bar=False, tol=1e-10)
    exact.run(jax.random.key(0), logit, WON)
    engine = BilinearEP(product, progress_bar=False, tol=1e-9)
    engine.run(jax.random.key(0), logit, WON)
    ours, theirs = engine.posterior["h"], exact.posterior["h"]
    np.testing.assert_allclose(ours.mean, theirs.mean, atol=2e-7)
    np.testing.assert_allclose(ours.covariance(), theirs.covariance(), atol=2e-7)
    np.testing.assert_allclose(float(engine.log_evidence), float(exact.log_evidence), atol=2e-7)


@pytest.mark.thorough
def test_factors_need_not_be_log_concave():
    """Against draws of the prior, weighted by the likelihood: four heights, of which three differences count."""
    y = RNG.standard_t(3, size=36)
    engine = BilinearEP(product, progress_bar=False)
    engine.run(jax.random.key(0), student, y)
    h = RNG.normal(size=(400_000, 4)) @ np.linalg.cholesky(KERNEL).T
    log_weight = scipy.stats.t.logpdf(y, 3.0, h[:, FIRST] - h[:, SECOND], 0.5).sum(1)
    weight = np.exp(log_weight - log_weight.max())
    mean = weight @ h / weight.sum()
    sd = np.sqrt(weight @ (h - mean) ** 2 / weight.sum())
    assert 1 / np.sum((weight / weight.sum()) ** 2) > 2000
    np.testing.assert_allclose(engine.posterior["h"].mean, mean, atol=0.1 * sd.min())
    np.testing.assert_allclose(engine.posterior["h"].sd, sd, rtol=0.1)
    with pytest.raises(ModelStructureError, match="BilinearEP for others of one predictor"):
        BilinearVG(product).run(jax.random.key(0), student, y)
    with pytest.raises(ValueError, match=r"log-concave and analytic, and that of this model \(\w+\) is not"):
        engine.fold_in(jax.random.key(1), student, y)


@pytest.mark.thorough
def test_weights_of_observations_are_powers():
    """Twice the weight is half the variance, of Gaussian noise."""

    def model(y, weight, variance):
        with numpyro.plate("users", 6):
            w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("items", 4):
            h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with handlers.scale(scale=weight):
            numpyro.sample("y", dist.Normal((w[USER] * h[FIRST]).sum(-1), np.sqrt(variance)), obs=y)

    y, fits = RNG.normal(size=36), []
    for weight, variance in ((2.0, 1.0), (1.0, 0.5)):
        fits.append(BilinearEP(model, progress_bar=False, num_samples=10))
        fits[-1].run(jax.random.key(0), y, weight, variance)
    for name in ("w", "h"):
        np.testing.assert_allclose(fits[0].posterior[name].mean, fits[1].posterior[name].mean, atol=1e-3)
        np.testing.assert_allclose(fits[0].posterior[name].sd, fits[1].posterior[name].sd, atol=1e-3)


@pytest.fixture(scope="module")
def fitted():
    engine = BilinearEP(preference_factorization, progress_bar=False, num_samples=50)
    engine.run(jax.random.key(0), USER, FIRST, SECOND, WON, **GIVEN)
    return engine


@pytest.mark.thorough
def test_answers_are_those_of_a_bilinear_engine(fitted, tmp_path):
    assert fitted.diagnostics.converged and not fitted.log_evidence.is_lower_bound
    wins = np.asarray(fitted.predictive_mean(USER, FIRST, SECOND, WON, **GIVEN)["won"])
    scores = fitted.log_predictive(USER, FIRST, SECOND, np.ones(36, int), **GIVEN)["won"]
    np.testing.assert_allclose(wins, np.exp(scores), atol=0.05)
    assert wins[WON == 1].mean() > 0.6 and wins[WON == 0].mean() < 0.4
    assert fitted.get_samples()["tastes"].shape == (50, 2, 4)
    new = fitted.fold_in(jax.random.key(1), USER[:12], FIRST[:12], SECOND[:12], WON[:12], **{**GIVEN, "num_users": 2})
    assert new.posterior["weights"].mean.shape == (2, 2) and new.log_evidence.is_lower_bound
    fitted.save(tmp_path / "fit.npz")
    loaded = BilinearEP.load(tmp_path / "fit.npz", preference_factorization)
    np.testing.assert_allclose(loaded.posterior["tastes"].mean, fitted.posterior["tastes"].mean, rtol=1e-12)


@pytest.mark.thorough
def test_a_run_goes_on_where_it_stopped(fitted):
    short = BilinearEP(preference_factorization, progress_bar=False, num_steps=10)
    with pytest.warns(UserWarning, match="BilinearEP did not converge. The largest change of the mean of a predictor"):
        short.run(jax.random.key(0), USER, FIRST, SECOND, WON, **GIVEN)
    again = BilinearEP(preference_factorization, progress_bar=False)
    again.run(jax.random.key(0), USER, FIRST, SECOND, WON, init_state=short.last_state, **GIVEN)
    assert again.diagnostics.num_steps == fitted.diagnostics.num_steps
    np.testing.assert_allclose(again.posterior["tastes"].mean, fitted.posterior["tastes"].mean, rtol=1e-8, atol=1e-10)


@pytest.mark.thorough
@pytest.mark.float32
def test_an_item_compared_with_itself_adds_a_constant():
    """Its predictor has no variance, and messages about it were no numbers."""
    second = np.where(np.arange(36) < 4, FIRST, SECOND)
    engine, others = (BilinearEP(preference_factorization, num_samples=10, progress_bar=False) for _ in range(2))
    with pytest.warns(UserWarning, match="4 of 36 comparisons are of an item with itself"):
        engine.run(jax.random.key(0), USER, FIRST, second, WON, **GIVEN)
    others.run(jax.random.key(0), USER[4:], FIRST[4:], SECOND[4:], WON[4:], **GIVEN)
    tol = 1e-7 if jax.config.jax_enable_x64 else 1e-3
    np.testing.assert_allclose(engine.log_evidence, others.log_evidence + 4 * np.log(0.5), rtol=tol)
    np.testing.assert_allclose(engine.posterior["tastes"].mean, others.posterior["tastes"].mean, atol=tol)


@pytest.mark.thorough
def test_what_it_cannot_treat_is_named():
    def learned(won):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("users", 6):
            w = numpyro.sample("w", dist.Normal(0.0, scale))
        h = numpyro.sample("h", dist.MultivariateNormal(0.0, KERNEL))
        numpyro.sample("won", dist.Bernoulli(logits=w[USER] * (h[FIRST] - h[SECOND])), obs=won)

    def correlated(won):
        with numpyro.plate("users", 6):
            w = numpyro.sample("w", dist.MultivariateNormal(np.zeros(2), np.array([[1.0, 0.5], [0.5, 1.0]])))
        with numpyro.plate("items", 4):
            h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("won", dist.Bernoulli(logits=(w[USER] * h[FIRST]).sum(-1)), obs=won)

    def matrix(won):
        with numpyro.plate("users", 6):
            w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("items", 4):
            h = numpyro.sample("h", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        between = np.array([[1.0, 0.5], [0.0, 1.0]])
        numpyro.sample("won", dist.Bernoulli(logits=((w[USER] @ between) * h[FIRST]).sum(-1)), obs=won)

    for model, message in (
        (learned, r"does not learn hyperparameters.*values of \['scale'\] \(hyper_values=\{'scale': ...\}\)"),
        (correlated, r"components of each vector of \['w'\] are correlated by the prior.*covariance='full'"),
        (matrix, r"products of single components.*\['w'\] with \['h'\] has a matrix between them"),
    ):
        with pytest.raises(ValueError, match=message):
            BilinearEP(model, progress_bar=False).run(jax.random.key(0), WON)
    with pytest.raises(ValueError, match="damping must be above 0 and at most 1; got 0"):
        BilinearEP(learned, damping=0)


@pytest.mark.thorough
def test_new_rows_of_counts_are_folded_in_and_a_product_of_nothing_is_refused():
    rows, columns = np.repeat(np.arange(5), 4), np.tile(np.arange(4), 5)
    counts = RNG.poisson(1.5, 20)

    def model(rank, rows, columns, y, size=5):
        a = numpyro.sample("a", dist.Normal(0, 1).expand([size, rank]).to_event(2))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([4, rank]).to_event(2))
        numpyro.sample("y", dist.Poisson(jnp.exp((a @ b.T)[rows, columns])), obs=y)

    for engine in (BilinearVG, BilinearEP):
        with pytest.raises(ModelStructureError, match=r"'a' has the shape \(5, 0\), so that the product has no comp"):
            engine(model).run(jax.random.key(0), 0, rows, columns, counts)
    engine = BilinearEP(model, progress_bar=False)
    engine.run(jax.random.key(0), 1, rows, columns, counts)
    folded = engine.fold_in(jax.random.key(1), 1, np.zeros(4, int), np.arange(4), counts[:4], size=1)
    old, new = engine.posterior["a"], folded.posterior["a"]
    assert folded.diagnostics.converged
    np.testing.assert_allclose(new.mean[0], old.mean[0], atol=0.2 * float(old.sd[0, 0]))
    np.testing.assert_allclose(new.sd[0], old.sd[0], rtol=0.15)
