"""Observations that are looked at, and log predictive densities of those that a fit has not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ....compilation.quick_jit import quick_jit
from ....compilation.store import shared
from ....potentials.base import Potential
from ....potentials.vector_rows import VectorRows
from ....structure import LatentGaussianReading
from ....structure.latent_gaussian.form import LatentGaussian

Slices = Callable[[str, tuple[int, ...]], tuple[slice, ...]]
"""Function of a site's name and its shape on all rows that gives the part of it that is asked for."""


class ObservedPart(NamedTuple):
    """The observations of a site that are looked at."""

    number: int
    """Number of the site."""
    name: str
    kept: np.ndarray
    """Numbers of these observations, in their shape."""
    size: int
    """Size of the whole site."""
    rows: np.ndarray
    """Numbers of the predictors behind them."""
    rows_per_observation: int


def observed_parts(reading: LatentGaussianReading, slices: Slices | None) -> Iterator[ObservedPart]:
    """The sites with observations, and of each what is looked at; all of it without slices."""
    start = 0
    for number, name in enumerate(reading.observed_names):
        shape, num_rows = tuple(reading.factor_shapes[number]), reading.rows_per_observation[number]
        size = int(np.prod(shape))
        first, start = start, start + size * num_rows
        if reading.sites[name].family == "Unit":
            continue
        kept = chosen(name, shape, slices)
        rows = first + (kept.reshape(-1)[:, None] * num_rows + np.arange(num_rows)).reshape(-1)
        yield ObservedPart(number, name, kept, size, rows, num_rows)


