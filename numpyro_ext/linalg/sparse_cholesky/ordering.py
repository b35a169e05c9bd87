"""Orders of elimination, and their cost by the column counts of the factor."""

from __future__ import annotations

import importlib

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array, csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from .elimination_tree import EliminationTree, elimination_tree
from .pattern import SparsePattern

# Below, nested dissection finds no better order than minimum degree.
_LEAST_SIZE_OF_DISSECTION = 1000


def choose_ordering(pattern: SparsePattern) -> tuple[NDArray[np.int64], EliminationTree]:
    """Cheapest order among those tried, and the elimination tree of the matrix in that order.

    Minimum degree is tried always, nested dissection if ``pymetis`` is installed, the given order and that of reverse
    Cuthill-McKee where the matrix is a band so narrow that they might win.

    :return: the old index of each new one, shape (n,), such that the tree is in postorder; the tree.
    """
    best = _postordered(pattern, _minimum_degree(pattern))
    if pattern.size >= _LEAST_SIZE_OF_DISSECTION and (order := _nested_dissection(pattern)) is not None:
        best = min(best, _postordered(pattern, order), key=_flops)
    for order in (np.arange(pattern.size), _reverse_cuthill_mckee(pattern)):
        # A band has long chains of small fronts, one after the other, so it must win clearly.
        if order is not None and _flops_of_band(pattern, order) < 0.5 * best[1].flops:
            best = min(best, _postordered(pattern, order), key=_flops)
    return best


def _flops(candidate: tuple[NDArray[np.int64], EliminationTree]) -> float:
    return candidate[1].flops


def _postordered(pattern: SparsePattern, order: NDArray[np.int64]) -> tuple[NDArray[np.int64], EliminationTree]:
    tree, postorder = elimination_tree(pattern, order)
    return order[postorder], tree


def _flops_of_band(pattern: SparsePattern, order: NDArray[np.int64]) -> float:
    position = np.empty(pattern.size, np.int64)
    position[order] = np.arange(pattern.size)
    width = float(np.max(np.abs(position[pattern.rows] - position[pattern.columns])))
    return pattern.size * (width + 1) ** 2


def _symmetric(rows: NDArray[np.generic], columns: NDArray[np.generic], size: int) -> csr_array:
    """Adjacency without the diagonal."""
    i, j = np.concatenate([rows, columns]), np.concatenate([columns, rows])
    keep = i != j
    return csr_array((np.ones(np.count_nonzero(keep)), (i[keep], j[keep])), shape=(size, size))


def _minimum_degree(pattern: SparsePattern) -> NDArray[np.int64]:
    """Multiple minimum degree of SuperLU, whose incomplete factorisation is told to keep nothing.

    Dense columns go last beforehand: they would be searched again at each elimination.
    """
    from scipy.sparse.linalg import spilu

    size = pattern.size
    degree, is_dense = pattern.degrees, pattern.dense_columns
    sparse, dense = np.flatnonzero(~is_dense), np.flatnonzero(is_dense)
    if sparse.size == 0:
        return np.arange(size)
    index = np.full(size, -1, np.int32)
    index[sparse] = np.arange(sparse.size)
    keep = (index[pattern.rows] >= 0) & (index[pattern.columns] >= 0) & (pattern.rows != pattern.columns)
    i, j = index[pattern.rows[keep]], index[pattern.columns[keep]]
    diagonal = np.arange(sparse.size, dtype=np.int32)
    matrix = csc_array(
        (
            np.concatenate([np.ones(sparse.size), np.full(2 * i.size, 1e-9)]),
            (np.concatenate([diagonal, i, j]), np.concatenate([diagonal, j, i])),
        ),
        shape=(sparse.size, sparse.size),
    )
    found = spilu(
        matrix,
        drop_tol=1.0,
        fill_factor=1.0,
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )
    order = np.argsort(found.perm_c, kind="stable")
    return np.concatenate([sparse[order], dense[np.argsort(degree[dense], kind="stable")]])


def _nested_dissection(pattern: SparsePattern) -> NDArray[np.int64] | None:
    """METIS's order, or None where ``pymetis`` is not installed."""
    try:
        pymetis = importlib.import_module("pymetis")
    except ImportError:
        return None
    graph = _symmetric(pattern.rows, pattern.columns, pattern.size)
    order, _ = pymetis.nested_dissection(xadj=graph.indptr.tolist(), adjncy=graph.indices.tolist())
    return np.asarray(order, np.int64)


def _reverse_cuthill_mckee(pattern: SparsePattern) -> NDArray[np.int64]:
    graph = _symmetric(pattern.rows, pattern.columns, pattern.size)
    return np.asarray(reverse_cuthill_mckee(graph, symmetric_mode=True), np.int64)
