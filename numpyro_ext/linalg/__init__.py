"""Linear operators, Gaussian algebra and the solvers that the engines share."""

from .frozen_pytree import frozen_pytree
from .inducing import fitc, pair_covariance
from .operators.convolution import convolution
from .operators.differences import finite_differences, total_variation
from .operators.fourier import FourierOperator, fourier, masked_fourier
from .operators.from_functions import adjoint_error, from_functions
from .operators.operator import LinearOperator, diagonal, from_matrix, identity, select, stack
from .operators.shifted_transforms import ShiftedTransforms, shifted_transforms
from .operators.wavelets import WaveletTransform, wavelet_transform
from .recurrent_states import gated_states, simple_states
from .saved_names import saved_as

__all__ = [
    "FourierOperator",
    "LinearOperator",
    "ShiftedTransforms",
    "WaveletTransform",
    "adjoint_error",
    "convolution",
    "diagonal",
    "finite_differences",
    "fitc",
    "fourier",
    "from_functions",
    "from_matrix",
    "gated_states",
    "identity",
    "frozen_pytree",
    "masked_fourier",
    "pair_covariance",
    "saved_as",
    "select",
    "shifted_transforms",
    "simple_states",
    "stack",
    "total_variation",
    "wavelet_transform",
]
