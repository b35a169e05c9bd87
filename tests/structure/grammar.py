"""Random models from a small grammar: field sites, links between them, predictors, likelihoods, modifiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import ndtr
from numpyro import handlers

from numpyro_ext.distributions import RectifiedLinearPoisson, SoftplusPoisson

N, J, P = 6, 3, 2
GROUP = np.array([0, 1, 2, 0, 1, 1])


def random_model(seed: int) -> Callable[[], None]:
    """A model without arguments, whose structure and data are drawn from ``seed``."""
    rng = np.random.default_rng(seed)
    num_terms = int(rng.integers(1, 4))
    terms = [str(rng.choice(list(TERMS))) for _ in range(num_terms)]
    likelihood = str(rng.choice(list(LIKELIHOODS)))
    second = str(rng.choice(list(LIKELIHOODS))) if rng.random() < 0.25 else None
    joint = str(rng.choice(["sum", "sum", "sum", "sum", "product", "chain"]))
    modifier = str(rng.choice(["none", "none", "mask", "scale", "plate", "event"]))
    mask, x = rng.random(N) < 0.7, rng.normal(size=(N, P))
    mask[0] = True
    noise = rng.normal(size=4)
    data = {name: np.asarray(draw(rng)) for name, (_, draw) in LIKELIHOODS.items()}

    def model() -> None:
        parts = [TERMS[kind](f"{kind}_{i}", x, noise) for i, kind in enumerate(terms)]
        eta = sum(parts[1:], start=parts[0])
        if joint == "product" and len(parts) > 1:
            eta = parts[0] * parts[1]
        if joint == "chain":
            eta = numpyro.sample("chain", dist.Normal(0.7 * eta, 0.5).to_event(1))
        numpyro.deterministic("predictor", eta)
        _observe("y", likelihood, eta, data[likelihood], modifier, mask)
        if second is not None:
            _observe("y2", second, 0.5 * eta - 0.1, data[second], "none", mask)

    model.description = f"{terms} {joint} {likelihood} {second} {modifier}"  # type: ignore[attr-defined]
    return model


def _observe(name: str, likelihood: str, eta: Any, data: Any, modifier: str, mask: Any) -> None:
    fn = LIKELIHOODS[likelihood][0](eta)
    if fn is None:
        numpyro.factor(name, -jnp.sum(jnp.cosh(0.3 * eta) - 0.2 * eta))
    elif modifier == "mask":
        with handlers.mask(mask=mask):
            numpyro.sample(name, fn, obs=data)
    elif modifier == "scale":
        with handlers.scale(scale=2.5):
            numpyro.sample(name, fn, obs=data)
    elif modifier == "plate":
        with numpyro.plate(f"{name}_plate", N):
            numpyro.sample(name, fn, obs=data)
    elif modifier == "event":
        numpyro.sample(name, fn.to_event(len(fn.batch_shape)), obs=data)
    else:
        numpyro.sample(name, fn, obs=data)


def _scalar(name: str, x: Any, noise: Any) -> Any:
    return numpyro.sample(name, dist.Normal(noise[0], 1.3)) * jnp.ones(N)


def _coefficients(name: str, x: Any, noise: Any) -> Any:
    return x @ numpyro.sample(name, dist.Normal(0.0, 1.0).expand([P]).to_event(1))


def _flat(name: str, x: Any, noise: Any) -> Any:
    return x @ numpyro.sample(name, dist.ImproperUniform(dist.constraints.real_vector, (), (P,)))


def _groups_centred(name: str, x: Any, noise: Any) -> Any:
    loc = numpyro.sample(f"{name}_loc", dist.Normal(0.0, 1.0))
    scale = numpyro.sample(f"{name}_scale", dist.HalfNormal(1.0))
    with numpyro.plate(f"{name}_plate", J):
        effect = numpyro.sample(name, dist.Normal(loc, scale))
    return effect[GROUP]


def _groups_noncentred(name: str, x: Any, noise: Any) -> Any:
    scale = numpyro.sample(f"{name}_scale", dist.LogNormal(0.0, 0.3))
    z = numpyro.sample(name, dist.Normal(0.0, 1.0).expand([J]).to_event(1))
    return (scale * z)[GROUP]


def _slopes_lkj(name: str, x: Any, noise: Any) -> Any:
    tril = numpyro.sample(f"{name}_corr", dist.LKJCholesky(P, 2.0))
    scale = numpyro.sample(f"{name}_scale", dist.HalfNormal(jnp.ones(P)))
    z = numpyro.sample(name, dist.Normal(jnp.zeros((J, P)), 1.0))
    return jnp.sum((scale[:, None] * tril @ z.T).T[GROUP] * x, axis=-1)


def _batched_normals(name: str, x: Any, noise: Any) -> Any:
    cov = jnp.array([[1.0, 0.3], [0.3, 0.5]])
    with numpyro.plate(f"{name}_plate", J):
        b = numpyro.sample(name, dist.MultivariateNormal(noise[:P], cov))
    return jnp.einsum("np,np->n", b[GROUP], x)


def _kernel() -> Any:
    t = jnp.arange(N)
    return jnp.exp(-0.5 * (t[:, None] - t) ** 2 / 2.0) + 1e-4 * jnp.eye(N)


def _gp_covariance(name: str, x: Any, noise: Any) -> Any:
    amplitude = numpyro.sample(f"{name}_amplitude", dist.HalfNormal(1.0))
    return numpyro.sample(name, dist.MultivariateNormal(noise[1], amplitude**2 * _kernel()))


def _gp_precision(name: str, x: Any, noise: Any) -> Any:
    return numpyro.sample(name, dist.MultivariateNormal(jnp.zeros(N), precision_matrix=jnp.linalg.inv(_kernel())))


def _gp_tril(name: str, x: Any, noise: Any) -> Any:
    return numpyro.sample(name, dist.MultivariateNormal(0.2, scale_tril=jnp.linalg.cholesky(_kernel())))


def _low_rank(name: str, x: Any, noise: Any) -> Any:
    return numpyro.sample(name, dist.LowRankMultivariateNormal(jnp.zeros(N), jnp.asarray(x), 0.5 * jnp.ones(N)))


def _walk(name: str, x: Any, noise: Any) -> Any:
    scale = numpyro.sample(f"{name}_scale", dist.HalfNormal(1.0))
    return numpyro.sample(name, dist.GaussianRandomWalk(scale, N))


def _cumulated(name: str, x: Any, noise: Any) -> Any:
    steps = numpyro.sample(name, dist.Normal(0.0, 0.4).expand([N - 1]))
    return jnp.pad(jnp.cumsum(steps), (1, 0))


def _nested(name: str, x: Any, noise: Any) -> Any:
    with numpyro.plate(f"{name}_outer", 2, dim=-1), numpyro.plate(f"{name}_inner", J, dim=-2):
        effect = numpyro.sample(name, dist.Normal(0.0, 0.8))
    return effect[GROUP, np.arange(N) % 2]


def _set_columns(name: str, x: Any, noise: Any) -> Any:
    b = numpyro.sample(name, dist.Normal(0.0, 1.0).expand([J - 1]))
    return jnp.zeros(J).at[1:].set(b)[GROUP]


TERMS: dict[str, Callable[[str, Any, Any], Any]] = {
    "scalar": _scalar,
    "coefficients": _coefficients,
    "flat": _flat,
    "centred": _groups_centred,
    "noncentred": _groups_noncentred,
    "lkj": _slopes_lkj,
    "batched": _batched_normals,
    "covariance": _gp_covariance,
    "precision": _gp_precision,
    "tril": _gp_tril,
    "lowrank": _low_rank,
    "walk": _walk,
    "cumulated": _cumulated,
    "nested": _nested,
    "corner": _set_columns,
}


def _counts(rng: Any) -> Any:
    return rng.poisson(2.0, N)


def _binary(rng: Any) -> Any:
    return rng.binomial(1, 0.5, N)


def _reals(rng: Any) -> Any:
    return rng.normal(size=N)


LIKELIHOODS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "normal": (lambda eta: dist.Normal(eta, numpyro.sample("noise", dist.HalfNormal(1.0))), _reals),
    "multivariate": (lambda eta: dist.MultivariateNormal(eta, _kernel()), _reals),
    "student": (lambda eta: dist.StudentT(4.0, eta, 0.7), _reals),
    "laplace": (lambda eta: dist.Laplace(eta, 0.4), _reals),
    "volatility": (lambda eta: dist.Normal(0.0, jnp.exp(0.5 * eta)), _reals),
    "poisson": (lambda eta: dist.Poisson(1.5 * jnp.exp(eta)), _counts),
    "poisson rectified": (lambda eta: dist.Poisson(2.0 * jnp.maximum(eta + 3.0, 0.0)), _counts),
    "poisson softplus": (lambda eta: dist.Poisson(jax.nn.softplus(eta)), _counts),
    "rectified": (lambda eta: RectifiedLinearPoisson(eta, 2.0, 3.0), _counts),
    "softplus": (lambda eta: SoftplusPoisson(eta, 2.0, 0.5), _counts),
    "logit": (lambda eta: dist.Bernoulli(logits=eta), _binary),
    "logistic": (lambda eta: dist.Bernoulli(probs=jax.nn.sigmoid(-eta)), _binary),
    "probit": (lambda eta: dist.Bernoulli(probs=ndtr(eta)), _binary),
    "binomial": (lambda eta: dist.Binomial(np.array([5, 6, 7, 8, 9, 10]), logits=eta), _counts),
    "negative binomial": (lambda eta: dist.NegativeBinomial2(jnp.exp(eta), 3.0), _counts),
    "zero inflated": (lambda eta: dist.ZeroInflatedPoisson(0.2, jnp.exp(eta)), _counts),
    "ordered": (lambda eta: dist.OrderedLogistic(eta, jnp.array([-1.0, 1.0])), lambda rng: rng.integers(0, 3, N)),
    "gamma": (lambda eta: dist.Gamma(2.0, jnp.exp(-eta)), lambda rng: rng.gamma(2.0, size=N)),
    "factor": (lambda eta: None, _reals),
}
