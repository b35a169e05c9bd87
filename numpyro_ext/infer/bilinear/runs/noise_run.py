"""Runs of BilinearEP on ordered categories whose noise, cut points and priors of the sides are latent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.quick_jit import quick_jit
from ....linalg.cholesky import cholesky
from ....structure.bilinear.factors import Unlisted
from ....structure.bilinear.form import Bilinear
from ....structure.bilinear.noisy.form import NoisyBilinear
from ....structure.bilinear.noisy.scales import find_noise
from ....structure.bilinear.read import read_like
from ....structure.bilinear.reading import BilinearReading
from ....structure.errors import ModelStructureError
from ...front.answers.draws import Draws, draw_inside_support, with_hyper
from ...front.answers.ranking import expected_ranks
from ...front.answers.sites import PointPosterior, SitePosterior
from ...front.files.content import Content
from ...front.options import check_at_least, check_one_of, default_tolerance
from ...front.results import Diagnostics
from ...front.running.iterations import StepInfo
from ...front.state import NO_ERRORS, EngineState, Fit, data_digest
from ...hyper.space import UnconstrainedSpace
from ..algorithms import hybrid
from ..algorithms import sweeps as core
from ..algorithms.cells import Block
from ..algorithms.messages import Moments
from ..algorithms.ratings import cuts as cut_points
from ..algorithms.ratings import iterations, noise
from ..algorithms.ratings.variances import GammaMessage, Rule, gamma_of
from ..algorithms.schedules.loop import SolveInfo
from ..marginals.newcomers import Fitted, Newcomers
from ..marginals.noise import VariancePosterior, independent_gaussians, level_probabilities, mean_level_probabilities
from ..marginals.prediction import draw_predictors
from ..programs import BilinearPrograms
from .run import BilinearRun, check_sizes

_FOLD_TOL, _FOLD_TOL_SINGLE = 1e-6, 1e-3
_spectral_start = jax.jit(hybrid.spectral_start)


@jax.jit
def _paced(form: NoisyBilinear, rows: Moments, columns: Moments, damping: float) -> iterations.Paced:
    return iterations.paced(noise.init(form, rows, columns), damping)


class NoisyModel:
    """A reading with the noise behind it, and its iterations.

    :param BilinearReading reading: of the model.
    :param UnconstrainedSpace space: of the latent sites that are integrated over.
    :param BilinearPrograms answers: compiled functions of the form.
    :param str rule: by which messages to variances are made.
    """

    def __init__(
        self, reading: BilinearReading, space: UnconstrainedSpace, answers: BilinearPrograms, rule: Rule = "quadrature"
    ) -> None:
        self.reading, self.space, self.answers, self.rule = reading, space, answers, rule
        self.form, self.sites = find_noise(reading, self.form_at, space.names, space.fixed)

    def form_at(self, hyper: Mapping[str, Array]) -> Bilinear:
        """The form at values of all sites outside the two sides."""
        return self.answers.form(self.reading.data, dict(hyper))

    def start(self, hyper: Mapping[str, Array], damping: float, rng_key: Array) -> iterations.Paced:
        """State before the first iteration: products along the leading singular vectors of what cells say alone."""
        found = _spectral_start(self.form_at(hyper), rng_key)
        return _paced(self.form, found.rows.seen, found.columns.seen, damping)

    def shapes(self) -> Any:
        """Shapes of a state."""
        sides = (Moments(side.mean, side.variance) for side in self.form.sides)
        return jax.eval_shape(_paced, self.form, *sides, 1.0)

    def solve(
        self, state: iterations.Paced, num_steps: object, damping: float, warm_up: int, tol: float, chunk: int
    ) -> tuple[iterations.Paced, StepInfo]:
        """Iterations, at most ``chunk``."""
        dtype = state.damping.dtype
        arguments = jnp.asarray(num_steps), jnp.asarray(damping, dtype), jnp.asarray(warm_up), jnp.asarray(tol, dtype)
        state, info, trace, count = iterations.iterate(self.form, state, *arguments, rule=self.rule, chunk=chunk)
        value = trace[jnp.maximum(count - 1, 0)]
        solved = SolveInfo(
            iterations.has_settled(state, info, warm_up, tol), count, value, trace, info.change, info.num_skipped
        )
        return state, StepInfo(solved, value, jnp.zeros((), dtype), jnp.zeros((self.space.size,), bool))

    def points(self, state: noise.NoiseState) -> dict[str, np.ndarray]:
        """Posterior modes of variances, and means of all other latent sites, in their shapes."""
        out: dict[str, np.ndarray] = {}
        for name, found in self.posteriors(state).items():
            if isinstance(found, GammaMessage):
                out[name] = np.asarray(found.rate / (found.shape + 1.0))
                if name in self.sites.precisions:
                    out[name] = 1.0 / out[name]
            else:
                out[name] = np.asarray(found.mean)
        return {n: x.reshape(self.reading.hyper[n].shape) for n, x in out.items()}

    def posteriors(self, state: noise.NoiseState) -> dict[str, Moments | GammaMessage]:
        """Moments of Gaussian sites, and gamma densities of the precisions of others, flat."""
        sites, form = self.sites, self.form
        out: dict[str, Moments | GammaMessage] = {}
        for name, scale, messages in zip(sites.scales, form.scales, state.scales, strict=True):
            out[name] = gamma_of(scale, messages, of_groups=True)
        if sites.cuts is not None:
            elements, parents = cut_points.posterior(form, state.cuts)
            out[sites.cuts] = elements
            if sites.parent is not None and parents is not None:
                out[sites.parent] = parents
        for side, found in enumerate(state.sides):
            for own, site in ((found.mean, sites.means[side]), (found.precision, sites.variances[side])):
                if site is not None:
                    out[site] = own
        return out


@dataclass(eq=False, repr=False)
class NoiseRun(BilinearRun):
    """Posteriors of vectors, noise, cut points and priors of the sides, from the messages at the end.

    :param NoisyModel noisy: what was iterated.
    :param folded: posteriors of both sides, where those of one are new and the others were held; all else as in
        :class:`.run.BilinearRun`.
    """

    noisy: NoisyModel
    folded: tuple[Block, Block] | None = None

    @property
    def _messages(self) -> noise.NoiseState:
        return self.fit.last_state.state.messages

    @property
    def fitted(self) -> Fitted:
        """The model and its messages at the end."""
        self._refuse_folded("cold_start", "ask the engine of the fit")
        return Fitted(self.noisy.form, self.noisy.sites, self._messages)

    @cached_property
    def blocks(self) -> tuple[Block, Block]:
        if self.folded is not None:
            return self.folded
        return Block(*self._messages.rows.seen), Block(*self._messages.columns.seen)

    @property
    def inputs(self) -> tuple[Any, dict[str, Array], core.State]:
        return self.reading.data, self.fit.hyper, core.State.beginning_at(*self.blocks, self.fit.log_evidence)

    @property
    def is_lower_bound(self) -> bool:
        return False

    @property
    def points(self) -> tuple[str, ...]:
        return ()

    @cached_property
    def hyper_posterior(self) -> Mapping[str, SitePosterior]:
        out: dict[str, SitePosterior] = {n: PointPosterior(n, v) for n, v in self.fit.hyper.items()}
        for name, found in self.noisy.posteriors(self._messages).items():
            shape = tuple(self.reading.hyper[name].shape)
            if isinstance(found, GammaMessage):
                out[name] = VariancePosterior(name, shape, found, name in self.noisy.sites.precisions)
            else:
                out[name] = independent_gaussians(name, shape, found)
        return out

    @cached_property
    def hyper(self) -> Any:
        return {**super().hyper, **{n: self.hyper_posterior[n] for n in self.space.names}}

    def draw(self, rng_key: Array, num_samples: int | None = None) -> tuple[dict[str, Array], Array]:
        number = self.num_samples if num_samples is None else num_samples
        reading, fixed, names = self.reading, self.fit.hyper, self.space.names
        blocks = self.blocks

        def draw(key: Array) -> Draws:
            keys = jax.random.split(key, len(names) + 2)
            drawn = {n: self.hyper_posterior[n].sample(k, number) for n, k in zip(names, keys, strict=False)}
            vectors = [_drawn(block, k, number) for block, k in zip(blocks, keys[-2:], strict=True)]
            held = {n: v for n, v in fixed.items() if n not in drawn}
            return Draws(*self._draw_program(reading.data, held, drawn, *vectors))

        found = draw_inside_support(draw, rng_key)
        return with_hyper(found.sites, fixed, reading.observed_names, number), found.log_density

    @cached_property
    def _draw_program(self) -> Callable[..., Any]:
        # Of the run, so that further draws compile nothing.
        return quick_jit(_draw_program(self.reading))

    def on(self, reading: BilinearReading) -> NoisyModel:
        """The model on other arguments."""
        space = UnconstrainedSpace(reading.hyper, self.space.fixed)
        return NoisyModel(reading, space, self.programs.like(reading, space), self.noisy.rule)

    def _model_of(self, reading: BilinearReading) -> NoisyModel:
        """The model on other arguments, with the same sites of noise and cut points."""
        model = self.on(reading)
        if model.sites != self.noisy.sites:
            raise ModelStructureError(
                f"on these arguments the sites of noise and cut points are {model.sites.names}, in the fit "
                f"{self.noisy.sites.names}."
            )
        return model

    def level_probabilities(self, reading: BilinearReading, num_draws: int = 0) -> tuple[NoisyBilinear, Array]:
        """The cells of a reading, and the probabilities of all levels in each of them.

        :param BilinearReading reading: of the arguments.
        :param int num_draws: draws of the posterior to average over; with zero in closed form.
        :raises ModelStructureError: if the cells have other sites of noise or cut points than the fit.
        :raises ValueError: if these have another size than in the fit.
        """
        model = self._model_of(reading)
        form, own, messages = model.form, self.noisy.form, self._messages
        elements = None if own.cuts is None else cut_points.posterior(own, messages.cuts)[0]
        if elements is not None and form.cuts is not None:
            _check_same(self.noisy.sites.cuts, elements.mean, form.cuts.mean)
        gammas = [gamma_of(s, said, of_groups=True) for s, said in zip(own.scales, messages.scales, strict=True)]
        for name, gamma, scale in zip(self.noisy.sites.scales, gammas, form.scales, strict=True):
            _check_same(name, gamma.shape, scale.shape)
        if not num_draws:
            variances = [gamma.rate / (gamma.shape + 1.0) for gamma in gammas]
            return form, level_probabilities(form, self.blocks, elements, variances)
        keys = jax.random.split(jax.random.fold_in(self.rng_key, 2), num_draws)
        return form, mean_level_probabilities(form, self.blocks, elements, gammas, keys)

    def log_predictive(
        self,
        *args: Any,
        method: Literal["gaussian", "draws"] = "gaussian",
        num_samples: int = 500,
        **kwargs: Any,
    ) -> Any:
        """Log predictive probability of ratings that the fit has not seen.

        :param args: arguments of the model, by default those of the fit, of which the masked observations are scored.
        :param str method: ``"gaussian"`` is a closed form: predictor and cut points are Gaussian with the posterior
            moments, and the variance of the noise stands at its mode. ``"draws"`` averages over draws of all of them.
        :param int num_samples: number of these draws.
        :param kwargs: keyword arguments of the model.
        :return: for each observed site an array in the shape of its observations, zero where nothing was scored.
        :raises ValueError: if there are other vectors, noise or cut points on these arguments.
        """
        check_one_of(Literal["gaussian", "draws"], method=method)
        check_at_least(1, num_samples=num_samples)

        def score(reading: BilinearReading, _: Bilinear) -> Array:
            form, probabilities = self.level_probabilities(reading, num_samples if method == "draws" else 0)
            label = jnp.clip(form.label, 0, probabilities.shape[-1] - 1)[:, None]
            return jnp.log(jnp.take_along_axis(probabilities, label, 1)[:, 0])

        return self._scores(score, args, kwargs)

    def predictive_mean(self, *args: object, **kwargs: object) -> dict[str, Array]:
        """Posterior mean of the level of each cell, counted from zero, by the closed form of :meth:`log_predictive`.

        :param args: arguments of the model, by default those of the fit; observations are not needed.
        :param kwargs: keyword arguments of the model.
        :return: for each observed site an array in the shape of its observations.
        """
        if not args and not kwargs:
            args, kwargs = self.reading.args, dict(self.reading.kwargs)
        reading, _ = self._read_cells(args, kwargs, needs_observations=False)
        probabilities = self.level_probabilities(reading)[1]
        return self._by_site(reading, probabilities @ jnp.arange(probabilities.shape[-1], dtype=probabilities.dtype))

    def expected_ranks(
        self, rng_key: Array, *args: object, num_samples: int = 200, **kwargs: object
    ) -> dict[str, Array]:
        reading, _ = self._read_cells(args, kwargs, needs_observations=False)
        # of predictors that no noise has divided
        draws = draw_predictors(self.on(reading).form.cells, *self.blocks, rng_key, num_samples=num_samples)
        return self._by_site(reading, expected_ranks(draws, reading.index[0]))

    def fold_in(
        self,
        rng_key: Array,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *,
        side: str,
        unlisted_cells: Unlisted,
    ) -> BilinearRun:
        """The run of new vectors of one side and of what is their own, by the messages of the fit.

        All else stays as it is: the other side and cut points up to their Gaussians, noise at its mode.
        """
        check_one_of(Literal["rows", "columns"], side=side)
        self._refuse_folded("fold_in", "further new ones go to the engine of the fit")
        number = ("rows", "columns").index(side)
        reading = read_like(self.reading, args, kwargs, self.rng_key, has_sizes=False)
        check_sizes(self.reading, reading, (1 - number,), "That side is held and must be the same.")
        model, fitted = self._model_of(reading), self.fitted
        people = Newcomers.of(fitted, model.form, number, np.arange(len(reading.elements[number])))
        tol = default_tolerance(None, _FOLD_TOL, _FOLD_TOL_SINGLE)
        people, bound = people.of_every_rating(tol=tol, rule=model.rule)
        assert people.state is not None
        vectors = Block(people.state.vectors.mean, people.state.vectors.variance)
        blocks = (vectors, self.blocks[1]) if side == "rows" else (self.blocks[0], vectors)
        model.form, messages = people.in_place_of_priors(fitted)
        points = model.space.pack(model.points(messages))
        ended = people.change < tol
        words: tuple[str, ...] = (
            () if ended else (f"The new {side} did not converge: the last change was {people.change:.2g}.",)
        )
        if people.num_at_mode:
            words += (
                f"The noise of {people.num_at_mode} new {side} stands at its mode, as messages do not settle where it "
                "is small: more of their ratings help.",
            )
        diagnostics = Diagnostics(ended, 0, np.array([bound]), people.change, 0, {}, None, words)
        state = self.fit.last_state.state._replace(messages=messages)
        last = EngineState(points, state, None, 0, data_digest(reading.written_data, model.space.fixed, reading.key))
        fit = Fit(last, model.space.unpack(points), None, NO_ERRORS, bound, diagnostics)
        return NoiseRun(reading, model.space, fit, rng_key, self.num_samples, model.answers, model, blocks)

    def content(self) -> Content:
        self._refuse_folded("save", "save the engine of the fit, and fold them in again, which takes seconds")
        return super().content()

    def _refuse_folded(self, what: str, instead: str) -> None:
        if self.folded is not None:
            raise RuntimeError(f"{what} needs the cells of a fit, and these vectors were folded in: {instead}.")


def _drawn(block: Block, rng_key: Array, num_samples: int) -> Array:
    """Draws of all vectors of a side, shape ``(num_samples, num, size)``."""
    assert block.covariance is not None
    white = jax.random.normal(rng_key, (num_samples, *block.mean.shape))
    if block.covariance.ndim == 2:
        return block.mean + jnp.sqrt(block.covariance) * white
    return block.mean + jnp.einsum("nij,snj->sni", cholesky(block.covariance), white)


def _draw_program(reading: BilinearReading) -> Any:
    def program(data: Any, held: Any, drawn: Any, rows: Array, columns: Array) -> tuple[dict[str, Array], Array]:
        def one(draw: tuple[Any, Array, Array]) -> tuple[dict[str, Array], Array]:
            hyper, u, v = {**held, **draw[0]}, draw[1], draw[2]
            sites = reading.site_values(hyper, reading.unknowns(u, v), data)
            density = reading.form(hyper, data).log_density(u, v) + reading.log_prior(hyper, data)
            # Cut points that cross have density zero.
            return sites, jnp.where(jnp.isnan(density), -jnp.inf, density)

        return jax.lax.map(one, (drawn, rows, columns))

    return program


def _check_same(name: str | None, fitted: Array, found: Array) -> None:
    if fitted.shape != found.shape:
        raise ValueError(
            f"On the new arguments '{name}' has {found.size} elements, in the fit {fitted.size}: fit old and new "
            "rows together."
        )
