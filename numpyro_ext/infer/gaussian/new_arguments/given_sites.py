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

from ....compilation.quick_jit import quick_jit
from ....compilation.store import shared
from ....structure import LatentGaussianReading
from ....structure.latent_gaussian.form import LatentGaussian
from ....structure.latent_gaussian.like_another import ReadingOfRows
from ...front.answers.joint_arguments import NotJoined
from ...hyper.space import UnconstrainedSpace
from ...hyper.stacked import at_each
from ..algorithms.algorithm import Algorithm
from ..algorithms.fit_info import FitInfo
from ..algorithms.nodes.node_posterior import NodePosterior
from ..algorithms.nodes.quadrature import Quadrature
from ..algorithms.posterior import Covariance, GaussianPosterior
from ..fitting.fitting_programs import POINTS_PER_CALL
from ..fitting.point_fit import PointFit
from ..integration.exploration import Exploration
from ..integration.scatter import NUM_POINTS, Scatter
from ..programs import Programs, compiled_programs
from ..runs.integrated_run import IntegratedRun, unstacked
from ..runs.quadrature_run import IntegratedQuadratureRun, QuadratureRun
from ..runs.run import GaussianRun
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


def on_all_rows(
    run: GaussianRun, found: LatentGaussianReading, places: np.ndarray, *, is_contained: bool = False
) -> GaussianRun:
    """The run with its Gaussian sites, or its quadrature given the rows of the fit, on old and new rows.

    :param GaussianRun run: of the fit.
    :param LatentGaussianReading found: of old and new arguments together.
    :param places: its rows that are those of the fit.
    :param bool is_contained: whether that reading is known to contain that of the fit, so that nothing is checked.
    :raises NotJoined: if it does not.
    """
    sites = _sites(run, [run.inputs[1:]])
    fitted, observed = jax.tree.map(lambda leaf: leaf[0], sites)
    num_rows = sum(
        int(np.prod(shape)) * k for shape, k in zip(found.factor_shapes, found.rows_per_observation, strict=True)
    )
    in_use = np.zeros(num_rows, bool)
    in_use[places] = observed
    reading = ReadingOfRows(found, in_use)
    has_nodes = isinstance(fitted, NodePosterior)
    algorithm: Algorithm = Quadrature(fitted.num_nodes) if has_nodes else _GivenSites(fitted.covariance_family)
    moves = _Moves(run, reading, algorithm, _programs(reading, algorithm, run.space), places, not is_contained)
    last = run.fit.last_state._replace(state=moves.moved([run.inputs[1:]], 1, sites[0])[0])
    parts = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    parts |= {"reading": reading, "algorithm": algorithm, "programs": moves.programs}
    parts["fit"] = run.fit._replace(last_state=last)
    if isinstance(run, IntegratedRun):
        kind = _IntegratedQuadraturePrediction if has_nodes else _IntegratedPrediction
        return kind(**parts, fitted=run, moves=moves)
    return QuadratureRun(**parts) if has_nodes else GaussianRun(**parts)


def _sites(run: GaussianRun, points: Sequence[tuple[Any, Any]]) -> Any:
    """The posterior of a fit without its form, and which rows are observed, at hyperparameters and states, stacked.

    :raises NotJoined: if it has neither sites nor nodes.
    """
    program, parts = shared(_sites_over, run.programs), []
    for start in range(0, len(points), POINTS_PER_CALL):
        number = min(POINTS_PER_CALL, len(points) - start)
        # Filled up, so that one program serves all.
        chosen = [points[start + min(k, number - 1)] for k in range(POINTS_PER_CALL)]
        found = program(run.reading.data, *_stacked(chosen), number)
        parts.append(jax.tree.map(lambda leaf, number=number: np.asarray(leaf)[:number], found))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _sites_over(programs: Programs) -> Callable[..., Any]:
    def sites(data: object, hypers: object, states: object, number: int | Array) -> Any:
        @jax.jit  # traced once, for the shapes and for the loop
        def at(point: Any) -> Any:
            posterior = programs.posterior(data, *point[:2])
            if not isinstance(posterior, GaussianPosterior | NodePosterior):
                raise NotJoined(f"A {type(posterior).__name__} has no sites to predict with. {ADVICE}")
            without_form: Any = {"form": None}
            return dataclasses.replace(posterior, **without_form), jnp.concatenate(posterior.form.observed)

        # Without hyperparameters and with Gaussian factors alone neither of the two has an array.
        return at_each(at, (hypers, states, jnp.arange(POINTS_PER_CALL)), number)

    return quick_jit(sites, is_small=programs.is_small)


