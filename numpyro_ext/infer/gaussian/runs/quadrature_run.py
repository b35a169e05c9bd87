"""A run by quadrature: marginals have the quantiles of the density at the nodes, and not of a Gaussian."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ....compilation.quick_jit import quick_jit
from ....compilation.store import shared
from ....compilation.transfer import generator_of
from ....linalg.gaussian.design import SparseRows
from ....structure import LatentGaussianReading
from ....structure.latent_gaussian import AffineMap
from ...front.answers.sites import PosteriorSites, SitePosterior
from ..algorithms.algorithm import Algorithm
from ..algorithms.nodes.node_density import quantiles
from ..algorithms.nodes.node_posterior import NodePosterior
from ..answers.coordinates import HyperCoordinates, hyper_coordinates, root_of
from .integrated_run import IntegratedRun
from .run import GaussianRun, Point

_NUM_DRAWS = 4000
"""Draws from which quantiles of sums of several unknowns are estimated."""


class NodeSite(SitePosterior):
    """The posterior of one site by quadrature.

    Quantiles of sites whose elements are functions of one unknown each, in blocks of one, are those of the density at
    the nodes. Others, and all where hyperparameters are integrated over, are estimated from 4000 draws of that
    density. Obtained as ``engine.posterior[name]``.
    """

    quantile_fn: Callable[[np.ndarray], Array | None] | None = None
    """Quantiles by the density, shape ``(len(q), size)``; ``None`` where they are no function of one unknown each."""

    def part(self, places: np.ndarray) -> NodeSite:
        """Some of the elements as a site of their own; see :meth:`SitePosterior.part`."""
        whole, flat = super().part(places), np.asarray(places).reshape(-1)
        found = _node_site(whole, whole._sample)
        quantile_fn = self.quantile_fn
        if quantile_fn is not None:
            found.quantile_fn = lambda q: None if (all_of := quantile_fn(q)) is None else all_of[:, flat]
        return found

    def cdf(self, x: ArrayLike) -> Array:
        """Posterior probability of each element being below ``x``, as the share of 4000 draws.

        :param x: in the shape of the site, or with further axes in front.
        :return: in the shape of ``x``.
        """
        x, draws = np.asarray(x), np.asarray(self.sample(jax.random.key(0), _NUM_DRAWS)).reshape(_NUM_DRAWS, -1)
        columns = np.broadcast_to(x, np.broadcast_shapes(x.shape, self.shape)).reshape(-1, self.size)
        below = [np.searchsorted(np.sort(draw), column) for draw, column in zip(draws.T, columns.T, strict=True)]
        return jnp.asarray((np.stack(below, axis=1) / _NUM_DRAWS).reshape(-1, *self.shape).reshape(x.shape))

    def _quantile(self, q: np.ndarray) -> Array:
        found = None if self.quantile_fn is None else self.quantile_fn(q.reshape(-1))
        if found is None:
            draws = np.asarray(self.sample(jax.random.key(0), _NUM_DRAWS))
            return jnp.asarray(np.quantile(draws, q.reshape(-1), axis=0))
        return found


def _node_site(site: SitePosterior, sample: Callable[[Array, int], Array]) -> NodeSite:
    return NodeSite(site.name, site.shape, site._mean, site._variance, site._covariance, sample)


def _note_of_other_fields(reading: LatentGaussianReading) -> str | None:
    """Sentence on the hyperparameters over which quadrature might integrate instead."""
    names = [name for name in reading.hyper if reading.sites[name].is_candidate and reading.sites[name].shape]
    if not names:
        return None
    named = ", ".join(f"field=[{name!r}]" for name in names)
    return f"quadrature: over {list(reading.field)}; {named} integrates over another site in its place"


def affine_draws(posterior: NodePosterior, maps: Mapping[str, AffineMap]) -> dict[str, Array]:
    """4000 draws of each of several quantities affine in the unknowns, shape ``(4000, R)``, by name."""
    unknowns = posterior.sample(jax.random.key(1), _NUM_DRAWS)
    return {name: jax.vmap(design.matvec)(unknowns) + offset for name, (design, offset) in maps.items()}


def _drawn(
    run: GaussianRun,
    sites: Mapping[str, SitePosterior],
    marginals_at: Callable[[Point, Callable[..., Any]], Mapping[str, Any]],
) -> dict[str, SitePosterior]:
    """Sites whose draws and quantiles are those of 4000 draws over the points of a run."""

    @cache
    def draws() -> dict[str, np.ndarray]:
        points = list(run.weighted_points())
        weights = np.array([weight for weight, _ in points])
        generator = np.random.default_rng(0)
        chosen = generator.choice(len(points), _NUM_DRAWS, p=weights / weights.sum())
        out: dict[str, np.ndarray] = {}
        for number in np.unique(chosen):
            for name, values in marginals_at(points[number][1], affine_draws).items():
                whole = out.setdefault(name, np.empty(values.shape, values.dtype))
                whole[chosen == number] = np.asarray(values)[chosen == number]
        return out

    def sample(rng_key: Array, num_samples: int, name: str) -> Array:
        # by NumPy, which compiles nothing; each of them once before any is there twice
        generator = generator_of(rng_key)
        rounds = [generator.permutation(_NUM_DRAWS) for _ in range(-(-num_samples // _NUM_DRAWS))]
        return jnp.asarray(draws()[name][np.concatenate([np.zeros(0, int), *rounds])[:num_samples]])

    return {name: _node_site(site, partial(sample, name=name)) for name, site in sites.items()}


class _NodeAnswers(GaussianRun):
    """Answers that runs by quadrature share, whether or not they integrate over hyperparameters."""

    @cached_property
    def _coordinates(self) -> HyperCoordinates:
        """Coordinates of the hyperparameters alone, as the field is integrated out exactly."""
        if not len(self.space.integrable):
            raise ValueError(
                f"No hyperparameter has a density: all are param sites or given ({', '.join(self.reading.hyper)}). "
                "Given these the field is drawn exactly by get_samples(); numpyro.sample gives them one."
            )
        return hyper_coordinates(self.reading, self.space, self._hyper_moments)

    def describe(self) -> str:
        """Describe the reading of the model, and other choices of the field that there may be."""
        note = _note_of_other_fields(self.reading)
        return "\n".join([super().describe(), *([] if note is None else [note])])

    @cached_property
    def refits_without(self) -> tuple[np.ndarray, str]:
        """No change: the density at the nodes is divided by the factor itself, and no sites are held."""
        return np.zeros_like(self.leave_one_out[0]), ""

    def affine_sites(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        marginals_at: Callable[[Point, Callable[..., object]], Mapping[str, object]],
        covariance_at: Callable[[Point, str], Array],
    ) -> dict[str, SitePosterior]:
        """Posteriors of quantities affine in the field, with draws of the density at the nodes."""
        return _drawn(self, super().affine_sites(shapes, marginals_at, covariance_at), marginals_at)


@dataclass(eq=False, repr=False)
class QuadratureRun(_NodeAnswers):
    """Posterior of small blocks by quadrature; parameters are those of :class:`GaussianRun`."""

    @property
    def _hyper_moments(self) -> tuple[Array, np.ndarray | None]:
        """Center of the density of the unconstrained hyperparameters, a step from the optimum that the search has found
        with priors of the constrained ones, and its covariance."""
        center, covariance = super()._hyper_moments
        if covariance is None:
            return center, covariance
        root = root_of(covariance, self.space.integrable)
        slope = np.asarray(quick_jit(jax.grad(self.space.log_volume))(center))[self.space.integrable]
        step = np.clip(root.T @ slope, -1.0, 1.0)  # where the density is far from normal a longer one leads anywhere
        return center.at[self.space.integrable].add(root @ step), covariance

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Marginals by name, for every field site and every deterministic site affine in the field."""

        def on_nodes(site: SitePosterior) -> SitePosterior:
            found = _node_site(site, site._sample)
            found.quantile_fn = partial(self._quantiles, site.name)
            return found

        return super().posterior.changed(on_nodes)

    def _quantiles(self, name: str, q: np.ndarray) -> Array | None:
        """Quantiles of a site, shape ``(len(q), size)``; ``None`` if they are no function of one unknown each."""
        if self.reading.abstract_form.blocks.columns.shape[1] > 1:
            return None
        return shared(node_quantiles, self.reading, self.algorithm, name)(*self.inputs, jnp.asarray(q))


