"""Sparse Cholesky factorisation beside dense algebra."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import scipy.sparse.linalg
import scipy.stats
from jax.test_util import check_grads

from numpyro_ext.linalg.sparse_cholesky import CarriedPattern, SparsePattern, analyse, factorise, numeric, ordering
from numpyro_ext.linalg.sparse_cholesky import analysis as analysis_module
from numpyro_ext.linalg.sparse_cholesky.elimination_tree import elimination_tree
from numpyro_ext.linalg.sparse_cholesky.pattern import multiply
from numpyro_ext.linalg.sparse_cholesky.primitive import factorise_and_solve, white_noise
from numpyro_ext.linalg.sparse_cholesky.symbolic import make_batches
from tests.monte_carlo import assert_close_covariance, assert_close_means
from tests.tiers import thorough


def grid(side):
    nodes = np.arange(side * side).reshape(side, side)
    ends = [(nodes[1:], nodes[:-1]), (nodes[:, 1:], nodes[:, :-1])]
    return SparsePattern.of(side * side, *(np.concatenate([pair[k].ravel() for pair in ends]) for k in (0, 1)))


def random_pattern(size, num_entries, seed):
    return SparsePattern.of(size, *np.random.default_rng(seed).integers(0, size, (2, num_entries)))


def random_tree(size):
    rng = np.random.default_rng(0)
    return SparsePattern.of(size, np.arange(1, size), (rng.random(size - 1) * np.arange(1, size)).astype(int))


def with_dense_column(size):
    rng = np.random.default_rng(1)
    rows, columns = rng.integers(0, size, (2, size // 2))
    return SparsePattern.of(size, [*rows, *range(size)], [*columns, *[3] * size])


def joined_cliques(number, size, common):
    """Groups of which each unknown meets all others of its group, and all unknowns that the groups have in common."""
    apart = np.kron(np.eye(number, dtype=bool), np.ones((size, size), bool))
    apart = np.pad(apart, (0, common))
    apart[number * size :] = True
    return SparsePattern.of(len(apart), *np.nonzero(np.tril(apart, -1)))


def map_with_noise(side, common=2):
    """Nodes of a grid, one more unknown for each of them, and some that meet all."""
    nodes, field = np.arange(side * side), grid(side)
    is_apart = field.rows != field.columns
    ends = [(field.rows[is_apart], field.columns[is_apart]), (nodes + nodes.size, nodes)]
    ends += [(np.full(2 * nodes.size, 2 * nodes.size + k), np.arange(2 * nodes.size)) for k in range(common)]
    return SparsePattern.of(2 * nodes.size + common, *(np.concatenate([pair[k] for pair in ends]) for k in (0, 1)))


PATTERNS = {
    "one node": SparsePattern.of(1, [], []),
    "diagonal": SparsePattern.of(7, [], []),
    "path": SparsePattern.of(50, np.arange(1, 50), np.arange(49)),
    "star": SparsePattern.of(40, np.full(39, 39), np.arange(39)),
    "complete": SparsePattern.of(30, *np.tril_indices(30, -1)),
    # larger than what is eliminated in batches
    "complete, one large front": SparsePattern.of(140, *np.tril_indices(140, -1)),
    # as halves of regular grids are
    "large fronts of one size": joined_cliques(3, 100, 4),
    # 50 and 45 are less than what is large, and their padding is more
    "fronts that padding makes large": joined_cliques(3, 50, 45),
    "grid": grid(20),
    "tree": random_tree(300),
    "map with noise": map_with_noise(9),
    "map with noise and covariates": map_with_noise(9, 5),
    "disconnected": random_pattern(200, 90, 2),
    "much fill": random_pattern(250, 900, 3),
    "some fill": random_pattern(250, 350, 4),
    "dense column": with_dense_column(600),
}


def random_values(pattern, seed=0, least=0.1):
    """Values of a matrix whose diagonal is larger than the rest of its rows."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(pattern.num_entries)
    is_diagonal = pattern.rows == pattern.columns
    sums = np.zeros(pattern.size)
    for index in (pattern.rows, pattern.columns):
        np.add.at(sums, index[~is_diagonal], np.abs(values[~is_diagonal]))
    values[is_diagonal] = sums + least + rng.random(pattern.size)
    return values


