"""Digits that single precision does not keep of a posterior, found by conditioning on its sites in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import sparse

from ....compilation.quick_jit import quick_jit
from ....compilation.store import shared
from ....linalg.gaussian.design import DenseDesign, SparseRows
from ....linalg.gaussian.prior import DiagonalPrior, FlatPrior
from ....structure import LatentGaussianReading
from ....structure.latent_gaussian import AffineMap
from ....structure.latent_gaussian.form import LatentGaussian
from ...front.state import Fit
from ..algorithms.posterior import GaussianPosterior
from .fitting_programs import FittingPrograms
from .flat_directions import names_of_blocks

_MOST_UNKNOWNS = 400
"""Unknowns up to which their covariance takes next to no time on the host."""
_LARGEST_ERROR = 0.1
"""Change of a mean in standard deviations, or of the logarithm of a deviation, that matters."""
_LEAST_ROUNDING = 3e-3
"""Rounding of the covariance, relative to its entries, below which nothing is looked at."""
_TYPICAL_PRECISION = 100.0
"""Precision of a site by which that rounding is foreseen."""


def with_lost_digits(reading: LatentGaussianReading, programs: FittingPrograms, fit: Fit) -> Fit:
    """The fit, which has not converged where single precision has lost the digits of its posterior.

    Columns that are nearly alike, as an intercept and years that were not centred, make coefficients whose large errors
    cancel in the predictors: steps get small, and the coefficients are wrong. Looked at are fields of up to 400
    unknowns that are independent given the hyperparameters. Cost: their covariance on the host, and one small program
    where columns are nearly alike; nothing in double precision.

    :param LatentGaussianReading reading: of the model.
    :param FittingPrograms programs: compiled for its structure.
    :param Fit fit: the outcome of a run.
    """
    abstract = reading.abstract_form
    is_plain = isinstance(abstract.design, DenseDesign | SparseRows)
    is_plain &= all(isinstance(block, DiagonalPrior | FlatPrior) for block in abstract.prior)
    if abstract.offset.dtype != jnp.float32 or not is_plain or reading.num_columns > _MOST_UNKNOWNS:
        return fit
    if not fit.diagnostics.converged:
        return fit
    form = reading.compiled_form(fit.hyper)
    precision = _precision(form, np.full(form.num_rows, _TYPICAL_PRECISION))
    scale = 1.0 / np.sqrt(np.maximum(np.diag(precision), np.finfo(float).tiny))
    least = np.linalg.eigvalsh(precision * scale * scale[:, None])[0]
    if least * _LEAST_ROUNDING > np.finfo(np.float32).eps:
        return fit
    found = shared(_moments, programs)(reading.data, fit.hyper, fit.last_state.state)
    message = None if found is None else _message(reading, form, *(np.asarray(part, float) for part in found))
    if message is None:
        return fit
    ended = fit.diagnostics
    return fit._replace(diagnostics=ended._replace(converged=False, messages=(*ended.messages, message)))


def _moments(programs: FittingPrograms) -> Callable[..., tuple[Array, ...] | None]:
    """Precisions and shifts of the sites, and mean and variance of the unknowns; nothing of other posteriors."""

    def moments(data: Any, hyper: dict[str, Array], state: Any) -> tuple[Array, ...] | None:
        posterior = programs.posterior(data, hyper, state)
        if not isinstance(posterior, GaussianPosterior) or posterior.covariance_family != "full":
            return None
        size, dtype = posterior.form.design.num_columns, posterior.form.offset.dtype
        unknowns = AffineMap(DenseDesign(jnp.eye(size, dtype=dtype)), jnp.zeros(size, dtype))
        return posterior.site_precision, posterior.site_shift, *posterior.mean_and_variance(unknowns)

    return quick_jit(moments, is_small=True)


def _entries(form: LatentGaussian) -> Any:
    """The design as a sparse matrix in double precision."""
    design = form.design
    if isinstance(design, DenseDesign):
        return sparse.csr_array(np.asarray(design.to_dense(), float))
    assert isinstance(design, SparseRows)  # as was asked
    columns, values = np.asarray(design.columns), np.asarray(design.values, float)
    rows = np.repeat(np.arange(columns.shape[0]), columns.shape[1])
    shape = design.num_rows, design.num_columns
    return sparse.coo_array((values.ravel(), (rows, columns.ravel())), shape=shape).tocsr()


def _precision(form: LatentGaussian, sites: np.ndarray) -> np.ndarray:
    """Precision of the unknowns in double precision, given that of the sites."""
    entries = _entries(form)
    prior = [
        1.0 / np.asarray(block.variance, float) if isinstance(block, DiagonalPrior) else np.zeros(block.size)
        for block in form.prior
    ]
    weighted = sparse.diags_array(sites) @ entries
    return np.diag(np.concatenate(prior)) + np.asarray((entries.T @ weighted).toarray())


def _message(
    reading: LatentGaussianReading,
    form: LatentGaussian,
    site_precision: np.ndarray,
    site_shift: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
) -> str | None:
    """A sentence on the unknown whose moments are furthest from those in double precision, if they are far."""
    precision = _precision(form, site_precision)
    scale = 1.0 / np.sqrt(np.abs(np.diag(precision)))
    try:
        root = np.linalg.cholesky(precision * scale * scale[:, None])
    except np.linalg.LinAlgError:  # no posterior at all, of which others speak
        return None
    inverse = np.linalg.inv(root)
    covariance = inverse.T @ inverse * scale * scale[:, None]
    exact = covariance @ (_entries(form).T @ (site_shift - site_precision * np.asarray(form.offset, float)))
    deviation = np.sqrt(np.diag(covariance))
    shift = np.abs(mean - exact) / deviation
    ratio = np.sqrt(np.maximum(variance, 0.0)) / deviation
    with np.errstate(divide="ignore"):
        error = np.maximum(shift, np.abs(np.log(ratio)))
    worst = int(np.argmax(error))
    if not error[worst] > _LARGEST_ERROR:
        return None
    ends = np.cumsum([block.size for block in form.prior])
    site = names_of_blocks(reading, form)[int(np.searchsorted(ends, worst, side="right"))]
    return (
        f"Single precision has lost the digits of the posterior of site {site!r}: its mean is {shift[worst]:.2g} "
        f"standard deviations away from what its sites say in double precision, and its standard deviation is "
        f"{ratio[worst]:.2g} times that. Columns that are nearly alike are the cause, as an intercept and years about "
        "2000 are: take off the mean of such a covariate, or call numpyro.enable_x64() at the start of the program."
    )
