"""Sites that a run sets to a point: which they are, and when a person has to be told."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpyro.distributions import constraints

from ...hyper.space import UnconstrainedSpace
from ..results import Diagnostics
from ..running.progress import warn

_UNBOUNDED = (type(constraints.real), constraints.zero_sum)
_SIMPLEX = type(constraints.simplex)
_MOST_NAMES = 5


def point_sites(space: UnconstrainedSpace) -> tuple[str, ...]:
    """Latent sites that are learned as hyperparameters; neither ``param`` sites nor those that the user fixed.

    :param UnconstrainedSpace space: of the hyperparameters of the run.
    """
    return tuple(name for name in space.names if not space.sites[name].is_param)


def warn_of_points(diagnostics: Diagnostics, space: UnconstrainedSpace, engine: str) -> None:
    """Warn once of points whose missing uncertainty misleads: several effects, or scales at zero.

    Scales, correlations, probabilities and single parameters are what hyperparameters usually are, and pass; so do
    ``param`` sites, which have no distribution. Probabilities at zero or one are in ``diagnostics.edges`` alone.

    :param Diagnostics diagnostics: of the run.
    :param UnconstrainedSpace space: of its hyperparameters.
    :param str engine: its name, for the message.
    """
    parts = []
    effects = [name for name in diagnostics.points if _are_effects(space.sites[name])]
    if effects:
        shapes = _listed([f"{name!r} {tuple(space.sites[name].shape)}" for name in effects])
        parts.append(
            f"{shapes} has no place in the Gaussian field (its prior is not Gaussian, the predictor is not affine in "
            "it, or quadrature takes the blocks apart that it joins) and was set to a point: standard deviations of "
            "zero in get_samples() and summaries are not its uncertainty. integrate='auto' of an engine that has this "
            "option, a Normal prior, field=[...] with it in the place of what it is multiplied by, BilinearVG, which "
            "integrates over both factors of a product, or NUTS give that."
        )
    scales = [name for name in diagnostics.edges if not _is_bounded(space.sites[name])]
    if scales:
        parts.append(
            f"{_listed([repr(name) for name in scales])} ended at the edge of the support. The data do not "
            "need what it scales, which does not mean that there is none. Give a prior that keeps away from the edge, "
            "or a value (hyper_values)."
        )
    if parts:
        warn(f"{engine}: " + " ".join(parts))


def _are_effects(site: Any) -> bool:
    return math.prod(site.shape) > 1 and isinstance(_constraint(site), _UNBOUNDED)


def _is_bounded(site: object) -> bool:
    constraint = _constraint(site)
    return isinstance(constraint, _SIMPLEX) or bool(np.all(np.isfinite(getattr(constraint, "upper_bound", np.inf))))


def _constraint(site: Any) -> object:
    """Constraint of one element of a site."""
    constraint = site.transform.codomain
    while isinstance(constraint, constraints.independent):
        constraint = constraint.base_constraint
    return constraint


def _listed(words: list[str]) -> str:
    more = f" and {len(words) - _MOST_NAMES} more" if len(words) > _MOST_NAMES else ""
    return ", ".join(words[:_MOST_NAMES]) + more
