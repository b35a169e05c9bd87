"""Everything about a factorisation that follows from the pattern alone, computed once for each pattern."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..padding import rounded_up
from .ordering import choose_ordering
from .pattern import AnyPattern, SparsePattern
from .symbolic import Batch, make_batches

_CACHE_BYTES = 256 * 2**20
_SHORT = 2**20
# Measured 2e9 on a grid of 10^5 nodes, 5e9 on a crossed design; only to say about how long a refused one would take.
_FLOPS_PER_SECOND = 4e9


class Analysis(NamedTuple):
    """Order of elimination and fronts of a pattern, on the host."""

    pattern: SparsePattern
    order: NDArray[np.int64]
    """Old index of each column in the order of elimination, shape (n,)."""
    batches: tuple[Batch, ...]
    """Fronts, from the leaves of the elimination tree to its roots."""
    fill: int
    """Entries of the factor."""
    flops: float
    """Multiplications and additions of a factorisation."""
    memory: int
    """Bytes that a factorisation, or a selected inverse, needs: the factor and what fronts pass on."""

    @property
    def length(self) -> int:
        """Numbers that the factor is stored in, with the zeros that padding and relaxed supernodes add."""
        return self.batches[-1].stop

    @property
    def padded_length(self) -> int:
        """:attr:`length` rounded up, by more where it is small, so that patterns of like size share programs."""
        return rounded_up(self.length, digits=1 if self.length < _SHORT else 3)

    @property
    def nbytes(self) -> int:
        """Bytes that this analysis takes itself."""
        return self.order.nbytes + sum(batch.nbytes for batch in self.batches)


_analyses: OrderedDict[bytes, Analysis] = OrderedDict()
_lock = threading.Lock()


def analyse(pattern: SparsePattern, *, memory_limit: int = 4 * 2**30) -> Analysis:
    """Symbolic factorisation, kept for patterns used last (256 MB).

    >>> from numpyro_ext.linalg.sparse_cholesky import SparsePattern, analyse
    >>> chain = SparsePattern.of(5, [1, 2, 3, 4], [0, 1, 2, 3])
    >>> analyse(chain).fill
    9

    :param SparsePattern pattern: entries of the lower triangle.
    :param int memory_limit: bytes that a factorisation may need.
    :return: the order, the fronts, and predictions: ``fill``, ``flops``, ``memory``.
    :raises ValueError: if it would need more, before anything of that size is allocated.
    """
    with _lock:
        if (known := _analyses.get(pattern.digest)) is not None:
            _analyses.move_to_end(pattern.digest)
    if known is None:
        order, tree = choose_ordering(pattern)
        # a factor has at least so many numbers
        if 8 * tree.fill > memory_limit:
            raise _too_large(pattern, 8 * tree.fill, tree.flops, int(tree.counts.max()), memory_limit)
        order, batches = make_batches(pattern, order, tree)
        known = Analysis(pattern, order, tuple(batches), tree.fill, tree.flops, _memory(batches))
        with _lock:
            _analyses[pattern.digest] = known
            _forget_oldest(_CACHE_BYTES)
    if known.memory > memory_limit:
        largest = max(sum(batch.shape[1:]) for batch in known.batches)
        raise _too_large(pattern, known.memory, known.flops, largest, memory_limit)
    return known


def known_analysis(pattern: AnyPattern) -> Analysis:
    """:func:`analyse` of a pattern whose arrays have values, by its digest alone where that is kept."""
    if isinstance(pattern, SparsePattern):
        return analyse(pattern)
    with _lock:
        if (known := _analyses.get(digest := np.asarray(pattern.digest).tobytes())) is not None:
            _analyses.move_to_end(digest)
            return known
    return analyse(pattern.known())


def _forget_oldest(most_bytes: int) -> None:
    """Keep the last analysis, and of the others as many of the last ones as have room."""
    total = sum(analysis.nbytes for analysis in _analyses.values())
    while total > most_bytes and len(_analyses) > 1:
        total -= _analyses.popitem(last=False)[1].nbytes


def _memory(batches: list[Batch]) -> int:
    waiting: dict[int, int] = {}
    most = 0
    for number, batch in enumerate(batches):
        fronts, own, below = batch.shape
        most = max(most, sum(waiting.values()) + fronts * (own + below) ** 2)
        for child in batch.children:
            if child.is_last:
                del waiting[child.batch]
        if below:
            waiting[number] = fronts * below**2
    return 8 * (batches[-1].stop + most)


def _too_large(pattern: SparsePattern, memory: int, flops: float, front: int, limit: int) -> ValueError:
    return ValueError(
        f"The Cholesky factor of this matrix of {pattern.size} rows and {pattern.num_entries} entries would need "
        f"{memory / 2**30:.2g} GiB, of {limit / 2**30:.2g} allowed, and about {flops / _FLOPS_PER_SECOND:.2g} s each "
        f"time; its largest front has {front} rows. Fewer unknowns or a graph with smaller separators help (maps and "
        "meshes have them, random graphs have not), installing pymetis (the extra 'sparse') may, and so "
        "may an iterative method."
    )
