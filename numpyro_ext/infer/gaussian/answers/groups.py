"""Groups that are independent given the hyperparameters: members of a plate in which the whole field stands."""

from __future__ import annotations

from collections.abc import Mapping

from ....structure import LatentGaussianReading


def shared_hyper(reading: LatentGaussianReading, hyper: Mapping[str, object]) -> dict[str, object]:
    """The hyperparameters that new members of the plate have in common with those of a fit.

    :param LatentGaussianReading reading: of the fit.
    :param hyper: its hyperparameters, constrained.
    :return: those of them that stand outside the plate.
    :raises ValueError: if no plate holds the whole field, naming what stands outside.
    """
    plates = {name: {plate for plate, _ in reading.sites[name].plates} for name in reading.field}
    common = set.intersection(*plates.values())
    if not common:
        largest = max(
            sorted(set.union(*plates.values())),
            key=lambda plate: sum(plate in of for of in plates.values()),
            default=None,
        )
        shared = [name for name, found in plates.items() if largest not in found]
        where = "in a plate (numpyro.plate)" if largest is None else f"in plate {largest!r}"
        raise ValueError(
            f"new groups are independent of those of the fit where the whole field stands in one plate, and here "
            f"{', '.join(map(repr, shared))} is not {where}: what the fit knows of it would be lost. Run the model on "
            "old and new groups together, or make it a hyperparameter (field=[...] names the other sites)."
        )
    return {
        name: value for name, value in hyper.items() if not common & {plate for plate, _ in reading.sites[name].plates}
    }
