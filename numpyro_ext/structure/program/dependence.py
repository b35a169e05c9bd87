"""Dependence of elements on elements: sparsity patterns pushed through a program.

An operation that is not known makes every output element depend on every input element, which can cost speed or a
refusal, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .equations import Atom, Constant, Equation, apply_equation, apply_to_known, inner_jaxpr, is_opaque_call
from .patterns import (
    MAX_ENTRIES,
    Pattern,
    TooLarge,
    as_array,
    broadcast,
    check_size,
    cumulate,
    deduplicate,
    everything,
    merge,
    or_nothing,
    reduce_axes,
    same_width,
)
from .program import Program
from .questions import Questions

ConcreteFn = Callable[..., Any]
"""Function that gives known values, as :meth:`Questions.decide`."""

ELEMENTWISE = frozenset(
    "add add_any sub mul div rem neg abs sign floor ceil round exp exp2 log log1p expm1 tanh tan sin cos asin acos "
    "atan atan2 sinh cosh asinh acosh atanh sqrt rsqrt cbrt square pow integer_pow logistic max min clamp erf erfc "
    "erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a random_gamma_grad bessel_i0e bessel_i1e zeta "
    "regularized_incomplete_beta nextafter is_finite eq ne lt le gt ge eq_to le_to lt_to and or not xor select_n "
    "convert_element_type copy copy_p reduce_precision real imag conj stop_gradient optimization_barrier".split()
)
MOVEMENT = frozenset("reshape transpose squeeze expand_dims broadcast_in_dim rev slice tile".split())
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split()
)
CUMULATIVE = frozenset("cumsum cumprod cummax cummin cumlogsumexp".split())


def propagate(
    eqn: Equation, patterns: Sequence[Pattern | None], program: Program, concrete: ConcreteFn
) -> Sequence[Pattern]:
    """Patterns of the outputs of one equation.

    :param patterns: per input its pattern, or None where it does not depend on any seed.
    :param concrete: gives the value of an atom if it is known without any input, else None (for gather indices).
    """
    shapes = [tuple(program.avals[n].shape) for n in eqn.outputs]
    try:
        return _propagate(eqn, [None if p is None else as_array(p) for p in patterns], program, concrete, shapes)
    except TooLarge:
        return everything(patterns, shapes)


def _propagate(
    eqn: Equation,
    patterns: list[np.ndarray | None],
    program: Program,
    concrete: ConcreteFn,
    shapes: list[tuple[int, ...]],
) -> Sequence[Pattern]:
    name = eqn.primitive.name
    if is_opaque_call(eqn):
        return _through_call(eqn, patterns, concrete)
    if name == "optimization_barrier":
        return [or_nothing(p, s) for p, s in zip(patterns, shapes, strict=True)]
    if name == "select_n" and patterns[0] is None and sum(p is not None for p in patterns) > 1:
        which = concrete(eqn.inputs[0])
        if which is not None:
            return [_chosen(np.asarray(which), patterns[1:], shapes[0])]
    if name in ELEMENTWISE:
        return [merge([broadcast(p, shapes[0]) for p in patterns if p is not None])]
    if name in MOVEMENT:
        found = None if patterns[0] is None else moved(eqn, patterns[0], shapes[0])
        return [_apply_per_slot(eqn, patterns, [None] * len(patterns)) if found is None else found]
    if name in ("concatenate", "stack"):
        return [_join(eqn, patterns, program)]
    if name == "pad":
        return [_pad(eqn, patterns, program)]
    if name in ("gather", "dynamic_slice"):
        return [_indexed(eqn, patterns, concrete, shapes)]
    if name in ("scatter", "scatter-add", "scatter_add", "dynamic_update_slice"):
        return [_updated(eqn, patterns, program, concrete, shapes)]
    if name == "dot_general":
        sparse = _dot_with_known(eqn, patterns, concrete, shapes[0])
        return [_dot(eqn, patterns, shapes[0]) if sparse is None else sparse]
    first = patterns[0]
    if name == "conv_general_dilated" and first is not None and patterns[1] is None and _is_plain_convolution(eqn):
        return [_convolve(eqn, first, program)]
    if first is not None and name == "split":
        return np.split(first, np.cumsum(eqn.params["sizes"])[:-1], axis=eqn.params["axis"])
    if first is not None and name in REDUCTIONS:
        return [reduce_axes(first, tuple(eqn.params["axes"]))]
    if first is not None and name in CUMULATIVE:
        return [cumulate(first, eqn.params["axis"], eqn.params.get("reverse", False))]
    return everything(patterns, shapes)


def _chosen(which: np.ndarray, cases: Sequence[np.ndarray | None], shape: tuple[int, ...]) -> np.ndarray:
    """Each element depends on what that of its case does."""
    full = same_width([broadcast(or_nothing(case, shape), shape) for case in cases])
    if all(case is full[0] or np.array_equal(case, full[0]) for case in full):
        return full[0]
    numbers = np.broadcast_to(which, shape).astype(int)[None, ..., None]
    return deduplicate(np.take_along_axis(np.stack(full), numbers, axis=0)[0])


def moved(eqn: Equation, pattern: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Move elements by NumPy, which compiles nothing, or None for what it does not know."""
    name, params, slots = eqn.primitive.name, eqn.params, pattern.shape[-1]
    if name in ("squeeze", "expand_dims") or (name == "reshape" and params.get("dimensions") is None):
        return pattern.reshape(*shape, slots)
    if name == "transpose":
        return np.transpose(pattern, (*params["permutation"], pattern.ndim - 1))
    if name == "broadcast_in_dim":
        aligned = [1] * len(shape)
        for axis, length in zip(params["broadcast_dimensions"], pattern.shape, strict=False):
            aligned[axis] = length
        return np.broadcast_to(pattern.reshape(*aligned, slots), (*shape, slots))
    if name == "rev":
        return np.flip(pattern, params["dimensions"])
    if name == "slice":
        strides = params["strides"] or (1,) * len(shape)
        cuts = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        return pattern[tuple(slice(*cut) for cut in cuts)]
    return None


