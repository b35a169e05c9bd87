"""Programs of factors of two predictors: short ones where quick rules serve all factors, others on demand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import logsumexp

from numpyro_ext.infer import EP
from numpyro_ext.infer.gaussian.fitting import fitting_programs
from tests.compilations import compiled_programs

IS_DOUBLE = jax.config.jax_enable_x64
LINE = np.linspace(-8.0, 8.0, 1601)


def _spike(a, b, y, xp=jnp):
    """A peak with heavy tails in the cavity, which no nodes around a peak follow."""
    return -1.5 * xp.log1p(((a - y) ** 2 + (b - 0.5) ** 2) / 0.2)


def _counts(a, b, y, xp=jnp):
    """Counts that may be zero for another reason."""
    log_gate, log_open = -xp.logaddexp(0.0, -b), -xp.logaddexp(0.0, b)
    log_poisson = log_open + y * a - xp.exp(a)
    return xp.where(y == 0, xp.logaddexp(log_gate, log_poisson), log_poisson)


def _pairs(y, log_factor):
    """Pairs of unknowns, each with a factor of its own, for which EP is exact."""
    scale = numpyro.sample("scale", dist.LogNormal(-0.7, 0.3))
    a, b = (numpyro.sample(name, dist.Normal(0, 1).expand([len(y)]).to_event(1)) for name in "ab")
    numpyro.factor("y", jnp.sum(log_factor(scale * a, scale * b, y)))


def spikes(y):
    _pairs(y, _spike)


def counts(y):
    _pairs(y, _counts)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "log_factor", "y", "num_programs"),
    [(counts, _counts, [0.0, 1.0, 3.0], 1), (spikes, _spike, [1.2, -0.9, 0.6], 2)],
)
def test_nested_integrals_are_compiled_where_a_factor_asks_for_them(monkeypatch, model, log_factor, y, num_programs):
    monkeypatch.setattr(fitting_programs, "is_small", lambda *_: False)  # as for more factors than are quick to test
    y = np.asarray(y)
    engine = EP(model, integrate="none", progress_bar=False)
    with compiled_programs() as names:
        engine.run(jax.random.key(0), y)
    assert sum("_solution" in name for name in names) == num_programs, names
    assert engine.diagnostics.converged
    scale = float(engine.hyper["scale"].value)
    first, second = np.meshgrid(LINE, LINE, indexing="ij")
    log_prior = -0.5 * (first**2 + second**2)
    log_evidence = 0.0
    for k, datum in enumerate(y):
        log_weight = log_prior + log_factor(scale * first, scale * second, datum, np)
        log_total = logsumexp(log_weight)
        log_evidence += log_total - logsumexp(log_prior)
        weight = np.exp(log_weight - log_total)
        for name, values in (("a", first), ("b", second)):
            mean = np.sum(weight * values)
            sd = np.sqrt(np.sum(weight * (values - mean) ** 2))
            found = engine.posterior[name]
            assert abs(found.mean[k] - mean) < (1e-5 if IS_DOUBLE else 1e-2) * sd
            assert abs(found.sd[k] / sd - 1.0) < (1e-5 if IS_DOUBLE else 1e-2)
    np.testing.assert_allclose(float(engine.log_evidence), log_evidence, rtol=0, atol=1e-5 if IS_DOUBLE else 1e-2)
