"""The density of any number of traits as a Gaussian at its mode (Laplace), and scores at points of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.stats import norm, qmc

from ...compilation.pickles import OnDemand
from .bank import Floats, ItemBank
from .beliefs import At, Ints, negative_entropy

_NUM_POINTS = 64
"""Points of a posterior at which scores look."""
_LARGEST_BLOCK = 2**18
"""Numbers in a table of people at points that are looked at together, few enough for the caches."""
_MAX_STEPS = 100


class GaussianPosterior(NamedTuple):
    """Mode ``(N, D)`` and covariance ``(N, D, D)`` of the traits, their answers, and who has converged."""

    mean: Floats
    covariance: Floats
    answers: Ints
    converged: Any


class GaussianBeliefs(OnDemand):
    """Gaussians at the modes of the densities of people's traits; exact where the log density is quadratic.

    With draws of the items the density is that of the traits with the items integrated out over the draws. Cost: some
    three to eight Newton steps an answer, each with ``D`` derivatives of the log probabilities of the bank.

    :param bank: the items and the prior.
    """

    def __init__(self, bank: ItemBank) -> None:
        self.bank = bank
        # A sequence of low discrepancy: the same for all items, so that scores differ by what items are.
        uniform = qmc.Sobol(bank.num_traits, scramble=False).random(_NUM_POINTS) + 0.5 / _NUM_POINTS
        self._normal = norm.ppf(uniform)
        self._last: tuple[GaussianPosterior, list[Floats]] | None = None

    def prior_state(self, num_people: int) -> Ints:
        return np.full((num_people, self.bank.num_items), -1)

    def updated(self, state: Ints, items: Ints, values: Ints) -> Ints:
        answers = state.copy()
        told = np.flatnonzero(items >= 0)
        answers[told, items[told]] = values[told]
        return answers

    def posterior(self, state: Ints) -> GaussianPosterior:
        # From the prior mean each time, so that the order of the answers makes no difference.
        start = np.tile(self.bank.mean, (len(state), 1))
        mean, covariance, converged = (np.asarray(part) for part in self._fit(state, start))
        return GaussianPosterior(mean.astype(float), covariance.astype(float), state, converged)

    def moments(self, posterior: GaussianPosterior) -> tuple[Floats, Floats]:
        return posterior.mean, posterior.covariance

    def predictive(self, posterior: GaussianPosterior, items: Ints | None = None) -> Floats:
        if items is None:
            return self._at_points(posterior)[0]
        if self._last is not None and self._last[0] is posterior:
            return self._last[1][0][:, items]
        return self._in_blocks(partial(self._predictions, items), posterior)[0]

    def expected_information(self, posterior: GaussianPosterior, focus: Sequence[int] | None) -> Floats:
        if focus is not None and len(focus) < self.bank.num_traits:
            raise ValueError(
                "Expected information about some of the traits needs their density on nodes, and the table is too "
                "large for these: take maximum_information(..., focus=), or give num_nodes=."
            )
        predictive, conditional = self._at_points(posterior)
        return np.maximum(conditional - negative_entropy(predictive), 0.0)

    def fisher_information(self, posterior: GaussianPosterior, at: At) -> Floats:
        if at == "mean":
            return self.bank.information(posterior.mean)
        points = self._points(posterior)[:, :32]
        found = self.bank.information(points.reshape(-1, points.shape[-1]))
        return found.reshape(*points.shape[:2], *found.shape[1:]).mean(1)

    def votes(self, posterior: GaussianPosterior) -> Floats:
        found = self._in_blocks(self._votes, posterior)[0]
        return found

    def trouble(self, posterior: GaussianPosterior, covariance: Floats) -> str | None:
        failed = int((~posterior.converged).sum())
        return f"The mode of the traits of {failed} of {len(posterior.mean)} people was not found." if failed else None

    def _points(self, posterior: GaussianPosterior) -> Floats:
        root = np.linalg.cholesky(posterior.covariance)
        return posterior.mean[:, None] + np.einsum("nde,me->nmd", root, self._normal)

    def _at_points(self, posterior: GaussianPosterior) -> list[Floats]:
        """Means over the points of probabilities and of their negative entropies."""
        # Predictions after an answer and scores before the next one ask for the same.
        if self._last is None or self._last[0] is not posterior:
            self._last = posterior, self._in_blocks(self._scores, posterior)
        return self._last[1]

    def _in_blocks(self, function: Callable[..., Any], posterior: GaussianPosterior) -> list[Floats]:
        """Results of a compiled function of points and answers, for some people at a time."""
        bank, points = self.bank, self._points(posterior)
        each = bank.num_draws * points.shape[1] * bank.num_items * bank.num_categories
        size = min(len(points), max(1, _LARGEST_BLOCK // each))
        parts = []
        for start in range(0, len(points), size):
            # The last block is filled up with people of the one before, so that all have one program.
            first = min(start, len(points) - size)
            found = function(points[first : first + size], posterior.answers[first : first + size])
            parts.append([np.asarray(part, float)[start - first :] for part in found])
        return [np.concatenate(part) for part in zip(*parts, strict=True)]

    @cached_property
    def _votes(self) -> Callable[..., Any]:
        def votes(points: Array, answers: Array) -> tuple[Array]:
            _, log_p = _probabilities(self.bank, points, answers)
            return (jax.nn.one_hot(log_p.argmax(-1), log_p.shape[-1]).mean(1),)

        return jax.jit(votes)

    @cached_property
    def _scores(self) -> Callable[..., Any]:
        bank = self.bank

        def scores(points: Array, answers: Array) -> tuple[Array, Array]:
            p, log_p = _probabilities(bank, points, answers)
            entropies = jnp.where(p > 0.0, p * log_p, 0.0).sum(-1)
            return p.mean(1), entropies.mean(1)

        return jax.jit(scores)

    @cached_property
    def _predictions(self) -> Callable[..., Any]:
        def predictions(items: Array, points: Array, answers: Array) -> tuple[Array]:
            return (_probabilities(self.bank, points, answers)[0][:, :, items].mean(1),)

        return jax.jit(predictions)

    @cached_property
    def _fit(self) -> Callable[..., Any]:
        bank = self.bank
        precision: Floats = np.linalg.inv(bank.covariance).astype(float)

        def log_density(theta: Array, answers: Array) -> Array:
            away = theta - bank.mean
            found = jax.nn.logsumexp(_log_likelihoods(bank.log_probabilities(theta), answers), 0)
            return found - 0.5 * jnp.einsum("nd,de,ne->n", away, precision, away)

        def derivatives(theta: Array, answers: Array) -> tuple[Array, Array, Array]:
            """Log density of each person, its gradient and minus its Hessian."""

            def gradient(point: Array) -> tuple[Array, Array]:
                value, back = jax.vjp(lambda at: log_density(at, answers), point)
                return back(jnp.ones_like(value))[0], value

            def column(direction: Array) -> tuple[Array, Array, Array]:
                along = jnp.broadcast_to(direction, theta.shape)
                slope, change, value = jax.jvp(gradient, (theta,), (along,), has_aux=True)
                return slope, -change, value

            slopes, columns, values = jax.lax.map(column, jnp.eye(theta.shape[1], dtype=theta.dtype))
            return values[0], slopes[0], jnp.moveaxis(columns, 0, -1)

        return jax.jit(lambda answers, start: _newton(derivatives, answers, jnp.asarray(start), precision))


def _probabilities(bank: ItemBank, points: Array, answers: Array) -> tuple[Array, Array]:
    """Probabilities of answers at points of each person's traits, and their logarithms.

    Draws of the items are weighted by the person's answers at that point.

    :param points: shape ``(people, points, D)``.
    :param answers: shape ``(people, items)``, minus one for none.
    :return: shape ``(people, points, items, categories)``.
    """
    people, number, dimension = points.shape
    table = bank.log_probabilities(points.reshape(-1, dimension))
    log_p = table[0]
    if bank.has_draws:
        log_weights = jax.nn.log_softmax(_log_likelihoods(table, jnp.repeat(answers, number, 0)), 0)
        log_p = jax.nn.logsumexp(table + log_weights[..., None, None], 0)
    log_p = log_p.reshape(people, number, *log_p.shape[1:])
    return jnp.exp(log_p), log_p


def _log_likelihoods(table: Array, answers: Array) -> Array:
    """Log likelihood of the answers of each person under each draw of the items, shape ``(draws, people)``.

    :param table: log probabilities, shape ``(draws, people, items, categories)``.
    :param answers: shape ``(people, items)``, minus one for none.
    """
    told = jnp.take_along_axis(table, jnp.maximum(answers, 0)[None, ..., None], -1)[..., 0]
    return jnp.where(answers >= 0, told, 0.0).sum(-1)


def _newton(
    derivatives: Callable[[Array, Array], tuple[Array, Array, Array]],
    answers: Array,
    start: Array,
    prior_precision: Floats,
) -> tuple[Array, Array, Array]:
    """Modes and covariances of all people by damped Newton steps.

    Where the curvature is not that of a maximum the prior precision takes its place. A step that does not raise the log
    density of a person is halved for that person.
    """
    epsilon = float(jnp.finfo(start.dtype).eps)
    prior = jnp.asarray(prior_precision, start.dtype)

    def direction(slope: Array, curvature: Array) -> Array:
        floor = jnp.linalg.eigvalsh(prior)[0]
        values, vectors = jnp.linalg.eigh(curvature)
        along = jnp.einsum("nde,nd->ne", vectors, slope) / jnp.maximum(values, floor)
        return jnp.einsum("nde,ne->nd", vectors, along)

    def goes_on(carry: tuple[Array, ...]) -> Array:
        step_number, *_, gain = carry
        return (step_number <= _MAX_STEPS) & jnp.any(gain > epsilon**1.5)

    def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        number, theta, value, slope, curvature, towards, size, _ = carry
        tried = theta + size[:, None] * towards
        new = derivatives(tried, answers)
        # Rounding of the value must not refuse the last steps.
        better = new[0] >= value - 8.0 * epsilon * (1.0 + jnp.abs(value))
        keep = better[:, None]
        theta = jnp.where(keep, tried, theta)
        value = jnp.where(better, new[0], value)
        slope = jnp.where(keep, new[1], slope)
        curvature = jnp.where(keep[..., None], new[2], curvature)
        size = jnp.where(better, jnp.minimum(1.0, 2.0 * size), 0.5 * size)
        towards = direction(slope, curvature)
        # The squared Newton decrement, half of what is still to be gained.
        gain = jnp.einsum("nd,nd->n", slope, towards)
        return number + 1, theta, value, slope, curvature, towards, size, gain

    # The first step goes nowhere and finds the derivatives, so that they are compiled once.
    unknown = jnp.full(start.shape[0], jnp.inf, start.dtype)
    nowhere, unit = jnp.zeros_like(start), jnp.ones_like(unknown)
    curvature = jnp.broadcast_to(prior, (*start.shape, start.shape[1]))
    carry: tuple[Array, ...] = (jnp.zeros((), int), start, -unknown, nowhere, curvature, nowhere, unit, unknown)
    _, theta, value, _, curvature, _, _, gain = jax.lax.while_loop(goes_on, step, carry)
    values = jnp.linalg.eigvalsh(curvature)[:, 0]
    identity = jnp.broadcast_to(jnp.eye(start.shape[1], dtype=start.dtype), curvature.shape)
    covariance = jnp.linalg.solve(curvature, identity)
    covariance = 0.5 * (covariance + jnp.swapaxes(covariance, -1, -2))
    return theta, covariance, (gain <= epsilon) & (values > 0.0) & jnp.isfinite(value)
