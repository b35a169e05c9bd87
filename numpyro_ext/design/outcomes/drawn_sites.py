"""The sites of a model at draws of its latent ones: which have draws, which are outcomes, and whether they belong
together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers

from ...structure.model.running.messages import Message
from ...structure.program.run_compiled import run_compiled

Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and keyword arguments of a model."""


class NewMembers(ValueError):
    """Sites of other shapes than their draws have."""


def _sites(
    model: Callable[..., object],
    latents: Mapping[str, object],
    call: Call,
    seed: int,
    are_wanted: Callable[[str], bool],
) -> dict[str, dict[str, Any]]:
    """Distributions of those sites that are wanted, where some latent ones are given, by one program for all."""
    found: dict[str, dict[str, Any]] = {}

    def distributions(latents: Mapping[str, object], rng_key: Array) -> dict[str, Any]:
        trace = _traced_sites(model, latents, call, rng_key)
        kept = {name: site for name, site in trace.items() if site["type"] == "sample" and are_wanted(name)}
        found.update({name: {"is_observed": site["is_observed"]} for name, site in kept.items()})
        return {name: site["fn"] for name, site in kept.items()}

    for name, fn in run_compiled(distributions, dict(latents), jax.random.key(seed)).items():
        found[name]["fn"] = fn
    return found


def outcome_distribution(model: Callable[..., object], latents: Mapping[str, object], call: Call, name: str) -> Any:
    """The distribution of a site's observations at given latent sites, without its mask; within other programs."""
    return without_mask(_traced_sites(model, latents, call, jax.random.key(0))[name]["fn"])[0]


def _traced_sites(
    model: Callable[..., object], latents: Mapping[str, object], call: Call, rng_key: Array
) -> dict[str, Any]:
    args, kwargs = call
    run = handlers.substitute(handlers.seed(model, rng_key), data=dict(latents))
    return handlers.trace(run).get_trace(*args, **kwargs)


def outcome_sites(
    model: Callable[..., object], latents: Mapping[str, object], call: Call, seed: int = 0
) -> dict[str, Any]:
    """The sites of a model that are observed, or would be, at given latent sites: whether they are, and their
    distributions."""
    found = _sites(model, latents, call, seed, lambda name: name not in latents)
    return {name: site for name, site in found.items() if not isinstance(site["fn"], dist.Unit)}


def check_complete(
    model: Callable[..., object], latents: Mapping[str, object], sites: Mapping[str, Any], call: Call, drawn: list[str]
) -> None:
    """Refuse draws that lack a site on which others depend: it would be drawn from its prior, and taken for an
    outcome.

    :param sites: the :func:`outcome_sites`.
    :param drawn: the names of the sites that have draws.
    """
    free = [name for name, site in sites.items() if not site["is_observed"]]
    if not free or len(sites) == 1:
        return
    again = outcome_sites(model, latents, call, seed=1)
    moved = [name for name in sites if not _are_equal(sites[name]["fn"], again[name]["fn"])]
    missing = [name for name in free if name not in moved] or free
    if moved:
        raise ValueError(
            f"The draws are of {drawn}, and {moved[0]!r} depends on other sites, which have none: give draws of "
            f"{missing} as well."
        )


def check_same_members(
    model: Callable[..., Any], latents: Mapping[str, Any], sites: Mapping[str, Any], call: Call, fitted: Call
) -> None:
    """Refuse draws of a process where it was sampled in the place of its values at as many other inputs.

    :param sites: the :func:`outcome_sites`.
    :param fitted: the call that the draws are from.
    """
    lengths = {length for site in sites.values() for length in site["fn"].shape()}
    old, new = (_sites(model, latents, each, 0, latents.__contains__) for each in (fitted, call))
    for name, value in latents.items():
        if not lengths.intersection(value.shape):
            continue
        if name in old and name in new and not _are_equal(old[name]["fn"], new[name]["fn"]):
            raise NewMembers(
                f"The prior of {name!r} is another one at these arguments than in the fit, whose draws are not of what "
                f"{name!r} is here: new members have no draws yet. Put their observations into the fit, masked, and "
                "ask without arguments."
            )


def _are_equal(first: object, second: object) -> bool:
    ours, others = jax.tree.leaves(first), jax.tree.leaves(second)
    if len(ours) != len(others):
        return False
    pairs = zip(ours, others, strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True) for a, b in pairs)


def latents_among(model: Callable[..., object], samples: Mapping[str, Array], call: Call) -> dict[str, Array]:
    """Draws of the latent sites of a model at these arguments: what is computed from them is left to the model."""
    found = {}
    shapes = _latent_shapes(model, call)
    for name, value in samples.items():
        if name not in shapes:
            continue
        if shapes[name] != value.shape[1:]:
            raise NewMembers(
                f"The draws of {name!r} have the shape {value.shape[1:]}, and the model at these arguments needs "
                f"{shapes[name]}: new members have no draws yet. Put their observations into the fit, "
                "masked, and ask without arguments."
            )
        if jnp.issubdtype(value.dtype, jnp.floating) and bool(jnp.isnan(value).any()):
            raise ValueError(f"Some draws of {name!r} are nan: leave them out.")
        found[name] = value
    return found


def _latent_shapes(model: Callable[..., object], call: Call) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}

    def run(rng_key: Array) -> None:
        for name, site in _traced_sites(handlers.substitute(model, substitute_fn=_instead), {}, call, rng_key).items():
            if site["type"] in ("sample", "param") and not site.get("is_observed"):
                shapes[name] = np.shape(site["value"])

    jax.eval_shape(run, jax.random.key(0))
    return shapes


def _instead(site: Message) -> Any:
    """A value of a site from whose prior nothing can be drawn."""
    if site["type"] != "sample" or site["is_observed"]:
        return None
    try:
        site["fn"].sample(jax.random.key(0))
    except NotImplementedError:
        return site["fn"].support.feasible_like(jnp.zeros(site["fn"].shape()))
    return None


def without_mask(fn: object) -> tuple[Any, Any]:
    """A distribution without its mask, and the mask."""
    mask: Any = True
    while isinstance(fn, dist.MaskedDistribution | dist.ExpandedDistribution):
        if isinstance(fn, dist.MaskedDistribution):
            mask = mask & jnp.asarray(fn._mask)
            fn = fn.base_dist
        elif isinstance(fn.base_dist, dist.MaskedDistribution):
            inner = fn.base_dist
            mask = mask & jnp.asarray(inner._mask)
            fn = inner.base_dist.expand(fn.batch_shape)
        else:
            break
    return fn, mask
