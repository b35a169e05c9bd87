"""Base of the spaces whose rows are one block."""

from __future__ import annotations

from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from ...frozen_pytree import frozen_pytree
from ..marginals import GaussianSpace, NotSequential
from ..prior import PriorBlock
from .coefficient_space import WhitenedPrior


class OneBlock(GaussianSpace, NotSequential):
    """A space that keeps all rows of its design together."""

    design: Any

    @property
    def rows(self) -> Array:
        """Rows of the one block."""
        return jnp.arange(self.design.num_rows)[None]

    def to_rows(self, local: Array) -> Array:
        """Values of shape ``(1, m)`` as ``(num_rows,)``."""
        return local[0]


@frozen_pytree
class IndependentUnknowns(OneBlock):
    r"""A space of unknowns :math:`e = s \circ w` with a diagonal prior, seen through :math:`h = A e`."""

    design: Any
    scale: Array
    """:math:`s`, shape ``(N,)``."""
    precision: Array
    """Prior precision of :math:`w`: one, or zero where the prior is flat."""
    half_log_determinant: Array
    """Half the log determinant of the precision, with the constant of the flat unknowns."""

    @classmethod
    def whiten(cls, prior: tuple[PriorBlock, ...], design: Any, dtype: Any) -> Self:
        """The space in which the prior is white, in the dtype of the design."""
        factor, precision, constant = WhitenedPrior.build(prior, dtype)
        ones = jnp.ones((design.num_columns,), dtype)
        return cls(design, factor.apply(ones), precision.apply(ones), constant)

    def predictor(self, coordinates: Array) -> Array:
        """Predictors of shape ``(num_rows,)`` for coordinates :math:`w` of shape ``(1, N)``."""
        return self.design.matvec(self.unknowns(coordinates))

    def unknowns(self, coordinates: Array) -> Array:
        """:math:`e` of shape ``(..., N)`` for ``w`` of shape ``(..., 1, N)``."""
        return self.scale * coordinates[..., 0, :]

    def inner(self, a: Array, b: Array) -> Array:
        return jnp.sum(self.precision * a * b)

    def zeros(self) -> Array:
        return jnp.zeros_like(self.scale)[None]
