"""How far one posterior is from another, site by site."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .contestants import Moments

__all__ = ["Gaps", "gaps_between"]


class Gaps(NamedTuple):
    """Differences of means, in standard deviations of the reference, and ratios of standard deviations to its."""

    largest_mean: float = np.nan
    median_mean: float = np.nan
    farthest_sd: float = np.nan
    """The ratio that is farthest from one, in logarithms; zero for a site that was set to a point."""
    median_sd: float = np.nan
    at: str = ""
    """The site of the largest difference of means."""


def gaps_between(found: Moments, reference: Moments) -> Gaps:
    """Gaps over all elements of the sites that both have in equal shapes and that vary under the reference.

    :param found: mean and standard deviation by site.
    :param reference: the same of the reference.
    """
    names, means, ratios = [], [], []
    for name, (mean, sd) in found.items():
        if name not in reference or np.shape(reference[name][0]) != np.shape(mean):
            continue
        of_mean, of_sd = (np.asarray(value, float).reshape(-1) for value in reference[name])
        varies = of_sd > 1e-10 * (1.0 + np.abs(of_mean))
        means.append((np.abs(np.asarray(mean).reshape(-1) - of_mean)[varies]) / of_sd[varies])
        ratios.append(np.asarray(sd).reshape(-1)[varies] / of_sd[varies])
        names += [name] * int(varies.sum())
    if not names:
        return Gaps()
    gap, ratio = np.concatenate(means), np.concatenate(ratios)
    with np.errstate(divide="ignore"):
        farthest = int(np.argmax(np.abs(np.log(ratio))))
    worst = int(np.argmax(gap))
    return Gaps(float(gap[worst]), float(np.median(gap)), float(ratio[farthest]), float(np.median(ratio)), names[worst])
