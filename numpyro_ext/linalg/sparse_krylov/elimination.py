"""Order in which the unknowns of a sparse precision are eliminated: leaves, those of a Krylov space, a few common
ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

from ..padding import padded_groups
from ..sparse_cholesky import SparsePattern

_Ints = NDArray[np.int64]

_LARGEST_LEAF = 8
_MOST_COMMON = 64
_COMMON_SHARE = 0.25
"""Share of all unknowns that one meets from which on it is a common one."""
_MOST_KNOWN = 8
NUM_PROBES = 32


class Couplings(NamedTuple):
    """Matrix in compressed rows of which each stored element is taken from an array."""

    pointer: NDArray[np.int32]
    columns: NDArray[np.int32]
    source: _Ints
    """Place of each element in the array that holds the elements."""
    shape: tuple[int, int]

    @classmethod
    def of(cls, rows: _Ints, columns: _Ints, source: _Ints, shape: tuple[int, int]) -> Couplings:
        """Couplings of elements in any order."""
        order = np.lexsort((columns, rows))
        pointer = np.searchsorted(rows[order], np.arange(shape[0] + 1))
        return cls(pointer.astype(np.int32), columns[order].astype(np.int32), source[order], shape)

    def matrix(self, elements: NDArray[np.float64]) -> scipy.sparse.csr_matrix:
        """The matrix of given elements."""
        return scipy.sparse.csr_matrix((elements[self.source], self.columns, self.pointer), self.shape)


class Plan(NamedTuple):
    """Places of the entries of a pattern by the classes of their unknowns.

    Leaves are ``b`` blocks of ``n`` places, padded; the unknowns of the Krylov space are ``m``, the common ones ``q``.
    Entries of places without an unknown are one past the last.
    """

    leaves: _Ints
    """Unknowns in the leaves, shape ``(b, n)``, padded with the number of unknowns."""
    middle: _Ints
    """Unknowns of the Krylov space, shape ``(m,)``."""
    common: _Ints
    """Shape ``(q,)``."""
    within: _Ints
    """Entries in leaves, shape ``(b, n, n)``."""
    block: _Ints
    """Leaf of each pair of a leaf and an unknown of the Krylov space that it meets, shape ``(p,)``, sorted."""
    met: _Ints
    """Place in ``middle`` of each pair."""
    pairs: _Ints
    """Entries of the pairs, shape ``(p, n)``."""
    rows: Couplings
    """Pairs as a matrix of ``b n`` rows and ``m`` columns."""
    columns: Couplings
    """Its transpose."""
    diagonal: _Ints
    """Diagonal entries of the middle, shape ``(m,)``."""
    beside: Couplings
    """Other entries of the middle, both triangles."""
    leaves_common: _Ints
    """Entries of leaves with common unknowns, shape ``(b n, q)``."""
    middle_common: _Ints
    """Shape ``(m, q)``."""
    common_common: _Ints
    """Shape ``(q, q)``."""


@jax.tree_util.register_static
class Elimination:
    """Pattern of a symmetric matrix whose unknowns are eliminated in three steps.

    Leaves are blocks of few unknowns that do not meet each other, such as the largest factor of a crossed design. The
    Schur complement that is left is known by its products, but for a few common unknowns that meet most others, which
    come last and are eliminated exactly. Equal and hashed by its content.

    :param SparsePattern pattern: entries of the matrix.
    :param leaves: unknowns of each block, shape ``(b, n)``, padded with the number of unknowns.
    :param common: shape ``(q,)``.
    :param num_probes: random signs by which log determinants are estimated; ``None`` takes unit vectors in their
        place, as many as the Krylov space has unknowns, with which they are exact.
    :param known: orthonormal directions that the signs are orthogonal to, which are taken one by one; those of small
        eigenvalues would give estimates most of their error. Shape ``(m, r)``.
    """

    def __init__(
        self,
        pattern: SparsePattern,
        leaves: np.ndarray,
        common: np.ndarray,
        num_probes: int | None = NUM_PROBES,
        known: np.ndarray | None = None,
    ) -> None:
        self.pattern = pattern
        self.leaves, self.common = np.asarray(leaves, np.int64), np.asarray(common, np.int64)
        is_middle = np.ones(pattern.size + 1, bool)
        is_middle[self.leaves] = is_middle[self.common] = is_middle[-1] = False
        self.middle = np.flatnonzero(is_middle)
        self.num_probes = None if num_probes is None or num_probes >= self.middle.size else num_probes
        self.known = np.zeros((self.middle.size, 0)) if known is None else known
        content = hashlib.blake2b(pattern.digest, digest_size=16)
        content.update(str((self.leaves.shape, self.common.size, self.num_probes)).encode())
        content.update(self.leaves.tobytes())
        content.update(self.common.tobytes())
        content.update(np.ascontiguousarray(self.known).tobytes())
        self.digest = content.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Elimination) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Elimination({self.leaves.shape[0]} leaves, {self.middle.size} by products, {self.common.size} common)"

    def describe(self) -> str:
        """The order of elimination, in a line."""
        number, width = self.leaves.shape
        return (
            f"eliminated: {number} blocks of up to {width} unknowns, then {self.middle.size} by conjugate gradients, "
            f"then {self.common.size}"
        )

    @cached_property
    def probes(self) -> NDArray[np.float64]:
        """Starts of Krylov spaces whose outer products add up to one, on average over signs; shape ``(m, number)``."""
        size = self.middle.size
        if self.num_probes is None:
            return np.eye(size)
        return self.starts(np.random.default_rng(0).choice([-1.0, 1.0], (size, self.num_probes)))

    def starts(self, signs: NDArray[np.float64]) -> NDArray[np.float64]:
        """The known directions, and what signs ``(m, num_probes)`` have beside these."""
        beside = signs - self.known @ (self.known.T @ signs)
        return np.concatenate([self.known, beside / np.sqrt(signs.shape[1])], axis=1)

    @cached_property
    def plan(self) -> Plan:
        """Places of all entries."""
        pattern, size = self.pattern, self.pattern.size
        nothing = pattern.num_entries
        (b, n), m, q = self.leaves.shape, self.middle.size, self.common.size
        kind, place = np.full(size, 1), np.zeros(size, np.int64)
        is_leaf = self.leaves < size
        kind[self.leaves[is_leaf]], kind[self.common] = 0, 2
        place[self.leaves[is_leaf]] = np.flatnonzero(is_leaf.reshape(-1))
        place[self.middle], place[self.common] = np.arange(m), np.arange(q)
        # both triangles, the diagonal once
        slots = np.arange(nothing)
        off = np.flatnonzero(pattern.rows != pattern.columns)
        i = np.concatenate([pattern.rows, pattern.columns[off]]).astype(np.int64)
        j = np.concatenate([pattern.columns, pattern.rows[off]]).astype(np.int64)
        slots = np.concatenate([slots, slots[off]])

        def of(first: int, second: int) -> tuple[_Ints, _Ints, _Ints]:
            chosen = np.flatnonzero((kind[i] == first) & (kind[j] == second))
            return place[i[chosen]], place[j[chosen]], slots[chosen]

        def filled(first: int, second: int, shape: tuple[int, int]) -> _Ints:
            found = np.full(shape, nothing)
            rows, columns, source = of(first, second)
            found[rows, columns] = source
            return found

        rows, columns, source = of(0, 0)
        if np.any(rows // n != columns // n):
            raise ValueError("leaves must not meet each other.")
        within = np.full((b, n, n), nothing)
        within[rows // n, rows % n, columns % n] = source
        rows, columns, source = of(0, 1)
        codes, inverse = np.unique(rows // n * m + columns, return_inverse=True)
        block, met = np.divmod(codes, max(m, 1))
        pairs = np.full((codes.size, n), nothing)
        pairs[inverse, rows % n] = source
        at = (block[:, None] * n + np.arange(n)).reshape(-1), np.repeat(met, n), np.arange(codes.size * n)
        rows, columns, source = of(1, 1)
        is_off = rows != columns
        diagonal = np.zeros(m, np.int64)
        diagonal[rows[~is_off]] = source[~is_off]
        beside = Couplings.of(rows[is_off], columns[is_off], source[is_off], (m, m))
        return Plan(
            self.leaves,
            self.middle,
            self.common,
            within,
            block,
            met,
            pairs,
            Couplings.of(*at, (b * n, m)),
            Couplings.of(at[1], at[0], at[2], (m, b * n)),
            diagonal,
            beside,
            filled(0, 2, (b * n, q)),
            filled(1, 2, (m, q)),
            filled(2, 2, (q, q)),
        )


def find_elimination(
    pattern: SparsePattern, sites: Sequence[tuple[int, int]], num_probes: int | None = NUM_PROBES
) -> Elimination:
    """Elimination whose leaves are those of the largest sites whose unknowns do not meet, but in blocks of eight.

    :param SparsePattern pattern: entries of the matrix.
    :param sites: first unknown and number of unknowns of each site.
    :param num_probes: see :class:`Elimination`.

    >>> first, second = np.divmod(np.arange(600), 20)  # thirty levels of a factor meet twenty of another one
    >>> pattern = SparsePattern.of(51, np.append(30 + second, np.full(50, 50)), np.append(first, np.arange(50)))
    >>> find_elimination(pattern, [(0, 30), (30, 20), (50, 1)])
    Elimination(30 leaves, 0 by products, 21 common)
    """
    is_leaf, label = np.zeros(pattern.size, bool), np.zeros(0, np.int64)
    for start, size in sorted(sites, key=lambda site: -site[1]):
        trial = is_leaf.copy()
        trial[start : start + size] = True
        found = _components(pattern, trial)
        if np.bincount(found).max(initial=0) <= _LARGEST_LEAF:
            is_leaf, label = trial, found
    unknowns = np.append(np.flatnonzero(is_leaf), pattern.size)
    number = int(label.max(initial=-1)) + 1
    leaves = unknowns[padded_groups(label, number, label.size)] if number else np.zeros((0, 1), np.int64)
    off = pattern.rows != pattern.columns
    touched = np.concatenate([pattern.rows[off], pattern.columns[off]])
    meets = np.where(is_leaf, 0, np.bincount(touched, minlength=pattern.size))
    order = np.argsort(-meets, kind="stable")[:_MOST_COMMON]
    common = order[meets[order] > _COMMON_SHARE * pattern.size]
    # sums over the levels of a factor, which those of another one may take the place of
    site = np.zeros(pattern.size, np.int64)
    for number, (start, size) in enumerate(sites):
        site[start : start + size] = number
    is_middle = ~is_leaf
    is_middle[common] = False
    label, found = site[is_middle], np.unique(site[is_middle])[:_MOST_KNOWN]
    known = np.where(label[:, None] == found, np.sqrt(meets[is_middle])[:, None], 0.0)
    size = np.linalg.norm(known, axis=0)
    known = known[:, size > 0.0] / size[size > 0.0]
    return Elimination(pattern, leaves, common, num_probes, known)


def _components(pattern: SparsePattern, mask: np.ndarray) -> np.ndarray:
    """Component of each unknown of a mask, of those that meet within it."""
    place = np.cumsum(mask) - 1
    inside = mask[pattern.rows] & mask[pattern.columns]
    i, j = place[pattern.rows[inside]], place[pattern.columns[inside]]
    size = int(mask.sum())
    graph = scipy.sparse.coo_matrix((np.ones(i.size, np.int8), (i, j)), (size, size))
    label: np.ndarray = connected_components(graph.tocsr(), directed=False)[1]
    return label
