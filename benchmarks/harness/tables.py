"""Tables of Markdown, and means over repeats in the words of their cells."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def blocks(*parts: str | Iterable[str]) -> list[str]:
    """Lines of a page: headings, paragraphs and tables with an empty line between each two; what is empty is left out.

    :param parts: paragraphs, or lines of tables and lists.
    """
    found = [[part] if isinstance(part, str) else list(part) for part in parts]
    return [line for part in found if part for line in ("", *part)][1:]


def table_head(heads: str) -> list[str]:
    """First two lines of a table of Markdown, given its heads with bars between them."""
    return [f"| {heads} |", "|---" * len(heads.split("|")) + "|"]


def table(heads: str, rows: Iterable[Iterable[Any]]) -> list[str]:
    """Lines of a table, each printed as soon as its row is made.

    :param heads: names of the columns, with bars between them.
    :param rows: cells of each row (:func:`cell`).
    """
    lines = table_head(heads)
    for row in rows:
        lines.append(f"| {' | '.join(map(cell, row))} |")
        print(lines[-1], flush=True)
    return lines


def cell(value: Any) -> str:
    """Text of a cell: truth in words, nothing for what is missing, three digits of other numbers."""
    if value is None or isinstance(value, float) and np.isnan(value):
        return ""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def summary(values: np.ndarray) -> dict[str, float]:
    """Mean over repeats and its standard error, which is nan for one."""
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
    return {"mean": float(values.mean()), "standard_error": float(error)}


def mean_and_error(values: Iterable[float], sign: str = "", digits: int = 1) -> str:
    """Mean and standard error in words; of one repeat the mean alone."""
    found = summary(np.asarray(list(values), float))
    error = "" if np.isnan(found["standard_error"]) else f" ± {found['standard_error']:.{digits}f}"
    return f"{found['mean']:{sign}.{digits}f}{error}"


def verdict(is_met: bool | np.bool_) -> str:
    """Word for a target that is met or missed."""
    return "**met**" if is_met else "**missed**"


def standardised(x: np.ndarray) -> np.ndarray:
    """Columns with mean zero and standard deviation one, constant ones with mean zero."""
    return np.asarray((x - x.mean(0)) / np.where(x.std(0) > 0.0, x.std(0), 1.0))
