"""Small latent-Gaussian forms for the tests of the engines."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from numpyro_ext.linalg.gaussian.design import DenseDesign, SparseRows
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior, FlatPrior, PrecisionPrior
from numpyro_ext.linalg.gaussian.spaces.border_space import Border
from numpyro_ext.potentials import GaussianPotential, LogitPotential, PoissonExpPotential, StudentTPotential
from numpyro_ext.structure.latent_gaussian.form import Blocks, LatentGaussian


def one_block(num_rows, num_columns):
    return Blocks(jnp.arange(num_rows)[None], jnp.arange(num_columns)[None])


def make_form(prior, design, potentials, offset=None, observed=None, blocks=None, log_constant=0.0):
    """A form with defaults; ``potentials`` share the rows equally when there is more than one."""
    num_rows = design.num_rows
    size = num_rows // len(potentials)
    if observed is None:
        observed = tuple(jnp.ones(size, bool) for _ in potentials)
    offset = jnp.zeros(num_rows) if offset is None else offset
    blocks = one_block(num_rows, design.num_columns) if blocks is None else blocks
    return LatentGaussian(tuple(prior), design, offset, tuple(potentials), observed, jnp.asarray(log_constant), blocks)


def kernel(num, scale=1.0, length=0.3, jitter=1e-6):
    x = jnp.linspace(0.0, 1.0, num)
    return scale**2 * (jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2) + jitter * jnp.eye(num))


def identity(num):
    return SparseRows(jnp.arange(num)[:, None], jnp.ones((num, 1)), num)


def mixed_prior(rng, is_flat=False):
    """Eleven unknowns of all kinds: 2 diagonal, 2 x 2 covariance, 3 precision, 2 flat or diagonal."""
    a = rng.normal(size=(2, 2, 2))
    b = rng.normal(size=(3, 3))
    last = FlatPrior(2) if is_flat else DiagonalPrior(jnp.array([2.0, 3.0]))
    return (
        DiagonalPrior(jnp.array([0.5, 1.5])),
        CovariancePrior(jnp.asarray(a @ a.swapaxes(-1, -2) + 0.3 * np.eye(2))),
        PrecisionPrior(jnp.asarray(b @ b.T + 0.5 * np.eye(3))[None]),
        last,
    )


def dense_prior_precision(prior):
    """The prior precision as a dense matrix, by plain inversion."""
    blocks = []
    for block in prior:
        if isinstance(block, DiagonalPrior):
            blocks.append(np.diag(1 / np.asarray(block.variance)))
        elif isinstance(block, CovariancePrior):
            blocks.extend(np.linalg.inv(np.asarray(c)) for c in block.covariance)
        elif isinstance(block, PrecisionPrior):
            blocks.extend(np.asarray(p) for p in block.precision)
        else:
            blocks.append(np.zeros((block.size, block.size)))
    out = np.zeros((sum(len(b) for b in blocks),) * 2)
    start = 0
    for block in blocks:
        out[start : start + len(block), start : start + len(block)] = block
        start += len(block)
    return out


def random_sparse(rng, num_rows, num_columns, k):
    columns = rng.integers(0, num_columns, size=(num_rows, k))
    return SparseRows(jnp.asarray(columns), jnp.asarray(rng.normal(size=(num_rows, k))), num_columns)


def random_dense(rng, num_rows, num_columns):
    return DenseDesign(jnp.asarray(rng.normal(size=(num_rows, num_columns)) / np.sqrt(num_columns)))


def counts_in_single_precision(num, counts):
    """Poisson counts driven by a Gaussian process, all arrays in float32."""
    prior = (CovariancePrior(kernel(num, jitter=1e-3).astype(jnp.float32)[None]),)
    design = DenseDesign(jnp.eye(num, dtype=jnp.float32))
    factors = (PoissonExpPotential(counts.astype(jnp.float32), jnp.float32(1.0)),)
    form = make_form(prior, design, factors, jnp.zeros(num, jnp.float32))
    return form._replace(log_constant=jnp.float32(0.0))


def assert_gradient_of_refits(refit, point):
    """The gradient of an evidence, with the state held, is that of the evidence of fits beside it.

    :param refit: from parameters to evidence, gradient, and whether the fit converged.
    """
    _, gradient, converged = refit(point)
    assert converged
    for i, shift in enumerate(1e-4 * jnp.eye(point.size)):
        difference = (refit(point + shift)[0] - refit(point - shift)[0]) / 2e-4
        np.testing.assert_allclose(gradient[i], difference, rtol=1e-5, atol=1e-6)


def crossed_form(parameters, family):
    """Five groups crossed with three, by the scales of both and a mean; the second groups are the border."""
    first, second, mean = parameters
    rows = np.arange(24)
    columns = jnp.asarray(np.stack([rows % 5, 5 + rows * 7 % 3], axis=1))
    counts, data = jnp.asarray(rows * 5 % 7, float), jnp.asarray(np.random.default_rng(3).standard_t(2.0, size=24))
    potential = {
        "binary": LogitPotential(jnp.asarray(rows * 5 % 7 > 2, float)),
        "counts": PoissonExpPotential(counts, 1.0),
        "heavy-tailed": StudentTPotential(data, 0.5, 3.0),
        "Gaussian": GaussianPotential(data, 0.5),
    }[family]
    prior = DiagonalPrior(jnp.full(5, first**2)), DiagonalPrior(jnp.full(3, second**2))
    form = make_form(prior, SparseRows(columns, jnp.ones((24, 2)), 8), (potential,), offset=jnp.full(24, mean))
    return form._replace(border=Border(jnp.arange(5)[:, None], jnp.arange(5, 8), jnp.zeros((24, 1), int)))
