r"""Variational EM for rows of data: factor analysis and Gaussian graphical models of discrete and mixed columns.

**References**

1. *Variational Learning for Latent Gaussian Models of Discrete Data*, M. E. Khan, PhD thesis, UBC 2012, chapters
   3 to 5.
2. *Sparse Inverse Covariance Estimation with the Graphical Lasso*, J. Friedman, T. Hastie, R. Tibshirani, 2008.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..potentials import GaussianPotential, Potential, VectorPotential
from .gaussian_rows import (
    Family,
    LatentGaussianRows,
    RowPosteriors,
    expectation_step,
    initial_posteriors,
    map_chunks,
)

__all__ = ["EMResult", "maximisation_step", "variational_em"]

Parameter = Literal["mean", "covariance", "loadings", "intercept", "noise"]

_NUM_HALVINGS = 30


class EMResult(NamedTuple):
    """What :func:`variational_em` found."""

    rows: LatentGaussianRows
    """The data with the fitted parameters."""
    posteriors: RowPosteriors
    """Gaussians for the latent variables of the rows."""
    objective_trace: np.ndarray
    """The objective after every step: E, then M and E for every iteration; shape ``(2 num_steps + 1,)``."""
    converged: bool
    num_steps: int
    """Iterations that were made."""
    precision: np.ndarray | None
    """With ``sparsity``, the inverse of the covariance with exact zeros, shape ``(L, L)``."""


def variational_em(
    rows: LatentGaussianRows,
    *,
    learn: Collection[Parameter],
    num_steps: int = 100,
    tol: float = 1e-6,
    num_expectation_steps: int = 20,
    expectation_tol: float = 1e-10,
    sparsity: float | None = None,
    chunk_size: int = 4096,
) -> EMResult:
    r"""Maximise the bound of the log likelihood of the rows over Gaussians and parameters in turn.

    The E-step is :func:`~numpyro_ext.infer.gaussian_rows.expectation_step`, the M-step :func:`maximisation_step`.
    Neither lowers the weighted sum of the bounds of the rows. For real columns the Gaussians are exact and this is the
    EM algorithm, with the log likelihood itself as bound.

    On a model function with ``param`` sites, such as :func:`numpyro_ext.models.factor_analysis`, the engine
    :class:`~numpyro_ext.infer.VariationalGaussian` maximises the same bound by L-BFGS, with the best Gaussian at every
    evaluation. That serves any model. This function serves one family of models, for which an iteration has a cost and
    memory linear in the number of rows, with small constants.

    :param LatentGaussianRows rows: data, and parameters to start from.
    :param learn: which of ``"mean"``, ``"covariance"``, ``"loadings"``, ``"intercept"`` and ``"noise"`` (the ``scale``
        of Gaussian columns: one number if it has no axes, else one per column) to maximise over.
    :param int num_steps: the largest number of iterations.
    :param float tol: stop when an iteration raises the objective by less than this times the sum of the weights.
    :param int num_expectation_steps: the largest number of steps in an E-step. A few suffice: they go on from where the
        last E-step ended.
    :param float expectation_tol: see ``tol`` of the E-step. The error of the Gaussians is about its square root.
    :param float sparsity: penalty of the graphical lasso on the absolute values of the elements of
        :math:`\Sigma^{-1}` off the diagonal. The objective is the bound less half of it times the sum of the weights.
    :param int chunk_size: how many rows are worked on together; memory beyond the result is proportional to it.
    :return: the fit, see :class:`EMResult`.
    :raises ValueError: for an unknown parameter, for noise to be learned without real columns or that differs between
        rows, or for ``sparsity`` without learning the covariance.

    **Example:**

    >>> from numpyro_ext.potentials import GaussianPotential
    >>> table = jnp.array([[1.0, 2.0, 0.5], [-1.0, -1.5, 0.0], [0.5, 1.0, 1.5], [0.0, -0.5, -1.0], [1.5, 0.0, 1.0]])
    >>> rows = LatentGaussianRows(
    ...     mean=jnp.zeros(1), covariance=jnp.eye(1), loadings=jnp.ones((3, 1)), intercept=jnp.zeros(3),
    ...     potentials=(GaussianPotential(table, jnp.ones(3)),), observed=(jnp.ones((5, 3), bool),),
    ...     weights=jnp.ones(5))
    >>> found = variational_em(rows, learn=("loadings", "intercept", "noise"), num_steps=30)
    >>> bool(np.all(np.diff(found.objective_trace) > -1e-4)), found.rows.loadings.shape
    (True, (3, 1))
    """
    learn = _checked(rows, learn, sparsity)
    expect = partial(expectation_step, num_steps=num_expectation_steps, tol=expectation_tol, chunk_size=chunk_size)
    posteriors = expect(rows, initial_posteriors(rows))
    total_weight = float(jnp.sum(rows.weights))
    precision, penalty = None, 0.0
    if sparsity is not None:
        precision = np.linalg.inv(np.asarray(rows.covariance, float))
        penalty = _penalty(precision, sparsity * total_weight)
    trace = [float(jnp.sum(rows.weights * posteriors.bound)) - penalty]
    converged, count = False, 0
    while count < num_steps and not converged:
        rows = maximisation_step(rows, posteriors, learn=learn, chunk_size=chunk_size)
        if sparsity is not None and precision is not None:
            rows, precision = _sparse_covariance(rows, posteriors, sparsity, precision)
            penalty = _penalty(precision, sparsity * total_weight)
        posteriors = expect(rows, posteriors)
        sums = jnp.stack([posteriors.start_bound, posteriors.bound]) @ rows.weights
        trace.extend(np.asarray(sums, float) - penalty)
        count += 1
        if not np.isfinite(trace[-1]):
            break
        converged = bool(trace[-1] - trace[-3] < tol * total_weight)
    return EMResult(rows, posteriors, np.array(trace), converged, count, precision)


@partial(jax.jit, static_argnames=("learn", "chunk_size"))
def maximisation_step(
    rows: LatentGaussianRows, posteriors: RowPosteriors, *, learn: tuple[Parameter, ...], chunk_size: int = 4096
) -> LatentGaussianRows:
    r"""New parameters, for which the bound at the given Gaussians is no lower.

    Mean and covariance are the weighted moments of the Gaussians (Khan 2012, section 3.2). Loadings and intercept of a
    column solve one least-squares problem: with :math:`\bar z = (z, 1)`, slopes :math:`g_n` and
    :math:`\Lambda_n = -2 G_n` of the expected log factors,

    .. math:: \sum_n \Lambda_n [W, w_0]\, E[\bar z_n \bar z_n^T]
        = \sum_n (g_n + \Lambda_n \bar\eta_n)\, E[\bar z_n]^T.

    That is the maximum for Gaussian columns and quadratic bounds (Böhning, Jaakkola) at the local parameters of now.
    For any other expectation it is a step of Newton's kind, halved in the columns whose bound would fall. The noise of
    real columns is the root of the expected squared residual at the new loadings.

    Cost: ``N D L^2``, and one evaluation or more of all expectations.

    :param LatentGaussianRows rows: data and parameters.
    :param RowPosteriors posteriors: Gaussians of the rows.
    :param learn: the parameters to change; the covariance is not sparse here.
    :param int chunk_size: how many rows are worked on together.
    """
    total = jnp.sum(rows.weights)
    mean, covariance = rows.mean, rows.covariance
    if "mean" in learn:
        mean = rows.weights @ posteriors.mean / total
    if "covariance" in learn:
        covariance = _scatter(rows._replace(mean=mean), posteriors)
    potentials = rows.potentials
    if "loadings" in learn or "intercept" in learn:
        rows = _raise_columns(rows, posteriors, learn, chunk_size)
    if "noise" in learn:
        potentials = _noise(rows, posteriors, chunk_size)
    return rows._replace(mean=mean, covariance=covariance, potentials=potentials)


def _checked(rows: LatentGaussianRows, learn: Collection[Parameter], sparsity: float | None) -> tuple[Parameter, ...]:
    names = get_args(Parameter)
    unknown = [name for name in learn if name not in names]
    if unknown or isinstance(learn, str):
        raise ValueError(f"learn must hold some of {', '.join(map(repr, names))}, got {learn!r}.")
    real = [potential for potential in rows.potentials if isinstance(potential, GaussianPotential)]
    if "noise" in learn and not real:
        raise ValueError("learn has 'noise', but no potential is a GaussianPotential.")
    if "noise" in learn and any(jnp.ndim(potential.scale) > 1 for potential in real):
        raise ValueError("To learn 'noise', the scale of a GaussianPotential must be a number or one per column.")
    if sparsity is not None and ("covariance" not in learn or not sparsity >= 0.0):
        raise ValueError("sparsity must not be negative, and 'covariance' must be among what is learned.")
    return tuple(name for name in names if name in learn)


def _scatter(rows: LatentGaussianRows, posteriors: RowPosteriors) -> Array:
    """The covariance that maximises the bound, shape ``(L, L)``."""
    share = rows.weights / jnp.sum(rows.weights)
    centered = posteriors.mean - rows.mean
    scatter = jnp.tensordot(share, posteriors.covariance, axes=1) + (share[:, None] * centered).T @ centered
    return 0.5 * (scatter + scatter.T)


def _sparse_covariance(
    rows: LatentGaussianRows, posteriors: RowPosteriors, sparsity: float, precision: np.ndarray
) -> tuple[LatentGaussianRows, np.ndarray]:
    """The graphical lasso in place of the covariance that maximises the bound; kept as it was if that is better."""
    from sklearn.covariance import graphical_lasso

    scatter = np.asarray(_scatter(rows, posteriors), float)
    _, found = graphical_lasso(scatter, sparsity, tol=1e-8, enet_tol=1e-8, max_iter=500)

    def objective(matrix: np.ndarray) -> float:
        return 0.5 * (np.linalg.slogdet(matrix)[1] - np.sum(scatter * matrix)) - _penalty(matrix, sparsity)

    best = max((precision, found), key=objective)
    return rows._replace(covariance=jnp.asarray(np.linalg.inv(best), rows.mean.dtype)), best


def _penalty(precision: np.ndarray, weight: float) -> float:
    return 0.5 * weight * float(np.sum(np.abs(precision)) - np.sum(np.abs(np.diag(precision))))


def _raise_columns(
    rows: LatentGaussianRows, posteriors: RowPosteriors, learn: tuple[Parameter, ...], chunk_size: int
) -> LatentGaussianRows:
    """Loadings and intercepts after one step, of which each column takes the whole or a part."""
    statistics = map_chunks(_column_statistics, rows, posteriors, chunk_size, is_sum=True)
    size = rows.num_latents
    free = np.r_[0 : size if "loadings" in learn else 0, size : size + ("intercept" in learn)]
    moves = []
    for gram, gradient, _ in statistics:
        columns, width = gradient.shape[:2]
        rank = width * len(free)
        matrix = gram[..., free[:, None], free].swapaxes(2, 3).reshape(columns, rank, rank)
        step = _flat_solve(matrix, gradient[..., free].reshape(columns, rank))
        moves.append(jnp.zeros_like(gradient).at[..., free].set(step.reshape(columns, width, len(free))))

    def moved(parts: list[Array]) -> LatentGaussianRows:
        joined = [(part[:, None, None] * move).reshape(-1, size + 1) for part, move in zip(parts, moves, strict=True)]
        change = jnp.concatenate(joined)
        return rows._replace(loadings=rows.loadings + change[:, :-1], intercept=rows.intercept + change[:, -1])

    before = [value for *_, value in statistics]
    eps = jnp.finfo(rows.mean.dtype).eps

    def refused(parts: list[Array]) -> list[Array]:
        after = map_chunks(_column_values, moved(parts), posteriors, chunk_size, is_sum=True)
        # Not "less": a value that is not a number is refused too.
        return [
            ~(new >= old - 16.0 * eps * jnp.abs(old)) & (part > 0.0)
            for new, old, part in zip(after, before, parts, strict=True)
        ]

    def proceed(state: tuple[list[Array], list[Array], Array]) -> Array:
        return jnp.any(jnp.stack([jnp.any(is_refused) for is_refused in state[1]]))

    def halve(state: tuple[list[Array], list[Array], Array]) -> tuple[list[Array], list[Array], Array]:
        parts, are_refused, count = state
        smaller = jnp.where(count < _NUM_HALVINGS, 0.5, 0.0)
        parts = [jnp.where(bad, smaller * part, part) for part, bad in zip(parts, are_refused, strict=True)]
        return parts, refused(parts), count + 1

    whole = [jnp.ones(value.shape, value.dtype) for value in before]
    parts, *_ = lax.while_loop(proceed, halve, (whole, refused(whole), jnp.asarray(0)))
    return moved(parts)


def _column_statistics(rows: LatentGaussianRows, posteriors: RowPosteriors) -> list[tuple[Array, Array, Array]]:
    """For each family sums over rows: of precisions times moments, of the slopes in loadings, of expectations.

    Shapes ``(C, K, K, L + 1, L + 1)``, ``(C, K, L + 1)`` and ``(C,)``.
    """
    size = rows.num_latents
    mean, covariance, weights = posteriors.mean, posteriors.covariance, rows.weights
    extended = jnp.pad(mean, ((0, 0), (0, 1)), constant_values=1.0)
    second = (extended[:, :, None] * extended[:, None, :]).reshape(-1, (size + 1) ** 2)
    result = []
    for family in rows.families():
        found = family.expect(mean, covariance)
        columns, width = found.mean_slope.shape[1:]
        precision = (weights[:, None, None, None] * found.precision).reshape(-1, columns * width**2)
        shape = (columns, width, width)
        spread = (precision.T @ covariance.reshape(-1, size**2)).reshape(*shape, size, size)
        located = (precision.T @ second).reshape(*shape, size + 1, size + 1)
        slope = (weights[:, None, None] * found.mean_slope).reshape(-1, columns * width)
        gradient = (slope.T @ extended).reshape(columns, width, size + 1)
        spread = jnp.pad(spread, [(0, 0)] * 3 + [(0, 1)] * 2)
        pulled = jnp.einsum("ckjlm,cjl->ckm", spread[..., :size, :], family.loadings)
        result.append((located + spread, gradient - pulled, weights @ found.value))
    return result


def _column_values(rows: LatentGaussianRows, posteriors: RowPosteriors) -> list[Array]:
    return [rows.weights @ family.expect(posteriors.mean, posteriors.covariance).value for family in rows.families()]


def _flat_solve(matrix: Array, vector: Array) -> Array:
    """An ascent direction: Newton's, with zero where there is no curvature and the curvature made positive."""
    # One matrix at a time: see the note on batches in linalg/cholesky.py.
    values, vectors = lax.map(jnp.linalg.eigh, matrix)
    size = jnp.abs(values)
    floor = matrix.shape[-1] * jnp.finfo(matrix.dtype).eps * jnp.max(size, axis=-1, keepdims=True)
    is_used = size > floor
    inverse = jnp.where(is_used, 1.0 / jnp.where(is_used, size, 1.0), 0.0)
    return jnp.einsum("cij,cj,ckj,ck->ci", vectors, inverse, vectors, vector)


