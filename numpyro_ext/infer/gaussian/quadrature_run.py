"""A run by quadrature: marginals have the quantiles of the density at the nodes, and not of a Gaussian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.recent import Recent
from ...linalg.gaussian.design import SparseRows
from ..front.answers.sites import PosteriorSites, SitePosterior
from .algorithms.node_density import fine_density, inverse
from .run import GaussianRun

__all__ = ["NodeSite", "QuadratureRun"]

_COMPILED = Recent(16)
_NUM_DRAWS = 4000
"""Draws from which quantiles of sums of several unknowns are estimated."""


class NodeSite(SitePosterior):
    """The posterior of one site by quadrature.

    Quantiles of sites whose elements are functions of one unknown each, in blocks of one, are those of the density at
    the nodes. Others are estimated from 4000 draws of that density. Obtained as ``engine.posterior[name]``.
    """

    quantile_fn: Callable[[np.ndarray], Array | None] | None = None
    """Quantiles by the density, shape ``(len(q), size)``; ``None`` where they are no function of one unknown each."""

    def _quantile(self, q: np.ndarray) -> Array:
        found = None if self.quantile_fn is None else self.quantile_fn(q.reshape(-1))
        if found is None:
            draws = np.asarray(self.sample(jax.random.key(0), _NUM_DRAWS))
            return jnp.asarray(np.quantile(draws, q.reshape(-1), axis=0))
        return found


@dataclass(eq=False, repr=False)
class QuadratureRun(GaussianRun):
    """Posterior of small blocks by quadrature; parameters are those of :class:`GaussianRun`."""

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Marginals by name, for every field site and every deterministic site affine in the field."""
        found = super().posterior
        sites = {}
        for name in found:
            site = found[name]
            own = NodeSite(name, site.shape, site._mean, site._variance, site._covariance, site._sample)
            own.quantile_fn = partial(self._quantiles, name)
            sites[name] = own
        return PosteriorSites(sites, found.reasons, {name: found[name] for name in found.large})  # type: ignore[misc]

    def _quantiles(self, name: str, q: np.ndarray) -> Array | None:
        """Quantiles of a site, shape ``(len(q), size)``; ``None`` if they are no function of one unknown each."""
        reading, algorithm = self.reading.skeleton(), self.algorithm
        if self.reading.abstract_form.blocks.columns.shape[1] > 1:
            return None

        def compute(data: Any, hyper: dict[str, Array], state: Any, q: Array) -> Array | None:
            form = reading.form(hyper, data)
            posterior = algorithm.posterior(form, state)
            design, offset = reading.maps(hyper, data, (name,))[name]
            if not isinstance(design, SparseRows) or design.columns.shape[1] != 1:
                return None
            column, value = design.columns[:, 0], design.values[:, 0]
            block = (
                jnp.zeros((form.num_columns,), int)
                .at[form.blocks.columns[:, 0]]
                .set(jnp.arange(form.blocks.columns.shape[0]))[column]
            )
            asked = jnp.where(value[:, None] >= 0.0, q, 1.0 - q)
            places = jax.vmap(lambda density, p: inverse(*fine_density(density), p))(
                posterior.log_density.T[block], asked
            )
            nodes = jax.tree.map(lambda leaf: leaf[block], posterior.nodes)
            unknown = jax.vmap(nodes.at, 1)(places[:, :, None])[:, :, 0]
            values: Array = value * unknown + offset
            return values

        key = (reading.structure_key, algorithm, name)
        found: Array | None = _COMPILED.get(key, lambda: jax.jit(compute))(*self.inputs, jnp.asarray(q))
        return found
