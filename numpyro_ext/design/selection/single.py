"""From scores to what is observed next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax import Array, random
from numpy.typing import ArrayLike


class Candidate(NamedTuple):
    """One possible observation."""

    site: str
    place: int | tuple[int, ...]
    """Its place; a number where observations have one axis."""
    score: float


def select(
    scores: object,
    size: int | None = None,
    *,
    cost: ArrayLike | Mapping[str, ArrayLike] | None = None,
    budget: float | None = None,
    exclude: ArrayLike | Mapping[str, ArrayLike] | None = None,
    rng_key: Array | None = None,
) -> Any:
    """The candidates of the largest scores, or of the largest scores per cost.

    Scores of several are those of each for itself: two candidates that would tell the same are both taken, of which
    :func:`~numpyro_ext.design.select_batch` takes one.

    :param scores: an array, or what a score returns, a dictionary of arrays by site. Minus infinity is no candidate.
    :param int size: how many; one by default, or as many as the budget pays for.
    :param cost: of each candidate, positive; in the shape of the scores, or broadcasting against them.
    :param float budget: what all of them may cost together: taken in turn as long as they can be paid.
    :param exclude: booleans, true for what is not to be taken.
    :param rng_key: which of equal scores; a fixed key if left out.
    :return: of an array of one axis a whole number, of more axes a tuple; of a dictionary ``(site, place, score)``; a
        list of these if a size or a budget was given.
    :raises ValueError: if nothing is left, fewer than ``size`` are, scores are nan, or costs are not positive.

    **Example:**

    >>> from numpyro_ext.design import select
    >>> print(select([0.1, 0.7, 0.4]), select([0.1, 0.7, 0.4], 2), select([0.1, 0.7, 0.4], cost=[1, 10, 1]))
    1 [1, 2] 2
    >>> print(select({"y": [0.1, 0.7]}))
    Candidate(site='y', place=1, score=0.7)
    """
    by_site = scores if isinstance(scores, Mapping) else {"": scores}
    arrays = {name: np.asarray(value, float) for name, value in by_site.items()}
    for what, given in (("cost", cost), ("exclude", exclude)):
        unknown = sorted(set(given) - set(arrays)) if isinstance(given, Mapping) else []
        if unknown:
            raise ValueError(f"{what} names {unknown}, and there are scores of {list(arrays)}.")
    if size is not None and not (isinstance(size, int | np.integer) and size >= 1):
        raise ValueError(f"size must be a whole number of at least one, got {size!r}.")
    flat, costs = [], []
    for name, array in arrays.items():
        if np.isnan(array).any():
            raise ValueError(f"{int(np.isnan(array).sum())} scores{_of(name)} are nan.")
        price = _in_shape("cost", _for(cost, name, 1.0), name, array, float)
        if not (np.isfinite(price).all() and (price > 0.0).all()):
            raise ValueError(f"Costs{_of(name)} must be positive, got {price.min() if price.size else price}.")
        left = ~_in_shape("exclude", _for(exclude, name, False), name, array, bool)
        flat.append(np.where(left, array, -np.inf).reshape(-1))
        costs.append(price.reshape(-1))
    values, prices = np.concatenate([*flat, np.empty(0)]), np.concatenate([*costs, np.empty(0)])
    number = int((values > -np.inf).sum())
    if number == 0:
        raise ValueError("No candidate is left: every score is minus infinity or excluded.")
    wanted = number if size is None and budget is not None else size or 1
    if wanted > number:
        raise ValueError(f"{wanted} candidates are asked for, and {number} are left.")
    rate = values if cost is None else values / prices
    order = np.argsort(-rate, kind="stable")[:number]
    if np.any(rate[order][1:] == rate[order][:-1]):  # a random order first, so that equal scores come in it
        shuffled = np.asarray(random.permutation(random.key(0) if rng_key is None else rng_key, len(values)))
        order = shuffled[np.argsort(-rate[shuffled], kind="stable")][:number]
    chosen: list[int] = []
    spent = 0.0
    for candidate in order.tolist():
        if len(chosen) == wanted:
            break
        if budget is None or spent + prices[candidate] <= budget:
            chosen.append(candidate)
            spent += prices[candidate]
    if not chosen:
        raise ValueError(f"The budget of {budget} pays for no candidate; the cheapest costs {prices[order].min():.3g}.")
    found = [_candidate(*_place(arrays, k), values[k], isinstance(scores, Mapping)) for k in chosen]
    return found if size is not None or budget is not None else found[0]


def _place(arrays: Mapping[str, np.ndarray], number: int) -> tuple[str, tuple[int, ...]]:
    """The site and the index of one of all scores, counted through."""
    for name, array in arrays.items():
        if number < array.size:
            return name, tuple(map(int, np.unravel_index(number, array.shape)))
        number -= array.size
    raise IndexError(number)


def _candidate(name: str, index: tuple[int, ...], score: float, has_sites: bool) -> Candidate | int | tuple[int, ...]:
    place = int(index[0]) if len(index) == 1 else tuple(map(int, index))
    return Candidate(name, place, float(score)) if has_sites else place


def _in_shape(what: str, given: ArrayLike, name: str, scores: np.ndarray, dtype: type) -> np.ndarray:
    array: np.ndarray = np.asarray(given)
    if array.dtype.kind not in ("b" if dtype is bool else "buif"):
        kind = "booleans, true for what is not to be taken" if dtype is bool else "numbers"
        raise ValueError(f"{what}{_of(name)} must hold {kind}; got {given!r}.")
    array = array.astype(dtype)
    try:
        return np.broadcast_to(array, scores.shape)
    except ValueError as error:
        raise ValueError(f"{what} has the shape {array.shape}, and the scores{_of(name)} {scores.shape}.") from error


def _for(given: object, name: str, default: object) -> Any:
    if given is None:
        return default
    return given.get(name, default) if isinstance(given, Mapping) else given


def _of(name: str) -> str:
    return f" of {name!r}" if name else ""
