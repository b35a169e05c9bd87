"""Choice of prior scales, of the rank and of other settings of a bilinear model by the cells that a fit did not see."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from ...structure.model.running.execution import check_key
from ..front.options import check_kind
from ..front.running.progress import progress_bar, warn
from .engines.engine import BilinearVG


class Candidate(NamedTuple):
    """Predictive score of one combination of values."""

    params: dict[str, Any]
    scores: np.ndarray
    """Mean log predictive probability of a held-out cell, one per split."""
    converged: np.ndarray
    """True if the fit of each split had converged."""

    @property
    def score(self) -> float:
        """Mean over the splits; minus infinity where it is not a number."""
        mean = float(np.mean(self.scores))
        return mean if np.isfinite(mean) else -np.inf


class GridSearch(NamedTuple):
    """Outcome of :func:`grid_search`."""

    best_params: dict[str, Any]
    best_score: float
    """Mean log predictive probability of a held-out cell."""
    best_engine: BilinearVG
    """Run again on all cells with the best values."""
    results: tuple[Candidate, ...]
    """All combinations, best first."""


def grid_search(
    engine: BilinearVG,
    rng_key: Array,
    *cells: Any,
    param_grid: Mapping[str, Sequence[Any]],
    test_size: float = 0.25,
    num_splits: int = 1,
    **kwargs: Any,
) -> GridSearch:
    """Fit with every combination of values to random parts of the cells, score on the rest, refit the best on all.

    As ``GridSearchCV`` with ``ShuffleSplit`` in scikit-learn. It is how Ko and Khan (2014) choose prior variances and
    the rank, and the way to choose the scales of point estimates, which cannot be learned.

    :param BilinearVG engine: its model and options are used; what it has run itself is not.
    :param rng_key: random number generator key, for the splits and the fits.
    :param cells: positional arguments of the model, each with one entry per cell on its first axis, such as rows,
        columns and counts.
    :param dict param_grid: for each name the values to try. Names of arguments of the model, such as ``rank``, are
        passed to it; others are hyperparameters, such as the scale of a prior, which are then given and not learned.
    :param float test_size: part of the cells that is held out.
    :param int num_splits: how often to split; scores are means over the splits.
    :param kwargs: keyword arguments of the model, passed as they are.
    :return: the best values, an engine run with them, and all scores.
    :raises ValueError: if arguments are not of one length, the grid is empty, or a name in it is unknown; also if no
        combination has a finite score.

    Cost: a fit for every combination and split, and one more. On one split, combinations that leave shapes as they are
    share compiled programs; every split compiles its own, because where the cells are is a part of a program.

    **Example:**

    >>> import jax, jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
    >>> from numpyro_ext.infer import BilinearVG, grid_search
    >>> def model(rows, cols, counts):
    ...     scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    ...     with numpyro.plate("row", 8):
    ...         w = numpyro.sample("w", dist.Normal(0.0, scale))
    ...     with numpyro.plate("col", 6):
    ...         z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    ...     numpyro.sample("counts", dist.Poisson(jnp.exp(w[rows] * z[cols])), obs=counts)
    >>> rows, cols = np.divmod(np.arange(48), 6)
    >>> counts = np.random.default_rng(0).poisson(1.0, 48)  # nothing to find
    >>> engine = BilinearVG(model, covariance="point", progress_bar=False)
    >>> search = grid_search(engine, jax.random.key(0), rows, cols, counts, param_grid={"scale": [0.1, 3.0]})
    >>> search.best_params
    {'scale': 0.1}
    """
    check_kind("grid_search", engine, BilinearVG, "a BilinearVG")
    num_cells = _num_cells(cells)
    if not 0.0 < test_size < 1.0 or not 0 < round(test_size * num_cells) < num_cells:
        raise ValueError(f"test_size must leave some of the {num_cells} cells on either side, got {test_size}.")
    check_key(rng_key)
    if num_splits < 1:
        raise ValueError(f"num_splits must be at least 1, got {num_splits}.")
    if not param_grid or not all(len(values) for values in param_grid.values()):
        raise ValueError("param_grid must give at least one value for each of one or more names.")
    if engine.unlisted_cells == "zero":
        raise ValueError("Cells that are held out would count as zeros: search with unlisted_cells='missing'.")
    arguments = inspect.signature(engine.model).parameters
    combinations = [dict(zip(param_grid, values, strict=True)) for values in itertools.product(*param_grid.values())]
    scores = np.full((len(combinations), num_splits), np.nan)
    converged = np.zeros((len(combinations), num_splits), bool)

    def fit(params: dict[str, Any], chosen: np.ndarray | slice, key: Array) -> tuple[BilinearVG, dict[str, Any]]:
        passed = kwargs | {name: value for name, value in params.items() if name in arguments}
        given = {name: value for name, value in params.items() if name not in arguments}
        fitted = _with_values(engine, given)
        fitted.run(key, *(x[chosen] for x in cells), **passed)
        return fitted, passed

    total = len(combinations) * num_splits
    with progress_bar(total, "grid search", enabled=engine.progress_bar) as bar, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*did not converge")
        for split in range(num_splits):
            split_key, fit_key = jax.random.split(jax.random.fold_in(rng_key, split))
            order = np.asarray(jax.random.permutation(split_key, num_cells))
            num_test = round(test_size * num_cells)
            test, train = np.sort(order[:num_test]), np.sort(order[num_test:])
            for number, params in enumerate(combinations):
                fitted, passed = fit(params, train, fit_key)
                found = fitted.log_predictive(*(x[test] for x in cells), **passed)
                scores[number, split] = sum(float(np.sum(v)) for v in found.values()) / num_test
                converged[number, split] = fitted.diagnostics.converged
                bar.update(1)
    if not converged.all():
        warn(
            f"{int((~converged).sum())} of {total} fits of the grid search did not converge; results say which. Give "
            "the engine more sweeps (num_steps)."
        )
    candidates = [Candidate(*parts) for parts in zip(combinations, scores, converged, strict=True)]
    results = tuple(sorted(candidates, key=lambda candidate: -candidate.score))
    best = results[0]
    if not np.isfinite(best.score):
        raise ValueError("No combination has a finite score: fit one of them by itself to see why.")
    refitted, _ = fit(best.params, slice(None), rng_key)
    return GridSearch(best.params, best.score, refitted, results)


def _num_cells(cells: Sequence[Any]) -> int:
    lengths = {np.shape(x)[:1] for x in cells}
    if len(lengths) != 1 or lengths == {()}:
        raise ValueError(
            f"positional arguments need one entry per cell on their first axis, got the shapes "
            f"{[np.shape(x) for x in cells]}. Pass what is not of cells as keyword arguments."
        )
    return int(lengths.pop()[0])


def _with_values(engine: BilinearVG, given: Mapping[str, Array]) -> BilinearVG:
    """An engine with the same options, and these hyperparameters given."""
    changed = {"hyper_values": {**engine.hyper_values, **given}, "progress_bar": False, "devices": engine.devices}
    return type(engine)(engine.model, **{**engine._options_given(), **changed})
