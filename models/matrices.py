"""Models of matrices: products of vectors for real numbers, two outcomes, pairs and ratings, and types of people."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike

from numpyro_ext.distributions import CategoriesByType, CensoredPairs, OrderedProbit

from .indices import checked_indices, checked_outcomes

__all__ = [
    "binary_factorization",
    "gaussian_factorization",
    "heteroscedastic_ratings",
    "paired_symbols",
    "rating_types",
]

_NOISE_SHAPE, _NOISE = 5.0, 10.0
_CUT_VARIANCE = 0.1


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


def gaussian_factorization(
    rows: ArrayLike,
    cols: ArrayLike,
    values: ArrayLike | None = None,
    *,
    num_rows: int,
    num_cols: int,
    rank: int,
    heteroscedastic: bool = False,
) -> None:
    r"""Factorisation of a matrix of real numbers with normal noise, given the cells that are listed.

    .. math::
        y_c \sim N\big(u_{r(c)}^\top v_{s(c)} + z,\; \sigma_c^2\big), \qquad
        \sigma_c^2 = \text{noise}^2 \quad\text{or}\quad \gamma_{r(c)}\, \delta_{s(c)}

    Sites: ``z`` (standard normal), ``row_scale`` (half-normal), ``u`` of shape ``(num_rows, rank)``, ``v`` of shape
    ``(num_cols, rank)``, ``noise``, a standard deviation (half-normal); and ``values``. Only the product of the scales
    of ``u`` and ``v`` is determined, so that of ``v`` is one. With ``heteroscedastic=True`` the variance of a cell is
    that of its row times that of its column, ``row_noise`` and ``column_noise``, with priors InverseGamma(5, 5), in the
    place of ``noise``. Priors suit values of mean zero and standard deviation one.

    :class:`~numpyro_ext.infer.BilinearVG` has closed updates, posteriors of ``z`` and of the noise of rows and columns,
    and learns ``row_scale`` and ``noise`` as points. ``BilinearEP`` takes this model at given values of all but ``u``
    and ``v``.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import gaussian_factorization
        >>> rows, cols = np.divmod(np.arange(12), 4)
        >>> predictive = Predictive(gaussian_factorization, num_samples=5)
        >>> draws = predictive(random.key(0), rows, cols, num_rows=3, num_cols=4, rank=2)
        >>> print(draws["u"].shape, draws["noise"].shape, draws["values"].shape)
        (5, 3, 2) (5,) (5, 12)

    **References**

    1. Houlsby, N. (2014), *Efficient Bayesian Active Learning and Matrix Modelling*, section 7.4.1 (BMF and, with noise
       of rows and columns, RBMF).

    :param rows: row of each cell, integers from 0, shape ``(n,)``.
    :param cols: column of each cell, integers from 0, shape ``(n,)``.
    :param values: real numbers, shape ``(n,)``; ``None`` samples them.
    :param int num_rows: number of rows, also of those without a cell.
    :param int num_cols: number of columns.
    :param int rank: number of components.
    :param bool heteroscedastic: give rows and columns noise of their own.
    :raises ValueError: if an index is out of range, or the shapes differ.
    """
    rows, cols = checked_indices(rows=(rows, num_rows), cols=(cols, num_cols))
    level = numpyro.sample("z", dist.Normal(0.0, 1.0))
    row_scale = numpyro.sample("row_scale", dist.HalfNormal(1.0))
    own_noise = dist.InverseGamma(5.0, 5.0)
    with numpyro.plate("rows", num_rows):
        u = numpyro.sample("u", dist.Normal(0.0, row_scale).expand([rank]).to_event(1))
        row_noise = numpyro.sample("row_noise", own_noise) if heteroscedastic else None
    with numpyro.plate("cols", num_cols):
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))
        column_noise = numpyro.sample("column_noise", own_noise) if heteroscedastic else None
    if row_noise is not None and column_noise is not None:
        noise = jnp.sqrt(row_noise[rows] * column_noise[cols])
    else:
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    numpyro.sample("values", dist.Normal(jnp.sum(u[rows] * v[cols], axis=-1) + level, noise), obs=values)


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
    :raises ValueError: if the table has no three columns, or nothing is censored.
    """
    if pairs is not None and (jnp.ndim(pairs) != 2 or jnp.shape(pairs)[1] != 3):
        raise ValueError(
            "pairs must be a table with a row (user, item, count) for each pair, of shape (n, 3); got one of shape "
            f"{jnp.shape(pairs)}."
        )
    if not isinstance(num_censored, jax.core.Tracer) and not num_censored > 0:
        raise ValueError(
            f"num_censored must be positive; got {num_censored}. Without censored pairs all products are as large as "
            "the priors allow: assume some, such as one for each pair that occurred."
        )
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


