"""Readings made of another one: with some rows alone in use, or with the data of other parts of the members."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..model.running.execution import ModelCall
from ..model.running.inspection import inspect_sites
from ..model.validation import check_data
from .form import LatentGaussian
from .reading import LatentGaussianReading


class ReadingOfRows(LatentGaussianReading):
    """A reading whose form has a factor in the rows that are named, and in no other.

    :param LatentGaussianReading reading: of the model.
    :param in_use: boolean, shape ``(num_rows,)``.
    """

    def __init__(self, reading: LatentGaussianReading, in_use: np.ndarray):
        vars(self).update(vars(reading))
        for computed in ("abstract_form", "structure"):
            vars(self).pop(computed, None)
        # Behind the constants and in front of the indices, where programs find it in other data as well.
        self.data = (*reading.data[:-1], in_use, reading.data[-1])

    def form(self, hyper: Mapping[str, object], data: Sequence[Any] | None = None) -> LatentGaussian:
        """The form at given hyperparameters; see :class:`LatentGaussianReading`."""
        form = super().form(hyper, data)
        in_use = (self.data if data is None else data)[-2]
        return form._replace(observed=form.split_rows(in_use))


class PartsDiffer(Exception):
    """A model that does something else on one part of its members than on another."""


def reading_of_part(
    reading: LatentGaussianReading, call: ModelCall, init_values: Mapping[str, object]
) -> LatentGaussianReading:
    """The reading of some members, made of that of others.

    :param LatentGaussianReading reading: of as many.
    :param ModelCall call: recorded.
    :param init_values: of hyperparameters, as the reading has them.
    :raises PartsDiffer: where something that was looked up in the data of the reading is another.
    :raises ModelStructureError: for observations that are not finite or outside their support.
    """
    sites = inspect_sites(call, init_values)
    check_data(sites, True)
    found = reading.with_looked_up(call, sites, reading.looked_up)
    if found is None:
        raise PartsDiffer
    return found


def data_of_parts(
    reading: LatentGaussianReading, calls: Iterable[ModelCall], init_values: Mapping[str, object]
) -> Iterator[Sequence[Any]]:
    """The data that forms of the reading have on parts of the members, one part after the other; as for
    :func:`reading_of_part`."""
    for call in calls:
        yield reading_of_part(reading, call, init_values).data
