"""Reading NumPyro models into the forms that engines run on."""

from .bilinear import Bilinear
from .bilinear_reading import BilinearReading
from .errors import ModelStructureError, Reason
from .latent_gaussian import AffineMap, Blocks, LatentGaussian
from .model_reading import HyperSite
from .read import read_latent_gaussian, read_sparse_linear
from .read_bilinear import read_bilinear
from .reading import LatentGaussianReading
from .sparse_linear import SparseLinear
from .sparse_reading import SparseLinearReading

__all__ = [
    "AffineMap",
    "Bilinear",
    "BilinearReading",
    "Blocks",
    "HyperSite",
    "LatentGaussian",
    "LatentGaussianReading",
    "ModelStructureError",
    "Reason",
    "SparseLinear",
    "SparseLinearReading",
    "read_bilinear",
    "read_latent_gaussian",
    "read_sparse_linear",
]
