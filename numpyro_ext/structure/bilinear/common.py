"""Gaussian sites that all cells of a bilinear model see in the same way: an intercept, a few common coefficients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations

import jax
import jax.numpy as jnp
from jax import Array

from ...linalg.cholesky import cholesky, cholesky_solve
from ..program.degrees import Degree, classify
from ..program.program import Atom, Program
from .form import Common, GaussianSide


def find_common(
    program: Program,
    candidates: Mapping[str, int],
    field: Mapping[str, int],
    predictors: Sequence[Atom],
    priors: Mapping[str, Atom],
    others: Collection[Atom],
) -> tuple[str, ...]:
    """Names of the sites of which all predictors are affine with coefficients that depend on no unknown.

    :param program: the model.
    :param candidates: for each Gaussian site outside the field its input of the program.
    :param field: for each site of the two sides its input.
    :param predictors: of all observed sites.
    :param priors: log densities of all sites outside the field.
    :param others: values that such a site must have no part in, such as priors of the field, and log factors given
        their predictors.
    """
    inputs = set(program.inputs)
    found = []
    for name, number in candidates.items():
        behind_prior = program.ancestors([priors[name]]) & inputs
        elsewhere = [*others, *(atom for other, atom in priors.items() if other != name)]
        if behind_prior == {number} and number not in program.ancestors(elsewhere):
            pairs = [{name: number, other: place} for other, place in field.items()]
            if all(_is_affine(program, pair, predictors) for pair in pairs):
                found.append(name)
    meeting = {
        name
        for pair in combinations(found, 2)
        if not _is_affine(program, {n: candidates[n] for n in pair}, predictors)
        for name in pair
    }
    return tuple(name for name in found if name not in meeting)


def _is_affine(program: Program, sites: Mapping[str, int], predictors: Sequence[Atom]) -> bool:
    degrees = classify(program, sites)
    return all(degrees.of(atom) != Degree.NONLINEAR for atom in predictors)


def common_block(
    log_prior: Callable[[Array], Array], predict: Callable[[Array], Array], size: int, dtype: jnp.dtype
) -> Common:
    """The prior and the coefficients of common unknowns, exact derivatives of functions of them.

    :param log_prior: quadratic log density of the unknowns, shape ``(size,)``.
    :param predict: predictors of all cells, where the vectors of both sides are zero.
    :param int size: number of unknowns.
    :param dtype: of the unknowns.

    Cost: as many evaluations of the predictor as there are unknowns.
    """
    zeros = jnp.zeros((size,), dtype)
    precision = -jax.hessian(log_prior)(zeros)
    mean = cholesky_solve(cholesky(precision), jax.grad(log_prior)(zeros))

    def slope(direction: Array) -> Array:
        return jax.jvp(predict, (zeros,), (direction,))[1]

    coefficients = jax.lax.map(slope, jnp.eye(size, dtype=dtype)).T
    return Common(GaussianSide(mean[None], precision[None]), coefficients)
