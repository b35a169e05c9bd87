"""Mixtures, with equal weights, of posteriors under several values of arguments of the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..front.engine import check_at_least
from ..front.sites import SitePosterior
from ..front.state import Fit
from ..hyper.space import UnconstrainedSpace
from .tree_programs import TreePrograms

__all__ = ["Member", "MixtureSite", "check_average", "combined_fit", "label", "order", "shares"]


class Member(NamedTuple):
    """The posterior under one choice of the arguments that are averaged over."""

    arguments: dict[str, Any]
    """What the model got besides the arguments of the run."""
    reading: Any
    space: UnconstrainedSpace
    programs: TreePrograms
    projection: Any
    fit: Fit

    @property
    def inputs(self) -> tuple[Any, dict[str, Array], Any, Any]:
        """The first arguments of every program."""
        return self.reading.data, self.fit.hyper, self.projection, self.fit.last_state.state


class MixtureSite(SitePosterior):
    """A site under a mixture with equal weights, each member of which has an exact mean."""

    def __init__(
        self, name: str, shape: tuple[int, ...], members: Sequence[Member], rng_key: Array, num_samples: int
    ) -> None:
        self._members, self._rng_key, self._num_samples = members, rng_key, num_samples
        super().__init__(name, shape, moments=self._known_moments, covariance=self._full_covariance, sample=self._mixed)

    @cached_property
    def _means(self) -> Array:
        """Means of the members, shape ``(num_members, size)``."""
        return jnp.stack([m.programs.site_mean(*m.inputs, name=self.name) for m in self._members])

    @cached_property
    def _all_draws(self) -> list[Array]:
        """Draws of each member."""
        return self._draw_members(self._rng_key, self._num_samples)

    def _draw_members(self, rng_key: Array, num_samples: int) -> list[Array]:
        return [
            m.programs.draw_site(*m.inputs, key, name=self.name, num_samples=share)
            for key, share, m in shares(rng_key, self._members, num_samples)
        ]

    @property
    def mean(self) -> Array:
        """Posterior mean, in the shape of the site."""
        return jnp.mean(self._means, axis=0).reshape(self.shape)

    @cached_property
    def _variance(self) -> Array:
        means = self._means
        if all(m.programs.has_exact_variance(self.name) for m in self._members):
            parts = [m.programs.site_variance(*m.inputs, name=self.name) for m in self._members]
        else:
            parts = [jnp.mean(jnp.square(d - mean), axis=0) for d, mean in zip(self._all_draws, means, strict=True)]
        between = jnp.mean(jnp.square(means - jnp.mean(means, axis=0)), axis=0)
        variance = sum(parts[1:], parts[0]) / len(parts) + between
        if not bool(jnp.all(jnp.isfinite(variance))):
            raise FloatingPointError(f"The posterior of site {self.name!r} is not finite, although the evidence is.")
        return variance

    def _known_moments(self) -> tuple[Array, Array]:
        return self.mean.reshape(-1), self._variance

    def _full_covariance(self) -> Array:
        parts = [m.programs.site_covariance(*m.inputs, name=self.name) for m in self._members]
        centered = self._means - jnp.mean(self._means, axis=0)
        return (sum(parts[1:], parts[0]) + centered.T @ centered) / len(parts)

    def _mixed(self, rng_key: Array, num_samples: int) -> Array:
        draws = jnp.concatenate(self._draw_members(rng_key, num_samples))
        return draws[order(rng_key, len(self._members), num_samples)]

    def quantile(self, q: ArrayLike) -> Array:
        """Quantiles of each element, of the ``num_samples`` draws of the run.

        :param q: probability, or array of probabilities, inside (0, 1).
        :return: of shape ``q.shape + shape``.
        :raises ValueError: if a probability is outside (0, 1).
        """
        q = np.asarray(q, float)
        if not np.all((q > 0.0) & (q < 1.0)):
            raise ValueError(f"Quantiles need probabilities inside (0, 1), got {q}.")
        draws = np.concatenate([np.asarray(d) for d in self._all_draws])
        return jnp.asarray(np.quantile(draws, q, axis=0), self.mean.dtype).reshape(q.shape + self.shape)


def shares(rng_key: Array, members: Sequence[Member], num_samples: int) -> Iterable[tuple[Array, int, Member]]:
    """Equal numbers of draws of all members, in all at least as many as asked for."""
    share = -(-num_samples // len(members))
    return ((key, share, m) for key, m in zip(jax.random.split(rng_key, len(members)), members, strict=True))


def order(rng_key: Array, num_members: int, num_samples: int) -> Array:
    """Which of the draws to keep, in random order."""
    total = num_members * -(-num_samples // num_members)
    return jax.random.permutation(jax.random.fold_in(rng_key, 3), total)[:num_samples]


def label(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={np.asarray(value).tolist()!r}" for name, value in arguments.items())


def check_average(
    model: Callable[..., Any], num_shifts: int | None, average_over: Mapping[str, Sequence[Any]] | None
) -> dict[str, tuple[Any, ...]]:
    """Refuse averages over arguments that the model does not have.

    :return: the values of each argument.
    :raises ValueError: saying which.
    """
    if num_shifts is not None:
        check_at_least(1, num_shifts=num_shifts)
    average = {name: tuple(values) for name, values in dict(average_over or {}).items()}
    empty = [name for name, values in average.items() if not values]
    if empty:
        raise ValueError(f"average_over[{empty[0]!r}] holds no values.")
    if "shift" in average and num_shifts is not None:
        raise ValueError("Give either num_shifts or average_over={'shift': [...]}, not both.")
    names = [*average, *(() if num_shifts is None else ("shift",))]
    parameters = inspect.signature(model).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return average
    for name in names:
        if name not in parameters:
            option = "num_shifts" if name == "shift" and num_shifts is not None else "average_over"
            raise ValueError(
                f"{option} needs a model with an argument {name!r}; {getattr(model, '__name__', 'this one')} has "
                f"{', '.join(parameters) or 'none'}. A shift rolls the image: jnp.roll(image, shift, axes)."
            )
    return average


def combined_fit(learned: Sequence[Member], members: Sequence[Member]) -> Fit:
    """The fit of the mixture: hyperparameters of each combination, and the average of the evidences."""
    values = np.array([member.fit.log_evidence for member in members])
    log_evidence = float(np.logaddexp.reduce(values) - np.log(values.size))
    messages: list[str] = []
    seen: dict[int, Member] = {id(member): member for member in (*learned, *members)}
    for member in seen.values():
        prefix = label(member.arguments)
        messages += [f"{prefix}: {m}" if prefix else m for m in member.fit.diagnostics.messages]
    first = learned[0].fit
    diagnostics = first.diagnostics._replace(
        converged=all(m.fit.diagnostics.converged for m in seen.values()),
        objective_trace=values,
        max_change=max(m.fit.diagnostics.max_change for m in seen.values()),
        messages=tuple(messages),
        edges=tuple(dict.fromkeys(name for member in learned for name in member.fit.diagnostics.edges)),
    )
    return first._replace(log_evidence=log_evidence, diagnostics=diagnostics)
