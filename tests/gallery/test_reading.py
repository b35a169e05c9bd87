"""Published models are read without a change, into the split that a statistician would name, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import numpyro_ext.infer as engines
from numpyro_ext.structure import (
    ModelStructureError,
    read_bilinear,
    read_first,
    read_latent_gaussian,
    read_sparse_linear,
)
from numpyro_ext.structure.latent_gaussian.read import LATENT_GAUSSIAN
from tests.readings import log_densities
from tests.tiers import few

from . import GAUSSIAN, MODELS

PUBLISHED = [name for name, model in MODELS.items() if not model.refusal]
SLOW = [name for name in PUBLISHED if MODELS[name].is_slow]
QUICK = [name for name in PUBLISHED if name not in SLOW]
READ = [
    *few(QUICK, len(QUICK) // 6),  # models of one file have much in common
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
]
REFUSED = [name for name, model in MODELS.items() if model.refusal]
FORMS = {"BilinearVG": read_bilinear, "StructuredMeanField": read_sparse_linear}


@pytest.mark.parametrize("name", READ)
def test_a_model_is_read(name):
    published = MODELS[name]
    args = published.data()
    for engine in published.engines & set(FORMS):
        FORMS[engine](published.model, args)
    takers = published.engines & set(GAUSSIAN.split())
    if not published.is_latent_gaussian:
        return
    # the reading compares the density of what was read with that of NumPyro
    reading = read_latent_gaussian(published.model, args)
    assert (set(reading.field), set(reading.hyper)) == (published.field, published.hyper)
    assert np.isfinite(log_densities(reading, jax.random.key(1))).any()
    for engine in GAUSSIAN.split():
        try:
            kind = getattr(engines, engine)
            # Laplace's method reads priors that are not smooth as points
            own = [form for form in kind.forms if form.reading is LATENT_GAUSSIAN.reading]
            same = own[-1] is LATENT_GAUSSIAN
            kind(published.model).algorithm(reading if same else read_first(own, published.model, args, check=False))
        except ModelStructureError:
            assert engine not in takers
        else:
            assert engine in takers


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused_for_its_true_reason(name):
    published = MODELS[name]
    refusal = published.refusal
    with pytest.raises(ModelStructureError) as caught:
        read_latent_gaussian(published.model, published.data())
    error, message = caught.value, str(caught.value)
    assert (error.reason, error.site) == (refusal.reason, refusal.site), message
    assert re.search(refusal.words, message), message
    assert refusal.site is None or f"'{refusal.site}'" in message


def test_there_are_sixty_models_of_four_projects():
    projects = {published.source.split(":")[0] for published in MODELS.values()}
    assert {"NumPyro", "PyMC", "Stan user's guide", "Statistical Rethinking"} <= projects
    assert len(READ) >= 60


def test_rows_of_a_plate_are_independent_blocks():
    reading = read_latent_gaussian(MODELS["factor_analysis"].model, MODELS["factor_analysis"].data())
    blocks = reading.form(reading.initial_hyper()).blocks
    assert blocks.rows.shape == (12, 4)
    assert blocks.columns.shape == (12, 2)


def test_gathers_stay_sparse():
    reading = read_latent_gaussian(MODELS["rasch"].model, MODELS["rasch"].data())
    form = reading.form(reading.initial_hyper())
    assert form.design.values.shape == (40, 2)


def test_every_model_is_in_the_table_of_the_pages():
    page = (Path(__file__).parents[2] / "docs" / "gallery.md").read_text(encoding="utf-8")
    missing = [name for name in MODELS if f"| `{name}` |" not in page]
    assert not missing, f"python -m benchmarks.gallery.table FOLDER writes the table; it lacks {missing}"
