r"""Leave-one-out predictive densities from cavities, without importance weights, and with few refits.

What an approximation ``q`` knows of a predictor without its own observation is ``q`` divided by the Gaussian site of
that observation, the cavity (Vehtari, Mononen, Tolvanen, Sivula and Winther 2016, eq. 12 to 14). The predictive density
of the observation is the integral of its factor over the cavity. For a Gaussian likelihood this is exact. Elsewhere the
sites of the other observations would move without this one, which a cavity does not know: an error of second order in
the influence of one observation. So the most influential ones are left out of fits that start from the one at hand.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import ndtri

from ....linalg.gaussian.mean_field_space import MeanFieldPosterior
from ....potentials.base import Potential
from ....potentials.vector_rows import VectorRows
from ....structure import LatentGaussianReading
from ....structure.latent_gaussian.form import LatentGaussian
from ...front.answers.resampling import LARGEST_SHAPE, pareto_smoothed
from ..algorithms.algorithm import Algorithm
from ..algorithms.posterior import GaussianPosterior
from ..algorithms.propagation.tilting import cavities
from .prediction import are_coordinates_joint, log_predictive_density, log_predictive_factors

_NUM_PLACES = 256
_LEAST_UNEVEN = 1.5
_LEAST_INFLUENCE = 0.1
"""Gain of an observation's own log density by itself, below which it has little influence on the others."""


def check_single(reading: LatentGaussianReading, var_name: str | None) -> str:
    """The observed site whose observations are to be left out.

    :param LatentGaussianReading reading: of the model.
    :param str var_name: its name; needed where there are several.
    :raises ValueError: if there is none of this name, it is a ``numpyro.factor``, or its observations have coordinates
        that depend on each other.
    """
    names = [name for name in reading.observed_names if reading.sites[name].family != "Unit"]
    if not names and var_name is None:
        check_no_factor(reading, reading.observed_names[0])
    elif var_name in reading.observed_names:
        check_no_factor(reading, var_name)
    listed = ", ".join(map(repr, names)) or "none"
    if var_name is None and len(names) != 1:
        raise ValueError(f"Give var_name, the observed site whose observations are left out; there are {listed}.")
    name = names[0] if var_name is None else var_name
    if name not in names:
        raise ValueError(f"{name!r} is no observed site that depends on the field; there are {listed}.")
    if are_coordinates_joint(reading, name):
        raise ValueError(
            f"The coordinates of an observation of {name!r} ({reading.sites[name].family}) depend on each other: one "
            "of them cannot be left out. Mask observations, and score them by draws (log_likelihood of numpyro.infer)."
        )
    return name


def check_no_factor(reading: LatentGaussianReading, name: str) -> None:
    """Refuse a ``numpyro.factor`` where single observations are asked for.

    :param LatentGaussianReading reading: of the model.
    :param str name: of an observed site.
    :raises ValueError: if it is one, with how to write it.
    """
    if reading.sites[name].family == "Unit":
        raise ValueError(
            f"The likelihood {name!r} is a numpyro.factor, which has no observations to leave out: it may be any "
            "function of the data. Write it as a distribution of them, numpyro.sample"
            f"({name!r}, Likelihood(...), obs=y): one of NumPyro's, or a class Likelihood(dist.Distribution) of your "
            "own with a method log_prob(y), which is what the factor adds for each observation."
        )


def check_cavities(values: np.ndarray) -> None:
    """Refuse scores that rest on an approximation without its own observation that is none.

    :param values: of :func:`log_leave_one_out`.
    :raises FloatingPointError: if one is ``nan``.
    """
    improper = int(np.isnan(values).sum())
    if improper:
        raise FloatingPointError(
            f"Without their own observation {improper} of {values.size} predictors have no proper distribution "
            "(a flat prior, or an observation that alone informs an unknown). Give proper priors, or use "
            "cross_validate."
        )


def log_factors_at_draws(form: LatentGaussian, posterior: GaussianPosterior) -> Array:
    """Log factors at what stands for draws of their predictors, shape ``(256, num_rows)``.

    These are evenly spaced quantiles of a single one, and draws of several, whose factor is on its first row. What is
    rarer than one in five hundred is not among them.
    """
    mean, variance = posterior.predictor_moments()
    scale = jnp.sqrt(jnp.maximum(variance, 0.0))
    quantiles = ndtri((np.arange(_NUM_PLACES) + 0.5) / _NUM_PLACES)
    places = jnp.asarray(quantiles, mean.dtype)
    found: Array = jax.lax.map(lambda z: form.log_factors(mean + z * scale), places)
    columns: list[Array] = []
    families = zip(form.potentials, form.observed, *map(form.split_rows, (mean, variance)), strict=True)
    for potential, observed, centre, square in families:
        start = sum(column.shape[1] for column in columns)
        if not isinstance(potential, VectorRows):
            columns.append(found[:, start : start + observed.shape[0]])
            continue
        centres, covariances = potential.joint_moments(centre, square)
        size, generator = centres.shape[-1], np.random.default_rng(0)
        standard = np.stack([generator.permutation(quantiles) for _ in range(size)], axis=1)
        values, vectors = jnp.linalg.eigh(covariances)
        root = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[:, None, :]

        def at(z: Array, base: Any = potential, centres: Array = centres, root: Array = root) -> Array:
            return base.on_first_row(base.base.log_density(centres + root @ z))

        columns.append(jnp.where(observed, jax.lax.map(at, jnp.asarray(standard, mean.dtype)), 0.0))
    return jnp.concatenate([jnp.zeros((_NUM_PLACES, 0), mean.dtype), *columns], axis=1)


