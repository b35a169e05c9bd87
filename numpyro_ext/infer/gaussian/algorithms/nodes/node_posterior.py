"""The posterior of small independent blocks, known by its density at the nodes of a lattice for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

from .....linalg.cholesky import cholesky
from .....linalg.frozen_pytree import frozen_pytree
from .....linalg.gaussian.design import AnyDesign, SparseRows
from .....structure.latent_gaussian import AffineMap, LatentGaussian
from ..posterior import check_dense_covariance
from .block_nodes import BlockNodes, lattice, scattered
from .node_density import draw_places

_LARGEST_BATCH = 2_000_000
"""Numbers that the lattices of draws from a batch of blocks may have."""


@frozen_pytree
class NodePosterior:
    """Independent blocks, each with the density that it has at its nodes.

    Means, covariances and draws are those of this density, and not of a Gaussian. Cost of each method: a pass over
    ``num_nodes ** D`` numbers of each block.
    """

    form: LatentGaussian
    nodes: BlockNodes
    log_density: Array
    """Log density at the nodes, up to a constant for each block, shape ``(num_nodes ** D, B)``."""
    num_nodes: int = dataclasses.field(metadata={"static": True})

    @property
    def weights(self) -> Array:
        """Masses of the nodes of each block, shape ``(num_nodes ** D, B)``."""
        return jax.nn.softmax(self.log_density, axis=0)

    def block_moments(self) -> tuple[Array, Array]:
        """Mean ``(B, D)`` and covariance ``(B, D, D)`` of the unknowns of each block."""
        places = jnp.asarray(lattice(self.num_nodes, self.nodes.center.shape[1]), self.log_density.dtype)
        weights = self.weights
        lower, width, scale = self.nodes.lower, self.nodes.upper - self.nodes.lower, self.nodes.scale
        middle = weights.T @ places
        # about the mean, so that nothing cancels
        rest = places[:, None, :] - middle
        spread = jnp.einsum("qb,qbi,qbj->bij", weights, rest, rest)
        mean = self.nodes.center + jnp.einsum("bij,bj->bi", scale, lower + width * middle)
        root = scale * width[:, None, :]
        return mean, jnp.einsum("bik,bkl,bjl->bij", root, spread, root)

    @property
    def mean(self) -> Array:
        """Mean of the unknowns, shape ``(N,)``."""
        return scattered(self.form, self.block_moments()[0])

    def mean_and_variance(self, affine_map: AffineMap) -> tuple[Array, Array]:
        """Mean and variance of ``R`` quantities affine in the unknowns, shapes ``(R,)``."""
        return self.moments({"": affine_map})[""]

    def moments(self, maps: Mapping[str, AffineMap]) -> dict[str, tuple[Array, Array]]:
        """Means and variances of several quantities by name; see :meth:`mean_and_variance`."""
        mean, covariance = self.block_moments()
        unknowns = scattered(self.form, mean)
        return {
            name: (design.matvec(unknowns) + offset, self._variance(design, covariance))
            for name, (design, offset) in maps.items()
        }

    def predictor_moments(self) -> tuple[Array, Array]:
        """Mean and variance of every predictor, shapes ``(M,)``."""
        return self.mean_and_variance(AffineMap(self.form.design, self.form.offset))

    def covariance(self, affine_map: AffineMap) -> Array:
        """Joint covariance of ``R`` quantities affine in the unknowns, shape ``(R, R)``."""
        rows = affine_map.design.to_dense()
        return rows @ self._dense(self.block_moments()[1]) @ rows.T

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        """Independent draws of the unknowns from the density at the nodes, shape ``(num_samples, N)``."""
        blocks, dimension = self.nodes.center.shape
        dtype = self.log_density.dtype
        tiny = jnp.finfo(dtype).tiny
        uniform = jax.random.uniform(rng_key, (blocks, num_samples, dimension), dtype, tiny, 1.0)
        shape = (self.num_nodes,) * dimension

        def draw(block: tuple[Array, Array]) -> Array:
            log_density, numbers = block
            return draw_places(log_density.reshape(shape), numbers)

        batch_size = min(blocks, max(1, _LARGEST_BATCH // (num_samples * 8 * self.num_nodes)))
        places = lax.map(draw, (self.log_density.T, uniform), batch_size=batch_size)
        values = jax.vmap(self.nodes.at, 1)(places)
        return jax.vmap(lambda x: scattered(self.form, x))(values)

    def log_weight_fn(self) -> Callable[..., Array]:
        """Log density of unknowns and data over the density that they are drawn from: the same for all draws."""
        del self
        return lambda e, moved=None: jnp.zeros((), e.dtype)

    def log_predictive(self, new: LatentGaussian | None = None) -> tuple[Array, Array] | None:
        """Log posterior means of the factors, masked ones included, and of their inverses, shapes ``(num_rows,)``.

        The first is the log predictive density of each observation, and the second less one of all but itself.

        :param LatentGaussian new: a form on the same unknowns, instead of the one of the posterior.
        :return: nothing, where rows of the other form may see several blocks.
        """
        form = self.form if new is None else new
        design = form.design
        if new is not None and not (isinstance(design, SparseRows) and design.columns.shape[1] == 1):
            return None
        block = self._block_of_rows(design)
        whole = form._replace(observed=tuple(jnp.ones_like(mask) for mask in form.observed))
        places = jnp.asarray(lattice(self.num_nodes, self.nodes.center.shape[1]), self.log_density.dtype)
        log_weights = jax.nn.log_softmax(self.log_density, axis=0)

        def step(carry: tuple[Array, Array], node: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
            place, log_weight = node
            factors = whole.log_factors(form.predictor(scattered(self.form, self.nodes.at(place))))
            mass = log_weight[block]
            return (jnp.logaddexp(carry[0], mass + factors), jnp.logaddexp(carry[1], mass - factors)), None

        start = jnp.full(form.offset.shape, -jnp.inf, self.log_density.dtype)
        return lax.scan(step, (start, start), (places, log_weights))[0]

    def at_nodes(self) -> tuple[Array, Array]:
        """Predictors of all rows at the nodes of their blocks, and the masses of these, shapes ``(nodes, num_rows)``.

        Cost: memory for both.
        """
        places = jnp.asarray(lattice(self.num_nodes, self.nodes.center.shape[1]), self.log_density.dtype)
        predictors = lax.map(lambda place: self.form.predictor(scattered(self.form, self.nodes.at(place))), places)
        return predictors, self.weights[:, self._block_of_rows(self.form.design)]

    def _block_of_rows(self, design: AnyDesign) -> Array:
        """Number of the block that each row of a design sees."""
        numbers = jnp.arange(self.form.blocks.columns.shape[0])[:, None]
        number_of = jnp.zeros((self.form.num_columns + 1,), int).at[self.form.blocks.columns].set(numbers)
        if isinstance(design, SparseRows):
            entry = jnp.argmax(jnp.abs(design.values), axis=1)
            column = jnp.take_along_axis(design.columns, entry[:, None], axis=1)[:, 0]
        else:
            column = jnp.argmax(jnp.abs(design.to_dense()), axis=1)
        return number_of[column]

    def scale_tril(self) -> Array:
        """Lower Cholesky factor of the covariance of all unknowns, ``(N, N)``; of blocks, at cost ``N^2``.

        :raises ValueError: if it is far more than fits into memory.
        """
        check_dense_covariance(self.form)
        return cholesky(self._dense(self.block_moments()[1]))

    def _dense(self, covariance: Array) -> Array:
        size, columns = self.form.num_columns, self.form.blocks.columns
        out = jnp.zeros((size + 1, size + 1), covariance.dtype)
        return out.at[columns[:, :, None], columns[:, None, :]].set(covariance)[:-1, :-1]

    def _variance(self, design: AnyDesign, covariance: Array) -> Array:
        """Variance of each row of a design, shape ``(R,)``."""
        columns = self.form.blocks.columns
        if not isinstance(design, SparseRows):
            rows = design.to_dense()
            parts = jnp.append(rows, jnp.zeros((rows.shape[0], 1), rows.dtype), axis=1)[:, columns]
            return jnp.einsum("rbi,bij,rbj->r", parts, covariance, parts)
        # an entry of a row meets only those of its own block
        size = self.form.num_columns
        number, place = jnp.zeros((2, size + 1), int)
        number = number.at[columns].set(jnp.arange(columns.shape[0])[:, None])[design.columns]
        place = place.at[columns].set(jnp.arange(columns.shape[1]))[design.columns]
        values = covariance[number[:, :, None], place[:, :, None], place[:, None, :]]
        is_own = number[:, :, None] == number[:, None, :]
        return jnp.sum(
            jnp.where(is_own, values, 0.0) * design.values[:, :, None] * design.values[:, None, :], axis=(1, 2)
        )
