"""Data of a reading on other parts of the members of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..model.running.execution import ModelCall
from ..model.running.inspection import inspect_sites
from ..model.validation import check_data
from .reading import LatentGaussianReading


class PartsDiffer(Exception):
    """A model that does something else on one part of its members than on another."""


def data_of_parts(
    reading: LatentGaussianReading, calls: Iterable[ModelCall], init_values: Mapping[str, object]
) -> Iterator[Sequence[Any]]:
    """The data that forms of the reading have on parts of the members, one part after the other.

    :param LatentGaussianReading reading: of one of them.
    :param calls: recorded, on parts of the same size.
    :param init_values: of hyperparameters, as the reading has them.
    :raises PartsDiffer: where something that was looked up in the data of the reading is another.
    :raises ModelStructureError: for observations that are not finite or outside their support.
    """
    for call in calls:
        sites = inspect_sites(call, init_values)
        check_data(sites, True)
        found = reading.with_looked_up(call, sites, reading.looked_up)
        if found is None:
            raise PartsDiffer
        yield found.data
