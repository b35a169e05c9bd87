"""Log densities of families in NumPy, as functions of the predictor."""

import numpy as np
from scipy import special, stats


def log_sigmoid(x):
    return -np.logaddexp(0.0, -x)


def _log_softplus(x):
    return np.where(x < -30.0, x, np.log(np.logaddexp(0.0, np.maximum(x, -30.0))))


def poisson(count, exposure):
    return lambda x: count * (x + np.log(exposure)) - exposure * np.exp(x) - special.gammaln(count + 1.0)


def softplus(count, exposure):
    return lambda x: (
        count * (_log_softplus(x) + np.log(exposure)) - exposure * np.logaddexp(0.0, x) - special.gammaln(count + 1.0)
    )


def binomial(count, total):
    constant = special.gammaln(total + 1) - special.gammaln(count + 1) - special.gammaln(total - count + 1)
    return lambda x: constant + count * log_sigmoid(x) + (total - count) * log_sigmoid(-x)


def negative_binomial(count, size, shift):
    constant = special.gammaln(count + size) - special.gammaln(size) - special.gammaln(count + 1)
    return lambda x: constant + count * log_sigmoid(x + shift) + size * log_sigmoid(-x - shift)


def logistic(observation, scale):
    return lambda x: log_sigmoid((observation - x) / scale) + log_sigmoid((x - observation) / scale) - np.log(scale)


def soft_laplace(observation, scale):
    return lambda x: np.log(2.0 / (np.pi * scale)) - np.logaddexp((observation - x) / scale, (x - observation) / scale)


def asymmetric_laplace(observation, scale, asymmetry):
    return lambda x: stats.laplace_asymmetric.logpdf(observation, asymmetry, x, scale)
