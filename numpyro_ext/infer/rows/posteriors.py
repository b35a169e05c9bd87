r"""Rows of data that are independent given the parameters, and a variational Gaussian for each of them.

.. math:: z_n \sim N(\mu, \Sigma), \qquad \eta_n = W z_n + w_0, \qquad y_n \sim \prod_d t_{nd}(\eta_{nd})

Factor analysis fixes :math:`\mu = 0, \Sigma = I`; a latent Gaussian graphical model fixes :math:`W = I, w_0 = 0` (Khan
2012, section 1.1). All rows are worked on at once, in chunks, with matrices of the size of one :math:`z_n`. This file
has the data and the Gaussians; ``expectation`` raises the bound over the Gaussians, ``maximisation`` over the
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...display import shown
from ...linalg.padding import chunked
from ...potentials import Potential, VectorPotential

_MATRICES = ("precision", "covariance")

Tree = TypeVar("Tree")


@shown
class LatentGaussianRows(NamedTuple):
    """``N`` rows with ``L`` latent variables and ``D`` predictors each; see :mod:`~numpyro_ext.infer.rows.posteriors`.

    **Example:** two factors behind four binary columns, of which one cell is missing.

    >>> import numpy as np
    >>> from numpyro_ext.potentials import BoundedPotential, LogitPotential
    >>> from numpyro_ext.potentials.bounds.logistic import BohningBound
    >>> table = np.array([[1, 1, 0, 0], [1, 0, 0, 1], [0, 0, 1, 1]])
    >>> rows = LatentGaussianRows(
    ...     mean=jnp.zeros(2), covariance=jnp.eye(2), loadings=jnp.cos(jnp.arange(8.0)).reshape(4, 2),
    ...     intercept=jnp.zeros(4), potentials=(BoundedPotential(LogitPotential(table), BohningBound()),),
    ...     observed=(jnp.ones((3, 4), bool).at[0, 3].set(False),), weights=jnp.ones(3))
    >>> from numpyro_ext.infer.rows.expectation import expectation_step, initial_posteriors
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
    """Booleans ``(N, C)`` of each family, false where a cell is missing."""
    weights: Array
    """Weight of each row, shape ``(N,)``; need not be a whole number."""

    def _shown(self) -> list[str]:
        kinds = [
            f"{mask.shape[1]} of {type(potential).__name__}"
            for potential, mask in zip(self.potentials, self.observed, strict=True)
        ]
        size = f"{self.num_rows} rows of {self.num_latents} latent variables and {self.intercept.shape[0]} predictors"
        columns = f"columns: {', '.join(kinds)}"
        if not any(isinstance(mask, jax.core.Tracer) for mask in self.observed):
            columns += f"; {sum(int(mask.size) - int(mask.sum()) for mask in self.observed)} cells are missing"
        return [size, columns]

    @property
    def num_rows(self) -> int:
        return self.weights.shape[0]

    @property
    def num_latents(self) -> int:
        return self.mean.shape[0]

    def take(self, chosen: Array) -> LatentGaussianRows:
        """Some of the rows, by their numbers, in the order of these."""

        def of_rows(leaf: Any) -> object:
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

    def means(self, mean: Array) -> Array:
        """Means of the predictors, shape ``(n, C, K)``."""
        columns, width, size = self.loadings.shape
        return (mean @ self.loadings.reshape(-1, size).T).reshape(-1, columns, width) + self.intercept

    def covariances(self, covariance: Array) -> Array:
        """Covariances of the predictors, shape ``(n, C, K, K)``."""
        columns, width, size = self.loadings.shape
        return (covariance.reshape(-1, size**2) @ self.products().T).reshape(-1, columns, width, width)

    def expect(self, mean: Array, covariance: Array | None) -> FamilySlopes:
        """Expected log factors under Gaussians ``(n, L)``, ``(n, L, L)``, or at points, which have no covariance; one
        covariance may serve all rows."""
        return self.expect_at(self.means(mean), None if covariance is None else self.covariances(covariance))

    def expect_at(self, means: Array, covariances: Array | None) -> FamilySlopes:
        """Expected log factors at moments of the predictors; of points the log factors themselves, for which half the
        curvature is the slope in the covariance."""
        mask = self.observed[..., None]
        means = jnp.where(mask, means, 0.0)
        is_vector = isinstance(self.potential, VectorPotential)
        if covariances is None:
            value, slope, curvature = self.potential.derivatives(means if is_vector else means[..., 0])
            matrix = 0.5 * curvature
        else:
            covariances = jnp.where(mask[..., None], covariances, jnp.eye(means.shape[-1], dtype=means.dtype))
            if is_vector:
                value, slope, matrix = self.potential.expected_log_density(means, covariances)
            else:
                variances = jnp.maximum(covariances[..., 0, 0], jnp.finfo(means.dtype).tiny)
                value, slope, matrix = self.potential.expected_log_density(means[..., 0], variances)
        if not is_vector:
            slope, matrix = slope[..., None], matrix[..., None, None]
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
    """Covariance, of the shape of the precision."""
    bound: Array
    """Lower bounds of the log densities of the rows, not weighted, shape ``(N,)``. Minus infinity: not computed."""
    start_bound: Array
    """The bound before the first step: with the parameters of now and the Gaussians of before."""
    pattern: Array | None = None
    """Number of each row's covariance among ``U``, shape ``(N,)``; none: each its own."""

    def covariances(self) -> Array | None:
        """Covariances of all rows, shape ``(N, L, L)``; or ``(1, L, L)`` where all have the same; none for points."""
        if self.precision is None:
            return None
        return self.covariance if self.pattern is None or len(self.covariance) == 1 else self.covariance[self.pattern]

    def sum_over_sharing(self, values: Array) -> Array:
        """Sums of ``values`` ``(N, ...)`` over the rows that share a covariance: one for each of the covariances."""
        if self.pattern is None:
            return values
        return jax.ops.segment_sum(values, self.pattern, num_segments=len(self.covariance))


def predictive_log_density(rows: LatentGaussianRows, posteriors: RowPosteriors) -> tuple[Array, ...]:
    r"""Log predictive density :math:`\log \int t_{nd}(\eta) N(\eta \mid \bar\eta_{nd}, V_{nd}) d\eta` of every cell.

    For cells that the posteriors have not seen: fit with a mask, then put the held-out values into the potentials.

    :return: for each family an array ``(N, C)``.
    """
    values = []
    covariance = posteriors.covariances()
    for family in rows.families():
        moments = [family.means(posteriors.mean)]
        if covariance is not None:
            moments.append(family.covariances(covariance))
        if not isinstance(family.potential, VectorPotential):
            moments = [part.reshape(part.shape[:2]) for part in moments]
        potential = family.potential
        values.append(potential.log_density(*moments) if covariance is None else potential.log_normaliser(*moments))
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

    cut = partial(chunked, num_chunks=num_chunks, length=chunk_size)
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

    def join(parts: Array) -> Array:
        return jnp.sum(parts, axis=0) if is_sum else parts.reshape(-1, *parts.shape[2:])[:size]

    return jax.tree.map(join, results)
