"""Coordinates around the mode of the hyperparameters, and fits of the field at points in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import numpy as np

from ....compilation.transfer import to_device
from ...front.running.progress import progress_bar
from ...front.state import Fit
from ...hyper.density.known_points import KnownPoints
from ...hyper.space import UnconstrainedSpace
from ..fitting.fitting_programs import FittingPrograms
from ..fitting.point_fit import PointFit

_TOL = 1e-4
"""Tolerance of fits at a design: marginals are mixtures over points that are a standard deviation apart."""
_TOGETHER = 128
"""Points whose hyperparameters are computed in one call."""


class NoDesign(RuntimeError):
    """There is nothing to place a design around."""


class Surroundings(NamedTuple):
    """The mode of the hyperparameters, and coordinates ``z`` in which their density around it is about ``N(0, I)``."""

    programs: FittingPrograms
    """Programs of the run, whose objective is a density in the unconstrained space."""
    data: Any
    """The arrays of the reading."""
    space: UnconstrainedSpace
    """Space of the hyperparameters; ``param`` sites stay at their optimum."""
    fit: Fit
    """The end of the search for the mode."""
    marginals_fn: Callable[..., Any]
    """Function of the posterior that is kept at each point; see :class:`FittingPrograms`."""
    num_rows: int
    """Rows of the form."""
    factor: np.ndarray
    """From ``z`` to integrable hyperparameters, shape ``(d, k)``."""
    progress_bar: bool

    @classmethod
    def of(
        cls,
        programs: FittingPrograms,
        data: object,
        space: UnconstrainedSpace,
        fit: Fit,
        marginals_fn: Callable[..., object],
        num_rows: int,
        *,
        is_strict: bool,
        progress_bar: bool,
    ) -> Surroundings:
        """Surroundings of the mode of a fit.

        :param bool is_strict: whether the density has to fall in every direction from it. Otherwise hyperparameters
            stay at it in the directions in which it does not.
        :raises NoDesign: if it has to and does not, or falls in none.
        """
        factor = _factor(fit, space.integrable, is_strict=is_strict)
        return cls(programs, data, space, fit, marginals_fn, num_rows, factor, progress_bar)

    def turned(self) -> Surroundings:
        """The same with each axis of ``z`` close to one hyperparameter, where there are as many."""
        if self.factor.shape[0] != self.size or not self.size:
            return self
        rows = self.factor / np.linalg.norm(self.factor, axis=1, keepdims=True)
        left, _, right = np.linalg.svd(rows)
        return self._replace(factor=self.factor @ (left @ right).T)

    def turn(self) -> np.ndarray:
        """Coordinates of these surroundings in those of the turned ones, an orthogonal matrix of shape ``(k, k)``:
        points of the turned ones times its transpose are points here."""
        return np.linalg.lstsq(self.factor, self.turned().factor)[0]

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return int(self.factor.shape[1])

    def place(self, points: np.ndarray) -> np.ndarray:
        """Unconstrained hyperparameters of points, shapes ``(n, k)`` and ``(n, d)``."""
        values = np.repeat(np.asarray(self.fit.last_state.values)[None], len(points), axis=0)
        values[:, self.space.integrable] += points @ self.factor.T
        return values

    def constrained_sites(self, points: np.ndarray) -> dict[str, np.ndarray]:
        """Values of all hyperparameters at points, as what a user is told of: by name, shape ``(n, v)``."""
        values, parts = self.place(points).astype(self.fit.last_state.values.dtype), []
        for start in range(0, len(values), _TOGETHER):
            # filled up, so that one program serves any number
            index = np.minimum(np.arange(start, start + _TOGETHER), len(values) - 1)
            found = self.programs.constrained(to_device(values[index]), self.space.fixed)
            parts.append({name: np.asarray(value).reshape(_TOGETHER, -1) for name, value in found.items()})
        return {name: np.concatenate([part[name] for part in parts])[: len(values)] for name in parts[0]}

    def constrained(self, points: np.ndarray) -> np.ndarray:
        """The same as one array, shape ``(n, v)``."""
        return np.concatenate(list(self.constrained_sites(points).values()), axis=1)

    def cell(self, step: float) -> np.ndarray:
        """Standard deviations of unconstrained hyperparameters within a cube of ``z`` of this side, shape ``(d,)``."""
        found = np.zeros(self.space.size)
        found[self.space.integrable] = step * np.sqrt(np.sum(self.factor**2, axis=1) / 12.0)
        return found

    def fits(
        self,
        points: np.ndarray,
        states: object = None,
        tol: float = _TOL,
        *,
        with_marginals: bool = True,
        with_gradient: bool = False,
        task: str = "Integration",
        known: KnownPoints | None = None,
        floor: float = -math.inf,
    ) -> PointFit:
        """The field at points of shape ``(n, k)``.

        :param states: where the fits start, stacked; by default where the mode was left.
        :param float tol: of the fits.
        :param bool with_marginals: false for zeros in their place.
        :param bool with_gradient: whether gradients are asked for, which :meth:`slopes` has in these coordinates.
        :param str task: what the progress bar calls it.
        :param KnownPoints known: if given, fits start from what it predicts, and are noted in it.
        :param float floor: log density below which no digits are asked for.
        """
        return self._fits(self.place(points), states, tol, with_marginals, task, points, known, with_gradient, floor)

    def slopes(self, fits: PointFit) -> np.ndarray:
        """Gradients of the log density at points in these coordinates, shape ``(n, k)``."""
        return np.asarray(fits.gradient)[:, self.space.integrable] @ self.factor

    def fits_of(self, values: np.ndarray, tol: float, *, with_marginals: bool = True) -> PointFit:
        """:meth:`fits` at unconstrained hyperparameters, shape ``(n, d)``."""
        return self._fits(values, None, tol, with_marginals)

    def _fits(
        self,
        values: np.ndarray,
        states: object,
        tol: float,
        with_marginals: bool,
        task: str = "Integration",
        points: np.ndarray | None = None,
        known: KnownPoints | None = None,
        with_gradient: bool = False,
        floor: float = -math.inf,
    ) -> PointFit:
        last = self.fit.last_state
        tolerance = np.asarray(max(tol, self.programs.tol), values.dtype)
        batch, parts = self.programs.points_per_call if self.space.size else 1, []
        mode = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[None], batch, axis=0), last.state)
        start = 0
        with progress_bar(len(values), task, enabled=self.progress_bar) as bar:
            while start < len(values):
                number = min(batch, len(values) - start)
                if known is not None:
                    # The first ones teach those that follow.
                    number = min(number, max(self.size + 1, known.number // 2))
                # Filled up, so that one program serves all.
                filled = np.minimum(np.arange(batch), number - 1)
                index = start + filled
                begun = mode if states is None else jax.tree.map(itemgetter(index), states)
                if points is not None and known is not None and known.number:
                    begun = jax.tree.map(itemgetter(filled), known.states_at(points[start : start + number]))
                found = self.programs.fits(
                    self.data,
                    self.space.fixed,
                    values[index].astype(last.values.dtype),
                    number,
                    begun,
                    tolerance,
                    with_marginals,
                    with_gradient,
                    floor,
                    marginals_fn=self.marginals_fn,
                )
                found = jax.tree.map(lambda leaf, number=number: np.asarray(leaf)[:number], found)
                if points is not None and known is not None:
                    is_good = found.converged & np.isfinite(found.objective)
                    known.append(points[start : start + number], found.state, is_good)
                parts.append(found)
                start += number
                bar.update(number)
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _factor(fit: Fit, axes: np.ndarray, *, is_strict: bool) -> np.ndarray:
    """A root of the covariance of the integrable hyperparameters, given the others, with a column for each direction in
    which their density curves."""
    if not len(axes):
        return np.zeros((0, 0))
    if fit.covariance is None or (is_strict and not fit.has_curvature):
        raise NoDesign("the density of the hyperparameters does not curve downwards in every direction from its mode")
    covariance = np.asarray(fit.covariance)
    others = np.setdiff1d(np.arange(len(covariance)), axes)
    cross = covariance[np.ix_(axes, others)]
    # Of what the others have of them; directions without curvature have no variance here.
    given = cross @ np.linalg.pinv(covariance[np.ix_(others, others)], hermitian=True) @ cross.T
    eigenvalues, vectors = np.linalg.eigh(covariance[np.ix_(axes, axes)] - given)
    has_variance = eigenvalues > np.finfo(eigenvalues.dtype).eps * len(axes) * np.max(eigenvalues)
    if not has_variance.any():
        raise NoDesign("the density of the hyperparameters does not curve downwards in any direction from its mode")
    return (vectors * np.sqrt(np.maximum(eigenvalues, 0.0)))[:, has_variance]
