"""The run that an engine answers for: none before the first, and none after one that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import jax

from ....compilation.disk_cache import keep_by_default
from ....structure.model.running.execution import check_key

_MOST_LETTERS = 200


_Run = TypeVar("_Run")


class LastRun(Generic[_Run]):
    """An engine whose answers are those of its last run: where that failed there are none, and they say so.

    Answers of the run before would be those of other data or other options, without a sign of it.
    """

    _run: _Run | None = None
    _failure: str | None = None

    @contextmanager
    def _running(self, rng_key: object, *arguments: object) -> Iterator[None]:
        """The context in which a run is made and kept.

        :param rng_key: of the run.
        :param arguments: of the model.
        :raises TypeError: if the key is none, or something has no value because it is traced by JAX.
        """
        self._run, self._failure = None, None
        try:
            check_key(rng_key)
            _check_is_known(type(self).__name__, (rng_key, arguments))
            keep_by_default()
            yield
        except BaseException as error:
            said = str(error)
            said = said if len(said) <= _MOST_LETTERS else f"{said[:_MOST_LETTERS]}..."
            self._failure = f"{type(error).__name__}: {said}" if said else type(error).__name__
            raise

    def _finished(self) -> _Run:
        if self._run is None:
            raise self._not_run()
        return self._run

    def _not_run(self) -> RuntimeError:
        name = type(self).__name__
        if self._failure is None:
            return RuntimeError(f"run(...) should be called first to obtain results from {name}.")
        return RuntimeError(f"The last run(...) of {name} failed and has no results. It said: {self._failure}")


def _check_is_known(name: str, arguments: object) -> None:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
        raise TypeError(
            f"{name}.run reads the model and decides by what it finds, so it cannot be called within "
            "jax.jit, vmap or grad, where arguments have no values. run_many fits many data sets in one compiled loop, "
            "marginalize(model) is differentiable in the hyperparameters, and engine.program(...), where an engine has "
            "it, is the engine as pure functions of arrays."
        )
