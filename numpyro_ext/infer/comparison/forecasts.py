"""Cost of a step of a Gaussian engine, and reasons to expect a slow or a biased fit, before anything is run."""

from __future__ import annotations

from ...linalg.gaussian.conditioning import choose_space
from ...linalg.gaussian.design import SparseRows
from ...linalg.sparse_cholesky.analysis import known_analysis
from ...potentials import GaussianPotential, Potential
from ...potentials.elementwise import ElementwisePotential
from ...potentials.pairs import PairPotential
from ...potentials.vector_rows import VectorRows
from ...structure import LatentGaussianReading, ModelReading
from ..gaussian.engines.inla import INLA
from ..gaussian.engines.laplace_approximation import LaplaceApproximation
from ..gaussian.variational.engine import VariationalGaussian


def gaussian_cost(reading: LatentGaussianReading) -> str:
    """The algebra of a step in words, with the multiplications of its factorisation.

    A Cholesky factorisation of ``n x n`` takes ``n^3 / 6`` multiplications, as many additions, and is done once for
    each independent block.

    :param LatentGaussianReading reading: of the model.
    """
    form = reading.abstract_form
    rows, columns = form.num_rows, form.num_columns
    (blocks, block_rows), block_columns = form.blocks.rows.shape, form.blocks.columns.shape[1]
    rows_and_columns = form.blocks.rows, form.blocks.columns
    if (layout := reading.looked_up.layout) is not None:
        if layout.elimination is not None:
            return f"{rows} rows, {columns} unknowns: conjugate gradients, some dozens of products a step"
        found = known_analysis(layout.pattern)
        work = f"one sparse Cholesky factorisation with {found.fill} entries"
        return f"{rows} rows, {columns} unknowns: {work} (about {found.flops / 2:.0e} multiplications a step)"
    space = choose_space(form.prior, form.design, *rows_and_columns, border=form.border, touched=form.touched)
    head = f"{rows} rows, {columns} unknowns: "
    if space == "state":
        return head + "one pass over the steps of the series, linear in their number"
    if space == "banded":
        return head + f"a band of {columns} unknowns is factorised, linear in them for a given width of the band"
    if space == "border":
        assert form.border is not None  # which that space is for
        (blocks, size), shared = form.border.columns.shape, form.border.shared.size
        work = f"{blocks} blocks of up to {size} unknowns that share {shared} others are factorised"
        count = blocks * size**3 / 6 + rows * shared**2
        return f"{head}{work}, linear in their number (about {float(count):.0e} multiplications a step)"
    if space == "touched":
        assert form.touched is not None  # which that space is for
        shapes = form.touched.shapes
        work = f"{sum(blocks for blocks, _ in shapes)} blocks of up to {max(size for _, size in shapes)} quantities"
        count = float(sum(blocks * size**3 for blocks, size in shapes))
        return f"{head}{work} that rows touch, linear in their number (about {count:.0e} multiplications a step)"
    size = block_rows if space == "observation" else block_columns
    of = "predictors" if space == "observation" else "unknowns"
    if blocks > 1:
        work = f"{blocks} independent blocks of up to {size} {of} are factorised, linear in their number"
    else:
        work = f"one Cholesky factorisation of {size} x {size} {of}, cubic in them"
    more = ""
    if space == "sparse":
        assert isinstance(form.design, SparseRows)  # which that space is for
        more = f"; {form.design.columns.shape[1]} entries per row"
    return f"{head}{work} (about {float(blocks * size**3 / 6):.0e} multiplications a step{more})"


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
