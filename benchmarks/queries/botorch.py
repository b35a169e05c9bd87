"""Beside BoTorch: ``python -m benchmarks.queries.botorch`` writes seconds of queries, and what the answers are worth.

Two of its acquisitions ask within the same protocol, as scores of :func:`~numpyro_ext.design.compare_acquisitions`, and
every choice is judged by the same model of this package: comparisons of items, and lengths of a Gaussian process.
Without BoTorch, which the extra ``benchmark`` has, nothing is measured. Ten minutes of one core.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_ext.design import Phase, compare_acquisitions, expected_information_gain, predictive_entropy, random_scores
from numpyro_ext.infer import EP

from ..harness import blocks, mean_and_error, table, write_report
from .phases import ABOUT_HYPER, SETTINGS, SIZE, regression

_NUM_ITEMS, _NUM_POOL, _NUM_TEST = 40, 200, 200
_LENGTH, _SCALE = 1.0, 2.0
_WARMUP, _NUM_DRAWS, _THINNING = 128, 128, 8
"""Settings of NUTS: a quarter of BoTorch's default for the warmup and half of it for the draws, as many kept."""


def comparisons(items: Any, first: Any, second: Any, y: Any = None, labelled: Any = True) -> None:
    """Comparisons of two items: noise of variance one on each of their utilities, as BoTorch has it."""
    squares = jnp.sum(jnp.square(items[:, None] - items), -1)
    covariance = _SCALE**2 * jnp.exp(-0.5 * squares / _LENGTH**2) + 1e-6 * jnp.eye(len(items))
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(items)), covariance))
    with handlers.mask(mask=labelled):
        numpyro.sample("y", dist.Bernoulli(probs=norm.cdf((f[first] - f[second]) / jnp.sqrt(2.0))), obs=y)


def _answers(rng_key: Any) -> dict[str, np.ndarray]:
    """Pairs of items whose utilities are a draw of the model; the pool first."""
    rng = np.random.default_rng(np.asarray(random.key_data(rng_key)))
    items = rng.uniform(-2.0, 2.0, (_NUM_ITEMS, 2))
    squares = np.sum(np.square(items[:, None] - items), -1)
    covariance = _SCALE**2 * np.exp(-0.5 * squares / _LENGTH**2) + 1e-6 * np.eye(_NUM_ITEMS)
    noisy = np.linalg.cholesky(covariance) @ rng.standard_normal(_NUM_ITEMS)
    first, second = np.array([rng.choice(_NUM_ITEMS, 2, replace=False) for _ in range(_NUM_POOL + _NUM_TEST)]).T
    y = noisy[first] - noisy[second] + np.sqrt(2.0) * rng.standard_normal(len(first)) > 0.0
    return {"items": items, "first": first, "second": second, "y": y.astype(int)}


