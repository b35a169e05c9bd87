"""Operations on integers that are known when a model is read, such as indices: by NumPy, which compiles nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np


def _broadcast(params: Mapping[str, Any], values: np.ndarray) -> np.ndarray:
    shape = np.ones(len(params["shape"]), int)
    shape[list(params["broadcast_dimensions"])] = values.shape
    return np.broadcast_to(values.reshape(shape), params["shape"])


def _gather(params: Mapping[str, Any], operand: np.ndarray, indices: np.ndarray) -> np.ndarray | None:
    """``operand[indices]`` along the leading axis, and nothing more general."""
    numbers, mode = params["dimension_numbers"], str(params["mode"])
    trailing = tuple(range(indices.ndim - 1, indices.ndim - 2 + operand.ndim))
    is_take = (numbers.collapsed_slice_dims, numbers.start_index_map, numbers.offset_dims) == ((0,), (0,), trailing)
    is_take &= not numbers.operand_batching_dims and indices.shape[-1] == 1
    if not is_take or tuple(params["slice_sizes"]) != (1, *operand.shape[1:]) or not operand.size:
        return None
    rows, last = indices[..., 0], operand.shape[0] - 1
    out = operand[np.clip(rows, 0, last)]
    if mode.endswith("FILL_OR_DROP"):
        fill = params["fill_value"]
        inside = ((rows >= 0) & (rows <= last)).reshape(rows.shape + (1,) * (operand.ndim - 1))
        return np.where(inside, out, np.asarray(np.iinfo(out.dtype).min if fill is None else fill, out.dtype))
    return out if mode.endswith(("CLIP", "PROMISE_IN_BOUNDS")) else None


_ELEMENTWISE: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_OTHERS: dict[str, Callable[..., np.ndarray | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": lambda params, values: values.reshape(params["new_sizes"]) if params["dimensions"] is None else None,
    "squeeze": lambda params, values: np.squeeze(values, tuple(params["dimensions"])),
    "convert_element_type": lambda params, values: (
        values.astype(params["new_dtype"]) if np.dtype(params["new_dtype"]).kind in "iu" else None
    ),
    "select_n": lambda params, which, *cases: (
        np.where(which, cases[1], cases[0]).astype(cases[0].dtype) if which.dtype == bool and len(cases) == 2 else None
    ),
    "gather": _gather,
}


def known_result(name: str, params: Mapping[str, object], values: Sequence[Any]) -> np.ndarray | None:
    """Result of an operation on known integers, by NumPy; ``None`` if it is none that indices commonly go through.

    :param str name: of the primitive.
    :param params: of the equation.
    :param values: of its inputs, arrays of JAX or of NumPy.
    """
    if not (name in _ELEMENTWISE or name in _OTHERS) or not all(map(_is_integer, values)):
        return None
    if name in _OTHERS:
        return _OTHERS[name](params, *(np.asarray(value) for value in values))
    # A literal has no dtype of its own: it has that of the array which it meets.
    dtypes = {np.dtype(value.dtype) for value in values if np.ndim(value)}
    if len(dtypes) != 1:
        return None
    dtype = dtypes.pop()
    return _ELEMENTWISE[name](*(np.asarray(value, dtype) for value in values))


def _is_integer(value: object) -> bool:
    if isinstance(value, jax.core.Tracer) or not isinstance(value, jax.Array | np.ndarray | np.generic | int):
        return False
    # Random keys have a dtype of their own.
    return isinstance(value, int) or (isinstance(value.dtype, np.dtype) and value.dtype.kind in "iub")
