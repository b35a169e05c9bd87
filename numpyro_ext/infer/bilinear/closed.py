"""Choice between closed updates and steps of a bilinear model, and what closed updates cannot treat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np

from ...potentials.base import Potential
from ...potentials.families.binary import LogitPotential
from ...structure.bilinear.factors import Unlisted
from ...structure.bilinear.reading import BilinearReading
from ...structure.errors import ModelStructureError
from .algorithms.quadratic import Bound, Options, Update, has_rule
from .algorithms.quadratic import Zeros as Tangents
from .algorithms.quadratic.layout import LayoutKind
from .algorithms.selection import SelectionRule
from .algorithms.sweeps import Family

Solver = Literal["natural-gradient", "lbfgs"]
Zeros = Literal["by_row", "shared", "exact", "sampled"]
"""Tangents of the bound of unlisted zeros, or draws of cells in the place of sweeps."""

MAX_CELLS = 50_000_000
"""Pairs of a row and a column up to which each unlisted zero may have a tangent of its own, by default."""
_DENSE = 8
"""Pairs per cell up to which the cells are held as a matrix."""


def check_together(
    bound: Bound,
    zeros: Zeros,
    update: Update,
    unlisted_cells: Unlisted,
    solver: Solver,
    devices: Sequence[jax.Device] | None,
    has_restarts: bool,
) -> None:
    """Refuse options of an engine that exclude each other, and devices of other processes alone.

    :param bool has_restarts: whether other random starts are asked for.
    :raises ValueError: in these cases.
    """
    is_zero = unlisted_cells == "zero"
    if zeros == "sampled" and (not is_zero or bound != "jaakkola" or update != "joint" or has_restarts):
        raise ValueError(
            "zeros='sampled' draws unlisted cells of zeros and ones from one start: give unlisted_cells='zero' and "
            "bound='jaakkola', and leave update and num_restarts at their defaults."
        )
    if bound != "exact" and solver == "lbfgs":
        raise ValueError(f"bound={bound!r} has closed updates: leave solver at its default.")
    if bound == "bohning" and is_zero:
        raise ValueError("Zeros of Bernoulli outcomes in unlisted cells are for bound='jaakkola'.")
    if devices is None:
        return
    if solver == "lbfgs":
        raise ValueError("L-BFGS runs on one device: leave devices out, or take solver='natural-gradient'.")
    if is_zero and bound != "jaakkola":
        raise ValueError(
            "Zeros in unlisted cells of counts are for one device: leave devices out. (Those of Bernoulli outcomes, "
            "with bound='jaakkola', may be divided.)"
        )
    if not any(d.process_index == jax.process_index() for d in devices):
        raise ValueError(f"devices must hold one of this process: {jax.local_devices()}; got {list(devices)}.")


class ClosedChoice(NamedTuple):
    """Options of an engine that closed updates depend on."""

    bound: Bound = "exact"
    update: Update = "joint"
    zeros: Zeros = "by_row"
    max_cells: int = MAX_CELLS
    selection: SelectionRule = "learned"
    measures_draws: bool = False
    """True if moments of drawn cells are a part of the state."""

    def options(self, reading: BilinearReading, families: tuple[Family, Family]) -> Options | None:
        """Static choices for a reading, or ``None`` where steps take the place of closed updates.

        :raises ModelStructureError: if a bound is asked for and does not hold for the model.
        :raises ValueError: if options contradict each other.
        """
        takes = has_closed_rule(reading.factor_kind, self.bound)
        if reading.pair_sites is not None and self.bound != "jaakkola":
            raise ModelStructureError(
                f"the censored pairs of site '{reading.pair_sites.name}' need bound='jaakkola'.",
                site=reading.pair_sites.name,
            )
        if self.bound != "exact":
            self._check(reading, takes)
        elif reading.unlisted_cells == "zero" and isinstance(reading.factor_kind, LogitPotential):
            raise ModelStructureError(
                f"unlisted zeros of Bernoulli outcomes, here of {list(reading.factor_names)}, need bound='jaakkola'.",
                site=reading.factor_names[0],
            )
        if self.selection != "learned" and reading.pair_sites is None:
            raise ValueError(f"selection={self.selection!r} is for CensoredPairs, which the model does not observe.")
        if not takes or not reading.takes_closed_updates:
            return None
        if self.update != "joint" and "full" in families:
            raise ValueError(
                f"update={self.update!r} is for independent components: with covariance='full' all of a vector moves "
                "at once. Leave update out, or take covariance='diagonal'."
            )
        is_diagonal = reading.has_products_alone and "full" not in families
        if self.zeros == "sampled" and reading.unlisted_cells == "zero":
            self._check_drawn(reading, families)
        tangents = self._tangents(reading)
        layout = self._layout(reading, tangents)
        return Options(self.bound, layout, is_diagonal, self.update, tangents, self.selection)

    def _check_drawn(self, reading: BilinearReading, families: tuple[Family, Family]) -> None:
        if reading.pair_sites is not None:
            raise ValueError(
                "zeros='sampled' draws zeros and ones, and the model observes CensoredPairs: leave it out."
            )
        if set(families) != {"diagonal"}:
            raise ValueError(
                "zeros='sampled' is for independent components on both sides: leave covariance at 'diagonal', or take "
                "zeros='by_row'."
            )
        if not reading.has_products_alone:
            raise ModelStructureError(
                f"predictors of '{reading.factor_names[0]}' have components that are in products and in linear terms, "
                "or products of several, and drawn cells are for others: take zeros='by_row'.",
                site=reading.factor_names[0],
            )

    def _tangents(self, reading: BilinearReading) -> Tangents:
        """Tangents of computed bounds: where cells are drawn the best ones up to the largest number of cells."""
        if self.zeros != "sampled":
            return self.zeros
        return "exact" if _num_pairs(reading) <= self.max_cells else "by_row"

    def _check(self, reading: BilinearReading, takes: bool) -> None:
        if not takes:
            raise ModelStructureError(
                f"bound={self.bound!r} holds for logistic factors: Bernoulli and binomial outcomes by their logits, "
                f"and negative binomial counts. Those of {list(reading.factor_names)} are "
                f"{type(reading.factor_kind).__name__}: leave bound out.",
                site=reading.factor_names[0],
            )
        if any(reading.is_coupled):
            names = list(reading.sides[0 if reading.is_coupled[0] else 1])
            raise ModelStructureError(
                f"the vectors of {names} depend on each other, or cells touch several of them, and bound="
                f"{self.bound!r} is for independent ones: leave bound out.",
                site=names[0],
            )
        if not reading.takes_closed_updates:
            raise ModelStructureError(
                f"the coefficients of the predictor of '{reading.factor_names[0]}' differ between cells, as those of "
                f"covariates of a cell do, and bound={self.bound!r} needs the same ones in all cells: leave bound out.",
                site=reading.factor_names[0],
            )

    def _layout(self, reading: BilinearReading, tangents: Tangents) -> LayoutKind:
        rows, columns = (np.asarray(index) for index in reading.index)
        num_rows, num_columns = (len(elements) for elements in reading.elements)
        num_pairs = _num_pairs(reading)
        if reading.unlisted_cells == "zero" and tangents == "exact":
            if num_pairs > self.max_cells:
                raise ValueError(
                    f"zeros='exact' visits all {num_rows} x {num_columns} = {num_pairs} pairs, more than max_cells="
                    f"{self.max_cells}. Take zeros='by_row' or 'shared', whose cost is that of the listed cells, or a "
                    "larger max_cells."
                )
            return "grid"
        if reading.unlisted_cells == "zero" or reading.pair_sites is not None or num_pairs > _DENSE * rows.size:
            return "tiles"
        counts = np.bincount(rows.astype(np.int64) * num_columns + columns, minlength=num_pairs)
        return "grid" if counts.max() <= 1 else "tiles"


def _num_pairs(reading: BilinearReading) -> int:
    num_rows, num_columns = (len(elements) for elements in reading.elements)
    return num_rows * num_columns


def has_closed_rule(kind: Potential, bound: Bound) -> bool:
    """True if factors have a quadratic rule.

    :param Potential kind: the factors, with shapes in the place of arrays.
    :param str bound: of logistic ones.
    """
    found: list[bool] = []

    def look(potential: Potential) -> int:
        found.append(has_rule(potential, bound))
        return 0

    jax.eval_shape(look, kind)
    return found[0]
