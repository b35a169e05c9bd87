"""Zeros in all pairs of a row and a column of a bilinear form, besides the cells that are listed."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.scipy.special import gammaln, xlogy


class Selection(NamedTuple):
    """Dirichlet priors of the probabilities with which rows and columns are selected."""

    rows: Array
    """Concentrations, shape ``(num_rows,)``."""
    columns: Array
    """Shape ``(num_columns,)``."""

    def log_density(self, shares: tuple[Array, Array], counts: tuple[Array, Array]) -> Array:
        """Log density of the probabilities of rows and columns, and of those of the pairs that were selected.

        :param shares: probabilities of rows and of columns.
        :param counts: how often each row and each column was selected.
        """
        total = jnp.zeros(())
        for prior, share, count in zip(self, shares, counts, strict=True):
            constant = gammaln(jnp.sum(prior)) - jnp.sum(gammaln(prior))
            total += constant + jnp.sum(xlogy(prior - 1.0 + count, share))
        return total


class Background(NamedTuple):
    """Zeros in pairs of a row and a column, which have the coefficients and the offset that all cells share."""

    exposure: Array
    """Minus the log probability of a zero over the softplus of its predictor, for pairs that are no cells: the exposure
    of Poisson counts with that rate, one for Bernoulli outcomes. With a selection the number of censored pairs."""
    selection: Selection | None = None
    """Priors of the probabilities with which pairs were selected, where zeros are pairs that were censored."""
