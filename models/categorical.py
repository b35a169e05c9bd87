"""Categories, ordered categories and rankings: regression, Gaussian processes and choices among products."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro import handlers

from numpyro_ext.distributions import (
    AdjacentCategory,
    ContinuationRatio,
    MultinomialProbit,
    OrderedProbit,
    PlackettLuce,
    StickBreakingCategorical,
)

from .gaussian_process import squared_exponential
from .indices import checked_indices, checked_rankings, checked_table

__all__ = [
    "discrete_choice",
    "multiclass_gp_classification",
    "multinomial_regression",
    "ordinal_regression",
    "plackett_luce",
]

_LIKELIHOODS = {
    "softmax": lambda predictor: dist.Categorical(logits=predictor),
    "stick-breaking": StickBreakingCategorical,
    "probit": MultinomialProbit,
}
_ORDINAL = {
    "cumulative-logit": dist.OrderedLogistic,
    "cumulative-probit": OrderedProbit,
    "continuation-ratio": ContinuationRatio,
    "adjacent-category": AdjacentCategory,
}


def _num_predictors(likelihood: str, num_categories: int) -> int:
    if likelihood not in _LIKELIHOODS:
        raise ValueError(f"likelihood must be one of {tuple(_LIKELIHOODS)}; got {likelihood!r}.")
    return num_categories - (likelihood == "stick-breaking")


def multinomial_regression(
    X: ArrayLike,
    y: ArrayLike | None = None,
    mask: ArrayLike = True,
    *,
    num_categories: int,
    likelihood: str = "softmax",
    coefficient_scale: float = 2.5,
) -> None:
    r"""Regression of a category on covariates, with one linear predictor for each category.

    .. math:: \eta_i = a + B^T x_i, \qquad y_i \sim p(\,\cdot \mid \eta_i)

    (Khan, 2012, table 1.1, polychotomous regression). Sites: ``intercept``, ``coefficients`` and ``y``.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import multinomial_regression
        >>> X = random.normal(random.key(0), (10, 2))
        >>> draws = Predictive(multinomial_regression, num_samples=5)(random.key(1), X, num_categories=3)
        >>> print(draws["coefficients"].shape, draws["y"].shape)
        (5, 2, 3) (5, 10)

    :param X: covariates, shape ``(n, d)``.
    :param y: categories ``0, ..., num_categories - 1``, shape ``(n,)``; ``None`` samples them.
    :param mask: false where a category is missing or held out; broadcasts against ``y``.
    :param int num_categories: number of categories.
    :param str likelihood: ``"softmax"`` or ``"probit"``, with a predictor for every category, or ``"stick-breaking"``,
        with one fewer.
    :param float coefficient_scale: prior standard deviation of intercepts and coefficients.
    :raises ValueError: if the likelihood is unknown.
    """
    X = jnp.asarray(X)
    size = _num_predictors(likelihood, num_categories)
    prior = dist.Normal(0.0, coefficient_scale)
    intercept = numpyro.sample("intercept", prior.expand([size]).to_event(1))
    coefficients = numpyro.sample("coefficients", prior.expand([X.shape[1], size]).to_event(2))
    with handlers.mask(mask=mask):
        numpyro.sample("y", _LIKELIHOODS[likelihood](X @ coefficients + intercept), obs=y)


def multiclass_gp_classification(
    X: ArrayLike,
    y: ArrayLike | None = None,
    mask: ArrayLike = True,
    *,
    num_categories: int,
    likelihood: str = "softmax",
    jitter: float = 1e-6,
) -> None:
    r"""Classification into several classes with one Gaussian process for each of them.

    .. math:: f_k \sim \mathcal{GP}(0, k), \qquad y_i \sim p(\,\cdot \mid f_1(x_i), f_2(x_i), \dots)

    with the kernel of :func:`~numpyro_ext.models.gp_classification`, the same for all classes (Khan, 2012,
    section 5.7). Sites: ``scale``, ``length``, ``f`` of shape ``(classes, n)`` and ``y``.

    :param X: inputs, shape ``(n, d)`` or ``(n,)``.
    :param y: classes ``0, ..., num_categories - 1``, shape ``(n,)``; ``None`` samples them.
    :param mask: false where a class is missing or held out; broadcasts against ``y``.
    :param int num_categories: number of classes.
    :param str likelihood: as for :func:`multinomial_regression`.
    :param float jitter: share of the squared scale added to the variances of ``f``.
    :raises ValueError: if the likelihood is unknown.
    """
    size = _num_predictors(likelihood, num_categories)
    scale = numpyro.sample("scale", dist.HalfNormal(3.0))
    length = numpyro.sample("length", dist.LogNormal(0.5, 0.75))
    covariance = squared_exponential(jnp.asarray(X), scale, length, jitter)
    with numpyro.plate("classes", size):
        f = numpyro.sample("f", dist.MultivariateNormal(0.0, covariance))
    with handlers.mask(mask=mask):
        numpyro.sample("y", _LIKELIHOODS[likelihood](f.T), obs=y)


def ordinal_regression(
    X: ArrayLike,
    y: ArrayLike | None = None,
    mask: ArrayLike = True,
    *,
    num_categories: int,
    likelihood: str = "cumulative-logit",
    coefficient_scale: float = 2.5,
) -> None:
    r"""Regression of an ordered category on covariates, with one predictor and thresholds between the categories.

    The predictor is :math:`x_i^T \beta` (no intercept: it is in the thresholds); larger ones favour later categories
    (Khan, 2012, chapter 6). Sites: ``coefficients``, ``thresholds`` and ``y``.

    **Example:**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import ordinal_regression
        >>> X = random.normal(random.key(0), (10, 2))
        >>> draws = Predictive(ordinal_regression, num_samples=5)(random.key(1), X, num_categories=4)
        >>> print(draws["thresholds"].shape, draws["y"].shape)
        (5, 3) (5, 10)

    :param X: covariates, shape ``(n, d)``.
    :param y: categories ``0, ..., num_categories - 1``, shape ``(n,)``; ``None`` samples them.
    :param mask: false where a category is missing or held out; broadcasts against ``y``.
    :param int num_categories: number of categories.
    :param str likelihood: ``"cumulative-logit"``, ``"cumulative-probit"``, ``"continuation-ratio"`` or
        ``"adjacent-category"``.
    :param float coefficient_scale: prior standard deviation of the coefficients and of the thresholds.
    :raises ValueError: if the likelihood is unknown.
    """
    if likelihood not in _ORDINAL:
        raise ValueError(f"likelihood must be one of {tuple(_ORDINAL)}; got {likelihood!r}.")
    X = jnp.asarray(X)
    prior = dist.Normal(0.0, coefficient_scale)
    coefficients = numpyro.sample("coefficients", prior.expand([X.shape[1]]).to_event(1))
    free = prior.expand([num_categories - 1]).to_event(1)
    ordered = dist.TransformedDistribution(free, dist.transforms.OrderedTransform())
    thresholds = numpyro.sample("thresholds", ordered)
    with handlers.mask(mask=mask):
        numpyro.sample("y", _ORDINAL[likelihood](X @ coefficients, thresholds), obs=y)


def discrete_choice(
    attributes: ArrayLike,
    choices: ArrayLike | None = None,
    mask: ArrayLike = True,
    *,
    priors: bool = True,
) -> None:
    r"""Choices among products by agents with different tastes (mixed logit, random utility).

    .. math:: z_n \sim N(\mu, \mathrm{diag}(\tau^2)), \qquad y_{nd} \sim \mathrm{softmax}(X_{nd} z_n)

    Agent :math:`n` chooses in decision :math:`d` the product whose utility, :math:`X_{nd} z_n` plus independent Gumbel
    noise, is largest (Khan, 2012, section 1.2.2). Sites: ``mean`` (:math:`\mu`), ``scale`` (:math:`\tau`), ``tastes``
    (:math:`z`, deterministic), ``standardised`` and ``choices``.

    :param attributes: :math:`X`, shape ``(agents, decisions, products, attributes)``.
    :param choices: chosen products, shape ``(agents, decisions)``; ``None`` samples them.
    :param mask: false where a choice is missing or held out; broadcasts against ``choices``.
    :param bool priors: whether ``mean`` and ``scale`` are sample sites; if not, ``param`` sites without priors.
    """
    X = jnp.asarray(attributes)
    num_agents, size = X.shape[0], X.shape[3]
    if priors:
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.0).expand([size]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([size]).to_event(1))
    else:
        mean = numpyro.param("mean", jnp.zeros(size))
        scale = numpyro.param("scale", jnp.ones(size), constraint=dist.constraints.positive)
    with numpyro.plate("agents", num_agents):
        standardised = numpyro.sample("standardised", dist.Normal(0.0, 1.0).expand([size]).to_event(1))
    tastes = numpyro.deterministic("tastes", mean + scale * standardised)
    with handlers.mask(mask=mask):
        logits = jnp.einsum("ndkl,nl->ndk", X, tastes)
        numpyro.sample("choices", dist.Categorical(logits=logits).to_event(1), obs=choices)


def plackett_luce(
    num_ranked: ArrayLike, rankings: ArrayLike | None = None, *, num_items: int, entrants: ArrayLike | None = None
) -> None:
    r"""Strengths of items from rankings, such as races, votes and lists of favourites (Plackett 1975).

    A ranking is the order of the strengths :math:`s_i \sim N(0, \tau^2)` with Gumbel noise added; see
    :class:`~numpyro_ext.distributions.PlackettLuce`. Sites: ``scale`` (:math:`\tau`, half-normal), ``strength`` and
    ``ranking``.

    **Example:**

    .. doctest::

        >>> import numpy as np
        >>> from jax import random
        >>> from numpyro_ext import LaplaceApproximation
        >>> from numpyro_ext.models import plackett_luce
        >>> votes, num_ranked = np.array([[2, 0, 1], [2, 1, 0], [0, -1, -1]]), np.array([3, 3, 1])
        >>> election = LaplaceApproximation(plackett_luce, hyper_values={"scale": 1.0})
        >>> _ = election.run(random.key(0), num_ranked, votes, num_items=3)
        >>> print(election.posterior["strength"].mean.round(2))
        [-0.06 -0.43  0.49]

    **References**

    1. Plackett, R. L. (1975), The analysis of permutations, *Applied Statistics* 24.

    :param num_ranked: how many entries of each ranking count, shape ``(n,)``.
    :param rankings: items, best first, padded by any number; shape ``(n, columns)``, with at most as many columns as
        there are items to choose from. ``None`` samples them.
    :param int num_items: number of items.
    :param entrants: who takes part in each ranking, items of shape ``(n, k)``; ``None`` for all. Rankings then hold
        places in these rows: ``entrants`` in the order in which they came in, and ``0, 1, 2, ...`` in every ranking.
    :raises ValueError: if an entrant is out of range, or rankings have more columns than there are entrants.
    """
    num_ranked = checked_table("num_ranked", num_ranked)
    if num_ranked.ndim != 1:
        raise ValueError(f"num_ranked must have one number for each ranking; got shape {num_ranked.shape}.")
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("items", num_items):
        strength = numpyro.sample("strength", dist.Normal(0.0, scale))
    size = num_items
    if entrants is not None:
        shape = np.shape(entrants)
        (index,) = checked_indices(entrants=(np.ravel(entrants), num_items))
        size, strength = shape[-1], strength[index.reshape(shape)]
    if rankings is not None:
        rankings = checked_table("rankings", rankings)
        if rankings.ndim != 2 or rankings.shape[1] > size:
            raise ValueError(f"rankings must have two axes and at most {size} columns; got shape {rankings.shape}.")
        checked_rankings(rankings, num_ranked, size)
        rankings = np.pad(rankings, ((0, 0), (0, size - rankings.shape[1])), constant_values=-1)
    with numpyro.plate("rankings", num_ranked.shape[0]):
        numpyro.sample("ranking", PlackettLuce(strength, num_ranked), obs=rankings)
