"""Linear operators, Gaussian algebra and the solvers that the engines share."""

from .custom_operator import adjoint_error, from_functions
from .operators import LinearOperator, diagonal, from_matrix, identity, select, stack

__all__ = [
    "LinearOperator",
    "adjoint_error",
    "diagonal",
    "from_functions",
    "from_matrix",
    "identity",
    "select",
    "stack",
]
