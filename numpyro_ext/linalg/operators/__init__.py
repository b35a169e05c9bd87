"""Linear maps known by their products."""

from .operator import LinearOperator, diagonal, from_matrix, identity, image_shape, positive_size, select, stack

__all__ = ["LinearOperator", "diagonal", "from_matrix", "identity", "image_shape", "positive_size", "select", "stack"]
