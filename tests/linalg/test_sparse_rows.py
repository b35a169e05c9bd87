"""Products and quadratic forms of many sparse rows, which are summed entry by entry, beside the dense matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.linalg.gaussian import design as design_module
from numpyro_ext.linalg.gaussian import row_pairs
from numpyro_ext.linalg.gaussian.conditioning import choose_space
from numpyro_ext.linalg.gaussian.design import DenseDesign, SparseRows
from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
from numpyro_ext.linalg.gaussian.row_pairs import add_pairs, sum_pairs

NUM_ROWS, NUM_COLUMNS = 1700, 7


@pytest.fixture
def rows():
    """So many that products are summed entry by entry."""
    rng = np.random.default_rng(0)
    columns = rng.integers(0, NUM_COLUMNS, (NUM_ROWS, 3))
    return SparseRows(jnp.asarray(columns), jnp.asarray(rng.standard_normal(columns.shape)), NUM_COLUMNS)


def of_product(rows, x, *, is_dense):
    matvec = (DenseDesign(rows.to_dense()) if is_dense else rows).matvec
    return jnp.sum(jnp.sin(matvec(x)), -1)


@pytest.mark.parametrize("shape", [(), (2, 5)])
def test_products(rows, shape):
    x = jax.random.normal(jax.random.key(1), (*shape, NUM_COLUMNS))
    np.testing.assert_allclose(rows.matvec(x), x @ rows.to_dense().T, atol=1e-12)
    np.testing.assert_allclose(jax.vmap(rows.matvec)(x[None]), x[None] @ rows.to_dense().T, atol=1e-12)


@pytest.mark.parametrize("what", ["values", "x", "both", "twice", "forward"])
def test_derivatives(rows, what):
    def scalar(values, x, *, is_dense):
        return of_product(SparseRows(rows.columns, values, NUM_COLUMNS), x, is_dense=is_dense)

    def derivative(is_dense):
        def function(values, x):
            return scalar(values, x, is_dense=is_dense)

        derivatives = {
            "values": jax.grad(function, 0),
            "x": jax.grad(function, 1),
            "both": jax.grad(function, (0, 1)),
            "twice": jax.hessian(function, 1),
            "forward": lambda values, x: jax.jvp(function, (values, x), (jnp.ones_like(values), 2.0 * x))[1],
        }
        return derivatives[what](rows.values, jnp.linspace(-1.0, 1.0, NUM_COLUMNS))

    for found, expected in zip(*map(jax.tree.leaves, (derivative(False), derivative(True))), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_wide_rows_and_few_are_gathered_at_once(monkeypatch):
    def refused(*args):
        raise AssertionError("entry by entry")

    monkeypatch.setattr(design_module, "_sums_by_entry", refused)
    few = SparseRows(jnp.zeros((5, 2), int), jnp.ones((5, 2)), 1)
    np.testing.assert_allclose(few.matvec(jnp.ones(1)), 2.0)
    wide = SparseRows(jnp.zeros((500, 33), int), jnp.ones((500, 33)), 1)
    np.testing.assert_allclose(wide.matvec(jnp.ones(1)), 33.0)
    with pytest.raises(AssertionError, match="entry by entry"):
        SparseRows(jnp.zeros((5000, 1), int), jnp.ones((5000, 1)), 1).matvec(jnp.ones(1))


@pytest.mark.parametrize("num_entries", [10, 1_000_000])
def test_parts_are_added_in_a_loop_or_one_by_one(num_entries):
    parts = jnp.arange(6.0).reshape(3, 2), jnp.array([1.0, -2.0, 4.0])
    found = row_pairs.add_in_turn(lambda total, x, y: total + x * y, jnp.ones(2), parts, num_entries)
    np.testing.assert_array_equal(found, 1.0 + parts[0].T @ parts[1])


@pytest.mark.parametrize("width", [3, 5])
def test_sums_over_pairs(width):
    """Gram matrices and quadratic forms, and their gradients, pair by pair and, where rows are wide, all at once."""
    rng = np.random.default_rng(0)
    columns = rng.integers(0, NUM_COLUMNS, (NUM_ROWS, width))
    rows = SparseRows(jnp.asarray(columns), jnp.asarray(rng.standard_normal(columns.shape)), NUM_COLUMNS)
    assert row_pairs.is_summed_by_pair(rows.columns) is (width == 3)
    weight = jnp.linspace(-1.0, 2.0, NUM_ROWS)
    root = jax.random.normal(jax.random.key(2), (NUM_COLUMNS, NUM_COLUMNS))

    def sparse(values, root):
        start = jnp.zeros((NUM_COLUMNS, NUM_COLUMNS))
        lower = add_pairs(rows.columns, values, weight, lambda total, i, j, terms: total.at[i, j].add(terms), start)
        covariance = root @ root.T
        return lower + jnp.tril(lower, -1).T, sum_pairs(rows.columns, values, lambda i, j: covariance[i, j])

    def dense(values, root):
        matrix = SparseRows(rows.columns, values, NUM_COLUMNS).to_dense()
        return (matrix.T * weight) @ matrix, jnp.sum(jnp.square(matrix @ root), axis=1)

    def scalar(function):
        return lambda *args: sum(jnp.sum(jnp.sin(part)) for part in function(*args))

    for take in (lambda function: function, lambda function: jax.grad(scalar(function), (0, 1))):
        for found, expected in zip(take(sparse)(rows.values, root), take(dense)(rows.values, root), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-11)


def test_chunks_of_wide_rows_are_equally_long():
    rng = np.random.default_rng(0)
    columns, values, weight = rng.integers(0, 9, (328, 60)), rng.standard_normal((328, 60)), rng.random(328)
    # 163 rows are a chunk at most: there is none of 161 rows of zeros.
    assert row_pairs._chunks(jnp.asarray(columns))[0].shape == (3, 110, 60)
    dense = np.zeros((328, 9))
    np.add.at(dense, (np.arange(328)[:, None], columns), values)
    lower = row_pairs.gram_lower(SparseRows(jnp.asarray(columns), jnp.asarray(values), 9), jnp.asarray(weight))
    np.testing.assert_allclose(lower, np.tril(dense.T @ (weight[:, None] * dense)), rtol=1e-12, atol=1e-12)


def test_many_rows_with_few_unknowns_stay_sparse():
    """Products of a hundred thousand rows with a dense matrix of twenty columns would take ten times as long."""
    prior = (DiagonalPrior(jnp.ones(20)),)
    few, many = (SparseRows(jnp.zeros((size, 3), int), jnp.ones((size, 3)), 20) for size in (100, 10_000))
    spaces = [choose_space(prior, part, jnp.arange(part.num_rows)[None], jnp.arange(20)[None]) for part in (few, many)]
    assert spaces == ["coefficient", "sparse"]
