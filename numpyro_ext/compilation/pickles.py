"""Objects that leave in pickles what is computed on demand."""

from __future__ import annotations

from functools import cached_property
from typing import Any


class OnDemand:
    """An object whose cached properties stay out of pickles and deep copies, and are computed again when asked for.

    Among them are compiled programs, which cannot be pickled.
    """

    def __getstate__(self) -> dict[str, Any]:
        kind = type(self)
        return {name: value for name, value in vars(self).items() if not _is_cached(kind, name)}


def _is_cached(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), cached_property)