def _apply_per_slot(eqn: Equation, patterns: Sequence[Any], others: Sequence[Any]) -> np.ndarray:
    """Apply an operation that only moves elements to every slot of the one pattern among its inputs."""
    which = next(i for i, p in enumerate(patterns) if p is not None)
    pattern = patterns[which]
    if eqn.params.get("fill_value") is not None:
        eqn = eqn._replace(params={**eqn.params, "fill_value": -1})
    slots = []
    for slot in range(pattern.shape[-1]):
        values = [pattern[..., slot].astype(np.int32) if i == which else others[i] for i in range(len(patterns))]
        slots.append(np.asarray(apply_to_known(eqn, values)[0]))
    if not slots:  # of a value of nothing, such as a product over an axis without elements: the shape alone
        nothing = [np.full(pattern.shape[:-1], -1, np.int32) if i == which else others[i] for i in range(len(patterns))]
        return np.zeros((*np.shape(apply_to_known(eqn, nothing)[0]), 0), np.int64)
    out = np.stack(slots, axis=-1).astype(np.int64)
    return np.where(out < 0, -1, out)


def _join(eqn: Equation, patterns: Sequence[object], program: Program) -> np.ndarray:
    full = same_width([or_nothing(p, program.shape(a)) for p, a in zip(patterns, eqn.inputs, strict=True)])
    if eqn.primitive.name == "stack":
        return np.stack(full, axis=eqn.params.get("axis", eqn.params.get("dimension", 0)))
    return np.concatenate(full, axis=eqn.params["dimension"])


def _pad(eqn: Equation, patterns: Sequence[Any], program: Program) -> np.ndarray:
    operand = or_nothing(patterns[0], program.shape(eqn.inputs[0]))
    padding = [-1] if patterns[1] is None else list(np.ravel(patterns[1]))
    slots = []
    for slot in range(max(operand.shape[-1], len(padding))):
        inside = operand[..., slot] if slot < operand.shape[-1] else np.full(operand.shape[:-1], -1)
        value = padding[slot] if slot < len(padding) else -1
        both = [jnp.asarray(inside, jnp.int32), jnp.asarray(value, jnp.int32)]
        slots.append(np.asarray(apply_equation(eqn, both)[0]))
    return np.stack(slots, axis=-1).astype(np.int64)


def _indexed(
    eqn: Equation, patterns: Sequence[Any], concrete: ConcreteFn, shapes: Sequence[tuple[int, ...]]
) -> Pattern:
    indices = [concrete(a) for a in eqn.inputs[1:]]
    if patterns[0] is None or any(p is not None for p in patterns[1:]) or any(i is None for i in indices):
        return everything(patterns, shapes)[0]
    return _apply_per_slot(eqn, patterns, [None, *indices])