def _noise(
    rows: LatentGaussianRows, posteriors: RowPosteriors, chunk_size: int
) -> tuple[Potential | VectorPotential, ...]:
    """The potentials with the noise of real columns that maximises the bound."""
    sums = map_chunks(_residuals, rows, posteriors, chunk_size, is_sum=True)
    return tuple(map(_with_noise, rows.potentials, sums))


def _with_noise(potential: Potential | VectorPotential, sums: tuple[Array, Array]) -> Potential | VectorPotential:
    if not isinstance(potential, GaussianPotential):
        return potential
    square, count = map(jnp.sum, sums) if jnp.ndim(potential.scale) == 0 else sums
    # A column without observations keeps its noise.
    root = jnp.sqrt(square / jnp.where(count > 0, count, 1.0))
    return dataclasses.replace(potential, scale=jnp.where(count > 0, root, potential.scale))


def _residuals(rows: LatentGaussianRows, posteriors: RowPosteriors) -> list[tuple[Array, Array]]:
    """Weighted sums over rows of expected squared residuals and of ones, shape ``(C,)``; zero for what is not real."""

    def of_family(family: Family) -> tuple[Array, Array]:
        weight = rows.weights[:, None] * family.observed
        if isinstance(family.potential, VectorPotential) or not isinstance(family.potential, GaussianPotential):
            return jnp.zeros_like(weight[0]), jnp.zeros_like(weight[0])
        means, covariances = family.moments(posteriors.mean, posteriors.covariance)
        residual = jnp.where(family.observed, family.potential.observation - means[..., 0], 0.0)
        square = jnp.square(residual) + covariances[..., 0, 0]
        return jnp.sum(weight * square, axis=0), jnp.sum(weight, axis=0)

    return [of_family(family) for family in rows.families()]
