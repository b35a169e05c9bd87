"""Scores of events, states of a network and probabilities of the next event, at given parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro.handlers import replay, seed, substitute, trace

from .chunks import Events, batches_of_events, chunk_of
from .devices import OneDevice
from .local_sites import InBatch, LocalSites
from .setting import Setting


class Scoring:
    """Answers of a model and its guide for batches of users.

    :param model: takes users, events, a mask and the carry, and returns the carry.
    :param guide: its guide, or ``None``.
    :param plate: name of the plate of the users.
    :param chunk: events of a chunk.
    :param places: of tables and batches.
    """

    sites: LocalSites
    """Local parameters, once they are known."""

    def __init__(
        self,
        model: Callable[..., object],
        guide: Callable[..., object] | None,
        plate: str,
        chunk: int | None,
        places: OneDevice,
    ) -> None:
        self.model, self.plate, self.chunk, self.has_guide = model, plate, chunk, guide is not None
        self.places = places
        self.guide = guide if guide is not None else lambda *args, **kwargs: None
        self.score = jax.jit(self._score, static_argnames="width", donate_argnums=0)
        self.states = jax.jit(self._states, donate_argnums=0)
        self.next_logits = jax.jit(self._next_logits, static_argnames="width")

    def event_scores(
        self, values: dict[str, Array], key: Array, events: Events, batch_size: int, setting: Setting
    ) -> np.ndarray:
        """Log probability of each event given those of its user before it, at one draw of the guide.

        :param values: of the parameters.
        :param events: of all users.
        :return: shape ``(total,)``.
        """
        on_device, scores = Events(*map(jnp.asarray, events)), jnp.zeros(np.size(events.items))
        for users, width, num_chunks in self._batches(events, batch_size):
            lent, rows = self.lent_values(values, np.maximum(users, 0))
            scores = self.score(scores, lent, rows, key, users, num_chunks, on_device, setting, width)
        return np.asarray(scores, float)

    def event_states(
        self,
        values: dict[str, Array],
        key: Array,
        events: Events,
        first: np.ndarray,
        batch_size: int,
        setting: Setting,
    ) -> np.ndarray:
        """State of the network before each event but the first ones of each user, at one draw of the guide.

        :param values: of the parameters.
        :param events: of all users.
        :param first: number of events of each user that are left out, shape ``(users,)``.
        :return: numbers of the carry, shape ``(events that are not left out, numbers)``.
        """
        on_device, number = Events(*map(jnp.asarray, events)), np.asarray(events.lengths) - first
        size = sum(np.size(leaf) for leaf in jax.tree.leaves(setting.carry))
        states, place = jnp.zeros((int(number.sum()), size)), np.cumsum(number) - number - first
        for users, width, num_chunks in self._batches(events, batch_size):
            given = (key, users, width * num_chunks, on_device, jnp.asarray(first), jnp.asarray(place))
            states = self.states(states, *self.lent_values(values, np.maximum(users, 0)), *given, setting)
        return np.asarray(states, float)

    def _batches(self, events: Events, batch_size: int) -> Iterator[tuple[np.ndarray, int, int]]:
        """Users side by side, -1 for nobody, the events of their chunks, and the number of these."""
        lengths = np.asarray(events.lengths)
        if len(lengths) != self.sites.num_rows and self.sites.axes:
            raise ValueError(f"ChunkedSVI: the fit has {self.sites.num_rows} users; these are {len(lengths)}.")
        assert self.chunk is not None
        for batch in batches_of_events(lengths, batch_size, self.chunk, np.zeros(2 * len(lengths))):
            users = np.pad(batch.users, (0, batch_size - len(batch.users)), constant_values=-1)
            yield users, batch.width, batch.num_chunks

    def _seen(
        self, values: dict[str, Array], key: Array, users: Array, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Any]:
        """Observed sites and the new carry, at one draw of the guide, given parameters of the rows."""
        model_key, guide_key = jax.random.split(key)
        batch = partial(InBatch, None, self.plate, users, self.sites.axes)
        with trace() as latents, seed(rng_seed=guide_key), substitute(data=values), batch():
            self.guide(users, *args, **kwargs)
        draws = replay(trace=latents)
        with trace() as sites, seed(rng_seed=model_key), substitute(data=values), draws, batch():
            carry = self.model(users, *args, **kwargs)
        seen = {name: site for name, site in sites.items() if site["type"] == "sample" and site["is_observed"]}
        return seen, carry

    def lent_values(self, values: dict[str, Array], users: np.ndarray) -> tuple[dict[str, Array], Array | None]:
        """Values for a compiled program, and where the rows of some users are in them, or ``None``."""
        rows = None
        for name, axis in self.sites.axes.items():
            lent, rows = self.places.lend(values[name], users, axis)
            values = {**values, name: lent}
        return values, rows

    def _rows_of(self, values: dict[str, Array], users: Array) -> dict[str, Array]:
        axes = self.sites.axes
        return {name: jnp.take(value, users, axes[name]) if name in axes else value for name, value in values.items()}

    def _score(
        self,
        scores: Array,
        values: dict[str, Array],
        rows: Array | None,
        key: Array,
        users: Array,
        num_chunks: Array,
        events: Events,
        setting: Setting,
        width: int,
    ) -> Array:
        """Write the log probability of each event given those before it into ``scores``; users of -1 are nobody."""
        users, start, length = _own_events(events, users)
        own, kwargs = self._rows_of(values, users if rows is None else rows), setting.kwargs

        def body(number: Array, value: Any) -> Any:
            carry, scores = value
            items, mask, index = chunk_of(events, start, length, number, width)
            seen, carry = self._seen(own, key, users, (items, mask, carry), kwargs)
            total = jnp.zeros(mask.shape, scores.dtype)
            for name, site in seen.items():
                log_prob = site["fn"].log_prob(site["value"])
                if log_prob.shape != mask.shape:
                    raise ValueError(
                        f"ChunkedSVI: scores need one log probability for each event, of shape (users, steps) = "
                        f"{mask.shape}; the site {name!r} has {log_prob.shape}."
                    )
                total += log_prob.astype(scores.dtype)
            return carry, scores.at[jnp.where(mask, index, scores.size)].set(total, mode="drop")

        return lax.fori_loop(0, num_chunks, body, (of_each(setting.carry, users.shape[0]), scores))[1]

    def _states(
        self,
        states: Array,
        values: dict[str, Array],
        rows: Array | None,
        key: Array,
        users: Array,
        num_events: Array,
        events: Events,
        first: Array,
        place: Array,
        setting: Setting,
    ) -> Array:
        """Write the carry before each event of some users, flat, into ``states`` at ``place[user]`` plus its number."""
        users, start, length = _own_events(events, users)
        own, kwargs = self._rows_of(values, users if rows is None else rows), setting.kwargs

        def body(number: Array, value: Any) -> Any:
            carry, states = value
            leaves = [jnp.reshape(leaf, (users.shape[0], -1)) for leaf in jax.tree.leaves(carry)]
            is_kept = (number < length) & (number >= first[users])
            where = jnp.where(is_kept, place[users] + number, len(states))
            states = states.at[where].set(jnp.concatenate(leaves, axis=1).astype(states.dtype), mode="drop")
            items, mask, _ = chunk_of(events, start, length, number, 1)
            return self._seen(own, key, users, (items, mask, carry), kwargs)[1], states

        return lax.fori_loop(0, num_events, body, (of_each(setting.carry, users.shape[0]), states))[1]

    def _next_logits(
        self,
        values: dict[str, Array],
        rows: Array | None,
        key: Array,
        user: Array,
        length: Array,
        items: Array,
        setting: Setting,
        width: int,
    ) -> Array:
        """Log probabilities of all items after the first ``length`` of ``items``, which has one cell more at least."""
        users, kwargs = user[None], setting.kwargs
        own = self._rows_of(values, users if rows is None else rows)
        events, start = Events(items, jnp.zeros(1, int), length[None]), jnp.zeros(1, int)

        def body(number: Array, carry: Any) -> Any:
            chunk, mask, _ = chunk_of(events, start, length[None], number, width)
            return self._seen(own, key, users, (chunk, mask, carry), kwargs)[1]

        last = length // width
        carry = lax.fori_loop(0, last, body, of_each(setting.carry, 1))
        chunk, mask, _ = chunk_of(events, start, length[None] + 1, last, width)
        seen, _ = self._seen(own, key, users, (chunk, mask, carry), kwargs)
        return jax.nn.log_softmax(logits_of(seen, width)[0, length % width])


def _own_events(events: Events, users: Array) -> tuple[Array, Array, Array]:
    """Users of a batch with the first event and the number of events of each; a user of -1 is nobody and has none."""
    length = jnp.where(users < 0, 0, jnp.asarray(events.lengths)[users])
    users = jnp.maximum(users, 0)
    return users, jnp.asarray(events.starts)[users], length


def seen_in(sites: Mapping[str, Any]) -> Any:
    """Categorical of the one observed site, without mask."""
    seen = [site["fn"] for site in sites.values() if site["type"] == "sample" and site["is_observed"]]
    while len(seen) == 1 and hasattr(seen[0], "base_dist"):
        seen = [seen[0].base_dist]
    if len(seen) != 1 or not hasattr(seen[0], "logits"):
        raise ValueError("ChunkedFit: probabilities of the next event need one observed site, of a Categorical.")
    return seen[0]


def logits_of(sites: Mapping[str, Any], num_steps: int) -> Array:
    """Logits of the one observed site of one user, shape ``(1, steps, items)``."""
    logits = seen_in(sites).logits
    return jnp.broadcast_to(logits, (1, num_steps, logits.shape[-1]))


def of_each(carry: Any, number: int) -> Any:
    """The carry of one user, for each of several."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *jnp.shape(x))), carry)


def checked_number(who: str, name: str, number: Any, least: int) -> int:
    """Number of draws to average over, or of starts.

    :raises ValueError: if it is no integer, or too small.
    """
    if not isinstance(number, int | np.integer) or isinstance(number, bool) or number < least:
        raise ValueError(f"{who}: {name} is an integer from {least}; got {number!r}.")
    return int(number)
