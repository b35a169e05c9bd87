"""Mixtures of Gaussian and skew-normal marginals, element by element: what integrating over hyperparameters leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr, ndtr, owens_t

from ....compilation.quick_jit import quick_jit
from ....compilation.store import shared
from ....potentials.integrals.truncated_by_moments import TruncatedByMoments, truncated_by_moments

__all__ = ["CutNormal", "MarginalMixture", "SkewNormal"]

_LARGEST_SKEWNESS = 0.99
_HALVINGS = 60
_REACH, _REACH_OF_CUT = 12.0, 40.0
"""Deviations from the mean beyond which nothing is left; an exponential tail goes further."""


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
        value = ndtr(u) - 2.0 * owens_t(u, self.shape)
        return np.where(is_point, (x >= self.location).astype(value.dtype), value)


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
        return self._cdf()(x)

    def _cdf(self) -> Callable[[np.ndarray], np.ndarray]:
        """The function that :meth:`cdf` is, its parts made once."""
        kind: type[SkewNormal] | type[CutNormal] = SkewNormal if self.lower is None else CutNormal
        if self.lower is None:
            parts: SkewNormal | CutNormal = SkewNormal.from_moments(self.means, self.variances, self.skewnesses)
        else:
            lower = np.broadcast_to(self.lower, self.means.shape)
            parts = CutNormal.from_moments(self.means, self.variances, lower.astype(self.means.dtype))

        def cdf(x: np.ndarray) -> np.ndarray:
            total = np.zeros_like(x)
            for weight, *part in zip(self.weights, *parts, strict=True):
                total = total + weight * kind(*part).cdf(x)
            return total

        return cdf

    def quantile(self, q: np.ndarray) -> np.ndarray:
        """Quantiles by bisection to the last digit.

        :param q: probabilities of shape ``(...)``, inside (0, 1).
        :return: of shape ``(..., R)``.

        >>> means, ones = np.array([[-1.0], [1.0]]), np.ones((2, 1))
        >>> mixture = MarginalMixture(np.array([0.5, 0.5]), means, ones, 0.0 * ones)
        >>> print(mixture.quantile(np.array([0.5, 0.8413])).round(3) + 0.0)
        [[0.   ]
         [1.493]]
        """
        deviations = (_REACH if self.lower is None else _REACH_OF_CUT) * np.sqrt(self.variances)
        target, cdf = np.asarray(q)[..., None], self._cdf()
        lower = np.broadcast_to(np.min(self.means - deviations, axis=0), np.shape(q) + self.means.shape[1:])
        upper = np.broadcast_to(np.max(self.means + deviations, axis=0), lower.shape)
        if self.lower is not None:
            lower = np.broadcast_to(self.lower, lower.shape).astype(lower.dtype)
        for _ in range(_HALVINGS):
            middle = 0.5 * (lower + upper)
            is_below = cdf(middle) < target
            lower, upper = np.where(is_below, middle, lower), np.where(is_below, upper, middle)
        return 0.5 * (lower + upper)
