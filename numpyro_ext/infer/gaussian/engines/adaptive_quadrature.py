"""Adaptive quadrature as an inference engine for NumPyro models of small independent blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Self, Unpack
from warnings import catch_warnings, simplefilter

import jax.numpy as jnp
import numpy as np
from jax import Array

from ....structure import LatentGaussianReading, ModelStructureError
from ....structure.latent_gaussian import LatentGaussian
from ....structure.latent_gaussian.like_another import PartsDiffer
from ....structure.latent_gaussian.read import SMALL_BLOCKS
from ....structure.model.running.execution import ModelCall
from ....structure.model.running.parts import num_numbers, split_members
from ...front.options import check_at_least
from ...front.run import FinishedRun
from ...front.running.progress import warn
from ...front.state import EngineState
from ...hyper.space import UnconstrainedSpace
from ..algorithms.algorithm import Algorithm
from ..algorithms.nodes.column_factors import rows_by_column
from ..algorithms.nodes.find_shared_columns import find_kinds, find_shared_columns, kinds_hold
from ..algorithms.nodes.quadrature import Quadrature
from ..algorithms.nodes.quadrature_error import WORTH_A_WORD, quadrature_error
from ..algorithms.nodes.shared_columns import SharedColumns
from ..engine import Engine, GaussianOptions
from ..fitting.many import NOTHING_BEGUN, Begun
from ..marginal.model import MarginalModel
from ..runs.quadrature_parts import Members, scored_fit
from ..runs.quadrature_parts_run import MembersRun
from ..runs.quadrature_run import IntegratedQuadratureRun, QuadratureRun
from ..runs.run import GaussianRun

_NEGLIGIBLE, _MOST_NODES = 1e-4, 4000.0
"""Error of the log evidence for which no nodes are added; nodes of a block at most."""
_MAY_BE_A_MAXIMUM = 0.1
"""Error with the most nodes at which a maximum may be one of these, and none of the model: a slope that runs away."""
_NUM_PROBES, _SPREAD = 2, 0.3


class AdaptiveQuadrature(Engine):
    """Exact integration over the field of a latent Gaussian model that falls into blocks of at most three unknowns.

    Persons of an item-response model, groups of a random-intercept regression, pairs of random slopes: each block is
    integrated over by quadrature, whatever its likelihood is, so that the log evidence at given hyperparameters and the
    posterior of each block are exact up to quadrature. Sites that join blocks (common coefficients, parameters of
    items) are hyperparameters: maximum marginal likelihood for ``param`` sites, and with a prior they are integrated
    over as ``integrate`` says. Of several sets of sites that could be the field it is the one whose members have no
    hyperparameters of their own (people, and not items with their slopes), and of these the largest: ``describe()``
    names it and ``field=[...]`` chooses it.

    Quantiles are those of the density in blocks of one at given hyperparameters, and estimated from 4000 draws of it
    elsewhere.

    **Example:**

    .. code-block:: python

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_ext.infer import AdaptiveQuadrature

        >>> def model(y=None):
        ...     level = numpyro.param("level", jnp.array(0.0))
        ...     with numpyro.plate("groups", 3):
        ...         effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        ...     numpyro.sample("y", dist.Poisson(jnp.exp(level + effect[:, None])).to_event(2), obs=y)

        >>> engine = AdaptiveQuadrature(model)
        >>> engine.run(jax.random.key(0), jnp.array([[3, 5], [2, 4], [0, 1]]))
        >>> print(engine.posterior["effect"].mean.round(2))
        [ 0.59  0.31 -0.89]

    :param model: a NumPyro model whose field falls into independent blocks given its hyperparameters.
    :param int num_nodes: nodes along each axis of a block, at least 5; by default 49, 31 or 19 for blocks of one, two
        or three unknowns.
    :param options: those of :class:`~numpyro_ext.infer.Engine`: ``integrate``, ``field``, ``hyper_values``,
        ``init_values``, ``num_restarts``, ``hyper_tol``, ``max_hyper_steps``, ``num_samples`` and ``progress_bar``.
    """

    forms = (SMALL_BLOCKS,)
    _run_class = QuadratureRun
    _integrated_run_class = IntegratedQuadratureRun

    def __init__(
        self, model: Callable[..., object], *, num_nodes: int | None = None, **options: Unpack[GaussianOptions]
    ) -> None:
        super().__init__(model, **options)
        if num_nodes is not None:
            check_at_least(5, num_nodes=num_nodes)
        self.num_nodes = num_nodes
        self._may_share = True
        self._chosen_nodes: int | None = None
        self._looked_at: tuple[LatentGaussianReading, SharedColumns | None] | None = None

    def _start(
        self, rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object], init_state: EngineState | None
    ) -> FinishedRun:
        members = self._members(rng_key, args, kwargs)
        if members is not None:
            try:
                return self._run_of_members(members, rng_key, args, kwargs, init_state)
            except PartsDiffer:
                pass
        return super()._start(rng_key, args, kwargs, init_state)

    def _fitted_field(self, run: GaussianRun, args: tuple[object, ...], kwargs: dict[str, object]) -> list[str]:
        # not even a search for the field reads all members of a large model
        return list(run.judged.field) if self._may_be_large(args, kwargs) else super()._fitted_field(run, args, kwargs)

    def _may_be_large(self, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        """True if arguments hold so many numbers that members may be taken a part at a time."""
        return num_numbers((self.model, args, kwargs)) >= 2 * self._costs.most_cells_at_once

    def _members(self, rng_key: Array, args: tuple[object, ...], kwargs: dict[str, object]) -> Members | None:
        """The members of a large model in parts that share their columns; nothing where there are none."""
        if not (self._may_share and self._may_be_large(args, kwargs)):
            return None
        parts = split_members(ModelCall(self.model, args, kwargs, rng_key), self._costs.most_cells_at_once)
        if parts is None:
            return None
        try:
            with catch_warnings():  # the model has said of all members what there is to say
                simplefilter("ignore")
                reading = self._of_model(parts.example.model)._read(rng_key, parts.example.args, parts.example.kwargs)
        except ModelStructureError:
            return None
        of_members = [*reading.field, *reading.affine_sites]
        is_split = all(map(parts.has_members, of_members)) and not any(map(parts.has_members, reading.hyper))
        if not (is_split and reading.holds_no_values) or self._integrates(self._space(reading)):
            return None
        found = self._shared_columns(reading, _probes(reading))
        if found is None or found.is_ragged or found.has_weights:
            return None
        found = replace(found, has_gaps=found.has_gaps or parts.has_gaps)
        return Members(parts, reading, found, self._start_values)

    def _run_of_members(
        self,
        members: Members,
        rng_key: Array,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        init_state: EngineState | None,
    ) -> MembersRun:
        """Fit by the outcomes of all members, or score these where there is nothing to learn.

        :raises PartsDiffer: where members of other parts differ from the first in more than outcomes.
        """
        reading, scores = members.reading, None
        space = self._space(reading)
        if space.size:
            reading, priors = members.with_blocks(partial(_probe_values, reading))
            run = self._of_model(members.parts.example.model)._fit(reading, rng_key, init_state)
            if not isinstance(run.algorithm, SharedColumns):
                raise PartsDiffer
            members.check_priors(priors, run.fit.hyper)
            members, fit = replace(members, algorithm=replace(run.algorithm, num_kinds=None)), run.fit
        else:
            hyper = space.unpack(jnp.zeros((0,)))
            scores = members.scores(hyper)
            if not scores.error <= max(_NEGLIGIBLE, scores.rounding):
                raise PartsDiffer
            fit = scored_fit(scores, hyper)

        def whole() -> GaussianRun:
            other = copy.copy(self)
            other.hyper_values = dict(fit.hyper)
            return other._fit(other._read(rng_key, args, kwargs), rng_key, None)

        return MembersRun(members, space, fit, rng_key, self.num_samples, whole, scores)

    def _of_model(self, model: Callable[..., object]) -> Self:
        """This engine on another model."""
        other = copy.copy(self)
        other.model = model
        return other

    def _sampled_model(self) -> MarginalModel:
        run = self._finished()
        assert isinstance(run, GaussianRun)  # as all runs of this engine are
        return MarginalModel(copy.copy(self), run)

    def _space(self, reading: LatentGaussianReading) -> UnconstrainedSpace:
        return UnconstrainedSpace(reading.hyper, self.hyper_values)

    def algorithm(self, reading: LatentGaussianReading) -> Algorithm:
        if self._looked_at is not None and self._looked_at[0] is reading:
            found = self._looked_at[1]
        else:
            found = self._shared_columns(reading, _probes(reading)) if self._may_share else None
        return Quadrature(self.num_nodes or self._chosen_nodes) if found is None else found

    def _shared_columns(self, reading: LatentGaussianReading, forms: list[LatentGaussian]) -> SharedColumns | None:
        """The algorithm of one table for all blocks, where their factors differ in outcomes alone.

        :param forms: of the reading at hyperparameters that no model knows of.
        """
        # of two unknowns a rule of given size is for the density of each block
        if self.num_nodes is not None and reading.abstract_form.blocks.columns.shape[1] > 1:
            return None
        return _of_kinds(find_shared_columns(forms, self.num_nodes or self._chosen_nodes), reading)

    def _with_kinds(self, reading: LatentGaussianReading) -> LatentGaussianReading:
        if not self._may_share or reading.kinds is not None:
            return reading
        forms = _probes(reading)
        found = self._shared_columns(reading, forms)
        by_column = rows_by_column(forms) if found is None else None
        if by_column is not None:  # answers one below the other
            reading = reading.with_rows_by_column(by_column)
            forms = _probes(reading)
            found = self._shared_columns(reading, forms)
            reading = reading if found is not None else reading.with_rows_by_column(None)
        reading = reading if found is None else reading.with_kinds(find_kinds(forms, found, self._costs.most_kinds))
        self._looked_at = reading, _of_kinds(found, reading)
        return reading

    def _fit(
        self,
        reading: LatentGaussianReading,
        rng_key: Array,
        init_state: EngineState | None,
        begun: Begun = NOTHING_BEGUN,
    ) -> GaussianRun:
        """Fit, and look at the end whether the nodes were enough: more of them, where their number is not given."""
        try:
            run = super()._fit(reading, rng_key, init_state, begun)
        finally:
            self._looked_at = None
        reading, algorithm, hyper = run.reading, run.algorithm, run.fit.hyper
        is_shared = isinstance(algorithm, SharedColumns)
        if isinstance(algorithm, SharedColumns):
            form = reading.compiled_form(hyper)
            if find_shared_columns([form]) is None or not kinds_hold(form, algorithm):
                return self._unshared()._fit(reading.with_rows_by_column(None), rng_key, None)
        error, rounding, num_nodes = quadrature_error(reading, algorithm, hyper, run.fit.last_state.state)
        dimension = reading.abstract_form.blocks.columns.shape[1]
        more = 3 * num_nodes // 2 if is_shared and dimension > 1 else 2 * num_nodes - 1
        is_affordable = float(more) ** dimension <= _MOST_NODES
        negligible = WORTH_A_WORD if is_shared and dimension > 1 else _NEGLIGIBLE  # there, nodes are thousands
        if not error <= max(negligible, rounding) and self.num_nodes is None and is_affordable:
            finer = copy.copy(self)
            finer._chosen_nodes = more
            return finer._fit(reading, rng_key, run.fit.last_state)
        if is_shared and not error <= WORTH_A_WORD and dimension > 1:
            # sharp blocks, each of which needs nodes of its own
            return self._unshared()._fit(reading.with_rows_by_column(None), rng_key, None)
        messages = run.fit.diagnostics.messages
        if not error <= max(WORTH_A_WORD, rounding):
            message = (
                f"The quadrature is not exact: with a finer rule than {num_nodes} nodes an axis the log evidence "
                f"changes by {error:.2g}. Give more nodes (num_nodes)."
            )
            messages = (*messages, message)
            warn(f"{type(self).__name__}: {message}")
        converged = run.fit.diagnostics.converged
        if self.num_nodes is None and not error <= max(_MAY_BE_A_MAXIMUM, rounding):
            converged = False
        diagnostics = run.fit.diagnostics._replace(quadrature_error=error, messages=messages, converged=converged)
        run.fit = run.fit._replace(diagnostics=diagnostics)
        return run

    def _unshared(self) -> AdaptiveQuadrature:
        """The engine with a lattice for each block."""
        other = copy.copy(self)
        other._may_share, other._chosen_nodes = False, None
        return other


def _of_kinds(found: SharedColumns | None, reading: LatentGaussianReading) -> SharedColumns | None:
    """The algorithm, which knows how many blocks it sees."""
    return found if found is None or reading.kinds is None else replace(found, num_kinds=reading.kinds.size)


def _probes(reading: LatentGaussianReading) -> list[LatentGaussian]:
    """The form at hyperparameters that no model knows of, at which what is equal is so by the program."""
    return [reading.compiled_form(values) for values in _probe_values(reading, _NUM_PROBES)]


def _probe_values(reading: LatentGaussianReading, number: int) -> list[dict[str, Array]]:
    space = UnconstrainedSpace(reading.hyper, {})
    start = space.initial()
    noise = np.random.default_rng(0).normal(0.0, _SPREAD, (number, space.size))
    # NumPy compiles nothing
    return [space.unpack(np.asarray(start) + shift.astype(start.dtype)) for shift in noise]
