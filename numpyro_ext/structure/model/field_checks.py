"""Checks on the field and on the values that a user asks for, and on the hyperparameters that are left."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from ..errors import ModelStructureError, Reason
from ..half_lines import HALF_LINE_FAMILIES
from .reading import ModelReading
from .running.inspection import SiteInfo

MAX_HYPER_SIZE = 100
"""Elements that a hyperparameter may have."""


def check_values(sites: Mapping[str, SiteInfo], values: Mapping[str, object]) -> None:
    """Refuse starting values of sites that are not there, or outside the support of their site.

    :raises ModelStructureError: naming the first.
    """
    for name in values:
        if name not in sites or sites[name].kind not in ("latent", "param"):
            free = sorted(n for n, s in sites.items() if s.kind in ("latent", "param"))
            raise ModelStructureError(
                f"no latent or param site '{name}' to give a value to; the model has {free}.",
                site=name,
            )
        site = sites[name]
        if site.transform is not None and not bool(jnp.all(jnp.isfinite(site.transform.inv(site.init)))):
            raise ModelStructureError(
                f"the value given for site '{name}' is outside or at the edge of its support.", site=name
            )


def check_field(field: Sequence[str], sites: Mapping[str, SiteInfo]) -> None:
    """Refuse names that are no candidates for the field.

    :raises ModelStructureError: naming the first.
    """
    for name in field:
        if name not in sites or not sites[name].is_candidate:
            found = f"is {sites[name].family or sites[name].kind}" if name in sites else "does not exist"
            names = [n for n, s in sites.items() if s.is_candidate]
            is_half_line = name in sites and sites[name].family in HALF_LINE_FAMILIES
            more = " EP has coefficients with such a prior in its field." if is_half_line else ""
            raise ModelStructureError(
                f"field: site '{name}' {found}; latent sites of this model that this form takes: {names}.{more}",
                reason=Reason.NO_FIELD,
                site=name,
            )


def check_hyper(
    reading: ModelReading,
    sites: Mapping[str, SiteInfo],
    are_learned: bool,
    *,
    without: Collection[str] = (),
    max_size: int = MAX_HYPER_SIZE,
    held: Collection[str] = (),
) -> None:
    """Refuse hyperparameters that are discrete or masked, or too many where they are to be maximised over.

    :param without: names of sites that are not looked at.
    :param int max_size: elements of one of them at most.
    :param held: names of sites whose values are given, so that nothing is maximised over them.
    :raises ModelStructureError: naming the site.
    """
    # A factor of a vector, such as a multivariate normal likelihood, is of as many observations as it has elements.
    shapes = dict(zip(reading.observed_names, reading.factor_shapes, strict=False))
    observed = {name: site.shape for name, site in sites.items() if site.kind == "observed"}
    num_observations = sum(math.prod(max(observed[n], shapes.get(n, ()), key=math.prod)) for n in observed)
    for name, site in reading.hyper.items():
        if name in without:
            continue
        size, info = int(np.prod(site.shape)), sites[name]
        what = f"latent site '{name}' ({info.family}, shape {site.shape})"
        if info.is_discrete:
            raise ModelStructureError(
                f"{what} is discrete and affects the likelihood: sum it out in the model (a mixture distribution), "
                "condition on it, or use NUTS with enumeration.",
                site=name,
            )
        if info.is_masked:
            raise ModelStructureError(
                f"{what} is masked but other sites depend on it: move the mask to the observations, or index the "
                "elements that are in use.",
                site=name,
            )
        if site.is_param or size == 1 or not are_learned or name in held:
            continue
        kind = "not Gaussian" if not info.is_candidate else "used nonlinearly"
        if size >= num_observations or size > max_size:
            remedy = "give it a Gaussian prior where the predictor is affine in it"
            if info.family in HALF_LINE_FAMILIES:
                remedy += " (EP has coefficients with half-normal and exponential priors in the field there)"
            if info.is_candidate:
                remedy = "choose another field (field=[...]), take BilinearVG where a site of the field multiplies it"
            raise ModelStructureError(
                f"{what} is {kind}, so it would be a hyperparameter, but it has {size} elements for {num_observations} "
                "observations, too many to maximise over. Integrate it out in the model (a scale mixture written as a "
                f"Student-t, a Gamma-Poisson), {remedy}, or use NUTS.",
                site=name,
            )
