"""Check behind ``covariance="shared"``: one covariance is exact for all independent rows of a model."""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax import Array

from ....linalg.gaussian.design import DenseDesign, OperatorRows, StateSpaceDesign
from ....linalg.gaussian.prior import is_flat
from ....linalg.gaussian.spaces.shared_space import SharedSpace
from ....structure import ModelStructureError
from ....structure.latent_gaussian.form import LatentGaussian
from .bound import expected_log_factors

_ADVICE = "Use covariance='full'."


def check_shared_covariance(forms: Iterable[LatentGaussian]) -> None:
    """Refuse models whose independent blocks do not have the same covariance at the optimum.

    They have if prior, linear map, observed cells and the curvatures of the expected log factors are the same in every
    block, and the curvatures do not depend on where they are taken (Khan 2012, section 4.5).

    :param forms: of the same model at several values of its hyperparameters, with the bounds in place.
    :raises ModelStructureError: saying what differs.
    """
    for form in forms:
        if any(is_flat(block) for block in form.prior):
            raise ModelStructureError(
                f"covariance='shared' needs proper priors, and a part of the field is flat. {_ADVICE}"
            )
        rows, columns = (np.asarray(part) for part in form.blocks)
        if np.any(rows == form.num_rows) or np.any(columns == form.num_columns):
            raise ModelStructureError(
                "covariance='shared' needs independent blocks of one size (the rows of a plate), and the "
                f"{len(rows)} blocks of this model have several. {_ADVICE}"
            )
        if isinstance(form.design, StateSpaceDesign):
            raise ModelStructureError(
                f"covariance='shared' needs independent blocks, and the steps of a scan are one. {_ADVICE}"
            )
        design = form.design
        if isinstance(design, OperatorRows):
            design = DenseDesign(design.to_dense())
        space = SharedSpace.build(form.prior, design, form.blocks.rows, form.blocks.columns)
        if not np.all(np.isfinite(space.factor)):
            raise ModelStructureError(
                "covariance='shared' needs the same prior and the same linear map in each of the "
                f"{len(rows)} independent blocks, and here they differ, or a prior is not positive definite. {_ADVICE}"
            )
        observed = np.concatenate([np.asarray(mask) for mask in form.observed])[rows]
        if np.any(observed != observed[0]):
            raise ModelStructureError(
                "covariance='shared' needs the same cells to be observed in each independent block; each pattern of "
                f"missing cells has a covariance of its own. {_ADVICE}"
            )
        here, there = (np.asarray(_curvatures(form, point))[rows] for point in (0.0, 1.0))
        if not np.allclose(here, there, rtol=1e-5, atol=1e-6) or not np.allclose(here, here[0], rtol=1e-5, atol=1e-6):
            raise ModelStructureError(
                "covariance='shared' is exact only where expected log factors are quadratic with the same curvature in "
                f"each block: bound='bohning', or a Gaussian likelihood of one noise. {_ADVICE}"
            )


def _curvatures(form: LatentGaussian, point: float) -> Array:
    """Slopes of the expected log factors in the variances, at predictors with this mean and one plus it as variance."""
    mean = jnp.full_like(form.offset, point)
    return expected_log_factors(form, mean, 1.0 + mean).variance_slope
