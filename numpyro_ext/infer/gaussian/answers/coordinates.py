"""Coordinates of a posterior in which it is nearly standard normal: hyperparameters, and the field given these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from ....structure import LatentGaussianReading
from ...hyper.space import UnconstrainedSpace
from ..algorithms.held_sites import FieldGiven, HeldSites, field_given, hold
from ..algorithms.posterior import GaussianPosterior

_WIDEST = 10.0
"""Largest scale of an unconstrained hyperparameter, where its curvature says little."""


@dataclass(frozen=True, eq=False)
class HyperCoordinates:
    """Map from independent standard normal numbers to the hyperparameters of a model whose field is integrated out.

    They are whitened by the curvature of their density at its mode.

    :ivar reading: of the model.
    :ivar space: of its hyperparameters.
    :ivar mode: unconstrained hyperparameters of the fit, shape ``(d,)``; ``param`` sites stay there.
    :ivar scale: from whitened to unconstrained hyperparameters that are sampled, shape ``(k, k)``.
    """

    reading: LatentGaussianReading
    space: UnconstrainedSpace
    mode: Array
    scale: Array

    has_field: ClassVar[bool] = False

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return len(self.scale)

    @property
    def names(self) -> tuple[str, ...]:
        """Sample sites that the coordinates stand for."""
        return tuple(name for name in self.space.names if not self.space.sites[name].is_param)

    @property
    def held(self) -> dict[str, Any]:
        """Values of hyperparameters that are not sampled: ``param`` sites, and those that were given."""
        values = self.space.unpack(self.mode)
        return {name: value for name, value in values.items() if name not in self.names}

    @property
    def left_out(self) -> tuple[str, ...]:
        """Latent sites that the coordinates do not move, and what is computed from them."""
        return self.reading.field

    @property
    def num_replaced(self) -> int:
        """Number of site approximations of negative precision, in whose place stand tangents: there are none."""
        return 0

    def values(self, white: Array) -> tuple[dict[str, Array], Array]:
        """Values of the sites in :attr:`names` and of given hyperparameters, and the log volume of those that are
        sampled per unit volume of the coordinates.

        :param white: shape ``(size,)``.
        """
        vector = self._vector(white)
        log_volume = self.space.log_volume(vector) + jnp.linalg.slogdet(self.scale)[1]
        hyper = self.space.unpack(vector)
        return {name: value for name, value in hyper.items() if not self.space.sites[name].is_param}, log_volume

    def log_ratios(self, white: Array) -> dict[str, Array]:
        """Log factors over their approximations: there are none."""
        del white
        return {}

    def _vector(self, white: Array) -> Array:
        """Unconstrained hyperparameters."""
        return self.mode.at[self.space.integrable].add(self.scale @ white[: len(self.scale)])


@dataclass(frozen=True, eq=False)
class FieldCoordinates(HyperCoordinates):
    """Map from independent standard normal numbers to the sites of a model.

    The first numbers are hyperparameters, as of :class:`HyperCoordinates`; the others are the field, whitened by its
    covariance at these hyperparameters with the sites of the fit held.

    :ivar sites: of the fit.
    """

    sites: HeldSites

    has_field: ClassVar[bool] = True

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return super().size + self.reading.num_columns

    @property
    def names(self) -> tuple[str, ...]:
        """Sample sites that the coordinates stand for."""
        return *super().names, *self.reading.field

    @property
    def left_out(self) -> tuple[str, ...]:
        """Latent sites on which nothing else depends, and what is computed from them."""
        return self.reading.behind_predictive

    @property
    def num_replaced(self) -> int:
        """Number of site approximations of negative precision, in whose place stand tangents."""
        return int(self.sites.num_replaced)

    def values(self, white: Array) -> tuple[dict[str, Array], Array]:
        """Values as those of :class:`HyperCoordinates`, with the field."""
        hyper, log_volume = super().values(white)
        given, field = self._given(white)
        unknowns, log_scale = field.place(white[len(self.scale) :])
        sites = self.reading.values(given, unknowns, self.reading.data)
        return {**hyper, **{name: sites[name] for name in self.reading.field}}, log_volume + log_scale

    def log_ratios(self, white: Array) -> dict[str, Array]:
        """Log factors over their Gaussian sites by observed site, up to a constant for each factor, in the shape of the
        observations and with an axis behind where these have several rows each."""
        _, field = self._given(white)
        eta = field.form.predictor(field.from_white(white[len(self.scale) :]))
        difference = field.form.log_factors(eta) - field.log_sites(eta)
        reading, out, start = self.reading, {}, 0
        families = zip(reading.observed_names, reading.factor_shapes, reading.rows_per_observation, strict=False)
        for name, shape, num_rows in families:
            stop = start + int(np.prod(shape)) * num_rows
            out[name] = difference[start:stop].reshape(*shape, *((num_rows,) if num_rows > 1 else ()))
            start = stop
        return out

    def _given(self, white: Array) -> tuple[dict[str, Array], FieldGiven]:
        hyper = self.space.unpack(self._vector(white))
        return hyper, field_given(self.reading.form(hyper, self.reading.data), self.sites)


def root_of(covariance: np.ndarray | None, places: np.ndarray) -> np.ndarray:
    """Root of the covariance of some of the unconstrained hyperparameters; one along directions without curvature."""
    if covariance is None:
        return np.eye(len(places))
    variances, vectors = np.linalg.eigh(covariance[np.ix_(places, places)])
    rounding = len(places) * np.finfo(variances.dtype).eps * np.max(variances, initial=0.0)
    is_known = np.isfinite(variances) & (variances > rounding)
    return vectors * np.minimum(np.sqrt(np.where(is_known, variances, 1.0)), _WIDEST)


def hyper_coordinates(
    reading: LatentGaussianReading, space: UnconstrainedSpace, hyper: tuple[Array, np.ndarray | None]
) -> HyperCoordinates:
    """Coordinates of the hyperparameters of a fit.

    :param LatentGaussianReading reading: of the model.
    :param UnconstrainedSpace space: of its hyperparameters.
    :param hyper: center and covariance of the unconstrained ones; ``None`` where it is not known.
    """
    center, covariance = hyper
    return HyperCoordinates(reading, space, center, jnp.asarray(root_of(covariance, space.integrable)))


def field_coordinates(
    reading: LatentGaussianReading,
    space: UnconstrainedSpace,
    posterior: GaussianPosterior,
    mean: Array,
    hyper: tuple[Array, np.ndarray | None],
) -> FieldCoordinates:
    """Coordinates of a fit.

    Further parameters are those of :func:`hyper_coordinates`.

    :param posterior: of the field at the fit.
    :param mean: of the predictors there.
    :raises ValueError: if a field has no such coordinates.
    """
    if reading.half_lines:
        raise ValueError(
            f"Coefficients on a half line ({', '.join(reading.half_lines)}) are no map of normal numbers: name the "
            "other sites of the field, field=[...], so that these are hyperparameters."
        )
    sites, of_hyper = hold(posterior, mean), hyper_coordinates(reading, space, hyper)
    return FieldCoordinates(reading.for_held_sites(), space, of_hyper.mode, of_hyper.scale, sites)
