"""One store of what is made once for each structure: compiled programs, and what was found of a model's operations.

The key of an entry is the function that makes it with its arguments, so nothing that the entry depends on can be
missing from the key: the function stands at the top of a module and sees nothing else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from .content import Structure

_SIZE = 1024
"""Entries that are kept. A model takes some twenty, most of them small."""

_Made = TypeVar("_Made")
_Value = TypeVar("_Value")
_kept: OrderedDict[tuple[Hashable, ...], Any] = OrderedDict()
_counts: Counter[str] = Counter()


class Found(Generic[_Value]):
    """A value that is found once for a structure; its subclasses say what it is.

    :param of: what it was found of.
    :ivar value: ``None`` before it was found.
    """

    def __init__(self, *of: object) -> None:
        self.value: _Value | None = None


def shared(make: Callable[..., _Made], *static: object, **options: Hashable) -> _Made:
    """``make(*static, **options)``, made once for equal arguments.

    Of an argument that has data beside its ``structure``, a :class:`~numpyro_ext.compilation.content.Structure`, the
    function gets the object without the data, and all that is left is compared. The entries that were not asked for
    the longest are forgotten.

    :param make: a function or class at the top of a module.
    :param static: its arguments, none of them an array.
    :param options: its arguments by name.
    :return: what it returned the first time.
    :raises TypeError: if ``make`` is a function within another one, which may depend on more than its arguments.

    >>> shared(range, 3) is shared(range, 3)
    True
    """
    if "<" in make.__qualname__:
        raise TypeError(f"{make.__qualname__} may depend on more than its arguments: move it to the top of its module.")
    parts = [_structure(part) for part in static]
    key = make, tuple(parts), tuple((name, options[name]) for name in sorted(options))
    if key not in _kept:
        values = [part.value if isinstance(part, Structure) else part for part in parts]
        _kept[key] = make(*values, **options)
        _counts[f"{make.__module__}.{make.__qualname__}"] += 1
    _kept.move_to_end(key)
    while len(_kept) > _SIZE:
        _kept.popitem(last=False)
    return _kept[key]


def clear(*makes: Callable[..., object]) -> None:
    """Forget what these functions made, or all entries if none is named."""
    for key in [key for key in _kept if not makes or key[0] in makes]:
        del _kept[key]


def counts() -> dict[str, int]:
    """Number of entries that each function has made in this process, by its full name."""
    return dict(_counts)


def _structure(part: Any) -> Any:
    # asked of the class, as an attribute that is missing inside a property would be taken for the property
    found = part.structure if hasattr(type(part), "structure") else None
    return found if isinstance(found, Structure) else part
