"""Explanation of a form that is not finite, by the site where it is not."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from ...linalg.gaussian.design import AnyDesign, DenseDesign, OperatorRows, StateSpaceDesign
from ..errors import ModelStructureError
from .form import LatentGaussian

__all__ = ["explain_not_finite"]


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


def _rows_of(design: AnyDesign) -> Array:
    if isinstance(design, StateSpaceDesign):
        # a sum that is not finite where a number in it is not
        return design.from_blocks(jnp.sum(design.states, -1) + jnp.sum(design.local, -1))[:, None]
    if isinstance(design, OperatorRows):
        return design.matvec(jnp.ones((design.num_columns,), design.weight.dtype))[:, None]
    return design.matrix if isinstance(design, DenseDesign) else design.values
