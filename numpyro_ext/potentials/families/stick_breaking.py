"""Categorical observations as binary ones: one logistic factor for every stick that may have broken."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


def stick_breaking_labels(value: ArrayLike, num_sticks: int) -> tuple[Array, Array]:
    r"""The binary observations that a category is made of in the stick-breaking model.

    Category :math:`k < K` has probability :math:`\sigma(\eta_k) \prod_{j < k} (1 - \sigma(\eta_j))`, and the last
    category :math:`K` what remains: stick :math:`k` broke, those before it did not, and those after it were never
    looked at. A categorical site with :math:`K` predictors is therefore :math:`K` Bernoulli sites with missing data
    (Khan 2012, section 5.6).

    :param ArrayLike value: categories ``0, ..., num_sticks``.
    :param int num_sticks: :math:`K`, the number of predictors.
    :return: ``labels`` (zeros and ones) and ``observed`` (booleans), both of shape ``value.shape + (num_sticks,)``.
        A value out of range has nothing observed.

    **Example:**

    >>> labels, observed = stick_breaking_labels(jnp.array([0, 1, 2]), 2)
    >>> print(labels)
    [[1 0]
     [0 1]
     [0 0]]
    >>> print(observed)
    [[ True False]
     [ True  True]
     [ True  True]]
    """
    value = jnp.asarray(value)[..., None]
    stick = jnp.arange(num_sticks)
    labels = (stick == value).astype(int)
    observed = (stick <= value) & (value <= num_sticks)
    return labels, observed
