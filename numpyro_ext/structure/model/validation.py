"""Checks on the data of a model, before anything is computed from it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpyro.distributions import constraints

from ..errors import ModelStructureError, Reason
from .running.inspection import SiteInfo


def check_data(sites: Mapping[str, SiteInfo], check_values: bool = True) -> None:
    """Check observed values: present, finite, inside the support, of the shape of their distribution.

    :param bool check_values: whether they have to be finite and inside the support.
    :raises ModelStructureError: naming the site, the first offending value and its place.
    """
    observed = [s for s in sites.values() if s.kind == "observed" and s.family != "Unit"]
    factors = [s for s in sites.values() if s.kind == "observed" and s.family == "Unit"]
    if not observed and not factors:
        raise ModelStructureError(
            "the model has no observed site: pass the data (obs=...), otherwise the posterior is the prior.",
            reason=Reason.DATA,
        )
    for site in observed:
        _check_site(site, check_values)


def explain_masked_data(sites: Mapping[str, SiteInfo]) -> list[str]:
    """Message for a model of which masks leave no observation, if they do."""
    observed = [site for site in sites.values() if site.kind == "observed"]
    if not observed or any(site.family == "Unit" or np.any(_mask(site)) for site in observed):
        return []
    names = " and ".join(repr(site.name) for site in observed)
    return [
        f"Every observation of {names} is masked, so that the posterior is the prior. Masks are true where data is in "
        "use."
    ]


def can_be_scored(site: SiteInfo, shape: tuple[int, ...]) -> np.ndarray:
    """Mask of the values of an observed site that are data: finite and inside the support of its distribution.

    Values under a mask need not be, as missing ones are coded by NaN or by -1.

    :param SiteInfo site: an observed site.
    :param shape: of its factors; those of a multivariate site are its coordinates.
    :return: boolean, of this shape.
    """
    value = np.asarray(site.value)
    is_data = np.isfinite(value) if np.issubdtype(value.dtype, np.inexact) else np.ones(value.shape, bool)
    if site.support is not None:
        is_inside = np.asarray(site.support(value))
        is_data = is_data.all(axis=tuple(range(is_inside.ndim, value.ndim))) & is_inside
    try:
        return np.broadcast_to(is_data, shape)
    except ValueError:  # numpyro.factor has no values, and factors that share a predictor are one
        return np.ones(shape, bool)


def _mask(site: SiteInfo) -> np.ndarray:
    value = np.asarray(site.value)
    mask = np.asarray(True if site.mask is None else site.mask)
    # Masks cover the batch shape; values may have further axes in front of it.
    event = len(site.full_shape) - len(site.batch_shape) if mask.ndim else 0
    return np.broadcast_to(
        mask.reshape(mask.shape + (1,) * event), np.broadcast_shapes(mask.shape + (1,) * event, value.shape)
    )


def _check_site(site: SiteInfo, check_values: bool) -> None:
    value = np.asarray(site.value)
    if value.size == 0:
        raise ModelStructureError(
            f"observed site '{site.name}' is empty (shape {value.shape}): nothing to learn from.",
            reason=Reason.DATA,
            site=site.name,
        )
    try:
        shape: tuple[int, ...] | None = np.broadcast_shapes(value.shape, site.full_shape)
    except ValueError:
        shape = None
    if value.ndim > 0 and shape not in (value.shape, site.full_shape):
        found = "they do not match" if shape is None else f"broadcasting them would make {shape}"
        raise ModelStructureError(
            f"observed site '{site.name}' has data of shape {value.shape}, but its distribution has shape "
            f"{site.full_shape}; {found}. Give both the same shape (y.ravel()?).",
            reason=Reason.DATA,
            site=site.name,
        )
    if not check_values:
        return
    mask = _mask(site)
    spread = np.broadcast_to(value, mask.shape)
    if np.issubdtype(value.dtype, np.inexact):
        remedy = "remove it, or mask it: handlers.mask(mask=jnp.isfinite(y)) around the site, and obs=jnp.nan_to_num(y)"
        _report(site, spread, mask & ~np.isfinite(spread), "not finite", remedy)
    if site.support is not None:
        inside = np.asarray(site.support(spread))
        axes = tuple(range(inside.ndim, mask.ndim))
        what = f"outside the support of {site.family} ({_describe(site.support)})"
        _report(site, spread, mask.any(axis=axes) & ~inside, what, "correct the data, or choose another likelihood")
    if site.needs_integers:
        raise ModelStructureError(
            f"observed site '{site.name}' has values of dtype {value.dtype}, and {site.family} looks its categories up "
            "by integers: give y.astype(int) (columns of pandas become floats where a value is missing; missing ones "
            "need a number and a mask, jnp.nan_to_num(y).astype(int) under handlers.mask(mask=jnp.isfinite(y))).",
            reason=Reason.DATA,
            site=site.name,
        )


def _describe(support: object) -> str:
    if isinstance(support, type(constraints.multinomial(1))):
        return f"counts that add up to the total_count of {np.unique(np.asarray(support.upper_bound))}"
    return type(support).__name__.strip("_").lower() if str(support).startswith("<") else str(support)


def _report(site: SiteInfo, value: np.ndarray, bad: np.ndarray, what: str, remedy: str) -> None:
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        count = int(bad.sum())
        raise ModelStructureError(
            f"observed site '{site.name}': {count} value{'s are' if count > 1 else ' is'} {what}; the first is "
            f"{value[where]} at index {where}. Please {remedy}.",
            reason=Reason.DATA,
            site=site.name,
        )
