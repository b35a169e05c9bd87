"""Refusals of a bilinear model once its two sides are known, with the name of the site."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ...linalg.gaussian.prior import FlatPrior
from ..errors import ModelStructureError
from ..model.running.inspection import SiteInfo


def check_names(names: Collection[str], field: Sequence[str], sites: Mapping[str, SiteInfo]) -> None:
    """Refuse names of neither a site of the two sides nor a plate that has one of them.

    :param names: for which ``covariance`` names families.
    :param field: the sites of the two sides.
    :param sites: all of them.
    :raises ModelStructureError: saying which sites and plates there are.
    """
    plates = dict.fromkeys(plate for name in field for plate, _ in sites[name].plates)
    for name in names:
        if name not in field and name not in plates:
            raise ModelStructureError(
                f"covariance names {name!r}, which belongs to neither side. It takes sites of the two sides, here "
                f"{list(field)}, and plates with some of these: {list(plates) or 'there are none'}."
            )


def check_proper(priors: Mapping[str, object]) -> None:
    """Refuse flat priors of vectors.

    :param priors: of the sites of the two sides.
    """
    for name, prior in priors.items():
        if isinstance(prior, FlatPrior):
            raise ModelStructureError(
                f"site '{name}' has a flat prior: a factor of a product needs a proper one, because its scale is "
                "not determined by the data. Use dist.Normal with a scale of its own.",
                site=name,
            )


def check_components(
    sides: Sequence[Sequence[str]], fitted: Sequence[np.ndarray], elements: Sequence[np.ndarray]
) -> None:
    """Refuse vectors of another length than in the fit.

    :param sides: names of the sites of each side.
    :param fitted: flat numbers of the unknowns of each vector in the fit, for both sides.
    :param elements: the same on these arguments.
    """
    for names, old, new in zip(sides, fitted, elements, strict=True):
        if old.shape[1] != new.shape[1]:
            raise ModelStructureError(
                f"on these arguments {list(names)} make vectors of {new.shape[1]} components, in the fit of "
                f"{old.shape[1]}: the rank of a product, and what else makes a vector, must be that of the fit.",
                site=names[0],
            )


def check_finite(what: str, is_finite: np.ndarray, sites: Sequence[tuple[str, np.ndarray, tuple[int, ...]]]) -> None:
    """Refuse what is not finite in some cells, naming the site and its first observation.

    :param str what: has these values.
    :param is_finite: for the cells of all sites, one behind the other.
    :param sites: their names, the flat numbers of the observations in use, and the shapes of all observations.
    """
    ends = np.cumsum([cells.size for _, cells, _ in sites])
    for (name, cells, shape), finite in zip(sites, np.split(is_finite, ends[:-1]), strict=True):
        if not finite.all():
            where = tuple(int(i) for i in np.unravel_index(cells[np.argmin(finite)], shape))
            raise ModelStructureError(
                f"the {what} of site '{name}' is not finite in {int((~finite).sum())} cells (the first is at index "
                f"{where}): check covariates and exposures for NaN or infinity, or mask these cells.",
                site=name,
            )
