"""Values of a few elements of a large value, without the others: the program is followed backwards from each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import GatherScatterMode

from ..dependence import ELEMENTWISE
from ..equations import Atom, Constant, Equation, apply_equation
from ..program import Program
from .costs import ROW_COSTS, RowCosts
from .selected import KNOWN_MODES, looked_up

_Places = tuple[Array, ...]
"""Places of some elements, along each axis of a value."""


_KEEPS_ZERO = frozenset(
    "neg convert_element_type copy copy_p reshape squeeze expand_dims transpose broadcast_in_dim rev slice reduce_sum "
    "cumsum real imag conj div".split()
)


class _Values(NamedTuple):
    """Values of a program."""

    program: Program
    known: dict[int, Any]
    """Gains what is made as a whole on the way."""
    zeros: frozenset[int]
    found: dict[Any, tuple[_Places, Array]]
    """Values found at some places, with these, by their identities: two ways may lead to a value."""
    costs: RowCosts


def vanishing(program: Program, inputs: Iterable[int]) -> frozenset[int]:
    """Values that are zero where some inputs are, as long as nothing is infinite."""
    found: set[Atom] = set(inputs)
    for eqn in program.equations:
        name = eqn.primitive.name
        are_zero = [not np.any(a.value) if isinstance(a, Constant) else a in found for a in eqn.inputs]
        is_zero = (name in _KEEPS_ZERO and are_zero[0]) or (name in ("mul", "dot_general") and any(are_zero))
        if is_zero or (name in ("add", "sub", "add_any") and all(are_zero)):
            found.update(eqn.outputs)
    return frozenset(a for a in found if isinstance(a, int))


def evaluate_by_elements(
    program: Program,
    wanted: Iterable[Atom],
    env: Mapping[int, Any],
    zeros: frozenset[int] = frozenset(),
    costs: RowCosts = ROW_COSTS,
) -> list[Any]:
    """Evaluate, as :meth:`~numpyro_ext.structure.program.program.Program.evaluate` does, where large values that are
    only looked up in are not made.

    :param zeros: values that are known to be zero.
    :param RowCosts costs: by which values are large.
    """
    return _extend(_Values(program, dict(env), zeros, {}, costs), list(wanted))


def _extend(values: _Values, wanted: Sequence[Atom]) -> list[object]:
    program, known, *_ = values
    for index in sorted(program.needed(wanted, known)):
        eqn = program.equations[index]
        number, shape = eqn.outputs[0], program.shape(eqn.outputs[0])
        if number not in known and _looks_up_little(values, eqn):
            places = tuple(place.reshape(-1) for place in jnp.indices(shape, jnp.int32))
            found = _of_gather(values, eqn, places)
            if found is not None:
                known[number] = found.reshape(shape)
    return program.extend(wanted, known)


def _looks_up_little(values: _Values, eqn: Equation) -> bool:
    shape = values.program.shape
    if eqn.primitive.name != "gather" or eqn.inputs[0] in values.known or not shape(eqn.outputs[0]):
        return False
    size, costs = math.prod(shape(eqn.inputs[0])), values.costs
    return size > costs.large_value and size >= costs.least_gain * math.prod(shape(eqn.outputs[0]))


def selected_values(
    program: Program, atom: Atom, index: Array, env: Mapping[int, Array], costs: RowCosts = ROW_COSTS
) -> Array:
    """Elements of a value.

    :param Program program: that computes it.
    :param atom: the value.
    :param index: flat numbers of the elements, shape ``(n,)``.
    :param env: inputs, constants, or any values to take as given.
    :param RowCosts costs: by which values are large.
    :return: shape ``(n,)``.
    """
    values = _Values(program, dict(env), frozenset(), {}, costs)
    return _at(values, atom, jnp.unravel_index(index, program.shape(atom)))


def _at(values: _Values, atom: Atom, places: _Places) -> Array:
    """The elements at ``places``, arrays of one shape; of a number, itself."""
    key = None if isinstance(atom, Constant) else (atom, *map(id, places))
    if key in values.found:
        return values.found[key][1]
    program, known, zeros, _, costs = values
    shape, found = program.shape(atom), None
    if isinstance(atom, int) and shape:
        if atom in zeros:
            found = jnp.zeros(places[0].shape, program.avals[atom].dtype)
        elif atom not in known and math.prod(shape) >= costs.least_gain * places[0].size:
            found = _of_equation(values, program.equations[program.defined_by[atom]], places)
    if found is None:
        value = jnp.asarray(_extend(values, [atom])[0])
        found = value.at[places].get(mode="promise_in_bounds") if shape else value
    if key is not None:
        values.found[key] = places, found
    return found


def _of_equation(values: _Values, eqn: Equation, places: _Places) -> Array | None:
    """The same of the result of an equation; ``None`` where that is not known element by element."""
    name, params, shape = eqn.primitive.name, eqn.params, values.program.shape
    if name in ELEMENTWISE and len(eqn.outputs) == 1:
        return apply_equation(eqn, [_at(values, a, _aligned(places, shape(a))) for a in eqn.inputs])[0]
    if name == "broadcast_in_dim":
        kept, source = tuple(places[axis] for axis in params["broadcast_dimensions"]), eqn.inputs[0]
        return jnp.broadcast_to(_at(values, source, _aligned(kept, shape(source))), places[0].shape)
    if name == "transpose":
        moved = sorted(zip(params["permutation"], places, strict=True), key=itemgetter(0))
        return _at(values, eqn.inputs[0], tuple(place for _, place in moved))
    if name == "dot_general":
        return _of_product(values, eqn, places)
    return _of_gather(values, eqn, places) if name == "gather" else None


def _aligned(places: _Places, shape: tuple[int, ...]) -> _Places:
    """The same in an array of another shape that is repeated along axes of length one."""
    if not shape:
        return ()
    return tuple(jnp.zeros_like(place) if length == 1 else place for place, length in zip(places, shape, strict=True))


def _of_product(values: _Values, eqn: Equation, places: _Places) -> Array:
    contract, batch = eqn.params["dimension_numbers"]
    shapes = [values.program.shape(a) for a in eqn.inputs]
    length = math.prod(shapes[0][axis] for axis in contract[0])
    start, chosen = len(batch[0]), []
    for side in (0, 1):
        free = [axis for axis in range(len(shapes[side])) if axis not in (*contract[side], *batch[side])]
        whole = jnp.asarray(_extend(values, [eqn.inputs[side]])[0])
        whole = jnp.transpose(whole, (*batch[side], *free, *contract[side]))
        own = (*places[: len(batch[0])], *places[start : start + len(free)])
        start += len(free)
        chosen.append(whole.at[own].get(mode="promise_in_bounds").reshape(-1, length))
    return jnp.sum(chosen[0] * chosen[1], axis=-1)


def _of_gather(values: _Values, eqn: Equation, places: _Places) -> Array | None:
    if eqn.params["dimension_numbers"].operand_batching_dims or eqn.params["mode"] not in KNOWN_MODES:
        return None
    operand, where = eqn.inputs
    own, is_inside = looked_up(eqn, places, jnp.asarray(_extend(values, [where])[0]), values.program.shape(operand))
    found = _at(values, operand, own)
    if eqn.params["mode"] is not GatherScatterMode.FILL_OR_DROP:
        return found
    fill = eqn.params["fill_value"]
    return jnp.where(is_inside, found, jnp.nan if fill is None else fill)
