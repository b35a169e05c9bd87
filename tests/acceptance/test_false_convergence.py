"""A run that says ``converged=True`` is at a local maximum: random models, judged from NumPyro's density alone.

The evidence is computed anew from :func:`numpyro.infer.util.log_density`, by a dense Hessian at the mode of the field:
exact where noise and priors are Gaussian, and elsewhere what Laplace's method says that it maximises. For EP and
variational Gaussians on other factors the values (not the derivatives) are the engine's own. Derivatives are
differences.
The bounds of structured mean field and bilinear engines are computed anew from the densities of the model's sites; of
the latter all of the posterior is judged as well, by derivatives of that.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.infer import EP, BilinearVG, LaplaceApproximation, StructuredMeanField, VariationalGaussian
from numpyro_ext.structure import ModelStructureError

from ..infer.bounds_by_density import BilinearBound, SparseBound
from ..infer.evidence_by_density import Density, false_convergence, fault_at, promised_by_newton
from ..structure.grammar_of_learning import random_bilinear_model, random_learning_model, random_sparse_model

ENGINES = {"EP": EP, "Laplace": LaplaceApproximation, "VG": VariationalGaussian}


def _judge(seed, data_seed, engines, densities):
    """Each engine on one model: how its run ended, and what is wrong with that."""
    model, draw = random_learning_model(seed)
    y = draw(data_seed)
    for name in engines:
        engine = ENGINES[name](model, integrate=("auto", "none")[seed % 2], progress_bar=False)
        where = f"{model.description}, data {data_seed}, {name}"
        try:
            with warnings.catch_warnings():
                # points, edges and runs that say that they have not converged are part of the grammar
                warnings.simplefilter("ignore", UserWarning)
                engine.run(jax.random.key(seed), y)
        except ModelStructureError as error:
            yield "refused", f"{where}: {error}"
            continue
        # The end of the search is judged where the density around it could not be followed, too.
        if not engine._run.fit.diagnostics.converged or not engine.hyper:
            yield "not converged", f"{where}: {engine.diagnostics.messages}"
            continue
        key = seed, tuple(sorted(engine.hyper))
        densities.setdefault(key, None)
        densities[key] = densities[key] or Density(engine, model, y)
        fault = false_convergence(engine, name, densities[key], y)
        values = {site: np.asarray(value).round(4).tolist() for site, value in engine._run.fit.hyper.items()}
        yield "false" if fault else "converged", f"{where}: {fault} at {values}"


def _search(cases, engines_of):
    densities = {}
    _check(outcome for seed, data_seed in cases for outcome in _judge(seed, data_seed, engines_of(seed), densities))


def _check(outcomes):
    outcomes = list(outcomes)
    found = [text for kind, text in outcomes if kind == "false"]
    assert not found, "\n".join(found)
    converged = sum(kind == "converged" for kind, _ in outcomes)
    assert converged > 0.7 * len(outcomes), "\n".join(text for kind, text in outcomes if kind != "converged")


@pytest.mark.thorough
def test_two_random_models():
    # two data sets to a structure: the second costs next to nothing
    _search([(0, 0), (0, 1)], lambda seed: [list(ENGINES)[seed % 3]])


@pytest.mark.thorough
def test_six_random_models():
    _search([(seed, data) for seed in range(1, 4) for data in range(2)], lambda seed: [list(ENGINES)[seed % 3]])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_three_hundred_random_models(part):
    seeds = range(100 + 6 * part, 106 + 6 * part)
    _search([(seed, data) for seed in seeds for data in range(5)], lambda seed: ENGINES)


def _bound_of(engine, kind, model, y):
    """Objective and point of a finished run, and its own value there, with the log prior of the hyperparameters."""
    bound = kind(engine, model, y)
    prior = float(bound.log_prior(bound.point))
    return bound, float(engine.log_evidence) + prior


def _fault_of_sparse(engine, model, y):
    bound, own = _bound_of(engine, SparseBound, model, y)
    values = jax.jit(lambda points: jax.lax.map(bound, points))
    return fault_at(lambda points: np.asarray(values(jnp.asarray(points))), np.asarray(bound.point), own)


def _fault_of_bilinear(engine, model, y):
    bound, own = _bound_of(engine, BilinearBound, model, y)
    value, gradient, hessian = jax.jit(lambda x: (bound(x), jax.grad(bound)(x), jax.hessian(bound)(x)))(bound.point)
    if not np.isclose(value, own, rtol=1e-6, atol=1e-5):
        return f"the bound is {value:.6f}, reported as {own:.6f}"
    curvatures, directions = np.linalg.eigh(hessian)
    promised = promised_by_newton(gradient, curvatures, directions)
    if promised > 1e-3:
        return f"a step of Newton promises {promised:.3g}; the derivatives are {gradient[: bound.size]}"
    if curvatures[-1] > 1e-3 * np.abs(curvatures[0]):
        return f"it curves upwards by {curvatures[-1]:.2g} along {directions[: bound.size, -1]}"
    return None


BOUNDS = {
    StructuredMeanField: (random_sparse_model, _fault_of_sparse, {"tol": 1e-7, "num_steps": 3000}),
    BilinearVG: (
        random_bilinear_model,
        _fault_of_bilinear,
        {"tol": 1e-9, "num_steps": 5000, "num_restarts": 0, "field": ["w", "z"]},
    ),
}


def _judge_by_bound(kind, cases):
    random_model, fault_of, options = BOUNDS[kind]
    for seed, data_seed in cases:
        model, draw = random_model(seed)
        y = draw(data_seed)
        engine = kind(model, progress_bar=False, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            engine.run(jax.random.key(seed), y)
        converged = engine.diagnostics.converged
        fault = fault_of(engine, model, y) if converged else engine.diagnostics.messages
        values = {site: np.asarray(estimate.value).round(4).tolist() for site, estimate in engine.hyper.items()}
        outcome = ("false" if fault else "converged") if converged else "not converged"
        yield outcome, f"{model.description}, data {data_seed}: {fault} at {values}"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", list(BOUNDS))
def test_two_random_models_of_engines_that_learn_within_their_iterations(kind):
    _check(_judge_by_bound(kind, [(0, 0), (0, 2)]))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("kind", list(BOUNDS))
def test_twelve_random_models_of_engines_that_learn_within_their_iterations(kind, part):
    # The data tell their scales, so that few runs may end on a plateau: three of twelve.
    seeds = range(4 * part, 4 * part + 4)
    _check(_judge_by_bound(kind, [(seed, data) for seed in seeds for data in range(3)]))
