"""Precisions of relatives: inverse relationship matrices of pedigrees, and phylogenies."""

from __future__ import annotations

import heapq
import math

import numpy as np
from jax.typing import ArrayLike

from .checks import checked_numbers, whole_numbers
from .precision import SparsePrecision, from_triangle


def pedigree_precision(sire: ArrayLike, dam: ArrayLike) -> SparsePrecision:
    """Inverse of the additive relationship matrix of a pedigree, with inbreeding.

    The field of breeding values of a pedigree has this precision over the additive variance. It is assembled from the
    parents alone, at a cost that grows with the number of animals; inbreeding coefficients take a walk through the
    ancestors of each pair of parents.

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_ext.distributions import pedigree_precision
        >>> precision = pedigree_precision(sire=[-1, -1, 0], dam=[-1, -1, 1])
        >>> print(np.asarray(precision.to_dense()))
        [[ 1.5  0.5 -1. ]
         [ 0.5  1.5 -1. ]
         [-1.  -1.   2. ]]

    **References**

    1. Henderson, C. R. (1976), *A simple method for computing the inverse of a numerator relationship matrix used in
       prediction of breeding values*, Biometrics 32.
    2. Meuwissen, T. and Luo, Z. (1992), *Computing inbreeding coefficients in large populations*, Genetics Selection
       Evolution 24.

    :param sire: row of the father of each animal, -1 or a missing value (``nan``, ``None``) where he is not known. In
        any order: parents may stand below their offspring.
    :param dam: row of the mother, the same.
    :raises ValueError: if a number is no row, an animal has itself or a descendant as a parent, or lengths differ.
    """
    name = "pedigree_precision"
    parents = [_parents(given, name, what) for given, what in ((sire, "sire"), (dam, "dam"))]
    if parents[0].shape != parents[1].shape:
        raise ValueError(f"{name}: sire and dam must have as many rows; got {len(parents[0])} and {len(parents[1])}.")
    order = _ancestors_first(parents, name)
    within = _mendelian_variances(parents, order)
    weights = [np.where(parent >= 0, -0.5, 0.0) for parent in parents]
    return _of_innovations(parents, weights, within)


def phylogeny_precision(parent: ArrayLike, length: ArrayLike) -> SparsePrecision:
    """Precision of a Brownian motion along the branches of a phylogeny, at its nodes, inner ones and tips.

    Unit variance for unit length. The root is no node: its value is zero, and the branches that begin at it have the
    parent -1. The precision is sparse because inner nodes are kept; those of the tips alone is dense.

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_ext.distributions import phylogeny_precision
        >>> precision = phylogeny_precision(parent=[-1, -1, 1, 1], length=[1.0, 0.5, 0.5, 0.5])
        >>> print(np.linalg.inv(precision.to_dense())[[0, 2, 3]][:, [0, 2, 3]].round(3))
        [[1.  0.  0. ]
         [0.  1.  0.5]
         [0.  0.5 1. ]]

    Source: Hadfield, J. and Nakagawa, S. (2010), *General quantitative genetic methods for comparative biology*,
    Journal of Evolutionary Biology 23.

    :param parent: row of the node at which the branch of each node begins, -1 or a missing value for the root.
    :param length: positive lengths of these branches.
    :raises ValueError: if a number is no row, a node is its own ancestor, or a length is not positive.
    """
    name = "phylogeny_precision"
    parents = _parents(parent, name, "parent")
    lengths = checked_numbers(length, name, "length")
    if lengths.shape != parents.shape:
        raise ValueError(f"{name}: parent and length must have as many rows; got {parents.shape} and {lengths.shape}.")
    if np.any(lengths <= 0):
        k = int(np.argmax(lengths <= 0))
        raise ValueError(
            f"{name}: lengths of branches must be positive; the one of node {k} is {lengths[k]}. Give both ends of a "
            "branch of length zero one node."
        )
    _ancestors_first([parents], name)
    return _of_innovations([parents], [np.where(parents >= 0, -1.0, 0.0)], lengths)


def _parents(given: object, name: str, what: str) -> np.ndarray:
    """Rows of parents, -1 for those that are not known."""
    array = np.asarray(given)
    if array.dtype == object:
        array = np.array([-1 if _is_missing(x) else x for x in array.tolist()])
    if array.dtype.kind == "f":  # as columns with missing values are
        array = np.where(np.isnan(array), -1.0, array)
        if np.all(array == np.floor(array)):
            array = array.astype(np.int64)
    rows = whole_numbers(array, name, what)
    if rows.ndim != 1 or not len(rows):
        raise ValueError(f"{name}: {what} must have one entry for each row, shape (n,); got {rows.shape}.")
    outside = (rows < -1) | (rows >= len(rows))
    if np.any(outside):
        k = int(np.argmax(outside))
        raise ValueError(
            f"{name}: {what}[{k}] is {rows[k]}, and there are {len(rows)} rows, numbered 0 to {len(rows) - 1} (-1 for "
            "unknown). Parents need rows of their own; names become numbers by their place in the list of animals."
        )
    return rows


