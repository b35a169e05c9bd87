"""Objects that leave out of pickles what is computed on demand, and those that are in no pickles."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NoReturn, Self


class OnDemand:
    """An object whose cached properties stay out of pickles and deep copies, and are computed again when asked for.

    Among them are compiled programs, which cannot be pickled.
    """

    def __getstate__(self) -> dict[str, Any]:
        kind = type(self)
        return {name: value for name, value in vars(self).items() if not _is_cached(kind, name)}


def _is_cached(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), cached_property)


class OfARun:
    """An answer of an engine that asks its run when it is asked, and cannot be pickled without it; copies share it."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        del protocol
        raise TypeError(
            f"{type(self).__name__} cannot be pickled without its run. Pickle or save() the engine, which gives the "
            "same answers, or keep arrays: mean, variance, quantile(q), sample(key, n)."
        )

    def __copy__(self) -> Self:
        out = object.__new__(type(self))
        vars(out).update(vars(self))
        return out

    def __deepcopy__(self, memo: object) -> Self:
        del memo
        return self.__copy__()
