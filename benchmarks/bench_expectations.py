"""Bounds of the logistic log-partition, and expectations by panels, against the exact expectation."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from numpyro_ext.potentials import LogitPotential, ProbitPotential, StudentTPotential, logistic_bound

from .harness import compile_function

NUM_SITES = 10**5


def predictors(dtype: type) -> tuple[Array, Array]:
    """Means and variances such that about half of the Gaussians are wider than the bend of the function."""
    rng = np.random.default_rng(0)
    mean, variance = 3.0 * rng.normal(size=NUM_SITES), np.exp(2.0 * rng.normal(size=NUM_SITES))
    return jnp.asarray(mean, dtype), jnp.asarray(variance, dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    "name, num_pieces",
    [
        ("jaakkola", 3),
        ("bohning", 3),
        ("piecewise-linear", 20),
        ("piecewise-quadratic", 5),
        ("piecewise-quadratic", 20),
        (("jaakkola", "piecewise-quadratic"), 20),
    ],
)
def test_bounds(race, results, name, num_pieces, dtype):
    bound, exact = logistic_bound(name, num_pieces), logistic_bound("exact")
    arrays = predictors(dtype)
    ours, peer = (compile_function(one.__call__, *arrays) for one in (bound, exact))
    seconds, peer_seconds = race(ours.run, peer.run, rounds=7)
    excess = np.asarray(ours.run()[0]) - np.asarray(peer.run()[0])
    pieces = f", {num_pieces} pieces" if "piecewise" in str(name) else ""
    results.record(
        f"{bound.name}{pieces}, 10⁵ values and slopes",
        dtype=np.dtype(dtype).name,
        peer="exact expectation",
        times=(seconds, peer_seconds),
        figure="evaluations per second",
        value=NUM_SITES / seconds,
        programs=(ours, peer),
        remark=f"{peer_seconds / seconds:.3g} times those of the peer; mean excess {excess.mean():.1e}.",
    )


@pytest.mark.parametrize("family", ["probit", "student_t"])
@pytest.mark.parametrize("is_wide", [False, True], ids=["narrow", "wide"])
def test_panels(race, results, family, is_wide):
    number = 10**3
    mean, variance = (x[:number] for x in predictors(np.float64))
    variance = 1e3 * variance if is_wide else 1e-2 * variance
    label = jnp.ones(number)
    potential = ProbitPotential(label) if family == "probit" else StudentTPotential(label, 1.0, 4.0)

    def expectation(one: ProbitPotential | StudentTPotential | LogitPotential) -> Callable[..., tuple[Array, ...]]:
        return jax.tree_util.Partial(lambda p, m, v: tuple(p.expected_log_density(m, v)), one)

    ours, peer = (compile_function(expectation(one), mean, variance) for one in (potential, LogitPotential(label)))
    seconds, peer_seconds = race(ours.run, peer.run, rounds=5)
    results.record(
        f"expectation by panels, {family}, 10³ {'wide' if is_wide else 'narrow'} Gaussians",
        peer="exact logistic expectation",
        times=(seconds, peer_seconds),
        figure="evaluations per second",
        value=number / seconds,
        programs=(ours, peer),
        remark=f"{peer_seconds / seconds:.3g} times those of the peer.",
    )
