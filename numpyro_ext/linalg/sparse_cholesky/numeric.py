"""Numbers of the factor, solves and the selected inverse, front by front on the host.

The fronts are those of Duff and Reid (1983). Of each front F, with own columns first, the factor keeps ``inv(L11)``
and ``L21``, where ``F11 = L11 L11'`` and ``F21 = L21 L11'``; all that follows the factorisation is products of small
matrices. The inverse of a triangular block costs no more digits than substitution (Higham 2002, section 14.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dpotrf, dtrtri

from .symbolic import Batch

Array = NDArray[np.float64]

# Own columns of fronts are factorised and inverted by LAPACK one front after the other, unless there are more than
# so many fronts for each of their columns.
_MANY_FRONTS = 4


class _NotPositive(Exception):
    """A front is not positive definite."""


def factorise(batches: Sequence[Batch], values: Array, out: Array | None = None) -> Array:
    """Factor as one flat array; all nan where the matrix is not positive definite or not finite.

    :param out: array that becomes the factor, with zeros behind it where it is longer; by default a new one.
    """
    factor = np.empty(batches[-1].stop) if out is None else out
    factor[batches[-1].stop :] = 0.0
    if not np.all(np.isfinite(values)):
        factor.fill(np.nan)
        return factor
    updates: dict[int, Array] = {}
    try:
        for number, batch in enumerate(batches):
            front = _assemble(batches, batch, values, updates, diagonal_of_padding=1.0)
            own = batch.shape[1]
            inverse, lower = _parts(factor, batch)
            _invert_cholesky(front[:, :own, :own], inverse)
            if lower.size:
                _product(front[:, own:, :own], _transposed(inverse), out=lower)
                update = _product(lower, _transposed(lower))
                updates[number] = np.subtract(front[:, own:, own:], update, out=update)
    except _NotPositive:
        factor.fill(np.nan)
        return factor
    if not np.isfinite(np.sum(factor)):
        factor.fill(np.nan)
    return factor


def log_determinant(batches: Sequence[Batch], factor: Array) -> float:
    """Log determinant of the matrix."""
    diagonals = [np.diagonal(_parts(factor, batch)[0], axis1=1, axis2=2).reshape(-1) for batch in batches]
    return -2.0 * float(np.sum(np.log(np.concatenate(diagonals))))


def solve_lower(batches: Sequence[Batch], factor: Array, b: Array) -> Array:
    """Solution of ``L y = b``, rows in the order of elimination, shape (n, k)."""
    y = np.concatenate([b, np.zeros((1, b.shape[1]))], dtype=np.float64)
    for batch in batches:
        inverse, lower = _parts(factor, batch)
        own = _product(inverse, y.take(batch.columns, axis=0))
        y[batch.columns] = own
        if lower.size:
            change = _product(lower, own)
            if batch.is_large:  # without padding, so that no row occurs twice in a front
                for rows, part in zip(batch.rows, change, strict=True):
                    y[rows] -= part
            else:  # number by number, which NumPy does several times faster than row by row
                places = batch.rows[..., None] * b.shape[1] + np.arange(b.shape[1])
                np.subtract.at(y.reshape(-1), places.reshape(-1), change.reshape(-1))
    return y[:-1]


def solve_upper(batches: Sequence[Batch], factor: Array, b: Array) -> Array:
    """Solution of ``L' x = b``, rows in the order of elimination, shape (n, k)."""
    x = np.concatenate([b, np.zeros((1, b.shape[1]))], dtype=np.float64)
    for batch in reversed(batches):
        inverse, lower = _parts(factor, batch)
        own = x.take(batch.columns, axis=0)
        if lower.size:
            own -= _product(_transposed(lower), x.take(batch.rows, axis=0))
        x[batch.columns] = _product(_transposed(inverse), own)
    return x[:-1]


