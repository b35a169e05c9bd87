"""The space of sparse Cholesky factors beside dense algebra on the subspace where there is a density."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax import random

from numpyro_ext.linalg.gaussian.conditioning import choose_space, kl_divergence, linear_gaussian
from numpyro_ext.linalg.gaussian.design import DenseDesign, SparseRows
from numpyro_ext.linalg.gaussian.prior import (
    CovariancePrior,
    DiagonalPrior,
    FlatPrior,
    PrecisionPrior,
    SparsePrecisionPrior,
)
from numpyro_ext.linalg.gaussian.sparse_layout import block_pattern, find_layout
from numpyro_ext.linalg.sparse_cholesky import SparsePattern
from tests.monte_carlo import assert_close_covariance, assert_close_means

NODES, ROWS, SIZE = 12, 20, 17
RNG = np.random.default_rng(0)
PATTERN = SparsePattern.of(NODES, [*range(1, NODES - 1)], [*range(NODES - 2)])
COLUMNS = np.stack([np.zeros(ROWS, int), RNG.integers(1, 13, ROWS), RNG.integers(13, 17, ROWS)], axis=1)
IS_ENTRY = np.ones_like(COLUMNS, bool)
IS_ENTRY[::5, 2] = False
VALUES = RNG.normal(size=COLUMNS.shape) * IS_ENTRY
PRECISION, SHIFT = RNG.uniform(0.1, 2.0, ROWS), RNG.normal(size=ROWS)
PAIRS = np.array([[[2.0, 0.3], [0.3, 1.0]], [[1.0, -0.5], [-0.5, 1.5]]])


def _walk():
    """Eleven nodes in a row and an island, and what annihilates their precision."""
    laplacian, null = np.zeros((NODES, NODES)), np.zeros((NODES, 2))
    for i in range(1, NODES - 1):
        laplacian[i - 1 : i + 1, i - 1 : i + 1] += [[1.0, -1.0], [-1.0, 1.0]]
    null[:-1, 0], null[-1, 1] = (NODES - 1) ** -0.5, 1.0
    return laplacian, null


class Kind:
    """A field of one kind, as a sparse block and by dense matrices in coordinates ``basis`` of its support."""

    def __init__(self, name):
        self.matrix, null = _walk()
        if name.startswith("proper"):
            self.matrix, null = self.matrix + 0.3 * np.eye(NODES), np.full((NODES, 1), NODES**-0.5)
        self.is_constrained, self.is_flat = name.endswith("sum"), name == "flat"
        self.basis = scipy.linalg.null_space(null.T) if name != "proper" else np.eye(NODES)
        self.pivots = None if name.startswith("proper") else jnp.array([3, NODES - 1])
        self.directions = None if name == "proper" else jnp.asarray(null)
        full = np.concatenate([self.basis, null], axis=1) if self.is_flat else self.basis
        self.to_unknowns = scipy.linalg.block_diag(np.eye(1), full, np.eye(4))

    def sparse(self, scale):
        values = scale * jnp.asarray(self.matrix[PATTERN.rows, PATTERN.columns])
        return SparsePrecisionPrior(values, None, self.directions, self.pivots, PATTERN, self.is_constrained)

    def dense(self, scale):
        proper = PrecisionPrior((scale * jnp.asarray(self.basis.T @ self.matrix @ self.basis))[None])
        return (proper, FlatPrior(2)) if self.is_flat else (proper,)


LAYOUT = find_layout([None, PATTERN, block_pattern(CovariancePrior(PAIRS))], [1, NODES, 4], COLUMNS, IS_ENTRY)
KINDS = {name: Kind(name) for name in ("proper", "proper sum", "sum", "flat")}


def _space(kind, is_sparse, scale, variance, values=VALUES):
    field = (kind.sparse(scale),) if is_sparse else kind.dense(scale)
    prior = (DiagonalPrior(variance), *field, CovariancePrior(jnp.asarray(PAIRS)))
    design = SparseRows(jnp.asarray(COLUMNS), jnp.asarray(values), SIZE)
    if is_sparse:
        return linear_gaussian(prior, design, jnp.arange(ROWS)[None], jnp.arange(SIZE)[None], layout=LAYOUT)
    dense = DenseDesign(design.to_dense() @ kind.to_unknowns)
    columns = jnp.arange(dense.num_columns)[None]
    return linear_gaussian(prior, dense, jnp.arange(ROWS)[None], columns, space="coefficient")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _answers(name, is_sparse):
    kind = KINDS[name]

    def of(scale, variance, values, precision, shift):
        space = _space(kind, is_sparse, scale, variance, values)
        posterior = space.condition(precision, shift)
        marginals = posterior.marginals()
        divergence = kl_divergence(space, posterior, marginals.variance)
        total = marginals.log_partition + jnp.sum(jnp.sin(marginals.mean)) + jnp.sum(jnp.cos(marginals.variance))
        return total, (marginals, divergence, posterior)

    arguments = (1.7, jnp.array([0.6]), jnp.asarray(VALUES), jnp.asarray(PRECISION), jnp.asarray(SHIFT))
    slopes, (marginals, divergence, posterior) = jax.grad(of, argnums=(0, 1, 2, 3, 4), has_aux=True)(*arguments)
    slopes = (*slopes[:2], jnp.where(IS_ENTRY, slopes[2], 0.0), *slopes[3:])
    to_unknowns = np.eye(SIZE) if is_sparse else kind.to_unknowns
    dense = DenseDesign(jnp.asarray(np.random.default_rng(1).normal(size=(5, SIZE)) @ to_unknowns))
    maps = [
        # pairs in the pattern, with padding at a column that the row does not touch; and a pair that is in none
        SparseRows(jnp.array([[1, 2, 9], [3, 4, 3], [5, 5, 0]]), jnp.array([[1.0, 2, 0], [1, -1, 3], [1, 1, 1]]), SIZE),
        SparseRows(jnp.array([[1, 5], [3, 4]]), jnp.ones((2, 2)), SIZE),
        SparseRows(jnp.arange(SIZE)[:, None], jnp.ones((SIZE, 1)), SIZE),
    ]
    if not is_sparse:
        maps = [DenseDesign(design.to_dense() @ kind.to_unknowns) for design in maps]
    variances = [posterior.map_variance(design) for design in (*maps, dense)]
    unknowns = to_unknowns @ posterior.unknowns()
    return marginals, divergence, slopes, unknowns, variances, posterior.map_covariance(dense)


@pytest.mark.thorough
@pytest.mark.parametrize("name", KINDS)
def test_moments_evidence_and_their_derivatives_are_those_of_dense_algebra(name):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), *(_answers(name, k) for k in (True, False))
    )


@functools.partial(jax.jit, static_argnums=0)
def _densities(name, z):
    kind = KINDS[name]
    block, field = kind.sparse(1.7), jnp.asarray(kind.basis) @ z
    return block.log_density(field), kind.dense(1.7)[0].log_density(z)


@pytest.mark.parametrize("name", ["sum", pytest.param("proper sum", marks=pytest.mark.thorough)])
def test_density_is_that_on_the_subspace(name):
    z = np.random.default_rng(2).normal(size=KINDS[name].basis.shape[1])
    ours, dense = _densities(name, z)
    np.testing.assert_allclose(ours, dense, rtol=1e-12)
    drawn = KINDS[name].sparse(1.7).draw(jnp.asarray(np.random.default_rng(3).normal(size=NODES)))
    np.testing.assert_allclose(KINDS[name].directions.T @ drawn, 0.0, atol=1e-14)


@pytest.mark.thorough
def test_draws_have_the_moments_of_the_posterior_and_add_up_to_zero():
    space = _space(KINDS["sum"], True, 1.7, jnp.array([0.6]))

    @jax.jit
    def draw():
        posterior = space.condition(jnp.asarray(PRECISION), jnp.asarray(SHIFT))
        covariance = posterior.map_covariance(DenseDesign(jnp.eye(SIZE)))
        return posterior.sample(random.key(0), 20_000), posterior.unknowns(), covariance

    draws, mean, covariance = map(np.asarray, draw())
    np.testing.assert_allclose(draws[:, 1:-4] @ KINDS["sum"].directions, 0.0, atol=1e-12)
    free = np.delete(np.arange(SIZE), NODES)  # without the island, which is zero
    assert_close_means(draws[:, free], mean[free])
    assert_close_covariance(draws[:, free], covariance[np.ix_(free, free)])


def test_indefinite_posterior_is_nan():
    space = _space(KINDS["sum"], True, 1.7, jnp.array([0.6]))
    for sign in (-1.0, -100.0):
        marginals = space.condition(sign * 5.0 * jnp.asarray(PRECISION), jnp.asarray(SHIFT)).marginals()
        assert np.isnan(marginals.log_partition)
        assert np.all(np.isnan(marginals.mean))


def test_scale_of_independent_unknowns_may_be_zero():
    found = _space(KINDS["proper"], True, 1.7, jnp.array([0.0])).condition(jnp.asarray(PRECISION), jnp.asarray(SHIFT))
    assert found.unknowns()[0] == 0.0
    assert np.all(np.isfinite(found.marginals().variance))


def test_variance_of_an_island_of_one_node_is_zero():
    """It adds up to zero, so its variance is what rounding leaves, which had either sign."""

    @jax.jit
    @jax.vmap
    def island(scale):
        posterior = _space(KINDS["sum"], True, scale, jnp.array([0.6])).condition(PRECISION, SHIFT)
        return posterior.map_variance(SparseRows(jnp.array([[NODES]]), jnp.ones((1, 1)), SIZE))[0]

    found = island(jnp.geomspace(0.01, 100.0, 200))
    np.testing.assert_array_equal(found, 0.0)


def test_what_the_space_cannot_do_is_refused():
    space = _space(KINDS["sum"], True, 1.7, jnp.array([0.6]))
    field, rows, columns = (KINDS["sum"].sparse(1.0),), jnp.arange(ROWS)[None], jnp.arange(NODES)[None]
    with pytest.raises(ValueError, match="schedule='parallel'"):
        space.sequential_row(0)
    with pytest.raises(ValueError, match="space='sparse-cholesky'"):
        linear_gaussian(field, SparseRows(columns.T, jnp.ones((NODES, 1)), NODES), rows, columns, space="coefficient")
    with pytest.raises(ValueError, match="needs sparse rows"):
        linear_gaussian(field, DenseDesign(jnp.eye(NODES)), rows, columns, space="sparse-cholesky")
    assert choose_space(field, space.design, rows, columns, layout=LAYOUT) == "sparse-cholesky"
