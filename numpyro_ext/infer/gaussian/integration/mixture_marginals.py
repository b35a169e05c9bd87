"""Mixtures of Gaussian and skew-normal marginals, element by element: what integrating over hyperparameters leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri, owens_t

from ....compilation.quick_jit import quick_jit
from ....compilation.store import shared
from ....potentials.integrals.truncated_by_moments import TruncatedByMoments, truncated_by_moments

_LARGEST_SKEWNESS = 0.99
_MOST_STEPS = 60
_AT_ONCE = 2**15
"""Numbers that parts of mixtures are evaluated at together, which stay in the processor's cache."""
_REACH, _REACH_OF_CUT = 12.0, 40.0
"""Deviations from the mean beyond which nothing is left; an exponential tail goes further."""
_TWICE_OF_NORMAL = math.sqrt(2.0 / math.pi)


class SkewNormal(NamedTuple):
    r"""Skew-normal densities :math:`\frac{2}{\omega} \varphi(u) \Phi(\alpha u)`, :math:`u = (x - \xi) / \omega`
    (Azzalini 1985), elementwise."""

    location: np.ndarray
    """:math:`\\xi`."""
    scale: np.ndarray
    """:math:`\\omega`."""
    shape: np.ndarray
    """:math:`\\alpha`; zero for a Gaussian."""

    @classmethod
    def from_moments(cls, mean: np.ndarray, variance: np.ndarray, skewness: np.ndarray) -> SkewNormal:
        """The densities with given moments; a skewness beyond what the family has (0.995) is cut at 0.99.

        >>> density = SkewNormal.from_moments(np.array(1.0), np.array(4.0), np.array(0.5))
        >>> print(density.cdf(np.array([-1.0, 1.0, 3.0])).round(3))
        [0.152 0.537 0.843]
        """
        skewness = np.clip(skewness, -_LARGEST_SKEWNESS, _LARGEST_SKEWNESS)
        power = np.abs(skewness) ** (2.0 / 3.0)
        delta = np.sign(skewness) * np.sqrt(0.5 * np.pi * power / (power + (2.0 - 0.5 * np.pi) ** (2.0 / 3.0)))
        scale = np.sqrt(variance / (1.0 - 2.0 / np.pi * delta**2))
        return cls(mean - scale * delta * np.sqrt(2.0 / np.pi), scale, delta / np.sqrt(1.0 - delta**2))

    def cdf(self, x: np.ndarray) -> np.ndarray:
        """Probability below ``x``; where the scale is zero, that of a point."""
        is_point = self.scale == 0.0
        u = (x - self.location) / np.where(is_point, 1.0, self.scale)
        value = ndtr(u) - 2.0 * owens_t(u, self.shape) if np.any(self.shape) else ndtr(u)
        return np.where(is_point, (x >= self.location).astype(value.dtype), value)

    def density(self, x: np.ndarray) -> np.ndarray:
        """Density at ``x``; zero where the scale is."""
        scale = np.where(self.scale == 0.0, np.inf, self.scale)
        u = (x - self.location) / scale
        return _TWICE_OF_NORMAL * np.exp(-0.5 * u**2) * ndtr(self.shape * u) / scale


class CutNormal(NamedTuple):
    """Normal distributions cut at a lower bound, elementwise; see
    :class:`~numpyro_ext.potentials.integrals.truncated_by_moments.TruncatedByMoments`."""

    lower: np.ndarray
    location: np.ndarray
    scale: np.ndarray

    @classmethod
    def from_moments(cls, mean: np.ndarray, variance: np.ndarray, lower: np.ndarray) -> CutNormal:
        """The distributions with given moments.

        >>> half_normal = CutNormal.from_moments(np.array([0.79788456]), np.array([0.36338023]), np.array([0.0]))
        >>> print(half_normal.cdf(np.array([0.6744898])).round(5))
        [0.5]
        """
        return cls(*(np.asarray(part) for part in shared(_by_moments)(mean, variance, lower)))

    def cdf(self, x: np.ndarray) -> np.ndarray:
        """Probability below ``x``."""
        excess = np.maximum((x - self.lower) / self.scale, 0.0)
        return -np.expm1(log_ndtr(self.location - excess) - log_ndtr(self.location))

    def density(self, x: np.ndarray) -> np.ndarray:
        """Density at ``x``."""
        u = self.location - np.maximum((x - self.lower) / self.scale, 0.0)
        value = 0.5 * _TWICE_OF_NORMAL * np.exp(-0.5 * u**2 - log_ndtr(self.location)) / self.scale
        return np.where(x >= self.lower, value, 0.0)


