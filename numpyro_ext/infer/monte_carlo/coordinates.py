"""Coordinates in which priors do not depend on each other: locations and scales are taken out of the sites."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpyro.distributions as dist
from numpyro.distributions import biject_to, transforms

__all__ = ["Coordinates", "coordinates"]

_LOCATION_SCALE = (dist.Normal, dist.StudentT, dist.Cauchy, dist.Laplace, dist.Logistic, dist.Gumbel)
_SCALE = (dist.HalfNormal, dist.HalfCauchy)


class Coordinates(NamedTuple):
    """Coordinates of one site."""

    transform: Any
    """From unconstrained values to those of the site."""
    standard: Any
    """The distribution of unconstrained values, elementwise, where no other site has a part in it."""

    @property
    def is_gaussian(self) -> bool:
        """True if unconstrained values are independent and standard Gaussian under the prior."""
        return type(self.standard) is dist.Normal


def coordinates(fn: dist.Distribution, *, is_step: bool = False) -> Coordinates:
    """Coordinates of a site of distribution ``fn``: without location and scale, where the family has them.

    So a centred model is sampled as its non-centred twin, in which groups and the scale of groups are independent
    before the data speak (Papaspiliopoulos, Roberts and Sköld 2007). Other families are in NumPyro's unconstrained
    space.

    :param fn: a distribution of NumPyro.
    :param is_step: of a site in the body of a scan, whose values are those of all steps.
    """
    base = fn
    while isinstance(base, dist.Independent | dist.ExpandedDistribution) and not is_step:
        base = base.base_dist
    real = dist.constraints.real
    if isinstance(base, dist.MultivariateNormal) and not is_step:
        return Coordinates(transforms.LowerCholeskyAffine(base.loc, base.scale_tril), dist.Normal(0.0, 1.0))
    if isinstance(base, dist.LogNormal):
        affine = transforms.AffineTransform(base.loc, base.scale, domain=real)
        return Coordinates(transforms.ComposeTransform([affine, transforms.ExpTransform()]), dist.Normal(0.0, 1.0))
    if type(base) in _LOCATION_SCALE:
        freedom = {"df": base.df} if isinstance(base, dist.StudentT) else {}
        standard = type(base)(loc=0.0, scale=1.0, **freedom)
        return Coordinates(transforms.AffineTransform(base.loc, base.scale, domain=real), standard)
    if type(base) in _SCALE:
        scaled = transforms.AffineTransform(0.0, base.scale, domain=dist.constraints.positive)
        standard = dist.TransformedDistribution(type(base)(1.0), transforms.ExpTransform().inv)
        return Coordinates(transforms.ComposeTransform([transforms.ExpTransform(), scaled]), standard)
    return Coordinates(biject_to(fn.support), None)
