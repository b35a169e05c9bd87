"""Predictive scores, choice of a dimension and rotations against formulas, reference numbers and known structure."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

from numpyro_ext.infer import LaplaceApproximation, LatentGaussianRows, variational_em
from numpyro_ext.models import item_response
from numpyro_ext.potentials import GaussianPotential
from numpyro_ext.psychometrics import (
    bic,
    canonical_correlations,
    chance_levels,
    exponentiated_log_likelihood,
    fraction_correct,
    rotate,
    smallest_sufficient_dimension,
)

REFERENCE = json.loads((Path(__file__).parents[1] / "reference" / "hm_gfa_em.json").read_text())


def test_bic_is_that_of_the_reference_by_either_count():
    table = np.array(REFERENCE["Y"], float)
    found = {count: bic(REFERENCE["loglik_trace_51"][-1], *table.shape, 2, count) for count in ("thesis", "rotation")}
    np.testing.assert_allclose(found["thesis"], REFERENCE["bic_k_thesis_value"], rtol=1e-12)
    more = REFERENCE["bic_k_rotation"] - REFERENCE["bic_k_thesis"]
    np.testing.assert_allclose(found["rotation"] - found["thesis"], more * np.log(len(table)), rtol=1e-12)
    assert bic(0.0, 10, 6, 2, free_means=True) - bic(0.0, 10, 6, 2) == pytest.approx(6 * np.log(10))


@pytest.mark.thorough
def test_normal_items_have_the_log_likelihood_of_factor_analysis():
    # The reference has column means removed, so intercepts are zero.
    table = np.array(REFERENCE["Y"], float) - np.array(REFERENCE["column_means"])
    values = {"discrimination": jnp.asarray(REFERENCE["A_final"]), "intercept": jnp.zeros(table.shape[1]),
              "noise": jnp.sqrt(jnp.asarray(REFERENCE["sigma2_final"]))}  # fmt: skip
    engine = LaplaceApproximation(item_response, hyper_values=values, progress_bar=False)
    engine.run(random.key(0), table, family="gaussian", num_traits=2, signed=True)
    np.testing.assert_allclose(engine.log_evidence, REFERENCE["loglik_trace_51"][-1], rtol=1e-8)


@pytest.mark.thorough
def test_factor_analysis_by_em_has_the_trace_of_the_reference():
    table = np.array(REFERENCE["Y"], float) - np.array(REFERENCE["column_means"])
    known, start = np.isfinite(table), np.array(REFERENCE["A_init"])
    noise = jnp.sqrt(jnp.asarray(REFERENCE["sigma2_init"]))
    potential = GaussianPotential(jnp.asarray(np.where(known, table, 0.0)), noise)
    rows = LatentGaussianRows(
        mean=jnp.zeros(2), covariance=jnp.eye(2), loadings=jnp.asarray(start), intercept=jnp.zeros(len(noise)),
        potentials=(potential,), observed=(jnp.asarray(known),), weights=jnp.ones(len(table)),
    )  # fmt: skip
    found = variational_em(rows, learn=("loadings", "noise"), num_steps=50, tol=0.0, progress_bar=False)
    # After each E-step the bound is the log likelihood itself.
    np.testing.assert_allclose(found.objective_trace[::2], REFERENCE["loglik_trace_51"], rtol=1e-8)
    np.testing.assert_allclose(found.rows.loadings, REFERENCE["A_final"], atol=1e-8)
    np.testing.assert_allclose(found.rows.potentials[0].scale ** 2, REFERENCE["sigma2_final"], atol=1e-8)


def test_chance_levels_and_scores_leave_out_missing_answers():
    answers = np.array([[0, 2.0], [1, np.nan], [0, 2.0], [0, 0.0]])
    found = chance_levels(answers)
    p = np.array([4, 1, 2]) / 7
    items = [np.array([3, 1]) / 4, np.array([1, 2]) / 3]
    expected = [4 / 7, np.exp(np.sum(p * np.log(p))), np.mean([3 / 4, 2 / 3]),
                np.exp(np.mean([np.sum(q * np.log(q)) for q in items]))]  # fmt: skip
    np.testing.assert_allclose(found, expected)
    assert exponentiated_log_likelihood(np.log([[0.5, np.nan], [0.125, 0.25]])) == pytest.approx(0.25)
    assert fraction_correct(np.eye(3)[[0, 2, 1]], [0, 2, np.nan]) == 1.0
    for wrong in (lambda: exponentiated_log_likelihood([np.nan]), lambda: chance_levels(np.full((2, 2), np.nan))):
        with pytest.raises(ValueError, match=r"no log prob|no answer"):
            wrong()


def test_smallest_sufficient_dimension_is_that_of_the_t_tests():
    rng = np.random.default_rng(0)
    scores = np.array([0.3, 0.38, 0.4, 0.405, 0.39]) + 0.01 * rng.normal(size=(5, 5)) + rng.normal(size=(5, 1))
    dimensions = [1, 2, 5, 10, 20]
    best = scores.mean(0).argmax()
    p = [stats.ttest_1samp(scores[:, k] - scores[:, best], 0).pvalue if k != best else 1.0 for k in range(5)]
    expected = min(d for d, value in zip(dimensions, p, strict=True) if value >= 0.05)
    assert expected not in (1, dimensions[best])  # a case that asks something
    assert smallest_sufficient_dimension(dimensions, scores) == expected
    # Without pairs the spread between repeats hides all differences.
    assert smallest_sufficient_dimension(dimensions, scores, paired=False) == 1
    with pytest.raises(ValueError, match="two repeats or more"):
        smallest_sufficient_dimension(dimensions, scores[:1])


SIMPLE = np.array([[1.0, 0, 0], [0.9, 0, 0], [0.8, 0, 0], [0, 0.8, 0], [0, 0.7, 0], [0, 0, 0.6], [0, 0, 0.5]])


def test_rotations_find_simple_structure_and_the_correlation_of_traits():
    rng = np.random.default_rng(1)
    orthogonal = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    found = rotate(SIMPLE @ orthogonal, "varimax")
    np.testing.assert_allclose(found.loadings, SIMPLE, atol=1e-6)
    np.testing.assert_allclose(found.correlation, np.eye(3), atol=1e-12)
    assert found.converged
    correlation = np.array([[1, 0.4, 0.2], [0.4, 1, -0.3], [0.2, -0.3, 1]])
    mixed = SIMPLE @ np.linalg.cholesky(correlation) @ orthogonal
    found = rotate(mixed, "oblimin")
    np.testing.assert_allclose(found.loadings, SIMPLE, atol=1e-5)
    np.testing.assert_allclose(found.correlation, correlation, atol=1e-5)
    # Predictors stay: (x T) (L')^T = x A^T.
    x = rng.normal(size=(4, 3))
    np.testing.assert_allclose(x @ found.matrix @ found.loadings.T, x @ mixed.T, rtol=1e-10)
    partial = np.where(SIMPLE == 0, 0.0, np.nan)
    np.testing.assert_allclose(np.abs(rotate(mixed, partial).loadings), SIMPLE, atol=1e-5)


def test_an_orthogonal_target_is_reached_as_by_procrustes():
    rng = np.random.default_rng(2)
    loadings, target = rng.normal(size=(8, 3)), rng.normal(size=(8, 3))
    u, _, v = np.linalg.svd(loadings.T @ target)
    np.testing.assert_allclose(rotate(loadings, target, oblique=False).loadings, loadings @ u @ v, atol=1e-5)


def test_varimax_is_a_maximum_of_its_criterion():
    rng = np.random.default_rng(3)
    loadings = rng.normal(size=(10, 2))
    angles = np.linspace(0, np.pi / 2, 2001)
    turned = [loadings @ np.array([[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]]) for t in angles]
    best = max(np.sum(np.var(t**2, 0)) for t in turned)
    np.testing.assert_allclose(np.sum(np.var(rotate(loadings).loadings ** 2, 0)), best, rtol=1e-5)


def test_canonical_correlations_are_those_of_the_eigenvalue_problem():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(60, 3))
    y = x @ rng.normal(size=(3, 2)) + rng.normal(size=(60, 2)) + 3.0
    joint = np.cov(x.T, y.T)
    sxx, sxy, syy = joint[:3, :3], joint[:3, 3:], joint[3:, 3:]
    values = np.linalg.eigvals(np.linalg.solve(syy, sxy.T) @ np.linalg.solve(sxx, sxy))
    found = canonical_correlations(x, y, num_permutations=200)
    np.testing.assert_allclose(found.correlations, np.sort(np.sqrt(values.real))[::-1], rtol=1e-10)
    assert found.permuted.shape == (200, 2) and found.permuted[:, 0].max() < found.correlations[0]
    # The mean squared correlation of two random spaces is p q / (n - 1) shared by min(p, q) directions.
    np.testing.assert_allclose(np.sum(found.permuted**2, 1).mean(), 3 * 2 / 59, rtol=0.15)
    with pytest.raises(ValueError, match="constant"):
        canonical_correlations(np.ones((5, 1)), x[:5])


def test_rotations_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="'promax'"):
        rotate(SIMPLE, "promax")
    with pytest.raises(ValueError, match="A target must be"):
        rotate(SIMPLE, SIMPLE[:, :2])
    with pytest.raises(ValueError, match="no more traits"):
        rotate(SIMPLE.T)
