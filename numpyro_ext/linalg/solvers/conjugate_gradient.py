"""Preconditioned conjugate gradients for several right-hand sides at a time, with an account of how they ended.

:func:`jax.scipy.sparse.linalg.cg` reports neither iterations nor residuals, and stops several systems by one norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class ConjugateGradientResult(NamedTuple):
    """Solutions, and how far they are from it."""

    solution: Array
    """Shape of the right-hand sides."""
    num_iterations: Array
    """Products with the matrix that the slowest system took, a scalar."""
    residual: Array
    """Norm of each residual relative to that of its right-hand side, both in the metric of the preconditioner."""


class _Iterate(NamedTuple):
    solution: Array
    residual: Array
    direction: Array
    squared_norm: Array
    num_iterations: Array


def conjugate_gradient(
    matvec: Callable[[Array], Array],
    right_hand_side: Array,
    *,
    preconditioner: Array | Callable[[Array], Array] | None = None,
    initial: Array | None = None,
    tol: float = 1e-6,
    max_iterations: int = 1000,
) -> ConjugateGradientResult:
    r"""Solve :math:`A x = b` for a symmetric positive definite matrix known by its products.

    Runs under ``jit`` as one loop; a system that has converged stands still while the others go on. A matrix that is
    not positive definite, or has entries that are not finite, ends the loop with a residual that is large or nan.

    Cost: one product per system and iteration; the number of iterations grows with the square root of the condition
    number of the preconditioned matrix.

    :param matvec: :math:`x \mapsto A x` for one vector of shape ``(n,)``.
    :param right_hand_side: :math:`b` of shape ``(n,)`` or ``(k, n)``.
    :param preconditioner: positive diagonal close to that of :math:`A`, of shape ``(n,)``; or the product of a vector
        of shape ``(n,)`` with a symmetric positive definite matrix close to :math:`A^{-1}`.
    :param initial: where to start, of the shape of the right-hand side; zero by default.
    :param float tol: relative residual at which a system counts as solved.
    :param int max_iterations: iterations at most.
    :return: solutions, iterations and residuals.

    >>> import jax.numpy as jnp
    >>> matrix = jnp.array([[2.0, 1.0], [1.0, 3.0]])
    >>> result = conjugate_gradient(lambda x: matrix @ x, jnp.array([3.0, 4.0]))
    >>> bool(jnp.allclose(result.solution, 1.0, atol=1e-5)), int(result.num_iterations)
    (True, 2)

    **References**

    1. Hestenes, M. R. and Stiefel, E. (1952), *Methods of conjugate gradients for solving linear systems*, Journal of
       Research of the National Bureau of Standards 49, 409-436.
    """
    b = jnp.atleast_2d(right_hand_side)
    multiply = jax.vmap(matvec)
    if callable(preconditioner):
        precondition = jax.vmap(preconditioner)
    else:
        weight = jnp.ones_like(b[0]) if preconditioner is None else 1.0 / preconditioner

        def precondition(r: Array) -> Array:
            return weight * r

    # A system with the right-hand side zero is solved by zero.
    scale = jnp.sum(b * precondition(b), axis=-1)
    threshold = jnp.asarray(tol, b.dtype) ** 2 * scale
    if initial is None:
        x, r = jnp.zeros_like(b), b
    else:
        x = jnp.atleast_2d(initial)
        r = b - multiply(x)
    direction = precondition(r)
    start = _Iterate(x, r, direction, jnp.sum(r * direction, axis=-1), jnp.zeros((), jnp.int32))

    def unfinished(now: _Iterate) -> Array:
        return jnp.any(now.squared_norm > threshold) & (now.num_iterations < max_iterations)

    def advance(now: _Iterate) -> _Iterate:
        is_active = now.squared_norm > threshold
        product = multiply(now.direction)
        curvature = jnp.sum(now.direction * product, axis=-1)
        length = jnp.where(is_active, now.squared_norm / jnp.where(is_active, curvature, 1.0), 0.0)[:, None]
        residual = now.residual - length * product
        descent = precondition(residual)
        after = jnp.where(is_active, jnp.sum(residual * descent, axis=-1), now.squared_norm)
        ratio = jnp.where(is_active, after / jnp.where(is_active, now.squared_norm, 1.0), 0.0)[:, None]
        direction = jnp.where(is_active[:, None], descent + ratio * now.direction, now.direction)
        return _Iterate(now.solution + length * now.direction, residual, direction, after, now.num_iterations + 1)

    end = lax.while_loop(unfinished, advance, start)
    relative = jnp.sqrt(end.squared_norm / jnp.where(scale > 0.0, scale, 1.0))
    shape = jnp.shape(right_hand_side)
    return ConjugateGradientResult(end.solution.reshape(shape), end.num_iterations, relative.reshape(shape[:-1]))
