"""Whether a fit ended at a maximum: the log evidence computed anew from NumPyro's density, and its differences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.util import log_density

from numpyro_ext.potentials import GaussianPotential

STEP = 0.02
_NEWTON_STEPS = 40


class Density:
    """Log evidence plus log prior as a function of the unconstrained hyperparameters, from NumPyro's density.

    Of an engine that integrates over hyperparameters, the prior is per unit of the unconstrained space, and the point
    to be judged is the mode around which it does. Compiled once for a model and a split into field and hyperparameters.
    """

    def __init__(self, engine, model, y):
        # improper sites cannot be drawn
        sites = engine._run.posterior
        known = {name: jnp.asarray(sites[name].mean) for name in engine._run._moments if name in sites}
        with handlers.seed(rng_seed=0), handlers.trace() as trace:
            handlers.substitute(model, data=known)(y)
        sites = {name: site for name, site in trace.items() if "fn" in site or site["type"] == "param"}
        params = {name for name, site in sites.items() if site["type"] == "param"}
        self.transforms = {
            name: biject_to(
                sites[name]["kwargs"].get("constraint", constraints.real)
                if name in params
                else sites[name]["fn"].support
            )
            for name in engine.hyper
        }
        integrated = set() if engine.integrate == "none" else set(engine.hyper) - params
        # Missing observations, on which nothing depends, are in no fit.
        self.field = [
            name
            for name, site in sites.items()
            if site["type"] == "sample" and not site["is_observed"] and name in engine._run._moments
        ]
        _, self.unravel = ravel_pytree(self.free(engine))
        _, unravel_field = ravel_pytree(self.means(engine))

        def log_joint(x, point, y):
            values = self.hyper(point)
            held = {name: value for name, value in values.items() if name in params}
            density = log_density(handlers.substitute(model, data=held), (y,), {}, {**unravel_field(x), **values})[0]
            return density + log_volume(point)

        def log_volume(point):
            free, values = self.unravel(point), self.hyper(point)
            parts = [self.transforms[name].log_abs_det_jacobian(free[name], values[name]) for name in integrated]
            return sum((jnp.sum(part) for part in parts), start=jnp.zeros(()))

        def laplace(point, mean, y):
            def newton(_, x):
                gradient = jax.grad(log_joint)(x, point, y)
                precision = -jax.hessian(log_joint)(x, point, y)
                values, vectors = jnp.linalg.eigh(precision)
                move = vectors @ ((vectors.T @ gradient) / jnp.maximum(jnp.abs(values), 1e-8))
                sizes = 0.25 ** jnp.arange(6.0)
                heights = jax.vmap(lambda size: log_joint(x + size * move, point, y))(sizes)
                return x + sizes[jnp.argmax(jnp.where(jnp.isfinite(heights), heights, -jnp.inf))] * move

            mode = jax.lax.fori_loop(0, _NEWTON_STEPS, newton, mean)
            _, log_det = jnp.linalg.slogdet(-jax.hessian(log_joint)(mode, point, y))
            return log_joint(mode, point, y) + 0.5 * mode.size * jnp.log(2.0 * jnp.pi) - 0.5 * log_det

        def log_prior(point):
            values = self.hyper(point)
            priors = [sites[name]["fn"].log_prob(value) for name, value in values.items() if name not in params]
            return sum((jnp.sum(prior) for prior in priors), start=log_volume(point))

        self.laplace = jax.jit(lambda points, mean, y: jax.lax.map(lambda point: laplace(point, mean, y), points))

        def rounding(point, mean, y):
            curvatures = jnp.linalg.eigvalsh(-jax.hessian(log_joint)(mean, point, y))
            return jnp.finfo(mean.dtype).eps * jnp.max(jnp.abs(curvatures)) * jnp.max(jnp.square(mean), initial=1.0)

        self.log_prior = jax.jit(log_prior)
        self.rounding = jax.jit(rounding)

    def free(self, engine):
        found = engine._run.fit.hyper
        return {name: t.inv(jnp.asarray(found[name], float)) for name, t in self.transforms.items()}

    def means(self, engine):
        moments = engine._run._moments
        return {name: jnp.reshape(moments[name][0], engine.posterior[name].shape) for name in self.field}

    def hyper(self, point):
        return {name: self.transforms[name](value) for name, value in self.unravel(point).items()}

    def own_values(self, engine, points):
        """Log evidence of the engine, fitted at each point, plus the prior of NumPyro."""
        run, out = engine._run, []
        solve, inputs = run.programs.solve, run.fit.last_state.state
        for point in points:
            values = self.hyper(point)
            hyper = {name: values[name] for name in run.fit.hyper}
            _, info, value = solve(run.reading.data, hyper, inputs, num_steps=500)
            out.append(float(value) + float(self.log_prior(point)) if bool(info.converged) else -np.inf)
        return np.array(out)


def false_convergence(engine, name, density, y):
    """What is wrong with the end of a converged run, or nothing."""
    point = np.asarray(ravel_pytree(density.free(engine))[0])
    mean = ravel_pytree(density.means(engine))[0]
    # all factors: observations, and priors that are not Gaussian
    is_gaussian = all(isinstance(p, GaussianPotential) for p in engine._run.reading.abstract_form.potentials)

    def objective(points):
        points = jnp.asarray(points)
        if name == "Laplace" or is_gaussian:
            return np.asarray(density.laplace(points, mean, y))
        return density.own_values(engine, points)

    rounding = float(density.rounding(point, mean, y))
    return fault_at(objective, point, float(engine.last_state.search.best.objective), rounding)


def promised_by_newton(gradient, curvatures, directions):
    """By how much a Newton step would raise the objective; differences over a step see the third derivative as well."""
    return np.sum(np.square(directions.T @ gradient) / np.maximum(np.abs(curvatures), 1e-2)) / 2.0


def fault_at(objective, point, own, rounding=0.0):
    """What is wrong with a point that is said to be a maximum, from values of the objective around it.

    ``rounding`` is that of the values: noise of 1e-6, where a scale is at its edge, leaves four digits of them.
    """
    size = point.size
    shifts = np.concatenate([STEP * np.eye(size), -STEP * np.eye(size)])
    pairs = [(i, j) for i in range(size) for j in range(i)]
    both = STEP * np.array([np.eye(size)[i] + np.eye(size)[j] for i, j in pairs]).reshape(-1, size)
    values = objective(np.concatenate([point[None], point + shifts, point + both]))
    here, up, down, mixed = values[0], values[1 : size + 1], values[size + 1 : 2 * size + 1], values[2 * size + 1 :]
    if not np.isclose(here, own, rtol=1e-6, atol=1e-5 + rounding):
        return f"the objective is {here:.6f}, reported as {own:.6f}"
    gradient = (up - down) / (2.0 * STEP)
    hessian = np.diag((up - 2.0 * here + down) / STEP**2)
    for value, (i, j) in zip(mixed, pairs, strict=True):
        hessian[i, j] = hessian[j, i] = (value - up[i] - up[j] + here) / STEP**2
    if not np.all(np.isfinite(hessian)):
        return None if here == np.max(values) else "a neighbour is higher"
    curvatures, directions = np.linalg.eigh(hessian)
    promised = promised_by_newton(gradient, curvatures, directions)
    if promised > 1e-4 and np.max(values) > here + 1e-6 + rounding:
        return f"the gradient is {gradient}"
    if curvatures[-1] > 1e-3 * max(1.0, np.max(np.abs(curvatures))):
        beside = objective(point + np.array([0.1, -0.1, 0.4, -0.4])[:, None] * directions[:, -1])
        if np.max(beside) > here + 1e-5 + rounding:
            return f"it curves upwards by {curvatures[-1]:.2g} along {directions[:, -1]}"
    # At the edge of a support all derivatives vanish; there the constrained value is what to move.
    back = objective(point + 2.0 * np.eye(size))
    flat = (np.abs(np.diag(hessian)) < 1e-2) & (back > here + 1e-3)
    return f"the objective rises again from a plateau, by {back - here}" if flat.any() else None