def selected_inverse(batches: Sequence[Batch], factor: Array, num_entries: int) -> Array:
    """Inverse at the entries of the pattern (Takahashi et al. 1973), from the roots to the leaves."""
    result = np.zeros(num_entries)  # of padding too
    outer: dict[int, Array] = {}
    for number in range(len(batches) - 1, -1, -1):
        batch = batches[number]
        inverse, lower = _parts(factor, batch)
        gain = _product(lower, inverse)
        own_inverse = _product(_transposed(inverse), inverse)
        front = _inverse_front(own_inverse, gain, outer.pop(number, None))
        result[batch.entries] = front.reshape(-1)[batch.places]
        _hand_down(batches, batch, front, outer)
    return result


def selected_inverse_tangent(batches: Sequence[Batch], factor: Array, tangent: Array) -> Array:
    """Derivative of the selected inverse: ``-inv(H) dH inv(H)`` at the entries of the pattern.

    The recursions of the factorisation and of the selected inverse, differentiated front by front; three times the
    work of both.

    :param tangent: dH at the entries of the pattern.
    """
    gains, own_inverses, own_tangents, gain_tangents = [], [], [], []
    updates: dict[int, Array] = {}
    for number, batch in enumerate(batches):
        inverse, lower = _parts(factor, batch)
        gain, own_inverse = _product(lower, inverse), _product(_transposed(inverse), inverse)
        front = _assemble(batches, batch, tangent, updates, diagonal_of_padding=0.0)
        own = batch.shape[1]
        below = front[:, own:, :own]
        own_tangent = np.tril(front[:, :own, :own])
        own_tangent += _transposed(np.tril(own_tangent, -1))
        moved = _product(gain, own_tangent)
        if lower.size:
            # of the Schur complement F22 - F21 inv(F11) F12, with the gain F21 inv(F11)
            cross = _product(below, _transposed(gain))
            update = _product(moved, _transposed(gain))
            update += front[:, own:, own:]
            update -= cross
            update -= _transposed(cross)
            updates[number] = update
        gains.append(gain)
        own_inverses.append(own_inverse)
        own_tangents.append(-own_inverse @ own_tangent @ own_inverse)
        gain_tangents.append((below - moved) @ own_inverse)
    result = np.zeros(tangent.size)
    outer: dict[int, Array] = {}
    outer_tangent: dict[int, Array] = {}
    for number in range(len(batches) - 1, -1, -1):
        batch, gain, gain_tangent = batches[number], gains[number], gain_tangents[number]
        corner = outer.pop(number, None)
        front = _inverse_front(own_inverses[number], gain, corner)
        change = np.empty_like(front)
        own = batch.shape[1]
        change[:, :own, :own] = own_tangents[number]
        if corner is not None:
            corner_tangent = outer_tangent.pop(number)
            below = -(corner_tangent @ gain + corner @ gain_tangent)
            change[:, own:, own:] = corner_tangent
            change[:, own:, :own] = below
            change[:, :own, own:] = _transposed(below)
            change[:, :own, :own] -= _transposed(gain_tangent) @ front[:, own:, :own] + _transposed(gain) @ below
        result[batch.entries] = change.reshape(-1)[batch.places]
        _hand_down(batches, batch, front, outer)
        _hand_down(batches, batch, change, outer_tangent)
    return result


def _product(a: Array, b: Array, out: Array | None = None) -> Array:
    """Products of matrices; of a column and a row without a call for each."""
    return np.multiply(a, b, out=out) if a.shape[-1] == 1 else np.matmul(a, b, out=out)


def _transposed(matrices: Array) -> Array:
    return np.swapaxes(matrices, -1, -2)


def _parts(factor: Array, batch: Batch) -> tuple[Array, Array]:
    """Views of ``inv(L11)``, shape (m, K, K), and ``L21``, shape (m, B, K)."""
    fronts, own, below = batch.shape
    middle = batch.start + fronts * own * own
    return (
        factor[batch.start : middle].reshape(fronts, own, own),
        factor[middle : batch.stop].reshape(fronts, below, own),
    )


