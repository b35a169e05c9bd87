"""Draws of the hyperparameters of a Gaussian field, at each of which the field is conditioned exactly."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.recent import Recent
from ...infer.front.state import EngineState
from ...infer.gaussian.algorithms.algorithm import Algorithm
from ...infer.gaussian.algorithms.posterior import GaussianPosterior
from ...infer.gaussian.engine import Engine
from ...infer.gaussian.marginal.exact import exact_algorithm, gaussian_sites
from ...infer.gaussian.programs import compiled_form
from ...infer.gaussian.run import GaussianRun
from ...potentials import GaussianPotential
from ...structure import LatentGaussianReading, ModelStructureError
from .drawn_sites import latents_among
from .draws import PosteriorDraws
from .focus import Focus, Interest, as_focus, rows_of_elements, variance_left
from .outlooks import GaussianOutlook
from .points import Points, check_no_others, outlooks_at

__all__ = ["Conditioned", "outlooks_given_draws"]

_COMPILED = Recent(16)
_INSTEAD = "Fit an engine on a Gaussian field, such as EP or INLA, and ask it with this focus, or leave focus out."


def outlooks_given_draws(
    draws: PosteriorDraws,
    focus: Focus | None,
    at: Callable[[Conditioned, GaussianRun], tuple[GaussianRun, Any]],
    rng_key: Array,
) -> dict[str, GaussianOutlook]:
    """Observations as mixtures over draws of the hyperparameters, of which the field at each is a nuisance or of
    interest: what all draws together know of it is there in closed form, with no draws within draws.

    :param PosteriorDraws draws: of a model whose field is Gaussian given the others; draws of the field are not used.
    :param focus: as for :func:`~numpyro_ext.design.expected_information_gain`.
    :param at: from an engine and its run to the run that holds the observations that are looked at, and the part of
        them that is new.
    :param rng_key: for the check of the reading.
    :raises ValueError: if the field is not known exactly at each draw: why, and what to do.
    """
    engine = Conditioned(draws)
    engine.run(rng_key, *draws.args, **draws.kwargs)
    fitted = engine._finished()
    assert isinstance(fitted, GaussianRun)  # as it makes no others
    interest = as_focus(fitted, focus, tuple(fitted.reading.hyper))
    run, slices = at(engine, fitted)
    interest = interest.moved(fitted.reading, run.reading)
    weights, hyper = engine.points()
    if interest.is_about_hyper and len(weights) == 1:
        raise ValueError(
            f"All draws of {sorted(hyper)} are equal, and know nothing of their uncertainty: a chain that did not move?"
        )
    found, others = outlooks_at(run.reading, _points(run.reading, interest, weights, hyper), interest, slices)
    check_no_others(others)
    return {name: dataclasses.replace(outlook, is_of_draws=True) for name, outlook in found.items()}


class Conditioned(Engine):
    """The field of a model at a draw of its hyperparameters: a reading of the model with its data, at other draws too.

    :param PosteriorDraws draws: with the arguments of the fit that they are from.
    :raises ValueError: if these are not known.
    """

    def __init__(self, draws: PosteriorDraws) -> None:
        super().__init__(draws.model, progress_bar=False)
        if not (draws.args or draws.kwargs) and inspect.signature(draws.model).parameters:
            raise ValueError(
                "A focus needs the data that the draws have seen: give the arguments of the fit as well, "
                "draws_of(..., args=(x, y))."
            )
        self._drawn = latents_among(draws.model, draws.samples, (draws.args, draws.kwargs))
        self._weights = draws.weights
        self._num_draws = draws.num_draws

    def points(self) -> tuple[np.ndarray, dict[str, Array]]:
        """Weights that are not zero, and values of the hyperparameters; equal draws are one point."""
        names = list(self.hyper_values)
        weights = np.full(self._num_draws, 1.0 / self._num_draws) if self._weights is None else self._weights
        # a column of zeros besides: there may be nothing that draws could differ in
        columns = [np.reshape(self._drawn[name], (self._num_draws, -1)) for name in names]
        table = np.concatenate([np.zeros((self._num_draws, 1)), *columns], axis=1)
        _, first, place = np.unique(table, axis=0, return_index=True, return_inverse=True)
        total = np.bincount(place.reshape(-1), np.asarray(weights, float))
        kept = total > 0.0
        return total[kept] / total.sum(), {name: self._drawn[name][first[kept]] for name in names}

    def _start(
        self, rng_key: Array, args: tuple[Any, ...], kwargs: dict[str, Any], init_state: EngineState | None
    ) -> GaussianRun:
        try:
            reading = self._read(rng_key, args, kwargs)
        except ModelStructureError as error:
            raise ValueError(
                "A focus needs the other unknowns given those of interest, which draws have in a model with a Gaussian "
                f"field. Here {error}"
            ) from error
        missing = [name for name in reading.hyper if name not in self._drawn]
        if missing:
            raise ValueError(f"The draws are of {sorted(self._drawn)}; a focus needs draws of {missing} as well.")
        self.hyper_values = {name: self._drawn[name][0] for name in reading.hyper}
        return self._fit(reading, rng_key, init_state)

    def algorithm(self, reading: LatentGaussianReading) -> Algorithm:
        form = compiled_form(reading, self.hyper_values)
        parts = zip(reading.factor_names, form.potentials, form.observed, strict=True)
        names = [n for n, potential, used in parts if not isinstance(potential, GaussianPotential) and bool(used.any())]
        if names:
            raise ValueError(
                f"What the draws have seen of {names} is no observation with Gaussian noise, so that the field given "
                f"the hyperparameters is not known exactly, and draws within draws would be biased. {_INSTEAD}"
            )
        return exact_algorithm()


class _Programs(NamedTuple):
    moments: Any
    left: Any


def _points(reading: LatentGaussianReading, interest: Interest, weights: np.ndarray, hyper: dict[str, Array]) -> Points:
    programs = _programs(reading, tuple(interest.elements))
    number = jnp.arange(len(weights))  # there may be no hyperparameters
    potentials, mean, variance = programs.moments(reading.data, number, hyper)
    if not (np.isfinite(mean).all() and np.isfinite(variance).all()):
        raise FloatingPointError(
            "The field is not finite at some draws of the hyperparameters. The usual cause is a covariance close to "
            "singular: add jitter, or use float64 (numpyro.enable_x64())."
        )

    def left(rows: np.ndarray) -> Array | None:
        if not interest.elements:
            return None
        interest.check_joint(len(rows))
        found: Array = programs.left(reading.data, number, hyper, rows, interest.elements)
        return found

    return Points(jnp.asarray(weights, mean.dtype), potentials, mean, variance, left)


def _programs(reading: LatentGaussianReading, names: Sequence[str]) -> _Programs:
    return _COMPILED.get((reading.structure_key, names), lambda: _make_programs(reading.skeleton()))


def _make_programs(reading: LatentGaussianReading) -> _Programs:
    def posterior(hyper: Mapping[str, Array], data: Any) -> GaussianPosterior:
        form = reading.form(hyper, data)
        return GaussianPosterior(form, *gaussian_sites(form))

    def moments(data: Any, number: Array, hyper: Mapping[str, Array]) -> Any:
        def at(point: tuple[Array, Mapping[str, Array]]) -> Any:
            found = posterior(point[1], data)
            return found.form.potentials, *found.predictor_moments()

        return jax.lax.map(at, (number, hyper))

    def left(data: Any, number: Array, hyper: Mapping[str, Array], rows: Array, elements: Mapping[str, Array]) -> Array:
        def at(point: tuple[Array, Mapping[str, Array]]) -> Array:
            found = posterior(point[1], data)
            design = found.form.design.to_dense()[rows], rows_of_elements(reading, point[1], data, elements)
            return variance_left(found, jnp.concatenate(design), len(rows))

        found: Array = jax.lax.map(at, (number, hyper))
        return found

    return _Programs(jax.jit(moments), jax.jit(left))
