"""Names of the items and users of a log, so that another log is not taken for one that is numbered alike."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["Labels"]


class Labels(NamedTuple):
    """Names of items and users in the order of their numbers; ``None`` where the data have none."""

    items: list[Any] | None = None
    users: list[Any] | None = None

    @classmethod
    def of(cls, data: object) -> Labels:
        """Names that sequences have, such as ``EventSequences`` has them, or the training of a split."""
        source = getattr(data, "train", data)
        return cls(*(_plain(getattr(source, f"{kind}_labels", None)) for kind in ("item", "user")))

    def check(self, who: str, data: object, *, with_users: bool) -> None:
        """Refuse other data whose numbers stand for other items, or for other users where these matter.

        :param who: what was fitted, for the message.
        :param data: sequences or a split.
        :param with_users: whether users have a part of their own.
        :raises ValueError: with the first number that stands for something else.
        """
        found = Labels.of(data)
        for kind, own, other in zip(("items", "users"), self, found, strict=True):
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


def _plain(labels: Any) -> list[Any] | None:
    if labels is None:
        return None
    array = np.asarray(labels)
    return array.tolist() if array.dtype.kind in "biufU" else [str(label) for label in array]
