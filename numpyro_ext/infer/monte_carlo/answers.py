"""Answers of a sampler after its run."""

from __future__ import annotations

from typing import Any

from jax import Array

from ...display import Shown, Table, number
from ..front.answers.arviz import ArviZInterface, by_chain
from ..front.answers.last_run import LastRun
from ..front.answers.sites import PosteriorSites
from ..front.answers.summary import PrintsSummary, Summary
from ..front.display import ending, evidence
from ..front.options import check_at_least, suggests
from ..front.results import Diagnostics, LogEvidence
from .kernels.path import PathName
from .run import SMCRun, SMCState
from .target import Target


class Answers(Shown, LastRun[SMCRun], PrintsSummary, ArviZInterface):
    """The answers of a run, for :class:`~numpyro_ext.infer.SMC`."""

    num_particles: int
    path: PathName

    @property
    def last_state(self) -> SMCState:
        """State at the end of the last run, to be given to :meth:`run` as ``init_state`` if that was on the way."""
        return self._finished().state

    @property
    def log_evidence(self) -> LogEvidence:
        """A float with ``standard_error``.

        It is made of the weights of the steps, of how alike particles of one parent are, and of what they keep of their
        parent's weight (the genealogy of the run over one generation; Olsson and Douc 2019), which is right if moves
        forget. Where the whole genealogy (Lee and Whiteley 2018) tells a larger one, that is taken. Waste-free runs
        have too few lines for that: their error is that of one generation of chains (Dau and Chopin 2022), and is told
        a tenth too small where chains of 20 places are not much longer than their memory.
        """
        return self._finished().log_evidence

    @property
    def weights(self) -> Array:
        """Weights of the particles, summing to one; even after :meth:`run`, uneven after an :meth:`update` of little
        news."""
        return self._finished().weights

    @property
    def effective_sample_size(self) -> float:
        """Effective number of particles, between one and their number."""
        return self._finished().effective_sample_size

    @property
    def particles(self) -> dict[str, Array]:
        """All latent and deterministic sites of the particles, which have :attr:`weights`."""
        return self._finished().particles

    @property
    def diagnostics(self) -> Diagnostics:
        """End of the run; ``objective_trace`` is the log evidence after each step."""
        return self._finished().diagnostics

    @property
    def history(self) -> Any:
        """Figures of each step: an ``xarray.Dataset`` over ``step``.

        ``position`` of the path, ``effective_sample_size`` before resampling, ``num_moves``, ``acceptance``,
        ``correlation`` (the largest one that a coordinate has with its start), ``num_evaluations`` of the model (each a
        particle, gradients counted as one), ``log_evidence`` and its ``log_evidence_error``.
        """
        return self._finished().history

    @property
    def posterior(self) -> PosteriorSites:
        """Marginals by name, of the weighted particles: every latent and deterministic site of real numbers."""
        return self._finished().posterior

    @suggests
    def get_samples(
        self, group_by_chain: bool = False, seed: int | None = None, num_samples: int | None = None
    ) -> dict[str, Array]:
        """Draws from the posterior, every latent and deterministic site by name: the particles, resampled where their
        weights are uneven.

        :param bool group_by_chain: whether to put a chain dimension in front, of :attr:`num_chains` groups of draws.
        :param int seed: resample from this seed.
        :param int num_samples: how many draws; more than there are particles hold some of these more than once.
        :return: arrays of shape ``(num_samples, ...)``, or ``(num_chains, num_samples // num_chains, ...)``.
        :raises TypeError: for an unknown argument; the message says which one was probably meant.
        """
        if num_samples is not None:
            check_at_least(1, num_samples=num_samples)
        sites = self._finished().samples(seed, num_samples)
        return by_chain(sites) if group_by_chain else dict(sites)

    def get_extra_fields(self, group_by_chain: bool = False) -> dict[str, Array]:
        """``potential_energy`` of each draw: minus its unconstrained log density with the data, as NumPyro has it.

        :param bool group_by_chain: whether to put a chain dimension in front, as in :meth:`get_samples`.
        """
        fields = {"potential_energy": -self._finished().log_densities}
        return by_chain(fields) if group_by_chain else fields

    def _summary(self, exclude_deterministic: bool) -> Summary:
        run, posterior = self._finished(), self.posterior
        default = [name for name in posterior if not exclude_deterministic or name in run.target.sites]
        # Short sites first: long ones are effects of groups, of which the short ones are the parameters.
        default.sort(key=lambda name: posterior[name].size > 1)
        worth = f"Worth {number(run.effective_sample_size)} of {self.num_particles} particles"
        return Summary(default, run.all_labels, work="SMC", notes=[worth])

    def describe(self) -> str:
        """The sites, the kernel and the path."""
        run = self._finished()
        movement = run.programs.ladder.movement
        return (
            f"{run.target.size} dimensions ({shapes(run.target)}), {self.num_particles} particles, "
            f"path {self.path!r}, kernel {movement.kernel!r}; observed: {', '.join(run.target.observed)}"
        )

    def _shown(self) -> list[str | Table]:
        name = f"SMC({getattr(self.model, '__name__', type(self.model).__name__)})"
        run = self._run
        if run is None:
            return [f"{name}: not run yet"]
        end, *lines = ending(run.diagnostics)
        size = f"{number(run.effective_sample_size)} of {self.num_particles} particles"
        return [f"{name}: {end}", f"log evidence: {evidence(run.log_evidence)}", f"worth {size}", *lines]

    @property
    def _args(self) -> tuple[object, ...]:
        return self._finished().target.args

    @property
    def _kwargs(self) -> dict[str, object]:
        return self._finished().target.kwargs


def shapes(target: Target) -> str:
    """Names and shapes of the latent sites."""
    return ", ".join(f"{name} {shape}" for name, shape in target.shapes.items())
