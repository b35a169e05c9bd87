"""Factorisation of the counts of people and items, whose products are the logits of a person's next event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .counts import PairCounts
from .events import EventSequences
from .predictor import SequencePredictor, all_events


def matrix_factorisation_objective(M: ArrayLike, V: ArrayLike, U: ArrayLike, penalty: float) -> Array:
    r"""Objective of the factorisation of the positive cells of a matrix.

    .. math:: \sum_{M_{iu} > 0} (M_{iu} - v_i' u_u)^2 + \lambda (\sum_i d_i |v_i|^2 + \sum_u d_u |u_u|^2)

    with the numbers :math:`d_i`, :math:`d_u` of positive cells of an item and of a user. Differentiable in ``V``, ``U``
    and ``penalty``.

    **References**

    1. Ko, Y. J. (2017), *Applications of Approximate Learning and Inference for Probabilistic Models*, EPFL,
       equations (3.127)-(3.129).

    :param M: logarithms of counts plus one, shape ``(items, users)``.
    :param V: vectors of the items in columns, shape ``(width, items)``.
    :param U: vectors of the users in columns, shape ``(width, users)``.
    :param float penalty: :math:`\lambda`.
    :return: a number.

    **Example:**

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.sequences import matrix_factorisation_objective
    >>> M = jnp.array([[1.0, 0.0], [2.0, 1.0]])
    >>> print(matrix_factorisation_objective(M, jnp.ones((1, 2)), jnp.ones((1, 2)), 0.5))
    4.0
    """
    M, V, U = jnp.asarray(M), jnp.asarray(V), jnp.asarray(U)
    seen = M > 0
    squares = jnp.sum(jnp.where(seen, M - V.T @ U, 0.0) ** 2)
    sizes = jnp.sum(seen, axis=1) @ jnp.sum(V**2, axis=0) + jnp.sum(seen, axis=0) @ jnp.sum(U**2, axis=0)
    return squares + penalty * sizes


@dataclass(eq=False)
class MatrixFactorisation(SequencePredictor):
    """Factorisation of ``log(count + 1)`` of users and items; a user's next event has the softmax of her products.

    Order does not matter, and all test events of a user have the same probabilities. Alternating least squares, which
    never raises the objective; a sweep takes a time of ``non-zeros * width**2``. Someone who was not in the training
    has the vector that minimises the objective for her history, and without one all items alike.

    **References**

    1. Hu, Y., Koren, Y. and Volinsky, C. (2008), Collaborative filtering for implicit feedback datasets, *ICDM*.
    2. Ko, Y. J. (2017), *Applications of Approximate Learning and Inference for Probabilistic Models*, EPFL,
       section 3.3.4.

    :param int width: length of the vectors.
    :param float penalty: weight of the squares of the vectors, times the number of items of a user and of users of an
        item.
    :param int seed: of the random start.
    :param int max_sweeps: greatest number of sweeps. They end when the objective falls by less than 1e-6 of itself.
    """

    width: int = 16
    penalty: float = 0.05
    seed: int = 0
    max_sweeps: int = 200

    def _fit(self, train: EventSequences, validation: EventSequences | None) -> None:
        if self.width < 1 or not self.penalty > 0:
            raise ValueError(
                f"MatrixFactorisation: width is from 1 and penalty positive; got {self.width} and {self.penalty}."
            )
        train = all_events(train, validation)
        table = _table(train)
        of_items = table.T.tocsr()
        rng = np.random.default_rng(self.seed)
        self.items: np.ndarray = rng.normal(0.0, self.width**-0.5, size=(train.num_items, self.width))
        """Vectors of the items, shape ``(items, width)``."""
        objective: list[float] = []
        for _ in range(self.max_sweeps):
            self.users: np.ndarray = _solve(table, self.items, self.penalty)
            """Vectors of the users, shape ``(users, width)``."""
            self.items = _solve(of_items, self.users, self.penalty)
            objective.append(_objective(table, self.items, self.users, self.penalty))
            if len(objective) > 1 and objective[-2] - objective[-1] < 1e-6 * objective[-2]:
                break
        self.objective = np.array(objective)
        """Objective after each sweep."""

    def _log_probabilities(self, sequences: EventSequences) -> np.ndarray:
        self._check_users(sequences)
        found = np.empty(sequences.items.size)
        for user, (start, length) in enumerate(zip(sequences.starts, sequences.lengths, strict=True)):
            if length:
                logs = _log_softmax(self.items @ self.users[user])
                found[start : start + length] = logs[sequences.items[start : start + length]]
        return found

    def _next(self, history: np.ndarray, user: int | None) -> np.ndarray:
        if user is not None:
            vector = self.users[self._checked_user(user)]
        else:
            alone = EventSequences(history, np.array([history.size]), np.arange(self.num_items), np.zeros(1))
            vector = _solve(_table(alone), self.items, self.penalty)[0]
        return _log_softmax(self.items @ vector)


def _table(sequences: EventSequences) -> Any:
    """Logarithms of counts plus one, sparse, shape ``(users, items)``."""
    from scipy.sparse import csr_array

    pairs = PairCounts(sequences.users, sequences.items, sequences.num_items)
    shape = (sequences.num_users, sequences.num_items)
    return csr_array((np.log1p(pairs.counts), (pairs.first, pairs.second)), shape=shape)


def _solve(table: Any, vectors: np.ndarray, penalty: float, block: int = 1024) -> np.ndarray:
    """Vectors of the rows of a table that minimise the objective given those of its columns; zero where empty."""
    width = vectors.shape[1]
    upper, lower = np.triu_indices(width)  # of symmetric products half is enough
    place = np.empty((width, width), int)
    place[upper, lower] = place[lower, upper] = np.arange(len(upper))
    # not vectors[:, upper], whose columns are in one piece: each block would copy it
    products = np.take(vectors, upper, axis=1) * np.take(vectors, lower, axis=1)
    pattern = table.copy()
    pattern.data = np.ones_like(pattern.data)
    sizes = np.diff(table.indptr)
    found = np.empty((table.shape[0], width))
    for start in range(0, len(found), block):
        rows = slice(start, start + block)
        system = np.take(pattern[rows] @ products, place, axis=1)
        diagonal = np.where(sizes[rows] > 0, penalty * sizes[rows], 1.0)
        np.einsum("ndd->nd", system)[:] += diagonal[:, None]
        found[rows] = np.linalg.solve(system, (table[rows] @ vectors)[..., None])[..., 0]
    return found


def _objective(table: Any, items: np.ndarray, users: np.ndarray, penalty: float) -> float:
    cells = table.tocoo()
    user, item = cells.coords
    residual = cells.data - np.einsum("nd,nd->n", users[user], items[item])
    squares = np.sum(users[user] ** 2) + np.sum(items[item] ** 2)  # each vector once for each of its cells
    return float(residual @ residual + penalty * squares)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.sum(np.exp(shifted)))
