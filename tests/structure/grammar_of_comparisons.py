"""Random models of many people who compare items: plates of fields with one covariance, and pairs of their elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.stats import norm

NUM_USERS, NUM_ITEMS, RANK = 7, 6, 2


def random_comparison_model(seed: int) -> Callable[[], None]:
    """A model without arguments, whose structure and data are drawn from ``seed``.

    Users without a comparison, items that are never compared, repeats and contradictions are among them.
    """
    rng = np.random.default_rng(seed)
    user = np.repeat(np.arange(NUM_USERS), rng.choice([0, 1, 1, 2, 3, 6, 15], NUM_USERS))
    if user.size == 0 or rng.random() < 0.5:
        user = np.append(user, np.repeat(2, 12))
    rng.shuffle(user)
    first = rng.integers(NUM_ITEMS - 1, size=user.size)
    second = (first + rng.integers(1, NUM_ITEMS - 1, size=user.size)) % (NUM_ITEMS - 1)
    x = rng.normal(size=(NUM_ITEMS, 2))
    kernel = np.exp(-np.sum((x[:, None] - x) ** 2, -1)) + 0.1 * np.eye(NUM_ITEMS)
    loadings, mean = rng.normal(size=(NUM_ITEMS, RANK)), rng.normal(size=NUM_ITEMS)
    weights = rng.normal(size=(user.size, 2))
    field, seen, likelihood = (str(rng.choice(list(kinds))) for kinds in (FIELDS, SEEN, LIKELIHOODS))
    won, mask = rng.integers(0, 2, user.size), rng.random(user.size) < 0.9

    def model() -> None:
        f = numpyro.deterministic("utility", FIELDS[field](kernel, loadings, mean))
        eta = SEEN[seen](f, user, first, second, weights)
        numpyro.sample("won", LIKELIHOODS[likelihood](eta).mask(mask), obs=won)

    model.description = f"{field} {seen} {likelihood}"  # type: ignore[attr-defined]
    return model


def _scale() -> Any:
    return numpyro.sample("scale", dist.HalfNormal(1.0))


def _apart(kernel: Any, loadings: Any, mean: Any) -> Any:
    scale = _scale()
    with numpyro.plate("users", NUM_USERS):
        taste = numpyro.sample("taste", dist.Normal(0.0, 1.0).expand([RANK]).to_event(1))
        own = numpyro.sample("own", dist.MultivariateNormal(jnp.zeros(NUM_ITEMS), kernel))
    return mean + taste @ loadings.T + scale * own


def _collapsed(kernel: Any, loadings: Any, mean: Any) -> Any:
    scale = _scale()
    with numpyro.plate("users", NUM_USERS):
        return numpyro.sample("f", dist.MultivariateNormal(mean, loadings @ loadings.T + scale**2 * kernel))


def _around_tastes(kernel: Any, loadings: Any, mean: Any) -> Any:
    scale = _scale()
    with numpyro.plate("users", NUM_USERS):
        taste = numpyro.sample("taste", dist.Normal(0.0, scale).expand([RANK]).to_event(1))
        return numpyro.sample("f", dist.MultivariateNormal(mean + taste @ loadings.T, kernel))


def _by_precision(kernel: Any, loadings: Any, mean: Any) -> Any:
    scale = _scale()
    with numpyro.plate("users", NUM_USERS):
        return numpyro.sample("f", dist.MultivariateNormal(mean, precision_matrix=jnp.linalg.inv(kernel) / scale))


def _by_factor(kernel: Any, loadings: Any, mean: Any) -> Any:
    scale = _scale()
    with numpyro.plate("users", NUM_USERS):
        z = numpyro.sample("z", dist.MultivariateNormal(0.0, scale_tril=jnp.linalg.cholesky(kernel)))
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    return level[:, None] + scale * z


def _of_two_kinds(kernel: Any, loadings: Any, mean: Any) -> Any:
    kinds = _scale() * jnp.stack([kernel, 0.5 * kernel + 1.0])
    with numpyro.plate("kinds", 2, dim=-1), numpyro.plate("users", NUM_USERS, dim=-2):
        f = numpyro.sample("f", dist.MultivariateNormal(mean, kinds))
    return f[:, 0] - 0.5 * f[:, 1]


FIELDS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "apart": _apart,
    "collapsed": _collapsed,
    "around tastes": _around_tastes,
    "precision": _by_precision,
    "factor": _by_factor,
    "two kinds": _of_two_kinds,
}
SEEN: dict[str, Callable[..., Any]] = {
    "pairs": lambda f, user, first, second, weights: f[user, first] - f[user, second],
    "same pairs": lambda f, user, first, second, weights: f[user, first // 2] - f[user, 3],
    "weighted": lambda f, user, first, second, weights: (
        weights[:, 0] * f[user, first] + weights[:, 1] * f[user, second]
    ),
    "one": lambda f, user, first, second, weights: f[user, first] + weights[:, 0],
    "mean": lambda f, user, first, second, weights: f[user, first] - f.mean(1)[user],
}
LIKELIHOODS: dict[str, Callable[[Any], Any]] = {
    "probit": lambda eta: dist.Bernoulli(probs=norm.cdf(eta)),
    "logit": lambda eta: dist.Bernoulli(logits=-eta),
    "poisson": lambda eta: dist.Poisson(jnp.exp(eta)),
    "normal": lambda eta: dist.Normal(eta, 0.5),
}
