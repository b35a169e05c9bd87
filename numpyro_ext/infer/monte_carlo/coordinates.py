"""Coordinates in which priors do not depend on each other: locations and scales are taken out of the sites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpyro.distributions as dist
from numpyro.distributions import biject_to, transforms

from ...structure import ModelStructureError
from ...structure.model.running.inspection import SiteInfo

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


def check_sites(sites: Mapping[str, SiteInfo], latent: Mapping[str, SiteInfo], given: Mapping[str, object]) -> None:
    """Refuse models whose sites have no coordinates in which particles could move.

    :param sites: all of the model.
    :param latent: those to be sampled.
    :param given: values by name.
    :raises ModelStructureError: which site, and what to do.
    """

    def refuse(name: str, why: str) -> ModelStructureError:
        return ModelStructureError(f"site '{name}' {why}", site=name)

    for name in given:
        if name not in sites:
            raise ModelStructureError(f"hyper_values names {name!r}; the sites of the model are {', '.join(sites)}.")
    for name, site in sites.items():
        if site.kind == "param" and name not in given:
            raise refuse(
                name,
                "is a param statement, which has no prior: sample it from one, or give its value, "
                f"SMC(model, hyper_values={{{name!r}: ...}}).",
            )
    for name, site in latent.items():
        if site.is_discrete:
            raise refuse(
                name,
                f"is discrete ({site.family}), and particles move in continuous space: sum it out in the model "
                "(Mixture distributions, the forward algorithm in a scan), or use MixedHMC or DiscreteHMCGibbs.",
            )
        if site.is_improper or site.is_masked:
            what = "is masked and so has no prior density" if site.is_masked else "has a flat prior"
            raise refuse(
                name,
                f"{what}: there is nothing to draw from, and no evidence. Give it a proper prior, if a wide one; "
                "NUTS takes flat ones.",
            )
    if not latent:
        raise ModelStructureError("the model has no latent site that is not given: there is nothing to sample.")
    if not any(site.kind == "observed" for site in sites.values()):
        raise ModelStructureError(
            "the model has no observed site on these arguments: give the data. Draws from the prior are "
            "numpyro.infer.Predictive(model, num_samples=...)."
        )
