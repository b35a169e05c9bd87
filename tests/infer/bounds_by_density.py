"""The bounds that structured mean field and bilinear engines maximise, computed anew from NumPyro's own density.

Of a run the point alone is taken: hyperparameters, and for bilinear models means and variances. Densities are those of
the sites of the traced model; Gaussian expectations are Gauss-Hermite sums or dense algebra.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to, constraints

_ROUNDS = 400


class _Bound:
    """Hyperparameters in unconstrained coordinates; ``sites`` are those of the traced model at some values."""

    def __init__(self, engine, model, y):
        self.model, self.y = model, y
        with handlers.seed(rng_seed=0), handlers.trace() as trace:
            model(y)
        self.transforms = {
            name: biject_to(
                trace[name]["kwargs"].get("constraint", constraints.real)
                if trace[name]["type"] == "param"
                else trace[name]["fn"].support
            )
            for name in engine.hyper
        }
        free = {name: t.inv(jnp.asarray(engine.hyper[name].value, float)) for name, t in self.transforms.items()}
        self.point, self._unravel = ravel_pytree(free)
        self.size = self.point.size

    def sites(self, point, values):
        hyper = {name: self.transforms[name](x) for name, x in self._unravel(point[: self.size]).items()}
        substituted = handlers.substitute(self.model, data={**hyper, **values})
        with handlers.seed(rng_seed=0), handlers.trace() as trace:
            substituted(self.y)
        return trace

    def log_prior(self, point):
        sites = [self.sites(point, {})[name] for name in self.transforms]
        return sum((jnp.sum(s["fn"].log_prob(s["value"])) for s in sites if s["type"] == "sample"), start=jnp.zeros(()))


class SparseBound(_Bound):
    """For one site ``s`` with independent elements seen in ``y`` with Gaussian noise: the highest bound at given
    hyperparameters, by rounds in dense algebra. The log density of ``s`` as a function of its square is convex, and its
    tangent at ``x`` makes the Gaussian whose integral is the bound."""

    def __call__(self, point):
        def log_prior(x):
            return jnp.sum(self.sites(point, {"s": jnp.sqrt(x)})["s"]["fn"].log_prob(jnp.sqrt(x)))

        def mean(s):
            return self.sites(point, {"s": s})["y"]["fn"].mean

        zero = self.sites(point, {})["s"]["value"] * 0.0
        matrix, offset = jax.jacobian(mean)(zero), mean(zero)
        variance = jnp.broadcast_to(self.sites(point, {})["y"]["fn"].variance, offset.shape)
        gram, residual = matrix.T @ (matrix / variance[:, None]), self.y - offset

        def moments(x):
            weight = -2.0 * jax.grad(log_prior)(x)
            precision = gram + jnp.diag(weight)
            m = jnp.linalg.solve(precision, matrix.T @ (residual / variance))
            return weight, precision, m

        def advance(_, x):
            _, precision, m = moments(x)
            return jnp.diagonal(jnp.linalg.inv(precision)) + m**2

        x = jax.lax.fori_loop(0, _ROUNDS, advance, jnp.full_like(zero, 0.5))
        weight, precision, m = moments(x)
        rest = residual - matrix @ m
        log_likelihood = -0.5 * jnp.sum(rest**2 / variance + jnp.log(2.0 * jnp.pi * variance))
        integral = 0.5 * zero.size * jnp.log(2.0 * jnp.pi) - 0.5 * jnp.linalg.slogdet(precision)[1]
        bound = log_likelihood - 0.5 * jnp.sum(weight * m**2) + integral + 0.5 * jnp.sum(weight * x) + log_prior(x)
        return bound + self.log_prior(point)


class BilinearBound(_Bound):
    """For two sites ``w`` and ``z`` of single numbers, independent Gaussians in the posterior, and counts ``y`` of
    which each sees one of either: a function of hyperparameters, means and log standard deviations."""

    def __init__(self, engine, model, y, num_nodes=24):
        super().__init__(engine, model, y)
        nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
        self._nodes, self._weights = jnp.asarray(nodes), jnp.asarray(weights / weights.sum())
        parts = {n: (engine.posterior[n].mean, jnp.log(engine.posterior[n].sd)) for n in ("w", "z")}
        posterior, self._unravel_posterior = ravel_pytree(parts)
        self.point = jnp.concatenate([self.point, posterior])

    def __call__(self, point):
        posterior = self._unravel_posterior(point[self.size :])

        def at(i, j):
            values = {n: m + jnp.exp(s) * i_ for (n, (m, s)), i_ in zip(posterior.items(), (i, j), strict=True)}
            sites = self.sites(point, values)
            return sum(jnp.sum(sites[name]["fn"].log_prob(sites[name]["value"])) for name in ("w", "z", "y"))

        log_joint = jax.vmap(lambda i: jax.vmap(lambda j: at(i, j))(self._nodes))(self._nodes)
        entropy = sum(jnp.sum(s + 0.5 * jnp.log(2.0 * jnp.pi * jnp.e)) for _, s in posterior.values())
        return self._weights @ log_joint @ self._weights + entropy + self.log_prior(point)