def _by_moments() -> Callable[..., TruncatedByMoments]:
    return quick_jit(truncated_by_moments, is_small=True)


class MarginalMixture(NamedTuple):
    """Mixtures of ``K`` skew normals with common weights, one for each of ``R`` quantities."""

    weights: np.ndarray
    """Shape ``(K,)``, summing to one."""
    means: np.ndarray
    """Shape ``(K, R)``, as the other moments."""
    variances: np.ndarray
    skewnesses: np.ndarray
    lower: np.ndarray | None = None
    """Bounds of the quantities, shape ``(R,)``: the parts are normals cut there; ``None`` where they have none."""

    def mean_and_variance(self) -> tuple[np.ndarray, np.ndarray]:
        """Moments of the mixtures, shapes ``(R,)``."""
        mean = self.weights @ self.means
        return mean, self.weights @ (self.variances + (self.means - mean) ** 2)

    def cdf(self, x: np.ndarray) -> np.ndarray:
        """Probabilities below ``x`` of shape ``(..., R)``."""
        parts = self._parts
        return self._sum(type(parts).cdf, parts, x)

    @property
    def _parts(self) -> SkewNormal | CutNormal:
        """The parts, as arrays of shape ``(K, R)``."""
        if self.lower is None:
            return SkewNormal.from_moments(self.means, self.variances, self.skewnesses)
        lower = np.broadcast_to(self.lower, self.means.shape)
        return CutNormal.from_moments(self.means, self.variances, lower.astype(self.means.dtype))

    def _sum(self, function: Callable[[Any, np.ndarray], np.ndarray], parts: Any, x: np.ndarray) -> np.ndarray:
        """The sum over parts, as many at once as stay in the cache, at ``x`` of shape ``(..., R)``."""
        number, total = max(1, _AT_ONCE // max(1, x.size)), np.zeros_like(x)
        for start in range(0, len(self.weights), number):
            some = slice(start, start + number)
            own = (part[some].reshape(-1, *(1,) * (x.ndim - 1), x.shape[-1]) for part in parts)
            total = total + np.tensordot(self.weights[some], function(type(parts)(*own), x), 1).astype(x.dtype)
        return total

    def quantile(self, q: np.ndarray) -> np.ndarray:
        """Quantiles to the last digit, by Newton's method and, where its steps do not halve, by bisection.

        :param q: probabilities of shape ``(...)``, inside (0, 1).
        :return: of shape ``(..., R)``.

        >>> means, ones = np.array([[-1.0], [1.0]]), np.ones((2, 1))
        >>> mixture = MarginalMixture(np.array([0.5, 0.5]), means, ones, 0.0 * ones)
        >>> print(mixture.quantile(np.array([0.5, 0.8413])).round(3) + 0.0)
        [[0.   ]
         [1.493]]
        """
        deviations = (_REACH if self.lower is None else _REACH_OF_CUT) * np.sqrt(self.variances)
        target, parts = np.asarray(q)[..., None], self._parts
        lower = np.broadcast_to(np.min(self.means - deviations, axis=0), np.shape(q) + self.means.shape[1:])
        upper = np.broadcast_to(np.max(self.means + deviations, axis=0), lower.shape)
        if self.lower is not None:
            lower = np.broadcast_to(self.lower, lower.shape).astype(lower.dtype)
        mean, variance = self.mean_and_variance()
        x = np.clip(mean + np.sqrt(variance) * ndtri(target), lower, upper).astype(lower.dtype)
        step, is_done, eps = upper - lower, np.zeros(x.shape, bool), np.finfo(x.dtype).eps
        # After a step of Newton's method so short the next one is below rounding.
        short = eps**0.6 * np.sqrt(np.min(self.variances, axis=0))
        for _ in range(_MOST_STEPS):
            excess = self._sum(type(parts).cdf, parts, x) - target
            lower, upper = np.where(excess < 0.0, x, lower), np.where(excess < 0.0, upper, x)
            with np.errstate(all="ignore"):
                newton = -excess / self._sum(type(parts).density, parts, x)
                is_newton = (np.abs(newton) < 0.5 * np.abs(step)) & (x + newton >= lower) & (x + newton <= upper)
            step = np.where(is_newton, newton, 0.5 * (lower + upper) - x)
            x = np.where(is_done, x, x + step)
            is_done |= np.abs(step) <= np.where(is_newton, short, eps * np.abs(x))
            if is_done.all():
                break
        return x
