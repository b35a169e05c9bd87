"""A run that says ``converged=True`` is at a local maximum: random models, judged from NumPyro's density alone.

The evidence is computed anew from :func:`numpyro.infer.util.log_density`, by a dense Hessian at the mode of the field:
exact where the noise is Gaussian, and elsewhere what Laplace's method says that it maximises. For EP and variational
Gaussians on other likelihoods the values (not the derivatives) are the engine's own. Derivatives are differences.
The bounds of structured mean field and bilinear engines are computed anew from the densities of the model's sites; of
the latter all of the posterior is judged as well, by derivatives of that.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.util import log_density

from numpyro_ext.infer import EP, BilinearVG, LaplaceApproximation, StructuredMeanField, VariationalGaussian
from numpyro_ext.structure import ModelStructureError

from ..infer.bounds_by_density import BilinearBound, SparseBound
from ..structure.grammar_of_learning import random_bilinear_model, random_learning_model, random_sparse_model

ENGINES = {"EP": EP, "Laplace": LaplaceApproximation, "VG": VariationalGaussian}
STEP = 0.02
_NEWTON_STEPS = 40


class Density:
    """Log evidence plus log prior as a function of the unconstrained hyperparameters, from NumPyro's density.

    Compiled once for a model and a split into field and hyperparameters.
    """

    def __init__(self, engine, model, y):
        with handlers.seed(rng_seed=0), handlers.trace() as trace:
            model(y)
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
        self.field = [
            name
            for name, site in sites.items()
            if site["type"] == "sample" and not site["is_observed"] and name not in engine.hyper
        ]
        _, self.unravel = ravel_pytree(self.free(engine))
        _, unravel_field = ravel_pytree(self.means(engine))

        def log_joint(x, point, y):
            values = self.hyper(point)
            held = {name: value for name, value in values.items() if name in params}
            return log_density(handlers.substitute(model, data=held), (y,), {}, {**unravel_field(x), **values})[0]

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
            return sum((jnp.sum(prior) for prior in priors), start=jnp.zeros(()))

        self.laplace = jax.jit(lambda points, mean, y: jax.lax.map(lambda point: laplace(point, mean, y), points))

        def rounding(point, mean, y):
            curvatures = jnp.linalg.eigvalsh(-jax.hessian(log_joint)(mean, point, y))
            return jnp.finfo(mean.dtype).eps * jnp.max(jnp.abs(curvatures)) * jnp.max(jnp.square(mean), initial=1.0)

        self.log_prior = jax.jit(log_prior)
        self.rounding = jax.jit(rounding)

    def free(self, engine):
        return {name: t.inv(jnp.asarray(engine.hyper[name].value, float)) for name, t in self.transforms.items()}

    def means(self, engine):
        return {name: jnp.asarray(engine.posterior[name].mean) for name in self.field}

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
    is_gaussian = type(engine._run.reading.abstract_form.potentials[0]).__name__.startswith("Gaussian")

    def objective(points):
        points = jnp.asarray(points)
        if name == "Laplace" or is_gaussian:
            return np.asarray(density.laplace(points, mean, y))
        return density.own_values(engine, points)

    rounding = float(density.rounding(point, mean, y))
    return fault_at(objective, point, float(engine.last_state.search.best.objective), rounding)


def _promised_by_newton(gradient, curvatures, directions):
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
    promised = _promised_by_newton(gradient, curvatures, directions)
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


def _judge(seed, data_seed, engines, densities):
    """Each engine on one model: how its run ended, and what is wrong with that."""
    model, draw = random_learning_model(seed)
    y = draw(data_seed)
    for name in engines:
        engine = ENGINES[name](model, progress_bar=False)
        where = f"{model.description}, data {data_seed}, {name}"
        try:
            with warnings.catch_warnings():
                # points, edges and runs that say that they have not converged are part of the grammar
                warnings.simplefilter("ignore", UserWarning)
                engine.run(jax.random.key(seed), y)
        except ModelStructureError as error:
            yield "refused", f"{where}: {error}"
            continue
        if not engine.diagnostics.converged or not engine.hyper:
            yield "not converged", f"{where}: {engine.diagnostics.messages}"
            continue
        key = seed, tuple(sorted(engine.hyper))
        densities.setdefault(key, None)
        densities[key] = densities[key] or Density(engine, model, y)
        fault = false_convergence(engine, name, densities[key], y)
        values = {site: np.asarray(estimate.value).round(4).tolist() for site, estimate in engine.hyper.items()}
        yield "false" if fault else "converged", f"{where}: {fault} at {values}"


def _search(cases, engines_of):
    densities = {}
    _check(outcome for seed, data_seed in cases for outcome in _judge(seed, data_seed, engines_of(seed), densities))


def _check(outcomes):
    outcomes = list(outcomes)
    found = [text for kind, text in outcomes if kind == "false"]
    assert not found, "\n".join(found)
    converged = sum(kind == "converged" for kind, _ in outcomes)
    assert converged > 0.7 * len(outcomes), "\n".join(text for kind, text in outcomes if kind != "converged")


def test_eight_random_models():
    # two data sets to a structure: the second costs next to nothing
    _search([(seed, data) for seed in range(4) for data in range(2)], lambda seed: [list(ENGINES)[seed % 3]])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_three_hundred_random_models(part):
    seeds = range(100 + 6 * part, 106 + 6 * part)
    _search([(seed, data) for seed in seeds for data in range(5)], lambda seed: ENGINES)


def _bound_of(engine, kind, model, y):
    """Objective and point of a finished run, and its own value there, with the log prior of the hyperparameters."""
    bound = kind(engine, model, y)
    prior = float(bound.log_prior(bound.point))
    return bound, float(engine.log_evidence) + prior


def _fault_of_sparse(engine, model, y):
    bound, own = _bound_of(engine, SparseBound, model, y)
    values = jax.jit(lambda points: jax.lax.map(bound, points))
    return fault_at(lambda points: np.asarray(values(jnp.asarray(points))), np.asarray(bound.point), own)


def _fault_of_bilinear(engine, model, y):
    bound, own = _bound_of(engine, BilinearBound, model, y)
    value, gradient, hessian = jax.jit(lambda x: (bound(x), jax.grad(bound)(x), jax.hessian(bound)(x)))(bound.point)
    if not np.isclose(value, own, rtol=1e-6, atol=1e-5):
        return f"the bound is {value:.6f}, reported as {own:.6f}"
    curvatures, directions = np.linalg.eigh(hessian)
    promised = _promised_by_newton(gradient, curvatures, directions)
    if promised > 1e-3:
        return f"a step of Newton promises {promised:.3g}; the derivatives are {gradient[: bound.size]}"
    if curvatures[-1] > 1e-3 * np.abs(curvatures[0]):
        return f"it curves upwards by {curvatures[-1]:.2g} along {directions[: bound.size, -1]}"
    return None


BOUNDS = {
    StructuredMeanField: (random_sparse_model, _fault_of_sparse, {"tol": 1e-7, "num_steps": 3000}),
    BilinearVG: (
        random_bilinear_model,
        _fault_of_bilinear,
        {"tol": 1e-9, "num_steps": 5000, "num_restarts": 0, "field": ["w", "z"]},
    ),
}


def _judge_by_bound(kind, cases):
    random_model, fault_of, options = BOUNDS[kind]
    for seed, data_seed in cases:
        model, draw = random_model(seed)
        y = draw(data_seed)
        engine = kind(model, progress_bar=False, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            engine.run(jax.random.key(seed), y)
        converged = engine.diagnostics.converged
        fault = fault_of(engine, model, y) if converged else engine.diagnostics.messages
        values = {site: np.asarray(estimate.value).round(4).tolist() for site, estimate in engine.hyper.items()}
        outcome = ("false" if fault else "converged") if converged else "not converged"
        yield outcome, f"{model.description}, data {data_seed}: {fault} at {values}"


@pytest.mark.parametrize("kind", list(BOUNDS))
def test_two_random_models_of_engines_that_learn_within_their_iterations(kind):
    _check(_judge_by_bound(kind, [(0, 0), (0, 2)]))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("kind", list(BOUNDS))
def test_twelve_random_models_of_engines_that_learn_within_their_iterations(kind, part):
    # The data tell their scales, so that few runs may end on a plateau: three of twelve.
    seeds = range(4 * part, 4 * part + 4)
    _check(_judge_by_bound(kind, [(seed, data) for seed in seeds for data in range(3)]))
