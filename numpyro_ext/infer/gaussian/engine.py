"""The front shared by all engines on latent Gaussian models: it reads, runs and reports, and holds no mathematics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, TypedDict

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import psis_diagnostic
from numpyro.infer.autoguide import AutoMultivariateNormal

from ...structure import read_latent_gaussian
from ..front.draws import draw_inside_support, with_hyper
from ..front.engine import BaseEngine, check_at_least, check_positive
from ..front.saved_runs import fit_from_content, fit_to_content
from ..front.sites import PosteriorSites, SitePosterior
from ..front.state import EngineState, Fit
from ..hyper.space import UnconstrainedSpace
from .fitting import RunOptions, fit, judge
from .guide import field_importance_pair, fitted_guide
from .prediction import by_site, check_same_unknowns
from .programs import Algorithm, Programs, compiled_programs

__all__ = ["Engine", "EngineOptions"]


class _Run(NamedTuple):
    """All that the answers of an engine are computed from."""

    reading: Any
    space: UnconstrainedSpace
    programs: Programs
    fit: Fit
    rng_key: Array

    @property
    def inputs(self) -> tuple[Any, dict[str, Array], Any]:
        """Data, hyperparameters and state: the first arguments of every program."""
        return self.reading.data, self.fit.hyper, self.fit.last_state.state


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of :class:`Engine`, for the constructors of its subclasses."""

    num_steps: int
    tol: float | None
    field: Sequence[str] | None
    hyper_values: Mapping[str, Any] | None
    init_values: Mapping[str, Any] | None
    num_restarts: int
    hyper_tol: float | None
    max_hyper_steps: int
    num_samples: int
    progress_bar: bool


