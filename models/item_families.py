"""Families of items: their parameters as sites, and the distributions of their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints

from numpyro_ext.distributions import AdjacentCategory
from numpyro_ext.first_look import is_first_look

__all__ = ["FAMILIES", "ItemGroup", "ItemParameters", "answer_distribution", "item_groups", "item_parameters"]

_BINARY = ("rasch", "2pl", "3pl", "4pl")
_COMMON_SLOPE = ("rasch", "rating-scale", "partial-credit")
_WITH_INTERCEPT = (*_BINARY, "rating-scale", "gaussian")
FAMILIES = (*_BINARY, "graded", "rating-scale", "partial-credit", "generalised-partial-credit", "nominal", "gaussian")


class ItemGroup(NamedTuple):
    """Items of one family with one number of categories: their answers are one site."""

    family: str
    num_categories: int | None
    """``None`` for real answers."""
    items: np.ndarray
    """Indices of the items, increasing."""
    family_suffix: str
    """Ending of the sites that all items of the family share: empty if there is one family."""
    suffix: str
    """Ending of the sites of this group: with the number of categories if the family has several."""


def item_groups(
    family: str | Sequence[str], num_items: int, num_categories: Any, largest: np.ndarray | None
) -> list[ItemGroup]:
    """The groups of a test, in the order of the first item of each family, then by number of categories.

    :param family: of all items, or of each.
    :param num_categories: of all items or of each; ``None`` for those up to the largest answer to any item of
        the family.
    :param largest: the largest answer to each item, nan where there is none.
    :raises ValueError: for an unknown family, and if the lengths or the numbers do not fit.
    """
    families = [family] * num_items if isinstance(family, str) else [str(name) for name in family]
    unknown = sorted(set(families) - set(FAMILIES))
    if unknown or len(families) != num_items:
        raise ValueError(
            f"family must be one of {FAMILIES}, or one of these for each of the {num_items} items; got "
            f"{unknown or f'{len(families)} of them'}."
        )
    numbers = _numbers_of_categories(families, num_categories, largest)
    groups = []
    for name in dict.fromkeys(families):
        family_suffix = f"_{name}".replace("-", "_") if len(set(families)) > 1 else ""
        of_family = np.flatnonzero(np.array(families) == name)
        sizes = list(dict.fromkeys(sorted(numbers[k] or 0 for k in of_family)))
        for size in sizes:
            items = np.array([k for k in of_family if (numbers[k] or 0) == size])
            suffix = f"{family_suffix}_{size}" if len(sizes) > 1 else family_suffix
            groups.append(ItemGroup(name, size or None, items, family_suffix, suffix))
    return groups


def _numbers_of_categories(
    families: Sequence[str], num_categories: Any, largest: np.ndarray | None
) -> list[int | None]:
    given = np.asarray(num_categories) if num_categories is not None else None
    if given is not None and (given.dtype.kind not in "iu" or given.shape not in ((), (len(families),))):
        raise ValueError(f"num_categories must be an integer, or one for each item; got {num_categories!r}.")
    numbers: list[int | None] = []
    for k, family in enumerate(families):
        if family == "gaussian":
            numbers.append(None)
        elif family in _BINARY:
            numbers.append(2)
        elif given is not None:
            numbers.append(int(given if given.ndim == 0 else given[k]))
        else:
            if largest is None:
                raise ValueError(f"num_categories must be given without answers to {family} items.")
            alike = [largest[j] for j, other in enumerate(families) if other == family and np.isfinite(largest[j])]
            numbers.append(max(2, int(max(alike, default=1)) + 1))
        if numbers[-1] is not None and numbers[-1] < 2:
            raise ValueError(f"Items have two categories or more; num_categories says {numbers[-1]} of item {k}.")
    return numbers


class ItemParameters(NamedTuple):
    """Parameters of the items of one group, one row each."""

    slopes: Array
    """Shape ``(items,)`` for one trait, ``(items, traits)`` for several; of nominal items one axis more before the
    traits, for the categories after the first."""
    others: dict[str, Array]
    """Intercepts, cutpoints, steps, guessing and so on, by the names of their sites."""

    def of(self, index: Any) -> ItemParameters:
        """The parameters of some items, for each answer."""
        return ItemParameters(self.slopes[index], {name: value[index] for name, value in self.others.items()})


class _Sites:
    """Makers of the sites of items: sample sites with priors, or ``param`` sites without."""

    def __init__(self, priors: bool) -> None:
        self.priors = priors
        self.number = 0
        self.at_start = True

    def vector(
        self, name: str, start: Any, prior: dist.Distribution, constraint: Any = constraints.real, event_dim: int = 0
    ) -> Array:
        """Parameters of items, on the first axis, with a prior for each of them.

        :param start: initial values of a ``param`` site, which give the shape.
        :param prior: of the elements of an item, of ``event_dim`` dimensions.
        """
        start = jnp.asarray(start, float)
        self.number += start.size
        if self.priors:
            return numpyro.sample(name, prior.expand(start.shape[: start.ndim - event_dim]).to_event())
        value = numpyro.param(name, start, constraint=constraint)
        self.at_start = self.at_start and (value is start or is_first_look())
        return value


def item_parameters(
    groups: Sequence[ItemGroup],
    num_traits: int,
    pattern: np.ndarray | None,
    *,
    signed: bool,
    priors: bool,
) -> tuple[list[ItemParameters], int | None]:
    """The sites of the items, and their values group by group.

    :return: the parameters of each group, and the number of free parameters if the sites are ``param`` sites at their
        initial values or an engine is to learn them (a first look at the model), else ``None``.
    """
    sites, out = _Sites(priors), []
    for family in dict.fromkeys(group.family for group in groups):
        own = [group for group in groups if group.family == family]
        items = np.sort(np.concatenate([group.items for group in own]))
        slopes = None if family == "nominal" else _slopes(sites, own[0], items, num_traits, pattern, signed)
        shared = _shared_by_family(sites, own[0], len(items))
        for group in own:
            places = np.searchsorted(items, group.items)
            others = {name: value[places] for name, value in shared.items()}
            others |= _of_group(sites, group)
            found = _nominal_slopes(sites, group, num_traits, pattern) if slopes is None else slopes[places]
            out.append(ItemParameters(found, others))
            if num_traits == 1 and family in _BINARY:
                easiness = others["intercept"]
                numpyro.deterministic(f"difficulty{group.suffix}", -easiness / found)
    return out, sites.number if sites.at_start and not priors else None


def _slope_prior(signed: bool) -> tuple[dist.Distribution, Any]:
    if signed:
        return dist.Normal(0.0, 1.0), constraints.real
    return dist.LogNormal(0.0, 0.5), constraints.positive


def _slopes(
    sites: _Sites, group: ItemGroup, items: np.ndarray, num_traits: int, pattern: np.ndarray | None, signed: bool
) -> Array:
    """Slopes of the items of a family, shape ``(items,)``, or ``(items, traits)``."""
    name = f"discrimination{group.family_suffix}"
    prior, constraint = _slope_prior(signed and group.family not in _COMMON_SLOPE)
    signs = None if pattern is None else pattern[items]
    if group.family in _COMMON_SLOPE:
        value = sites.vector(name, 1.0, prior, constraint)
        if signs is None:
            if num_traits > 1:
                raise ValueError(
                    f"{group.family} items have one slope: with {num_traits} traits pattern= must say which of them "
                    "each item measures."
                )
            signs = np.ones((len(items), 1))
        return value * (signs[:, 0] if num_traits == 1 else signs)
    if signs is not None:
        rows, columns = np.nonzero(signs)
        free = sites.vector(f"free_{name}", np.ones(len(rows)), prior, constraint)
        table = jnp.zeros(signs.shape, free.dtype).at[rows, columns].set(free * signs[rows, columns])
        return numpyro.deterministic(name, table[:, 0] if num_traits == 1 else table)
    if num_traits == 1:
        return sites.vector(name, np.ones(len(items)), prior, constraint)
    # Orthogonal waves: from slopes that are all alike no gradient leads to different traits.
    waves = np.cos(np.pi / len(items) * np.outer(0.5 + np.arange(len(items)), np.arange(num_traits)))
    start = waves if signed else 1.0 + 0.5 * waves
    return sites.vector(name, start, prior, constraint)


def _nominal_slopes(sites: _Sites, group: ItemGroup, num_traits: int, pattern: np.ndarray | None) -> Array:
    """Slopes of the categories after the first, shape ``(items, K - 1)``, or ``(items, K - 1, traits)``."""
    assert group.num_categories is not None
    width, name = group.num_categories - 1, f"slopes{group.suffix}"
    ramp = np.arange(1, width + 1) / width
    signs = np.ones((len(group.items), num_traits)) if pattern is None else pattern[group.items]
    start = ramp[:, None] * signs[:, None, :]
    if num_traits == 1:
        return sites.vector(name, start[..., 0], dist.Normal(0.0, 1.0))
    if pattern is None:
        waves = np.cos(np.pi / len(start) * np.outer(0.5 + np.arange(len(start)), np.arange(num_traits)))
        return sites.vector(name, start * waves[:, None, :], dist.Normal(0.0, 1.0))
    rows, columns = np.nonzero(signs)
    free = sites.vector(f"free_{name}", start[rows, :, columns], dist.Normal(0.0, 1.0))
    table = jnp.zeros(start.shape, free.dtype).at[rows, :, columns].set(free)
    return numpyro.deterministic(name, table)


def _shared_by_family(sites: _Sites, group: ItemGroup, num_items: int) -> dict[str, Array]:
    """Parameters that do not depend on the number of categories, one row for each item of the family."""
    end, found = group.family_suffix, {}
    if group.family in _WITH_INTERCEPT:
        found["intercept"] = sites.vector(f"intercept{end}", np.zeros(num_items), dist.Normal(0.0, 3.0))
    if group.family in ("3pl", "4pl"):
        interval = constraints.unit_interval
        found["guessing"] = sites.vector(f"guessing{end}", np.full(num_items, 0.2), dist.Beta(5.0, 17.0), interval)
        if group.family == "4pl":
            found["upper"] = sites.vector(f"upper{end}", np.full(num_items, 0.95), dist.Beta(17.0, 5.0), interval)
    if group.family == "gaussian":
        start = np.ones(num_items)
        found["noise"] = sites.vector(f"noise{end}", start, dist.HalfNormal(2.0), constraints.positive)
    return found


def _of_group(sites: _Sites, group: ItemGroup) -> dict[str, Array]:
    """Parameters with an axis of categories."""
    if group.num_categories is None or group.family in _BINARY:
        return {}
    width, num, end = group.num_categories - 1, len(group.items), group.suffix
    zeros = np.zeros((num, width))
    if group.family == "graded":
        start = np.linspace(-1.5, 1.5, width) if width > 1 else np.zeros(1)
        return {"cutpoints": sites.vector(f"cutpoints{end}", zeros + start, _ordered_prior(start),
                                          constraints.ordered_vector, event_dim=1)}  # fmt: skip
    if group.family == "rating-scale":
        if width == 1:
            steps = jnp.zeros(1)  # two categories have one step, which the intercept is
        else:
            prior = dist.ZeroSumNormal(2.0, (width,))
            steps = sites.vector(f"steps{end}", zeros[0], prior, constraints.zero_sum(1), event_dim=1)
        return {"steps": jnp.broadcast_to(steps, (num, width))}
    if group.family == "nominal":
        return {"intercepts": sites.vector(f"intercepts{end}", zeros, dist.Normal(0.0, 3.0))}
    return {"steps": sites.vector(f"steps{end}", zeros, dist.Normal(0.0, 3.0))}


def _ordered_prior(start: np.ndarray) -> dist.Distribution:
    """Increasing numbers, the first normal and the gaps log-normal around those of the start."""
    location = np.concatenate([start[:1], np.log(np.diff(start))])
    scale = np.concatenate([[3.0], np.ones(len(start) - 1)])
    free = dist.Normal(location, scale).to_event(1)
    return dist.TransformedDistribution(free, dist.transforms.OrderedTransform())


def answer_distribution(family: str, parameters: ItemParameters, trait: Array, num_traits: int) -> dist.Distribution:
    """Distribution of the answers to items of one group.

    :param parameters: of the item of each answer, or of the items on the last axis of the batch.
    :param trait: of the person of each answer, with an axis for the items that broadcasts against them, and the traits
        on the last axis if there are several.
    """
    slopes, others = parameters
    if family == "nominal":
        logits = trait[..., None] * slopes if num_traits == 1 else jnp.sum(trait[..., None, :] * slopes, -1)
        logits = logits + others["intercepts"]
        return dist.Categorical(logits=jnp.concatenate([jnp.zeros_like(logits[..., :1]), logits], -1))
    if num_traits == 1:
        eta = trait * slopes
    elif trait.ndim == slopes.ndim:
        eta = jnp.sum(trait * slopes, -1)
    else:  # people by items, a product of matrices
        eta = trait[..., 0, :] @ slopes.T
    return _DISTRIBUTIONS[family](eta, others)


def _guessing(eta: Array, others: dict[str, Array]) -> dist.Distribution:
    """p = c + (1 - c) s(z) by its logit, in which nothing cancels far from the item."""
    z, c = eta + others["intercept"], others["guessing"]
    return dist.Bernoulli(logits=jnp.logaddexp(jnp.log(c), z) - jnp.log1p(-c))


def _guessing_and_slipping(eta: Array, others: dict[str, Array]) -> dist.Distribution:
    """p = c + (u - c) s(z) by its logit, the ratio of c (1 - s) + u s to (1 - c) (1 - s) + (1 - u) s."""
    z, c, u = eta + others["intercept"], others["guessing"], others["upper"]
    yes, no = jnp.logaddexp(jnp.log(c), jnp.log(u) + z), jnp.logaddexp(jnp.log1p(-c), jnp.log1p(-u) + z)
    return dist.Bernoulli(logits=yes - no)


def _logistic(eta: Array, others: dict[str, Array]) -> dist.Distribution:
    return dist.Bernoulli(logits=eta + others["intercept"])


def _adjacent(eta: Array, others: dict[str, Array]) -> dist.Distribution:
    return AdjacentCategory(eta, others["steps"])


_DISTRIBUTIONS: dict[str, Callable[[Array, dict[str, Array]], dist.Distribution]] = {
    "rasch": _logistic,
    "2pl": _logistic,
    "3pl": _guessing,
    "4pl": _guessing_and_slipping,
    "graded": lambda eta, others: dist.OrderedLogistic(eta, others["cutpoints"]),
    "rating-scale": lambda eta, others: AdjacentCategory(eta + others["intercept"], others["steps"]),
    "partial-credit": _adjacent,
    "generalised-partial-credit": _adjacent,
    "gaussian": lambda eta, others: dist.Normal(eta + others["intercept"], others["noise"]),
}
