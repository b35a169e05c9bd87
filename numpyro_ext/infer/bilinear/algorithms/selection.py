r"""Selection of rows and columns where pairs are censored (Paquet, Koenigstein and Winther).

The censored pairs are unknown. Each of them is of row :math:`i` with probability :math:`s_i` and of column :math:`j`
with :math:`t_j`, the same for all of them, so that a pair has :math:`D' s_i t_j` zeros. The probabilities with which
rows and columns are selected have Dirichlet posteriors.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import digamma, gammaln

from ....structure.bilinear.form import Bilinear, GaussianSide, Selection
from .cells import Side, over_devices

SelectionRule = Literal["learned", "constant"]


class Selected(NamedTuple):
    """Posterior of the probabilities of selection, and of who the censored are."""

    row_counts: Array
    """Parameters of the Dirichlet distribution of the rows, shape ``(num_rows,)``."""
    column_counts: Array
    log_rows: Array
    """Logs of the shares :math:`s_i` of the rows in the censored pairs, shape ``(num_rows,)``."""
    log_columns: Array
    tangent: Array
    """Square of the tangent of the zeros of all pairs that are not listed, a scalar."""


class Censored(NamedTuple):
    """Number of the censored pairs, and what is known of the selection."""

    number: Array
    prior: Selection
    counts: tuple[Array, Array]
    """Total counts of the listed pairs of each row and of each column."""
    weight: Array | None = None
    """Zero for rows that only fill up an array, else one; ``None`` where all are used."""

    @classmethod
    def of_form(cls, form: Bilinear, axis_name: str | None = None) -> Censored | None:
        """Censored pairs of a form with its cells; ``None`` where nothing is censored.

        :param str axis_name: of the axis of devices between which the rows are divided, if they are.
        """
        if form.background is None or form.background.selection is None:
            return None
        assert isinstance(form.rows, GaussianSide)
        rows, columns = form.listed_counts()
        counts = rows, over_devices(columns, axis_name)
        return cls(form.background.exposure, form.background.selection, counts, form.rows.weight)

    def shares(self, selected: Selected) -> tuple[Array, Array]:
        """Shares of the rows and of the columns in the censored pairs."""
        rows, columns = jnp.exp(selected.log_rows), jnp.exp(selected.log_columns)
        return rows if self.weight is None else jnp.where(self.weight > 0.0, rows, 0.0), columns

    def with_counts(self, selected: Selected) -> Selected:
        """The best Dirichlet distributions, given who the censored are."""
        rows, columns = (
            prior + count + self.number * share
            for prior, count, share in zip(self.prior, self.counts, self.shares(selected), strict=True)
        )
        return selected._replace(row_counts=rows, column_counts=columns)

    def best_shares(self, selected: Selected, values: Array, side: Side, axis_name: str | None = None) -> Array:
        """Logs of the shares of a side in the censored pairs that are best given the other side.

        :param values: expected log probability that a pair with each vector of the side is censored, by the shares of
            the other side.
        """
        if side == "columns":
            return jax.nn.log_softmax(_expected_log(selected.column_counts, jnp.sum(selected.column_counts)) + values)
        total = self._sum_rows(selected.row_counts, axis_name)
        logits = _expected_log(selected.row_counts, total) + values
        if self.weight is not None:
            logits = jnp.where(self.weight > 0.0, logits, -jnp.inf)
        if axis_name is None:
            return jax.nn.log_softmax(logits)
        logits -= jax.lax.pmax(jnp.max(logits), axis_name)
        return logits - jnp.log(over_devices(jnp.sum(jnp.exp(logits)), axis_name))

    def bound(self, selected: Selected, axis_name: str | None = None) -> Array:
        """Terms of the objective that know of no vector: those of the selection, and the entropy of the shares."""
        total = jnp.zeros_like(self.number)
        posteriors, log_shares = selected[:2], (selected.log_rows, selected.log_columns)
        sums = partial(self._sum_rows, axis_name=axis_name), jnp.sum
        parts = zip(self.prior, self.counts, posteriors, self.shares(selected), log_shares, sums, strict=True)
        for prior, count, posterior, share, log_share, add in parts:
            log_selection = _expected_log(posterior, add(posterior))
            total += add((count + self.number * share + prior - posterior) * log_selection)
            total += gammaln(add(prior)) - add(gammaln(prior))
            total += add(gammaln(posterior)) - gammaln(add(posterior))
            total -= self.number * add(jnp.where(share > 0.0, share * log_share, 0.0))
        return total

    def _sum_rows(self, values: Array, axis_name: str | None) -> Array:
        if self.weight is not None:
            values = jnp.where(self.weight > 0.0, values, 0.0)
        return over_devices(jnp.sum(values), axis_name)


def _expected_log(counts: Array, total: Array) -> Array:
    """Expected log probabilities under a Dirichlet distribution, given the sum of its parameters."""
    return digamma(counts) - digamma(total)


def first_selected(form: Bilinear) -> Selected | None:
    """Equal shares of all rows and of all columns, where pairs are censored."""
    censored = Censored.of_form(form)
    if censored is None:
        return None
    rows, columns = (jnp.full(x.shape, -jnp.log(x.size), x.dtype) for x in censored.prior)
    return censored.with_counts(Selected(rows, columns, rows, columns, jnp.ones((), rows.dtype)))


def draw_shares(selected: Selected, rng_key: Array) -> tuple[Array, Array]:
    """One draw of the probabilities of selection of rows and of columns."""
    rows, columns = jax.random.split(rng_key)
    return jax.random.dirichlet(rows, selected.row_counts), jax.random.dirichlet(columns, selected.column_counts)
