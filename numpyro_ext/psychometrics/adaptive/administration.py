"""Rules that stand between scores and the item that is asked: exposure of items, shares of content, end of a test."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array, random
from numpy.typing import NDArray

from ...compilation.store import shared
from ...compilation.transfer import generator_of
from ...infer.front.options import check_at_least
from .bank import Floats
from .beliefs import Ints

_STEPS_AT_ONCE = 32


@dataclass(frozen=True)
class Stop:
    """End of a test: the first of the conditions that holds.

    :param float standard_error: largest posterior standard deviation of the traits at which a test is over; zero if it
        does not matter.
    :param int num_items: number of answers, or ``None``.
    """

    standard_error: float = 0.0
    num_items: int | None = None

    @classmethod
    def of(cls, stop: Mapping[str, Any] | None, bank_size: int) -> Stop:
        """Read ``{"standard_error": 0.3, "num_items": 30}``.

        :raises ValueError: for other names, and numbers that are not positive.
        """
        given = dict(stop or {})
        unknown = sorted(set(given) - {"standard_error", "num_items"})
        if unknown:
            raise ValueError(f"stop has no {unknown}; it takes 'standard_error' and 'num_items'.")
        error, number = given.get("standard_error"), given.get("num_items")
        if error is not None and not (math.isfinite(float(error)) and float(error) > 0.0):
            raise ValueError(f"stop: standard_error must be positive, got {error!r}.")
        if number is not None:
            check_at_least(1, num_items=number)
            if number > bank_size:
                raise ValueError(f"stop: {number} items are more than the {bank_size} of the bank.")
        return cls(0.0 if error is None else float(error), None if number is None else int(number))

    def reason(self, num_answers: int, standard_error: float, num_left: int) -> str | None:
        """Reason why a test is over, or ``None``."""
        if self.num_items is not None and num_answers >= self.num_items:
            return f"it has {num_answers} answers"
        if standard_error <= self.standard_error:
            return f"its standard error is {standard_error:.3g}"
        return "no item is left" if num_left == 0 else None


@dataclass(frozen=True, eq=False)
class Administration:
    """Choice of items from their scores.

    :param int randomesque: number of best items of which one is drawn (Kingsbury and Zara 1989).
    :param rates: probability that an item which is chosen is asked, shape ``(items,)`` (Sympson and Hetter 1985).
    :param areas: number of the content area of each item, shape ``(items,)``.
    :param shares: share of each area in a test.
    """

    randomesque: int = 1
    rates: Floats | None = None
    areas: Ints | None = None
    shares: Floats | None = None

    @classmethod
    def of(cls, exposure: Mapping[str, Any] | None, content: Any, num_items: int) -> Administration:
        """Read the options of a test.

        :param exposure: ``{"randomesque": k}`` or ``{"sympson_hetter": rates}``.
        :param content: areas of the items and a dictionary of the share of each area.
        :param int num_items: size of the bank.
        :raises ValueError: if they do not go with the bank.
        """
        exposure = dict(exposure or {})
        unknown = sorted(set(exposure) - {"randomesque", "sympson_hetter"})
        if unknown:
            raise ValueError(f"exposure has no {unknown}; it takes 'randomesque' and 'sympson_hetter'.")
        number, rates = exposure.get("randomesque", 1), exposure.get("sympson_hetter")
        check_at_least(1, randomesque=number)
        if rates is not None:
            rates = np.asarray(rates, float)
            if rates.shape != (num_items,) or not ((rates >= 0.0) & (rates <= 1.0)).all():
                raise ValueError(f"exposure: sympson_hetter must be {num_items} probabilities, one for each item.")
        areas, shares = (None, None) if content is None else _content(content, num_items)
        return cls(int(number), rates, areas, shares)

    def barred(self, num_people: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Items that a person is not asked although they may be chosen, shape ``(people, items)``.

        The experiment of Sympson and Hetter is made once for each person and item.
        """
        assert self.rates is not None
        return rng.random((num_people, len(self.rates))) > self.rates

    def chosen(self, scores: Floats, asked: NDArray[np.bool_], rng: np.random.Generator) -> Ints:
        """The item of each person with the largest score that the rules allow, minus one if none is left.

        :param scores: shape ``(people, items)``, minus infinity for no candidate.
        :param asked: items that have been answered, shape ``(people, items)``.
        :param rng: for equal scores, and the draw among the best.
        """
        scores = np.array(scores, float)
        if np.isnan(scores).any():
            raise FloatingPointError(f"{int(np.isnan(scores).sum())} scores are nan.")
        is_left = scores > -np.inf
        if self.areas is not None and self.shares is not None:
            is_in = self.areas[:, None] == np.arange(len(self.shares))
            counts = asked.astype(float) @ is_in
            # Behind its share after the next item; an area without items left or without a share comes last.
            behind = self.shares * (counts.sum(1, keepdims=True) + 1.0) - counts
            behind = np.where(is_left.astype(float) @ is_in > 0.0, behind, -np.inf)
            scores = np.where(self.areas == behind.argmax(1)[:, None], scores, -np.inf)
        number = min(self.randomesque, scores.shape[1])
        ties = rng.random(scores.shape)
        if number == 1:
            best = scores == scores.max(1, keepdims=True)
            items = np.where(best, ties, -1.0).argmax(1)
        else:
            kth = np.partition(scores, -number, axis=1)[:, -number, None]
            items = np.where((scores >= kth) & (scores > -np.inf), ties, -1.0).argmax(1)
        return np.where(is_left.any(1), items, -1)


