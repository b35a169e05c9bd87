"""Sparse precision matrices of maps, walks, surfaces, meshes, pedigrees and phylogenies."""

from .graphs import GraphPrecision, car, graph_precision, leroux
from .meshes import matern_precision
from .pedigrees import pedigree_precision, phylogeny_precision
from .precision import SparsePrecision
from .splines import bspline_basis, sparse_matmul
from .walks import difference_precision, kronecker, kronecker_sum

__all__ = [
    "GraphPrecision",
    "SparsePrecision",
    "bspline_basis",
    "car",
    "difference_precision",
    "graph_precision",
    "kronecker",
    "kronecker_sum",
    "leroux",
    "matern_precision",
    "pedigree_precision",
    "phylogeny_precision",
    "sparse_matmul",
]
