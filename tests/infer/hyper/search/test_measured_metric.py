"""Searches that measure their curvature on the way: the same maximum in fewer evaluations."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import LaplaceApproximation
from numpyro_ext.infer.hyper.curvature import hessian
from tests.readings import with_fit_costs

KEY = jax.random.key(0)
RNG = np.random.default_rng(3)
FIRST, SECOND = np.arange(600) % 40, RNG.integers(0, 5, 600)
Y = 0.3 * RNG.normal(size=40)[FIRST] + 0.1 * RNG.normal(size=5)[SECOND] + 4.0 * RNG.normal(size=600)


def crossed(y):
    """Scales of very different curvature, that of the noise far from where a search begins."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(5.0))
    first = numpyro.sample("first", dist.Normal(0.0, scale[0]).expand([40]))
    second = numpyro.sample("second", dist.Normal(0.0, scale[1]).expand([5]))
    numpyro.sample("y", dist.Normal(first[FIRST] + second[SECOND], noise), obs=y)


@pytest.mark.thorough
def test_a_search_that_measures_its_curvature_ends_at_the_same_maximum_in_fewer_evaluations():
    plain = LaplaceApproximation(crossed, progress_bar=False)
    measuring = with_fit_costs(LaplaceApproximation, least_measured_rows=0)(crossed, progress_bar=False)
    for engine in (plain, measuring):
        engine.run(KEY, Y)
        assert engine.diagnostics.hyper.converged
    evaluations = [engine.diagnostics.hyper.num_evaluations for engine in (plain, measuring)]
    assert evaluations[1] < evaluations[0]
    ends = [engine.last_state.search for engine in (plain, measuring)]
    np.testing.assert_allclose(ends[1].values, ends[0].values, atol=1e-4)
    np.testing.assert_allclose(ends[1].best.objective, ends[0].best.objective, atol=1e-8)

    reading = measuring._read(KEY, (Y,), {})
    _, _, compiled = measuring._compile(reading)
    expected = hessian(ends[1], tol=1e-4)
    found = compiled.differences(reading.data, {}, ends[1])
    units = 1.0 / np.sqrt(np.abs(np.diagonal(expected)))
    np.testing.assert_allclose(units[:, None] * found * units, units[:, None] * expected * units, atol=0.1)
