"""Logistic terms: the log density of every family that has them, and of no other."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.potentials import (
    BinomialLogitPotential,
    GaussianPotential,
    LogitPotential,
    NegativeBinomialExpPotential,
    ProbitPotential,
)
from numpyro_ext.potentials.elementwise import TemperedPotential
from numpyro_ext.potentials.families.logit_counts import NegativeBinomialLogitPotential

POTENTIALS = [
    LogitPotential(jnp.array([0, 1, 1])),
    LogitPotential(jnp.array([False, True, True])),
    BinomialLogitPotential(jnp.array([0.0, 3.0, 5.0]), jnp.array([5.0, 5.0, 5.0])),
    BinomialLogitPotential(jnp.array([0, 3, 5]), 5),
    NegativeBinomialExpPotential(jnp.array([0.0, 7.0, 2.0]), 2.5, jnp.array([1.0, 0.1, 30.0])),
    NegativeBinomialLogitPotential(jnp.array([0.0, 7.0, 2.0]), jnp.array([2.5, 2.5, 0.3])),
    TemperedPotential(BinomialLogitPotential(jnp.array([0.0, 3.0, 5.0]), 5.0), jnp.array([0.5, 1.0, 3.0])),
    TemperedPotential(LogitPotential(jnp.array([0, 1, 1])), 0.25),
]


@pytest.mark.float32
@pytest.mark.parametrize("potential", POTENTIALS, ids=lambda p: type(p).__name__)
def test_terms_are_the_log_density(potential):
    terms = potential.logistic_terms()
    assert terms.weights.shape == terms.slopes.shape == terms.offsets.shape
    assert terms.weights.ndim == 2 and np.all(terms.weights >= 0.0)
    eta = jnp.array([[-40.0, 0.3, 2.0], [1.0, -7.0, 35.0], [0.0, 0.0, 90.0]])
    tolerance = 200 * jnp.finfo(eta.dtype).eps
    # Relative: in the favourable tail of a label nothing may cancel.
    np.testing.assert_allclose(terms.log_density(eta), potential.log_density(eta), rtol=tolerance)


@pytest.mark.float32
def test_other_families_have_none():
    assert ProbitPotential(jnp.ones(2)).logistic_terms() is None
    assert TemperedPotential(GaussianPotential(jnp.ones(2), 1.0), 0.5).logistic_terms() is None
