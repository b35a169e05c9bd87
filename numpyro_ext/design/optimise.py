"""Search for the next measurement in a continuum: scores climbed by their gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from ..infer.front.options import check_at_least
from ..infer.front.running.progress import warn
from ..infer.gaussian.engine import Engine
from ..infer.gaussian.new_arguments.predict import Prediction, predict
from ..infer.gaussian.run import GaussianRun
from ..linalg.gaussian.design import DenseDesign
from ..potentials import GaussianPotential
from ..potentials.outcomes import log_probabilities
from ..structure.latent_gaussian import AffineMap
from ..structure.model.running.execution import bound_arguments
from .outcomes.committee import committee_information
from .outcomes.outlooks import GaussianOutlook
from .outcomes.points import gaussian_outlooks
from .scores.pointwise import Acquisition, expected_information_gain

__all__ = ["OptimisedDesign", "optimise_design"]

_NUM_DRAWS, _MOST_CONFIGURATIONS = 1024, 1024
_LARGEST_MISS = 1e-5


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


class _Moments(NamedTuple):
    """Moments of the predictors of new rows, points of the hyperparameters first; a score is differentiated in
    these."""

    mean: Array
    variance: Array
    covariance: Array | None
    """Joint covariance of all new rows, where several are asked about."""
    potentials: tuple[Any, ...]


class _Here:
    """A source of scores: what is known of outcomes at some arguments."""

    def __init__(self, outlooks: dict[str, GaussianOutlook]) -> None:
        self._outlooks = outlooks

    def outlooks(self) -> dict[str, GaussianOutlook]:
        return self._outlooks


def optimise_design(
    engine: Engine,
    *args: Any,
    argument: str,
    bounds: Any,
    score: Acquisition = expected_information_gain,
    size: int = 1,
    num_starts: int = 5,
    num_raw: int = 50,
    starts: Any = None,
    num_steps: int = 100,
    rng_key: Array | None = None,
    **kwargs: Any,
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
    :raises NotJoined: if the field does not cover new inputs; see ``engine.predict``.
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
    objective = _Objective(engine, run, args, kwargs, argument, old, raw[0], score, key_score)
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


class _Objective:
    """A score of new inputs, with its gradient, at the fit of an engine."""

    def __init__(
        self,
        engine: Engine,
        run: GaussianRun,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        argument: str,
        old: np.ndarray,
        x: np.ndarray,
        score: Acquisition,
        rng_key: Array,
    ) -> None:
        self._engine, self._score, self._key = engine, score, rng_key
        self._args, self._kwargs, self._argument = args, dict(kwargs), argument
        read = partial(engine._read, run.rng_key, check=False, check_observations=False, changing=(argument,))
        found = predict(run, read, rng_key, args, {**kwargs, argument: x}, None)
        self._run, self._reading = found._run, found._run.reading
        self._check_rows(found, old, x)
        self._outlooks, by_draws = gaussian_outlooks(self._run, slices=found._new_slices)
        if by_draws:
            raise ValueError(
                f"The observations of {sorted(by_draws)} have several predictors each or no known outcomes, and scores "
                "of one predictor are differentiated: score a grid of points."
            )
        self._rows = jnp.asarray(np.concatenate([outlook.rows for outlook in self._outlooks.values()]))
        sizes = [
            int(np.prod(shape)) * number
            for shape, number in zip(self._reading.factor_shapes, self._reading.rows_per_observation, strict=True)
        ]
        first = dict(zip(self._reading.factor_names, np.cumsum([0, *sizes]).tolist(), strict=False))
        self._kept = [outlook.rows - first[name] for name, outlook in self._outlooks.items()]
        """Numbers of the new observations among those of each site."""
        self._is_joint = len(x) > 1
        inputs = [point for _, point in self._run.weighted_points()]
        self._points = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[(hyper, state) for _, hyper, state in inputs])
        self._old = jnp.asarray(old)
        self._moments, self._pull = jax.jit(self._moments_at), jax.jit(self._pull_back)
        # Scores choose how they integrate by values, so that they run as they are.
        self._slopes = jax.jit(self._with_slopes) if self._is_joint else self._with_slopes
        self.num_evaluations = 0
        self.best: tuple[float, np.ndarray] | None = None

    def _check_rows(self, found: Prediction, old: np.ndarray, x: np.ndarray) -> None:
        joint = np.asarray(found._call.arguments[self._argument])
        if joint.shape != (len(old) + len(x), *old.shape[1:]):
            raise ValueError(
                f"argument {self._argument!r} has no row for each observation: with those of the fit "
                f"{list(old.shape)} and new ones {list(x.shape)} it is {list(joint.shape)}."
            )

    def _moments_at(self, x: Array) -> _Moments:
        arrays = {self._argument: jnp.concatenate([self._old, x.astype(self._old.dtype)])}
        data = self._reading.with_changing(arrays)
        names = self._reading.observed_names

        def at(point: tuple[Any, Any, Array]) -> _Moments:
            form = self._reading.form(point[0], data)
            posterior = self._run.algorithm.posterior(form, point[1])
            rows = AffineMap(DenseDesign(form.design.to_dense()[self._rows]), form.offset[self._rows])
            mean, variance = posterior.mean_and_variance(rows)
            covariance = posterior.covariance(rows) if self._is_joint else None
            factors = tuple(form.potentials[names.index(name)] for name in self._outlooks)
            return _Moments(mean, jnp.maximum(variance, 0.0), covariance, factors)

        numbers = jnp.arange(len(self._weights))  # there may be no hyperparameters
        found: _Moments = jax.lax.map(at, (*self._points, numbers))
        return found

    @property
    def dtype(self) -> Any:
        """Precision in which scores are computed."""
        return self._old.dtype

    @property
    def _weights(self) -> Array:
        return next(iter(self._outlooks.values())).weights

    def _pull_back(self, x: Array, slopes: list[Array]) -> Array:
        def real(x: Array) -> list[Array]:
            return _real_leaves(self._moments_at(x))[0]

        _, pull = jax.vjp(real, x)
        slope: Array = pull(slopes)[0]
        return slope

    def _score_of(self, moments: _Moments) -> Array:
        """Score of all new observations, by any function of their outcomes."""
        here, start = {}, 0
        for outlook, factors, kept in zip(self._outlooks.values(), moments.potentials, self._kept, strict=True):
            stop = start + len(kept)

            def chosen(leaf: Array, kept: np.ndarray = kept) -> Array:
                leaf = leaf[:, None] if jnp.ndim(leaf) == 1 else leaf
                return leaf if leaf.shape[1] == 1 else leaf[:, kept]

            here[outlook.name] = dataclasses.replace(
                outlook,
                potential=jax.tree.map(chosen, factors),
                mean=moments.mean[:, start:stop],
                variance=moments.variance[:, start:stop],
            )
            start = stop
        if moments.covariance is not None:
            return _joint_information(here, moments.mean, moments.covariance, self._weights, self._key)
        found = self._score(_Here(here), rng_key=self._key)
        return sum((jnp.sum(jnp.asarray(value)) for value in found.values()), jnp.zeros(()))

    def _with_slopes(self, moments: _Moments) -> tuple[Array, list[Array]]:
        """The score, and its derivatives in what is real of the moments."""
        real, restore = _real_leaves(moments)
        found: tuple[Array, list[Array]] = jax.value_and_grad(lambda leaves: self._score_of(restore(leaves)))(real)
        return found

    def value(self, x: np.ndarray) -> float:
        if self._is_joint:
            return self.value_and_gradient(x)[0]
        self.num_evaluations += 1
        return self._keep(float(self._score_of(self._moments(jnp.asarray(x)))), x)

    def value_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        self.num_evaluations += 1
        try:
            value, slopes = self._slopes(self._moments(jnp.asarray(x)))
        except jax.errors.TracerArrayConversionError as error:
            name = getattr(self._score, "__name__", type(self._score).__name__)
            raise ValueError(
                f"{name} has no derivative, as it computes with NumPy: compute with jax.numpy, or score a grid of "
                "points."
            ) from error
        return self._keep(float(value), x), np.asarray(self._pull(jnp.asarray(x), slopes), float)

    def _keep(self, value: float, x: np.ndarray) -> float:
        if np.isfinite(value) and (self.best is None or value > self.best[0]):
            self.best = value, np.array(x)
        return value

    def check(self, x: np.ndarray, value: float) -> None:
        """Compare with the score of the engine itself, for which the model is read on these inputs."""
        found = self._score(self._engine, *self._args, rng_key=self._key, **self._kwargs, **{self._argument: x})
        expected = float(sum(np.sum(scores) for scores in found.values()))
        if not abs(expected - value) <= _LARGEST_MISS * (1.0 + abs(expected)):
            raise RuntimeError(
                f"The score at {x.tolist()} is {expected:.8g}, and as a function of {self._argument!r} {value:.8g}: "
                "does the model branch on its values? Score a grid of points instead."
            )


def _climb(
    objective: _Objective, x: np.ndarray, low: np.ndarray, high: np.ndarray, num_steps: int
) -> tuple[float, np.ndarray, bool]:
    from scipy.optimize import minimize  # which takes a third of the time of an import

    width = np.broadcast_to(high - low, x.shape)
    low = np.broadcast_to(low, x.shape)

    def at(unit: np.ndarray) -> np.ndarray:
        point: np.ndarray = low + width * np.clip(unit, 0.0, 1.0).reshape(x.shape)
        return point

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


def _joint_information(
    outlooks: Mapping[str, GaussianOutlook], mean: Array, covariance: Array, weights: Array, rng_key: Array
) -> Array:
    """Joint information of all observations, in nats; axes of ``mean`` are points of the hyperparameters and rows."""
    potentials = [outlook.potential for outlook in outlooks.values()]
    if all(isinstance(potential, GaussianPotential) for potential in potentials):
        noise = [
            jnp.broadcast_to(jnp.square(o.potential.scale), o.mean.shape)  # type: ignore[attr-defined]  # as was asked
            for o in outlooks.values()
        ]
        scale = jnp.sqrt(jnp.concatenate(noise, axis=1))
        ratio = covariance / (scale[:, :, None] * scale[:, None, :]) + jnp.eye(mean.shape[1])
        return 0.5 * jnp.sum(weights * jnp.linalg.slogdet(ratio)[1])
    # The same draws at all inputs; each point of the hyperparameters has as many, with its weight.
    num_draws, num_rows = max(1, _NUM_DRAWS // len(weights)), mean.shape[1]
    z = random.normal(rng_key, (len(weights), num_draws, num_rows), mean.dtype)
    least = 1e-10 * jnp.mean(jnp.diagonal(covariance, axis1=1, axis2=2), axis=1)
    root = jnp.linalg.cholesky(covariance + least[:, None, None] * jnp.eye(num_rows))
    eta = (mean[:, None] + jnp.einsum("pij,psj->psi", root, z)).reshape(-1, num_rows)
    of_draw = jnp.repeat(jnp.arange(len(weights)), num_draws)
    log_p, start = jnp.zeros((len(eta), 1), mean.dtype), 0
    for name, outlook in outlooks.items():
        known, stop = outlook.potential.outcomes(), start + outlook.mean.shape[1]
        if known is None or known.number is None or known.number ** (stop - start) > _MOST_CONFIGURATIONS:
            raise ValueError(
                f"What {stop - start} observations of {name!r} tell together has a rule for Gaussian noise and for up "
                f"to {_MOST_CONFIGURATIONS} configurations of outcomes: ask for fewer points, or choose from a grid "
                "with select_batch."
            )
        potential = jax.tree.map(lambda leaf: leaf[of_draw], outlook.potential)
        table = jnp.moveaxis(log_probabilities(potential, eta[:, start:stop], known.number), 0, -1)
        for number in range(stop - start):
            log_p = (log_p[:, :, None] + table[:, number, None, :]).reshape(len(eta), -1)
        start = stop
    found: Array = committee_information(log_p[:, None], weights[of_draw] / num_draws)[0]
    return found


def _real_leaves(tree: Any) -> tuple[list[Array], Callable[[list[Array]], Any]]:
    """The leaves of a tree that have derivatives, and what puts others in their places."""
    leaves, structure = jax.tree.flatten(tree)
    which = [k for k, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]

    def restore(real: list[Array]) -> Any:
        values = dict(zip(which, real, strict=True))
        return jax.tree.unflatten(structure, [values.get(k, leaf) for k, leaf in enumerate(leaves)])

    return [leaves[k] for k in which], restore


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


def _bounds(bounds: Any, shape: tuple[int, ...], argument: str) -> tuple[np.ndarray, np.ndarray]:
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


def _starts(starts: Any, shape: tuple[int, ...], low: np.ndarray, high: np.ndarray) -> np.ndarray | None:
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
