"""Differences between neighbouring pixels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..frozen_pytree import frozen_pytree
from ..saved_names import saved_as
from .operator import LinearOperator, image_shape, stack


def finite_differences(shape: Sequence[int] | int, axis: int) -> LinearOperator:
    """Differences ``x[i + 1] - x[i]`` along one axis of an image, none across its border.

    :param shape: sides of the image.
    :param int axis: the axis, from 0.
    :return: an operator on flattened images; its rows are the flattened array of differences, whose side along the
        axis is one less than that of the image.

    >>> import jax.numpy as jnp
    >>> from numpyro_ext.linalg import finite_differences
    >>> print(finite_differences((2, 3), 1) @ jnp.array([1.0, 2.0, 4.0, 0.0, 0.0, 5.0]))
    [1. 2. 0. 5.]
    """
    sides = image_shape(shape)
    if not -len(sides) <= axis < len(sides):
        raise ValueError(f"finite_differences: images of shape {sides} have no axis {axis}.")
    axis = axis % len(sides)
    if sides[axis] < 2:
        raise ValueError(
            f"finite_differences: images of shape {sides} have one pixel along axis {axis}: no difference."
        )
    return _FiniteDifferences(sides, axis)


def total_variation(shape: Sequence[int] | int) -> LinearOperator:
    """The differences along every axis, under one another: their absolute values sum to the total variation.

    :param shape: sides of the image, one, two or three (or more) of them; axes of a single pixel have no rows.
    :return: an operator on flattened images.

    >>> from numpyro_ext.linalg import total_variation
    >>> total_variation((4, 4)).shape
    (24, 16)
    """
    sides = image_shape(shape)
    operators = [finite_differences(sides, axis) for axis, side in enumerate(sides) if side > 1]
    if not operators:
        raise ValueError("total_variation: an image of one pixel has no differences.")
    return stack(operators)


@saved_as("FiniteDifferences")
@frozen_pytree
class _FiniteDifferences(LinearOperator):
    sides: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        size = int(np.prod(self.sides))
        return size - size // self.sides[self.axis], size

    def matvec(self, x: Array) -> Array:
        return jnp.diff(x.reshape(self.sides), axis=self.axis).reshape(-1)
