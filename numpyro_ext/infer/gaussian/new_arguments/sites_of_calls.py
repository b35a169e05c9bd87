"""Calls of a model, and their sites and densities at given latent sites: where these agree, so do the posteriors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from numpyro import handlers

from ....structure.program.run_compiled import run_compiled
from ..answers.prediction import Slices


class NewCall(NamedTuple):
    """A call of the model at the new arguments alone."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SiteOfCall(NamedTuple):
    """A site at each of some values of the latent ones, with an axis of these in front."""

    value: Any
    log_prob: Any
    """Log density of the value, of each of its independent elements; ``None`` of a deterministic site."""
    scale: Any
    """Factor of the log density, from ``handlers.scale``; one for all, or with the axes of the site's batch."""


def sites_of_call(
    model: Callable[..., object],
    call: NewCall,
    latents: Mapping[str, object],
    outcomes: Mapping[str, object],
    without: Collection[str] = (),
) -> dict[str, SiteOfCall]:
    """Sites of a model at given values of latent sites and of outcomes.

    :param model: a NumPyro model.
    :param NewCall call: its arguments.
    :param latents: values of latent and ``param`` sites, with an axis of several in front.
    :param outcomes: values of observed sites, in the place of those that the model has.
    :param without: names of sites that are left out.
    """

    def at(latents: dict[str, Array], outcomes: dict[str, Array]) -> dict[str, SiteOfCall]:
        seeded = handlers.seed(handlers.uncondition(model), random.key(0))
        sites = handlers.trace(handlers.substitute(seeded, data={**latents, **outcomes})).get_trace(*call[0], **call[1])
        out = {}
        for name, site in sites.items():
            if name in without or site["type"] not in ("sample", "deterministic"):
                continue
            value, scale = site["value"], site.get("scale")
            fn = site.get("fn")
            while isinstance(fn, dist.Independent) and scale is None:
                fn = fn.base_dist  # whose elements have densities of their own
            log_prob = fn.log_prob(value) if site["type"] == "sample" else None
            out[name] = SiteOfCall(value, log_prob, jnp.asarray(1.0 if scale is None else scale))
        return out

    found: dict[str, SiteOfCall] = run_compiled(jax.vmap(at), dict(latents), dict(outcomes))
    return jax.tree.map(np.asarray, found)


def are_part(few: Mapping[str, SiteOfCall], all_: Mapping[str, SiteOfCall], slices: Slices, *, scaled: bool) -> bool:
    """True if the sites of one call are a part of those of another, to rounding.

    :param few: sites of a call on some of the rows, or of the members.
    :param all_: those of a call on more of them.
    :param slices: from the name and the shape of one of the latter, its part.
    :param bool scaled: whether factors of the log densities count: where the part is fitted, and not only drawn from.
    """
    if set(few) != set(all_):
        return False
    for name, (value, log_prob, scale) in few.items():
        whole, densities, scales = all_[name]
        at = slice(None), *slices(name, whole.shape[1:])
        pairs = [(value, whole[at])]
        if log_prob is not None:
            # New coordinates of one observation, or outcomes that say nothing of their distribution.
            if any(part != slice(None) for part in at[np.ndim(densities) :]) or not np.isfinite(log_prob).any(0).all():
                return False
            weighted = (_scaled(log_prob, scale), _scaled(densities, scales)) if scaled else (log_prob, densities)
            pairs.append((weighted[0], weighted[1][at[: np.ndim(densities)]]))
        for x, y in pairs:
            if np.shape(x) != np.shape(y) or not is_close(x, y, np.max(np.abs(x), initial=0.0)):
                return False
    return True


def _scaled(log_prob: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Log densities times their factors, which are aligned at the last axes."""
    missing = (1,) * (log_prob.ndim - scale.ndim)
    return log_prob * scale.reshape(scale.shape[:1] + missing + scale.shape[1:])


def is_close(old: Any, new: Any, scale: Any) -> bool:
    """True if numbers are equal to rounding, where they are as large as ``scale``."""
    if not np.issubdtype(np.asarray(old).dtype, np.floating):
        return np.array_equal(old, new)
    tolerance = 1e3 * np.finfo(np.asarray(old).dtype).eps * scale
    with np.errstate(invalid="ignore"):
        is_same = (np.abs(new - old) <= tolerance) | (new == old) | (np.isnan(new) & np.isnan(old))
    return bool(np.all(is_same))
