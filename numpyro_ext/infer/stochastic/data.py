"""Data of a run: rows of arrays, or sequences with a validation."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .chunks import Batch, Events, batches_of_events, batches_of_rows, checked_events, chunk_of, joined, last_events
from .scoring import of_each


class Rows(NamedTuple):
    """Arrays with one row for each member of a plate."""

    data: tuple[Array, ...]
    num_rows: int
    validation: None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: Any) -> Rows:
        """Rows of an array, a table of pandas, or a tuple of these.

        :raises TypeError: if something is not numbers.
        :raises ValueError: if the numbers of rows differ or there are none.
        """
        arrays = [np.asarray(part) for part in (data if isinstance(data, tuple) else (data,))]
        for array in arrays:
            if array.dtype.kind not in "biufc":
                hint = " Sequences of events need chunk=." if hasattr(data, "lengths") or hasattr(data, "train") else ""
                raise TypeError(f"ChunkedSVI: without chunk= the data are arrays of numbers; got {array.dtype}.{hint}")
        sizes = {array.shape[0] if array.ndim else 0 for array in arrays}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(
                "ChunkedSVI: the arrays of the data have one row for each member of the plate; their shapes are "
                f"{[array.shape for array in arrays]}."
            )
        return cls(tuple(map(jnp.asarray, arrays)), sizes.pop())

    def first(self, batch_size: int, carry: Any) -> tuple[Array, tuple[Any, ...]]:
        """Members of a first batch, and arguments of the model for them."""
        rows = jnp.arange(min(batch_size, self.num_rows))
        return rows, tuple(array[rows] for array in self.data)

    def batches(self, batch_size: int, uniform: ArrayLike) -> list[Batch]:
        """Batches of an epoch."""
        return batches_of_rows(self.num_rows, batch_size, np.asarray(uniform))

    def size(self, batch: Batch) -> int:
        """Rows of a batch."""
        return len(batch.users)

    def digest(self) -> str:
        """Digest of the arrays."""
        return _digest(self.data)


class Sequences(NamedTuple):
    """Sequences of events in chunks."""

    events: Events
    """Training events, on the device."""
    chunk: int
    num_items: int
    validation: tuple[Events, np.ndarray] | None
    """Training and validation joined, and the number of training events of each user."""
    notes: tuple[str, ...]

    @classmethod
    def of(cls, data: Any, chunk: int, max_chunks: int | None) -> Sequences:
        """Sequences of an object with ``items``, ``starts`` and ``lengths``, or of a split of such.

        :raises ValueError: if there is nothing to train on or, in a split, to validate on.
        """
        is_split = hasattr(data, "train") and hasattr(data, "validation")
        events = checked_events(data.train if is_split else data)
        num_items = int((data.train if is_split else data).num_items)
        lengths, notes, validation = np.asarray(events.lengths), [], None
        if not lengths.sum():
            raise ValueError("ChunkedSVI: there are no training events.")
        if (lengths == 0).any():
            notes.append(f"{(lengths == 0).sum()} users have no training events; their parameters stay as they began")
        if is_split:
            later = checked_events(data.validation, num_items)
            if not np.sum(later.lengths):
                raise ValueError("ChunkedSVI: the split has no validation events; train on its part without a split.")
            validation = (joined(events, later), lengths)
        if max_chunks is not None and (lengths > max_chunks * chunk).any():
            notes.append(f"only the last {max_chunks * chunk} events of {(lengths > max_chunks * chunk).sum()} users")
            events = last_events(events, max_chunks * chunk)
        on_device = Events(*map(jnp.asarray, events))
        return cls(on_device, chunk, num_items, validation, tuple(notes))

    @property
    def num_rows(self) -> int:
        """Number of users."""
        return np.size(self.events.lengths)

    def first(self, batch_size: int, carry: Any) -> tuple[Array, tuple[Any, ...]]:
        """Users of a first batch, and arguments of the model for their first chunk."""
        users = np.arange(min(batch_size, self.num_rows))
        start, length = np.asarray(self.events.starts)[users], np.asarray(self.events.lengths)[users]
        items, mask, _ = jax.jit(chunk_of, static_argnums=4)(self.events, start, length, 0, self.chunk)
        return jnp.asarray(users), (items, mask, of_each(carry, len(users)))

    def batches(self, batch_size: int, uniform: ArrayLike) -> list[Batch]:
        """Batches of an epoch."""
        return batches_of_events(np.asarray(self.events.lengths), batch_size, self.chunk, np.asarray(uniform))

    def size(self, batch: Batch) -> int:
        """Events of a batch."""
        return int(np.asarray(self.events.lengths)[batch.users].sum())

    def digest(self) -> str:
        """Digest of training and validation."""
        return _digest((self.events, self.validation))


def _digest(arrays: object) -> str:
    found = blake2b(digest_size=16)
    for array in map(np.asarray, jax.tree.leaves(arrays)):
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()
