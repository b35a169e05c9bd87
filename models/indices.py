"""Indices of items, users and cells, outcomes, sizes and kernels among the arguments of a model."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

__all__ = ["checked_indices", "checked_kernel", "checked_outcomes", "checked_rankings", "checked_size", "checked_table"]

_LARGEST_FACTORED = 500  # a look at these takes next to no time


def checked_indices(**indices: tuple[ArrayLike, int | None]) -> list[np.ndarray]:
    """Indices as concrete arrays of one length, which JAX would clip without a word were they out of range.

    Each name has its values and how many places there are; ``None`` for one more than the largest value.
    """
    out = []
    for name, (values, given) in indices.items():
        index = np.asarray(values)
        if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer):
            raise ValueError(
                f"{name} must be a vector of integers; got {index.dtype} of shape {index.shape}. "
                f"np.unique({name}, return_inverse=True)[1] makes numbers of labels."
            )
        size = int(index.max(initial=-1)) + 1 if given is None else given
        if index.size and not 0 <= index.min() <= index.max() < size:
            raise ValueError(f"{name} must lie in 0, ..., {size - 1}; got values from {index.min()} to {index.max()}.")
        out.append(index)
    if len({index.shape for index in out}) > 1:
        shapes = " and ".join(str(index.shape) for index in out)
        raise ValueError(f"{' and '.join(indices)} must have the same length; got {shapes}.")
    return out


def checked_outcomes(
    name: str, values: ArrayLike | None, num: int, size: int, *, is_ordered: bool = False
) -> ArrayLike | None:
    """Outcomes ``0, ..., size - 1``, one for each of ``num`` comparisons, as an array; ``None`` where there are none.

    Of ordered ones the message says how other numbers become levels. What is not finite is left to the engine, which
    says how to leave it out.
    """
    if values is None or isinstance(values, jax.core.Tracer):
        return values
    array = np.asarray(values)
    if array.shape != (num,):
        raise ValueError(f"{name} must hold one outcome for each of {num} comparisons; got shape {array.shape}.")
    if not (array.dtype == bool or np.issubdtype(array.dtype, np.number)):
        raise ValueError(f"{name} must hold numbers, 0 to {size - 1}; got {array.dtype}.")
    wrong = np.isfinite(array) & ~np.isin(array, np.arange(size))
    if np.any(wrong):
        known, hint = " or ".join(map(str, range(size))) if size < 3 else f"0 to {size - 1}", ""
        if is_ordered:
            found = np.unique(array[np.isfinite(array)])
            hint = (
                f" np.unique({name}, return_inverse=True)[1] makes levels of the {found.size} values that occur: "
                f"{found[0]:g} becomes 0, and {found[-1]:g} becomes {found.size - 1}."
            )
        raise ValueError(
            f"{name} must be {known}; {int(wrong.sum())} of {num} are not, the first is {array[wrong][0]} at index "
            f"{int(np.argmax(wrong))}.{hint}"
        )
    return values if isinstance(values, jax.Array) else array


def checked_size(name: str, value: Any) -> int:
    """A number of things, such as a rank, as a Python integer; no boolean, which is one to Python."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{name} must be an integer; got {value!r}.")


def checked_kernel(name: str, kernel: ArrayLike) -> tuple[Array, int]:
    """A covariance of items or users, and how many there are; where it is known and not large, that it is one."""
    shape = np.shape(kernel)
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"{name} must be a square matrix; got shape {shape}.")
    if not isinstance(kernel, jax.core.Tracer) and shape[0] <= _LARGEST_FACTORED and not _is_covariance(kernel):
        raise ValueError(
            f"{name} must be symmetric and positive definite: items (or users) that are alike in all features make it "
            "singular. Add a share of the identity, such as 0.1 * np.eye(len(kernel))."
        )
    return jnp.asarray(kernel, float), shape[0]


def _is_covariance(kernel: ArrayLike) -> bool:
    values = np.asarray(kernel, jnp.result_type(float))
    if not np.allclose(values, values.T, rtol=1e-4):
        return False
    try:
        return bool(np.isfinite(np.linalg.cholesky(values)).all())
    except np.linalg.LinAlgError:
        return False


def checked_table(name: str, values: ArrayLike) -> np.ndarray:
    """Values as an array, whose rows are of one length."""
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ValueError(
            f"{name} has rows of different lengths. Rankings of fewer items end in -1, in a table as wide as the "
            "longest, and num_ranked says of each how many entries count."
        ) from error


def checked_rankings(rankings: np.ndarray, num_ranked: np.ndarray, num_items: int) -> None:
    """Refuse rankings whose entries that count are no different items, counted from zero."""
    if len(rankings) != len(num_ranked):
        raise ValueError(f"num_ranked has {len(num_ranked)} numbers, for {len(rankings)} rankings.")
    if rankings.dtype.kind not in "iu" or num_ranked.dtype.kind not in "iu":
        raise ValueError(
            f"rankings and num_ranked must hold integers; got {rankings.dtype} and {num_ranked.dtype}. Rankings of "
            "fewer items end in -1."
        )
    for k, (ranking, num) in enumerate(zip(rankings, num_ranked, strict=True)):
        counted = ranking[:num]
        if not 1 <= num <= rankings.shape[1]:
            raise ValueError(f"num_ranked must be from 1 to {rankings.shape[1]}; got {num} for ranking {k}.")
        if not 0 <= counted.min() <= counted.max() < num_items:
            raise ValueError(f"Ranking {k} must hold items from 0 to {num_items - 1}; got {counted.tolist()}.")
        if np.unique(counted).size < num:
            raise ValueError(
                f"Ranking {k} has an item twice: {counted.tolist()}. Items that are tied have no order: end the "
                "ranking before them (num_ranked), or give their order at random."
            )
