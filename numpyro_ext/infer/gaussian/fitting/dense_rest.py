"""Memory and time of crossed effects that leave a large dense matrix."""

from __future__ import annotations

from ....structure import LatentGaussianReading, ModelStructureError
from ...front.running.progress import warn
from .costs import FitCosts

_MATRICES, _FLOPS_PER_SECOND = 10, 2e10
"""Matrices of what is left together that are alive at once, and the rate of LAPACK on one core."""


def warn_of_dense_rest(reading: LatentGaussianReading, engine: str, costs: FitCosts) -> None:
    """Say before a fit of crossed effects what it takes, where the matrix of those that are left together is large.

    :param LatentGaussianReading reading: of the model.
    :param str engine: its name.
    :param FitCosts costs: its ``most_memory`` is the most that is tried.
    :raises ModelStructureError: if more memory is needed.
    """
    if not (size := reading.dense_rest):
        return
    memory = _MATRICES * 8 * size**2
    takes = (
        f"{engine} would factorise a dense matrix of {size} unknowns, which crossed effects of this model leave "
        f"together: about {memory / 2**30:.2g} GiB, and {size**3 / _FLOPS_PER_SECOND:.2g} s for each factorisation, of "
        "which a fit takes hundreds. LaplaceApproximation(model) iterates instead, in minutes and little memory."
    )
    if memory > costs.most_memory:
        raise ModelStructureError(
            f"{takes} Nothing was allocated: {costs.most_memory / 2**30:.2g} GiB are the most that is tried."
        )
    warn(takes)
