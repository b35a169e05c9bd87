r"""The variational Gaussian by a general optimiser, to compare the special algorithms with.

Two parameterisations of the same optimum (Khan 2012, §3.5): mean and Cholesky factor of the whitened unknowns, in which
the bound is concave for log-concave factors (Challis and Barber 2011), and one pull and one log precision per factor
(Opper and Archambeau 2009), which are few. Both are slow; both climb by L-BFGS until the
gradient vanishes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ....linalg.cholesky import cholesky, cholesky_inverse, solve_upper
from ....linalg.gaussian.prior import is_valid_prior
from ....linalg.gaussian.spaces.coefficient_space import CoefficientSpace
from ....linalg.gaussian.spaces.observation_space import ObservationSpace
from ....structure.latent_gaussian.form import Blocks, LatentGaussian
from ...hyper import search
from ...hyper.evaluation import Evaluation
from ...hyper.search import SearchState
from ..algorithms.fit_info import FitInfo
from ..algorithms.posterior import gaussian_prior
from . import natural_gradient as vg
from .bound import Point, expected_log_factors, linearised_sum, optimal_sites

Parameters = Literal["cholesky", "opper-archambeau"]


class State(NamedTuple):
    """The optimiser, and the sites of the Gaussian that it is at."""

    site_precision: Array
    """Shape ``(num_rows,)``."""
    site_shift: Array
    """Shape ``(num_rows,)``."""
    search: SearchState


class _Problem(NamedTuple):
    start: Array
    moments: Callable[[Array], tuple[Array, Array, Array]]
    """Means and variances of the predictors at a vector of parameters, and minus the divergence from the prior."""


def init(form: LatentGaussian, *, parameters: Parameters) -> State:
    """Start at the mean of the prior, with the covariance that unit site precisions give.

    :param LatentGaussian form: the model.
    :param str parameters: ``"cholesky"``, ``N (N + 3) / 2`` numbers for ``N`` unknowns, or ``"opper-archambeau"``, two
        for each row, for which all priors must be proper.
    """
    problem = _problem(form, parameters)
    precision, shift = vg.initial_sites(form)
    return State(precision, shift, _new_search(problem.start))


def solve(
    form: LatentGaussian, state: State, *, parameters: Parameters, num_steps: int = 1000, tol: float = 1e-6
) -> tuple[State, FitInfo]:
    """Climb until no derivative of the bound exceeds ``tol``.

    :param LatentGaussian form: the model.
    :param State state: where to start. On the same form the search goes on where it stopped.
    :param str parameters: as for :func:`init`.
    :param int num_steps: evaluations of the bound at most.
    :param float tol: largest derivative in a parameter at convergence.
    :return: the final state and how the run ended; ``max_change`` is the largest derivative, and the trace is the best
        bound so far.
    """
    problem = _problem(form, parameters)

    def evaluate(values: Array, _: tuple[()]) -> Evaluation:
        def bound(values: Array) -> Array:
            mean, variance, negative_divergence = problem.moments(values)
            return form.log_constant + linearised_sum(form, mean, variance) + negative_divergence

        value, gradient = jax.value_and_grad(bound)(values)
        return Evaluation(value, gradient, value, (), ())

    values = state.search.values
    here, slope = evaluate(values, ())[:2]
    rounding = jnp.finfo(values.dtype).eps ** 0.5
    is_same = jnp.abs(here - state.search.best.objective) <= rounding * (1.0 + jnp.abs(here))
    # States that were predicted from others have about the right bound, and say that they have converged.
    scale = 1.0 + jnp.max(jnp.abs(slope))
    is_same &= jnp.max(jnp.abs(slope - state.search.best.gradient)) <= jnp.minimum(tol, scale * rounding)
    fresh = _new_search(jnp.where(jnp.isfinite(here), values, problem.start))
    begun = jax.tree.map(partial(jnp.where, is_same), state.search, fresh)
    begun = begun._replace(is_searching=~begun.converged)
    found, trace = search.search(evaluate, begun, num_evaluations=num_steps, tol=tol, max_iterations=2**30)

    mean, variance, _ = problem.moments(found.values)
    _, mean_slope, variance_slope = expected_log_factors(form, mean, variance)
    point = Point(found.best.objective, mean, variance, mean_slope, variance_slope)
    precision, shift = optimal_sites(form, point)
    objective = jnp.where(is_valid_prior(form.prior), found.best.objective, jnp.nan)
    best = jnp.maximum(lax.cummax(jnp.where(jnp.isnan(trace), -jnp.inf, trace)), begun.best.objective)
    trace = jnp.where(jnp.isnan(trace), jnp.nan, best)
    info = FitInfo(
        found.converged & jnp.isfinite(objective),
        found.num_evaluations - begun.num_evaluations,
        trace,
        jnp.max(jnp.abs(found.best.gradient)),
        jnp.zeros((form.num_rows,), bool),
        objective,
    )
    return State(precision, shift, found), info


def _new_search(values: Array) -> SearchState:
    shapes = jax.eval_shape(lambda x: Evaluation(jnp.sum(x), x, jnp.sum(x), (), ()), values)
    blank = search.init_search(shapes, values, ())
    size = values.shape[0]
    # The curvature is not asked for: its probes count as done, and need no room.
    return blank._replace(
        num_probes=jnp.asarray(2 * size, jnp.int32), probes=jnp.zeros((1, 2, size), values.dtype), values=values
    )


def _problem(form: LatentGaussian, parameters: Parameters) -> _Problem:
    if parameters == "cholesky":
        return _cholesky_problem(form)
    if parameters == "opper-archambeau":
        return _opper_archambeau_problem(form)
    raise ValueError(f"Unknown parameters {parameters!r}: expected 'cholesky' or 'opper-archambeau'.")


def _cholesky_problem(form: LatentGaussian) -> _Problem:
    """Mean and lower factor of the unknowns in the coordinates in which the prior is simple, as one block."""
    whole = Blocks(jnp.arange(form.num_rows)[None], jnp.arange(form.num_columns)[None])
    space = gaussian_prior(form._replace(blocks=whole), "coefficient")
    assert isinstance(space, CoefficientSpace)  # asked for by name
    matrix, precision = space.matrix[0], space.precision[0]
    size = form.num_columns
    lower = jnp.tril_indices(size)

    def moments(values: Array) -> tuple[Array, Array, Array]:
        center = values[:size]
        factor = jnp.zeros((size, size), values.dtype).at[lower].set(values[size:])
        mean, variance = matrix @ center + form.offset, jnp.sum((matrix @ factor) ** 2, axis=1)
        # The sign of a column of the factor is free, so its diagonal needs no constraint.
        half_log_determinant = jnp.sum(jnp.log(jnp.abs(jnp.diagonal(factor))))
        energy = center @ precision @ center + jnp.sum(factor * (precision @ factor))
        total = space.whitened.half_log_determinant + half_log_determinant + 0.5 * (size - energy)
        return mean, variance, total

    sites, _ = vg.initial_sites(form)
    root = space.condition(sites, jnp.zeros_like(sites)).factor[0]
    start = jnp.concatenate([jnp.zeros((size,), root.dtype), cholesky(cholesky_inverse(root))[lower]])
    return _Problem(start, moments)


def _opper_archambeau_problem(form: LatentGaussian) -> _Problem:
    r"""Pulls :math:`\alpha` with mean :math:`b + K \alpha`, and logarithms of the site precisions.

    In the pulls themselves the bound is as ill-conditioned as the covariance :math:`K = R R^\top` of the predictors,
    and the search crawls. It goes along :math:`z` with :math:`R^\top \alpha = L^{-\top} z`, where
    :math:`L L^\top = I + R^\top R`: then the curvature is one if that of all factors is.
    """
    space = gaussian_prior(form, "observation")
    assert isinstance(space, ObservationSpace)  # asked for by name
    observed = jnp.concatenate(form.observed)
    eigenvalues, vectors = jnp.linalg.eigh(space.covariance)
    root = vectors * jnp.sqrt(jnp.maximum(eigenvalues, 0.0))[:, None, :]
    unit, _ = vg.initial_sites(form)
    seen = space.to_local(unit)[..., None] * root
    factor = cholesky(jnp.eye(root.shape[-1], dtype=root.dtype) + root.swapaxes(-1, -2) @ seen)

    def moments(values: Array) -> tuple[Array, Array, Array]:
        direction, log_precision = jnp.split(values, 2)
        whitened = solve_upper(factor, space.to_local(direction)[..., None])
        precision = jnp.where(observed, jnp.exp(log_precision), 0.0)
        posterior = space.condition(precision, jnp.zeros_like(precision))
        variance = posterior.marginals().variance
        total = posterior.log_volume() + 0.5 * jnp.sum(precision * variance) - 0.5 * jnp.sum(jnp.square(whitened))
        return space.to_rows((root @ whitened)[..., 0]) + form.offset, variance, total

    return _Problem(jnp.zeros((2 * form.num_rows,), form.offset.dtype), moments)
