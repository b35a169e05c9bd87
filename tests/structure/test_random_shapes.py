"""Shapes, masks and scales from everywhere: what is read is the density of the function that nothing has touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density

from numpyro_ext.compilation.quick_jit import quick_jit
from numpyro_ext.structure import ModelStructureError, Reason, read_latent_gaussian
from tests.tiers import thorough

from .grammar_of_shapes import random_model

KEY = jax.random.key(0)
Y = np.array([0.3, -1.2, 0.8, 1.9, 0.4, -0.6])
SEEN = np.array([True, True, False, True, False, True])


def _densities(model: Any, reading: Any, hyper: dict[str, Any], e: Any) -> tuple[float, float]:
    """Log densities by the form and by the function, compiled as one."""

    def both(hyper: dict[str, Any], e: Any) -> tuple[Any, Any]:
        values = {n: v for n, v in reading.values(hyper, e, reading.data).items() if n in reading.field}
        values |= hyper | {n: reading.sites[n].init for n in reading.predictive}
        total, trace = log_density(handlers.seed(model, KEY), (), {}, values)
        # sites that nothing depends on integrate to one, and are no part of a form
        own = [jnp.sum(trace[n]["fn"].log_prob(trace[n]["value"])) for n in reading.predictive]
        return reading.log_joint(hyper, e, reading.data), total - sum(own, start=0.0)

    found, wanted = quick_jit(both, is_small=True)(hyper, e)
    return float(found), float(wanted)


def _normal(x: Any, spread: Any) -> None:
    with handlers.mask(mask=SEEN):
        numpyro.sample("y", dist.Normal(x, spread), sample_shape=(6,), obs=Y)


def _method(x: Any, spread: Any) -> None:
    numpyro.sample("y", dist.StudentT(4, x, spread).mask(SEEN[:3]), sample_shape=(2,), obs=Y.reshape(2, 3))


def _parameters(x: Any, spread: Any) -> None:
    with handlers.scale(scale=jnp.linspace(0.5, 2.0, 6)):
        numpyro.sample("y", dist.Normal(x * jnp.arange(6), spread), sample_shape=(6,), obs=Y)


def _vector(x: Any, spread: Any) -> None:
    fn = dist.MultivariateNormal(x * jnp.ones(2), jnp.eye(2) + spread)
    with handlers.mask(mask=SEEN[:3]):
        numpyro.sample("y", fn, sample_shape=(3,), obs=Y.reshape(3, 2))


def _counts(x: Any, spread: Any) -> None:
    with handlers.mask(mask=SEEN):
        numpyro.sample("y", dist.BetaBinomial(jnp.exp(x), 1.0 + spread, 5), sample_shape=(6,), obs=np.arange(6) // 2)


@pytest.mark.float32
@pytest.mark.parametrize("observe", [_normal, _method, *thorough(_parameters, _vector, _counts)])
def test_sample_shape_is_that_of_the_values(observe: Any) -> None:
    # A mask, a scale or a parameter may have it already.
    def model() -> None:
        observe(numpyro.sample("x", dist.Normal(0, 1)), numpyro.sample("spread", dist.HalfNormal(1)))

    reading = read_latent_gaussian(model, check=False)
    hyper = {"spread": jnp.asarray(0.8)}
    found, wanted = _densities(model, reading, hyper, jnp.array([0.4]))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def _look_at(seed: int, *, check: bool) -> str:
    """Read a model and compare; what came of it in a word."""
    model = random_model(seed)
    told = f"{seed}: {model.description}"  # type: ignore[attr-defined]
    try:
        jax.eval_shape(lambda: log_density(handlers.seed(model, KEY), (), {}, {})[0])
    except (AssertionError, TypeError, ValueError):
        return "refused by NumPyro"
    try:
        reading = read_latent_gaussian(model, check=check)
    except ModelStructureError as error:
        assert error.reason is not Reason.MISREAD, (told, str(error))
        return f"refused: {str(error)[:60]}"
    rng = np.random.default_rng(seed)
    hyper, e = {"spread": jnp.asarray(0.8)}, jnp.asarray(0.5 * rng.standard_normal(reading.num_columns))
    assert set(reading.hyper) <= {"spread", "x", "z"}, told
    hyper = reading.initial_hyper() | {n: v for n, v in hyper.items() if n in reading.hyper}
    found, wanted = _densities(model, reading, hyper, e)
    if not np.isfinite(wanted):
        return "no density"
    rtol = 1e-9 if jnp.result_type(float) == np.float64 else 2e-5
    # betaln of NumPyro's counts jumps by a millionth
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=max(rtol, 1e-4 * ("beta" in told)), err_msg=told)
    return "read"


def _search(seeds: Iterable[int], is_double: bool, check: bool = False) -> Counter[str]:
    with jax.enable_x64(is_double):
        return Counter(_look_at(seed, check=check) for seed in seeds)


def _check_counts(found: Counter[str], number: int) -> None:
    assert sum(found.values()) == number
    # Of five models NumPyro itself refuses three; of the others most are read.
    looked_at = number - found["refused by NumPyro"] - found["no density"]
    assert found["read"] >= 0.7 * looked_at, found


def test_a_few_random_shapes() -> None:
    assert _search([0, 2], True) == {"read": 2}


@pytest.mark.slow
@pytest.mark.parametrize("is_double", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("part", range(5))
def test_five_hundred_random_shapes(part: int, is_double: bool) -> None:
    _check_counts(_search(range(350 * part, 350 * part + 350), is_double), 350)
