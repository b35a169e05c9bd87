"""PSIS-LOO by ArviZ, for either of its living generations."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy as np


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
        # The first generation takes groups as keywords, the second one dictionary of them.
        takes_keywords = "posterior" in inspect.signature(az.from_dict).parameters
        found = az.loo(az.from_dict(**draws) if takes_keywords else az.from_dict(draws))
        return float(found.elpd_loo if hasattr(found, "elpd_loo") else found.elpd)
