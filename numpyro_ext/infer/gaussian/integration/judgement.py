"""Messages on how hyperparameters were integrated over."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpyro.distributions import constraints

from ...front.answers.resampling import LARGEST_SHAPE, pareto_smoothed
from ...hyper.density.adaptive import effective_share
from ...hyper.space import UnconstrainedSpace
from ..fitting.point_fit import PointFit
from .mixture_marginals import MarginalMixture

LARGEST_RISE = 0.1
"""Rise of the log density above the mode that says that there is another mode."""
_LEAST_SHARE = 0.5
"""Effective share of importance weights below which hyperparameters are not as their density was taken to be."""
_NORMAL_SHARE = 0.8
"""The same where k-hat, by 64 weights, is too large as well."""
_LARGEST_TAIL = 0.3
"""Share of a variance that may lie far out."""
_LARGEST_SHIFT, _LARGEST_RATIO = 0.25, 1.4
"""Change of a mean by the last points, in standard deviations, and factor of one, that are told where the latter has a
larger error by these points than the next."""
_LARGEST_ERROR = 0.12
_LARGEST_ERROR_OF_SPREAD = 0.1
"""Relative standard error of a standard deviation that is told."""
_LEAST_FALL_OF_MODE, _LEAST_VALLEY = 7.0, 1.0
"""By how much another mode may be lower to be told, and how deep the valley is that makes it one, in logarithm."""

_LITTLE_MASS = 0.01
"""Mass of points far out on the sides, where rounding may keep fits from their tolerance, which nobody needs to know
of."""
_LOADINGS = (
    " If vectors among them multiply the field, as tastes do items' traits, name what is to be the field by "
    "`field=[...]`, or take `BilinearVG`."
)


class OppositeMode(NamedTuple):
    """Another mode of the density of the hyperparameters, with the opposite sign of one site."""

    name: str
    """The site."""
    rise: float
    """Log density there less that at the mode of the run."""
    place: np.ndarray
    """Unconstrained, shape ``(d,)``."""

    def message(self, places: np.ndarray, deviation: np.ndarray, log_evidence: float) -> tuple[str, ...]:
        """Words on an evidence that lacks this mode; none if points that are integrated over are next to it.

        :param places: the points, unconstrained, shape ``(n, d)``.
        :param deviation: standard deviations at the mode of the run, shape ``(d,)``.
        :param log_evidence: of the run.
        """
        if np.any(np.all(np.abs(places - self.place) <= deviation, axis=-1)):
            return ()
        return (
            f"The density of the hyperparameters has two modes: with the opposite sign of {self.name!r} it is "
            f"{abs(self.rise):.2g} {'above' if self.rise > 0.0 else 'below'} this one in logarithm, and lower between "
            f"them. This run is of one mode, with log evidence {log_evidence:.2f}; of two modes alike in width it "
            f"would be {log_evidence + np.logaddexp(0.0, self.rise):.2f}. A prior of one sign leaves one of them.",
        )


def opposite_mode(
    space: UnconstrainedSpace, mode: np.ndarray, fits_at: Callable[[np.ndarray], PointFit], height: Any
) -> OppositeMode | None:
    """A mode that the density has with the opposite sign of a site on the real line, if there is one.

    Cost: two fits for each such site.

    :param UnconstrainedSpace space: of the hyperparameters.
    :param mode: unconstrained, shape ``(d,)``.
    :param fits_at: the field at unconstrained hyperparameters of shape ``(n, d)``.
    :param height: log density at the mode.
    """
    names = [name for name in space.names if not space.sites[name].is_param and _is_real(space, name, mode)]
    if not names:
        return None
    turned = np.repeat(mode[None], 2 * len(names), axis=0)
    for k, name in enumerate(names):
        turned[2 * k, space.slices[name]] *= -1.0
        turned[2 * k + 1, space.slices[name]] = 0.0
    found = fits_at(turned)
    heights = np.where(np.asarray(found.converged), found.objective, -np.inf).reshape(-1, 2)
    for name, (other, between) in zip(names, heights, strict=True):
        rise = float(other - height)
        if rise > -_LEAST_FALL_OF_MODE and between < min(float(other), float(height)) - _LEAST_VALLEY:
            return OppositeMode(name, rise, turned[2 * names.index(name)])
    return None


def _is_real(space: UnconstrainedSpace, name: str, mode: np.ndarray) -> bool:
    """True if the values of a site are any real numbers, and its mode is not zero."""
    own = mode[space.slices[name]]
    transform = space.sites[name].transform
    return transform.codomain is constraints.real and bool(np.any(own != 0.0))


def bent_message(names: Sequence[str]) -> tuple[str, ...]:
    """Message on a ridge that a central composite design does not follow."""
    return (
        f"The density of the hyperparameters ({', '.join(map(repr, names))}) falls off on both sides of its mode much "
        "faster than its curvature there says, as along a bent ridge where the data know only a sum or a product of "
        "them: the central composite design does not see where it goes on. Write what is known as the hyperparameter, "
        "give values to some (hyper_values), take integrate='grid' for up to four of them, or marginalize and NUTS.",
    )


def judge_directions(size: int, space: UnconstrainedSpace) -> tuple[str, ...]:
    """Messages on directions that are left out, where ``size`` of them are integrated over."""
    number = len(space.integrable)
    if size == number:
        return ()
    return (
        f"Along {number - size} of {number} directions the density of the hyperparameters does not curve: there they "
        "are at their mode and not integrated over."
        + (_LOADINGS if any(math.prod(shape) > 1 for shape in space.shapes.values()) else ""),
    )


def judge_unfinished(is_unfinished: np.ndarray, weights: np.ndarray) -> tuple[str, ...]:
    """Messages on points at which the field did not converge, where these have much of the mass."""
    share = float(weights[is_unfinished].sum())
    if share <= _LITTLE_MASS:
        return ()
    return (
        f"At {int(is_unfinished.sum())} of {is_unfinished.size} points, which have {100 * share:.3g} % of the mass, "
        "the field did not converge.",
    )


def judge_ratios(log_ratios: np.ndarray) -> tuple[str, ...]:
    """Messages on an emulated density, by the densities at draws from it over what it says without them."""
    share, shape = effective_share(log_ratios), pareto_smoothed(log_ratios)[1]
    if share >= _LEAST_SHARE and shape <= LARGEST_SHAPE:
        return ()
    return (
        f"The density of the hyperparameters has a shape that the points do not tell: at {len(log_ratios)} more of "
        f"them it differs from what was expected, by importance weights with an effective share of {share:.2f} and "
        f"Pareto k-hat {shape:.2f}. Give tighter priors, give values to some (hyper_values), write what the "
        "data know as the hyperparameter, or marginalize and NUTS.",
    )


def judge_last_look(
    before: tuple[Mapping[str, Any], np.ndarray],
    last: tuple[Mapping[str, Any], np.ndarray],
    after: Mapping[str, tuple[Any, Any]],
) -> tuple[str, ...]:
    """Messages on hyperparameters of which the points evaluated last tell much that those before did not, and little
    for certain, as few of them have most of the variance.

    >>> half = {"tau": np.array([-1.0, 3.0])}, np.array([0.5, 0.5])
    >>> few = {"tau": np.array([0.5, 0.9, 4.0])}, np.array([0.45, 0.45, 0.1])
    >>> (message,) = judge_last_look(half, few, {"tau": (0.9, 1.0)})
    >>> message[:89]
    "The last look at the density of the hyperparameters changed much: 'tau' (mean by 0.1 stan"
    >>> judge_last_look(half, half, {"tau": (0.9, 1.0)}), judge_last_look(half, few, {"tau": (0.9, 1.9)})
    ((), ())

    :param before: values of each site at points of the density as it was known without the last ones, and weights of
        these points, which sum to one.
    :param last: the same at the points evaluated last.
    :param after: mean and standard deviation of each site as they are known now.
    """
    changed = []
    for name, moments in after.items():
        old, old_sd, _ = _moments(before[0][name], before[1])
        error = float(np.max(_moments(last[0][name], last[1])[2], initial=0.0))
        mean, sd = map(np.ravel, moments)
        is_free = (sd > 0.0) & (old_sd > 0.0)
        shift = float(np.max(np.abs(mean - old)[is_free] / sd[is_free], initial=0.0))
        ratio = max((sd[is_free] / old_sd[is_free]).tolist(), key=lambda value: abs(np.log(value)), default=1.0)
        if error > _LARGEST_ERROR and (shift > _LARGEST_SHIFT or abs(np.log(ratio)) > np.log(_LARGEST_RATIO)):
            changed.append(f"{name!r} (mean by {shift:.2g} standard deviations, these by a factor of {ratio:.2g})")
    if not changed:
        return ()
    return (
        f"The last look at the density of the hyperparameters changed much: {', '.join(changed)}. What another one "
        "would change is not known: their standard deviations, and those of the field that follow from them, are not "
        "known well. engine.sample_exactly(key) draws from the posterior.",
    )


def _moments(values: Any, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means and standard deviations over weighted points, and relative errors of the latter."""
    flat = np.reshape(np.asarray(values, float), (len(weights), -1))
    mean = weights @ flat
    squares = np.square(flat - mean)
    variance = weights @ squares
    error = 0.5 * np.sqrt(np.square(weights) @ np.square(squares - variance))
    return mean, np.sqrt(variance), error / np.where(variance > 0.0, variance, 1.0)


