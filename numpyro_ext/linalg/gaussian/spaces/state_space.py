r"""Conditioning a Gaussian on sites of a state space: time and memory linear in the number of steps.

Steps are taken together in blocks. With whitened unknowns :math:`w_k` of block :math:`k` and the state :math:`c_k`
before it, the state goes on as :math:`c_{k+1} = A_k c_k + B_k w_k`, rows see :math:`h_k = C_k c_k + D_k w_k`, and the
first state is :math:`c_1 = S w_0` for unknowns :math:`w_0` that all blocks share. With sites of precision
:math:`\tau` the unknowns are eliminated from the last block to the first, by the recursion of linear quadratic
control (Anderson and Moore 2007, *Optimal Control*, section 2.4): with :math:`\Lambda_{k+1}` what later sites know of
the state,

.. math::
    G_k = I + D^T \tau D + B^T \Lambda_{k+1} B, \quad M_k = G_k^{-1} (D^T \tau C + B^T \Lambda_{k+1} A), \\
    \Lambda_k = \tilde C^T \tau \tilde C + M^T M + \tilde A^T \Lambda_{k+1} \tilde A, \quad
    \tilde A = A - B M, \quad \tilde C = C - D M.

This is a Cholesky factorisation of the posterior precision of all :math:`w`: it exists exactly when the posterior is
proper, whatever the signs of :math:`\tau` and however singular the covariance of a state. In the posterior
:math:`w_k = -M_k c_k + G_k^{-T/2} \xi_k` with independent :math:`\xi_k` of variance one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, TypeGuard

import jax.numpy as jnp
from jax import Array, lax, random
from jax.typing import ArrayLike

from ...cholesky import cholesky, half_log_determinant, solve_lower, solve_upper
from ...frozen_pytree import frozen_pytree
from ..block_diagonal import BlockDiagonal
from ..design import AnyDesign, StateSpaceDesign
from ..marginals import NotSequential, WhitenedPosterior
from ..prior import FlatPrior, PriorBlock
from ..recurrences import has_short_states, known_of_states, run_backward, run_forward
from .one_block import OneBlock

_LARGEST_WRITTEN_OUT = 8
"""Unknowns of a block at most that is factorised together with all others."""


@frozen_pytree
class StateSpace(OneBlock):
    """Unknowns seen through a :class:`~.design.StateSpaceDesign`, in whitened coordinates.

    Coordinates are one vector: those of the shared unknowns, then block after block, padding included.
    """

    design: StateSpaceDesign
    shared_factor: Array
    """From whitened to shared unknowns, shape ``(p, p)``."""
    shared_precision: Array
    """Prior precision of the whitened shared unknowns: one, or zero where flat; shape ``(p,)``."""
    local_factor: Array
    """From whitened unknowns of a block to its unknowns, shape ``(K, n, n)``."""
    half_log_determinant: Array
    """The constant of the flat unknowns."""
    is_signed: bool = dataclasses.field(metadata={"static": True})
    """True if site precisions may be negative."""

    @classmethod
    def build(cls, prior: tuple[PriorBlock, ...], design: StateSpaceDesign, is_signed: bool) -> StateSpace:
        """Whiten the prior, which must be proper, and independent between blocks, for unknowns that are not shared."""
        dtype, dynamics = design.states.dtype, design.dynamics
        flat = [isinstance(block, FlatPrior) for block in prior]
        factor = BlockDiagonal(
            tuple(
                jnp.ones((b.size,), dtype) if is_flat else b.scale_part()
                for b, is_flat in zip(prior, flat, strict=True)
            )
        )
        precision = [jnp.full((b.size,), 1.0 - is_flat, dtype) for b, is_flat in zip(prior, flat, strict=True)]
        num_flat = sum(b.size for b, is_flat in zip(prior, flat, strict=True) if is_flat)
        return cls(
            design,
            factor.take(dynamics.shared[None])[0],
            jnp.concatenate(precision)[dynamics.shared],
            factor.take(dynamics.columns),
            jnp.asarray(0.5 * num_flat * math.log(2.0 * math.pi), dtype),
            is_signed,
        )

    def predictor(self, coordinates: Array) -> Array:
        return self.design.matvec(self.unknowns(coordinates))

    def unknowns(self, coordinates: Array) -> Array:
        """Unknowns of shape ``(..., N)`` for coordinates of shape ``(..., 1, size)``."""
        shared, local = self.split(coordinates[..., 0, :])
        dynamics = self.design.dynamics
        local = jnp.einsum("kij,...kj->...ki", self.local_factor, local)
        out = jnp.zeros((*coordinates.shape[:-2], dynamics.num_columns), coordinates.dtype)
        out = out.at[..., dynamics.columns].set(local, mode="drop")
        return out.at[..., dynamics.shared].set(shared @ self.shared_factor.T)

    def inner(self, a: Array, b: Array) -> Array:
        shared_a, local_a = self.split(a[..., 0, :])
        shared_b, local_b = self.split(b[..., 0, :])
        return jnp.sum(self.shared_precision * shared_a * shared_b) + jnp.sum(local_a * local_b)

    def zeros(self) -> Array:
        return jnp.zeros((1, self.shared_precision.size + self.local_factor[..., 0].size), self.local_factor.dtype)

    def split(self, coordinates: Array) -> tuple[Array, Array]:
        """Coordinates ``(..., size)`` of the shared unknowns ``(..., p)``, and of the blocks ``(..., K, n)``."""
        shared, local = jnp.split(coordinates, [self.shared_precision.size], axis=-1)
        return shared, local.reshape(*local.shape[:-1], *self.local_factor.shape[:2])

    def condition(self, site_precision: Array, site_shift: Array) -> StatePosterior:
        design = self.design
        dynamics = design.dynamics
        gain = dynamics.gain @ self.local_factor
        start = dynamics.start @ self.shared_factor
        blocks = _Blocks(
            dynamics.transition,
            gain,
            design.states,
            design.local @ self.local_factor,
            design.to_blocks(site_precision),
        )
        num_blocks, num_states, num_local = gain.shape
        is_small = num_local <= _LARGEST_WRITTEN_OUT and has_short_states(num_states, num_blocks)
        # a block alone is proper where no precision is negative
        eliminate = _eliminate_together if is_small and not self.is_signed else _eliminate_in_turn
        before, factor, feedback = eliminate(blocks)
        shared = cholesky(jnp.diag(self.shared_precision) + start.T @ before @ start)
        closed = dynamics.transition - gain @ feedback
        zeros = self.zeros()
        posterior = StatePosterior(self, site_precision, shared, factor, feedback, closed, gain, start, zeros[0], zeros)
        white = posterior.whiten(design, design.to_blocks(site_shift)[..., None])
        white_mean = jnp.concatenate([white.shared[:, 0], white.local.reshape(-1)])
        mean = posterior.colour(White(*self.split(white_mean[None])))
        return dataclasses.replace(posterior, white_mean=white_mean, coordinates=mean)


class _Blocks(NamedTuple):
    """Transitions, gains and rows that are eliminated, with the blocks on the first axis."""

    transition: Array
    gain: Array
    states: Array
    local: Array
    precision: Array

    def factor_and_feedback(self, after: Array | None) -> tuple[Array, Array]:
        """Factor of :math:`G` and :math:`M`, of one block or of all, with what later sites know of the states."""
        weighted = self.local.mT * self.precision[..., None, :]
        gram, cross = weighted @ self.local, weighted @ self.states
        if after is not None:
            onward = self.gain.mT @ after
            gram, cross = gram + onward @ self.gain, cross + onward @ self.transition
        factor = cholesky(gram + jnp.eye(gram.shape[-1], dtype=gram.dtype))
        return factor, solve_upper(factor, solve_lower(factor, cross))

    def known(self, feedback: Array) -> Array:
        """Precision of states by the sites of their own block, with the unknowns at their best."""
        states = self.states - self.local @ feedback
        return (states.mT * self.precision[..., None, :]) @ states + feedback.mT @ feedback


def _eliminate_in_turn(blocks: _Blocks) -> tuple[Array, Array, Array]:
    """Precision of the first state by all sites; factors and feedbacks of all blocks, from the last to the first."""

    def eliminate(after: Array, block: _Blocks) -> tuple[Array, tuple[Array, Array]]:
        factor, feedback = block.factor_and_feedback(after)
        transition = block.transition - block.gain @ feedback
        before = block.known(feedback) + transition.T @ after @ transition
        return 0.5 * (before + before.T), (factor, feedback)

    before, (factor, feedback) = lax.scan(eliminate, jnp.zeros_like(blocks.transition[0]), blocks, reverse=True)
    return before, factor, feedback


def _eliminate_together(blocks: _Blocks) -> tuple[Array, Array, Array]:
    """The same where states are short: each block alone, then the states of all, then blocks with what is known."""
    factor, feedback = blocks.factor_and_feedback(None)
    root = solve_lower(factor, blocks.gain.mT)
    before = known_of_states(blocks.transition - blocks.gain @ feedback, root.mT @ root, blocks.known(feedback))
    after = jnp.concatenate([before[1:], jnp.zeros_like(before[:1])])
    return before[0], *blocks.factor_and_feedback(after)


class White(NamedTuple):
    """Coordinates in which the posterior has unit covariance."""

    shared: Array
    local: Array


@frozen_pytree
class StatePosterior(WhitenedPosterior, NotSequential):
    """The Gaussian of :meth:`StateSpace.condition`."""

    space: StateSpace
    site_precision: Array
    shared_factor: Array
    """Cholesky factor of the posterior precision of the shared unknowns, shape ``(p, p)``."""
    factor: Array
    """Cholesky factors of :math:`G_k`, shape ``(K, n, n)``."""
    feedback: Array
    """:math:`M_k`, shape ``(K, n, s)``."""
    transition: Array
    r""":math:`\tilde A_k`, shape ``(K, s, s)``."""
    gain: Array
    """:math:`B_k`, shape ``(K, s, n)``."""
    start: Array
    """:math:`S`, shape ``(s, p)``."""
    white_mean: Array
    """Shape ``(size,)``."""
    coordinates: Array
    """Shape ``(1, size)``."""

    def row_variance(self) -> Array:
        return self.map_variance(self.space.design)

    def log_volume(self) -> Array:
        own = half_log_determinant(self.shared_factor) + half_log_determinant(self.factor)
        return self.space.half_log_determinant - own

    def map_variance(self, design: AnyDesign) -> Array:
        """Posterior variance of ``J e`` for a design ``J``, shape ``(rows of J,)``.

        On the same dynamics the states go forward with covariances that are sums of squares; otherwise all entries of
        ``J`` are needed.
        """
        if not self._shares_dynamics(design):
            return jnp.sum(jnp.square(self._white_map(design)), axis=0)
        root = solve_lower(self.factor, self.gain.swapaxes(-1, -2))
        start = solve_lower(self.shared_factor, self.start.T)

        def go_on(covariance: Array, block: tuple[Array, Array]) -> tuple[Array, Array]:
            transition, noise = block
            return transition @ covariance @ transition.T + noise.T @ noise, covariance

        _, covariance = lax.scan(go_on, start.T @ start, (self.transition, root))
        local = design.local @ self.space.local_factor
        states = design.states - local @ self.feedback
        own = solve_lower(self.factor, local.swapaxes(-1, -2))
        variance = jnp.einsum("kms,kst,kmt->km", states, covariance, states) + jnp.sum(own**2, axis=-2)
        return design.from_blocks(variance)

    def map_covariance(self, design: AnyDesign) -> Array:
        white = self._white_map(design)
        return white.T @ white

    def sample(self, rng_key: Array, num_samples: int) -> Array:
        keys = random.split(rng_key)
        shape, dtype = self.factor.shape[:2], self.factor.dtype
        noise = White(
            random.normal(keys[0], (num_samples, self.start.shape[1]), dtype),
            random.normal(keys[1], (num_samples, *shape), dtype),
        )
        return self.space.unknowns(self.coordinates + self.colour(noise)[:, None])

    def from_white(self, white: Array) -> Array:
        """Unknowns made of as many standard normal numbers, one to one; both of shape ``(num_columns,)``."""
        dynamics = self.space.design.dynamics
        local = white.at[dynamics.columns].get(mode="fill", fill_value=0.0)
        # the mean and what is away from it go through the states at once
        shared, own = self.space.split(self.white_mean)
        together = White((shared + white[dynamics.shared])[None], (own + local)[None])
        return self.space.unknowns(self.colour(together))

    def whiten(self, design: StateSpaceDesign, shift: Array) -> White:
        r"""Transform shifts of rows of a design to white coordinates, for shifts of shape ``(K, m, r)``.

        The product of the inverse of the factor with :math:`J^T \nu`: shapes ``(p, r)`` and ``(K, n, r)``.
        """
        return self._whiten(design.states.swapaxes(-1, -2) @ shift, design.local.swapaxes(-1, -2) @ shift, 0.0)

    def _whiten(self, states: ArrayLike, local: Array, shared: ArrayLike) -> White:
        """The same for shifts of states ``(K, s, r)``, local unknowns ``(K, n, r)`` and shared ones ``(p, r)``."""
        local = self.space.local_factor.swapaxes(-1, -2) @ local
        first, after = run_backward(self.transition, jnp.asarray(states) - self.feedback.swapaxes(-1, -2) @ local)
        local = solve_lower(self.factor, local + self.gain.swapaxes(-1, -2) @ after)
        shared = self.space.shared_factor.T @ jnp.asarray(shared) if jnp.ndim(shared) else 0.0
        return White(solve_lower(self.shared_factor, self.start.T @ first + shared), local)

    def _shares_dynamics(self, design: AnyDesign) -> TypeGuard[StateSpaceDesign]:
        return isinstance(design, StateSpaceDesign) and design.dynamics.key == self.space.design.dynamics.key

    def _white_map(self, design: AnyDesign) -> Array:
        """White coordinates of all rows of a design, shape ``(p + K n, rows of J)``."""
        if self._shares_dynamics(design):
            identity = jnp.eye(design.num_rows, dtype=design.states.dtype)
            white = self.whiten(design, jnp.moveaxis(design.to_blocks(identity), 0, -1))
        else:
            dynamics, matrix = self.space.design.dynamics, design.to_dense()
            local = matrix.at[:, dynamics.columns].get(mode="fill", fill_value=0.0)
            white = self._whiten(0.0, jnp.moveaxis(local, 0, -1), matrix[:, dynamics.shared].T)
        return jnp.concatenate([white.shared, white.local.reshape(-1, white.local.shape[-1])])

    def colour(self, white: White) -> Array:
        """Coordinates ``(r, size)`` of white ones of shapes ``(r, p)`` and ``(r, K, n)``."""
        shared = solve_upper(self.shared_factor, white.shared.T)
        local = solve_upper(self.factor, jnp.moveaxis(white.local, 0, -1))
        states = run_forward(self.transition, self.gain @ local, self.start @ shared)
        local = local - self.feedback @ states
        return jnp.concatenate([shared, local.reshape(-1, local.shape[-1])]).T