def dense(pattern, values):
    lower = jnp.zeros((pattern.size, pattern.size)).at[pattern.rows, pattern.columns].set(values)
    return lower + jnp.tril(lower, -1).T


def dense_on_host(pattern, values):
    lower = np.zeros((pattern.size, pattern.size))
    lower[pattern.rows, pattern.columns] = values
    return lower + np.tril(lower, -1).T


def entries_of_dense_elimination(matrix):
    filled = matrix != 0.0
    for k in range(len(filled)):
        below = np.flatnonzero(filled[k + 1 :, k]) + k + 1
        filled[np.ix_(below, below)] = True
    return np.tril(filled).sum(0)


def check_on_host(pattern, order, batches):
    """Factor, solves, selected inverse and its derivative, in a given order, beside the dense ones."""
    values, size = random_values(pattern), pattern.size
    matrix = dense_on_host(pattern, values)
    inverse = np.linalg.inv(matrix)
    tolerance = 1e-12 * np.linalg.cond(matrix)
    factor = numeric.factorise(batches, values)
    lower = np.linalg.cholesky(matrix[np.ix_(order, order)])
    b = np.random.default_rng(5).standard_normal((size, 3))

    def agree(found, expected):
        np.testing.assert_allclose(found, expected, rtol=0.0, atol=tolerance * max(1.0, np.max(np.abs(expected))))

    agree(numeric.log_determinant(batches, factor), np.linalg.slogdet(matrix)[1])
    for k in (1, 3):
        agree(numeric.solve_lower(batches, factor, b[:, :k]), np.linalg.solve(lower, b[:, :k]))
        agree(numeric.solve_upper(batches, factor, b[:, :k]), np.linalg.solve(lower.T, b[:, :k]))
    at = pattern.rows, pattern.columns
    agree(numeric.selected_inverse(batches, factor, values.size), inverse[at])
    tangent = np.random.default_rng(6).standard_normal(values.size)
    change = -inverse @ dense_on_host(pattern, tangent) @ inverse
    agree(numeric.selected_inverse_tangent(batches, factor, tangent), change[at])


@pytest.mark.parametrize("name", PATTERNS)
def test_beside_dense(name):
    pattern = PATTERNS[name]
    analysis = analyse(pattern)
    assert sorted(analysis.order) == list(range(pattern.size))
    assert analysis.length >= analysis.fill
    check_on_host(pattern, analysis.order, analysis.batches)


@pytest.mark.parametrize("common", [0, 2, 3, 5])
def test_noise_of_areas_is_eliminated_on_its_own(common):
    areas = 81
    first = analyse(map_with_noise(9, common)).batches[0]
    assert first.shape[1] == 1 and first.shape[0] >= areas - 2
    assert np.all(np.diff(np.sort(first.rows.ravel())[: areas - 2]) > 0)  # no two of them meet the same area


