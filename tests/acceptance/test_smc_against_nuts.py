"""SMC beside long runs of NUTS, whose draws are the truth here, and on several devices."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC, NUTS

from numpyro_ext.infer import SMC, annealed_importance_sampling

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
GAIN = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
ERROR = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
GROUP = np.repeat(np.arange(12), 6)
COUNTS = np.random.default_rng(0).poisson(np.exp(0.5 + 0.7 * np.random.default_rng(1).normal(size=12))[GROUP])


def eight_schools(error, gain):
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    spread = numpyro.sample("spread", dist.HalfNormal(5))
    with numpyro.plate("schools", 8):
        z = numpyro.sample("z", dist.Normal(0, 1))
        effect = numpyro.deterministic("effect", mean + spread * z)
        numpyro.sample("gain", dist.Normal(effect, error), obs=gain)


def random_intercepts(group, counts):
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("groups", 12):
        z = numpyro.sample("z", dist.Normal(0, 1))
    numpyro.sample("counts", dist.Poisson(jnp.exp(intercept + scale * z[group])), obs=counts)


def cox_process(counts):
    """A Gaussian process with given hyperparameters, by elliptical slices; white, as NUTS needs it."""
    x = jnp.arange(40.0)
    covariance = jnp.exp(-0.5 * ((x[:, None] - x) / 6.0) ** 2) + 1e-6 * jnp.eye(40)
    white = numpyro.sample("white", dist.Normal(0, 1).expand([40]).to_event(1))
    f = numpyro.deterministic("f", jnp.linalg.cholesky(covariance) @ white)
    numpyro.sample("counts", dist.Poisson(jnp.exp(f)), obs=counts)


SERIES = np.random.default_rng(2).poisson(np.exp(np.sin(np.arange(40) / 6.0)))


@pytest.mark.parametrize(
    ("model", "args"),
    [(eight_schools, (ERROR, GAIN)), (random_intercepts, (GROUP, COUNTS)), (cox_process, (SERIES,))],
    ids=["schools", "intercepts", "cox"],
)
def test_moments_are_those_of_nuts(model, args):
    mcmc = MCMC(NUTS(model), num_warmup=2000, num_samples=40_000, progress_bar=False)
    mcmc.run(random.key(0), *args)
    smc = SMC(model, num_particles=20_000, progress_bar=False)
    smc.run(random.key(1), *args)
    assert smc.diagnostics.converged
    truth, draws = mcmc.get_samples(), smc.get_samples()
    for name, values in draws.items():
        deviation = truth[name].std(0)
        assert np.all(np.abs(values.mean(0) - truth[name].mean(0)) < 0.05 * deviation), name
        np.testing.assert_allclose(values.std(0), deviation, rtol=0.05, err_msg=name)
    if model is cox_process:
        other = annealed_importance_sampling(cox_process, random.key(2), *args, num_chains=2000)
        error = np.hypot(smc.log_evidence.standard_error, other.standard_error)
        assert abs(smc.log_evidence - other.log_evidence) < 3.0 * error < 0.3


ON_DEVICES = """
import jax, numpy as np, numpyro, numpyro.distributions as dist
numpyro.enable_x64()
from numpyro_ext.infer import SMC
def model(y):
    level = numpyro.sample("level", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(level, 1 + scale), obs=y)
y = np.random.default_rng(0).normal(1, 1, 40)
for devices in (None, jax.devices()):
    smc = SMC(model, num_particles=2000, devices=devices, progress_bar=False)
    smc.run(jax.random.key(0), y)
    shards = [shard.data.shape[0] for shard in smc.last_state.particles.vectors.addressable_shards]
    print(float(smc.log_evidence), smc.log_evidence.standard_error, *shards)
"""


def test_particles_on_four_devices():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PYTHONPATH": str(ROOT)}
    environment |= {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", ON_DEVICES], capture_output=True, check=False, env=environment, text=True
    )
    assert result.returncode == 0, result.stderr
    one, four = ([float(x) for x in line.split()] for line in result.stdout.splitlines())
    assert four[2:] == [500.0] * 4
    assert one[2:] == [2000.0]
    assert abs(one[0] - four[0]) < 3.0 * np.hypot(one[1], four[1])
