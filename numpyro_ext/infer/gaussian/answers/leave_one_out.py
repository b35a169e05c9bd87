r"""Leave-one-out predictive densities from cavities: no refit, and no importance weights.

What an approximation ``q`` knows of a predictor without its own observation is ``q`` divided by the Gaussian site of
that observation, the cavity (Vehtari, Mononen, Tolvanen, Sivula and Winther 2016, eq. 12 to 14). The predictive density
of the observation is the integral of its factor over the cavity. For a Gaussian likelihood this is exact.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ....linalg.gaussian.mean_field_space import MeanFieldPosterior
from ....potentials.vector_rows import VectorRows, row_directions
from ....structure import LatentGaussianReading
from ....structure.latent_gaussian.form import LatentGaussian
from ..algorithms.posterior import GaussianPosterior

__all__ = ["check_cavities", "check_single", "log_leave_one_out"]

_VECTORS = ("MultivariateNormal", "LowRankMultivariateNormal")


def check_single(reading: LatentGaussianReading, var_name: str | None) -> str:
    """The observed site whose observations are to be left out.

    :param LatentGaussianReading reading: of the model.
    :param str var_name: its name; needed where there are several.
    :raises ValueError: if there is none of this name, or its observations have coordinates that depend on each other.
    """
    names = [name for name in reading.observed_names if reading.sites[name].family != "Unit"]
    listed = ", ".join(map(repr, names)) or "none"
    if var_name is None and len(names) != 1:
        raise ValueError(f"Give var_name, the observed site whose observations are left out; there are {listed}.")
    name = names[0] if var_name is None else var_name
    if name not in names:
        raise ValueError(f"{name!r} is no observed site that depends on the field; there are {listed}.")
    if reading.sites[name].family in _VECTORS:
        raise ValueError(
            f"The coordinates of an observation of {name!r} ({reading.sites[name].family}) depend on each other: one "
            "of them cannot be left out. Use cross_validate, or mask observations and score them by log_predictive()."
        )
    return name


def check_cavities(values: Array) -> None:
    """Refuse scores that rest on an approximation without its own observation that is none.

    :param values: of :func:`log_leave_one_out`.
    :raises FloatingPointError: if one is ``nan``.
    """
    improper = int(jnp.sum(jnp.isnan(values)))
    if improper:
        raise FloatingPointError(
            f"Without their own observation {improper} of {values.size} predictors have no proper distribution "
            "(a flat prior, or an observation that alone informs an unknown). Give proper priors, or use "
            "cross_validate."
        )


def log_leave_one_out(form: LatentGaussian, posterior: GaussianPosterior) -> tuple[Array, Array]:
    r"""Log predictive densities of every factor, without and with its own observation.

    Without it they are :math:`\log \int t_i(\eta) q^{\setminus i}(\eta) d\eta`, with it
    :math:`\log \int t_i(\eta) q(\eta) d\eta`. A factor of several predictors is left out with all its rows.

    :param LatentGaussian form: the model.
    :param GaussianPosterior posterior: sites and what conditions on them.
    :return: two arrays of shape ``(num_rows,)``, the first ``nan`` where the cavity is improper and zero where a mask
        removes the factor.
    """
    # Where unknowns are independent in the approximation, the Gaussian of the same sites has the cavities.
    conditioned = dataclasses.replace(posterior, covariance_family="full").condition()
    assert not isinstance(conditioned, MeanFieldPosterior)  # as asked
    mean, variance, ratio, _ = conditioned.marginals()
    rows = mean + form.offset, variance, ratio, posterior.site_precision, posterior.site_shift
    without, within = [], []
    parts = [form.split_rows(values) for values in rows]
    for number, (potential, observed) in enumerate(zip(form.potentials, form.observed, strict=True)):
        moments = _Rows(*(part[number] for part in parts))
        if isinstance(potential, VectorRows):
            left, is_proper = _leave_vector_out(potential, moments)
        else:
            left, is_proper = _leave_out(moments)
        value = jnp.where(is_proper, potential.log_normaliser(*left), jnp.nan)
        without.append(jnp.where(observed, value, 0.0))
        within.append(jnp.where(observed, potential.log_normaliser(moments.mean, moments.variance), 0.0))
    empty = jnp.zeros((0,), mean.dtype)
    return jnp.concatenate([empty, *without]), jnp.concatenate([empty, *within])


class _Rows(NamedTuple):
    """Of the rows of one family of factors."""

    mean: Array
    variance: Array
    cavity_ratio: Array
    site_precision: Array
    site_shift: Array


def _leave_out(rows: _Rows) -> tuple[tuple[Array, Array], Array]:
    """Moments of the predictors without their sites, and whether there are such."""
    mean, variance, ratio, _, shift = rows
    is_pinned = variance <= 0.0
    is_proper = ratio > 0.0
    safe = jnp.where(is_proper & ~is_pinned, ratio, 1.0)
    left = jnp.where(is_pinned, mean, (mean - variance * shift) / safe), jnp.where(is_pinned, 0.0, variance / safe)
    return left, is_proper | is_pinned


def _leave_vector_out(potential: VectorRows, rows: _Rows) -> tuple[tuple[Array, Array], Array]:
    """The same for factors of several predictors, whose sites are matrices; moments are those of the rows."""
    mean, variance, _, precision, shift = rows
    size = potential.base.dimension
    directions = np.zeros((potential.num_rows, size))
    for row, (added, taken) in enumerate(row_directions(size)):
        directions[row, added] = 1.0
        if taken >= 0:
            directions[row, taken] = -1.0
    matrix = jnp.einsum("nr,ri,rj->nij", precision.reshape(-1, potential.num_rows), directions, directions)
    vector = shift.reshape(-1, potential.num_rows) @ directions
    means, covariances = potential.joint_moments(mean, variance)
    remainder = jnp.eye(size) - covariances @ matrix
    left = jnp.linalg.solve(remainder, covariances)
    left = 0.5 * (left + left.swapaxes(-1, -2))
    moved = jnp.linalg.solve(remainder, (means - jnp.einsum("nij,nj->ni", covariances, vector))[..., None])[..., 0]
    is_proper = jnp.all(jnp.linalg.eigvalsh(left) >= 0.0, axis=-1) & jnp.all(jnp.isfinite(moved), axis=-1)
    left = jnp.where(is_proper[:, None, None], left, covariances)
    moved = jnp.where(is_proper[:, None], moved, means)
    variances = jnp.einsum("ri,nij,rj->nr", directions, left, directions)
    return ((moved @ directions.T).reshape(-1), variances.reshape(-1)), jnp.repeat(is_proper, potential.num_rows)
