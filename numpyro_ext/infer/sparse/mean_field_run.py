"""A run of structured mean field: the bound, marginals, draws and states."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from jax import Array

from ...linalg.operators.operator import LinearOperator
from ..front.answers.draws import finite_draws
from ..front.results import LogEvidence
from .mean_field_programs import MeanFieldPrograms
from .run import Member, SparseRun

__all__ = ["MeanFieldRun"]


class MeanFieldRun(SparseRun[MeanFieldPrograms]):
    """A Gaussian over sparse coefficients, and a tree over their states; one member."""

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

    def check_variances(self, name: str) -> None:
        if self.programs.options.variances == "none":
            raise RuntimeError(
                f"variances='none' finds the mode only: {name!r} has no posterior variance. Its mode is "
                "engine.posterior[...].mean."
            )

    @cached_property
    def _own_draws(self) -> list[tuple[Member[MeanFieldPrograms], Array]]:
        return list(super().coefficient_draws(self.rng_key, self.num_samples))

    def coefficient_draws(self, rng_key: Array, num_samples: int) -> Iterator[tuple[Member[MeanFieldPrograms], Array]]:
        """Draws of the coefficients; those that belong to the run are made once, as they take systems of equations."""
        is_own = rng_key is self.rng_key and num_samples == self.num_samples
        return iter(self._own_draws) if is_own else super().coefficient_draws(rng_key, num_samples)

    def draw(self, rng_key: Array) -> tuple[dict[str, Array], Array]:
        """Draws of all sites but the observed ones, and the log density of each."""
        return finite_draws(super().draw(rng_key))

    def measured_size(self, site: str | None) -> int:
        """The number of elements of a site, or of all coefficients."""
        reading = self.reading
        self.check_variances(site or reading.field[0])
        if site is None:
            return reading.num_columns
        if site not in reading.affine_sites:
            raise ValueError(f"{site!r} is not linear in the coefficients; sites: {', '.join(reading.affine_sites)}.")
        return int(np.prod(reading.site_shapes[site]))

    def row_variance(self, rows: LinearOperator | Array, site: str | None) -> Array:
        """Posterior variance of each row, by one solution with the posterior precision; without a site, of rows applied
        to all coefficients in order."""
        found: Array = self.programs.row_variance(self.members[0].inputs, rows, name=site)
        return found
