"""Comparisons of two: leagues, one person's preferences, and those of many people with shared tastes."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.scipy.stats import norm
from jax.typing import ArrayLike

from .gaussian_process import squared_exponential
from .indices import checked_indices, checked_kernel, checked_outcomes, checked_size

__all__ = [
    "bradley_terry",
    "collaborative_preferences",
    "joint_preference_gp",
    "preference_factorization",
    "preference_gp",
]


def bradley_terry(
    first: ArrayLike,
    second: ArrayLike,
    result: ArrayLike | None = None,
    *,
    num_items: int,
    home: ArrayLike | None = None,
    ties: bool = False,
) -> None:
    r"""Strengths of teams, players or products from contests of two (Bradley and Terry 1952).

    .. math:: P(i \text{ beats } j) = \sigma(s_i - s_j + a\,h), \qquad s_i \sim N(0, \tau^2)

    with :math:`h` one where the first is at home, minus one where the second is, and zero on neutral ground. With ties
    the three results are ordered, with thresholds :math:`-c` and :math:`c` (Rao and Kupper 1967). Sites: ``scale``
    (:math:`\tau`, half-normal), ``strength``, ``home_advantage`` (:math:`a`, normal; with ``home``), ``tie_width``
    (:math:`c`, half-normal; with ``ties``) and ``result``.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro_ext import EP
        >>> from numpyro_ext.models import bradley_terry
        >>> first, second, result = np.array([0, 0, 1, 2, 1]), np.array([1, 2, 2, 0, 0]), np.array([1, 1, 1, 0, 0])
        >>> league = EP(bradley_terry, hyper_values={"scale": 1.0})
        >>> _ = league.run(random.key(0), first, second, result, num_items=3)
        >>> print(np.asarray(league.posterior["strength"].mean, float).round(2))
        [ 0.95 -0.18 -0.77]

    **References**

    1. Bradley, R. A. and Terry, M. E. (1952), Rank analysis of incomplete block designs, *Biometrika* 39.
    2. Rao, P. V. and Kupper, L. L. (1967), Ties in paired-comparison experiments, *JASA* 62.

    :param first: first item of each contest, integers from 0, shape ``(n,)``.
    :param second: its opponent, shape ``(n,)``.
    :param result: one where the first wins and zero where the second does; with ``ties`` two, and one for a tie. Shape
        ``(n,)``; ``None`` samples them.
    :param int num_items: number of items, also of those without a contest.
    :param home: 1, 0 or -1 as above, or one number for all contests; ``None`` for no advantage.
    :param bool ties: whether a contest may be tied.
    :raises ValueError: if an index is out of range, or the shapes differ.
    """
    first, second = checked_indices(first=(first, num_items), second=(second, num_items))
    _warn_of_self_comparisons(first, second)
    result = checked_outcomes("result", result, first.size, 3 if ties else 2)
    if home is not None and np.shape(home) not in ((), first.shape):
        raise ValueError(f"home must be a number, or one for each of {first.size} contests; got {np.shape(home)}.")
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("items", num_items):
        strength = numpyro.sample("strength", dist.Normal(0.0, scale))
    predictor = strength[first] - strength[second]
    if home is not None:
        predictor += numpyro.sample("home_advantage", dist.Normal(0.0, 1.0)) * jnp.asarray(home, predictor.dtype)
    likelihood = dist.Bernoulli(logits=predictor)
    if ties:
        width = numpyro.sample("tie_width", dist.HalfNormal(1.0))
        likelihood = dist.OrderedLogistic(predictor, width * jnp.array([-1.0, 1.0]))
    with numpyro.plate("contests", first.shape[0]):
        numpyro.sample("result", likelihood, obs=result)


def preference_gp(
    X: ArrayLike,
    first: ArrayLike,
    second: ArrayLike,
    won: ArrayLike | None = None,
    *,
    link: str = "probit",
    jitter: float = 1e-6,
) -> None:
    r"""The utility of items to one person, as a function of what is known of them (Chu and Ghahramani 2005).

    .. math:: f \sim \mathcal{GP}(0, k), \qquad P(i \succ j) = \Phi(f(x_i) - f(x_j))

    with the isotropic squared-exponential kernel of :func:`~numpyro_ext.models.gp_classification`. Sites: ``scale``,
    ``length``, ``utility`` of shape ``(num_items,)`` and ``won``. The priors suit standardised inputs.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import preference_gp
        >>> X, first, second = np.linspace(-1.0, 1.0, 5), np.array([0, 1, 2]), np.array([4, 3, 4])
        >>> draws = Predictive(preference_gp, num_samples=7)(random.key(0), X, first, second)
        >>> print(draws["utility"].shape, draws["won"].shape)
        (7, 5) (7, 3)

    **References**

    1. Chu, W. and Ghahramani, Z. (2005), Preference learning with Gaussian processes, *ICML*.

    :param X: inputs of the items, shape ``(num_items,)`` or ``(num_items, d)``.
    :param first: first item of each comparison, integers from 0, shape ``(n,)``.
    :param second: the other item, shape ``(n,)``.
    :param won: one where the first was preferred, else zero, shape ``(n,)``; ``None`` samples them.
    :param float jitter: share of the squared scale added to the variances of the utilities.
    :param str link: ``"probit"``, or ``"logit"`` for the logistic function in the place of :math:`\Phi`.
    :raises ValueError: if the link is unknown, an index is out of range, or the shapes differ.
    """
    X = jnp.asarray(X)
    first, second = checked_indices(first=(first, X.shape[0]), second=(second, X.shape[0]))
    _warn_of_self_comparisons(first, second)
    scale = numpyro.sample("scale", dist.HalfNormal(3.0))
    length = numpyro.sample("length", dist.LogNormal(0.5, 0.75))
    f = numpyro.sample("utility", dist.MultivariateNormal(0.0, squared_exponential(X, scale, length, jitter)))
    _compare(f[first] - f[second], won, link)


def collaborative_preferences(
    user: ArrayLike,
    first: ArrayLike,
    second: ArrayLike,
    won: ArrayLike | None = None,
    *,
    num_users: int,
    kernel: ArrayLike,
    rank: int,
    link: str = "probit",
) -> None:
    r"""Preferences of many people, who share what their tastes are made of (Ko 2017, section 3.2).

    .. math::
        f_u = b + V t_u + \sigma g_u, \quad t_u \sim N(0, I), \quad g_u \sim N(0, K), \qquad
        P(i \succ_u j) = \Phi(f_{ui} - f_{uj})

    The loadings :math:`V`, the means :math:`b` and the scale :math:`\sigma` are the same for all people and are
    maximised over. Sites: ``b``, ``sigma`` and, unless ``rank`` is zero, ``V`` of shape ``(num_items, rank)``, which
    are ``param`` sites; ``taste`` of shape ``(num_users, rank)``, ``own`` of shape ``(num_users, num_items)``, the
    deterministic ``utility`` and ``won``. The identity as the kernel says nothing of the items.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import collaborative_preferences
        >>> user, first, second = np.array([0, 0, 1]), np.array([0, 1, 2]), np.array([2, 3, 0])
        >>> draws = Predictive(collaborative_preferences, num_samples=7)(
        ...     random.key(0), user, first, second, num_users=2, kernel=np.eye(4), rank=1)
        >>> print(draws["utility"].shape, draws["won"].shape)
        (7, 2, 4) (7, 3)

    **References**

    1. Ko, Y. J. (2017), *Applications of Approximate Learning and Inference for Probabilistic Models*, EPFL,
       section 3.2.

    :param user: who compared, integers from 0, shape ``(n,)``.
    :param first: first item of each comparison, integers from 0, shape ``(n,)``.
    :param second: the other item, shape ``(n,)``.
    :param won: one where the first was preferred, else zero, shape ``(n,)``; ``None`` samples them.
    :param int num_users: number of users, also of those without a comparison.
    :param kernel: positive definite covariance :math:`K` of the items, shape ``(num_items, num_items)``.
    :param int rank: number of shared tastes; zero for utilities that share their means and scale only.
    :param str link: ``"probit"``, or ``"logit"`` for the logistic function in the place of :math:`\Phi`.
    :raises ValueError: if the link is unknown, an index is out of range, shapes do not fit, or the rank is not
        below the number of items.
    """
    kernel, num_items = checked_kernel("kernel", kernel)
    rank = checked_size("rank", rank)
    if not 0 <= rank < num_items:
        raise ValueError(f"rank must be in 0, ..., {num_items - 1}, below the number of items; got {rank}.")
    user, first, second = _checked_comparisons(user, first, second, num_users, num_items)
    utility = numpyro.param("b", jnp.zeros(num_items))
    sigma = numpyro.param("sigma", 1.0, constraint=dist.constraints.positive)
    if rank:
        V = numpyro.param("V", lambda key: 0.3 * jax.random.normal(key, (num_items, rank)))
    with numpyro.plate("users", num_users):
        if rank:
            taste = numpyro.sample("taste", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))
            utility = utility + taste @ V.T
        own = numpyro.sample("own", dist.MultivariateNormal(jnp.zeros(num_items), kernel))
    f = numpyro.deterministic("utility", utility + sigma * own)
    _compare(f[user, first] - f[user, second], won, link)


def preference_factorization(
    user: ArrayLike,
    first: ArrayLike,
    second: ArrayLike,
    won: ArrayLike | None = None,
    *,
    num_users: int,
    kernel: ArrayLike,
    rank: int,
    user_kernel: ArrayLike | None = None,
    shared: bool = True,
    link: str = "probit",
) -> None:
    r"""Preferences as a product of weights of the users and Gaussian processes on the items, both integrated over.

    .. math::
        f_{ui} = m_i + \sum_d w_{ud} h_d(i), \quad m, h_d \sim N(0, K), \qquad P(i \succ_u j) = \Phi(f_{ui} - f_{uj})

    (Houlsby et al. 2012; the mean utility :math:`m` is ours). The weights of users are independent, or Gaussian
    processes across them. Sites: ``weights`` of shape ``(num_users, rank)``, or ``(rank, num_users)`` with a
    ``user_kernel``, ``tastes`` (:math:`h`) of shape ``(rank, num_items)``, ``mean`` (with ``shared``) and ``won``.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import preference_factorization
        >>> user, first, second = np.array([0, 0, 1]), np.array([0, 1, 2]), np.array([2, 3, 0])
        >>> draws = Predictive(preference_factorization, num_samples=7)(
        ...     random.key(0), user, first, second, num_users=2, kernel=np.eye(4), rank=2)
        >>> print(draws["tastes"].shape, draws["weights"].shape, draws["won"].shape)
        (7, 2, 4) (7, 2, 2) (7, 3)

    **References**

    1. Houlsby, N., Hernández-Lobato, J. M., Huszár, F. and Ghahramani, Z. (2012), Collaborative Gaussian processes for
       preference learning, *NIPS*.

    :param user: who compared, integers from 0, shape ``(n,)``.
    :param first: first item of each comparison, integers from 0, shape ``(n,)``.
    :param second: the other item, shape ``(n,)``.
    :param won: one where the first was preferred, else zero, shape ``(n,)``; ``None`` samples them.
    :param int num_users: number of users, also of those without a comparison.
    :param kernel: positive definite covariance :math:`K` of the items, shape ``(num_items, num_items)``.
    :param int rank: number of products.
    :param user_kernel: covariance of the users, shape ``(num_users, num_users)``; ``None`` for independent users.
    :param bool shared: whether there is a utility that all users share.
    :param str link: ``"probit"``, or ``"logit"`` for the logistic function in the place of :math:`\Phi`.
    :raises ValueError: if the link is unknown, an index is out of range, shapes do not fit, or the rank is below one.
    """
    kernel, num_items = checked_kernel("kernel", kernel)
    rank = checked_size("rank", rank)
    if rank < 1:
        raise ValueError(f"rank must be one or more; got {rank}.")
    user, first, second = _checked_comparisons(user, first, second, num_users, num_items)
    on_items = dist.MultivariateNormal(jnp.zeros(num_items), kernel)
    if user_kernel is None:
        with numpyro.plate("users", num_users):
            weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))
    else:
        user_kernel, size = checked_kernel("user_kernel", user_kernel)
        if size != num_users:
            raise ValueError(f"user_kernel must have num_users = {num_users} rows; got {size}.")
        with numpyro.plate("components", rank):
            weights = numpyro.sample("weights", dist.MultivariateNormal(jnp.zeros(num_users), user_kernel)).T
    with numpyro.plate("components", rank):
        tastes = numpyro.sample("tastes", on_items)
    predictor = jnp.sum(weights[user] * (tastes.T[first] - tastes.T[second]), axis=-1)
    if shared:
        mean = numpyro.sample("mean", on_items)
        predictor += mean[first] - mean[second]
    _compare(predictor, won, link)


def joint_preference_gp(
    user: ArrayLike,
    first: ArrayLike,
    second: ArrayLike,
    won: ArrayLike | None = None,
    *,
    kernel: ArrayLike,
    user_kernel: ArrayLike,
    link: str = "probit",
) -> None:
    r"""Preferences of many people as one Gaussian process on users and items (Bonilla et al. 2010).

    .. math::
        \mathrm{cov}(f_{ui}, f_{vj}) = \sigma^2\, K^{\text{users}}_{uv} K_{ij}, \qquad
        P(i \succ_u j) = \Phi(f_{ui} - f_{uj})

    Users of one kind inform each other as far as their features make them alike. The cost is that of a Gaussian process
    on all pairs of a user and an item. Sites: ``scale`` (:math:`\sigma`, half-normal), ``standardised`` and the
    deterministic ``utility``, both of shape ``(num_users, num_items)``, and ``won``.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import joint_preference_gp
        >>> user, first, second = np.array([0, 0, 1]), np.array([0, 1, 2]), np.array([2, 3, 0])
        >>> draws = Predictive(joint_preference_gp, num_samples=7)(
        ...     random.key(0), user, first, second, kernel=np.eye(4), user_kernel=np.eye(2))
        >>> print(draws["utility"].shape, draws["won"].shape)
        (7, 2, 4) (7, 3)

    **References**

    1. Bonilla, E. V., Guo, S. and Sanner, S. (2010), Gaussian process preference elicitation, *NIPS*.

    :param user: who compared, integers from 0, shape ``(n,)``.
    :param first: first item of each comparison, integers from 0, shape ``(n,)``.
    :param second: the other item, shape ``(n,)``.
    :param won: one where the first was preferred, else zero, shape ``(n,)``; ``None`` samples them.
    :param kernel: positive definite covariance of the items, shape ``(num_items, num_items)``.
    :param user_kernel: positive definite covariance of the users, shape ``(num_users, num_users)``.
    :param str link: ``"probit"``, or ``"logit"`` for the logistic function in the place of :math:`\Phi`.
    :raises ValueError: if the link is unknown, an index is out of range, or shapes do not fit.
    """
    kernel, num_items = checked_kernel("kernel", kernel)
    user_kernel, num_users = checked_kernel("user_kernel", user_kernel)
    user, first, second = _checked_comparisons(user, first, second, num_users, num_items)
    scale = numpyro.sample("scale", dist.HalfNormal(3.0))
    factors = jnp.linalg.cholesky(user_kernel), jnp.linalg.cholesky(kernel)
    f = numpyro.sample("standardised", dist.MatrixNormal(jnp.zeros((num_users, num_items)), *factors))
    f = numpyro.deterministic("utility", scale * f)
    _compare(f[user, first] - f[user, second], won, link)


def _checked_comparisons(
    user: ArrayLike, first: ArrayLike, second: ArrayLike, num_users: int, num_items: int
) -> list[np.ndarray]:
    found = checked_indices(user=(user, num_users), first=(first, num_items), second=(second, num_items))
    _warn_of_self_comparisons(*found[1:])
    return found


def _warn_of_self_comparisons(first: np.ndarray, second: np.ndarray) -> None:
    same = np.flatnonzero(first == second)
    if same.size:
        warnings.warn(
            f"{same.size} of {first.size} comparisons are of an item with itself (the first at index {same[0]}): they "
            "say nothing of it, and add a constant to the evidence. Leave them out.",
            UserWarning,
            stacklevel=2,
        )


def _compare(difference: Array, won: ArrayLike | None, link: str) -> None:
    if link not in ("logit", "probit"):
        raise ValueError(f"link must be 'logit' or 'probit'; got {link!r}.")
    won = checked_outcomes("won", won, difference.shape[0], 2)
    likelihood = dist.Bernoulli(logits=difference) if link == "logit" else dist.Bernoulli(probs=norm.cdf(difference))
    with numpyro.plate("comparisons", difference.shape[0]):
        numpyro.sample("won", likelihood, obs=won)
