"""Maximum marginal likelihood of published data by ``AdaptiveQuadrature``, from three starts."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pandas as pd
import pytest
from jax import random
from scipy.optimize import minimize
from scipy.special import expit, log_expit, logsumexp

from numpyro_ext.datasets import data_path
from numpyro_ext.datasets.external import DATA_VARIABLE
from numpyro_ext.infer import AdaptiveQuadrature
from numpyro_ext.models import item_response

needs_data = pytest.mark.skipif(not os.environ.get(DATA_VARIABLE), reason=f"{DATA_VARIABLE} names no downloaded data")

SLOPES = [0.8257, 0.7227, 0.8909, 0.6884, 0.6569]
INTERCEPTS = [2.7732, 0.9902, 0.2491, 1.2848, 2.0533]


def _lsat() -> np.ndarray:
    return pd.read_csv(data_path("irt", "lsat6.csv")).to_numpy().astype(int)


def _simulated() -> np.ndarray:
    rng = np.random.default_rng(5)
    logits = np.linspace(0.7, 1.6, 6) * rng.normal(size=(600, 1)) + np.linspace(-1.5, 2.0, 6)
    return (rng.random(logits.shape) < expit(logits)).astype(int)


def _verbal_aggression() -> np.ndarray:
    table = pd.read_csv(data_path("irt", "verbagg_long.csv.gz"))
    table["code"] = table["resp"].map({"no": 0, "perhaps": 1, "yes": 2})
    return table.pivot(index="id", columns="item", values="code").to_numpy()


def _extraversion(num_people: int) -> np.ndarray:
    table = pd.read_csv(data_path("ipip-big5", "big5_first15000.csv.gz"), sep=None, engine="python")
    found = table[[f"E{number}" for number in range(1, 11)]].to_numpy()[:num_people] - 1
    found[:, 1::2] = 4 - found[:, 1::2]
    return found


@needs_data
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("answers", "family", "log_likelihood"),
    [
        (_lsat, "rasch", -2466.9376),
        (_lsat, "2pl", -2466.6534),
        (_verbal_aggression, "graded", -6285.8175),
        (_verbal_aggression, "generalised-partial-credit", -6298.4964),
        (partial(_extraversion, 4000), "graded", -53855.228),
        (partial(_extraversion, 4000), "generalised-partial-credit", -54340.575),
        (partial(_extraversion, 15_000), "graded", -202282.024),
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


def _maximum_on_61_points(y: np.ndarray) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """Marginal log likelihood of two-parameter items, their slopes and intercepts at its maximum, and standard errors
    from differences of its gradient."""
    points, number = np.linspace(-6.0, 6.0, 61), y.shape[1]
    log_weights = -0.5 * points**2 - logsumexp(-0.5 * points**2)
    patterns, counts = np.unique(y, axis=0, return_counts=True)

    def negative(parameters):
        slopes, intercepts = parameters[:number, None], parameters[number:, None]
        logits = slopes * points + intercepts
        joint = patterns @ log_expit(logits) + (1 - patterns) @ log_expit(-logits) + log_weights
        each = logsumexp(joint, axis=1)
        weights = np.exp(joint - each[:, None]) * counts[:, None]
        residuals = patterns.T @ weights - weights.sum(0) * expit(logits)
        return -counts @ each, -np.append(residuals @ points, residuals.sum(1))

    start = np.repeat([1.0, 0.0], number)
    found = minimize(negative, start, jac=True, method="BFGS", options={"gtol": 1e-8})
    step = 1e-5
    hessian = [(negative(found.x + e)[1] - negative(found.x - e)[1]) / (2 * step) for e in step * np.eye(2 * number)]
    return -found.fun, found.x[:number], found.x[number:], np.sqrt(np.diag(np.linalg.inv(hessian)))


@pytest.mark.parametrize("answers", [_simulated, pytest.param(_lsat, marks=[needs_data, pytest.mark.thorough])])
def test_items_and_their_errors_are_those_of_a_sum_over_61_points(answers):
    y = answers()
    log_likelihood, slopes, intercepts, errors = _maximum_on_61_points(y)
    engine = AdaptiveQuadrature(partial(item_response, family="2pl"), progress_bar=False)
    engine.run(random.key(0), y)
    assert abs(float(engine.log_evidence) - log_likelihood) < 1e-5
    for name, expected, error in zip(
        ("discrimination", "intercept"), (slopes, intercepts), np.split(errors, 2), strict=True
    ):
        np.testing.assert_allclose(engine.hyper[name].value, expected, atol=1e-4)
        np.testing.assert_allclose(engine.hyper[name].standard_error, error, rtol=1e-3)
