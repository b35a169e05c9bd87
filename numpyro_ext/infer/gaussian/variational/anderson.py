"""Anderson's mixing: a fixed-point iteration sped up by what its last moves taught (Anderson 1965)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import cho_solve

from ....linalg.cholesky import cholesky


class History(NamedTuple):
    """The last moves and what they did to the residual; rows of zeros where there is none yet."""

    moves: Array
    """Shape ``(memory, size)``, the newest first."""
    changes: Array
    """Residual after minus residual before each move, shape ``(memory, size)``."""


def empty_history(memory: int, size: int, dtype: jnp.dtype) -> History:
    """A history of nothing."""
    blank = jnp.zeros((memory, size), dtype)
    return History(blank, blank)


def remember(history: History, move: Array, change: Array) -> History:
    """Put a move in front and drop the oldest one; a pair with numbers that are not finite is left out."""
    is_good = jnp.all(jnp.isfinite(move)) & jnp.all(jnp.isfinite(change))
    moves = jnp.concatenate([move[None], history.moves[:-1]])
    changes = jnp.concatenate([change[None], history.changes[:-1]])
    return History(jnp.where(is_good, moves, history.moves), jnp.where(is_good, changes, history.changes))


def mixing_correction(history: History, residual: Array, scale: Array) -> Array:
    """Correction of ``x + residual`` that would make the residual smallest, were it linear.

    :param History history: of the iteration.
    :param Array residual: image minus argument at the current point ``x``, shape ``(size,)``.
    :param Array scale: units in which a residual counts, shape ``(size,)``.
    :return: shape ``(size,)``; zero without history.
    """
    weighted = scale * history.changes
    length = jnp.sqrt(jnp.sum(weighted**2, axis=1))
    is_used = length > 0
    length = jnp.where(is_used, length, 1.0)
    weighted = weighted / length[:, None]
    # The unit columns make the ridge a relative one; it also gives the empty rows their weight of zero.
    ridge = 10.0 * jnp.finfo(residual.dtype).eps
    gram = weighted @ weighted.T + jnp.diag(jnp.where(is_used, ridge, 1.0))
    weights = cho_solve((cholesky(gram), True), weighted @ (scale * residual)) / length
    return -(history.moves + history.changes).T @ weights
