"""The form that the latent-Gaussian engines run on."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ...linalg.gaussian.design import AnyDesign, DenseDesign, SparseRows
from ...linalg.gaussian.prior import PriorBlock
from ...linalg.gaussian.spaces.border_space import Border
from ...linalg.gaussian.spaces.touched_space import Touched
from ...linalg.gaussian.sparse_layout import SparseLayout
from ...potentials.base import Potential


class AffineMap(NamedTuple):
    """A quantity ``design @ e + offset`` of the unknowns ``e``, flattened in C order."""

    design: AnyDesign
    offset: Array


class Blocks(NamedTuple):
    """A partition of rows and columns into ``num_blocks`` groups that share neither factor nor prior.

    ``rows`` of shape ``(num_blocks, max_rows)`` and ``columns`` of shape ``(num_blocks, max_columns)`` hold indices,
    padded with ``num_rows`` and ``num_columns`` (one past the end). One block means: no structure to exploit.
    """

    rows: Array
    columns: Array


class BlockKinds(NamedTuple):
    """Blocks with equal factors, data and priors, as of people with the same answers: one stands for all of a kind."""

    first: Array
    """A block of each kind, shape ``(U,)``; padded with a block that counts nothing."""
    number: Array
    """Number of blocks of each kind, zero of padding, real numbers of shape ``(U,)``."""
    of_blocks: Array
    """Kind of each block, shape ``(num_blocks,)``."""

    @property
    def size(self) -> int:
        """Number of kinds, with padding."""
        return int(self.first.shape[0])


class MoreBlocks(NamedTuple):
    """Outcomes of blocks whose factors are those of the form's in all else, as of people beyond the first: where a form
    has them, evidence is that of these blocks, and the form's own are among them."""

    labels: tuple[Array, ...]
    """Outcomes of the factors of each family, shape ``(num_blocks, columns)`` each."""
    observed: tuple[Array, ...] | None
    """Masks of these, if there are gaps."""
    weights: Array | None = None
    """Location and variance of each block as sums of those of the first blocks of the form, shape ``(num_blocks, r)``;
    by default those of the first one."""

    @property
    def size(self) -> int:
        """Number of blocks."""
        return int(self.labels[0].shape[0])


class LatentGaussian(NamedTuple):
    r"""Unknowns :math:`e \sim \prod_s N(0, C_s)`, predictors :math:`\eta = A e + b`, factors :math:`t_i(\eta_i)`.

    The unknowns are the innovations of the field's sites: a site whose mean depends on other sites is written as that
    mean plus an innovation, which is a shear of unit Jacobian, so densities agree and prior blocks are independent.
    Everything is an array or a container of arrays: a form can be passed through ``jit``, ``vmap`` and ``grad``.
    """

    prior: tuple[PriorBlock, ...]
    """Independent blocks of ``e``, in the order of the columns of ``A``."""
    design: AnyDesign
    """:math:`A`, of shape ``(num_rows, num_columns)``."""
    offset: Array
    """:math:`b`, of shape ``(num_rows,)``."""
    potentials: tuple[Potential, ...]
    """Families of factors; consecutive runs of rows belong to consecutive families."""
    observed: tuple[Array, ...]
    """Boolean array over the rows of each family: false where a mask removes the factor."""
    log_constant: Array
    """Terms of the log density that do not depend on ``e``."""
    blocks: Blocks
    """Independent groups of rows and columns."""
    border: Border | None = None
    """Groups that are independent given a few unknowns, where that is much cheaper; whoever does not know of them takes
    all unknowns together, as :attr:`blocks` says."""
    touched: Touched | None = None
    """Quantities that rows touch of blocks, where these are much fewer than the unknowns."""
    layout: SparseLayout | None = None
    """Places of all entries in a sparse posterior precision, where a prior is sparse."""
    kinds: BlockKinds | MoreBlocks | None = None
    """Blocks that are alike, where an engine has looked for them, or further ones that are like these; see
    :meth:`LatentGaussianReading.with_kinds`."""

    @property
    def num_rows(self) -> int:
        return self.offset.shape[0]

    @property
    def num_columns(self) -> int:
        return sum(block.size for block in self.prior)

    @property
    def has_blocks_alone(self) -> bool:
        """True if the form is its :attr:`blocks` and nothing beside, with a design whose rows are held as numbers."""
        beside = (self.border, self.touched, self.layout, self.kinds)
        return all(part is None for part in beside) and isinstance(self.design, SparseRows | DenseDesign)

    def split_rows(self, values: Array) -> tuple[Array, ...]:
        """Cut an array of shape ``(num_rows, ...)`` into the parts that belong to each family of factors."""
        parts, start = [], 0
        for mask in self.observed:
            parts.append(values[start : start + mask.shape[0]])
            start += mask.shape[0]
        return tuple(parts)

    def predictor(self, e: Array) -> Array:
        """:math:`A e + b` of shape ``(num_rows,)``."""
        return self.design.matvec(e) + self.offset

    def log_factors(self, eta: Array) -> Array:
        """Log factors at the predictors ``eta``, zero where masked; shape ``(num_rows,)``."""
        terms = []
        for potential, mask, part in zip(self.potentials, self.observed, self.split_rows(eta), strict=True):
            terms.append(jnp.where(mask, potential.log_density(part), 0.0))
        return jnp.concatenate(terms) if terms else jnp.zeros((0,), eta.dtype)

    def log_density(self, e: Array) -> Array:
        """Joint log density of the unknowns ``e`` of shape ``(num_columns,)`` and the data."""
        return self.log_prior(e) + jnp.sum(self.log_factors(self.predictor(e)))

    def log_prior(self, e: Array) -> Array:
        """Log density of the unknowns without the factors, with all constants of the joint one."""
        total, start = self.log_constant, 0
        for block in self.prior:
            total = total + block.log_density(e[start : start + block.size])
            start += block.size
        return total
