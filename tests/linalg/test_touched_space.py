"""Conditioning what rows touch of many blocks, against the formulas with all unknowns in one matrix."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.linalg.gaussian.block_diagonal import BlockDiagonal
from numpyro_ext.linalg.gaussian.conditioning import kl_divergence, linear_gaussian
from numpyro_ext.linalg.gaussian.design import DenseDesign, SparseRows
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior, PrecisionPrior
from numpyro_ext.linalg.gaussian.spaces.touched_space import Touched
from tests.infer.gaussian.gaussian_forms import one_block
from tests.tiers import few

NUM_USERS, NUM_ITEMS, RANK = 4, 5, 2
NUM_COLUMNS = NUM_USERS * (NUM_ITEMS + RANK)


def singular_kernel():
    """Items 0 and 1 are the same, and the others have no noise of their own: of rank two."""
    loadings = np.random.default_rng(0).normal(size=(NUM_ITEMS, 2))
    loadings[1] = loadings[0]
    return loadings @ loadings.T


def problem(kernel):
    """Tastes of all users, then a field of each: user 0 compares three items in seven pairs with a cycle and repeats,
    user 1 two in one pair, user 2 none, user 3 two and a sum. The blocks stand in two buckets, one padded."""
    rng = np.random.default_rng(1)
    loadings = rng.normal(size=(NUM_ITEMS, RANK))
    prior = (DiagonalPrior(jnp.full(NUM_USERS * RANK, 0.8)), CovariancePrior(jnp.asarray(kernel)[None], NUM_USERS))
    start = NUM_USERS * RANK
    seen = [(0, 0), (0, 1), (0, 4), (1, 2), (1, 3), (3, 0), (3, 1)]  # user and item; in the second bucket two each
    columns, values = np.zeros((3 + 2 * 3, RANK + 1), int), np.zeros((3 + 2 * 3, RANK + 1))
    number = {}
    for place, (user, item) in zip([0, 1, 2, 3, 4, 5, 6], seen, strict=True):
        columns[place] = [*(user * RANK + np.arange(RANK)), start + user * NUM_ITEMS + item]
        values[place] = [*loadings[item], 0.6]
        number[user, item] = place
    pairs = [(0, 0, 1), (0, 1, 4), (0, 4, 0), (0, 0, 1), (0, 1, 0), (0, 0, 4), (0, 4, 1), (1, 2, 3), (3, 0, 1)]
    rows = np.array([[number[u, i], number[u, j]] for u, i, j in pairs])
    weights = np.tile([1.0, -1.0], (len(pairs), 1))
    weights[-1, 1] = 1.0
    of_users = [
        np.array([*(u * RANK + np.arange(RANK)), *(start + u * NUM_ITEMS + np.arange(NUM_ITEMS))]) for u in range(4)
    ]
    whole = [np.where(np.isin(c, columns[values[:, -1] != 0.0]), c, NUM_COLUMNS) for c in of_users]
    home = np.full(NUM_COLUMNS, -1)
    for block, user in enumerate((0, 1, 3)):
        home[of_users[user]] = block
    nobody = np.full(RANK + NUM_ITEMS, NUM_COLUMNS)
    touched = Touched(
        SparseRows(jnp.asarray(rows), jnp.asarray(weights), len(columns)),
        SparseRows(jnp.asarray(columns), jnp.asarray(values), NUM_COLUMNS),
        (jnp.asarray(whole[:1]), jnp.asarray([whole[1], whole[3], nobody])),
        jnp.asarray(home),
        ((1, 3), (3, 2)),
    )
    design = SparseRows(
        jnp.asarray(columns[rows].reshape(len(rows), -1)),
        jnp.asarray((weights[:, :, None] * values[rows]).reshape(len(rows), -1)),
        NUM_COLUMNS,
    )
    sites = jnp.asarray(rng.gamma(1.0, size=len(rows))).at[2].set(0.0), jnp.asarray(rng.normal(size=len(rows)))
    return prior, touched, design, sites


def dense(prior, design, sites):
    """Mean and covariance of the unknowns and the log partition function, nothing inverted but a sum with one."""
    whole = np.asarray(BlockDiagonal(tuple(block.covariance_part() for block in prior)).to_dense())
    matrix, (precision, shift) = np.asarray(design.to_dense()), map(np.asarray, sites)
    of_rows = matrix @ whole @ matrix.T
    system = np.eye(len(shift)) + precision[:, None] * of_rows
    gain = np.linalg.solve(system, precision[:, None] * matrix @ whole)
    coordinates = np.linalg.solve(system, shift)
    log_partition = 0.5 * shift @ of_rows @ coordinates - 0.5 * np.linalg.slogdet(system)[1]
    return whole @ matrix.T @ coordinates, whole - whole @ matrix.T @ gain, log_partition


def space_of(prior, touched, design):
    return linear_gaussian(prior, design, *one_block(design.num_rows, NUM_COLUMNS), touched=touched)


@jax.jit
def answers(prior, touched, design, sites, chosen, local, used):
    """Marginals, unknowns, and moments of chosen rows and of some columns, as one program."""
    posterior = space_of(prior, touched, design).condition(*sites)
    of_rows = [
        (posterior.map_variance(asked), posterior.map_covariance(asked))
        for asked in (chosen, DenseDesign(chosen.to_dense()))
    ]
    return posterior.marginals(), posterior.unknowns(), of_rows, posterior.covariance_of(local, used)


@pytest.mark.thorough
@pytest.mark.parametrize("is_singular", few([False, True], 1))
def test_everything_follows_from_what_rows_touch(is_singular):
    prior, touched, design, sites = problem(singular_kernel() + (0.0 if is_singular else 0.3) * np.eye(NUM_ITEMS))
    rng = np.random.default_rng(2)
    # rows across the blocks of several users, of one that has no rows, and with columns that stand there twice
    chosen = SparseRows(jnp.asarray(rng.integers(0, NUM_COLUMNS, (30, 4))), jnp.asarray(rng.normal(size=(30, 4))), 28)
    used = jnp.array([2, 9, 11, 20, 23])
    local = SparseRows(jnp.asarray(rng.integers(0, 5, (6, 3))), jnp.asarray(rng.normal(size=(6, 3))), 5)
    marginals, unknowns, of_chosen, of_local = answers(prior, touched, design, sites, chosen, local, used)

    mean, covariance, log_partition = dense(prior, design, sites)
    matrix = np.asarray(design.to_dense())
    np.testing.assert_allclose(marginals.mean, matrix @ mean, atol=1e-12)
    np.testing.assert_allclose(marginals.variance, np.diag(matrix @ covariance @ matrix.T), atol=1e-12)
    np.testing.assert_allclose(marginals.cavity_ratio, 1.0 - sites[0] * marginals.variance, atol=1e-12)
    np.testing.assert_allclose(marginals.log_partition, log_partition, rtol=1e-12)
    np.testing.assert_allclose(unknowns, mean, atol=1e-12)  # user 2 and items that nobody compared too
    expected = np.asarray(chosen.to_dense()) @ covariance @ np.asarray(chosen.to_dense()).T
    for variances, covariances in of_chosen:
        np.testing.assert_allclose(variances, np.diag(expected), atol=1e-12)
        np.testing.assert_allclose(covariances, expected, atol=1e-12)
    expected = np.asarray(local.to_dense()) @ covariance[np.ix_(used, used)] @ np.asarray(local.to_dense()).T
    np.testing.assert_allclose(of_local, expected, atol=1e-12)


def test_divergence_and_gradients_equal_those_of_the_rows():
    """With a singular covariance too, of which the space of the rows knows nothing either."""
    kernel = jnp.asarray(singular_kernel())

    def objective(values, is_touched):
        prior, touched, design, sites = problem(kernel)
        prior = (prior[0], CovariancePrior(values["kernel"][None], NUM_USERS))
        touched = touched if is_touched else None
        space = linear_gaussian(prior, design, *one_block(9, NUM_COLUMNS), touched=touched, space=which[is_touched])
        posterior = space.condition(values["precision"], sites[1])
        marginals = posterior.marginals()
        weights = jnp.cos(jnp.arange(9.0))
        # the variances as well, as objectives of variational inference do
        return (
            marginals.log_partition + weights @ marginals.variance + kl_divergence(space, posterior, marginals.variance)
        )

    which = {True: "touched", False: "observation"}
    values = {"kernel": kernel, "precision": problem(kernel)[3][0] + 0.1}
    (ours, slope), (other, expected) = (
        jax.jit(jax.value_and_grad(objective), static_argnums=1)(values, flag) for flag in (True, False)
    )
    np.testing.assert_allclose(ours, other, rtol=1e-12)
    np.testing.assert_allclose(slope["precision"], expected["precision"], atol=1e-11)
    symmetric = [g["kernel"] + g["kernel"].T for g in (slope, expected)]  # of a symmetric matrix this is what counts
    np.testing.assert_allclose(*symmetric, atol=1e-11)


@pytest.mark.thorough
def test_covariances_taken_in_turn_are_those_written_out():
    rng = np.random.default_rng(3)
    root = rng.normal(size=(2, 3, 3))
    matrices = jnp.asarray(root @ root.swapaxes(-1, -2) + 0.3 * np.eye(3))
    e, design = jnp.asarray(rng.normal(size=24)), DenseDesign(jnp.asarray(rng.normal(size=(10, 24))))
    sites = jnp.asarray(rng.gamma(1.0, size=10)), jnp.asarray(rng.normal(size=10))

    @partial(jax.jit, static_argnames="space")
    def answers(prior, design, sites, space):
        posterior = linear_gaussian((prior,), design, *one_block(10, 24), space=space).condition(*sites)
        return posterior.marginals(), posterior.unknowns()

    for kind in (CovariancePrior, PrecisionPrior):
        short, long = kind(matrices, 4), kind(jnp.tile(matrices, (4, 1, 1)))
        assert short.size == long.size == 24
        np.testing.assert_allclose(short.log_density(e), long.log_density(e), rtol=1e-13)
        for space in ("observation", "coefficient"):
            found, expected = (answers(p, design, sites, space) for p in (short, long))
            # Two programs, whose operations JAX 0.12 fuses differently: equal but for the rounding of numbers near 40.
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12), found[0], expected[0])
            np.testing.assert_allclose(found[1], expected[1], atol=1e-13)


def test_the_space_says_what_it_needs():
    prior, touched, design, _ = problem(np.eye(NUM_ITEMS))
    with pytest.raises(ValueError, match="sites of positive precision"):
        linear_gaussian(prior, design, *one_block(9, NUM_COLUMNS), touched=touched, is_signed=True, space="touched")
    space = space_of(prior, touched, design)
    with pytest.raises(ValueError, match="sequential"):
        space.sequential_row(0)