@pytest.mark.parametrize("side", [30, 45, 60])
def test_surfaces_beside_superlu(side):
    """Lattices in which unknowns meet two others on either side: fronts of all sizes, and several of one."""
    walk = scipy.sparse.diags([1.0, -2.0, 1.0], [0, 1, 2], (side - 2, side))
    both = scipy.sparse.kronsum(walk.T @ walk, walk.T @ walk) + 0.01 * scipy.sparse.eye(side**2)
    lower = scipy.sparse.coo_array(scipy.sparse.tril(both))
    pattern = SparsePattern.of(side**2, *lower.coords)
    values = np.asarray(both.tocsr()[pattern.rows, pattern.columns]).ravel()
    analysis = analyse(pattern)
    factor = numeric.factorise(analysis.batches, values)
    other = scipy.sparse.linalg.splu(both.tocsc(), permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
    expected = np.sum(np.log(np.abs(other.U.diagonal())))
    assert numeric.log_determinant(analysis.batches, factor) == pytest.approx(expected, rel=1e-12)
    b = np.random.default_rng(0).standard_normal((side**2, 2))
    inner = numeric.solve_lower(analysis.batches, factor, b[analysis.order])
    found = np.empty_like(b)
    found[analysis.order] = numeric.solve_upper(analysis.batches, factor, inner)
    np.testing.assert_allclose(found, other.solve(b), atol=1e-9)
    inverse = numeric.selected_inverse(analysis.batches, factor, values.size)
    some = np.random.default_rng(1).integers(0, side**2, 20)
    units = np.zeros((side**2, 20))
    units[some, np.arange(20)] = 1.0
    at = np.searchsorted(pattern.rows * side**2 + pattern.columns, some * (side**2 + 1))
    np.testing.assert_allclose(inverse[at], other.solve(units)[some, np.arange(20)], rtol=1e-9)


@pytest.mark.parametrize("name", ["path", "grid", "disconnected", "much fill", "dense column"])
def test_any_order_of_elimination(name):
    """Column counts are those of an elimination of the dense pattern, and the fronts are right in every order."""
    pattern = PATTERNS[name]
    given = np.random.default_rng(0).permutation(pattern.size)
    tree, postorder = elimination_tree(pattern, given)
    order = given[postorder]
    matrix = dense_on_host(pattern, np.ones(pattern.num_entries))[np.ix_(order, order)]
    np.testing.assert_array_equal(tree.counts, entries_of_dense_elimination(matrix))
    order, batches = make_batches(pattern, order, tree)
    check_on_host(pattern, order, batches)


def test_nested_dissection_is_used_where_it_is_cheaper(monkeypatch):
    pattern, seen = grid(32), []

    def dissect(order):
        def nested_dissection(xadj, adjncy):
            seen.append((len(xadj), len(adjncy)))
            return order, np.argsort(order)

        module = types.ModuleType("pymetis")
        module.nested_dissection = nested_dissection
        monkeypatch.setitem(sys.modules, "pymetis", module)
        return ordering.choose_ordering(pattern)[1].flops

    usual = dissect(list(range(1024)))  # row by row, which is dearer
    assert seen == [(1025, 4 * 32 * 31)]
    monkeypatch.setattr(ordering, "_minimum_degree", lambda pattern: np.random.default_rng(0).permutation(1024))
    assert usual < dissect(list(range(1024))) <= 1024 * 33**2


# ---- in JAX ----

PATTERN = random_pattern(30, 45, 7)
VALUES = random_values(PATTERN, least=1.0)
RIGHT = np.random.default_rng(8).standard_normal(PATTERN.size)


def tolerance():
    return 1e-11 if jax.config.jax_enable_x64 else 2e-4


def assert_close(found, expected):
    scale = float(jnp.max(jnp.abs(expected)))
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=tolerance() * scale)


def everything(values, b):
    """A scalar of all answers that have derivatives."""
    factor = factorise(PATTERN, values)
    return factor.log_determinant + jnp.sum(jnp.sin(factor.solve(b))) + jnp.sum(jnp.cos(factor.selected_inverse()))


def everything_dense(values, b):
    matrix = dense(PATTERN, values)
    inverse = jnp.linalg.inv(matrix)
    selected = inverse[PATTERN.rows, PATTERN.columns]
    return jnp.linalg.slogdet(matrix)[1] + jnp.sum(jnp.sin(inverse @ b)) + jnp.sum(jnp.cos(selected))


@pytest.mark.float32
def test_gradients_and_many_matrices():
    values, b = jnp.asarray(VALUES), jnp.asarray(RIGHT)
    both = jnp.stack([values, 1.5 * values]), jnp.stack([b, -b])
    found, expected = (jax.jit(jax.vmap(jax.value_and_grad(f, (0, 1))))(*both) for f in (everything, everything_dense))
    jax.tree.map(assert_close, found, expected)


