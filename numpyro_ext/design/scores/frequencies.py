"""A score that looks at no model: how often each level was seen."""

from __future__ import annotations

from typing import Literal

import numpy as np
from jax import Array
from scipy.special import entr

from ...infer.bilinear.runs.run import BilinearRun
from ...infer.front.engine import BaseEngine
from ...infer.front.options import check_one_of
from ..outcomes.outlooks import Outlook
from ..outcomes.sources import outlooks
from ..outcomes.vectors import VectorOutlook

Side = Literal["rows", "columns"]


def empirical_entropy(
    source: object, *args: object, rng_key: Array | None = None, side: Side = "columns", **kwargs: object
) -> dict[str, np.ndarray]:
    """Entropy of the levels that were seen in the same column, in nats: ask about what divides people.

    It knows nothing of who is asked. A column of which nothing was seen has the largest, the log of the number of
    levels (Houlsby 2014, section 7.4.2).

    >>> import numpy as np
    >>> from jax import random
    >>> from numpyro_ext.design import empirical_entropy
    >>> from numpyro_ext.infer import BilinearEP
    >>> from numpyro_ext.models import heteroscedastic_ratings
    >>> user, item = np.divmod(np.arange(12), 3)
    >>> rating = np.array([0, 1, 2, 0, 1, 1, 0, 2, 0, 0, 2, 1])
    >>> sizes = {"num_users": 4, "num_items": 3, "rank": 1, "num_levels": 3}
    >>> engine = BilinearEP(heteroscedastic_ratings, tol=0.1, progress_bar=False)
    >>> engine.run(random.key(0), user, item, rating, **sizes)
    >>> print(empirical_entropy(engine, np.array([0, 0, 0]), np.array([0, 1, 2]), **sizes)["rating"].round(3))
    [0.    0.693 1.04 ]

    :param source: BilinearEP after its run on ordered ratings, or the newcomers of
        :func:`~numpyro_ext.design.cold_start`.
    :param args: arguments of the model with the ratings to look at.
    :param rng_key: plays no part.
    :param str side: ``"columns"`` for the levels in the same column, ``"rows"`` for those in the same row; newcomers
        have those of the side that is not new.
    :param kwargs: keyword arguments of the model.
    :return: for each observed site an array in the shape of its observations.
    :raises ValueError: if the frequencies are not known.
    """
    check_one_of(Side, side=side)
    run = source._finished() if isinstance(source, BaseEngine) else None
    if isinstance(run, BilinearRun):
        return _of_run(run, args, kwargs, int(side == "columns"))
    found = {name: _frequencies(outlook) for name, outlook in outlooks(source, args, kwargs, rng_key).items()}
    return {name: outlook.shaped(_entropy(counts)) for name, (outlook, counts) in found.items()}


def _frequencies(outlook: Outlook) -> tuple[Outlook, np.ndarray]:
    counts = outlook.frequencies if isinstance(outlook, VectorOutlook) else None
    if counts is None:
        raise ValueError(
            f"empirical_entropy counts the levels of rows or columns of ordered ratings, which are not known of "
            f"{outlook.name!r}: take predictive_entropy."
        )
    return outlook, counts


def _entropy(counts: np.ndarray) -> np.ndarray:
    total = counts.sum(-1, keepdims=True)
    share = np.where(total > 0.0, counts / np.maximum(total, 1.0), 1.0 / counts.shape[-1])
    found: np.ndarray = entr(share).sum(-1)
    return found


def _of_run(run: BilinearRun, args: tuple[object, ...], kwargs: dict[str, object], side: int) -> dict[str, np.ndarray]:
    reading = run.reading
    seen = run.programs.form(reading.data, run.fit.hyper).potential
    label, thresholds = getattr(seen, "label", None), getattr(seen, "thresholds", None)
    if label is None or thresholds is None:
        raise ValueError(
            f"empirical_entropy counts the levels of ordered ratings, and {list(reading.factor_names)} have none: take "
            "predictive_entropy."
        )
    counts = np.zeros((len(reading.elements[side]), np.shape(thresholds)[-1] + 1))
    np.add.at(counts, (np.asarray(reading.index[side]), np.asarray(label).astype(int)), 1.0)
    is_fit = not args and not kwargs
    if is_fit:
        args, kwargs = reading.args, dict(reading.kwargs)
    there, _ = run._read_cells(args, kwargs, is_held_out=is_fit, needs_observations=False)
    values = _entropy(counts)[np.asarray(there.index[side])]
    out, start = {}, 0
    for name, cells, shape in zip(there.factor_names, there.cells, there.factor_shapes, strict=True):
        found = np.full(int(np.prod(shape)), -np.inf)
        found[cells] = values[start : start + cells.size]
        out[name], start = found.reshape(shape), start + cells.size
    return out
