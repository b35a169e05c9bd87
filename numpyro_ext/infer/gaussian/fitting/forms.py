"""The compiled function from the hyperparameters and the data of a reading to its form."""

from __future__ import annotations

from collections.abc import Mapping

from ....compilation.quick_jit import quick_jit
from ....compilation.recent import Recent
from ....structure import LatentGaussianReading
from ....structure.latent_gaussian import LatentGaussian

__all__ = ["compiled_form"]

_FORMS = Recent(16)


def compiled_form(reading: LatentGaussianReading, hyper: Mapping[str, object]) -> LatentGaussian:
    """The form of a reading at given hyperparameters, by one compiled function instead of one for each operation.

    :param LatentGaussianReading reading: of the model.
    :param hyper: all hyperparameters, constrained.
    """
    form = _FORMS.get(reading.structure_key, lambda: quick_jit(reading.skeleton().form, is_small=True))
    found: LatentGaussian = form(hyper, reading.data)
    return found
