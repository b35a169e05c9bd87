"""Reading NumPyro models into the forms that engines run on."""

from .errors import ModelStructureError
from .latent_gaussian import AffineMap, Blocks, LatentGaussian
from .read import read_latent_gaussian
from .reading import HyperSite, LatentGaussianReading

__all__ = [
    "AffineMap",
    "Blocks",
    "HyperSite",
    "LatentGaussian",
    "LatentGaussianReading",
    "ModelStructureError",
    "read_latent_gaussian",
]