def _pairwise(arguments: Mapping[str, Any], seen: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Utilities by ``PairwiseBayesianActiveLearningByDisagreement``, its process with the same kernel."""
    import torch
    from botorch.acquisition.preference import PairwiseBayesianActiveLearningByDisagreement
    from botorch.models.pairwise_gp import PairwiseGP
    from gpytorch.kernels import RBFKernel, ScaleKernel

    items, pairs = torch.tensor(arguments["items"]), np.stack([arguments["first"], arguments["second"]], -1)
    kernel = ScaleKernel(RBFKernel(dtype=torch.float64), dtype=torch.float64)
    kernel.base_kernel.lengthscale, kernel.outputscale = _LENGTH, _SCALE**2
    won = np.where(y[seen, None] == 1, pairs[seen], pairs[seen, ::-1])
    model = PairwiseGP(items, torch.tensor(won), covar_module=kernel)
    with torch.no_grad():
        found: np.ndarray = PairwiseBayesianActiveLearningByDisagreement(model)(items[torch.tensor(pairs)]).numpy()
    return found


def _fully_bayesian(arguments: Mapping[str, Any], seen: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Utilities by ``qBayesianActiveLearningByDisagreement``, its model that of its manual, by NUTS."""
    import torch
    from botorch.acquisition.bayesian_active_learning import qBayesianActiveLearningByDisagreement
    from botorch.fit import fit_fully_bayesian_model_nuts
    from botorch.models.fully_bayesian import SaasFullyBayesianSingleTaskGP

    x = torch.tensor(np.asarray(arguments["x"], float))
    model = SaasFullyBayesianSingleTaskGP(x[seen], torch.tensor(y[seen, None]))
    fit_fully_bayesian_model_nuts(
        model, warmup_steps=_WARMUP, num_samples=_NUM_DRAWS, thinning=_THINNING, disable_progbar=True
    )
    with torch.no_grad():
        found: np.ndarray = qBayesianActiveLearningByDisagreement(model)(x[:, None]).numpy()
    return found


_Query = Callable[[Mapping[str, Any], np.ndarray, np.ndarray], np.ndarray]


class _Task(NamedTuple):
    """Something to ask about, ours and theirs."""

    name: str
    about: str
    engine: Callable[[], Any]
    data: Callable[[Any], dict[str, np.ndarray]]
    test: Any
    phases: tuple[Phase, ...]
    ours: Callable[..., Any]
    peer: str
    query: _Query
    num_ours: int
    """Repeats at most; theirs are these, too."""


_TASKS = (
    _Task(
        "comparisons of items",
        f"{_NUM_ITEMS} items in the plane, {_NUM_POOL} pairs that may be asked, a known kernel; area: the geometric "
        "mean of test probabilities in per cent, averaged over the labels",
        lambda: EP(comparisons, progress_bar=False),
        _answers,
        np.arange(_NUM_POOL + _NUM_TEST) >= _NUM_POOL,
        (Phase(40),),
        expected_information_gain,
        "PairwiseBayesianActiveLearningByDisagreement",
        _pairwise,
        20,
    ),
    _Task(
        "lengths of a process",
        f"{SIZE} points of a process of two inputs, a third for the test; hyperparameters are learned anew with each "
        "label of the first half of the others, then held while labels of the second half, which alone are in the fit, "
        "are asked for by entropy; area: a hundred times the geometric mean of test densities, averaged over these",
        lambda: EP(regression, field=["f"], integrate="none", progress_bar=False),
        SETTINGS["GP, two inputs"].data,
        1.0 / 3.0,
        (Phase(10, learns=True), Phase(20)),
        ABOUT_HYPER,
        "qBayesianActiveLearningByDisagreement",
        _fully_bayesian,
        4,
    ),
)


def _as_score(query: _Query, data: Mapping[str, Any], seconds: list[float]) -> Callable[..., Any]:
    """An acquisition with the signature of a score, whose seconds are noted."""

    def score(source: Any, rng_key: Any = None, **_: Any) -> dict[str, np.ndarray]:
        candidates = expected_information_gain(source)["y"]  # what is seen is minus infinity
        seen = np.isneginf(np.asarray(candidates))
        started = time.perf_counter()
        utilities = query(data, seen, np.asarray(data["y"], float))
        seconds.append(time.perf_counter() - started)
        return {"y": np.where(seen, -np.inf, utilities)}

    return score


def _measured(task: _Task, repeats: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    seconds: dict[str, list[float]] = {name: [] for name in ("ours", task.peer, "at random")}
    areas: dict[str, list[float]] = {name: [] for name in seconds}
    for number in range(repeats + 1):  # the first compiles, and counts for nothing
        key_data, key = random.split(random.key(number))
        data = task.data(key_data)
        for name, times in seconds.items():
            found: list[float] = []
            theirs = partial(_as_score, task.query, data, found)
            score = {"ours": task.ours, "at random": random_scores}.get(name) or theirs()
            if number == 0 and name == task.peer:
                continue
            plan = {name: [score, *[predictive_entropy] * (len(task.phases) - 1)]}
            compared = compare_acquisitions(
                task.engine(), key, data, plan, phases=task.phases, num_repeats=1, test=task.test, show_progress=False
            )
            if number:
                # of ours with the fits of new labels and their judgement, in the second phase, too
                whole = float(compared["seconds"].values[0, 0]) / task.phases[0].num_labels
                times.append(float(np.mean(found)) if found else whole)
                areas[name].append(100.0 * float(compared["area"].values[0, 0]))
    return seconds, areas


def _section(task: _Task, repeats: int) -> list[str]:
    seconds, areas = _measured(task, repeats)

    def row(name: str) -> Iterable[Any]:
        ratio = float(np.median(seconds["ours"]) / np.median(seconds[name]))
        less = "" if name == "ours" else mean_and_error(np.array(areas["ours"]) - np.array(areas[name]), "+")
        return name, f"{np.median(seconds[name]):.4f}", f"{ratio:.3f}", f"{np.mean(areas[name]):.1f}", less

    return blocks(
        f"## {task.name[0].upper()}{task.name[1:]}",
        f"{task.about[0].upper()}{task.about[1:]}. {repeats} repeats of {task.phases[0].num_labels} labels.",
        table("acquisition | seconds | ours over it | area | ours less", map(row, seconds)),
    )


def main() -> None:
    """Ask, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[task.name for task in _TASKS])
    parser.add_argument("--repeats", type=int, default=None)
    arguments = parser.parse_args()
    if importlib.util.find_spec("botorch") is None:
        raise SystemExit(
            "Skipped: BoTorch is not installed here. `pip install botorch` installs it, and PyTorch with it; the "
            "benchmarks ask for no more of that than its build for CPUs."
        )
    import torch

    torch.set_num_threads(1)  # of small problems, which two threads only wait for each other over
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("botorch", "torch"))
    lines = blocks(
        "# Beside BoTorch",
        f"{versions}. Seconds for a query: of BoTorch, on one thread, those of its model and acquisition, of ours with "
        "the fit of the label, its judgement and all of a second phase. Every choice is judged by one model, ours.",
    )
    chosen = [task for task in _TASKS if arguments.only in (None, task.name)]
    sections = [_section(task, arguments.repeats or task.num_ours) for task in chosen]
    write_report("botorch", blocks(lines, *sections))


if __name__ == "__main__":
    main()
