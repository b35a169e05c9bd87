"""Answers among people with the same sum score, against those that a model expects: S-X^2."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike
from scipy.special import chdtrc

from ..potentials.integrals.several_predictors.vector_quadrature import gaussian_rule
from .curves import Response, category_probabilities


class ScoreFit(NamedTuple):
    """Pearson's statistic of each item, its degrees of freedom and its p-value."""

    statistic: np.ndarray
    degrees_of_freedom: np.ndarray
    p_value: np.ndarray


def score_fit(
    response: Response,
    answers: np.ndarray,
    population: tuple[ArrayLike, ArrayLike],
    num_parameters: ArrayLike | None,
    least_expected: float,
) -> ScoreFit:
    """S-X² of each item (Orlando and Thissen, 2000; Kang and Chen, 2008).

    :param answers: categories, shape ``(people, items)``.
    :param population: mean and covariance of the traits.
    :param num_parameters: of each item, or of all; ``None`` for the number of its categories.
    """
    probabilities, weights = _on_nodes(response, population)
    num_items = answers.shape[1]
    sizes = [int(np.sum(probabilities[:, k].max(0) > 0)) for k in range(num_items)]
    number = np.broadcast_to(np.array(sizes) if num_parameters is None else np.asarray(num_parameters), (num_items,))
    total = answers.sum(1)
    out = np.full((3, num_items), np.nan)
    for item in range(num_items):
        conditional = expected_answers(probabilities, weights, item, sizes)
        counts = np.zeros_like(conditional)
        np.add.at(counts, (total, answers[:, item]), 1.0)
        expected = counts.sum(1, keepdims=True) * conditional
        several = (conditional > 0).sum(1) > 1  # the lowest and the highest score say nothing
        statistic, cells = _pearson(counts[several], expected[several], least_expected)
        freedom = cells - number[item]
        if freedom > 0:
            out[:, item] = statistic, freedom, chdtrc(freedom, statistic)
    return ScoreFit(*out)


def _on_nodes(response: Response, population: tuple[ArrayLike, ArrayLike]) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of answers on the nodes of a rule for the population, shape ``(nodes, items, K)``, and weights."""
    mean, covariance = (np.asarray(value, float) for value in population)
    nodes, weights = gaussian_rule(1 if covariance.ndim == 0 else len(covariance))
    if covariance.ndim == 0:
        traits = mean + np.sqrt(covariance) * nodes[:, 0]
    else:
        traits = mean + nodes @ np.linalg.cholesky(covariance).T
    return np.asarray(category_probabilities(response, traits), float), weights


def expected_answers(probabilities: np.ndarray, weights: np.ndarray, item: int, sizes: list[int]) -> np.ndarray:
    """Probability of each answer to an item given the sum score, shape ``(scores, K)``; zero where it is impossible.

    By the recursion of Lord and Wingersky (1984) over the other items.

    :param probabilities: on nodes of the trait, shape ``(nodes, items, K)``.
    :param weights: of the nodes.
    :param sizes: number of categories of each item.
    """
    rest = np.ones((len(weights), 1))
    for other, size in enumerate(sizes):
        if other == item:
            continue
        grown = np.zeros((len(weights), rest.shape[1] + size - 1))
        for category in range(size):
            grown[:, category : category + rest.shape[1]] += rest * probabilities[:, other, category, None]
        rest = grown
    size, num_scores = sizes[item], rest.shape[1] + sizes[item] - 1
    joint = np.zeros((num_scores, size))
    for category in range(size):
        own = weights * probabilities[:, item, category]
        joint[category : category + rest.shape[1], category] = own @ rest
    total = joint.sum(1, keepdims=True)
    return np.divide(joint, total, out=np.zeros_like(joint), where=total > 0)


def _pearson(counts: np.ndarray, expected: np.ndarray, least: float) -> tuple[float, int]:
    """Pearson's statistic over scores and categories, and its number of independent cells.

    Sum scores are joined with their neighbours until each category that is possible there is expected ``least`` times,
    or none is left; categories that are expected less are then joined with those below.
    """
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    observed, mean = np.zeros(counts.shape[1]), np.zeros(counts.shape[1])
    for row_counts, row_mean in zip(counts, expected, strict=True):
        observed, mean = observed + row_counts, mean + row_mean
        if np.all(mean >= least):
            rows.append((observed, mean))
            observed, mean = np.zeros_like(observed), np.zeros_like(mean)
    if mean.sum() > 0 and rows:
        last = rows.pop()
        rows.append((last[0] + observed, last[1] + mean))
    elif mean.sum() > 0:
        rows.append((observed, mean))
    statistic, cells = 0.0, 0
    for row in rows:
        o, e = _joined(*row, least)
        if len(e) > 1:
            statistic += float(np.sum(np.square(o - e) / e))
            cells += len(e) - 1
    return statistic, cells


def _joined(observed: np.ndarray, expected: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Neighbouring categories joined until each is expected often enough."""
    o: list[float] = []
    e: list[float] = []
    for one, mean in zip(observed, expected, strict=True):
        if e and e[-1] < least:
            o[-1], e[-1] = o[-1] + one, e[-1] + mean
        else:
            o.append(float(one))
            e.append(float(mean))
    if len(e) > 1 and e[-1] < least:
        last_o, last_e = o.pop(), e.pop()
        o[-1], e[-1] = o[-1] + last_o, e[-1] + last_e
    return np.array(o), np.array(e)
