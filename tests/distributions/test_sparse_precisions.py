"""Sparse precisions against dense products, differences, recursions and covariances, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.interpolate
import scipy.sparse
import scipy.special
from jax.experimental import sparse as jax_sparse

from numpyro_ext.distributions import (
    GaussianMarkovRandomField,
    SparsePrecision,
    bspline_basis,
    car,
    difference_precision,
    graph_precision,
    kronecker,
    kronecker_sum,
    leroux,
    matern_precision,
    pedigree_precision,
    phylogeny_precision,
    sparse_matmul,
)
from numpyro_ext.infer.front.files.archive import read_archive, write_archive

PAIRS = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (4, 5), (5, 6)]
MATRIX = np.array([[2.0, -1.0, 0.0], [-1.0, 3.0, 0.5], [0.0, 0.5, 1.0]])
LOWER = [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)]
NUMBERS = [2.0, -1.0, 3.0, 0.5, 1.0]


def _laplacian(pairs, weights, size):
    dense = np.zeros((size, size))
    for (i, j), w in zip(pairs, weights, strict=True):
        step = np.zeros(size)
        step[i], step[j] = 1.0, -1.0
        dense += w * np.outer(step, step)
    return dense


@pytest.mark.parametrize("form", ["coo", "csr", "csc", "lil", "dok", "dia", "bsr", "array", "bcoo", "dense", "list"])
def test_a_matrix_as_people_have_it(form):
    made = {
        "array": lambda: scipy.sparse.csr_array(MATRIX),
        "bcoo": lambda: jax_sparse.BCOO.fromdense(MATRIX, nse=9),
        "dense": lambda: jnp.asarray(MATRIX, jnp.float32),
        "list": MATRIX.tolist,
    }
    matrix = made[form]() if form in made else getattr(scipy.sparse, f"{form}_matrix")(MATRIX)
    precision = SparsePrecision.of(matrix)
    np.testing.assert_allclose(precision.to_dense(), MATRIX)
    np.testing.assert_allclose(precision.to_scipy().toarray(), MATRIX)
    assert precision.indices.tolist() == [list(pair) for pair in LOWER]


@pytest.mark.parametrize("form", ["both", "upper", "int", "frame"])
def test_pairs_as_people_have_them(form):
    rows, columns = np.nonzero(MATRIX)
    indices, values = np.stack([rows, columns], axis=1), MATRIX[rows, columns]
    if form == "upper":
        indices, values = [(j, i) for i, j in LOWER], NUMBERS
    elif form == "frame":
        frame = pd.DataFrame({"i": rows, "j": columns, "value": values})
        indices, values = frame[["i", "j"]], frame["value"]
    elif form == "int":
        indices, values = np.array(LOWER, np.uint8), np.array([4, -2, 6, 1, 2]).astype(object) / 2
    np.testing.assert_allclose(SparsePrecision(indices, values, np.int64(3)).to_dense(), MATRIX)


def test_algebra_is_that_of_dense_matrices_with_traced_numbers_too():
    other = difference_precision(3, 1)
    x, y = np.arange(3.0), np.arange(6.0).reshape(3, 2)

    @jax.jit
    def compute(values, c):
        precision = SparsePrecision(LOWER, values, 3).scale_by(c)
        total = precision + other.scale_by(2.0)
        product = kronecker(precision, other)
        from_bcoo = SparsePrecision.of(jax_sparse.BCOO((values[:2][jnp.array([0, 1, 1, 0])], _CORNER), shape=(2, 2)))
        return total.to_dense(), total @ x, total @ y, product.to_dense(), from_bcoo.to_dense()

    dense, second = 3.0 * MATRIX, np.asarray(other.to_dense())
    total = dense + 2.0 * second
    expected = total, total @ x, total @ y, np.kron(dense, second), np.array([[2.0, -1.0], [-1.0, 2.0]])
    for found, known in zip(compute(jnp.array(NUMBERS), 3.0), expected, strict=True):
        np.testing.assert_allclose(found, known, atol=1e-12)
    static = SparsePrecision.of(MATRIX)
    assert jax.tree.structure(static) == jax.tree.structure(SparsePrecision(LOWER, NUMBERS, 3))
    assert len(jax.tree.leaves(static)) == 1  # numbers that are known stay constants: one program holds them
    batch = static.scale_by(np.array([1.0, 2.0]))
    np.testing.assert_allclose(batch @ x, np.stack([MATRIX @ x, 2.0 * MATRIX @ x]))
    np.testing.assert_allclose((batch + static).to_dense()[1], 3.0 * MATRIX)
    ridge = difference_precision(4, 1) + scipy.sparse.identity(4)
    assert ridge.null_space is None
    np.testing.assert_allclose(
        np.ptp((difference_precision(4, 1) + difference_precision(4, 2)).null_space), 0, atol=1e-12
    )


LOWER_INDICES = jnp.array(LOWER)
REFUSED = {
    "not symmetric": (
        lambda: SparsePrecision.of([[1.0, 2.0], [3.0, 9.0]]),
        r"not symmetric: entry \(0, 1\) is 2 and \(1, 0\) is 3. If only one triangle",
    ),
    "one triangle": (lambda: SparsePrecision.of(np.tril(MATRIX)), r"entry \(1, 0\) is -1 and \(0, 1\) is 0"),
    "traced and not symmetric": (
        lambda: jax.jit(lambda v: SparsePrecision.of(jax_sparse.BCOO((v, LOWER_INDICES), shape=(3, 3))).values)(
            jnp.array(NUMBERS)
        ),
        r"entry \(1, 0\) is listed and \(0, 1\) is not",
    ),
    "diagonal": (
        lambda: SparsePrecision.of([[0.0, 1.0], [1.0, 0.0]]),
        r"entry \(0, 1\) is there and the diagonal entry \(0, 0\) is missing.*graph_precision",
    ),
    "nan": (lambda: SparsePrecision.of([[1.0, 0.0], [0.0, np.nan]]), r"finite; entry \(1, 1\) is nan. Replace"),
    "infinite": (lambda: SparsePrecision([(0, 0)], [np.inf], 1), r"entry \(0, 0\) is inf"),
    "words": (lambda: SparsePrecision([(0, 0)], ["a"], 1), r"values must be numbers"),
    "shape": (lambda: SparsePrecision.of(np.ones((2, 3))), r"square matrix; got the shape \(2, 3\)"),
    "number of values": (lambda: SparsePrecision(LOWER, [1.0], 3), r"5 pairs of indices need as many values"),
    "out of range": (
        lambda: SparsePrecision([(0, 3)], [1.0], 3),
        r"row 0 of indices is \(0, 3\), and there are 3.*one",
    ),
    "negative": (lambda: SparsePrecision([(0, 0), (-1, 0)], [1, 1], 3), r"row 1 of indices is \(-1, 0\)"),
    "floats": (lambda: SparsePrecision([(0.0, 1.0)], [1.0], 3), r"must be integers; .*astype\(int\)"),
    "broken": (lambda: SparsePrecision([(0, 0), (0.5, 1)], [1.0, 1], 3), r"integers; .*0.5.* at \(1, 0\)"),
    "listed twice": (
        lambda: SparsePrecision([(0, 0), (0, 0)], [1, 1], 1),
        r"\(0, 0\) is listed more than once. Add up",
    ),
    "some both ways": (
        lambda: SparsePrecision([(0, 1), (1, 0), (1, 2)], [1, 1, 1], 3),
        r"\(1, 2\) is listed and \(2, 1\) is not, while other pairs",
    ),
    "size": (lambda: SparsePrecision([(0, 0)], [1.0], 1.5), r"size must be a whole number, 1 or more; got 1.5"),
    "factor": (lambda: difference_precision(3, 1).scale_by(-1.0), r"factor must be positive and finite; got -1.0"),
    "sizes": (lambda: difference_precision(3, 1) + difference_precision(4, 1), r"3 and 4 unknowns cannot be added"),
    "few points": (lambda: difference_precision(2, 2), r"order 2 need more than 2 points; got 2"),
    "graph: float": (lambda: graph_precision([(0.0, 1.0)], num_nodes=2), r"neighbours must be integers"),
    "graph: range": (
        lambda: graph_precision([(0, 2)], num_nodes=2),
        r"row 0 of neighbours is \(0, 2\), and there are 2",
    ),
    "graph: negative": (lambda: graph_precision([(0, -1)], num_nodes=2), r"row 0 of neighbours is \(0, -1\)"),
    "graph: loop": (lambda: graph_precision([(1, 1)], num_nodes=2), r"node 1 is listed as its own neighbour. Remove"),
    "graph: number": (lambda: graph_precision([(0, 1)]), r"give num_nodes="),
    "graph: weights": (
        lambda: graph_precision([(0, 1)], [0.0], num_nodes=2),
        r"positive; the one of the pair \(1, 0\)",
    ),
    "graph: two weights": (lambda: graph_precision([(0, 1), (1, 0)], [1, 2], num_nodes=2), r"the weights 1 and 2"),
    "graph: one way": (
        lambda: graph_precision(scipy.sparse.csr_matrix([[0, 1, 0], [0, 0, 0], [0, 0, 0]])),
        r"entry \(0, 1\) is 1 and \(1, 0\) is 0. If neighbours are named one way only, give matrix \+ matrix.T",
    ),
    "graph: nan": (
        lambda: graph_precision(np.full((3, 3), np.nan)),
        r"adjacency matrix must be finite; entry \(0, 0\)",
    ),
    "car: islands": (lambda: car(graph_precision(PAIRS, num_nodes=9), 0.5), r"nodes 7, 8 have no neighbours.*leroux"),
    "car: alpha": (lambda: car(graph_precision(PAIRS, num_nodes=7), 1.0), r"alpha must be in \(-1, 1\).*null_space="),
    "leroux: rho": (lambda: leroux(graph_precision(PAIRS, num_nodes=7), 1.0), r"rho must be in \[0, 1\)"),
    "pedigree: range": (lambda: pedigree_precision([-1, 5], [-1, -1]), r"sire\[1\] is 5, and there are 2 rows"),
    "pedigree: circle": (lambda: pedigree_precision([1, 0], [-1, -1]), r"row 0 is its own ancestor"),
    "phylogeny: length": (lambda: phylogeny_precision([-1, 0], [1, 0]), r"positive; the one of node 1 is 0"),
    "mesh: unused": (
        lambda: matern_precision((np.eye(4, 2), [(0, 1, 2)]), 1.0),
        r"vertex 3 is in no triangle",
    ),
    "mesh: flat": (lambda: matern_precision(([(0, 0), (1, 1), (2, 2)], [(0, 1, 2)]), 1.0), r"triangle 0.*has no area"),
    "mesh: index": (lambda: matern_precision((np.eye(3, 2), [(0, 1, 3)]), 1.0), r"row 0 of triangles is \(1, 3\)"),
    "mesh: range": (lambda: matern_precision((np.eye(3, 2), [(0, 1, 2)]), -1.0), r"range_ must be positive"),
    "spline: outside": (
        lambda: bspline_basis([0.0, 2.0], 5, domain=(0, 1)),
        r"coords\[1, 0\] is 2, outside of the domain \[0.0, 1.0\].*wider domain=",
    ),
    "spline: few": (lambda: bspline_basis([0.0, 2.0], 3), r"knots must be a whole number, 4 or more; got 3"),
    "spline: one place": (lambda: bspline_basis([1.0, 1.0], 5), r"low < high"),
    "product": (lambda: sparse_matmul(MATRIX, np.ones(2)), r"got the shapes \(3, 3\) and \(2,\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_was_found_and_what_to_do(case):
    ask, told = REFUSED[case]
    with pytest.raises(ValueError, match=told):
        ask()


def test_traced_matrices_that_are_not_symmetric_are_nan():
    values = jax.jit(lambda v: SparsePrecision.of(jax_sparse.BCOO((v, _CORNER), shape=(2, 2))).values)
    assert np.isfinite(values(jnp.array([2.0, 1.0, 1.0, 2.0]))).all()
    assert np.isnan(values(jnp.array([2.0, 1.0, 1.1, 2.0]))).any()


def test_graphs_have_parts_islands_and_scales():
    """Freni-Sterrantino et al. (2018): the geometric mean of the variances of each part is one, by a dense inverse."""
    graph = graph_precision(PAIRS, num_nodes=8)
    dense = np.asarray(graph.precision.to_dense())
    np.testing.assert_array_equal(dense, _laplacian(PAIRS, np.ones(7), 8))
    assert (graph.num_nodes, graph.num_components, graph.rank) == (8, 3, 5)
    assert graph.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 2]
    assert graph.is_island.tolist() == [False] * 7 + [True]
    np.testing.assert_array_equal(graph.null_space, np.eye(3)[graph.labels])
    variances = np.diagonal(np.linalg.pinv(np.asarray(graph.scaled.to_dense())))
    for part in (slice(0, 4), slice(4, 7)):
        assert np.mean(np.log(variances[part])) == pytest.approx(0.0, abs=1e-9)
    assert variances[7] == 0.0
    scale = np.asarray(graph.scaled.to_dense())[4:7, 4:7] / dense[4:7, 4:7].clip(min=None, max=-1e-9)
    assert scale[0, 1] == pytest.approx(scale[1, 2])
    both_ways = pd.DataFrame(PAIRS + [(j, i) for i, j in PAIRS], columns=["from", "to"])
    adjacency = scipy.sparse.coo_matrix((np.ones(7, int), np.transpose(PAIRS)), (8, 8))
    for given in (np.array(PAIRS, np.uint16), both_ways, (adjacency + adjacency.T).tolil()):
        again = graph_precision(given, num_nodes=8)
        assert jax.tree.structure(again) == jax.tree.structure(graph)
    islands = graph_precision([], num_nodes=2)
    assert (islands.rank, islands.num_components) == (0, 2)
    weights = np.arange(1.0, 8.0)
    np.testing.assert_allclose(
        graph_precision(PAIRS, weights, num_nodes=8).precision.to_dense(), _laplacian(PAIRS, weights, 8)
    )
    identity = np.eye(8)
    np.testing.assert_allclose(leroux(graph, 0.3).to_dense(), 0.3 * dense + 0.7 * identity)
    traced = jax.jit(lambda a: (leroux(graph, a).to_dense(), car(_connected(), a).to_dense()))(0.3)
    np.testing.assert_allclose(traced[0], 0.3 * dense + 0.7 * identity)
    degrees = np.diag([3.0, 2.0, 3.0, 2.0])
    np.testing.assert_allclose(traced[1], degrees - 0.3 * (degrees - dense[:4, :4]))


def _connected():
    return graph_precision(PAIRS[:5], num_nodes=4)


def test_graphs_can_be_saved(tmp_path):
    graph = graph_precision(PAIRS, num_nodes=8)
    write_archive(tmp_path / "file", {"args": (graph, leroux(graph, 0.5))})
    again, mixed = read_archive(tmp_path / "file")["args"]
    assert jax.tree.structure(again) == jax.tree.structure(graph)
    np.testing.assert_array_equal(again.null_space, graph.null_space)
    np.testing.assert_array_equal(mixed.values, leroux(graph, 0.5).values)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_walks_are_sums_of_squared_differences(order):
    x = np.cos(np.arange(9.0) ** 2)
    walk = difference_precision(9, order)
    assert x @ (walk @ x) == pytest.approx(np.sum(np.diff(x, order) ** 2))
    np.testing.assert_allclose(walk @ walk.null_space, 0.0, atol=1e-12)
    powers = np.vander(np.arange(9.0), order)
    assert np.linalg.matrix_rank(np.c_[powers, walk.null_space]) == order == walk.null_space.shape[1]
    around = difference_precision(9, order, cyclic=True)
    assert x @ (around @ x) == pytest.approx(np.sum(np.diff(np.r_[x, x[:order]], order) ** 2))
    assert np.linalg.matrix_rank(np.asarray(around.to_dense())) == 8


def test_variances_of_a_walk_are_those_of_its_sum():
    """A walk of first order with its mean taken away: variances of cumulated steps, centred."""
    field = GaussianMarkovRandomField(difference_precision(6, 1), null_space=np.ones(6), sum_to_zero=True)
    steps = np.tril(np.ones((6, 6)), -1)[:, :5]
    centred = steps - steps.mean(axis=0)
    np.testing.assert_allclose(field.variance, np.sum(centred**2, axis=1), rtol=1e-9)


def test_kronecker_products_and_sums_are_dense_ones():
    first, second = difference_precision(4, 2).scale_by(3.0), leroux(_connected(), 0.4)
    a, b = np.asarray(first.to_dense()), np.asarray(second.to_dense())
    np.testing.assert_allclose(kronecker(first, second).to_dense(), np.kron(a, b), atol=1e-12)
    total = np.kron(a, np.eye(4)) + np.kron(np.eye(4), b)
    np.testing.assert_allclose(kronecker_sum(first, second).to_dense(), total, atol=1e-12)
    for left, right in ((first, second), (first, difference_precision(3, 1)), (second, first)):
        product = kronecker(left, right)
        kept = product.size - np.linalg.matrix_rank(np.asarray(product.to_dense()))
        assert product.null_space.shape[1] == kept
        np.testing.assert_allclose(product @ product.null_space, 0.0, atol=1e-10)
    surface = kronecker_sum(difference_precision(4, 2), difference_precision(5, 1))
    assert np.linalg.matrix_rank(np.asarray(surface.to_dense())) == 20 - surface.null_space.shape[1]
    np.testing.assert_allclose(surface @ surface.null_space, 0.0, atol=1e-12)
    with pytest.raises(ValueError, match=r"null space has \d+ directions of 40000 numbers.*Add a small number"):
        kronecker(difference_precision(200, 2), difference_precision(200, 2))


def _relationships(sire, dam):
    """Additive relationships by the tabular recursion (Henderson 1976), parents before offspring."""
    table = np.zeros((len(sire), len(sire)))
    for i, parents in enumerate(zip(sire, dam, strict=True)):
        known = [p for p in parents if p >= 0]
        table[i, :i] = table[:i, i] = sum((0.5 * table[p, :i] for p in known), np.zeros(i))
        table[i, i] = 1.0 + (0.5 * table[parents] if len(known) == 2 else 0.0)
    return table


def test_pedigrees_are_inverse_tables_of_relationships():
    rng = np.random.default_rng(2)
    sire, dam = (np.array([rng.integers(-1, i) if i else -1 for i in range(30)]) for _ in range(2))
    sire[11], dam[11], sire[12], dam[12] = 3, 3, 11, 11  # selfing
    table = _relationships(sire, dam)
    assert np.diagonal(table).max() > 1.2  # inbred
    found = pedigree_precision(sire, dam)
    np.testing.assert_allclose(np.asarray(found.to_dense()) @ table, np.eye(30), atol=1e-10)
    assert pedigree_precision(pd.Series(np.where(sire < 0, np.nan, sire)), pd.array(dam, dtype="Int64")) is not None
    order = rng.permutation(30)  # parents below their offspring
    place = np.r_[np.argsort(order), -1]
    shuffled = pedigree_precision(place[sire[order]], place[dam[order]])
    np.testing.assert_allclose(shuffled.to_dense(), np.asarray(found.to_dense())[np.ix_(order, order)], atol=1e-12)


def test_phylogenies_are_times_that_are_shared():
    parent, length = np.array([-1, 0, 0, 1, 1, 2, -1]), np.array([1.0, 0.5, 0.7, 0.2, 0.3, 0.9, 2.0])
    above = np.zeros((7, 7))  # branches on the way of each node to the root
    for node in range(7):
        at = node
        while at >= 0:
            above[node, at] = 1.0
            at = parent[at]
    covariance = above * length @ above.T
    dense = phylogeny_precision(np.where(parent < 0, np.nan, parent), length).to_dense()
    np.testing.assert_allclose(np.asarray(dense) @ covariance, np.eye(7), atol=1e-12)


def test_meshes_have_the_covariance_of_matern_inside():
    """On triangles with steps of h the error of the variance is of the order (kappa h)^2 log(1 / kappa h)."""
    range_, sigma = 8.0, 1.5
    kappa = np.sqrt(8.0) / range_
    for n, step in ((41, 1.0), (81, 0.5)):
        x, y = np.meshgrid(step * np.arange(n), step * np.arange(n))
        corner = (np.arange(n - 1)[:, None] * n + np.arange(n - 1)).ravel()
        triangles = np.concatenate([corner[:, None] + (0, 1, n), corner[:, None] + (1, n + 1, n)])
        precision = matern_precision((np.stack([x.ravel(), y.ravel()], axis=1), triangles), range_, sigma)
        middle = np.zeros(n * n)
        middle[n * (n // 2) + n // 2] = 1.0
        found = scipy.sparse.linalg.spsolve(precision.to_scipy(), middle).reshape(n, n)[n // 2, n // 2 :]
        scaled = kappa * step * np.arange(1.0, 12.0 / step)
        expected = sigma**2 * np.r_[1.0, scaled * scipy.special.k1(scaled)]
        errors = np.abs(found[: len(expected)] - expected) / (sigma * kappa * step) ** 2
        assert errors.max() < 0.5 * (1.0 - np.log(kappa * step))
        assert errors[int(4.0 / step) :].max() < 0.02  # from half a range on, where the covariance is smooth
    traced = jax.jit(lambda r, s: matern_precision(MESH, r, s).values)(3.0, 2.0)
    np.testing.assert_allclose(traced, matern_precision(MESH, 3, 2).values, rtol=1e-12)


_CORNER = jnp.array([(0, 0), (0, 1), (1, 0), (1, 1)])
MESH = (np.array([(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)]), np.array([(0, 1, 2), (1, 3, 2)]))


@pytest.mark.parametrize("degree", [0, 1, 3])
def test_splines_are_those_of_scipy(degree):
    places = np.r_[0.0, np.random.default_rng(0).uniform(size=40), 1.0]
    found = bspline_basis(places, 9, degree=degree)
    knots = (np.arange(9 + degree + 1) - degree) / (9 - degree)
    for k in range(9):
        spline = scipy.interpolate.BSpline(knots, np.eye(9)[k], degree, extrapolate=False)
        # the last place belongs to the last spline, which SciPy leaves open on the right
        inside = np.nan_to_num(spline(places[:-1]))
        np.testing.assert_allclose(found[:-1, k].toarray().ravel(), inside, atol=1e-12)
    np.testing.assert_allclose(found.sum(axis=1), 1.0)


def test_surfaces_of_splines_are_products_and_products_are_dense_ones():
    coords = np.random.default_rng(1).uniform(size=(20, 2))
    rows = bspline_basis(coords, knots=(7, 5))
    single = [bspline_basis(coords[:, k], count).toarray() for k, count in ((0, 7), (1, 5))]
    np.testing.assert_allclose(rows.toarray(), np.einsum("ri,rj->rij", *single).reshape(20, 35), atol=1e-14)
    assert np.diff(rows.indptr).tolist() == [16] * 20
    weights = np.random.default_rng(2).normal(size=(3, 35))
    few = scipy.sparse.random(50, 35, 0.03, random_state=0).tolil()
    few[7] = 1.0  # one row of all: not padded
    for matrix in (rows, few, few.toarray(), jax_sparse.BCOO.from_scipy_sparse(few.tocsr())):
        dense = matrix.todense() if hasattr(matrix, "todense") else matrix
        np.testing.assert_allclose(sparse_matmul(matrix, weights), weights @ np.asarray(dense).T, atol=1e-12)
    slope = jax.jacobian(lambda w: sparse_matmul(rows, w))(weights[0])
    np.testing.assert_allclose(slope, rows.toarray(), atol=1e-14)
