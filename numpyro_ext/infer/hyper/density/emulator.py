"""A log density that is dear to evaluate, followed by a Gaussian process through its values at few points.

Coordinates are standardised, so that the density is about ``N(0, I)`` around its mode, which is the origin.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular

_ROUNDNESSES = (0.03, 0.15, 0.3, 0.5, 0.75, 1.0, 1.4, 2.0, 2.8)
"""Inverse slopes of a tail to choose from; that of a normal density is next to zero."""
_POWERS = (-1e-3, -0.1, -0.17, -0.25, -0.32, -0.4, -0.5)
"""Minus the inverse powers with which a heavy tail falls, to choose from; that of a normal density is next to zero."""
_DEGREES_OF_FREEDOM = (2.0, 3.0, 5.0, 10.0)
"""Degrees of freedom of a multivariate Student t to choose from, where axes have their tails together."""
_PENALTY, _PENALTY_OF_POWERS, _NUM_SWEEPS = 0.03, 0.1, 4
_LENGTHS = (1.2, 1.7, 2.4, 3.4, 4.8, 6.8)
"""Length scales of the process to choose from, for four coordinates; they grow with the root of the number."""
_AMPLITUDES = (0.5, 1.5, 5.0, 15.0)
"""Standard deviations of the process to choose from, in root mean squares of what it goes through."""
_LOWEST = 25.0
"""A fall of the log density below which it does not matter how far it falls."""
_LOWEST_OF_POWERS = 100.0
"""The same where tails fall as powers."""
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
    """Tails of the axes below and above the mode, shape ``(2, k)``: inverse slopes (:func:`log_beta`), or minus inverse
    powers (:func:`log_student`)."""
    joint: float = 0.0
    """Inverse power of the tails that all axes have together; zero where they are independent."""

    @property
    def is_heavy(self) -> bool:
        """True if some tail falls as a power."""
        return self.joint > 0.0 or bool(np.any(self.tails < 0.0))

    def log_density(self, at: np.ndarray) -> np.ndarray:
        """Log density, up to a constant, at points of shape ``(m, k)``, as ``(m,)``."""
        # As many points at once as stay in the processor's cache.
        number = max(1, _AT_ONCE // len(self.points))
        parts = [self._kernel(at[k : k + number]) @ self.coefficients for k in range(0, len(at), number)]
        return np.concatenate(parts) + _together(np.sum(log_axes(at, self.tails), axis=1), self.joint)

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


def emulate(points: np.ndarray, values: np.ndarray, *, is_heavy: bool = False) -> Emulator:
    """Fit the axes by least squares, and the process with the length and amplitude of the largest marginal likelihood.

    :param points: shape ``(n, k)``.
    :param values: log density less that at the origin, shape ``(n,)``; where it is not finite it has fallen far.
    :param bool is_heavy: whether tails may fall as powers, each axis by itself or all together.
    :return: the emulator.

    >>> points, tails = np.linspace(-4.0, 3.0, 15)[:, None], np.array([[0.75], [0.3]])
    >>> emulator, new = emulate(points, log_beta(points, tails)[:, 0]), np.array([[-2.2], [1.3]])
    >>> emulator.log_density(new).round(2), log_beta(new, tails)[:, 0].round(2)
    (array([-1.61, -0.96]), array([-1.61, -0.96]))
    """
    values = np.where(np.isfinite(values), values, -np.inf)
    values = np.maximum(values, np.max(values) - (_LOWEST_OF_POWERS if is_heavy else _LOWEST))
    fall = np.max(values) - values
    errors = _LEAST_ERROR + _GROWTH * np.maximum(fall - _EXACT_FALL, 0.0) ** 2
    tails, joint = _tails(points, values, 1.0 / (1.0 + fall), is_heavy)
    rest = values - _together(np.sum(log_axes(points, tails), axis=1), joint)
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
    return Emulator(points, coefficients, root, stretch * length, variance, tails, joint)


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


def log_student(at: np.ndarray, tails: np.ndarray) -> np.ndarray:
    r"""Log density of a Student t: :math:`-t^2 / 2` to second order, with tails that fall as powers.

    :param at: points, shape ``(..., k)``.
    :param tails: inverse powers below and above zero, positive, shape ``(2, k)``; near zero for a normal density.
    :return: elementwise, zero at zero.
    """
    inverse = np.where(at < 0.0, *tails)
    return -np.log1p(inverse * at**2) / (2.0 * inverse)


def log_axes(at: np.ndarray, tails: np.ndarray) -> np.ndarray:
    """:func:`log_beta` of axes with positive tails, :func:`log_student` of those with negative ones."""
    is_beta = tails[0] > 0.0
    if is_beta.all():
        return log_beta(at, tails)
    size = np.abs(tails)
    return np.where(is_beta, log_beta(at, np.where(is_beta, size, 1.0)), log_student(at, size))


def _together(total: np.ndarray, joint: float) -> np.ndarray:
    """Sum of the axes as a power, so that normal axes are a multivariate Student t."""
    return total if joint == 0.0 else -np.log1p(-2.0 * joint * total) / (2.0 * joint)


def _tails(points: np.ndarray, values: np.ndarray, weights: np.ndarray, is_heavy: bool) -> tuple[np.ndarray, float]:
    """Tails of the axes by weighted least squares, one axis after the other from a list of pairs, and what they have
    together."""
    size = points.shape[1]
    kinds = (_ROUNDNESSES, _POWERS) if is_heavy else (_ROUNDNESSES,)
    pairs = np.array([pair for kind in kinds for pair in itertools.product(kind, repeat=2)]).T
    columns = np.stack([log_axes(column[:, None], pairs).T for column in points.T])  # (k, pairs, n)
    penalty = np.sum(np.where(pairs < 0.0, _PENALTY_OF_POWERS, _PENALTY) * pairs**2, axis=0)
    best: tuple[float, np.ndarray, float] | None = None
    joint_tails = [1.0 / (size + freedom) for freedom in _DEGREES_OF_FREEDOM] if is_heavy else []
    for joint in (0.0, *joint_tails):
        if joint > 0.0:  # one power is enough
            columns, penalty = columns[:, : len(_ROUNDNESSES) ** 2], penalty[: len(_ROUNDNESSES) ** 2]
        chosen = np.zeros(size, int)
        parts, score = columns[:, 0].copy(), math.inf
        for _ in range(_NUM_SWEEPS):
            for axis in range(size):
                rest = parts.sum(axis=0) - parts[axis]
                scores = np.square(values - _together(rest + columns[axis], joint)) @ weights + penalty
                chosen[axis] = np.argmin(scores)
                score = float(scores[chosen[axis]])
                parts[axis] = columns[axis, chosen[axis]]
        if best is None or score < best[0]:
            best = score, pairs[:, chosen], joint
    assert best is not None  # the first of them is
    return best[1], best[2]


def _kernel(a: np.ndarray, b: np.ndarray, length: float) -> np.ndarray:
    # In place: most of the time goes into memory.
    found = (2.0 * a) @ b.T
    found -= np.sum(a**2, axis=1)[:, None]
    found -= np.sum(b**2, axis=1)
    np.minimum(found, 0.0, out=found)
    found *= 0.5 / length**2
    return np.exp(found, out=found)
