"""Answers of people to items as numbers: from tables of pandas, lists and arrays, with what does not fit refused."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .item_families import ItemGroup

__all__ = [
    "Answers",
    "answers_in_records",
    "answers_in_table",
    "checked_answers",
    "mask_of_table",
    "warn_of_degenerate_items",
]

_MOST_NAMES = 5
_MOST_PEOPLE = 5000
"""Rows at which a table is looked for reversed items."""
_FEW_PEOPLE_TO_GUESS = 1000


class Answers(NamedTuple):
    """Answers as numbers."""

    values: Any
    """Shape ``(people, items)``, or ``(records,)``: integers as they were given, or floating point with ``nan`` where
    there is no answer."""
    names: Sequence[str]
    """One for each item."""
    relabelled: Sequence[str] = ()
    """Labels of a table that stand for different numbers in different items."""

    @property
    def is_concrete(self) -> bool:
        return not isinstance(self.values, jax.core.Tracer)

    @property
    def are_integers(self) -> bool:
        """True if all are there, and none is between two categories."""
        return bool(jnp.issubdtype(self.values.dtype, jnp.integer))

    def in_table(self, person: np.ndarray, item: np.ndarray, shape: tuple[int, int]) -> Answers:
        """Records as a table; of several answers of a person to an item the last one."""
        if not self.is_concrete:
            return self
        table = np.full(shape, np.nan)
        table[person, item] = np.asarray(self.values)
        return Answers(table, self.names)


def answers_in_table(response: Any, num_items: int) -> Answers:
    """Answers of people to items, one column each; a table of pandas has the names of its columns."""
    if hasattr(response, "columns") and hasattr(response, "iloc"):
        names = [str(name) for name in response.columns]
        columns = [_numbers(response.iloc[:, k], f"Column {names[k]!r}") for k in range(len(names))]
        return Answers(np.stack(columns, -1), names, _relabelled(response, names))
    return Answers(_numbers(response, "response"), [f"item {k}" for k in range(num_items)])


def _relabelled(table: Any, names: Sequence[str]) -> list[str]:
    """Labels whose numbers differ between columns, as a ``Categorical`` of each numbers those that it has."""
    found: dict[object, dict[int, str]] = {}
    for name, dtype in zip(names, table.dtypes, strict=True):
        for number, label in enumerate(getattr(dtype, "categories", ())):
            found.setdefault(label, {}).setdefault(number, name)
    return [
        f"{label!r} ({', '.join(f'{number} in {name}' for number, name in places.items())})"
        for label, places in found.items()
        if len(places) > 1
    ]


def mask_of_table(mask: Any, response: Any, shape: tuple[int, int]) -> Any:
    """A mask whose columns are in the order of those of the answers, where both are tables with the same names.

    :param shape: of the answers.
    :raises ValueError: for a mask of another shape.
    """
    given = np.shape(mask) if mask is not None else ()
    if len(given) > 2 or any(own not in (1, size) for own, size in zip(given[::-1], shape[::-1], strict=False)):
        raise ValueError(f"mask must have the shape of the answers, {shape}; got {given}.")
    if not all(hasattr(table, "columns") and table.columns.is_unique for table in (mask, response)):
        return mask
    return mask[list(response.columns)] if set(mask.columns) == set(response.columns) else mask


def answers_in_records(response: Any, num_items: int) -> Answers:
    """Answers one below the other."""
    return Answers(_numbers(response, "response"), [f"item {k}" for k in range(num_items)])


def _numbers(values: Any, name: str) -> Any:
    """A column or an array as floating point, with ``nan`` for what is missing; integers stay what they are.

    :raises ValueError: for text and for categories without an order, which have no numbers.
    """
    if isinstance(values, jax.core.Tracer):
        return values.astype(jnp.result_type(values, float))
    category = getattr(getattr(values, "dtype", None), "categories", None)
    if category is not None:  # a Categorical of pandas
        if not values.dtype.ordered and len(category) > 2:
            raise ValueError(
                f"{name} has categories without an order, {list(category)}: give their order, "
                "pandas.Categorical(values, categories=[...], ordered=True), or codes 0, 1, ... for a nominal model."
            )
        codes = np.asarray(getattr(values, "cat", values).codes, float)
        return np.where(codes < 0, np.nan, codes)
    if hasattr(values, "to_numpy"):
        array = values.to_numpy(dtype=object) if values.dtype.kind not in "biuf" else values.to_numpy()
    else:
        array = np.asarray(values)
    if array.dtype.kind in "iuf":
        return array
    if array.dtype.kind == "b":
        return array.astype(np.int8)
    flat = [np.nan if _is_missing(value) else value for value in array.ravel()]
    words = sorted({str(value) for value in flat if isinstance(value, str)})
    if words or array.dtype.kind not in "O":
        raise ValueError(
            f"{name} holds words such as {', '.join(map(repr, words[:3]))}: answers are numbers 0, 1, ... Give "
            "their order, pandas.Categorical(values, categories=[...], ordered=True), or map them."
        )
    try:
        return np.array(flat, float).reshape(array.shape)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must hold numbers, 0, 1, ...; {error}.") from error


def _is_missing(value: Any) -> bool:
    return value is None or type(value).__name__ in ("NAType", "NaTType") or value != value  # noqa: PLR0124


def checked_answers(answers: Answers, groups: Sequence[ItemGroup], item: np.ndarray | None = None) -> None:
    """Refuse answers that are not among the categories of their items.

    :param item: the item of each answer, for records.
    :raises ValueError: naming the first item with such an answer.
    """
    if not answers.is_concrete:
        return
    values = np.asarray(answers.values)
    for group in groups:
        if group.num_categories is None:
            infinite = _first(np.isinf(values), answers, group, item)
            if infinite is not None:
                raise ValueError(f"An answer to {infinite[0]} is infinite.")
            continue
        between = None
        if not answers.are_integers:
            between = _first(np.isfinite(values) & (values != np.round(values)), answers, group, item)
        if between is not None:
            raise ValueError(
                f"An answer to {between[0]} is {between[1]:g}, between two categories. A {group.family} item has "
                f"answers 0 to {group.num_categories - 1}."
            )
        outside = (values < 0) | (values >= group.num_categories)
        wrong = _first(outside, answers, group, item)
        if wrong is not None:
            from_one = not np.any(values[..., group.items] == 0) if item is None else not np.any(values == 0)
            hint = "; no answer is 0, so if they are counted from one, subtract one" if from_one else ""
            raise ValueError(
                f"An answer to {wrong[0]} is {wrong[1]:g}; a {group.family} item has answers 0 to "
                f"{group.num_categories - 1}{hint}. Missing answers are nan."
            )


def _first(wrong: np.ndarray, answers: Answers, group: ItemGroup, item: np.ndarray | None) -> tuple[str, float] | None:
    """Name of the first item of a group with a wrong answer, and the answer."""
    of_group = np.isin(np.arange(len(answers.names)), group.items)
    wrong = wrong & (of_group if item is None else of_group[item])
    if not wrong.any():
        return None
    place = tuple(index[0] for index in np.nonzero(wrong))
    return answers.names[place[1] if item is None else item[place[0]]], float(np.asarray(answers.values)[place])


def _some(names: Sequence[str] | np.ndarray) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")


def warn_of_degenerate_items(
    answers: Answers,
    groups: Sequence[ItemGroup],
    num_parameters: int,
    traits: np.ndarray | None,
    pattern: np.ndarray | None,
) -> None:
    """Warn of items whose maximum likelihood estimates are infinite or meaningless, by name, in one warning.

    :param num_parameters: number of parameters of the items.
    :param traits: the trait that each item measures with a positive slope, -1 for none alone; ``None`` if slopes have
        either sign.
    :param pattern: -1, 0 and 1, shape ``(items, traits)``.
    """
    if not answers.is_concrete:
        return
    values, names = np.asarray(answers.values), np.asarray(answers.names)
    found: list[str] = []

    def note(items: Any, what: str) -> None:
        if len(items):
            found.append(f"{what}: {_some(names[list(items)])}")

    if answers.relabelled:
        found.append(
            f"labels with another number in other items, {_some(answers.relabelled)} (give all items one list of "
            "categories, unless this is meant)"
        )
    known = np.isfinite(values)
    note(np.flatnonzero(~known.any(0)), "items without answers")
    if answers.are_integers and len(values):
        low, high = values.min(0), values.max(0)
    else:
        low, high = np.min(np.where(known, values, np.inf), 0), np.max(np.where(known, values, -np.inf), 0)
    note(np.flatnonzero(low == high), "items with one answer only, whose estimates are infinite")
    for group in groups:
        if group.num_categories is not None and group.num_categories > 2:
            counts = np.array([[np.sum(values[:, k] == c) for c in range(group.num_categories)] for k in group.items])
            unused = group.items[(counts == 0).any(1) & (low < high)[group.items]]
            note(unused, "items with unused categories (give the number of each, num_categories=[...], or merge them)")
    groups_of_equal: dict[bytes, list[int]] = {}
    for k in range(values.shape[1]):
        groups_of_equal.setdefault(np.ascontiguousarray(values[:, k]).tobytes(), []).append(k)
    for equal in groups_of_equal.values():
        note(
            equal if len(equal) > 1 and low[equal[0]] < high[equal[0]] else [],
            "items with the same answers, whose slopes run away",
        )
    if traits is not None:
        note(
            _reversed(values[:_MOST_PEOPLE], traits),
            "reversed items (signed=True allows negative slopes, or turn their answers round)",
        )
    if any(group.family in ("3pl", "4pl") for group in groups) and len(values) < _FEW_PEOPLE_TO_GUESS:
        found.append(f"{len(values)} people hardly tell guessing from difficulty: priors=True keeps it near 0.23")
    if known.sum() < num_parameters:
        found.append(f"fewer answers ({known.sum()}) than parameters of items ({num_parameters})")
    numbers = [group.num_categories for group in groups for _ in group.items]
    if None not in numbers and (possible := np.prod(np.array(numbers, float)) - 1) < num_parameters:
        few = f"frequencies of answers that data can tell ({possible:.0f}) than parameters of items ({num_parameters})"
        found.append(f"fewer {few} (ask more items, or priors=True)")
    if pattern is not None:
        _, counts = np.unique(np.abs(pattern), axis=1, return_counts=True)
        if counts.max() > 1:
            found.append("traits that are measured by the same items, and so are known up to a rotation")
    empty = int(np.sum(~known.any(1)))
    if empty:
        found.append(f"people without answers, whose traits are those of the population: {empty}")
    if found:
        warnings.warn("Items to look at. " + "; ".join(found) + ".", UserWarning, stacklevel=3)


def _reversed(values: np.ndarray, traits: np.ndarray) -> list[int]:
    """Items that load negatively on the first principal component of their trait, by three standard errors.

    The component has the sign of most items.
    """
    out: list[int] = []
    for trait in np.unique(traits[traits >= 0]):
        places = np.flatnonzero(traits == trait)
        known = np.isfinite(values[:, places])
        number = np.maximum(known.sum(0), 1)
        filled = np.where(known, values[:, places], 0.0)
        centred = np.where(known, filled - filled.sum(0) / number, 0.0)
        spread = np.sqrt(np.sum(centred**2, 0) / number)
        varies = spread > 0
        if varies.sum() < 3:
            continue
        scores = centred[:, varies] / spread[varies]
        both = known[:, varies].astype(float)
        correlations = scores.T @ scores / np.maximum(both.T @ both, 1.0)
        eigenvalues, vectors = np.linalg.eigh(correlations)
        loadings = np.sqrt(max(eigenvalues[-1], 0.0)) * vectors[:, -1]
        loadings = loadings * np.sign(np.sum(np.sign(loadings)) or loadings[0])
        out += list(places[varies][loadings < -3.0 / np.sqrt(number[varies])])
    return out
