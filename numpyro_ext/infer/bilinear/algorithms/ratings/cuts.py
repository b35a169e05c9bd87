"""Expectation propagation for cut points: one step for each boundary of each cell, and their Gaussian priors."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import ndtr
from jax.typing import ArrayLike

from .....potentials.integrals.normal import truncated_normal
from .....potentials.integrals.normal_interval import normal_interval
from .....structure.bilinear.noisy.form import Cuts, NoisyBilinear
from ..messages import Message, Moments, as_message, damped, divided, mean_of, nothing, times


class StepMessages(NamedTuple):
    """Outcome of one comparison of two Gaussian numbers."""

    log_z: Array
    """Log probability of the order that was seen."""
    first: Message
    """Message of the comparison to the first number."""
    second: Message


class CutState(NamedTuple):
    """Messages about boundaries and about what lies between them, shape ``(num_cells, num_boundaries)`` each."""

    value: Message
    """From each step to the value that is compared; of known cut points one for each cell, shape ``(num_cells, 1)``."""
    boundary: Message
    """From each step to its boundary."""
    prior: Message
    """From the prior to each element of the cut points, shape ``(num_elements,)``."""
    parent: Message
    """From each element to its prior mean."""


def step_messages(sign: ArrayLike, first: Moments, second: Moments) -> StepMessages:
    """Messages of ``sign (a - b) > 0`` to independent Gaussian ``a`` and ``b``, in closed form.

    :param sign: one or minus one.
    :param Moments first: of ``a``.
    :param Moments second: of ``b``.
    """
    total = first.variance + second.variance
    root = jnp.sqrt(total)
    sign = jnp.asarray(sign)
    z = sign * (first.mean - second.mean) / root
    found = truncated_normal(z)
    shift, shrink = sign * found.ratio / root, found.shrinkage / total

    def message(own: Moments, shift: Array) -> Message:
        # Never as a quotient of the new moments by the old, which rounds to a negative precision where z is large.
        left = 1.0 - own.variance * shrink
        return Message((shift + own.mean * shrink) / left, shrink / left)

    return StepMessages(found.log_mass, message(first, shift), message(second, -shift))


def init(form: NoisyBilinear) -> CutState:
    """Messages before the first iteration: none from the steps, the prior to the boundaries."""
    if form.cuts is None:
        none = nothing(form.thresholds[:, :1])
        return CutState(none, none, nothing(jnp.zeros((0,))), nothing(jnp.zeros((0,))))
    mean, variance = form.cuts.mean, form.cuts.variance
    if form.cuts.parent is not None:
        mean = mean + form.cuts.parent_mean[form.cuts.parent]
        variance = variance + form.cuts.parent_variance[form.cuts.parent]
    steps = nothing(form.thresholds)
    return CutState(steps, steps, as_message(Moments(mean, variance)), nothing(mean))


def boundaries(form: NoisyBilinear, state: CutState) -> Message:
    """Product of the messages of all steps to each element of the cut points."""
    assert form.cuts is not None
    index, num = form.cuts.element.reshape(-1), form.cuts.mean.shape[0]
    return Message(*(jax.ops.segment_sum(x.reshape(-1), index, num) for x in state.boundary))


def posterior(form: NoisyBilinear, state: CutState) -> tuple[Moments, Moments | None]:
    """Moments of the elements of the cut points, and of their prior means where these are latent."""
    cuts = form.cuts
    assert cuts is not None
    own = times(boundaries(form, state), state.prior)
    elements = Moments(mean_of(own), 1.0 / own.precision)
    if cuts.parent is None:
        return elements, None
    total = _of_parents(cuts, state)
    return elements, Moments(mean_of(total), 1.0 / total.precision)


def _of_parents(cuts: Cuts, state: CutState) -> Message:
    assert cuts.parent is not None
    num = cuts.parent_mean.shape[0]
    own = as_message(Moments(cuts.parent_mean, cuts.parent_variance))
    return times(own, Message(*(jax.ops.segment_sum(x, cuts.parent, num) for x in state.parent)))


def update(
    form: NoisyBilinear, state: CutState, value: Message, damping: Array, *, num_visits: int
) -> tuple[CutState, Array]:
    """Visits of all steps and of the priors of the boundaries.

    :param Message value: what all else says of the value of each cell, shape ``(num_cells,)``.
    :param damping: share of new messages.
    :param int num_visits: how many.
    :return: the messages, and how many steps kept theirs in the last visit, as the new ones would have been no
        Gaussians.
    """
    if form.cuts is None:
        found = state, jnp.asarray(0)
        return lax.fori_loop(0, num_visits, lambda _, found: _update_known(form, found[0], value, damping), found)
    # the products of all steps are summed once for the priors and for the next visit
    start = state, boundaries(form, state), jnp.asarray(0)
    state, _, skipped = lax.fori_loop(
        0, num_visits, lambda _, found: _visit(form, found[0], found[1], value, damping), start
    )
    return state, skipped


def _visit(
    form: NoisyBilinear, state: CutState, said: Message, value: Message, damping: Array
) -> tuple[CutState, Message, Array]:
    """One visit, given the products of the messages of all steps to each element, and returning them."""
    assert form.cuts is not None
    num_boundaries = form.thresholds.shape[-1]
    sign = jnp.where(form.label[:, None] > jnp.arange(num_boundaries), 1.0, -1.0)
    seen = Message(*(x[:, None] + jnp.sum(y, 1, keepdims=True) for x, y in zip(value, state.value, strict=True)))
    first = divided(seen, state.value)
    elements = times(said, state.prior)
    second = divided(Message(*(x[form.cuts.element] for x in elements)), state.boundary)
    is_sound = (first.precision > 0.0) & (second.precision > 0.0)

    def sound(message: Message) -> Moments:
        precision = jnp.where(is_sound, message.precision, 1.0)
        return Moments(message.shift / precision, 1.0 / precision)

    a, b = sound(first), sound(second)
    found = step_messages(sign, a, b._replace(mean=b.mean + form.thresholds))
    new_value = found.first
    new_boundary = found.second._replace(shift=found.second.shift - found.second.precision * form.thresholds)
    is_valid = is_sound & jnp.isfinite(new_value.shift) & jnp.isfinite(new_boundary.shift)

    def moved(old: Message, new: Message) -> Message:
        return Message(*(jnp.where(is_valid, x + damping * (y - x), x) for x, y in zip(old, new, strict=True)))

    state = state._replace(value=moved(state.value, new_value), boundary=moved(state.boundary, new_boundary))
    said = boundaries(form, state)
    return _with_priors(form, state, said, damping), said, jnp.sum(~is_valid)


def _with_priors(form: NoisyBilinear, state: CutState, said: Message, damping: Array) -> CutState:
    """Messages between the elements of the cut points, given those of all steps, and their prior means."""
    cuts = form.cuts
    assert cuts is not None
    if cuts.parent is None:
        return state
    has_said = said.precision > 0.0
    precision = jnp.where(has_said, said.precision, 1.0)
    up = as_message(Moments(said.shift / precision - cuts.mean, 1.0 / precision + cuts.variance))
    up = Message(*(jnp.where(has_said, x, y) for x, y in zip(up, state.parent, strict=True)))
    state = state._replace(parent=damped(state.parent, up, damping))
    down = divided(Message(*(x[cuts.parent] for x in _of_parents(cuts, state))), state.parent)
    new = as_message(Moments(mean_of(down) + cuts.mean, 1.0 / down.precision + cuts.variance))
    return state._replace(prior=damped(state.prior, new, damping))


def _update_known(form: NoisyBilinear, state: CutState, value: Message, damping: Array) -> tuple[CutState, Array]:
    """One message to each cell from the interval that its category is, where cut points are known."""
    num = form.thresholds.shape[-1]
    ends = jnp.pad(form.thresholds, ((0, 0), (1, 1)), constant_values=((0.0, 0.0), (-jnp.inf, jnp.inf)))
    place = jnp.clip(form.label, 0, num)[:, None]
    lower, upper = (jnp.take_along_axis(ends, place + k, 1)[:, 0] for k in (0, 1))
    is_sound = value.precision > 0.0
    precision = jnp.where(is_sound, value.precision, 1.0)
    root = jnp.sqrt(precision)
    mean = value.shift / precision
    inside = normal_interval((lower - mean) * root, (upper - mean) * root)
    # as differences of the moments lose the digits of wide intervals
    new_precision = precision * inside.shrinkage / inside.variance
    new_shift = (mean + inside.mean / root) * (precision + new_precision) - value.shift
    new = Message(new_shift[:, None], new_precision[:, None])
    is_valid = (is_sound & jnp.isfinite(new_shift))[:, None]
    moved = (jnp.where(is_valid, x + damping * (y - x), x) for x, y in zip(state.value, new, strict=True))
    return state._replace(value=Message(*moved)), jnp.sum(~is_valid)


def level_probabilities(predictor: Moments, cuts: Moments, noise: Array) -> Array:
    r"""Probabilities of all levels, of shape ``(..., num_boundaries + 1)``.

    Each boundary is passed with the probability :math:`\Phi(\zeta_k)` that Gaussian numbers of its moments say. Where
    these probabilities fall from one boundary to the next, as they may where the variances of neighbours differ, the
    largest so far stands in their place: so no level has a negative probability, and all add up to one.

    :param Moments predictor: of shape ``(...,)``.
    :param Moments cuts: boundaries, of shape ``(..., num_boundaries)``.
    :param noise: variance between predictor and value, of shape ``(...,)``.
    """
    total = predictor.variance[..., None] + cuts.variance + noise[..., None]
    zeta = lax.cummax((cuts.mean - predictor.mean[..., None]) / jnp.sqrt(total), axis=cuts.mean.ndim - 1)
    ends = jnp.pad(zeta, [(0, 0)] * (zeta.ndim - 1) + [(1, 1)], constant_values=((-jnp.inf, jnp.inf),))
    lower, upper = ends[..., :-1], ends[..., 1:]
    # On the side where the tail is small, so that differences keep their digits.
    is_right = lower > 0.0
    return jnp.where(is_right, ndtr(-lower) - ndtr(-upper), ndtr(upper) - ndtr(lower))
