"""Softmax over many items estimated from a few of them, for training alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.primitives import Messenger

from ...distributions import LinearCategorical
from .chunks import Events

_UNIFORM_SHARE = 0.5
"""Share of the candidates drawn uniformly: rare items weigh at most twice what they would if all were."""


class Candidates(NamedTuple):
    """Items that stand for all in the sum of a softmax."""

    items: Array
    """Shape ``(number,)``."""
    log_rates: Array
    """Logarithm of how often each is expected among them, shape ``(number,)``."""


def log_proposals(items: ArrayLike, num_items: int) -> Array:
    """Log probabilities by which candidates are drawn, shape ``(num_items,)``: half uniform, half as in the events."""
    counts = np.bincount(np.asarray(items), minlength=num_items)
    return jnp.log(_UNIFORM_SHARE / num_items + (1.0 - _UNIFORM_SHARE) * counts / counts.sum())


def draw_candidates(key: Array, number: int, events: Events, log_proposal: Array) -> Candidates:
    """Draw candidates with replacement.

    :param log_proposal: :func:`log_proposals` of the events.
    """
    which, uniform, place = random.split(key, 3)
    drawn = jnp.asarray(events.items)[random.randint(place, (number,), 0, np.size(events.items))]
    anywhere = random.randint(uniform, (number,), 0, log_proposal.size, drawn.dtype)
    items = jnp.where(random.bernoulli(which, _UNIFORM_SHARE, (number,)), anywhere, drawn)
    return Candidates(items, jnp.log(number) + log_proposal[items])


class SampledSoftmax(Messenger):
    """Effect handler that scores observed sites of :class:`LinearCategorical` by some candidates instead of all items.

    :raises ValueError: at the end, if there was no such site.
    """

    def __init__(self, fn: Callable[..., object] | None, candidates: Candidates) -> None:
        self.candidates, self._is_used = candidates, False
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["is_observed"]:
            found = self._sampled(msg["fn"])
            if found is not None:
                self._is_used, msg["fn"] = True, found

    def _sampled(self, fn: Any) -> dist.Distribution | None:
        if isinstance(fn, dist.MaskedDistribution):
            found = self._sampled(fn.base_dist)
            return None if found is None else found.mask(fn._mask)
        return _Sampled(fn, self.candidates) if isinstance(fn, LinearCategorical) else None

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        if exc_type is None and not self._is_used:
            raise ValueError(
                "ChunkedSVI: sampled_softmax= is for observed events of a LinearCategorical (numpyro_ext.distributions)"
                ", of the shape of the batch; the model has none. Write LinearCategorical(states, W_out) in the place "
                "of Categorical(logits=states @ W_out.T)."
            )


class _Sampled(dist.Distribution):
    """Categorical of which only log probabilities are asked, estimated from candidates."""

    support = dist.constraints.nonnegative_integer

    def __init__(self, exact: LinearCategorical, candidates: Candidates) -> None:
        self._exact, self._candidates = exact, candidates
        super().__init__(exact.batch_shape, (), validate_args=False)

    def log_prob(self, value: ArrayLike) -> jax.Array:
        return self._exact.sampled_log_prob(value, *self._candidates)
