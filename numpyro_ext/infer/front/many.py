"""The fits of one engine to many data sets."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import jax
import numpy as np
from jax import Array

from ...structure.model.running.execution import check_key
from .columns import is_table
from .running.chunks import Interruption
from .running.progress import progress_bar, warn

_Engine = TypeVar("_Engine", bound=Any)
_MOST_NAMED = 5


class Dataset(NamedTuple):
    """The arguments of the model for one of the fits, and its random key."""

    rng_key: Array
    args: tuple[object, ...]
    kwargs: dict[str, object]


def as_datasets(rng_key: Array, datasets: Sequence[object], shared: Mapping[str, object]) -> list[Dataset]:
    """Arguments as a person gives them, with a key for each.

    :param datasets: tuples of arguments, dictionaries of keyword arguments, or single arguments.
    :param shared: keyword arguments of all.
    :raises ValueError: if there are none.
    :raises TypeError: if one of them gives what is shared, the key is none, or a table or dictionary is no list.
    """
    check_key(rng_key, "run_many(jax.random.key(0), datasets)")
    if isinstance(datasets, Mapping | str) or is_table(datasets) or type(datasets).__name__.endswith("GroupBy"):
        raise TypeError(
            f"run_many takes a list of data sets, and a {type(datasets).__name__} would be a list of its names: give "
            "[data[name] for name in data], or for the rows of a table list(table.to_numpy())."
        )
    given = list(datasets)
    if not given:
        raise ValueError("There are no data sets to fit.")
    out = []
    for number, data in enumerate(given):
        own = dict(data) if isinstance(data, Mapping) else {}
        args = () if isinstance(data, Mapping) else data if isinstance(data, tuple) else (data,)
        twice = sorted(set(own) & set(shared))
        if twice:
            raise TypeError(f"datasets[{number}] has {', '.join(map(repr, twice))}, which is given for all as well.")
        out.append(Dataset(jax.random.fold_in(rng_key, number), tuple(args), {**shared, **own}))
    return out


class Fits(Sequence[_Engine]):
    """The outcome of :meth:`~numpyro_ext.infer.front.engine.BaseEngine.run_many`: ``fits[i]`` is an engine that has
    been run on data set ``i``; what follows has the data set as its first axis.

    :ivar errors: by the number of the data set, why it could not be fitted; its rows below are ``nan``.
    """

    def __init__(self, engines: Sequence[_Engine], errors: Mapping[int, Exception]) -> None:
        self._engines = list(engines)
        self.errors = dict(errors)

    def __len__(self) -> int:
        return len(self._engines)

    @overload
    def __getitem__(self, index: int) -> _Engine: ...
    @overload
    def __getitem__(self, index: slice) -> list[_Engine]: ...
    def __getitem__(self, index: int | slice) -> _Engine | list[_Engine]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        error = self.errors.get(range(len(self))[index])
        if error is not None:
            raise error
        return self._engines[index]

    def __repr__(self) -> str:
        name = type(self._engines[0]).__name__
        return f"<{len(self)} fits of {name}, {int(self.converged.sum())} converged>"

    def _stacked(self, answer: Callable[[_Engine], object]) -> Any:
        """The answers of all, ``nan`` for those that have none."""
        known = [answer(engine) for number, engine in enumerate(self._engines) if number not in self.errors]
        blank = jax.tree.map(lambda x: np.full(np.shape(x), np.nan), known[0])
        answers = iter(known)
        rows = [blank if number in self.errors else next(answers) for number in range(len(self))]
        return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *rows)

    @property
    def converged(self) -> np.ndarray:
        """Mask of the fits that converged, shape ``(num_datasets,)``."""
        ended = [number not in self.errors for number in range(len(self))]
        return np.array([ok and engine.diagnostics.converged for ok, engine in zip(ended, self._engines, strict=True)])

    @property
    def log_evidence(self) -> np.ndarray:
        """Shape ``(num_datasets,)``."""
        return self._stacked(lambda engine: float(engine.log_evidence))

    @property
    def hyper(self) -> dict[str, np.ndarray]:
        """The values of the hyperparameters, by name, each of shape ``(num_datasets, ...)``."""
        return self._stacked(lambda engine: {n: h.value for n, h in engine.hyper.items()})

    @property
    def mean(self) -> dict[str, np.ndarray]:
        """Posterior means by site, each of shape ``(num_datasets, ...)``."""
        return self._stacked(lambda engine: {n: p.mean for n, p in engine.posterior.items()})

    @property
    def sd(self) -> dict[str, np.ndarray]:
        """Posterior standard deviations by site, each of shape ``(num_datasets, ...)``."""
        return self._stacked(lambda engine: {n: p.sd for n, p in engine.posterior.items()})

    def get_samples(self) -> dict[str, np.ndarray]:
        """Draws of every site, each of shape ``(num_datasets, num_samples, ...)``."""
        return self._stacked(lambda engine: engine.get_samples())


def collect_fits(engine: _Engine, datasets: Sequence[Dataset]) -> Fits[_Engine]:
    """Run an engine on each data set, and keep what has been finished when a person interrupts.

    :param engine: whose options the fits have.
    :param datasets: from :func:`as_datasets`.
    :raises KeyboardInterrupt: if interrupted before the first was finished.
    :raises Exception: that of the first data set, if none can be fitted.
    """
    engines: list[_Engine] = []
    errors: dict[int, Exception] = {}
    said: list[tuple[int, str]] = []
    name, total = type(engine).__name__, len(datasets)
    quiet = copy.copy(engine)
    quiet.progress_bar = False  # one bar for all
    with progress_bar(total, f"{name}, data sets", enabled=engine.progress_bar) as bar, Interruption() as interruption:
        try:
            for number, start in enumerate(quiet._start_many(datasets)):
                fitted = copy.copy(engine)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    try:
                        fitted._keep(start())
                    except (ValueError, RuntimeError, ArithmeticError) as error:
                        errors[number] = error
                said += [(number, str(warning.message)) for warning in caught]
                engines.append(fitted)
                bar.update()
                if interruption:
                    break
        except KeyboardInterrupt:
            if not engines:
                raise
    if len(errors) == len(engines):
        raise errors[0]
    if len(engines) < total:
        warn(f"Interrupted: {len(engines)} of {total} data sets were fitted.")
    said += [(number, f"{name} could not fit this: {error}") for number, error in errors.items()]
    for message in _grouped(said, total):
        warn(message)
    return Fits(engines, errors)


def _grouped(said: Sequence[tuple[int, str]], total: int) -> list[str]:
    """One message for all that differ in their numbers only."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for number, text in said:
        groups.setdefault(re.sub(r"[-+]?[\d.]+(e[-+]?\d+)?", "#", text), []).append((number, text))
    out = []
    for group in groups.values():
        numbers = list(dict.fromkeys(number for number, _ in group))
        names = ", ".join(map(str, numbers[:_MOST_NAMED])) + (", ..." if len(numbers) > _MOST_NAMED else "")
        out.append(f"{len(numbers)} of {total} data sets ({names}): {group[0][1]}")
    return out
