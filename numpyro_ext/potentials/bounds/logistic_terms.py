"""Logistic log-partitions of the factors that count successes and failures."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ..moments import LogisticTerms


def two_sided_terms(constant: Array, successes: Array, failures: Array, shift: Array) -> LogisticTerms:
    r"""Terms of ``constant + successes * log_sigmoid(x) + failures * log_sigmoid(-x)`` with :math:`x = \eta + b`.

    One term is enough, since the two log sigmoids differ by ``x``. It is turned to the side of the larger count, where
    the linear part does not cancel against it.

    :param Array constant: what does not depend on the predictor.
    :param Array successes: weights of the log sigmoid, any non-negative numbers.
    :param Array failures: weights of its mirror image.
    :param Array shift: the number :math:`b`.
    """
    constant, successes, failures, shift = jnp.broadcast_arrays(constant, successes, failures, shift)
    sign = jnp.where(successes > failures, -1.0, 1.0).astype(constant.dtype)
    linear = sign * jnp.minimum(successes, failures)
    return LogisticTerms(
        constant=constant + linear * shift,
        linear=linear,
        weights=(successes + failures)[None],
        slopes=sign[None],
        offsets=(sign * shift)[None],
    )
