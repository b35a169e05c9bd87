"""Beside scikit-activeml and BoTorch: seconds of queries, and what the answers are worth.

``python -m benchmarks.queries.peers WORK`` writes the tables; ``--only`` names tasks. Strategies of both ask within the
same protocol, as scores of :func:`~numpyro_ext.design.compare_acquisitions`, and every choice is judged by the same
model of this package. The extra ``benchmark`` has both libraries. A quarter of an hour of one core.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_ext.design import (
    Phase,
    compare_acquisitions,
    expected_information_gain,
    expected_risk,
    predictive_entropy,
    random_scores,
)
from numpyro_ext.infer import EP

from ..harness import Study, blocks, mean_and_error, table
from . import phases

_NUM_ITEMS, _NUM_POOL, _NUM_TEST = 40, 200, 200
_LENGTH, _SCALE = 1.0, 2.0
_WARMUP, _NUM_DRAWS, _THINNING = 128, 128, 8
"""Settings of NUTS: a quarter of BoTorch's default for the warmup and half of it for the draws, as many kept."""
_NUM_MEMBERS, _NUM_RISKS = 10, 3
_KERNEL = {"log_scale": np.log(3.0), "log_length": np.zeros(2)}
"""Hyperparameters of the noisy block, as round numbers: what is compared are the queries."""
_IN_TEST = np.arange(444) >= 194
_Query = Callable[[Mapping[str, Any], np.ndarray], np.ndarray]
"""From the data and the labels, which are nan where there is none, to utilities, which are nan where none is wanted."""


def classifier(x: Any, y: Any = None, labelled: Any = True, noise: float = 1e-6) -> None:
    """A Gaussian process behind probit labels, with hyperparameters of its own."""
    # Of logarithms, so that their mode is not drawn to short lengths, where no point tells of another.
    log_scale = numpyro.sample("log_scale", dist.Normal(1.0, 1.0))
    center = 0.5 + 0.5 * np.log(x.shape[1])
    log_length = numpyro.sample("log_length", dist.Normal(center, 1.0).expand([x.shape[1]]).to_event(1))
    z = x / jnp.exp(log_length)
    squares = jnp.maximum(jnp.sum(z**2, 1)[:, None] + jnp.sum(z**2, 1) - 2.0 * z @ z.T, 0.0)
    covariance = jnp.exp(2.0 * log_scale) * (jnp.exp(-0.5 * squares) + noise * jnp.eye(len(x)))
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(x)), covariance))
    with handlers.mask(mask=labelled):
        numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(f)), obs=y)


def _noisy_block(rng_key: Any) -> dict[str, np.ndarray]:
    """Two classes to the left and right, and a block of noise between them (Houlsby 2014); the pool first."""
    rng = np.random.default_rng(np.asarray(random.key_data(rng_key)))
    xs, ys = [], []
    for clean, block in ((114, 80), (225, 25)):
        x = rng.uniform(-3.0, 3.0, (6 * clean, 2))
        x = x[np.abs(x[:, 0]) >= 0.4][:clean]
        xs += [x, rng.uniform(-0.4, 0.4, (block, 2))]
        ys += [x[:, 0] > 0.0, rng.integers(0, 2, block)]
    return {"x": np.concatenate(xs), "y": np.concatenate(ys).astype(int)}


def _on_block(ask: Callable[[np.ndarray, np.ndarray, Any, int], Any]) -> _Query:
    """A query on the pool of the noisy block, with a maker of Gaussian processes of its kernel and a seed."""

    def query(data: Mapping[str, Any], labels: np.ndarray) -> np.ndarray:
        from skactiveml.classifier import SklearnClassifier
        from sklearn.gaussian_process import GaussianProcessClassifier
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel

        scale = ConstantKernel(float(np.exp(2.0 * _KERNEL["log_scale"])), "fixed")
        kernel = scale * RBF(np.exp(_KERNEL["log_length"]), "fixed")

        def process(seed: int) -> Any:
            found = GaussianProcessClassifier(kernel, optimizer=None)
            return SklearnClassifier(found, classes=[0, 1], random_state=seed)

        is_pool, utilities = ~_IN_TEST, np.full(len(labels), np.nan)
        seed = int(np.isfinite(labels).sum())
        utilities[is_pool] = ask(data["x"][is_pool], labels[is_pool], process, seed)
        return utilities

    return query


def _committee(x: np.ndarray, y: np.ndarray, process: Any, seed: int) -> Any:
    """Members by bootstrap, as the manual of scikit-activeml has it."""
    from skactiveml.pool import QueryByCommittee

    rng, seen, members = np.random.default_rng(seed), np.flatnonzero(~np.isnan(y)), []
    for member in range(_NUM_MEMBERS):
        chosen = rng.choice(seen, len(seen))
        members.append(process(member).fit(x[chosen], y[chosen]))
    strategy = QueryByCommittee(method="KL_divergence", random_state=seed)
    return strategy.query(x, y, ensemble=members, fit_ensemble=False, return_utilities=True)[1][0]


