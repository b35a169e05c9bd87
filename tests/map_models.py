"""Counts on maps, as users write them."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from numpyro_ext.distributions import GaussianMarkovRandomField


def bym2(graph, expected, x, y=None):
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    rho = numpyro.sample("rho", dist.Beta(0.5, 0.5))
    field = GaussianMarkovRandomField(graph.scaled, null_space=graph.null_space, sum_to_zero=True)
    spatial = numpyro.sample("spatial", field)
    with numpyro.plate("areas", graph.num_nodes):
        noise = numpyro.sample("noise", dist.Normal(0, 1))
        r = jnp.where(graph.is_island, 0.0, rho)
        f = numpyro.deterministic("f", sigma * (jnp.sqrt(r) * spatial + jnp.sqrt(1 - r) * noise))
        numpyro.sample("y", dist.Poisson(expected * jnp.exp(a + b * x + f)), obs=y)
