"""The prior of people's traits, as a fitted model has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpy.typing import NDArray
from numpyro import handlers

from .responses import FittedResponse, Replay

Floats = NDArray[np.float64]


def population_of(response: FittedResponse) -> tuple[Any, Any] | None:
    """Mean and covariance of the traits, numbers where there is one; ``None`` if people differ or are not normal."""
    replay: Any = response.answers
    found = traits_of_people(replay, response.values, replay.args, replay.kwargs)
    if found is None or not all(np.allclose(part, part[:1]) for part in found):
        return None
    mean, covariance = (part[0] for part in found)
    return (mean[0], covariance[0, 0]) if len(replay.shape) == 1 else (mean, covariance)


def traits_of_people(
    replay: Replay, values: Mapping[str, Array], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Floats, Floats] | None:
    """Prior means ``(people, traits)`` and covariances of the traits; none if they are not normal.

    :param values: of the other sites.
    :param args: arguments of the model.
    """
    with handlers.block():
        model = handlers.substitute(handlers.seed(replay.model, 0), data=dict(values))
        site = handlers.trace(model).get_trace(*args, **kwargs).get(replay.trait)
    if site is None or site["type"] != "sample":
        return None
    fn, shape = site["fn"], replay.shape
    while isinstance(fn, dist.ExpandedDistribution | dist.MaskedDistribution | dist.Independent):
        fn = fn.base_dist
    number = 1 if len(shape) == 1 else shape[1]
    if isinstance(fn, dist.Normal):
        mean = np.broadcast_to(np.asarray(fn.loc, float), shape).reshape(-1, number)
        variance = np.broadcast_to(np.asarray(fn.scale, float) ** 2, shape).reshape(-1, number)
        return mean, variance[:, :, None] * np.eye(number)
    if isinstance(fn, dist.MultivariateNormal) and len(shape) == 2:
        mean = np.broadcast_to(np.asarray(fn.loc, float), shape)
        return mean, np.broadcast_to(np.asarray(fn.covariance_matrix, float), (*shape, number))
    return None