def _assemble(
    batches: Sequence[Batch], batch: Batch, values: Array, updates: dict[int, Array], *, diagonal_of_padding: float
) -> Array:
    """Fronts, shape (m, F, F): entries of the matrix and what children leave, right in the lower triangles alone."""
    fronts, own, below = batch.shape
    front = np.zeros((fronts, own + below, own + below))
    flat = front.reshape(-1)
    flat[batch.places] = values.take(batch.entries)
    flat[batch.padding] = diagonal_of_padding
    for child in batch.children:
        source = batches[child.batch]
        update = updates[child.batch][child.start : child.stop]
        if source.is_large:  # without padding, so that no place occurs twice
            for one, parent, place in zip(update, child.parents, source.in_parent[child.start :], strict=False):
                front[parent][np.ix_(place, place)] += one
        else:
            places = child.places
            if places is None:
                places = child.find_places(source.in_parent, own + below)
            np.add.at(flat, places.reshape(-1), update.reshape(-1))
        if child.is_last:
            del updates[child.batch]
    return front


def _hand_down(batches: Sequence[Batch], batch: Batch, front: Array, outer: dict[int, Array]) -> None:
    """Give the children of a batch the part of an inverse that belongs to their rows below."""
    for child in batch.children:
        source = batches[child.batch]
        if child.batch not in outer:
            outer[child.batch] = np.empty((source.shape[0], source.shape[2], source.shape[2]))
        target = outer[child.batch]
        if source.is_large:
            for slot, parent in zip(range(child.start, child.stop), child.parents, strict=True):
                place = source.in_parent[slot]
                target[slot] = front[parent][np.ix_(place, place)]
        else:
            places = child.places
            if places is None:
                places = child.find_places(source.in_parent, front.shape[1])
            np.take(front.reshape(-1), places, out=target[child.start : child.stop], mode="clip")


def _inverse_front(own_inverse: Array, gain: Array, corner: Array | None) -> Array:
    """Inverse at a front, from that at its rows below."""
    own = own_inverse.shape[1]
    if corner is None:
        return own_inverse
    below = -_product(corner, gain)
    width = own + gain.shape[1]
    front = np.empty((own_inverse.shape[0], width, width))
    front[:, own:, own:] = corner
    front[:, own:, :own] = below
    front[:, :own, own:] = _transposed(below)
    np.subtract(own_inverse, _product(_transposed(gain), below), out=front[:, :own, :own])
    return front


def _invert_cholesky(matrices: Array, out: Array) -> None:
    """Inverses of the lower Cholesky factors, of which only the lower triangles are read."""
    number, size = out.shape[:2]
    if size == 1:
        pivots = matrices[:, 0, 0]
        if not np.all(pivots > 0.0):
            raise _NotPositive
        out[:, 0, 0] = 1.0 / np.sqrt(pivots)
        return
    if number > _MANY_FRONTS * size:
        try:
            lower = np.asarray(np.linalg.cholesky(matrices), np.float64)
        except np.linalg.LinAlgError as error:
            raise _NotPositive from error
        _invert_lower(lower, out)
        return
    out[...] = matrices
    for one in out:
        # in place, as the transpose has the order of columns
        if dpotrf(one.T, lower=0, overwrite_a=1)[1]:
            raise _NotPositive
        dtrtri(one.T, lower=0, overwrite_c=1)


def _invert_lower(lower: Array, out: Array) -> None:
    """Inverses of lower triangular matrices: of both halves of their rows at once, and what couples these."""
    number, size = lower.shape[:2]
    half = size // 2
    out[...] = 0.0
    if size % 2:  # row by row
        pivots = 1.0 / np.diagonal(lower, axis1=1, axis2=2)
        for i in range(size):
            if i:
                row = _product(lower[:, i : i + 1, :i], out[:, :i, :i])[:, 0]
                out[:, i, :i] = -pivots[:, i, None] * row
            out[:, i, i] = pivots[:, i]
        return
    halves = np.concatenate([lower[:, :half, :half], lower[:, half:, half:]])
    inverses = np.empty_like(halves)
    _invert_lower(halves, inverses)
    first, second = inverses[:number], inverses[number:]
    out[:, :half, :half], out[:, half:, half:] = first, second
    np.negative(_product(second, _product(lower[:, half:, :half], first)), out=out[:, half:, :half])