def judge_spreads(marginals: Mapping[str, MarginalMixture]) -> tuple[str, ...]:
    """Messages on sites of the field whose standard deviation rests on few points of the hyperparameters.

    The part of a variance that is between the points has the error of a mean of squares over independent points with
    their weights.

    >>> means, ones = np.array([[0.1], [6.0], [0.0]]), np.ones((3, 1))
    >>> (message,) = judge_spreads({"x": MarginalMixture(np.array([0.4, 0.2, 0.4]), means, ones, 0.0 * ones)})
    >>> message[:60]
    "The standard deviation of 'x' (known to 31 %) rests on few p"

    :param marginals: of each site, mixtures over the points.
    """
    uncertain = {}
    for name, mixture in marginals.items():
        weights, (mean, variance) = mixture.weights, mixture.mean_and_variance()
        squares = np.square(mixture.means - mean)
        errors = 0.5 * np.sqrt(np.square(weights) @ np.square(squares - weights @ squares))
        worst = float(np.max(errors / np.where(variance > 0.0, variance, 1.0), initial=0.0))
        if not worst <= _LARGEST_ERROR_OF_SPREAD:
            uncertain[name] = worst
    if not uncertain:
        return ()
    names = ", ".join(f"{name!r} (known to {100.0 * error:.0f} %)" for name, error in uncertain.items())
    return (
        f"The standard deviation of {names} rests on few points of the hyperparameters, far from the others, as tails "
        "are heavy: draws may have another one, mostly smaller. engine.sample_exactly(key) draws from the posterior.",
    )


