r"""New vectors of one side from few ratings each, all else held as a fit has left it (Houlsby 2014, chapter 7).

The other side, its cut points and its noise are known up to a Gaussian, and each cell of a new vector meets them once,
so that they are integrated out cell by cell. What is left is a Gaussian vector with a full covariance behind each new
row, its noise, and its cut points where these are its own: expectation propagation as in :mod:`.noise`, with exact
cavities in the place of the products. New vectors do not see each other, and all are treated at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from .....linalg.cholesky import cholesky, solve_lower
from .....linalg.short_axes import as_matrices
from .....structure.bilinear.noisy.form import Cuts, NoisyBilinear, Scale
from ..messages import Message, Moments, as_message, damped, mean_of, nothing
from . import cuts as cut_points
from .noise import Levels, levels_heard, noise_variances
from .variances import GammaMessage, Rule, gamma_of

_MOST_STEPS = 200
_DAMPING = 0.7
_LEAST_OF_PRIOR = 0.5
"""Share of the prior precision of new vectors that the width of predictors leaves at least."""
_BLOCK = 4096
"""Cells at a time whose points are visited one after the other, from fast memory."""


class Met(NamedTuple):
    """Cells of new vectors, and what a fit says of all that they meet there."""

    form: NoisyBilinear
    """The cells: their levels, and what is known of noise and cut points. Sides, and latent noise and cut points, play
    no part."""
    person: Array
    """New vector of each cell, shape ``(num_cells,)``."""
    prior: Moments
    """Prior of the new vectors, shape ``(num_new, size)``."""
    coefficient: Moments
    """Weights of the components of the new vector in the predictor, shape ``(num_cells, size)``."""
    offset: Moments
    """Rest of the predictor, shape ``(num_cells,)``."""
    noise: Array
    """Noise variance of each cell, but for the factors that new vectors have."""
    held_cuts: Moments | None
    """Latent cut points that the other side has, shape ``(num_cells, num_boundaries)``."""
    own_cuts: Moments | None
    """Prior of those that each new vector has, shape ``(num_new, num_boundaries)``."""
    own_noise: tuple[GammaMessage, ...]
    """Priors of noise precisions that each new vector has, shape ``(num_new,)`` each."""

    @property
    def num_levels(self) -> int:
        return self.form.thresholds.shape[1] + 1


class NewState(NamedTuple):
    """Posterior of the new vectors, and the messages of the observed cells, in slots of each vector."""

    vectors: Moments
    """Means, and covariances of shape ``(num_new, size, size)``."""
    noise: tuple[GammaMessage, ...]
    """Posteriors of the precisions of the new vectors' noise."""
    cuts: Moments | None
    """Cut points of each cell, shape ``(num_cells, num_boundaries)``; ``None`` where they are known."""
    levels: Levels | None = None
    """Messages of the observed cells; ``None`` where another fit has found the posterior."""


def known(met: Met, vectors: Moments) -> NewState:
    """State at a posterior of the new vectors, with the noise and the cut points that ``met`` says they have."""
    cuts = met.held_cuts
    if met.own_cuts is not None:
        cuts = Moments(*(x[met.person] for x in met.own_cuts))
    return NewState(vectors, met.own_noise, _with_thresholds(met, cuts))


@jax.jit
def start(met: Met, cells: Array) -> NewState:
    """State before the first cell is observed.

    :param Met met: the new vectors.
    :param cells: in slots, shape ``(num_new, num_slots)``.
    """
    form = _form(met, cells, jnp.zeros(cells.shape, bool))
    vectors = Moments(met.prior.mean, as_matrices(met.prior.variance))
    product = as_message(_predictor(met, vectors, cells.reshape(-1)))
    none = nothing(product.shift)
    scales = tuple(GammaMessage(*none) for _ in form.scales)
    moments = Moments(mean_of(product), 1.0 / product.precision)
    value = as_message(moments._replace(variance=moments.variance + noise_variances(form, scales)))
    return known(met, vectors)._replace(levels=Levels(cut_points.init(form), value, none, product, scales))


