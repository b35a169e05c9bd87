"""Classes of arrays: their structures tell them apart."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp

import numpyro_ext
from numpyro_ext.infer.gaussian.algorithms.posterior import GaussianPosterior
from numpyro_ext.linalg.gaussian.design import DenseDesign, SparseRows
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior, FlatPrior, PrecisionPrior


def test_structures_of_two_classes_differ():
    x = jnp.ones((1, 2, 2))
    found = [jax.tree.structure(cls(x)) for cls in (CovariancePrior, PrecisionPrior, DenseDesign, DiagonalPrior)]
    found += [jax.tree.structure(FlatPrior(2)), jax.tree.structure(SparseRows(x, x, 2))]
    found += [jax.tree.structure(SparseRows(x, x, 3)), jax.tree.structure(GaussianPosterior(x, x, x))]
    for number, structure in enumerate(found):
        assert [structure == other for other in found] == [number == k for k in range(len(found))]


def test_no_class_is_registered_as_a_dataclass():
    """JAX takes the structures of two of these for equal, and may run on one what it has compiled for the other."""
    root = Path(numpyro_ext.__file__).parent
    files = [*root.rglob("*.py"), *(root.parent / "models").rglob("*.py")]
    assert len(files) > 100
    found = [file for file in files if re.search(r"tree_util\.register_dataclass\b(?!`)", file.read_text())]
    assert not found, f"numpyro_ext.linalg.frozen_pytree has a decorator for such classes: {found}"
