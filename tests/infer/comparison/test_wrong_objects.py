"""Functions of engines, given what is none of those that they take, say so and how to make one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest

from numpyro_ext import design, infer, psychometrics
from numpyro_ext.infer import EP, SMC, BilinearVG, ChunkedSVI, StructuredMeanField

KEY = jax.random.key(0)


def model(y=None):
    raise AssertionError("No model is run before the engine is looked at.")


QUESTIONS: dict[str, Callable[[Any], object]] = {
    "cross_validate": lambda given: infer.cross_validate(given, KEY, np.ones(3)),
    "calibrate": lambda given: infer.calibrate(given, KEY, None),
    "fit_batches": lambda given: infer.fit_batches(given, KEY, [], over="u"),
    "grid_search": lambda given: infer.grid_search(given, KEY, np.ones(3), param_grid={"scale": [1.0]}),
    "predictive_moments": infer.predictive_moments,
    "predictive_pit": infer.predictive_pit,
    "rank_summary": lambda given: infer.rank_summary(given, "u"),
    "shortlist": lambda given: infer.shortlist(given, "u"),
    "ranking_quality": lambda given: infer.ranking_quality(given, [0], [0]),
    "recommend_items": lambda given: infer.recommend_items(given, [0]),
    "IndependenceMetropolis": infer.IndependenceMetropolis,
    "PosteriorReparam": infer.PosteriorReparam,
    "compare_acquisitions": lambda given: design.compare_acquisitions(given, KEY, {"x": np.ones(3)}),
    "cold_start": lambda given: design.cold_start(given, (), new="u"),
    "expected_information_gain": lambda given: design.expected_information_gain(given, rng_key=KEY),
    "expected_risk": design.expected_risk,
    "random_scores": lambda given: design.random_scores(given, rng_key=KEY),
    "SequentialDesign": design.SequentialDesign,
    "response_of": psychometrics.response_of,
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("given", [EP, model, object()], ids=["class", "model", "object"])
def test_what_is_no_engine_is_refused(question, given):
    with pytest.raises(TypeError, match="takes|give an engine") as error:
        QUESTIONS[question](given)
    assert "missing 1 required positional" not in str(error.value)
    if given is model:
        assert "function model" in str(error.value)


def test_the_way_from_a_class_or_a_model_to_an_engine_is_told():
    with pytest.raises(TypeError, match=r"got the class EP, of which EP\(model, \.\.\.\) makes one"):
        infer.calibrate(EP, KEY, None)
    with pytest.raises(TypeError, match=r"got the function model; if it is a model, EP\(model\) makes an engine"):
        infer.calibrate(model, KEY, None)
    with pytest.raises(TypeError, match="got None"):
        infer.calibrate(None, KEY, None)


@pytest.mark.parametrize(
    "kind",
    [BilinearVG, SMC, partial(ChunkedSVI, optim=optax.sgd(0.1), plate="rows", batch_size=2)],
    ids=["BilinearVG", "SMC", "ChunkedSVI"],
)
@pytest.mark.parametrize("devices", [2, "cpu", [0, 1]])
def test_devices_are_a_sequence_and_not_their_number(kind, devices):
    with pytest.raises(TypeError, match=r"devices are a sequence, such as jax.devices\(\)\[:2\]; got"):
        kind(model, devices=devices)


@pytest.mark.parametrize("kind", [BilinearVG, StructuredMeanField])
def test_engines_of_another_kind_are_refused_before_they_run(kind):
    with pytest.raises(TypeError, match=f"Gaussian field .* got an object of class {kind.__name__}"):
        infer.cross_validate(kind(model), KEY, np.ones(3))
