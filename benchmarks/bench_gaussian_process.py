"""A sweep of expectation propagation on a Gaussian process, in units of a Cholesky factorisation and an inverse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.linalg import solve_triangular

from numpyro_ext.linalg.gaussian.design import SparseRows
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior
from numpyro_ext.potentials import ProbitPotential, RectifiedLinearPoissonPotential
from numpyro_ext.structure.latent_gaussian.form import Blocks, LatentGaussian

from .harness import at_most, compile_function, compile_sweep

SIZES = (500, 1000, 2000)


def gaussian_process(size: int, likelihood: str) -> LatentGaussian:
    """A process on a line with an unknown mean: what the reader makes of the Cox process, kernel given."""
    rng = np.random.default_rng(size)
    t = np.arange(float(size))
    covariance = 9.0 * (np.exp(-0.5 * ((t[:, None] - t) / 15.0) ** 2) + 1e-6 * np.eye(size))
    curve = np.sin(t / 20.0)
    potential = (
        RectifiedLinearPoissonPotential(jnp.asarray(rng.poisson(5.0 + 3.0 * curve), float))
        if likelihood == "rectified Poisson"
        else ProbitPotential(jnp.asarray(rng.random(size) < 0.5 + 0.4 * curve, float))
    )
    columns = jnp.stack([jnp.zeros(size, int), 1 + jnp.arange(size)], axis=-1)
    return LatentGaussian(
        prior=(DiagonalPrior(jnp.array([4.0])), CovariancePrior(jnp.asarray(covariance)[None])),
        design=SparseRows(columns, jnp.ones((size, 2)), size + 1),
        offset=jnp.zeros(size),
        potentials=(potential,),
        observed=(jnp.ones(size, bool),),
        log_constant=jnp.zeros(()),
        blocks=Blocks(jnp.arange(size)[None], jnp.arange(size + 1)[None]),
    )


def factorise_and_invert(matrix: jax.Array) -> jax.Array:
    """The floor: one Cholesky factorisation and the inverse of the factor."""
    factor = jnp.linalg.cholesky(matrix)
    return solve_triangular(factor, jnp.eye(matrix.shape[0], dtype=matrix.dtype), lower=True)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("likelihood", ["rectified Poisson", "probit"])
def test_sweep(race, results, likelihood, dtype):
    runs = []
    for size in SIZES:
        form = jax.tree.map(
            lambda x: jnp.asarray(x, dtype) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x,
            gaussian_process(size, likelihood),
        )
        matrix = jnp.eye(size, dtype=dtype) + form.prior[1].covariance[0]
        runs += [compile_sweep(form), compile_function(factorise_and_invert, matrix)]
    seconds = race(*[compiled.run for compiled in runs], rounds=10)
    for i, size in enumerate(SIZES):
        ours, floor = runs[2 * i], runs[2 * i + 1]
        results.record(
            f"EP sweep, Gaussian process, {likelihood}, n = {size}",
            dtype=np.dtype(dtype).name,
            peer="Cholesky and triangular inverse",
            times=(seconds[2 * i], seconds[2 * i + 1]),
            target=at_most(3),
            programs=(ours, floor),
        )
    exponents = [np.polyfit(np.log(SIZES), np.log(seconds[i::2]), 1)[0] for i in range(2)]
    results.record(
        f"EP sweep, Gaussian process, {likelihood}, n = {SIZES[0]} to {SIZES[-1]}",
        dtype=np.dtype(dtype).name,
        peer="Cholesky and triangular inverse",
        figure="exponent of growth",
        value=float(exponents[0]),
        remark=f"That of the floor: {exponents[1]:.2f}.",
    )
