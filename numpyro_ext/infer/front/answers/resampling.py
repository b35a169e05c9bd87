"""Draws from an approximation, resampled by Pareto-smoothed importance weights (Vehtari et al. 2024)."""

from __future__ import annotations

import math
from typing import Literal

import jax
import numpy as np
from jax import Array

from ...hyper.density.cloud import systematic
from ..running.progress import warn

Resample = Literal["psis"]

LARGEST_SHAPE = 0.7
"""Largest shape of the Pareto tail of importance weights that may be averaged (Vehtari et al. 2024, section 3.2.4)."""
_PROPOSALS_PER_DRAW, _LEAST_PROPOSALS = 4, 1000
_LEAST_TAIL = 5
_LEAST_EXCESS = 1e-300
"""Smaller ones have no inverse."""
_LEAST_DISTINCT = 0.05


def num_proposals(num_samples: int) -> int:
    """Number of draws that are made for so many resampled ones."""
    return max(_PROPOSALS_PER_DRAW * num_samples, _LEAST_PROPOSALS)


def pareto_smoothed(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Importance weights whose largest are replaced by quantiles of a Pareto distribution fitted to them.

    :param log_weights: unnormalised, shape ``(n,)``; ``-inf`` for a draw of density zero.
    :return: log weights whose largest is zero at most, and k-hat, the shape of the tail: below 0.7 averages hold.

    >>> noise = np.random.default_rng(0).standard_normal(4000)
    >>> smoothed, shape = pareto_smoothed(-0.1 * noise**2)  # weights that are bounded
    >>> shape < 0.3, pareto_smoothed(0.4 * noise**2)[1] > 0.7
    (True, True)
    """
    log_weights = np.asarray(log_weights, float)
    log_weights = log_weights - np.max(log_weights)
    size = math.ceil(min(0.2 * log_weights.size, 3.0 * math.sqrt(log_weights.size)))
    order = np.argsort(log_weights)
    cutoff = np.exp(log_weights[order[-size - 1]])
    tail = order[-size:]
    excess = np.exp(log_weights[tail]) - cutoff
    if size < _LEAST_TAIL or excess[size // 4] <= _LEAST_EXCESS:
        # Too few to fit, or ties: weights without a tail, unless what is above the ties is all of them.
        return log_weights, 0.0 if excess[-1] <= 1e-8 else math.inf
    shape, scale = _fit_pareto(excess)
    probabilities = (np.arange(size) + 0.5) / size
    quantiles = -np.log1p(-probabilities) if shape == 0.0 else np.expm1(-shape * np.log1p(-probabilities)) / shape
    smoothed = log_weights.copy()
    smoothed[tail] = np.minimum(np.log(cutoff + scale * quantiles), 0.0)
    return smoothed, shape


def _fit_pareto(excess: np.ndarray) -> tuple[float, float]:
    """Shape and scale of a generalised Pareto distribution (Zhang and Stephens 2009), the shape drawn towards one half
    as by ten observations (Vehtari et al. 2024, appendix G); ``excess`` is sorted."""
    size = len(excess)
    number = 30 + int(math.sqrt(size))
    grid = 1.0 - np.sqrt(number / (np.arange(number) + 0.5))
    grid = grid / (3.0 * excess[int(size / 4 + 0.5) - 1]) + 1.0 / excess[-1]
    shapes = np.mean(np.log1p(-grid[:, None] * excess), axis=1)
    profile = size * (np.log(-grid / shapes) - shapes - 1.0)
    masses = np.exp(profile - np.max(profile))
    rate = float(grid @ (masses / masses.sum()))
    shape = float(np.mean(np.log1p(-rate * excess)))
    return (shape * size + 5.0) / (size + 10.0), -shape / rate


def psis_resampled(log_weights: np.ndarray, num_samples: int, rng_key: Array) -> np.ndarray:
    """Numbers of the draws to keep, in random order and with repetition.

    :param log_weights: of the draws, shape ``(n,)``.
    :param int num_samples: how many to keep.
    :param rng_key: random number generator key.
    :return: indices of shape ``(num_samples,)``.
    :raises FloatingPointError: if no draw has a positive weight.
    :warns UserWarning: if k-hat is above 0.7, or few draws have all the weight.
    """
    if np.isnan(log_weights).any() or not np.isfinite(np.max(log_weights)):
        raise FloatingPointError(
            "None of the draws has a positive and finite importance weight: the approximation does not overlap the "
            "support of the model. Use get_samples() without resample, or NUTS."
        )
    smoothed, shape = pareto_smoothed(log_weights)
    generator = np.random.default_rng(np.asarray(jax.random.bits(rng_key, (2,))))
    chosen: np.ndarray = generator.permutation(systematic(np.exp(smoothed), num_samples, generator.random()))
    distinct = len(np.unique(chosen))
    if shape > LARGEST_SHAPE or distinct < min(num_samples, max(2.0, _LEAST_DISTINCT * num_samples)):
        warn(
            f"The importance weights of draws from the approximation cannot hold: Pareto k-hat {shape:.2f} (above "
            f"{LARGEST_SHAPE}: no average of them is reliable), and {distinct} of the {num_samples} resampled draws "
            "are distinct. Use get_samples() without resample, another engine (EP, where it is Laplace), or NUTS, on "
            "the model or on marginalize(model, engine)."
        )
    return chosen
