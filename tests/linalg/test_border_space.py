"""Conditioning with a border, against the space of all unknowns at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.linalg.cholesky import gram_of_lower, inverse_lower_in_blocks
from numpyro_ext.linalg.gaussian.border.coupling import Coupling
from numpyro_ext.linalg.gaussian.conditioning import choose_space, linear_gaussian
from numpyro_ext.linalg.gaussian.design import DenseDesign, SparseRows
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior, FlatPrior, PrecisionPrior
from numpyro_ext.linalg.gaussian.spaces.border_space import Border
from tests.infer.gaussian.gaussian_forms import one_block, random_sparse
from tests.tiers import thorough

NUM_ROWS, NUM_COLUMNS = 40, 19


def positive(rng, *shape):
    root = rng.normal(size=(*shape, shape[-1]))
    return jnp.asarray(root @ root.swapaxes(-1, -2) + 0.3 * np.eye(shape[-1]))


def problem(is_flat=False, is_signed=False, dtype=float, is_wide=False, is_listed=False):
    """Border: 2 unknowns with a covariance and 2 more. Blocks: one unknown alone and a pair with a covariance (3 of
    these), a triple with a precision, and independent ones; some rows see no border, some nothing but the border."""
    rng = np.random.default_rng(4)
    last = FlatPrior(2) if is_flat else DiagonalPrior(jnp.array([2.0, 3.0], dtype))
    prior = (
        CovariancePrior(positive(rng, 1, 2).astype(dtype)),  # 0, 1: border
        DiagonalPrior(jnp.array([0.5, 1.5, 0.0], dtype)),  # 2, 3, 4
        CovariancePrior(positive(rng, 3, 2).astype(dtype)),  # 5 to 10
        PrecisionPrior(positive(rng, 1, 3).astype(dtype)),  # 11 to 13
        DiagonalPrior(jnp.array([1.0, 2.0, 0.7], dtype)),  # 14 to 16
        last,  # 17, 18: border
    )
    columns = np.array([[2, 5, 6], [3, 7, 8], [4, 9, 10], [11, 12, 13], [14, 19, 19], [15, 16, 19]])
    shared = np.array([18, 0, 1, 17])
    design_columns = np.zeros((NUM_ROWS, 5), int)
    for row in range(NUM_ROWS):
        block = columns[row % 6][columns[row % 6] < NUM_COLUMNS]
        num_local = 0 if row in (7, 8) else 3 if row < 30 else 5
        chosen = np.concatenate([rng.choice(block, num_local), rng.choice(shared, 5 - num_local)])  # repeats add up
        design_columns[row] = rng.permutation(chosen)
    is_local = ~np.isin(design_columns, shared)
    slots = np.argsort(~is_local, axis=1, kind="stable")
    slots = np.where(np.take_along_axis(is_local, slots, axis=1), slots, 5)
    values = jnp.asarray(rng.normal(size=design_columns.shape), dtype)
    design = SparseRows(jnp.asarray(design_columns), values, NUM_COLUMNS)
    precision = rng.gamma(1.0, size=NUM_ROWS)
    precision[3] = 0.0
    if is_signed:
        precision[[1, 4]] = -0.02, -0.01
    others = np.argsort(is_local, axis=1, kind="stable")
    others = np.where(np.take_along_axis(~is_local, others, axis=1), others, 5)
    shared_slots = jnp.asarray(others) if is_wide else None
    border = Border(jnp.asarray(columns), jnp.asarray(shared), jnp.asarray(slots), shared_slots)
    if is_listed:
        border = border._replace(**lists_of(columns, shared, design_columns, others))
    return prior, design, border, jnp.asarray(precision, dtype), jnp.asarray(rng.normal(size=NUM_ROWS), dtype)


def lists_of(columns, shared, design_columns, shared_slots):
    """Unknowns of the border that each block meets, ascending; of the pair 0 and 1 both or none."""
    met = [[] for _ in columns]
    entries = np.full(shared_slots.shape, -1)
    for row, slots in enumerate(shared_slots):
        for k, slot in enumerate(slots[slots < 5]):
            entries[row, k] = design_columns[row, slot]
            if not set(design_columns[row]) <= set(shared):
                met[row % 6] += [0, 1] if entries[row, k] < 2 else [entries[row, k]]
    met = [sorted(set(column), key=list(shared).index) for column in met]
    place = {column: number for number, column in enumerate(shared)}
    lists = [[place[column] for column in some] + [len(shared)] * (4 - len(some)) for some in met]
    # rows that see the border alone have no weight in any list
    listed = [[met[r % 6].index(c) if c in met[r % 6] else 0 for c in row] for r, row in enumerate(entries)]
    return {"met": jnp.asarray(lists), "listed": jnp.asarray(listed)}


def everything(space, prior, design, border, precision, shift, maps=()):
    prepared = linear_gaussian(
        prior, design, *one_block(design.num_rows, design.num_columns), border=border, is_signed=True, space=space
    )
    posterior = prepared.condition(precision, shift)
    coordinates = posterior.coordinates
    return (
        posterior.marginals(),
        posterior.unknowns(),
        posterior.log_volume(),
        prepared.inner(coordinates, coordinates),
        prepared.predictor(coordinates),
        [(posterior.map_variance(m), posterior.map_covariance(m)) for m in maps],
    )


compiled_everything = jax.jit(everything, static_argnums=0)


OTHERS = (False, False, False), (True, False, False), (True, True, False), (False, True, True)


@pytest.mark.thorough
@pytest.mark.parametrize(("is_hard", "is_wide", "is_listed"), [(True, True, True), *thorough(*OTHERS)])
def test_border_agrees_with_all_unknowns_at_once(is_hard, is_wide, is_listed):
    prior, design, border, precision, shift = problem(is_hard, is_hard, is_wide=is_wide, is_listed=is_listed)
    one, few, many = (random_sparse(np.random.default_rng(8), 6, NUM_COLUMNS, k) for k in (1, 2, 7))
    maps = (one, few, many, DenseDesign(few.to_dense()))
    found, whole = (
        compiled_everything(space, prior, design, border, precision, shift, maps) for space in ("border", "coefficient")
    )
    assert np.isfinite(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(whole)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11), found, whole)

    def value(space, precision, shift, values):
        parts = everything(space, prior, SparseRows(design.columns, values, NUM_COLUMNS), border, precision, shift)
        return parts[0].log_partition + jnp.sum(parts[0].variance) + parts[2]

    gradients = [
        jax.jit(jax.grad(lambda *at, space=space: value(space, *at), (0, 1, 2)))(precision, shift, design.values)
        for space in ("border", "coefficient")
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), *gradients)


@pytest.mark.thorough
def test_variances_of_many_rows_some_at_a_time():
    prior, design, border, precision, shift = problem(is_wide=True)
    space = linear_gaussian(prior, design, *one_block(NUM_ROWS, NUM_COLUMNS), border=border)
    posterior = space.condition(precision, shift)
    rows = random_sparse(np.random.default_rng(8), 7, NUM_COLUMNS, 3)
    found = jax.jit(posterior.map_variance, static_argnums=2)(rows, None, 12)  # three rows at a time
    np.testing.assert_allclose(found, jnp.diagonal(posterior.map_covariance(rows)), rtol=1e-12)


@pytest.mark.parametrize("width", [1, 3, 4, 11])
def test_products_of_what_blocks_meet(width):
    """In parts of lists that are padded, and of which some are full, beside a dense product."""
    rng, size = np.random.default_rng(2), 13
    numbers = rng.integers(0, width + 1, 9)
    numbers[0] = width
    columns = np.full((9, width), size)
    for row, number in zip(columns, numbers, strict=True):
        row[:number] = np.sort(rng.choice(size, number, replace=False))
    values = rng.normal(size=(9, 2, width)) * (columns < size)[:, None]
    coupling = Coupling(jnp.asarray(values), jnp.asarray(columns), size)
    whole = np.asarray(coupling.dense()).reshape(-1, size)
    np.testing.assert_allclose(np.tril(coupling.gram_lower()), np.tril(whole.T @ whole), rtol=1e-12, atol=1e-13)


def test_inverse_of_a_large_matrix_by_halves():
    size = 1100  # which is cut twice
    factor = np.tril(0.02 * np.random.default_rng(0).normal(size=(size, size))) + np.eye(size)
    root = inverse_lower_in_blocks(jnp.asarray(factor))
    np.testing.assert_allclose(root @ factor, np.eye(size), atol=1e-12)
    np.testing.assert_allclose(gram_of_lower(root), np.linalg.inv(factor @ factor.T), rtol=1e-9, atol=1e-12)


def test_blocks_without_a_border():
    rng = np.random.default_rng(0)
    prior = (DiagonalPrior(jnp.array([1.0, 0.5, 2.0])),)
    home = jnp.asarray(rng.integers(0, 3, 12))
    design = SparseRows(home[:, None], jnp.asarray(rng.normal(size=(12, 1))), 3)
    border = Border(jnp.arange(3)[:, None], jnp.zeros((0,), int), jnp.zeros((12, 1), int))
    arrays = jnp.asarray(rng.gamma(1.0, size=12)), jnp.asarray(rng.normal(size=12))
    found, whole = (
        compiled_everything(space, prior, design, border, *arrays, (design,)) for space in ("border", "coefficient")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11), found, whole)


@pytest.mark.thorough
def test_draws_have_the_posterior_moments():
    num_samples = 100_000

    @jax.jit
    def answers(key, prior, design, border, precision, shift):
        space = linear_gaussian(prior, design, *one_block(NUM_ROWS, NUM_COLUMNS), border=border)
        posterior = space.condition(precision, shift)
        covariance = posterior.map_covariance(DenseDesign(jnp.eye(NUM_COLUMNS)))
        return posterior.sample(key, num_samples), posterior.unknowns(), covariance

    draws, mean, covariance = map(np.asarray, answers(jax.random.key(0), *problem(is_flat=True)))
    free = np.arange(NUM_COLUMNS) != 4  # which has the variance zero
    assert np.all(draws[:, ~free] == 0.0)
    white = np.linalg.solve(np.linalg.cholesky(covariance[np.ix_(free, free)]), (draws - mean)[:, free].T)
    # Means have standard error 1/sqrt(n); entries of a white sample covariance at most sqrt(2/n).
    assert np.abs(white.mean(1)).max() < 5 / np.sqrt(num_samples)
    assert np.abs(np.cov(white) - np.eye(NUM_COLUMNS - 1)).max() < 5 * np.sqrt(2 / num_samples)


def test_refusals_and_choice():
    prior, design, border, precision, shift = problem()
    whole = one_block(NUM_ROWS, NUM_COLUMNS)
    assert choose_space(prior, design, *whole, border=border) == "border"
    assert choose_space(prior, design, *whole, border=border, is_sequential=True) == "coefficient"
    assert choose_space(prior, design, *whole) == "coefficient"
    with pytest.raises(ValueError, match="none that would pay"):
        linear_gaussian(prior, design, *whole, space="border")
    space = linear_gaussian(prior, design, *whole, border=border)
    with pytest.raises(ValueError, match="sequential schedule has no"):
        space.sequential_row(0)

    @jax.jit
    def log_volume(precision):
        return linear_gaussian(prior, design, *whole, border=border).condition(precision, shift).log_volume()

    assert np.isfinite(log_volume(precision))
    # a negative precision in a block, and one that only the border sees
    for row in (0, 7):
        assert np.isnan(log_volume(precision.at[row].set(-1e3))), row


@pytest.mark.float32
def test_single_precision():
    exact = problem()
    single = problem(dtype=np.float32)
    found = compiled_everything("border", *single)
    whole = compiled_everything("border", *exact)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-3, atol=3e-4), found, whole)


def operations(num_groups, num_shared):
    """Multiplications of conditioning and all variances, and bytes of memory, as the compiler counts them."""
    num_rows = 5 * num_groups
    rng = np.random.default_rng(0)
    columns = np.concatenate(
        [np.repeat(np.arange(num_groups), 5)[:, None], num_groups + np.tile(np.arange(num_shared), (num_rows, 1))], 1
    )
    design = SparseRows(jnp.asarray(columns), jnp.asarray(rng.normal(size=columns.shape)), num_groups + num_shared)
    shared = num_groups + jnp.arange(num_shared)
    border = Border(jnp.arange(num_groups)[:, None], shared, jnp.zeros((num_rows, 1), int))
    prior = (DiagonalPrior(jnp.ones(num_groups + num_shared)),)

    def run(design, precision):
        space = linear_gaussian(prior, design, *one_block(num_rows, design.num_columns), border=border)
        return space.condition(precision, precision).marginals()

    compiled = jax.jit(run).lower(design, jnp.ones(num_rows)).compile()
    memory = compiled.memory_analysis()
    return compiled.cost_analysis()["flops"], memory.temp_size_in_bytes + memory.output_size_in_bytes


def test_cost_grows_with_the_groups():
    """In proportion, as counted by the compiler, so that no clock is asked."""
    (few, little), (many, much) = operations(500, 4), operations(8000, 4)
    assert np.log(many / few) / np.log(16) < 1.05
    assert np.log(much / little) / np.log(16) < 1.05
