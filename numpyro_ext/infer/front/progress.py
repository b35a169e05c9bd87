"""What a person sees while a run goes on: a bar between compiled chunks, and warnings at the caller's line."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm.auto import tqdm

__all__ = ["progress_bar", "warn"]

_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep


@contextmanager
def progress_bar(total: int, description: str, *, enabled: bool = True, delay: float = 1.0) -> Iterator[tqdm]:
    """A bar of ``total`` units that shows itself only once ``delay`` seconds have passed.

    :param int total: the number of units at most; a run that converges earlier ends at a full bar.
    :param str description: shown on the left.
    :param bool enabled: false for no bar at all.
    :param float delay: runs shorter than this draw nothing.
    :return: a context manager giving the bar, to be advanced with ``update``.
    """
    bar = tqdm(total=total, desc=description, delay=delay, disable=not enabled, leave=True)
    try:
        yield bar
    finally:
        bar.close()


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points at the first line outside this package.

    :param str message: the text.
    :param category: the class of the warning.
    """
    level, frame = 1, inspect.currentframe()
    while frame is not None and os.path.abspath(frame.f_code.co_filename).startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
