"""Random models whose hyperparameters enter means, scales, kernels and products, with the numbers that people type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

N, J = 12, 4
GROUP = np.arange(N) % J
X = np.linspace(-1.5, 1.5, N)
_DISTANCE = np.square(X[:, None] - X)


def random_learning_model(seed: int) -> tuple[Callable[..., None], Callable[[int], Any]]:
    """A model of an array ``y``, whose structure and literals are drawn from ``seed``, and draws of the array."""
    rng = np.random.default_rng(seed)
    chosen = [str(name) for name in rng.choice(list(FIELDS), size=int(rng.integers(1, 3)), replace=False)]
    extra = str(rng.choice(list(MEANS)))
    kind = str(rng.choice(list(OBSERVED)))
    literals = Literals(rng)

    def model(y: Any) -> None:
        literals.rewind()
        parts = [FIELDS[name](name, literals) for name in chosen]
        eta = sum(parts[1:], start=parts[0]) + MEANS[extra](literals)
        OBSERVED[kind][0](eta, y, literals)

    def draw(data_seed: int) -> Any:
        rng = np.random.default_rng((seed, data_seed))
        size = rng.choice([0.1, 1.0, 2.0])
        return OBSERVED[kind][1](rng, size * (rng.normal(size=J)[GROUP] + np.sin(2.0 * X + rng.normal())))

    model.description = f"{seed}: {', '.join(chosen)}, {extra}, {kind}, priors {literals.priors}"  # type: ignore[attr-defined]
    return model, draw


class Literals:
    """Numbers in the forms in which they are written; every run of a model gets the same ones."""

    _FORMS = (int, float, np.float32, np.float64, np.int64, jnp.asarray)

    def __init__(self, rng: Any) -> None:
        self._forms = [self._FORMS[i] for i in rng.integers(0, len(self._FORMS), size=40)]
        self._scales = [int(i) for i in rng.integers(0, len(SCALES), size=10)]
        self.priors = [str(name) for name in rng.choice(list(PRIORS), size=2, p=[0.5, *[0.1] * 5])]
        self.rewind()

    def rewind(self) -> None:
        self._number = self._scale = self._prior = 0

    def __call__(self, value: int) -> Any:
        self._number += 1
        return self._forms[self._number](value)

    def prior(self, location: Any, scale: Any) -> Any:
        """A prior of coefficients: Gaussian, or a factor on them."""
        self._prior += 1
        return PRIORS[self.priors[self._prior - 1]](location, scale, self)

    def scale(self, name: str) -> Any:
        """A positive hyperparameter."""
        self._scale += 1
        return numpyro.sample(name, SCALES[self._scales[self._scale]](self))


SCALES: list[Callable[[Literals], Any]] = [
    lambda c: dist.HalfNormal(c(1)),
    lambda c: dist.HalfNormal(c(1)),
    lambda c: dist.LogNormal(c(0), c(1)),
    lambda c: dist.Gamma(c(2), c(2)),
    lambda c: dist.Exponential(c(1)),
    lambda c: dist.HalfCauchy(c(1)),
    lambda c: dist.InverseGamma(c(3), c(2)),
    lambda c: dist.Uniform(c(0), c(5)),
]


PRIORS: dict[str, Callable[[Any, Any, Literals], Any]] = {
    "normal": lambda location, scale, c: dist.Normal(location, scale),
    "laplace": lambda location, scale, c: dist.Laplace(location, scale),
    "student": lambda location, scale, c: dist.StudentT(c(4), location, scale),
    "cauchy": lambda location, scale, c: dist.Cauchy(location, scale),
    "logistic": lambda location, scale, c: dist.Logistic(location, scale),
    "asymmetric": lambda location, scale, c: dist.AsymmetricLaplace(location, scale, c(2)),
}


def _groups(name: str, c: Literals) -> Any:
    location = numpyro.sample("location", dist.Normal(c(0), c(2)))
    return numpyro.sample(name, c.prior(location, c.scale(f"{name}_scale")).expand([J]))[GROUP]


def _scaled(name: str, c: Literals) -> Any:
    z = numpyro.sample(name, dist.Normal(c(0), c(1)).expand([J]))
    return (c.scale(f"{name}_scale") * z)[GROUP]


def _signed(name: str, c: Literals) -> Any:
    """A factor of either sign: zero, where its prior is highest, is a saddle."""
    factor = numpyro.sample(f"{name}_factor", dist.Normal(c(0), c(1)))
    return factor * numpyro.sample(name, dist.Normal(c(0), c(1)).expand([N]))


def _two_factors(name: str, c: Literals) -> Any:
    pair = numpyro.sample(f"{name}_factors", dist.Normal(c(0), c(1)).expand([2]).to_event(1))
    return pair[0] * pair[1] * numpyro.sample(name, dist.Normal(c(0), c(1)).expand([J]))[GROUP]


def _process(name: str, c: Literals) -> Any:
    length = numpyro.sample(f"{name}_length", dist.LogNormal(c(0), c(1)))
    kernel = c.scale(f"{name}_scale") ** 2 * jnp.exp(-0.5 * _DISTANCE / length**2) + 1e-4 * jnp.eye(N)
    return numpyro.sample(name, dist.MultivariateNormal(c(0), kernel))


def _walk(name: str, c: Literals) -> Any:
    return numpyro.sample(name, dist.GaussianRandomWalk(c.scale(f"{name}_scale"), N))


def _slope(name: str, c: Literals) -> Any:
    return numpyro.sample(name, c.prior(c(0), c(2))) * X


FIELDS: dict[str, Callable[[str, Literals], Any]] = {
    "groups": _groups,
    "scaled": _scaled,
    "signed": _signed,
    "factors": _two_factors,
    "process": _process,
    "walk": _walk,
    "slope": _slope,
}


def _none(c: Literals) -> Any:
    return c(0)


def _square(c: Literals) -> Any:
    return numpyro.sample("root", dist.Normal(c(0), c(1))) ** 2


def _bend(c: Literals) -> Any:
    return jnp.tanh(numpyro.sample("bend", dist.Normal(c(0), c(2))) * X)


def _wave(c: Literals) -> Any:
    return numpyro.sample("amplitude", dist.Normal(c(1), c(1))) * jnp.sin(X * c.scale("frequency"))


def _offset(c: Literals) -> Any:
    return numpyro.param("offset", 0.0)


MEANS: dict[str, Callable[[Literals], Any]] = {
    "none": _none,
    "square": _square,
    "bend": _bend,
    "wave": _wave,
    "offset": _offset,
}


def _normal(eta: Any, y: Any, c: Literals) -> None:
    numpyro.sample("y", dist.Normal(eta, c.scale("noise")), obs=y)


def _known_noise(eta: Any, y: Any, c: Literals) -> None:
    numpyro.sample("y", dist.Normal(eta, c(1)), obs=y)


def _student(eta: Any, y: Any, c: Literals) -> None:
    numpyro.sample("y", dist.StudentT(c(4), eta, c.scale("noise")), obs=y)


def _poisson(eta: Any, y: Any, c: Literals) -> None:
    numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)


def _negative_binomial(eta: Any, y: Any, c: Literals) -> None:
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(eta), c.scale("concentration")), obs=y)


def _binary(eta: Any, y: Any, c: Literals) -> None:
    numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def _reals(rng: Any, truth: Any) -> Any:
    return truth + 0.5 * rng.normal(size=N)


def _counts(rng: Any, truth: Any) -> Any:
    return rng.poisson(np.exp(np.clip(truth, -3.0, 3.0)))


# Gaussian noise twice: there the evidence is exact in closed form, whatever the engine.
OBSERVED: dict[str, tuple[Callable[[Any, Any, Literals], None], Callable[[Any, Any], Any]]] = {
    "normal": (_normal, _reals),
    "known noise": (_known_noise, _reals),
    "student": (_student, _reals),
    "poisson": (_poisson, _counts),
    "negative binomial": (_negative_binomial, _counts),
    "binary": (_binary, lambda rng, truth: (truth + rng.logistic(size=N) > 0).astype(int)),
}


def random_sparse_model(seed: int) -> tuple[Callable[..., None], Callable[[int], Any]]:
    """As :func:`random_learning_model`, of coefficients ``s`` with a sparse prior in Gaussian noise."""
    rng = np.random.default_rng((1, seed))
    prior, scale = str(rng.choice(list(SPARSE))), str(rng.choice(list(SPREADS)))
    has_matrix, learns_noise = rng.random(2) < 0.5
    matrix = rng.normal(size=(2 * N, J)) if has_matrix else np.eye(N)
    literals = Literals(rng)

    def model(y: Any) -> None:
        literals.rewind()
        deviation = SPREADS[scale](literals)
        noise = literals.scale("noise") if learns_noise and has_matrix else 0.3
        s = numpyro.sample("s", SPARSE[prior](deviation, literals).expand([matrix.shape[1]]))
        numpyro.sample("y", dist.Normal(matrix @ s, noise), obs=y)

    def draw(data_seed: int) -> Any:
        rng = np.random.default_rng((seed, data_seed))
        s = rng.choice([0.02, 0.5, 2.0]) * rng.laplace(size=matrix.shape[1])
        return matrix @ s + 0.3 * rng.normal(size=matrix.shape[0])

    model.description = f"{seed}: {prior}, {scale}, matrix {has_matrix}, noise {learns_noise}"  # type: ignore[attr-defined]
    return model, draw


SPARSE: dict[str, Callable[[Any, Literals], Any]] = {
    "laplace": lambda scale, c: dist.Laplace(c(0), scale),
    "student": lambda scale, c: dist.StudentT(c(3), c(0), scale),
    "normal": lambda scale, c: dist.Normal(c(0), scale),
}


def _log_product(c: Literals) -> Any:
    """Both start at zero, which is a saddle."""
    return jnp.exp(numpyro.param("first", 0.0) * numpyro.param("second", 0.0))


def _log_square(c: Literals) -> Any:
    return jnp.exp(numpyro.sample("root", dist.Normal(c(0), c(1))) ** 2 - c(1))


SPREADS: dict[str, Callable[[Literals], Any]] = {
    "plain": lambda c: c.scale("scale"),
    "product": _log_product,
    "square": _log_square,
    "two": lambda c: c.scale("scale") * c.scale("other"),
}


def random_bilinear_model(seed: int) -> tuple[Callable[..., None], Callable[[int], Any]]:
    """As :func:`random_learning_model`, of counts whose log rates are products of single numbers ``w`` and ``z``."""
    rng = np.random.default_rng((2, seed))
    row_scale, level = str(rng.choice(list(SPREADS))), str(rng.choice(list(LEVELS)))
    rows, columns = np.divmod(np.arange(N * J), J)
    literals = Literals(rng)

    def model(y: Any) -> None:
        literals.rewind()
        base, factor = LEVELS[level](literals)
        w = numpyro.sample("w", dist.Normal(literals(0), SPREADS[row_scale](literals)).expand([N]))
        z = numpyro.sample("z", dist.Normal(literals(0), 0.8).expand([J]))
        numpyro.sample("y", dist.Poisson(jnp.exp(base + factor * w[rows] * z[columns])), obs=y)

    def draw(data_seed: int) -> Any:
        rng = np.random.default_rng((seed, data_seed))
        # Counts without products would leave scales to crawl to zero, and runs without an end to judge.
        w, z = rng.normal(size=N), rng.choice([-1.0, 1.0], size=J) * rng.uniform(0.5, 1.5, size=J)
        return rng.poisson(np.exp(np.clip(1.0 + rng.choice([0.6, 1.0, 1.4]) * w[rows] * z[columns], -3.0, 4.0)))

    model.description = f"{seed}: {row_scale}, {level}"  # type: ignore[attr-defined]
    return model, draw


LEVELS: dict[str, Callable[[Literals], Any]] = {
    "given": lambda c: (c(1), c(1)),
    "level": lambda c: (numpyro.sample("level", dist.Normal(c(0), c(2))), c(1)),
    "factor": lambda c: (c(1), numpyro.sample("factor", dist.Normal(c(0), c(1)))),
    "param": lambda c: (numpyro.param("level", 0.0), c(1)),
}
