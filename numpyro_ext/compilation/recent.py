"""A store of compiled functions that forgets what has not been used for long."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

__all__ = ["Recent"]

_Kept = TypeVar("_Kept")


class Recent:
    """The last ``size`` things that were asked for.

    :param int size: how many are kept.

    >>> squares = Recent(2)
    >>> [squares.get(n, lambda n=n: n * n) for n in (3, 4)]
    [9, 16]
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], _Kept]) -> _Kept:
        """Value that is kept under a key, made if it is not there.

        :param key: equal keys mean equal things.
        :param make: called without arguments when needed.
        """
        if key not in self._kept:
            self._kept[key] = make()
        self._kept.move_to_end(key)
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)
        found: _Kept = self._kept[key]
        return found

    def clear(self) -> None:
        """Forget all that is kept."""
        self._kept.clear()
