"""Modes of the posterior of one person, from the ends of several searches."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

_SAME = 0.5
"""Greatest distance of two ends of searches for one mode, in its standard deviations."""


class Peaks(NamedTuple):
    """Gaussians at the modes of a posterior, the one of the greatest evidence first."""

    means: np.ndarray
    """Shape ``(modes, K)``."""
    covariances: np.ndarray
    """Shape ``(modes, K, K)``."""
    shares: np.ndarray
    """Share of each in the evidence, shape ``(modes,)``."""

    @classmethod
    def of(
        cls, means: np.ndarray, precisions: np.ndarray, log_evidence: np.ndarray, converged: np.ndarray
    ) -> tuple[Peaks, float]:
        """Different modes among the ends of searches, and the logarithm of the sum of their evidence.

        Searches that have not ended are left out where others have; of these alone the best is kept.

        :param means: where each search ended, shape ``(searches, K)``.
        :param precisions: curvatures there.
        """
        order = np.argsort(-log_evidence, kind="stable")
        order = order[converged[order]] if converged.any() else order[:1]
        covariances = {int(k): inverse_curvature(precisions[k]) for k in order}
        kept: list[int] = []
        for k in covariances:
            apart = [means[k] - means[j] for j in kept]
            if all(x @ np.linalg.solve(covariances[j], x) > _SAME**2 for x, j in zip(apart, kept, strict=True)):
                kept.append(k)
        logs = np.asarray(log_evidence[kept], float)
        total = float(logsumexp(logs))
        return cls(means[kept], np.stack([covariances[k] for k in kept]), np.exp(logs - total)), total


def inverse_curvature(precision: np.ndarray) -> np.ndarray:
    """Inverse of a curvature, which is no less than that of the prior, whatever rounding has made of it."""
    if not np.isfinite(precision).all():
        raise FloatingPointError(
            "The curvature at the mode of a person is not finite: the network overflows for her events. Train it with "
            "smaller steps, or use float64 (numpyro.enable_x64())."
        )
    values, vectors = np.linalg.eigh(np.asarray(precision + precision.T, float) / 2)
    return (vectors / np.maximum(values, 1.0)) @ vectors.T
