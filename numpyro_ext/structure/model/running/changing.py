"""Arguments without whose values a model is read: data of its form that may become others of the same shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to

from ...errors import ModelStructureError, Reason
from ...program.program import make_program
from .execution import ModelCall, bound_arguments, line_of_model
from .inspection import SiteInfo
from .plain_sites import PlainSites

_Read = TypeVar("_Read")


def read_with_changing(
    call: ModelCall, names: str | Sequence[str] | None, read: Callable[[tuple[str, ...]], _Read]
) -> _Read:
    """Read a model without the values of some arguments; of all that hold arrays and whose values it does not need, if
    none are named.

    :param ModelCall call: of the model.
    :param names: of the arguments, or ``None``.
    :param read: of the names of arguments, reads the model without their values.
    :raises ModelStructureError: if the model needs the values of those that are named, or of all.
    """
    if names is not None:
        return read((names,) if isinstance(names, str) else tuple(names))
    there, _ = bound_arguments(call.model, call.args, call.kwargs)
    arrays = tuple(name for name, value in there.items() if _holds_arrays(value))
    if not arrays:
        raise ModelStructureError(
            f"no argument of the model holds an array of numbers ({', '.join(there) or 'it has none'}), and a program "
            "is a function of such: let the model take its data as arguments.",
            reason=Reason.DATA,
        )
    try:
        return read(arrays)
    except ModelStructureError as error:
        refusal = error
    read(())  # says what is wrong with the model itself
    if len(arrays) == 1:
        raise refusal
    found: _Read | None = None
    kept: tuple[str, ...] = ()
    for name in arrays:
        try:
            found = read((*kept, name))
        except ModelStructureError:
            continue
        kept = (*kept, name)
    if found is None:
        raise refusal
    return found


def _holds_arrays(value: object) -> bool:
    """True if an argument is an array, or a tree of arrays (lists of numbers among them), and holds numbers alone."""
    leaves = jax.tree.leaves(value)
    kinds = [leaf.dtype.kind if isinstance(leaf, jax.Array) else np.asarray(leaf).dtype.kind for leaf in leaves]
    is_long = isinstance(value, list) or any(np.ndim(leaf) > 0 for leaf in leaves)
    return bool(leaves) and is_long and all(kind in "iufb" for kind in kinds)


def needs_value(
    call: ModelCall, error: Exception, trace: Callable[[Mapping[str, object]], object]
) -> ModelStructureError:
    """The error for a model that does not run without the values of the arguments that change, naming those.

    :param error: that it raised.
    :param trace: of some of these arguments by name, runs the model without their values.
    """

    def fails(name: str, value: object) -> bool:
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

    def look(changing: Mapping[str, object]) -> dict[str, list[Array]]:
        args, kwargs = call.with_values(changing)
        model = handlers.substitute(handlers.seed(PlainSites(call.model), call.rng_key), data=values)
        found = {}
        for name, site in handlers.trace(model).get_trace(*args, **kwargs).items():
            if name in names and site["type"] == "sample":
                leaves = jax.tree.leaves(biject_to(site["fn"].support))
                found[name] = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        return found

    changing = call.changing_values()
    # What is computed of other arguments has no value within a trace, either.
    program, bounds = make_program(look, changing, keep_literals=True)
    inputs = jax.tree.unflatten(jax.tree.structure(changing), program.inputs)
    for name, atoms in bounds.items():
        behind = program.ancestors(atoms)
        found = [argument for argument in changing if behind.intersection(jax.tree.leaves(inputs[argument]))]
        if found:
            raise ModelStructureError(
                f"the support of site '{name}' ({sites[name].family}) depends on {found}, which changing= says are to "
                "change. Give its bounds as other arguments of the model.",
                site=name,
            )


def other_values(examples: Mapping[str, object], arrays: Mapping[str, object]) -> list[Array]:
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
