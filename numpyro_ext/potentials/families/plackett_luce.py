"""Rankings as choices made one after the other among what is left."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike

from ..base import potential
from ..bounds.log_sum_exp import log_sum_exp_bound
from ..integrals.several_predictors.vector_quadrature import log_concave_normaliser
from ..vector import VectorExpectedLogDensity
from .categorical import LogSumExpPotential

# How far below all others a choice is put that is gone: its share is far below rounding, and the bounds of log-sum-exp
# work with differences of this size.
_GONE = 60.0


def ranking_places(ranking: ArrayLike, num_ranked: ArrayLike, num_items: int) -> Array:
    """The place of each item in a ranking, from zero; ``num_items`` for those that it does not name.

    :param ranking: indices of items, best first, shape ``(..., n)``.
    :param num_ranked: how many of these count, shape ``(...)``.
    :param int num_items: how many items there are.
    :return: integers of shape ``(..., num_items)``.
    """
    ranking, num_ranked = jnp.asarray(ranking), jnp.asarray(num_ranked)
    places = jnp.arange(ranking.shape[-1])
    counts = places < num_ranked[..., None]
    names = (ranking[..., None] == jnp.arange(num_items)) & counts[..., None]
    return jnp.min(jnp.where(names, places[:, None], num_items), axis=-2)


@potential
class PlackettLucePotential(LogSumExpPotential):
    r"""Rankings: each place goes to one of the items that are left, with probability as in a softmax.

    .. math:: p(y \mid \eta) = \prod_k \frac{e^{\eta_{y_k}}}{\sum_{j \notin \{y_1, \dots, y_{k-1}\}} e^{\eta_j}}

    One factor has all items as its predictors, however many places are taken. Its expectation is the sum over places of
    that of :class:`SoftmaxPotential` among the items that are left.

    :param Array place: of each item, as made by :func:`ranking_places`; shape ``(..., num_categories)``.
    :param str bound: name of the bound of log-sum-exp.
    :raises ValueError: for one item, or an unknown bound.

    **Example:**

    >>> potential = PlackettLucePotential(ranking_places(jnp.array([2, 0]), 2, 3))
    >>> print(potential.log_density(jnp.array([1.0, 0.0, 2.0])).round(4))
    -0.7209
    """

    place: Array
    bound: str = dataclasses.field(default="tilted", metadata={"static": True})

    is_log_concave: ClassVar[bool] = True
    has_tilted_moments: ClassVar[bool] = False
    pinned = None

    @property
    def num_categories(self) -> int:  # type: ignore[override]
        return jnp.shape(self.place)[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return jnp.shape(self.place)[:-1]

    def _stages(self) -> tuple[Array, Array]:
        """Items that are left at each place, ``(..., places, items)``, and mask of the places that were taken, ``(...,
        places)``.

        The last of all items has no choice, and so no place.
        """
        place = jnp.asarray(self.place)
        number = jnp.arange(self.num_categories - 1)
        left = place[..., None, :] >= number[:, None]
        taken = number < jnp.sum(place < self.num_categories, axis=-1, keepdims=True)
        return left, taken

    def _chosen(self, taken: Array, dtype: jnp.dtype) -> Array:
        """One where an item took a place that was a choice, zero elsewhere."""
        place = jnp.asarray(self.place)
        return (place < jnp.sum(taken, axis=-1, keepdims=True)).astype(dtype)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = self._complete(eta)
        eta = jnp.broadcast_to(eta, jnp.broadcast_shapes(eta.shape, jnp.shape(self.place)))
        left, taken = self._stages()
        logits = jnp.where(left, eta[..., None, :], -jnp.inf)
        total = logsumexp(logits, axis=-1)
        probs = jnp.where(taken[..., None], jnp.exp(logits - total[..., None]), 0.0)
        chosen = self._chosen(taken, eta.dtype)
        value = jnp.sum(chosen * eta, axis=-1) - jnp.sum(jnp.where(taken, total, 0.0), axis=-1)
        identity = jnp.eye(self.num_categories, dtype=eta.dtype)
        sums = jnp.sum(probs, axis=-2)
        hessian = jnp.einsum("...ki,...kj->...ij", probs, probs) - sums[..., None] * identity
        return value, chosen - sums, hessian

    def log_normaliser(self, mean: ArrayLike, covariance: ArrayLike) -> Array:
        return log_concave_normaliser(self.derivatives, *self._complete_moments(mean, covariance))

    def expected_log_density(self, mean: ArrayLike, covariance: ArrayLike) -> VectorExpectedLogDensity:
        mean, covariance = self._complete_moments(mean, covariance)
        left, taken = self._stages()
        # An item that is gone stays among the others, far below them and known: every bound is then one of all items.
        floor = jnp.min(mean, axis=-1, keepdims=True) - _GONE
        means = jnp.where(left, mean[..., None, :], floor[..., None])
        both = left[..., None] & left[..., None, :]
        upper = log_sum_exp_bound(self.bound)(means, jnp.where(both, covariance[..., None, :, :], 0.0))
        chosen = self._chosen(taken, mean.dtype)
        value = jnp.sum(chosen * mean, axis=-1) - jnp.sum(jnp.where(taken, upper.value, 0.0), axis=-1)
        slope = chosen - jnp.sum(jnp.where(taken[..., None] & left, upper.mean_slope, 0.0), axis=-2)
        kept = taken[..., None, None] & both
        return VectorExpectedLogDensity(value, slope, -jnp.sum(jnp.where(kept, upper.covariance_slope, 0.0), axis=-3))
