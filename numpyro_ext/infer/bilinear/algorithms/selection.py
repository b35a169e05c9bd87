r"""Selection of rows and columns where pairs are censored (Paquet, Koenigstein and Winther).

The censored pairs are unknown. Each of them is of row :math:`i` with probability :math:`s_i` and of column :math:`j`
with :math:`t_j`, the same for all of them, so that a pair has :math:`D' s_i t_j` zeros. The probabilities with which
rows and columns are selected have Dirichlet posteriors.
"""

from __future__ import annotations

from collections.abc import Callable
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

    def transposed(self) -> Selected:
        """The same with rows and columns exchanged."""
        return Selected(self.column_counts, self.row_counts, self.log_columns, self.log_rows, self.tangent)


class SelectionTerms(NamedTuple):
    """Sums over the vectors of a side, or over some of them."""

    value: Array
    """Terms that add up."""
    prior_total: Array
    """Parameters of the Dirichlet prior."""
    posterior_total: Array

    @property
    def bound(self) -> Array:
        """Terms of the objective, of the sums over a whole side."""
        return self.value + gammaln(self.prior_total) - gammaln(self.posterior_total)


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

    def best_shares(
        self, selected: Selected, values: Array, side: Side, axis_name: str | None = None
    ) -> tuple[Array, Array]:
        """Logs of the shares of a side in the censored pairs that are best given the other side, and the log of what
        they were divided by to add up to one.

        :param values: expected log probability that a pair with each vector of the side is censored, by the shares of
            the other side.
        """
        logits = digamma(selected.column_counts if side == "columns" else selected.row_counts) + values
        if side == "rows" and self.weight is not None:
            logits = jnp.where(self.weight > 0.0, logits, -jnp.inf)
        if side == "columns" or axis_name is None:
            total = jax.nn.logsumexp(logits)
        else:
            most = jax.lax.pmax(jnp.max(logits), axis_name)
            total = most + jnp.log(over_devices(jnp.sum(jnp.exp(logits - most)), axis_name))
        return logits - total, total

    def bound(self, selected: Selected, axis_name: str | None = None) -> Array:
        """Terms of the objective that know of no vector: those of the selection, and the entropy of the shares."""
        value = jnp.zeros_like(self.number)
        sums = partial(self._sum_rows, axis_name=axis_name), jnp.sum
        shares, posteriors = self.shares(selected), selected[:2]
        parts = zip(self.terms(selected, axis_name), self.prior, self.counts, shares, posteriors, sums, strict=True)
        for terms, prior, count, share, posterior, add in parts:
            log_selection = digamma(posterior) - digamma(terms.posterior_total)
            value += terms.bound + add((count + self.number * share + prior - posterior) * log_selection)
        return value

    def terms(self, selected: Selected, axis_name: str | None = None) -> tuple[SelectionTerms, SelectionTerms]:
        """Terms of rows and columns in the objective, with Dirichlet distributions that are best for the shares."""
        log_shares = selected.log_rows, selected.log_columns
        sums: tuple[Callable[[Array], Array], ...] = (partial(self._sum_rows, axis_name=axis_name), jnp.sum)
        parts = zip(self.prior, selected[:2], self.shares(selected), log_shares, sums, strict=True)
        rows, columns = (
            SelectionTerms(
                add(gammaln(posterior) - gammaln(prior) - self.number * jnp.where(share > 0.0, share * log_share, 0.0)),
                add(prior),
                add(posterior),
            )
            for prior, posterior, share, log_share, add in parts
        )
        return rows, columns

    def _sum_rows(self, values: Array, axis_name: str | None) -> Array:
        if self.weight is not None:
            values = jnp.where(self.weight > 0.0, values, 0.0)
        return over_devices(jnp.sum(values), axis_name)


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