def test_derivatives_against_differences():
    check_grads(jax.jit(everything), (jnp.asarray(VALUES), jnp.asarray(RIGHT)), 1, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("derivative", [jax.hessian, *thorough(lambda f: jax.jacrev(jax.grad(f)))])
def test_second_derivatives(derivative):
    def scalar(values, log_determinant_and_solve):
        log_determinant, solution = log_determinant_and_solve(values)
        return jnp.sin(log_determinant) + jnp.sum(solution**2)

    def ours(values):
        factor = factorise(PATTERN, values)
        return factor.log_determinant, factor.solve(RIGHT)

    def by_dense(values):
        matrix = dense(PATTERN, values)
        return jnp.linalg.slogdet(matrix)[1], jnp.linalg.solve(matrix, RIGHT)

    found, expected = (jax.jit(derivative(lambda v, f=f: scalar(v, f)))(VALUES) for f in (ours, by_dense))
    assert_close(found, expected)


@pytest.mark.float32
def test_draws_have_the_inverse_as_covariance():
    factor = factorise(PATTERN, VALUES)
    half = factor.half_solve(jnp.eye(PATTERN.size))
    assert_close(half @ half.T, jnp.linalg.inv(dense(PATTERN, VALUES)))
    # the transpose, by reverse mode
    pulled = jax.vjp(factor.half_solve, jnp.zeros(PATTERN.size))[1](jnp.asarray(RIGHT, half.dtype))[0]
    assert_close(pulled, half.T @ RIGHT)


def test_loops_of_gradient_steps():
    def steps(values, log_determinant):
        def step(state):
            k, values = state
            return k + 1, values + 0.01 * jax.grad(log_determinant)(values)

        return jax.lax.while_loop(lambda state: state[0] < 20, step, (0, values))[1]

    many = jnp.stack([jnp.asarray(VALUES), 2.0 * VALUES])
    found, expected = (
        jax.jit(jax.vmap(lambda v, f=f: steps(v, f)))(many)
        for f in (
            lambda v: factorise(PATTERN, v).log_determinant,
            lambda v: jnp.linalg.slogdet(dense(PATTERN, v))[1],
        )
    )
    assert_close(found, expected)


@pytest.mark.float32
@pytest.mark.parametrize("bad", ["indefinite", "nan", "inf", "singular"])
@pytest.mark.parametrize("name", ["one node", "grid", "complete, one large front"])
def test_what_is_not_positive_definite_is_nan(name, bad):
    pattern = PATTERNS[name]
    values = random_values(pattern)
    middle = pattern.positions([pattern.size // 2], [pattern.size // 2])
    values[middle] = {"indefinite": -1.0, "nan": np.nan, "inf": np.inf, "singular": 0.0}[bad]
    factor = factorise(pattern, values)
    assert np.isnan(factor.log_determinant)
    assert np.all(np.isnan(factor.solve(np.ones(pattern.size))))
    assert np.all(np.isnan(factor.selected_inverse()))


@pytest.mark.parametrize("convert", [list, pd.Series, lambda v: v.astype(int), lambda v: v.astype(np.float32)])
def test_values_of_other_types(convert):
    pattern = SparsePattern.of(3, pd.Series([1, 2]), [0, np.int64(1)])
    values = convert(np.array([4.0, 1.0, 5.0, 2.0, 6.0]))
    expected = np.linalg.solve([[4.0, 1.0, 0.0], [1.0, 5.0, 2.0], [0.0, 2.0, 6.0]], [1.0, 2.0, 3.0])
    found = factorise(pattern, values).solve(np.array([1, 2, 3]))
    np.testing.assert_allclose(found, expected, rtol=1e-6 if found.dtype == jnp.float32 else 1e-14)


@pytest.mark.float32
@pytest.mark.parametrize("name", ["star", "grid", "map with noise", "diagonal", "one node"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_products(name, shape):
    """Rows of like lengths and others, and their derivatives."""
    pattern = PATTERNS[name]
    values = jnp.asarray(random_values(pattern))
    x, weight = jnp.asarray(np.random.default_rng(1).standard_normal((2, pattern.size, *shape)))

    def of(product):
        return jax.value_and_grad(lambda *args: jnp.sum(weight * product(*args)), (0, 1))(values, x)

    assert_close(multiply(pattern, values, x), dense(pattern, values) @ x)
    found, expected = (of(f) for f in (lambda *a: multiply(pattern, *a), lambda v, x: dense(pattern, v) @ x))
    jax.tree.map(assert_close, found, expected)


@pytest.mark.parametrize("shape", [(3,), pytest.param((), marks=pytest.mark.thorough)])
def test_factor_and_solution_by_one_call(shape):
    """Values, first and second derivatives, also those in the right-hand sides alone."""
    b = jnp.asarray(np.random.default_rng(2).standard_normal((PATTERN.size, *shape)))

    def ours(values, b):
        factor, x = factorise_and_solve(PATTERN, values, b)
        return factor.log_determinant + jnp.sum(jnp.sin(x))

    def by_dense(values, b):
        matrix = dense(PATTERN, values)
        return jnp.linalg.slogdet(matrix)[1] + jnp.sum(jnp.sin(jnp.linalg.solve(matrix, b)))

    both = jnp.asarray(VALUES), b
    _, x = factorise_and_solve(PATTERN, *both)
    assert_close(x, jnp.linalg.solve(dense(PATTERN, VALUES), b))
    for make in (lambda f: jax.grad(f, (0, 1)), lambda f: jax.jacfwd(f, 1), jax.hessian):
        found, expected = (jax.jit(make(f))(*both) for f in (ours, by_dense))
        jax.tree.map(assert_close, found, expected)


def test_solution_of_an_indefinite_matrix_is_nan():
    factor, x = factorise_and_solve(PATTERN, -jnp.asarray(VALUES), jnp.asarray(RIGHT))
    assert np.isnan(factor.log_determinant) and np.all(np.isnan(x))


@pytest.mark.float32
def test_white_noise():
    draw = jax.jit(lambda key: white_noise(key, float, (40_000, 3))[0])
    found = np.asarray(draw(jax.random.key(0)), float)
    assert_close_means(found, np.zeros(3))
    assert_close_covariance(found, np.eye(3))
    assert scipy.stats.kstest(found.ravel(), scipy.stats.norm.cdf).pvalue > 1e-3
    # the same numbers of the same key, whatever the program
    np.testing.assert_array_equal(white_noise(jax.random.PRNGKey(0), float, (40_000, 3))[0], found)
    both = jax.vmap(lambda key: white_noise(key, float, (5,))[0])(jax.random.split(jax.random.key(1)))
    np.testing.assert_array_equal(both[1], white_noise(jax.random.split(jax.random.key(1))[1], float, (5,))[0])
    assert np.all(np.asarray(both[0]) != np.asarray(both[1]))


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
def test_derivatives_that_do_not_exist_are_refused(outer, inner):
    """Also where the first derivative is a transpose, which knows of the values by the factor alone."""

    def half(values, z):
        return jnp.sum(factorise(PATTERN, values).half_solve(z))

    def inverse(values):
        return jnp.sum(factorise(PATTERN, values).selected_inverse())

    with pytest.raises(NotImplementedError, match="half_solve has no derivative in the values"):
        outer(half)(VALUES, RIGHT)
    with pytest.raises(NotImplementedError, match="half_solve has no derivative in the values"):
        outer(inner(half, 1))(VALUES, RIGHT)
    with pytest.raises(NotImplementedError, match="derivative of the selected inverse has no derivative"):
        outer(inner(inverse))(VALUES)
    with pytest.raises(NotImplementedError, match="derivative of the selected inverse has no derivative"):
        outer(jax.jit(inner(inverse)))(VALUES)


# ---- patterns and analyses ----


def test_patterns():
    pattern = SparsePattern.of(4, [0, 3, 2, 0], [2, 1, 0, 2])  # both triangles, twice the same
    assert [*zip(pattern.rows.tolist(), pattern.columns.tolist(), strict=True)] == [
        (0, 0),
        (1, 1),
        (2, 0),
        (2, 2),
        (3, 1),
        (3, 3),
    ]
    assert pattern.positions([0, 3], [2, 3]).tolist() == [2, 5]
    again = SparsePattern(4, pattern.rows, pattern.columns)
    assert again == pattern and hash(again) == hash(pattern) and again != SparsePattern.of(4, [], [])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, [0, 5, 7], [0, 1, 1]), ValueError, r"rows\[1\] is 5: indices go from 0 to 2"),
        ((3, [0, 1], [0, -1]), ValueError, r"columns\[1\] is -1"),
        ((3, [0.0], [1.0]), TypeError, "float64: indices of entries are integers"),
        ((3, [0, 1], [0]), ValueError, "2 rows and 1 columns"),
        ((0, [], []), ValueError, "positive integer, not 0"),
        ((True, [], []), ValueError, "positive integer, not True"),
    ],
)
def test_bad_indices_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        SparsePattern.of(*arguments)


def test_entries_in_another_form_are_refused():
    for rows, columns in (([0, 0, 1], [0, 1, 1]), ([1, 0], [1, 0]), ([0], [0]), ([0, 0, 1], [0, 0, 1])):
        with pytest.raises(ValueError, match="SparsePattern.of"):
            SparsePattern(2, rows, columns)
    with pytest.raises(ValueError, match=r"no entry \(0, 1\)"):
        SparsePattern.of(2, [], []).positions([0], [1])


def test_values_and_right_hand_sides_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"shape \(3,\), the pattern has 1 entries.*"):
        factorise(PATTERNS["one node"], np.ones(3))
    with pytest.raises(TypeError, match="not complex"):
        factorise(PATTERNS["one node"], np.ones(1) * 1j)
    with pytest.raises(ValueError, match=r"shape \(1,\) or \(1, k\), not \(2,\)"):
        factorise(PATTERNS["one node"], np.ones(1)).solve(np.ones(2))