def _updated(
    eqn: Equation, patterns: Sequence[Any], program: Program, concrete: ConcreteFn, shapes: Sequence[tuple[int, ...]]
) -> Pattern:
    """Scatter and dynamic_update_slice: elements of the operand, replaced by or added to elements of the update."""
    is_scatter, is_sum = eqn.primitive.name.startswith("scatter"), eqn.primitive.name in ("scatter-add", "scatter_add")
    where_update = 2 if is_scatter else 1
    index_positions = [1] if is_scatter else list(range(2, len(eqn.inputs)))
    indices = {i: concrete(eqn.inputs[i]) for i in index_positions}
    if any(patterns[i] is not None for i in index_positions) or any(v is None for v in indices.values()):
        return everything(patterns, shapes)[0]
    operand = or_nothing(patterns[0], program.shape(eqn.inputs[0]))
    update = or_nothing(patterns[where_update], program.shape(eqn.inputs[where_update]))

    def bind(base: np.ndarray, new: np.ndarray) -> np.ndarray:
        values: list[Any] = [None] * len(eqn.inputs)
        values[0], values[where_update] = jnp.asarray(base, jnp.int32), jnp.asarray(new, jnp.int32)
        for i, v in indices.items():
            values[i] = v
        if is_sum:
            # the equation itself carries a program that adds numbers of its own dtype
            options = {n: eqn.params[n] for n in ("dimension_numbers", "unique_indices", "indices_are_sorted", "mode")}
            return np.asarray(jax.lax.scatter_add(*values, **options))
        return np.asarray(apply_equation(eqn, values)[0])

    if is_sum:
        hits = bind(np.zeros(operand.shape[:-1]), np.ones(update.shape[:-1]))
        if hits.max(initial=0) > 1:
            return everything(patterns, shapes)[0]
        # without collisions, adding (id + 1) to zeros places each id where it is added
        placed = [bind(np.zeros(operand.shape[:-1]), update[..., s] + 1) - 1 for s in range(update.shape[-1])]
        return merge([operand, np.stack(placed, axis=-1).astype(np.int64)])
    operand, update = same_width([operand, update])
    return np.stack([bind(operand[..., s], update[..., s]) for s in range(operand.shape[-1])], -1).astype(np.int64)


