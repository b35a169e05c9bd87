"""A run on a latent Gaussian model: posterior, draws, predictive densities and a guide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import psis_diagnostic
from numpyro.infer.autoguide import AutoMultivariateNormal

from ....potentials import GaussianPotential
from ....structure import LatentGaussianReading
from ...front.answers.bounded_sites import BoundedPosterior
from ...front.answers.draws import Draws, draw_inside_support, with_hyper, with_predictive
from ...front.answers.resampling import num_proposals, psis_resampled
from ...front.answers.sites import LargeSite, PosteriorSites, SitePosterior, gaussian_draws, missing_sites
from ...front.files.content import Content
from ...front.files.saved_runs import draws_to_content, fit_to_content
from ...front.results import Diagnostics
from ...front.run import FinishedRun
from ..algorithms.algorithm import Algorithm
from ..algorithms.modes.mode_shift import mode_shifts
from ..algorithms.propagation.cumulants import correction, skewness_of_variances
from ..algorithms.supports import never_vanishes
from ..answers.coordinates import HyperCoordinates, field_coordinates
from ..answers.corrected import Corrected, check_cumulants, corrected
from ..answers.guide import field_importance_pair, fitted_guide
from ..answers.leave_one_out import most_influential, weights_fail
from ..answers.left_out import farthest, has_few_cumulants, note_of_mode, note_of_skewness
from ..answers.prediction import by_site, check_same_unknowns
from ..fitting.costs import FitCosts
from ..integration.simplified_laplace import gaussian_marginals
from ..programs import Programs

Point = tuple[Any, dict[str, Array], Any]
"""Data, hyperparameters and state: the first arguments of every program."""

_FEW_OUTLIERS = 0.01
"""Share of observations whose weights may fail: ArviZ says so of single ones."""
_REFITS_AT_ONCE = 4


_ON_HOST = (
    "Factors of the sparse precision are made by NumPy on the host, one after the other: a GPU or vmap does not speed "
    "them up."
)


@dataclass(eq=False, repr=False)
class GaussianRun(FinishedRun):
    """Posterior of a latent Gaussian model by an algorithm.

    :param algorithm: that was run, with its options.
    :param Programs programs: its compiled functions.
    :param FitCosts costs: sizes from which draws come without their log densities; all else as in
        :class:`FinishedRun`.
    """

    reading: LatentGaussianReading
    algorithm: Algorithm
    programs: Programs
    costs: FitCosts

    @property
    def inputs(self) -> Point:
        """Data, hyperparameters and state: the first arguments of every program."""
        return self.reading.data, self.fit.hyper, self.fit.last_state.state

    @property
    def is_lower_bound(self) -> bool:
        return self.algorithm.is_lower_bound

    @property
    def judged(self) -> LatentGaussianReading:
        return self.reading

    def describe(self) -> str:
        """Describe the reading of the model, and its treatment by the algorithm."""
        notes = [*self.algorithm.notes, *([_ON_HOST] if self.reading.abstract_form.layout is not None else [])]
        return "\n".join([super().describe(), *notes])

    def content(self) -> Content:
        """The outcome in plain containers, with draws that were made. Blocks that are alike are looked for again."""
        fit = fit_to_content(self.fit, self.reading.with_rows_by_column(None))
        return fit | draws_to_content(vars(self).get("draws"))

    @property
    def full_diagnostics(self) -> Diagnostics:
        """Ending of the run, with the distance of the mean from the mode where an algorithm finds the mode."""
        return self.diagnostics._replace(messages=(*self.diagnostics.messages, *self._note_of_mode))

    @cached_property
    def _note_of_mode(self) -> tuple[str, ...]:
        return note_of_mode(*self._farthest(mode_shifts)) if self.algorithm.is_mode and self._may_be_off else ()

    @cached_property
    def left_out(self) -> tuple[str, ...]:
        """Sentence on skewness that makes standard deviations too small."""
        if not self.algorithm.has_cavities or not self._may_be_off or not has_few_cumulants(self.reading):
            return ()
        return note_of_skewness(*self._farthest(skewness_of_variances))

    @property
    def _may_be_off(self) -> bool:
        """True if moments of the Gaussian are those of the fit, and may differ from those of the posterior."""
        if not self.fit.diagnostics.converged or self._has_corrected_means or not self.reading.num_columns:
            return False
        return not all(isinstance(potential, GaussianPotential) for potential in self.reading.abstract_form.potentials)

    def _farthest(self, function: Callable[..., Mapping[str, Array]]) -> tuple[str, float]:
        """Label and value of the element of the field at which a function of the posterior is farthest from zero."""
        found = self.programs.marginals_once(*self.inputs, marginals_fn=function)
        name, place, value = farthest({name: np.asarray(found[name]) for name in self.reading.field})
        return self.all_labels.label(name, tuple(self.reading.site_shapes[name]), place), value

    @property
    def _has_corrected_means(self) -> bool:
        return False

    @cached_property
    def _moments(self) -> dict[str, tuple[Array, Array]]:
        moments = self.programs.moments(*self.inputs)
        for name, (mean, variance) in moments.items():
            if not (np.isfinite(mean).all() and np.isfinite(variance).all() and np.all(np.asarray(variance) >= 0.0)):
                raise FloatingPointError(
                    f"The posterior of site {name!r} is not finite, although the evidence is. The usual cause is a "
                    "covariance close to singular: add jitter, or use float64 (numpyro.enable_x64())."
                )
        return moments

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Exact Gaussian marginals by name, for every field site and every deterministic site affine in the field; of
        field sites on a half line normals cut at its bound."""
        reading, programs = self.reading, self.programs

        def site(name: str) -> SitePosterior:
            lower = {"lower": reading.lower_bounds(name)} if name in reading.half_lines else {}
            return (BoundedPosterior if lower else SitePosterior)(
                name,
                tuple(reading.site_shapes[name]),
                **lower,
                mean=lambda: self._moments[name][0],
                variance=lambda: self._moments[name][1],
                covariance=lambda: programs.covariance(*self.inputs, name=name),
                sample=lambda rng_key, num_samples: programs.draw_site(
                    *self.inputs, rng_key, name=name, num_samples=num_samples
                ),
            )

        sites = {name: site(name) for name in reading.affine_sites}
        return PosteriorSites(sites, missing_sites(reading), self._large_sites())

    def _large_sites(self) -> dict[str, LargeSite]:
        shapes = {name: tuple(self.reading.site_shapes[name]) for name in self.reading.large_sites}
        return {name: LargeSite(name, shape, partial(self._chosen, name)) for name, shape in shapes.items()}

    def _chosen(self, name: str, places: np.ndarray) -> SitePosterior:
        """The posterior of chosen elements of a large site."""
        chosen, indices = self.reading.choose(name, places.reshape(-1))

        def marginals_at(inputs: Point, marginals_fn: Callable[..., object]) -> dict[str, Any]:
            found = self.programs.chosen_marginals(*inputs, indices, chosen=chosen, marginals_fn=marginals_fn)
            return {name: found}

        def covariance_at(inputs: Point, name: str) -> Array:
            return self.programs.chosen_covariance(*inputs, indices, chosen=chosen)

        return self.affine_sites({name: places.shape}, marginals_at, covariance_at)[name]

    def affine_sites(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        marginals_at: Callable[[Point, Callable[..., object]], Mapping[str, object]],
        covariance_at: Callable[[Point, str], Array],
    ) -> dict[str, SitePosterior]:
        """Posteriors of quantities affine in the field, computed when they are first asked for.

        :param shapes: by name.
        :param marginals_at: from the first arguments of every program, and what the marginals are to be, to means,
            variances and skewnesses by name.
        :param covariance_at: from these arguments and a name to the joint covariance.
        """

        @cache
        def moments() -> Mapping[str, Any]:
            return marginals_at(self.inputs, gaussian_marginals)

        @cache
        def covariance(name: str) -> Array:
            return covariance_at(self.inputs, name)

        def site(name: str, shape: tuple[int, ...]) -> SitePosterior:
            return SitePosterior(
                name,
                shape,
                mean=lambda: moments()[name][0],
                variance=lambda: moments()[name][1],
                covariance=partial(covariance, name),
                sample=lambda rng_key, num_samples: gaussian_draws(
                    moments()[name][0], covariance(name), rng_key, num_samples
                ),
            )

        return {name: site(name, shape) for name, shape in shapes.items()}

    def draw(self, rng_key: Array, num_samples: int | None = None) -> tuple[dict[str, Array], Array | None]:
        """Draws of all sites but the observed ones, and the log density of each unless that would take long."""
        number = self.num_samples if num_samples is None else num_samples
        form = self.reading.abstract_form
        with_data = form.num_rows * number <= self.costs.most_densities or not never_vanishes(form)
        found = self._propose(rng_key, number, with_data=with_data)
        return self._latents(found.sites, number), found.log_density if with_data else None

    @cached_property
    def log_densities(self) -> Array:
        """Log density of each of the draws that belong to the run, which are made again if they came without them."""
        known = self.draws[1]
        return self._propose(self.rng_key, self.num_samples).log_density if known is None else known

    def _propose(self, rng_key: Array, num_samples: int, is_weighted: bool = False, with_data: bool = True) -> Draws:
        """Draws of the sites that the posterior has, with weights and the density of the data if asked for."""
        options: dict[str, Any] = {"num_samples": num_samples, "is_weighted": is_weighted, "with_data": with_data}
        return draw_inside_support(partial(self.programs.draws, *self.inputs, **options), rng_key)

    def _latents(self, sites: dict[str, Array], num_samples: int) -> dict[str, Array]:
        return with_hyper(sites, self.fit.hyper, self.reading.observed_names, num_samples)

    def resample(self, rng_key: Array, num_samples: int | None = None) -> dict[str, Array]:
        """Draws by Pareto-smoothed importance weights."""
        number = self.num_samples if num_samples is None else num_samples
        key_draws, key_choice = jax.random.split(rng_key)
        found = self._propose(key_draws, num_proposals(number), is_weighted=True)
        chosen = psis_resampled(np.asarray(found.log_weight), number, key_choice)
        sites = self._latents({name: value[chosen] for name, value in found.sites.items()}, number)
        return with_predictive(self.reading, sites, rng_key)

    def log_predictive(self, new: Any = None) -> dict[str, Array]:
        """Log predictive density of the masked observations, or of those of another reading.

        :raises ValueError: if the field of the other reading is another one.
        """
        if new is None:
            values, observed = self.programs.log_predictive(*self.inputs)
            return by_site(self.reading, values, ~observed)
        check_same_unknowns(self.reading, new, self.fit.hyper)
        return by_site(new, *self.log_predictive_of(new))

    def log_predictive_of(self, new: LatentGaussianReading) -> tuple[Any, Any]:
        """Log predictive density of every factor of another reading with this field, and whether it is observed."""
        return self.programs.log_predictive(*self.inputs, new.compiled_form(self.fit.hyper))

    def typical_noise(self) -> Array:
        """The average variance of the noise, where all observations have Gaussian noise."""
        names, total = self.reading.observed_names, jnp.zeros(())
        for weight, (_, hyper, _) in self.weighted_points():
            # one factor for each observed site; behind them, priors that are factors
            factors = self.reading.compiled_form(hyper).potentials[: len(names)]
            scales = [jnp.square(f.scale) for f in factors if isinstance(f, GaussianPotential)]
            if not names or len(scales) < len(names):
                return jnp.asarray(super().typical_noise())
            total = total + weight * jnp.mean(jnp.concatenate([jnp.ravel(scale) for scale in scales]))
        return total

    @cached_property
    def leave_one_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Log predictive density of every factor without and with its own observation."""
        return self._held_at_mode

    @cached_property
    def _held_at_mode(self) -> tuple[np.ndarray, np.ndarray]:
        """The densities of :attr:`leave_one_out` at the mode alone, with the sites of all other factors held."""
        without, within = self.programs.leave_one_out(*self.inputs)
        return np.asarray(without), np.asarray(within)

    @cached_property
    def refits_without(self) -> tuple[np.ndarray, str]:
        """The answer of :meth:`refit_without`, kept."""
        return self.refit_without()

    def refit_without(self, most: int = 64, small_change: float = 0.02) -> tuple[np.ndarray, str]:
        """Change of the log predictive densities of the most influential factors without themselves where all others
        are fitted again, at the mode; zero of other factors. And a reason to doubt that this is enough, if any.

        Factors are left out in the order of their influence, until some in a row change little.

        :param int most: number of factors left out at most.
        :param float small_change: change of a log density below which no more are fitted.
        """
        held, within = self._held_at_mode
        change, rows = np.zeros_like(held), most_influential(held, within)
        factors = self.reading.compiled_form(self.inputs[1]).potentials
        if all(isinstance(factor, GaussianPotential) for factor in factors):  # their sites are exact
            return change, ""
        for start in range(0, min(rows.size, most), _REFITS_AT_ONCE):
            # always as many, so that one program serves all
            some = np.resize(rows[start : start + _REFITS_AT_ONCE], _REFITS_AT_ONCE)
            found, converged = map(np.asarray, self.programs.refit_without(*self.inputs, jnp.asarray(some)))
            if not converged.all():
                return change, "a fit without one of them did not converge"
            change[some] = found - held[some]
            if np.max(np.abs(change[some])) < small_change:
                return change, ""
        is_all = rows.size <= most
        return change, "" if is_all else f"{most} of {rows.size} of them were left out of a fit"

    @cached_property
    def against_weights(self) -> tuple[str, ...]:
        """Reasons against leaving observations out by weights of draws, site by site, at the mode."""
        log_factors = self.programs.log_factors_at_draws(*self.inputs)
        vanishing, heavy = (by_site(self.reading, x) for x in weights_fail(np.asarray(log_factors)))
        found = []
        for name, zeros in vanishing.items():
            site, is_zero, fails = self.reading.sites[name], zeros > 0.0, (zeros + heavy[name]) > 0.0
            if site.has_joint_coordinates or site.family == "Unit":
                continue
            if is_zero.any() or fails.mean() > _FEW_OUTLIERS:
                cause = "vanishes at some draws" if is_zero.any() else "varies so much that k-hat is above 0.7"
                found.append(f"{name!r}: of {fails.sum()} of {fails.size} observations it {cause}")
        return tuple(found)

    @cached_property
    def corrected(self) -> Corrected:
        """Corrections of EP's results by cumulants of the tilted densities."""
        check_cumulants(self.reading)
        if not self.fit.diagnostics.converged:
            raise RuntimeError("The correction is one of a fixed point of EP, and this run did not converge.")
        points = list(self.weighted_points())
        parts = [self.programs.marginals(*inputs, marginals_fn=correction) for _, inputs in points]
        shapes = self.reading.site_shapes
        parts = [p._replace(mean={n: m.reshape(shapes[n]) for n, m in p.mean.items()}) for p in parts]
        return corrected(self.log_evidence, np.array([weight for weight, _ in points]), parts)

    def weighted_points(self) -> Iterable[tuple[float, Point]]:
        """Masses of the hyperparameters at which the field was fitted, and the first arguments of every program."""
        return [(1.0, self.inputs)]

    @cached_property
    def guide_and_params(self) -> tuple[AutoMultivariateNormal, dict[str, Array]]:
        """The posterior as a fitted autoguide over all latent sites, and its parameters."""
        reading, space, result = self.reading, self.space, self.fit
        mean, rows = self.programs.stacked_moments(*self.inputs, names=tuple(reading.field))
        field, start = {}, 0
        for name in reading.field:
            shape = tuple(reading.site_shapes[name])
            stop = start + int(np.prod(shape))
            field[name] = (mean[start:stop].reshape(shape), rows[start:stop])
            start = stop
        factor = np.zeros((space.size, space.size))
        if result.covariance is not None:
            # Without variance in directions in which the evidence does not curve.
            variances, vectors = np.linalg.eigh(result.covariance)
            factor = vectors * np.sqrt(np.maximum(variances, 0.0))
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
        return fitted_guide(reading.model, reading.args, reading.kwargs, field=field, hyper=hyper, params=params)

    @property
    def coordinates(self) -> HyperCoordinates:
        """Map from normal numbers to the sites of the model, with the sites of the fit held.

        :raises ValueError: if the fit has another precision than JAX has now, or no such coordinates.
        """
        fitted, now = self.fit.last_state.values.dtype, jnp.zeros(()).dtype
        if fitted != now:  # the recording of the model has the numbers of then
            raise ValueError(
                f"The engine was run in {fitted}, and JAX computes in {now} now: run it again, or switch x64 "
                f"{'off' if now == np.float64 else 'on'} (numpyro.enable_x64)."
            )
        return self._coordinates

    @cached_property
    def _coordinates(self) -> HyperCoordinates:
        posterior, mean, _, _ = self.programs.rows(*self.inputs)
        return field_coordinates(self.reading, self.space, posterior, mean, self._hyper_moments)

    @property
    def _hyper_moments(self) -> tuple[Array, np.ndarray | None]:
        """Center and covariance of the unconstrained hyperparameters, where it is known."""
        return self.fit.last_state.values, self.fit.covariance

    def psis_diagnostic(self, rng_key: Array, num_particles: int) -> float:
        """Pareto k-hat of the field's posterior, given the hyperparameters."""
        form, mean, scale_tril = self.programs.weight_inputs(*self.inputs)
        model, guide = field_importance_pair(form.log_density, mean, scale_tril)
        return float(psis_diagnostic(rng_key, {}, model, guide, num_particles=num_particles))