def test_too_much_fill_is_refused_before_it_is_allocated(monkeypatch):
    monkeypatch.setattr(analysis_module, "make_batches", lambda *_: pytest.fail("symbolic factorisation made"))
    pattern = random_pattern(700, 2100, 9)
    with pytest.raises(ValueError, match=r"700 rows .* GiB, of .* allowed.*largest front has \d+ rows.*iterative"):
        analyse(pattern, memory_limit=2**18)
    monkeypatch.undo()
    needed = analyse(pattern).memory
    assert analyse(pattern, memory_limit=needed).memory == needed  # known by now
    with pytest.raises(ValueError, match="would need"):
        analyse(pattern, memory_limit=needed - 1)


def test_analyses_used_last_are_kept_and_others_made_again():
    solve = jax.jit(lambda v, b: factorise(PATTERN, v).solve(b))
    before = solve(VALUES, RIGHT)
    assert analyse(PATTERN) is analyse(SparsePattern.of(PATTERN.size, PATTERN.columns, PATTERN.rows))
    kept, other = analyse(PATTERN), random_pattern(20, 20, 10)
    last = analyse(other)
    analysis_module._forget_oldest(last.nbytes)
    assert analyse(other) is last and analyse(PATTERN) is not kept
    analyse(random_pattern(20, 20, 11))
    analysis_module._forget_oldest(0)
    np.testing.assert_array_equal(solve(VALUES, RIGHT), before)


