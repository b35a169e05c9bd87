"""Values at which a model is run to see its sites: those that are given, else central ones of the priors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to

from ...errors import ModelStructureError
from ..priors import is_gaussian, location
from .messages import Message


def initial_value(given: Mapping[str, Any], site: Message) -> Any:
    """The value at which the model is run: what is given for a site, else a central one."""
    name = site["name"]
    if name not in given or site["type"] not in ("sample", "param") or site.get("is_observed"):
        return _central_value(site)
    if site["type"] == "sample":
        shape = site["fn"].batch_shape + site["fn"].event_shape
    else:
        shape = np.shape(site["args"][0] if site["args"] else site["fn"]())  # a function of a key has no arguments
    try:
        return jnp.broadcast_to(given[name], shape)
    except ValueError as error:
        raise ModelStructureError(
            f"the value given for site '{name}' has shape {np.shape(given[name])}, the site has shape {shape}."
        ) from error


def _central_value(site: Message) -> Any:
    """A central value of a latent site without drawing a sample: median, else mean, else the image of zero."""
    if site["type"] != "sample" or site["is_observed"] or site["value"] is not None:
        return None
    fn = site["fn"]
    shape = fn.batch_shape + fn.event_shape
    if is_gaussian(fn):
        return location(fn)
    if fn.support.is_discrete:
        return None
    transform = biject_to(fn.support)
    value = transform(jnp.zeros(transform.inverse_shape(shape)))
    for attempt in (lambda: fn.mean, lambda: fn.icdf(0.5)):
        try:
            center = jnp.broadcast_to(attempt(), shape)
        except (NotImplementedError, AttributeError, TypeError, ValueError, ImportError, ArithmeticError):
            continue  # not every distribution has them, at all parameters, or without packages that are not installed
        inside = jnp.all(fn.support(center)) & jnp.all(jnp.isfinite(transform.inv(center)))
        value = jnp.where(inside, center, value)
    return value
