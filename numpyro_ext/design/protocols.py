"""Acquisitions side by side: the same pools, first labels and test observations for each of them."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, random

from ..infer.front.engine import AnyEngine, BaseEngine
from ..infer.front.options import check_at_least, check_kind
from ..infer.front.running.progress import progress_bar, warn
from ..structure.model.running.execution import bound_arguments, check_key
from .outcomes.outlooks import Outlook
from .outcomes.sources import outlooks
from .scores.pointwise import Acquisition, expected_information_gain, predictive_entropy, random_scores
from .sequential import SequentialDesign

DEFAULT: Mapping[str, Acquisition] = {
    "expected information gain": expected_information_gain,
    "predictive entropy": predictive_entropy,
    "random": random_scores,
}


class Phase(NamedTuple):
    """A part of a protocol: labels asked for in a pool of its own.

    >>> from functools import partial
    >>> from numpyro_ext.design import Phase, expected_information_gain, predictive_entropy
    >>> phases = [Phase(50, learns=True), Phase(50)]
    >>> about_length = partial(expected_information_gain, focus="length", hyper="mgp")
    >>> acquisitions = {"length, then field": [about_length, predictive_entropy], "entropy": predictive_entropy}
    """

    num_labels: int = 30
    """Number of labels that are asked for, beside the first ones."""
    learns: bool = False
    """True if the engine runs after each label, so that hyperparameters are learned anew. Otherwise they stay where
    the phase before has left them, or in the first phase where the first labels put them."""
    keeps: bool = False
    """True if the labels of the phases before stay in the fit."""
    share: float = 1.0
    """Share of the pool, relative to those of the other phases."""


def compare_acquisitions(
    engine: BaseEngine[Any],
    rng_key: Array,
    data: Mapping[str, object] | Callable[[Array], Mapping[str, object]],
    acquisitions: Mapping[str, Acquisition | Sequence[Acquisition]] = DEFAULT,
    *,
    phases: Sequence[Phase] | None = None,
    num_labels: int = 30,
    num_initial: int = 5,
    num_repeats: int = 10,
    test: float | object = 0.5,
    observations: str = "y",
    mask: str = "labelled",
    show_progress: bool = True,
) -> Any:
    """Learning curves of acquisitions on pools of labelled data.

    In each repeat the observations are parted at random into a pool and test observations, some of the pool are
    labelled at first, and each acquisition then asks for labels one by one (Houlsby 2014, section 3.2.1). All start
    from the same fit. The score is the geometric mean of the predictive probabilities of the test observations; of real
    numbers that of their densities. The error is the share of test observations that are not what was held for
    likeliest; of real numbers the root mean square of their distance from the predictive mean.

    Cost: ``num_repeats * len(acquisitions) * num_labels`` acquisitions, of some milliseconds each for engines on
    Gaussian fields.

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
    >>> from jax import random
    >>> from jax.scipy.stats import norm
    >>> from numpyro_ext.design import compare_acquisitions
    >>> from numpyro_ext.infer import EP
    >>> def model(x, y=None, labelled=True):
    ...     slope = numpyro.sample("slope", dist.Normal(0, 3).expand([2]).to_event(1))
    ...     with numpyro.handlers.mask(mask=labelled):
    ...         numpyro.sample("y", dist.Bernoulli(probs=norm.cdf(x @ slope)), obs=y)
    >>> x = random.normal(random.key(0), (60, 2))
    >>> data = {"x": x, "y": (x[:, 0] > x[:, 1]).astype(int)}
    >>> curves = compare_acquisitions(EP(model), random.key(1), data, num_labels=5, num_repeats=2)
    >>> print(dict(curves["score"].sizes))
    {'acquisition': 3, 'repeat': 2, 'num_observed': 6}

    :param engine: before its run; it is left as it is after the last repeat.
    :param rng_key: random number generator key of the parting, the first labels and ties.
    :param data: arguments of the model by name, with all labels; or a function of a key that makes them, for a new data
        set in each repeat.
    :param acquisitions: scores by the names under which they are shown; where phases differ, sequences of one for each.
    :param phases: parts with pools of their own, one after the other, in the place of ``num_labels``: hyperparameters
        may be learned from the labels of one, and held where another asks for those of the field (Houlsby 2014, section
        3.3.3).
    :param int num_labels: that are asked for, beside the first ones.
    :param int num_initial: of the pool that are labelled at first, at random; in each phase.
    :param int num_repeats: partings.
    :param test: the share of observations that are left for the test, or booleans for which they are.
    :param str observations: the argument with the labels.
    :param str mask: the argument that says which are observed.
    :param bool show_progress: whether to show a bar.
    :return: an ``xarray.Dataset`` with ``score`` and ``error`` over acquisition, repeat and number of observations,
        ``area`` (the mean of each curve of scores, of the last phase) and ``seconds`` for each acquisition and repeat.
        With phases, the curves are over ``step``, of which ``phase`` and ``num_observed`` are coordinates. Where Ctrl-C
        ended it, what was not done is nan.
    :raises ValueError: if arguments are missing or too few observations are left, with what to change.
    """
    import xarray

    check_key(rng_key, "compare_acquisitions(engine, jax.random.key(0), data)")
    check_at_least(1, num_labels=num_labels, num_initial=num_initial, num_repeats=num_repeats)
    check_kind("compare_acquisitions", engine, BaseEngine, "an engine")
    _check_arguments(engine, observations=observations, mask=mask)
    if not acquisitions:
        raise ValueError("acquisitions names no score.")
    if phases is not None and not len(phases):
        raise ValueError("phases names none.")
    parts = [Phase(num_labels)] if phases is None else [Phase(*phase) for phase in phases]
    plans = {name: _plan(name, scores, parts) for name, scores in acquisitions.items()}
    numbers = _numbers(parts, num_initial)
    curves = np.full((2, len(plans), num_repeats, sum(map(len, numbers))), np.nan)
    seconds = np.full((len(plans), num_repeats), np.nan)
    try:
        with progress_bar(num_repeats * len(plans), "compare_acquisitions", enabled=show_progress) as bar:
            for repeat, key in enumerate(random.split(rng_key, num_repeats)):
                key_data, key_parts, key_ask = random.split(key, 3)
                arguments = dict(data(key_data) if callable(data) else data)
                pools = _parted(arguments, observations, mask, test, num_initial, parts, key_parts)
                protocol = _Protocol(engine, arguments, pools, observations, mask, key, key_ask)
                # the same first fit for all
                start = protocol.fit(engine, pools.first[0])
                for number, plan in enumerate(plans.values()):
                    engine._with(start)
                    began = time.perf_counter()
                    curves[:, number, repeat] = protocol.curves(plan, parts)
                    seconds[number, repeat] = time.perf_counter() - began
                    bar.update()
    except KeyboardInterrupt:
        done = int(np.isfinite(seconds).all(0).sum())
        warn(f"compare_acquisitions: interrupted after {done} of {num_repeats} repeats; the others are nan.")
    axis = "num_observed" if phases is None else "step"
    score, error = curves
    coords: dict[str, Any] = {"acquisition": list(plans), "num_observed": (axis, np.concatenate(numbers))}
    if phases is not None:
        coords["phase"] = (axis, np.repeat(np.arange(len(parts)), [len(part) for part in numbers]))
    return xarray.Dataset(
        {
            "score": (("acquisition", "repeat", axis), score),
            "error": (("acquisition", "repeat", axis), error),
            "area": (("acquisition", "repeat"), score[..., -len(numbers[-1]) :].mean(-1)),
            "seconds": (("acquisition", "repeat"), seconds),
        },
        coords=coords,
    )


def _check_arguments(engine: AnyEngine, **names: str) -> None:
    parameters = inspect.signature(engine.model).parameters
    if any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for option, name in names.items():
        if name not in parameters:
            raise ValueError(f"The arguments of the model are {list(parameters)}: {option}={name!r} is none of them.")


def _plan(name: str, scores: Any, parts: Sequence[Phase]) -> list[Acquisition]:
    """The score of each phase."""
    plan = [scores] * len(parts) if callable(scores) else list(scores)
    if len(plan) != len(parts) or not all(callable(score) for score in plan):
        raise ValueError(f"There are {len(parts)} phases, and acquisition {name!r} needs a score for each of them.")
    return plan


def _numbers(parts: Sequence[Phase], num_initial: int) -> list[np.ndarray]:
    """Observations in the fit, step by step of each phase."""
    out: list[np.ndarray] = []
    for phase in parts:
        check_at_least(1, num_labels=phase.num_labels)
        if not phase.share > 0.0:
            raise ValueError(f"The share of a phase must be positive, not {phase.share!r}.")
        before = int(out[-1][-1]) if out and phase.keeps else 0
        out.append(before + num_initial + np.arange(phase.num_labels + 1))
    return out


class _Pools(NamedTuple):
    """Observations of the test, and for each phase those in its pool and those labelled at first."""

    is_test: np.ndarray
    members: list[np.ndarray]
    first: list[np.ndarray]


class _Protocol(NamedTuple):
    """One repeat."""

    engine: BaseEngine[Any]
    arguments: Mapping[str, Any]
    pools: _Pools
    observations: str
    mask: str
    key: Array
    key_ask: Array

    def fit(self, engine: BaseEngine[Any], seen: np.ndarray) -> Any:
        """The run of an engine on some of the labels."""
        args, kwargs = _call(engine, {**self.arguments, self.mask: seen})
        engine.run(self.key, *args, **kwargs)
        return engine._finished()

    def curves(self, plan: Sequence[Acquisition], parts: Sequence[Phase]) -> np.ndarray:
        """Score and error in the test at each step, ``(2, steps)``, from the first fit on, which the engine has."""
        labels, engine, curves = np.asarray(self.arguments[self.observations]), self.engine, []
        seen = self.pools.first[0]
        for number, (score, phase) in enumerate(zip(plan, parts, strict=True)):
            if number:
                hyper = engine._finished().fit.hyper
                engine = copy.copy(self.engine)
                if not phase.learns and hyper:
                    engine.hyper_values = dict(hyper)
                seen = self.pools.first[number] | (seen if phase.keeps else False)
                self.fit(engine, seen)
            refit_every = 1 if phase.learns else None
            design = SequentialDesign(
                engine, score, observations=self.observations, mask=self.mask, refit_every=refit_every
            )
            key = self.key_ask if number == 0 else jax.random.fold_in(self.key_ask, number)
            found = _curve(design, labels, self.pools.is_test, self.pools.members[number], phase.num_labels, key)
            curves.append(found)
            seen = np.zeros(labels.size, bool)
            seen[design.observed_places()] = True
            seen = seen.reshape(labels.shape)
        return np.concatenate(curves, axis=1)


def _parted(
    arguments: Mapping[str, Any],
    observations: str,
    mask: str,
    test: Any,
    num_initial: int,
    parts: Sequence[Phase],
    rng_key: Array,
) -> _Pools:
    if observations not in arguments:
        raise ValueError(
            f"data has no {observations!r}, but {sorted(arguments)}: name the argument with the labels by "
            "observations=."
        )
    if mask in arguments:
        raise ValueError(f"data has {mask!r}, which says what is observed: leave it out, it is made here.")
    shape = np.shape(arguments[observations])
    size = int(np.prod(shape))
    order = np.asarray(random.permutation(rng_key, size))
    is_test = np.zeros(size, bool)
    if np.ndim(test):
        is_test = np.asarray(test, bool).reshape(-1).copy()
        if is_test.size != size:
            raise ValueError(f"test has the shape {np.shape(test)}, and the labels {shape}.")
    else:
        is_test[order[: round(float(test) * size)]] = True
    pool = order[~is_test[order]]
    ends = np.cumsum([phase.share for phase in parts])
    pools = np.split(pool, np.round(len(pool) * ends[:-1] / ends[-1]).astype(int))
    members, first = np.zeros((2, len(parts), size), bool)
    for number, (part, phase) in enumerate(zip(pools, parts, strict=True)):
        if len(part) < num_initial + phase.num_labels or not is_test.any():
            raise ValueError(
                f"Of {size} observations {int(is_test.sum())} are for the test and {len(part)} in the pool, too few "
                f"for {num_initial} first and {phase.num_labels} further labels: change test=, num_initial= or "
                "num_labels=."
            )
        members[number, part], first[number, part[:num_initial]] = True, True
    return _Pools(is_test.reshape(shape), [m.reshape(shape) for m in members], [f.reshape(shape) for f in first])


def _call(engine: BaseEngine[Any], arguments: Mapping[str, object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _, call = bound_arguments(engine.model, (), arguments)
    return call(arguments)


def _curve(
    design: SequentialDesign,
    labels: np.ndarray,
    is_test: np.ndarray,
    is_member: np.ndarray,
    num_labels: int,
    rng_key: Array,
) -> np.ndarray:
    """Score and error in the test before each label and after the last."""
    flat = labels.reshape(-1)
    tested = np.flatnonzero(is_test.reshape(-1))

    def score() -> tuple[float, float]:
        (outlook,) = _outlooks_of(design).values()
        log_predictive = outlook.log_predictive(tested, flat[tested])
        return float(np.exp(np.mean(log_predictive))), outlook.error(tested, flat[tested])

    found = [score()]
    for step in range(num_labels):
        place = design.propose(jax.random.fold_in(rng_key, step), exclude=~is_member)
        design.observe(place, labels[place])
        found.append(score())
    return np.array(found).T


def _outlooks_of(design: SequentialDesign) -> dict[str, Outlook]:
    found = outlooks(design.source)
    if len(found) != 1:
        raise ValueError(f"Protocols are for models with one observed site; this one has {sorted(found)}.")
    return found
