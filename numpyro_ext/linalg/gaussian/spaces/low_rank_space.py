r"""Conditioning fields whose covariances are of low rank but for their diagonal, as sparse Gaussian processes have.

Unknowns :math:`f = W u + D^{1/2} \epsilon` of a :class:`~.prior.LowRankPrior` are independent given the inducing values
:math:`u`. So their space is that of :math:`(\epsilon, u)`, all standard normal and in number more than :math:`f`: a
border of inducing values (:mod:`~.border_space`) where many rows see them, at cost ``n rank^2``. Sites are functions of
:math:`f`, so partition functions, divergences from the prior and moments of :math:`f` are the same, and nothing divides
by :math:`D` (Snelson and Ghahramani 2006, *Sparse Gaussian processes using pseudo-inputs*).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...cholesky import safe_sqrt
from ...frozen_pytree import frozen_pytree
from ..design import DenseDesign, Design, SparseRows
from ..marginals import ConditionedGaussian, GaussianSpace, Marginals, NotSequential
from ..prior import DiagonalPrior, LowRankPrior, PriorBlock
from .border_space import Border, BorderPosterior, BorderSpace


@frozen_pytree
class InducingValues:
    """The map from noise and inducing values to unknowns: those of other priors are themselves."""

    prior: tuple[PriorBlock, ...]
    scale: Array
    """Coefficient of each unknown in its noise, shape ``(num_columns,)``."""
    factor: Array
    """Coefficients of each unknown in the inducing values of its field, shape ``(num_columns, rank)``, padded with
    zeros."""
    first: Array
    """The first of these inducing values, shape ``(num_columns,)``."""

    @classmethod
    def build(cls, prior: tuple[PriorBlock, ...]) -> InducingValues:
        """Stack the priors, one of which is of low rank at least."""
        low_rank = [block for block in prior if isinstance(block, LowRankPrior)]
        rank, dtype = max(block.factor.shape[-1] for block in low_rank), low_rank[0].factor.dtype
        scales, factors, firsts, start = [], [], [], 0
        for block in prior:
            if isinstance(block, LowRankPrior):
                batch, width, own = block.factor.shape
                scales.append(safe_sqrt(block.diagonal).reshape(-1))
                factors.append(jnp.pad(block.factor.reshape(-1, own), ((0, 0), (0, rank - own))))
                firsts.append(start + own * np.repeat(np.arange(batch), width))
                start += batch * own
            else:
                scales.append(jnp.ones((block.size,), dtype))
                factors.append(jnp.zeros((block.size, rank), dtype))
                firsts.append(np.zeros(block.size, int))
        return cls(prior, jnp.concatenate(scales), jnp.concatenate(factors), jnp.asarray(np.concatenate(firsts)))

    @property
    def num_columns(self) -> int:
        """The unknowns, and as many numbers in front of the inducing values."""
        return self.scale.shape[0]

    @property
    def num_inducing(self) -> int:
        """Inducing values of all fields."""
        return sum(b.factor.shape[0] * b.factor.shape[2] for b in self.prior if isinstance(b, LowRankPrior))

    def standard_prior(self) -> tuple[PriorBlock, ...]:
        """The prior of noise, other unknowns and inducing values."""
        dtype = self.scale.dtype
        standard = [
            DiagonalPrior(jnp.ones((block.size,), dtype)) if isinstance(block, LowRankPrior) else block
            for block in self.prior
        ]
        return *standard, DiagonalPrior(jnp.ones((self.num_inducing,), dtype))

    def by_noise(self, design: Design) -> Design:
        """Design of the rows in noise and other unknowns."""
        scaled = design.scale_columns(self.scale)
        if isinstance(scaled, DenseDesign):
            return DenseDesign(jnp.pad(scaled.matrix, ((0, 0), (0, self.num_inducing))))
        return SparseRows(scaled.columns, scaled.values, self.num_columns + self.num_inducing)

    def by_inducing(self, design: Design) -> Array:
        """Coefficients of the rows in the inducing values, shape ``(rows, num_inducing)``."""
        rank, total = self.factor.shape[1], self.num_inducing
        if isinstance(design, DenseDesign):
            places = self.first[:, None] + jnp.arange(rank)
            whole = jnp.zeros((self.num_columns, total), self.factor.dtype)
            whole = whole.at[jnp.arange(self.num_columns)[:, None], places].add(self.factor, mode="drop")
            return design.matrix @ whole
        if rank == total:  # one field
            return jnp.einsum("rk,rkm->rm", design.values, self.factor[design.columns])
        out = jnp.zeros((design.num_rows, total), self.factor.dtype)
        for columns, values in zip(design.columns.T, design.values.T, strict=True):
            places = self.first[columns][:, None] + jnp.arange(rank)
            out = out.at[jnp.arange(design.num_rows)[:, None], places].add(
                values[:, None] * self.factor[columns], mode="drop"
            )
        return out

    def unknowns(self, standard: Array) -> Array:
        """Unknowns ``(..., num_columns)`` of noise, other unknowns and inducing values side by side."""
        noise, inducing = jnp.split(standard, [self.num_columns], axis=-1)
        if self.factor.shape[1] == self.num_inducing:  # one field
            return self.scale * noise + inducing @ self.factor.T
        places = jnp.minimum(self.first[:, None] + jnp.arange(self.factor.shape[1]), self.num_inducing - 1)
        return self.scale * noise + jnp.sum(self.factor * inducing[..., places], axis=-1)


@frozen_pytree
class LowRankSpace(GaussianSpace, NotSequential):
    """A prior with fields of low rank in the space of noise and inducing values.

    >>> prior = (LowRankPrior(jnp.ones((1, 2, 1)), jnp.zeros((1, 2))),)  # f = (u, u)
    >>> design = SparseRows(jnp.arange(2)[:, None], jnp.ones((2, 1)), 2)
    >>> border = Border(jnp.arange(2)[:, None], jnp.array([2]), jnp.zeros((2, 1), int))
    >>> space = LowRankSpace.build(prior, design, border)
    >>> posterior = space.condition(jnp.array([3.0, 0.0]), jnp.array([4.0, 0.0]))
    >>> print(posterior.unknowns(), posterior.marginals().variance)
    [1. 1.] [0.25 0.25]
    """

    inducing: InducingValues
    standard: BorderSpace
    """The space of noise, other unknowns and inducing values."""

    @classmethod
    def build(cls, prior: tuple[PriorBlock, ...], design: SparseRows, border: Border) -> LowRankSpace:
        """Prepare to condition.

        :param tuple prior: the prior blocks.
        :param SparseRows design: what rows see of the unknowns.
        :param Border border: blocks of noise and other unknowns; the shared ones end with all inducing values, which
            stand behind the unknowns.
        """
        inducing = InducingValues.build(prior)
        local = inducing.by_noise(design)
        assert isinstance(local, SparseRows)  # as the design is
        standard = BorderSpace.build(inducing.standard_prior(), local, border, inducing.by_inducing(design))
        return cls(inducing, standard)

    @property
    def rows(self) -> Array:
        """Rows of the one whole."""
        return self.standard.rows

    def predictor(self, coordinates: Array) -> Array:
        return self.standard.predictor(coordinates)

    def unknowns(self, coordinates: Array) -> Array:
        return self.inducing.unknowns(self.standard.unknowns(coordinates))

    def inner(self, a: Array, b: Array) -> Array:
        return self.standard.inner(a, b)

    def zeros(self) -> Array:
        return self.standard.zeros()

    def condition(self, site_precision: Array, site_shift: Array) -> LowRankPosterior:
        return LowRankPosterior(self, self.standard.condition(site_precision, site_shift))


@frozen_pytree
class LowRankPosterior(ConditionedGaussian, NotSequential):
    """The Gaussian of :meth:`LowRankSpace.condition`."""

    space: LowRankSpace
    standard: BorderPosterior
    """Posterior of noise, other unknowns and inducing values."""

    @property
    def site_precision(self) -> Array:
        """Shape ``(num_rows,)``."""
        return self.standard.site_precision

    @property
    def coordinates(self) -> Array:
        """Coordinates of the posterior mean."""
        return self.standard.coordinates

    def marginals(self) -> Marginals:
        return self.standard.marginals()

    def log_volume(self) -> Array:
        return self.standard.log_volume()

    def unknowns(self) -> Array:
        return self.space.unknowns(self.coordinates)

    def map_variance(self, design: Design) -> Array:
        inducing = self.space.inducing
        return self.standard.map_variance(inducing.by_noise(design), inducing.by_inducing(design))

    def map_covariance(self, design: Design) -> Array:
        inducing = self.space.inducing
        return self.standard.map_covariance(inducing.by_noise(design), inducing.by_inducing(design))

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        return self.space.inducing.unknowns(self.standard.sample(rng_key, num_samples))
