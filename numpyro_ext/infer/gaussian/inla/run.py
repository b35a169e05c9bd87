"""A run that integrates over hyperparameters: the design around their mode, and mixtures over its points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.scipy.special import logsumexp

from ...front.answers.draws import draw_inside_support, with_hyper
from ...front.answers.sites import PosteriorSites, missing_sites
from ...front.results import Diagnostics, LogEvidence
from ...hyper.design import PROBE, Design, central_composite, explore_lattice, stretch
from ..answers.prediction import by_site, check_same_unknowns
from ..programs import PointFit
from ..run import GaussianRun
from .mixture_marginals import MarginalMixture
from .mixture_posteriors import HyperPosterior, MixturePosterior
from .simplified_laplace import gaussian_marginals, simplified_laplace_marginals

__all__ = ["DesignName", "DesignOptions", "INLARun", "Marginal"]

Marginal = Literal["simplified-laplace", "gaussian"]
DesignName = Literal["auto", "lattice", "central-composite"]

Point = tuple[Any, dict[str, Array], Any]
Drawn = TypeVar("Drawn")

_LARGEST_LATTICE_DIMENSION = 2
_POINTS_PER_CALL = 8
_DRAWS_PER_CALL = 32
# A point of the design so far above the mode says that there is another mode.
_LARGEST_RISE = 0.1


class DesignOptions(NamedTuple):
    """The options of :class:`~numpyro_ext.infer.INLA`, see there."""

    marginal: Marginal
    name: DesignName
    grid_step: float
    log_density_drop: float


class Exploration(NamedTuple):
    """The field at the points of a design over the hyperparameters."""

    points: np.ndarray
    """Unconstrained hyperparameters, shape ``(K, d)``."""
    weights: np.ndarray
    """Posterior masses, shape ``(K,)``, summing to one."""
    fits: PointFit
    """Fits of the field, with a leading axis of ``K``."""
    log_evidence: float
    messages: tuple[str, ...]


@dataclass(eq=False, repr=False)
class INLARun(GaussianRun):
    """Laplace's method at the mode of the hyperparameters, and the posterior integrated over a design around it.

    :param DesignOptions options: of the integration; all else as in :class:`GaussianRun`.
    """

    options: DesignOptions

    @cached_property
    def exploration(self) -> Exploration:
        """The field at the points of the design, whose mode has been found."""
        options = self.options
        size, mode = self.space.size, np.asarray(self.fit.last_state.values)
        factor = np.zeros((0, 0))
        if size:
            if self.fit.covariance is None or not self.fit.has_curvature:
                raise RuntimeError(
                    "INLA explores the hyperparameters from their posterior mode, and at the point found the density "
                    "does not curve downwards in every direction. Give tighter priors, other init_values or more "
                    "max_hyper_steps, or give values to the hyperparameters without information (hyper_values)."
                )
            eigenvalues, vectors = np.linalg.eigh(self.fit.covariance)
            factor = vectors * np.sqrt(eigenvalues)
        marginals_fn = gaussian_marginals if options.marginal == "gaussian" else simplified_laplace_marginals
        parts: list[PointFit] = []

        def evaluate(points: np.ndarray) -> np.ndarray:
            values = mode + points @ factor.T
            for start in range(0, len(values), _POINTS_PER_CALL):
                part = values[start : start + _POINTS_PER_CALL]
                # The last batch is filled with repetitions, so that one program serves all.
                padded = np.concatenate([part, np.repeat(part[-1:], self._batch(size) - len(part), axis=0)])
                fits = self.programs.fits(
                    self.reading.data,
                    self.space.fixed,
                    jnp.asarray(padded, self.fit.last_state.values.dtype),
                    self.fit.last_state.state,
                    marginals_fn=marginals_fn,
                )
                fits = jax.tree.map(np.asarray, fits)
                parts.append(jax.tree.map(itemgetter(slice(len(part))), fits))
            objective = np.concatenate([part.objective for part in parts])[-len(values) :]
            return np.where(np.isfinite(objective), objective, -np.inf)

        ended = True
        if size == 0:
            evaluate(np.zeros((1, 0)))
            design, chosen = Design(np.zeros((1, 0)), np.zeros(1)), np.zeros(1, int)
        elif options.name == "lattice" or (options.name == "auto" and size <= _LARGEST_LATTICE_DIMENSION):
            design, chosen, ended = explore_lattice(evaluate, size, options.grid_step, options.log_density_drop)
        else:
            axes = PROBE * np.eye(size)
            probes = evaluate(np.concatenate([np.zeros((1, size)), axes, -axes]))
            design = stretch(central_composite(size), (probes[0] - probes[1:]).reshape(2, size))
            inside = np.flatnonzero(np.isfinite(evaluate(design.points)))
            design = Design(design.points[inside], design.log_volumes[inside])
            chosen = len(probes) + inside
        fits = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        messages = self._judge_points(fits.objective, fits.converged[chosen], ended)
        fits = jax.tree.map(lambda leaf: leaf[chosen], fits)
        log_volume = np.linalg.slogdet(factor)[1] if size else 0.0
        log_masses = fits.objective + design.log_volumes + log_volume
        log_evidence = float(logsumexp(log_masses))
        weights = np.exp(log_masses - log_evidence)
        # Rounding must not be visible where probabilities are asked to sum to one.
        weights = weights / weights.sum()
        return Exploration(mode + design.points @ factor.T, weights, fits, log_evidence, messages)

    @staticmethod
    def _batch(size: int) -> int:
        return _POINTS_PER_CALL if size else 1

    @staticmethod
    def _judge_points(objective: np.ndarray, converged: np.ndarray, ended: bool) -> tuple[str, ...]:
        messages = []
        failed = int(np.sum(~np.isfinite(objective)))
        if failed:
            messages.append(
                f"At {failed} of {objective.size} points of the hyperparameters the evidence is not finite."
            )
        if not converged.all():
            messages.append(f"At {int(np.sum(~converged))} of {converged.size} points the field did not converge.")
        rise = float(np.max(objective, initial=-np.inf, where=np.isfinite(objective)) - objective[0])
        if rise > _LARGEST_RISE:
            messages.append(
                f"A point of the design has a log density {rise:.2g} above that of the mode: the search ended too "
                "early, or there are several modes. Use num_restarts or other init_values."
            )
        if not ended:
            messages.append(
                "The density of the hyperparameters does not fall off, so the lattice was cut. Give tighter priors."
            )
        return tuple(messages)

    @property
    def points(self) -> tuple[str, ...]:
        """None: hyperparameters have a distribution."""
        return ()

    @property
    def log_evidence(self) -> LogEvidence:
        """Log evidence of the model, integrated over field and hyperparameters."""
        return LogEvidence(self.exploration.log_evidence, self.is_lower_bound)

    @property
    def diagnostics(self) -> Diagnostics:
        """How the search for the mode ended, with what was found in the exploration among the messages."""
        found = self.fit.diagnostics
        return found._replace(messages=found.messages + self.exploration.messages)

    @cached_property
    def hyper(self) -> dict[str, HyperPosterior]:  # type: ignore[override]
        """The posterior of each hyperparameter."""
        found = self.exploration
        values = jax.vmap(self.space.unpack)(jnp.asarray(found.points))
        free = jax.vmap(self.space.unpack_unconstrained)(jnp.asarray(found.points))
        out = {}
        for name, mode in self.fit.hyper.items():
            transform = self.space.sites[name].transform
            is_fixed = name in self.space.fixed
            inner = jnp.broadcast_to(transform.inv(mode), (len(found.weights), *jnp.shape(transform.inv(mode))))
            out[name] = HyperPosterior(
                name, np.asarray(values[name]), np.asarray(inner if is_fixed else free[name]), found.weights, mode,
                transform, is_fixed,
            )  # fmt: skip
        return out

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Mixtures over the design by name, for every field site and every deterministic site affine in the field."""
        found = self.exploration
        reading, programs = self.reading, self.programs

        def site(name: str) -> MixturePosterior:
            moments = found.fits.marginals[name]
            mixture = MarginalMixture(found.weights, *(np.asarray(moment) for moment in moments))

            def covariance() -> Array:
                centred = jnp.asarray(mixture.means - mixture.mean_and_variance()[0])
                total = (centred.T * found.weights) @ centred
                for weight, inputs in zip(found.weights, self._points(), strict=True):
                    total = total + weight * programs.covariance(*inputs, name=name)
                return total

            def sample(rng_key: Array, num_samples: int) -> Array:
                def draw(inputs: Point, key: Array) -> Array:
                    return programs.draw_site(*inputs, key, name=name, num_samples=_DRAWS_PER_CALL)

                return self._draw_over_points(rng_key, num_samples, draw)

            return MixturePosterior(name, tuple(reading.site_shapes[name]), mixture, covariance, sample)

        return PosteriorSites({name: site(name) for name in reading.affine_sites}, missing_sites(reading))

    def _points(self) -> Iterator[Point]:
        """The first arguments of every program, point by point."""
        found = self.exploration
        for k, point in enumerate(found.points):
            hyper = self.space.unpack(jnp.asarray(point, self.fit.last_state.values.dtype))
            yield self.reading.data, hyper, jax.tree.map(lambda leaf, k=k: jnp.asarray(leaf[k]), found.fits.state)

    def _draw_over_points(self, rng_key: Array, num_samples: int, draw: Callable[[Point, Array], Drawn]) -> Drawn:
        """Draws from the mixture; ``draw`` makes ``_DRAWS_PER_CALL`` of them from a point's inputs and a key."""
        found = self.exploration
        choice_key, draw_key, order_key = random.split(rng_key, 3)
        choice = random.choice(choice_key, len(found.weights), (num_samples,), p=jnp.asarray(found.weights))
        counts = np.bincount(np.asarray(choice), minlength=len(found.weights))
        parts: list[Any] = []
        for count, inputs in zip(counts, self._points(), strict=True):
            for start in range(0, int(count), _DRAWS_PER_CALL):
                number = min(_DRAWS_PER_CALL, int(count) - start)
                drawn = draw(inputs, random.fold_in(draw_key, len(parts)))
                parts.append(jax.tree.map(lambda leaf, number=number: np.asarray(leaf[:number]), drawn))
        order = np.asarray(random.permutation(order_key, num_samples))
        drawn_in_order: Drawn = jax.tree.map(lambda *leaves: jnp.asarray(np.concatenate(leaves)[order]), *parts)
        return drawn_in_order

    def draw(self, rng_key: Array) -> tuple[dict[str, Array], Array]:
        """Hyperparameters from the points of the design by their weights, and the field from its Gaussian there."""

        def one_point(inputs: Point, key: Array) -> tuple[dict[str, Array], Array]:
            return self.programs.draws(*inputs, key, num_samples=_DRAWS_PER_CALL)

        def draw(key: Array) -> tuple[dict[str, Array], Array]:
            return self._draw_over_points(key, self.num_samples, one_point)

        sites, log_density = draw_inside_support(draw, rng_key)
        return with_hyper(sites, self.space.fixed, self.reading.observed_names, self.num_samples), log_density

    def log_predictive(self, new: Any = None) -> dict[str, Array]:
        """Log predictive density of the masked observations, or of those of another reading, over the design."""
        if new is not None:
            check_same_unknowns(self.reading, new, self.fit.hyper)
        parts = []
        for inputs in self._points():
            form = () if new is None else (new.form(inputs[1], new.data),)
            values, observed = self.programs.log_predictive(*inputs, *form)
            parts.append(values)
        total = logsumexp(jnp.stack(parts), axis=0, b=jnp.asarray(self.exploration.weights)[:, None])
        return by_site(self.reading, total, ~observed) if new is None else by_site(new, total, observed)