def _content(content: Any, num_items: int) -> tuple[Ints, Floats]:
    try:
        areas, shares = content
        names = list(shares)
        labels = np.asarray(areas)
    except (TypeError, ValueError) as error:
        raise ValueError("content must be a pair: the area of each item, and a dictionary of shares.") from error
    if labels.shape != (num_items,):
        raise ValueError(f"content must name the area of each of the {num_items} items; got shape {labels.shape}.")
    values = np.array([float(shares[name]) for name in names])
    if not (np.isfinite(values).all() and (values >= 0.0).all() and values.sum() > 0.0):
        raise ValueError(f"content: shares must be positive, got {dict(shares)}.")
    unknown = sorted({str(label) for label in labels.tolist()} - {str(name) for name in names})
    if unknown:
        raise ValueError(f"content: the areas {unknown} have no share, and shares are of {names}.")
    numbers = {str(name): number for number, name in enumerate(names)}
    empty = [
        name for name, value in zip(names, values, strict=True) if value > 0.0 and str(name) not in labels.astype(str)
    ]
    if empty:
        raise ValueError(f"content: the areas {empty} have a share and no item.")
    return np.array([numbers[str(label)] for label in labels.tolist()]), values / values.sum()


def generator(rng_key: Array) -> np.random.Generator:
    """A generator of NumPy that a key of JAX determines."""
    return generator_of(rng_key)


class StepKeys:
    """Keys of the steps of a test, which follow from one key, some of them made at once: one by one they take longer
    than all else that is computed for a proposal.

    :param rng_key: of the test; that of a step is ``jax.random.fold_in(rng_key, step)``.
    """

    def __init__(self, rng_key: Array) -> None:
        self._rng_key = rng_key
        self._found: dict[int, tuple[Array, NDArray[np.uint32]]] = {}

    def at(self, step: int) -> tuple[Array, np.random.Generator]:
        """The key of a step, and :func:`generator` of it."""
        if step not in self._found:
            first = step - step % _STEPS_AT_ONCE
            keys, words = shared(_keys_of_steps)(self._rng_key, np.arange(first, first + _STEPS_AT_ONCE))
            self._found |= zip(
                range(first, first + _STEPS_AT_ONCE), zip(keys, np.asarray(words), strict=True), strict=True
            )
        key, numbers = self._found[step]
        return key, np.random.default_rng(numbers)


def _keys_of_steps() -> Callable[..., tuple[list[Array], Array]]:
    def compute(rng_key: Array, steps: Array) -> tuple[list[Array], Array]:
        keys = jax.vmap(lambda step: random.fold_in(rng_key, step))(steps)
        return list(keys), random.key_data(keys)

    return jax.jit(compute)
