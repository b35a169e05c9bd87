"""A run on a bilinear model: posteriors, predictions of cells, rankings, and new rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ....structure.bilinear.factors import Unlisted
from ....structure.bilinear.form import Bilinear, CoupledSide, Side
from ....structure.bilinear.noisy.normal import NO_NOISE, NormalNoise, find_normal_noise
from ....structure.bilinear.read import read_like
from ....structure.bilinear.reading import BilinearReading
from ...front.answers.draws import finite_draws, with_hyper
from ...front.answers.ranking import expected_ranks
from ...front.answers.sites import PosteriorSites, SitePosterior, missing_sites
from ...front.columns import in_columns
from ...front.results import Diagnostics, LogEvidence
from ...front.run import FinishedRun, hyper_estimates
from ...front.running.progress import warn
from ...front.state import NO_ERRORS, EngineState, Fit, data_digest
from ...hyper.space import UnconstrainedSpace
from ..algorithms import sweeps as core
from ..algorithms.cells import Block
from ..algorithms.incidence import SideBlock
from ..algorithms.messages import Moments
from ..algorithms.quadratic.normal_noise import held_terms, noise_terms
from ..algorithms.ratings.variances import GammaMessage
from ..marginals.common_unknowns import GaussianMarginal, absorb_common, append_common
from ..marginals.noise import VariancePosterior
from ..marginals.pairs import share_posteriors
from ..marginals.places import site_places
from ..marginals.prediction import draw_predictors, expected_means, log_predictive_counts
from ..programs import BilinearPrograms

_FOLD_STEPS = 200
_WIDEST_PRODUCT = 9.0


@dataclass(eq=False, repr=False)
class BilinearRun(FinishedRun):
    """Posteriors of the vectors of both sides.

    :param BilinearPrograms programs: compiled functions.
    :param NormalNoise noise: variances of Normal cells that are integrated over, whose values among the hyperparameters
        are inverse mean precisions; all else as in :class:`FinishedRun`.
    """

    reading: BilinearReading
    programs: BilinearPrograms
    noise: NormalNoise = field(default=NO_NOISE, kw_only=True)

    @classmethod
    def ended_at(
        cls,
        reading: BilinearReading,
        space: UnconstrainedSpace,
        programs: BilinearPrograms,
        state: core.State,
        bound: float,
        diagnostics: Diagnostics,
        rng_key: Array,
        num_samples: int,
        noise: NormalNoise = NO_NOISE,
    ) -> BilinearRun:
        """A run with nothing to learn, from the state and the bound at its end."""
        digest = data_digest(reading.written_data, space.fixed, reading.key)
        last = EngineState(jnp.zeros((0,)), state, None, diagnostics.num_steps, digest)
        fit = Fit(last, space.fixed, None, NO_ERRORS, bound, diagnostics)
        return cls(reading, space, fit, rng_key, num_samples, programs, noise=noise)

    @property
    def inputs(self) -> tuple[Any, dict[str, Array], core.State]:
        """The first arguments of every program."""
        return self.reading.data, self.fit.hyper, self.fit.last_state.state

    @property
    def blocks(self) -> tuple[SideBlock, SideBlock]:
        """The posteriors of rows and columns."""
        state = self.fit.last_state.state
        return state.rows, state.columns

    @property
    def vectors(self) -> tuple[Moments, Moments] | None:
        """Posterior moments of all components of rows and columns; ``None`` where these depend on each other."""
        rows, columns = self.blocks
        if not isinstance(rows, Block) or not isinstance(columns, Block):
            return None
        return Moments(rows.mean, rows.variance), Moments(columns.mean, columns.variance)

    @property
    def is_lower_bound(self) -> bool:
        """True if the log evidence cannot exceed the exact one: where no side is a point."""
        return "point" not in self.programs.families

    @cached_property
    def priors(self) -> tuple[Side, Side]:
        """The priors of rows and columns at the fitted hyperparameters."""
        return self.programs.priors(self.reading.data, self.fit.hyper)

    @cached_property
    def widest_product(self) -> float:
        r"""The largest eigenvalue of :math:`\operatorname{Cov}(u) \operatorname{Cov}(v)` over all cells."""
        return 1.0 - float(self.programs.margin(*self.inputs))

    def check_widths(self) -> None:
        """Warn if the quadrature of the expectations is not accurate: both factors of a product vary widely."""
        is_by_quadrature = not self.reading.has_boundary and self.programs.closed is None
        if is_by_quadrature and self.is_lower_bound and self.widest_product > _WIDEST_PRODUCT:
            warn(
                f"The product of the posterior covariances of a row and its column has an eigenvalue of "
                f"{self.widest_product:.3g}; above {_WIDEST_PRODUCT:.0f} the quadrature of expected log factors loses "
                "accuracy. Use narrower priors."
            )

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Gaussian marginals by name, for every site of the two sides; points have no variance."""
        sites = {}
        for name in self.reading.field:
            places = site_places(self.reading, self.blocks, name, self.priors)
            shape = tuple(self.reading.site_shapes[name])
            sites[name] = SitePosterior(name, shape, places.mean, places.variance, places.covariance, places.sample)
        sites |= self._common_posteriors() | share_posteriors(self.reading, self.inputs[2].selected)
        return PosteriorSites(sites, missing_sites(self.reading, "draws of it are in get_samples()"))

    def _common_posteriors(self) -> dict[str, SitePosterior]:
        """Gaussian marginals of the sites that all cells see."""
        out: dict[str, SitePosterior] = {}
        start, block = 0, self.common
        for name in self.reading.common_sites:
            assert block is not None and block.covariance is not None
            shape = tuple(self.reading.hyper[name].shape)
            size = int(np.prod(shape))
            mean, covariance = block.mean[0, start : start + size], block.covariance[0, start : start + size]
            own = GaussianMarginal(mean, covariance[:, start : start + size])
            out[name] = SitePosterior(name, shape, own.get_mean, own.variance, own.get_covariance, own.sample)
            start += size
        return out

    @cached_property
    def _noise_posteriors(self) -> dict[str, SitePosterior]:
        out: dict[str, SitePosterior] = {}
        for name, rule in self.noise.rules.items():
            is_precision, value = name in self.noise.precisions, jnp.ravel(self.fit.hyper[name])
            gamma = GammaMessage(rule.shape, rule.shape / value if is_precision else rule.shape * value)
            out[name] = VariancePosterior(name, tuple(self.reading.hyper[name].shape), gamma, is_precision)
        return out

    @property
    def hyper_posterior(self) -> Mapping[str, SitePosterior]:
        found = {**super().hyper_posterior, **self._noise_posteriors}
        return {n: posterior for n, posterior in found.items() if n not in self.reading.common_sites}

    @cached_property
    def hyper(self) -> dict[str, Any]:
        """Value and standard error of each hyperparameter, and the posterior of noise that is integrated over."""
        found: dict[str, Any] = {**hyper_estimates(self.space, self.fit), **self._noise_posteriors}
        return {n: estimate for n, estimate in found.items() if n not in self.reading.common_sites}

    @property
    def points(self) -> tuple[str, ...]:
        return tuple(n for n in super().points if n not in self.noise.names)

    @property
    def log_evidence(self) -> LogEvidence:
        found = super().log_evidence
        is_optimum = any(n not in self.noise.names for n in self.space.names)
        return LogEvidence(
            float(found), found.is_lower_bound, "optimum" if is_optimum else "none", flat_sites=self.flat_sites
        )

    def draw(self, rng_key: Array, num_samples: int | None = None) -> tuple[dict[str, Array], Array]:
        """Draws of all sites but the observed ones, and the log density of each."""
        number = self.num_samples if num_samples is None else num_samples
        sites, log_density = finite_draws(self.programs.draws(*self.inputs, rng_key, self.noise, num_samples=number))
        return with_hyper(sites, self.fit.hyper, self.reading.observed_names, number), log_density

    @property
    def common(self) -> Block | None:
        """Posterior of the unknowns that all cells see."""
        return self.inputs[2].common

    def cell_blocks(self, side: Literal["rows", "columns"] = "rows") -> tuple[SideBlock, SideBlock]:
        """Posteriors of rows and columns as the cells of :meth:`_read_cells` see them.

        :param str side: of which each vector has a copy of what is common to all cells.
        """
        rows, columns = self.blocks
        if side == "rows":
            return append_common(rows, self.common), columns
        return rows, append_common(columns, self.common)

    def predict(self, rng_key: Array, *args: object, **kwargs: object) -> NoReturn:
        """There is none; see what this says instead."""
        raise RuntimeError(
            "predict needs one Gaussian field, and this model has a product of two. fold_in(rng_key, *new_args) gives "
            "the posterior of new rows or columns without refitting; predictive_mean, expected_ranks and "
            "log_predictive say what is expected in cells of the rows and columns that were fitted."
        )

    # Other cells of the same vectors

    def _read_cells(
        self,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        *,
        is_held_out: bool = False,
        needs_observations: bool = True,
        side_of_common: Literal["rows", "columns"] = "rows",
    ) -> tuple[BilinearReading, Bilinear]:
        fitted = self.reading.args, self.reading.kwargs
        args, kwargs = in_columns(self.columns, fitted, self.reading.model, args, kwargs)
        reading = read_like(
            self.reading, args, kwargs, self.rng_key, is_held_out=is_held_out, needs_observations=needs_observations
        )
        check_sizes(self.reading, reading, (0, 1), "Use fold_in for rows or columns that were not fitted.")
        form = self._form_of(reading, self.fit.hyper)
        self._check_priors((form.rows, form.columns), (0, 1))
        return reading, absorb_common(form, side_of_common)

    def _form_of(self, reading: BilinearReading, hyper: dict[str, Array]) -> Bilinear:
        return self.programs.like(reading, self.space).form(reading.data, hyper)

    def _refuse_censored(self, reason: str) -> None:
        """Refuse what is not known where pairs are censored."""
        if self.reading.pair_sites is not None:
            raise ValueError(f"Site '{self.reading.pair_sites.name}' has censored pairs, so that {reason}.")

    def _check_priors(self, priors: tuple[Side, Side], sides: Sequence[int]) -> None:
        """Refuse another kernel: posteriors of vectors that depend on each other are kept in the coordinates of theirs.

        :param priors: on new arguments.
        :param sides: of which the posterior is used.
        """
        for side in sides:
            old, new = self.priors[side], priors[side]
            if not isinstance(old, CoupledSide) or not isinstance(new, CoupledSide):
                continue
            pairs = [(old.mean, new.mean), (old.scale, new.scale), (old.root[old.group], new.root[new.group])]
            if not all(np.allclose(x, y, rtol=1e-4, atol=1e-6) for x, y in pairs):
                raise ValueError(
                    f"The prior of {list(self.reading.sides[side])} is another one on the new arguments, and their "
                    "posterior holds under that of the fit: give the same kernel, of the same items in the same order."
                )

    def _by_site(self, reading: BilinearReading, values: ArrayLike) -> dict[str, Array]:
        out, start, numbers = {}, 0, np.asarray(values)
        for name, cells, shape in zip(reading.factor_names, reading.cells, reading.factor_shapes, strict=True):
            filled = np.zeros(int(np.prod(shape)), numbers.dtype)
            filled[cells] = numbers[start : start + cells.size]
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
        self._refuse_censored("a probability of a pair is one among all pairs: score held-out pairs by ranking_quality")

        def score(reading: BilinearReading, form: Bilinear) -> Array:
            key = jax.random.fold_in(self.rng_key, 2)
            if not self.noise.names:
                return log_predictive_counts(form, *self.cell_blocks(), key, num_samples=num_samples)
            programs, given = self.programs.like(reading, self.space), (self.noise, *self.cell_blocks(), key)
            return programs.scores(reading.data, self.fit.hyper, *given, num_samples=num_samples)

        return self._scores(score, args, kwargs)

    def _scores(
        self,
        score: Callable[[BilinearReading, Bilinear], Array],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> dict[str, Array]:
        """Scores of the masked observations of the fit, or of all at these arguments; zero where there is no value."""
        own, is_held_out = self.reading, not args and not kwargs
        if is_held_out:
            args, kwargs = own.args, dict(own.kwargs)
            if own.uses_all_cells:
                return {n: jnp.zeros(shape) for n, shape in zip(own.factor_names, own.factor_shapes, strict=True)}
        reading, form = self._read_cells(args, kwargs, is_held_out=is_held_out)
        has_value = zip(reading.factor_names, reading.cells, strict=True)
        known = np.concatenate([reading.has_value(name).reshape(-1)[cells] for name, cells in has_value])
        return self._by_site(reading, jnp.where(known, score(reading, form), 0.0))

    def predictive_mean(self, *args: object, **kwargs: object) -> dict[str, Array]:
        """Posterior mean of rates or probabilities, without draws; ``inf``, with a warning, where there is none.

        Of censored pairs it is the probability that each different pair, in the order in which they come first, is
        emitted once it is selected. That of an exponential rate exists in every cell of a Poisson fit, and in all cells
        if the product of the prior variances is below one. Where it does not, compare predictions by
        :meth:`log_predictive` or :meth:`expected_ranks`.

        :param args: arguments of the model, by default those of the fit; observations play no part and may be left out.
        :param kwargs: keyword arguments of the model.
        :return: for each observed site an array in the shape of its observations, zero where masked.
        :raises ValueError: if observations are ordered categories.
        """
        if not args and not kwargs:
            args, kwargs = self.reading.args, dict(self.reading.kwargs)
        reading, form = self._read_cells(args, kwargs, needs_observations=False)
        means = expected_means(form, *self.cell_blocks())
        number = int(jnp.sum(~jnp.isfinite(means)))
        if number:
            warn(
                f"The predictive mean does not exist in {number} of {means.size} cells: the product of the covariances "
                "of their row and column has an eigenvalue of one or more. Use log_predictive, or narrower priors."
            )
        return self._by_site(reading, means)

    def expected_ranks(
        self, rng_key: Array, *args: object, num_samples: int = 200, **kwargs: object
    ) -> dict[str, Array]:
        """Posterior expectation of the rank of each cell among the given cells of its row, by predictor, from one.

        :param rng_key: random number generator key.
        :param args: arguments of the model with the candidate cells; observations play no part and may be left out.
        :param int num_samples: number of draws.
        :param kwargs: keyword arguments of the model.
        :return: for each observed site an array in the shape of its observations, zero where masked.
        """
        reading, form = self._read_cells(args, kwargs, needs_observations=False)
        draws = draw_predictors(form, *self.cell_blocks(), rng_key, num_samples=num_samples)
        return self._by_site(reading, expected_ranks(draws, reading.index[0]))

    # Vectors

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
        places = site_places(self.reading, self.blocks, site, self.priors)
        return places.similar(rng_key, index, num_similar=num_similar, num_samples=num_samples)

    def fold_in(
        self,
        rng_key: Array,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *,
        side: str,
        unlisted_cells: Unlisted,
    ) -> BilinearRun:
        """The run of new vectors of one side, while the other side and the hyperparameters stay as they are."""
        self._refuse_censored("new vectors would have shares of the censored pairs: fit all of them together")
        if side not in ("rows", "columns"):
            raise ValueError(f"side must be 'rows' or 'columns', got {side!r}.")
        other = 1 if side == "rows" else 0
        if self.reading.is_coupled[1 - other]:
            raise ValueError(
                f"{list(self.reading.sides[1 - other])} are vectors that depend on each other, and new ones cannot "
                "be told from their own cells alone: fit all of them together. For new vectors of the other side say "
                f"side={'columns' if other else 'rows'!r}."
            )
        own = [n for n in self.noise.names if self._is_noise_of(n, 1 - other)]
        reading = read_like(self.reading, args, kwargs, self.rng_key, unlisted_cells=unlisted_cells, has_sizes=not own)
        check_sizes(self.reading, reading, (other,), "That side is held and must be the same.")
        hyper = {n: reading.hyper[n].init if n in own else value for n, value in self.fit.hyper.items()}
        programs = self.programs.like(reading, UnconstrainedSpace(reading.hyper, hyper))
        new = self._noise_on(reading, programs, hyper)
        self._check_priors(programs.priors(reading.data, hyper), (other,))
        given = self.blocks[other], self.common, rng_key, new.of(own)
        state, info, hyper = programs.fold(reading.data, hyper, *given, side=side, num_steps=_FOLD_STEPS)
        messages = () if bool(info.converged) else (f"The new {side} did not converge in {_FOLD_STEPS} steps.",)
        if messages:
            warn(messages[0])
        held = [n for n in self.noise.names if n not in own]
        terms = noise_terms(new.of(own), hyper, reading.log_prior_of) + held_terms(self.noise, new.of(held))
        bound = float(jnp.sum(info.objective) + terms)
        diagnostics = Diagnostics(bool(info.converged), 0, np.array([bound]), 0.0, 0, {}, None, messages)
        space, noise = UnconstrainedSpace(reading.hyper, hyper), self.noise.updated(new.of(own))
        return BilinearRun.ended_at(
            reading, space, programs, state, bound, diagnostics, rng_key, self.num_samples, noise
        )

    def _noise_on(self, reading: BilinearReading, programs: BilinearPrograms, hyper: dict[str, Array]) -> NormalNoise:
        """The noise of this fit in the cells of another reading."""
        fixed = {n: value for n, value in hyper.items() if n not in self.noise.names}
        found, refusals = find_normal_noise(
            reading, lambda at: programs.form(reading.data, dict(at)), self.noise.names, fixed
        )
        for refusal in refusals.values():
            raise refusal
        return found

    def _is_noise_of(self, name: str, side: int) -> bool:
        """True if the vectors of a side have noise of their own: if both are in the same plate."""
        plates = {plate for site in self.reading.sides[side] for plate, _ in self.reading.sites[site].plates}
        return any(plate in plates for plate, _ in self.reading.sites[name].plates)


def check_sizes(old: BilinearReading, new: BilinearReading, sides: tuple[int, ...], advice: str) -> None:
    """Refuse arguments on which some sides have other sizes than in the fit."""
    for side in sides:
        fitted, found = old.elements[side].shape, new.elements[side].shape
        if fitted != found:
            raise ValueError(
                f"On the new arguments {list(new.sides[side])} make {found[0]} vectors of {found[1]} components, in "
                f"the fit {fitted[0]} of {fitted[1]}. {advice}"
            )
