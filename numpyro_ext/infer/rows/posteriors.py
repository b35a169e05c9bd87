r"""Rows of data that are independent given the parameters, and a variational Gaussian for each of them.

.. math:: z_n \sim N(\mu, \Sigma), \qquad \eta_n = W z_n + w_0, \qquad y_n \sim \prod_d t_{nd}(\eta_{nd})

Factor analysis fixes :math:`\mu = 0, \Sigma = I`; a latent Gaussian graphical model fixes :math:`W = I, w_0 = 0` (Khan
2012, section 1.1). All rows are worked on at once, in chunks, with matrices of the size of one :math:`z_n`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...linalg.cholesky import cholesky, cholesky_solve, solve_lower
from ...potentials import Potential, VectorPotential

__all__ = [
    "FamilySlopes",
    "LatentGaussianRows",
    "RowPosteriors",
    "expectation_step",
    "initial_posteriors",
    "inverse_from_cholesky",
    "map_chunks",
    "predictive_log_density",
    "prior_divergence",
]

_SMALLEST_STEP = 1e-6
_SLACK = 16.0
_MATRICES = ("precision", "covariance")

Tree = TypeVar("Tree")


class LatentGaussianRows(NamedTuple):
    """``N`` rows with ``L`` latent variables and ``D`` predictors each; see :mod:`~numpyro_ext.infer.rows.posteriors`.

    **Example:** two factors behind four binary columns, of which one cell is missing.

    >>> import numpy as np
    >>> from numpyro_ext.potentials import BohningBound, BoundedPotential, LogitPotential
    >>> table = np.array([[1, 1, 0, 0], [1, 0, 0, 1], [0, 0, 1, 1]])
    >>> rows = LatentGaussianRows(
    ...     mean=jnp.zeros(2), covariance=jnp.eye(2), loadings=jnp.cos(jnp.arange(8.0)).reshape(4, 2),
    ...     intercept=jnp.zeros(4), potentials=(BoundedPotential(LogitPotential(table), BohningBound()),),
    ...     observed=(jnp.ones((3, 4), bool).at[0, 3].set(False),), weights=jnp.ones(3))
    >>> posteriors = expectation_step(rows, initial_posteriors(rows), num_steps=50)
    >>> print(posteriors.mean.shape, posteriors.bound.sum().round(3))
    (3, 2) -7.439
    """

    mean: Array
    """Shape ``(L,)``."""
    covariance: Array
    """Shape ``(L, L)``, positive definite."""
    loadings: Array
    """Shape ``(D, L)``."""
    intercept: Array
    """Shape ``(D,)``."""
    potentials: tuple[Potential | VectorPotential, ...]
    """Families of columns in the order of the predictors. An array of a family of ``C`` columns has a shape that
    broadcasts to ``(N, C)``; what all rows share has fewer than two axes or one row. A column of a vector family takes
    as many consecutive predictors as the family has dimensions."""
    observed: tuple[Array, ...]
    """For each family booleans ``(N, C)``, false where a cell is missing."""
    weights: Array
    """How often each row is counted, shape ``(N,)``; need not be whole numbers."""

    @property
    def num_rows(self) -> int:
        return self.weights.shape[0]

    @property
    def num_latents(self) -> int:
        return self.mean.shape[0]

    def take(self, chosen: Array) -> LatentGaussianRows:
        """Some of the rows, by their numbers, in the order of these."""

        def of_rows(leaf: Any) -> Any:
            return leaf[chosen] if jnp.ndim(leaf) >= 2 and leaf.shape[0] == self.num_rows else leaf

        potentials = jax.tree.map(of_rows, self.potentials)
        observed = tuple(mask[chosen] for mask in self.observed)
        return self._replace(potentials=potentials, observed=observed, weights=self.weights[chosen])

    def families(self) -> list[Family]:
        """The families of columns with their parts of loadings and intercept."""
        families, start = [], 0
        for potential, mask in zip(self.potentials, self.observed, strict=True):
            width = potential.dimension if isinstance(potential, VectorPotential) else 1
            stop = start + mask.shape[1] * width
            loadings = self.loadings[start:stop].reshape(mask.shape[1], width, self.num_latents)
            families.append(Family(potential, mask, loadings, self.intercept[start:stop].reshape(-1, width)))
            start = stop
        return families


class FamilySlopes(NamedTuple):
    """Expected log factors of ``C`` columns with ``K`` predictors each; zero where a cell is missing."""

    value: Array
    """Shape ``(n, C)``."""
    mean_slope: Array
    """Shape ``(n, C, K)``."""
    precision: Array
    """Minus twice the slope in the covariance of the predictors, shape ``(n, C, K, K)``."""


class Family(NamedTuple):
    """Columns of one kind."""

    potential: Potential | VectorPotential
    observed: Array
    loadings: Array
    """Shape ``(C, K, L)``."""
    intercept: Array
    """Shape ``(C, K)``."""

    def products(self) -> Array:
        """All :math:`w_k w_j^T` of a column, shape ``(C K K, L L)``: quadratic forms as a matrix product."""
        columns, width, size = self.loadings.shape
        outer = jnp.einsum("ckl,cjm->ckjlm", self.loadings, self.loadings)
        return outer.reshape(columns * width**2, size**2)

    def moments(self, mean: Array, covariance: Array) -> tuple[Array, Array]:
        """Means ``(n, C, K)`` and covariances ``(n, C, K, K)`` of the predictors; one covariance may serve all rows."""
        columns, width, size = self.loadings.shape
        covariances = covariance.reshape(-1, size**2) @ self.products().T
        return self.means(mean), covariances.reshape(-1, columns, width, width)

    def means(self, mean: Array) -> Array:
        """Means of the predictors only."""
        columns, width, size = self.loadings.shape
        return (mean @ self.loadings.reshape(-1, size).T).reshape(-1, columns, width) + self.intercept

    def expect(self, mean: Array, covariance: Array | None) -> FamilySlopes:
        """The expected log factors under Gaussians ``(n, L)``, ``(n, L, L)``; of points, which have no covariance, the
        log factors themselves, for which half the curvature is the slope in the covariance."""
        if covariance is None:
            return self._at_points(self.means(mean))
        means, covariances = self.moments(mean, covariance)
        return self.expect_at(means, covariances)

    def _at_points(self, means: Array) -> FamilySlopes:
        mask = self.observed[..., None]
        means = jnp.where(mask, means, 0.0)
        if isinstance(self.potential, VectorPotential):
            value, slope, hessian = self.potential.derivatives(means)
        else:
            value, *slopes = self.potential.derivatives(means[..., 0])
            slope, hessian = slopes[0][..., None], slopes[1][..., None, None]
        return FamilySlopes(
            jnp.where(self.observed, value, 0.0),
            jnp.where(mask, slope, 0.0),
            jnp.where(mask[..., None], -hessian, 0.0),
        )

    def expect_at(self, means: Array, covariances: Array) -> FamilySlopes:
        """The expected log factors at :meth:`moments`."""
        width = means.shape[-1]
        mask = self.observed[..., None]
        means = jnp.where(mask, means, 0.0)
        covariances = jnp.where(mask[..., None], covariances, jnp.eye(width, dtype=means.dtype))
        if isinstance(self.potential, VectorPotential):
            value, slope, matrix = self.potential.expected_log_density(means, covariances)
        else:
            variances = jnp.maximum(covariances[..., 0, 0], jnp.finfo(means.dtype).tiny)
            value, *slopes = self.potential.expected_log_density(means[..., 0], variances)
            slope, matrix = slopes[0][..., None], slopes[1][..., None, None]
        return FamilySlopes(
            jnp.where(self.observed, value, 0.0),
            jnp.where(mask, slope, 0.0),
            jnp.where(mask[..., None], -2.0 * matrix, 0.0),
        )


class RowPosteriors(NamedTuple):
    """A Gaussian for the latent variables of every row."""

    mean: Array
    """Shape ``(N, L)``."""
    precision: Array | None
    """Shape ``(N, L, L)``, or ``(U, L, L)`` with a :attr:`pattern`. None: points without variance."""
    covariance: Array
    """As the precision."""
    bound: Array
    """Lower bounds of the log densities of the rows, not weighted, shape ``(N,)``. Minus infinity: not computed."""
    start_bound: Array
    """The bound before the first step: with the parameters of now and the Gaussians of before."""
    pattern: Array | None = None
    """Which of ``U`` covariances a row has, shape ``(N,)``; none: each its own."""

    def covariances(self) -> Array | None:
        """For every row, shape ``(N, L, L)``; or ``(1, L, L)`` where all have the same; none for points."""
        if self.precision is None:
            return None
        return self.covariance if self.pattern is None or len(self.covariance) == 1 else self.covariance[self.pattern]

    def sum_over_sharing(self, values: Array) -> Array:
        """Sums of ``values`` ``(N, ...)`` over the rows that share a covariance: one for each of the covariances."""
        if self.pattern is None:
            return values
        return jax.ops.segment_sum(values, self.pattern, num_segments=len(self.covariance))


class _Trial(NamedTuple):
    covariance: Array
    bound: Array
    precision_target: Array
    shift_target: Array


def initial_posteriors(rows: LatentGaussianRows) -> RowPosteriors:
    """At the prior mean, with unit precision of every factor: under a broad prior itself expectations may overflow."""
    products = [family.products().reshape(mask.shape[1], -1, rows.num_latents**2) for family, mask in _pairs(rows)]
    width = [round(part.shape[1] ** 0.5) for part in products]
    total = sum(
        jnp.einsum("nc,cp->np", mask.astype(rows.mean.dtype), part[:, :: k + 1].sum(axis=1))
        for part, mask, k in zip(products, rows.observed, width, strict=True)
    )
    size = rows.num_latents
    precision = inverse_from_cholesky(cholesky(rows.covariance)) + jnp.reshape(total, (rows.num_rows, size, size))
    nothing = jnp.full((rows.num_rows,), -jnp.inf, rows.mean.dtype)
    mean = jnp.broadcast_to(rows.mean, (rows.num_rows, size))
    return RowPosteriors(mean, precision, inverse_from_cholesky(cholesky(precision)), nothing, nothing)


@partial(jax.jit, static_argnames=("num_steps", "chunk_size"))
def expectation_step(
    rows: LatentGaussianRows,
    posteriors: RowPosteriors,
    *,
    num_steps: int = 20,
    tol: float = 1e-10,
    chunk_size: int = 4096,
) -> RowPosteriors:
    r"""Raise the bound of every row by natural-gradient steps of its Gaussian, none of which lowers it.

    With slopes :math:`g_d, -\tfrac12 \Lambda_d` of the expected log factors in means and covariances of the predictors,
    a step moves the natural parameters by a fraction :math:`\rho` towards

    .. math:: \Sigma^{-1} + \sum_d W_d^T \Lambda_d W_d, \qquad
        \Sigma^{-1} \mu + \sum_d W_d^T (g_d + \Lambda_d (\bar\eta_d - w_{0d}))

    (Khan and Lin 2017; Khan 2012, section 3.3). :math:`\rho` is one, halved in rows where the bound would fall. For
    quadratic bounds (Böhning, Jaakkola) and Gaussian columns :math:`\rho = 1` is the update of the local parameters and
    never refused.

    Cost of a step: ``N (L^3 + D L^2)`` and the expectations; memory ``N L^2`` and what one chunk needs.

    :param LatentGaussianRows rows: data and parameters.
    :param RowPosteriors posteriors: where to start.
    :param int num_steps: the largest number of steps.
    :param float tol: stop when no bound of a row rises by more than this times one plus its size.
    :param int chunk_size: how many rows are worked on together.
    """

    def solve(rows: LatentGaussianRows, posteriors: RowPosteriors) -> RowPosteriors:
        return _solve(rows, posteriors, num_steps, tol)

    return map_chunks(solve, rows, posteriors, chunk_size)


def predictive_log_density(rows: LatentGaussianRows, posteriors: RowPosteriors) -> tuple[Array, ...]:
    r"""Log predictive density :math:`\log \int t_{nd}(\eta) N(\eta \mid \bar\eta_{nd}, V_{nd}) d\eta` of every cell.

    For cells that the posteriors have not seen: fit with a mask, then put the held-out values into the potentials.

    :return: for each family an array ``(N, C)``.
    """
    values = []
    for family in rows.families():
        covariance = posteriors.covariances()
        if covariance is None:
            means = family.means(posteriors.mean)
            is_vector = isinstance(family.potential, VectorPotential)
            values.append(family.potential.log_density(means if is_vector else means[..., 0]))
            continue
        means, covariances = family.moments(posteriors.mean, covariance)
        if isinstance(family.potential, VectorPotential):
            values.append(family.potential.log_normaliser(means, covariances))
        else:
            values.append(family.potential.log_normaliser(means[..., 0], covariances[..., 0, 0]))
    return tuple(values)


def map_chunks(
    function: Callable[[LatentGaussianRows, RowPosteriors], Tree],
    rows: LatentGaussianRows,
    posteriors: RowPosteriors,
    chunk_size: int,
    *,
    is_sum: bool = False,
) -> Tree:
    """Apply a function to chunks of rows, and join (or add) what it returns for them.

    Chunks are of one size: the last is filled up with copies of its last row, without weight or observations.
    """
    size = rows.num_rows
    if size <= chunk_size:
        return function(rows, posteriors)
    num_chunks = -(-size // chunk_size)
    leaves, structure = jax.tree.flatten(rows.potentials)
    is_own = [jnp.ndim(leaf) >= 2 and leaf.shape[0] == size for leaf in leaves]

    def cut(x: Array, **fill: Any) -> Array:
        padding = [(0, num_chunks * chunk_size - size)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding, **fill).reshape(num_chunks, chunk_size, *x.shape[1:])

    own = [cut(leaf, mode="edge") for leaf, mine in zip(leaves, is_own, strict=True) if mine]
    observed, weights = jax.tree.map(cut, (rows.observed, rows.weights))
    is_shared = posteriors.pattern is not None
    parts_of_rows = [None if is_shared and name in _MATRICES else part for name, part in posteriors._asdict().items()]
    chunks = own, observed, weights, jax.tree.map(partial(cut, mode="edge"), parts_of_rows)

    def apply(chunk: tuple[Any, ...]) -> Tree:
        own, observed, weights, of_rows = chunk
        part = RowPosteriors(*of_rows)
        if is_shared:
            part = part._replace(precision=posteriors.precision, covariance=posteriors.covariance)
        parts = iter(own)
        merged = [next(parts) if mine else leaf for leaf, mine in zip(leaves, is_own, strict=True)]
        potentials = jax.tree.unflatten(structure, merged)
        return function(rows._replace(potentials=potentials, observed=observed, weights=weights), part)

    results = lax.map(apply, chunks)
    if is_sum:
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), results)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:size], results)


def _solve(rows: LatentGaussianRows, start: RowPosteriors, num_steps: int, tol: float) -> RowPosteriors:
    eps = jnp.finfo(rows.mean.dtype).eps
    families = rows.families()
    prior_factor = cholesky(rows.covariance)
    prior_precision = inverse_from_cholesky(prior_factor)

    def evaluate(mean: Array, precision: Array) -> _Trial:
        factor = cholesky(precision)
        covariance = inverse_from_cholesky(factor)
        divergence = prior_divergence(rows.mean, prior_factor, mean, covariance, factor)
        # At W (m - mean) = predictor - intercept the offset of the sites drops out.
        shift = jnp.broadcast_to(prior_precision @ rows.mean, mean.shape)
        target, bound = jnp.broadcast_to(prior_precision, precision.shape), -divergence
        for family in families:
            found = family.expect(mean, covariance)
            bound = bound + jnp.sum(found.value, axis=-1)
            loadings = family.loadings.reshape(-1, rows.num_latents)
            sites = found.precision.reshape(mean.shape[0], -1) @ family.products()
            sites = sites.reshape(precision.shape)
            target = target + sites
            shift = shift + found.mean_slope.reshape(mean.shape[0], -1) @ loadings
            shift = shift + jnp.einsum("nlm,nm->nl", sites, mean)
        return _Trial(covariance, bound, target, shift)

    assert start.precision is not None  # modes are not where this starts
    own = start.precision if start.pattern is None else start.precision[start.pattern]
    first = evaluate(start.mean, own)

    def proceed(state: tuple[Any, ...]) -> Array:
        *_, is_done, count = state
        return (count < num_steps) & ~jnp.all(is_done)

    def advance(state: tuple[Any, ...]) -> tuple[Any, ...]:
        mean, precision, now, size, is_done, count = state
        part = size[:, None]
        natural = jnp.einsum("nlm,nm->nl", precision, mean)
        new_precision = precision + part[..., None] * (now.precision_target - precision)
        new_shift = natural + part * (now.shift_target - natural)
        new_mean = cholesky_solve(cholesky(new_precision), new_shift)
        trial = evaluate(new_mean, new_precision)
        scale = 1.0 + jnp.abs(now.bound)
        # Near the optimum the increase is below rounding. From where there is no bound any place is better.
        rises = (trial.bound >= now.bound - _SLACK * eps * scale) | ~jnp.isfinite(now.bound)
        accepted = rises & jnp.isfinite(trial.bound) & ~is_done
        gain = jnp.abs(trial.bound - now.bound)
        is_small = accepted & (gain <= jnp.maximum(tol, _SLACK * eps) * scale)
        is_done = is_done | is_small | (~accepted & (size < _SMALLEST_STEP))

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(accepted.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        taken = jax.tree.map(choose, (new_mean, new_precision, trial), (mean, precision, now))
        return *taken, jnp.where(accepted, jnp.minimum(1.0, 2.0 * size), 0.5 * size), is_done, count + 1

    ones = jnp.ones_like(first.bound)
    state = (start.mean, own, first, ones, jnp.zeros_like(first.bound, bool), 0)
    mean, precision, last, *_ = lax.while_loop(proceed, advance, state)
    return RowPosteriors(mean, precision, last.covariance, last.bound, first.bound)


def _pairs(rows: LatentGaussianRows) -> list[tuple[Family, Array]]:
    return list(zip(rows.families(), rows.observed, strict=True))


def inverse_from_cholesky(factor: Array) -> Array:
    """``(L L^T)^-1``, which is symmetric by construction."""
    identity = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    root = solve_lower(factor, identity)
    return root.swapaxes(-1, -2) @ root


def prior_divergence(prior_mean: Array, prior_factor: Array, mean: Array, covariance: Array, factor: Array) -> Array:
    """Kullback-Leibler divergences of the prior from Gaussians with Cholesky factors of their precisions."""
    size = prior_factor.shape[-1]
    root = solve_lower(prior_factor, jnp.eye(size, dtype=prior_factor.dtype))
    precision = root.T @ root
    trace = covariance.reshape(-1, size**2) @ precision.reshape(-1)
    distance = jnp.sum(jnp.square((mean - prior_mean) @ root.T), axis=-1)
    log_ratio = jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).sum(axis=-1)
    log_ratio = log_ratio + jnp.sum(jnp.log(jnp.diagonal(prior_factor)))
    return 0.5 * (trace + distance - size) + log_ratio
