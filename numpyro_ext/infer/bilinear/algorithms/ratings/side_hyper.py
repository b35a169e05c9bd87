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
from jax import Array, lax

from .....structure.bilinear.noisy.form import SideHyper
from ..messages import Message, Moments
from .variances import GammaMessage

_NEWTON_STEPS = 8
_LONGEST_STEP = 0.5


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


def rescaled(
    sides: tuple[SideHyper, SideHyper],
    posteriors: tuple[SidePosterior, SidePosterior],
    vectors: tuple[Moments, Moments],
    is_silent: Array,
) -> tuple[tuple[SidePosterior, SidePosterior], tuple[Moments, Moments]]:
    """Each component of the rows multiplied by the number that is best for the bound, and that of the columns divided.

    Products keep their moments, and vectors keep their distance from their priors, where these are latent, belong to
    this component alone and change along; other components stay as they are. So the number is one that maximises
    what the priors of means and precisions say. Sweeps alone take hundreds to go there, as vectors and their priors
    hold each other where they are.

    :param sides: the priors of rows and columns.
    :param posteriors: of their latent means and precisions.
    :param vectors: moments of all components of all vectors.
    :param is_silent: for each of the first components, whether cells see of it nothing but products of both sides.
    """
    owners = [_owners(side, is_silent.size) for side in sides]
    rows, columns = (_gains(*one) for one in zip(sides, posteriors, owners, strict=True))
    # weights of c**-2, 1 / c, log(c), c and c**2, and the columns see 1 / c
    weight = rows + jnp.flip(columns, 0) * jnp.array([1.0, 1.0, -1.0, 1.0, 1.0], rows.dtype)[:, None]
    power = jnp.array([-2.0, -1.0, 0.0, 1.0, 2.0], rows.dtype)[:, None]

    def gain(t: Array) -> Array:
        return jnp.sum(weight * jnp.where(power == 0.0, t, jnp.exp(power * t)), 0)

    def climb(_: int, t: Array) -> Array:
        terms = weight * jnp.exp(power * t)
        slope, curvature = weight[2] + jnp.sum(power * terms, 0), jnp.sum(power**2 * terms, 0)
        step = jnp.clip(slope / jnp.maximum(-curvature, jnp.abs(slope)), -_LONGEST_STEP, _LONGEST_STEP)
        return jnp.where(gain(t + step) > gain(t), t + step, t)

    t = lax.fori_loop(0, _NEWTON_STEPS, climb, jnp.zeros_like(weight[0]))
    scale = jnp.exp(jnp.where(is_silent & owners[0].is_free & owners[1].is_free, t, 0.0))
    (row_prior, own), (column_prior, other) = (
        _multiplied(owners[side], posteriors[side], vectors[side], x) for side, x in enumerate((scale, 1.0 / scale))
    )
    return (row_prior, column_prior), (own, other)


class _Owners(NamedTuple):
    """Component that each latent element of the priors of a side is of; one behind the last if it is of others too."""

    mean: Array
    precision: Array
    is_free: Array
    """For each component, whether its priors are latent and of this component alone."""


def _owners(side: SideHyper, num: int) -> _Owners:
    def owner(index: Array | None, like: Array) -> tuple[Array, Array]:
        if index is None:
            return jnp.full(like.shape, num), jnp.zeros(num, bool)
        component = jnp.broadcast_to(jnp.arange(index.shape[1]), index.shape).reshape(-1)
        first, last = (
            f(component, index.reshape(-1), like.size + 1) for f in (jax.ops.segment_min, jax.ops.segment_max)
        )
        found = jnp.where((first == last) & (first < num), first, num).at[-1].set(num)
        return found[:-1], jnp.all(found[index[:, :num]] < num, 0)

    (mean, has_mean), (precision, has_precision) = (
        owner(side.mean_index, side.mean_mean),
        owner(side.variance_index, side.shape),
    )
    has_mean |= (side.mean_index is None) | jnp.zeros(num, bool)
    return _Owners(mean, precision, has_mean & has_precision & jnp.all(side.mean[:, :num] == 0.0, 0))


def _gains(side: SideHyper, posterior: SidePosterior, owners: _Owners) -> Array:
    """Weights of powers of a number in what the priors of means and precisions say of each component times it."""
    num = owners.is_free.size
    mean, gamma = posterior
    terms = [
        (-side.rate * gamma.shape / gamma.rate, owners.precision),
        (jnp.zeros(0), jnp.zeros(0, int)),
        (-2.0 * side.shape, owners.precision),
        (mean.mean * side.mean_mean / side.mean_variance, owners.mean),
        (-0.5 * (mean.mean**2 + mean.variance) / side.mean_variance, owners.mean),
    ]
    found = jnp.stack([jax.ops.segment_sum(x, owner, num) for x, owner in terms])
    # the entropy of the means; that of the precisions is with their densities
    return found.at[2].add(jax.ops.segment_sum(jnp.ones_like(mean.mean), owners.mean, num))


def _multiplied(
    owners: _Owners, posterior: SidePosterior, vectors: Moments, scale: Array
) -> tuple[SidePosterior, Moments]:
    of_element = jnp.append(scale, 1.0)
    own, other = of_element[owners.mean], of_element[owners.precision]
    mean = Moments(posterior.mean.mean * own, posterior.mean.variance * own**2)
    gamma = posterior.precision._replace(rate=posterior.precision.rate * other**2)
    all_components = jnp.append(scale, jnp.ones(vectors.mean.shape[1] - scale.size))
    moments = Moments(vectors.mean * all_components, vectors.variance * all_components**2)
    return SidePosterior(mean, gamma), moments


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
