"""Arguments without whose values a model is read: data of its form that may become others of the same shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to

from ...errors import ModelStructureError, Reason
from .execution import ModelCall, line_of_model
from .inspection import SiteInfo
from .plain_sites import PlainSites

__all__ = ["check_supports", "needs_value", "other_values"]


def needs_value(call: ModelCall, error: Exception, trace: Callable[[Mapping[str, Any]], Any]) -> ModelStructureError:
    """The error for a model that does not run without the values of the arguments that change, naming those.

    :param error: that it raised.
    :param trace: of some of these arguments by name, runs the model without their values.
    """

    def fails(name: str, value: Any) -> bool:
        try:
            jax.eval_shape(lambda given: trace({name: given}), value)
        except Exception:  # whatever a model does with values that it is not given
            return True
        return False

    found = [name for name, value in call.changing_values().items() if fails(name, value)] or list(call.changing)
    return ModelStructureError(
        f"the model needs the values of {' and '.join(map(repr, found))}, which changing= says are to change"
        f"{line_of_model(error, call.model)}: {str(error).strip().splitlines()[0]} Compute with jax.numpy what is "
        "computed of it, use jnp.where for branches, and give the model as arguments of their own what decides shapes "
        "(numbers of groups, lengths); or leave it out of changing=.",
        reason=Reason.EXECUTION,
    )


def check_supports(call: ModelCall, sites: Mapping[str, SiteInfo], names: list[str]) -> None:
    """Refuse sites whose support depends on arguments that change: their transforms are made once.

    :param names: of the sites.
    :raises ModelStructureError: naming the first.
    """
    values = {name: site.init for name, site in sites.items() if site.kind in ("latent", "param")}

    def look(changing: dict[str, Any]) -> None:
        args, kwargs = call.with_values(changing)
        model = handlers.substitute(handlers.seed(PlainSites(call.model), call.rng_key), data=values)
        for name, site in handlers.trace(model).get_trace(*args, **kwargs).items():
            if name in names and site["type"] == "sample":
                leaves = jax.tree.leaves(biject_to(site["fn"].support))
                if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                    raise ModelStructureError(
                        f"the support of site '{name}' ({sites[name].family}) depends on {list(call.changing)}, which "
                        "changing= says are to change. Give its bounds as other arguments of the model.",
                        site=name,
                    )

    jax.eval_shape(look, call.changing_values())


def other_values(examples: Mapping[str, Any], arrays: Mapping[str, Any]) -> list[Array]:
    """The leaves of arguments that change, with the values that are given in the place of their examples.

    :param examples: by name, arrays or their shapes and dtypes.
    :param arrays: by name, of the same shapes; of those left out the examples stay.
    :raises ValueError: naming an argument that is none of these, or has another shape or kind.
    """
    unknown = sorted(set(arrays) - set(examples))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of the arguments that change, which are {list(examples)}.")
    out: list[Array] = []
    wanted: Any
    structure: Any
    for name in sorted(examples):  # as leaves of a tree are
        example = examples[name]
        wanted, structure = jax.tree.flatten(example)
        given, other = jax.tree.flatten(arrays.get(name, example))
        if structure != other:
            raise ValueError(f"Argument {name!r} is to have the structure {structure}, and has {other}.")
        for old, new in zip(wanted, given, strict=True):
            array = new if isinstance(new, jax.Array | np.ndarray) else np.asarray(new)
            fits = np.shape(array) == np.shape(old) and np.can_cast(array.dtype, old.dtype, "same_kind")
            if not fits:
                raise ValueError(
                    f"Argument {name!r} was read as {old.dtype}{list(old.shape)}, and is {array.dtype}"
                    f"{list(np.shape(array))}. Read the model anew for other shapes: engine.program(...)."
                )
            out.append(jnp.asarray(array, old.dtype))
    return out
