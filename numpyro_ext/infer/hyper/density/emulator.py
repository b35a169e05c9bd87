"""A log density that is dear to evaluate, followed by a Gaussian process through its values at few points.

Coordinates are standardised, so that the density is about ``N(0, I)`` around its mode, which is the origin.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

_ROUNDNESSES = (0.03, 0.15, 0.3, 0.5, 0.75, 1.0, 1.4, 2.0, 2.8)
"""Inverse slopes of a tail to choose from; that of a normal density is next to zero."""
_PENALTY, _NUM_SWEEPS = 0.03, 4
_LENGTHS = (1.2, 1.7, 2.4, 3.4, 4.8, 6.8)
"""Length scales of the process to choose from, for four coordinates; they grow with the root of the number."""
_AMPLITUDES = (0.5, 1.5, 5.0, 15.0)
"""Standard deviations of the process to choose from, in root mean squares of what it goes through."""
_LOWEST = 25.0
"""A fall of the log density below which it does not matter how far it falls."""
_LEAST_ERROR, _GROWTH, _EXACT_FALL = 5e-3, 0.02, 4.0
"""Errors allowed to the process, in nats: down to some fall of the log density, and how they grow from there on."""

_AT_ONCE = 2**15
"""Numbers of a kernel that are computed together."""


class Emulator(NamedTuple):
    """Log densities of independent axes, plus a Gaussian process through what the values at some points differ."""

    points: np.ndarray
    """Points at which the density is known, shape ``(n, k)``."""
    coefficients: np.ndarray
    """Factors of the kernels around the points, shape ``(n,)``."""
    root: np.ndarray
    """Lower Cholesky factor of the covariance of the values."""
    length: float
    variance: float
    tails: np.ndarray
    """Inverse slopes of the axes below and above the mode, shape ``(2, k)``; see :func:`log_beta`."""

    def log_density(self, at: np.ndarray) -> np.ndarray:
        """Log density, up to a constant, at points of shape ``(m, k)``, as ``(m,)``."""
        # As many points at once as stay in the processor's cache.
        number = max(1, _AT_ONCE // len(self.points))
        parts = [self._kernel(at[k : k + number]) @ self.coefficients for k in range(0, len(at), number)]
        return np.concatenate(parts) + np.sum(log_beta(at, self.tails), axis=1)

    def most_uncertain(self, candidates: np.ndarray, number: int) -> np.ndarray:
        """Indices of candidates, each where the process knows least once it knows the values at those before.

        :param candidates: points of shape ``(m, k)``.
        :param int number: how many are chosen.
        """
        known = solve_triangular(self.root, self._kernel(candidates).T, lower=True)
        variance = self.variance - np.sum(known**2, axis=0)
        chosen: list[int] = []
        for _ in range(min(number, len(candidates))):
            best = int(np.argmax(variance))
            chosen.append(best)
            cross = self.variance * _kernel(candidates, candidates[best : best + 1], self.length)[:, 0]
            scale = math.sqrt(max(float(variance[best]), 0.0) + _LEAST_ERROR**2)
            row = (cross - known.T @ known[:, best]) / scale
            known = np.concatenate([known, row[None]])
            variance = variance - row**2
            variance[best] = -np.inf
        return np.array(chosen, int)

    def _kernel(self, at: np.ndarray) -> np.ndarray:
        return self.variance * _kernel(at, self.points, self.length)


def emulate(points: np.ndarray, values: np.ndarray) -> Emulator:
    """Fit the axes by least squares, and the process with the length and amplitude of the largest marginal likelihood.

    :param points: shape ``(n, k)``.
    :param values: log density less that at the origin, shape ``(n,)``; where it is not finite it has fallen far.
    :return: the emulator.

    >>> points, tails = np.linspace(-4.0, 3.0, 15)[:, None], np.array([[0.75], [0.3]])
    >>> emulator, new = emulate(points, log_beta(points, tails)[:, 0]), np.array([[-2.2], [1.3]])
    >>> emulator.log_density(new).round(2), log_beta(new, tails)[:, 0].round(2)
    (array([-1.61, -0.96]), array([-1.61, -0.96]))
    """
    values = np.where(np.isfinite(values), values, -np.inf)
    values = np.maximum(values, np.max(values) - _LOWEST)
    fall = np.max(values) - values
    errors = _LEAST_ERROR + _GROWTH * np.maximum(fall - _EXACT_FALL, 0.0) ** 2
    tails = _tails(points, values, 1.0 / (1.0 + fall))
    rest = values - np.sum(log_beta(points, tails), axis=1)
    size = max(float(np.sqrt(np.mean(rest**2))), 1e-3)
    stretch, best = math.sqrt(max(points.shape[1], 4) / 4.0), None
    for length in _LENGTHS:
        kernel = _kernel(points, points, stretch * length)
        for amplitude in _AMPLITUDES:
            variance = (amplitude * size) ** 2
            root = np.linalg.cholesky(variance * kernel + np.diag(errors**2 + 1e-9 * variance))
            scaled = solve_triangular(root, rest, lower=True)
            score = -0.5 * scaled @ scaled - np.sum(np.log(np.diagonal(root)))
            if best is None or score > best[0]:
                best = score, length, variance, root, scaled
    assert best is not None  # the first of them is
    _, length, variance, root, scaled = best
    coefficients = solve_triangular(root.T, scaled, lower=False)
    return Emulator(points, coefficients, root, stretch * length, variance, tails)


def log_beta(at: np.ndarray, tails: np.ndarray) -> np.ndarray:
    r"""Log density of the logit of a beta variable, moved and scaled: :math:`-t^2 / 2` to second order, with straight
    tails.

    So is the posterior of the logarithm of a scale of which the data say little, and that of a correlation.

    :param at: points :math:`t`, shape ``(..., k)``.
    :param tails: inverse slopes below and above zero, positive, shape ``(2, k)``; near zero for a normal density.
    :return: elementwise, zero at zero.
    """
    below, above = 1.0 / tails
    a, b = below * (below * above / (below + above)), above * (below * above / (below + above))
    scaled = np.sqrt((a + b) / (a * b)) * at
    share = a / (a + b)
    return a * scaled - (a + b) * np.logaddexp(np.log1p(-share), np.log(share) + scaled)


def _tails(points: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Tails of the axes by weighted least squares, one axis after the other from a list of pairs."""
    size = points.shape[1]
    pairs = np.array([(p, q) for p in _ROUNDNESSES for q in _ROUNDNESSES]).T
    columns = np.stack([log_beta(column[:, None], pairs).T for column in points.T])  # (k, pairs, n)
    penalty = _PENALTY * np.sum(pairs**2, axis=0)
    chosen = np.zeros(size, int)
    parts = columns[:, 0].copy()
    for _ in range(_NUM_SWEEPS):
        for axis in range(size):
            rest = values - parts.sum(axis=0) + parts[axis]
            chosen[axis] = np.argmin(np.square(rest - columns[axis]) @ weights + penalty)
            parts[axis] = columns[axis, chosen[axis]]
    return pairs[:, chosen]


def _kernel(a: np.ndarray, b: np.ndarray, length: float) -> np.ndarray:
    # In place: most of the time goes into memory.
    found = (2.0 * a) @ b.T
    found -= np.sum(a**2, axis=1)[:, None]
    found -= np.sum(b**2, axis=1)
    np.minimum(found, 0.0, out=found)
    found *= 0.5 / length**2
    return np.exp(found, out=found)