@partial(jax.jit, static_argnames=("rule",))
def learned(
    met: Met, state: NewState, cells: Array, is_used: Array, tol: Array, *, rule: Rule
) -> tuple[NewState, Array]:
    """The posterior of the new vectors given the cells in use, from the messages of an earlier call.

    :param Met met: the new vectors.
    :param NewState state: to start from; slots that were in use have the same cells.
    :param cells: in slots, shape ``(num_new, num_slots)``.
    :param is_used: in that shape.
    :param tol: change of a mean in its standard deviations, without damping, at which iterations end.
    :param str rule: see :func:`.noise.step`.
    :return: the state, and the change of each vector in the last iteration, shape ``(num_new,)``.

    Cost: some ten to thirty iterations over the slots, with a Cholesky factorisation of each vector's precision.
    """
    form = _form(met, cells, is_used)
    flat, used = cells.reshape(-1), is_used.reshape(-1)
    damping = jnp.asarray(_DAMPING, met.noise.dtype)

    def advance(carry: tuple[Moments, Levels, Array, Array]) -> tuple[Moments, Levels, Array, Array]:
        vectors, before, _, count = carry
        cuts, factor, scales, _ = levels_heard(form, before, damping, damping, rule=rule)
        factor = _where_used(used, factor)
        moved, cavity = _solved(met, vectors, flat, factor)
        product = damped(before.product, as_message(cavity), damping)
        below = Moments(mean_of(product), 1.0 / product.precision)
        noise = noise_variances(form, scales, of_cavities=True)
        value = damped(before.value, as_message(below._replace(variance=below.variance + noise)), damping)
        after = Levels(cuts, value, factor, product, scales)
        return moved, after, _changes(met, form, (vectors, before), (moved, after)) / damping, count + 1

    def proceed(carry: tuple[Moments, Levels, Array, Array]) -> Array:
        return (carry[3] < _MOST_STEPS) & ~jnp.all(carry[2] < tol)

    assert state.levels is not None
    begin = state.vectors, state.levels, jnp.full(len(cells), jnp.inf, met.noise.dtype), jnp.asarray(0)
    vectors, levels, change, _ = lax.while_loop(proceed, advance, begin)
    # what slots out of use have heard was of no cell
    said = levels.cuts._replace(
        value=_where_used(used, levels.cuts.value), boundary=_where_used(used, levels.cuts.boundary)
    )
    levels = levels._replace(cuts=said, scales=tuple(_where_used(used, scale) for scale in levels.scales))
    return _answers(met, form, vectors, levels), change


@jax.jit
def log_evidence(met: Met, state: NewState, cells: Array, is_used: Array) -> Array:
    """Estimates of the log probability of the levels of each new vector, shape ``(num_new,)``.

    Those of expectation propagation for the vectors, at the modes of all noise. They are no bounds.

    :param NewState state: from :func:`learned`, with the same cells.
    """
    assert state.levels is not None
    flat, (shift, precision) = cells.reshape(-1), state.levels.factor
    vectors, _ = _solved(met, state.vectors, flat, state.levels.factor)
    cavity, cuts, noise, level = seen_without_own(met, state, cells)
    own = jnp.take_along_axis(cut_points.level_probabilities(cavity, cuts, noise), level[:, None], 1)[:, 0]
    rest, center = _rest(met, state.vectors, flat), met.offset.mean[flat]
    # of each factor: what it is of a predictor with its mean at a vector of zero, which the vectors go on from
    values = jnp.log(own) + _log_mean(center, rest, shift, precision) - _log_mean(*cavity, shift, precision)
    value = jnp.sum(jnp.where(is_used.reshape(-1), values, 0.0).reshape(is_used.shape), 1)

    mean, spread = met.prior
    pull = jnp.linalg.solve(vectors.variance, vectors.mean[..., None])[..., 0]
    value += 0.5 * jnp.sum(pull * vectors.mean - mean**2 / spread - jnp.log(spread), 1)
    return value + jnp.sum(jnp.log(jnp.diagonal(cholesky(vectors.variance), axis1=1, axis2=2)), 1)


