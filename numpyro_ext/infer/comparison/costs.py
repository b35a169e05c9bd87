"""Cost of one step of a Gaussian engine, from the shapes of the form alone."""

from __future__ import annotations

from ...linalg.gaussian.conditioning import choose_space
from ...linalg.gaussian.design import SparseRows
from ...linalg.sparse_cholesky import SparsePattern, analyse
from ...structure import LatentGaussianReading


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
    if form.layout is not None:
        if not isinstance(form.layout.pattern, SparsePattern):
            return f"{rows} rows, {columns} unknowns: conjugate gradients, some dozens of products a step"
        found = analyse(form.layout.pattern)
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
