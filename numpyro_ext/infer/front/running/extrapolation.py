"""The limit that three successive points of a slow fixed-point iteration point at."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree


def extrapolate(first: object, second: object, third: object, *, largest: float = 16.0) -> Any:
    r"""The squared extrapolation of Varadhan and Roland (2008), scheme S3.

    With :math:`r = x_1 - x_0`, :math:`v = x_2 - 2 x_1 + x_0` and :math:`a = \lVert r \rVert / \lVert v \rVert` it is
    :math:`x_0 + 2 a r + a^2 v`: exact where one slow direction is left, and nowhere sure to raise an objective, so that
    the caller has to look. ``a`` is at least one, which gives the third point, and at most ``largest``. What is no
    floating-point number is that of the third point.

    :param first: a tree of arrays.
    :param second: what the iteration makes of it.
    :param third: what the iteration makes of the second.
    :param float largest: the largest ``a``.
    :return: a tree like these.

    **Example:**

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.infer.front.running.extrapolation import extrapolate
    >>> print(extrapolate(jnp.array([1.0]), jnp.array([0.9]), jnp.array([0.81])).round(6))
    [0.]

    **References**

    1. Varadhan, R. and Roland, C. (2008), *Simple and globally convergent methods for accelerating the convergence of
       any EM algorithm*, Scandinavian Journal of Statistics 35, 335-353.
    """
    leaves, tree = jax.tree.flatten(third)
    is_real = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
    real = ([x for x, keep in zip(jax.tree.leaves(p), is_real, strict=True) if keep] for p in (first, second, third))
    (x, back), (y, _), (z, _) = (ravel_pytree(point) for point in real)
    step, bend = y - x, z - 2.0 * y + x
    size = jnp.sqrt(jnp.sum(jnp.square(bend)))
    length = jnp.sqrt(jnp.sum(jnp.square(step))) / jnp.where(size > 0.0, size, 1.0)
    length = jnp.where(size > 0.0, jnp.clip(length, 1.0, largest), 1.0)
    found = iter(back(x + 2.0 * length * step + length**2 * bend))
    return jax.tree.unflatten(tree, [next(found) if keep else z for z, keep in zip(leaves, is_real, strict=True)])
