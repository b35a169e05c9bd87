"""Which cases of a test run by default."""

from __future__ import annotations

from typing import Any

import pytest


def thorough(*cases: Any) -> list[Any]:
    """Cases for ``pytest.mark.parametrize`` that ``make test-thorough`` runs and ``make test`` does not.

    :param cases: values of one argument, or tuples of the values of several.
    """
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough) for case in cases]
