"""Sparse Gaussian processes as priors, and the kernel of comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .cholesky import cholesky, solve_lower


def fitc(
    kernel: Callable[[object, object], Array], x: ArrayLike, inducing: ArrayLike, *, jitter: float | None = None
) -> tuple[Array, Array]:
    r"""Low-rank factor and diagonal of the FITC prior, which knows a Gaussian process through its inducing values.

    Values at ``x`` are independent given those at ``inducing``, and their variances are those of the process:
    :math:`Q + \mathrm{diag}(K - Q)` with :math:`Q = K_{x0} K_{00}^{-1} K_{0x}` (Snelson and Ghahramani 2006, *Sparse
    Gaussian processes using pseudo-inputs*; Houlsby 2014, chapter 6). It is the process itself where the inducing
    values determine it. The arrays are parameters of ``numpyro.distributions.LowRankMultivariateNormal``, whose low
    rank the engines keep: ``n m^2`` operations a sweep. Both are differentiable in what the kernel depends on.

    :param kernel: a function of two arrays of points that returns the covariances of all pairs, as
        ``kernel(x, inducing)`` of shape ``(n, m)``; any object of tinygp does.
    :param x: points, shape ``(n,)`` or ``(n, d)``.
    :param inducing: inducing points, shape ``(m,)`` or ``(m, d)``; of ``x`` or not.
    :param float jitter: added to the variances at ``inducing``, and the least element of the diagonal, relative to the
        largest prior variance at these points. Densities divide by the diagonal, so it is positive. The square root of
        the precision of the numbers if left out.
    :return: ``cov_factor`` of shape ``(n, m)`` and ``cov_diag`` of shape ``(n,)``.
    :raises ValueError: if points have different dimensions, if there are no inducing points, or if the kernel returns
        another shape.

    Cost: ``n m^2 + m^3``, and ``n + n m + m^2`` covariances.

    **Example:**

    >>> import jax.numpy as jnp
    >>> def kernel(a, b):
    ...     return jnp.exp(-0.5 * (a[:, None] - b) ** 2)
    >>> cov_factor, cov_diag = fitc(kernel, jnp.linspace(0.0, 5.0, 100), jnp.linspace(0.0, 5.0, 8))
    >>> cov_factor.shape, bool(jnp.allclose(jnp.sum(cov_factor**2, 1) + cov_diag, 1.0, atol=1e-3))
    ((100, 8), True)
    """
    x, inducing = jnp.asarray(x), jnp.asarray(inducing)
    if not x.ndim or not inducing.size or x.shape[1:] != inducing.shape[1:]:
        raise ValueError(
            f"x of shape {x.shape} and inducing of shape {inducing.shape} must be points of one dimension, one a row, "
            "and at least one of them inducing."
        )
    shared = jnp.asarray(kernel(inducing, inducing))
    cross = jnp.asarray(kernel(x, inducing))
    if shared.shape != (len(inducing),) * 2 or cross.shape != (len(x), len(inducing)):
        raise ValueError(
            f"kernel(x, inducing) has shape {cross.shape} and kernel(inducing, inducing) {shared.shape}: expected "
            f"{(len(x), len(inducing))} and {(len(inducing),) * 2}, the covariances of all pairs of points."
        )
    variance = jax.vmap(lambda point: jnp.reshape(kernel(point[None], point[None]), ()))(x).astype(cross.dtype)
    if jitter is None:
        jitter = math.sqrt(jnp.finfo(cross.dtype).eps)
    least = jitter * jnp.max(jnp.diagonal(shared))
    factor = solve_lower(cholesky(shared + least * jnp.eye(len(inducing), dtype=shared.dtype)), cross.T).T
    return factor, jnp.maximum(variance - jnp.sum(factor**2, axis=1), least)


def pair_covariance(
    covariance: ArrayLike, pairs: ArrayLike, others: ArrayLike | None = None, *, jitter: float = 1e-5
) -> Array:
    r"""Covariances of differences :math:`f_i - f_j` of utilities, the preference kernel.

    :math:`k((i, j), (k, l)) = K_{ik} + K_{jl} - K_{il} - K_{jk}` (Houlsby, Huszar, Ghahramani and Hernandez-Lobato
    2012, *Collaborative Gaussian processes for preference learning*, eq. 2). Pairs that close a circle determine each
    other: the rank is less than the number of items, hence the jitter. With the utilities themselves as the field of a
    model none is needed.

    :param covariance: :math:`K` of the items, shape ``(num_items, num_items)``.
    :param pairs: whole numbers ``(i, j)``, shape ``(n, 2)``.
    :param others: the same, shape ``(m, 2)``; ``pairs`` if left out.
    :param float jitter: added to the variances, where ``others`` is left out or the same object as ``pairs``.
    :return: shape ``(n, m)``.
    :raises ValueError: if pairs are not two whole numbers each, or name an item that there is not.

    **Example:**

    >>> import jax.numpy as jnp
    >>> print(pair_covariance(jnp.eye(3), [[0, 1], [1, 2]], jitter=0.0))
    [[ 2. -1.]
     [-1.  2.]]
    >>> kernel = lambda a, b: pair_covariance(jnp.eye(3), a, b, jitter=0.0)
    >>> cov_factor, cov_diag = fitc(kernel, [[0, 1], [1, 2], [2, 0]], [[0, 1], [1, 2]])  # these determine the third
    >>> bool(jnp.all(cov_diag < 1e-2))
    True
    """
    matrix = jnp.asarray(covariance)
    is_same = others is None or others is pairs
    pairs = _checked(pairs, len(matrix))
    others = pairs if others is None else _checked(others, len(matrix))
    (first, second), (winner, loser) = pairs.T[:, :, None], others.T[:, None, :]
    found = matrix[first, winner] + matrix[second, loser] - matrix[first, loser] - matrix[second, winner]
    return found + jitter * jnp.eye(len(pairs), dtype=found.dtype) if is_same else found


def _checked(pairs: ArrayLike, size: int) -> Array:
    """Pairs of items from zero; of values that are being traced nothing is known."""
    pairs = jnp.asarray(pairs)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not jnp.issubdtype(pairs.dtype, jnp.integer):
        raise ValueError(f"pairs must be whole numbers of shape (n, 2), got {pairs.dtype} of shape {pairs.shape}.")
    if not isinstance(pairs, jax.core.Tracer) and pairs.size and not 0 <= int(pairs.min()) <= int(pairs.max()) < size:
        raise ValueError(
            f"pairs must lie in 0, ..., {size - 1}, as covariance is of {size} items; got values from "
            f"{int(pairs.min())} to {int(pairs.max())}."
        )
    return pairs
