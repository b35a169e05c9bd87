"""Random multilevel models: many groups, and beside them what all or many of their observations share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

NUM_GROUPS, NUM_FEW, P = 30, 4, 3


def random_multilevel_model(seed: int) -> Callable[[], None]:
    """A model without arguments, whose structure and data are drawn from ``seed``."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, NUM_GROUPS) if rng.random() < 0.5 else np.full(NUM_GROUPS, 3)
    group = np.repeat(np.arange(NUM_GROUPS), sizes)
    if rng.random() < 0.5:
        rng.shuffle(group)
    few, x = rng.integers(0, NUM_FEW, group.size), rng.normal(size=(group.size, P))
    x[rng.random(x.shape) < 0.2] = 0.0
    data = group, few, x
    of_groups = [str(rng.choice(list(GROUPS)))]
    shared = [str(kind) for kind in rng.choice(list(SHARED), rng.integers(1, 4), replace=False)]
    y = rng.poisson(1.5, group.size)
    mask = rng.random(group.size) < 0.9

    def model() -> None:
        eta = sum((SHARED[kind](kind, *data) for kind in shared), jnp.zeros(group.size))
        eta = eta + sum(GROUPS[kind](kind, *data) for kind in of_groups)
        numpyro.deterministic("predictor", eta)
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)).mask(mask), obs=y)

    model.description = f"{of_groups} {shared}"  # type: ignore[attr-defined]
    return model


def _intercepts(name: str, group: Any, few: Any, x: Any) -> Any:
    scale = numpyro.sample(f"{name}_scale", dist.HalfNormal(1.0))
    with numpyro.plate(f"{name}_plate", NUM_GROUPS):
        return numpyro.sample(name, dist.Normal(0.3, scale))[group]


def _around_a_mean(name: str, group: Any, few: Any, x: Any) -> Any:
    mean = numpyro.sample(f"{name}_mean", dist.Normal(0.0, 2.0))
    with numpyro.plate(f"{name}_plate", NUM_GROUPS):
        return numpyro.sample(name, dist.Normal(mean, 0.5))[group]


def _slopes(name: str, group: Any, few: Any, x: Any) -> Any:
    covariance = jnp.array([[1.0, 0.3], [0.3, 0.5]])
    with numpyro.plate(f"{name}_plate", NUM_GROUPS):
        slopes = numpyro.sample(name, dist.MultivariateNormal(jnp.zeros(2), covariance))
    return jnp.einsum("nk,nk->n", slopes[group], x[:, :2])


def _slopes_lkj(name: str, group: Any, few: Any, x: Any) -> Any:
    tril = numpyro.sample(f"{name}_corr", dist.LKJCholesky(2, 2.0))
    z = numpyro.sample(name, dist.Normal(jnp.zeros((NUM_GROUPS, 2)), 1.0))
    return jnp.sum((z @ tril.T)[group] * x[:, :2], axis=-1)


def _by_precision(name: str, group: Any, few: Any, x: Any) -> Any:
    precision = jnp.array([[1.0, 0.3], [0.3, 0.5]])
    with numpyro.plate(f"{name}_plate", NUM_GROUPS):
        value = numpyro.sample(name, dist.MultivariateNormal(jnp.zeros(2), precision_matrix=precision))
    return value[group, few % 2]


def _nested(name: str, group: Any, few: Any, x: Any) -> Any:
    outer = numpyro.sample(f"{name}_outer", dist.Normal(0.0, 1.0).expand([NUM_GROUPS // 3]))
    with numpyro.plate(f"{name}_plate", NUM_GROUPS):
        inner = numpyro.sample(name, dist.Normal(outer[np.arange(NUM_GROUPS) // 3], 0.7))
    return inner[group]


GROUPS: dict[str, Callable[..., Any]] = {
    "intercepts": _intercepts,
    "around a mean": _around_a_mean,
    "slopes": _slopes,
    "lkj": _slopes_lkj,
    "precision": _by_precision,
    "nested": _nested,
}


def _scalar(name: str, group: Any, few: Any, x: Any) -> Any:
    return numpyro.sample(name, dist.Normal(0.5, 1.3))


def _flat(name: str, group: Any, few: Any, x: Any) -> Any:
    return numpyro.sample(name, dist.ImproperUniform(dist.constraints.real, (), ()))


def _coefficients(name: str, group: Any, few: Any, x: Any) -> Any:
    return x @ numpyro.sample(name, dist.Normal(0.0, 1.0).expand([P]).to_event(1))


def _correlated(name: str, group: Any, few: Any, x: Any) -> Any:
    covariance = 0.5 * jnp.eye(P) + 0.2
    return x @ numpyro.sample(name, dist.MultivariateNormal(jnp.zeros(P), covariance))


def _crossed(name: str, group: Any, few: Any, x: Any) -> Any:
    scale = numpyro.sample(f"{name}_scale", dist.LogNormal(0.0, 0.3))
    return scale * numpyro.sample(name, dist.Normal(0.0, 1.0).expand([NUM_FEW]))[few]


def _summing_to_zero(name: str, group: Any, few: Any, x: Any) -> Any:
    return numpyro.sample(name, dist.ZeroSumNormal(0.8, event_shape=(NUM_FEW,)))[few]


def _sparse_process(name: str, group: Any, few: Any, x: Any) -> Any:
    """A value for each observation, of rank two but for its diagonal."""
    scale = numpyro.sample(f"{name}_scale", dist.LogNormal(0.0, 0.3))
    factor, diagonal = scale * jnp.asarray(x[:, :2]), 0.1 + jnp.asarray(x[:, 2] ** 2)
    return numpyro.sample(name, dist.LowRankMultivariateNormal(jnp.full(group.size, 0.2), factor, diagonal))


SHARED: dict[str, Callable[..., Any]] = {
    "scalar": _scalar,
    "flat": _flat,
    "coefficients": _coefficients,
    "correlated": _correlated,
    "crossed": _crossed,
    "zero sum": _summing_to_zero,
    "sparse process": _sparse_process,
}
