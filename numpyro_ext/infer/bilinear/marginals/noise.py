"""Posteriors of noise, cut points and priors of the sides of ratings, as sites, and probabilities of levels."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import gammainccinv, gammaincinv

from ....structure.bilinear.form import Bilinear
from ....structure.bilinear.noisy.form import NoisyBilinear
from ...front.answers.sites import SitePosterior
from ..algorithms import hybrid
from ..algorithms.cells import Block, draw_block
from ..algorithms.messages import Moments
from ..algorithms.ratings import cuts as cut_points
from ..algorithms.ratings.variances import GammaMessage


class VariancePosterior(SitePosterior):
    """The posterior of variances whose precisions have gamma densities, or of these precisions.

    :param str name: of the site.
    :param shape: of the site.
    :param GammaMessage gamma: densities of the precisions, flat.
    :param bool is_precision: whether the site is the precisions.
    """

    def __init__(self, name: str, shape: tuple[int, ...], gamma: GammaMessage, is_precision: bool) -> None:
        a, b = (np.asarray(x, float) for x in gamma)
        self._gamma, self._is_precision = (a, b), is_precision

        def sample(rng_key: Array, num_samples: int) -> Array:
            drawn = jax.random.gamma(rng_key, jnp.asarray(a), (num_samples, a.size)) / b
            return (drawn if is_precision else 1.0 / drawn).reshape(num_samples, *shape)

        def mean() -> np.ndarray:
            return a / b if is_precision else np.where(a > 1.0, b / np.maximum(a - 1.0, 1e-300), np.inf)

        def variance() -> np.ndarray:
            if is_precision:
                return np.asarray(a / b**2)
            return np.where(a > 2.0, mean() ** 2 / np.maximum(a - 2.0, 1e-300), np.inf)

        super().__init__(name, shape, mean, variance, lambda: jnp.diag(jnp.asarray(variance())), sample)

    def _quantile(self, q: np.ndarray) -> Array:
        a, b = self._gamma
        level = np.asarray(q).reshape(-1, 1)
        found = gammaincinv(a, level) / b if self._is_precision else b / gammainccinv(a, level)
        return jnp.asarray(found).reshape((*np.shape(q), *self.shape))


def independent_gaussians(name: str, shape: tuple[int, ...], found: Moments) -> SitePosterior:
    """The posterior of a site of independent Gaussian elements, given flat."""
    mean, variance = (np.asarray(x) for x in found)

    def sample(rng_key: Array, num_samples: int) -> Array:
        noise_of = jax.random.normal(rng_key, (num_samples, mean.size), mean.dtype)
        drawn: Array = mean + np.sqrt(variance) * noise_of
        return drawn.reshape(num_samples, *shape)

    return SitePosterior(name, shape, lambda: mean, lambda: variance, lambda: jnp.diag(jnp.asarray(variance)), sample)


@jax.jit
def level_probabilities(
    form: NoisyBilinear, blocks: Sequence[Block], elements: Moments | None, variances: Sequence[Array]
) -> Array:
    """Probabilities of all levels, given moments of vectors and of cut points, and values of the noise variances.

    Of the vectors of one side at most components may be correlated, or both sides are points.
    """
    predictor = _predictors(form.cells, *blocks)
    cuts = Moments(form.thresholds, jnp.zeros_like(form.thresholds))
    if elements is not None and form.cuts is not None:
        cuts = Moments(form.thresholds + elements.mean[form.cuts.element], elements.variance[form.cuts.element])
    noise = form.noise
    for scale, variance in zip(form.scales, variances, strict=True):
        noise = noise * variance[scale.group]
    return cut_points.level_probabilities(predictor, cuts, noise)


@jax.jit
def mean_level_probabilities(
    form: NoisyBilinear,
    blocks: Sequence[Block],
    elements: Moments | None,
    gammas: Sequence[GammaMessage],
    keys: Array,
) -> Array:
    """Probabilities of all levels, averaged over draws of vectors, cut points and noise, one for each key."""

    def add(number: Array, total: Array) -> Array:
        own_keys = iter(jax.random.split(keys[number], len(gammas) + 3))
        drawn = [Block(draw_block(block, next(own_keys)), None) for block in blocks]
        cuts = None if elements is None else _drawn(next(own_keys), elements)
        variances = [g.rate / jax.random.gamma(key, g.shape) for g, key in zip(gammas, own_keys, strict=False)]
        return total + level_probabilities(form, drawn, cuts, variances)

    num_levels = form.thresholds.shape[-1] + 1
    blank = jnp.zeros((form.thresholds.shape[0], num_levels), form.thresholds.dtype)
    total: Array = jax.lax.fori_loop(0, len(keys), add, blank)
    return total / len(keys)


def _predictors(cells: Bilinear, rows: Block, columns: Block) -> Moments:
    """Moments of all predictors."""
    blocks = [Moments(block.mean, block.variance) for block in (rows, columns)]
    mean, variance = hybrid.predictor_moments(cells, *blocks)
    index, linear = (cells.row_index, cells.column_index), (cells.row_linear, cells.column_linear)
    k = cells.coupling.shape[-1]
    for side, block in enumerate((rows, columns)):
        if block.is_diagonal:
            continue
        # what multiplies the vectors, at its mean: its variance meets their variances alone
        partner = cells.coupling * blocks[1 - side].mean[index[1 - side], :k]
        at = jnp.pad(partner, [(0, 0), (0, block.mean.shape[1] - k)])
        if linear[side].shape[-1]:
            at = at + linear[side]
        between = block.matrices * (1.0 - jnp.eye(block.mean.shape[1], dtype=at.dtype))
        variance += jnp.einsum("ni,nij,nj->n", at, between[index[side]], at)
    return Moments(mean, variance)


def _drawn(rng_key: Array, block: Moments) -> Moments:
    """Draws of Gaussian numbers, as moments without variance."""
    white = jax.random.normal(rng_key, block.mean.shape, block.mean.dtype)
    return Moments(block.mean + jnp.sqrt(block.variance) * white, jnp.zeros_like(block.mean))
