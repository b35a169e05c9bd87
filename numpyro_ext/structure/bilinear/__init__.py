"""Two Gaussian blocks and their products: the form and how it is read."""

from .form import Bilinear, CoupledSide, GaussianSide, order_cells

__all__ = ["Bilinear", "CoupledSide", "GaussianSide", "order_cells"]
