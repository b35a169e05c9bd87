"""Statistics of persons and items: who answers unlike the model, which items do, and which pairs of items."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .fitted_model import FittedModel
from .fitted_test import fitted_test
from .responses import response_of
from .summed_scores import ScoreFit, score_fit


class PersonFit(NamedTuple):
    """Fit of the answers of each person to the model, shape ``(people,)``; ``nan`` without answers."""

    log_likelihood: np.ndarray
    """Log probability of the answers at the trait."""
    standardised: np.ndarray
    """l_z: the log likelihood less its mean, over its standard deviation. Far below zero for answers that go against
    the order of the items. Its variance is below one, since the trait was estimated from the same answers."""
    corrected: np.ndarray
    """l_z*: the same with the part along the score of the trait taken out, approximately standard normal."""
    infit: np.ndarray
    """Squared residuals over their variances, both summed over the items; about one."""
    outfit: np.ndarray
    """Mean squared standardised residual, which single surprises dominate; about one."""
    num_answers: np.ndarray


class ItemFit(NamedTuple):
    """Fit of each item to the model, shape ``(items,)``; ``nan`` where it cannot be told."""

    infit: np.ndarray
    """Squared residuals over their variances, both summed over people; about one."""
    outfit: np.ndarray
    """Mean squared standardised residual; about one."""
    score_statistic: np.ndarray
    """S-X^2: answers among people with the same sum score against those that the model expects there."""
    degrees_of_freedom: np.ndarray
    p_value: np.ndarray
    num_people: int
    """People who answered every item, of whom S-X^2 is made."""
    names: list[str]


class TestRetest(NamedTuple):
    """Agreement of two sittings of one test."""

    agreement: float
    """Share of equal answers among those given twice."""
    correlation: float
    """Correlation of mean scores over the items answered twice: the classical reliability."""
    expected_agreement: float
    """Mean agreement of the first sitting with new answers at the same traits, over the posterior."""
    p_value: float
    """Posterior predictive probability of an agreement no larger than the one seen: near zero where people are less
    consistent than the model says, near one where they remember their answers."""
    replicates: np.ndarray
    """Agreements with new answers, one for each draw."""


TestRetest.__test__ = False  # type: ignore[attr-defined]  # no test of pytest


def person_fit(
    source: object, traits: ArrayLike | None = None, answers: object = None, *, trait: str = "trait"
) -> PersonFit:
    r"""Measure how well the answers of each person fit the model.

    With :math:`w_{ik} = \log p_{ik}(\hat\theta)`: :math:`l_z = \sum_i (w_{i y_i} - E\, w_i) / \sqrt{\sum_i V\, w_i}`
    (Drasgow, Levine and Williams, 1985). The correction puts :math:`w_{ik} - c^T \nabla \log p_{ik}` in the place of
    :math:`w_{ik}`, with :math:`c` such that the two parts are uncorrelated (Snijders, 2001; Sinharay, 2016, for
    categories); it holds for whatever estimate of the trait, to first order, and for several traits. Answers take
    ``O(people * items * K)``.

    **Example:** the second person solves the hard items and fails the easy ones.

    >>> import jax.numpy as jnp
    >>> import numpyro.distributions as dist
    >>> from numpyro_ext.psychometrics import person_fit
    >>> difficulty = jnp.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    >>> def response(theta):
    ...     return dist.Bernoulli(logits=1.5 * (theta[..., None] - difficulty))
    >>> print(person_fit(response, [0.0, 0.0], [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]]).corrected.round(1))
    [ 0.7 -6.7]

    :param source: an engine or ``MCMC`` after its run, or a response (a function from traits to a distribution).
    :param traits: traits of the people, shape ``(people,)`` or ``(people, traits)``; by default posterior means.
    :param answers: shape ``(people, items)``, ``nan`` for none; by default those of the fit.
    :param str trait: name of the site of the traits.
    :return: the statistics.
    :raises TypeError: if answers are not among finitely many.
    :raises ValueError: if shapes do not fit.
    """
    test = fitted_test(source, traits, answers, trait)

    def statistics(theta: Array, answers: Array) -> dict[str, Array]:
        known = jnp.isfinite(answers)
        label = jnp.where(known, answers, 0.0).astype(int)
        w = test.log_probabilities(theta)
        p = jnp.where(known[..., None], jnp.exp(w), 0.0)
        directions = jnp.eye(test.num_traits, dtype=theta.dtype)
        directions = directions[0] if theta.ndim == 1 else directions
        slopes = jnp.stack(
            [
                jax.jvp(test.log_probabilities, (theta,), (jnp.broadcast_to(direction, theta.shape),))[1]
                for direction in directions
            ],
            -1,
        )  # (people, items, K, traits)
        information = jnp.einsum("npk,npkd,npke->nde", p, slopes, slopes)
        along = jnp.einsum("npk,npkd,npk->nd", p, slopes, w)
        # A person without answers has no information, and no statistic.
        safe = jnp.where(known.any(-1)[:, None, None], information, jnp.eye(test.num_traits))
        c = jnp.linalg.solve(safe, along[..., None])[..., 0]
        rest = w - jnp.einsum("npkd,nd->npk", slopes, c)

        def standardised(values: Array) -> Array:
            own = jnp.take_along_axis(values, label[..., None], -1)[..., 0]
            mean = jnp.sum(p * values, -1)
            variance = jnp.sum(p * jnp.square(values - mean[..., None]), -1)
            return jnp.sum(jnp.where(known, own - mean, 0.0), -1) / jnp.sqrt(variance.sum(-1))

        own = jnp.take_along_axis(w, label[..., None], -1)[..., 0]
        squared, variance = _residuals(p, label, known)
        return {
            "log_likelihood": jnp.where(known, own, 0.0).sum(-1),
            "standardised": standardised(w),
            "corrected": standardised(rest),
            "infit": squared.sum(-1) / variance.sum(-1),
            "outfit": _ratio(squared, variance, known).sum(-1) / known.sum(-1),
            "num_answers": known.sum(-1),
        }

    parts = [found for _, found in test.by_people(statistics)]
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    empty = found["num_answers"] == 0
    number = found.pop("num_answers")
    return PersonFit(**{name: np.where(empty, np.nan, value) for name, value in found.items()}, num_answers=number)


def _residuals(p: Array, label: Array, known: Array) -> tuple[Array, Array]:
    """Squared residuals of the scores and their variances; zero where there is no answer."""
    scores = jnp.arange(p.shape[-1], dtype=p.dtype)
    mean = p @ scores
    variance = jnp.sum(p * jnp.square(scores - mean[..., None]), -1)
    return jnp.where(known, jnp.square(label - mean), 0.0), jnp.where(known, variance, 0.0)


def _ratio(squared: Array, variance: Array, known: Array) -> Array:
    tiny = jnp.finfo(squared.dtype).tiny
    return jnp.where(known, squared / jnp.maximum(variance, tiny), 0.0)


def item_fit(
    source: object,
    traits: ArrayLike | None = None,
    answers: object = None,
    *,
    num_parameters: ArrayLike | None = None,
    population: tuple[ArrayLike, ArrayLike] | None = None,
    least_expected: float = 1.0,
    trait: str = "trait",
) -> ItemFit:
    r"""Measure how well the answers to each item fit the model.

    Infit and outfit compare residuals at the estimated traits with their variances (Wright and Masters, 1982). S-X²
    compares, among people with the same sum score, the numbers of answers to an item with those that the model expects
    (Orlando and Thissen, 2000; Kang and Chen, 2008): Pearson's statistic over sum scores and categories, where cells
    with few expected answers are joined. It is made of people who answered all items. The recursion over sum scores
    (Lord and Wingersky, 1984) takes ``O(items^2 * K^2 * nodes)`` for each item.

    :param source: an engine or ``MCMC`` after its run, or a response (a function from traits to a distribution).
    :param traits: traits of the people, shape ``(people,)`` or ``(people, traits)``; by default posterior means.
    :param answers: shape ``(people, items)``, ``nan`` for none; by default those of the fit.
    :param num_parameters: estimated parameters of each item, which its degrees of freedom lose; by default those of the
        family in the models of items of this project, else a slope and a threshold for each category after the first.
    :param population: mean and covariance of the traits; by default those of the model's prior, and of a function
        standard normal. Where traits are not normal, or people differ, there is no S-X² without it.
    :param float least_expected: cells with fewer expected answers are joined.
    :param str trait: name of the site of the traits.
    :return: the statistics.
    :raises TypeError: if answers are not among finitely many.
    :raises ValueError: if shapes do not fit.
    """
    test = fitted_test(source, traits, answers, trait)

    def sums(theta: Array, answers: Array) -> tuple[Array, ...]:
        known = jnp.isfinite(answers)
        label = jnp.where(known, answers, 0.0).astype(int)
        squared, variance = _residuals(jnp.exp(test.log_probabilities(theta)), label, known)
        return squared.sum(0), variance.sum(0), _ratio(squared, variance, known).sum(0), known.sum(0)

    squared, variance, ratio, number = (sum(part) for part in zip(*(s for _, s in test.by_people(sums)), strict=True))
    population = test.population if population is None else population
    complete = test.answers[np.isfinite(test.answers).all(1)]
    num_items = test.answers.shape[1]
    scores = ScoreFit(*(np.full(num_items, np.nan) for _ in range(3)))
    if population is not None and len(complete):
        given = num_parameters if num_parameters is not None else test.num_parameters
        scores = score_fit(test.response, complete.astype(int), population, given, least_expected)
    with np.errstate(invalid="ignore", divide="ignore"):
        infit, outfit = np.asarray(squared / variance), np.asarray(ratio / number)
    return ItemFit(infit, outfit, *scores, len(complete), test.names)


def local_dependence(
    source: object, traits: ArrayLike | None = None, answers: object = None, *, trait: str = "trait"
) -> np.ndarray:
    """Correlations of residuals between items, which the trait should have explained (Q3 of Yen, 1984).

    Around ``-1 / (items - 1)`` where items are independent given the trait; 0.2 above it is a common sign of items
    that share more. Of each pair it is over people who answered both.

    :param source: an engine or ``MCMC`` after its run, or a response (a function from traits to a distribution).
    :param traits: traits of the people, shape ``(people,)`` or ``(people, traits)``; by default posterior means.
    :param answers: shape ``(people, items)``, ``nan`` for none; by default those of the fit.
    :param str trait: name of the site of the traits.
    :return: shape ``(items, items)``, ones on the diagonal; ``nan`` where fewer than three people answered both.
    :raises TypeError: if answers are not among finitely many.
    :raises ValueError: if shapes do not fit.
    """
    test = fitted_test(source, traits, answers, trait)

    def residual(theta: Array, answers: Array) -> Array:
        p = jnp.exp(test.log_probabilities(theta))
        return answers - p @ jnp.arange(p.shape[-1], dtype=p.dtype)

    rest = np.concatenate([part for _, part in test.by_people(residual)])
    known = np.isfinite(rest)
    r, m = np.where(known, rest, 0.0), known.astype(float)
    number, sums, squares, products = m.T @ m, r.T @ m, (r**2).T @ m, r.T @ r
    with np.errstate(invalid="ignore", divide="ignore"):
        covariance = products - sums * sums.T / number
        variances = squares - sums**2 / number
        found: np.ndarray = covariance / np.sqrt(variances * variances.T)
    found[number < 3] = np.nan
    return found


def test_retest(
    source: object,
    second: object,
    *,
    first: object = None,
    num_draws: int = 100,
    rng_key: Array | None = None,
    trait: str = "trait",
) -> TestRetest:
    """Compare two sittings of one test, and the agreement with what the model expects of new answers.

    The share of equal answers estimates the sum of squared probabilities, a bound on what can be predicted (Houlsby,
    2014, section 8.2). Replicates are answers at draws of the traits from the posterior of the first sitting, with the
    items at their estimates.

    :param source: an engine or ``MCMC`` after its run on the first sitting.
    :param second: answers of the same people to the same items at the second sitting, shape ``(people, items)``,
        ``nan`` for none.
    :param first: answers at the first sitting; by default those of the fit.
    :param int num_draws: draws of the traits.
    :param rng_key: for these; a fixed key if left out.
    :param str trait: name of the site of the traits.
    :return: the comparison.
    :raises ValueError: if nobody answered an item twice, or the shapes differ.
    """
    key, other = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)
    fitted, response = FittedModel.of(source), response_of(source, trait=trait)
    one = fitted.observed_answers() if first is None else fitted.answers_of(first, same_people=True)
    two = fitted.answers_of(second, same_people=True)
    if one.shape != two.shape:
        raise ValueError(f"Both sittings must have the same people and items; got {one.shape} and {two.shape}.")
    both = np.isfinite(one) & np.isfinite(two)
    if not both.any():
        raise ValueError("Nobody answered an item in both sittings.")
    equal = float(np.mean(one[both] == two[both]))
    people = both.any(1)
    means = [np.where(both, x, 0.0)[people].sum(1) / both[people].sum(1) for x in (one, two)]
    varies = all(np.ptp(mean) > 0 for mean in means)
    drawn = fitted.drawn(num_draws, key)[trait] if trait in fitted.names else fitted.source.get_samples()[trait]
    labels, where = jnp.asarray(np.where(both, one, 0).astype(int)), jnp.asarray(both)

    @jax.jit
    def replicate(theta: Array, key: Array) -> tuple[Array, Array]:
        log_p = log_p_of(theta)
        new = jax.random.categorical(key, log_p)
        same = jnp.take_along_axis(jnp.exp(log_p), labels[..., None], -1)[..., 0]
        total = where.sum()
        return jnp.sum(where & (new == labels)) / total, jnp.sum(jnp.where(where, same, 0.0)) / total

    def log_p_of(theta: Array) -> Array:
        return jax.nn.log_softmax(response(theta).logits)

    found = [replicate(theta, k) for theta, k in zip(drawn, jax.random.split(other, len(drawn)), strict=True)]
    replicates, expected = (np.array(values) for values in zip(*found, strict=True))
    p_value = float(np.mean(replicates < equal) + 0.5 * np.mean(replicates == equal))
    return TestRetest(
        equal,
        float(np.corrcoef(*means)[0, 1]) if varies else float("nan"),
        float(expected.mean()),
        p_value,
        replicates,
    )


test_retest.__test__ = False  # type: ignore[attr-defined]
