"""Columns of the unknowns by the priors of their sites, whose correlations join unknowns that no row joins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ...linalg.gaussian.prior import (
    CovariancePrior,
    FlatPrior,
    LowRankPrior,
    PrecisionPrior,
    PriorBlock,
    SparsePrecisionPrior,
)


class PriorColumns(NamedTuple):
    """Priors of the sites of a field, and the unknowns that each of them is about."""

    columns: Mapping[str, slice]
    """Columns of each site of the field, in their order."""
    blocks: Mapping[str, PriorBlock]
    """Prior of each site, with atoms of a program in place of numbers."""
    shape: Callable[[Any], tuple[int, ...]]
    """Function from an atom to its shape."""
    value: Callable[[Any], Any]
    """Function from a tree of atoms that depend on no site to their values."""

    @property
    def sites(self) -> list[tuple[int, int]]:
        """First column and number of columns of each site."""
        return [(columns.start, columns.stop - columns.start) for columns in self.columns.values()]

    @property
    def abstract(self) -> dict[str, PriorBlock]:
        """Priors with shapes in place of numbers, by site."""
        return {
            name: jax.tree.map(lambda atom: jax.ShapeDtypeStruct(self.shape(atom), float), self.blocks[name])
            for name in self.columns
        }

    def with_patterns(self) -> dict[str, PriorBlock]:
        """:attr:`abstract`, with the numbers of patterns of sparse precisions."""
        found = self.abstract
        for name, block in self.blocks.items():
            if isinstance(block, SparsePrecisionPrior):
                found[name] = dataclasses.replace(block, pattern=self.value(block.pattern))
        return found

    def coupled(self, *, given_inducing: bool = False) -> list[tuple[int, int, int]]:
        """First column, number and width of the blocks of each prior with correlations; those of low rank have none
        given their inducing values."""
        kinds = (CovariancePrior, PrecisionPrior) if given_inducing else (CovariancePrior, PrecisionPrior, LowRankPrior)
        found = []
        for name, columns in self.columns.items():
            block = self.blocks[name]
            if isinstance(block, kinds):
                width = self._leading_shape(block)[1]
                found.append((columns.start, (columns.stop - columns.start) // max(width, 1), width))
        return found

    def inducing(self) -> list[tuple[int, int]]:
        """Number and rank of the blocks of each prior of low rank."""
        shapes = [self._leading_shape(block) for block in self.blocks.values() if isinstance(block, LowRankPrior)]
        return [(batch, rank) for batch, _, rank in shapes]

    def independent_blocks(self) -> np.ndarray:
        """The number of the independent block of the prior that each unknown belongs to, -1 for flat ones."""
        numbers = np.arange(max((columns.stop for columns in self.columns.values()), default=0))
        for start, batch, width in self.coupled():
            numbers[start : start + batch * width] = start + np.repeat(np.arange(batch) * width, width)
        for name, columns in self.columns.items():
            if isinstance(self.blocks[name], FlatPrior):
                numbers[columns] = -1
        return numbers

    def _leading_shape(self, block: PriorBlock) -> tuple[int, ...]:
        """Shape of the first array of a prior: its covariance, precision or factors."""
        return self.shape(jax.tree.leaves(block)[0])
