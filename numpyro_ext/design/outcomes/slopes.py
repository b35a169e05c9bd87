"""Information of observations with Gaussian noise about hyperparameters, by one fit and its derivatives (Houlsby
2014, section 3.3): to first order, or by the marginal Gaussian process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...infer.gaussian.engine import Engine
from ...infer.gaussian.predictive_moments import LocalMoments, hyper_covariance, local_moments
from ...infer.gaussian.runs.run import GaussianRun
from .focus import Focus, named_sites
from .outlooks import RealOutlook

Hyper = Literal["mixture", "linearised", "mgp"]
SlopeRule = Literal["linearised", "mgp"]


def slope_outlooks(
    engine: Engine,
    run: GaussianRun,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    focus: Focus | None,
    hyper: SlopeRule,
) -> dict[str, RealOutlook]:
    r"""Entropies of observations, and those that are expected once the focus is known.

    With the variance :math:`V(\Sigma)` of an observation under hyperparameters of covariance :math:`\Sigma` (see
    :func:`~numpyro_ext.infer.predictive_moments`, with ``target="y"``), all hyperparameters leave the variance at their
    optimum (Houlsby 2014, eq. 3.13), some of them :math:`V` with the covariance that the others have given these, and
    hyperparameters and field together the variance of the noise.

    :raises ValueError: if the focus is a part of the field, or the derivatives are not known.
    """
    covariance = hyper_covariance(engine, hyper)
    chosen = None if focus is None else _chosen(run, focus, hyper)
    is_about_field, numbers = chosen if chosen is not None else (True, np.arange(len(covariance)))
    left = _given(covariance, numbers)

    def known(local: LocalMoments) -> Array:
        """The variance of an observation once the focus is known."""
        if is_about_field:
            return local.noise
        return local.at_optimum("y") if len(numbers) == len(covariance) else local.widened(left, hyper, "y")

    out = {}
    for name, local in local_moments(engine, args, kwargs).items():
        is_candidate = np.ones(local.mean.shape, bool)
        if not (args or kwargs):
            is_candidate = ~np.asarray(run.reading.known_mask(name)).reshape(local.mean.shape)
        entropy, conditional = (
            0.5 * jnp.log(2.0 * jnp.pi * jnp.e * variance.reshape(-1))
            for variance in (local.widened(covariance, hyper, "y"), known(local))
        )
        out[name] = RealOutlook(
            name=name, shape=local.mean.shape, is_candidate=is_candidate, entropy=entropy, conditional=conditional
        )
    return out


def _chosen(run: GaussianRun, focus: Focus, hyper: str) -> tuple[bool, np.ndarray]:
    """True if the field is in focus, and the numbers of the unconstrained hyperparameters that are."""
    named, space, reading = named_sites(run, focus), run.space, run.reading
    of_field = {name: indices for name, indices in named.items() if name not in reading.hyper}
    fixed = sorted(name for name in named if name in space.fixed)
    if fixed:
        raise ValueError(f"focus names {fixed}, to which hyper_values gives values: nothing can be learned of them.")
    numbers = []
    for name in (name for name in named if name in reading.hyper):
        part = np.arange(space.size)[space.slices[name]]
        indices, shape = named[name], tuple(reading.hyper[name].shape)
        if indices is not None:
            if part.size != int(np.prod(shape)):
                raise ValueError(
                    f"The elements of {name!r} are not free of each other, so that none of them is a hyperparameter of "
                    "its own: put all of it in focus."
                )
            try:
                part = part.reshape(shape)[indices]
            except IndexError as error:
                raise ValueError(f"focus asks for {name!r}[{indices!r}], whose shape is {shape}.") from error
        numbers.append(part.reshape(-1))
    found = np.unique(np.concatenate(numbers)) if numbers else np.zeros(0, int)
    is_whole = set(reading.field) <= {name for name, indices in of_field.items() if indices is None}
    if of_field and not (is_whole and len(found) == space.size):
        raise ValueError(
            f"hyper={hyper!r} is for a focus on hyperparameters, or on all unknowns, and this one has "
            f"{sorted(of_field)} in it. Leave out the field, or take hyper='mixture'."
        )
    return bool(of_field), found


def _given(covariance: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The covariance that is left once some of the hyperparameters are known."""
    cross = covariance[:, numbers]
    values, vectors = np.linalg.eigh(cross[numbers])
    kept = values > 1e-12 * max(values.max(initial=0.0), 0.0)
    explained = cross @ vectors[:, kept]
    left: np.ndarray = covariance - (explained / values[kept]) @ explained.T
    left[numbers], left[:, numbers] = 0.0, 0.0
    return left
