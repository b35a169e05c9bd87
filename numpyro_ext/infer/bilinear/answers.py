"""What a fitted bilinear model answers: posteriors, predictions of cells, rankings, and new rows."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...structure.bilinear.factors import Unlisted
from ...structure.bilinear.read import read_like
from ..front.draws import finite_draws, with_hyper
from ..front.engine import BaseEngine, default_tolerance
from ..front.progress import warn
from ..front.results import Diagnostics
from ..front.sites import PosteriorSites, SitePosterior, missing_sites
from ..front.state import EngineState, Fit, data_digest
from ..hyper.space import UnconstrainedSpace
from . import sweeps as core
from .cells import Block
from .prediction import draw_predictors, expected_means, expected_ranks, log_predictive_counts
from .programs import BilinearPrograms, Solver, compiled_bilinear_programs
from .sites import site_places

__all__ = ["BilinearAnswers", "BilinearRun"]

_FOLD_STEPS = 200


class BilinearRun(NamedTuple):
    """A fit, and what it was made with."""

    reading: Any
    space: UnconstrainedSpace
    programs: BilinearPrograms
    fit: Fit
    rng_key: Array

    @property
    def inputs(self) -> tuple[Any, dict[str, Array], core.State]:
        return self.reading.data, self.fit.hyper, self.fit.last_state.state


class BilinearAnswers(BaseEngine):
    """The part of :class:`~numpyro_ext.infer.BilinearVG` that is used after a run."""

    covariance: core.Family | dict[str, core.Family]
    tol: float | None
    solver: Solver
    unlisted_cells: Unlisted
    devices: tuple[jax.Device, ...] | None

    # Options, as a reading needs them

    def _programs(self, reading: Any, space: UnconstrainedSpace) -> BilinearPrograms:
        families, tol = self._families(reading), self._tolerance()
        return compiled_bilinear_programs(reading, space, families, tol, self.devices, self.solver)

    def _tolerance(self) -> float:
        return default_tolerance(self.tol, 1e-6, 1e-5)

    def _families(self, reading: Any) -> tuple[core.Family, core.Family]:
        if not isinstance(self.covariance, dict):
            return self.covariance, self.covariance
        unknown = [n for n in self.covariance if n not in reading.field]
        if unknown:
            raise ValueError(
                f"covariance names {unknown[0]!r}, which belongs to neither side; rows: {reading.sides[0]}, "
                f"columns: {reading.sides[1]}."
            )
        out: list[core.Family] = []
        for names in reading.sides:
            found = {self.covariance[n] for n in names if n in self.covariance}
            if len(found) > 1:
                raise ValueError(f"covariance gives {sorted(found)} for {list(names)}, which are of one side.")
            out.append(found.pop() if found else "diagonal")
        return out[0], out[1]

    # Results

    @property
    def is_lower_bound(self) -> bool:
        """Whether ``log_evidence`` cannot exceed the exact one: where no side is a point."""
        return "point" not in self._families(self._finished().reading)

    @cached_property
    def distance_to_boundary(self) -> float:
        r"""One less the largest eigenvalue of :math:`\operatorname{Cov}(u) \operatorname{Cov}(v)` over all cells.

        Expected exponential rates grow without limit as it goes to zero; every accepted step keeps it positive. Other
        expectations always exist: then it is ``inf``.
        """
        run = self._finished()
        return float(run.programs.margin(*run.inputs)) if run.reading.has_boundary else np.inf

    def _blocks(self) -> tuple[Block, Block]:
        state = self._finished().fit.last_state.state
        return state.rows, state.columns

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Gaussian marginals by name, for every site of the two sides; points have no variance."""
        run = self._finished()
        reading = run.reading
        sites = {}
        for name in reading.field:
            places = site_places(reading, self._blocks(), name)
            shape = tuple(reading.site_shapes[name])
            sites[name] = SitePosterior(name, shape, places.moments, places.covariance, places.sample)
        reasons = missing_sites(reading, "draws of it are in get_samples()")
        return PosteriorSites(sites, reasons)

    def _draw(self, rng_key: Array) -> tuple[dict[str, Array], Array]:
        run = self._finished()
        draws = run.programs.draws(*run.inputs, rng_key, num_samples=self.num_samples)
        sites, log_density = finite_draws(draws)
        return with_hyper(sites, run.fit.hyper, run.reading.factor_names, self.num_samples), log_density

    # Prediction

    def _read_cells(self, args: tuple, kwargs: dict[str, Any], *, is_held_out: bool = False) -> Any:
        run = self._finished()
        reading = read_like(run.reading, args, kwargs, run.rng_key, is_held_out=is_held_out)
        _check_sizes(run.reading, reading, (0, 1), "Use fold_in for rows or columns that were not fitted.")
        return reading, compiled_bilinear_programs(reading, run.space, self._families(reading), self._tolerance()).form(
            reading.data, run.fit.hyper
        )

    def _by_site(self, reading: Any, values: Any) -> dict[str, Array]:
        out, start = {}, 0
        for name, cells, shape in zip(reading.factor_names, reading.cells, reading.factor_shapes, strict=True):
            filled = np.zeros(int(np.prod(shape)), np.asarray(values).dtype)
            filled[cells] = values[start : start + cells.size]
            out[name] = jnp.asarray(filled.reshape(shape))
            start += cells.size
        return out

    def log_predictive(self, *args: Any, num_samples: int = 500, **kwargs: Any) -> dict[str, Array]:
        """Log predictive probability of counts that the fit has not seen.

        Without arguments these are the masked observations of the fit; those whose value is missing (NaN, or outside
        the support, such as a count coded -1) score zero. With arguments the model is read on them, and all its
        observations (that are not masked) are scored, one by one; the two sides must have the same sizes.

        :param args: arguments of the model.
        :param int num_samples: draws of one side, over which probabilities given the draw are averaged.
        :param kwargs: keyword arguments of the model.
        :return: for each observed site an array in the shape of its observations, zero where nothing was scored.
        :raises ValueError: if there are other vectors on these arguments.
        """
        run = self._finished()
        is_held_out = not args and not kwargs
        if is_held_out:
            args, kwargs = run.reading.args, dict(run.reading.kwargs)
            if all(
                c.size == int(np.prod(s)) for c, s in zip(run.reading.cells, run.reading.factor_shapes, strict=True)
            ):
                shapes = zip(run.reading.factor_names, run.reading.factor_shapes, strict=True)
                return {name: jnp.zeros(shape) for name, shape in shapes}
        reading, form = self._read_cells(args, kwargs, is_held_out=is_held_out)
        state, key = run.fit.last_state.state, jax.random.fold_in(run.rng_key, 2)
        values = log_predictive_counts(form, state.rows, state.columns, key, num_samples=num_samples)
        has_value = zip(reading.factor_names, reading.cells, strict=True)
        known = np.concatenate([reading.has_value(name).reshape(-1)[cells] for name, cells in has_value])
        values = jnp.where(known, values, 0.0)
        return self._by_site(reading, values)

    def predictive_mean(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Posterior mean of rates or probabilities, without draws; ``inf``, with a warning, where there is none.

        That of an exponential rate exists in every cell of a Poisson fit, and in all cells if the product of the prior
        variances is below one. Where it does not, compare predictions by :meth:`log_predictive` or
        :meth:`expected_ranks`.

        :param args: arguments of the model, by default those of the fit.
        :param kwargs: keyword arguments of the model.
        :return: for each observed site an array in the shape of its observations, zero where masked.
        :raises ValueError: if observations are ordered categories.
        """
        run = self._finished()
        if not args and not kwargs:
            args, kwargs = run.reading.args, dict(run.reading.kwargs)
        reading, form = self._read_cells(args, kwargs)
        state = run.fit.last_state.state
        means = expected_means(form, state.rows, state.columns)
        number = int(jnp.sum(~jnp.isfinite(means)))
        if number:
            warn(
                f"The predictive mean does not exist in {number} of {means.size} cells: the product of the covariances "
                "of their row and column has an eigenvalue of one or more. Use log_predictive, or narrower priors."
            )
        return self._by_site(reading, means)

    def expected_ranks(self, rng_key: Array, *args: Any, num_samples: int = 200, **kwargs: Any) -> dict[str, Array]:
        """Posterior expectation of the rank of each cell among the given cells of its row, by predictor, from one.

        :param rng_key: random number generator key.
        :param args: arguments of the model with the candidate cells; their counts play no part.
        :param int num_samples: number of draws.
        :param kwargs: keyword arguments of the model.
        :return: for each observed site an array in the shape of its observations, zero where masked.
        """
        reading, form = self._read_cells(args, kwargs)
        state = self._finished().fit.last_state.state
        draws = draw_predictors(form, state.rows, state.columns, rng_key, num_samples=num_samples)
        return self._by_site(reading, expected_ranks(draws, reading.index[0]))

    def similar(
        self, rng_key: Array, site: str, index: int, *, num_similar: int = 10, num_samples: int = 500
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The vectors of one site that are most similar to one of them, by cosine, with uncertainty.

        :param rng_key: random number generator key.
        :param str site: such as ``"z"``, with several components per vector.
        :param int index: of the vector to compare with.
        :param int num_similar: how many to return.
        :param int num_samples: posterior draws of the cosines.
        :return: indices, means and standard deviations of the cosines, most similar first.
        :raises ValueError: if the site belongs to neither side, or there is no such vector.
        """
        run = self._finished()
        places = site_places(run.reading, self._blocks(), site)
        return places.similar(rng_key, index, num_similar=num_similar, num_samples=num_samples)

    def fold_in(self, rng_key: Array, *args: Any, side: Literal["rows", "columns"] = "rows", **kwargs: Any) -> Self:
        """Posteriors of new rows (or columns) while the other side and the hyperparameters stay as they were fitted.

        The optimum given the other side is unique, and costs a few passes over the new cells.

        :param rng_key: random number generator key.
        :param args: arguments of the model with the new rows alone: their number, and their cells.
        :param str side: ``"rows"`` or ``"columns"``, which side is new.
        :param kwargs: keyword arguments of the model.
        :return: an engine that answers for the new rows as this one for those of the fit. Its ``log_evidence`` is the
            lower bound of the log predictive density of the new cells under the posterior of the other side.
        :raises ValueError: if the other side has another size than in the fit.
        """
        run = self._finished()
        if side not in ("rows", "columns"):
            raise ValueError(f"side must be 'rows' or 'columns', got {side!r}.")
        reading = read_like(run.reading, args, kwargs, run.rng_key, unlisted_cells=self.unlisted_cells)
        other = 1 if side == "rows" else 0
        _check_sizes(run.reading, reading, (other,), "That side is held and must be the same.")
        space = UnconstrainedSpace(reading.hyper, run.fit.hyper)
        programs = self._programs(reading, space)
        held = self._blocks()[other]
        state, info = programs.fold(reading.data, run.fit.hyper, held, rng_key, side=side, num_steps=_FOLD_STEPS)
        messages = () if bool(info.converged) else (f"The new {side} did not converge in {_FOLD_STEPS} steps.",)
        if messages:
            warn(messages[0])
        bound = float(jnp.sum(info.objective))
        diagnostics = Diagnostics(bool(info.converged), 0, np.array([bound]), 0.0, 0, {}, None, messages)
        return self._sibling(reading, space, state, bound, diagnostics, rng_key)

    def _sibling(
        self,
        reading: Any,
        space: UnconstrainedSpace,
        state: core.State,
        bound: float,
        diagnostics: Diagnostics,
        rng_key: Array,
    ) -> Self:
        """An engine of the same options that has run, with nothing to learn, and ended at ``state``."""
        engine = type(self)(self.model, **{name: getattr(self, name) for name in self._option_names()})
        last = EngineState(jnp.zeros((0,)), state, None, diagnostics.num_steps, data_digest(reading.data, space.fixed))
        fit = Fit(last, space.fixed, None, False, bound, diagnostics)
        engine._run = BilinearRun(reading, space, self._programs(reading, space), fit, rng_key)
        engine._last_state = last
        return engine


def _check_sizes(old: Any, new: Any, sides: tuple[int, ...], advice: str) -> None:
    for side in sides:
        fitted, found = old.elements[side].shape, new.elements[side].shape
        if fitted != found:
            raise ValueError(
                f"On the new arguments {list(new.sides[side])} make {found[0]} vectors of {found[1]} components, in "
                f"the fit {fitted[0]} of {fitted[1]}. {advice}"
            )
