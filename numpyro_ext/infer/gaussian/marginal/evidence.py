"""The log evidence as a function of hyperparameters that may be differentiated, and draws of the field given them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ....compilation.pytree import PyTree
from ....compilation.quick_jit import quick_jit
from ....compilation.store import shared
from ....structure import LatentGaussianReading
from ..algorithms.algorithm import Algorithm
from ..algorithms.fit_info import FitInfo
from .exact import exactly

Hyper = dict[str, Array]

_MOST_ROUNDS = 20
_LEAST_UNIT = 0.01
"""Smallest unit of a hyperparameter, for the steps of differences: what is closer to zero may be a location that
happens to be."""


class FieldDraws(NamedTuple):
    """One draw of the field at each of some hyperparameters."""

    sites: dict[str, Array]
    """Field and deterministic sites, with the leading axis running over the draws."""
    log_evidence: Array
    """Shape ``(num_draws,)``; minus infinity where there is no fit."""
    converged: Array
    is_inside: Array
    """True if the density of the model is positive at the draw."""


class EvidencePrograms:
    """Functions of ``(data, start, hyper)`` for one structure of models and one algorithm.

    ``data`` are the arrays of a reading, ``start`` a state of the algorithm from which every fit begins, ``hyper`` the
    hyperparameters (constrained).

    :param LatentGaussianReading reading: any reading of the structure.
    :param Algorithm algorithm: the algorithm.
    :param int num_steps: steps of one fit at most.
    :param float tol: at which the algorithm stops.
    """

    def __init__(self, reading: LatentGaussianReading, algorithm: Algorithm, num_steps: int, tol: float) -> None:
        self._reading = reading
        self._algorithm = algorithm
        self._options: dict[str, Any] = {"num_steps": num_steps, "tol": tol}
        # Traced once for all programs that it becomes a part of.
        self.value_and_gradient = jax.jit(self._value_and_gradient)
        self.draws = jax.jit(self._draws)
        self.start = quick_jit(self._start, is_small=True)

    def _start(self, data: Sequence[object], hyper: Hyper) -> Any:
        form = self._reading.form(hyper, data)
        return self._algorithm.solve(form, self._algorithm.init(form), **self._options)[0]

    def _value_and_gradient(self, data: Sequence[object], start: object, hyper: Hyper) -> tuple[Array, Hyper]:
        """The log evidence and its gradient: what is stationary is held, so nothing flows through the iteration, and
        what the fit has made at its end is not made again."""
        form, algorithm = self._reading.form(hyper, data), self._algorithm
        state, info, held = jax.lax.stop_gradient(algorithm.solve_and_hold(form, start, **self._options))

        def evidence(hyper: Hyper) -> Array:
            return algorithm.held_evidence(self._reading.form(hyper, data), state, held)

        value, gradient = jax.value_and_grad(evidence)(hyper)
        known = algorithm.known_evidence(info)
        value = value if known is None else known
        return _or_refused(self._unless_astray(value, info), gradient)

    def _unless_astray(self, value: Array, info: FitInfo) -> Array:
        """The log evidence; not a number where the last step was undone, as it led to no posterior.

        A fit that only needs more steps is near enough, and is warned of. This one is anywhere: it may be thousands of
        nats too high where Student's distribution is narrow, and a Markov chain would stay there.
        """
        if self._algorithm.is_lower_bound:
            return value
        return jnp.where(~info.converged & jnp.isinf(info.max_change), jnp.nan, value)

    def log_evidence(self, data: Sequence[object] | None, start: PyTree) -> Callable[[Hyper], Array]:
        """A function of the hyperparameters: minus infinity where the field has no fit.

        First derivatives, by both modes, are those at the fixed point of the algorithm; second ones, forward over
        anything, are central differences of these.
        """

        @jax.custom_jvp
        def fit(hyper: Hyper) -> tuple[Array, Hyper]:
            return self.value_and_gradient(data, start, hyper)

        @fit.defjvp
        def _(primals: tuple[Hyper], tangents: tuple[Hyper]) -> tuple[Any, Any]:
            ((hyper,), (direction,)) = primals, tangents
            value, gradient = fit(hyper)
            step = _difference_step(hyper, direction)
            up, down = (fit(jax.tree.map(lambda h, d, s=s: h + s * d, hyper, direction))[1] for s in (step, -step))
            curved = jax.tree.map(lambda a, b: (a - b) / (2.0 * step), up, down)
            return (value, gradient), (_inner(gradient, direction), curved)

        @jax.custom_jvp
        def log_evidence(hyper: Hyper) -> Array:
            return fit(hyper)[0]

        @log_evidence.defjvp
        def _(primals: tuple[Hyper], tangents: tuple[Hyper]) -> tuple[Array, Array]:
            value, gradient = fit(*primals)
            return value, _inner(gradient, *tangents)

        return log_evidence

    def _draws(self, data: Sequence[object], start: object, hyper: Hyper, rng_keys: Array) -> FieldDraws:
        """Fit the field at each of the hyperparameters, one after the other, and draw from it inside the support."""

        def at(inputs: tuple[Hyper, Array]) -> FieldDraws:
            hyper, rng_key = inputs
            form = self._reading.form(hyper, data)
            state, info, value = self._algorithm.fit(form, start, **self._options)
            posterior = self._algorithm.posterior(form, state)

            def draw(number: int | Array) -> tuple[Array, Array]:
                e = posterior.sample(jax.random.fold_in(rng_key, number), 1)[0]
                return e, form.log_density(e) > -jnp.inf

            def again(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                return (*draw(carry[2]), carry[2] + 1)

            first = (*draw(0), jnp.asarray(1))
            e, is_inside, _ = jax.lax.while_loop(lambda c: ~c[1] & (c[2] < _MOST_ROUNDS), again, first)
            value = self._unless_astray(value, info)
            value = jnp.where(jnp.isfinite(value), value, -jnp.inf)
            return FieldDraws(self._reading.values(hyper, e, data), value, info.converged, is_inside)

        return jax.lax.map(at, (hyper, rng_keys))


def evidence_programs(
    reading: LatentGaussianReading, algorithm: Algorithm, *, num_steps: int, tol: float
) -> EvidencePrograms:
    """The programs for this structure and algorithm, kept from an earlier model if there was one.

    :param LatentGaussianReading reading: of the model.
    :param Algorithm algorithm: with its options bound; where all factors are Gaussian, an exact one takes its place.
    :param int num_steps: steps of one fit at most.
    :param float tol: at which the algorithm stops.
    """
    return shared(EvidencePrograms, reading, exactly(algorithm, reading.abstract_form), num_steps, tol)


def _or_refused(value: Array, gradient: Hyper) -> tuple[Array, Hyper]:
    """Minus infinity, without slope, where there is no finite value: a sampler turns back there."""
    is_finite = jnp.isfinite(value)
    gradient = jax.tree.map(lambda g: jnp.where(is_finite, g, 0.0), gradient)
    return jnp.where(is_finite, value, -jnp.inf), gradient


def _inner(gradient: Mapping[str, Array], direction: Mapping[str, Array]) -> Array:
    return jnp.asarray(sum(jnp.sum(gradient[name] * direction[name]) for name in gradient))


def _difference_step(hyper: Hyper, direction: Hyper) -> Array:
    """By how many of the direction to step so that no hyperparameter moves by more than a thousandth of itself."""
    leaves = zip(jax.tree.leaves(hyper), jax.tree.leaves(direction), strict=True)
    sizes = [jnp.max(jnp.abs(d) / jnp.maximum(jnp.abs(h), _LEAST_UNIT)) for h, d in leaves]
    largest = jnp.max(jnp.stack(sizes))
    relative = 1e-3 if largest.dtype == jnp.float64 else 3e-2
    return relative / jnp.where(largest > 0.0, largest, 1.0)
