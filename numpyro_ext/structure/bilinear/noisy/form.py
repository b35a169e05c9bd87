"""The form of bilinear models of ordered categories whose noise, cut points and priors of the sides are latent."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from ..form import Bilinear

__all__ = ["Cuts", "NoiseSites", "NoisyBilinear", "Scale", "SideHyper"]


class Scale(NamedTuple):
    """Noise variances with inverse gamma priors, one for each group of cells."""

    group: Array
    """Variance that each cell has, shape ``(num_cells,)``."""
    shape: Array
    """Shapes of the gamma priors of the precisions, ``(num_groups,)``."""
    rate: Array
    """Rates of these priors."""


class Cuts(NamedTuple):
    """Cut points that are Gaussian, with prior means that may be Gaussian too."""

    element: Array
    """Element of the site that each boundary of each cell is, shape ``(num_cells, num_boundaries)``."""
    mean: Array
    """Prior means of the elements, less those of their parents, shape ``(num_elements,)``."""
    variance: Array
    """Prior variances given the parents."""
    parent: Array | None
    """Parent of each element; ``None`` where prior means are known."""
    parent_mean: Array
    """Prior means of the parents, shape ``(num_parents,)``."""
    parent_variance: Array


class SideHyper(NamedTuple):
    """Priors of the means and variances of the vectors of a side; an index behind the last element is none."""

    mean: Array
    """Known part of the prior means of the vectors, shape ``(num, size)``."""
    variance: Array
    """Known factor of their variances."""
    mean_index: Array | None
    """Latent mean of each component, shape ``(num, size)``."""
    mean_mean: Array
    mean_variance: Array
    variance_index: Array | None
    """Latent variance of each component."""
    shape: Array
    """Shapes of the gamma priors of the latent precisions."""
    rate: Array


class NoisyBilinear(NamedTuple):
    """Cells whose predictor has noise of several latent variances before a category is read off between cut points."""

    cells: Bilinear
    """Predictors in units of the cut points; its factors play no part."""
    label: Array
    """Category of each cell, from zero."""
    noise: Array
    """Known factor of each noise variance, shape ``(num_cells,)``."""
    thresholds: Array
    """Known part of each cut point, shape ``(num_cells, num_boundaries)``."""
    scales: tuple[Scale, ...]
    cuts: Cuts | None
    sides: tuple[SideHyper, SideHyper]


class NoiseSites(NamedTuple):
    """Names of the latent sites behind a :class:`NoisyBilinear`."""

    scales: tuple[str, ...]
    cuts: str | None
    parent: str | None
    means: tuple[str | None, str | None]
    """Prior means of rows and columns."""
    variances: tuple[str | None, str | None]
    precisions: frozenset[str]
    """Sites that are precisions, with gamma priors, and not variances."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every site."""
        found = (*self.scales, self.cuts, self.parent, *self.means, *self.variances)
        return tuple(name for name in found if name is not None)