def heteroscedastic_ratings(
    user: ArrayLike,
    item: ArrayLike,
    rating: ArrayLike | None = None,
    *,
    num_users: int,
    num_items: int,
    rank: int,
    num_levels: int,
    heteroscedastic: bool = True,
    learn_cuts: bool = True,
) -> None:
    r"""Heteroscedastic ordinal matrix factorisation (Houlsby 2014, chapter 7; Hernandez-Lobato et al. 2014).

    User ``u`` and item ``i`` have tastes and traits of some components; their product, with noise of a variance that
    is the product of one of the user and one of the item, lies between two cut points of the item, which make the
    rating. Means and variances of tastes and traits, and the cut points of a typical item, are latent as well.
    :class:`~numpyro_ext.infer.BilinearEP` integrates over all of these.

    Sites: ``tastes`` of shape ``(num_users, rank)``, ``traits`` of shape ``(num_items, rank)``, their prior moments
    ``mean_of_users``, ``variance_of_users``, ``mean_of_items``, ``variance_of_items``; ``row_noise`` and
    ``column_noise``; ``cuts`` of shape ``(num_items, num_levels - 1)`` and ``typical_cuts``; and ``rating``. Cut points
    that cross have density zero: start a sampler at the median of the prior (``init_to_median``).

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import heteroscedastic_ratings
        >>> user, item = np.divmod(np.arange(12), 4)
        >>> predictive = Predictive(heteroscedastic_ratings, num_samples=5)
        >>> draws = predictive(random.key(0), user, item, num_users=3, num_items=4, rank=2, num_levels=5)
        >>> print(draws["tastes"].shape, draws["cuts"].shape, draws["rating"].shape)
        (5, 3, 2) (5, 4, 4) (5, 12)

    :param user: user of each rating, integers from 0, shape ``(n,)``.
    :param item: item of each rating, integers from 0, shape ``(n,)``.
    :param rating: levels, integers from 0, shape ``(n,)``; ``None`` samples them.
    :param int num_users: number of users.
    :param int num_items: number of items.
    :param int rank: components of tastes and traits.
    :param int num_levels: number of levels.
    :param bool heteroscedastic: give people and items noise of their own; otherwise its variance is ten.
    :param bool learn_cuts: make cut points latent; otherwise they stand at equal distances from -6 to 6.
    :raises ValueError: if an index or a level is out of range, or there are fewer than two levels.
    """
    if num_levels < 2:
        raise ValueError(f"num_levels must be 2 at least; got {num_levels}.")
    grid = jnp.linspace(-6.0, 6.0, num_levels - 1) if num_levels > 2 else jnp.zeros(1)
    user, item = checked_indices(user=(user, num_users), item=(item, num_items))
    rating = checked_outcomes("rating", rating, len(user), num_levels, is_ordered=True)
    means, variances = {}, {}
    for side in ("users", "items"):
        with numpyro.plate(f"components of {side}", rank):
            means[side] = numpyro.sample(f"mean_of_{side}", dist.Normal(0.0, 1.0))
            variances[side] = numpyro.sample(f"variance_of_{side}", dist.InverseGamma(5.0, 5.0))
    noise = dist.InverseGamma(_NOISE_SHAPE, _NOISE_SHAPE * _NOISE**0.5)
    cuts = grid
    if learn_cuts:
        typical = numpyro.sample("typical_cuts", dist.Normal(grid, _CUT_VARIANCE**0.5).to_event(1))
    with numpyro.plate("users", num_users):
        tastes = numpyro.sample("tastes", dist.Normal(means["users"], jnp.sqrt(variances["users"])).to_event(1))
        row_noise = numpyro.sample("row_noise", noise) if heteroscedastic else None
    with numpyro.plate("items", num_items):
        traits = numpyro.sample("traits", dist.Normal(means["items"], jnp.sqrt(variances["items"])).to_event(1))
        column_noise = numpyro.sample("column_noise", noise) if heteroscedastic else None
        if learn_cuts:
            cuts = numpyro.sample("cuts", dist.Normal(typical, _CUT_VARIANCE**0.5).to_event(1))[item]
    if row_noise is not None and column_noise is not None:
        scale = jnp.sqrt(row_noise[user] * column_noise[item])
        predictor, cuts = (tastes[user] * traits[item]).sum(-1) / scale, cuts / scale[:, None]
    else:
        scale = _NOISE**0.5
        predictor, cuts = (tastes[user] * traits[item]).sum(-1) / scale, cuts / scale
    numpyro.sample("rating", OrderedProbit(predictor, cuts), obs=rating)


