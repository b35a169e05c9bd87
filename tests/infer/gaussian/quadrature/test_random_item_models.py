"""Quadrature on random item-response models, against plain sums over long grids in NumPy."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.infer import AdaptiveQuadrature, Quadrature
from numpyro_ext.infer.gaussian.algorithms.nodes.shared_columns import SharedColumns
from numpyro_ext.infer.hyper.space import UnconstrainedSpace
from numpyro_ext.models import item_response
from tests.infer.gaussian.quadrature.random_item_models import RandomModel, random_model
from tests.tiers import thorough

_NODES = {1: 121, 2: 61, 3: 61}
"""Nodes an axis at which sums over one to three traits are exact to 1e-8 and better."""
_STEP = 1e-3
_CHOSEN = [1, 10, 11]
"""Nominal and Rasch items with gaps and priors; 3PL items of two traits with gaps; graded and rating-scale items."""


@pytest.mark.parametrize("seed", [*thorough(*_CHOSEN), *(pytest.param(k, marks=pytest.mark.slow) for k in range(200))])
def test_a_random_model_is_that_of_sums_over_a_long_grid(seed):
    model = random_model(seed)
    engine = AdaptiveQuadrature(item_response)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # few answers of few people
        reading = engine._read(jax.random.key(0), (model.response,), model.options)
    default, space = engine.algorithm(reading), UnconstrainedSpace(reading.hyper, {})
    exact = dataclasses.replace(default, num_nodes=_NODES[model.num_traits])
    is_shared = isinstance(default, SharedColumns)
    noise = np.random.default_rng(seed).normal(size=space.size)
    values = space.initial() + 0.4 * jnp.asarray(noise)

    def form_fn(x):
        return reading.form(space.unpack(x))

    @jax.jit
    def found(x):
        form = form_fn(x)
        state, info = default.solve(form, default.init(form), num_steps=1, tol=1e-8)
        evidence, gradient = jax.value_and_grad(lambda y: exact.log_evidence(form_fn(y), state))(x)
        posterior = exact.posterior(form, state)
        trait = reading.values(space.unpack(x), posterior.mean, reading.data)["trait"]
        out = {"evidence": evidence, "gradient": gradient, "mean": trait, "is_found": info.converged}
        coarse, fine = default.with_finer_rule(form, state)
        out |= {"default": default.log_evidence(form, state), "error": jnp.sum(jnp.abs(fine - coarse))}
        if is_shared:
            hessian = jax.hessian(lambda y: exact.log_evidence(form_fn(y), state))(x)
            louis = sum(exact.second_derivatives(form_fn, x, state, is_rough=False))
            out |= {"hessian": hessian, "louis": louis}
            out["cells"] = Quadrature(_NODES[1]).fit(form, num_steps=1, tol=1e-8)[2]
        return out

    found = found(values)
    sums = _sums_at(model, space, values)
    expected = sums.log_evidence.sum()
    assert found["is_found"]
    assert abs(found["evidence"] - expected) < 1e-8
    np.testing.assert_allclose(np.reshape(found["mean"], sums.mean.shape), sums.mean, atol=1e-8)
    # the rule that is the default is off by no more than it says
    assert abs(found["default"] - expected) < 1.5 * found["error"] + 1e-8
    np.testing.assert_allclose(found["gradient"], _differences(model, space, values), atol=1e-6)
    if is_shared:
        assert abs(found["cells"] - found["evidence"]) < 1e-11 * max(1.0, abs(expected))
        np.testing.assert_allclose(found["louis"], found["hessian"], atol=1e-9 * (1 + np.abs(found["hessian"]).max()))


def _sums_at(model: RandomModel, space: UnconstrainedSpace, values):
    return model.sums({name: np.asarray(value) for name, value in space.unpack(values).items()})


def _differences(model: RandomModel, space: UnconstrainedSpace, values):
    """Gradient of the log evidence by differences of fourth order."""
    steps = np.concatenate([k * _STEP * np.eye(space.size) for k in (1, -1, 2, -2)])
    unpacked = jax.jit(jax.vmap(space.unpack))(values + steps)
    evidence = [
        model.sums({name: np.asarray(value[k]) for name, value in unpacked.items()}).log_evidence.sum()
        for k in range(len(steps))
    ]
    up, down, far_up, far_down = np.reshape(evidence, (4, -1))
    return (8.0 * (up - down) - (far_up - far_down)) / (12.0 * _STEP)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", _CHOSEN)
def test_quantiles_and_draws_of_a_random_model_are_those_of_the_density(seed):
    model, probabilities, number = random_model(seed), np.array([0.01, 0.1, 0.5, 0.9, 0.99]), 4000
    engine = AdaptiveQuadrature(item_response, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # few answers of few people
        space = UnconstrainedSpace(engine._read(jax.random.key(0), (model.response,), model.options).hyper, {})
        noise = np.random.default_rng(seed).normal(size=space.size)
        engine.hyper_values = space.unpack(space.initial() + 0.4 * jnp.asarray(noise))
        engine.run(jax.random.key(0), model.response, **model.options)
    sums, trait = model.sums(engine.hyper_values), engine.posterior["trait"]
    variance = np.diagonal(sums.covariance, axis1=1, axis2=2)
    draws = np.asarray(trait.sample(jax.random.key(1), number)).reshape(number, *variance.shape)
    np.testing.assert_allclose(np.reshape(trait.variance, variance.shape), variance, atol=1e-7)
    assert np.all(np.abs(draws.mean(0) - sums.mean) < 4.5 * np.sqrt(variance / number) + 1e-3)
    spread = np.mean((draws - sums.mean) ** 2, 0)
    np.testing.assert_allclose(spread, variance, rtol=4.5 * np.sqrt(5.0 / number))  # kurtosis up to 6
    if sums.marginal is not None:
        below = np.cumsum(sums.marginal, 1) - 0.5 * sums.marginal
        for person, asked in enumerate(np.moveaxis(np.asarray(trait.quantile(probabilities)), 0, -1)):
            found = np.interp(asked - sums.location[person, 0], sums.axis, below[person])
            np.testing.assert_allclose(found, probabilities, atol=1e-3)
