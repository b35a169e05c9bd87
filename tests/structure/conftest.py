"""Fixtures of the tests of recordings."""

import logging
from collections.abc import Iterator

import jax
import pytest

from numpyro_ext.structure import ModelStructureError

_OF_MODELS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
    ModelStructureError,
)
"""Errors of models that need values, or that are refused: all else is a fault of the recording."""


@pytest.fixture
def no_faults(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail on an error in a recording that would go unseen, because the model is called in its place."""
    caplog.set_level(logging.DEBUG, logger="numpyro_ext")
    yield
    errors = [record.exc_info[1] for record in caplog.get_records("call") if record.exc_info]
    faults = [error for error in errors if not isinstance(error, _OF_MODELS)]
    assert not faults, faults