def rating_types(
    user: ArrayLike,
    item: ArrayLike,
    rating: ArrayLike | None = None,
    *,
    num_users: int,
    num_items: int,
    num_levels: int,
    num_types: int,
    concentration: float = 1.0,
) -> None:
    r"""Users of a few types, each with probabilities of its own for the levels of every item: a multinomial mixture.

    .. math::
        t_u \sim \text{Categorical}(\pi), \qquad r_{ui} \mid t_u \sim \text{Categorical}(\phi_{t_u, i})

    Sites: ``types``, the shares :math:`\pi`, of shape ``(num_types,)``; ``chances``, :math:`\phi`, of shape
    ``(num_types, num_items, num_levels)``, both with Dirichlet priors; and ``rating``. Types of users are summed out;
    with ratings the deterministic site ``type_of_user``, of shape ``(num_users, num_types)``, has their probabilities,
    and :math:`\sum_t p(t_u = t)\, \phi_{ti}` those of a rating that is not seen. Levels have no order here.

    No site is Gaussian, so that NUTS, SVI and :class:`~numpyro_ext.infer.SMC` run this model, and all engines that read
    a form refuse it. Types can be exchanged: chains and starts may end in any order of them.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import rating_types
        >>> user, item = np.divmod(np.arange(12), 4)
        >>> predictive = Predictive(rating_types, num_samples=5)
        >>> draws = predictive(random.key(0), user, item, num_users=3, num_items=4, num_levels=5, num_types=2)
        >>> print(draws["chances"].shape, draws["rating"].shape)
        (5, 2, 4, 5) (5, 12)

    **References**

    1. Houlsby, N. (2014), *Efficient Bayesian Active Learning and Matrix Modelling*, section 7.4.1 (BMM).

    :param user: user of each rating, integers from 0, shape ``(n,)``.
    :param item: item of each rating, integers from 0, shape ``(n,)``.
    :param rating: levels, integers from 0, shape ``(n,)``; ``None`` samples them.
    :param int num_users: number of users, also of those without a rating.
    :param int num_items: number of items.
    :param int num_levels: number of levels.
    :param int num_types: number of types.
    :param float concentration: of the Dirichlet priors.
    :raises ValueError: if an index or a level is out of range.
    """
    user, item = checked_indices(user=(user, num_users), item=(item, num_items))
    rating = checked_outcomes("rating", rating, len(user), num_levels, is_ordered=True)
    types = numpyro.sample("types", dist.Dirichlet(jnp.full(num_types, concentration, float)))
    prior = dist.Dirichlet(jnp.full(num_levels, concentration, float))
    with numpyro.plate("kinds", num_types, dim=-2), numpyro.plate("items", num_items, dim=-1):
        chances = numpyro.sample("chances", prior)
    density = CategoriesByType(types, chances, user, item, num_people=num_users)
    if rating is not None:
        numpyro.deterministic("type_of_user", density.type_probabilities(rating))
    numpyro.sample("rating", density, obs=rating)
