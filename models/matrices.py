"""Models of matrices with two outcomes: a logit that is a product of two vectors with biases."""

from __future__ import annotations

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike

from .indices import checked_indices

__all__ = ["binary_factorization"]


def binary_factorization(
    rows: ArrayLike,
    cols: ArrayLike,
    x: ArrayLike | None = None,
    *,
    num_rows: int,
    num_cols: int,
    rank: int,
) -> None:
    r"""Factorisation of a matrix of zeros and ones with biases, given the cells that are listed.

    .. math:: P(x_c = 1) = \sigma\big(u_{r(c)}^\top v_{s(c)} + b_{r(c)} + g_{s(c)} + z\big)

    Sites, all with standard normal priors: ``z``, ``u`` of shape ``(num_rows, rank)``, ``b``, ``v`` of shape
    ``(num_cols, rank)``, ``g``; and ``x``. The model knows of the listed cells alone; under
    ``BilinearVG(..., bound="jaakkola", unlisted_cells="zero")`` all other cells are zeros, so that the ones suffice.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import binary_factorization
        >>> rows, cols = np.divmod(np.arange(12), 4)
        >>> predictive = Predictive(binary_factorization, num_samples=5)
        >>> draws = predictive(random.key(0), rows, cols, num_rows=3, num_cols=4, rank=2)
        >>> print(draws["u"].shape, draws["g"].shape, draws["x"].shape)
        (5, 3, 2) (5, 4) (5, 12)

    :param rows: row of each cell, integers from 0, shape ``(n,)``.
    :param cols: column of each cell, integers from 0, shape ``(n,)``.
    :param x: zeros and ones, shape ``(n,)``; ``None`` samples them.
    :param int num_rows: number of rows.
    :param int num_cols: number of columns.
    :param int rank: number of components of the product.
    :raises ValueError: if an index is out of range, or the shapes differ.
    """
    rows, cols = checked_indices(rows=(rows, num_rows), cols=(cols, num_cols))
    level = numpyro.sample("z", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", num_rows):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))
        row_bias = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("cols", num_cols):
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))
        col_bias = numpyro.sample("g", dist.Normal(0.0, 1.0))
    logits = jnp.sum(u[rows] * v[cols], axis=-1) + row_bias[rows] + col_bias[cols] + level
    numpyro.sample("x", dist.Bernoulli(logits=logits), obs=x)
