"""Acquisitions side by side: the same pools, first labels and test observations for each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import Array, random

from ..infer.front.answers.joint_arguments import bound_arguments
from ..infer.front.engine import BaseEngine, check_at_least
from ..infer.front.running.progress import progress_bar, warn
from .outlooks import Outlook
from .scores import Acquisition, expected_information_gain, predictive_entropy, random_scores
from .sequential import SequentialDesign
from .sources import outlooks

__all__ = ["compare_acquisitions"]

DEFAULT: Mapping[str, Acquisition] = {
    "expected information gain": expected_information_gain,
    "predictive entropy": predictive_entropy,
    "random": random_scores,
}


def compare_acquisitions(
    engine: BaseEngine[Any],
    rng_key: Array,
    data: Mapping[str, Any] | Callable[[Array], Mapping[str, Any]],
    acquisitions: Mapping[str, Acquisition] = DEFAULT,
    *,
    num_labels: int = 30,
    num_initial: int = 5,
    num_repeats: int = 10,
    test: float | Any = 0.5,
    observations: str = "y",
    mask: str = "labelled",
    show_progress: bool = True,
) -> Any:
    """Learning curves of acquisitions on pools of labelled data.

    In each repeat the observations are parted at random into a pool and test observations, some of the pool are
    labelled at first, and each acquisition then asks for labels one by one (Houlsby 2014, section 3.2.1). All start
    from the same fit. The score is the geometric mean of the predictive probabilities of the test observations; of real
    numbers that of their densities.

    Cost: ``num_repeats * len(acquisitions) * num_labels`` acquisitions, of some milliseconds each for engines on
    Gaussian fields.

    >>> import jax.numpy as jnp
    >>> import numpyro
    >>> import numpyro.distributions as dist
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
    :param acquisitions: scores by the names under which they are shown.
    :param int num_labels: that are asked for, beside the first ones.
    :param int num_initial: of the pool that are labelled at first, at random.
    :param int num_repeats: partings.
    :param test: the share of observations that are left for the test, or booleans for which they are.
    :param str observations: the argument with the labels.
    :param str mask: the argument that says which are observed.
    :param bool show_progress: whether to show a bar.
    :return: an ``xarray.Dataset`` with ``score`` over acquisition, repeat and number of observations, ``area`` (the
        mean of each curve) and ``seconds`` for each acquisition and repeat. Where Ctrl-C ended it, what was not done is
        nan.
    :raises ValueError: if arguments are missing or too few observations are left, with what to change.
    """
    import xarray

    check_at_least(1, num_labels=num_labels, num_initial=num_initial, num_repeats=num_repeats)
    if not acquisitions:
        raise ValueError("acquisitions names no score.")
    names = list(acquisitions)
    score = np.full((len(names), num_repeats, num_labels + 1), np.nan)
    seconds = np.full((len(names), num_repeats), np.nan)
    try:
        with progress_bar(num_repeats * len(names), "compare_acquisitions", enabled=show_progress) as bar:
            for repeat, key in enumerate(random.split(rng_key, num_repeats)):
                key_data, key_parts, key_ask = random.split(key, 3)
                arguments = dict(data(key_data) if callable(data) else data)
                is_test, first = _parted(arguments, observations, mask, test, num_initial, num_labels, key_parts)
                args, kwargs = _call(engine, arguments | {mask: first})
                engine.run(key, *args, **kwargs)
                labels = np.asarray(arguments[observations])
                # the same first fit for all
                start = engine._finished()
                for number, name in enumerate(names):
                    engine._with(start)
                    began = time.perf_counter()
                    score[number, repeat] = _curve(
                        SequentialDesign(engine, acquisitions[name], observations=observations, mask=mask),
                        labels,
                        is_test,
                        num_labels,
                        key_ask,
                    )
                    seconds[number, repeat] = time.perf_counter() - began
                    bar.update()
    except KeyboardInterrupt:
        done = int(np.isfinite(seconds).all(0).sum())
        warn(f"compare_acquisitions: interrupted after {done} of {num_repeats} repeats; the others are nan.")
    return xarray.Dataset(
        {
            "score": (("acquisition", "repeat", "num_observed"), score),
            "area": (("acquisition", "repeat"), score.mean(-1)),
            "seconds": (("acquisition", "repeat"), seconds),
        },
        coords={"acquisition": names, "num_observed": num_initial + np.arange(num_labels + 1)},
    )


def _parted(
    arguments: Mapping[str, Any],
    observations: str,
    mask: str,
    test: Any,
    num_initial: int,
    num_labels: int,
    rng_key: Array,
) -> tuple[np.ndarray, np.ndarray]:
    """Which observations are for the test, and which are labelled at first."""
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
    if len(pool) < num_initial + num_labels or not is_test.any():
        raise ValueError(
            f"Of {size} observations {int(is_test.sum())} are for the test and {len(pool)} in the pool, too few for "
            f"{num_initial} first and {num_labels} further labels: change test=, num_initial= or num_labels=."
        )
    first = np.zeros(size, bool)
    first[pool[:num_initial]] = True
    return is_test.reshape(shape), first.reshape(shape)


def _call(engine: BaseEngine[Any], arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _, call = bound_arguments(engine.model, (), arguments)
    return call(arguments)


def _curve(
    design: SequentialDesign, labels: np.ndarray, is_test: np.ndarray, num_labels: int, rng_key: Array
) -> np.ndarray:
    """The test score before each label and after the last."""
    flat = labels.reshape(-1)
    tested = np.flatnonzero(is_test.reshape(-1))

    def score() -> float:
        (outlook,) = _outlooks_of(design).values()
        return float(np.exp(np.mean(outlook.log_predictive(tested, flat[tested]))))

    found = [score()]
    for step in range(num_labels):
        place = design.propose(jax.random.fold_in(rng_key, step), exclude=is_test)
        design.observe(place, labels[place])
        found.append(score())
    return np.array(found)


def _outlooks_of(design: SequentialDesign) -> dict[str, Outlook]:
    found = outlooks(design.source)
    if len(found) != 1:
        raise ValueError(f"Protocols are for models with one observed site; this one has {sorted(found)}.")
    return found
