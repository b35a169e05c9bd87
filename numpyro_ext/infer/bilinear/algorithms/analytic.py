"""The best mean-field posterior of a matrix of Normal values, from one singular value decomposition."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ...front.options import check_positive


class AnalyticFactors(NamedTuple):
    """Posterior mean of a matrix, ``left * singular_values @ right.T``."""

    left: np.ndarray
    """Shape ``(num_rows, k)``, with orthonormal columns."""
    singular_values: np.ndarray
    """Shape ``(k,)``, none of them zero, the largest first."""
    right: np.ndarray
    """Shape ``(num_columns, k)``."""

    @property
    def mean(self) -> np.ndarray:
        """Posterior mean of the product, shape ``(num_rows, num_columns)``."""
        return (self.left * self.singular_values) @ self.right.T


def analytic_matrix_factorization(
    x: ArrayLike, noise: float, scales: tuple[float, float], *, rank: int | None = None
) -> AnalyticFactors:
    r"""The global optimum of variational Bayes for a complete matrix :math:`x = u v^\top + \epsilon` (Nakajima,
    Sugiyama and Tomioka 2010).

    Vectors of rows and columns have independent Normal priors of mean zero, and in the posterior those of one side are
    independent of those of the other. Every singular value of the data shrinks on its own: those below a threshold
    vanish, others become the root of a quartic.

    :param x: values, shape ``(num_rows, num_columns)``, none missing.
    :param float noise: standard deviation of the noise.
    :param scales: prior standard deviations of the vectors of rows and of columns.
    :param int rank: number of components at most; by default as many as there can be.
    :return: the posterior mean of the product, by its singular values.
    :raises ValueError: if values are missing, the matrix is empty, or a scale is not positive.

    Cost: one singular value decomposition.

    **Example:**

    >>> import numpy as np
    >>> x = np.outer([3.0, 1.0, 2.0], [2.0, -1.0, 1.0, 2.0])
    >>> found = analytic_matrix_factorization(x, noise=1.0, scales=(2.0, 2.0))
    >>> print(found.singular_values.round(3), np.linalg.norm(x).round(3))
    [11.283] 11.832
    """
    values = np.asarray(x, float)
    if values.ndim != 2 or 0 in values.shape or not np.all(np.isfinite(values)):
        raise ValueError(
            f"x must be a matrix of finite values, got the shape {values.shape}; where some are missing use BilinearVG."
        )
    check_positive(noise=noise, row_scale=scales[0], column_scale=scales[1])
    left, found, right = np.linalg.svd(values, full_matrices=False)
    shrunk = np.array([_shrunk(value, values.shape, noise**2, scales) for value in found])
    kept = np.flatnonzero(shrunk > 0.0)[:rank]
    return AnalyticFactors(left[:, kept], shrunk[kept], right[kept].T)


def _shrunk(value: float, shape: tuple[int, int], variance: float, scales: tuple[float, float]) -> float:
    """Singular value of the posterior mean, zero below the threshold."""
    rows, columns = shape
    product = rows * columns
    excess = variance**2 / (scales[0] * scales[1]) ** 2
    middle = (rows + columns) * variance / 2.0 + excess / 2.0
    threshold = np.sqrt(middle + np.sqrt(middle**2 - product * variance**2))
    if value <= threshold:
        return 0.0
    square = value**2 * (1.0 - rows * variance / value**2) * (1.0 - columns * variance / value**2)
    third = (rows - columns) ** 2 * value / product
    last = (square - excess) ** 2
    second = -(third * value + (rows**2 + columns**2) * square / product + 2.0 * excess)
    roots = np.roots([1.0, third, second, third * np.sqrt(last), last])
    real = np.sort(roots[np.abs(roots.imag) <= 1e-6 * np.abs(roots)].real)
    return float(real[-2])
