"""Curves of items: probabilities of answers, expected scores and information, as functions of the trait.

A *response* is any function from traits, shape ``(...,)`` or ``(..., D)``, to a NumPyro distribution of the answers to
``P`` items, with batch shape ``(..., P)``. :func:`~numpyro_ext.psychometrics.response_of` makes one of a fitted model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike

from ..potentials.families.ordinal import cumulative_logit_table
from ..potentials.integrals.several_predictors.vector_quadrature import gaussian_rule

Response = Callable[[Array], dist.Distribution]


def category_probabilities(response: Response, theta: ArrayLike) -> Array:
    """Probability of each answer to each item.

    **Example:**

    >>> import jax.numpy as jnp
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.psychometrics import category_probabilities
    >>> slope, intercept = jnp.array([1.0, 2.0]), jnp.array([0.0, -1.0])
    >>> def response(theta):
    ...     return dist.Bernoulli(logits=slope * theta[..., None] + intercept)
    >>> print(category_probabilities(response, 0.5).round(3))
    [[0.378 0.622]
     [0.5   0.5  ]]

    :param response: a function from traits to the distribution of the answers.
    :param theta: traits, shape ``(...,)``, or ``(..., D)`` for several.
    :return: shape ``(..., P, K)``; zero for categories that an item does not have.
    :raises TypeError: if the answers are not among finitely many.
    """
    return jnp.exp(log_category_probabilities(response(_traits(theta))))


def log_category_probabilities(distribution: dist.Distribution) -> Array:
    """Log probability of each value of a distribution with finitely many values.

    Ordered logistic probabilities are computed without the differences of NumPyro's, which lose all digits in the
    tails.

    :param distribution: of batch shape ``(...)``.
    :return: shape ``(..., K)``.
    :raises TypeError: if the support is not finite.
    """
    base = unmasked(distribution)
    if isinstance(base, dist.OrderedLogistic):
        found = cumulative_logit_table(base.predictor, base.cutpoints)
    elif isinstance(base, dist.BernoulliLogits):
        # NumPyro's own has another derivative where the logit is exactly zero, that of one side.
        logit = jnp.asarray(base.logits)[..., None]
        found = jax.nn.log_sigmoid(jnp.concatenate([-logit, logit], -1))
    elif base.has_enumerate_support and not base.event_shape:
        found = jnp.moveaxis(base.log_prob(base.enumerate_support(expand=False)), 0, -1)
    else:
        raise TypeError(
            f"{type(base).__name__} has no finite number of answers. Curves of categories need a distribution such as "
            "Bernoulli, OrderedLogistic, AdjacentCategory or Categorical."
        )
    return jnp.broadcast_to(found, (*distribution.batch_shape, found.shape[-1]))


def unmasked(distribution: dist.Distribution) -> dist.Distribution:
    """The distribution below masks and expansions."""
    while isinstance(distribution, dist.MaskedDistribution | dist.ExpandedDistribution):
        distribution = distribution.base_dist
    return distribution


def expected_score(response: Response, theta: ArrayLike) -> Array:
    """Mean answer to each item: of categories the mean of their numbers, of real answers the mean.

    :param response: a function from traits to the distribution of the answers.
    :param theta: traits, shape ``(...,)`` or ``(..., D)``.
    :return: shape ``(..., P)``.
    """
    distribution = response(_traits(theta))
    if isinstance(normal := unmasked(distribution), dist.Normal):
        return jnp.broadcast_to(jnp.asarray(normal.mean), distribution.batch_shape)
    probabilities = jnp.exp(log_category_probabilities(distribution))
    return probabilities @ jnp.arange(probabilities.shape[-1], dtype=probabilities.dtype)


def fisher_information(response: Response, theta: ArrayLike) -> Array:
    r"""Fisher information of each item about the traits, by derivatives in forward mode.

    .. math:: I(\theta) = \sum_k \frac{\nabla p_k(\theta)\, \nabla p_k(\theta)^T}{p_k(\theta)}

    computed as :math:`\sum_k p_k \nabla \log p_k \nabla \log p_k^T`, which stays finite where probabilities vanish. Of
    normal answers it is :math:`\nabla \mu \nabla \mu^T / \sigma^2 + 2 \nabla \log \sigma \nabla \log \sigma^T`. Takes
    one evaluation with its derivative for each trait.

    **Example:** information of a logistic item is :math:`a^2 p (1 - p)`.

    >>> import jax.numpy as jnp
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.psychometrics import fisher_information
    >>> def response(theta):
    ...     return dist.Bernoulli(logits=jnp.array([1.0, 2.0]) * theta[..., None])
    >>> print(fisher_information(response, 0.0))
    [0.25 1.  ]

    :param response: a function from traits to the distribution of the answers.
    :param theta: traits, shape ``(...,)`` or ``(..., D)``.
    :return: shape ``(..., P)``, or ``(..., P, D, D)`` for several traits.
    :raises TypeError: if answers are neither categories nor normal.
    """
    theta = _traits(theta)
    dimension = trait_dimension(response, theta)
    directions = jnp.eye(dimension or 1, dtype=theta.dtype)
    if dimension is None:
        directions = directions[0]

    def along(direction: Array) -> tuple[Array, ...]:
        """Square roots of the parts of the information along a direction; their squares add up."""
        tangent = jnp.broadcast_to(direction, theta.shape)
        return jax.jvp(lambda point: _parts(response(point)), (theta,), (tangent,))[1]

    weights = _weights(response(theta))
    slopes = [along(direction) for direction in directions]
    if dimension is None:
        return _sum_of_products(weights, slopes[0], slopes[0])
    rows = [jnp.stack([_sum_of_products(weights, first, second) for second in slopes], -1) for first in slopes]
    return jnp.stack(rows, -2)


def _sum_of_products(weights: tuple[Array, ...], first: tuple[Array, ...], second: tuple[Array, ...]) -> Array:
    """Weighted products of two sets of derivatives, added over the last axis and over the parts."""
    return jnp.asarray(sum(jnp.sum(w * a * b, -1) for w, a, b in zip(weights, first, second, strict=True)))


def _parts(distribution: dist.Distribution) -> tuple[Array, ...]:
    """Quantities whose squared derivatives make the information, with an axis to be added over."""
    if isinstance(normal := unmasked(distribution), dist.Normal):
        mean, scale = (jnp.broadcast_to(value, distribution.batch_shape) for value in (normal.loc, normal.scale))
        return mean[..., None], jnp.log(scale)[..., None]
    return (log_category_probabilities(distribution),)


def _weights(distribution: dist.Distribution) -> tuple[Array, ...]:
    if isinstance(normal := unmasked(distribution), dist.Normal):
        scale = jnp.broadcast_to(normal.scale, distribution.batch_shape)[..., None]
        return 1.0 / jnp.square(scale), jnp.full_like(scale, 2.0)
    return (jnp.exp(log_category_probabilities(distribution)),)


def test_information(response: Response, theta: ArrayLike, items: Any = None) -> Array:
    """Fisher information of a whole test: the sum over its items.

    :param response: a function from traits to the distribution of the answers.
    :param theta: traits, shape ``(...,)`` or ``(..., D)``.
    :param items: items of the test, by number or, of a fitted model, by name; all by default.
    :return: shape ``(...,)``, or ``(..., D, D)`` for several traits.
    """
    theta = _traits(theta)
    axis = -1 if trait_dimension(response, theta) is None else -3
    information = fisher_information(response, theta)
    if items is not None:
        information = jnp.take(information, item_numbers(response, items, information.shape[axis]), axis)
    return information.sum(axis)


# A test to pytest by its name alone, in modules that import it.
test_information.__test__ = False  # type: ignore[attr-defined]


def item_numbers(response: Response, items: Any, number: int) -> np.ndarray:
    """Numbers of items that go by number or by the name that they have in the fit.

    :param response: a function from traits to the distribution of the answers, which may have ``names`` of its items.
    :param items: one item or several.
    :param int number: of all items.
    :raises ValueError: for an item that there is not.
    """
    names = list(getattr(response, "names", ()))
    found = []
    for item in [items] if np.ndim(items) == 0 else list(items):
        place = np.asarray(names.index(item) if item in names else item)
        if place.ndim or place.dtype.kind not in "iuf" or place != np.floor(place):
            known = f"; names are {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}" if names else ""
            raise ValueError(f"An item goes by its number, or by its name in the fit; got {item!r}{known}.")
        if not 0 <= place < number:
            raise ValueError(f"There is no item {item!r}: items are 0 to {number - 1}.")
        found.append(int(place))
    return np.array(found, int)


def marginal_reliability(
    response: Response,
    mean: ArrayLike = 0.0,
    covariance: ArrayLike = 1.0,
    items: object = None,
) -> Array:
    r"""Reliability of a test in a population of traits: the share of their variance that the answers tell.

    .. math:: \rho = 1 - E\left[ \frac{1}{I(\theta) + 1 / \sigma^2} \right] \Big/ \sigma^2

    over :math:`\theta \sim N(\mu, \sigma^2)` (Green et al. 1984, with the posterior variance that information and the
    population give, so that tests with little information stay between zero and one). Of several traits one number
    each, from the diagonal of :math:`(I(\theta) + \Sigma^{-1})^{-1}`.

    **Example:**

    >>> import jax.numpy as jnp
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.psychometrics import marginal_reliability
    >>> def parallel(theta):
    ...     return dist.Normal(theta[..., None] + jnp.zeros(4), 2.0)  # four measurements with four times the variance
    >>> print(marginal_reliability(parallel).round(4))
    0.5

    :param response: a function from traits to the distribution of the answers.
    :param mean: mean of the population, shape ``()`` or ``(D,)``.
    :param covariance: its variance, or covariance of shape ``(D, D)``.
    :param items: items of the test, by number or, of a fitted model, by name; all by default.
    :return: shape ``()``, or ``(D,)``.
    :raises ValueError: if the covariance is neither a number nor a matrix.
    """
    covariance = jnp.asarray(covariance, float)
    if covariance.ndim == 0:
        nodes, weights = gaussian_rule(1)
        theta = jnp.asarray(mean) + jnp.sqrt(covariance) * jnp.asarray(nodes[:, 0])
        variance = 1.0 / (test_information(response, theta, items) + 1.0 / covariance)
        return jnp.asarray(1.0 - jnp.asarray(weights, variance.dtype) @ variance / covariance)
    if covariance.ndim != 2 or covariance.shape[0] != covariance.shape[1]:
        raise ValueError(f"covariance must be a number or a square matrix; got shape {covariance.shape}.")
    nodes, weights = gaussian_rule(covariance.shape[0])
    theta = jnp.asarray(mean) + jnp.asarray(nodes) @ jnp.linalg.cholesky(covariance).T
    precision = test_information(response, theta, items) + jnp.linalg.inv(covariance)
    identity = jnp.broadcast_to(jnp.eye(len(covariance)), precision.shape)
    variances = jnp.diagonal(jnp.linalg.solve(precision, identity), axis1=-2, axis2=-1)
    return jnp.asarray(1.0 - jnp.asarray(weights, variances.dtype) @ variances / jnp.diagonal(covariance))


def _traits(theta: ArrayLike) -> Array:
    """Traits as floating-point numbers."""
    theta = jnp.asarray(theta)
    return theta.astype(jnp.result_type(theta, float))


def trait_dimension(response: Response, theta: Array) -> int | None:
    """Number of traits on the last axis of ``theta``, or ``None`` if every element is a trait of its own.

    It is read off the batch shape of the answers, whose last axis is that of the items.

    :raises ValueError: if the batch shape goes with neither.
    """
    known = getattr(response, "num_traits", None)
    if known is not None:
        return None if known == 1 else int(known)
    batch = jax.eval_shape(lambda point: _parts(response(point))[0], theta).shape[:-1]
    if batch[:-1] == theta.shape:
        return None
    if theta.ndim and batch[:-1] == theta.shape[:-1]:
        return int(theta.shape[-1])
    raise ValueError(
        f"The response to traits of shape {theta.shape} has batch shape {batch}: it must be {(*theta.shape, 'items')} "
        f"for one trait, or {(*theta.shape[:-1], 'items')} for {theta.shape[-1] if theta.ndim else 0} traits."
    )
