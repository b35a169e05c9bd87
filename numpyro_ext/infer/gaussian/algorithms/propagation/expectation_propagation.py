r"""Expectation propagation on a latent-Gaussian form (Minka 2001; Ko 2017, §2.1; Rasmussen and Williams 2006, §3.6).

Every factor :math:`t_i(\eta_i)` is replaced by a site :math:`\exp(-\tau_i \eta_i^2/2 + \nu_i \eta_i)` whose
parameters are such that the Gaussian with all sites has the mean and variance of the *tilted* density, the one in
which factor ``i`` is exact. The functions here are pure; options that change what is compiled are keywords.

>>> import jax.numpy as jnp
>>> from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation as ep
>>> from numpyro_ext.linalg.gaussian.design import DenseDesign
>>> from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
>>> from numpyro_ext.potentials import ProbitPotential
>>> from numpyro_ext.structure.latent_gaussian import Blocks, LatentGaussian
>>> form = LatentGaussian(
...     prior=(DiagonalPrior(jnp.ones(1)),), design=DenseDesign(jnp.ones((2, 1))), offset=jnp.zeros(2),
...     potentials=(ProbitPotential(jnp.array([1.0, 1.0])),), observed=(jnp.ones(2, bool),),
...     log_constant=jnp.zeros(()), blocks=Blocks(jnp.arange(2)[None], jnp.arange(1)[None]),
... )
>>> state, info = ep.solve(form, ep.init(form), num_steps=50, tol=1e-6)
>>> bool(info.converged), round(float(jnp.exp(info.objective)), 3)
(True, 0.333)
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from .....linalg.gaussian.conditioning import Space, choose_space
from .....linalg.gaussian.prior import is_valid_prior
from .....linalg.solvers.anderson import History, no_history
from .....potentials.vector_rows import has_vector_factors
from .....structure.latent_gaussian import LatentGaussian, joined
from ..fit_info import FitInfo
from ..modes.mode_derivative import HeldPosterior, holds_factor
from ..posterior import GaussianPosterior, gaussian_prior
from .evidence_of_sites import exceeds_one, is_coupled, log_evidence
from .held_factor import with_space, without_space
from .newton import newton_sites
from .opening import (
    Info,
    State,
    before_opening,
    change_of_sites,
    init,
    is_proper,
    refresh,
    refresh_and_hold,
    sites_of,
)
from .sweep import AtHand, Schedule, sweep_once
from .tilting import propose, tilt

__all__ = [
    "Info",
    "State",
    "approach",
    "init",
    "log_evidence",
    "posterior",
    "solve",
    "solve_and_hold",
    "step",
    "update",
]

_UNTAKEN = 0.1
"""Share of the tolerance that a sweep may change for it not to be taken: what the last one that is taken leaves."""
_SHARE_OF_WAY_TO_FLOOR = 0.25
_NO_DIFFERENCE = 0.1
"""Nats, in units of the tolerance, by which two evidences may differ and be one number: changes of all marginals and of
all sites, squared and added up."""


def step(
    form: LatentGaussian,
    state: State,
    *,
    damping: float = 0.0,
    adapt_damping: bool = True,
    power: float = 1.0,
    schedule: Schedule = "parallel",
    space: Space = "auto",
) -> tuple[State, Info]:
    r"""One sweep over all factors.

    The parallel schedule updates all sites from the same marginals and refreshes these once: one factorisation and
    one triangular solve. The sequential one refreshes the joint after every site by a rank-one update; it evaluates
    all factors and uses one (one per block), so it costs ``O(M^2)`` factor evaluations besides ``O(M D^2)`` algebra,
    with ``D`` the smaller of rows and columns, and is meant for a few hundred rows.

    A site whose cavity or tilted moments are improper or not finite is kept and counted. Rounding may give a
    log-concave factor a precision below zero: it is raised to zero. A sweep that leads to an improper posterior, or
    robs a factor of its cavity, is undone and its step size halved.

    :param LatentGaussian form: the model.
    :param State state: sites, with marginals that belong to ``form``.
    :param float damping: fraction of the old natural parameters that is kept, in ``[0, 1)``.
    :param bool adapt_damping: whether to damp more where successive sweeps undo each other without dying out.
    :param float power: fraction of a factor that is replaced at a time, ``1`` for EP; below one, fractional EP.
    :param str schedule: ``"parallel"`` or ``"sequential"``.
    :param str space: where to do the algebra; see :func:`~numpyro_ext.linalg.gaussian.conditioning.choose_space`.
    :return: the next state and what the sweep found.
    :raises ValueError: for an unknown schedule.
    """
    prior = gaussian_prior(form, _space(form, space, schedule))
    found = sweep_once(form, prior, state, damping, adapt_damping, power, schedule)
    return found.state, found.info


def solve(
    form: LatentGaussian,
    state: State,
    *,
    num_steps: int = 100,
    tol: float = 1e-6,
    damping: float = 0.0,
    adapt_damping: bool = True,
    power: float = 1.0,
    schedule: Schedule = "parallel",
    space: Space = "auto",
) -> tuple[State, FitInfo]:
    """Sweep until no marginal changes by more than ``tol``, in one compiled loop.

    Where a sweep says beforehand that it will change less (:mod:`.held_factor`), it is not taken.

    With ``adapt_damping``, parallel sweeps under correlated priors and of factors of several predictors are
    extrapolated where they converge slowly (see :mod:`~numpyro_ext.linalg.solvers.anderson`): same end, up to half as
    many sweeps. The last one is always plain.

    The state may come from another form of the same shapes (warm start): sites of factors that are masked here are
    removed, its marginals are recomputed, and if its sites are improper under this form, which takes negative
    precisions, the run starts afresh.

    :param LatentGaussian form: the model.
    :param State state: where to start.
    :param int num_steps: the largest number of sweeps.
    :param float tol: see :attr:`Info.max_change`; a hundred roundings at least.
    :return: the final state and how the run ended. Other parameters are those of :func:`step`.
    """
    return solve_and_hold(
        form,
        state,
        num_steps=num_steps,
        tol=tol,
        damping=damping,
        adapt_damping=adapt_damping,
        power=power,
        schedule=schedule,
        space=space,
    )[:2]


def solve_and_hold(
    form: LatentGaussian,
    state: State,
    *,
    num_steps: int = 100,
    tol: float = 1e-6,
    damping: float = 0.0,
    adapt_damping: bool = True,
    power: float = 1.0,
    schedule: Schedule = "parallel",
    space: Space = "auto",
    floor: ArrayLike | None = None,
) -> tuple[State, FitInfo, HeldPosterior | None]:
    """:func:`solve`, and the posterior at its end, in spaces whose posteriors hold a factor that serves again.

    :param floor: a log evidence below which a run may end before it has converged; see :func:`_is_low`.
    """
    form = joined(form)
    prior = gaussian_prior(form, _space(form, space, schedule))
    infinity = jnp.full_like(state.max_change, jnp.inf)
    start = before_opening(form)._replace(step_size=jnp.full_like(infinity, 1.0 - damping))
    # Sweeps leave the sites of masked factors alone, and the other form may not have masked them.
    precision, shift = (jnp.where(jnp.concatenate(form.observed), site, 0.0) for site in state[:2])
    has_vectors = has_vector_factors(form.potentials)
    marginals, posterior = refresh_and_hold(form, prior, precision, shift)
    held = without_space(posterior) if holds_factor(prior) and schedule == "parallel" and not has_vectors else None
    warm = start._replace(site_precision=precision, site_shift=shift, marginals=marginals, is_start=state.is_start)
    afresh = state.is_start
    if has_vectors or not all(potential.is_log_concave for potential in form.potentials):
        afresh |= ~is_proper(marginals)
    state = jax.tree.map(partial(jnp.where, afresh), start, warm)
    bound = jnp.maximum(tol, 100 * jnp.finfo(infinity.dtype).eps)

    def proceed(run: _Run) -> Array:
        return ~run.is_finished & is_proper(run.state.marginals)

    def sweep(run: _Run) -> _Run:
        # One more sweep than steps: it evaluates the evidence at the last sites, and is not taken. There is none where
        # the evidence before the last step is that after it, as it is stationary in the sites.
        is_start = run.state.is_start
        is_finished = ~is_start & ((run.num_steps >= num_steps) | (run.state.max_change < bound))
        is_counted = ~(is_finished | is_start)
        history = run.history
        if history is not None:  # what the last step changes has to be the residual
            history = history._replace(number=jnp.where(run.num_steps + 1 < num_steps, history.number, 0))
        at_hand = AtHand(run.held, ~is_finished, _UNTAKEN * bound)
        swept = sweep_once(form, prior, run.state, damping, adapt_damping, power, schedule, history, at_hand)
        moved, found = swept.state, swept.info
        trace = run.trace.at[jnp.where(is_counted, run.num_steps, num_steps)].set(found.objective, mode="drop")
        state, info = jax.tree.map(partial(jnp.where, is_finished), (run.state, run.info), (moved, found))
        is_known = change_of_sites(form, run.state, moved) < _NO_DIFFERENCE * bound * found.step_size**2
        is_known &= (form.num_rows * state.max_change**2 < _NO_DIFFERENCE * bound) & jnp.isfinite(found.objective)
        is_finished |= swept.is_untaken | ((state.max_change < bound) & is_known)
        if floor is not None:
            is_finished |= _is_low(found.objective, run.objective, floor)
        number = run.num_steps + is_counted
        return _Run(state, info, found.objective, trace, number, is_finished, swept.history, swept.held)

    unknown = jnp.full_like(infinity, jnp.nan)
    before = Info(unknown, infinity, jnp.asarray(0), jnp.zeros((form.num_rows,), bool), state.step_size)
    trace = jnp.full((num_steps,), jnp.nan, infinity.dtype)
    history = (
        no_history(sites_of(state))
        if schedule == "parallel" and adapt_damping and (has_vectors or is_coupled(form))
        else None
    )
    run = _Run(state, before, unknown, trace, jnp.asarray(0), jnp.asarray(False), history, held)
    run = lax.while_loop(proceed, sweep, run)
    state = run.state
    is_sound = is_valid_prior(form.prior) & is_proper(state.marginals)
    # More than one, where priors are so broad that rounding alone is left, would draw a search there.
    is_sound &= ~exceeds_one(form, run.objective)
    objective = jnp.where(is_sound, run.objective, jnp.nan)
    converged = (state.max_change < bound) & jnp.isfinite(objective)
    info = FitInfo(converged, run.num_steps, run.trace, run.info.max_change, run.info.skipped, objective)
    return state, info, with_space(prior, run.held)


def _is_low(evidence: Array, before: Array, floor: ArrayLike) -> Array:
    """True if a log evidence is below a floor by so much more than it changed in the last sweep that it will stay so:
    sweeps that settle at all change it less and less, mostly by a half or less of the change before."""
    return jnp.abs(evidence - before) < _SHARE_OF_WAY_TO_FLOOR * (floor - evidence)


class _Run(NamedTuple):
    """Carry of the loop of :func:`solve`."""

    state: State
    info: Info
    """Findings of the last sweep that was taken."""
    objective: Array
    """Log evidence at the sites before the last sweep, taken or not."""
    trace: Array
    num_steps: Array
    """Sweeps taken, without the opening."""
    is_finished: Array
    history: History | None
    """Sweeps from which others are extrapolated, if they are."""
    held: Any
    """The posterior at the sites, without its space; ``None`` where it is not held."""


def update(
    form: LatentGaussian, precision: Array, shift: Array, *, power: float = 1.0, space: Space = "auto"
) -> tuple[Array, Array]:
    """The sites that match the tilted moments at these sites: those of a fixed point are themselves."""
    marginals = refresh(form, gaussian_prior(form, space), precision, shift)
    return propose(form, precision, shift, tilt(form, marginals, precision, shift, power), power)[:2]


def approach(form: LatentGaussian, state: State, *, power: float = 1.0) -> State:
    """A state of almost the same data brought nearer to the fixed point, for :func:`solve`: see :mod:`.newton`."""
    where = ~state.is_start
    precision, shift = newton_sites(form, state.site_precision, state.site_shift, power=power, where=where)
    return state._replace(site_precision=precision, site_shift=shift)


def posterior(form: LatentGaussian, state: State, *, space: Space = "auto") -> GaussianPosterior:
    """The Gaussian approximation of the posterior of the unknowns."""
    return GaussianPosterior(form, state.site_precision, state.site_shift, space)


def _space(form: LatentGaussian, space: Space, schedule: Schedule) -> Space:
    if space == "auto" and schedule == "sequential":
        return choose_space(form.prior, form.design, *form.blocks, layout=form.layout, is_sequential=True)
    return space
