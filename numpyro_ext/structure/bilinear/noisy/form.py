"""The form of bilinear models of ordered categories whose noise, cut points and priors of the sides are latent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..form import Bilinear


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

    def taken(self, numbers: Array) -> NoisyBilinear:
        """The same model of the cells with these numbers."""
        return _by_cells(lambda x: x[numbers], self)

    def joined(self, other: NoisyBilinear) -> NoisyBilinear:
        """The same model of these cells and, behind them, of the cells of another form with the same unknowns."""
        return _by_cells(lambda x, y: jnp.concatenate([x, y]), self, other)


def _by_cells(function: Callable[..., Array], *forms: NoisyBilinear) -> NoisyBilinear:
    """Forms made one by a function of every array that has one entry for each cell; factors of cells stay as they are.

    What is the same for all cells is written out for each.
    """
    first, names = (
        forms[0],
        ("row_index", "column_index", "coupling", "row_linear", "column_linear", "offset", "weight"),
    )

    def made(*arrays: Array) -> Array:
        sizes = (form.label.shape[0] for form in forms)
        return function(*(jnp.broadcast_to(x, (n, *x.shape[1:])) for x, n in zip(arrays, sizes, strict=True)))

    arrays: dict[str, Any] = {name: made(*(getattr(form.cells, name) for form in forms)) for name in names}
    cells = first.cells._replace(**arrays)
    scales = (scale._replace(group=made(*(f.scales[k].group for f in forms))) for k, scale in enumerate(first.scales))
    cuts = first.cuts
    if cuts is not None:
        cuts = cuts._replace(element=made(*(form.cuts.element for form in forms if form.cuts is not None)))
    return first._replace(
        cells=cells._replace(row_order=jnp.argsort(cells.row_index), column_order=jnp.argsort(cells.column_index)),
        label=made(*(form.label for form in forms)),
        noise=made(*(form.noise for form in forms)),
        thresholds=made(*(form.thresholds for form in forms)),
        scales=tuple(scales),
        cuts=cuts,
    )


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
