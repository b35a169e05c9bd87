"""Leave-one-out scores in the type of ArviZ, in both of its living generations."""

from __future__ import annotations

from typing import Any

import numpy as np


def elpd_data(name: str, values: np.ndarray, within: np.ndarray, num_samples: int) -> Any:
    """Result in the type of ``arviz.loo``, from scores that were computed without importance weights.

    There are no Pareto shapes in it, as there was no sampling.

    :param str name: of the observed site.
    :param values: log predictive density of each observation without it, in the shape of the site.
    :param within: the same with it.
    :param int num_samples: draws of the engine, which ``arviz.compare`` looks at.
    """
    import arviz
    import xarray

    total, size = float(values.sum()), values.size
    error = float(np.sqrt(size * np.var(values)))
    num_parameters = float(within.sum() - total)
    dims = [f"{name}_dim_{axis}" for axis in range(values.ndim)]
    pointwise = xarray.DataArray(
        values, dims=dims, name="loo_i", coords={d: np.arange(n) for d, n in zip(dims, values.shape, strict=True)}
    )
    if arviz.__version__.startswith("0."):
        content = {
            "elpd_loo": total,
            "se": error,
            "p_loo": num_parameters,
            "n_samples": num_samples,
            "n_data_points": size,
            "warning": False,
            "loo_i": pointwise,
            "scale": "log",
        }
        return arviz.ELPDData(data=list(content.values()), index=list(content))
    # Later releases have a class for each estimator, earlier ones say which it is.
    kind = getattr(arviz, "ELPDDataLOO", None)
    options = {} if kind is not None else {"kind": "loo"}
    return (kind or arviz.ELPDData)(
        elpd=total,
        se=error,
        p=num_parameters,
        n_samples=num_samples,
        n_data_points=size,
        scale="log",
        warning=False,
        good_k=None,
        elpd_i=pointwise,
        **options,
    )
