r"""Upper bounds of the Gaussian expectation of the logistic log-partition :math:`\log(1 + e^x)`.

A bound is called with means and variances and returns the value, its slope in the mean and its slope in the variance.
In a factor with :class:`~numpyro_ext.potentials.moments.LogisticTerms` it gives a lower bound of the expected log
density, and so of the evidence: see :class:`BoundedPotential`. All bounds are symmetric as the expectation is,
:math:`U(-m, v) = U(m, v) - m`.

**References**

1. *Variational Learning for Latent Gaussian Models of Discrete Data*, M. E. Khan, PhD thesis, UBC 2012, chapter 4.
2. *Piecewise Bounds for Estimating Bernoulli-Logistic Latent Gaussian Models*, B. Marlin, M. E. Khan, K. Murphy, ICML
   2011.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..base import Potential, potential
from ..elementwise import DerivedPotential
from ..integrals.expectation import expected_logistic_terms
from ..integrals.logistic_expectation import expected_log_partition
from ..moments import ExpectedLogDensity
from .piecewise import PiecewiseCoefficients, minimax_pieces

_Slopes = tuple[Array, Array, Array]


@jax.custom_jvp
def _with_slopes(value: Array, mean: Array, variance: Array, mean_slope: Array, variance_slope: Array) -> Array:
    """``value`` as a function of mean and variance alone, whose derivatives are the given slopes."""
    return value


@_with_slopes.defjvp
def _with_slopes_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    *_, mean_slope, variance_slope = primals
    _, mean_dot, variance_dot, _, _ = tangents
    return _with_slopes(*primals), mean_slope * mean_dot + variance_slope * variance_dot


class LogisticBound:
    """Base of the bounds: a subclass defines :meth:`evaluate` on arrays of one shape and floating dtype."""

    @property
    def name(self) -> str:
        """The name under which :func:`logistic_bound` knows it."""
        raise NotImplementedError

    @property
    def maximum_error(self) -> float:
        """The most by which the bound is above the expectation, for any mean and variance; may be infinite."""
        raise NotImplementedError

    @property
    def is_convex(self) -> bool:
        """True if the slope in the variance is never negative, as of the expectation of a convex function."""
        return True

    def evaluate(self, mean: Array, variance: Array) -> _Slopes:
        """Value and slopes. The value is not differentiated, the slopes are."""
        raise NotImplementedError

    def __call__(self, mean: ArrayLike, variance: ArrayLike) -> _Slopes:
        r"""The bound :math:`U(m, v) \ge E \log(1 + e^x)` under :math:`N(x \mid m, v)`, and its slopes.

        :param ArrayLike mean: means :math:`m`.
        :param ArrayLike variance: variances :math:`v`, non-negative.
        :return: ``(value, mean_slope, variance_slope)``, each of the broadcast shape. The gradient of the value is the
            slopes.
        """
        dtype = jnp.result_type(mean, variance, float)
        mean, variance = jnp.broadcast_arrays(jnp.asarray(mean, dtype), jnp.asarray(variance, dtype))
        value, mean_slope, variance_slope = self.evaluate(mean, variance)
        return _with_slopes(value, mean, variance, mean_slope, variance_slope), mean_slope, variance_slope


@potential
class ExactExpectation(LogisticBound):
    """The expectation itself, to rounding.

    See :func:`~numpyro_ext.potentials.integrals.logistic_expectation.expected_log_partition`.
    """

    name = "exact"
    maximum_error = 0.0

    def evaluate(self, mean: Array, variance: Array) -> _Slopes:
        value, mean_slope, variance_slope = expected_log_partition(mean, variance)
        return value, mean_slope, variance_slope


@potential
class JaakkolaBound(LogisticBound):
    r"""A parabola that touches at :math:`\pm\xi`, with the best :math:`\xi^2 = m^2 + v` put in (Jaakkola 1997).

    :math:`U = m/2 - \xi/2 + \log(1 + e^\xi)`. Tight for small variances; the error grows as the standard deviation.
    """

    name = "jaakkola"
    maximum_error = math.inf

    def evaluate(self, mean: Array, variance: Array) -> _Slopes:
        square = jnp.square(mean) + variance
        is_small = square < 1e-4
        xi = jnp.sqrt(jnp.where(is_small, 1.0, square))
        # tanh(xi / 2) / (4 xi)
        series = (1.0 - square * (1.0 / 12.0 - square * (1.0 / 120.0 - square * (17.0 / 20160.0)))) / 8.0
        weight = jnp.where(is_small, series, 0.25 * jnp.tanh(0.5 * xi) / xi)
        root = jnp.where(is_small, jnp.sqrt(square), xi)
        # (m + xi) / 2 as a positive number: for a negative mean the two cancel.
        distance = root + jnp.abs(mean)
        opposed = variance / jnp.where(distance > 0.0, distance, 1.0)
        value = 0.5 * jnp.where(mean < 0.0, opposed, distance) + jnp.log1p(jnp.exp(-root))
        return value, 0.5 + 2.0 * weight * mean, weight


@potential
class BohningBound(LogisticBound):
    r"""A parabola of curvature 1/4 that touches at :math:`\psi`, with the best :math:`\psi = m` put in (Böhning 1992).

    :math:`U = \log(1 + e^m) + v/8`. Never below the bound of Jaakkola; its slope in the variance is constant.
    """

    name = "bohning"
    maximum_error = math.inf

    def evaluate(self, mean: Array, variance: Array) -> _Slopes:
        return jax.nn.softplus(mean) + 0.125 * variance, jax.nn.sigmoid(mean), jnp.full_like(mean, 0.125)


@potential
class PiecewiseBound(LogisticBound):
    r"""The expectation of a minimax piecewise upper bound of the function, which it exceeds by at most a constant.

    The quadratic one jumps at its breakpoints: for small variances its slopes may leave the ranges of those of the
    expectation. For variances that are small enough, the bounds of Jaakkola and Böhning are closer.

    :param str kind: ``"linear"`` or ``"quadratic"``.
    :param int num_pieces: number of pieces, at least three.
    :raises ValueError: as :func:`minimax_pieces`.

    **Example:**

    >>> bound = PiecewiseBound("quadratic", 20)
    >>> [x.item() for x in bound(0.0, 1.0)]
    [0.8061, 0.5, 0.1033]
    """

    kind: Literal["linear", "quadratic"] = dataclasses.field(metadata={"static": True})
    num_pieces: int = dataclasses.field(default=20, metadata={"static": True})

    def __post_init__(self) -> None:
        minimax_pieces(self.kind, self.num_pieces)

    @property
    def name(self) -> str:
        return f"piecewise-{self.kind}"

    @property
    def coefficients(self) -> PiecewiseCoefficients:
        """Breakpoints and coefficients of the pieces."""
        return minimax_pieces(self.kind, self.num_pieces)

    @property
    def breakpoints(self) -> np.ndarray:
        """Points where the pieces meet, ascending."""
        return self.coefficients.breakpoints

    @property
    def is_convex(self) -> bool:
        return self.kind == "linear"  # quadratic pieces jump where they meet

    @property
    def maximum_error(self) -> float:
        return self.coefficients.maximum_error

    def evaluate(self, mean: Array, variance: Array) -> _Slopes:
        """Moments of the Gaussian truncated to each piece (Khan 2012, appendix A.2, with its slips put right)."""
        t, a, b, c = (_leading(x, mean) for x in self.coefficients[:4])
        variance = jnp.maximum(variance, jnp.finfo(mean.dtype).tiny)
        scale = jnp.sqrt(variance)
        z = (t - mean) / scale
        density = jnp.exp(-0.5 * jnp.square(z)) / math.sqrt(2.0 * math.pi)
        # On either side of the mean, differences of the tail probabilities that are small there.
        tail = jax.scipy.special.ndtr(-jnp.abs(z))
        right = z > 0.0
        below, above = jnp.where(right, 1.0 - tail, tail), jnp.where(right, tail, 1.0 - tail)
        mass = jnp.where(_padded(right, False, True)[:-1], -_difference(above, 1.0, 0.0), _difference(below, 0.0, 1.0))
        slope = _difference(density, 0.0, 0.0)
        moment = _difference(z * density, 0.0, 0.0)
        first = mean * mass - scale * slope
        second = (jnp.square(mean) + variance) * mass - 2.0 * mean * scale * slope - variance * moment
        # Between breakpoints that are close for the Gaussian these differences cancel.
        is_close = jnp.pad((t[1:] - t[:-1]) / scale < 0.25, [(1, 1)] + [(0, 0)] * mean.ndim)
        moments = (mass, first, second), _legendre_moments(t, mean, scale)
        mass, first, second = (jnp.where(is_close, close, far) for far, close in zip(*moments, strict=True))
        value = jnp.sum(a * second + b * first + c * mass, axis=0)
        # What the bound and its slope jump by at the breakpoints.
        height = _leading(self._jumps(0), mean)
        bend = _leading(self._jumps(1), mean)
        mean_slope = jnp.sum(2.0 * a * first + b * mass, axis=0) + jnp.sum(height * density, axis=0) / scale
        at_jumps = bend * density / scale + height * (z * density) / variance
        return value, mean_slope, 0.5 * (jnp.sum(2.0 * a * mass, axis=0) + jnp.sum(at_jumps, axis=0))

    def _jumps(self, order: int) -> np.ndarray:
        t, a, b, c, _ = self.coefficients
        a, b, c = (np.diff(x) for x in (a, b, c))
        return (a * t + b) * t + c if order == 0 else 2.0 * a * t + b


def _legendre_moments(t: Array, mean: Array, scale: Array) -> list[Array]:
    """Zeroth to second moment on each piece by five nodes, which is exact for short ones; zero on the tails."""
    nodes, weights = np.polynomial.legendre.leggauss(5)
    half, center = 0.5 * (t[1:] - t[:-1]), 0.5 * (t[1:] + t[:-1])
    totals: list[Array] = [jnp.zeros(jnp.broadcast_shapes(half.shape, (1, *mean.shape)), mean.dtype)] * 3
    for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True):
        x = center + node * half
        measure = weight * half * jnp.exp(-0.5 * jnp.square((x - mean) / scale)) / (scale * math.sqrt(2.0 * math.pi))
        totals = [total + part for total, part in zip(totals, (measure, measure * x, measure * x * x), strict=True)]
    return [_padded(total, 0.0, 0.0) for total in totals]


def _leading(x: np.ndarray, like: Array) -> Array:
    """``x`` on a new first axis."""
    return jnp.asarray(x, like.dtype).reshape(-1, *(1,) * like.ndim)


def _padded(x: Array, first: ArrayLike, last: ArrayLike) -> Array:
    """``x`` with what it is at minus and plus infinity."""
    ends = (jnp.full_like(x[:1], first), jnp.full_like(x[:1], last))
    return jnp.concatenate([ends[0], x, ends[1]])


def _difference(x: Array, first: float, last: float) -> Array:
    return jnp.diff(_padded(x, first, last), axis=0)


@potential
class MinimumBound(LogisticBound):
    """The smallest of several bounds at each mean and variance, which is a bound too, with the slopes of that one.

    :param tuple bounds: the bounds.
    :raises ValueError: if there are none.
    """

    bounds: tuple[LogisticBound, ...]

    def __post_init__(self) -> None:
        if not self.bounds:
            raise ValueError("MinimumBound needs at least one bound.")

    @property
    def name(self) -> str:
        return f"minimum of {', '.join(bound.name for bound in self.bounds)}"

    @property
    def maximum_error(self) -> float:
        return min(bound.maximum_error for bound in self.bounds)

    @property
    def is_convex(self) -> bool:
        return all(bound.is_convex for bound in self.bounds)

    def evaluate(self, mean: Array, variance: Array) -> _Slopes:
        best, *others = (bound.evaluate(mean, variance) for bound in self.bounds)
        for other in others:
            is_lower = other[0] < best[0]
            best = tuple(jnp.where(is_lower, new, old) for new, old in zip(other, best, strict=True))  # type: ignore[assignment]
        return best


LOGISTIC_BOUNDS: dict[str, Callable[[int], LogisticBound]] = {
    "exact": lambda num_pieces: ExactExpectation(),
    "jaakkola": lambda num_pieces: JaakkolaBound(),
    "bohning": lambda num_pieces: BohningBound(),
    "piecewise-linear": lambda num_pieces: PiecewiseBound("linear", num_pieces),
    "piecewise-quadratic": lambda num_pieces: PiecewiseBound("quadratic", num_pieces),
}


def logistic_bound(name: str | LogisticBound | tuple[Any, ...] | list[Any], num_pieces: int = 20) -> LogisticBound:
    """The bound with a name, or the minimum of several.

    :param name: ``"exact"``, ``"jaakkola"``, ``"bohning"``, ``"piecewise-linear"``, ``"piecewise-quadratic"``, a bound
        (returned as it is), or a tuple or list of these, which means their minimum.
    :param int num_pieces: number of pieces of the piecewise bounds.
    :raises ValueError: if a name is unknown, the tuple empty, or ``num_pieces`` not an integer of three or more.

    **Example:**

    >>> bound = logistic_bound(("jaakkola", "piecewise-quadratic"), num_pieces=10)
    >>> [x.item() for x in bound(jnp.zeros(2), jnp.array([0.01, 25.0]))[0]]
    [0.6944, 2.121]
    """
    if isinstance(name, LogisticBound):
        return name
    if isinstance(name, tuple | list):
        return MinimumBound(tuple(logistic_bound(part, num_pieces) for part in name))
    if name not in LOGISTIC_BOUNDS:
        raise ValueError(
            f"bound must be one of {', '.join(map(repr, LOGISTIC_BOUNDS))}, or a tuple of these, got {name!r}."
        )
    return LOGISTIC_BOUNDS[name](num_pieces)


@potential
class BoundedPotential(DerivedPotential):
    """Factors whose expected log density is replaced by a lower bound. All else is as in ``base``.

    :param Potential base: factors that have logistic terms.
    :param LogisticBound bound: upper bound of the expected log-partition.
    :raises ValueError: if ``base`` has no logistic terms.
    """

    base: Potential
    bound: LogisticBound

    def __post_init__(self) -> None:
        if self.base.logistic_terms() is None:
            raise ValueError(
                f"bound {self.bound.name!r} holds for logistic factors; {type(self.base).__name__} has no logistic "
                "log-partition. Use bound='exact'."
            )

    @property
    def is_log_concave(self) -> bool:  # type: ignore[override]
        """True if what takes the place of the factor is log-concave: no Gaussian site has a negative precision."""
        return self.base.is_log_concave and self.bound.is_convex

    def expected_log_density(self, mean: ArrayLike, variance: ArrayLike) -> ExpectedLogDensity:
        """A lower bound of the expectation, and its slopes."""
        terms = self.base.logistic_terms()
        assert terms is not None  # the constructor refuses such factors
        return expected_logistic_terms(terms, self.bound, mean, variance)