def _dot(eqn: Equation, patterns: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    (contract_l, contract_r), (batch_l, batch_r) = eqn.params["dimension_numbers"]
    parts = []
    for side, (pattern, contract, batch) in enumerate(
        zip(patterns, (contract_l, contract_r), (batch_l, batch_r), strict=True)
    ):
        if pattern is None:
            continue
        free = [i for i in range(pattern.ndim - 1) if i not in contract and i not in batch]
        moved = np.transpose(pattern, (*batch, *free, *contract, pattern.ndim - 1))
        lead = moved.shape[: len(batch) + len(free)]
        check_size(moved.size)
        moved = deduplicate(moved.reshape(*lead, -1))
        num_batch, num_other = len(batch), len(shape) - len(lead)
        if side == 0:
            moved = moved.reshape(*lead, *(1,) * num_other, moved.shape[-1])
        else:
            moved = moved.reshape(*lead[:num_batch], *(1,) * num_other, *lead[num_batch:], moved.shape[-1])
        parts.append(broadcast(moved, shape))
    return merge(parts)


def _dot_with_known(
    eqn: Equation, patterns: Sequence[Any], concrete: ConcreteFn, shape: tuple[int, ...]
) -> np.ndarray | None:
    """Product with a known array that has zeros, contracted over one axis; None for all other products."""
    contract, batch = eqn.params["dimension_numbers"]
    side = 0 if patterns[0] is None else 1
    if batch[0] or len(contract[0]) != 1 or (patterns[0] is None) == (patterns[1] is None):
        return None
    is_there = concrete(eqn.inputs[side], only_zeros=True)
    if is_there is None:
        return None
    pattern = np.moveaxis(patterns[1 - side], contract[1 - side][0], 0)
    present = np.moveaxis(np.asarray(is_there), contract[side][0], -1)
    lead, width = present.shape[:-1], int(present.sum(-1).max(initial=0))
    if width >= present.shape[-1] or np.prod(shape) * max(width, 1) * pattern.shape[-1] > MAX_ENTRIES:
        return None
    # the places of the nonzero numbers of each row first, then one place of none
    order = np.argsort(~present, axis=-1, kind="stable")[..., : max(width, 1)]
    is_place = np.take_along_axis(present, order, -1)
    met = np.where(is_place.reshape(*is_place.shape, *(1,) * (pattern.ndim - 1)), pattern[order], -1)
    met = deduplicate(np.moveaxis(met, len(lead), -2).reshape(*lead, *pattern.shape[1:-1], -1))
    if side == 1:
        met = np.moveaxis(met, range(len(lead)), range(-1 - len(lead), -1))
    return met


def _is_plain_convolution(eqn: Equation) -> bool:
    steps = (*eqn.params["window_strides"], *eqn.params["lhs_dilation"], *eqn.params["rhs_dilation"])
    one_group = eqn.params["feature_group_count"] == eqn.params["batch_group_count"] == 1
    return one_group and all(n == 1 for n in steps) and all(n >= 0 for both in eqn.params["padding"] for n in both)


def _convolve(eqn: Equation, pattern: np.ndarray, program: Program) -> np.ndarray:
    """Each element depends on all that its window covers, in all features."""
    numbers = eqn.params["dimension_numbers"]
    kernel = program.shape(eqn.inputs[1])
    features, *window = (kernel[i] for i in (numbers.rhs_spec[0], *numbers.rhs_spec[2:]))
    moved = np.transpose(pattern, (*numbers.lhs_spec, pattern.ndim - 1))
    moved = np.pad(moved, [(0, 0), (0, 0), *eqn.params["padding"], (0, 0)], constant_values=-1)
    check_size(moved.size * float(np.prod(window)))
    seen = np.lib.stride_tricks.sliding_window_view(moved, window, tuple(range(2, 2 + len(window))))
    # batch, feature, places, slots, window -> batch, places, everything else
    seen = np.moveaxis(seen, 1, -1)
    lead = seen.shape[: 1 + len(window)]
    found = deduplicate(seen.reshape(*lead, -1))
    found = np.broadcast_to(found[:, None], (lead[0], features, *found.shape[1:]))
    return np.transpose(found, (*np.argsort(numbers.out_spec), found.ndim - 1))


def _through_call(eqn: Equation, patterns: Sequence[Any], concrete: ConcreteFn) -> list[Pattern]:
    inner = inner_jaxpr(eqn.params)
    assert inner is not None
    program = Program(inner)
    seeds = {n: p for n, p in zip(program.inputs, patterns, strict=True) if p is not None}
    known = {n: concrete(a) for n, a in zip(program.inputs, eqn.inputs, strict=True)}
    known = {number: value for number, value in known.items() if value is not None}
    found = dependence(Questions(program, program.data, known), seeds)
    shapes = [program.shape(a) for a in program.outputs]
    return [
        or_nothing(found.get(a) if isinstance(a, int) else None, s)
        for a, s in zip(program.outputs, shapes, strict=True)
    ]


def dependence(
    questions: Questions, seeds: Mapping[int, Pattern], wanted: Sequence[Atom] | None = None
) -> dict[int, Pattern]:
    """Patterns of all values that depend on the ``seeds`` (values with given patterns, not looked behind).

    :param questions: the program and its data, of which indices are asked.
    :param wanted: restrict the work to what these values need.
    """
    patterns: dict[int, Pattern] = dict(seeds)
    program = questions.program
    cache: dict[tuple[Atom, bool], Any] = {}

    def concrete(atom: Atom, *, only_zeros: bool = False) -> Any:
        if (atom, only_zeros) not in cache:
            known = None if atom in patterns else questions.decide(atom, only_zeros=only_zeros)
            cache[atom, only_zeros] = known
        return cache[atom, only_zeros]

    # patterns are concrete even where the caller is being compiled
    with jax.ensure_compile_time_eval():
        for index in sorted(program.needed(program.outputs if wanted is None else wanted, seeds)):
            eqn = program.equations[index]
            inputs = [None if isinstance(a, Constant) else patterns.get(a) for a in eqn.inputs]
            if any(p is not None for p in inputs):
                for number, pattern in zip(eqn.outputs, propagate(eqn, inputs, program, concrete), strict=True):
                    patterns.setdefault(number, pattern)
    return patterns
