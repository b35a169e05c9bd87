"""Predictions of bilinear posteriors: probabilities of observations and their expected means."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ....potentials.base import Potential
from ....potentials.base import potential as make_potential
from ....structure.bilinear.form import Bilinear
from ..algorithms.cells import Side, cell_expectations, cell_values, conditional_moments
from ..algorithms.incidence import SideBlock, draw_side, touched


@partial(jax.jit, static_argnames="num_samples")
def log_predictive_counts(
    form: Bilinear, rows: SideBlock, columns: SideBlock, rng_key: Array, *, num_samples: int
) -> Array:
    r"""Log posterior predictive probability of the observation of each cell.

    The vectors of one side are drawn; given them the predictor is Gaussian, and the factor is integrated over by
    quadrature. So the estimate is smooth in a count, also far in the tail. It always exists, unlike the mean.

    :param Bilinear form: holds the cells.
    :param rows: posterior of the rows.
    :param columns: of the columns.
    :param rng_key: random number generator key.
    :param int num_samples: number of draws; where one side is a point, it is that which is held and nothing is random.
    :return: shape ``(num_cells,)``.

    Cost: one quadrature per cell and draw.
    """
    seen = touched(rows, form.rows), touched(columns, form.columns)
    swap = seen[0].covariance is None and seen[1].covariance is not None
    side: Side = "columns" if swap else "rows"
    own, other = seen[::-1] if swap else seen
    drawn, prior = (rows, form.rows) if swap else (columns, form.columns)
    potential = form.potential

    def score(total: Array, key: Array) -> tuple[Array, None]:
        mean, variance = conditional_moments(form, side, own, prior.touched(draw_side(drawn, prior, key)))
        if own.covariance is None:
            value = potential.log_density(mean)
        else:
            value = potential.log_normaliser(mean, jnp.maximum(variance, jnp.finfo(mean.dtype).tiny))
        return jnp.logaddexp(total, value), None

    num = 1 if other.covariance is None else num_samples
    start = jnp.full(form.offset.shape, -jnp.inf, form.offset.dtype)
    total, _ = jax.lax.scan(score, start, jax.random.split(rng_key, num))
    return total - jnp.log(num)


@jax.jit
def expected_means(form: Bilinear, rows: SideBlock, columns: SideBlock) -> Array:
    """Posterior expectation of the mean of each observation; ``inf`` where it does not exist.

    That of an exponential is in closed form, others are integrated over the distribution of the predictor.

    :param Bilinear form: holds the cells.
    :param rows: posterior of the rows.
    :param columns: of the columns.
    :return: shape ``(num_cells,)``.
    :raises ValueError: if observations are categories, which have no mean.
    """
    potential = form.potential
    start = potential.mean(jnp.zeros_like(form.offset))
    if start is None:
        raise ValueError(
            f"What {type(potential).__name__} describes, such as ordered categories, has no mean: use log_predictive "
            "for probabilities, one category at a time, or expected_ranks."
        )
    rows, columns = touched(rows, form.rows), touched(columns, form.columns)
    if potential.has_exponential_mean:
        return start * jnp.exp(cell_expectations(form, rows, columns))
    return cell_values(form._replace(potential=_Mean(potential)), rows, columns)


@make_potential
class _Mean(Potential):
    """The mean of an observation in the place of its log factor."""

    base: Potential

    def log_density(self, eta: ArrayLike) -> Array:
        found = self.base.mean(jnp.asarray(eta))
        assert found is not None  # by expected_means
        return found


@partial(jax.jit, static_argnames="num_samples")
def draw_predictors(form: Bilinear, rows: SideBlock, columns: SideBlock, rng_key: Array, *, num_samples: int) -> Array:
    """Posterior draws of the predictors, shape ``(num_samples, num_cells)``."""

    def one(key: Array) -> Array:
        row_key, column_key = jax.random.split(key)
        return form.predictor(draw_side(rows, form.rows, row_key), draw_side(columns, form.columns, column_key))

    return jax.lax.map(one, jax.random.split(rng_key, num_samples))