def _with_windows(x: np.ndarray, y: np.ndarray, process: Any, seed: int, *, name: str, **options: Any) -> Any:
    """With Parzen windows: the wrapper of scikit-learn's process takes no weights, which strategies hand on."""
    from skactiveml import pool
    from skactiveml.classifier import ParzenWindowClassifier

    strategy = getattr(pool, name)(random_state=seed, **options)
    return strategy.query(x, y, clf=ParzenWindowClassifier(classes=[0, 1]), return_utilities=True)[1][0]


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


def _pairwise(data: Mapping[str, Any], labels: np.ndarray) -> np.ndarray:
    """Utilities by ``PairwiseBayesianActiveLearningByDisagreement``, its process with the same kernel."""
    import torch
    from botorch.acquisition.preference import PairwiseBayesianActiveLearningByDisagreement
    from botorch.models.pairwise_gp import PairwiseGP
    from gpytorch.kernels import RBFKernel, ScaleKernel

    torch.set_num_threads(1)  # of small problems, which two threads only wait for each other over
    items, pairs = torch.tensor(data["items"]), np.stack([data["first"], data["second"]], -1)
    kernel = ScaleKernel(RBFKernel(dtype=torch.float64), dtype=torch.float64)
    kernel.base_kernel.lengthscale, kernel.outputscale = _LENGTH, _SCALE**2
    seen = np.isfinite(labels)
    won = np.where(labels[seen, None] == 1, pairs[seen], pairs[seen, ::-1])
    model = PairwiseGP(items, torch.tensor(won), covar_module=kernel)
    with torch.no_grad():
        found: np.ndarray = PairwiseBayesianActiveLearningByDisagreement(model)(items[torch.tensor(pairs)]).numpy()
    return found


def _fully_bayesian(data: Mapping[str, Any], labels: np.ndarray) -> np.ndarray:
    """Utilities by ``qBayesianActiveLearningByDisagreement``, its model that of its manual, by NUTS."""
    import torch
    from botorch.acquisition.bayesian_active_learning import qBayesianActiveLearningByDisagreement
    from botorch.fit import fit_fully_bayesian_model_nuts
    from botorch.models.fully_bayesian import SaasFullyBayesianSingleTaskGP

    torch.set_num_threads(1)
    x, seen = torch.tensor(np.asarray(data["x"], float)), np.isfinite(labels)
    model = SaasFullyBayesianSingleTaskGP(x[seen], torch.tensor(labels[seen, None]))
    fit_fully_bayesian_model_nuts(
        model, warmup_steps=_WARMUP, num_samples=_NUM_DRAWS, thinning=_THINNING, disable_progbar=True
    )
    with torch.no_grad():
        found: np.ndarray = qBayesianActiveLearningByDisagreement(model)(x[:, None]).numpy()
    return found


class _Task(NamedTuple):
    """Something to ask about, by scores of this package and by queries of others."""

    about: str
    engine: Callable[[], Any]
    data: Callable[[Any], dict[str, np.ndarray]]
    test: Any
    phases: tuple[Phase, ...]
    ours: Mapping[str, Callable[..., Any]]
    """The first is what others are compared with."""
    peers: Mapping[str, _Query]
    num_repeats: int
    few: Mapping[str, str] = {}
    """Strategies that are asked a few times alone, and with whose seconds theirs are compared."""


_PARZEN, _RISK = "EpistemicUncertaintySampling", "one-step risk"
TASKS = {
    "labels of the noisy block": _Task(
        "the strategies of scikit-activeml are a committee of scikit-learn's Gaussian processes with the same kernel "
        "by bootstrap, and with Parzen windows, since they take no such process, the uncertainty and the reduction of "
        f"the expected error; this, like our risk, is asked {_NUM_RISKS} times; area: the geometric mean of test "
        "probabilities in per cent, averaged over the labels",
        lambda: EP(classifier, hyper_values=_KERNEL, progress_bar=False),
        _noisy_block,
        _IN_TEST,
        (Phase(40),),
        {"information": expected_information_gain, _RISK: expected_risk},
        {
            "QueryByCommittee": _on_block(_committee),
            _PARZEN: _on_block(partial(_with_windows, name=_PARZEN)),
            "MonteCarloEER": _on_block(partial(_with_windows, name="MonteCarloEER", method="misclassification_loss")),
        },
        3,
        {_RISK: _RISK, "MonteCarloEER": _RISK},
    ),
    "comparisons of items": _Task(
        f"{_NUM_ITEMS} items in the plane, {_NUM_POOL} pairs that may be asked, a known kernel; area: the geometric "
        "mean of test probabilities in per cent, averaged over the labels",
        lambda: EP(comparisons, progress_bar=False),
        _answers,
        np.arange(_NUM_POOL + _NUM_TEST) >= _NUM_POOL,
        (Phase(40),),
        {"ours": expected_information_gain, "at random": random_scores},
        {"PairwiseBayesianActiveLearningByDisagreement": _pairwise},
        20,
    ),
    "lengths of a process": _Task(
        f"{phases.SIZE} points of a process of two inputs, a third for the test; hyperparameters are learned anew with "
        "each label of the first half of the others, then held while labels of the second half, which alone are in "
        "the fit, are asked for by entropy; area: a hundred times the geometric mean of test densities, averaged over "
        "these",
        lambda: EP(phases.regression, field=["f"], integrate="none", progress_bar=False),
        phases.SETTINGS["GP, two inputs"].data,
        1.0 / 3.0,
        (Phase(10, learns=True), Phase(20)),
        {"ours": phases.ABOUT_HYPER, "at random": random_scores},
        {"qBayesianActiveLearningByDisagreement": _fully_bayesian},
        4,
    ),
}


