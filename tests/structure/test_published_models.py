"""Published multilevel models read without a change, into the split that a statistician would name."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from numpyro_ext.structure import read_latent_gaussian
from numpyro_ext.structure.model.verification import log_densities

from .published_models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_split_and_log_density(name: str) -> None:
    model, args, field, hyper = MODELS[name]
    reading = read_latent_gaussian(model, args)
    assert set(reading.field) == field
    assert set(reading.hyper) == hyper
    form, reference = log_densities(reading, jax.random.key(1), spreads=(0.2, 1.0)).T
    assert np.isfinite(reference).all()
    np.testing.assert_allclose(form, reference, rtol=1e-11, atol=1e-9)


def test_rows_of_a_plate_are_independent_blocks() -> None:
    model, args, _, _ = MODELS["factor analysis"]
    reading = read_latent_gaussian(model, args)
    assert reading._blocks[0].shape == (6, 4)
    assert reading._blocks[1].shape == (6, 2)


def test_gathers_stay_sparse() -> None:
    model, args, _, _ = MODELS["Rasch"]
    reading = read_latent_gaussian(model, args)
    form = reading.form(reading.initial_hyper())
    assert form.design.values.shape == (24, 2)
