"""Representations of objects: short text, and the same as HTML in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple, TypeVar

import numpy as np

_Class = TypeVar("_Class")

MOST_ROWS = 10
"""Rows of a table that are shown."""


class Table(NamedTuple):
    """Cells in rows of equal length, under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Shown:
    """Mixin of classes with a text and an HTML representation, made of :meth:`_shown`.

    >>> class Fit(Shown):
    ...     def _shown(self):
    ...         return ["Fit: converged", Table(["site", "mean"], [["a < b", "1.20"]])]
    >>> Fit()
    Fit: converged
      site    mean
      a < b   1.20
    >>> print(Fit()._repr_html_())
    <div><b>Fit: converged</b></div><table><thead><tr><th>site</th><th>mean</th></tr></thead><tbody><tr><td>a &lt;
    b</td><td>1.20</td></tr></tbody></table>
    """

    def _shown(self) -> Sequence[str | Table]:
        """The title, then lines and tables."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return as_text(self._shown())

    def _repr_html_(self) -> str:
        return as_html(self._shown())


def shown(cls: type[_Class]) -> type[_Class]:
    """Give a class the representations of :class:`Shown`, as a named tuple has no mixins.

    :param cls: a class with ``_shown``.
    """
    for name in ("__repr__", "_repr_html_"):
        setattr(cls, name, vars(Shown)[name])
    return cls


def counted(number: int, noun: str) -> str:
    """A number and what it counts, in the singular or plural.

    >>> counted(1, "step"), counted(2, "step")
    ('1 step', '2 steps')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(noun: str, items: Iterable[object]) -> str:
    """A noun, in the singular or plural, and what it names.

    >>> listed("element", [3]), listed("element", [3, 5])
    ('element 3', 'elements 3, 5')
    """
    texts = [str(item) for item in items]
    return f"{noun if len(texts) == 1 else noun + 's'} {', '.join(texts)}"


def as_text(parts: Sequence[str | Table]) -> str:
    """Lines, all but the first indented, and tables with their columns aligned."""
    lines: list[str] = []
    for part in parts:
        lines += [part] if isinstance(part, str) else _aligned(part)
    return "\n".join(lines[:1] + [f"  {line}" for line in lines[1:]])


def _aligned(table: Table) -> list[str]:
    rows = [list(table.header), *map(list, table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def as_html(parts: Sequence[str | Table]) -> str:
    """The same as HTML in which every text is escaped."""
    out = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            text = escape(part).replace("\n", "<br>")
            out.append(f"<div><b>{text}</b></div>" if number == 0 else f"<div>{text}</div>")
        else:
            body = "".join(_row(row, "td") for row in part.rows)
            out.append(f"<table><thead>{_row(part.header, 'th')}</thead><tbody>{body}</tbody></table>")
    return "".join(out)


def _row(cells: Iterable[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def number(value: Any) -> str:
    """A number with three digits; nothing for NaN."""
    value = float(value)
    if np.isnan(value):
        return ""
    if value != 0.0 and (abs(value) < 1e-2 or abs(value) >= 1e6):
        return f"{value:.1e}"
    return f"{value:.2f}" if abs(value) < 100.0 else f"{value:.0f}"