def chosen(name: str, shape: tuple[int, ...], slices: Slices | None) -> np.ndarray:
    """The numbers of the observations that are looked at, in their shape."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    return numbers if slices is None else numbers[slices(name, shape)]


class OtherField(ValueError):
    """New arguments under which the field is another one than in the fit."""


def log_predictive_factors(form: LatentGaussian, mean: Array, variance: Array) -> Array:
    r"""Log of :math:`\int t_i(\eta) N(\eta \mid m_i, v_i) d\eta` for every factor: the log tilted normaliser.

    Ko (2017), eq. (2.55).

    :param LatentGaussian form: holds the factors; masked ones are scored like the others.
    :param mean: of the predictors, shape ``(num_rows,)``.
    :param variance: of the predictors, shape ``(num_rows,)``.
    :return: shape ``(num_rows,)``.
    """
    means, variances = form.split_rows(mean), form.split_rows(variance)
    terms = [log_predictive_density(p, m, v) for p, m, v in zip(form.potentials, means, variances, strict=True)]
    return jnp.concatenate(terms) if terms else jnp.zeros((0,), mean.dtype)


def log_predictive_density(potential: Potential, mean: Array, variance: Array) -> Array:
    """The same for the factors of one family; those whose predictor is known, as where all covariates are zero, are
    their density there.

    :param Potential potential: the factors.
    :param mean: of the predictors, shape ``(n,)``.
    :param variance: of the predictors, shape ``(n,)``.
    :return: shape ``(n,)``.
    """
    if isinstance(potential, VectorRows):
        return potential.log_normaliser(mean, variance)
    is_known = variance <= 0.0
    found = potential.log_normaliser(mean, jnp.where(is_known, 1.0, variance))
    return jnp.where(is_known, potential.log_density(mean), found)


def are_coordinates_joint(reading: LatentGaussianReading, name: str) -> bool:
    """True if a vector, or matrix, that is one observation was taken apart into factors, of which none has a density of
    its own: their logarithms add up to that of the whole at given unknowns only.

    :param LatentGaussianReading reading: of the model.
    :param str name: of an observed site.
    """
    site = reading.sites[name]
    event_dim = len(site.full_shape) - len(site.batch_shape)
    observations = np.shape(site.value)[: np.ndim(site.value) - event_dim]
    num_observations = max(np.prod(site.batch_shape), np.prod(observations))
    num_factors = np.prod(reading.factor_shapes[reading.factor_names.index(name)])
    return site.has_joint_coordinates or bool(event_dim and num_factors > num_observations)


def by_site(reading: LatentGaussianReading, values: ArrayLike, scored: ArrayLike | None = None) -> dict[str, Array]:
    """Cut values of all rows into the observed sites, with zero where nothing is to be scored or no value is known.

    The rows of one observation are added up, which treats the sticks of a stick-breaking one as independent.

    :param reading: names, shapes and values of the observed sites.
    :param values: one per factor, shape ``(num_rows,)``.
    :param scored: boolean, which factors to keep; same shape. All of them if left out.
    :return: from site name to an array in the shape of the site's observations.
    :raises ValueError: if values are to be scored of observations whose coordinates depend on each other.
    :raises FloatingPointError: if a kept value is ``nan``; the message names the site.
    """
    out, start = {}, 0
    values = np.asarray(values)  # NumPy compiles nothing
    families = zip(reading.factor_names, reading.factor_shapes, reading.rows_per_observation, strict=True)
    for name, shape, num_rows in families:
        if name not in reading.observed_names:  # priors, which stand behind all observations
            break
        stop = start + int(np.prod(shape)) * num_rows
        has_value = np.repeat(reading.has_value(name).reshape(-1), num_rows)
        is_scored = has_value if scored is None else np.asarray(scored)[start:stop] & has_value
        if scored is not None and are_coordinates_joint(reading, name) and is_scored.any():
            if reading.sites[name].family == "Unit":
                raise ValueError(
                    f"The likelihood {name!r} is a numpyro.factor that adds up its observations, so that none can be "
                    "scored by itself. Write it as a distribution of them (see engine.loo), or add its terms inside a "
                    "plate: with numpyro.plate('rows', n): numpyro.factor(...)."
                )
            raise ValueError(
                f"The coordinates of an observation of site {name!r} ({reading.sites[name].family}) depend on each "
                "other, and predictors are scored one by one. Score it by draws: log_likelihood of numpyro.infer, of "
                "engine.get_samples(), has its density at each of them."
            )
        kept = np.where(is_scored, values[start:stop], 0.0).astype(values.dtype)
        if np.isnan(kept).any():
            raise FloatingPointError(
                f"The log predictive density of site {name!r} is nan at "
                f"{int(np.isnan(kept).sum())} observations: are its predictor and scale finite there?"
            )
        out[name] = jnp.asarray(kept.reshape(*shape, num_rows).sum(-1))
        start = stop
    return out


def check_same_unknowns(fitted: LatentGaussianReading, new: LatentGaussianReading, hyper: dict[str, Array]) -> None:
    """Refuse new arguments under which the field is another one than in the fit.

    :param fitted: reading of the fit.
    :param new: reading of the new arguments.
    :param dict hyper: all hyperparameters, constrained.
    :raises OtherField: if sites, shapes or priors of the field differ, or a hyperparameter is missing.
    """
    advice = "Give the model all inputs at once, and mask the observations that are to be predicted."
    old_shapes = {name: tuple(fitted.site_shapes[name]) for name in fitted.field}
    new_shapes = {name: tuple(new.site_shapes[name]) for name in new.field}
    if old_shapes != new_shapes:
        raise OtherField(
            f"On the new arguments the field has the sites {new_shapes}, in the fit it has {old_shapes}. {advice}"
        )
    if set(new.hyper) != set(hyper):
        raise OtherField(
            f"On the new arguments the hyperparameters are {sorted(new.hyper)}, in the fit they are {sorted(hyper)}."
        )
    # Affine functions of the same unknowns are the same where their values are, at zero and at a random point.
    at = np.random.default_rng(0).standard_normal(fitted.num_columns)
    points = np.asarray([np.zeros_like(at), at], jnp.result_type(float))
    (old_values, old_priors), (new_values, new_priors) = (_field_at(r, hyper, points) for r in (fitted, new))
    for name in fitted.field:
        if not _same(old_values[name], new_values[name]):
            raise OtherField(f"The prior mean of field site {name!r} is another one on the new arguments. {advice}")
    if not _same(old_priors, new_priors):
        raise OtherField(f"The prior of the field {list(fitted.field)} is another one on the new arguments. {advice}")


def _field_at(reading: LatentGaussianReading, hyper: dict[str, Array], points: np.ndarray) -> tuple[Any, Any]:
    """Values of the field sites at some unknowns, and the priors, by one program instead of one for each operation."""

    return shared(_field_of, reading)(hyper, points, reading.data)


def _field_of(reading: LatentGaussianReading) -> Callable[..., tuple[Any, Any]]:
    def look(hyper: dict[str, Array], points: Array, data: Sequence[object]) -> tuple[Any, Any]:
        form = reading.form(hyper, data)
        values = jax.vmap(lambda e: {n: reading.values(hyper, e, data)[n] for n in reading.field})(points)
        # Priors that are not Gaussian are the factors behind those of observations.
        return values, (form.prior, form.potentials[len(reading.observed_names) :])

    return quick_jit(look, is_small=True)


def _same(old: object, new: object) -> bool:
    old_structure: Any = jax.tree.structure(old)
    if old_structure != jax.tree.structure(new):
        return False
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    return all(jnp.shape(x) == jnp.shape(y) and np.allclose(x, y, rtol=1e-5, atol=1e-8) for x, y in pairs)
