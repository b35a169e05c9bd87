"""Agreement of an approximation with exact draws, site by site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ...display import Shown, Table
from .gaps import Errors, Moments

TOLERANCE = 0.1
"""Gap of means in standard deviations, and relative gap of standard deviations, within which an approximation holds."""
_NUM_ERRORS = 4.0
_FAR_WIDER = 3.0
"""Ratio of standard deviations from which on the draws may be of one mode of several."""


class SiteAgreement(NamedTuple):
    """Gap between approximation and exact draws at the element of a site where it is largest beyond its error."""

    gap: float
    """Mean of the approximation less that of the draws, in standard deviations of the draws."""
    gap_error: float
    ratio: float
    """Standard deviation of the approximation over that of the draws; zero of a site that was set to a point."""
    ratio_error: float
    word: str
    """``"holds"``, ``"off"``, or ``"unknown"`` where there are too few draws to tell."""


class Agreement(Shown, Mapping[str, SiteAgreement]):
    """Agreement by site; its text is a table with a verdict.

    It compares with what the chains have reached: of a mode that none of them has seen it says nothing, and
    :class:`~numpyro_ext.infer.SMC` may.

    :param sites: by name.
    """

    def __init__(self, sites: Mapping[str, SiteAgreement]) -> None:
        self._sites = dict(sites)

    def __getitem__(self, name: str) -> SiteAgreement:
        return self._sites[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    @property
    def word(self) -> str:
        """``"holds"`` where all sites do, ``"off"`` where some site is, else ``"unknown"``."""
        words = {site.word for site in self._sites.values()}
        return next((word for word in ("off", "unknown") if word in words), "holds" if words else "unknown")

    @property
    def verdict(self) -> str:
        """Sentence on all sites."""
        off = [name for name, site in self._sites.items() if site.word == "off"]
        least = {name: site.ratio - _NUM_ERRORS * site.ratio_error for name, site in self._sites.items()}
        wider = [name for name in off if least[name] > _FAR_WIDER]
        if wider:
            return (
                f"The approximation is off at {', '.join(off)}, and far wider than the draws at {', '.join(wider)}: it "
                "is too wide, or the chains have stayed at one of several modes. Compare SMC before you use the draws."
            )
        if off:
            return f"The approximation is off at {', '.join(off)}: use the exact draws."
        if self.word == "unknown":
            return "Too few draws to tell whether the approximation holds."
        return f"The approximation holds: means within {TOLERANCE} sd and sds within {TOLERANCE:.0%}, up to the errors."

    def _shown(self) -> list[str | Table]:
        rows = [
            [name, f"{s.gap:.3f} ± {s.gap_error:.3f}", f"{s.ratio:.3f} ± {s.ratio_error:.3f}", s.word]
            for name, s in self._sites.items()
        ]
        return [self.verdict, Table(["site", "gap of means, sd", "ratio of sds", "approximation"], rows)]


def agreement_between(found: Moments, exact: Moments, errors: Errors) -> Agreement:
    """Agreement of the moments of an approximation with those of exact draws.

    :param found: mean and standard deviation by site, of the approximation.
    :param exact: the same of the draws.
    :param errors: Monte Carlo errors of the draws by site, relative to their standard deviations; those of other sites
        are unknown.
    """
    sites = {}
    for name, moments in found.items():
        if name not in exact or np.shape(exact[name][0]) != np.shape(moments[0]):
            continue
        (mean, sd), (other, other_sd) = ([np.ravel(x).astype(float) for x in pair] for pair in (moments, exact[name]))
        varies = other_sd > 1e-10 * (1.0 + np.abs(other))
        if not varies.any():
            continue
        gap, ratio = (mean - other)[varies] / other_sd[varies], sd[varies] / other_sd[varies]
        unknown = np.full(other.shape, np.nan)
        gap_error, sd_error = (np.ravel(error)[varies] for error in errors.get(name, (unknown, unknown)))
        # An error that is not known, of a chain that did not move, is no small one.
        gap_error, ratio_error = (np.where(np.isfinite(e), e, np.inf) for e in (gap_error, ratio * sd_error))
        at, where = _worst(np.abs(gap), gap_error), _worst(np.abs(ratio - 1.0), ratio_error)
        pairs = (np.abs(gap), gap_error), (np.abs(ratio - 1.0), ratio_error)
        if any(np.any(size - _NUM_ERRORS * error > TOLERANCE) for size, error in pairs):
            word = "off"
        elif all(np.all((size <= TOLERANCE + 2.0 * error) & (error <= 0.5 * TOLERANCE)) for size, error in pairs):
            word = "holds"
        else:
            word = "unknown"
        sites[name] = SiteAgreement(
            float(gap[at]), float(gap_error[at]), float(ratio[where]), float(ratio_error[where]), word
        )
    return Agreement(sites)


def _worst(size: np.ndarray, error: np.ndarray) -> int:
    """Place where a gap exceeds its error most."""
    return int(np.argmax(np.where(np.isfinite(error), size - error, -np.inf)))
