"""Squared error of the average of several posterior means, estimated from the data without the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..run import Member
from .programs import TreePrograms

# Of rows and elements at random coefficients, in units of their spread: single precision is more exact, and chance
# brings no two of a million that close in all probes.
_SAME = 1e-3
_NUM_PROBES = 4


class Risk(NamedTuple):
    r"""The squared error of the mean of a site, on the average over its elements.

    Stein's (1981) estimate of it is unbiased, and has a standard error that does not vanish beside a small risk. So all
    values between the variance of the average and that of the mixture are taken for equally probable beforehand, the
    estimate for normal, and the value is the mean given both.
    """

    estimate: float
    """Without bias; may be negative."""
    standard_error: float
    """Standard error of the estimate, from the noise."""
    lowest: float
    """The variance of the average, and zero where it has none."""
    highest: float
    """The variance of the mixture."""

    @property
    def is_between(self) -> bool:
        """True if the estimate itself is among the values that were taken for possible."""
        return self.lowest <= self.estimate <= self.highest

    @property
    def value(self) -> float:
        """The mean of a normal variable, cut off at both ends.

        :raises FloatingPointError: if something of it is no number.
        """
        from scipy.stats import truncnorm  # takes as long to import as JAX

        if not np.isfinite(self).all():
            raise FloatingPointError(
                f"The squared error cannot be estimated, as not all of this is finite: {tuple(self)}."
            )
        scale = self.standard_error
        if self.highest - self.lowest <= 1e-4 * scale:  # the data have no say, and digits would be lost
            return 0.5 * (self.lowest + self.highest)
        # Beyond thirty standard errors the mean is the nearer end to a thirtieth of one, and digits are lost.
        centre = float(np.clip(self.estimate, self.lowest - 30.0 * scale, self.highest + 30.0 * scale))
        ends = ((end - centre) / scale for end in (self.lowest, self.highest))
        return float(np.clip(truncnorm.mean(*ends, loc=centre, scale=scale), self.lowest, self.highest))

    def __str__(self) -> str:
        where = "between" if self.is_between else "not between"
        return (
            f"squared error {self.value:.3g}, from an estimate of {self.estimate:.3g} +- {self.standard_error:.2g} "
            f"that is {where} the variances of average and mixture, {self.lowest:.3g} and {self.highest:.3g}"
        )


class Seen(NamedTuple):
    """Observations of the elements of a site, each of shape ``(size,)``."""

    values: np.ndarray
    noise_variance: np.ndarray


def seen_elements(members: Sequence[Member[TreePrograms]], name: str) -> Seen:
    """The observation of each element of a site, which is the one whose mean is this element for all coefficients.

    :param members: the posteriors.
    :param str name: of the site.
    :raises ValueError: if an element has no observation of its own, or members have different ones.
    """
    from scipy.spatial import KDTree  # takes a while to import

    first: Seen | None = None
    places = np.zeros(0, int)
    for member in members:
        probes = member.programs.probes(member.inputs, name=name, num_probes=_NUM_PROBES)
        rows, elements, observed, offset, noise_variance = (np.asarray(x, float) for x in probes)
        spread = np.sqrt(np.mean(np.square(rows))) + np.finfo(float).tiny
        if first is None:
            _, places = KDTree(rows).query(elements)
        distance = np.max(np.abs(rows[places] - elements), axis=1) if len(rows) > places.max() else np.full(1, np.inf)
        num_unseen = int(np.sum(distance > _SAME * spread))
        if num_unseen:
            raise ValueError(
                f"pooling='risk' compares means with data, and {num_unseen} of the {len(elements)} elements of site "
                f"{name!r} are not what is observed with noise. Ask for pooling='mixture' or pooling='average'."
            )
        seen = Seen(observed[places] + offset, noise_variance[places])
        if first is None:
            first = seen
        elif not all(_are_close(*pair) for pair in zip(first, seen, strict=True)):
            raise ValueError(
                f"pooling='risk' compares means with data, and members have different data or noise behind site "
                f"{name!r}. Ask for pooling='mixture' or pooling='average'."
            )
    assert first is not None
    return first


def _are_close(first: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.max(np.abs(first - other)) <= 1e-4 * np.max(np.abs(first)))


def estimated_risk(
    seen: Seen, mean: np.ndarray, within: np.ndarray, between: np.ndarray, noise_variance: np.ndarray | None = None
) -> Risk:
    r"""Stein's (1981) unbiased estimate of the squared error of a posterior mean under Gaussian noise.

    .. math:: \frac{1}{n} \sum_i (y_i - m_i)^2 - \sigma_i^2 + 2 \sigma_i^2 \frac{\partial m_i}{\partial y_i}

    Under Gaussian noise :math:`\sigma_i^2\, \partial m_i / \partial y_i` is the posterior variance of element :math:`i`
    while parameters are held; for an average of means it is the average of variances within members. The standard error
    is that of :math:`\sum_i (y_i - m_i)^2` for noise alone, :math:`\sqrt{2 \sum_i \sigma_i^4} / n`: too large
    where means follow the data closely.

    It leaves out that parameters are learned from the same data, and that a model may use data twice, as in a margin of
    reflected pixels: both make the derivative larger than the variance. On the square roots of photons of one picture
    of 64 x 64 each added 4 % of the variance, and the estimate lacked four fifths of its standard error.

    :param Seen seen: data of the elements.
    :param mean: the average of the means, shape ``(size,)``.
    :param within: the average of the variances, of the same shape.
    :param between: the variance of the means, of the same shape.
    :param noise_variance: that of the data, of shape ``(size,)`` or ``(1,)``, where the model has another: variances
        within members are then divided by the model's for the derivative.
    """
    variance = np.broadcast_to(seen.noise_variance if noise_variance is None else noise_variance, mean.shape)
    terms = np.square(seen.values - mean) - variance + 2.0 * variance * (within / seen.noise_variance)
    error = np.sqrt(2.0 * np.sum(np.square(variance))) / mean.size
    inside, outside = float(np.mean(within)), float(np.mean(between))
    return Risk(float(np.mean(terms)), float(error), max(inside - outside, 0.0), inside + outside)
