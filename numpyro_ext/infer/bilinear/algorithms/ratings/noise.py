r"""Expectation propagation for ordered categories whose noise and cut points are latent (Houlsby 2014, chapter 7).

Each cell has a predictor :math:`c = u^\top v`, a noisy value :math:`a \sim N(c, \gamma_r \gamma_s)`, and a category
that says between which cut points the value lies. Values, predictors, cut points and prior means have Gaussians of
their own, variances inverse gammas. Steps at boundaries are matched exactly (:mod:`.cuts`), products and the priors of
their vectors by variational Bayes (:mod:`.hybrid`, :mod:`.side_hyper`); the noise factor is met at a point value of
the variance where it sends to Gaussians, and by one of four rules where it sends to a variance.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from .....potentials.families.ordinal import CumulativeProbitPotential
from .....structure.bilinear.form import Bilinear, GaussianSide
from .....structure.bilinear.noisy.form import NoisyBilinear
from .. import hybrid
from ..messages import Message, Moments, as_message, damped, divided, mean_of, nothing, times
from . import cuts as cut_points
from .cuts import CutState
from .side_hyper import SidePosterior, prior_at_points, prior_message, rescaled, side_start, updated_side
from .variances import GammaMessage, Rule, gamma_of, updated_gammas

ALL_SWEEPS, FEW_SWEEPS = 10, 3
"""Sweeps of variational Bayes in an iteration: after all of them the vectors have next to nothing left to move. The
factors hear of the vectors, and where these go all their way each time, both may chase each other for ever."""
_LEAST_SHARE = 0.2
"""Share of the prior precision of a predictor that is left at least, once the message of its factor is taken out."""
_VISITS = 3
"""Visits of boundaries in each iteration: they cost little and are slow to settle."""


class NoiseState(NamedTuple):
    """Messages of all factors, and posteriors of the priors of both sides."""

    cuts: CutState
    value: Message
    """From the noise factor to the value of each cell, shape ``(num_cells,)``."""
    factor: Message
    """From the noise factor to the predictor of each cell."""
    product: Message
    """From the products to the predictors."""
    rows: hybrid.SideState
    columns: hybrid.SideState
    scales: tuple[GammaMessage, ...]
    """From the noise factor of each cell to each of its variances."""
    sides: tuple[SidePosterior, SidePosterior]


class Levels(NamedTuple):
    """Messages between the levels of cells, cut points, noise and predictors; see :class:`NoiseState`."""

    cuts: CutState
    value: Message
    factor: Message
    product: Message
    scales: tuple[GammaMessage, ...]


class NoiseInfo(NamedTuple):
    """Outcome of one iteration."""

    change: Array
    """Largest change of a mean in its standard deviations, had the step not been damped."""
    num_skipped: Array
    """Messages that stayed as they were, as the new ones would have been no densities."""
    num_limited: Array
    """Variances of noise that went only a part of their way."""


def init(form: NoisyBilinear, rows: Moments, columns: Moments) -> NoiseState:
    """Messages before the first iteration.

    :param NoisyBilinear form: the model.
    :param Moments rows: where variational Bayes starts for the rows; not at zero, which is a saddle.
    :param Moments columns: of the columns.
    """
    sides = tuple(side_start(side) for side in form.sides)
    priors = [prior_message(side, own) for side, own in zip(form.sides, sides, strict=True)]
    states = [
        hybrid.SideState(seen, prior, nothing(seen.mean)) for seen, prior in zip((rows, columns), priors, strict=True)
    ]
    moments = (Moments(mean_of(prior), 1.0 / prior.precision) for prior in priors)
    mean, variance = hybrid.predictor_moments(form.cells, *moments)
    none = nothing(mean)
    scales = tuple(GammaMessage(none.shift, none.shift) for _ in form.scales)
    total = variance + noise_variances(form, scales)
    return NoiseState(
        cut_points.init(form),
        as_message(Moments(mean, total)),
        none,
        as_message(Moments(mean, variance)),
        states[0],
        states[1],
        scales,
        (sides[0], sides[1]),
    )


def noise_variances(form: NoisyBilinear, scales: tuple[GammaMessage, ...], *, of_cavities: bool = False) -> Array:
    """The noise variance of each cell at the modes of its variances.

    :param scales: messages of the cells to the variances.
    :param bool of_cavities: whether the cell's own message is left out.
    """
    found = form.noise
    for scale, messages in zip(form.scales, scales, strict=True):
        gamma = gamma_of(scale, messages, of_cavities=of_cavities)
        found = found * (gamma.rate / (gamma.shape + 1.0))
    return found


def step(
    form: NoisyBilinear,
    state: NoiseState,
    damping: Array,
    learns_noise: Array,
    *,
    rule: Rule,
    num_sweeps: Array | int = ALL_SWEEPS,
) -> tuple[NoiseState, NoiseInfo]:
    """One iteration: boundaries, noise, products, priors.

    :param NoisyBilinear form: the model.
    :param NoiseState state: before it.
    :param damping: share of new messages, in (0, 1].
    :param learns_noise: false while variances of the noise keep their priors.
    :param str rule: by which messages to variances are made.
    :param num_sweeps: of variational Bayes.

    Cost: a pass over the cells for each sweep of variational Bayes; for each cell and boundary a normal distribution
    function, and with ``"quadrature"`` 80 exponentials or logs for each cell and variance.
    """
    levels = Levels(state.cuts, state.value, state.factor, state.product, state.scales)
    cuts, factor, scales, (skipped, limited) = levels_heard(form, levels, damping, damping * learns_noise, rule=rule)
    rows, columns = hybrid.swept(form.cells, factor, state.rows, state.columns, num_sweeps=num_sweeps)
    mean, variance = hybrid.predictor_moments(form.cells, rows.seen, columns.seen)
    new_product = without_factor(form.cells, Moments(mean, variance), factor, rows.prior, columns.prior)
    product = damped(state.product, new_product, damping)
    below = Moments(mean_of(product), 1.0 / product.precision)
    noise = noise_variances(form, scales, of_cavities=True)
    value = damped(state.value, as_message(below._replace(variance=below.variance + noise)), damping)

    before, seen = rescaled(form.sides, state.sides, (rows.seen, columns.seen), _is_silent(form.cells))
    sides, blocks = [], []
    for hyper, old, own in zip(form.sides, before, seen, strict=True):
        sides.append(updated_side(hyper, old, own))
        moved = hybrid.from_cells(hybrid.SideState(own, prior_message(hyper, old), nothing(own.mean)), 1.0)
        blocks.append(moved._replace(prior=prior_message(hyper, sides[-1])))
    new = NoiseState(cuts, value, factor, product, blocks[0], blocks[1], scales, (sides[0], sides[1]))
    number = skipped + jnp.sum(~(new_product.precision > 0.0))
    return new, NoiseInfo(_change(form, state, new) / damping, number, limited)


def levels_heard(
    form: NoisyBilinear, state: Levels, damping: Array, damping_of_noise: Array, *, rule: Rule
) -> tuple[CutState, Message, tuple[GammaMessage, ...], tuple[Array, Array]]:
    """Messages of the levels to cut points, predictors and variances of noise.

    :param NoisyBilinear form: the model, whose products play no part.
    :param state: before.
    :param damping: share of new messages.
    :param damping_of_noise: the same of those to variances.
    :param str rule: by which messages to variances are made.
    :return: messages about boundaries, to predictors and to variances; how many stayed as they were, and how many
        variances went a part of their way.
    """
    cuts, skipped = cut_points.update(form, state.cuts, state.value, damping, num_visits=_VISITS)
    said = Message(jnp.sum(cuts.value.shift, 1), jnp.sum(cuts.value.precision, 1))
    has_said = said.precision > 0.0
    precision = jnp.where(has_said, said.precision, 1.0)
    above = Moments(said.shift / precision, 1.0 / precision)
    below = Moments(mean_of(state.product), 1.0 / state.product.precision)
    noise = noise_variances(form, state.scales, of_cavities=True)
    to_predictor = as_message(above._replace(variance=above.variance + noise))
    to_predictor = Message(*(jnp.where(has_said, x, y) for x, y in zip(to_predictor, state.factor, strict=True)))
    factor = damped(state.factor, to_predictor, damping, may_vanish=True)
    scales, skipped_scales, limited = updated_gammas(
        form, state.scales, above, below, noise, has_said, damping_of_noise, rule=rule
    )
    return cuts, factor, scales, (skipped + skipped_scales, limited)


def without_factor(
    cells: Bilinear, predictor: Moments, factor: Message, row_prior: Message, column_prior: Message
) -> Message:
    """Messages of the products to the predictors: the moments of variational Bayes without what the factors say.

    Without a cell its predictor is no less certain than under the prior. But the variances of variational Bayes are too
    small, so that next to nothing is left of a cell that has drawn its vectors along. The message would lie anywhere,
    and the noise, which explains the cell, and the product would chase each other for ever; so a share of the prior
    precision is left at least.
    """
    left = divided(as_message(predictor), factor)
    rows, columns = (Moments(mean_of(prior), 1.0 / prior.precision) for prior in (row_prior, column_prior))
    least = _LEAST_SHARE / hybrid.predictor_moments(cells, rows, columns)[1]
    return left._replace(precision=jnp.maximum(left.precision, least))


def _is_silent(cells: Bilinear) -> Array:
    """For each component that is multiplied with one of the other side, whether no cell sees it otherwise."""
    num = cells.coupling.shape[-1]
    found = jnp.ones(num, bool)
    for linear in (cells.row_linear, cells.column_linear):
        if linear.shape[-1]:
            found &= jnp.all(linear[:, :num] == 0.0, 0)
    return found


def _change(form: NoisyBilinear, before: NoiseState, after: NoiseState) -> Array:
    """Largest change of a mean between two states, in standard deviations."""
    own, old = (times(s.factor, s.product) for s in (after, before))
    found = [jnp.abs(mean_of(own) - mean_of(old)) * jnp.sqrt(own.precision)]

    def add_gaussian(new: Moments, start: Moments) -> None:
        found.append(jnp.abs(new.mean - start.mean) / jnp.sqrt(new.variance))

    def add_gamma(new: GammaMessage, start: GammaMessage) -> None:
        found.append(jnp.abs(jnp.log(new.rate / new.shape * start.shape / start.rate)) * jnp.sqrt(new.shape))

    for scale, new, start in zip(form.scales, after.scales, before.scales, strict=True):
        add_gamma(gamma_of(scale, new, of_groups=True), gamma_of(scale, start, of_groups=True))
    if form.cuts is not None:
        add_gaussian(*(cut_points.posterior(form, s.cuts)[0] for s in (after, before)))
    for side, side_before in zip(after.sides, before.sides, strict=True):
        add_gaussian(side.mean, side_before.mean)
        add_gamma(side.precision, side_before.precision)
    largest = [jnp.max(jnp.where(jnp.isnan(x), jnp.inf, x), initial=0.0) for x in found]
    return jnp.max(jnp.stack(largest))


def at_points(form: NoisyBilinear, state: NoiseState) -> tuple[Bilinear, hybrid.HybridState]:
    """The model with noise, cut points and priors of the sides held at their posterior modes and means, whose noise is
    that of the likelihood, and the messages in its units."""
    noise = noise_variances(form, state.scales)
    root = jnp.sqrt(noise)[:, None]
    thresholds = form.thresholds
    if form.cuts is not None:
        thresholds = thresholds + cut_points.posterior(form, state.cuts)[0].mean[form.cuts.element]
    priors = [prior_at_points(side, messages) for side, messages in zip(form.sides, state.sides, strict=True)]
    cells = form.cells
    scaled = (x / root if x.shape[-1] else x for x in (cells.coupling, cells.row_linear, cells.column_linear))
    coupling, row_linear, column_linear = scaled
    point = cells._replace(
        rows=GaussianSide(priors[0].mean, 1.0 / priors[0].variance),
        columns=GaussianSide(priors[1].mean, 1.0 / priors[1].variance),
        coupling=coupling,
        row_linear=row_linear,
        column_linear=column_linear,
        offset=cells.offset / root[:, 0],
        potential=CumulativeProbitPotential(form.label, thresholds / root),
    )
    factor, product = (Message(m.shift * root[:, 0], m.precision * noise) for m in (state.factor, state.product))
    rows, columns = (
        block._replace(prior=as_message(prior))
        for block, prior in zip((state.rows, state.columns), priors, strict=True)
    )
    return point, hybrid.HybridState(factor, product, rows, columns)
