"""Search for the next measurement in a continuum: scores climbed by their gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, random

from ..infer.front.options import check_at_least
from ..infer.front.running.progress import warn
from ..infer.gaussian.engine import Engine
from ..infer.gaussian.runs.run import GaussianRun
from ..structure.model.running.execution import bound_arguments
from .objective import Objective
from .scores.pointwise import Acquisition, expected_information_gain


class OptimisedDesign(NamedTuple):
    """The best point that was found, or the best points that are measured together."""

    x: np.ndarray
    """Values of the argument for the new rows, shape ``(size, ...)``: to be given to the model as they are."""
    score: float
    converged: bool
    """True if the climb to it ended where the score has no slope within the bounds."""
    optima: np.ndarray
    """End of each climb, best first."""
    num_evaluations: int


def optimise_design(
    engine: Engine,
    *args: object,
    argument: str,
    bounds: object,
    score: Acquisition = expected_information_gain,
    size: int = 1,
    num_starts: int = 5,
    num_raw: int = 50,
    starts: object = None,
    num_steps: int = 100,
    rng_key: Array | None = None,
    **kwargs: object,
) -> OptimisedDesign:
    r"""The inputs, of a continuum, at which an observation is worth the most.

    A model is read on the inputs of the fit and on new ones together, without the values of these, so that predictors
    there, and the noise if it depends on inputs, are functions that are differentiated. From the best of ``num_raw``
    random points L-BFGS-B (Byrd, Lu, Nocedal and Zhu 1995) climbs within the bounds. Scores have many tops: the best of
    ``num_starts`` is returned, and ``optima`` says how many of these agree. What was found is compared with the score
    of the engine itself.

    Several points are climbed together, by what they tell together: with Gaussian noise half the log determinant
    (about the field, hyperparameters given), outcomes that can be counted by all of their configurations under draws of
    the predictors that stay the same.

    Cost: two compilations; for each evaluation a factorisation of the fit for each point of the hyperparameters.

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from jax import random
    >>> from numpyro_ext.design import optimise_design
    >>> from numpyro_ext.infer import EP
    >>> def model(x, y=None):
    ...     kernel = jnp.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-6 * jnp.eye(x.shape[0])
    ...     f = numpyro.sample("f", dist.MultivariateNormal(0.0, kernel))
    ...     numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> engine = EP(model)
    >>> engine.run(random.key(0), jnp.array([0.0, 1.0, 3.0]), jnp.array([0.1, 0.8, 0.2]))
    >>> found = optimise_design(engine, argument="x", bounds=(0.0, 3.0))
    >>> print(found.x.round(2), round(found.score, 2), found.converged)
    [2.06] 1.72 True

    :param engine: one on a Gaussian field, after its run.
    :param args: other arguments of the model for the new rows, without observations.
    :param str argument: name of the argument that holds inputs, a row for each observation.
    :param bounds: lowest and highest value, ``(low, high)``; for inputs of several coordinates one such row for each,
        shape ``(d, 2)`` (lists, arrays and tables alike).
    :param score: a score that asks for outcomes alone, such as
        :func:`~numpyro_ext.design.expected_information_gain`, :func:`~numpyro_ext.design.predictive_entropy` or a
        ``functools.partial`` of one with its options.
    :param int size: how many points are measured together; more than one by information alone.
    :param int num_starts: climbs.
    :param int num_raw: random points of which the best are started from.
    :param starts: points to start from in their place, shape ``(number, size, ...)``, or without the second axis.
    :param int num_steps: of a climb, at most.
    :param rng_key: of random points and of scores that draw; a fixed key if left out.
    :param kwargs: keyword arguments of the model.
    :return: the point, with its score. Interrupted (Ctrl-C), the best so far with a warning.
    :raises ValueError: for bounds that are none, starts outside them, an argument that has no row for each
        observation, or a score that asks for more than outcomes: which, and what to do.
    :raises ValueError: if the field does not cover new inputs; see ``engine.predict``.
    """
    check_at_least(1, size=size, num_starts=num_starts, num_raw=num_raw, num_steps=num_steps)
    run = engine._finished() if isinstance(engine, Engine) else None
    if not isinstance(run, GaussianRun):
        raise ValueError(
            f"optimise_design differentiates the predictors of a Gaussian field, which a {type(engine).__name__} does "
            "not have: take EP, LaplaceApproximation, VariationalGaussian or INLA, or score a grid of points."
        )
    if size > 1 and score is not expected_information_gain:
        raise ValueError(
            "Several points are chosen by what they tell together, which expected_information_gain alone says: by "
            "other scores ask for one, observe it, and ask again."
        )
    if not run.fit.diagnostics.converged:
        warn(f"{type(engine).__name__} has not converged, and scores are of the posterior that it has.")
    old = _inputs_of(run, argument)
    low, high = _bounds(bounds, old.shape[1:], argument)
    key_raw, key_score = random.split(random.key(0) if rng_key is None else rng_key)
    shape = size, *old.shape[1:]
    raw = _starts(starts, shape, low, high)
    if raw is None:
        unit = random.uniform(key_raw, (num_raw, *shape), dtype=old.dtype)
        raw = np.asarray(low + (high - low) * np.asarray(unit))
    objective = Objective(engine, run, args, kwargs, argument, old, raw[0], score, key_score)
    best: list[tuple[float, np.ndarray, bool]] = []
    try:
        begin = raw
        if starts is None:
            values = np.array([objective.value(x) for x in raw])
            begin = raw[np.argsort(-np.where(np.isfinite(values), values, -np.inf), kind="stable")[:num_starts]]
        for x in begin:
            best.append(_climb(objective, x, low, high, num_steps))
    except KeyboardInterrupt:
        if not best and objective.best is None:
            raise
        warn("Interrupted: the best point so far is returned.")
        if not best:
            assert objective.best is not None  # as was seen
            best.append((*objective.best, False))
    best = [found for found in best if np.isfinite(found[0])]
    if not best:
        raise FloatingPointError(
            "No start has a finite score with a finite slope: is the kernel differentiable within the bounds (no "
            "square root of a squared distance of zero), and the covariance positive definite (a jitter on its "
            "diagonal)?"
        )
    best.sort(key=lambda found: -found[0])
    value, x, converged = best[0]
    if size == 1:
        objective.check(x, value)
    return OptimisedDesign(x, value, converged, np.array([found[0] for found in best]), objective.num_evaluations)


def _climb(
    objective: Objective, x: np.ndarray, low: np.ndarray, high: np.ndarray, num_steps: int
) -> tuple[float, np.ndarray, bool]:
    from scipy.optimize import minimize  # which takes a third of the time of an import

    width = np.broadcast_to(high - low, x.shape)
    low = np.broadcast_to(low, x.shape)

    def at(unit: np.ndarray) -> np.ndarray:
        return low + width * np.clip(unit, 0.0, 1.0).reshape(x.shape)

    def descend(unit: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective.value_and_gradient(at(unit))
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            return np.inf, np.zeros(unit.size)
        return -value, -(gradient * width).reshape(-1)

    start = np.where(width > 0.0, (x - low) / np.where(width > 0.0, width, 1.0), 0.0).reshape(-1)
    # Where a score is rounded to eps, slopes below its root say nothing, and a line search for less fails.
    eps = float(jnp.finfo(objective.dtype).eps)
    options = {"maxiter": num_steps, "gtol": max(1e-6, math.sqrt(eps)), "ftol": max(1e-12, 10.0 * eps)}
    found = minimize(descend, start, jac=True, method="L-BFGS-B", bounds=[(0.0, 1.0)] * start.size, options=options)
    return -float(found.fun), at(np.asarray(found.x)), bool(found.success and np.isfinite(found.fun))


def _inputs_of(run: GaussianRun, argument: str) -> np.ndarray:
    arguments, _ = bound_arguments(run.reading.model, run.reading.args, run.reading.kwargs)
    if argument not in arguments:
        raise ValueError(f"argument={argument!r} is none of the arguments of the model, which are {list(arguments)}.")
    found = np.asarray(arguments[argument])
    if found.ndim == 0 or found.dtype.kind not in "iuf":
        raise ValueError(
            f"argument {argument!r} holds {found.dtype} of shape {found.shape}: a design is of an array of numbers "
            "with a row for each observation."
        )
    return found.astype(jnp.result_type(float))


def _bounds(bounds: object, shape: tuple[int, ...], argument: str) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest values, in the shape of one point."""
    try:
        pairs = np.asarray(bounds, float)
    except (TypeError, ValueError) as error:
        raise ValueError(f"bounds must be numbers, (low, high) for each coordinate; got {bounds!r}.") from error
    if pairs.shape not in {(2,), (*shape, 2)}:
        raise ValueError(
            f"A point of {argument!r} has the shape {shape}: bounds must be (low, high), or an array of shape "
            f"{(*shape, 2)}; got {pairs.shape}."
        )
    low, high = (np.broadcast_to(pairs[..., k], shape) for k in (0, 1))
    if not (np.isfinite(pairs).all() and np.all(low <= high)):
        raise ValueError(f"bounds must be finite, the lower ones not above the upper ones; got {pairs.tolist()}.")
    return low, high


def _starts(starts: object, shape: tuple[int, ...], low: np.ndarray, high: np.ndarray) -> np.ndarray | None:
    if starts is None:
        return None
    given = np.asarray(starts, float)
    if shape[0] == 1 and given.ndim == len(shape) and given.shape[1:] == shape[1:]:
        given = given[:, None]
    if given.shape[1:] != shape or not len(given):
        raise ValueError(f"starts must have the shape (number, {', '.join(map(str, shape))}); got {given.shape}.")
    if not np.all((given >= low) & (given <= high)):
        number = int(np.argmin(np.all((given >= low) & (given <= high), axis=tuple(range(1, given.ndim)))))
        raise ValueError(f"starts[{number}] is outside the bounds: {given[number].tolist()}.")
    return given
