"""Priors written as observations of zero: the missing power of their scale is found, and said."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import LaplaceApproximation
from numpyro_ext.infer.gaussian.algorithms.pseudo_observations import explain_powers
from numpyro_ext.infer.hyper.space import UnconstrainedSpace
from numpyro_ext.linalg import total_variation
from numpyro_ext.models import poisson_deblurring
from numpyro_ext.structure import read_latent_gaussian
from tests.tiers import few

DATA = jnp.array([0.3, 1.1, -0.4, 0.8, 2.0, 1.7])
GRID = total_variation((2, 3))
CYCLE = jnp.eye(6) - jnp.roll(jnp.eye(6), 1, axis=0)


def smooth(differences, family=dist.Laplace, power=0.0, zeros=0.0, noise=False):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    u = numpyro.sample("u", dist.ImproperUniform(dist.constraints.real_vector, (), (6,)))
    numpyro.factor("normaliser", power * jnp.log(scale))
    numpyro.sample("steps", family(differences @ u, scale), obs=jnp.full(differences.shape[0], zeros))
    numpyro.sample("y", dist.Normal(u, scale if noise else 1.0), obs=DATA)


def messages(*args, model=smooth, hyper_values=None, largest=1 << 20, **kwargs):
    reading = read_latent_gaussian(model, args, kwargs, rng_key=jax.random.key(0))
    return explain_powers(reading, UnconstrainedSpace(reading.hyper, hyper_values), largest)


@pytest.mark.thorough
def test_power_is_that_of_the_evidence():
    """With Normal differences the evidence has a closed form, whose slope at small scales is that of the message."""
    matrix = np.asarray(GRID.materialise())

    def log_evidence(scale):
        precision = np.eye(6) + matrix.T @ matrix / scale**2
        mean = np.linalg.solve(precision, DATA)
        constant = len(matrix) * np.log(scale) + 0.5 * np.linalg.slogdet(precision)[1]
        return 0.5 * mean @ precision @ mean - constant

    slope = (log_evidence(1e-4) - log_evidence(1e-3)) / np.log(0.1)
    np.testing.assert_allclose(slope, -2.0, atol=1e-4)
    for family in (dist.Normal, dist.Laplace):
        (message,) = messages(GRID, family)
        assert "The 7 equal observations of 'steps' can all be met and have the rank 5" in message
        assert "its power -2," in message and "numpyro.factor('normaliser', 2 * jnp.log(scale))" in message
        assert "GaussianMarkovRandomField(graph_precision(pairs, num_nodes).precision.scale_by(1 / scale**2)" in message


@pytest.mark.thorough
@pytest.mark.parametrize("largest", few([0, 1 << 20], 1))
def test_what_is_as_it_should_be_is_left_alone(largest):
    found = partial(messages, largest=largest)
    # Where the rank is not computed it is the number of columns at most, so that the power found is one less.
    missing = 2.0 if largest else 1.0
    assert found(GRID) and found(GRID, power=0.25 * missing)
    assert not found(GRID, power=missing)
    # As many steps as directions; steps that cannot all be met; a scale of other data as well; a scale that is given.
    assert not found(total_variation((6,)))
    assert bool(found(CYCLE)) == bool(largest) and not found(CYCLE, zeros=1.0)
    assert not found(GRID, noise=True)
    assert not found(GRID, hyper_values={"scale": 1.0})
    assert not found(np.array([[1, 0, 4], [2, 1, 5]]), model=poisson_deblurring)


@pytest.mark.thorough
def test_engines_say_so():
    engine = LaplaceApproximation(smooth, progress_bar=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.run(jax.random.key(0), GRID, dist.Normal)
    assert "have the rank 5" in str(caught[0].message)
    assert any("have the rank 5" in message for message in engine.diagnostics.messages)
