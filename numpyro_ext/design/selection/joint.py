"""Several observations of a Gaussian field at once: what is known of them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...infer.front.running.progress import warn
from ...infer.gaussian.algorithms.posterior import GaussianPosterior
from ...infer.gaussian.engine import Engine
from ...infer.gaussian.run import GaussianRun
from ..outcomes.focus import EVERYTHING, Focus, Interest, as_focus, joint_covariance
from ..outcomes.outlooks import GaussianOutlook, Outlook
from ..outcomes.points import gaussian_outlooks
from ..outcomes.pool import Pool
from ..outcomes.sources import check_candidates, run_at
from .batches import conditional_covariance

__all__ = ["JointPredictors", "flattened", "joint_predictors"]

_LARGEST = 2**27
"""Numbers in joint covariances at all points: 1 GB."""


class JointPredictors:
    """The observations of all sites, one after the other, under the joint distribution of their predictors.

    :param outlooks: by site.
    :param covariance: of the numbers of some predictors of the fit their joint covariance, shape ``(points, n, n)``,
        with the elements of interest behind them.
    :param Interest interest: what is to be learned.
    """

    def __init__(
        self,
        outlooks: Mapping[str, GaussianOutlook],
        covariance: Callable[[np.ndarray], np.ndarray],
        interest: Interest = EVERYTHING,
    ) -> None:
        self.outlooks, self.interest = dict(outlooks), interest
        self._covariance = covariance
        self.rows = np.concatenate([outlook.rows for outlook in self.outlooks.values()])
        self.is_candidate = np.concatenate([o.is_candidate.reshape(-1) for o in self.outlooks.values()])
        self.mean = np.concatenate([np.asarray(o.mean, float) for o in self.outlooks.values()], axis=1)
        """Of the predictors, shape ``(points, observations)``; as the variance."""
        self.variance = np.concatenate([np.asarray(o.variance, float) for o in self.outlooks.values()], axis=1)
        self.weights = np.asarray(next(iter(self.outlooks.values())).weights, float)
        """Of the points."""

    def covariances(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Joint covariance of the predictors of some observations, shape ``(points, r, r)``; and what is left of it
        once the elements of interest are known, where they are a part of the field."""
        found, number = self._joint(chosen), len(chosen)
        left = None
        if self.interest.elements:
            left = np.stack([conditional_covariance(joint, number) for joint in found])
        return found[:, :number, :number], left

    def _joint(self, chosen: np.ndarray) -> np.ndarray:
        size = len(chosen) + sum(len(numbers) for numbers in self.interest.elements.values())
        if len(self.weights) * size**2 > _LARGEST:
            raise ValueError(
                f"{len(chosen)} observations at {len(self.weights)} points of the hyperparameters have a joint "
                "covariance too large: ask about fewer, or fit with integrate='none'."
            )
        found = np.asarray(self._covariance(self.rows[chosen]), float)
        if not np.isfinite(found).all():
            raise FloatingPointError("The joint covariance of some predictors is not finite.")
        return found

    def parts(self, chosen: np.ndarray) -> list[tuple[GaussianOutlook, np.ndarray]]:
        """Some observations as outlooks, site by site, and which of them these are."""
        found, start = [], 0
        for outlook in self.outlooks.values():
            size = outlook.is_candidate.size
            here = np.flatnonzero((chosen >= start) & (chosen < start + size))
            if len(here):
                found.append((outlook.part(chosen[here] - start), here))
            start += size
        return found

    def by_site(self, values: np.ndarray, chosen: np.ndarray) -> dict[str, np.ndarray]:
        """Scores of some observations in the shapes of their sites, minus infinity elsewhere."""
        every = np.full(self.is_candidate.size, -np.inf)
        every[chosen] = values
        found, start = {}, 0
        for name, outlook in self.outlooks.items():
            size = outlook.is_candidate.size
            found[name] = outlook.shaped(every[start : start + size])
            start += size
        return found

    def marked(self, given: Any, what: str) -> np.ndarray:
        """Booleans of all observations, given in the shape of the site, or of several by name.

        :raises ValueError: if they have another shape.
        """
        return flattened(given, self.outlooks, what, False)


