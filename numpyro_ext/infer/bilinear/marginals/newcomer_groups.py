"""Newcomers with similar numbers of ratings, whose cells fill the same number of slots."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....linalg.padding import cheapest_levels, places_within, rounded_up
from ..algorithms.ratings.newcomers import Met, NewState

_MOST_GROUPS, _WORTH_GROUPS = 4, 2**16
"""Largest number of groups, and the number of empty slots from which on they pay for their compilation."""


def slots_of(person: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Cells of each of so many vectors, filled up to a number of slots that many data share, and how many there are."""
    number = np.bincount(person, minlength=num)
    slots = np.zeros((num, _num_slots(int(number.max(initial=0)))), int)
    slots[person, places_within(person, num)] = np.arange(person.size)
    return slots, number


def first_slots(slots: np.ndarray, num_used: int | np.ndarray) -> Array:
    """True in the first so many slots of each vector."""
    return jnp.asarray(np.arange(slots.shape[1]) < np.broadcast_to(num_used, len(slots))[:, None])


def groups_of(number: np.ndarray) -> list[np.ndarray]:
    """Newcomers in groups of similar numbers of ratings; one group where few slots would be empty.

    :param number: of the ratings of each newcomer.
    :return: numbers of the newcomers of each group, in order.
    """
    widths, of = np.unique([_num_slots(n) for n in number.tolist()], return_inverse=True)
    if number.size * int(widths[-1]) - int(number.sum()) < _WORTH_GROUPS:
        return [np.arange(number.size)]
    before = np.concatenate([[0], np.cumsum(np.bincount(of))])
    level = cheapest_levels((before[1:] - before[:-1, None]) * widths.astype(float), _MOST_GROUPS)[of]
    return [np.flatnonzero(level == one) for one in range(level.max() + 1)]


def only(met: Met, people: np.ndarray) -> tuple[Met, np.ndarray]:
    """Some of the newcomers, and the numbers of their cells.

    :param people: their numbers, in order.
    """
    person = np.asarray(met.person)
    cells = np.flatnonzero(np.isin(person, people))
    of_cells, of_people = (partial(_taken, places=jnp.asarray(places)) for places in (cells, people))
    part = Met(
        met.form.taken(jnp.asarray(cells)),
        jnp.asarray(np.searchsorted(people, person[cells])),
        of_people(met.prior),
        *(of_cells(x) for x in (met.coefficient, met.offset, met.noise, met.held_cuts)),
        *(of_people(x) for x in (met.own_cuts, met.own_noise)),
    )
    return part, cells


def in_order(states: list[NewState], people: list[np.ndarray], cells: list[np.ndarray]) -> NewState:
    """States of all newcomers, from those of groups with these newcomers and cells."""
    of_people, of_cells = (np.argsort(np.concatenate(numbers)) for numbers in (people, cells))
    vectors, noise, cuts = (
        jax.tree.map(lambda *x, places=places: jnp.concatenate(x)[places], *parts)
        for places, parts in (
            (of_people, [state.vectors for state in states]),
            (of_people, [state.noise for state in states]),
            (of_cells, [state.cuts for state in states]),
        )
    )
    return NewState(vectors, noise, cuts)


def _num_slots(number: int) -> int:
    """A number of slots that many data share."""
    return rounded_up(max(number, 1), 2)


def _taken(values: Any, places: Array) -> Any:
    return jax.tree.map(lambda x: x[places], values)
