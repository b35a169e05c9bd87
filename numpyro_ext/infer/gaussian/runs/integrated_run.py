"""A run that integrates over hyperparameters: its answers are mixtures over a design around their mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from scipy.special import logsumexp, softmax

from ....compilation.collection import return_freed_memory, without_collection
from ....compilation.transfer import aligned, to_device
from ....structure import LatentGaussianReading
from ...front.answers.draws import Draws, draw_inside_support
from ...front.answers.sites import PointPosterior, PosteriorSites, SitePosterior, gaussian_draws, missing_sites
from ...front.files.content import Content
from ...front.results import Diagnostics, HyperEstimate, LogEvidence
from ...front.run import hyper_estimates
from ...hyper.density.cloud import systematic
from ..answers.prediction import by_site
from ..integration.exploration import MANY_ROWS, Exploration, Integration, explore
from ..integration.judgement import judge_last_look, judge_spreads
from ..integration.matched_weights import features_of, matched_weights
from ..integration.mixture_marginals import MarginalMixture
from ..integration.mixture_posteriors import HyperPosterior, MixturePosterior
from ..integration.scatter import NUM_POINTS, Scatter, generator_and_keys, scatter
from ..integration.simplified_laplace import simplified_laplace_marginals
from ..integration.surroundings import Surroundings
from .run import GaussianRun, Point

_CALLS, _CALLS_OF_SMALL, _CALLS_OF_SPARSE, _CALLS_OF_MANY_ROWS = (32, 16), (64, 32), (16, 32), (8, 64)
"""Points at which one call draws, and how often it draws at each, at most. With many rows the points are those of the
design, and to condition on the rows takes as long as dozens of draws; a sparse factor takes as long as some."""
_CALLS_OF_FEW_DRAWS = 64, 4
"""The same in small models where no more draws are made at a point on average: numbers of others would be in vain."""

_MOST_NUMBERS_OF_CALL, _FEWEST_OF_CALL = 2**23, 16
"""Numbers that one call draws, at most, unless so many draws have more: they are there several times on the way."""
_MANY_POINTS = 1024
"""Points of many draws where neither a fit nor a factorisation is dear."""
_POINTS_OF_ONE_PASS, _CALLS_OF_ONE_PASS = 256, (32, 4)
"""Points of many draws of a nearly normal density, each of which takes a fit, and the calls there: a thousand draws are
four at each."""


@dataclass(eq=False, repr=False)
class IntegratedRun(GaussianRun):
    """An algorithm at the mode of the hyperparameters, and the posterior integrated over a design around it.

    :param Integration options: of the integration.
    :param marginals_fn: what the components of the marginals are.
    :param bool is_strict: whether all hyperparameters must be integrated over; all else as in :class:`GaussianRun`.
    """

    options: Integration
    marginals_fn: Callable[..., Any]
    is_strict: bool
    fits_in_one_pass: ClassVar[bool] = False
    """True if a fit of the field is one evaluation of all factors, so that many draws have many points."""

    @cached_property
    def exploration(self) -> Exploration:
        """The field at the points of the design, whose mode has been found."""
        return explore(self._surroundings, self.options)

    @cached_property
    def _surroundings(self) -> Surroundings:
        return Surroundings.of(
            self.programs,
            self.reading.data,
            self.space,
            self.fit,
            self.marginals_fn,
            self.reading.abstract_form.num_rows,
            is_strict=self.is_strict,
            progress_bar=self.options.progress_bar,
        )

    @property
    def is_at_hand(self) -> bool:
        """True if the design has been explored; that of a run from a file has not."""
        return "exploration" in vars(self)

    @property
    def _has_corrected_means(self) -> bool:
        return self.marginals_fn is simplified_laplace_marginals

    @property
    def points(self) -> tuple[str, ...]:
        """None: hyperparameters have a distribution."""
        return ()

    @property
    def is_lower_bound(self) -> bool:
        """Not of a sum over points, even where each of them has a bound."""
        return super().is_lower_bound and not len(self.space.integrable)

    @property
    def log_evidence(self) -> LogEvidence:
        """Log evidence of the model, integrated over field and hyperparameters."""
        found = self.exploration
        errors = [error for error in (found.error, self.fit.diagnostics.evidence_error) if error is not None]
        error = math.hypot(*errors) if errors else None  # of points, and of probes that all points share
        return LogEvidence(found.log_evidence, self.is_lower_bound, "integrated", error, found.method, self.flat_sites)

    @property
    def diagnostics(self) -> Diagnostics:
        """End of the search for the mode, with messages of the exploration; it has not converged where much of the
        density is not among the points."""
        found, explored = self.fit.diagnostics, self.exploration
        return found._replace(
            converged=found.converged and explored.is_whole,
            messages=found.messages + explored.messages + self._said_of_spreads,
        )

    @cached_property
    def _said_of_spreads(self) -> tuple[str, ...]:
        """Messages on hyperparameters and field, where points that follow a density are few for them."""
        found = self.exploration
        if found.followed is None or found.around is None or found.spread is None:
            return ()
        earlier, now = found.followed.earlier, {n: (h.mean, h.sd) for n, h in self._known_hyper.items()}
        before = self._constrained(found.around.place(earlier.points)), earlier.weights
        said = judge_last_look(before, (found.spread.hyper, softmax(found.followed.log_ratios)), now)
        return said + judge_spreads({name: self._mixture(name) for name in found.fits.marginals})

    @property
    def _known_hyper(self) -> dict[str, HyperPosterior]:
        """Hyperparameters that have a distribution."""
        return {n: h for n, h in self.hyper.items() if isinstance(h, HyperPosterior) and not h.is_fixed}

    def _constrained(self, values: np.ndarray) -> dict[str, Array]:
        """Hyperparameters of unconstrained ones, shape ``(n, d)``."""
        return self.programs.constrained(to_device(values.astype(self.fit.last_state.values.dtype)), self.space.fixed)

    def content(self) -> Content:
        """The fit at the mode: the design is explored again when it is asked for."""
        return {**super().content(), "is_integrated": True}

    @cached_property
    def hyper(self) -> dict[str, HyperEstimate | HyperPosterior]:  # type: ignore[override]
        """The posterior of each hyperparameter; of ``param`` sites, which have no prior, the estimate."""
        found, space = self.exploration, self.space
        weights, unconstrained, constrained = found.weights, found.values, found.fits.hyper
        if (cloud := found.cloud) is not None and found.around is not None:
            # Of so many points that moments and quantiles are theirs.
            weights, unconstrained = cloud[1], found.around.place(cloud[0])
            constrained = self._constrained(unconstrained)
        out: dict[str, HyperEstimate | HyperPosterior] = {}
        for name, mode in self.fit.hyper.items():
            transform, is_fixed = space.sites[name].transform, name in space.fixed
            if space.sites[name].is_param and not is_fixed:
                out[name] = hyper_estimates(space, self.fit)[name]
                continue
            values, cell = np.asarray(constrained[name]), None
            if is_fixed:
                free = np.broadcast_to(transform.inv(mode), (len(weights), *jnp.shape(transform.inv(mode))))
            else:
                free = unconstrained[:, space.slices[name]].reshape(-1, *space.shapes[name])
                cell = None if found.cell is None else found.cell[space.slices[name]]
            draw = partial(self._draw_hyper, name)
            out[name] = HyperPosterior(name, values, free, weights, mode, transform, is_fixed, cell, draw)
        return out

    @property
    def _hyper_moments(self) -> tuple[Array, np.ndarray]:
        """Mean and covariance of the unconstrained hyperparameters over the design."""
        mean, covariance = self.exploration.moments()
        return to_device(mean.astype(self.fit.last_state.values.dtype)), covariance

    def _draw_hyper(self, name: str, rng_key: Array, num_samples: int) -> Array:
        """Draws of one hyperparameter, without those of the field."""
        points, generator = self.draw_points(rng_key, num_samples), generator_and_keys(rng_key)[0]
        chosen = generator.permutation(systematic(points.weights, num_samples, generator.random()))
        return to_device(np.asarray(points.fits.hyper[name])[chosen])

    @property
    def hyper_posterior(self) -> dict[str, Any]:
        """Marginals of the hyperparameters by name; ``param`` sites are points."""
        values = self.hyper.items()
        return {n: h if isinstance(h, HyperPosterior) else PointPosterior(n, h.value) for n, h in values}

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Mixtures over the design by name, for every field site and every deterministic site affine in the field."""
        found = self.exploration
        reading, programs = self.reading, self.programs

        def site(name: str) -> MixturePosterior:
            mixture = self._mixture(name)

            def covariance() -> Array:
                centred = jnp.asarray(mixture.means - mixture.mean_and_variance()[0])
                total = (centred.T * found.weights) @ centred
                for weight, inputs in zip(found.weights, self.design_points(), strict=True):
                    total = total + weight * programs.covariance(*inputs, name=name)
                return total

            def sample(rng_key: Array, num_samples: int) -> Array:
                return self._draw_over(Scatter.of(found), rng_key, num_samples).sites[name]

            return MixturePosterior(name, tuple(reading.site_shapes[name]), mixture, covariance, sample)

        sites = {name: site(name) for name in reading.affine_sites}
        return PosteriorSites(sites, missing_sites(reading), self._large_sites())

    def _mixture(self, name: str) -> MarginalMixture:
        """The marginals of a site, over the design."""
        found, reading = self.exploration, self.reading
        moments = (np.asarray(moment) for moment in found.fits.marginals[name])
        lower = reading.lower_bounds(name) if name in reading.half_lines else None
        return MarginalMixture(found.weights, *moments)._replace(lower=lower)

    def affine_sites(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        marginals_at: Callable[[Point, Callable[..., object]], Mapping[str, object]],
        covariance_at: Callable[[Point, str], Array],
    ) -> dict[str, SitePosterior]:
        """Mixtures over the design; see :meth:`GaussianRun.affine_sites`."""
        weights = self.exploration.weights

        @cache
        def mixtures() -> dict[str, MarginalMixture]:
            parts = [marginals_at(inputs, self.marginals_fn) for inputs in self.design_points()]
            return {
                name: MarginalMixture(
                    weights, *(np.stack(moment) for moment in zip(*(p[name] for p in parts), strict=True))
                )
                for name in shapes
            }

        @cache
        def covariances(name: str) -> list[np.ndarray]:
            return [np.asarray(covariance_at(inputs, name)) for inputs in self.design_points()]

        def covariance(name: str) -> Array:
            mixture = mixtures()[name]
            centred = mixture.means - mixture.mean_and_variance()[0]
            return jnp.asarray((centred.T * weights) @ centred + np.tensordot(weights, np.stack(covariances(name)), 1))

        def sample(rng_key: Array, num_samples: int, name: str) -> Array:
            key_point, key_draw = random.split(rng_key)
            means = mixtures()[name].means
            points = np.asarray(random.choice(key_point, len(weights), (num_samples,), p=jnp.asarray(weights)))
            out = np.empty((num_samples, means.shape[1]))
            for number in np.unique(points):
                here = np.flatnonzero(points == number)
                key = random.fold_in(key_draw, number)
                out[here] = gaussian_draws(means[number], covariances(name)[number], key, len(here))
            return jnp.asarray(out)

        return {
            name: MixturePosterior(name, shape, mixtures()[name], partial(covariance, name), partial(sample, name=name))
            for name, shape in shapes.items()
        }

    def design_points(self) -> Iterator[Point]:
        """The first arguments of every program, point by point."""
        fits = self.exploration.fits
        for hyper, state in unstacked((fits.hyper, fits.state), len(fits.objective)):
            yield self.reading.data, hyper, state

    def weighted_points(self) -> Iterator[tuple[float, Point]]:
        """Masses and arguments, point by point."""
        yield from zip(self.exploration.weights, self.design_points(), strict=True)

    @without_collection()
    def _draw_over(self, points: Scatter, rng_key: Array, num_samples: int, **options: bool) -> Draws:
        """Draws from a mixture over points, in random order."""
        # By NumPy: each of a dozen small programs would have to be compiled.
        generator, make_keys = generator_and_keys(rng_key)
        chosen = systematic(points.weights, num_samples, generator.random())
        counts = np.bincount(chosen, minlength=len(points.weights))
        num_points, most = _CALLS_OF_SMALL if self.programs.is_small else _CALLS
        if self.fits_in_one_pass and self.exploration.nearly_normal is not None:
            num_points, most = _CALLS_OF_ONE_PASS
        elif self.programs.is_small and num_samples <= _CALLS_OF_FEW_DRAWS[1] * len(points.weights):
            num_points, most = _CALLS_OF_FEW_DRAWS
        elif self._surroundings.num_rows > MANY_ROWS:
            num_points, most = _CALLS_OF_MANY_ROWS
        elif self.reading.abstract_form.layout is not None:
            num_points, most = _CALLS_OF_SPARSE
        number = _MOST_NUMBERS_OF_CALL // self.reading.abstract_form.num_columns  # draws of one call
        most = min(most, max(number // _FEWEST_OF_CALL, 1) * _FEWEST_OF_CALL)
        num_points = max(1, min(num_points, number // most))
        # A point with more draws than a call makes of it is there several times.
        parts = -(-counts // most)
        places = np.repeat(np.arange(len(counts)), parts)
        numbers = np.minimum(most, np.repeat(counts, parts) - most * (np.arange(len(places)) - _starts(parts)))
        kept = np.repeat(most * np.arange(len(places)), numbers) + np.arange(num_samples) - _starts(numbers)
        starts = range(0, len(places), num_points)
        keys = [make_keys(num_points) for _ in starts]
        kept = generator.permutation(kept)
        out: Any = None
        for start, own_keys in zip(starts, keys, strict=True):
            if self.programs.is_large:
                return_freed_memory()
            index = np.minimum(np.arange(start, start + num_points), len(places) - 1)
            hypers, states = jax.tree.map(
                lambda leaf, index=index: leaf[places[index]], (points.fits.hyper, points.fits.state)
            )
            found = self.programs.draws_over(
                self.reading.data,
                hypers,
                states,
                own_keys,
                numbers[index],
                min(num_points, len(places) - start),
                num_samples=most,
                **options,
            )
            found = jax.tree.map(np.asarray, found)
            if found.log_weight is not None:
                found = found._replace(log_weight=found.log_weight + points.log_weights[places[index]][:, None])
            if out is None:
                out = jax.tree.map(lambda leaf: aligned((num_samples, *leaf.shape[2:]), leaf.dtype), found)
            first, size = start * most, num_points * most
            own = np.flatnonzero((kept >= first) & (kept < first + size))
            for whole, part in zip(jax.tree.leaves(out), jax.tree.leaves(found), strict=True):
                whole[own] = part.reshape(size, *part.shape[2:])[kept[own] - first]
            del found, part  # hundreds of megabytes of large fields, beside which the next ones are made
        return jax.tree.map(to_device, out)

    def draw_points(self, rng_key: Array, num_samples: int) -> Scatter:
        """Hyperparameters of their density for so many draws, and the field there; the points of the design where fits
        are dear."""
        found, around = self.exploration, self._surroundings
        is_nearly_normal = found.nearly_normal is not None
        has_many_rows = around.num_rows > MANY_ROWS and not (is_nearly_normal and self.fits_in_one_pass)
        if not around.size or has_many_rows:
            return Scatter.of(found)
        design, number = self.options.design(around.size, around.num_rows), NUM_POINTS
        if num_samples > NUM_POINTS and (self.fits_in_one_pass if is_nearly_normal else self.programs.is_small):
            number = _POINTS_OF_ONE_PASS if is_nearly_normal else _MANY_POINTS
        points = scatter(around, found, generator_and_keys(rng_key)[0], design, number)
        return self._matched(points) if design in ("grid", "adaptive") else points

    def _matched(self, points: Scatter) -> Scatter:
        """The points with weights under which hyperparameters have the means and deviations of :attr:`hyper`.

        For a lattice and for a density that was emulated, whose moments are known better than those of a few weighted
        points.
        """
        known = self._known_hyper
        pairs = [(np.asarray(h.mean, float).ravel(), np.asarray(h.sd, float).ravel()) for h in known.values()]
        moments = [(mean, mean**2 + sd**2) for mean, sd in pairs]
        target = np.concatenate([np.concatenate(part) for part in zip(*moments, strict=True)])
        features = features_of([np.asarray(points.fits.hyper[name], float) for name in known])
        weights = matched_weights(np.asarray(points.weights, float), features, target)
        return points._replace(weights=weights.astype(points.weights.dtype))

    def _propose(self, rng_key: Array, num_samples: int, is_weighted: bool = False, with_data: bool = True) -> Draws:
        """Hyperparameters from their density, and the field from its Gaussian there."""
        points = self.draw_points(rng_key, num_samples)
        options = {"is_weighted": is_weighted, "with_data": with_data}
        return draw_inside_support(lambda key: self._draw_over(points, key, num_samples, **options), rng_key)

    def log_predictive(self, new: Any = None) -> dict[str, Array]:
        """Log predictive density of the masked observations, or of those of another reading, over the design."""
        if new is not None:
            return super().log_predictive(new)
        parts = []
        for inputs in self.design_points():
            values, observed = map(np.asarray, self.programs.log_predictive(*inputs))
            parts.append(values)
        return by_site(self.reading, self._mixed(np.stack(parts)), ~observed)

    def log_predictive_of(self, new: LatentGaussianReading) -> tuple[np.ndarray, np.ndarray]:
        """The same of another reading with this field, over the design."""
        points = ((inputs, new.compiled_form(inputs[1])) for inputs in self.design_points())
        parts, observed = zip(*(self.programs.log_predictive(*inputs, form) for inputs, form in points), strict=True)
        return self._mixed(np.stack(parts)), np.asarray(observed[0])

    @cached_property
    def leave_one_out(self) -> tuple[np.ndarray, np.ndarray]:
        """The same over the design: without an observation, hyperparameters that fit it less have more mass, which
        makes harmonic means of the densities at the points (Held, Schrodle and Rue 2010, eq. 7)."""
        points = (map(np.asarray, self.programs.leave_one_out(*p)) for p in self.design_points())
        without, within = map(np.stack, zip(*points, strict=True))
        return -self._mixed(-without), self._mixed(within)

    def _mixed(self, values: np.ndarray) -> np.ndarray:
        """The log of a mean over the design; by NumPy, which compiles nothing."""
        found = logsumexp(values, axis=0, b=np.asarray(self.exploration.weights)[:, None])
        return np.asarray(found, values.dtype)


def unstacked(tree: Any, number: int) -> list[Any]:
    """The parts of a tree whose leaves have a leading axis."""
    return [jax.tree.map(lambda leaf, k=k: jnp.asarray(leaf[k]), tree) for k in range(number)]


def _starts(counts: np.ndarray) -> np.ndarray:
    """Start of the run of equal elements in which each element of ``np.repeat(..., counts)`` stands."""
    return np.repeat(np.cumsum(counts) - counts, counts)