def flattened(given: Any, outlooks: Mapping[str, Outlook], what: str, default: bool | float) -> np.ndarray:
    """Numbers or booleans of the observations of all sites, one site after the other.

    :param given: in the shape of the observations, or one for all; by their names where there are several sites.
    :param str what: they are, for messages.
    :param default: of sites that are not named, and of the kind that is wanted.
    :raises ValueError: if they have another shape or kind.
    """
    if isinstance(given, Mapping):
        unknown = sorted(set(given) - set(outlooks))
        if unknown:
            raise ValueError(f"{what} names {unknown}; observed sites are {list(outlooks)}.")
    elif len(outlooks) > 1 and np.ndim(given) > 0:
        raise ValueError(f"{what} of several sites must be a dictionary by their names {list(outlooks)}.")
    parts = []
    for name, outlook in outlooks.items():
        value = np.asarray(given.get(name, default) if isinstance(given, Mapping) else given)
        is_kind = value.dtype == bool if isinstance(default, bool) else value.dtype.kind in "iuf"
        if not is_kind or value.shape not in ((), outlook.shape):
            kind = "booleans" if isinstance(default, bool) else "numbers"
            raise ValueError(
                f"{what} must hold {kind} in the shape of the observations {outlook.shape} of {name!r}; got "
                f"{value.dtype} of shape {value.shape}."
            )
        parts.append(np.broadcast_to(value, outlook.shape).reshape(-1))
    return np.concatenate(parts)


def joint_predictors(
    source: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rng_key: Array | None,
    what: str,
    focus: Focus | None = None,
) -> JointPredictors:
    """What a source knows of observations together.

    :param source: an engine on a Gaussian field after its run, or what
        :attr:`~numpyro_ext.design.SequentialDesign.source` is of one.
    :param args: arguments of the model at which to look; without, the candidates are the masked observations.
    :param kwargs: keyword arguments of the model.
    :param str what: the score that asks, for messages.
    :param focus: what is to be learned, as for :func:`~numpyro_ext.design.expected_information_gain`.
    :raises ValueError: for other sources, sites of several predictors, and if nothing is left to be observed.
    """
    if isinstance(source, Pool):
        if args or kwargs or focus is not None:
            raise ValueError("A pool has the candidates that it was made with, and everything in focus.")
        pooled: dict[str, GaussianOutlook] = source.outlooks()  # type: ignore[assignment]  # as all of a pool are
        check_candidates(pooled)
        joint = np.asarray(source.covariances())
        return JointPredictors(pooled, lambda rows: joint[:, rows[:, None], rows])
    run = source._finished() if isinstance(source, Engine) else None
    if not (isinstance(source, Engine) and isinstance(run, GaussianRun)):
        raise ValueError(
            f"{what} needs the joint distribution of predictors, which a {type(source).__name__} does not know: take "
            "an engine on a Gaussian field, such as EP."
        )
    if not source.diagnostics.converged:
        warn(f"{type(source).__name__} has not converged, and scores are of the posterior that it has.")
    interest = as_focus(run, focus)
    at, slices = run_at(source, run, args, kwargs, jax.random.key(0) if rng_key is None else rng_key)
    interest = interest.moved(run.reading, at.reading)
    found, others = gaussian_outlooks(at, slices=slices)
    if others:
        raise ValueError(
            f"The observations of {sorted(others)} have several predictors each or no known outcomes: {what} has no "
            "rule for them."
        )
    check_candidates(found)

    def covariance(rows: np.ndarray) -> np.ndarray:
        parts = []
        for _, inputs in at.weighted_points():
            posterior, *_ = at.programs.rows(*inputs)
            if not isinstance(posterior, GaussianPosterior):
                raise ValueError(f"A {type(posterior).__name__} has no joint covariance: use EP.")
            design = posterior.form.design.to_dense()[jnp.asarray(rows)]
            if interest.elements:
                design = jnp.concatenate([design, interest.design(at, inputs[1])])
            parts.append(np.asarray(joint_covariance(posterior, design)))
        return np.stack(parts)

    return JointPredictors(found, covariance, interest)
