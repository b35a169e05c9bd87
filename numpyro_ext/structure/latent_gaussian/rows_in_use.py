"""A reading of which some rows alone are in use, whatever the masks of the model say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
