"""Reading NumPyro models into the forms that engines run on."""

from . import likelihoods  # noqa: F401  the entries of the registry
from .bilinear.form import Bilinear
from .bilinear.read import read_bilinear
from .bilinear.reading import BilinearReading
from .errors import Conflict, ModelStructureError, Reason
from .families import (
    EXP,
    IDENTITY,
    LOG_SOFTMAX,
    LOGISTIC,
    PROBIT,
    RECTIFIED_LINEAR,
    SOFTMAX,
    SOFTPLUS,
    Built,
    Family,
    Link,
    Observations,
    family_of,
    register_family,
)
from .latent_gaussian.form import AffineMap, Blocks, LatentGaussian
from .latent_gaussian.read import read_latent_gaussian
from .latent_gaussian.reading import LatentGaussianReading
from .model.hyper_site import HyperSite
from .model.reading import ModelReading
from .model.search import Form, read_first
from .sparse_linear.form import SparseLinear
from .sparse_linear.read import read_sparse_linear
from .sparse_linear.reading import SparseLinearReading

__all__ = [
    "EXP",
    "IDENTITY",
    "LOGISTIC",
    "LOG_SOFTMAX",
    "PROBIT",
    "RECTIFIED_LINEAR",
    "SOFTMAX",
    "SOFTPLUS",
    "AffineMap",
    "Bilinear",
    "BilinearReading",
    "Blocks",
    "Built",
    "Conflict",
    "Family",
    "Form",
    "HyperSite",
    "LatentGaussian",
    "LatentGaussianReading",
    "Link",
    "ModelReading",
    "ModelStructureError",
    "Observations",
    "Reason",
    "SparseLinear",
    "SparseLinearReading",
    "family_of",
    "read_bilinear",
    "read_first",
    "read_latent_gaussian",
    "read_sparse_linear",
    "register_family",
]
