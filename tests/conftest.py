"""Precision of the test run: float64, or float32 where ``NUMPYRO_EXT_TEST_PRECISION=float32`` asks for it."""

import os

import jax
import pytest

PRECISION = os.environ.get("NUMPYRO_EXT_TEST_PRECISION", "float64")
if PRECISION not in ("float32", "float64"):
    raise pytest.UsageError(f"NUMPYRO_EXT_TEST_PRECISION is {PRECISION!r}; it must be float32 or float64.")

jax.config.update("jax_enable_x64", PRECISION == "float64")


def pytest_report_header() -> str:
    return f"jax {jax.__version__} on {jax.default_backend()}, {PRECISION}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest test first: at the end, one worker would run it while the other has nothing to do.
    items.sort(key=lambda item: "sixty_random_models" not in item.nodeid)
