"""Conditioning fields of low rank in the space of their inducing values, against their covariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.linalg.gaussian.conditioning import kl_divergence, linear_gaussian
from numpyro_ext.linalg.gaussian.design import DenseDesign, SparseRows
from numpyro_ext.linalg.gaussian.prior import DiagonalPrior, FlatPrior, LowRankPrior, is_valid_prior
from numpyro_ext.linalg.gaussian.spaces.border_space import Border
from numpyro_ext.linalg.gaussian.spaces.low_rank_space import LowRankSpace
from tests.infer.gaussian.gaussian_forms import one_block, random_sparse
from tests.tiers import few

NUM_ROWS, WIDTHS, RANKS = 30, (7, 3), (2, 1)  # of one field of seven unknowns, and two of three


def problem(is_hard=False, dtype=float):
    """Two sites of low rank, one of independent unknowns and a common one; sites of negative precision, a flat prior
    and elements without noise where it is hard."""
    rng = np.random.default_rng(3)
    diagonals = rng.gamma(2.0, size=(1, 7)), rng.gamma(2.0, size=(2, 3))
    if is_hard:
        diagonals[0][0, :2], diagonals[1][1, 0] = 0.0, 0.0
    one, two = (
        LowRankPrior(jnp.asarray(rng.normal(size=(*d.shape, rank)), dtype), jnp.asarray(d, dtype))
        for d, rank in zip(diagonals, RANKS, strict=True)
    )
    last = FlatPrior(1) if is_hard else DiagonalPrior(jnp.full(1, 2.0, dtype))
    prior = (one, DiagonalPrior(jnp.asarray(rng.gamma(2.0, size=4), dtype)), two, last)
    num_columns = 18
    groups = rng.integers(0, 17, NUM_ROWS)  # one unknown of 17 a row, and the common one
    columns = np.stack([groups, np.full(NUM_ROWS, 17)], 1)
    design = SparseRows(jnp.asarray(columns), jnp.asarray(rng.normal(size=columns.shape), dtype), num_columns)
    shared = jnp.asarray([17, *(num_columns + np.arange(4))])
    border = Border(jnp.arange(17)[:, None], shared, jnp.zeros((NUM_ROWS, 1), int))
    precision = rng.gamma(1.0, size=NUM_ROWS)
    if is_hard:
        precision[4] = -0.05
    return prior, design, border, jnp.asarray(precision, dtype), jnp.asarray(rng.normal(size=NUM_ROWS), dtype)


def everything(space, prior, design, border, precision, shift, maps=()):
    whole = one_block(NUM_ROWS, design.num_columns)
    prepared = linear_gaussian(prior, design, *whole, border=border, is_signed=True, space=space)
    assert isinstance(prepared, LowRankSpace) == (space == "border")
    posterior = prepared.condition(precision, shift)
    marginals, coordinates = posterior.marginals(), posterior.coordinates
    return (
        marginals,
        posterior.unknowns(),
        posterior.log_volume(),
        prepared.inner(coordinates, coordinates),
        prepared.predictor(coordinates),
        kl_divergence(prepared, posterior, marginals.variance),
        [(posterior.map_variance(m), posterior.map_covariance(m)) for m in maps],
    )


@pytest.mark.thorough
@pytest.mark.parametrize("is_hard", few([False, True], 1))
def test_inducing_values_agree_with_covariances(is_hard):
    """In coefficients where no covariance is singular, and against a tiny noise where some are."""
    prior, design, border, precision, shift = problem(is_hard)
    few, many = (random_sparse(np.random.default_rng(8), 6, 18, k) for k in (2, 7))
    maps = (few, many, DenseDesign(few.to_dense()))
    dense = tuple(block.dense() if isinstance(block, LowRankPrior) else block for block in prior)
    if is_hard:
        dense = tuple(
            type(b)(b.covariance + 1e-12 * jnp.eye(b.covariance.shape[-1])) if hasattr(b, "covariance") else b
            for b in dense
        )
    found = jax.jit(lambda *args: everything("border", *args, maps=maps))(prior, design, border, precision, shift)
    whole = jax.jit(lambda *args: everything("coefficient", *args, maps=maps))(dense, design, border, precision, shift)
    assert np.isfinite(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(whole)))
    tolerance = 1e-9 if is_hard else 1e-10
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, whole)


@pytest.mark.thorough
def test_gradients():
    prior, design, border, precision, shift = problem()

    def value(space, prior, precision, values):
        design_ = SparseRows(design.columns, values, 18)
        parts = everything(space, prior, design_, border, precision, shift)
        return parts[0].log_partition + jnp.sum(parts[0].variance) + parts[2]

    gradients = [
        jax.jit(jax.grad(lambda *at, space=space: value(space, *at), (0, 1, 2)))(prior, precision, design.values)
        for space in ("border", "coefficient")
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), *gradients)


@pytest.mark.thorough
def test_density_is_that_of_the_covariance():
    rng = np.random.default_rng(0)
    for block in (b for b in problem()[0] if isinstance(b, LowRankPrior)):
        e = jnp.asarray(rng.normal(size=block.size))
        np.testing.assert_allclose(block.log_density(e), block.dense().log_density(e), rtol=1e-12)
    # little noise: the difference of large numbers of Woodbury's identity would leave six digits
    factor = jnp.asarray(rng.normal(size=(1, 6, 2)))
    block = LowRankPrior(factor, jnp.full((1, 6), 1e-10))
    e = block.draw(jnp.asarray(rng.normal(size=6)))
    scale = np.linalg.qr(np.concatenate([np.asarray(factor[0]), 1e-5 * np.eye(6)], 1).T)[1].T
    white = np.linalg.solve(scale, np.asarray(e))
    exact = -0.5 * white @ white - np.log(np.abs(np.diag(scale))).sum() - 3 * np.log(2 * np.pi)
    np.testing.assert_allclose(block.log_density(e), exact, rtol=1e-9)
    assert is_valid_prior((block,))
    assert not is_valid_prior((LowRankPrior(factor, -block.diagonal),))
    assert not is_valid_prior((LowRankPrior(factor * jnp.nan, block.diagonal),))
    # a rank above the number of unknowns is a rank
    wide = LowRankPrior(jnp.asarray(rng.normal(size=(2, 2, 5))), jnp.ones((2, 2)))
    assert np.all(np.isfinite(wide.draw(jnp.ones(4))))
    np.testing.assert_allclose(wide.log_density(jnp.ones(4)), wide.dense().log_density(jnp.ones(4)), rtol=1e-12)


def test_draws_have_the_posterior_moments():
    num_samples = 100_000

    @jax.jit
    def answers(key, prior, design, border, precision, shift):
        space = linear_gaussian(prior, design, *one_block(NUM_ROWS, 18), border=border)
        posterior = space.condition(precision, shift)
        covariance = posterior.map_covariance(DenseDesign(jnp.eye(18)))
        return posterior.sample(key, num_samples), posterior.unknowns(), covariance

    draws, mean, covariance = map(np.asarray, answers(jax.random.key(0), *problem()))
    white = np.linalg.solve(np.linalg.cholesky(covariance), (draws - mean).T)
    # Means have standard error 1/sqrt(n); entries of a white sample covariance at most sqrt(2/n).
    assert np.abs(white.mean(1)).max() < 5 / np.sqrt(num_samples)
    assert np.abs(np.cov(white) - np.eye(18)).max() < 5 * np.sqrt(2 / num_samples)

    def sequential_row(prior, design, border):
        return linear_gaussian(prior, design, *one_block(NUM_ROWS, 18), border=border).sequential_row(0)

    with pytest.raises(ValueError, match="sequential schedule has no"):
        jax.eval_shape(sequential_row, *problem()[:3])


@pytest.mark.float32
def test_single_precision():
    compiled = jax.jit(everything, static_argnums=0)
    found, exact = compiled("border", *problem(dtype=np.float32)), compiled("border", *problem())
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-3, atol=3e-4), found, exact)


def test_cost_grows_with_the_unknowns():
    """In proportion, and little faster than the square of the rank, as counted by the compiler."""

    def operations(n, rank):
        border = Border(jnp.arange(n)[:, None], n + jnp.arange(rank), jnp.zeros((n, 1), int))
        design = SparseRows(jnp.arange(n)[:, None], jnp.ones((n, 1)), n)

        def run(factor, precision):
            prior = (LowRankPrior(factor[None], jnp.ones((1, n))),)
            posterior = linear_gaussian(prior, design, *one_block(n, n), border=border).condition(precision, precision)
            return posterior.marginals(), posterior.map_variance(design)

        compiled = jax.jit(run).lower(jnp.ones((n, rank)), jnp.ones(n)).compile()
        memory = compiled.memory_analysis()
        return compiled.cost_analysis()["flops"], memory.temp_size_in_bytes + memory.output_size_in_bytes

    few, many = operations(500, 8), operations(8000, 8)
    assert all(np.log(b / a) / np.log(16) < 1.05 for a, b in zip(few, many, strict=True))
    assert operations(8000, 32)[0] < 16 * many[0]
