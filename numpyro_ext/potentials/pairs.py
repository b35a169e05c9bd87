"""Factors of two predictors given by any function of them: location and log scale, rate and zero inflation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from ..linalg.in_range import rows_of
from .base import potential
from .integrals.several_predictors.few_rows import for_few_rows
from .integrals.several_predictors.pair_quadrature import NUM_OUTER, expectation, tilted_moments
from .integrals.several_predictors.plane_nodes import on_plane_nodes
from .vector import VectorExpectedLogDensity, VectorPotential, VectorTiltedMoments

_PROBES = np.array([-1.0, 0.3, 2.0])
_OTHERS = np.array([-2.0, 0.1, 1.5])
_NUM_CLIMBS = 30
_STEEP = 1e6
"""Curvature at the places above: the exponential of an exponential reaches it, as in Weibull densities by the logarithm
of their shape."""


class PairKind(NamedTuple):
    """Over which of the two predictors a factor is integrated first, and how."""

    inner: int
    is_gaussian: bool
    """True if the factor is Gaussian in that predictor, given the other."""
    is_mixture: bool
    """True if the factor is a function of one predictor plus a function of the other."""
    is_steep: bool = False
    """True if the curvature is vast at places that are looked at: few nodes hardly ever serve all factors."""


@potential
class PairPotential(VectorPotential):
    r"""Factors :math:`\log t_i(\eta_{i1}, \eta_{i2})` computed by one function of all pairs of predictors.

    Smoothness is assumed, concavity is not. Integrals over the plane are nested: over one predictor given the other, in
    closed form where the factor is Gaussian in it (a location), around its mode otherwise, and then over the other.

    :param Callable function: ``function(eta, *args)`` maps ``eta`` of shape ``(n, 2)`` to log factors of shape
        ``(n,)``, each of its own pair. It must be hashable, and what it computes must depend on arrays only through
        ``args``.
    :param tuple args: pytree of arrays, in which results are differentiable.
    :param int inner: the predictor that is integrated first: the one of which the factor says more.
    :param bool is_gaussian: whether the logarithm is quadratic in that one.
    :param bool is_mixture: whether a factor is the sum of a function of one predictor and one of the other, as the
        density of an observation that belongs to one of two regressions: posteriors then have several modes.
    :param bool is_brief: whether tilted moments are left without a number where nodes around a guess do not serve.
    :param columns: ``columns(first, second, *args)``, the same function of the two predictors as arrays ``(n,)`` of
        their own. Nodes that share one of them then share what is computed of that one alone.
    :param bool is_steep: whether nested integrals are likely to be needed, so that nothing is gained by a program
        without.
    :param bool has_own_args: whether each array of ``args`` has one element for all factors, or one for each that no
        other factor depends on. What some factors ask for is then computed for them alone.

    **Example:**

    >>> def normal(eta, y):
    ...     return -0.5 * ((y - eta[:, 0]) * jnp.exp(-eta[:, 1])) ** 2 - eta[:, 1] - 0.5 * jnp.log(2 * jnp.pi)
    >>> noisy = PairPotential(normal, (jnp.array([3.0]),), is_gaussian=True)
    >>> tilted = noisy.tilted_moments(jnp.zeros((1, 2)), jnp.eye(2)[None])
    >>> print(tilted.mean.round(3))  # the location moves to the datum, and the scale grows
    [[0.841 0.622]]
    """

    function: Callable[..., Array] = dataclasses.field(metadata={"static": True})
    args: tuple[object, ...] = ()
    inner: int = dataclasses.field(default=0, metadata={"static": True})
    is_gaussian: bool = dataclasses.field(default=False, metadata={"static": True})
    is_mixture: bool = dataclasses.field(default=False, metadata={"static": True})
    is_steep: bool = dataclasses.field(default=False, metadata={"static": True})
    has_own_args: bool = dataclasses.field(default=False, metadata={"static": True})
    columns: Callable[..., Array] | None = dataclasses.field(default=None, metadata={"static": True})
    is_brief: bool = dataclasses.field(default=False, metadata={"static": True})

    has_tilted_moments = True
    is_lower_bound = True
    dimension = 2

    def log_density(self, eta: ArrayLike) -> Array:
        return self.function(jnp.asarray(eta), *self.args)

    def at(self, inner: Array, outer: Array) -> Array:
        """Log factors of shape ``(n,)``, at numbers of the inner and of the other predictor."""
        pair = (inner, outer)[self.inner], (inner, outer)[1 - self.inner]
        return self.log_density(jnp.stack(pair, -1)) if self.columns is None else self.columns(*pair, *self.args)

    def derivatives(self, eta: ArrayLike) -> tuple[Array, Array, Array]:
        eta = jnp.asarray(eta)

        def along(one: Array, other: Array) -> tuple[Array, Array, Array]:
            """Values, and derivatives in one direction and in both."""
            directions = (jnp.broadcast_to(part, eta.shape) for part in (one, other))
            return _twice(self.log_density, eta, *directions)

        # one copy of the derivatives serves all three
        axes = jnp.eye(2, dtype=eta.dtype)[np.array([[0, 0, 1], [0, 1, 1]])]
        value, slopes, bends = jax.vmap(along, out_axes=(None, 0, 0))(*axes)
        hessian = jnp.stack([jnp.stack([bends[0], bends[1]], -1), jnp.stack([bends[1], bends[2]], -1)], -2)
        return value, jnp.stack([slopes[0], slopes[2]], -1), hessian

    def tilted_moments(self, mean: ArrayLike, covariance: ArrayLike, power: ArrayLike = 1.0) -> VectorTiltedMoments:
        return self.tilted_moments_near(mean, covariance, power, mean, covariance)

    def tilted_moments_near(
        self, mean: ArrayLike, covariance: ArrayLike, power: ArrayLike, near: ArrayLike, spread: ArrayLike
    ) -> VectorTiltedMoments:
        given = (jnp.asarray(part) for part in (mean, covariance, near, spread))
        return _tilted_moments(self, *given, power)

    def in_brief(self) -> PairPotential:
        """Without steps to modes and nested integrals, which take long to compile and serve few factors, if any."""
        asks_for_more = self.is_gaussian or self.is_mixture or self.is_steep
        return self if asks_for_more else dataclasses.replace(self, is_brief=True)

    def chosen(self, rows: Array, num_factors: int) -> _Chosen:
        """Factors with these numbers out of ``num_factors``, at most as many, of those that have own arguments."""
        return _Chosen(self, rows, num_factors)

    def expected_log_density(self, mean: ArrayLike, covariance: ArrayLike) -> VectorExpectedLogDensity:
        order = self._order
        covariance = jnp.asarray(covariance)[..., order, :][..., order]

        def derivatives(inner: Array, outer: Array) -> tuple[Array, Array, Array]:
            return self.derivatives(jnp.stack([inner, outer], axis=-1)[..., order])

        parts = expectation(derivatives, jnp.asarray(mean)[..., order], covariance, self.is_gaussian)
        value, slope, hessian = parts
        return VectorExpectedLogDensity(value, slope, 0.5 * hessian)

    def log_normaliser(self, mean: ArrayLike, covariance: ArrayLike) -> Array:
        return self.tilted_moments(mean, covariance).log_z

    @property
    def outer_first(self) -> np.ndarray:
        """The numbers of the outer and of the inner predictor."""
        return self._order[::-1]

    @property
    def _order(self) -> np.ndarray:
        """The inner predictor first; its own inverse."""
        return np.array([self.inner, 1 - self.inner])


class _Chosen:
    """Some factors: all of them are asked, with the arguments of these, since their function has a fixed shape."""

    def __init__(self, base: PairPotential, rows: Array, num_factors: int) -> None:
        self._number, self._num_factors = len(rows), num_factors
        places = jnp.pad(rows, (0, num_factors - len(rows)), mode="edge")

        def own(leaf: ArrayLike) -> Array:
            leaf = jnp.asarray(leaf)
            return leaf if leaf.size == 1 else rows_of(leaf.reshape(-1), places).reshape(leaf.shape)

        self._base = dataclasses.replace(base, args=jax.tree.map(own, base.args))

        self.outer_first, self.derivatives = base.outer_first, base.derivatives

    def at(self, inner: Array, outer: Array) -> Array:
        filled = (jnp.pad(part, (0, self._num_factors - self._number), mode="edge") for part in (inner, outer))
        return self._base.at(*filled)[: self._number]


def _twice(function: Callable[[Array], Array], at: Array, one: Array, other: Array) -> tuple[Array, Array, Array]:
    (value, slope), (_, bend) = jax.jvp(lambda x: jax.jvp(function, (x,), (one,)), (at,), (other,))
    return value, slope, bend


@jax.jit  # traced once, for moments and for derivatives of the log normaliser alone
def _tilted_moments(
    factors: PairPotential, mean: Array, covariance: Array, near: Array, spread: Array, power: ArrayLike
) -> VectorTiltedMoments:
    """By even nodes where they can be trusted, and one predictor after the other elsewhere, and where the inner
    integral is known in closed form."""
    power = jnp.broadcast_to(jnp.asarray(power, mean.dtype), mean.shape[:-1])
    if factors.is_gaussian:
        return _nested_moments(factors, factors, mean, covariance, power, 1)
    number = len(power)
    choose = partial(factors.chosen, num_factors=number) if factors.has_own_args else None
    given_spread = spread if factors.is_brief else None
    found, is_trusted = on_plane_nodes(factors, mean, covariance, power, choose, near, given_spread)
    if factors.is_brief:  # a product, so that derivatives are no numbers either
        return found._replace(log_z=found.log_z * jnp.where(is_trusted, 1.0, jnp.nan))
    size = number if choose is None else max(1, number // NUM_OUTER)
    copies = number // size

    def nested(rows: Array) -> VectorTiltedMoments:
        own = factors if choose is None else choose(jnp.tile(rows, copies))
        return _nested_moments(factors, own, *rows_of((mean, covariance, power), rows), copies)

    return for_few_rows(nested, ~is_trusted, found, size)


def _nested_moments(
    kind: PairPotential, own: PairPotential | _Chosen, mean: Array, covariance: Array, power: Array, copies: int
) -> VectorTiltedMoments:
    """Moments by integrals over one predictor given the other, whatever the shape of the tilted densities.

    :param own: the factors, so many times.
    """
    order = kind._order
    swapped = mean[..., order], covariance[..., order, :][..., order]
    found = tilted_moments(own.at, *swapped, power, kind.is_gaussian, copies)
    return VectorTiltedMoments(found.log_z, found.mean[..., order], found.covariance[..., order, :][..., order])


def kind_of_pair(
    factors: PairPotential, num_factors: int, run: Callable[[Callable[[], Any]], Any] = lambda probe: jax.jit(probe)()
) -> PairKind:
    """Choose the integral of factors by their derivatives at a few points.

    A factor that is Gaussian in a predictor has the same second derivative in it wherever that predictor is. Otherwise
    the one comes first of which the factor can say most: the location, however small the scale. What a change of one
    predictor does to a mixture does not depend on the other.

    :param PairPotential factors: with any :attr:`PairPotential.inner`.
    :param int num_factors: of them.
    :param run: calls a function without arguments; one that keeps compiled programs saves most of the time.
    """
    dtype = jnp.result_type(float)

    def along_either(x: Array, outer: Array) -> tuple[Array, Array]:
        """Slopes and curvatures in either predictor at ``x``, shape ``(2, n)``, the other one being ``outer``."""
        others = jnp.full((num_factors,), outer)
        pairs = jnp.stack([jnp.stack([x[0], others], axis=-1), jnp.stack([others, x[1]], axis=-1)])
        _, gradient, hessian = jax.vmap(factors.derivatives)(pairs)
        return jnp.stack([gradient[k, :, k] for k in range(2)]), jnp.stack([hessian[k, :, k, k] for k in range(2)])

    def log_densities(point: Array) -> Array:
        return factors.log_density(jnp.broadcast_to(point, (num_factors, 2)))

    def probe(outer: Array) -> tuple[Array, Array]:
        """Curvatures at some points, and at the peak, in either predictor; the other one is given."""

        def look(x: Array, place: Array) -> tuple[Array, Array]:
            """The curvature at a place, or at the climber's, who takes a step then: one copy of the derivatives."""
            climbs = jnp.isnan(place)
            slope, curvature = along_either(jnp.where(climbs, x, place), outer)
            step = slope / jnp.maximum(jnp.abs(curvature), 1e-3)
            step = jnp.where(jnp.isfinite(step), jnp.clip(step, -1.0 - jnp.abs(x), 1.0 + jnp.abs(x)), 0.0)
            return jnp.where(climbs, x + step, x), curvature

        places = jnp.asarray(np.append(_PROBES, np.full(_NUM_CLIMBS, np.nan)), dtype)
        found = lax.scan(look, jnp.zeros((2, num_factors), dtype), places)[1]
        return found[: len(_PROBES)].swapaxes(0, 1), -found[-1]

    grid = jnp.asarray(np.stack(np.meshgrid(_PROBES, _PROBES, indexing="ij"), axis=-1).reshape(-1, 2), dtype)
    (along, peaks), values = run(lambda: (lax.map(probe, jnp.asarray(_OTHERS, dtype)), lax.map(log_densities, grid)))
    along, peaks = np.asarray(along, float), np.nan_to_num(np.asarray(peaks, float), nan=0.0, posinf=0.0, neginf=0.0)
    tolerance = 1e-9 if dtype == np.float64 else 1e-3
    values = np.asarray(values, float)[:, np.isfinite(values).all(axis=0)].reshape(3, 3, -1)
    densities = np.exp(values - values.max(axis=(0, 1), initial=-np.inf))
    along_one, along_both = (np.diff(densities, axis=k) for k in range(2)), np.diff(np.diff(densities, axis=0), axis=1)
    # A factor that is flat here in one predictor, such as one whose weight begins at zero, says nothing about itself.
    varies = all(np.any(np.abs(change) > tolerance) for change in along_one)
    is_mixture = bool(varies and np.all(np.abs(along_both) < tolerance))
    is_steep = bool(np.max(np.abs(along), initial=0.0, where=np.isfinite(along)) > _STEEP)
    for k in range(2):
        curvature = along[:, k][..., np.isfinite(along[:, k]).all(axis=(0, 1))]
        is_constant = np.allclose(curvature, curvature[:, :1], rtol=tolerance, atol=0.0)
        if curvature.size and np.all(curvature < 0) and is_constant:
            return PairKind(k, True, is_mixture, is_steep)
    return PairKind(int(np.argmax(np.mean(peaks.max(axis=0), axis=-1))), False, is_mixture, is_steep)