def seen_without_own(met: Met, state: NewState, cells: Array) -> tuple[Moments, Moments, Array, Array]:
    """Predictors of cells in slots without what their own levels say, cut points, noise variances, and the levels."""
    assert state.levels is not None
    flat = cells.reshape(-1)
    cavity = _solved(met, state.vectors, flat, state.levels.factor)[1]
    noise, cuts = (jax.tree.map(lambda x: x[flat], found) for found in _noise_and_cuts(met, state))
    return cavity, cuts, noise, jnp.clip(met.form.label[flat], 0, met.num_levels - 1)


def _log_mean(mean: Array, variance: Array, shift: Array, precision: Array) -> Array:
    """Logs of the expectations of ``exp(shift x - precision x**2 / 2)`` over Gaussian numbers."""
    wider = 1.0 + variance * precision
    return 0.5 * ((2.0 * mean * shift + variance * shift**2 - mean**2 * precision) / wider - jnp.log(wider))


@jax.jit
def predictive(met: Met, state: NewState) -> Array:
    """Probabilities of all levels in each cell, in closed form, shape ``(num_cells, num_levels)``."""
    numbers = jnp.arange(met.person.shape[0])
    return _probabilities(met, state, _predictor(met, state.vectors, numbers))


@jax.jit
def information(met: Met, state: NewState, white: Array, weights: Array) -> Array:
    """Information of each cell about the vector of its person: entropies of levels less those given the vector.

    Vectors are taken at points, their means plus a root of their covariance times ``white``; all else is integrated
    out at each point. The first entropy is that of the mean over the points. It is zero for a single point: then it is
    that of :func:`predictive`.

    :param white: shape ``(num_points, size)``.
    :param weights: of the points, shape ``(num_points,)``.
    :return: shape ``(num_cells,)``, in nats; levels of a point have single precision, errors of about ``1e-6``.

    Cost: for each cell and point a normal distribution function for each boundary, and a log for each level.
    """
    mean, covariance = state.vectors
    vectors = mean + jnp.einsum("pij,sj->spi", cholesky(covariance), white)
    noise, cuts = _noise_and_cuts(met, state)
    num = met.person.shape[0]
    is_single = white.shape[0] == 1

    def of_block(numbers: Array) -> Array:
        person, coefficient, offset = jax.tree.map(lambda x: x[numbers], (met.person, met.coefficient, met.offset))
        # level by level, so that all of a point is one loop over the cells
        boundaries = [
            (cuts.mean[numbers, k], (noise + cuts.variance[:, k])[numbers]) for k in range(cuts.mean.shape[1])
        ]

        def add(total: tuple[Levelwise, Array], point: tuple[Array, Array]) -> tuple[tuple[Levelwise, Array], None]:
            u = point[0][person]
            at = offset.mean + jnp.sum(coefficient.mean * u, 1)
            spread = offset.variance + jnp.sum(coefficient.variance * u**2, 1)
            passed = [jnp.zeros(numbers.shape, jnp.float32)]
            for cut, width in boundaries:
                zeta = (at - cut) * lax.rsqrt(2.0 * (spread + width))
                passed.append(jnp.maximum(passed[-1], 0.5 * lax.erfc(zeta.astype(jnp.float32))))
            found = [y - x for x, y in pairwise([*passed, jnp.ones_like(passed[0])])]
            mixture = tuple(x + point[1] * y for x, y in zip(total[0], found, strict=True))
            return (mixture, total[1] + point[1] * _entropy(found)), None

        blank = jnp.zeros(numbers.shape, mean.dtype)
        (mixture, conditional), _ = lax.scan(add, ((blank,) * (len(boundaries) + 1), blank), (vectors, weights))
        return -conditional if is_single else _entropy(mixture) - conditional

    size = min(_BLOCK, num)
    numbers = jnp.minimum(jnp.arange(-(-num // size) * size), num - 1).reshape(-1, size)
    found = lax.map(of_block, numbers).reshape(-1)[:num]
    return found + _entropy(jnp.moveaxis(predictive(met, state), 1, 0)) if is_single else found


Levelwise = tuple[Array, ...]


def _entropy(levels: Iterable[Array]) -> Array:
    """Entropy of probabilities, given level by level."""
    tiny = [(p, jnp.finfo(p.dtype).tiny) for p in levels]
    return -sum((p * jnp.log(jnp.maximum(p, least)) for p, least in tiny), start=jnp.zeros(()))


def _probabilities(met: Met, state: NewState, predictor: Moments) -> Array:
    noise, cuts = _noise_and_cuts(met, state)
    return cut_points.level_probabilities(predictor, cuts, noise)


def _noise_and_cuts(met: Met, state: NewState) -> tuple[Array, Moments]:
    """Variance of the noise of each cell at its mode, and its cut points."""
    noise = met.noise
    for gamma in state.noise:
        noise = noise * (gamma.rate / (gamma.shape + 1.0))[met.person]
    thresholds = met.form.thresholds
    return noise, Moments(thresholds, jnp.zeros_like(thresholds)) if state.cuts is None else state.cuts


_Messages = TypeVar("_Messages", Message, GammaMessage)


def _where_used(used: Array, messages: _Messages) -> _Messages:
    """Messages of the slots that are in use, and nothing of the others."""
    return jax.tree.map(lambda x: jnp.where(used.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0), messages)


def _form(met: Met, cells: Array, is_used: Array) -> NoisyBilinear:
    """The slots as cells, each with its own copies of what the other side has.

    Slots that are not in use also have copies of what new vectors have, so that these do not hear of them.
    """
    flat, num = cells.reshape(-1), cells.size
    owner = jnp.where(
        is_used.reshape(-1), jnp.repeat(jnp.arange(len(cells)), cells.shape[1]), len(cells) + jnp.arange(num)
    )

    def copied(x: Array) -> Array:
        return jnp.concatenate([x, x[met.person[flat]]])

    scales = tuple(Scale(owner, copied(gamma.shape), copied(gamma.rate)) for gamma in met.own_noise)
    num_boundaries = met.num_levels - 1
    places = jnp.arange(num_boundaries)
    cuts = None
    if met.held_cuts is not None:
        mean, variance = (x[flat].reshape(-1) for x in met.held_cuts)
        element = num_boundaries * jnp.arange(num)[:, None] + places
        cuts = Cuts(element, mean, variance, None, mean[:0], mean[:0])
    elif met.own_cuts is not None:
        mean, variance = (copied(x).reshape(-1) for x in met.own_cuts)
        cuts = Cuts(num_boundaries * owner[:, None] + places, mean, variance, None, mean[:0], mean[:0])
    label, thresholds = met.form.label[flat], met.form.thresholds[flat]
    return met.form._replace(label=label, noise=met.noise[flat], thresholds=thresholds, scales=scales, cuts=cuts)


def _answers(met: Met, form: NoisyBilinear, vectors: Moments, levels: Levels) -> NewState:
    """State of the new vectors, from the messages of the cells in use."""
    num = met.prior.mean.shape[0]
    noise = tuple(
        GammaMessage(*(x[:num] for x in gamma_of(scale, said, of_groups=True)))
        for scale, said in zip(form.scales, levels.scales, strict=True)
    )
    cuts = met.held_cuts
    if met.own_cuts is not None:
        elements = cut_points.posterior(form, levels.cuts)[0]
        cuts = Moments(*(x.reshape(-1, met.num_levels - 1)[met.person] for x in elements))
    return NewState(vectors, noise, _with_thresholds(met, cuts), levels)


def _with_thresholds(met: Met, cuts: Moments | None) -> Moments | None:
    return None if cuts is None else cuts._replace(mean=cuts.mean + met.form.thresholds)


def _predictor(met: Met, vectors: Moments, cells: Array) -> Moments:
    """Moments of the predictors of some cells."""
    mean, covariance = (x[met.person[cells]] for x in vectors)
    at, spread = (x[cells] for x in met.coefficient)
    own = jnp.einsum("ni,nij,nj->n", at, covariance, at)
    return Moments(met.offset.mean[cells] + jnp.sum(at * mean, 1), own + _rest(met, vectors, cells))


def _rest(met: Met, vectors: Moments, cells: Array) -> Array:
    """Variance of the predictors of some cells that is not of the new vector, but of what multiplies it."""
    mean, covariance = vectors
    square = mean**2 + jnp.diagonal(covariance, axis1=1, axis2=2)
    return met.offset.variance[cells] + jnp.sum(met.coefficient.variance[cells] * square[met.person[cells]], 1)


def _solved(met: Met, vectors: Moments, cells: Array, factor: Message) -> tuple[Moments, Moments]:
    """Vectors given what factors say of the predictors of cells in slots, and predictors without what their own says.

    What multiplies a vector is uncertain, and a part of the noise, as large as the vectors are expected to be.
    """
    num, size = met.prior.mean.shape
    rest, center = _rest(met, vectors, cells), met.offset.mean[cells]
    heard = 1.0 / (1.0 + rest * factor.precision)
    precision, shift = factor.precision * heard, (factor.shift - factor.precision * center) * heard
    at = met.coefficient.mean[cells].reshape(num, -1, size)
    total = jnp.einsum("psi,ps,psj->pij", at, precision.reshape(num, -1), at)
    wide = _said_by_width(met, vectors, cells, precision, shift)
    diagonal = (1.0 + jnp.maximum(wide * met.prior.variance, _LEAST_OF_PRIOR - 1.0)) / met.prior.variance
    total += as_matrices(diagonal)
    pull = met.prior.mean / met.prior.variance + jnp.einsum("psi,ps->pi", at, shift.reshape(num, -1))
    identity = jnp.broadcast_to(jnp.eye(size, dtype=at.dtype), total.shape)
    root = solve_lower(cholesky(total), identity)
    covariance = jnp.swapaxes(root, 1, 2) @ root
    mean = jnp.einsum("pij,pj->pi", covariance, pull)
    variance = jnp.einsum("psi,pij,psj->ps", at, covariance, at).reshape(-1)
    own = jnp.einsum("psi,pi->ps", at, mean).reshape(-1)
    left = jnp.maximum(1.0 - variance * precision, jnp.finfo(at.dtype).eps)
    cavity = Moments(center + (own - variance * shift) / left, variance / left + rest)
    return Moments(mean, covariance), cavity


def _said_by_width(met: Met, vectors: Moments, cells: Array, precision: Array, shift: Array) -> Array:
    """Precisions of vectors that say how wide the uncertainty of what multiplies them makes predictors.

    To first order in that width. Levels that are far from predictors say that it is larger, and so do large vectors.
    """
    num, size = met.prior.mean.shape
    mean, covariance = (x[met.person[cells]] for x in vectors)
    at = met.coefficient.mean[cells]
    square = (shift - precision * jnp.sum(at * mean, 1)) ** 2
    square += precision**2 * jnp.einsum("ni,nij,nj->n", at, covariance, at)
    return jnp.sum(((precision - square)[:, None] * met.coefficient.variance[cells]).reshape(num, -1, size), 1)


def _changes(met: Met, form: NoisyBilinear, before: tuple[Moments, Levels], after: tuple[Moments, Levels]) -> Array:
    """Largest change of a mean of each new vector, its noise or its cut points, in standard deviations."""
    (old, said_before), (new, said) = before, after
    num = len(new.mean)
    found = [jnp.abs(new.mean - old.mean) / jnp.sqrt(jnp.diagonal(new.variance, axis1=1, axis2=2))]
    for scale, x, y in zip(form.scales, said_before.scales, said.scales, strict=True):
        (a, b), (c, d) = (gamma_of(scale, m, of_groups=True) for m in (x, y))
        found.append((jnp.abs(jnp.log(d / c * a / b)) * jnp.sqrt(c))[:num, None])
    if form.cuts is not None:
        last, own = (cut_points.posterior(form, levels.cuts)[0] for levels in (said_before, said))
        moved = (jnp.abs(own.mean - last.mean) / jnp.sqrt(own.variance)).reshape(-1, met.num_levels - 1)
        found.append(moved.reshape(num, -1) if met.own_cuts is None else moved[:num])
    every = jnp.concatenate(found, axis=1)
    return jnp.max(jnp.where(jnp.isnan(every), jnp.inf, every), axis=1)
