"""Distance of one posterior from another, site by site, and the part of it that is Monte Carlo error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpyro.diagnostics import effective_sample_size

NUM_ERRORS = 3.0
"""Standard errors of the reference within which a gap is noise; the largest of many elements is often beyond two."""
_FEWEST_DRAWS = 8

Moments = dict[str, tuple[np.ndarray, np.ndarray]]
"""Means and standard deviations by site."""
Errors = dict[str, tuple[np.ndarray, np.ndarray]]
"""Standard errors by site: of the mean in standard deviations, and of the standard deviation relative to it."""


class Gaps(NamedTuple):
    """Differences of means, in standard deviations of the reference, and ratios of standard deviations to its."""

    largest_mean: float = np.nan
    median_mean: float = np.nan
    farthest_sd: float = np.nan
    """Ratio that is farthest from one, in logarithms; zero for a site that was set to a point."""
    median_sd: float = np.nan
    at: str = ""
    """Site of the largest difference of means."""
    mean_error: float = np.nan
    """Standard error of the reference in ``largest_mean``; nan where it is unknown."""
    sd_error: float = np.nan
    """Standard error of the reference in ``farthest_sd``; nan where it is unknown."""


def gaps_between(found: Moments, reference: Moments, errors: Errors | None = None) -> Gaps:
    """Gaps over all elements of the sites that both have in equal shapes and that vary under the reference.

    Where errors are given, the largest gap is the one that exceeds its error the most.

    :param found: mean and standard deviation by site.
    :param reference: the same of the reference.
    :param errors: Monte Carlo errors of the reference by site, or ``None`` where they are unknown.
    """
    names, means, ratios, mean_errors, sd_errors = [], [], [], [], []
    for name, (mean, sd) in found.items():
        if name not in reference or np.shape(reference[name][0]) != np.shape(mean):
            continue
        of_mean, of_sd = (np.asarray(value, float).reshape(-1) for value in reference[name])
        varies = of_sd > 1e-10 * (1.0 + np.abs(of_mean))
        means.append((np.abs(np.asarray(mean).reshape(-1) - of_mean)[varies]) / of_sd[varies])
        ratios.append(np.asarray(sd).reshape(-1)[varies] / of_sd[varies])
        unknown = np.full(of_mean.shape, np.nan)
        of_site = (errors or {}).get(name, (unknown, unknown))
        mean_errors.append(np.asarray(of_site[0]).reshape(-1)[varies])
        sd_errors.append(np.asarray(of_site[1]).reshape(-1)[varies])
        names += [name] * int(varies.sum())
    if not names:
        return Gaps()
    gap, ratio = np.concatenate(means), np.concatenate(ratios)
    mean_error, sd_error = np.concatenate(mean_errors), np.concatenate(sd_errors)
    with np.errstate(divide="ignore"):
        distance = np.abs(np.log(ratio))
    farthest, worst = _most_beyond(distance, sd_error), _most_beyond(gap, mean_error)
    return Gaps(
        largest_mean=float(gap[worst]),
        median_mean=float(np.median(gap)),
        farthest_sd=float(ratio[farthest]),
        median_sd=float(np.median(ratio)),
        at=names[worst],
        mean_error=float(mean_error[worst]),
        sd_error=float(sd_error[farthest]),
    )


def _most_beyond(gap: np.ndarray, error: np.ndarray) -> int:
    """Place of the gap that exceeds its error the most; of the largest one, where none does."""
    beyond = gap - NUM_ERRORS * np.nan_to_num(error)
    return int(np.argmax(beyond if beyond.max() > 0.0 else gap))


def monte_carlo_errors(draws: Mapping[str, np.ndarray]) -> Errors:
    """Standard errors of means and standard deviations that are computed from draws, by their autocorrelation.

    :param draws: by site, ``(chains, draws, ...)``; sites that are not of real numbers are left out.
    :return: errors of each element; nan where it does not move or where there are too few draws to tell.
    """
    out: Errors = {}
    for name, values in draws.items():
        if not np.issubdtype(values.dtype, np.floating) or values.shape[1] < _FEWEST_DRAWS:
            continue
        with np.errstate(all="ignore"):
            centred = (values - values.mean((0, 1))) / values.std((0, 1))
            squares = centred**2
            of_mean = 1.0 / np.sqrt(effective_sample_size(centred))
            of_sd = 0.5 * squares.std((0, 1)) / np.sqrt(effective_sample_size(squares))
        out[name] = of_mean, of_sd
    return out


def largest_errors(errors: Errors) -> tuple[float, float]:
    """Largest error of a mean, in standard deviations, and of a standard deviation, relative to it.

    :param errors: by site.
    :return: both; nan where no error is known.
    """
    found = []
    for place in (0, 1):
        known = [np.ravel(of_site[place]) for of_site in errors.values()]
        every = np.concatenate(known) if known else np.empty(0)
        every = every[np.isfinite(every)]
        found.append(float(every.max()) if every.size else np.nan)
    return found[0], found[1]
