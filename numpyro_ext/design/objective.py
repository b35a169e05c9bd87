"""A score as a function of one argument of the model, with its slopes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from ..infer.gaussian.engine import Engine
from ..infer.gaussian.new_arguments.predict import Prediction, predict
from ..infer.gaussian.runs.run import GaussianRun
from ..linalg.gaussian.design import DenseDesign
from ..potentials import GaussianPotential
from ..potentials.outcomes import log_probabilities
from ..structure.latent_gaussian import AffineMap
from .outcomes.committee import committee_information
from .outcomes.outlooks import GaussianOutlook
from .outcomes.points import gaussian_outlooks
from .scores.pointwise import Acquisition

_NUM_DRAWS, _MOST_CONFIGURATIONS = 1024, 1024
_LARGEST_MISS = 1e-5


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


class Objective:
    """A score of new inputs, with its gradient, at the fit of an engine."""

    def __init__(
        self,
        engine: Engine,
        run: GaussianRun,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        argument: str,
        old: np.ndarray,
        x: np.ndarray,
        score: Acquisition,
        rng_key: Array,
        num_draws: int = _NUM_DRAWS,
    ) -> None:
        self._engine, self._score, self._key, self._num_draws = engine, score, rng_key, num_draws
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
        return jax.lax.map(at, (*self._points, numbers))

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
        return pull(slopes)[0]

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
            return _joint_information(here, moments.mean, moments.covariance, self._weights, self._key, self._num_draws)
        found = self._score(_Here(here), rng_key=self._key)
        return sum((jnp.sum(jnp.asarray(value)) for value in found.values()), jnp.zeros(()))

    def _with_slopes(self, moments: _Moments) -> tuple[Array, list[Array]]:
        """The score, and its derivatives in what is real of the moments."""
        real, restore = _real_leaves(moments)
        return jax.value_and_grad(lambda leaves: self._score_of(restore(leaves)))(real)

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


def _joint_information(
    outlooks: Mapping[str, GaussianOutlook],
    mean: Array,
    covariance: Array,
    weights: Array,
    rng_key: Array,
    num_draws: int,
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
    num_draws, num_rows = max(1, num_draws // len(weights)), mean.shape[1]
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
    return committee_information(log_p[:, None], weights[of_draw] / num_draws)[0]


def _real_leaves(tree: object) -> tuple[list[Array], Callable[[list[Array]], Any]]:
    """The leaves of a tree that have derivatives, and what puts others in their places."""
    leaves, structure = jax.tree.flatten(tree)
    which = [k for k, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]

    def restore(real: list[Array]) -> object:
        values = dict(zip(which, real, strict=True))
        return jax.tree.unflatten(structure, [values.get(k, leaf) for k, leaf in enumerate(leaves)])

    return [leaves[k] for k in which], restore
