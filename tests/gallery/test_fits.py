"""Published models are fitted by two engines each, to points that are optima of what these maximise."""

from __future__ import annotations

import warnings

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import numpyro_ext.infer as engines

from ..infer.evidence_by_density import Density, fault_at
from . import GAUSSIAN, MODELS

READ = [name for name, model in MODELS.items() if not model.refusal]
# The others are long runs; these two guard the same promise.
TIERS = dict.fromkeys(("milk_imputation", "rasch"), pytest.mark.thorough)
FACTORS = ("principal_components", "poisson_factors", "matrix_factorisation")
# Fits that say that they did not converge, and why they cannot.
NOT_CONVERGED = {
    # the quantile's loss has a kink, written out so that it is not known as one
    ("quantile_regression", "LaplaceApproximation"),
    # loadings that can be turned or change their sign: flat directions and several modes of their density
    *((name, engine) for name in FACTORS for engine in GAUSSIAN.split()),
    # weights of a network, with two modes, and ten scales and correlations of four columns, hardly known by 12 rows:
    # no design of points follows their density, which the weights of further points tell
    *((name, engine) for name in ("small_network", "seemingly_unrelated_regressions") for engine in GAUSSIAN.split()),
    # half-Cauchy scales of coefficients: large ones leave these to the data, so that the density falls as the square of
    # a scale (cube, where coefficients do not saturate), and there is no standard deviation to be told
    *((name, engine) for name in ("horseshoe", "regularised_horseshoe") for engine in GAUSSIAN.split()),
}
PREFERENCE = [*GAUSSIAN.split(), "BilinearVG", "StructuredMeanField"]


def _run(name, engine_name):
    published = MODELS[name]
    engine = getattr(engines, engine_name)(published.model, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # points and edges, which are in the diagnostics
        engine.run(jax.random.key(0), *published.data())
    return engine


def _fault(engine, published):
    args = published.data()
    density = Density(engine, lambda _: published.model(*args), None)
    point = np.asarray(ravel_pytree(density.free(engine))[0])
    best = float(engine.last_state.search.best.objective)
    return fault_at(lambda points: density.own_values(engine, points), point, best)


@pytest.mark.parametrize("name", [pytest.param(name, marks=TIERS.get(name, pytest.mark.slow)) for name in READ])
def test_a_model_is_fitted_by_two_engines(name):
    published = MODELS[name]
    for engine_name in [name for name in PREFERENCE if name in published.engines][:2]:
        engine = _run(name, engine_name)
        assert np.isfinite(float(engine.log_evidence))
        for site, draws in engine.get_samples().items():
            assert np.isfinite(draws).all(), site
        if (name, engine_name) in NOT_CONVERGED:
            assert not engine.diagnostics.converged and engine.diagnostics.messages
            continue
        assert engine.diagnostics.converged, engine.diagnostics.messages
        # sparse coefficients have another state
        if engine.hyper and engine_name in GAUSSIAN.split() and engine.last_state.search is not None:
            assert _fault(engine, published) is None, engine_name
