"""Forms of few families and blocks, for models that name each of many sites."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...compilation.pytree import PyTree
from ...linalg.gaussian.prior import DiagonalPrior
from ...potentials.base import Potential
from .form import LatentGaussian


def joined(form: LatentGaussian) -> LatentGaussian:
    """The same form with like families of factors, and independent unknowns, that follow each other put together.

    A model that makes a site for each group in a loop has as many families of factors as it has groups; an algorithm
    would be traced and compiled for each of them. Rows and columns stay where they are.

    :param LatentGaussian form: any.
    :return: a form with at most as many families and blocks.
    """
    prior: list[Any] = []
    for kind, blocks in groupby(form.prior, key=type):
        run: list[Any] = list(blocks)
        if kind is DiagonalPrior and len(run) > 1:
            run = [DiagonalPrior(jnp.concatenate([block.variance for block in run]))]
        prior += run
    potentials: list[Potential] = []
    observed: list[Array] = []
    for _, families in groupby(zip(form.potentials, form.observed, strict=True), key=lambda family: _kind(*family)):
        of, masks = zip(*families, strict=True)
        if len(of) > 1:
            of, masks = (_one_of(of, masks),), (jnp.concatenate(masks),)
        potentials += of
        observed += masks
    return form._replace(prior=tuple(prior), potentials=tuple(potentials), observed=tuple(observed))


def _kind(potential: Potential, observed: Array) -> object:
    """Kind of a family: those of one kind may be joined; a family that may not has a kind of its own."""
    leaves, structure = jax.tree.flatten(potential)
    is_elementwise = potential.is_elementwise and all(np.shape(leaf) in ((), observed.shape) for leaf in leaves)
    return (structure, *(jnp.result_type(leaf) for leaf in leaves)) if is_elementwise else object()


def _one_of(potentials: tuple[Potential, ...], observed: tuple[Array, ...]) -> Potential:
    def put_together(*leaves: PyTree) -> Array:
        if all(np.shape(leaf) == () for leaf in leaves) and all(leaf is leaves[0] for leaf in leaves):
            return jnp.asarray(leaves[0])
        parts = [jnp.broadcast_to(leaf, mask.shape) for leaf, mask in zip(leaves, observed, strict=True)]
        return jnp.concatenate(parts)

    return jax.tree.map(put_together, *potentials)
