"""FITC and the kernel of comparisons, against the formulas of Houlsby (2014) and the processes that they stand for."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.stats import norm

from numpyro_ext.infer import EP
from numpyro_ext.linalg.gaussian.conditioning import linear_gaussian
from numpyro_ext.linalg.gaussian.design import SparseRows
from numpyro_ext.linalg.gaussian.prior import LowRankPrior
from numpyro_ext.linalg.gaussian.spaces.border_space import Border
from numpyro_ext.linalg.inducing import fitc, pair_covariance
from tests.infer.gaussian.gaussian_forms import identity, one_block

REFERENCE = Path(__file__).parents[1] / "reference"
needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="compares in double precision")


def squared_exponential(a, b):
    return jnp.exp(-0.5 * (a[:, None] - b) ** 2)


@needs_float64
@pytest.mark.parametrize("space", ["border", "observation"])
def test_reference_values(space):
    """Posterior, evidence and predictions of pseudo-observations, computed by Woodbury's identity elsewhere."""
    reference = json.loads((REFERENCE / "hm_fitc.json").read_text())
    x = np.array([*reference["x"], *reference["x_star"]])
    factor, diagonal = fitc(squared_exponential, x, reference["pseudo"], jitter=reference["jitter_on_pseudo"])
    n, m = len(x), len(reference["pseudo"])
    num_observed = len(reference["x"])
    mean, variance = (np.array(reference[name]) for name in ("pseudo_obs_mean", "pseudo_obs_var"))
    border = Border(jnp.arange(n)[:, None], n + jnp.arange(m), jnp.zeros((num_observed, 1), int))
    design = SparseRows(jnp.arange(num_observed)[:, None], jnp.ones((num_observed, 1)), n)

    @jax.jit
    def answers(factor, diagonal):
        prior = (LowRankPrior(factor[None], diagonal[None]),)
        prepared = linear_gaussian(prior, design, *one_block(num_observed, n), border=border, space=space)
        posterior = prepared.condition(jnp.asarray(1 / variance), jnp.asarray(mean / variance))
        return posterior.unknowns(), posterior.map_variance(identity(n)), posterior.marginals().log_partition

    *moments, log_partition = answers(factor, diagonal)
    constant = -0.5 * np.sum(mean**2 / variance + np.log(2 * np.pi * variance))
    expected = (
        reference["post_mean"] + reference["pred_mean"],
        reference["post_var"] + reference["pred_var"],
        reference["log_normaliser"],
    )
    for a, b in zip((*moments, log_partition + constant), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7)


@needs_float64
def test_the_process_itself_where_inducing_values_determine_it():
    rng = np.random.default_rng(0)
    x = rng.normal(size=9)
    factor, diagonal = fitc(squared_exponential, x, x[:6], jitter=1e-12)
    covariance = np.asarray(factor @ factor.T + jnp.diag(diagonal))
    exact = np.asarray(squared_exponential(x, x))
    np.testing.assert_allclose(covariance[:6], exact[:6], atol=1e-8)  # at the inducing points, with all others
    np.testing.assert_allclose(np.diag(covariance), 1.0, atol=1e-8)
    # pairs that connect all items determine all others
    root = rng.normal(size=(5, 7))
    items = root @ root.T
    pairs = np.array([(i, j) for i in range(5) for j in range(5) if i != j])

    def kernel(a, b):
        return pair_covariance(items, a, b, jitter=0.0)

    exact = np.asarray(kernel(pairs, pairs))
    assert np.linalg.matrix_rank(exact) == 4
    for tree, is_exact in (([[0, 1], [1, 2], [3, 1], [4, 0]], True), ([[0, 1], [1, 2], [0, 2], [4, 0]], False)):
        factor, diagonal = fitc(kernel, pairs, tree, jitter=1e-12)
        error = np.abs(np.asarray(factor @ factor.T + jnp.diag(diagonal)) - exact).max()
        assert (error < 1e-9) == is_exact and (is_exact or error > 0.1)


def test_pairs():
    rng = np.random.default_rng(1)
    root = rng.normal(size=(4, 4))
    items = (root @ root.T).tolist()
    pairs, others = [[0, 1], [2, 3], [1, 0]], np.array([[1, 2], [0, 1]], np.int32)
    differences = np.eye(4)[np.array(pairs)[:, 0]] - np.eye(4)[np.array(pairs)[:, 1]]
    of_others = np.eye(4)[others[:, 0]] - np.eye(4)[others[:, 1]]
    tolerance = 1e-12 if jax.config.jax_enable_x64 else 1e-5
    np.testing.assert_allclose(pair_covariance(items, pairs, others), differences @ items @ of_others.T, atol=tolerance)
    exact = differences @ items @ differences.T
    for found in (pair_covariance(items, pairs, pairs, jitter=0.5), pair_covariance(items, pairs, jitter=0.5)):
        np.testing.assert_allclose(found, exact + 0.5 * np.eye(3), atol=tolerance)
    if jax.config.jax_enable_x64:
        reference = json.loads((REFERENCE / "hm_pref_gpc_ep.json").read_text())
        x = np.array(reference["items"]) / reference["lengthscale"]
        kernel = np.exp(-0.5 * np.sum((x[:, None] - x) ** 2, -1))
        np.testing.assert_allclose(
            pair_covariance(kernel, reference["pairs"], jitter=0.0), reference["K_pref"], atol=1e-12
        )
    for bad in ([[0.0, 1.0]], [0, 1], [[0, 1, 2]]):
        with pytest.raises(ValueError, match="whole numbers of shape"):
            pair_covariance(items, bad)


