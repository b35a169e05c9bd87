r"""The E-step of variational EM for rows: the best Gaussian of every row at given parameters.

Three kinds of Gaussians climb by one damped ascent: each row with a covariance of its own; rows that share covariances;
and points without variance, which are the modes of :math:`\log p(y_n, z_n)`. Maximising over points and parameters
overfits (Khan 2012, section 2.2.1), which is what the variational Gaussian is there to avoid: they are the baseline.

Covariances are shared where the slopes of the expected log factors in the variances are constants (Böhning's bound,
Gaussian columns). Then the best precision :math:`\Sigma^{-1} + \sum_d W_d^T \Lambda_d W_d` depends only on which of the
cells of a row are observed (Khan 2012, section 4.5), and one factorisation serves all rows with the same pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...linalg.cholesky import cholesky, cholesky_inverse, cholesky_solve
from ...potentials import BoundedPotential, GaussianPotential, Potential, SoftmaxPotential, VectorPotential
from ...potentials.bounds.logistic import BohningBound
from .posteriors import LatentGaussianRows, RowPosteriors, map_chunks

_SMALLEST_STEP = 1e-6
_SLACK = 16.0
# Sharing pays where there are at least so many rows for one covariance.
_LEAST_ROWS = 2.0

Point = TypeVar("Point")


def initial_posteriors(rows: LatentGaussianRows) -> RowPosteriors:
    """Gaussians at the prior mean, with unit precision of every factor: under a broad prior itself expectations may
    overflow."""
    prior = cholesky_inverse(cholesky(rows.covariance))
    precision = jnp.broadcast_to(prior, (rows.num_rows, *prior.shape))
    for family in rows.families():
        gram = jnp.einsum("ckl,ckm->clm", family.loadings, family.loadings)
        precision = precision + jnp.tensordot(family.observed.astype(gram.dtype), gram, axes=1)
    return _at_prior_mean(rows, precision, cholesky_inverse(cholesky(precision)))


def initial_modes(rows: LatentGaussianRows) -> RowPosteriors:
    """The prior mean as the mode of every row: Gaussians without variance."""
    point = jnp.zeros((1, rows.num_latents, rows.num_latents), rows.mean.dtype)
    return _at_prior_mean(rows, None, point, jnp.zeros((rows.num_rows,), int))


def shared_posteriors(rows: LatentGaussianRows) -> RowPosteriors | None:
    """Gaussians with the best covariance at the prior mean, one covariance for each pattern of observed cells.

    :param LatentGaussianRows rows: data and parameters; concrete arrays.
    :return: where to start :func:`expectation_step`, or ``None`` where covariances depend on the point or nearly every
        row has a pattern of its own.

    >>> from numpyro_ext.potentials import LogitPotential
    >>> table = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 1]])
    >>> rows = LatentGaussianRows(
    ...     mean=jnp.zeros(1), covariance=jnp.eye(1), loadings=jnp.ones((3, 1)), intercept=jnp.zeros(3),
    ...     potentials=(BoundedPotential(LogitPotential(table), BohningBound()),),
    ...     observed=(jnp.ones((4, 3), bool).at[0, 2].set(False),), weights=jnp.ones(4))
    >>> print(shared_posteriors(rows).covariance.round(4).ravel(), shared_posteriors(rows).pattern)
    [0.6667 0.5714] [0 1 1 1]
    """
    if not all(map(_has_constant_curvature, rows.potentials)):
        return None
    _, first, pattern = np.unique(_keys(rows), axis=0, return_index=True, return_inverse=True)
    if len(first) * _LEAST_ROWS > rows.num_rows:
        return None
    precision = _best_precisions(rows, jnp.asarray(first))
    covariance = cholesky_inverse(cholesky(precision))
    return _at_prior_mean(rows, precision, covariance, jnp.asarray(pattern.reshape(-1)))


@partial(jax.jit, static_argnames=("num_steps", "chunk_size"))
def expectation_step(
    rows: LatentGaussianRows,
    posteriors: RowPosteriors,
    *,
    num_steps: int = 20,
    tol: float = 1e-10,
    chunk_size: int = 4096,
) -> RowPosteriors:
    r"""Raise the bound of every row by steps of its Gaussian, none of which lowers it.

    With slopes :math:`g_d, -\tfrac12 \Lambda_d` of the expected log factors in means and covariances of the predictors,
    a natural-gradient step moves the natural parameters by a fraction :math:`\rho` towards

    .. math:: \Sigma^{-1} + \sum_d W_d^T \Lambda_d W_d, \qquad
        \Sigma^{-1} \mu + \sum_d W_d^T (g_d + \Lambda_d (\bar\eta_d - w_{0d}))

    (Khan and Lin 2017; Khan 2012, section 3.3). :math:`\rho` is one, halved in rows where the bound would fall. For
    quadratic bounds (Böhning, Jaakkola) and Gaussian columns :math:`\rho = 1` is the update of the local parameters and
    never refused. Shared covariances are at their best at once, and only means climb; points climb by Newton steps.

    Cost of a step: ``N (L^3 + D L^2)`` and the expectations; memory ``N L^2`` and what one chunk needs. With ``U``
    shared covariances ``U (L^3 + D L^2)`` once and ``N (L^2 + D L)`` a step; memory ``U L^2``.

    :param LatentGaussianRows rows: data and parameters.
    :param RowPosteriors posteriors: where to start: :func:`initial_posteriors`, :func:`shared_posteriors` or
        :func:`initial_modes` of rows with the same observed cells, or what this function returned.
    :param int num_steps: the largest number of steps.
    :param float tol: a row is done when its bound rises by no more than this times one plus its size.
    :param int chunk_size: how many rows are worked on together.
    :return: Gaussians of the same kind. The ``bound`` of points is the log joint density, which bounds nothing.
    """
    if posteriors.pattern is None:
        return map_chunks(partial(_climb_gaussians, num_steps=num_steps, tol=tol), rows, posteriors, chunk_size)
    new = posteriors
    if posteriors.precision is not None:
        count = len(posteriors.covariance)
        first = jax.ops.segment_min(jnp.arange(rows.num_rows), posteriors.pattern, num_segments=count)
        precision = _best_precisions(rows, first)
        new = posteriors._replace(precision=precision, covariance=cholesky_inverse(cholesky(precision)))

    def solve(rows: LatentGaussianRows, part: RowPosteriors) -> tuple[Array, Array, Array]:
        # The new covariances are of all chunks, the means of this one.
        moved = part._replace(precision=new.precision, covariance=new.covariance)
        mean, bound, start = _climb_means(rows, moved, num_steps, tol)
        return mean, bound, start if part.precision is None else _means_evaluation(rows, part)(part.mean)[0]

    mean, bound, start = map_chunks(solve, rows, posteriors, chunk_size)
    return new._replace(mean=mean, bound=bound, start_bound=start)


def _climb_gaussians(rows: LatentGaussianRows, start: RowPosteriors, num_steps: int, tol: float) -> RowPosteriors:
    assert start.precision is not None  # these are no points
    prior_factor = cholesky(rows.covariance)

    def evaluate(point: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array, Array]]:
        mean, precision = point
        factor = cholesky(precision)
        covariance = cholesky_inverse(factor)
        spreads = [family.covariances(covariance) for family in rows.families()]
        value, slope, target = _joint(rows, mean, spreads)
        shift = slope + jnp.einsum("nlm,nm->nl", target, mean)
        return value - _spread_divergence(prior_factor, covariance, factor), (covariance, target, shift)

    def move(point: tuple[Array, Array], aim: tuple[Array, Array, Array], size: Array) -> tuple[Array, Array]:
        mean, precision = point
        _, target, shift = aim
        natural = jnp.einsum("nlm,nm->nl", precision, mean)
        new = precision + size[:, None, None] * (target - precision)
        return cholesky_solve(cholesky(new), natural + size[:, None] * (shift - natural)), new

    point, bound, (covariance, *_), first = _climb(evaluate, move, (start.mean, start.precision), num_steps, tol)
    return RowPosteriors(*point, covariance, bound, first)


def _climb_means(
    rows: LatentGaussianRows, start: RowPosteriors, num_steps: int, tol: float
) -> tuple[Array, Array, Array]:
    """Means, their bounds and the bounds at the start, for Gaussians with given covariances or points."""

    def move(mean: Array, direction: Array, size: Array) -> Array:
        return mean + size[:, None] * direction

    mean, bound, _, first = _climb(_means_evaluation(rows, start), move, start.mean, num_steps, tol)
    return mean, bound, first


def _means_evaluation(rows: LatentGaussianRows, posteriors: RowPosteriors) -> Callable[[Array], tuple[Array, Array]]:
    """A function from means ``(n, L)`` to bounds and directions; what depends on covariances only is done before."""
    prior_factor = cholesky(rows.covariance)
    covariances = posteriors.covariances()
    if covariances is None:
        log_volume = jnp.sum(jnp.log(jnp.diagonal(prior_factor))) + 0.5 * rows.num_latents * jnp.log(2.0 * jnp.pi)

        def at_points(mean: Array) -> tuple[Array, Array]:
            value, slope, precision = _joint(rows, mean, [None] * len(rows.potentials))
            return value - log_volume, cholesky_solve(cholesky(precision), slope)

        return at_points

    assert posteriors.precision is not None  # these are no points
    pattern = posteriors.pattern
    divergence = _spread_divergence(prior_factor, posteriors.covariance, cholesky(posteriors.precision))[pattern]
    spreads = [family.covariances(posteriors.covariance)[pattern] for family in rows.families()]

    def at_shared(mean: Array) -> tuple[Array, Array]:
        value, slope, _ = _joint(rows, mean, spreads)
        directions = jnp.einsum("nlm,nm->nl", jnp.broadcast_to(covariances, (len(mean), *covariances.shape[1:])), slope)
        return value - divergence, directions

    return at_shared


def _joint(rows: LatentGaussianRows, mean: Array, spreads: Sequence[Array | None]) -> tuple[Array, Array, Array]:
    """Expected log factors less half the squared distance of the mean from the prior's, the slope in the mean, and the
    best precision; at means ``(n, L)``, and covariances of the predictors of each family or none."""
    prior_precision = cholesky_inverse(cholesky(rows.covariance))
    slope = (rows.mean - mean) @ prior_precision
    value = 0.5 * jnp.sum(slope * (mean - rows.mean), axis=-1)
    precision = jnp.broadcast_to(prior_precision, (len(mean), *prior_precision.shape))
    for family, spread in zip(rows.families(), spreads, strict=True):
        found = family.expect_at(family.means(mean), spread)
        value = value + jnp.sum(found.value, axis=-1)
        slope = slope + found.mean_slope.reshape(len(mean), -1) @ family.loadings.reshape(-1, rows.num_latents)
        precision = precision + (found.precision.reshape(len(mean), -1) @ family.products()).reshape(precision.shape)
    return value, slope, precision


def _climb(
    evaluate: Callable[[Point], tuple[Array, Any]],
    move: Callable[[Point, Any, Array], Point],
    start: Point,
    num_steps: int,
    tol: float,
) -> tuple[Point, Array, Any, Array]:
    """Damped ascent of every row on its own.

    :param evaluate: from points, arrays with a row each, to values ``(n,)`` and where to go from there.
    :param move: from points, where to go, and the size of the step ``(n,)``, to new points.
    :return: the last points, their values, what ``evaluate`` says of them, and the values at the start.
    """
    first, aim = evaluate(start)
    eps = jnp.finfo(first.dtype).eps

    def proceed(state: tuple[Any, ...]) -> Array:
        *_, is_done, count = state
        return jnp.logical_and(count < num_steps, ~jnp.all(is_done))

    def advance(state: tuple[Any, ...]) -> tuple[Any, ...]:
        (_, value, _), size, is_done, count = state
        point, _, aim = state[0]
        moved = move(point, aim, size)
        trial, next_aim = evaluate(moved)
        scale = 1.0 + jnp.abs(value)
        # Near the optimum the increase is below rounding. From where there is no value any place is better.
        rises = (trial >= value - _SLACK * eps * scale) | ~jnp.isfinite(value)
        accepted = rises & jnp.isfinite(trial) & ~is_done
        is_small = accepted & (jnp.abs(trial - value) <= jnp.maximum(tol, _SLACK * eps) * scale) & jnp.isfinite(value)
        is_done = is_done | is_small | (~accepted & (size < _SMALLEST_STEP))

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(accepted.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        taken = jax.tree.map(choose, (moved, trial, next_aim), state[0])
        return taken, jnp.where(accepted, jnp.minimum(1.0, 2.0 * size), 0.5 * size), is_done, count + 1

    state = ((start, first, aim), jnp.ones_like(first), jnp.zeros_like(first, bool), 0)
    (point, value, aim), *_ = lax.while_loop(proceed, advance, state)
    return point, value, aim, first


def _at_prior_mean(
    rows: LatentGaussianRows, precision: Array | None, covariance: Array, pattern: Array | None = None
) -> RowPosteriors:
    mean = jnp.broadcast_to(rows.mean, (rows.num_rows, rows.num_latents))
    nothing = jnp.full((rows.num_rows,), -jnp.inf, rows.mean.dtype)
    return RowPosteriors(mean, precision, covariance, nothing, nothing, pattern)


def _spread_divergence(prior_factor: Array, covariance: Array, factor: Array) -> Array:
    """Kullback-Leibler divergences between Gaussians of one mean, from Cholesky factors of the prior's covariance and
    of the precisions."""
    size = prior_factor.shape[-1]
    trace = covariance.reshape(-1, size**2) @ cholesky_inverse(prior_factor).reshape(-1)
    log_ratio = jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).sum(axis=-1)
    return 0.5 * (trace - size) + log_ratio + jnp.sum(jnp.log(jnp.diagonal(prior_factor)))


def _best_precisions(rows: LatentGaussianRows, chosen: Array) -> Array:
    """The best precisions of some rows with constant curvatures, shape ``(len(chosen), L, L)``."""
    part = rows.take(chosen)
    mean = jnp.broadcast_to(rows.mean, (len(chosen), rows.num_latents))
    nothing = [family.covariances(jnp.zeros((1, *rows.covariance.shape), mean.dtype)) for family in part.families()]
    return _joint(part, mean, nothing)[2]


def _has_constant_curvature(potential: Potential | VectorPotential) -> bool:
    if isinstance(potential, VectorPotential):
        return isinstance(potential, SoftmaxPotential) and potential.bound == "bohning"
    if isinstance(potential, BoundedPotential):
        return isinstance(potential.bound, BohningBound)
    return isinstance(potential, GaussianPotential)


def _keys(rows: LatentGaussianRows) -> np.ndarray:
    """Bytes ``(N, size)`` that are equal for rows with the same covariance."""
    parts = [np.packbits(np.asarray(mask), axis=1) for mask in rows.observed]
    mean = jnp.broadcast_to(rows.mean, (rows.num_rows, rows.num_latents))
    for family in rows.families():
        found = family.expect(mean, jnp.zeros((1, rows.num_latents, rows.num_latents), mean.dtype))
        curvature = np.asarray(found.precision).reshape(rows.num_rows, family.observed.shape[1], -1)
        common = np.max(curvature, axis=0, where=np.asarray(family.observed)[..., None], initial=-np.inf)
        if np.any(np.where(family.observed[..., None], curvature != common, False)):
            flat = np.ascontiguousarray(curvature.reshape(rows.num_rows, -1))
            parts.append(flat.view(np.uint8).reshape(rows.num_rows, -1))
    return np.concatenate(parts, axis=1)
