"""Choice of the expectation or bound of each observed site in a variational Gaussian fit."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ....potentials import Potential
from ....potentials.bounds.log_sum_exp import LOG_SUM_EXP_BOUNDS, log_sum_exp_bound
from ....potentials.bounds.logistic import LOGISTIC_BOUNDS, BoundedPotential, LogisticBound, logistic_bound
from ....potentials.elementwise import TemperedPotential
from ....potentials.families.categorical import LogSumExpPotential
from ....potentials.vector_rows import VectorRows
from ....structure import ModelStructureError

BoundName = str | tuple[str, ...]


class SiteBound(NamedTuple):
    """Expectation of the log factors of one site, and its kind."""

    bound: LogisticBound | str | None
    """Bound of the logistic log-partition; the name of one of log-sum-exp; or ``None`` for the expectation itself."""
    description: str
    is_lower_bound: bool
    """True if the value cannot exceed the expectation, but by the rounding of accurate quadrature."""


def check_name(name: BoundName, num_pieces: int) -> None:
    """:raises ValueError: for a bound that neither binary nor categorical factors know."""
    if isinstance(name, str) and name in LOG_SUM_EXP_BOUNDS:
        return
    if isinstance(name, str) and name not in LOGISTIC_BOUNDS:
        raise ValueError(
            f"bound must be one of {', '.join(map(repr, LOGISTIC_BOUNDS))}, or a tuple of these; for categorical sites "
            f"also {', '.join(map(repr, LOG_SUM_EXP_BOUNDS))}. Got {name!r}."
        )
    logistic_bound(name, num_pieces)


def choose_bound(site: str, potential: Potential, name: BoundName, num_pieces: int) -> SiteBound:
    """The treatment of one observed site.

    :param str site: its name, for the message.
    :param Potential potential: its factors.
    :param name: of the bound that was asked for.
    :param int num_pieces: of piecewise bounds.
    :raises ModelStructureError: if the bound does not hold for these factors.
    """
    base = potential.base if isinstance(potential, TemperedPotential) else potential
    family = type(base.base).__name__ if isinstance(base, VectorRows) else type(base).__name__
    if isinstance(base, VectorRows):
        if isinstance(base.base, LogSumExpPotential):
            key = "quadrature" if name == "exact" else name
            if not isinstance(key, str) or key not in LOG_SUM_EXP_BOUNDS:
                names = ", ".join(map(repr, ("exact", *LOG_SUM_EXP_BOUNDS)))
                raise ModelStructureError(
                    f"The bound {name!r} is one for binary logistic factors, and site {site!r} is categorical "
                    f"({family}). Choose one of {names}; or write the site as StickBreakingCategorical.",
                    site=site,
                )
            chosen = base.base.with_bound(key)
            words = "expectation by quadrature" if key == "quadrature" else f"bound {key} of log-sum-exp"
            if not log_sum_exp_bound(key).is_bound and key != "quadrature":
                words = f"approximation {key} of log-sum-exp, which is no bound"
            return SiteBound(key, words, chosen.is_lower_bound)
        if name == "exact":
            return SiteBound(None, "expectation by quadrature", base.base.is_lower_bound)
    if name == "exact":
        return SiteBound(None, "exact expectation", True)
    if isinstance(base, VectorRows) or (isinstance(name, str) and name not in LOGISTIC_BOUNDS):
        raise ModelStructureError(
            f"The bound {name!r} does not hold for site {site!r} ({family}). Treat it exactly: bound='exact', or a "
            "dictionary that names other sites only.",
            site=site,
        )
    bound = logistic_bound(name, num_pieces)
    if potential.logistic_terms() is None:
        raise ModelStructureError(
            f"The bound {bound.name!r} is one for logistic likelihoods, and the factor of site {site!r} "
            f"({family}) is none. Treat it exactly: bound='exact', or a dictionary that names other sites only.",
            site=site,
        )
    return SiteBound(bound, f"local bound {bound.name}", True)


def with_bound(potential: Potential, bound: LogisticBound | str | None) -> Potential:
    """The factors with their expectation taken by :attr:`SiteBound.bound`."""
    if bound is None:
        return potential
    if isinstance(bound, LogisticBound):
        return BoundedPotential(potential, bound)
    if isinstance(potential, TemperedPotential):
        return dataclasses.replace(potential, base=with_bound(potential.base, bound))
    assert isinstance(potential, VectorRows) and isinstance(potential.base, LogSumExpPotential)  # by choose_bound
    return VectorRows(potential.base.with_bound(bound))
