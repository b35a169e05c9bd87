"""Sizes at which one way to fit is preferred to another."""

from __future__ import annotations

from typing import NamedTuple

from ....compilation.quick_jit import holds_little
from ....structure import LatentGaussian
from ..algorithms.modes.damped_newton import has_constant_curvature

_MOST_SMALL_NUMBERS, _FEW_FAMILIES = 20_000, 4
"""Numbers that fit in a tenth of a second, and families of factors from which more rows do, as the compiler takes
longer for the sites of each than they take to run."""

_MANY_PAIRS = 5_000_000
"""Pairs of unknowns of a border that blocks meet, from which on their sums are worth an optimised program."""


class FitCosts(NamedTuple):
    """Thresholds by which engines with a Gaussian field choose how to fit. They change what fits cost."""

    least_probes: int = 50_000
    """Rows times hyperparameters from which curvatures come from factors held at the end of a search."""
    least_measured_rows: int = 5_001
    """Rows from which a search over a few hyperparameters measures its curvature on the way: where fits are dear."""
    most_small_rows: int = 500
    """Rows that fit in a tenth of a second."""
    most_sparse_rows: int = 2_000
    """Rows of a field with sparse factors, which are made outside of programs, up to which the same holds."""
    most_quick_numbers: int = 100_000
    """Numbers that an evaluation passes over, where it does nothing else, up to which all programs take less time than
    their optimisation, and from which it is a program of its own."""
    most_rows_apart: int = 50_000
    """Rows up to which such a program is cut in two, each of which makes the form, and the second is not optimised."""
    most_cells_apart: int = 160_000
    """The same rows where an evaluation passes over numbers alone, so that the form is little of it."""
    most_kinds: float = 0.5
    """Share of independent blocks up to which it pays to look for equal ones and to count them once."""
    most_cells_at_once: int = 320_000
    """Observations of members that are read at once, where parts of these are alike and quadrature looks at them in
    turn: from two parts on."""
    most_lanes: int = 32
    """Data sets that are fitted at once."""
    least_often: int = 8
    """Data sets of one call from which fits at points of the hyperparameters are worth an optimised program."""
    most_points: int = 20_000
    """Points of a lattice over the hyperparameters, which is cut there, and that is said."""
    most_densities: int = 10_000_000
    """Rows times draws up to which draws come with their log densities. Beyond, these are left to who asks for them,
    unless a factor may be zero at a draw."""
    most_memory: int = 16 * 2**30
    """Bytes that dense matrices of crossed effects may need."""


FIT_COSTS = FitCosts()
"""Thresholds of all engines."""


def is_small(form: LatentGaussian, costs: FitCosts = FIT_COSTS) -> bool:
    """True if fits of such a form take a tenth of a second, whatever the compiler makes of it."""
    most = costs.most_small_rows * max(1.0, len(form.potentials) / _FEW_FAMILIES)
    return form.num_rows <= most and holds_little(form, _MOST_SMALL_NUMBERS)


def adds_much(form: LatentGaussian) -> bool:
    """True if sums over pairs of unknowns that blocks meet take a good part of each fit, and the factors are Gaussian:
    the compiler takes hundreds of megabytes more for an optimised program, and the programs of others are larger."""
    met = None if form.border is None else form.border.met
    return met is not None and met.shape[0] * met.shape[1] ** 2 >= _MANY_PAIRS and has_constant_curvature(form)
