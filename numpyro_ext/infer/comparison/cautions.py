"""Reasons to expect a slow or a biased fit, from the likelihoods of a model and the shapes of its form."""

from __future__ import annotations

from ...potentials import GaussianPotential, Potential
from ...potentials.elementwise import ElementwisePotential
from ...potentials.pairs import PairPotential
from ...potentials.vector_rows import VectorRows
from ...structure import LatentGaussianReading, ModelReading
from ..gaussian.inla import INLA
from ..gaussian.laplace_approximation import LaplaceApproximation
from ..gaussian.variational.engine import VariationalGaussian

MANY_ROWS = 10
"""Rows per unknown from which posteriors under log-concave likelihoods have little skewness."""


def caution(engine: object, reading: ModelReading) -> str:
    """Reasons to expect a slow or a biased fit of a model by an engine that takes it.

    :param engine: an engine, not run.
    :param ModelReading reading: of the model.
    :return: sentences without their last full stop; empty where nothing is known against the engine.
    """
    if not isinstance(reading, LatentGaussianReading):
        return ""
    form = reading.abstract_form
    factors = dict(zip(reading.factor_names, form.potentials, strict=True))
    is_laplace, few_rows = isinstance(engine, LaplaceApproximation), form.num_rows < MANY_ROWS * form.num_columns
    notes = []
    if not is_laplace:
        notes += [f"slow: {site!r} {why}" for site, factor in factors.items() if (why := _integrals(factor))]
    curved = [site for site, factor in factors.items() if not isinstance(_base(factor), GaussianPotential)]
    modes = [site for site in curved if not factors[site].is_log_concave]
    if is_laplace and modes:
        notes.append(f"biased: {_listed(modes)} is not log-concave, so the mode may lie far from the mean")
    elif is_laplace and curved and few_rows and not isinstance(engine, INLA):
        notes.append(
            f"biased: {form.num_rows} rows for {form.num_columns} unknowns under {_listed(curved)}, so the mode may be "
            "off the mean by a share of a standard deviation"
        )
    if isinstance(engine, VariationalGaussian) and curved and few_rows:
        notes.append("biased: standard deviations come out a little too small")
    return "; ".join(notes)


def _integrals(factor: Potential) -> str:
    """Integrals that take long, of a factor in every step of an algorithm that integrates over it."""
    base = _base(factor)
    if isinstance(base, PairPotential):
        return "is a function of two predictors without a family, integrated over the plane in every step"
    if isinstance(base, ElementwisePotential):
        return "has no family, so its integrals take some dozens of nodes in every step"
    return ""


def _base(factor: Potential) -> object:
    return factor.base if isinstance(factor, VectorRows) else factor


def _listed(sites: list[str]) -> str:
    return ", ".join(map(repr, sites))
