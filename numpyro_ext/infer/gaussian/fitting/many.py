"""Fits of many data sets: compiled loops over batches of data sets whose readings have one structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....compilation.quick_jit import quick_jit
from ....compilation.store import shared
from ....compilation.transfer import to_device
from ....structure import LatentGaussianReading, ModelReading, ModelStructureError, Reason
from ...front.many import Dataset
from ...front.running.chunks import Chunks
from ...hyper.search import SearchState
from ...hyper.space import UnconstrainedSpace
from .costs import FitCosts
from .fitting_programs import FittingPrograms

_LONGEST_TRACE = 500
"""Evaluations of a whole search whose objectives are kept; a search may make more."""
_MOST_ROWS = 30_000
"""Rows of all data sets of a batch: beyond, a fit takes so long that nothing is gained by fitting others beside it."""


class Begun(NamedTuple):
    """Part of a fit that was computed together with those of other data sets."""

    search: tuple[SearchState, np.ndarray] | None = None
    """For the hyperparameters, to its end, and its objectives."""
    solved: Chunks | None = None
    """The field, where there is nothing to learn."""
    runs_often: bool = False
    """True if the others are so many that programs for all of them are worth their optimisation."""


NOTHING_BEGUN = Begun()


def refuse(error: ModelStructureError) -> NoReturn:
    """Raise the error of a data set that cannot be read, in its turn."""
    raise error


def read_all(
    datasets: Sequence[Dataset], read: Callable[..., ModelReading]
) -> tuple[dict[int, LatentGaussianReading], dict[int, ModelStructureError]] | None:
    """The readings of data sets, and the errors of those that cannot be read, by their numbers.

    :param datasets: the data sets.
    :param read: reads the model on one of them, with a check of its density if asked for.
    :return: both; ``None`` where a model is no latent Gaussian one, which is seen at the first.
    :raises ModelStructureError: if no data set can be read.
    :raises ValueError: if answers have other shapes: saying which data set differs from the first, and in what.
    """
    readings: dict[int, LatentGaussianReading] = {}
    refused: dict[int, ModelStructureError] = {}
    for number, (rng_key, args, kwargs) in enumerate(datasets):
        try:
            # A fault of the structure shows on the first data set: the others have the same.
            reading = read(rng_key, args, kwargs, check=not readings)
        except ModelStructureError as error:
            told = ModelStructureError(f"datasets[{number}]: {error}", reason=error.reason, site=error.site)
            if error.reason is not Reason.DATA:  # no other data set can be read either
                raise told from error
            told.__cause__ = error
            refused[number] = told
            continue
        if not isinstance(reading, LatentGaussianReading):
            return None
        readings[number] = reading
    if not readings:
        raise refused[0]
    _check_alike(readings)
    return readings, refused


def _check_alike(readings: Mapping[int, LatentGaussianReading]) -> None:
    shapes = {number: _shapes(reading) for number, reading in readings.items()}
    first = next(iter(shapes))
    for number, other in shapes.items():
        for name in shapes[first] | other:
            here, there = (found.get(name, "not in it") for found in (shapes[first], other))
            if here != there:
                raise ValueError(
                    f"datasets[{number}] is not of the structure of datasets[{first}]: the shape of site {name!r} is "
                    f"{there} there and {here} here. Data sets of one call have equal shapes: pad the shorter ones "
                    "with masked observations, or make a call for each structure."
                )


def _shapes(reading: LatentGaussianReading) -> dict[str, tuple[int, ...]]:
    hyper = {name: tuple(site.shape) for name, site in reading.hyper.items()}
    factors = dict(zip(reading.factor_names, map(tuple, reading.factor_shapes), strict=True))
    return {name: tuple(shape) for name, shape in reading.site_shapes.items()} | hyper | factors


def begin_together(
    readings: Sequence[LatentGaussianReading],
    programs_of: Callable[[LatentGaussianReading, bool], FittingPrograms],
    space: UnconstrainedSpace,
    values: Sequence[Array],
    steps: int,
    costs: FitCosts,
) -> Iterator[Begun]:
    """Compute what takes long of the fits, batch by batch.

    :param readings: of the data sets. Those of one batch have one structure: where groups are independent of one
        another, the size of the largest is a part of it.
    :param programs_of: the compiled programs for a reading, and whether they run often.
    :param space: of the hyperparameters to learn.
    :param values: where the search of each starts, unconstrained.
    :param int steps: of a search at most, or of a solve where there is nothing to learn.
    :param FitCosts costs: with the number of data sets of a batch.
    :return: for each reading what was computed, in turn; nothing for models so large that batches do not pay.
    """
    num_rows = max(1, readings[0].abstract_form.num_rows)
    num_lanes = min(costs.most_lanes, len(readings), _MOST_ROWS // num_rows)
    runs_often = len(readings) >= costs.least_often
    if num_lanes < 2:
        yield from (Begun(runs_often=runs_often) for _ in readings)
        return
    waiting: dict[Any, list[int]] = {}
    for number, reading in enumerate(readings):
        waiting.setdefault(reading.structure, []).append(number)
    done: dict[int, Begun] = {}
    for number, reading in enumerate(readings):
        if number not in done:
            alike = waiting[reading.structure]
            batch, alike[:num_lanes] = alike[:num_lanes], []
            # A batch that is not full is filled up, so that one program serves all.
            lanes = batch + [number] * (num_lanes - len(batch))
            # By NumPy, which takes a tenth of the time for so small arrays.
            data = jax.tree.map(
                lambda *leaves: to_device(np.stack([np.asarray(leaf) for leaf in leaves])),
                *(readings[n].data for n in lanes),
            )
            programs = programs_of(reading, runs_often)
            if space.size:
                found = _searches(data, programs, space, jnp.stack([values[n] for n in lanes]), steps)
            else:
                found = _solves(data, programs, space, steps)
            done |= zip(batch, found, strict=False)
        yield done.pop(number)._replace(runs_often=runs_often)


def _searches(
    data: object, programs: FittingPrograms, space: UnconstrainedSpace, values: Array, steps: int
) -> list[Begun]:
    searches = shared(_compiled_searches, programs)
    found = _lanes(searches(data, space.fixed, values, max_iterations=steps))
    return [Begun(search=(search, trace[~np.isnan(trace)])) for search, trace in found]


def _solves(data: object, programs: FittingPrograms, space: UnconstrainedSpace, steps: int) -> list[Begun]:
    hyper, solves = space.unpack(jnp.zeros((0,))), shared(_compiled_solves, programs)
    out = []
    for state, info, objective in _lanes(solves(data, hyper, num_steps=steps)):
        taken = int(info.num_steps)
        out.append(Begun(solved=Chunks(state, info, float(objective), info.objective_trace[:taken], taken, [])))
    return out


def _compiled_searches(programs: FittingPrograms) -> Callable[..., tuple[SearchState, Array]]:
    """Whole searches and their objectives, for data and starting values of several data sets, stacked.

    One after the other: together, each would wait for the slowest, and conditions would compute both branches.
    """

    def searches(data: object, fixed: dict[str, Array], values: Array, *, max_iterations: int) -> Any:
        def one(inputs: tuple[object, Array]) -> tuple[SearchState, Array]:
            data, values = inputs
            start = programs.init_search(data, fixed, values, programs.first_state(data, fixed, values))
            return programs.whole_search(data, fixed, start, max_iterations, _LONGEST_TRACE)

        return jax.lax.map(one, (data, values))

    return quick_jit(searches, static_argnames="max_iterations")  # runs often, so that optimisation pays


def _compiled_solves(programs: FittingPrograms) -> Callable[..., tuple[Any, Any, Array]]:
    """Fits of the field from the start, for data of several data sets, stacked."""

    def solves(data: object, hyper: dict[str, Array], *, num_steps: int) -> Any:
        return jax.lax.map(lambda one: programs.fitted(one, hyper, None, num_steps=num_steps), data)

    return quick_jit(solves, static_argnames="num_steps")


def _lanes(stacked: object) -> list[Any]:
    """The trees that were stacked to one, in NumPy's memory."""
    stacked = jax.device_get(stacked)
    count = len(jax.tree.leaves(stacked)[0])
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(count)]
