r"""Densities of many hyperparameters that are nearly normal: a map of normal variables with their skewness.

In coordinates in which a log density is about :math:`-|z|^2/2` around its mode, with third derivatives
:math:`T_{jkl}`, the map

.. math:: z_j = u_j + \tfrac16 \sum_{kl} T_{jkl} u_k u_l + \tfrac13 \sum_k T_{jkk}, \qquad u \sim N(0, I),

has that density to first order in the third derivatives (its mean is the shift :math:`\tfrac12 T_{jkk}` of Tierney and
Kadane 1986). Of these the ones with two equal indices are known from gradients at two points on each axis; others are
left out. Squares and products of the map are exponentials of the same first order, so that it has an inverse.

What later orders leave is a location and a width of each axis, found by two identities of Stein: over the density the
gradient has the mean zero, and its product with the axis the mean minus one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .design import PROBE, Design, normal_points

NUM_NORMAL_POINTS = 64
"""Points of a density, of answers, and at least so many from which its misfit is told."""

_LARGEST_BEND, _LARGEST_CROSS = 1.0, 0.3
"""Bends of an axis by itself and by another one at most: beyond, derivatives at the mode tell nothing of a density."""
_LEAST_BEND = 1e-6
_LARGEST_STRETCH = 2.0
"""Factor of a width, in one correction."""
_FEW, _MOST_PROBED = 64, 128
"""Axes of which third derivatives are always found, and where a normal density does not fit."""
_NUM_ROUNDS, _SHARE = 2, 0.5
"""Corrections of location and widths, and the share of each: of skewed densities a whole one goes too far."""
_LITTLE_SHIFT, _LITTLE_STRETCH = 0.1, 0.03
"""Shift and stretch of each axis after which there is no further round: a whole correction then fits."""


class SkewedNormal(NamedTuple):
    """A density of skewed variables, which are a function of normal ones."""

    bend: np.ndarray
    """A third of the third derivative of the log density along each axis, shape ``(d,)``."""
    cross: np.ndarray
    """In row ``k`` and column ``j`` by how much axis ``k`` stretches axis ``j``: a third of the third derivative, once
    along ``k`` and twice along ``j``; zero on the diagonal, shape ``(d, d)``."""
    shift: np.ndarray
    """Added to the bent axes, shape ``(d,)``."""
    scale: np.ndarray
    """Factor of the bent axes, shape ``(d,)``."""

    @classmethod
    def plain(cls, size: int) -> SkewedNormal:
        """The normal density."""
        return cls(np.zeros(size), np.zeros((size, size)), np.zeros(size), np.ones(size))

    @classmethod
    def of(cls, above: np.ndarray, below: np.ndarray) -> SkewedNormal:
        """The density with the third derivatives that gradients tell.

        :param above: gradients of the log density at the distance ``PROBE`` on the positive side of each axis, a row
            for each axis, shape ``(d, d)``; what is not finite tells nothing.
        :param below: the same on the negative side.

        >>> x = PROBE * np.eye(2)
        >>> gradient = lambda z: -z + 0.06 * z**2  # two axes with the third derivative 0.12
        >>> found = SkewedNormal.of(gradient(x), gradient(-x))
        >>> print(found.bend.round(3), found.shift.round(3))
        [0.04 0.04] [0.04 0.04]
        """
        thirds = (above + below) / (3.0 * PROBE**2)
        thirds = np.where(np.isfinite(thirds), thirds, 0.0)  # in row k and column j: twice along k, once along j
        bend = np.clip(np.diagonal(thirds), -_LARGEST_BEND, _LARGEST_BEND)
        squares = np.clip(thirds, -_LARGEST_CROSS, _LARGEST_CROSS)
        np.fill_diagonal(squares, 0.0)
        return cls(bend, squares.T, bend + squares.sum(axis=0), np.ones(len(bend)))

    def places(self, normal: np.ndarray) -> np.ndarray:
        """Points of this density.

        :param normal: points of normal variables, shape ``(n, d)``.
        """
        bent = self._bent(normal)[0] * np.exp(normal @ self.cross)
        return self.scale * (bent + 0.5 * normal**2 @ self.cross.T) + self.shift

    def design(self, normal: np.ndarray) -> Design:
        """Points of this density, and minus its logarithm there, without their number.

        Cost: a determinant of the size of the density for each point.

        :param normal: points of normal variables, shape ``(n, d)``.

        >>> design = SkewedNormal.plain(1).design(np.array([[0.0], [1.0]]))
        >>> print(design.points[:, 0].round(5), (design.log_volumes - 0.5 * np.log(2.0 * np.pi)).round(12))
        [0. 1.] [0.  0.5]
        """
        factor = np.exp(normal @ self.cross)
        bent, slope = self._bent(normal)
        axes = np.arange(normal.shape[1])
        jacobians = (bent * factor)[:, :, None] * self.cross.T + self.cross * normal[:, None, :]
        jacobians[:, axes, axes] += slope * factor
        log_slopes = np.linalg.slogdet(jacobians)[1] + np.sum(np.log(self.scale))
        constant = 0.5 * normal.shape[1] * math.log(2.0 * math.pi)
        return Design(self.places(normal), 0.5 * np.sum(normal**2, axis=1) + log_slopes + constant)

    def _bent(self, normal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each axis bent by itself, and the derivative."""
        is_bent = np.abs(self.bend) > _LEAST_BEND
        bend = np.where(is_bent, self.bend, 1.0)
        bent, slope = np.expm1(bend * normal) / bend, np.exp(bend * normal)
        return np.where(is_bent, bent, normal), np.where(is_bent, slope, 1.0)

    def misfit(self, points: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """By how much each axis is to be shifted, and stretched around its mean.

        :param points: of this density, shape ``(n, d)``.
        :param gradients: of the log density that it is to have, at the points; points where they are not finite are
            left out, and if these are more than half nothing is known.
        :return: shifts and factors, shape ``(d,)`` each.
        """
        is_known = np.isfinite(gradients).all(axis=1)
        if 2 * is_known.sum() <= len(points):
            return np.zeros_like(self.shift), np.ones_like(self.scale)
        points, gradients = points[is_known], gradients[is_known]
        product = np.mean((points - points.mean(axis=0)) * gradients, axis=0)
        factors = 1.0 / np.sqrt(np.clip(-product, _LARGEST_STRETCH**-2, _LARGEST_STRETCH**2))
        return np.clip(gradients.mean(axis=0), -1.0, 1.0), factors

    def moved(self, mean: np.ndarray, shifts: np.ndarray, factors: np.ndarray) -> SkewedNormal:
        """The density stretched around its mean, and shifted."""
        return self._replace(shift=factors * (self.shift - mean) + mean + shifts, scale=factors * self.scale)


def skewed_normal(slopes: Callable[[np.ndarray], np.ndarray], size: int) -> SkewedNormal:
    """Find the density of skewed normal variables with the gradients of a log density.

    Cost: two gradients for each axis, and once or twice 64 to 128 more; of more than 64 axes there are none for axes
    where a normal density fits, nor of more than 128.

    :param slopes: gradients of the log density at points of shape ``(n, d)``, in coordinates in which the density is
        about ``N(0, I)`` around its mode.
    :param int size: the number of coordinates.

    >>> found = skewed_normal(lambda z: 2.0 - 2.0 * np.exp(0.5 * z), 1)  # twice a log gamma variable, of shape 4
    >>> z = found.places(normal_points(1, 4000).points)
    >>> print(z.mean().round(2), z.std().round(2))  # exact: -0.26 and 1.07
    -0.25 1.07
    """
    normal = normal_points(size, max(NUM_NORMAL_POINTS, 2 * min(size, _FEW))).points  # exact covariances, of up to 64
    found, is_bent = SkewedNormal.plain(size), False

    def bent() -> SkewedNormal:
        gradients = slopes(PROBE * np.concatenate([np.eye(size), -np.eye(size)]))
        return SkewedNormal.of(gradients[:size], gradients[size:])

    if size <= _FEW:
        found, is_bent = bent(), True
    num_rounds = 0
    while num_rounds < _NUM_ROUNDS:
        points = found.places(normal)
        mean, (shifts, factors) = points.mean(axis=0), found.misfit(points, slopes(points))
        if np.all(np.abs(shifts) < _LITTLE_SHIFT) and np.all(np.abs(np.log(factors)) < _LITTLE_STRETCH):
            return found.moved(mean, shifts, factors)
        if not is_bent and size <= _MOST_PROBED:
            found, is_bent = bent(), True
        else:
            found = found.moved(mean, _SHARE * shifts, factors**_SHARE)
            num_rounds += 1
    return found
