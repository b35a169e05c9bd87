"""First looks at a model, when it may warn of its data: of later calls, and of given parameters, there is no need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_FIRST_LOOK: ContextVar[bool] = ContextVar("first look", default=False)


def is_first_look() -> bool:
    """True while an engine calls a model for the first time, whose parameters it is to learn.

    >>> is_first_look()
    False
    """
    return _FIRST_LOOK.get()


@contextmanager
def first_look(is_first: bool = True) -> Iterator[None]:
    """Say by :func:`is_first_look` what a model is called for.

    :param bool is_first: whether this is a first look.

    >>> with first_look():
    ...     is_first_look()
    True
    """
    before = _FIRST_LOOK.set(is_first)
    try:
        yield
    finally:
        _FIRST_LOOK.reset(before)
