r"""The variational Gaussian approximation on a latent-Gaussian form (Opper and Archambeau 2009; Khan 2012, ch. 3).

Among all Gaussians the one with the largest lower bound on the log evidence is the prior times one Gaussian site per
factor, :math:`\exp(-\lambda_i \eta_i^2/2 + \nu_i \eta_i)`. A natural-gradient step moves all sites towards those that
the slopes of the expected log factors ask for (Khan and Lin 2017). Steps that would lower the bound are refused, and
successive ones are mixed, which turns the many short steps of a hard problem into a few.

The best Gaussian of independent unknowns (``covariance="diagonal"``) is given by sites too, of which only the means are
those of the joint Gaussian; see :class:`~numpyro_ext.linalg.gaussian.mean_field_space.MeanFieldSpace`.

>>> import jax.numpy as jnp
>>> from numpyro_ext.infer.gaussian.variational import natural_gradient as vg
>>> from numpyro_ext.linalg.gaussian.design import DenseDesign
>>> from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
>>> from numpyro_ext.potentials import ProbitPotential
>>> from numpyro_ext.structure.latent_gaussian import Blocks, LatentGaussian
>>> form = LatentGaussian(
...     prior=(DiagonalPrior(jnp.ones(1)),), design=DenseDesign(jnp.ones((2, 1))), offset=jnp.zeros(2),
...     potentials=(ProbitPotential(jnp.array([1.0, 1.0])),), observed=(jnp.ones(2, bool),),
...     log_constant=jnp.zeros(()), blocks=Blocks(jnp.arange(2)[None], jnp.arange(1)[None]),
... )
>>> state, info = vg.solve(form, vg.init(form), num_steps=50, tol=1e-5)
>>> bool(info.converged), round(float(jnp.exp(info.objective)), 3)  # the evidence is 1/3
(True, 0.332)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....linalg.gaussian.conditioning import LinearGaussian, Space, kl_divergence
from ....linalg.gaussian.marginals import relative_change
from ....linalg.gaussian.mean_field_space import MeanFieldSpace, expected_log_prior
from ....linalg.gaussian.prior import is_valid_prior
from ....linalg.solvers.anderson import Moves, correction, no_moves
from ....structure.latent_gaussian import LatentGaussian, joined
from ..algorithms.fit_info import FitInfo
from ..algorithms.posterior import Covariance, GaussianPosterior, gaussian_prior
from ..algorithms.supports import may_vanish, sites_within_support
from .bound import (
    Point,
    evaluate,
    expected_log_factors,
    is_finite,
    linearised_sum,
    optimal_sites,
    site_floor,
    unknown_point,
)

_MEMORY = 5
_MIN_STEP_SIZE = 1e-9


class State(NamedTuple):
    """Sites, and the Gaussian that they make with the prior."""

    site_precision: Array
    """Shape ``(num_rows,)``; zero where a row has no factor."""
    site_shift: Array
    """Precision times mean of every site, shape ``(num_rows,)``."""
    point: Point
    """The bound and its slopes there."""
    history: Moves
    """Latest moves of the sites: precisions, then shifts."""
    step_size: Array
    """Fraction of the way that an unmixed step goes."""
    is_mixed: Array
    """True if the next step is a mixed one; after a refusal it is not."""
    max_change: Array
    """Change in the last accepted step; infinite at the start."""


class Info(NamedTuple):
    """Outcome of one step."""

    objective: Array
    """The bound *after* the step, never less than before."""
    max_change: Array
    """Largest change of a marginal mean in standard deviations or of a marginal variance relative to itself, by the
    step or by what the slopes ask of a single site after it. That of the step before if this one was refused."""
    accepted: Array
    """True if the sites moved."""


def init(form: LatentGaussian, *, space: Space = "auto") -> State:
    """Start at the mean of the prior, with unit precision of every site; nothing is evaluated yet.

    Under the prior itself, if it is broad, expectations may overflow, and a flat one has no density.
    """
    precision, shift = initial_sites(form)
    one = jnp.ones((), form.offset.dtype)
    history = no_moves(_MEMORY, 2 * form.num_rows, one.dtype)
    return State(precision, shift, unknown_point(form), history, one, jnp.asarray(True), jnp.inf * one)


def step(
    form: LatentGaussian, state: State, *, space: Space = "auto", covariance: Covariance = "full"
) -> tuple[State, Info]:
    """Try one step, and take it unless the bound falls: one factorisation and one expectation of every factor.

    A refused step is tried again without mixing, then with half the step size, by the steps that follow.

    The first step after :func:`init` moves nothing and only evaluates the start.

    :param LatentGaussian form: the model.
    :param State state: sites, with a point that belongs to ``form``.
    :param str space: where to do the algebra; see :func:`~numpyro_ext.linalg.gaussian.conditioning.choose_space`.
    :param str covariance: ``"full"``, or ``"diagonal"`` for independent unknowns.
    :return: the next state and what the step found.
    """
    return _step(form, gaussian_prior(form, space, covariance), state)


def solve(
    form: LatentGaussian,
    state: State,
    *,
    num_steps: int = 200,
    tol: float = 1e-8,
    space: Space = "auto",
    covariance: Covariance = "full",
) -> tuple[State, FitInfo]:
    """Step until no marginal changes by more than ``tol``, in one compiled loop.

    :param LatentGaussian form: the model.
    :param State state: where to start; may come from another form of the same shapes. If its sites have no finite
        bound under this one, the run starts afresh.
    :param int num_steps: the largest number of steps.
    :param float tol: see :attr:`Info.max_change`; a hundred roundings at least.
    :param str space: where to do the algebra.
    :param str covariance: ``"full"``, or ``"diagonal"`` for independent unknowns.
    :return: the final state and how the run ended. Steps are counted by evaluations of the bound: the first one, and
        one for every step, refused ones included.
    """
    form = joined(form)
    prior = gaussian_prior(form, space, covariance)
    bound = jnp.maximum(tol, 100 * jnp.finfo(state.max_change.dtype).eps)
    return repeat(form, state, partial(_step, form, prior), num_steps=num_steps, bound=bound)


def repeat(
    form: LatentGaussian,
    state: State,
    step: Callable[[State], tuple[State, Info]],
    *,
    num_steps: int,
    bound: Array,
) -> tuple[State, FitInfo]:
    """Take steps of a form until the largest change is below ``bound``, or steps are too small to be taken.

    :param step: from a state to the next one, and what it found. All else is as for :func:`solve`.
    """
    infinity = jnp.full_like(state.max_change, jnp.inf)
    size = jnp.maximum(state.step_size, _MIN_STEP_SIZE)
    state = state._replace(point=unknown_point(form), max_change=infinity, step_size=size)

    def proceed(carry: tuple[State, Array, Array]) -> Array:
        state, _, count = carry
        return (count < num_steps) & ~(state.max_change < bound) & (state.step_size >= _MIN_STEP_SIZE)

    def advance(carry: tuple[State, Array, Array]) -> tuple[State, Array, Array]:
        state, trace, count = carry
        state, info = step(state)
        return state, trace.at[count].set(info.objective), count + 1

    trace = jnp.full((num_steps,), jnp.nan, infinity.dtype)
    state, trace, count = lax.while_loop(proceed, advance, (state, trace, jnp.asarray(0)))
    objective = jnp.where(is_valid_prior(form.prior), state.point.bound, jnp.nan)
    converged = (state.max_change < bound) & jnp.isfinite(objective)
    no_row = jnp.zeros((form.num_rows,), bool)
    return state, FitInfo(converged, count, trace, state.max_change, no_row, objective)


def log_evidence(
    form: LatentGaussian, state: State, *, space: Space = "auto", covariance: Covariance = "full"
) -> Array:
    r"""The lower bound on the log evidence at the sites of ``state``.

    At the optimum it is stationary in the Gaussian, so its gradient with respect to ``form`` is the explicit one with
    the Gaussian held. That is the gradient of the log partition function of prior and sites, plus that of the
    expected log factors in their own parameters; no gradient flows through the iteration or the quadrature nodes.

    :param LatentGaussian form: the model; differentiable.
    :param State state: an optimum of :func:`solve` for ``form``.
    :param str space: where to do the algebra.
    :param str covariance: as for :func:`solve`.
    :return: a scalar; nan where a prior is not positive definite.
    """
    form = joined(form)
    precision, shift = lax.stop_gradient((state.site_precision, state.site_shift))
    if covariance == "diagonal":
        return _mean_field_bound(form, precision, shift, space)
    return bound_at_sites(form, precision, shift, space)


def bound_at_sites(form: LatentGaussian, precision: Array, shift: Array, space: Space) -> Array:
    """The value and gradient of :func:`log_evidence` at given sites."""
    prior = gaussian_prior(form, space)
    posterior = prior.condition(precision, shift - precision * form.offset)
    marginals = posterior.marginals()
    mean, variance = lax.stop_gradient((marginals.mean + form.offset, marginals.variance))
    expected = form.log_constant + jnp.sum(expected_log_factors(form, mean, variance).value)
    bound = lax.stop_gradient(expected - kl_divergence(prior, posterior, marginals.variance))
    log_partition = marginals.log_partition + jnp.sum(shift * form.offset - 0.5 * precision * form.offset**2)
    explicit = expected + log_partition
    value = bound + (explicit - lax.stop_gradient(explicit))
    return jnp.where(lax.stop_gradient(is_valid_prior(form.prior)), value, jnp.nan)


def _mean_field_bound(form: LatentGaussian, precision: Array, shift: Array, space: Space) -> Array:
    """The same as :func:`bound_at_sites`, for independent unknowns, whose moments are held."""
    held = lax.stop_gradient(form)
    prior = gaussian_prior(held, space, "diagonal")
    assert isinstance(prior, MeanFieldSpace)  # asked for by name
    bound = evaluate(held, prior, precision, shift).bound
    independent = prior.condition(precision, shift - precision * held.offset)
    mean, variance = independent.unknowns(), independent.variance
    explicit = linearised_sum(form, form.predictor(mean), form.design.squared().matvec(variance))
    explicit += form.log_constant + expected_log_prior(form.prior, mean, variance)
    value = bound + (explicit - lax.stop_gradient(explicit))
    return jnp.where(lax.stop_gradient(is_valid_prior(form.prior)), value, jnp.nan)


def posterior(
    form: LatentGaussian, state: State, *, space: Space = "auto", covariance: Covariance = "full"
) -> GaussianPosterior:
    """The Gaussian approximation of the posterior of the unknowns."""
    return GaussianPosterior(form, state.site_precision, state.site_shift, space, covariance)


def update(
    form: LatentGaussian, precision: Array, shift: Array, *, space: Space = "auto", covariance: Covariance = "full"
) -> tuple[Array, Array]:
    """The sites that the slopes of the bound ask for at these sites: at its maximum, themselves."""
    return optimal_sites(form, evaluate(form, gaussian_prior(form, space, covariance), precision, shift))


def initial_sites(form: LatentGaussian) -> tuple[Array, Array]:
    """Unit precision for every factor, centred at the offsets: precisions and shifts, shape ``(num_rows,)``."""
    observed = jnp.concatenate(form.observed) if form.observed else jnp.zeros((form.num_rows,), bool)
    precision = jnp.where(observed, jnp.ones_like(form.offset), 0.0)
    return precision, precision * form.offset


def _step(form: LatentGaussian, prior: LinearGaussian | MeanFieldSpace, state: State) -> tuple[State, Info]:
    point, size = state.point, state.step_size
    sites = jnp.concatenate([state.site_precision, state.site_shift])
    is_known = is_finite(point)
    residual = jnp.where(is_known, jnp.concatenate(optimal_sites(form, point)) - sites, 0.0)
    scale = jnp.concatenate([point.variance, jnp.sqrt(jnp.maximum(point.variance, 0.0))])
    mixed = residual + correction(*state.history, residual, lambda x: scale * x)
    move = jnp.where(state.is_mixed, mixed, size * residual)
    precision, shift = jnp.split(sites + jnp.where(is_known, move, 0.0), 2)
    precision = jnp.maximum(precision, site_floor(form, precision.dtype))
    trial = evaluate(form, prior, precision, shift)

    # Near the optimum the increase is below rounding, and the step must still be taken.
    slack = 100 * jnp.finfo(scale.dtype).eps * (1.0 + jnp.abs(point.bound)) * form.num_rows**0.5
    accepted = is_finite(trial) & ((trial.bound >= point.bound - slack) | ~is_known)

    moved = jnp.concatenate([precision, shift])
    wanted = jnp.concatenate(optimal_sites(form, trial))
    change = jnp.max(jnp.abs(relative_change(trial, point))) / jnp.where(state.is_mixed, 1.0, size)
    change = jnp.maximum(change, jnp.max(jnp.abs(_own_change(trial, wanted - moved))))
    history = state.history.with_move(moved - sites, wanted - moved - residual)

    next_size = jnp.where(accepted, jnp.minimum(1.0, 2.0 * size), 0.5 * size)
    next_size = jnp.where(state.is_mixed, size, next_size)
    new = State(
        site_precision=precision,
        site_shift=shift,
        point=trial,
        history=jax.tree.map(lambda x, y: jnp.where(is_known, x, y), history, state.history),
        step_size=next_size,
        is_mixed=jnp.asarray(True),
        max_change=jnp.where(is_known, change, jnp.inf),
    )
    # Without a finite bound at the start: begin again at the sites that have one if any have, or give up.
    start = jnp.concatenate(initial_sites(form))
    is_hopeless = ~is_known & jnp.all(sites == start)
    if may_vanish(form):
        last = lax.cond(is_known | accepted, lambda: start, lambda: _last_resort(form, prior))
        start = jnp.where(is_hopeless, last, start)
        is_hopeless = ~is_known & jnp.all(sites == last)
    sites = jnp.where(is_known, sites, start)
    kept = state._replace(
        site_precision=sites[: form.num_rows],
        site_shift=sites[form.num_rows :],
        step_size=jnp.where(is_hopeless, 0.0, jnp.where(is_known, next_size, size)),
        is_mixed=~is_known,
    )
    state = jax.tree.map(lambda x, y: jnp.where(accepted, x, y), new, kept)
    return state, Info(state.point.bound, state.max_change, accepted)


def _last_resort(form: LatentGaussian, prior: LinearGaussian | MeanFieldSpace) -> Array:
    """Sites around predictors at which no factor is zero: precisions, then shifts."""
    joint = prior.joint if isinstance(prior, MeanFieldSpace) else prior
    return jnp.concatenate(sites_within_support(form, joint, form.offset))


def _own_change(point: Point, site_change: Array) -> Array:
    """Change of a predictor by that of its own site alone: precisions in units of the variance, then pulls in
    standard deviations."""
    precision, shift = jnp.split(site_change, 2)
    pull = shift - precision * point.mean
    return jnp.concatenate([precision * point.variance, pull * jnp.sqrt(jnp.maximum(point.variance, 0.0))])
