"""Observations chosen together: what each adds to those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jax import Array, random
from numpy.typing import ArrayLike

_TIE = 1e-12
"""Relative to the largest value: below it two are equal, and a key decides."""
_SINGULAR = 1e-10
"""Share of the largest eigenvalue, below which a direction is known already."""


class Batch(list[Any]):
    """Observations that are made together, in the order in which they were chosen.

    :ivar gains: of each, what it adds to those before it, in nats.
    :ivar information: of all together, the sum of the gains.
    :ivar str method: how they were computed.
    :ivar str guarantee: how far the greedy choice may be from the best one of its size.
    """

    def __init__(self, members: Iterable[object], gains: Iterable[float], method: str, guarantee: str) -> None:
        super().__init__(members)
        self.gains = [float(gain) for gain in gains]
        self.method, self.guarantee = method, guarantee

    @property
    def information(self) -> float:
        return float(sum(self.gains))

    def __repr__(self) -> str:
        return f"Batch({list(self)}, {self.information:.4g} nats by {self.method})"


def greedy(
    gains: Callable[[], np.ndarray],
    take: Callable[[int], None],
    size: int,
    *,
    is_candidate: np.ndarray,
    cost: np.ndarray | None = None,
    rng_key: Array | None = None,
) -> tuple[list[int], list[float]]:
    """The candidate with the largest gain (or gain per cost), then the one with the largest gain after it, and so on.

    :param gains: of all candidates after those that have been taken.
    :param take: takes one.
    :param int size: how many.
    :param is_candidate: which may be taken, shape ``(n,)``; each once.
    :param cost: of each, positive.
    :param rng_key: among equal ones.
    :return: the numbers of those taken, and what each added.
    :raises ValueError: if there are too few.
    """
    left = np.array(is_candidate, bool)
    check_size(size, int(left.sum()))
    order = np.asarray(random.permutation(random.key(0) if rng_key is None else rng_key, len(left)))
    chosen: list[int] = []
    found: list[float] = []
    while len(chosen) < size:
        if chosen:
            take(chosen[-1])
        gain = np.asarray(gains(), float)
        if not np.isfinite(gain[left]).all():
            raise FloatingPointError("What some candidates would tell is not finite: are their predictors?")
        rate = np.where(left, gain if cost is None else gain / cost, -np.inf)
        is_best = rate >= rate.max() - _TIE * max(1.0, abs(rate.max()))
        best = int(order[np.flatnonzero(is_best[order])[0]])
        left[best] = False
        chosen.append(best)
        found.append(float(gain[best]))
    return chosen, found


def check_size(size: object, number: int) -> None:
    """Refuse what is no size of a batch of so many candidates."""
    if isinstance(size, bool) or not (isinstance(size, int | np.integer) and size >= 1):
        raise ValueError(f"size must be a whole number of at least one, got {size!r}.")
    if size > number:
        raise ValueError(f"{size} candidates are asked for, and there are {number}.")


def checked_cost(cost: Any, shape: tuple[int, ...]) -> np.ndarray | None:
    """Costs of candidates in their shape.

    :raises ValueError: unless they are positive numbers.
    """
    if cost is None:
        return None
    try:
        price = np.broadcast_to(np.asarray(cost, float), shape)
    except ValueError as error:
        raise ValueError(f"Costs have the shape {np.shape(cost)}, and candidates {shape}.") from error
    if not (np.isfinite(price).all() and (price > 0.0).all()):
        raise ValueError(f"Costs must be positive, got {price.min() if price.size else price}.")
    return price


def guarantee(has_nuisance: bool, has_cost: bool, of_draws: bool = False) -> str:
    """Bound on the distance of a greedy choice from the best one, in words."""
    if has_nuisance:
        return "none: with a nuisance, two observations may tell more together than each for itself"
    if has_cost:
        return "none: by gain per cost, one expensive observation may be worth more than all that were chosen"
    bound = "at least 1 - 1/e = 0.63 of the information in the best choice of this size"
    return f"{bound}, up to the error of the draws" if of_draws else bound


def greedy_information(
    covariance: ArrayLike,
    noise_variance: ArrayLike,
    size: int,
    *,
    left: ArrayLike | None = None,
    cost: np.ndarray | None = None,
    rng_key: Array | None = None,
) -> tuple[list[int], list[float]]:
    r"""Measurements of Gaussian quantities, each the one that tells the most after those before it.

    :math:`\tfrac12 \log(1 + v_i / \sigma_i^2)` is the gain of the next one, with the variance that those before have
    left: each takes a matrix of rank one from the covariance. Cost: ``O(size * n^2)``.

    :param covariance: joint, shape ``(n, n)``.
    :param noise_variance: of the measurements, shape ``(n,)``.
    :param int size: how many.
    :param left: joint covariance once what is of interest is known, if that does not fix everything.
    :param cost: of each, positive: gains are per cost then.
    :param rng_key: among equal ones.
    :return: their numbers, and what each added, in nats.
    """
    parts = [np.array(x, float) for x in (covariance, left) if x is not None]
    noise = np.broadcast_to(np.asarray(noise_variance, float), len(parts[0]))

    def gains() -> np.ndarray:
        own, *rest = (0.5 * np.log1p(np.maximum(np.diag(part), 0.0) / noise) for part in parts)
        return own - sum(rest)

    def take(number: int) -> None:
        for part in parts:
            column = part[:, number].copy()
            np.subtract(part, np.outer(column, column / (column[number] + noise[number])), out=part)

    return greedy(gains, take, size, is_candidate=np.ones(len(noise), bool), cost=cost, rng_key=rng_key)


def joint_information(covariance: ArrayLike, noise_variance: ArrayLike, left: ArrayLike | None = None) -> float:
    r"""Joint information of measurements of Gaussian quantities, :math:`\tfrac12 \log |I + N^{-1/2} C N^{-1/2}|`.

    :param covariance: joint, shape ``(n, n)``.
    :param noise_variance: of the measurements, shape ``(n,)``.
    :param left: joint covariance once what is of interest is known.
    :return: in nats.
    """
    scale = 1.0 / np.sqrt(np.broadcast_to(np.asarray(noise_variance, float), len(np.asarray(covariance))))

    def half(part: ArrayLike) -> float:
        scaled = np.asarray(part, float) * np.outer(scale, scale)
        return float(0.5 * np.sum(np.log1p(np.maximum(np.linalg.eigvalsh(scaled), 0.0))))

    return half(covariance) - (0.0 if left is None else half(left))


def conditional_covariance(joint: ArrayLike, number: int) -> np.ndarray:
    """Covariance of the first quantities once the others are known, which may determine each other.

    :param joint: covariance, shape ``(n, n)``.
    :param int number: of the first.
    :return: shape ``(number, number)``.
    """
    joint = np.asarray(joint, float)
    own, cross, known = joint[:number, :number], joint[:number, number:], joint[number:, number:]
    values, vectors = np.linalg.eigh(known)
    kept = values > _SINGULAR * max(values.max(initial=0.0), 0.0)
    explained = (cross @ vectors[:, kept]) / np.sqrt(values[kept])
    return own - explained @ explained.T
