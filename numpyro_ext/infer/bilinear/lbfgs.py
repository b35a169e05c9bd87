"""L-BFGS for the vectors of one side, as in the papers: the alternative to natural-gradient steps.

Given the other side, the objective is a sum of functions of single vectors, concave in the mean and the Cholesky factor
of the covariance (the standard deviations, if components are independent). Every vector has a memory and a step size of
its own; all are evaluated in one pass over the cells.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from ...linalg.cholesky import cholesky
from ...structure.bilinear.form import GaussianSide
from .cells import Block, View, sum_cells
from .sweeps import block_objective, divergence

__all__ = ["lbfgs_side"]

_ITERATIONS = 5
_MEMORY = 10
_MAX_HALVINGS = 30
_SUFFICIENT_INCREASE = 1e-4


def lbfgs_side(
    view: View, own: Block, other: Block, prior: GaussianSide, step: Array, *, axis_name: str | None = None
) -> tuple[Block, Array, Array, Array]:
    """A few iterations of L-BFGS on every vector of one side, the other being held.

    Arguments and results are those of :func:`~numpyro_ext.infer.bilinear.sweeps.step_side`; ``step`` is returned as
    it is. A line search halves the step of a vector until its objective has increased enough; a point where there is no
    objective counts as one where it has not.

    Cost: for each of five iterations one pass over the cells with slopes, and one or more for the values.
    """
    if axis_name is not None:
        raise ValueError("L-BFGS runs on one device.")
    num, size = own.mean.shape

    def as_block(parameters: Array) -> Block:
        mean, rest = parameters[:, :size], parameters[:, size:]
        if own.covariance is None:
            return Block(mean, None)
        if own.covariance.ndim == 2:
            return Block(mean, rest**2)
        factor = jnp.tril(rest.reshape(num, size, size))
        return Block(mean, factor @ factor.swapaxes(-1, -2))

    def as_parameters(block: Block) -> Array:
        if block.covariance is None:
            return block.mean
        spread = jnp.sqrt(block.covariance) if block.covariance.ndim == 2 else cholesky(block.covariance)
        return jnp.concatenate([block.mean, spread.reshape(num, -1)], axis=1)

    def is_valid(parameters: Array) -> Array:
        """Factors are unique once their diagonals are positive."""
        rest = parameters[:, size:]
        if own.covariance is None:
            return jnp.ones((num,), bool)
        diagonal = rest if own.covariance.ndim == 2 else rest[:, :: size + 1]
        return jnp.all(diagonal > 0.0, axis=1)

    def evaluate(parameters: Array) -> tuple[Array, Array]:
        """Objectives and their gradients."""
        sums = sum_cells(view, as_block(parameters), other)

        def with_held_slopes(parameters: Array) -> Array:
            block = as_block(parameters)
            value = jnp.sum(sums.slope * block.mean) - jnp.sum(divergence(block, prior))
            return value if block.covariance is None else value - 0.5 * jnp.sum(sums.precision * block.covariance)

        return sums.value - divergence(as_block(parameters), prior), jax.grad(with_held_slopes)(parameters)

    def values_at(parameters: Array) -> Array:
        valid = is_valid(parameters)
        safe = jnp.where(valid[:, None], parameters, start)
        values = block_objective(view, as_block(safe), other, prior)
        return jnp.where(valid & jnp.isfinite(values), values, -jnp.inf)

    rule = optax.scale_by_lbfgs(memory_size=_MEMORY)
    start = as_parameters(own)

    def iterate(number: int, carry: Any) -> Any:
        parameters, memory = carry
        values, gradient = evaluate(parameters)
        # the rule is for minimisation
        scaled, memory = jax.vmap(rule.update)(-gradient, memory, parameters)
        slope = -jnp.sum(gradient * scaled, -1)
        direction = jnp.where((slope > 0.0)[:, None], -scaled, gradient)
        slope = jnp.where(slope > 0.0, slope, jnp.sum(gradient**2, -1))
        slack = 10 * jnp.finfo(values.dtype).eps * (1.0 + jnp.abs(values))

        def is_searching(search: tuple[Array, Array, Array]) -> Array:
            _, done, count = search
            return ~jnp.all(done) & (count < _MAX_HALVINGS)

        def halve(search: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            length, done, count = search
            length = jnp.where(done | (count == 0), length, 0.5 * length)
            found = values_at(parameters + length[:, None] * direction)
            return length, found >= values + _SUFFICIENT_INCREASE * length * slope - slack, count + 1

        ones = jnp.ones_like(values)
        length, done, _ = lax.while_loop(is_searching, halve, (ones, jnp.zeros((num,), bool), jnp.asarray(0)))
        moved = done & jnp.all(jnp.isfinite(direction), axis=1)
        return jnp.where(moved[:, None], parameters + length[:, None] * direction, parameters), memory

    parameters, _ = lax.fori_loop(0, _ITERATIONS, iterate, (start, jax.vmap(rule.init)(start)))
    block = as_block(parameters)
    values = block_objective(view, block, other, prior)
    return block, step, values, jnp.zeros_like(values)
