"""A pool of observations of a Gaussian field, of which more and more are seen: fits of those that are, and no others.

The rows that are in use are gathered into one of few sizes, so that a fit costs what its observations cost and not what
the pool would, and nothing is compiled for another one. All rows are looked at once, at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.store import shared
from ...infer.gaussian.algorithms.algorithm import Algorithm
from ...infer.gaussian.runs.quadrature_run import IntegratedQuadratureRun, QuadratureRun
from ...infer.gaussian.runs.run import GaussianRun
from ...linalg.gaussian.design import DenseDesign, SparseRows, rows_at
from ...linalg.gaussian.prior import CovariancePrior, PriorBlock, is_valid_prior
from ...potentials.outcomes import with_outcome
from ...structure import LatentGaussianReading
from ...structure.latent_gaussian import AffineMap, LatentGaussian
from ...structure.latent_gaussian.form import Blocks
from .outlooks import GaussianOutlook, JointField, Outlook
from .points import gaussian_outlooks

_LEAST = 16
_MOST_COLUMNS = 5000
_LARGEST = 2**27
"""Numbers in the forms at all points: 1 GB."""
_NOT_FINITE = (
    "The fit of the observations seen so far is not finite; the usual cause is a covariance close to singular: add "
    "jitter, or use float64 (numpyro.enable_x64())."
)


class NoPool(ValueError):
    """A fit whose observations cannot be taken one by one."""


class _Seen(NamedTuple):
    """Observations of each family in use, in slots: the first of them are taken."""

    rows: tuple[Array, ...]
    values: tuple[Array, ...]
    is_used: tuple[Array, ...]


class _Fit(NamedTuple):
    """At each point of the hyperparameters."""

    state: Any
    log_evidence: Array
    converged: Array
    mean: Array
    variance: Array


class Pool:
    """The observations of a fit, seen and not, at the hyperparameters of the fit (or at the points of its design).

    :param GaussianRun run: of an engine.
    :param int num_steps: of a fit at most.
    :raises NoPool: if the form is none of which rows can be taken one by one, with the reason.
    """

    def __init__(self, run: GaussianRun, num_steps: int) -> None:
        self._run = run
        reading = run.reading
        self._points = list(run.weighted_points())
        self._outlooks, _ = gaussian_outlooks(run)
        form = reading.abstract_form
        reason = self._reason(reading, form)
        if reason is not None:
            raise NoPool(reason)
        self._sizes = [len(mask) for mask in form.observed]
        self.names = reading.observed_names
        self._taken: dict[str, dict[int, float]] = {name: {} for name in self.names}
        for name in self.names:
            mask, values = reading.known_mask(name).reshape(-1), np.asarray(reading.sites[name].value).reshape(-1)
            self._taken[name] = {int(place): float(values[place]) for place in np.flatnonzero(mask)}
        self._fit: _Fit | None = None
        self._now: dict[str, Outlook] | None = None  # what the last fit knows, which scores and judges share
        self._capacities: tuple[int, ...] = ()
        # Weights of the points are those of the fit; what is seen later changes them by its evidence.
        self._log_weights = np.log([weight for weight, _ in self._points])
        self._first_evidence: np.ndarray | None = None
        hyper = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[inputs[1] for _, inputs in self._points])
        # Tighter than a run where digits allow it, since each fit starts where the last one stopped.
        tol = run.programs.tol * (1e-2 if jnp.result_type(float) == jnp.float64 else 1.0)
        self._programs = shared(_programs, reading, run.algorithm, tol, num_steps)
        numbers = jnp.arange(len(self._points))  # there may be no hyperparameters
        self._forms, is_valid = self._programs.forms(reading.data, numbers, hyper)
        if not np.all(is_valid):
            raise FloatingPointError(_NOT_FINITE)
        self._update()
        self._first_evidence = np.asarray(self._found.log_evidence)

    def _reason(self, reading: LatentGaussianReading, form: LatentGaussian) -> str | None:
        missing = [name for name in reading.observed_names if name not in self._outlooks]
        if missing:
            return f"the observations of {missing} have several predictors each, or outcomes that are not known"
        if isinstance(self._run, QuadratureRun | IntegratedQuadratureRun):
            return "its algorithm integrates over whole blocks"
        if not isinstance(form.design, DenseDesign | SparseRows):
            return "its field is a state space"
        size = len(self._points) * sum(leaf.size for leaf in jax.tree.leaves(form))
        if form.num_columns > _MOST_COLUMNS or size > _LARGEST:
            return f"its field of {form.num_columns} unknowns is too large to be kept"
        return None

    @property
    def _found(self) -> _Fit:
        assert self._fit is not None  # from the start on
        return self._fit

    @property
    def num_seen(self) -> int:
        return sum(len(taken) for taken in self._taken.values())

    @property
    def log_evidence(self) -> float:
        """Log evidence of the observations that are seen, integrated over the points."""
        first = self._found.log_evidence if self._first_evidence is None else self._first_evidence
        gained = np.asarray(self._found.log_evidence) - np.asarray(first)
        total = float(np.logaddexp.reduce(self._log_weights + gained))
        return float(self._run.log_evidence) + total

    @property
    def converged(self) -> bool:
        return bool(np.all(np.asarray(self._found.converged)))

    @property
    def weights(self) -> np.ndarray:
        """Weights of the points, given all that is seen."""
        first = self._found.log_evidence if self._first_evidence is None else self._first_evidence
        log_weights = self._log_weights + np.asarray(self._found.log_evidence) - np.asarray(first)
        return np.exp(log_weights - np.logaddexp.reduce(log_weights))

    def snapshot(self) -> tuple[dict[str, dict[int, float]], _Fit | None, tuple[int, ...]]:
        """Observations so far and their fit, for :meth:`restore`."""
        taken = {name: dict(values) for name, values in self._taken.items()}
        return taken, self._fit, self._capacities

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Go back to a snapshot; observations since then are forgotten."""
        self._taken, self._fit, self._capacities = snapshot
        self._now = None

    def take(self, observations: Iterable[tuple[str, int, float]]) -> None:
        """See further observations, each a site, a place and a value, and fit them with those before.

        The fit starts from where the last one ended.
        """
        self._now = None
        for name, place, value in observations:
            self._taken[name][place] = value
        self._update()

    def _update(self) -> None:
        sizes = zip(self.names, self._sizes, strict=False)
        capacities = tuple(_capacity(len(self._taken[name]), size) for name, size in sizes)
        seen = self._seen(capacities)
        state = self._found.state if capacities == self._capacities else None
        programs = self._programs
        self._fit = programs.fit(self._forms, seen, programs.start(self._forms, seen) if state is None else state)
        self._capacities, self._now = capacities, None
        if not np.isfinite(np.asarray(self._fit.log_evidence)).all():
            raise FloatingPointError(_NOT_FINITE)

    def _seen(self, capacities: tuple[int, ...]) -> _Seen:
        rows: list[Any] = []
        values: list[Any] = []
        used: list[Any] = []
        for name, capacity in zip(self.names, capacities, strict=True):
            taken = self._taken[name]
            rows.append(np.zeros(capacity, int))
            values.append(np.zeros(capacity))
            rows[-1][: len(taken)] = list(taken)
            values[-1][: len(taken)] = list(taken.values())
            used.append(np.arange(capacity) < len(taken))
            # An empty slot repeats what is in the first: it has to be a value of the support.
            values[-1][len(taken) :] = next(iter(taken.values()), self._placeholder(name))
        return _Seen(tuple(rows), tuple(values), tuple(used))

    def seen_values(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the observations of a site that are seen, and their values."""
        taken = self._taken[name]
        return np.array(list(taken), int), np.array(list(taken.values()), float)

    def fits_after(self, name: str, candidates: np.ndarray, number: int) -> tuple[np.ndarray, Array, Array]:
        """Fits after each candidate and each of its outcomes ``0, ..., number - 1``.

        :return: what the log evidence gains, shape ``(candidates, outcomes, points)``, and means and variances of the
            predictors, with an axis of all rows behind.
        """
        sizes = zip(self.names, self._sizes, strict=False)
        capacities = tuple(_capacity(len(self._taken[n]) + (n == name), size) for n, size in sizes)
        seen = self._seen(capacities)
        state = self._found.state
        if capacities != self._capacities:
            state = self._programs.start(self._forms, seen)
        at = self.names.index(name), len(self._taken[name])
        found = self._programs.fits_after(
            self._forms, seen, state, at[1], jnp.asarray(candidates), jnp.arange(number), site=at[0]
        )
        return np.asarray(found.log_evidence) - np.asarray(self._found.log_evidence), found.mean, found.variance

    def covariances(self) -> Array:
        """Joint covariance of all predictors at each point, shape ``(points, rows, rows)``."""
        return self._programs.covariances(self._forms, self._seen(self._capacities), self._found.state)

    def _placeholder(self, name: str) -> float:
        return float(np.asarray(self._run.reading.sites[name].value).reshape(-1)[0])

    def predictors(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Mean and variance of every predictor, by site; of mixtures over points those of the mixture."""
        weights = self.weights
        mean = weights @ np.asarray(self._found.mean)
        variance = weights @ (np.asarray(self._found.variance) + np.square(self._found.mean - mean))
        out, start = {}, 0
        for name, size in zip(self.names, self._sizes, strict=False):
            shape, here = self._outlooks[name].shape, slice(start, start + size)
            out[name] = mean[here].reshape(shape), variance[here].reshape(shape)
            start += size
        return out

    def outlooks(self) -> dict[str, Outlook]:
        """Predictive distributions of the observations that are still to be made."""
        if self._now is None:
            self._now = self._make_outlooks()
        return self._now

    def _make_outlooks(self) -> dict[str, Outlook]:
        out: dict[str, Outlook] = {}
        start = 0
        weights = jnp.asarray(self.weights, self._found.mean.dtype)
        for name, size in zip(self.names, self._sizes, strict=False):
            outlook, here = self._outlooks[name], slice(start, start + size)
            start += size
            is_candidate = np.ones(size, bool)
            is_candidate[list(self._taken[name])] = False
            out[name] = GaussianOutlook(
                name=name,
                shape=outlook.shape,
                is_candidate=is_candidate.reshape(outlook.shape),
                potential=outlook.potential,
                mean=self._found.mean[:, here],
                variance=self._found.variance[:, here],
                weights=weights,
                rows=np.arange(here.start, here.stop),
                joint=JointField(lambda rows: np.asarray(self.covariances())[:, rows[:, None], rows]),
            )
        return out


def _capacity(number: int, size: int) -> int:
    """Slots for so many observations: the next power of two, or all."""
    capacity = _LEAST
    while capacity < number:
        capacity *= 2
    return min(capacity, size)


class _Programs(NamedTuple):
    forms: Any
    start: Any
    fit: Any
    fits_after: Any
    covariances: Any


def _programs(reading: LatentGaussianReading, algorithm: Algorithm, tol: float, num_steps: int) -> _Programs:
    def forms(data: Sequence[object], numbers: Array, hyper: Mapping[str, Array]) -> tuple[LatentGaussian, Array]:
        def at(point: tuple[Array, Mapping[str, Array]]) -> tuple[LatentGaussian, Array]:
            form = reading.form(point[1], data)
            # Asked once: fits of a few rows would take longer over a factorisation of all than over the rest.
            return form._replace(prior=tuple(map(_known, form.prior))), is_valid_prior(form.prior)

        return jax.lax.map(at, (numbers, hyper))

    def start(forms: LatentGaussian, seen: _Seen) -> Any:
        return jax.lax.map(lambda form: algorithm.init(rows_of(form, seen)), forms)

    def fit(forms: LatentGaussian, seen: _Seen, state: object) -> _Fit:
        def at(point: tuple[LatentGaussian, object]) -> _Fit:
            form = point[0]
            small = rows_of(form, seen)
            start = algorithm.approach(small, point[1])
            ended, info, log_evidence = algorithm.fit(small, start, num_steps=num_steps, tol=tol)
            posterior = algorithm.posterior(small, ended)
            mean, variance = posterior.mean_and_variance(AffineMap(form.design, form.offset))
            return _Fit(ended, log_evidence, info.converged, mean, jnp.maximum(variance, 0.0))

        return jax.lax.map(at, (forms, state))

    def fits_after(
        forms: LatentGaussian, seen: _Seen, state: object, slot: Array, candidates: Array, outcomes: Array, *, site: int
    ) -> _Fit:
        def put(arrays: tuple[Array, ...], value: object) -> tuple[Array, ...]:
            return tuple(jnp.asarray(x).at[slot].set(value) if k == site else x for k, x in enumerate(arrays))

        def at(candidate: Array) -> _Fit:
            def told(outcome: Array) -> _Fit:
                more = _Seen(put(seen.rows, candidate), put(seen.values, outcome), put(seen.is_used, True))
                return fit(forms, more, state)._replace(state=None)

            return jax.lax.map(told, outcomes)

        return jax.lax.map(at, candidates)

    def covariances(forms: LatentGaussian, seen: _Seen, state: object) -> Array:
        def at(point: tuple[LatentGaussian, object]) -> Array:
            posterior = algorithm.posterior(rows_of(point[0], seen), point[1])
            return posterior.covariance(AffineMap(point[0].design, point[0].offset))

        return jax.lax.map(at, (forms, state))

    return _Programs(
        jax.jit(forms),
        jax.jit(start),
        jax.jit(fit),
        jax.jit(fits_after, static_argnames="site"),
        jax.jit(covariances),
    )


def _known(block: PriorBlock) -> PriorBlock:
    return dataclasses.replace(block, is_known_valid=True) if isinstance(block, CovariancePrior) else block


def rows_of(form: LatentGaussian, seen: _Seen) -> LatentGaussian:
    """The form of the observations that are seen alone, in one block; priors that are factors stay."""
    potentials, observed, index = [], [], []
    start = 0
    for number, mask in enumerate(form.observed):
        size = mask.shape[0]
        potential = form.potentials[number]
        if number < len(seen.rows):
            rows = seen.rows[number]

            def take(leaf: Array, rows: Array = rows, size: int = size) -> Array:
                return leaf[rows] if jnp.ndim(leaf) and leaf.shape[0] == size else leaf

            potential = with_outcome(jax.tree.map(take, potential), seen.values[number])
            index.append(start + rows)
            observed.append(seen.is_used[number])
        else:
            index.append(jnp.arange(start, start + size))
            observed.append(mask)
        potentials.append(potential)
        start += size
    at = jnp.concatenate(index)
    return form._replace(
        design=rows_at(form.design, at),
        offset=form.offset[at],
        potentials=tuple(potentials),
        observed=tuple(observed),
        blocks=Blocks(jnp.arange(at.shape[0])[None], jnp.arange(form.num_columns)[None]),
        border=None,
        touched=None,
        layout=form.layout and dataclasses.replace(form.layout, row_slots=form.layout.row_slots[at]),
    )
