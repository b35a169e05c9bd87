"""A run of structured mean field: the bound, marginals, draws and states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...linalg.operators.operator import LinearOperator
from ...structure import SparseLinearReading
from ..front.draws import finite_draws, with_hyper
from ..front.results import LogEvidence
from ..front.run import FinishedRun
from ..front.sites import PosteriorSites, SitePosterior, missing_sites
from . import mean_field as core
from .mean_field_programs import SparsePrograms

__all__ = ["MeanFieldRun"]


@dataclass(eq=False, repr=False)
class MeanFieldRun(FinishedRun):
    """A Gaussian over sparse coefficients, and a tree over their states.

    :param SparsePrograms programs: the compiled functions of the structure.
    :param workspace: what they share; all else as in :class:`FinishedRun`.
    """

    reading: SparseLinearReading
    programs: SparsePrograms
    workspace: core.Workspace

    @property
    def inputs(self) -> tuple[Any, dict[str, Array], core.Workspace, core.State]:
        """The first arguments of every program."""
        return self.reading.data, self.fit.hyper, self.workspace, self.fit.last_state.state

    @property
    def is_lower_bound(self) -> bool:
        """True: the objective is a bound. With variances that are not exact it is known up to their errors."""
        return True

    @property
    def log_evidence(self) -> LogEvidence:
        """The lower bound of the log evidence at the hyperparameters of the fit.

        :raises RuntimeError: without variances, where there is none.
        """
        if self.programs.options.variances == "none":
            raise RuntimeError(
                "The search for the mode (variances='none') has no log evidence; the log joint density after each step "
                "is in diagnostics.objective_trace."
            )
        return super().log_evidence

    def describe(self) -> str:
        """How the model was read, and how the Gaussian is solved for."""
        options = self.programs.options
        return "\n".join([super().describe(), f"solver: {options.solver}, variances: {options.variances}"])

    @cached_property
    def _centered_draws(self) -> Array:
        """Draws of the coefficients less their mean, for variances without closed form; ``(num_samples, n)``."""
        return self.programs.draw_centered(*self.inputs, self.rng_key, num_samples=self.num_samples)

    def _site_moments(self, name: str) -> tuple[Array, Array]:
        self._check_variances(name)
        mean, variance = self.programs.site_moments(*self.inputs, self._draws_for(name), name=name)
        if not bool(jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(variance))):
            raise FloatingPointError(f"The posterior of site {name!r} is not finite, although the bound is.")
        return mean, variance

    def _draws_for(self, name: str) -> Array:
        """No draws where the variance is exact."""
        if self.programs.has_exact_variance(name):
            return jnp.zeros((0, self.reading.num_columns))
        return self._centered_draws

    def _check_variances(self, name: str) -> None:
        if self.programs.options.variances == "none":
            raise RuntimeError(
                f"variances='none' finds the mode only: {name!r} has no posterior variance. Its mode is "
                "engine.posterior[...].mean."
            )

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Gaussian marginals by name, for every coefficient site and every deterministic site linear in them.

        Variances are exact with exact variances for the coefficients, and for other sites up to 2048 coefficients;
        elsewhere they are estimated from ``num_samples`` draws, with relative standard deviation
        ``sqrt(2 / num_samples)``.
        """
        reading, programs = self.reading, self.programs
        sites = {
            name: _Site(
                name,
                tuple(reading.site_shapes[name]),
                mean=partial(programs.site_mean, *self.inputs, name=name),
                moments=partial(self._site_moments, name),
                covariance=partial(self._covariance, name),
                sample=partial(self._sample_site, name),
            )
            for name in reading.affine_sites
        }
        return PosteriorSites(sites, missing_sites(reading))

    def _covariance(self, name: str) -> Array:
        self._check_variances(name)
        return self.programs.site_covariance(*self.inputs, name=name)

    def _sample_site(self, name: str, rng_key: Array, num_samples: int) -> Array:
        self._check_variances(name)
        return self.programs.draw_site(*self.inputs, rng_key, name=name, num_samples=num_samples)

    def draw(self, rng_key: Array) -> tuple[dict[str, Array], Array]:
        """Draws of all sites but the observed ones, and the log density of each."""
        self._check_variances(self.reading.field[0])
        centered = (
            self._centered_draws
            if rng_key is self.rng_key
            else self.programs.draw_centered(*self.inputs, rng_key, num_samples=self.num_samples)
        )
        sites, log_density = finite_draws(self.programs.draws(*self.inputs, centered))
        return with_hyper(sites, self.fit.hyper, self.reading.factor_names, self.num_samples), log_density

    def state_probabilities(self) -> Array:
        """Probability that each coefficient is in the high state, of shape ``(n,)``; zero where there are no states."""
        return self.programs.state_probabilities(*self.inputs)

    def measured_size(self, site: str | None) -> int:
        """The number of elements of a site, or of all coefficients."""
        reading = self.reading
        self._check_variances(site or reading.field[0])
        if site is None:
            return reading.num_columns
        if site not in reading.affine_sites:
            raise ValueError(f"{site!r} is not linear in the coefficients; sites: {', '.join(reading.affine_sites)}.")
        return int(np.prod(reading.site_shapes[site]))

    def row_variance(self, rows: LinearOperator | Array, site: str | None) -> Array:
        """Posterior variance of each row, by one solution with the posterior precision; without a site, of rows applied
        to all coefficients in order."""
        return self.programs.row_variance(*self.inputs, rows, name=site)

    def typical_noise(self) -> Array:
        """The average variance of the noise."""
        return jnp.mean(self.reading.noise_variance(self.fit.hyper))


class _Site(SitePosterior):
    """A site whose mean is known at less cost than its variance, or without one."""

    def __init__(self, name: str, shape: tuple[int, ...], mean: Callable[[], Array], **functions: Any) -> None:
        super().__init__(name, shape, **functions)
        self._mean = mean
        self._known: tuple[Array, Array] | None = None

    @property
    def mean(self) -> Array:
        """Posterior mean, in the shape of the site."""
        return self._mean().reshape(self.shape)

    @property
    def variance(self) -> Array:
        """Posterior variance of each element, in the shape of the site."""
        if self._known is None:
            self._known = self._moments()
        return self._known[1].reshape(self.shape)
