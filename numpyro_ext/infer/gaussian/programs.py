"""The compiled functions that a run is made of, shared by all runs of the same structure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...compilation.quick_jit import quick_jit
from ...compilation.store import shared
from ...structure import LatentGaussianReading
from ...structure.latent_gaussian import AffineMap, LatentGaussian, joined
from ...structure.program.rows.chosen_rows import ChosenIndices, ChosenRows
from ..front.answers.draws import Draws
from ..hyper import search as hyper_search
from ..hyper.search import SearchState
from ..hyper.space import UnconstrainedSpace
from ..hyper.stacked import at_each
from .algorithms.algorithm import Algorithm
from .algorithms.half_lines import half_lines
from .algorithms.modes.mode_shift import shifted
from .algorithms.nodes.node_posterior import NodePosterior
from .answers.leave_one_out import log_factors_at_draws, log_leave_one_out, log_refitted
from .answers.prediction import log_predictive_factors
from .fitting.fitting_programs import FittingPrograms
from .integration.simplified_laplace import simplified_laplace_marginals

_LARGEST_BATCH = 10_000_000
_FEW_DRAWS = 4
"""Draws that are made together, where more may not be asked for."""


class Programs(FittingPrograms):
    """Compiled functions of ``(data, hyper, ...)`` for one model structure and one algorithm.

    ``data`` are the arrays of a reading, ``hyper`` its hyperparameters (constrained), ``state`` the state of the
    algorithm. Functions compile on first use; another reading of the same structure runs them as they are.

    :param LatentGaussianReading reading: any reading of the structure.
    :param Algorithm algorithm: the algorithm.
    :param UnconstrainedSpace space: of the hyperparameters that are learned.
    :param int num_steps: steps of one fit of the field at most.
    :param float tol: at which the algorithm stops.
    :param float hyper_tol: largest derivative of the objective at which the hyperparameters are accepted.
    :param int max_iterations: steps of the hyperparameter search at most.
    :param bool is_density_unconstrained: whether the prior density of the hyperparameters is per unit of the
        unconstrained space, in which they are to be integrated, and not per unit of their own.
    :param marginals_fn: what :meth:`fits` are to find at points of the hyperparameters; ``None`` if none are planned.
    """

    def __init__(
        self, reading: LatentGaussianReading, algorithm: Algorithm, space: UnconstrainedSpace, **options: Any
    ) -> None:
        super().__init__(reading, algorithm, space, **options)
        compile_ = self._compile
        self._has_corrected_means = options.get("marginals_fn") is simplified_laplace_marginals
        self.moments = compile_(self._moments)
        self.covariance = compile_(self._covariance, static_argnames="name")
        self.chosen_marginals = compile_(self._chosen_marginals, static_argnames=("chosen", "marginals_fn"))
        self.chosen_covariance = compile_(self._chosen_covariance, static_argnames="chosen")
        self.draw_site = compile_(self._draw_site, static_argnames=("name", "num_samples"))
        options_of_draws = "num_samples", "is_weighted", "with_data"
        # Optimised in small models too, as draws are made at up to a thousand points.
        self.draws_over = quick_jit(self._draws_over, adds_much=self._adds_much, static_argnames=options_of_draws)
        self.draws = compile_(self._draws, static_argnames=options_of_draws)
        self.stacked_moments = compile_(self._stacked_moments, static_argnames="names")
        self.marginals = compile_(self._marginals, static_argnames="marginals_fn")
        self.marginals_once = self._compile_once(self._marginals, static_argnames="marginals_fn")
        self.rows = compile_(self._rows)
        self.log_predictive = compile_(self._log_predictive)
        self.leave_one_out = compile_(self._leave_one_out)
        self.refit_without = compile_(self._refit_without)
        self.log_factors_at_draws = compile_(self._log_factors_at_draws)
        self.weight_inputs = compile_(self._weight_inputs)
        self.fold_predictive = compile_(self._fold_predictives, static_argnames="batch_size")

    def _moments(
        self, data: Sequence[object] | None, hyper: dict[str, Array], state: object
    ) -> dict[str, tuple[Array, Array]]:
        found: dict[str, tuple[Array, Array]]
        found = self.posterior(data, hyper, state).moments(self._reading.maps(hyper, data))
        return found

    def _marginals(
        self, data: Sequence[object], hyper: dict[str, Array], state: Any, *, marginals_fn: Callable[..., Any]
    ) -> Any:
        return marginals_fn(self.posterior(data, hyper, state), self._reading.maps(hyper, data))

    def _rows(self, data: object, hyper: dict[str, Array], state: object) -> tuple[Any, Array, Array, Array]:
        """The posterior, mean and variance of the predictors, and log factors a deviation below, at and above them."""
        form, posterior = self.form(hyper, data), self.posterior(data, hyper, state)
        mean, variance = posterior.predictor_moments()
        points = mean + jnp.sqrt(jnp.maximum(variance, 0.0)) * jnp.array([[-1.0], [0.0], [1.0]])
        return posterior, mean, variance, jax.vmap(form.log_factors)(points)

    def _covariance(self, data: Sequence[object] | None, hyper: dict[str, Array], state: object, *, name: str) -> Array:
        return self.posterior(data, hyper, state).covariance(self._reading.maps(hyper, data)[name])

    def _chosen_marginals(
        self,
        data: Sequence[object],
        hyper: dict[str, Array],
        state: Any,
        indices: ChosenIndices,
        *,
        chosen: ChosenRows,
        marginals_fn: Callable[..., Any],
    ) -> object:
        """The marginals of chosen elements of a large site."""
        affine_map = self._reading.chosen_map(chosen, indices, hyper, data)
        return marginals_fn(self.posterior(data, hyper, state), {"chosen": affine_map})["chosen"]

    def _chosen_covariance(
        self,
        data: Sequence[object],
        hyper: dict[str, Array],
        state: object,
        indices: ChosenIndices,
        *,
        chosen: ChosenRows,
    ) -> Array:
        affine_map, posterior = (
            self._reading.chosen_map(chosen, indices, hyper, data),
            self.posterior(data, hyper, state),
        )
        return posterior.covariance_of(affine_map, jnp.asarray(indices.used), jnp.asarray(indices.places))

    def _draw_site(
        self,
        data: Sequence[object] | None,
        hyper: dict[str, Array],
        state: object,
        rng_key: Array,
        *,
        name: str,
        num_samples: int,
    ) -> Array:
        design, offset = self._reading.maps(hyper, data)[name]
        form, posterior = self.form(hyper, data), self.posterior(data, hyper, state)
        unknowns, bounded = posterior.sample(rng_key, num_samples), half_lines(self._reading, form, posterior)
        return design.matvec(unknowns if bounded is None else bounded.move(unknowns)) + offset

    def _draws(
        self,
        data: Sequence[object],
        hyper: dict[str, Array],
        state: object,
        rng_key: Array,
        *,
        num_samples: int,
        number: int | Array | None = None,
        is_weighted: bool = False,
        with_data: bool = True,
    ) -> Draws:
        """Draws of every site, the log density of each with the hyperparameters' prior and, if asked for, the data, and
        the log weight of those of the field, if asked for; of a ``number`` of them or a few more, if that is given, and
        zeros of the others."""
        form = self.form(hyper, data)
        posterior = self.algorithm.posterior(form, state)
        # weights correct the means as well
        is_corrected = self._has_corrected_means and not is_weighted
        unknowns = (shifted(posterior) if is_corrected else posterior).sample(rng_key, num_samples)
        log_density = joined(form).log_density if with_data else form.log_prior
        bounded = half_lines(self._reading, form, posterior)
        weight = posterior.log_weight_fn() if is_weighted else None

        def log_weight(e: Array, moved: Array) -> Array | None:
            if weight is None or bounded is None:
                return None if weight is None else weight(e)
            return weight(e, moved) - bounded.log_ratio(e, moved)

        def at(drawn_and_moved: tuple[Array, Array]) -> Draws:
            drawn, e = drawn_and_moved
            sites = self._reading.values(hyper, e, data)
            # batches of arrays without elements cannot be put together
            sites = {name: value for name, value in sites.items() if value.size}
            return Draws(sites, log_density(e), log_weight(drawn, e))

        points = unknowns, unknowns if bounded is None else bounded.move(unknowns)
        # Batches bound the memory that the factors of many observations take at many draws.
        batch_size = min(num_samples, max(1, _LARGEST_BATCH // max(1, form.num_rows)))
        found: Draws
        if number is None:
            found = jax.lax.map(at, points, batch_size=batch_size)
        else:
            size = math.gcd(num_samples, _FEW_DRAWS) if batch_size >= _FEW_DRAWS else 1
            batches = jax.tree.map(lambda part: part.reshape(-1, size, *part.shape[1:]), points)
            # traced once, for the shapes and for the loop
            found = at_each(jax.jit(jax.vmap(at)), batches, (number + size - 1) // size)
            found = jax.tree.map(lambda leaf: leaf.reshape(num_samples, *leaf.shape[2:]), found)
        shapes = self._reading.site_shapes
        empty = {n: jnp.zeros((num_samples, *shapes[n])) for n in shapes if 0 in shapes[n] and n not in found.sites}
        found = found._replace(sites=found.sites | empty)
        return found._replace(log_density=found.log_density + self._reading.log_prior(hyper, data))

    def _draws_over(
        self,
        data: Sequence[object],
        hypers: dict[str, Array],
        states: object,
        rng_keys: Array,
        counts: Array,
        num_points: int | Array,
        *,
        num_samples: int,
        is_weighted: bool = False,
        with_data: bool = True,
    ) -> Draws:
        """:meth:`_draws` at the first ``num_points`` of several hyperparameters, whose values, states, keys and counts
        of draws are stacked; zeros at the others."""
        points = hypers, states, rng_keys, counts

        @jax.jit  # traced once, for the shapes and for the loop
        def draw(point: tuple[Any, Any, Array, Array]) -> Draws:
            *place, count = point
            return self._draws(
                data, *place, num_samples=num_samples, number=count, is_weighted=is_weighted, with_data=with_data
            )

        return at_each(draw, points, num_points)

    def _stacked_moments(
        self, data: Sequence[object] | None, hyper: dict[str, Array], state: object, *, names: tuple[str, ...]
    ) -> tuple[Array, Array]:
        """Joint mean of the named sites, flattened one after the other, and a factor ``F`` of their covariance
        ``F F^T``, of shape ``(total size, num_columns)``."""
        maps = self._reading.maps(hyper, data)
        posterior = self.posterior(data, hyper, state)
        design = jnp.concatenate([maps[name].design.to_dense() for name in names])
        offset = jnp.concatenate([maps[name].offset for name in names])
        return design @ posterior.mean + offset, design @ posterior.scale_tril()

    def _log_predictive(
        self, data: object, hyper: dict[str, Array], state: object, new: LatentGaussian | None = None
    ) -> tuple[Array, Array]:
        """Log predictive density of every factor and whether it is observed, of the fit itself or of another form on
        the same unknowns."""
        form = self.form(hyper, data)
        posterior = self.algorithm.posterior(form, state)
        if isinstance(posterior, NodePosterior):
            scores = posterior.log_predictive(new)
            if scores is not None:
                return scores[0], jnp.concatenate((form if new is None else new).observed)
        if new is None:
            new, moments = form, posterior.predictor_moments()
        else:
            moments = posterior.mean_and_variance(AffineMap(new.design, new.offset))
        return log_predictive_factors(new, *moments), jnp.concatenate(new.observed)

    def _leave_one_out(self, data: object, hyper: dict[str, Array], state: object) -> tuple[Array, Array]:
        """Log predictive density of every factor without and with its own observation."""
        form = self.form(hyper, data)
        posterior = self.algorithm.posterior(form, state)
        if isinstance(posterior, NodePosterior):
            scores = posterior.log_predictive()
            assert scores is not None  # as of its own form
            return -scores[1], scores[0]
        return log_leave_one_out(form, posterior)

    def _refit_without(self, data: object, hyper: dict[str, Array], state: object, rows: Array) -> tuple[Array, Array]:
        """Log predictive density of chosen factors under fits without them, and whether these converged."""
        form = self.form(hyper, data)
        return log_refitted(form, self.algorithm, state, rows, num_steps=self._num_steps, tol=self.tol)

    def _log_factors_at_draws(self, data: object, hyper: dict[str, Array], state: object) -> Array:
        form = self.form(hyper, data)
        return log_factors_at_draws(form, self.algorithm.posterior(form, state))

    def _weight_inputs(
        self, data: object, hyper: dict[str, Array], state: object
    ) -> tuple[LatentGaussian, Array, Array]:
        """The form, and mean and lower Cholesky factor of its unknowns: what importance weights are made of."""
        form = self.form(hyper, data)
        posterior = self.algorithm.posterior(form, state)
        return form, posterior.mean, posterior.scale_tril()

    def _fold_predictives(
        self, data: object, fixed: dict[str, Array], values: Array, *, batch_size: int | None
    ) -> tuple[Array, SearchState | None, Any]:
        """:meth:`_fold_predictive` for folds whose ``data`` are stacked, so many of them at a time."""
        return jax.lax.map(lambda fold: self._fold_predictive(fold, fixed, values), data, batch_size=batch_size)

    def _fold_predictive(
        self, data: object, fixed: dict[str, Array], values: Array
    ) -> tuple[Array, SearchState | None, Any]:
        """Fit one fold and score all its factors: predictive densities, the search, and the algorithm's info."""
        space = self.space
        if space.size:
            evaluate = self._objective(data, fixed)
            start = self.algorithm.init(self.form(space.unpack(values, fixed), data))
            final = hyper_search.maximise(
                evaluate, values, start, tol=self._hyper_tol, max_iterations=self._max_iterations, with_curvature=False
            )
            hyper, state, info = space.unpack(final.values, fixed), final.best.state, final.best.info
        else:
            final, hyper = None, dict(fixed)
            state, info, _ = self.fitted(data, hyper, None, num_steps=self._num_steps)
        return self._log_predictive(data, hyper, state)[0], final, info


def compiled_programs(
    reading: LatentGaussianReading, algorithm: Algorithm, space: UnconstrainedSpace, **options: object
) -> Programs:
    """The programs for this structure, from the cache if a run of the same structure has been made before.

    :param LatentGaussianReading reading: of the model.
    :param Algorithm algorithm: with its options bound.
    :param UnconstrainedSpace space: of the hyperparameters that are learned.
    :param options: as for :class:`Programs`.
    """
    return shared(Programs, reading, algorithm, space, **options)
