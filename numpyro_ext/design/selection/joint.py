"""Several observations of a Gaussian field at once: what is known of them together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
from jax import Array

from ...infer.gaussian.engine import Engine
from ..outcomes.outlooks import GaussianOutlook, Outlook
from ..outcomes.sources import outlooks
from .batches import conditional_covariance

_LARGEST = 2**27
"""Numbers in joint covariances at all points: 1 GB."""


class JointPredictors:
    """The observations of all sites, one after the other, under the joint distribution of their predictors.

    :param outlooks: by site, of one source that knows how its predictors depend on each other.
    """

    def __init__(self, outlooks: Mapping[str, GaussianOutlook]) -> None:
        self.outlooks = dict(outlooks)
        first = next(iter(self.outlooks.values()))
        assert first.joint is not None  # as the caller has asked
        self._field = first.joint
        self.is_about_hyper = first.is_about_hyper
        self.rows = np.concatenate([outlook.rows for outlook in self.outlooks.values()])
        self.is_candidate = np.concatenate([o.is_candidate.reshape(-1) for o in self.outlooks.values()])
        self.mean = np.concatenate([np.asarray(o.mean, float) for o in self.outlooks.values()], axis=1)
        """Mean of the predictors, shape ``(points, observations)``, as that of the variance."""
        self.variance = np.concatenate([np.asarray(o.variance, float) for o in self.outlooks.values()], axis=1)
        self.weights = np.asarray(first.weights, float)
        """Weights of the points."""

    def covariances(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Joint covariance of the predictors of some observations, shape ``(points, r, r)``; and what is left of it
        once the elements of interest are known, where they are a part of the field."""
        found, number = self._joint(chosen), len(chosen)
        left = None
        if self._field.num_elements:
            left = np.stack([conditional_covariance(joint, number) for joint in found])
        return found[:, :number, :number], left

    def _joint(self, chosen: np.ndarray) -> np.ndarray:
        size = len(chosen) + self._field.num_elements
        if len(self.weights) * size**2 > _LARGEST:
            raise ValueError(
                f"{len(chosen)} observations at {len(self.weights)} points of the hyperparameters have a joint "
                "covariance too large: ask about fewer, or fit with integrate='none'."
            )
        found = np.asarray(self._field.covariance(self.rows[chosen]), float)
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

    def marked(self, given: object, what: str) -> np.ndarray:
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


def are_joint(found: Mapping[str, Outlook]) -> TypeGuard[Mapping[str, GaussianOutlook]]:
    """True if it is known how all predictors depend on each other."""
    return all(isinstance(outlook, GaussianOutlook) and outlook.joint is not None for outlook in found.values())


def joint_predictors(
    source: object, args: tuple[object, ...], kwargs: Mapping[str, object], rng_key: Array | None, what: str
) -> JointPredictors:
    """Joint predictors of several observations, from a source.

    :param source: an engine on a Gaussian field after its run, draws where the field is known in closed form given
        each, or what :attr:`~numpyro_ext.design.SequentialDesign.source` is of one.
    :param args: arguments of the model at which to look; without, the candidates are the masked observations.
    :param kwargs: keyword arguments of the model.
    :param str what: the score that asks, for messages.
    :raises ValueError: for other sources, sites of several predictors, and if nothing is left to be observed.
    """
    found = outlooks(source, args, kwargs, rng_key)
    if are_joint(found):
        return JointPredictors(found)
    if isinstance(source, Engine):
        others = sorted(n for n, o in found.items() if not isinstance(o, GaussianOutlook))
        raise ValueError(
            f"The observations of {others} have several predictors each or no known outcomes: {what} has no rule for "
            "them."
        )
    raise ValueError(
        f"{what} needs the joint distribution of predictors, which a {type(source).__name__} does not know: take an "
        "engine on a Gaussian field, such as EP."
    )
