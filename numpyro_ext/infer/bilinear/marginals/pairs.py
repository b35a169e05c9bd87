"""Posteriors of the selection of rows and columns where pairs are censored, and states at stated moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import Array

from ....structure.bilinear.form import Bilinear, Side
from ....structure.bilinear.reading import BilinearReading
from ...front.answers.sites import SitePosterior
from ..algorithms import sweeps as core
from ..algorithms.cells import Block
from ..algorithms.selection import Censored, Selected
from .places import site_places


class CensoredShares(NamedTuple):
    """Rows and columns of the censored pairs of a fit."""

    rows: Array
    """Probability that a censored pair is of each row, shape ``(num_rows,)``."""
    columns: Array
    """Probability that it is of each column, shape ``(num_columns,)``."""
    tangent: Array
    """Size of the predictor at which the bounds of all pairs that are not listed touch."""

    @classmethod
    def of(cls, selected: Selected) -> CensoredShares:
        """Shares and tangent of a state."""
        return cls(jnp.exp(selected.log_rows), jnp.exp(selected.log_columns), jnp.sqrt(selected.tangent))


class DirichletPosterior(SitePosterior):
    """The Dirichlet posterior of probabilities, or of some of them.

    :param str name: of the site.
    :param counts: parameters of the distribution, shape ``(n,)``.
    :param places: numbers of the probabilities, in the shape that they are to have; all by default.
    """

    def __init__(self, name: str, counts: Array, places: np.ndarray | None = None) -> None:
        self._counts = np.asarray(counts)
        self._places = np.arange(self._counts.size) if places is None else np.asarray(places)
        flat = self._places.reshape(-1)
        total = self._counts.sum()
        mean = self._counts[flat] / total

        def covariance() -> Array:
            is_same = flat[:, None] == flat[None, :]
            return jnp.asarray((np.where(is_same, mean, 0.0) - np.outer(mean, mean)) / (1.0 + total))

        def sample(rng_key: Array, num_samples: int) -> Array:
            return jax.random.dirichlet(rng_key, jnp.asarray(self._counts), (num_samples,))[:, flat]

        super().__init__(
            name, self._places.shape, lambda: mean, lambda: mean * (1.0 - mean) / (1.0 + total), covariance, sample
        )

    def _quantile(self, q: np.ndarray) -> Array:
        own, total = self._counts[self._places.reshape(-1)], self._counts.sum()
        return jnp.asarray(scipy.special.betaincinv(own, total - own, q[..., None]), self._counts.dtype)

    def part(self, places: np.ndarray) -> DirichletPosterior:
        """Some of the elements as a site of their own; see :meth:`SitePosterior.part`."""
        return DirichletPosterior(self.name, jnp.asarray(self._counts), self._places.reshape(-1)[np.asarray(places)])


def share_posteriors(reading: BilinearReading, selected: Selected | None) -> dict[str, SitePosterior]:
    """Posteriors of the probabilities of selection, by the names of their sites."""
    if selected is None:
        return {}
    counts = zip(reading.share_sites, (selected.row_counts, selected.column_counts), strict=True)
    return {name: DirichletPosterior(name, count) for name, count in counts}


def state_at(
    reading: BilinearReading, form: Bilinear, priors: tuple[Side, Side], state: core.State, values: Mapping[str, Any]
) -> core.State:
    """A state with given moments.

    :param BilinearReading reading: of the model.
    :param Bilinear form: of it.
    :param priors: of its rows and columns.
    :param State state: for what is not given.
    :param values: means and variances by the names of sites of the two sides, each in the shape of the site or one that
        broadcasts to it; for the probabilities of selection the shares of rows or columns in the censored pairs; for
        ``"tangent"`` the size of the predictor at which the bounds of pairs that are not listed touch.
    :raises ValueError: if there is no such site, or a moment cannot be that of one.
    """
    selected = state.selected
    for name, given in values.items():
        if name in reading.field:
            blocks = state.rows, state.columns
            places = site_places(reading, blocks, name, priors)
            block = _block_at(name, places, tuple(reading.site_shapes[name]), given)
            is_rows = name in reading.sides[0]
            state = state._replace(rows=block) if is_rows else state._replace(columns=block)
        elif selected is not None and name in reading.share_sites:
            part = "log_rows" if name == reading.share_sites[0] else "log_columns"
            share = np.asarray(given, float)
            if share.shape != getattr(selected, part).shape or not np.all(share > 0.0):
                raise ValueError(f"The shares of {name!r} must be positive, of shape {getattr(selected, part).shape}.")
            log_share = jnp.asarray(np.log(share / share.sum()), selected.log_rows.dtype)
            selected = selected._replace(**{part: log_share})
        elif selected is not None and name == "tangent":
            selected = selected._replace(tangent=jnp.asarray(np.square(float(given)), selected.tangent.dtype))
        else:
            known = [*reading.field, *reading.share_sites, *(["tangent"] if selected is not None else [])]
            raise ValueError(f"A state has no moments of {name!r}; it has those of {known}.")
    censored = Censored.of_form(form)
    if censored is not None and selected is not None:
        selected = censored.with_counts(selected)
    return state._replace(selected=selected)


def _block_at(name: str, places: Any, shape: tuple[int, ...], given: Any) -> Block:
    block = places.block
    if not isinstance(block, Block) or block.covariance is None:
        raise ValueError(f"Site {name!r} has no Gaussian of its own for each vector, whose moments could be given.")
    try:
        mean, variance = (np.broadcast_to(np.asarray(x, float), shape).reshape(-1) for x in given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"values[{name!r}] must be (mean, variance), each of the shape {shape}.") from error
    if not np.all(np.isfinite(mean)) or not np.all((variance > 0.0) & np.isfinite(variance)):
        raise ValueError(f"values[{name!r}]: means must be finite, and variances positive.")
    at = places.vector, places.component
    covariance = block.covariance
    if covariance.ndim == 2:
        return Block(block.mean.at[at].set(mean), covariance.at[at].set(variance))
    covariance = covariance.at[(*at, slice(None))].set(0.0).at[(at[0], slice(None), at[1])].set(0.0)
    return Block(block.mean.at[at].set(mean), covariance.at[(*at, at[1])].set(variance))
