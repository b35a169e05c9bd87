"""Linear operators, Gaussian algebra and the solvers that the engines share."""

from .convolutions import convolution
from .custom_operator import adjoint_error, from_functions
from .differences import finite_differences, total_variation
from .fourier_transform import FourierOperator, fourier, masked_fourier
from .operators import LinearOperator, diagonal, from_matrix, identity, select, stack
from .shifted_transforms import ShiftedTransforms, shifted_transforms
from .wavelets import WaveletTransform, wavelet_transform

__all__ = [
    "FourierOperator",
    "LinearOperator",
    "ShiftedTransforms",
    "WaveletTransform",
    "adjoint_error",
    "convolution",
    "diagonal",
    "finite_differences",
    "fourier",
    "from_functions",
    "from_matrix",
    "identity",
    "masked_fourier",
    "select",
    "shifted_transforms",
    "stack",
    "total_variation",
    "wavelet_transform",
]
