"""Rankings of all columns of a bilinear posterior for single rows, and how well they find what was held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from ...potentials.families.binary import LogitPotential
from ...potentials.families.gaussian import GaussianPotential
from ...structure.bilinear.form import Bilinear
from ...structure.model.running.pandas_arguments import check_rows
from ..front.options import check_at_least, check_kind, check_one_of
from .algorithms.cells import Block, oriented
from .algorithms.quadratic.moments import Moments, own_moments, partner_moments
from .answers import BilinearAnswers

By = Literal["joint", "taste"]
Ties = Literal["none", "half"]
_CHUNK = 1 << 22
"""Pairs that are scored at a time."""


class Recommendations(NamedTuple):
    """The columns with the largest scores, the largest first."""

    items: np.ndarray
    """Shape ``(num_users, k)``, -1 where a row has fewer candidates."""
    scores: np.ndarray
    """Probabilities of a one, or expected values, of the same shape; ``nan`` where there is no column."""


class RankingQuality(NamedTuple):
    """Ranks of held-out columns among all candidates of their rows."""

    mean_rank: float
    """Mean share of the candidates, the column itself among them, that the held-out column beats: at most one less one
    over their number."""
    mean_rank_error: float
    """Its standard error over the held-out pairs."""
    hits: dict[int, float]
    """Share of the held-out columns among the first ``k`` candidates, by ``k``."""
    hit_errors: dict[int, float]
    """Standard errors of these."""
    bins: list[tuple[int, int, int, float]]
    """For ranges of the number of listed cells of a row: from, up to and without, number of pairs, mean rank."""
    ranks: np.ndarray
    """Share that is beaten, of each held-out pair."""


def recommend_items(
    engine: object, users: ArrayLike, k: int = 10, *, by: By = "joint", exclude: Literal["listed", "nothing"] = "listed"
) -> Recommendations:
    r"""The columns with the largest predicted values for some rows, such as the items that a person may like.

    A score of a Bernoulli outcome is its probability by MacKay's approximation,
    :math:`\sigma(m / \sqrt{1 + \pi v / 8})` with mean and variance of the predictor, which prefers what is known well;
    that of a Normal value is its expectation.

    :param engine: a :class:`~numpyro_ext.infer.BilinearVG` that has run, on Bernoulli outcomes by their logits or
        Normal values, with the same coefficients in all cells.
    :param users: rows, integers, shape ``(num_users,)``.
    :param int k: how many columns.
    :param str by: ``"joint"``, the predictor as it is, or ``"taste"``, without what all rows share: biases of columns.
        Of censored pairs ``"joint"`` is the probability that a pair is emitted times that of selecting its column, and
        ``"taste"`` that it is emitted.
    :param str exclude: ``"listed"`` leaves out columns whose cells in the row were fitted; ``"nothing"`` keeps them.
    :return: columns and scores.
    :raises ValueError: if a row is out of range, or scores of such a model are not known.

    Cost: for each row the number of columns times the size of a vector.

    **Example:**

    .. code-block:: python

        >>> import jax, numpy as np
        >>> from numpyro_ext.infer import BilinearVG, recommend_items
        >>> from numpyro_ext.models import binary_factorization
        >>> rows, cols = np.array([0, 0, 1, 1, 2, 3]), np.array([0, 1, 0, 1, 2, 2])
        >>> engine = BilinearVG(binary_factorization, bound="jaakkola", unlisted_cells="zero", progress_bar=False)
        >>> engine.run(jax.random.key(0), rows, cols, np.ones(6, int), num_rows=4, num_cols=4, rank=1)
        >>> print(recommend_items(engine, [0], k=2).items)
        [[2 3]]
    """
    check_one_of(By, by=by)
    check_one_of(Literal["listed", "nothing"], exclude=exclude)
    check_at_least(1, k=k)
    ranking = _Ranking.of(engine, by)
    wanted = ranking.checked("users", users, 0)
    items, scores = [], []
    for chunk in ranking.chunks(wanted):
        found = ranking.scores(chunk)
        if exclude == "listed":
            found[ranking.is_listed(chunk)] = -np.inf
        order = np.argsort(-found, axis=1, kind="stable")[:, :k]
        best = np.take_along_axis(found, order, axis=1)
        items.append(np.where(np.isfinite(best), order, -1))
        scores.append(np.where(np.isfinite(best), ranking.probability(best), np.nan))
    empty = np.zeros((0, min(k, ranking.num_columns)))
    return Recommendations(np.concatenate([empty.astype(int), *items]), np.concatenate([empty, *scores]))


def ranking_quality(
    engine: object,
    test_rows: ArrayLike,
    test_cols: ArrayLike,
    k: int | Sequence[int] = (10, 20),
    *,
    by: By = "joint",
    ties: Ties = "none",
) -> RankingQuality:
    r"""Quality with which a posterior ranks held-out columns among all columns that were not listed for their rows.

    The rank of a pair is :math:`\frac{1}{n} \sum_j 1[f_{*} > f_j]` over the ``n`` columns ``j`` that were not listed
    for the row, which has the largest value :math:`1 - 1/n`.

    :param engine: see :func:`recommend_items`.
    :param test_rows: rows of held-out pairs, shape ``(n,)``; no such pair was listed.
    :param test_cols: their columns.
    :param k: length of the list in which they are looked for, or several.
    :param str by: see :func:`recommend_items`.
    :param str ties: ``"none"`` counts a tie as lost, ``"half"`` as half a win.
    :return: mean rank, hits at each ``k``, and ranks by the number of listed cells of a row.
    :raises ValueError: if indices are out of range, there is none, or a test pair was listed.
    """
    check_one_of(By, by=by)
    check_one_of(Ties, ties=ties)
    lengths = list(k) if isinstance(k, Sequence | np.ndarray) else [k]
    for length in lengths:
        check_at_least(1, k=length)
    ranking = _Ranking.of(engine, by)
    check_rows([("test_rows", test_rows), ("test_cols", test_cols)])
    rows, cols = ranking.checked("test_rows", test_rows, 0), ranking.checked("test_cols", test_cols, 1)
    if rows.shape != cols.shape or not rows.size:
        raise ValueError(f"test_rows and test_cols must be of one length, and not empty: {rows.size}, {cols.size}.")
    beaten, above, number = (np.zeros(rows.size) for _ in range(3))
    start = 0
    for chunk in ranking.chunks(rows):
        here = slice(start, start + chunk.size)
        found, is_listed = ranking.scores(chunk), ranking.is_listed(chunk)
        own = np.arange(chunk.size), cols[here]
        if is_listed[own].any():
            place = start + int(np.argmax(is_listed[own]))
            raise ValueError(f"The test pair {int(rows[place]), int(cols[place])} was listed: hold it out of the fit.")
        score = found[own][:, None]
        tied = ((found == score) & ~is_listed).sum(1) - 1.0
        share = 0.5 if ties == "half" else 0.0
        beaten[here] = ((found < score) & ~is_listed).sum(1) + share * tied
        above[here] = ((found > score) & ~is_listed).sum(1) + (1.0 - share) * tied
        number[here] = (~is_listed).sum(1)
        start += chunk.size
    ranks = beaten / number
    is_hit = {length: above < length for length in lengths}
    degree = ranking.degrees[rows]
    edges = [0, *(2**power for power in range(int(np.log2(max(degree.max(), 1))) + 2))]
    bins = []
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        chosen = (low <= degree) & (degree < high)
        if chosen.any():
            bins.append((low, high, int(chosen.sum()), float(ranks[chosen].mean())))
    return RankingQuality(
        float(ranks.mean()),
        _error(ranks),
        {length: float(hit.mean()) for length, hit in is_hit.items()},
        {length: _error(hit) for length, hit in is_hit.items()},
        bins,
        ranks,
    )


def _error(values: np.ndarray) -> float:
    return float(np.std(values) / np.sqrt(max(values.size - 1, 1)))


class _Ranking(NamedTuple):
    """Scores of all columns, a few rows at a time."""

    rows: Moments
    columns: Moments
    shift: Array
    """Mean and variance of what is added to all predictors."""
    log_share: np.ndarray | None
    """Log probability with which each column is selected, where that counts."""
    is_binary: bool
    sizes: tuple[int, int]
    """Numbers of rows and of columns."""
    listed: tuple[np.ndarray, np.ndarray]
    """Columns of the cells that were fitted, in the order of rows, and where each row begins."""

    @classmethod
    def of(cls, engine: Any, by: By) -> _Ranking:
        check_kind("Ranking of items", engine, BilinearAnswers, "a bilinear engine (BilinearVG, BilinearEP)")
        run = engine._finished()
        reading = run.reading
        is_known = isinstance(reading.factor_kind, LogitPotential | GaussianPotential)
        if not is_known or not reading.takes_closed_updates:
            raise ValueError(
                "Rankings of all columns are for Bernoulli outcomes by their logits and Normal values, with the same "
                "coefficients in all cells: use predictive_mean or expected_ranks on the cells that you want."
            )
        form: Bilinear = run.programs.form(reading.data, run.fit.hyper)
        if by == "joint" and np.ptp(np.asarray(form.offset)) > 0.0:
            raise ValueError(
                "Predictors have offsets that differ between cells, and those of other cells are not known: take "
                "by='taste', or predictive_mean on the cells that you want."
            )
        rows, columns = run.blocks
        assert isinstance(rows, Block) and isinstance(columns, Block)
        selected = run.inputs[2].selected
        is_whole = by == "joint" or selected is not None
        own, partner = _moments(form, rows, columns, not is_whole)
        first, second = (np.asarray(index) for index in reading.index)
        order = np.argsort(first, kind="stable")
        starts = np.searchsorted(first[order], np.arange(rows.mean.shape[0] + 1))
        common = run.common
        shift = jnp.zeros((2,), rows.mean.dtype)
        if is_whole:
            shift = shift.at[0].set(form.offset[0])
        if common is not None and form.common is not None and is_whole:
            assert common.covariance is not None
            weights = form.common.coefficients[0]
            shift += jnp.stack([weights @ common.mean[0], weights @ common.covariance[0] @ weights])
        sizes = rows.mean.shape[0], columns.mean.shape[0]
        is_binary = isinstance(reading.factor_kind, LogitPotential)
        log_share = None
        if selected is not None and by == "joint":
            log_share = np.log(np.asarray(selected.column_counts / jnp.sum(selected.column_counts)))
        return cls(own, partner, shift, log_share, is_binary, sizes, (second[order], starts))

    @property
    def num_columns(self) -> int:
        """Number of columns."""
        return self.sizes[1]

    @property
    def degrees(self) -> np.ndarray:
        """Number of cells of each row."""
        return np.diff(self.listed[1])

    def checked(self, name: str, values: ArrayLike, side: int) -> np.ndarray:
        """Indices of a side as an array."""
        index, size = np.atleast_1d(np.asarray(values)), self.sizes[side]
        index = index if index.size else index.astype(int)
        if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer):
            raise ValueError(f"{name} must be integers, got {index.dtype} of shape {index.shape}.")
        if index.size and not 0 <= index.min() <= index.max() < size:
            raise ValueError(f"{name} must lie in 0, ..., {size - 1}; got {index.min()} to {index.max()}.")
        return index

    def chunks(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """The rows, a few at a time."""
        length = max(1, _CHUNK // self.num_columns)
        yield from (rows[start : start + length] for start in range(0, rows.size, length))

    def scores(self, rows: np.ndarray) -> np.ndarray:
        """Scores on the scale of the predictor, or logs of probabilities of pairs, shape ``(n, num_columns)``."""
        own = jax.tree.map(lambda x: x[rows], self.rows)
        found = np.array(_scores(own, self.columns, self.shift, is_binary=self.is_binary))
        if self.log_share is None:
            return found
        return np.asarray(self.log_share + np.asarray(jax.nn.log_sigmoid(found)))

    def probability(self, scores: np.ndarray) -> np.ndarray:
        """Predicted values of scores."""
        if self.log_share is not None:
            return np.asarray(np.exp(scores))
        return np.asarray(jax.nn.sigmoid(scores)) if self.is_binary else scores

    def is_listed(self, rows: np.ndarray) -> np.ndarray:
        """True where a cell was fitted, shape ``(n, num_columns)``."""
        out = np.zeros((rows.size, self.num_columns), bool)
        columns, starts = self.listed
        for place, row in enumerate(rows):
            out[place, columns[starts[row] : starts[row + 1]]] = True
        return out


@partial(jax.jit, static_argnames="is_taste")
def _moments(form: Bilinear, rows: Block, columns: Block, is_taste: bool) -> tuple[Moments, Moments]:
    """Moments of ``(u, 1)`` and of what multiplies it, or without the last entry what all rows share."""
    coefficients = oriented(form, "rows")[2]
    partner = partner_moments(coefficients, rows.mean.shape[1], columns, is_diagonal=False)
    own = own_moments(rows, is_diagonal=False)
    return (own._replace(mean=own.mean.at[:, -1].set(0.0)) if is_taste else own), partner


@partial(jax.jit, static_argnames="is_binary")
def _scores(own: Moments, columns: Moments, shift: Array, is_binary: bool) -> Array:
    mean = own.mean @ columns.mean.T + shift[0]
    if not is_binary:
        return mean
    assert own.covariance is not None and columns.covariance is not None
    row, column = np.triu_indices(own.mean.shape[-1])
    twice = jnp.where(row == column, 1.0, 2.0)
    products = columns.mean[:, row] * columns.mean[:, column]
    variance = shift[1] + (twice * own.second) @ columns.covariance.T + (twice * own.covariance) @ products.T
    return mean / jnp.sqrt(1.0 + jnp.pi / 8.0 * variance)
