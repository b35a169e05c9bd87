"""Which cases of a test run by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thorough(*cases: Any) -> list[Any]:
    """Cases for ``pytest.mark.parametrize`` that ``make test-thorough`` runs and ``make test`` does not.

    :param cases: values of one argument, or tuples of the values of several.
    """
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough) for case in cases]


def few(cases: Iterable[Any], number: int) -> list[Any]:
    """Some of many cases by default, spread evenly over their order, and all others thorough."""
    cases = list(cases)
    chosen = {round(i * (len(cases) - 1) / max(number - 1, 1)) for i in range(number)}
    return [part for i, case in enumerate(cases) for part in ([case] if i in chosen else thorough(case))]