def node_quantiles(reading: LatentGaussianReading, algorithm: Algorithm, name: str) -> Callable[..., Array | None]:
    """Quantiles of a site whose elements are functions of one unknown each; none of other sites."""

    def compute(data: Sequence[object], hyper: dict[str, Array], state: object, q: Array) -> Array | None:
        form = reading.form(hyper, data)
        posterior = algorithm.posterior(form, state)
        design, offset = reading.maps(hyper, data, (name,))[name]
        if not isinstance(design, SparseRows) or design.columns.shape[1] != 1:
            return None
        column, value = design.columns[:, 0], design.values[:, 0]
        numbers = jnp.arange(form.blocks.columns.shape[0])
        block = jnp.zeros((form.num_columns,), int).at[form.blocks.columns[:, 0]].set(numbers)[column]
        asked = jnp.where(value[:, None] >= 0.0, q, 1.0 - q)
        places = jax.vmap(quantiles)(posterior.log_density.T[block], asked)
        nodes = jax.tree.map(lambda leaf: leaf[block], posterior.nodes)
        unknown = jax.vmap(nodes.at, 1)(places[:, :, None])[:, :, 0]
        return value * unknown + offset

    return jax.jit(compute)


@dataclass(eq=False, repr=False)
class IntegratedQuadratureRun(_NodeAnswers, IntegratedRun):
    """Mixture over hyperparameters of posteriors by quadrature; parameters are those of :class:`IntegratedRun`."""

    fits_in_one_pass: ClassVar[bool] = True

    @cached_property
    def posterior(self) -> PosteriorSites:
        return super().posterior.changed(lambda site: _node_site(site, site._sample))
