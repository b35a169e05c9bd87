"""Models from a grammar: what is read equals NumPyro's density, what is refused is refused by name."""

from __future__ import annotations

import warnings

import jax
import numpy as np
import pytest

from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from tests.readings import log_densities

from .grammar import random_model


def _read_all(seeds: range) -> None:
    refused = []
    for seed in seeds:
        model = random_model(seed)
        try:
            reading = read_latent_gaussian(model, check=False)
        except ModelStructureError as error:
            message = str(error)
            assert "misread" not in message, (seed, model.description, message)
            assert "'" in message and ("predictors" in message or "hyperparameter" in message), (seed, message)
            refused.append(seed)
            continue
        with warnings.catch_warnings():
            # counts drawn without regard to the support of a truncated or weighted site are part of the grammar
            form, reference = log_densities(reading, jax.random.key(seed), spreads=(0.1, 0.7)).T
        np.testing.assert_allclose(form, reference, rtol=1e-9, atol=1e-8, err_msg=f"{seed}: {model.description}")
        assert np.isfinite(reference).any(), (seed, model.description)
        assert "predictor" in reading.affine_sites, (seed, model.description, reading.describe())
    # products of two fields have no latent Gaussian form; everything else in the grammar has one
    assert len(refused) <= 0.15 * len(seeds), refused


@pytest.mark.thorough
@pytest.mark.first
def test_ten_random_models() -> None:
    _read_all(range(10))


@pytest.mark.thorough
def test_twenty_random_models() -> None:
    _read_all(range(10, 30))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(30, 60), range(1000, 1500)], ids=["thirty", "five hundred"])
def test_more_random_models(seeds: range) -> None:
    _read_all(seeds)