class Engine(BaseEngine):
    """Base class of the engines on latent Gaussian models: a subclass names its algorithm, in :meth:`_algorithm`.

    :param model: a NumPyro model whose field is Gaussian given its hyperparameters.
    :param int num_steps: steps of one fit of the field at most.
    :param float tol: largest change in a step at which the field has converged; by default ``1e-8`` in float64 and
        ``1e-4`` in float32.
    :param field: names of the latent sites to be treated as the Gaussian field, where two choices are possible.
    :param dict hyper_values: hyperparameters that are given and not learned.
    :param dict init_values: where the search for the others starts (constrained).
    :param int num_restarts: further searches, from normal perturbations of that point; the best is kept.
    :param float hyper_tol: the search ends when no derivative of log evidence plus log prior with respect to an
        unconstrained hyperparameter exceeds this.
    :param int max_hyper_steps: steps of the search at most.
    :param int num_samples: draws made for :meth:`get_samples`.
    :param bool progress_bar: whether runs longer than a second show a bar.
    """

    integrates_hyper: ClassVar[bool] = False
    """Whether hyperparameters are integrated over; otherwise they are set to their optimum."""

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        num_steps: int = 100,
        tol: float | None = None,
        field: Sequence[str] | None = None,
        hyper_values: Mapping[str, Any] | None = None,
        init_values: Mapping[str, Any] | None = None,
        num_restarts: int = 0,
        hyper_tol: float | None = None,
        max_hyper_steps: int = 100,
        num_samples: int = 1000,
        progress_bar: bool = True,
    ) -> None:
        super().__init__(
            model,
            field=field,
            hyper_values=hyper_values,
            init_values=init_values,
            num_samples=num_samples,
            progress_bar=progress_bar,
        )
        check_at_least(1, num_steps=num_steps, max_hyper_steps=max_hyper_steps)
        check_at_least(0, num_restarts=num_restarts)
        check_positive(tol=tol, hyper_tol=hyper_tol)
        self.num_steps = num_steps
        self.tol = tol
        self.num_restarts = num_restarts
        self.hyper_tol = hyper_tol
        self.max_hyper_steps = max_hyper_steps

    @abstractmethod
    def _algorithm(self) -> Algorithm:
        """The algorithm with the options of this engine bound."""

    def _check_form(self, reading: Any) -> None:
        """Refuse a form that the algorithm cannot run on; the default accepts every one.

        :raises ModelStructureError: saying which site, what was found, and what to do.
        """

    # Running

    def run(self, rng_key: Array, *args: Any, init_state: EngineState | None = None, **kwargs: Any) -> None:
        """Read the model on these arguments, learn its hyperparameters and fit its field.

        :param rng_key: random number generator key, for the check of the reading, the restarts and the draws.
        :param args: arguments of the model.
        :param EngineState init_state: ``last_state`` of an earlier run. On the same data the run goes on exactly where
            that one stopped; on other data of the same shapes it starts from its values.
        :param kwargs: keyword arguments of the model.
        :raises ModelStructureError: if the model is not of the form, or not one for this algorithm.
        :raises ValueError: if the evidence is not finite; the message names the likely cause.
        :raises RuntimeError: if more than one factor in a hundred was refused in the last step.
        """
        self._forget()
        reading, space, programs = self._prepare(rng_key, args, kwargs)
        result = fit(
            reading,
            programs,
            space,
            rng_key,
            self._options(),
            init_values=space.initial(self.init_values),
            init_state=init_state,
        )
        self._last_state = result.last_state
        judge(result, reading, type(self).__name__)
        self._run = _Run(reading, space, programs, result, rng_key)

    def _options(self) -> RunOptions:
        is_double = jnp.finfo(jnp.result_type(float)).bits == 64
        return RunOptions(
            num_steps=self.num_steps,
            tol=self.tol if self.tol is not None else (1e-8 if is_double else 1e-4),
            hyper_tol=self.hyper_tol if self.hyper_tol is not None else (1e-4 if is_double else 1e-2),
            num_restarts=self.num_restarts,
            max_hyper_steps=self.max_hyper_steps,
            progress_bar=self.progress_bar,
            name=type(self).__name__,
        )

    def _prepare(
        self, rng_key: Array, args: tuple, kwargs: dict[str, Any], *, check: bool = True
    ) -> tuple[Any, UnconstrainedSpace, Programs]:
        reading = read_latent_gaussian(
            self.model, args, kwargs, field=self.field, hyper_values=None, rng_key=rng_key, check=check
        )
        self._check_form(reading)
        space = UnconstrainedSpace(reading.hyper, self.hyper_values)
        options = self._options()
        programs = compiled_programs(
            reading,
            self._algorithm(),
            space,
            num_steps=options.num_steps,
            tol=options.tol,
            hyper_tol=options.hyper_tol,
            max_iterations=options.max_hyper_steps,
            is_density_unconstrained=self.integrates_hyper,
        )
        return reading, space, programs

    # Results

    @cached_property
    def _moments(self) -> dict[str, tuple[Array, Array]]:
        run = self._finished()
        moments = run.programs.moments(*run.inputs)
        for name, (mean, variance) in moments.items():
            if not (np.isfinite(mean).all() and np.isfinite(variance).all() and np.all(np.asarray(variance) >= 0.0)):
                raise FloatingPointError(
                    f"The posterior of site {name!r} is not finite, although the evidence is. The usual cause is a "
                    "covariance close to singular: add jitter, or use float64 (numpyro.enable_x64())."
                )
        return moments

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Exact Gaussian marginals by name, for every field site and every deterministic site affine in the field."""
        run = self._finished()
        reading, programs = run.reading, run.programs

        def site(name: str) -> SitePosterior:
            return SitePosterior(
                name,
                tuple(reading.site_shapes[name]),
                moments=lambda: self._moments[name],
                covariance=lambda: programs.covariance(*run.inputs, name=name),
                sample=lambda rng_key, num_samples: programs.draw_site(
                    *run.inputs, rng_key, name=name, num_samples=num_samples
                ),
            )

        reasons = dict.fromkeys(reading.site_shapes, "it is not affine in the field; draws of it are in get_samples()")
        reasons |= dict.fromkeys(reading.hyper, "it is a hyperparameter; its estimate is in engine.hyper")
        reasons |= dict.fromkeys(reading.factor_names, "it is observed")
        return PosteriorSites({name: site(name) for name in reading.affine_sites}, reasons)

    def _draw(self, rng_key: Array) -> tuple[dict[str, Array], Array]:
        run = self._finished()
        draw = partial(run.programs.draws, *run.inputs, num_samples=self.num_samples)
        sites, log_density = draw_inside_support(draw, rng_key)
        return with_hyper(sites, run.fit.hyper, run.reading.factor_names, self.num_samples), log_density

    # Prediction

    def log_predictive(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Log predictive density of observations that the fit has not seen.

        Without arguments these are the masked observations of the fit; those whose value is missing (NaN, or outside
        the support, such as a count or category coded -1) score zero. With arguments the model is read on them and all
        its observations (that are not masked) are scored under the posterior of the fit, one by one; the field must
        have the same sites, shapes and prior. A Gaussian process at new inputs has another field: give the model all
        inputs at once and mask the ones to be predicted.

        :param args: arguments of the model.
        :param kwargs: keyword arguments of the model.
        :return: for each observed site an array in the shape of its observations, zero where nothing was scored.
        :raises ValueError: if the field of the model on these arguments is another one.
        """
        run = self._finished()
        if not args and not kwargs:
            values, observed = run.programs.log_predictive(*run.inputs)
            return by_site(run.reading, values, ~observed)
        new = read_latent_gaussian(
            self.model, args, kwargs, field=self.field, hyper_values=None, rng_key=run.rng_key, check=False
        )
        check_same_unknowns(run.reading, new, run.fit.hyper)
        values, observed = run.programs.log_predictive(*run.inputs, new.form(run.fit.hyper, new.data))
        return by_site(new, values, observed)

    # Interoperation

    @cached_property
    def _guide_and_params(self) -> tuple[AutoMultivariateNormal, dict[str, Array]]:
        run = self._finished()
        reading, space, result = run.reading, run.space, run.fit
        mean, rows = run.programs.stacked_moments(*run.inputs, names=tuple(reading.field))
        field, start = {}, 0
        for name in reading.field:
            shape = tuple(reading.site_shapes[name])
            stop = start + int(np.prod(shape))
            field[name] = (mean[start:stop].reshape(shape), rows[start:stop])
            start = stop
        factor = np.zeros((space.size, space.size))
        if result.covariance is not None:
            factor = np.linalg.cholesky(result.covariance)
        hyper, params = {}, {}
        for name, site in reading.hyper.items():
            if site.is_param:
                params[name] = result.hyper[name]
            elif name in space.fixed:
                free = site.transform.inv(result.hyper[name])
                hyper[name] = (free, jnp.zeros((free.size, space.size), mean.dtype))
            else:
                free = space.unpack_unconstrained(result.last_state.values)[name]
                hyper[name] = (free, jnp.asarray(factor[space.slices[name]], mean.dtype))
        return fitted_guide(self.model, self._args, self._kwargs, field=field, hyper=hyper, params=params)

    @property
    def guide(self) -> AutoMultivariateNormal:
        """The posterior as a fitted autoguide over all latent sites, for ``Predictive``, ELBO or PSIS; see ``params``.

        Hyperparameters have in it the covariance given by the curvature, and are independent of the field.
        """
        return self._guide_and_params[0]

    @property
    def params(self) -> dict[str, Array]:
        """The parameters of :attr:`guide` and the values of the model's ``param`` sites."""
        return self._guide_and_params[1]

    def psis_diagnostic(self, rng_key: Array, num_particles: int = 1000) -> float:
        """Pareto k-hat of the field's posterior, given the hyperparameters: below 0.7 the approximation can be trusted.

        :param rng_key: random number generator key.
        :param int num_particles: number of draws.
        :return: k-hat (Vehtari et al., 2024).
        """
        run = self._finished()
        form, mean, scale_tril = run.programs.weight_inputs(*run.inputs)
        model, guide = field_importance_pair(form.log_density, mean, scale_tril)
        return psis_diagnostic(rng_key, {}, model, guide, num_particles=num_particles)

    # Persistence

    def _content(self) -> dict[str, Any]:
        run = self._finished()
        return fit_to_content(run.fit, run.reading)

    def _restore(self, content: dict[str, Any], rng_key: Array, args: tuple, kwargs: dict[str, Any]) -> _Run:
        reading, space, programs = self._prepare(rng_key, args, kwargs, check=False)
        return _Run(reading, space, programs, fit_from_content(content, reading, programs, space), rng_key)
