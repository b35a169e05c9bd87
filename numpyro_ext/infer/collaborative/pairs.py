"""Pairs that users compared, in a few batches of users with about as many pairs each."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from ...linalg.padding import cheapest_levels
from ...linalg.saved_names import saved_as
from ...structure.model.running.pandas_arguments import check_rows

_MOST_SHAPES = 6
_COST_OF_PAIR = 200  # of a pair in a step, where factorising the covariance of n items costs their cube
_COST_OF_SHAPE = 1e6  # of compiling for one more shape, some seconds: as much as a few hundred steps of such a cost
_LARGEST_BATCH = 2**24  # elements of the covariances of the users of a batch


class Pairs(NamedTuple):
    """Comparisons, each of which somebody decided for the winner."""

    user: np.ndarray
    winner: np.ndarray
    loser: np.ndarray

    def take(self, chosen: np.ndarray) -> Pairs:
        """Some of the pairs."""
        return Pairs(*(part[chosen] for part in self))


@saved_as("UserBatch")
class UserBatch(NamedTuple):
    """Users side by side, each with the items that its pairs touch; padded to the largest numbers of both."""

    users: np.ndarray
    """Shape ``(n,)``; ``-1`` where there is none."""
    items: Array
    """Items that a user compared, shape ``(n, touched)``, padded by the number of items."""
    winner: Array
    """The winner of each pair as a place among the items of its user, shape ``(n, pairs)``."""
    loser: Array
    observed: Array
    """False where there is no pair, shape ``(n, pairs)``."""

    def take(self, chosen: np.ndarray, num_items: int | None = None) -> UserBatch:
        """Some of the users; nobody at places of -1, for which the number of items is needed."""
        users, items, winner, loser, observed = self
        taken = UserBatch(users[chosen], items[chosen], winner[chosen], loser[chosen], observed[chosen])
        if num_items is None:
            return taken
        nobody = chosen < 0
        return taken._replace(
            users=np.where(nobody, -1, taken.users),
            items=jnp.where(nobody[:, None], num_items, taken.items),
            observed=taken.observed & ~nobody[:, None],
        )


def checked_pairs(pairs: object, num_users: int | None, num_items: int) -> tuple[Pairs, int, int]:
    """The pairs with the winner first, the number of users, and how often an item was compared with itself.

    :param pairs: columns ``user, first, second`` and perhaps ``won``: an array or table of that many columns, or a
        tuple of arrays.
    :param num_users: ``None`` for one more than the largest.
    :param int num_items: number of items.
    :raises ValueError: for columns that are none of these, that are no integers, or that are out of range.
    """
    columns = _columns(pairs)
    if len(columns) not in (3, 4):
        raise ValueError(
            "pairs must have the columns user, winner and loser, or user, first, second and won (0 or 1); got "
            f"{len(columns)} columns. A table of pairs has a row for each; columns by themselves go in a tuple."
        )
    names = ("user", "winner", "loser") if len(columns) == 3 else ("user", "first", "second", "won")
    check_rows(zip(names, columns, strict=True))
    arrays = [np.asarray(column) for column in columns]
    if len({array.shape for array in arrays}) > 1 or arrays[0].ndim != 1:
        raise ValueError(f"{', '.join(names)} must be vectors of one length; got {[a.shape for a in arrays]}.")
    indices = arrays[:3]
    for name, array in zip(names, indices, strict=False):
        if array.dtype.kind not in "biuf":
            raise ValueError(
                f"{name} must hold integers from zero; got {array.dtype}. Numbers for names are "
                "np.unique(names, return_inverse=True)[1]."
            )
        _refuse(name, array, ~np.isfinite(array) | (array != np.floor(array)), "must hold integers")
    if num_users is None:
        num_users = int(np.max(indices[0], initial=-1)) + 1
    whole = [array.astype(int) for array in indices]
    for name, index, size in zip(names, whole, (num_users, num_items, num_items), strict=False):
        if index.size and not 0 <= index.min() <= index.max() < size:
            raise ValueError(f"{name} must lie in 0, ..., {size - 1}; got values from {index.min()} to {index.max()}.")
    user, first, second = whole
    won = checked_outcomes(arrays[3], user.size) if len(arrays) == 4 else np.ones(user.size, bool)
    if not user.size:
        raise ValueError("There are no pairs: nothing to learn from.")
    found = Pairs(user, np.where(won, first, second), np.where(won, second, first))
    is_same = first == second
    return found.take(~is_same), num_users, int(is_same.sum())


def checked_outcomes(won: ArrayLike, num: int) -> np.ndarray:
    """Outcomes of pairs, checked: one where the first item won.

    :param won: one where it did, else zero.
    :param int num: number of pairs.
    :raises ValueError: for outcomes that are none, naming the first, or that are not one for each pair.
    """
    array = np.asarray(won)
    if array.shape != (num,):
        raise ValueError(f"won must hold one outcome for each of {num} pairs; got shape {array.shape}.")
    if array.dtype.kind not in "biuf":
        raise ValueError(f"won must hold ones and zeros; got {array.dtype}.")
    _refuse("won", array, ~np.isin(array, (0, 1)), "must be 0 or 1")
    return np.asarray(array == 1)


def _refuse(name: str, array: np.ndarray, is_wrong: np.ndarray, what: str) -> None:
    if is_wrong.any():
        first = int(np.argmax(is_wrong))
        raise ValueError(
            f"{name} {what}; {int(is_wrong.sum())} of {array.size} are not, the first is {array[first]} at index "
            f"{first}."
        )


def warn_of_self_comparisons(num: int) -> None:
    """Say of how many pairs nothing is learned, if there are any."""
    if num:
        warnings.warn(
            f"{num} pair{'s compare' if num > 1 else ' compares'} an item with itself, which says nothing of it: left "
            "out.",
            UserWarning,
            stacklevel=3,
        )


def _columns(pairs: Any) -> list[Any]:
    """By name where there are names, else by place."""
    if isinstance(pairs, tuple):
        return list(pairs)
    if hasattr(pairs, "keys"):  # a data frame, or a dictionary
        given = list(pairs.keys())
        for names in (("user", "first", "second", "won"), ("user", "winner", "loser")):
            if set(names) <= set(given):
                return [pairs[name] for name in names]
        if isinstance(pairs, Mapping) or set(given) & {"user", "first", "second", "won", "winner", "loser"}:
            raise ValueError(
                "A table of pairs has columns named user, winner and loser, or user, first, second and won; got "
                f"{', '.join(map(str, given))}."
            )
    table = np.asarray(pairs)
    if table.ndim != 2:
        raise ValueError(f"pairs must be a table, or a tuple of columns; got an array of shape {table.shape}.")
    return list(table.T)


def batches_of_users(pairs: Pairs, num_items: int, sizes: Sequence[tuple[int, int]] | None = None) -> list[UserBatch]:
    """Users with pairs, in batches of few shapes: with few pairs together, and with many.

    :param Pairs pairs: the comparisons.
    :param int num_items: number of items.
    :param sizes: of batches, pairs and touched items, for batches of the same shapes each time; else the least.
    """
    users, number, counts = np.unique(pairs.user, return_inverse=True, return_counts=True)
    order = np.argsort(number, kind="stable")
    starts = np.cumsum(counts) - counts
    own = [order[start : start + count] for start, count in zip(starts, counts, strict=True)]
    touched = [np.unique([pairs.winner[mine], pairs.loser[mine]]) for mine in own]
    if sizes is None:
        level = _levels(np.array([items.size for items in touched]), counts)
    else:
        level = np.searchsorted([size[0] for size in sizes], counts)
    batches: list[UserBatch] = []
    for each in np.unique(level):
        members = np.flatnonzero(level == each)
        if sizes is None:
            num_pairs, width = counts[members].max(), max(touched[k].size for k in members)
        else:
            num_pairs, width = sizes[each]
        per_batch = max(1, min(len(members), _LARGEST_BATCH // width**2))
        for start in range(0, len(members), per_batch):
            part = members[start : start + per_batch]
            batches.append(_batch(pairs, users, own, touched, part, (per_batch, num_pairs, width), num_items))
    return batches


def _levels(
    widths: np.ndarray, counts: np.ndarray, most_shapes: int = _MOST_SHAPES, cost_of_shape: float = _COST_OF_SHAPE
) -> np.ndarray:
    """For each user one of a few levels such that padding all to the largest of their level costs least."""
    sizes, place, members = np.unique(widths, return_inverse=True, return_counts=True)
    pairs = np.zeros(sizes.size)
    np.maximum.at(pairs, place, counts)
    users, last = np.append(0, np.cumsum(members)), np.arange(sizes.size)
    cost = np.full((sizes.size, sizes.size), np.inf)  # of a level that holds the sizes from one to another
    for first in last:
        padded = sizes[first:] ** 3.0 + _COST_OF_PAIR * np.maximum.accumulate(pairs[first:])
        cost[first, first:] = (users[first + 1 :] - users[first]) * padded + cost_of_shape
    return cheapest_levels(cost, most_shapes)[place]


def _batch(
    pairs: Pairs,
    users: np.ndarray,
    own: list[np.ndarray],
    touched: list[np.ndarray],
    members: np.ndarray,
    shape: tuple[int, int, int],
    num_items: int,
) -> UserBatch:
    size, num_pairs, width = shape
    who, items = np.full(size, -1), np.full((size, width), num_items)
    winner, loser, observed = (np.zeros((size, num_pairs), kind) for kind in (int, int, bool))
    for row, k in enumerate(members):
        who[row] = users[k]
        items[row, : touched[k].size] = touched[k]
        count = own[k].size
        winner[row, :count] = np.searchsorted(touched[k], pairs.winner[own[k]])
        loser[row, :count] = np.searchsorted(touched[k], pairs.loser[own[k]])
        observed[row, :count] = True
    return UserBatch(who, *map(jnp.asarray, (items, winner, loser, observed)))