def _as_score(query: _Query, data: Mapping[str, Any], seconds: list[float]) -> Callable[..., Any]:
    """A query with the signature of a score, whose seconds are noted."""

    def score(source: Any, rng_key: Any = None, **_: Any) -> dict[str, np.ndarray]:
        seen = np.isneginf(np.asarray(expected_information_gain(source)["y"]))  # so is what is seen, and no other
        labels = np.where(seen, np.asarray(data["y"], float), np.nan)
        started = time.perf_counter()
        utilities = query(data, labels)
        seconds.append(time.perf_counter() - started)
        return {"y": np.where(seen | np.isnan(utilities), -np.inf, utilities)}

    return score


def _asked(task: _Task, name: str, number: int) -> tuple[float, float | None]:
    """Seconds of a query, and the area; of ours with the fits of new labels and their judgement in all phases."""
    key_data, key = random.split(random.key(number))
    data, found = task.data(key_data), []
    score = task.ours[name] if name in task.ours else _as_score(task.peers[name], data, found)
    count = _NUM_RISKS if name in task.few else task.phases[0].num_labels
    parts = (task.phases[0]._replace(num_labels=count), *task.phases[1:])
    plan = {name: [score, *[predictive_entropy] * (len(parts) - 1)]}
    compared = compare_acquisitions(
        task.engine(), key, data, plan, phases=parts, num_repeats=1, test=task.test, show_progress=False
    )
    seconds = float(np.mean(found)) if found else float(compared["seconds"].values[0, 0]) / count
    return seconds, None if name in task.few else 100.0 * float(compared["area"].values[0, 0])


@functools.cache
def _compile(name: str) -> None:
    """Ask once by each of ours, which counts for nothing."""
    for ours in TASKS[name].ours:
        _asked(TASKS[name], ours, 0)


def ask(draw: int, name: str) -> dict[str, tuple[float, float | None]]:
    """Seconds and areas of all strategies."""
    task = TASKS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _compile(name)
        return {strategy: _asked(task, strategy, draw + 1) for strategy in (*task.ours, *task.peers)}


def _rows(task: _Task, draws: list[Any]) -> Iterator[Iterable[Any]]:
    best = next(iter(task.ours))
    for name in draws[0]:
        seconds = {other: np.median([draw[other][0] for draw in draws]) for other in (name, task.few.get(name, best))}
        ours, theirs = seconds[task.few.get(name, best)], seconds[name]
        areas = [] if name in task.few else [draw[name][1] for draw in draws]
        less = mean_and_error((draw[best][1] - draw[name][1] for draw in draws), "+") if areas and name != best else ""
        yield name, f"{theirs:.4f}", f"{ours / theirs:.3f}", f"{np.mean(areas):.1f}" if areas else "", less


def main() -> None:
    """Ask, and write the tables of what was asked."""
    draws = {name: task.num_repeats for name, task in TASKS.items()}
    study = Study(__doc__, {name: partial(ask, name=name) for name in TASKS}, draws=draws)
    parts = [
        blocks(
            f"## {name[0].upper()}{name[1:]}",
            f"{task.about[0].upper()}{task.about[1:]}. {len(found)} repeats of {task.phases[0].num_labels} labels.",
            table("strategy | seconds | ours over it | area | ours less", _rows(task, found)),
        )
        for (name, task), found in zip(TASKS.items(), study.run().values(), strict=True)
        if found
    ]
    lines = blocks(
        "# Active learning beside other libraries",
        "Seconds for a query: of others those of model and strategy (BoTorch on one thread), of ours with the fit of "
        "the label, its judgement and all of a second phase. Every choice is judged by one model, ours.",
        *parts,
    )
    study.write("activeml", lines)


if __name__ == "__main__":
    main()
