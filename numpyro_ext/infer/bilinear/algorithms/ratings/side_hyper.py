"""Latent prior means and variances of the vectors of a side, by variational Bayes together with the vectors.

Houlsby (2014), chapter 7, sends messages of expectation propagation to them. These take the vectors of a side for
independent witnesses of their mean, whose sign and size the other side can undo: where a component is about to vanish
the messages circle without end, however much they are damped. Variational Bayes climbs the bound that the products
climb, and ends.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .....structure.bilinear.noisy.form import SideHyper
from ..messages import Message, Moments
from .variances import GammaMessage

__all__ = ["SidePosterior", "prior_at_points", "prior_message", "side_start", "updated_side"]


class SidePosterior(NamedTuple):
    """Posteriors of prior means and of prior precisions of a side, one for each latent element."""

    mean: Moments
    precision: GammaMessage


def side_start(side: SideHyper) -> SidePosterior:
    """The priors."""
    return SidePosterior(Moments(side.mean_mean, side.mean_variance), GammaMessage(side.shape, side.rate))


def prior_message(side: SideHyper, posterior: SidePosterior) -> Message:
    """Message of the prior to each component of each vector."""
    precision = _precisions(side, posterior)
    return Message(precision * _means(side, posterior), precision)


def prior_at_points(side: SideHyper, posterior: SidePosterior) -> Moments:
    """Prior moments of the vectors at the posterior means of their means and the modes of their variances."""
    gamma = posterior.precision
    return Moments(
        _means(side, posterior),
        side.variance * _spread_out(gamma.rate / (gamma.shape + 1.0), side.variance_index, 1.0),
    )


def updated_side(side: SideHyper, posterior: SidePosterior, vectors: Moments) -> SidePosterior:
    """Optimal prior means given the vectors and the precisions, then precisions.

    :param SideHyper side: the priors.
    :param SidePosterior posterior: before.
    :param Moments vectors: of all components of all vectors.
    """
    if side.mean_index is not None:
        weight = _precisions(side, posterior)
        precision = 1.0 / side.mean_variance + _summed(weight, side.mean_index, side.mean_mean)
        shift = side.mean_mean / side.mean_variance
        shift += _summed(weight * (vectors.mean - side.mean), side.mean_index, side.mean_mean)
        posterior = posterior._replace(mean=Moments(shift / precision, 1.0 / precision))
    if side.variance_index is not None:
        square = (vectors.mean - _means(side, posterior)) ** 2 + vectors.variance
        square += _spread_out(posterior.mean.variance, side.mean_index, 0.0)
        shape = side.shape + 0.5 * _summed(jnp.ones_like(square), side.variance_index, side.shape)
        rate = side.rate + 0.5 * _summed(square / side.variance, side.variance_index, side.shape)
        posterior = posterior._replace(precision=GammaMessage(shape, rate))
    return posterior


def _means(side: SideHyper, posterior: SidePosterior) -> Array:
    return side.mean + _spread_out(posterior.mean.mean, side.mean_index, 0.0)


def _precisions(side: SideHyper, posterior: SidePosterior) -> Array:
    gamma = posterior.precision
    return _spread_out(gamma.shape / gamma.rate, side.variance_index, 1.0) / side.variance


def _spread_out(values: Array, index: Array | None, otherwise: float) -> Array:
    """Value of the latent element of each component; the index behind the last is that of components without one."""
    return jnp.asarray(otherwise, values.dtype) if index is None else jnp.append(values, otherwise)[index]


def _summed(values: Array, index: Array, like: Array) -> Array:
    return jax.ops.segment_sum(values.reshape(-1), index.reshape(-1), like.size + 1)[:-1]
