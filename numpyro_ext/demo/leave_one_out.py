"""PSIS-LOO by ArviZ, for either of its living generations."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

__all__ = ["psis_loo"]


def psis_loo(pointwise: np.ndarray) -> float:
    """Expected log pointwise predictive density by Pareto-smoothed importance sampling (Vehtari et al., 2017).

    :param pointwise: log likelihood of each observation under each draw, shape ``(num_draws, num_observations)``.
    :return: ``elpd_loo``, higher is better.
    """
    import arviz as az

    draws: dict[str, Any] = {"posterior": {"draw_number": np.arange(len(pointwise), dtype=float)[None]}}
    draws["log_likelihood"] = {"counts": pointwise[None]}
    with warnings.catch_warnings():
        # a few observations with a large Pareto k are expected of isolated events, and seen in the plots
        warnings.simplefilter("ignore", UserWarning)
        if hasattr(az, "InferenceData"):
            return float(az.loo(az.from_dict(**draws)).elpd_loo)
        return float(az.loo(az.from_dict(draws)).elpd)