def test_one_program_serves_patterns_of_like_size():
    """Answers and derivatives beside dense ones; the host has forgotten the pattern, and makes it again."""
    b, other = jnp.asarray(RIGHT[:1].repeat(36, 0)), np.random.default_rng(3).permutation(36)
    cycle = SparsePattern.of(36, *(np.append(a, end) for a, end in ((grid(6).rows, 35), (grid(6).columns, 0))))
    patterns = grid(6), SparsePattern.of(36, other[cycle.rows], other[cycle.columns])
    assert patterns[0].num_entries < patterns[1].num_entries

    @jax.jit
    def ours(pattern, values):
        def of(values):
            factor, x = factorise_and_solve(pattern, values, b)
            return factor.log_determinant + jnp.sum(jnp.sin(x))

        factor = factorise(pattern, values)
        return *jax.value_and_grad(of)(values), factor.selected_inverse(), factor.solve(b), multiply(pattern, values, b)

    for pattern in patterns:
        values = jnp.asarray(random_values(pattern))
        carried = CarriedPattern.of(pattern, 128, 1024)
        assert carried.known() == pattern
        analysis_module._forget_oldest(0)
        found = ours(carried, jnp.pad(values, (0, 128 - values.size)))

        def by_dense(values, pattern=pattern):
            matrix = dense(pattern, values)
            return jnp.linalg.slogdet(matrix)[1] + jnp.sum(jnp.sin(jnp.linalg.solve(matrix, b)))

        matrix = dense(pattern, values)
        inverse = jnp.linalg.inv(matrix)
        expected = (
            *jax.value_and_grad(by_dense)(values),
            inverse[pattern.rows, pattern.columns],
            inverse @ b,
            matrix @ b,
        )
        for one, wanted in zip(found, expected, strict=True):
            assert_close(one[: wanted.shape[0]] if one.ndim else one, wanted)
    assert ours._cache_size() == 1
