"""A run of structured mean field: the bound, marginals, draws and states."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from jax import Array

from ...linalg.operators.operator import LinearOperator
from ..front.answers.draws import finite_draws
from ..front.results import LogEvidence
from .mean_field_programs import MeanFieldPrograms
from .run import Member, SparseRun, SparseSite


class MeanFieldSite(SparseSite):
    """A site under the Gaussian of structured mean field, whose precision can be solved with at any size."""

    def _row_variance(self, rows: LinearOperator | Array, rng_key: Array | None, num_samples: int) -> Array:
        return self._solved(rows, "row_variance")

    def _row_covariance(self, rows: LinearOperator | Array, rng_key: Array | None, num_samples: int) -> Array:
        return self._solved(rows, "row_covariance")

    def _solved(self, rows: LinearOperator | Array, program: str) -> Array:
        self._run.check_variances(self.name)
        (member,) = self._run.members
        return getattr(member.programs, program)(member.inputs, rows, name=self.name)


class MeanFieldRun(SparseRun[MeanFieldPrograms]):
    """A Gaussian over sparse coefficients, and a tree over their states; one member."""

    site_class = MeanFieldSite

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
        """Describe the reading of the model, and the solver of the Gaussian."""
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

    def draw(self, rng_key: Array, num_samples: int | None = None) -> tuple[dict[str, Array], Array]:
        """Draws of all sites but the observed ones, and the log density of each."""
        return finite_draws(super().draw(rng_key, num_samples))
