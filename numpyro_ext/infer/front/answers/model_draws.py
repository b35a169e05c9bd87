"""Draws of all sites of a model by the model itself, observed ones included, given draws of its latent sites."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from numpyro import handlers
from numpyro.infer import Predictive
from numpyro.primitives import Messenger

from ....compilation.transfer import generator_of, to_device
from ....structure.model.reading import ModelReading
from ....structure.model.running.execution import bound_arguments
from ....structure.program.run_compiled import run_compiled
from .joint_arguments import leaves_equal_to, without

_MOST_READ = 2_000_000
"""Numbers of latent draws: the model does little with most of them where it draws little itself."""


def observed_leaves(reading: ModelReading) -> frozenset[int]:
    """Leaves of the arguments of a reading that are the values of its observed sites.

    :param ModelReading reading: of a model.
    """
    values = [np.asarray(site.value) for site in reading.sites.values() if site.kind == "observed"]
    return leaves_equal_to(bound_arguments(reading.model, reading.args, reading.kwargs)[0], values)


def model_draws(
    reading: ModelReading,
    latents: Mapping[str, Array],
    rng_key: Array,
    observations: frozenset[int],
    other: ModelReading | None = None,
) -> dict[str, Array]:
    """Draws of all sites but ``numpyro.factor``, those of latent sites as they are given.

    :param ModelReading reading: of the model on the arguments at which to draw.
    :param latents: draws of the latent and ``param`` sites, with the leading axis running over them.
    :param rng_key: random number generator key.
    :param observations: which leaves of the arguments are observations: they are ``None`` to the model, as NumPyro's
        ``Predictive`` wants it; a model that does not run so is given them, and draws in their place.
    :param other: a reading with other values in the place of observations that there are not: what depends on them is
        left out.
    :raises ValueError: if the model gives its observations back in place of draws, or needs some that there are not.
    """
    arguments, make_call = bound_arguments(reading.model, reading.args, reading.kwargs)
    args, kwargs = make_call(without(arguments, observations))
    draw = partial(predictive_draws, handlers.uncondition(reading.model), latents, rng_key)
    try:
        found = draw(args, kwargs)
    except (AttributeError, IndexError, TypeError, ValueError) as failure:
        found = draw(reading.args, reading.kwargs)
        if other is not None:
            again = draw(other.args, other.kwargs)
            found = {name: value for name, value in found.items() if np.array_equal(value, again[name])}
            for name in reading.observed_names:
                if name in again and name not in found:
                    raise ValueError(
                        f"Draws of {name!r} depend on observations that are left out, as in a regression on values of "
                        "steps before. Let the model draw what it needs: a scan that carries them."
                    ) from failure
        for name in reading.observed_names:
            values = np.asarray(found.get(name, 0.0))
            if values.size and np.array_equal(values, np.broadcast_to(reading.sites[name].value, values.shape)):
                raise ValueError(
                    f"The model gives the observations of {name!r} back in place of draws (a scan hides its sites), "
                    "and does not run without them. Let it take None for them, as NumPyro's Predictive needs."
                ) from failure
    factors = [name for name, site in reading.sites.items() if site.family == "Unit"]
    return {name: value for name, value in {**latents, **found}.items() if name not in factors}


def predictive_draws(
    model: Callable[..., object],
    latents: Mapping[str, Array],
    rng_key: Array,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    return_sites: Collection[str] | None = None,
) -> dict[str, Array]:
    """Draws of the sites that ``latents`` leave open, one for each draw of these.

    ``Predictive`` itself compiles the model anew at every call, which takes longer than most fits.

    :param model: a NumPyro model.
    :param latents: draws by site, with the leading axis running over them.
    :param rng_key: random number generator key.
    :param args: arguments of the model.
    :param kwargs: its keyword arguments.
    :param return_sites: names of the sites to draw, by default those of ``Predictive``.
    """

    def run(rng_key: Array, latents: dict[str, Array]) -> dict[str, Array]:
        return Predictive(_WholeTotals(model), latents, return_sites=return_sites)(rng_key, *args, **kwargs)

    return run_compiled(run, rng_key, dict(latents), most_read=_MOST_READ)


def draws_with_new_members(
    model: Callable[..., object],
    latents: Mapping[str, Array],
    rng_key: Array,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> dict[str, Array]:
    """Draws of the sites that ``latents`` leave open, and of those elements of latent sites that stand behind the given
    ones along some axes: new members of groups, from their prior given all that comes before.

    :param model: a NumPyro model, whose sites have independent elements along these axes.
    :param latents: draws by site, with the leading axis running over them.
    :param rng_key: random number generator key.
    :param args: arguments of the model, with the new members.
    :param kwargs: its keyword arguments.
    """

    def one(key: Array, values: dict[str, Array]) -> dict[str, Array]:
        whole: set[str] = set()

        def given(msg: dict[str, Any]) -> Array | None:
            """The value of a site that has all its elements, so that no key is split for it."""
            value = values.get(msg["name"])
            is_whole = msg["type"] == "param" or (
                msg["type"] == "sample"
                and value is not None
                and msg["fn"].shape(msg["kwargs"]["sample_shape"]) == value.shape
            )
            whole.update({msg["name"]} if is_whole else ())
            return value if is_whole else None

        def completed(msg: dict[str, Any]) -> Array | None:
            value = values.get(msg["name"]) if msg["type"] == "sample" and msg["value"] is None else None
            if value is None:
                return None
            drawn = msg["fn"](rng_key=msg["kwargs"]["rng_key"], sample_shape=msg["kwargs"]["sample_shape"])
            return jnp.asarray(drawn).at[tuple(map(slice, value.shape))].set(value)

        seeded = handlers.seed(handlers.substitute(_WholeTotals(model), substitute_fn=given), key)
        trace = handlers.trace(handlers.substitute(seeded, substitute_fn=completed)).get_trace(*args, **kwargs)
        kinds = "sample", "deterministic"
        return {n: site["value"] for n, site in trace.items() if site["type"] in kinds and n not in whole}

    def run(rng_key: Array, latents: dict[str, Array]) -> dict[str, Array]:
        number = len(jax.tree.leaves(latents)[0])
        return jax.vmap(one)(random.split(rng_key, number), latents)

    found: dict[str, Array] = run_compiled(run, rng_key, dict(latents), most_read=_MOST_READ)
    return {**latents, **found}


def shuffled(draws: Mapping[str, Array], rng_key: Array) -> dict[str, Array]:
    """The draws in an order of their own for each key."""
    # By NumPy, which compiles nothing.
    generator, number = generator_of(rng_key), len(next(iter(draws.values()), ()))
    order = generator.permutation(number)
    return {name: to_device(np.asarray(value)[order]) for name, value in draws.items()}


class _WholeTotals(Messenger):
    """A model whose numbers of trials are integers: NumPyro has densities of floats there, and no draws."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample":
            msg["fn"] = _with_whole_total(msg["fn"])


def _with_whole_total(fn: dist.Distribution) -> dist.Distribution:
    new, total = {}, getattr(fn, "total_count", None)
    if isinstance(base := getattr(fn, "base_dist", None), dist.Distribution):
        whole = _with_whole_total(base)
        new = {} if whole is base else {"base_dist": whole}
    elif total is not None and jnp.issubdtype(jnp.result_type(total), jnp.floating):
        new = {"total_count": jnp.asarray(total).astype(int)}
    if new:
        fn = copy.copy(fn)
        vars(fn).update(new)
    return fn
