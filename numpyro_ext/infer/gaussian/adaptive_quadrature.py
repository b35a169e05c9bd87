"""Adaptive quadrature as an inference engine for NumPyro models of small independent blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.quick_jit import quick_jit
from ...compilation.store import shared
from ...structure import LatentGaussianReading
from ...structure.latent_gaussian import LatentGaussian
from ...structure.latent_gaussian.read import SMALL_BLOCKS
from ..front.options import check_at_least
from ..front.running.progress import warn
from ..front.state import EngineState
from ..hyper.space import UnconstrainedSpace
from .algorithms.algorithm import Algorithm
from .algorithms.nodes.find_shared_columns import find_kinds, find_shared_columns, kinds_hold
from .algorithms.nodes.quadrature import Quadrature
from .algorithms.nodes.shared_columns import SharedColumns
from .engine import Engine, GaussianOptions
from .fitting.many import NOTHING_BEGUN, Begun
from .quadrature_run import IntegratedQuadratureRun, QuadratureRun
from .run import GaussianRun

__all__ = ["AdaptiveQuadrature"]

_NEGLIGIBLE, _WORTH_A_WORD, _MOST_NODES = 1e-4, 1e-3, 4000.0
"""Errors of the log evidence for which no nodes are added, and that are told; nodes of a block at most."""
_ROUNDINGS = 4.0
"""Units in the last place by which the log evidence of a block may be off."""
_NUM_PROBES, _SPREAD = 2, 0.3
_MOST_QUICK_NUMBERS = 250_000
"""Numbers in an evaluation up to which the last one, by a finer rule, is compiled as quickly as may be."""


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
                return self._unshared()._fit(reading.with_kinds(None), rng_key, None)
        error, rounding, num_nodes = quadrature_error(reading, algorithm, hyper, run.fit.last_state.state)
        dimension = reading.abstract_form.blocks.columns.shape[1]
        more = 3 * num_nodes // 2 if is_shared and dimension > 1 else 2 * num_nodes - 1
        is_affordable = float(more) ** dimension <= _MOST_NODES
        negligible = _WORTH_A_WORD if is_shared and dimension > 1 else _NEGLIGIBLE  # there, nodes are thousands
        if not error <= max(negligible, rounding) and self.num_nodes is None and is_affordable:
            finer = copy.copy(self)
            finer._chosen_nodes = more
            return finer._fit(reading, rng_key, run.fit.last_state)
        if is_shared and not error <= _WORTH_A_WORD and dimension > 1:
            # sharp blocks, each of which needs nodes of its own
            return self._unshared()._fit(reading.with_kinds(None), rng_key, None)
        messages = run.fit.diagnostics.messages
        if not error <= max(_WORTH_A_WORD, rounding):
            message = (
                f"The quadrature is not exact: with a finer rule than {num_nodes} nodes an axis the log evidence "
                f"changes by {error:.2g}. Give more nodes (num_nodes)."
            )
            messages = (*messages, message)
            warn(f"{type(self).__name__}: {message}")
        diagnostics = run.fit.diagnostics._replace(quadrature_error=error, messages=messages)
        run.fit = run.fit._replace(diagnostics=diagnostics)
        return run

    def _unshared(self) -> AdaptiveQuadrature:
        """The engine with a lattice for each block."""
        other = copy.copy(self)
        other._may_share, other._chosen_nodes = False, None
        return other


def _of_kinds(found: SharedColumns | None, reading: LatentGaussianReading) -> SharedColumns | None:
    """The algorithm, which knows how many kinds of blocks there are."""
    return found if found is None or reading.kinds is None else replace(found, num_kinds=len(reading.kinds.first))


def quadrature_error(
    reading: LatentGaussianReading, algorithm: Any, hyper: dict[str, Array], state: Any
) -> tuple[float, float, int]:
    """Sum over blocks of the absolute change of their log evidence with a finer rule, its rounding, and the nodes of
    the coarse rule.

    No finer rule mends what is rounding, as the sum over many blocks in single precision is.

    :param LatentGaussianReading reading: of the model.
    :param algorithm: a :class:`Quadrature` or :class:`SharedColumns`.
    :param hyper: all hyperparameters.
    :param state: of the fit there.
    """
    form = reading.compiled_form(hyper)
    work = algorithm.numbers_in_evaluation(reading.abstract_form)
    error, rounding = shared(_change, algorithm, work is not None and work <= _MOST_QUICK_NUMBERS)(form, state)
    return float(error), float(rounding), algorithm.nodes_of(form)


def _change(algorithm: Any, is_small: bool) -> Callable[..., tuple[Array, Array]]:
    def change(form: LatentGaussian, state: object) -> tuple[Array, Array]:
        coarse, fine = algorithm.with_finer_rule(form, state)
        rounding = _ROUNDINGS * jnp.finfo(fine.dtype).eps * jnp.sum(1.0 + jnp.abs(fine))
        return jnp.sum(jnp.abs(fine - coarse)), rounding

    return quick_jit(change, is_small=is_small)


def _probes(reading: LatentGaussianReading) -> list[LatentGaussian]:
    """The form at hyperparameters that no model knows of, at which what is equal is so by the program."""
    space = UnconstrainedSpace(reading.hyper, {})
    start = space.initial()
    noise = np.random.default_rng(0).normal(0.0, _SPREAD, (_NUM_PROBES, space.size))
    points = [np.asarray(start) + shift.astype(start.dtype) for shift in noise]  # NumPy compiles nothing
    return [reading.compiled_form(space.unpack(point)) for point in points]
