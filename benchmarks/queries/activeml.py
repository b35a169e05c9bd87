"""Beside scikit-activeml: seconds of queries, and what labels are worth, by ``python -m benchmarks.queries.activeml``.

Its strategies ask within the same protocol, as scores of :func:`~numpyro_ext.design.compare_acquisitions`, and every
choice is judged by the same Gaussian process. A minute or two of one core.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax import random
from skactiveml.classifier import ParzenWindowClassifier, SklearnClassifier
from skactiveml.pool import EpistemicUncertaintySampling, MonteCarloEER, QueryByCommittee
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from numpyro_ext.design import compare_acquisitions, expected_information_gain, expected_risk
from numpyro_ext.infer import EP

from ..harness import blocks, mean_and_error, table, write_report
from .acquisitions import SETTINGS, classifier, hyper_values

_DATA, _NUM_LABELS, _NUM_MEMBERS, _NUM_RISKS = "noisy block", 40, 10, 3
_OWN: dict[str, Callable[..., Any]] = {"information": expected_information_gain, "one-step risk": expected_risk}
_Query = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


def _process(kernel: Any, seed: int = 0) -> Any:
    found = GaussianProcessClassifier(kernel, optimizer=None)
    return SklearnClassifier(found, classes=[0, 1], random_state=seed)


def _queries(kernel: Any) -> dict[str, _Query]:
    """Utilities of the candidates, given inputs and labels, which are nan where there is none."""

    def committee(x: np.ndarray, y: np.ndarray, seed: int) -> np.ndarray:
        rng, seen = np.random.default_rng(seed), np.flatnonzero(~np.isnan(y))
        members = []
        for member in range(_NUM_MEMBERS):  # by bootstrap, as its manual has it
            chosen = rng.choice(seen, len(seen))
            members.append(_process(kernel, member).fit(x[chosen], y[chosen]))
        strategy = QueryByCommittee(method="KL_divergence", random_state=seed)
        _, utilities = strategy.query(x, y, ensemble=members, fit_ensemble=False, return_utilities=True)
        return np.asarray(utilities[0])

    def with_windows(strategy: Any, **options: Any) -> _Query:
        """With Parzen windows: the wrapper of scikit-learn's process takes no weights, which strategies hand on."""

        def query(x: np.ndarray, y: np.ndarray, seed: int) -> np.ndarray:
            windows = ParzenWindowClassifier(classes=[0, 1])
            found = strategy(random_state=seed, **options).query(x, y, clf=windows, return_utilities=True)
            return np.asarray(found[1][0])

        return query

    return {
        "QueryByCommittee": committee,
        "EpistemicUncertaintySampling": with_windows(EpistemicUncertaintySampling),
        "MonteCarloEER": with_windows(MonteCarloEER, method="misclassification_loss"),
    }


def _as_score(query: _Query, x: np.ndarray, is_pool: np.ndarray, seconds: list[float]) -> Callable[..., Any]:
    """A strategy with the signature of a score; it sees the pool alone, and its seconds are noted."""

    def score(source: Any, rng_key: Any = None, **_: Any) -> dict[str, np.ndarray]:
        places, values = source.seen_values("y")
        labels = np.full(len(x), np.nan)
        labels[places] = values
        started = time.perf_counter()
        utilities = query(x[is_pool], labels[is_pool], len(places))
        seconds.append(time.perf_counter() - started)
        scores = np.full(len(x), -np.inf)
        scores[is_pool] = np.where(np.isnan(utilities), -np.inf, utilities)
        return {"y": scores}

    return score


def main() -> None:
    """Ask, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    setting = SETTINGS[_DATA]
    hyper = hyper_values(_DATA)
    kernel = ConstantKernel(float(np.exp(2.0 * hyper["log_scale"])), "fixed") * RBF(
        np.exp(hyper["log_length"]), "fixed"
    )
    queries = _queries(kernel)
    is_pool = ~np.asarray(setting.test)
    seconds: dict[str, list[float]] = {name: [] for name in (*_OWN, *queries)}
    areas: dict[str, list[float]] = {name: [] for name in seconds}
    for number in range(repeats + 1):  # the first compiles, and counts for nothing
        key_data, key = random.split(random.key(number))
        data = setting.data(key_data)
        for name, times in seconds.items():
            found: list[float] = []
            is_risk = name in ("one-step risk", "MonteCarloEER")
            score = _OWN[name] if name in _OWN else _as_score(queries[name], data["x"], is_pool, found)
            labels = _NUM_RISKS if is_risk else _NUM_LABELS
            engine = EP(classifier, hyper_values=hyper, progress_bar=False)
            compared = compare_acquisitions(
                engine,
                key,
                data,
                {name: score},
                num_labels=labels,
                num_repeats=1,
                test=setting.test,
                show_progress=False,
            )
            if number == 0:
                continue
            # of ours with the fit of the new label and its judgement
            times.append(float(np.mean(found)) if found else float(compared["seconds"].values[0, 0]) / labels)
            areas[name].append(float("nan") if is_risk else 100.0 * float(compared["area"].values[0, 0]))

    def row(name: str) -> Iterable[Any]:
        mine = "one-step risk" if name in ("one-step risk", "MonteCarloEER") else "information"
        area, gap = np.array(areas[name]), np.array(areas["information"]) - np.array(areas[name])
        less = mean_and_error(gap, "+") if name != "information" and np.isfinite(gap).all() else ""
        ratio = np.median(seconds[mine]) / np.median(seconds[name])
        shown = "" if np.isnan(area).all() else f"{area.mean():.1f}"
        return name, f"{np.median(seconds[name]):.4f}", f"{ratio:.3f}", shown, less

    lines = blocks(
        "# Beside scikit-activeml",
        f"Noisy Block, pool of {int(is_pool.sum())}, {repeats} repeats: seconds for a query (of ours with the fit "
        f"of its label), and the mean over {_NUM_LABELS} labels of the geometric mean of test probabilities, in per "
        "cent, by one Gaussian process for all. The strategies are those of scikit-activeml: a committee of "
        f"{_NUM_MEMBERS} of scikit-learn's Gaussian processes with the same kernel by bootstrap, and with Parzen "
        "windows, since they take no such process, the uncertainty and the reduction of the expected error. This, like "
        f"our risk, is asked {_NUM_RISKS} times.",
        table("strategy | seconds | ours over it | area | information less", map(row, seconds)),
    )
    write_report("activeml", lines)


if __name__ == "__main__":
    main()
