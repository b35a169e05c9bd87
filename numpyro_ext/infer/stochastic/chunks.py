"""Sequences as ragged arrays, and the batches and chunks that they are visited in."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike


class Events(NamedTuple):
    """Ragged sequences: user ``u`` has ``items[starts[u] : starts[u] + lengths[u]]``."""

    items: ArrayLike
    starts: ArrayLike
    lengths: ArrayLike


class Ragged(Protocol):
    """Whatever has ragged sequences, such as ``Events`` and ``EventSequences``."""

    @property
    def items(self) -> ArrayLike: ...
    @property
    def starts(self) -> ArrayLike: ...
    @property
    def lengths(self) -> ArrayLike: ...


class Batch(NamedTuple):
    """Users whose chunks are taken side by side."""

    users: np.ndarray
    width: int
    """Events of a chunk."""
    num_chunks: int


def checked_events(data: Any, num_items: int | None = None) -> Events:
    """Ragged arrays of an object with ``items``, ``starts`` and ``lengths``, such as ``EventSequences``.

    :param data: the object.
    :param num_items: items are smaller than this; ``data.num_items`` if ``None``.
    :raises TypeError: if an attribute is missing.
    :raises ValueError: if the items are no integers in their range, or the arrays do not fit.
    """
    try:
        items, starts, lengths = (np.asarray(getattr(data, name)) for name in Events._fields)
        num_items = int(data.num_items) if num_items is None else num_items
    except AttributeError as error:
        raise TypeError(
            "ChunkedSVI: with chunk= the data are sequences with the attributes items, starts, lengths and num_items "
            f"(numpyro_ext.sequences.EventSequences), or a split of such; got {type(data).__name__}."
        ) from error
    for name, value in (("items", items), ("starts", starts), ("lengths", lengths)):
        if value.ndim != 1 or (value.size and value.dtype.kind not in "iu"):
            raise ValueError(
                f"ChunkedSVI: {name} is a vector of integers; got {value.dtype} of the shape {value.shape}."
            )
    ends = starts + lengths
    if starts.shape != lengths.shape or (lengths < 0).any() or (starts < 0).any() or (ends > items.size).any():
        raise ValueError(
            "ChunkedSVI: starts and lengths do not fit the items: each user has items[start:start+length]."
        )
    if items.size and not 0 <= items.min() <= items.max() < num_items:
        raise ValueError(
            f"ChunkedSVI: items are 0 to {num_items - 1}; these are {items.min()} to {items.max()}. "
            "EventSequences.from_events numbers labels."
        )
    return Events(items.astype(np.int32), starts.astype(np.int32), lengths.astype(np.int32))


def joined(first: Ragged, second: Ragged) -> Events:
    """Sequences of which each begins with that of ``first`` and goes on with that of ``second``."""
    a, b = np.asarray(first.lengths), np.asarray(second.lengths)
    if a.shape != b.shape:
        raise ValueError(f"ChunkedSVI: the parts of a split have {a.size} and {b.size} users; they must be the same.")
    lengths = a + b
    starts = np.cumsum(lengths) - lengths
    items = np.zeros(int(lengths.sum()), np.int32)
    for part, shift in ((first, 0 * a), (second, a)):
        count = np.asarray(part.lengths)
        place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        items[np.repeat(starts + shift, count) + place] = np.asarray(part.items)[
            np.repeat(np.asarray(part.starts), count) + place
        ]
    return Events(items, starts.astype(np.int32), lengths.astype(np.int32))


def last_events(events: Events, most: int) -> Events:
    """Sequences of at most the last ``most`` events of each user."""
    lengths = np.minimum(events.lengths, most).astype(np.int32)
    return events._replace(starts=np.asarray(events.starts) + np.asarray(events.lengths) - lengths, lengths=lengths)


def batches_of_events(lengths: np.ndarray, batch_size: int, chunk: int, uniform: np.ndarray) -> list[Batch]:
    """Batches of users of like length, in random order; users without events are in none.

    Sequences shorter than a chunk come in chunks of a half or a quarter. With one batch that is not full this makes at
    most four shapes.

    :param lengths: number of events of each user.
    :param uniform: random numbers in [0, 1): one for each user, then one for each batch, at least.
    """
    widths = np.unique([max(chunk // 4, 1), max(chunk // 2, 1), chunk])
    users = np.flatnonzero(lengths > 0)
    padded = np.where(
        lengths[users] > chunk,
        -(-lengths[users] // chunk) * chunk,
        widths[np.minimum(np.searchsorted(widths, lengths[users]), len(widths) - 1)],
    )
    order = np.lexsort((uniform[users], padded))
    first = len(users) % batch_size  # the batch that is not full has the shortest sequences
    cuts = np.arange(first, len(users), batch_size)
    found = []
    for part in np.split(order, cuts[cuts > 0]):
        longest = int(padded[part[-1]])
        found.append(Batch(users[part], min(longest, chunk), -(-longest // chunk)))
    return [found[k] for k in np.argsort(uniform[len(lengths) :][: len(found)], kind="stable")]


def batches_of_rows(num_rows: int, batch_size: int, uniform: np.ndarray) -> list[Batch]:
    """Batches of rows in random order, of which the last may be smaller."""
    order = np.argsort(uniform[:num_rows], kind="stable")
    return [Batch(part, 0, 1) for part in np.split(order, np.arange(batch_size, num_rows, batch_size))]


def chunk_of(
    events: Ragged, start: Array, length: Array, number: Array | int, width: int
) -> tuple[Array, Array, Array]:
    """One chunk of some users.

    :param start: first event of each user, shape ``(users,)``.
    :param length: number of events of each, shape ``(users,)``.
    :param number: of the chunk, from zero.
    :return: items, zero beyond the end; where there are events; and where these stand in ``events.items``; each of
        shape ``(users, width)``.
    """
    place = number * width + jnp.arange(width)
    mask = place < length[:, None]
    index = jnp.where(mask, start[:, None] + place, 0)
    return jnp.where(mask, jnp.asarray(events.items)[index], 0), mask, index
