"""Distributions that are sparse priors of the coefficients of a linear model, their forests and components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from ...distributions import AnalysisPrior
from ...linalg.operators.operator import LinearOperator
from ...potentials.trees.forest import Forest
from ...potentials.trees.mixture import TreeParameters
from ..errors import ModelStructureError
from ..families import IDENTITY, Observations, family_of
from ..model.priors import is_unweighted, unwrap


class SparsePrior(NamedTuple):
    """Distribution of the innovations of one site, flattened in C order."""

    forest: Forest
    parameters: TreeParameters
    analysis: LinearOperator | None = None
    """Operator to the coefficients, where these are not the values of the site."""
    weight: Any = None
    """Power of the prior, ``None`` for one."""


def is_sparse(fn: dist.Distribution) -> bool:
    """True if a site of this distribution can be coefficients with a product or forest prior."""
    base = unwrap(fn)
    if isinstance(base, AnalysisPrior):
        return fn.batch_shape == () and is_sparse(base.prior)
    family = family_of(base)
    is_product = family is not None and family.is_sparse_prior and not is_unweighted(fn)
    return is_product or (_has_forest(base) and fn.batch_shape == ())


def _has_forest(base: object) -> bool:
    """True if a distribution is a scale mixture on a forest, as ``HiddenMarkovTree`` is."""
    return isinstance(getattr(base, "forest", None), Forest) and hasattr(base, "parameters")


def sparse_prior(fn: dist.Distribution) -> SparsePrior:
    """Forest and components of a site; parameters that a distribution shares between elements make one group."""
    base = unwrap(fn)
    if isinstance(base, AnalysisPrior):
        return sparse_prior(base.prior)._replace(analysis=base.operator, weight=base.weight)
    if _has_forest(base):
        return SparsePrior(base.forest, base.parameters)
    shape = fn.batch_shape + fn.event_shape
    family = family_of(base)
    assert family is not None  # by is_sparse
    given = {n: getattr(base, n) for n in family.parameters}
    own = np.broadcast_shapes(*(jnp.shape(v) for v in given.values()))
    num_groups = int(np.prod(own))
    groups = np.broadcast_to(np.arange(num_groups).reshape(own), shape).reshape(-1)
    dtype = jnp.result_type(float, *given.values())
    parameters = {n: jnp.broadcast_to(v, own).reshape(-1).astype(dtype) for n, v in given.items()}
    zeros = jnp.zeros((num_groups,), dtype)
    potential = family.build(IDENTITY, Observations(zeros, parameters, jnp.ones(()), 1)).potential
    if not groups.size:
        raise ModelStructureError("a site without elements is no field: leave it out, or give it one at least.")
    forest = Forest.from_parents(np.full(groups.size, -1), groups)
    return SparsePrior(forest, TreeParameters(potential, potential, zeros, jnp.zeros((num_groups, 2), dtype)))


def join(priors: Sequence[TreeParameters], num_groups: Sequence[int]) -> TreeParameters:
    """Parameters of several forests side by side; their components are of the same families.

    :param num_groups: numbers of groups of the forests.
    """
    if len(priors) == 1:
        return priors[0]

    def component(parts: Sequence[object]) -> Any:
        names = list(vars(parts[0]))
        return type(parts[0])(
            *(_per_group([getattr(p, n) for p in parts], num_groups, 1) for n in names),
        )

    return TreeParameters(
        component([p.low for p in priors]),
        component([p.high for p in priors]),
        _per_group([p.root_probability for p in priors], num_groups, 1),
        _per_group([p.transition for p in priors], num_groups, 2),
    )


def _per_group(values: Sequence[Any], num_groups: Sequence[int], ndim: int) -> Array:
    shapes = [(n, 2)[:ndim] for n in num_groups]
    return jnp.concatenate([jnp.broadcast_to(v, shape) for v, shape in zip(values, shapes, strict=True)])


def join_forests(forests: Sequence[Forest]) -> Forest:
    """Forests side by side: nodes and groups of each are numbered after those of the ones before."""
    if len(forests) == 1:
        return forests[0]
    parents, groups, node, group = [], [], 0, 0
    for forest in forests:
        own = np.asarray(forest.parents)
        parents.append(np.where(own < 0, -1, own + node))
        groups.append(np.asarray(forest.groups) + group)
        node, group = node + forest.num_nodes, group + forest.num_groups
    return Forest.from_parents(np.concatenate(parents), np.concatenate(groups))
