"""Functions that an engine on Gaussian fields hands to the programs around it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from jax import Array

from ....structure.latent_gaussian.form import LatentGaussian
from .fit_info import FitInfo

__all__ = ["Algorithm"]


class Algorithm(NamedTuple):
    """An algorithm on a :class:`~numpyro_ext.structure.LatentGaussian`, its options bound."""

    init: Callable[[LatentGaussian], Any]
    solve: Callable[..., tuple[Any, FitInfo]]
    """``(form, state, num_steps=, tol=) -> (state, FitInfo)``."""
    log_evidence: Callable[[LatentGaussian, Any], Array]
    posterior: Callable[[LatentGaussian, Any], Any]
    key: Hashable
    """Name and options: equal keys mean equal functions. An engine adds its class and its options."""
    notes: tuple[str, ...] = ()
    """Notes on the treatment of this model, one line each, for ``describe()``."""
    is_lower_bound: bool = False
    """True if its log evidence cannot exceed the exact one."""
    is_exact_for_gaussian: bool = False
    """True if it finds the exact evidence and posterior where all factors are Gaussian."""
    is_mode: bool = False
    """True if its means are those of the mode, which third derivatives there may say is no mean."""
    localised: Callable[[LatentGaussian, Any], Callable[[LatentGaussian], LatentGaussian] | None] | None = None
    """``(form, state)`` at a fixed point: what gives forms near it factors that cost little and have the same first and
    second derivatives, if the algorithm knows of any; see :mod:`.algorithms.local_factors`."""
    update: Callable[[LatentGaussian, Array, Array], tuple[Array, Array]] | None = None
    """``(form, precision, shift) -> (precision, shift)``: Gaussian sites of which the fixed point is that of the
    algorithm, in one smooth step. Derivatives of a fit are those of this fixed point."""
    approach: Callable[[LatentGaussian, Any], Any] | None = None
    """``(form, state) -> state``: nearer to the fixed point, from that of almost the same data, for ``solve`` to go on
    from, if the algorithm knows of something quicker than its own steps."""
    state_key: Hashable = None
    """By which states in files are known; set by the engine."""

    def fit(self, form: LatentGaussian, state: Any = None, *, num_steps: int, tol: float) -> tuple[Any, FitInfo, Array]:
        """Fit the field of a form: the state, how the fit ended, and the log evidence there.

        :param LatentGaussian form: at given hyperparameters.
        :param state: where to start; by default where the algorithm itself does.
        :param int num_steps: at most.
        :param float tol: at which the algorithm stops.
        """
        state, info = self.solve(form, self.init(form) if state is None else state, num_steps=num_steps, tol=tol)
        return state, info, self.log_evidence(form, state) if info.objective is None else info.objective
