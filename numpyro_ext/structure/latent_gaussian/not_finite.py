"""Explanation of a form that is not finite, or has no digits left, by the site where it is so."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from ...linalg.gaussian.design import AnyDesign, DenseDesign, OperatorRows, StateSpaceDesign
from ..errors import ModelStructureError
from .form import LatentGaussian


def explain_not_finite(form: LatentGaussian, field: Sequence[str], factors: Sequence[str], at: str) -> None:
    """Refuse a form whose prior or predictors are not finite.

    :param form: at the hyperparameters that are told of.
    :param field: sites of its unknowns.
    :param factors: sites of its factors.
    :param at: the hyperparameters, in words.
    :raises ModelStructureError: naming the site, if there is one.
    """
    for name, block in zip(field, form.prior, strict=True):
        leaves = jax.tree.leaves(block)
        if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in leaves):
            raise ModelStructureError(f"the prior of site '{name}' has parameters that are not finite{at}.", site=name)
        if not bool(jnp.isfinite(block.log_density(jnp.zeros((block.size,))))):
            raise ModelStructureError(
                f"the covariance of site '{name}' is not positive definite{at}: add a jitter to its diagonal "
                "(1e-6 of its largest entry, in float32 1e-4), check the kernel for duplicate inputs, or give "
                "hyperparameters at which it is through init_values or hyper_values.",
                site=name,
            )
    rows = jnp.concatenate([form.offset[:, None], _rows_of(form.design)], axis=1)
    bad = ~jnp.all(jnp.isfinite(rows), axis=1)
    for name, part in zip(factors, form.split_rows(bad), strict=True):
        if bool(jnp.any(part)):
            row = int(jnp.argmax(part))
            raise ModelStructureError(
                f"the predictor of site '{name}' is not finite in {int(part.sum())} rows (the first is {row}): "
                "check the covariates for NaN or infinity, or mask the rows and set their covariates to zero.",
                site=name,
            )


def explain_rounding(form: LatentGaussian, factors: Sequence[str], tolerance: float) -> None:
    """Refuse predictors so far from zero that rounding them changes the log density.

    :param form: at some hyperparameters.
    :param factors: sites of its factors.
    :param tolerance: relative difference of two log densities that is no rounding.
    :raises ModelStructureError: naming the site.
    """
    value, slopes = jax.value_and_grad(lambda eta: jnp.sum(form.log_factors(eta)))(form.offset)
    errors = jnp.finfo(form.offset.dtype).eps * jnp.abs(form.offset * slopes)
    if not float(jnp.sum(errors)) > 0.1 * tolerance * (1.0 + abs(float(value))):
        return
    name, part, offset = max(
        zip(factors, form.split_rows(errors), form.split_rows(form.offset), strict=True),
        key=lambda found: float(jnp.sum(found[1])),
    )
    row = int(jnp.argmax(part))
    wider = "Use float64 (numpyro.enable_x64() at the start of the program), or take" if _is_single(form) else "Take"
    raise ModelStructureError(
        f"{form.offset.dtype} has too few digits for the predictors of site '{name}': row {row} has the offset "
        f"{float(offset[row]):.3g}, and rounding such numbers changes the log density by up to "
        f"{float(jnp.sum(errors)):.2g}. {wider} the offset out of the predictor: subtract it from the data as well, "
        "or give exposures in units in which predictors are near zero.",
        site=name,
    )


def _is_single(form: LatentGaussian) -> bool:
    return form.offset.dtype == jnp.float32


def _rows_of(design: AnyDesign) -> Array:
    if isinstance(design, StateSpaceDesign):
        # a sum that is not finite where a number in it is not
        return design.from_blocks(jnp.sum(design.states, -1) + jnp.sum(design.local, -1))[:, None]
    if isinstance(design, OperatorRows):
        return design.matvec(jnp.ones((design.num_columns,), design.weight.dtype))[:, None]
    return design.matrix if isinstance(design, DenseDesign) else design.values
