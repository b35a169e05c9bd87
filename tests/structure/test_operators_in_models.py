"""Operators inside latent Gaussian models: read as sparse rows, equal to the operators."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.distributions import RectifiedLinearPoisson
from numpyro_ext.linalg import LinearOperator, convolution, fourier, select, stack, total_variation
from numpyro_ext.linalg.gaussian.design import DenseDesign, SparseRows
from numpyro_ext.linalg.operators.wavelets import wavelet_transform
from numpyro_ext.structure import read_latent_gaussian

SHAPE, SIZE = (6, 5), 30
rng = np.random.default_rng(11)
COUNTS = rng.poisson(3.0, SIZE)
KERNEL = rng.random((3, 2))


def _flat(size: int) -> Any:
    return numpyro.sample("u", dist.ImproperUniform(dist.constraints.real_vector, (), (size,)))


def _deblur(blur: LinearOperator, differences: LinearOperator, counts: Any) -> None:
    rate = numpyro.sample("rate", dist.LogNormal(0.0, 1.0))
    u = _flat(blur.shape[1])
    gradients = differences @ u
    numpyro.sample("gradients", dist.Laplace(gradients, 1.0 / rate), obs=jnp.zeros(gradients.shape))
    numpyro.sample("counts", RectifiedLinearPoisson(blur @ u), obs=counts)


@pytest.mark.parametrize("boundary", ["periodic", "zero", "reflect", "replicate"])
def test_deblurring_has_sparse_rows(boundary: str) -> None:
    blur, differences = convolution(SHAPE, KERNEL, boundary), total_variation(SHAPE)
    reading = read_latent_gaussian(_deblur, (blur, differences, COUNTS), check=boundary == "reflect")
    assert [plan.label for plan in reading.plans] == ["laplace", "rectified linear poisson"]
    design = jax.jit(lambda hyper: reading.form(hyper).design)({"rate": 1.0})
    assert isinstance(design, DenseDesign) or design.columns.shape[1] == KERNEL.size
    matrix = jax.jit(lambda: stack([differences, blur]).materialise())()
    np.testing.assert_allclose(design.to_dense(), matrix, atol=1e-14)


def test_other_operators_are_read() -> None:
    mask = rng.random((8, 8)) < 0.5
    haar = wavelet_transform((8, 8), "haar", 1)
    parts = {"mask": select(mask), "wavelet": select([0, 9], 64) @ haar, "fourier": select([3], 64) @ fourier((8, 8))}

    def model(sparse: bool) -> None:
        s = _flat(64)
        numpyro.sample("y", dist.Poisson(jnp.exp(parts["mask"] @ s)), obs=np.ones(mask.sum(), int))
        numpyro.sample("wavelet", dist.Laplace(parts["wavelet"] @ s, 0.5), obs=jnp.ones(2))
        if not sparse:
            numpyro.sample("fourier", dist.Normal(parts["fourier"] @ s, 0.5), obs=jnp.ones(1))

    matrix = np.asarray(jax.jit(stack(list(parts.values())).materialise)())
    for sparse, rows in ((True, matrix[:-1]), (False, matrix)):
        reading = read_latent_gaussian(model, (sparse,), check=False)
        design = jax.jit(lambda data, reading=reading: reading.form({}, data).design)(reading.data)
        assert isinstance(design, SparseRows if sparse else DenseDesign)
        np.testing.assert_allclose(design.to_dense(), rows, atol=1e-14)


def test_images_of_a_thousand_pixels_keep_few_entries_per_row() -> None:
    shape = (32, 32)
    blur, differences = convolution(shape, np.ones((5, 5)) / 25.0, "replicate"), total_variation(shape)
    reading = read_latent_gaussian(_deblur, (blur, differences, rng.poisson(3.0, 1024)), check=False)
    assert "25 entries per row" in reading.describe()