def weights_fail(log_factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the factors whose inverse, the weight that leaves them out, has no average.

    :param log_factors: at draws, shape ``(num_draws, num_rows)``.
    :return: which vanish at some of the draws, and which have weights with a Pareto k-hat above 0.7.
    """
    vanishes = np.min(log_factors, axis=0, initial=0.0) == -np.inf
    weights = np.exp(np.min(np.where(vanishes, 0.0, log_factors), axis=0) - np.where(vanishes, 0.0, log_factors))
    # A heavy tail makes weights uneven; the rest need not be fitted.
    is_uneven = np.mean(weights**2, axis=0) > _LEAST_UNEVEN * np.mean(weights, axis=0) ** 2
    is_heavy = np.zeros_like(vanishes)
    for row in np.flatnonzero(is_uneven):
        is_heavy[row] = pareto_smoothed(-log_factors[:, row])[1] > LARGEST_SHAPE
    return vanishes, is_heavy


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
    marginals = conditioned.marginals()
    means = cavities(form, marginals, posterior.site_precision, posterior.site_shift, 1.0)
    rows = _Rows(
        marginals.mean + form.offset,
        marginals.variance,
        marginals.cavity_ratio,
        *means,
        posterior.site_precision,
        posterior.site_shift,
    )
    without, within = [], []
    for potential, observed, family in zip(
        form.potentials, form.observed, zip(*map(form.split_rows, rows), strict=True), strict=True
    ):
        leave_out = _leave_vector_out if isinstance(potential, VectorRows) else _leave_out
        value = leave_out(potential, _Rows(*family))
        without.append(jnp.where(observed, value, 0.0))
        within.append(jnp.where(observed, log_predictive_density(potential, *family[:2]), 0.0))
    empty = jnp.zeros((0,), form.offset.dtype)
    return jnp.concatenate([empty, *without]), jnp.concatenate([empty, *within])


def most_influential(without: np.ndarray, within: np.ndarray) -> np.ndarray:
    """First rows of the factors that add much to their own log density, those that add most first.

    :param without: of :func:`log_leave_one_out`, shape ``(num_rows,)``.
    :param within: of :func:`log_leave_one_out`, shape ``(num_rows,)``.
    :return: integers, shape ``(n,)``.
    """
    gain = np.nan_to_num(within - without, nan=0.0)
    rows: np.ndarray = np.argsort(-gain, kind="stable")
    return rows[: np.count_nonzero(gain > _LEAST_INFLUENCE)]


def log_refitted(
    form: LatentGaussian, algorithm: Algorithm, state: object, rows: Array, *, num_steps: int, tol: float
) -> tuple[Array, Array]:
    """Log predictive densities of factors under fits without them, one fit for each.

    :param LatentGaussian form: the model.
    :param Algorithm algorithm: that fits it.
    :param state: of the fit with all factors, from which the others start.
    :param rows: the first row of each factor that is left out, integers of shape ``(n,)``.
    :param int num_steps: of one fit at most.
    :param float tol: at which a fit stops.
    :return: densities and whether the fits converged, both of shape ``(n,)``.
    """
    sizes = [p.num_rows if isinstance(p, VectorRows) else 1 for p in form.potentials]
    # All rows of a factor of several predictors leave with their first one.
    firsts = [
        place - jnp.arange(place.size) % size
        for place, size in zip(form.split_rows(jnp.arange(form.num_rows)), sizes, strict=True)
    ]

    def refit(row: Array) -> tuple[Array, Array]:
        observed = tuple(mask & (first != row) for mask, first in zip(form.observed, firsts, strict=True))
        others = form._replace(observed=observed, kinds=None)
        found, info = algorithm.solve(others, state, num_steps=num_steps, tol=tol)
        posterior = dataclasses.replace(algorithm.posterior(others, found), covariance_family="full")
        return log_predictive_factors(form, *posterior.predictor_moments())[row], info.converged

    return jax.lax.map(refit, rows)


class _Rows(NamedTuple):
    """Moments of the rows of one family of factors."""

    mean: Array
    variance: Array
    cavity_ratio: Array
    cavity_mean: Array
    """Cavity mean of single rows, of no use to factors of several."""
    cavity_variance: Array
    site_precision: Array
    site_shift: Array


def _leave_out(potential: Potential, rows: _Rows) -> Array:
    """Log predictive densities under the cavities; ``nan`` where there is none."""
    is_pinned = rows.variance <= 0.0
    mean = jnp.where(is_pinned, rows.mean, rows.cavity_mean)
    value = log_predictive_density(potential, mean, jnp.where(is_pinned, 0.0, rows.cavity_variance))
    return jnp.where(is_pinned | (rows.cavity_ratio > 0.0), value, jnp.nan)


def _leave_vector_out(potential: Potential, rows: _Rows) -> Array:
    """The same for factors of any number of predictors, whose sites are matrices."""
    assert isinstance(potential, VectorRows)
    means, covariances = potential.joint_moments(rows.mean, rows.variance)
    precision, shift = potential.joint_site(rows.site_precision, rows.site_shift)
    remainder = jnp.eye(means.shape[-1]) - covariances @ precision
    left = jnp.linalg.solve(remainder, covariances)
    left = 0.5 * (left + left.mT)
    moved = jnp.linalg.solve(remainder, (means - jnp.einsum("nij,nj->ni", covariances, shift))[..., None])[..., 0]
    is_proper = jnp.all(jnp.linalg.eigvalsh(left) >= 0.0, axis=-1) & jnp.all(jnp.isfinite(moved), axis=-1)
    left = jnp.where(is_proper[:, None, None], left, covariances)
    value = potential.base.log_normaliser(jnp.where(is_proper[:, None], moved, means), left)
    return potential.on_first_row(jnp.where(is_proper, value, jnp.nan))
