"""Maximum marginal likelihood of published data by ``AdaptiveQuadrature``, from three starts."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pandas as pd
import pytest
from jax import random

from numpyro_ext.datasets import data_path
from numpyro_ext.datasets.external import DATA_VARIABLE
from numpyro_ext.infer import AdaptiveQuadrature
from numpyro_ext.models import item_response

needs_data = pytest.mark.skipif(not os.environ.get(DATA_VARIABLE), reason=f"{DATA_VARIABLE} names no downloaded data")

SLOPES = [0.8257, 0.7227, 0.8909, 0.6884, 0.6569]
INTERCEPTS = [2.7732, 0.9902, 0.2491, 1.2848, 2.0533]


def _lsat() -> np.ndarray:
    return pd.read_csv(data_path("irt", "lsat6.csv")).to_numpy().astype(int)


def _verbal_aggression() -> np.ndarray:
    table = pd.read_csv(data_path("irt", "verbagg_long.csv.gz"))
    table["code"] = table["resp"].map({"no": 0, "perhaps": 1, "yes": 2})
    return table.pivot(index="id", columns="item", values="code").to_numpy()


@needs_data
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("answers", "family", "log_likelihood"),
    [
        (_lsat, "rasch", -2466.9376),
        (_lsat, "2pl", -2466.6534),
        (_verbal_aggression, "graded", -6285.8175),
        (_verbal_aggression, "generalised-partial-credit", -6298.4964),
    ],
)
def test_maxima_are_those_of_the_literature_from_three_starts(answers, family, log_likelihood):
    y, found = answers(), []
    for start in (0.5, 1.0, 2.0):
        slopes = start if family == "rasch" else np.full(y.shape[1], start)
        engine = AdaptiveQuadrature(partial(item_response, family=family), init_values={"discrimination": slopes})
        engine.run(random.key(0), y)
        assert engine.diagnostics.converged
        assert abs(float(engine.log_evidence) - log_likelihood) < 2e-3
        found.append(np.asarray(engine.hyper["discrimination"].value))
    np.testing.assert_allclose(found[1:], [found[0]] * 2, atol=2e-3)
    if family == "rasch":
        assert abs(found[0] - 0.7551) < 2e-3
    elif answers is _lsat:
        np.testing.assert_allclose(found[0], SLOPES, atol=2e-3)
        np.testing.assert_allclose(engine.hyper["intercept"].value, INTERCEPTS, atol=2e-3)
