"""A run on sparse coefficients: marginals, draws and states, of one posterior or of several with equal weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ...structure import SparseLinearReading
from ..front.answers.draws import with_hyper
from ..front.answers.sites import PosteriorSites, SitePosterior, missing_sites
from ..front.files.content import Content
from ..front.files.saved_runs import outcome_to_content
from ..front.run import FinishedRun
from ..front.state import Fit
from ..hyper.space import UnconstrainedSpace
from .programs import Inputs, SparsePrograms

_Programs = TypeVar("_Programs", bound=SparsePrograms)


class Member(NamedTuple, Generic[_Programs]):
    """The posterior under one choice of the arguments that are averaged over."""

    arguments: dict[str, Any]
    """Arguments of the model besides those of the run."""
    reading: SparseLinearReading
    space: UnconstrainedSpace
    programs: _Programs
    prepared: Any
    """See :class:`~numpyro_ext.infer.sparse.programs.Inputs`."""
    fit: Fit

    @property
    def inputs(self) -> Inputs:
        """The first argument of every program."""
        return Inputs(self.reading.data, self.fit.hyper, self.prepared, self.fit.last_state.state)

    def content(self) -> Content:
        """Arguments and outcome as plain containers."""
        return {"arguments": self.arguments, **outcome_to_content(self.fit)}


class SparseSite(SitePosterior):
    """A site of a run, whose mean is exact and known at less cost than its variance, or without one."""

    def __init__(self, name: str, run: SparseRun[Any]) -> None:
        self._run = run
        shape = tuple(run.reading.site_shapes[name])
        super().__init__(name, shape, self._mixed_mean, self._mixed_variance, self._mixed_covariance, self._mix)

    # NumPy compiles nothing.

    @cached_property
    def _means(self) -> np.ndarray:
        """Means of the members, shape ``(num_members, size)``."""
        return np.stack([np.asarray(m.programs.site_mean(m.inputs, name=self.name)) for m in self._run.members])

    def _draws(self, rng_key: Array, num_samples: int) -> list[np.ndarray]:
        """Draws of each member."""
        drawn = self._run.coefficient_draws(rng_key, num_samples)
        return [np.asarray(m.programs.site_at(m.inputs, draws, name=self.name)) for m, draws in drawn]

    @cached_property
    def _own_draws(self) -> list[np.ndarray]:
        return self._draws(self._run.rng_key, self._run.num_samples)

    def _mixed_mean(self) -> np.ndarray:
        return np.mean(self._means, axis=0)

    @cached_property
    def _within(self) -> np.ndarray:
        """The average of the variances of the members."""
        members, means = self._run.members, self._means
        self._run.check_variances(self.name)
        if all(m.programs.has_exact_variance(self.name) for m in members):
            parts = [np.asarray(m.programs.site_variance(m.inputs, name=self.name)) for m in members]
        else:
            parts = [np.mean(np.square(d - mean), axis=0) for d, mean in zip(self._own_draws, means, strict=True)]
        within: np.ndarray = np.mean(parts, axis=0)
        if not np.all(np.isfinite(within)):
            raise FloatingPointError(f"The posterior of site {self.name!r} is not finite, although the evidence is.")
        return within

    @cached_property
    def _between(self) -> np.ndarray:
        """The variance of the means of the members."""
        return np.mean(np.square(self._means - self._mixed_mean()), axis=0)

    def _mixed_variance(self) -> np.ndarray:
        return self._within + self._between

    def _mixed_covariance(self) -> Array:
        self._run.check_variances(self.name)
        parts = [np.asarray(m.programs.site_covariance(m.inputs, name=self.name)) for m in self._run.members]
        centered = self._means - self._mixed_mean()
        return jnp.asarray((sum(parts[1:], parts[0]) + centered.T @ centered) / len(parts))

    def _mix(self, rng_key: Array, num_samples: int) -> Array:
        self._run.check_variances(self.name)
        return self._run.in_order(self._draws(rng_key, num_samples), rng_key, num_samples)


class SparseRun(FinishedRun, Generic[_Programs]):
    """Posterior of sparse coefficients by an algorithm.

    :param members: of the mixture, one of them where it is none. The run has the reading and the hyperparameters of the
        first.
    :param Fit fit: of all; the other parameters are as in :class:`FinishedRun`.
    """

    reading: SparseLinearReading
    site_class: ClassVar[type[SparseSite]] = SparseSite

    def __init__(self, members: Sequence[Member[_Programs]], fit: Fit, rng_key: Array, num_samples: int) -> None:
        super().__init__(members[0].reading, members[0].space, fit, rng_key, num_samples)
        self._members = tuple(members)

    @property
    def members(self) -> tuple[Member[_Programs], ...]:
        """The members of the mixture: ``arguments``, ``fit.log_evidence``, ``fit.hyper`` of each."""
        return self._members

    @property
    def programs(self) -> _Programs:
        """The compiled functions of the first member."""
        return self.members[0].programs

    def check_variances(self, name: str) -> None:
        """Refuse to answer where the posterior of a site has no variance."""

    @cached_property
    def posterior(self) -> PosteriorSites:
        """Marginals by name: of coefficient sites (not in mixtures) and deterministic sites linear in them.

        Means are exact given the hyperparameters and the approximation. So are variances of coefficients, and of other
        sites up to 2048 coefficients, wherever the algorithm has exact ones; elsewhere they are estimated from
        ``num_samples`` draws, with a relative standard deviation of about ``sqrt(2 / num_samples)``.
        """
        reading, reasons = self.reading, missing_sites(self.reading)
        names = [
            name
            for name in reading.affine_sites
            if all(m.reading.site_shapes.get(name) == reading.site_shapes[name] for m in self.members)
        ]
        if len(self.members) > 1:
            reasons |= dict.fromkeys(reading.field, "coefficients are other quantities in each member of the mixture")
            names = [name for name in names if name not in reading.field]
        return PosteriorSites({name: self.site_class(name, self) for name in names}, reasons)

    def coefficient_draws(self, rng_key: Array, num_samples: int) -> Iterator[tuple[Member[_Programs], Array]]:
        """Equal numbers of draws of the coefficients of all members, in all at least as many as asked for."""
        number = len(self.members)
        keys = [rng_key] if number == 1 else jax.random.split(rng_key, number)
        for member, key in zip(self.members, keys, strict=True):
            yield member, member.programs.draw(member.inputs, key, num_samples=-(-num_samples // number))

    def in_order(self, parts: Sequence[ArrayLike], rng_key: Array, num_samples: int) -> Array:
        """Choose as many draws of all members as asked for, in random order."""
        if len(parts) == 1:
            return jnp.asarray(parts[0])
        drawn = np.concatenate(parts)
        order = jax.random.permutation(jax.random.fold_in(rng_key, 3), len(drawn))
        return jnp.asarray(drawn[np.asarray(order)[:num_samples]])

    def draw(self, rng_key: Array, num_samples: int | None = None) -> tuple[dict[str, Array], Array]:
        """Equal shares of the draws from all members, in random order."""
        self.check_variances(self.reading.field[0])
        parts, number = [], self.num_samples if num_samples is None else num_samples
        for member, draws in self.coefficient_draws(rng_key, number):
            sites, log_density = member.programs.sites_at(member.inputs, draws)
            if len(self.members) > 1:
                sites = {n: v for n, v in sites.items() if n in self.posterior}
            parts.append((with_hyper(sites, member.fit.hyper, member.reading.observed_names, len(draws)), log_density))
        shapes = [{n: v.shape[1:] for n, v in sites.items()} for sites, _ in parts]
        names = [n for n, shape in shapes[0].items() if all(s.get(n) == shape for s in shapes)]
        in_order = partial(self.in_order, rng_key=rng_key, num_samples=number)
        sites = {n: in_order([s[n] for s, _ in parts]) for n in names}
        return sites, in_order([log_density for _, log_density in parts])

    def state_probabilities(self) -> Array:
        """Probability that each coefficient is in the high state, of shape ``(n,)``; zero where there are no states.

        :raises RuntimeError: in a mixture, where coefficients are different quantities.
        """
        if len(self.members) > 1:
            raise RuntimeError(
                f"State probabilities belong to one choice of arguments; this run is a mixture of {len(self.members)}."
            )
        (member,) = self.members
        return member.programs.state_probabilities(member.inputs)

    def typical_noise(self) -> Array:
        """The average variance of the noise."""
        return jnp.mean(self.reading.noise_variance(self.fit.hyper))
