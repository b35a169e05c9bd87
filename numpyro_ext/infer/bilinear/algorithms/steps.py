r"""Steps of the vectors of one side of a bilinear model, when those of the other are held.

Given one side, the objective separates into strictly concave functions, one per vector of the other. Each takes a
damped natural-gradient step

.. math:: A^{-1} \leftarrow (1 - \rho) A^{-1} + \rho P, \qquad a \leftarrow a + \rho A g,

which is kept only if its own function did not fall, with a step size :math:`\rho` of its own. A point at which an
expectation does not exist has the value minus infinity, so that no step is ever made to one.

The alternative, as in the papers, is L-BFGS: the functions are concave in the mean and the Cholesky factor of the
covariance (the standard deviations, if components are independent), and every vector has a memory and a step size of
its own. Either evaluates all vectors in one pass over the cells.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from ....compilation.pytree import PyTree
from ....linalg.cholesky import cholesky, cholesky_inverse, positive_solve
from ....structure.bilinear.form import CoupledSide, GaussianSide, Side
from .cells import Block, CellSums, View, over_devices, sum_cells, sum_values
from .incidence import CoupledBlock, SideBlock, coupled_divergence, make_coupled_feasible, touched

_MAX_HALVINGS = 60
_ITERATIONS = 5
_MEMORY = 10
_LINE_HALVINGS = 30
_SUFFICIENT_INCREASE = 1e-4


def make_feasible(view: View, own: SideBlock, other: Block, prior: Side) -> tuple[SideBlock, Array]:
    """Halve covariances, and pull means towards zero if that does not help, until every expectation is finite.

    :return: the block, and its expected log factors of shape ``(num,)``; minus infinity where nothing helped.
    """
    if isinstance(own, CoupledBlock):
        assert isinstance(prior, CoupledSide)
        return make_coupled_feasible(view, own, other, prior, _MAX_HALVINGS)

    def proceed(carry: tuple[Block, Array, Array]) -> Array:
        _, values, count = carry
        return ~jnp.all(jnp.isfinite(values)) & (count < _MAX_HALVINGS)

    def halve(carry: tuple[Block, Array, Array]) -> tuple[Block, Array, Array]:
        block, values, count = carry
        # In the first round nothing has been evaluated yet.
        factor = jnp.where(jnp.isfinite(values) | (count == 0), 1.0, 0.5)
        covariance = block.covariance
        if covariance is not None:
            covariance = covariance * factor.reshape(-1, *(1,) * (covariance.ndim - 1))
        # By half of the rounds the covariances are negligible.
        pull = jnp.where(count >= _MAX_HALVINGS // 2, factor, 1.0) if covariance is not None else factor
        block = Block(block.mean * pull[:, None], covariance)
        return block, sum_values(view, block, other), count + 1

    start = own, jnp.full(own.mean.shape[:1], -jnp.inf, own.mean.dtype), jnp.asarray(0)
    block, values, _ = lax.while_loop(proceed, halve, start)
    return block, values


def divergence(block: SideBlock, prior: Side) -> Array:
    """Kullback-Leibler divergence of each vector from its prior, or minus its log prior density if it is a point.

    :return: shape ``(num,)``; of vectors that depend on each other one for each component, shape ``(size,)``.
    """
    if isinstance(block, CoupledBlock):
        return coupled_divergence(block)
    assert isinstance(prior, GaussianSide)
    if block.covariance is None:
        return -prior.log_density(block.mean)
    residual, size, variance = block.mean - prior.mean, block.mean.shape[1], block.variance
    if block.is_diagonal:
        log_determinant = jnp.sum(jnp.log(variance), -1)
    else:
        factor = cholesky(block.covariance)
        log_determinant = 2.0 * jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)), -1)
    if prior.precision.ndim == 2:
        trace = jnp.sum(prior.precision * variance, -1)
    elif block.is_diagonal:
        trace = jnp.sum(prior.diagonal * variance, -1)
    else:
        trace = jnp.sum(prior.precision * block.covariance, (-2, -1))
    quadratic = trace + prior.quadratic(residual) - size
    return prior.weighted(0.5 * (quadratic - prior.log_determinant() - log_determinant))


def block_objective(view: View, own: SideBlock, other: Block, prior: Side) -> Array:
    """The part of the objective that belongs to each vector of ``own``, shape ``(num,)``; of all together, shape
    ``(1,)``, if they depend on each other."""
    values, cost = sum_values(view, touched(own, prior), other), divergence(own, prior)
    return (jnp.sum(values) - jnp.sum(cost))[None] if isinstance(own, CoupledBlock) else values - cost


def _natural_step(own: Block, prior: GaussianSide, sums: CellSums, step: Array) -> Block:
    """Every vector one damped step, by its step size."""
    slope = sums.slope - prior.apply(own.mean - prior.mean)
    precision = sums.precision
    if precision.ndim == 2:
        precision = precision + prior.diagonal
        if own.covariance is None:
            return Block(own.mean + step[:, None] * slope / precision, None)
        variance = 1.0 / ((1.0 - step[:, None]) / own.covariance + step[:, None] * precision)
        return Block(own.mean + step[:, None] * variance * slope, variance)
    precision = precision + prior.matrices
    if own.covariance is None:
        return Block(own.mean + step[:, None] * positive_solve(precision, slope), None)
    weight = step[:, None, None]
    mixed = (1.0 - weight) * cholesky_inverse(cholesky(own.covariance)) + weight * precision
    covariance = cholesky_inverse(cholesky(mixed))
    return Block(own.mean + step[:, None] * (covariance @ slope[..., None])[..., 0], covariance)


def step_side(
    view: View, own: Block, other: Block, prior: GaussianSide, step: Array, *, axis_name: str | None = None
) -> tuple[Block, Array, Array, Array]:
    """Try a step of every vector of one side, the other being held.

    :param view: the cells in the order of this side.
    :param own: the vectors that move.
    :param other: those that are held.
    :param prior: of the vectors that move.
    :param step: their step sizes, shape ``(num,)``.
    :param str axis_name: of the axis of devices between which the cells of each vector are divided, if they are.
    :return: the new vectors, their new step sizes, their objectives, and what each would have lost by its step: zero
        for those that took it.

    Cost: one pass over the cells with slopes and one for the values.
    """
    sums = over_devices(sum_cells(view, own, other), axis_name)
    before = sums.value - divergence(own, prior)
    trial = _natural_step(own, prior, sums, step)
    after = over_devices(sum_values(view, trial, other), axis_name) - divergence(trial, prior)
    # Near the optimum the gain is below rounding, and the step must still be taken.
    slack = 10 * jnp.finfo(before.dtype).eps * (1.0 + jnp.abs(before) + jnp.abs(sums.value))
    moved = after >= before - slack
    block = Block(
        jnp.where(moved[:, None], trial.mean, own.mean),
        None
        if trial.covariance is None or own.covariance is None
        else jnp.where(moved.reshape(-1, *(1,) * (own.covariance.ndim - 1)), trial.covariance, own.covariance),
    )
    loss = jnp.where(jnp.isfinite(before) & jnp.isfinite(after), before - after, jnp.inf)
    new_step = jnp.where(moved, jnp.minimum(1.0, 2.0 * step), 0.5 * step)
    return block, new_step, jnp.where(moved, after, before), jnp.where(moved, 0.0, loss)


def lbfgs_side(
    view: View, own: Block, other: Block, prior: GaussianSide, step: Array, *, axis_name: str | None = None
) -> tuple[Block, Array, Array, Array]:
    """A few iterations of L-BFGS on every vector of one side, the other being held.

    Arguments and results are those of :func:`step_side`; ``step`` is returned as
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

    def iterate(number: int, carry: PyTree) -> PyTree:
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
            return ~jnp.all(done) & (count < _LINE_HALVINGS)

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