def _is_missing(entry: object) -> bool:
    return entry is None or type(entry).__name__ == "NAType" or (isinstance(entry, float) and math.isnan(entry))


def _ancestors_first(parents: list[np.ndarray], name: str) -> np.ndarray:
    """Rows so ordered that parents stand before their offspring.

    :raises ValueError: if there is no such order.
    """
    size = len(parents[0])
    offspring: list[list[int]] = [[] for _ in range(size)]
    waiting = np.zeros(size, np.int64)
    for parent in parents:
        for child in np.flatnonzero(parent >= 0):
            offspring[parent[child]].append(int(child))
            waiting[child] += 1
    order: list[int] = np.flatnonzero(waiting == 0).tolist()
    for row in order:  # grows while it is walked through
        for number in offspring[row]:
            waiting[number] -= 1
            if waiting[number] == 0:
                order.append(number)
    if len(order) < size:
        first = int(np.flatnonzero(waiting > 0)[0])
        raise ValueError(
            f"{name}: row {first} is its own ancestor, or descends from such a row ({size - len(order)} rows do). "
            "Correct the parents."
        )
    return np.array(order)


def _mendelian_variances(parents: list[np.ndarray], order: np.ndarray) -> np.ndarray:
    """Variance of each animal given its parents, over the additive variance: the ``D`` of ``A = T D T^T``."""
    sire, dam = parents
    size = len(sire)
    age = np.empty(size, np.int64)
    age[order] = np.arange(size)
    inbreeding, within = np.zeros(size), np.ones(size)
    known: dict[tuple[int, int], float] = {}
    for animal in order:
        both = sorted((int(sire[animal]), int(dam[animal])))
        # an unknown parent is not inbred and has no ancestors
        within[animal] = 0.5 - 0.25 * sum(inbreeding[p] if p >= 0 else -1.0 for p in both)
        if both[0] < 0:
            continue
        key = both[0], both[1]
        if key not in known:
            known[key] = _half_relationship(key, parents, age, within)
        inbreeding[animal] = known[key]
    return within


def _half_relationship(pair: tuple[int, int], parents: list[np.ndarray], age: np.ndarray, within: np.ndarray) -> float:
    """Half the relationship of two animals, the inbreeding of their offspring: a sum over their common ancestors."""
    shares: dict[int, list[float]] = {}
    queue: list[tuple[int, int]] = []

    def give(animal: int, share: list[float]) -> None:
        if animal not in shares:
            shares[animal] = [0.0, 0.0]
            heapq.heappush(queue, (-int(age[animal]), animal))  # the youngest first: all its offspring have been seen
        shares[animal][0] += share[0]
        shares[animal][1] += share[1]

    give(pair[0], [1.0, 0.0])
    give(pair[1], [0.0, 1.0])
    total = 0.0
    while queue:
        _, animal = heapq.heappop(queue)
        share = shares.pop(animal)
        total += share[0] * share[1] * within[animal]
        for parent in parents:
            if parent[animal] >= 0:
                give(int(parent[animal]), [0.5 * share[0], 0.5 * share[1]])
    return 0.5 * total


def _of_innovations(parents: list[np.ndarray], weights: list[np.ndarray], variances: np.ndarray) -> SparsePrecision:
    """Precision of ``x_i + sum_k weights_k x_parent_k = innovation`` of these variances."""
    size = len(variances)
    members = [np.arange(size), *parents]
    coefficients = [np.ones(size), *weights]
    rows, columns, values = [], [], []
    for a, b in zip(members, coefficients, strict=True):
        for c, d in zip(members, coefficients, strict=True):
            is_there = (a >= 0) & (c >= 0) & (a >= c)
            rows.append(a[is_there])
            columns.append(c[is_there])
            values.append((b * d / variances)[is_there])
    keys = np.concatenate(rows) * size + np.concatenate(columns)
    unique, inverse = np.unique(keys, return_inverse=True)
    totals = np.bincount(inverse.reshape(-1), np.concatenate(values), len(unique))
    return from_triangle(size, unique // size, unique % size, totals)
