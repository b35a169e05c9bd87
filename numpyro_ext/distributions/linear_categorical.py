"""Softmax over many categories, whose logits are products of two factors."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import CategoricalLogits
from numpyro.distributions.util import validate_sample


class LinearCategorical(CategoricalLogits):
    r"""Softmax over many categories whose logits are products of an input with a row of weights for each category.

    .. math:: P(y = k) \propto \exp(x^\top w_k + b_k)

    It is ``Categorical(logits=inputs @ weights.T + offset)``, and keeps the factors, so that
    :class:`~numpyro_ext.infer.ChunkedSVI` may train on some of the categories (``sampled_softmax=``).

    **Example:**

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.distributions import LinearCategorical
    >>> fn = LinearCategorical(jnp.array([1.0, 0.0]), jnp.array([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]))
    >>> print(fn.probs.round(2))
    [0.21 0.58 0.21]

    :param inputs: shape ``(..., D)``.
    :param weights: shape ``(K, D)``.
    :param offset: added to the logits, shape ``()``, ``(K,)`` or ``(..., K)``.
    :raises ValueError: if the lengths of inputs and weights differ.
    """

    pytree_data_fields = ("inputs", "weights", "offset")

    def __init__(
        self, inputs: ArrayLike, weights: ArrayLike, offset: ArrayLike = 0.0, *, validate_args: bool | None = None
    ) -> None:
        self.inputs, self.weights, self.offset = map(jnp.asarray, (inputs, weights, offset))
        if self.weights.ndim != 2 or self.inputs.ndim < 1 or self.inputs.shape[-1] != self.weights.shape[1]:
            raise ValueError(
                "LinearCategorical needs weights of shape (K, D) and inputs of shape (..., D); got "
                f"{self.weights.shape} and {self.inputs.shape}."
            )
        # products of two matrices, as gradients of more axes would copy the logits in another order
        *shape, width = self.inputs.shape
        logits = self.inputs.reshape(prod(shape), width) @ self.weights.T
        logits = logits + self.offset if self.offset.ndim <= 1 else logits
        logits = logits.reshape(*shape, len(self.weights))
        super().__init__(logits + self.offset if self.offset.ndim > 1 else logits, validate_args=validate_args)

    def _logits_at(self, value: Array) -> Array:
        """Logits of some categories, from their own rows of the weights: nothing is gathered among all logits."""
        offset = self._offsets(value.ndim)
        return (self.inputs * self.weights[value]).sum(-1) + jnp.take_along_axis(offset, value[..., None], -1)[..., 0]

    def _offsets(self, ndim: int) -> Array:
        """Offsets with this many axes and that of the categories."""
        offset = self.offset.reshape(*(1,) * (ndim + 1 - self.offset.ndim), *self.offset.shape)
        return jnp.broadcast_to(offset, (*offset.shape[:-1], len(self.weights)))

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        """Log probability of a category, of the batch shape broadcast with that of the value."""
        value = jnp.asarray(value)
        value = jnp.broadcast_to(value, jnp.broadcast_shapes(value.shape, self.batch_shape))
        *shape, number = self.logits.shape
        total = jax.nn.logsumexp(self.logits.reshape(prod(shape), number), -1)
        return self._logits_at(value) - total.reshape(shape)

    def sampled_log_prob(self, value: ArrayLike, candidates: ArrayLike, log_rates: ArrayLike) -> Array:
        r"""Log probability with a sum over some categories in the place of all.

        .. math::
            \log\hat p(y) = \eta_y - \log\Big(\sum_{k \in R} e^{\eta_k} + \sum_{c \notin R} e^{\eta_c - \log r_c}\Big)

        The categories :math:`R` on the last axis of the values, such as all that one person chose, are in the sum for
        sure, and candidates stand for the others. The sum has the right expectation, so the estimate is too large by a
        term of the order of one over the number of candidates.

        :param value: categories, of the batch shape.
        :param candidates: categories drawn with replacement, shape ``(n,)``.
        :param log_rates: logarithms :math:`\log r_c` of how often each is expected among them, shape ``(n,)``.
        :return: of the batch shape.

        **Cost:** ``(n + T) D`` for each element of the batch, where ``T`` is the length of its last axis.

        **Source:** Bengio and Senecal (2008), *Adaptive importance sampling to accelerate training of a neural
        probabilistic language model*.
        """
        value, candidates = jnp.asarray(value), jnp.asarray(candidates)
        if value.ndim == 0:
            alone = LinearCategorical(self.inputs[None], self.weights, self.offset)
            return alone.sampled_log_prob(value[None], candidates, log_rates)[0]
        own, offset = self._logits_at(value), self._offsets(value.ndim)
        is_same = value[..., :, None] == value[..., None, :]
        is_first = ~jnp.tril(is_same, -1).any(-1)
        along = jnp.take_along_axis(offset, value[..., None, :], -1)
        certain = jnp.einsum("...td,...sd->...ts", self.inputs, self.weights[value]) + along
        others = self.inputs @ self.weights[candidates].T + offset[..., candidates] - log_rates
        is_certain = (value[..., :, None] == candidates).any(-2)
        least = jnp.finfo(others.dtype).min / 2  # finite, as no candidate may be left
        certain = jnp.where(is_first[..., None, :], certain, least)
        others = jnp.where(is_certain[..., None, :], least, others)
        return own - jnp.logaddexp(jax.nn.logsumexp(certain, -1), jax.nn.logsumexp(others, -1))
