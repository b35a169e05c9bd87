"""Quality of predicted answers, beside chance, and the number of traits that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class ChanceLevels(NamedTuple):
    """Quality of predictions that know nothing of the person."""

    fraction_correct: float
    """Share of the most frequent answer."""
    likelihood: float
    """Exponentiated log likelihood of the frequencies of all answers."""
    fraction_correct_by_item: float
    """Mean over the items of the share of their most frequent answer."""
    likelihood_by_item: float
    """Exponentiated mean over the items of the log likelihood of their frequencies."""


def exponentiated_log_likelihood(log_probabilities: ArrayLike) -> float:
    """Geometric mean of the probabilities of answers, between zero and one.

    **Example:**

    >>> import numpy as np
    >>> from numpyro_ext.psychometrics import exponentiated_log_likelihood
    >>> print(exponentiated_log_likelihood(np.log([0.5, 0.125, np.nan])))
    0.25

    :param log_probabilities: of the answers given, any shape; ``nan`` for those that are left out.
    :return: :math:`\\exp` of their mean (Houlsby, 2014, section 8.2).
    :raises ValueError: if there are none.
    """
    values = np.asarray(log_probabilities, float)
    known = values[~np.isnan(values)]
    if not known.size:
        raise ValueError("There are no log probabilities to average.")
    return float(np.exp(known.mean()))


def fraction_correct(probabilities: ArrayLike, answers: ArrayLike) -> float:
    """Share of answers that are the most probable ones.

    **Example:**

    >>> from numpyro_ext.psychometrics import fraction_correct
    >>> print(fraction_correct([[0.2, 0.8], [0.6, 0.4]], [1, 1]))
    0.5

    :param probabilities: of each category, shape ``(..., K)``.
    :param answers: shape ``(...)``, ``nan`` for those that are left out.
    :raises ValueError: if there are none, or shapes differ.
    """
    p, y = np.asarray(probabilities, float), np.asarray(answers, float)
    if p.shape[:-1] != y.shape:
        raise ValueError(f"Probabilities of shape {p.shape} do not go with answers of shape {y.shape}.")
    known = ~np.isnan(y)
    if not known.any():
        raise ValueError("There are no answers.")
    return float(np.mean(p.argmax(-1)[known] == y[known]))


def chance_levels(answers: ArrayLike) -> ChanceLevels:
    """Predictive scores of the frequencies of answers, of all together and of each item.

    **Example:**

    >>> import numpy as np
    >>> from numpyro_ext.psychometrics import chance_levels
    >>> print(np.round(chance_levels([[0, 1], [0, 1], [0, 0], [0, 2]]), 3))
    [0.625 0.406 0.75  0.595]

    :param answers: numbers of categories, shape ``(people, items)``, ``nan`` for none.
    :return: the scores.
    :raises ValueError: if there are no answers.
    """
    table = np.asarray(answers, float)
    columns = [column[~np.isnan(column)] for column in table.T]
    columns = [column for column in columns if column.size]
    if table.ndim != 2 or not columns:
        raise ValueError(f"Chance levels need answers of people to items; got shape {table.shape} and no answer.")
    overall = _frequencies(np.concatenate(columns))
    items = [_frequencies(column) for column in columns]
    return ChanceLevels(
        float(overall.max()),
        float(np.exp(np.sum(overall * np.log(overall)))),
        float(np.mean([p.max() for p in items])),
        float(np.exp(np.mean([np.sum(p * np.log(p)) for p in items]))),
    )


def _frequencies(values: np.ndarray) -> np.ndarray:
    counts = np.unique(values, return_counts=True)[1]
    return np.asarray(counts / counts.sum())


def bic(
    log_likelihood: float,
    num_people: int,
    num_items: int,
    num_traits: int,
    count: Literal["rotation", "thesis"] = "rotation",
    *,
    free_means: bool = False,
) -> float:
    r"""Bayesian information criterion of factor analysis, lower is better.

    .. math:: -2 \log p(Y) + k \log N, \qquad k = P D + P - D (D - 1) / 2

    with one parameter for each loading and each noise level, less those of a rotation of the traits.

    **Example:**

    >>> from numpyro_ext.psychometrics import bic
    >>> print(round(bic(-100.0, num_people=12, num_items=6, num_traits=2), 4))
    242.2434

    :param float log_likelihood: marginal log likelihood at its maximum.
    :param int num_people: :math:`N`.
    :param int num_items: :math:`P`.
    :param int num_traits: :math:`D`.
    :param str count: ``"thesis"`` subtracts :math:`D^2` for the rotation, as in Houlsby (2014, section 8.2), which is
        too much: to reproduce its figures.
    :param bool free_means: whether the means of the items were estimated as well.
    :raises ValueError: for another count.
    """
    if count not in ("rotation", "thesis"):
        raise ValueError(f"count must be 'rotation' or 'thesis'; got {count!r}.")
    rotations = num_traits**2 if count == "thesis" else num_traits * (num_traits - 1) // 2
    number = num_items * num_traits + num_items - rotations + num_items * free_means
    return float(-2.0 * log_likelihood + number * np.log(num_people))


def smallest_sufficient_dimension(
    dimensions: Sequence[int], scores: object, *, level: float = 0.05, paired: bool = True
) -> int:
    """Choose the smallest number of traits whose test scores do not differ significantly from the best.

    A t-test over repeats compares each number of traits with that of the highest mean (Houlsby, 2014, section 8.2, with
    the sense of the comparison corrected).

    **Example:**

    >>> from numpyro_ext.psychometrics import smallest_sufficient_dimension
    >>> scores = [[0.30, 0.41, 0.42], [0.31, 0.43, 0.42], [0.29, 0.40, 0.42]]
    >>> print(smallest_sufficient_dimension([1, 5, 10], scores))
    5

    :param dimensions: numbers of traits.
    :param scores: larger is better, shape ``(repeats, dimensions)``.
    :param float level: p-values from here on do not differ significantly.
    :param bool paired: whether a repeat has the same people and the same held-out answers at all numbers of traits.
    :return: the number of traits.
    :raises ValueError: with fewer than two repeats, with scores that are not finite, or if shapes differ.
    """
    from scipy import stats

    numbers, table = np.asarray(dimensions), np.asarray(scores, float)
    if table.ndim != 2 or table.shape[1] != len(numbers) or len(table) < 2 or not np.isfinite(table).all():
        raise ValueError(
            f"Scores must be finite, two repeats or more for each of {len(numbers)} numbers of traits; got shape "
            f"{table.shape}."
        )
    best = int(np.argmax(table.mean(0)))
    test = stats.ttest_rel if paired else stats.ttest_ind
    sufficient = [numbers[best]]
    for place, number in enumerate(numbers):
        difference = table[:, place] - table[:, best]
        if paired and np.ptp(difference) == 0:  # no spread, for which the test has no number
            p_value = float(difference[0] == 0)
        else:
            p_value = float(test(table[:, place], table[:, best]).pvalue)
        if p_value >= level:
            sufficient.append(number)
    return int(min(sufficient))
