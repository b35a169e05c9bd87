"""Choice of the family of Gaussians on each side of a bilinear model, from the names that the user gives."""

from __future__ import annotations

from collections.abc import Mapping

from ....structure.bilinear.reading import BilinearReading
from ....structure.bilinear.refusals import check_names
from ...hyper.space import UnconstrainedSpace
from ..algorithms.sweeps import Family

Covariance = Family | Mapping[str, Family]
"""One family, or families by sites or plates."""


def named_by_component(covariance: Covariance) -> frozenset[str] | bool:
    """Sites and plates whose sides may have vectors that depend on each other; true for all."""
    if not isinstance(covariance, Mapping):
        return covariance == "component"
    return frozenset(n for n, family in covariance.items() if family == "component")


def side_families(covariance: Covariance, reading: BilinearReading) -> tuple[Family, Family]:
    """The families of rows and columns; sides that are not named are diagonal.

    :raises ModelStructureError: if a name belongs to neither side.
    :raises ValueError: if a side is given two families.
    """
    given: Mapping[str, Family] = covariance if isinstance(covariance, Mapping) else {}
    default: Family = "diagonal" if isinstance(covariance, Mapping) else covariance
    check_names(given, reading.field, reading.sites)
    out: list[Family] = []
    for names, is_coupled in zip(reading.sides, reading.is_coupled, strict=True):
        found = {family for n, family in given.items() if any(reading.is_named(site, (n,)) for site in names)}
        if len(found) > 1:
            raise ValueError(f"covariance gives {sorted(found)} for {list(names)}, which are of one side.")
        family = found.pop() if found else default
        # Vectors that are independent and seen one at a time are so in each component.
        out.append("diagonal" if family == "component" and not is_coupled else family)
    return out[0], out[1]


def check_coupled(reading: BilinearReading, is_plain: bool) -> None:
    """Refuse what steps of vectors that depend on each other cannot do.

    :param bool is_plain: whether natural gradients step on one device, for cells that are listed.
    :raises ValueError: if they do not, and some vectors depend on each other.
    """
    if any(reading.is_coupled) and not is_plain:
        raise ValueError(
            f"covariance='component' for {list(reading.sides[0 if reading.is_coupled[0] else 1])} is for natural "
            "gradients on one device, and cells that are listed: leave devices, solver and unlisted_cells at their "
            "defaults."
        )


def check_points(reading: BilinearReading, space: UnconstrainedSpace, families: tuple[Family, Family]) -> None:
    """Refuse to learn the prior scales of sides that are points.

    :raises ValueError: if there are such scales, and no values of them are given.
    """
    for side, family in enumerate(families):
        learned = [n for n in reading.scale_hyper(side) if n in space.names]
        if family == "point" and learned:
            raise ValueError(
                f"The prior scales of {list(reading.sides[side])} depend on {learned}, which cannot be learned "
                "where these sites are points: their density grows without limit as a scale goes to zero. Give "
                f"values (hyper_values={{{learned[0]!r}: ...}}), chosen on held-out counts, or use Gaussians."
            )
