"""Item-response models: people with traits answer items of a dozen families, in a table or in records."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import constraints

from .indices import checked_indices, checked_size
from .item_answers import (
    Answers,
    answers_in_records,
    answers_in_table,
    checked_answers,
    mask_of_table,
    warn_of_degenerate_items,
)
from .item_families import ItemGroup, answer_distribution, item_groups, item_parameters

__all__ = ["ItemCall", "bifactor_pattern", "item_call", "item_response", "item_response_records"]

_LARGEST_TABLE = 10_000_000
"""Cells of people and items up to which records are looked at for items without a finite maximum."""


def item_response(
    response: Any = None,
    mask: ArrayLike | None = None,
    *,
    family: str | Sequence[str],
    num_traits: int = 1,
    num_categories: int | Sequence[int] | None = None,
    pattern: ArrayLike | None = None,
    correlated: bool = False,
    covariates: ArrayLike | None = None,
    signed: bool = False,
    priors: bool = False,
    shape: tuple[int, int] | None = None,
) -> None:
    r"""Answers of people to items, given a trait of each person and parameters of each item.

    .. math:: x_n \sim N(B^T z_n, \Sigma), \qquad y_{ni} \sim p_i(\,\cdot \mid a_i^T x_n)

    with unit variances of the traits. With :math:`\eta = a_i^T x_n`, :math:`\sigma` the logistic function:

    ================================  ============================================================================
    family                            answers
    ================================  ============================================================================
    ``"rasch"``                       :math:`P(1) = \sigma(\eta + d_i)`, one slope for all items
    ``"2pl"``                         the same with a slope for each item
    ``"3pl"``, ``"4pl"``              :math:`P(1) = c_i + (u_i - c_i)\, \sigma(\eta + d_i)`; 3pl: :math:`u_i = 1`
    ``"graded"``                      :math:`P(y \ge k) = \sigma(\eta - c_{ik})` (Samejima, 1969)
    ``"generalised-partial-credit"``  :math:`\log p_k / p_{k-1} = \eta - s_{ik}` (Muraki, 1992)
    ``"partial-credit"``              the same with one slope for all items (Masters, 1982)
    ``"rating-scale"``                one slope, and :math:`s_{ik} = s_k - d_i` (Andrich, 1978)
    ``"nominal"``                     :math:`\log p_k / p_0 = a_{ik} x_n + d_{ik}` (Bock, 1972)
    ``"gaussian"``                    :math:`N(\eta + d_i, \sigma_i^2)`, factor analysis
    ================================  ============================================================================

    Sites: ``discrimination`` (:math:`a`, ``(items,)``, or ``(items, traits)``; a number where items share it),
    ``intercept`` (:math:`d`; of binary items and one trait also ``difficulty``, :math:`-d / a`), ``guessing`` and
    ``upper``, ``cutpoints`` (increasing) and ``steps`` (``(items, K - 1)``; of the rating scale ``(K - 1,)`` with sum
    zero), ``slopes`` and ``intercepts`` of nominal items (``(items, K - 1)``; a mirror image of the trait has the
    same likelihood), ``noise``; ``trait`` (``(people,)``, or ``(people, traits)``), ``trait_coefficients``
    (:math:`B`), ``trait_cholesky`` (of the correlations); the observed ``response``. Where items are of several
    families, sites of items end in that of theirs (``intercept_2pl``, ``response_2pl``), and where items of a family
    have several numbers of categories, sites of categories end in theirs (``cutpoints_4``, ``response_4``).

    Parameters are ``param`` sites, for maximum marginal likelihood, or have ``priors``. Maximum likelihood has no
    finite value for items with one answer or with unused categories, for two items with the same answers, and hardly
    one for guessing of few people; a warning names such items, reversed ones, and people without answers. Several
    traits without a ``pattern`` are known up to a rotation (:func:`numpyro_ext.psychometrics.rotate`), and need
    ``signed`` where some items load negatively.

    **Example:**

    .. doctest::

        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import item_response
        >>> draws = Predictive(item_response, num_samples=5)(
        ...     random.key(0), family="graded", num_categories=4, priors=True, shape=(10, 3))
        >>> print(draws["trait"].shape, draws["cutpoints"].shape, draws["response"].shape)
        (5, 10) (5, 3, 3) (5, 10, 3)

    :param response: answers, shape ``(people, items)``: numbers from 0, ``nan`` for none; also a table of pandas with
        numbers, booleans or ordered ``Categorical`` columns. ``None`` samples them.
    :param mask: false where an answer is to be left out, shape ``(people, items)``.
    :param family: of all items, or of each.
    :param int num_traits: traits of a person.
    :param num_categories: of all items or of each; by default those up to the largest answer to any item of the family.
    :param pattern: 1 where an item measures a trait, -1 where it does with a negative slope, 0 elsewhere, shape
        ``(items, traits)``; see :func:`bifactor_pattern`.
    :param bool correlated: whether traits are correlated.
    :param covariates: :math:`z`, on which the mean of the traits depends, shape ``(people, columns)``; no column of
        ones, which the intercepts are.
    :param bool signed: whether slopes may be negative.
    :param bool priors: whether items are sample sites: slopes ``LogNormal(0, 0.5)`` (``signed``: standard normal),
        intercepts and steps of standard deviation 3, guessing ``Beta(5, 17)``, correlations LKJ(1).
    :param tuple shape: ``(people, items)``, needed without answers.
    :raises ValueError: for answers that are not among the categories, naming the item, and for patterns, families and
        shapes that do not fit.
    """
    num_people, num_items = _table_shape(response, shape)
    answers = None if response is None else answers_in_table(response, num_items)
    if answers is not None and answers.values.shape != (num_people, num_items):
        raise ValueError(f"response must have shape ({num_people}, {num_items}); got {answers.values.shape}.")
    mask = mask_of_table(mask, response, (num_people, num_items))
    groups, signs, num_traits = _design(family, num_items, num_categories, answers, None, num_traits, pattern)
    trait, found = _people_and_items(groups, signs, num_people, num_traits, correlated, covariates, signed, priors)
    parameters, num_parameters = found
    if answers is not None and num_parameters is not None:
        measured = _measured_alone(signs, num_items, num_traits, signed, family)
        warn_of_degenerate_items(answers, groups, num_parameters, measured, signs)
    every = trait[:, None]
    for group, of_items in zip(groups, parameters, strict=True):
        distribution = answer_distribution(group.family, of_items, every, num_traits)
        cells = None if answers is None else answers.values[:, group.items]
        kept = None if mask is None else jnp.broadcast_to(jnp.asarray(mask, bool), (num_people, num_items))
        _observe(group, distribution, cells, None if kept is None else kept[:, group.items])


def item_response_records(
    person: ArrayLike,
    item: ArrayLike,
    response: Any = None,
    mask: ArrayLike | None = None,
    *,
    num_people: int,
    num_items: int,
    family: str | Sequence[str],
    num_traits: int = 1,
    num_categories: int | Sequence[int] | None = None,
    pattern: ArrayLike | None = None,
    correlated: bool = False,
    covariates: ArrayLike | None = None,
    signed: bool = False,
    priors: bool = False,
) -> None:
    """The models of :func:`item_response` for answers that stand one below the other: few answers a person, or several
    answers of one person to one item.

    **Example:**

    .. doctest::

        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.models import item_response_records
        >>> draws = Predictive(item_response_records, num_samples=5)(
        ...     random.key(0), [0, 0, 1], [0, 2, 1], num_people=2, num_items=3, family="2pl")
        >>> print(draws["trait"].shape, draws["response"].shape)
        (5, 2) (5, 3)

    :param person: person of each answer, integers from 0, shape ``(n,)``.
    :param item: item of each answer, integers from 0, shape ``(n,)``.
    :param response: answers, shape ``(n,)``; ``None`` samples them.
    :param mask: false where an answer is to be left out, shape ``(n,)``.
    :param int num_people: number of people.
    :param int num_items: number of items.
    :param family: as for :func:`item_response`, like all that follow.
    :raises ValueError: for indices out of range, and as :func:`item_response`.
    """
    num_people, num_items = checked_size("num_people", num_people), checked_size("num_items", num_items)
    person, item = checked_indices(person=(_codes(person), num_people), item=(_codes(item), num_items))
    answers = None if response is None else answers_in_records(response, num_items)
    if answers is not None and answers.values.shape != item.shape:
        raise ValueError(f"response must have one answer for each of {item.shape[0]} records; got "
                         f"shape {answers.values.shape}.")  # fmt: skip
    groups, signs, num_traits = _design(family, num_items, num_categories, answers, item, num_traits, pattern)
    trait, (parameters, num_parameters) = _people_and_items(
        groups, signs, num_people, num_traits, correlated, covariates, signed, priors
    )
    if answers is not None and num_parameters is not None and num_people * num_items <= _LARGEST_TABLE:
        measured = _measured_alone(signs, num_items, num_traits, signed, family)
        table = answers.in_table(person, item, (num_people, num_items))
        warn_of_degenerate_items(table, groups, num_parameters, measured, signs)
    for group, of_items in zip(groups, parameters, strict=True):
        places = np.flatnonzero(np.isin(item, group.items))
        rows = np.searchsorted(group.items, item[places])
        distribution = answer_distribution(group.family, of_items.of(rows), trait[person[places]], num_traits)
        cells = None if answers is None else answers.values[places]
        kept = None if mask is None else jnp.broadcast_to(jnp.asarray(mask, bool), item.shape)[places]
        _observe(group, distribution, cells, kept)


def bifactor_pattern(groups: Sequence[Any]) -> np.ndarray:
    """Pattern of one general trait and one specific trait for each group of items (Gibbons and Hedeker, 1992).

    **Example:**

    .. doctest::

        >>> from numpyro_ext.models import bifactor_pattern
        >>> print(bifactor_pattern(["reading", "reading", "algebra", None]))
        [[1 0 1]
         [1 0 1]
         [1 1 0]
         [1 0 0]]

    :param groups: the group of each item, sorted by name in the pattern; ``None`` for an item of the general trait
        alone.
    :return: for ``pattern=`` of :func:`item_response`, shape ``(items, 1 + groups)``.
    """
    names = sorted({group for group in groups if group is not None}, key=str)
    table = [[1, *(int(group == name) for name in names)] for group in groups]
    return np.array(table).reshape(len(table), 1 + len(names))


class ItemCall(NamedTuple):
    """A call of a model of items, taken apart."""

    arguments: dict[str, Any]
    """Keyword arguments of :func:`item_response` with the same items and traits, without answers and ``shape``.
    ``covariates`` has each row that people have once."""
    items: np.ndarray
    """The item of each column where the sites of answers stand side by side."""
    table: Callable[[], np.ndarray | None]
    """Function that returns the answers, shape ``(people, items)``, ``nan`` where there is none; ``None`` without any.
    It raises where a person answers an item twice, of which all else takes no notice."""
    groups: list[ItemGroup]
    names: list[str]


def item_call(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ItemCall | None:
    """Take a call of :func:`item_response` or :func:`item_response_records` apart; ``None`` for another model."""
    given: dict[str, Any] = {}
    if isinstance(model, functools.partial):
        given = dict(inspect.signature(model.func).bind_partial(*model.args, **model.keywords).arguments)
        model = model.func
    if model not in (item_response, item_response_records):
        return None
    found = {**given, **inspect.signature(model).bind_partial(*args, **kwargs).arguments}
    response, answers, item = found.get("response"), None, None
    if model is item_response:
        num_people, num_items = _table_shape(response, found.get("shape"))
        answers = None if response is None else answers_in_table(response, num_items)
    else:
        num_people, num_items, item = found["num_people"], found["num_items"], np.asarray(_codes(found["item"]))
        answers = None if response is None else answers_in_records(response, num_items)
    names = ("family", "num_traits", "pattern", "correlated", "signed", "priors")
    kept: dict[str, Any] = {name: found[name] for name in names if name in found}
    if found.get("covariates") is not None:
        kept["covariates"] = np.unique(np.asarray(found["covariates"], float), axis=0)
    groups, _, _ = _design(found["family"], num_items, found.get("num_categories"), answers, item,
                           found.get("num_traits", 1), found.get("pattern"))  # fmt: skip
    numbers = np.full(num_items, 2)
    for group in groups:
        numbers[group.items] = group.num_categories or 2

    def table() -> np.ndarray | None:
        if answers is None:
            return None
        values = np.array(answers.values, float)
        if found.get("mask") is not None:
            mask = np.asarray(mask_of_table(found["mask"], response, values.shape), bool)
            values[~np.broadcast_to(mask, values.shape)] = np.nan
        if item is None:
            return values
        return _as_table(_codes(found["person"]), item, values, (num_people, num_items))

    labels = list(answers.names) if answers is not None else [f"item {k}" for k in range(num_items)]
    order = np.concatenate([group.items for group in groups])
    return ItemCall({**kept, "num_categories": numbers.tolist()}, order, table, groups, labels)


def _as_table(person: Any, item: np.ndarray, values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    known = np.isfinite(values)
    cells = np.asarray(person)[known] * shape[1] + item[known]
    if len(np.unique(cells)) < len(cells):
        twice = np.divmod(cells[np.flatnonzero(np.diff(np.sort(cells)) == 0)[0]], shape[1])
        raise ValueError(f"Person {twice[0]} answers item {twice[1]} twice: a table has one answer of each to each.")
    table = np.full(shape, np.nan)
    table.flat[cells] = values[known]
    return table


def _table_shape(response: Any, shape: tuple[int, int] | None) -> tuple[int, int]:
    if shape is not None:
        num_people, num_items = shape
        return checked_size("number of people", num_people), checked_size("number of items", num_items)
    found = np.shape(response) if response is not None else None
    if found is None or len(found) != 2:
        what = "" if found is None else f"; got shape {found}"
        raise ValueError(f"item_response needs answers with people in rows and items in columns, or their shape{what}.")
    if 0 in found:
        raise ValueError(f"item_response needs one person and one item at least; got answers of shape {found}.")
    return found[0], found[1]


def _codes(index: Any) -> Any:
    """Indices of people or items as an array; codes of a Categorical of pandas."""
    if hasattr(getattr(index, "dtype", None), "categories"):
        return np.asarray(getattr(index, "cat", index).codes)
    return np.asarray(index)


def _design(
    family: str | Sequence[str],
    num_items: int,
    num_categories: Any,
    answers: Answers | None,
    item: np.ndarray | None,
    num_traits: int,
    pattern: ArrayLike | None,
) -> tuple[list[ItemGroup], np.ndarray | None, int]:
    """Groups of items, the pattern, and the number of traits, all checked against the answers and each other."""
    largest = None
    if answers is not None and answers.is_concrete:
        values = np.asarray(answers.values)
        finite = values if answers.are_integers else np.where(np.isfinite(values), values, -1.0)
        largest = np.full(num_items, -1.0)
        if item is None:
            largest = finite.max(axis=0).astype(float) if len(finite) else largest
        else:
            np.maximum.at(largest, item, finite)
        largest[largest < 0] = np.nan
    groups = item_groups(family, num_items, num_categories, largest)
    if answers is not None:
        checked_answers(answers, groups, item)
        if num_categories is None:
            _check_not_counted_from_one(answers, groups, item)
    if pattern is None:
        return groups, None, checked_size("num_traits", num_traits)
    signs = np.asarray(pattern)
    signs = signs[:, None] if signs.ndim == 1 else signs
    if signs.ndim != 2 or signs.shape[0] != num_items or not np.isin(signs, (-1, 0, 1)).all():
        raise ValueError(
            f"pattern must hold -1, 0 and 1, one row for each of {num_items} items and one column for each trait; got "
            f"shape {np.shape(pattern)}."
        )
    if num_traits not in (1, signs.shape[1]):
        raise ValueError(f"num_traits is {num_traits}, and pattern has {signs.shape[1]} columns.")
    empty = np.flatnonzero(~signs.any(0))
    if empty.size:
        raise ValueError(f"No item measures trait {empty[0]} of the pattern.")
    unmeasured = np.flatnonzero(~signs.any(1))
    if unmeasured.size:
        raise ValueError(f"Item {unmeasured[0]} measures no trait of the pattern.")
    return groups, signs.astype(int), signs.shape[1]


def _check_not_counted_from_one(answers: Answers, groups: Sequence[ItemGroup], item: np.ndarray | None) -> None:
    if not answers.is_concrete:
        return
    values = np.asarray(answers.values)
    for group in groups:
        if group.num_categories is None:
            continue
        own = values[:, group.items] if item is None else values[np.isin(item, group.items)]
        if group.num_categories > 2 and np.isfinite(own).any() and np.nanmin(own) >= 1:
            raise ValueError(
                f"No answer to a {group.family} item is 0: categories are 0 to K - 1. If they are counted from one, "
                f"subtract one; if 0 exists and is unused, say so by num_categories={group.num_categories}."
            )


def _measured_alone(
    signs: np.ndarray | None, num_items: int, num_traits: int, signed: bool, family: str | Sequence[str]
) -> np.ndarray | None:
    """The trait that each item measures alone with a positive slope, -1 for others; ``None`` if there are no such."""
    families = np.array([family] * num_items if isinstance(family, str) else list(family))
    traits = np.zeros(num_items, int)
    if signs is not None:
        traits = np.where((signs != 0).sum(1) == 1, np.argmax(signs != 0, 1), -1)
        traits[(signs < 0).any(1)] = -1
    elif num_traits > 1:
        return None
    traits[(families == "nominal") | (signed & ~np.isin(families, ("rasch", "rating-scale", "partial-credit")))] = -1
    return traits


def _people_and_items(
    groups: Sequence[ItemGroup],
    signs: np.ndarray | None,
    num_people: int,
    num_traits: int,
    correlated: bool,
    covariates: ArrayLike | None,
    signed: bool,
    priors: bool,
) -> tuple[Array, Any]:
    parameters = item_parameters(groups, num_traits, signs, signed=signed, priors=priors)
    mean: Any = 0.0
    if covariates is not None:
        columns = covariates if isinstance(covariates, jax.Array) else jnp.asarray(_as_numbers(covariates))
        if columns.ndim != 2 or columns.shape[0] != num_people:
            raise ValueError(f"covariates must have shape ({num_people}, columns); got {columns.shape}.")
        size = (columns.shape[1],) if num_traits == 1 else (columns.shape[1], num_traits)
        if priors:
            normal = dist.Normal(0.0, 1.0).expand(size).to_event()
            coefficients = numpyro.sample("trait_coefficients", normal)
        else:
            coefficients = numpyro.param("trait_coefficients", jnp.zeros(size))
        mean = columns @ coefficients
    if correlated and num_traits == 1:
        raise ValueError("correlated=True needs two traits or more.")
    population: dist.Distribution
    if num_traits == 1:
        population = dist.Normal(mean, 1.0)
    elif correlated:
        if priors:
            factor = numpyro.sample("trait_cholesky", dist.LKJCholesky(num_traits, 1.0))
        else:
            factor = numpyro.param("trait_cholesky", jnp.eye(num_traits), constraint=constraints.corr_cholesky)
        numpyro.deterministic("trait_correlation", factor @ factor.T)
        population = dist.MultivariateNormal(mean, scale_tril=factor)
    else:
        population = dist.Normal(jnp.broadcast_to(mean, (num_people, num_traits)), 1.0).to_event(1)
    with numpyro.plate("people", num_people):
        trait: Array = numpyro.sample("trait", population)
    return trait, parameters


def _as_numbers(covariates: Any) -> np.ndarray:
    try:
        return np.asarray(covariates, float)
    except ValueError as error:
        raise ValueError(
            f"covariates must be numbers: {error}. Columns of pandas with labels are numbers after "
            "pd.get_dummies(covariates, drop_first=True)."
        ) from error


def _observe(group: ItemGroup, distribution: dist.Distribution, cells: Any, kept: Any) -> None:
    """The site of the answers to the items of a group; those that are ``nan`` are left out."""
    if cells is not None:
        if not jnp.issubdtype(cells.dtype, jnp.integer):
            known = ~jnp.isnan(cells) if isinstance(cells, jax.core.Tracer) else ~np.isnan(np.asarray(cells))
            # Not even an answer that is left out may be nan: it would be in the gradient.
            cells = jnp.where(known, cells, 0.0)
            kept = known if kept is None else known & kept
        cells = jnp.asarray(cells).astype(float if group.num_categories is None else int)
        if not isinstance(kept, jax.core.Tracer) and np.all(kept):
            kept = None
    with handlers.mask(mask=True if kept is None else kept):
        numpyro.sample(f"response{group.suffix}", distribution, obs=cells)
