r"""Selection of rows and columns where pairs are censored (Paquet, Koenigstein and Winther).

The censored pairs are unknown. Each of them is of row :math:`i` with probability :math:`s_i` and of column :math:`j`
with :math:`t_j`, the same for all of them, so that a pair has :math:`D' s_i t_j` zeros. The probabilities with which
rows and columns are selected have Dirichlet posteriors.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import digamma, gammaln

from ....structure.bilinear.form import Bilinear, Selection

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

    @classmethod
    def of_form(cls, form: Bilinear) -> Censored | None:
        """Censored pairs of a form with its cells; ``None`` where nothing is censored."""
        if form.background is None or form.background.selection is None:
            return None
        return cls(form.background.exposure, form.background.selection, form.listed_counts())

    def with_counts(self, selected: Selected) -> Selected:
        """The best Dirichlet distributions, given who the censored are."""
        shares = selected.log_rows, selected.log_columns
        rows, columns = (
            prior + count + self.number * jnp.exp(share)
            for prior, count, share in zip(self.prior, self.counts, shares, strict=True)
        )
        return selected._replace(row_counts=rows, column_counts=columns)

    def bound(self, selected: Selected) -> Array:
        """Terms of the objective that know of no vector: those of the selection, and the entropy of the shares."""
        total = jnp.zeros_like(self.number)
        after = (selected.row_counts, selected.column_counts), (selected.log_rows, selected.log_columns)
        for prior, count, posterior, log_share in zip(self.prior, self.counts, *after, strict=True):
            share, log_selection = jnp.exp(log_share), expected_log(posterior)
            total += jnp.sum((count + self.number * share + prior - posterior) * log_selection)
            total += gammaln(jnp.sum(prior)) - jnp.sum(gammaln(prior))
            total += jnp.sum(gammaln(posterior)) - gammaln(jnp.sum(posterior))
            total -= self.number * jnp.sum(share * log_share)
        return total


def expected_log(counts: Array) -> Array:
    """Expected log probabilities under a Dirichlet distribution."""
    return digamma(counts) - digamma(jnp.sum(counts))


def best_shares(counts: Array, values: Array) -> Array:
    """Logs of the shares of a side in the censored pairs that are best given the other side.

    :param counts: parameters of the Dirichlet distribution of the side.
    :param values: expected log probability that a pair with each vector of the side is censored, by the shares of the
        other side.
    """
    return jax.nn.log_softmax(expected_log(counts) + values)


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
