"""Tilted moments by brute force: composite Gauss-Legendre on meshes that grow geometrically around several points."""

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_OFFSETS = np.concatenate([[0.0], np.logspace(-13.0, 1.3, 400)])


def direct_moments(log_density, mean, variance, power=1.0, anchors=()):
    """Log normaliser, mean and variance of ``t^power N(mean, variance)``, in float64 and without JAX.

    :param log_density: NumPy function of an array.
    :param anchors: points near which ``t`` changes quickly (its peak, its kinks).
    """
    scale = np.sqrt(variance)

    def log_integrand(x):
        with np.errstate(all="ignore"):
            value = power * log_density(x) - 0.5 * (x - mean) ** 2 / variance - 0.5 * np.log(2 * np.pi * variance)
        return np.where(np.isnan(value), -np.inf, value)

    centers = [mean, *anchors]
    for _ in range(8):
        mesh = [
            center + sign * _OFFSETS * width
            for center in centers
            for sign in (-1.0, 1.0)
            for width in (scale, max(1.0, abs(center - mean)))
        ]
        mesh = np.unique(np.concatenate(mesh))
        peak = mesh[np.argmax(log_integrand(mesh))]
        centers = [mean, *anchors, peak]
    left, right = mesh[:-1, None], mesh[1:, None]
    x = 0.5 * (left + right) + 0.5 * (right - left) * _NODES
    values = log_integrand(x)
    top = values.max()
    weights = 0.5 * (right - left) * _WEIGHTS * np.exp(values - top)
    total = weights.sum()
    tilted_mean = peak + (weights * (x - peak)).sum() / total
    tilted_variance = (weights * (x - tilted_mean) ** 2).sum() / total
    return top + np.log(total), tilted_mean, tilted_variance


def largest_errors(moments, expected, mean, variance):
    """Errors of log Z, mean, variance, site precision and site shift, each relative to what it is made of."""
    log_z, tilted_mean, tilted_variance = (np.array(column) for column in zip(*expected, strict=True))
    values = [np.asarray(value, np.float64) for value in moments]
    precision, natural = 1.0 / tilted_variance, tilted_mean / tilted_variance
    cavity = 1.0 / variance
    errors = [
        np.abs(values[0] - log_z) / np.maximum(1.0, np.abs(log_z)),
        np.abs(values[1] - tilted_mean) / np.maximum(np.abs(tilted_mean), np.sqrt(tilted_variance)),
        np.abs(values[2] / tilted_variance - 1.0),
        np.abs(values[3] - (precision - cavity)) / np.maximum(precision, cavity),
        np.abs(values[4] - (natural - mean * cavity)) / (np.abs(natural) + np.abs(mean * cavity) + np.sqrt(precision)),
    ]
    return np.array([np.max(np.where(np.isfinite(error), error, np.inf)) for error in errors])
