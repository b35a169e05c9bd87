"""Rules on a line whose sums tell whether they can be trusted: of Gauss and Hermite, and even nodes with long tails."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

_ENDS = 1e3
"""Times that less mass is allowed at the ends than what moments may change by with a half of the nodes."""


class LineRule(NamedTuple):
    """Nodes on a line, and what each adds to the sums over all of them.

    The first three sums are the coefficients of the first Hermite polynomials, which are the moments. The others, of
    each of these with the first three of the other axis, are next to nothing where the rule is right.
    """

    position: np.ndarray
    """Shape ``(size,)``."""
    weight: np.ndarray
    """Shape ``(size, sums)``."""

    def in_blocks(self, copies: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions and weights, filled up with nodes of no weight, of shapes ``(blocks, copies, ...)``."""
        pad = -len(self.position) % copies
        position, weight = np.pad(self.position, (0, pad)), np.pad(self.weight, ((0, pad), (0, 0)))
        return position.reshape(-1, copies), weight.reshape(-1, copies, weight.shape[1])


def _hermite(position: np.ndarray, degree: int) -> np.ndarray:
    """Hermite polynomials that are orthonormal under the standard normal density, shape ``(size, degree + 1)``."""
    scale = np.sqrt([float(math.factorial(k)) for k in range(degree + 1)])
    return np.polynomial.hermite_e.hermevander(position, degree) / scale


def gauss_hermite(size: int) -> LineRule:
    """The rule of Gauss and Hermite, for functions that are smooth in the units of the frame.

    Ratios to the standard normal density are sums of Hermite polynomials. The last two coefficients that the nodes
    tell apart say how fast these sums converge; the rule misses those of about twice the degree.
    """
    position, weight = np.polynomial.hermite_e.hermegauss(size)
    polynomials = _hermite(position, size - 1)
    weight = weight * np.exp(0.5 * position**2)
    return LineRule(position, weight[:, None] * polynomials[:, [0, 1, 2, size - 2, size - 1]])


def trapezoidal(spacing: float, reach: float, stretch: float) -> LineRule:
    """Even nodes in ``u`` at ``sinh(stretch u) / stretch``, where tails are to be followed.

    The error is told by sums of alternating sign, which are what halves of the nodes differ by, and by the mass at the
    ends.
    """
    most = round(reach / spacing)
    step = np.arange(-most, most + 1)
    position = np.sinh(stretch * step * spacing) / stretch
    weight = spacing * np.cosh(stretch * step * spacing)[:, None] * _hermite(position, 2)
    is_end = (np.abs(step) == most)[:, None]
    return LineRule(
        position, np.concatenate([weight, weight * (-1.0) ** step[:, None], _ENDS * weight * is_end], axis=1)
    )
