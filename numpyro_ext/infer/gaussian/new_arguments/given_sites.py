"""The Gaussian sites of a fit on rows of which it has seen a part: its posterior, without another fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.store import shared
from ....structure import LatentGaussianReading
from ....structure.latent_gaussian.form import LatentGaussian
from ....structure.latent_gaussian.like_another import ReadingOfRows
from ...front.answers.joint_arguments import NotJoined
from ...hyper.space import UnconstrainedSpace
from ..algorithms.algorithm import Algorithm
from ..algorithms.fit_info import FitInfo
from ..algorithms.nodes.node_posterior import NodePosterior
from ..algorithms.nodes.quadrature import Quadrature
from ..algorithms.posterior import Covariance, GaussianPosterior
from ..fitting.point_fit import PointFit
from ..integrated_run import IntegratedRun, unstacked
from ..integration.exploration import Exploration
from ..integration.scatter import NUM_POINTS, Scatter
from ..programs import Programs, compiled_programs
from ..quadrature_run import IntegratedQuadratureRun, QuadratureRun
from ..run import GaussianRun, Point
from .containment import ADVICE, check_contained

_MOST_CHECKED = 5
"""Points of a design at which the predictors of the fit are looked for on all rows, beside the mode."""


class _Sites(NamedTuple):
    """The state of a posterior whose sites are given."""

    precision: Array
    shift: Array


_NO_FIT = "Predictions are not fitted."


@dataclasses.dataclass(frozen=True)
class _GivenSites(Algorithm):
    """A posterior whose sites are known, so that nothing is fitted."""

    covariance_family: Covariance

    def init(self, form: LatentGaussian) -> _Sites:
        raise AssertionError(_NO_FIT)

    def solve(self, form: LatentGaussian, state: _Sites, **options: object) -> tuple[_Sites, FitInfo]:
        raise AssertionError(_NO_FIT)

    def log_evidence(self, form: LatentGaussian, state: _Sites) -> Array:
        raise AssertionError(_NO_FIT)

    def posterior(self, form: LatentGaussian, state: _Sites) -> GaussianPosterior:
        return GaussianPosterior(form, state.precision, state.shift, covariance_family=self.covariance_family)


def on_all_rows(run: GaussianRun, found: LatentGaussianReading, places: np.ndarray) -> GaussianRun:
    """The run with its Gaussian sites, or its quadrature given the rows of the fit, on old and new rows."""
    fitted = run.programs.rows(*run.inputs)[0]
    if not isinstance(fitted, GaussianPosterior | NodePosterior):
        raise NotJoined(f"A {type(fitted).__name__} has no sites to predict with. {ADVICE}")
    observed = np.concatenate([np.asarray(part) for part in fitted.form.observed])
    num_rows = sum(
        int(np.prod(shape)) * k for shape, k in zip(found.factor_shapes, found.rows_per_observation, strict=True)
    )
    in_use = np.zeros(num_rows, bool)
    in_use[places] = observed
    reading = ReadingOfRows(found, in_use)
    algorithm: Algorithm
    if has_nodes := isinstance(fitted, NodePosterior):
        algorithm = Quadrature(fitted.num_nodes)
    else:
        algorithm = _GivenSites(fitted.covariance_family)
    programs = _programs(reading, algorithm, run.space)

    def sites(inputs: Point, is_checked: bool) -> Any:
        posterior, *before = run.programs.rows(*inputs)
        if has_nodes:
            state = _laid(reading, algorithm, inputs[1])
        else:
            parts = np.zeros((2, num_rows), posterior.site_precision.dtype)
            parts[:, places] = posterior.site_precision, posterior.site_shift
            state = _Sites(*map(jnp.asarray, parts))
        if is_checked:
            after = programs.rows(reading.data, inputs[1], state)[1:]
            check_contained(run.reading, before, [np.asarray(part)[..., places] for part in after])
        return state

    parts = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    last = run.fit.last_state._replace(state=sites(run.inputs, True))
    parts |= {"reading": reading, "algorithm": algorithm, "programs": programs}
    parts["fit"] = run.fit._replace(last_state=last)
    if isinstance(run, IntegratedRun):
        kind = _IntegratedQuadraturePrediction if has_nodes else _IntegratedPrediction
        return kind(**parts, fitted=run, sites=sites)
    return QuadratureRun(**parts) if has_nodes else GaussianRun(**parts)


def _laid(reading: ReadingOfRows, algorithm: Algorithm, hyper: dict[str, Array]) -> object:
    """Nodes over the density of every block given the rows in use: exact at these hyperparameters without a fit."""

    return shared(_lay, algorithm)(reading.compiled_form(hyper))


def _lay(algorithm: Algorithm) -> Callable[[LatentGaussian], object]:
    return jax.jit(lambda form: algorithm.solve(form, algorithm.init(form), num_steps=1, tol=0.0)[0])


@dataclasses.dataclass(eq=False, repr=False)
class _IntegratedPrediction(IntegratedRun):
    """A mixture over the points of a fit, whose Gaussian sites are on old and new rows together.

    :param fitted: the run at the arguments of the fit.
    :param sites: from the inputs of its programs to the state here, with a check of what becomes of its predictors.
    """

    fitted: IntegratedRun
    sites: Callable[[Point, bool], Any]

    @cached_property
    def exploration(self) -> Exploration:
        """The design of the fit, with marginals of the sites here."""
        found = self.fitted.exploration
        fits = self._moved(found.fits, _MOST_CHECKED)
        marginals = [
            self.programs.marginals(self.reading.data, hyper, state, marginals_fn=self.marginals_fn)
            for hyper, state in unstacked((fits.hyper, fits.state), len(found.weights))
        ]
        return found._replace(fits=fits._replace(marginals=_stacked(marginals)))

    def draw_points(self, rng_key: Array, num_samples: int) -> Scatter:
        """Points of the fit: few, as the sites are moved at each of them."""
        points = self.fitted.draw_points(rng_key, min(num_samples, NUM_POINTS))
        return points._replace(fits=self._moved(points.fits, 0))

    def _moved(self, fits: PointFit, num_checked: int) -> PointFit:
        pairs = unstacked((fits.hyper, fits.state), len(fits.objective))
        checked = set(np.linspace(0, len(pairs) - 1, num_checked).astype(int).tolist())
        data = self.fitted.reading.data
        return fits._replace(state=_stacked([self.sites((data, *pair), k in checked) for k, pair in enumerate(pairs)]))


@dataclasses.dataclass(eq=False, repr=False)
class _IntegratedQuadraturePrediction(_IntegratedPrediction, IntegratedQuadratureRun):
    """The same of posteriors by quadrature."""


def check_left_out(run: GaussianRun, other: LatentGaussianReading) -> None:
    """Refuse a model whose sites depend on observations that there are not.

    :param other: reading with other values in their place.
    """
    reading = ReadingOfRows(other, run.reading.data[-2])
    found = run.programs.moments(*run.inputs)
    check_equal(found, _programs(reading, run.algorithm, run.space).moments(reading.data, *run.inputs[1:]))


def check_equal(found: Mapping[str, Any], again: Mapping[str, Any]) -> None:
    for name, values in found.items():
        if not all(np.allclose(*pair, rtol=1e-5, atol=1e-8) for pair in zip(values, again[name], strict=True)):
            raise NotJoined(
                f"Site {name!r} depends on observations that are left out. Let it depend on latent sites alone, as a "
                f"scan that carries them does. {ADVICE}"
            )


def _programs(reading: ReadingOfRows, algorithm: Algorithm, space: UnconstrainedSpace) -> Programs:
    return compiled_programs(reading, algorithm, space, num_steps=1, tol=0.0, hyper_tol=0.0, max_iterations=0)


def _stacked(trees: Sequence[object]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *trees)
