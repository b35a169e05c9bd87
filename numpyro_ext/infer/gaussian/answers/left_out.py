"""Words on what the Gaussian of an algorithm leaves out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ....potentials.vector_rows import VectorRows
from ....structure import LatentGaussianReading

LARGEST_SHIFT = 0.25
"""Distance of the mean from the mode, in posterior standard deviations, that need not be said."""
_LARGEST_RATIO = 1.12
"""Standard deviation over that of a run that need not be said."""
_MOST_ROWS, _MOST_PRODUCTS = 1000, 3e8
"""Predictors of which all correlations are taken, and products of three of these: a fraction of a second."""


def farthest(values: Mapping[str, np.ndarray]) -> tuple[str, int, float]:
    """Site, place in it and value of what is farthest from zero; there must be some element."""
    sizes = {name: float(np.max(np.abs(x))) for name, x in values.items() if x.size}
    name = max(sizes, key=lambda site: sizes[site])
    place = int(np.argmax(np.abs(values[name])))
    return name, place, float(np.ravel(values[name])[place])


def note_of_mode(label: str, shift: float) -> tuple[str, ...]:
    """Sentence on the means, where they are the mode and third derivatives say that they are off.

    :param label: of the element of the field with the largest shift.
    :param shift: its mean less its mode, in posterior standard deviations.
    """
    if not abs(shift) > LARGEST_SHIFT:  # nan as well: third derivatives that do not exist say nothing
        return ()
    side = "above" if shift > 0.0 else "below"
    return (
        f"The mode is not the mean: third derivatives at the mode say that the mean of {label} is about "
        f"{abs(shift):.2g} of its posterior standard deviations {side} it, the most of the field. EP, "
        "VariationalGaussian, or INLA with its corrected marginals do not rest on the mode.",
    )


def note_of_skewness(label: str, growth: float) -> tuple[str, ...]:
    """Sentence on the standard deviations, where the skewness of the factors says that they are too small.

    :param label: of the element of the field with the largest growth.
    :param growth: variance over that of the Gaussian, less one.
    """
    if not growth > _LARGEST_RATIO**2 - 1.0:
        return ()
    return (
        "The posterior is skewed, as where data nearly separate: by third cumulants of tilted densities the standard "
        f"deviation of {label} is about {(1.0 + growth) ** 0.5:.2g} times as large as the Gaussian one, the most of "
        "the field. INLA has marginals that follow skewness, and engine.sample_exactly(key) draws from the posterior.",
    )


def has_few_cumulants(reading: LatentGaussianReading) -> bool:
    """True if the skewness of the factors is known and its effect costs little."""
    form = reading.abstract_form
    size = form.num_rows**2 * (form.num_rows + form.num_columns)
    is_small = form.num_rows <= _MOST_ROWS and size <= _MOST_PRODUCTS and form.layout is None
    return is_small and not reading.half_lines and not any(isinstance(p, VectorRows) for p in form.potentials)