@dataclasses.dataclass(frozen=True, eq=False)
class _Moves:
    """From states of a fit to states on old and new rows.

    :param run: of the fit.
    :param reading: of old and new rows.
    :param algorithm: of the states there.
    :param programs: of these.
    :param places: its rows that are those of the fit.
    :param bool is_checked: whether predictors of the fit are looked for on all rows.
    """

    run: GaussianRun
    reading: ReadingOfRows
    algorithm: Algorithm
    programs: Programs
    places: np.ndarray
    is_checked: bool

    def moved(self, points: Sequence[tuple[Any, Any]], num_checked: int, fitted: Any = None) -> list[Any]:
        """States at hyperparameters and states of the fit.

        :param points: these pairs.
        :param int num_checked: how many of them are checked.
        :param fitted: their posteriors, stacked, where these are at hand.
        :raises NotJoined: if predictors of the fit are others on all rows, at some of the points.
        """
        if isinstance(self.algorithm, Quadrature):
            moved = [_laid(self.reading, self.algorithm, hyper) for hyper, _ in points]
        else:
            fitted = _sites(self.run, points)[0] if fitted is None else fitted
            parts = np.zeros((2, len(points), len(self.reading.data[-2])), fitted.site_precision.dtype)
            parts[:, :, self.places] = fitted.site_precision, fitted.site_shift
            moved = [_Sites(*pair) for pair in zip(*parts, strict=True)]
        for k in sorted(set(np.linspace(0, len(points) - 1, num_checked * self.is_checked).astype(int).tolist())):
            hyper, state = points[k]
            before = self.run.programs.rows(self.run.reading.data, hyper, state)[1:]
            after = self.programs.rows(self.reading.data, hyper, moved[k])[1:]
            check_contained(self.run.reading, before, [np.asarray(part)[..., self.places] for part in after])
        return moved


def _laid(reading: ReadingOfRows, algorithm: Algorithm, hyper: dict[str, Array]) -> object:
    """Nodes over the density of every block given the rows in use: exact at these hyperparameters without a fit."""

    return shared(_lay, algorithm)(reading.compiled_form(hyper))


def _lay(algorithm: Algorithm) -> Callable[[LatentGaussian], object]:
    return jax.jit(lambda form: algorithm.solve(form, algorithm.init(form), num_steps=1, tol=0.0)[0])


@dataclasses.dataclass(eq=False, repr=False)
class _IntegratedPrediction(IntegratedRun):
    """A mixture over the points of a fit, whose Gaussian sites are on old and new rows together.

    :param fitted: the run at the arguments of the fit.
    :param moves: from its states to those here.
    """

    fitted: IntegratedRun
    moves: _Moves

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
        points = unstacked((fits.hyper, fits.state), len(fits.objective))
        return fits._replace(state=_stacked(self.moves.moved(points, num_checked)))


@dataclasses.dataclass(eq=False, repr=False)
class _IntegratedQuadraturePrediction(_IntegratedPrediction, IntegratedQuadratureRun):
    """The same of posteriors by quadrature."""


def check_left_out(run: GaussianRun, other: LatentGaussianReading) -> None:
    """Refuse a model whose sites depend on observations that there are not.

    :param other: reading with other values in their place.
    """
    reading = ReadingOfRows(other, run.reading.data[-2])
    programs = _programs(reading, run.algorithm, run.space)
    # by the program of marginals, where there is one
    found, again = (
        p.marginals(data, *run.inputs[1:], marginals_fn=run.marginals_fn)
        if isinstance(run, IntegratedRun)
        else p.moments(data, *run.inputs[1:])
        for p, data in ((run.programs, run.reading.data), (programs, reading.data))
    )
    check_equal(found, again)


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
