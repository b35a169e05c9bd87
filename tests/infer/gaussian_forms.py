"""Small latent-Gaussian forms, and factors that need nothing from the library, for the tests of the engines."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm

from numpyro_ext.linalg.design import DenseDesign, SparseRows
from numpyro_ext.linalg.prior import CovariancePrior, DiagonalPrior, FlatPrior, PrecisionPrior
from numpyro_ext.potentials.base import Potential, TiltedMoments, potential
from numpyro_ext.structure.latent_gaussian import Blocks, LatentGaussian

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(80)


class QuadratureMixin:
    """Tilted moments by Gauss-Hermite quadrature on the cavity: exact enough for smooth factors, and independent."""

    def tilted_moments(self, mean, variance, power=1.0):
        nodes = mean + jnp.sqrt(variance) * _NODES.reshape(-1, *([1] * jnp.ndim(mean)))
        log_weight = np.log(_WEIGHTS / np.sqrt(2 * np.pi)).reshape(-1, *([1] * jnp.ndim(mean)))
        log_terms = power * self.log_density(nodes) + log_weight
        log_z = jax.scipy.special.logsumexp(log_terms, axis=0)
        weight = jnp.exp(log_terms - log_z)
        new_mean = jnp.sum(weight * nodes, 0)
        new_variance = jnp.sum(weight * (nodes - new_mean) ** 2, 0)
        precision = 1 / new_variance - 1 / variance
        return TiltedMoments(log_z, new_mean, new_variance, precision, new_mean / new_variance - mean / variance)


@potential
class Gaussian(Potential):
    """``N(observation | eta, scale)``."""

    observation: jax.Array
    scale: jax.Array
    is_log_concave = True

    def log_density(self, eta):
        return norm.logpdf(self.observation, eta, self.scale)

    def tilted_moments(self, mean, variance, power=1.0):
        precision = power / self.scale**2 + 0 * mean
        shift = precision * self.observation
        new_variance = 1 / (1 / variance + precision)
        log_z = power * norm.logpdf(0.0, 0.0, self.scale) + 0.5 * jnp.log(new_variance / variance)
        log_z -= 0.5 * (self.observation - mean) ** 2 * precision * new_variance / variance
        return TiltedMoments(log_z, new_variance * (mean / variance + shift), new_variance, precision, shift)


@potential
class Logistic(QuadratureMixin, Potential):
    """Bernoulli with labels plus or minus one and a logit link."""

    label: jax.Array
    is_log_concave = True

    def log_density(self, eta):
        return -jax.nn.softplus(-self.label * eta)


@potential
class Poisson(QuadratureMixin, Potential):
    """``Poisson(count | exp(eta))``."""

    count: jax.Array
    is_log_concave = True

    def log_density(self, eta):
        return self.count * eta - jnp.exp(eta) - jax.scipy.special.gammaln(self.count + 1)


@potential
class Student(QuadratureMixin, Potential):
    """Student-t with ``df`` degrees of freedom around ``eta``: not log-concave."""

    observation: jax.Array
    scale: jax.Array
    df: jax.Array

    def log_density(self, eta):
        return jax.scipy.stats.t.logpdf(self.observation, self.df, eta, self.scale)


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
    return LatentGaussian(
        tuple(prior), design, offset, tuple(potentials), observed, jnp.asarray(log_constant), blocks
    )


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
