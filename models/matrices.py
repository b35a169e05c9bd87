"""Models of matrices whose logits are products of two vectors with biases: two outcomes, and pairs that occur."""

from __future__ import annotations

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike

from numpyro_ext.distributions import CensoredPairs

from .indices import checked_indices

__all__ = ["binary_factorization", "paired_symbols"]


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


def paired_symbols(
    pairs: ArrayLike | None = None,
    *,
    num_users: int,
    num_items: int,
    rank: int,
    num_censored: float,
    tau_u: ArrayLike = 1.0,
    tau_v: ArrayLike = 1.0,
    tau_b: ArrayLike = 1.0,
    alpha: float = 1.0,
    beta: float = 1.0,
    num_pairs: int = 1,
) -> None:
    r"""Pairs of a user and an item, such as views, with what was censored (Paquet, Koenigstein and Winther).

    A user and an item are selected independently, by how active the one and how popular the other is, and their pair
    occurs with probability :math:`\sigma(u_i^\top v_j + b_i + g_j)`; else it is censored, and nobody knows of it.

    Sites: ``u`` of shape ``(num_users, rank)``, ``b``, ``v`` of shape ``(num_items, rank)``, ``g``, all normal; ``pi``
    and ``psi``, the probabilities of selection; and ``pairs``. Under ``BilinearVG(..., bound="jaakkola")`` a sweep
    costs as much as the pairs that occurred; the density of the model visits all users and items.

    **Example:**

    .. doctest::

        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import paired_symbols
        >>> sizes = {"num_users": 4, "num_items": 3, "rank": 2, "num_censored": 10, "num_pairs": 10}
        >>> draws = Predictive(paired_symbols, num_samples=5)(random.key(0), **sizes)
        >>> print(draws["u"].shape, draws["psi"].shape, draws["pairs"].shape)
        (5, 4, 2) (5, 3) (5, 10, 3)

    :param pairs: table with rows ``(user, item, count)``, integers from 0, shape ``(n, 3)``; a pair may stand in
        several rows. ``None`` samples ``num_pairs`` rows.
    :param int num_users: number of users.
    :param int num_items: number of items.
    :param int rank: number of components of the product.
    :param num_censored: assumed number of censored pairs, such as that of the pairs; it cannot be learned.
    :param tau_u: precision of the vectors of users, a number or one for each component.
    :param tau_v: precision of the vectors of items.
    :param tau_b: precision of the biases.
    :param alpha: concentration of the prior of ``pi``.
    :param beta: concentration of the prior of ``psi``.
    :param int num_pairs: rows of a table that is sampled.
    """
    scale_u, scale_v, scale_b = (1.0 / jnp.sqrt(jnp.asarray(tau, float)) for tau in (tau_u, tau_v, tau_b))
    with numpyro.plate("users", num_users):
        u = numpyro.sample("u", dist.Normal(0.0, scale_u).expand([rank]).to_event(1))
        user_bias = numpyro.sample("b", dist.Normal(0.0, scale_b))
    with numpyro.plate("items", num_items):
        v = numpyro.sample("v", dist.Normal(0.0, scale_v).expand([rank]).to_event(1))
        item_bias = numpyro.sample("g", dist.Normal(0.0, scale_b))
    pi = numpyro.sample("pi", dist.Dirichlet(jnp.full(num_users, alpha, float)))
    psi = numpyro.sample("psi", dist.Dirichlet(jnp.full(num_items, beta, float)))
    density = CensoredPairs(u, v, user_bias, item_bias, pi, psi, num_censored, num_pairs=num_pairs)
    numpyro.sample("pairs", density, obs=pairs)
