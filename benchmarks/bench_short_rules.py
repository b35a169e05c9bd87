"""Tilted moments under narrow cavities by the short rules of their families, beside general quadrature of the same."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.potentials import (
    BinomialLogitPotential,
    LogitPotential,
    NegativeBinomialExpPotential,
    PoissonExpPotential,
    Potential,
    StudentTPotential,
    tilted_moments,
)
from numpyro_ext.potentials.families.positive import WeibullExpPotential
from numpyro_ext.potentials.families.zero_inflated import ZeroInflatedPotential

from .harness import at_most, compile_function

NUM_ROWS = 10_000
RANDOM = np.random.default_rng(0)
COUNTS, REAL = jnp.asarray(RANDOM.poisson(5, NUM_ROWS), float), jnp.asarray(RANDOM.standard_t(4, NUM_ROWS))
MEAN = jnp.asarray(RANDOM.normal(size=NUM_ROWS))
FEW = jnp.minimum(COUNTS, 2.0) - 1.0
FAMILIES: dict[str, Potential] = {
    "logit": LogitPotential(COUNTS > 4),
    "Poisson": PoissonExpPotential(COUNTS),
    "negative binomial": NegativeBinomialExpPotential(COUNTS, jnp.asarray(8.0)),
    "binomial": BinomialLogitPotential(COUNTS, COUNTS + 8.0),
    "Student-t": StudentTPotential(REAL, jnp.asarray(1.0), jnp.asarray(4.0)),
    "Weibull": WeibullExpPotential(COUNTS + 1.0, jnp.asarray(1.5)),
    "zero-inflated Poisson": ZeroInflatedPotential(
        PoissonExpPotential(jnp.maximum(FEW, 0.0)), FEW <= 0.0, jnp.log(0.2), jnp.log(0.8)
    ),
}


@pytest.mark.parametrize("variance", [0.05, 0.5])
@pytest.mark.parametrize("name", FAMILIES)
def test_short_rule(race, results, name, variance):
    factors, cavity = FAMILIES[name], (MEAN, jnp.full(NUM_ROWS, variance))
    short = compile_function(lambda f, m, v: f.tilted_moments(m, v), factors, *cavity)
    general = compile_function(tilted_moments, factors, *cavity)
    seconds, peer_seconds = race(short.run, general.run, rounds=10)
    ours, exact = short.run(), general.run()
    assert float(jnp.max(jnp.abs(ours.mean - exact.mean))) < 1e-9
    results.record(
        f"tilted moments of 10,000 {name} factors, cavity variance {variance}",
        peer="general quadrature",
        times=(seconds, peer_seconds),
        target=at_most(0.3),
        remark=f"{1e6 * seconds / NUM_ROWS:.2f} microseconds a row",
    )
