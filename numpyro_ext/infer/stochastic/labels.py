"""Names of the items and users of a log, so that another log is not taken for one that is numbered alike."""

from __future__ import annotations

from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from ..front.running.progress import warn
from .chunks import joined


class Labels(NamedTuple):
    """Names of items and users in the order of their numbers; ``None`` where the data have none."""

    items: list[Any] | None = None
    users: list[Any] | None = None
    lengths: list[int] | None = None
    """Number of events of each user that were learned from."""
    sums: list[int] | None = None
    """Check sum of these."""

    @classmethod
    def of(cls, data: object) -> Labels:
        """Names that sequences have, such as ``EventSequences`` has them, or the training of a split."""
        source = getattr(data, "train", data)
        return cls(*(_plain(getattr(source, f"{kind}_labels", None)) for kind in ("item", "user")))

    @classmethod
    def learned(cls, data: Any) -> Labels:
        """Names, and what is to be known later of events that are learned from; of a split, those of its training."""
        source = getattr(data, "train", data)
        lengths = np.asarray(source.lengths).tolist()
        return cls.of(source)._replace(lengths=lengths, sums=_sums(source, lengths))

    def warn_of_seen(self, who: str, split: Any) -> None:
        """Warn of test events of a split that were learned from: their errors are too small.

        :param who: what was fitted, for the message.
        """
        if self.lengths is None or self.sums is None:
            return
        users = _plain(getattr(split.train, "user_labels", None))
        if self.users is None or users is None:
            users, own = list(range(len(split.train.lengths))), list(range(len(self.lengths)))
        else:
            own = self.users
        before = np.asarray(split.train.lengths) + np.asarray(split.validation.lengths)
        place = {user: number for number, user in enumerate(own)}
        at = np.array([place.get(user, -1) for user in users], int)
        known = np.where(at < 0, 0, np.asarray(self.lengths, int)[at])
        later = (known > before) & (known <= before + np.asarray(split.test.lengths))
        if later.any():
            known, whole = np.where(later, known, 0), joined(joined(split.train, split.validation), split.test)
            later &= np.asarray(_sums(whole, known.tolist())) == np.asarray(self.sums, int)[at]
        if later.any():
            number = int((known - before)[later].sum())
            warn(
                f"{who} was fitted to {number:,} of these test events, of {later.sum():,} users, so that its error is "
                "too small. Fit one to this split, or to its train or history."
            )

    def check(self, who: str, data: object, *, with_users: bool) -> None:
        """Refuse other data whose numbers stand for other items, or for other users where these matter.

        :param who: what was fitted, for the message.
        :param data: sequences or a split.
        :param with_users: whether users have a part of their own.
        :raises ValueError: with the first number that stands for something else.
        """
        found = Labels.of(data)
        for kind, own, other in (("items", self.items, found.items), ("users", self.users, found.users)):
            if own is None or other is None or own == other or (kind == "users" and not with_users):
                continue
            pairs = zip(own, other, strict=False)
            what = next(
                (f"number {number} was {a!r} and is {b!r}" for number, (a, b) in enumerate(pairs) if a != b),
                f"there were {len(own):,} and are {len(other):,}",
            )
            users = ", users=True" if with_users else ""
            raise ValueError(
                f"{who} was fitted to other {kind} than these: {what}. Number them as the log of the fit: "
                f"numbered_as(data, fitted{users}) of numpyro_ext.sequences, with sequences of the fit."
            )


def checked_user(who: str, user: Any, num_users: int) -> int:
    """Index of a user that was fitted.

    :param who: what was fitted, for the message.
    :raises ValueError: if it is none.
    """
    array = np.asarray(user)
    if array.ndim or array.dtype.kind not in "iu" or not 0 <= int(array) < num_users:
        raise ValueError(
            f"{who}: users of the fit are the integers 0 to {num_users - 1}; got {user!r}. The index of a label is its "
            "place in EventSequences.user_labels."
        )
    return int(array)


def _sums(data: Any, lengths: list[int]) -> list[int]:
    """Check sums of the first events of each user."""
    items, starts = np.asarray(data.items, np.int64), np.asarray(data.starts).tolist()
    return [crc32(items[start : start + number].tobytes()) for start, number in zip(starts, lengths, strict=True)]


def _plain(labels: Any) -> list[Any] | None:
    if labels is None:
        return None
    array = np.asarray(labels)
    return array.tolist() if array.dtype.kind in "biufU" else [str(label) for label in array]