@pytest.mark.parametrize("pairs, found", [([[0, 3]], "0 to 3"), ([[0, 1], [-1, 2]], "-1 to 2")])
def test_pairs_of_items_that_there_are_not(pairs, found):
    """JAX would take the last item in the place of one that is out of range."""
    for given in ((pairs,), ([[0, 1]], pairs)):
        with pytest.raises(ValueError, match=rf"pairs must lie in 0, ..., 2, .* of 3 items; got values from {found}"):
            pair_covariance(jnp.eye(3), *given)


def test_points_and_kernels_that_do_not_fit():
    x = jnp.linspace(0.0, 1.0, 5)
    for points, inducing in ((x, x[:, None]), (x, x[:0]), (1.0, 1.0)):
        with pytest.raises(ValueError, match="points of one dimension"):
            fitc(squared_exponential, points, inducing)
    with pytest.raises(ValueError, match=r"kernel\(x, inducing\) has shape \(3, 5\)"):
        fitc(lambda a, b: squared_exponential(b, a), x, x[:3])
    # points in more dimensions, lists, and gradients in what the kernel depends on
    points = np.random.default_rng(0).normal(size=(6, 2))

    def evidence(length):
        def kernel(a, b):
            return jnp.exp(-0.5 * jnp.sum((a[:, None] - b) ** 2, -1) / length**2)

        factor, diagonal = fitc(kernel, points.tolist(), points[:3].tolist())
        return jnp.sum(factor**3) + jnp.sum(jnp.log(diagonal)[3:])

    assert np.isfinite(jax.grad(evidence)(0.7))


@pytest.mark.thorough
@needs_float64
def test_preferences_of_one_person():
    """Sites, moments and evidence of EP computed elsewhere: with the utilities as the field, and with the pairs."""
    reference = json.loads((REFERENCE / "hm_pref_gpc_ep.json").read_text())
    x = np.array(reference["items"]) / reference["lengthscale"]
    kernel = np.exp(-0.5 * np.sum((x[:, None] - x) ** 2, -1))
    pairs, won = np.array(reference["pairs"]), np.array(reference["y"]) > 0
    every = np.array(reference["all_pairs"])

    def by_items(won=None):
        f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(5), kernel))
        numpyro.deterministic("g", f[pairs[:, 0]] - f[pairs[:, 1]])
        numpyro.deterministic("every", f[every[:, 0]] - f[every[:, 1]])
        numpyro.sample("won", dist.Bernoulli(probs=norm.cdf(f[pairs[:, 0]] - f[pairs[:, 1]])), obs=won)

    def by_pairs(won=None):
        g = numpyro.sample("g", dist.MultivariateNormal(jnp.zeros(7), pair_covariance(kernel, pairs, jitter=1e-9)))
        numpyro.sample("won", dist.Bernoulli(probs=norm.cdf(g)), obs=won)

    def by_a_tree(won=None):
        factor, diagonal = fitc(partial(pair_covariance, kernel, jitter=0.0), pairs, pairs[:4], jitter=1e-9)
        g = numpyro.sample("g", dist.LowRankMultivariateNormal(jnp.zeros(7), factor, diagonal))
        numpyro.sample("won", dist.Bernoulli(probs=norm.cdf(g)), obs=won)

    expected = reference["ep"]
    for model in (by_items, by_pairs, by_a_tree):
        engine = EP(model, integrate="none", progress_bar=False, tol=1e-10)
        engine.run(jax.random.key(0), won)
        g = engine.posterior["g"]
        found = engine.log_evidence, g.mean, g.variance
        for a, b in zip(found, (expected["logZ"], expected["g_mean"], expected["g_var"]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7, err_msg=model.__name__)
        if model is by_items:
            f, difference = engine.posterior["f"], engine.posterior["every"]
            np.testing.assert_allclose(f.mean, reference["f_mean"], rtol=1e-6)
            np.testing.assert_allclose(f.covariance(), reference["f_cov"], rtol=1e-6, atol=1e-7)
            probability = norm.cdf(difference.mean / np.sqrt(1.0 + np.asarray(difference.variance)))
            np.testing.assert_allclose(probability, reference["p_first_preferred"], rtol=1e-6)
