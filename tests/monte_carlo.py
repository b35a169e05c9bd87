"""How far averages of independent draws may be from what they estimate."""

import numpy as np

# Of some hundred comparisons none should fail by chance: beyond five standard errors it is one in two million.
NUM_ERRORS = 5.0


def assert_close_means(draws, expected, *, other_error=0.0):
    """The means of independent draws along the first axis are the expected ones, to within their standard errors.

    :param other_error: standard errors of the expected values themselves.
    """
    draws = np.asarray(draws)
    error = np.sqrt(np.var(draws, axis=0, ddof=1) / len(draws) + np.square(other_error))
    gap = np.abs(draws.mean(0) - np.asarray(expected))
    assert np.all(gap <= NUM_ERRORS * error), (gap / error).max()


def assert_close_deviations(draws, expected):
    """Standard deviations of independent Gaussian draws along the first axis."""
    gap = np.abs(np.std(draws, axis=0, ddof=1) / np.asarray(expected) - 1.0)
    assert np.all(gap <= NUM_ERRORS / np.sqrt(2.0 * (len(draws) - 1))), gap.max()


def assert_close_covariance(draws, expected):
    """The covariance of independent Gaussian draws, of shape ``(num_draws, n)``."""
    expected = np.asarray(expected)
    variance = np.diagonal(expected)
    error = np.sqrt((np.outer(variance, variance) + expected**2) / (len(draws) - 1))
    gap = np.abs(np.cov(np.asarray(draws).T) - expected)
    assert np.all(gap <= NUM_ERRORS * error), (gap / error).max()


def trace_error(matrix, num_signs):
    """Standard error of the average of ``s' A s`` over vectors of random signs (Hutchinson 1990)."""
    matrix = np.asarray(matrix)
    return np.sqrt(2.0 * np.sum(np.square(matrix - np.diag(np.diagonal(matrix)))) / num_signs)


def log_determinant_error(precision, scale, num_signs):
    """Standard error of half the log determinant of a dense precision, averaged over quadratic forms in its logarithm.

    :param scale: the diagonal that it is divided by first.
    """
    eigenvalues, vectors = np.linalg.eigh(np.asarray(precision) / np.sqrt(np.outer(scale, scale)))
    return 0.5 * trace_error((vectors * np.log(eigenvalues)) @ vectors.T, num_signs)
