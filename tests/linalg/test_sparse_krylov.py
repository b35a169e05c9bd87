"""The Schur complement of leaves by its products, beside dense algebra: exact parts, and estimates by fixed probes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_ext.linalg.gaussian.conditioning import choose_space, kl_divergence, linear_gaussian
from numpyro_ext.linalg.gaussian.design import DenseDesign, SparseRows
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior
from numpyro_ext.linalg.gaussian.sparse_layout import block_pattern, find_layout
from numpyro_ext.linalg.sparse_cholesky import SparsePattern
from numpyro_ext.linalg.sparse_krylov import CarriedElimination, Elimination, KrylovFactor, carried, find_elimination
from numpyro_ext.linalg.sparse_krylov.schur import Schur
from tests.monte_carlo import assert_close_covariance, assert_close_means

DESIGNS = {
    # rows, levels of each factor, whether the first one has slopes
    "two factors": (400, (60, 45), False),
    "three factors": (500, (50, 40, 40), False),
    "slopes": (400, (40, 50), True),
    "one factor": (80, (40,), False),
}


def _matrix(name, seed=0):
    """Posterior precision of crossed effects beside two common coefficients, and the sites of its unknowns."""
    num_rows, levels, has_slopes = DESIGNS[name]
    draws = np.random.default_rng(seed)
    x = draws.normal(size=num_rows)
    groups = [draws.integers(0, size, num_rows) for size in levels]
    parts = [np.ones((num_rows, 1)), x[:, None], *(0.7 * np.eye(n)[g] for n, g in zip(levels, groups, strict=True))]
    if has_slopes:
        parts.append(0.4 * x[:, None] * np.eye(levels[0])[groups[0]])
    starts = np.cumsum([0, *(part.shape[1] for part in parts)])
    rows = np.concatenate(parts, axis=1)
    matrix = rows.T @ (draws.uniform(0.2, 2.0, num_rows)[:, None] * rows) + np.eye(rows.shape[1])
    i, j = np.nonzero(matrix)
    return matrix, SparsePattern.of(len(matrix), i, j), list(zip(starts, np.diff(starts), strict=False))


def _values(matrix, pattern):
    return matrix[pattern.rows, pattern.columns]


def _with_signs(order, signs):
    """The same order of elimination with other probes."""
    made = Elimination(order.pattern, order.leaves, order.common, signs.shape[1], order.known)
    vars(made)["probes"] = order.starts(signs)
    return made


@pytest.mark.parametrize("name", DESIGNS)
def test_all_is_that_of_the_dense_matrix_with_unit_vectors_for_probes(name):
    matrix, pattern, sites = _matrix(name)
    order = find_elimination(pattern, sites, num_probes=None)
    schur = Schur(order, _values(matrix, pattern))
    inverse = np.linalg.inv(matrix)
    sides = np.random.default_rng(1).normal(size=(len(matrix), 3))
    solved, residual = schur.solve(sides)
    np.testing.assert_allclose(solved, inverse @ sides, rtol=0, atol=1e-12)
    assert residual < 1e-13
    found = schur.determinant(with_gradient=True)
    np.testing.assert_allclose(found.value, np.linalg.slogdet(matrix)[1], rtol=1e-12)
    np.testing.assert_allclose(found.gradient, _values(inverse, pattern), rtol=0, atol=1e-9)
    assert found.standard_error == 0.0
    assert schur.determinant(with_gradient=False)[:3] == found[:3]
    root = schur.draw(np.eye(len(matrix)))  # by Krylov spaces that end at a residual of 1e-8
    np.testing.assert_allclose(root @ root.T, inverse, rtol=0, atol=1e-8)


def test_largest_sites_without_pairs_are_the_leaves():
    for name, (width, leaves) in {"two factors": (1, 60), "three factors": (1, 50), "slopes": (1, 50)}.items():
        _, pattern, sites = _matrix(name)
        order = find_elimination(pattern, sites)
        assert order.leaves.shape == (leaves, width), name
    _, pattern, sites = _matrix("slopes")
    both = [sites[0], sites[1], (2, 40), (92, 40)]  # intercepts and slopes meet within their groups alone
    order = find_elimination(pattern, [*both, (42, 50)][:4])
    assert order.leaves.shape == (40, 2)
    # what meets a quarter of the others comes last
    np.testing.assert_array_equal(np.sort(order.common)[:2], [0, 1])


def test_no_leaves_and_no_other_unknowns_are_fine():
    matrix, pattern, _ = _matrix("two factors")
    inverse, none, all_of_them = np.linalg.inv(matrix), np.zeros(0, int), np.arange(len(matrix))
    for order in (
        Elimination(pattern, none.reshape(0, 1), none, None),
        Elimination(pattern, none.reshape(0, 1), all_of_them, None),
    ):
        schur = Schur(order, _values(matrix, pattern))
        np.testing.assert_allclose(schur.solve(matrix)[0], np.eye(len(matrix)), rtol=0, atol=1e-10)
        found = schur.determinant(with_gradient=True)
        np.testing.assert_allclose(found.value, np.linalg.slogdet(matrix)[1], rtol=1e-12)
        np.testing.assert_allclose(found.gradient, _values(inverse, pattern), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["two factors", "three factors", "slopes"])
def test_inverse_is_the_derivative_of_the_estimate_by_fixed_probes(name):
    matrix, pattern, sites = _matrix(name)
    order = find_elimination(pattern, sites, num_probes=8)
    values = _values(matrix, pattern)
    direction = values * np.random.default_rng(2).normal(size=values.size)
    times = np.where(pattern.rows == pattern.columns, 1.0, 2.0)
    slope = times * direction @ Schur(order, values).determinant(with_gradient=True).gradient
    step = 1e-4

    def value(at):
        return Schur(order, values + at * direction).determinant(with_gradient=False).value

    difference = (8.0 * (value(step) - value(-step)) - value(2.0 * step) + value(-2.0 * step)) / (12.0 * step)
    np.testing.assert_allclose(slope, difference, rtol=1e-7)
    exact = times * direction @ _values(np.linalg.inv(matrix), pattern)
    assert abs(slope / exact - 1.0) > 1e-5  # of the estimate, and not of what is estimated


@pytest.mark.parametrize("name", ["two factors", "three factors"])
def test_estimates_have_the_right_means_and_a_standard_error_that_says_how_far_they_are(name):
    matrix, pattern, sites = _matrix(name)
    order = find_elimination(pattern, sites, num_probes=8)
    draws, found = np.random.default_rng(3), []
    for _ in range(60):
        signs = draws.choice([-1.0, 1.0], (order.middle.size, 8))
        schur = Schur(_with_signs(order, signs), _values(matrix, pattern))
        found.append(schur.determinant(with_gradient=True))
    exact = np.linalg.slogdet(matrix)[1]
    assert_close_means(np.array([one.value for one in found]), exact)
    errors = np.array([one.standard_error for one in found])
    spread = np.std([one.value for one in found], ddof=1)
    np.testing.assert_allclose(np.sqrt(np.mean(errors**2)), spread, rtol=5.0 / np.sqrt(2 * 59))
    at = [*pattern.diagonal, *np.random.default_rng(4).integers(0, pattern.num_entries, 50)]
    gradients, inverse = np.stack([one.gradient[at] for one in found]), _values(np.linalg.inv(matrix), pattern)[at]
    # exact but for rounding where unknowns meet no others
    is_estimate = np.std(gradients, axis=0) > 1e-9 * np.abs(inverse)
    assert_close_means(gradients[:, is_estimate], inverse[is_estimate])


def test_what_is_not_positive_definite_is_nan_and_what_does_not_converge_says_so():
    matrix, pattern, sites = _matrix("two factors")
    order = find_elimination(pattern, sites)
    for bad in (-matrix, matrix - 2.0 * np.eye(len(matrix)), np.where(matrix == matrix[0, 0], np.nan, matrix)):
        factor = KrylovFactor(jnp.asarray(_values(bad, pattern)), order)
        assert np.isnan(factor.log_determinant)
        assert np.all(np.isnan(factor.selected_inverse()))
        assert np.all(np.isnan(factor.solve(jnp.ones(len(matrix)))))
    size = 700  # a chain, on which information travels one step at a time
    chain = SparsePattern.of(size, np.arange(1, size), np.arange(size - 1))
    values = np.where(chain.rows == chain.columns, 2.0 + 1e-9, -1.0)
    alone = Elimination(chain, np.zeros((0, 1)), np.zeros(0), num_probes=4)
    assert float(KrylovFactor(jnp.asarray(values), alone).estimate().residual) > 1e-3
    assert Schur(alone, values).solve(np.ones((size, 1)))[1] > 1e-3
    with pytest.raises(ValueError, match="must not meet"):
        Schur(Elimination(chain, np.arange(4)[:, None], np.zeros(0)), values)


def test_factor_runs_in_compiled_programs_and_has_derivatives():
    matrix, pattern, sites = _matrix("one factor")
    order = find_elimination(pattern, sites, num_probes=None)
    values, side = jnp.asarray(_values(matrix, pattern)), jnp.arange(1.0, 1.0 + len(matrix))

    def of_factor(values, side):
        factor = KrylovFactor(values, order)
        return factor.log_determinant + jnp.sum(jnp.sin(factor.solve(side)))

    def of_dense(values, side):
        full = jnp.zeros(matrix.shape).at[pattern.rows, pattern.columns].set(values)
        full = full + jnp.tril(full, -1).T
        return jnp.linalg.slogdet(full)[1] + jnp.sum(jnp.sin(jnp.linalg.solve(full, side)))

    ours, dense = (jax.jit(jax.value_and_grad(f, (0, 1)))(values, side) for f in (of_factor, of_dense))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), ours, dense)
    scales = jnp.array([1.0, 2.0])
    mapped = jax.vmap(lambda scale: KrylovFactor(scale * values, order).log_determinant)(scales)
    np.testing.assert_allclose(mapped[1] - mapped[0], len(matrix) * np.log(2.0), rtol=1e-12)
    for answer in (lambda factor: factor.selected_inverse(), lambda factor: factor.half_solve(side)):
        with pytest.raises(NotImplementedError, match="has no derivative in the values"):
            jax.grad(lambda values, answer=answer: jnp.sum(answer(KrylovFactor(values, order))))(values)
    single = KrylovFactor(values.astype(jnp.float32), order)
    assert single.log_determinant.dtype == jnp.float32
    np.testing.assert_allclose(single.solve(side.astype(jnp.float32)), np.linalg.solve(matrix, side), rtol=1e-3)


ROWS, LEVELS = 300, (40, 30)
RNG = np.random.default_rng(5)
COLUMNS = np.stack([np.zeros(ROWS, int), 1 + RNG.integers(0, 40, ROWS), 41 + RNG.integers(0, 30, ROWS)], axis=1)
COLUMNS = np.concatenate([COLUMNS, COLUMNS[:, 2:] + 30], axis=1)  # slopes that correlate with the second effects
COLUMNS[:, 2:] = 41 + 2 * (COLUMNS[:, 2:3] - 41) + [0, 1]
VALUES = np.stack([np.ones(ROWS), np.ones(ROWS), np.ones(ROWS), RNG.normal(size=ROWS)], axis=1)
PRECISION, SHIFT = RNG.uniform(0.1, 2.0, ROWS), RNG.normal(size=ROWS)
SIZE = 101


def _space(scale, values, is_iterative):
    covariance = scale * jnp.array([[[1.0, 0.3], [0.3, 0.5]]])
    prior = DiagonalPrior(jnp.full(1, 25.0)), DiagonalPrior(scale * jnp.ones(40)), CovariancePrior(covariance, 30)
    design = SparseRows(jnp.asarray(COLUMNS), values, SIZE)
    where = jnp.arange(ROWS)[None], jnp.arange(SIZE)[None]
    if not is_iterative:
        return linear_gaussian(prior, design, *where, space="coefficient")
    patterns = [block_pattern(block) for block in prior]
    layout = find_layout(patterns, [1, 40, 60], COLUMNS, np.ones_like(COLUMNS, bool))
    order = find_elimination(layout.pattern, [(0, 1), (1, 40), (41, 60)], num_probes=None)
    layout = dataclasses.replace(layout, elimination=order)
    assert choose_space(prior, design, *where, layout=layout) == "iterative"
    return linear_gaussian(prior, design, *where, layout=layout)


@functools.partial(jax.jit, static_argnums=0)
def _answers(is_iterative):
    def solved(scale, values, precision, shift):
        space = _space(scale, values, is_iterative)
        return space, space.condition(precision, shift)

    def total(*arguments):
        _, posterior = solved(*arguments)
        return posterior.log_volume() + jnp.sum(jnp.sin(posterior.unknowns()))

    arguments = 0.6, jnp.asarray(VALUES), jnp.asarray(PRECISION), jnp.asarray(SHIFT)
    slopes = jax.grad(total, (0, 1, 2, 3))(*arguments)
    space, posterior = solved(*arguments)
    marginals = posterior.marginals()
    divergence = kl_divergence(space, posterior, marginals.variance)
    dense = DenseDesign(jnp.asarray(np.random.default_rng(6).normal(size=(5, SIZE))))
    maps = [SparseRows(jnp.arange(SIZE)[:, None], jnp.ones((SIZE, 1)), SIZE), SparseRows(*_unseen(), SIZE), dense]
    variances = [posterior.map_variance(design) for design in maps]
    return marginals, divergence, slopes, posterior.unknowns(), variances, posterior.map_covariance(dense)


def _unseen():
    return jnp.asarray([[1, 2], [41, 99]]), jnp.ones((2, 2))


def test_space_has_the_moments_and_derivatives_of_dense_algebra():
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8),
        *(_answers(which) for which in (True, False)),
    )


def test_draws_have_the_moments_of_the_posterior():
    def posterior(is_iterative):
        return _space(0.6, jnp.asarray(VALUES), is_iterative).condition(PRECISION, SHIFT)

    draws = jax.jit(lambda: posterior(True).sample(random.key(0), 20_000))()
    exact = posterior(False)
    assert_close_means(draws, exact.unknowns())
    assert_close_covariance(draws, exact.map_covariance(DenseDesign(jnp.eye(SIZE))))


def test_a_point_near_the_solution_gives_digits_of_the_distance():
    space = _space(0.6, jnp.asarray(VALUES), True)
    mean = space.condition(PRECISION, SHIFT).coordinates
    again = space.condition(PRECISION, SHIFT, near=mean)
    assert float(jnp.max(jnp.abs(again.coordinates - mean))) < 1e-14
    gradient = jnp.zeros_like(mean).at[0, 3].set(2.0)
    distance, residual = again.distance_to_mean(gradient)
    exact = 2.0 * np.sqrt(np.asarray(again.map_variance(SparseRows(jnp.array([[3]]), jnp.ones((1, 1)), SIZE)))[0])
    np.testing.assert_allclose(distance * space.scale[3], exact, rtol=1e-9)
    assert residual < 1e-12


def test_directions_that_one_factor_can_take_from_another_are_taken_exactly():
    draws = np.random.default_rng(7)
    first, second = draws.integers(0, 150, 2000), draws.integers(0, 120, 2000)
    rows = np.concatenate([np.eye(150)[first], np.eye(120)[second]], axis=1)
    matrix = 900.0 * rows.T @ rows + np.eye(270)  # of effects that their priors hardly hold
    pattern = SparsePattern.of(270, *np.nonzero(matrix))
    order = find_elimination(pattern, [(0, 150), (150, 120)])
    assert order.known.shape == (120, 1)
    np.testing.assert_allclose(order.probes @ order.probes.T @ order.known, order.known, atol=1e-12)
    without = Elimination(pattern, order.leaves, order.common)
    ours, other = (Schur(one, _values(matrix, pattern)).determinant(with_gradient=False) for one in (order, without))
    exact = np.linalg.slogdet(matrix)[1]
    assert abs(ours.value - exact) < 4.0 * ours.standard_error
    assert ours.standard_error < 0.5 * other.standard_error


def test_variances_are_never_below_those_given_all_unknowns_but_one():
    space = _space(0.6, jnp.asarray(VALUES), True)
    posterior = space.condition(PRECISION, SHIFT)
    layout, factor = space.layout, posterior.factor
    least = 1.0 / np.asarray(factor.values)[layout.pattern.diagonal]
    # estimates that noise has taken below zero; a column that stands twice in a row adds up
    rows = SparseRows(jnp.array([[1, 2], [3, 3], [3, 3]]), jnp.array([[1.0, 2.0], [1.0, 1.0], [1.0, -1.0]]), SIZE)
    found = posterior._corrected(-jnp.ones(3), SparseRows(rows.columns, rows.values * space.scale[rows.columns], SIZE))
    scales = np.asarray(space.scale)
    expected = [max(scales[1] ** 2 * least[1], 4.0 * scales[2] ** 2 * least[2]), 2.0 * scales[3] ** 2 * least[3], 0.0]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_an_order_that_is_carried_along_does_what_the_order_does():
    """Padded entries change nothing, and one program serves another pattern of like size."""

    def answers(order, values, b):
        factor = KrylovFactor(values, order)
        slope = jax.grad(lambda values: KrylovFactor(values, order).log_determinant)(values)
        parts = factor.solve(b), factor.half_solve(b), factor.selected_inverse(), factor.multiply(b)
        return factor.log_determinant, slope, *parts

    compiled, generator, sizes = jax.jit(answers), np.random.default_rng(4), set()
    for number in (395, 400):
        first, second = generator.integers(40, size=number), generator.integers(60, size=number)
        columns = np.stack([np.full(number, 100), first, 40 + second], axis=1)
        i, j = (columns[:, pair].ravel() for pair in ([0, 0, 1], [1, 2, 2]))
        pattern = SparsePattern.of(101, i, j)
        sizes.add(pattern.num_entries)
        values = np.where(pattern.rows == pattern.columns, 40.0, generator.uniform(0.1, 1.0, pattern.num_entries))
        order = find_elimination(pattern, [(0, 40), (40, 60), (100, 1)], num_probes=8)
        arrays, b = CarriedElimination.of(order), jnp.asarray(generator.normal(size=101))
        padded = arrays.pattern.num_entries
        assert padded <= 1.25 * pattern.num_entries
        found = compiled(arrays, jnp.asarray(np.pad(values, (0, padded - values.size))), b)
        expected = answers(order, jnp.asarray(values), b)
        for one, other in zip(found, expected, strict=True):
            wanted = np.zeros(one.shape)
            wanted[tuple(map(slice, other.shape))] = other
            np.testing.assert_allclose(one, wanted, rtol=1e-10, atol=1e-12)
    assert len(sizes) == 2 and compiled._cache_size() == 1


def test_an_order_that_the_host_has_forgotten_is_made_again():
    generator = np.random.default_rng(5)
    i, j = generator.integers(30, size=90), 30 + generator.integers(40, size=90)
    pattern = SparsePattern.of(70, i, j)
    order = find_elimination(pattern, [(0, 30), (30, 40)], num_probes=4)
    carried_along = CarriedElimination.of(order)
    carried._known.clear()
    assert carried_along.known() == order and carried_along.known() is not order
    assert carried_along.pattern.known() == pattern