def judge_normal(log_weights: np.ndarray, is_the_only_one: bool) -> tuple[str, ...]:
    """Messages on a normal approximation, by the weights that its points would have.

    :param log_weights: one for each point.
    :param bool is_the_only_one: whether no other design takes so many hyperparameters.
    """
    share, shape = effective_share(log_weights), pareto_smoothed(log_weights)[1]
    if share >= (_LEAST_SHARE if shape <= LARGEST_SHAPE else _NORMAL_SHARE):
        return ()
    remedy = (
        "Marginalize and NUTS integrate over so many" if is_the_only_one else "Take integrate='adaptive' (or 'auto')"
    )
    return (
        "The density of the hyperparameters is not normal: importance weights of its normal approximation have an "
        f"effective share of {share:.2f} and Pareto k-hat {shape:.2f}, so that means, spreads and evidence may be far "
        f"off. {remedy}.",
    )


def judge_tails(missed: Mapping[str, float], *, is_followed: bool) -> tuple[str, ...]:
    """Messages on hyperparameters whose density goes on far out, where a design has few points or none.

    >>> (message,) = judge_tails({"tau": 0.44, "noise": 0.01}, is_followed=False)
    >>> message[-122:-93]
    "'tau' (1.2 times as large) is"

    :param missed: the share of the variance of each site that lies there.
    :param bool is_followed: whether points that follow the density were taken or tried.
    """
    large = {name: share for name, share in missed.items() if not share <= _LARGEST_TAIL}  # nor a number
    if not large:
        return ()
    names = ", ".join(f"{name!r} ({math.sqrt(1.0 + share):.2g} times as large)" for name, share in large.items())
    remedy = (
        "It may have none, as its tail is heavy: ask for quantiles, or give a prior with lighter tails"
        if is_followed
        else "Take integrate='adaptive' (or 'auto'), or give a prior with lighter tails"
    )
    return (
        "The density of the hyperparameters goes on far from its mode, where points are few or none: with what lies "
        f"there the standard deviation of {names} is not what is told. {remedy}.",
    )


def highest_above_mode(heights: np.ndarray) -> int | None:
    """Index of the highest of some log densities, if it stands so far above the first, which is that of the mode, that
    there is another mode."""
    best = int(np.argmax(np.where(np.isfinite(heights), heights, -np.inf)))
    return best if heights[best] > heights[0] + LARGEST_RISE else None


def judge_points(
    objective: np.ndarray, cut: float | None, names: Sequence[str], rise: float | None = None
) -> tuple[str, ...]:
    """Messages on fits at points, of a lattice that was cut where the log density had fallen by so much.

    :param rise: of a point above the mode, whether or not of these, if there is one.
    """
    messages = []
    failed = int(np.sum(~np.isfinite(objective)))
    if failed:
        messages.append(
            f"At {failed} of {objective.size} points of the hyperparameters the evidence is not finite, or that of a "
            "field that did not converge and larger than at the mode; they are left out."
        )
    if rise is not None:
        messages.append(
            f"A point at which the field was fitted has a log density {rise:.2g} above the mode: the search ended too "
            "early, or there are several modes. Use num_restarts or other init_values."
        )
    if cut is not None:
        messages.append(
            f"The density of the hyperparameters ({', '.join(map(repr, names))}) does not fall off within "
            f"{objective.size} points of the lattice, which was cut where it has fallen by {cut:.2g} in logarithm. "
            "Where the data know only a sum or a product of them, write that as the hyperparameter. Give tighter "
            "priors, give values to some (hyper_values), or INLA a wider grid_step."
        )
    return tuple(messages)
