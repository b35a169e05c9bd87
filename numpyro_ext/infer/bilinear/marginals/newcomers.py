"""New rows or columns of a fit of ratings: what it knows of all that their cells meet, and what is learned of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....structure.bilinear.form import Bilinear
from ....structure.bilinear.noisy.form import NoiseSites, NoisyBilinear
from ....structure.errors import ModelStructureError
from ...front.running.progress import warn
from ..algorithms.messages import Moments, mean_of
from ..algorithms.ratings import cuts as cut_points
from ..algorithms.ratings import iterations, newcomers, noise
from ..algorithms.ratings.cuts import CutState
from ..algorithms.ratings.newcomers import Met, NewState
from ..algorithms.ratings.noise import NoiseState
from ..algorithms.ratings.side_hyper import prior_message
from ..algorithms.ratings.variances import GammaMessage, Rule, gamma_of

__all__ = ["Fitted", "Newcomers", "with_cells"]

_DAMPING, _MOST_STEPS, _TOL = 0.9, 200, 1e-3


class Fitted(NamedTuple):
    """A fit of ratings: its model, and the messages at its end."""

    form: NoisyBilinear
    sites: NoiseSites
    messages: NoiseState


@dataclass(frozen=True, eq=False)
class Newcomers:
    """Posterior of new vectors of one side after some of their ratings.

    :param Met met: their cells, and what a fit knows of these.
    :param NewState state: what has been learned.
    :param frequencies: for each cell how often each level was seen in the fit with the same vector of the other side,
        shape ``(num_cells, num_levels)``.
    :param int side: 0 if rows are new, 1 if columns are.
    :param chosen: numbers of the new vectors.
    """

    met: Met
    state: NewState | None
    frequencies: np.ndarray
    side: int
    chosen: np.ndarray

    @classmethod
    def of(cls, fitted: Fitted, form: NoisyBilinear, side: int, chosen: np.ndarray) -> Self:
        """Before the first rating; arguments as of :func:`met_by`."""
        met = met_by(fitted, form, side, chosen)
        other, seen = ((f.cells.column_index, f.cells.row_index)[side] for f in (met.form, fitted.form))
        counts = np.zeros(((fitted.form.cells.columns, fitted.form.cells.rows)[side].mean.shape[0], met.num_levels))
        np.add.at(counts, (np.asarray(seen), np.asarray(fitted.form.label)), 1.0)
        return cls(met, None, counts[np.asarray(other)], side, chosen)

    def learned(self, slots: np.ndarray, num_used: int, *, tol: float, rule: Rule) -> Self:
        """After the ratings in the first slots, from where the vectors are, while all else is held.

        :param slots: numbers of cells, shape ``(num_new, num_slots)``.
        :param int num_used: slots with ratings.
        """
        cells, is_used = jnp.asarray(slots), jnp.asarray(np.arange(slots.shape[1]) < num_used)
        before = newcomers.start(self.met, cells) if self.state is None else self.state
        state, change = newcomers.learned(
            self.met, before, cells, jnp.broadcast_to(is_used, cells.shape), jnp.asarray(tol), rule=rule
        )
        if not float(change) < tol:
            warn(
                "The vectors of newcomers have not converged: the largest change of a mean, in standard deviations, is "
                f"{float(change):.2g}, the tolerance {tol:.2g}."
            )
        return dataclasses.replace(self, state=state)

    def of_all(self, fitted: Fitted) -> Self:
        """The same newcomers after a fit that has seen their ratings, as :func:`with_cells` makes it."""
        met = met_by(fitted, self.met.form, self.side, self.chosen, is_fitted=True)
        chosen = jnp.asarray(self.chosen)
        mean, variance = (x[chosen] for x in (fitted.messages.rows, fitted.messages.columns)[self.side].seen)
        vectors = Moments(mean, variance[:, :, None] * jnp.eye(mean.shape[1], dtype=mean.dtype))
        return dataclasses.replace(self, met=met, state=newcomers.known(met, vectors))

    @cached_property
    def predictive(self) -> np.ndarray:
        """Probabilities of all levels in each cell, shape ``(num_cells, num_levels)``."""
        assert self.state is not None
        return np.asarray(newcomers.predictive(self.met, self.state))

    def information(self, white: Array) -> Array:
        """Information in each cell about the vector of its newcomer; see :func:`..newcomers.information`."""
        assert self.state is not None
        weights = jnp.full(white.shape[0], 1.0 / white.shape[0], white.dtype)
        return newcomers.information(self.met, self.state, white, weights)


def with_cells(fitted: Fitted, more: NoisyBilinear, rule: Rule) -> Fitted:
    """A fit that goes on with further cells behind its own.

    :param Fitted fitted: the fit.
    :param NoisyBilinear more: further cells, of the same vectors, noise and cut points.
    :param str rule: see :func:`..noise.step`.
    """
    form, old = fitted.form.joined(more), fitted.messages
    num = fitted.form.label.shape[0]
    new = noise.init(form, old.rows.seen, old.columns.seen)

    def kept(before: object, after: object) -> Any:
        return jax.tree.map(lambda x, y: y.at[:num].set(x), before, after)

    cuts = CutState(
        kept(old.cuts.value, new.cuts.value),
        kept(old.cuts.boundary, new.cuts.boundary) if form.cuts is not None else new.cuts.boundary,
        old.cuts.prior,
        old.cuts.parent,
    )
    start = old._replace(
        cuts=cuts,
        **{name: kept(getattr(old, name), getattr(new, name)) for name in ("value", "factor", "product", "scales")},
    )
    dtype = old.value.shift.dtype
    state = iterations.paced(start, _DAMPING, num_steps=1)
    limits = jnp.asarray(_DAMPING, dtype), jnp.asarray(0), jnp.asarray(_TOL, dtype)
    for _ in range(_MOST_STEPS // iterations.CHUNK):
        state, info, _, _ = iterations.iterate(
            form, state, jnp.asarray(iterations.CHUNK), *limits, rule=rule, chunk=iterations.CHUNK
        )
        if bool(iterations.has_settled(state, info, 0, _TOL)):
            return fitted._replace(form=form, messages=state.messages)
    warn(
        f"The fit of all ratings has not converged in {_MOST_STEPS} iterations: the last changed by {info.change:.2g}."
    )
    return fitted._replace(form=form, messages=state.messages)


def met_by(fitted: Fitted, form: NoisyBilinear, side: int, chosen: np.ndarray, *, is_fitted: bool = False) -> Met:
    """The cells of new vectors of one side, with all else as it was fitted.

    :param Fitted fitted: the fit.
    :param NoisyBilinear form: of the model on other cells, with the other side of the fit.
    :param int side: 0 if rows are new, 1 if columns are.
    :param chosen: numbers of the new vectors, in order; cells of others are left out.
    :param bool is_fitted: whether the fit has seen the new vectors: then their noise and cut points are those of the
        fit, and not their priors.
    :return: with the new vectors in this order.
    :raises ModelStructureError: if noise or cut points belong neither to one side nor to all cells, naming the site.
    """
    rows_or_columns = (form.cells.row_index, form.cells.column_index)[side]
    form = form.taken(jnp.asarray(np.flatnonzero(np.isin(np.asarray(rows_or_columns), chosen))))
    index = [np.asarray(x) for x in (form.cells.row_index, form.cells.column_index)]
    own, other = index[side], index[1 - side]
    person = np.searchsorted(chosen, own)
    first = np.unique(person, return_index=True)[1]
    block = (fitted.messages.rows, fitted.messages.columns)[1 - side].seen
    prior = prior_message(form.sides[side], fitted.messages.sides[side])
    coefficient, offset = _seen_from(form.cells, side, block, jnp.asarray(other))
    noise, own_noise = form.noise, []
    for name, scale, start, said in zip(
        fitted.sites.scales, form.scales, fitted.form.scales, fitted.messages.scales, strict=True
    ):
        group = np.asarray(scale.group)
        if _belongs_to(name, group[:, None], person, other, scale.shape.size == start.shape.size == 1):
            gamma = gamma_of(start, said, of_groups=True) if is_fitted else GammaMessage(scale.shape, scale.rate)
            own_noise.append(GammaMessage(*(x[group[first]] for x in gamma)))
        else:
            gamma = gamma_of(start, said, of_groups=True)
            _check_size(name, gamma.shape, scale.shape)
            noise = noise * (gamma.rate / (gamma.shape + 1.0))[scale.group]
    held_cuts, own_cuts = None, None
    if form.cuts is not None and fitted.sites.cuts is not None:
        elements, parents = cut_points.posterior(fitted.form, fitted.messages.cuts)
        element = np.asarray(form.cuts.element)
        if _belongs_to(
            fitted.sites.cuts, element, person, other, form.cuts.mean.size == elements.mean.size == element.shape[1]
        ):
            prior_cuts = Moments(form.cuts.mean, form.cuts.variance)
            if form.cuts.parent is not None and parents is not None:
                prior_cuts = Moments(*(x + y[form.cuts.parent] for x, y in zip(prior_cuts, parents, strict=True)))
            own_cuts = Moments(*(x[element[first]] for x in (elements if is_fitted else prior_cuts)))
        else:
            _check_size(fitted.sites.cuts, elements.mean, form.cuts.mean)
            held_cuts = Moments(*(x[element] for x in elements))
    vectors = Moments(*(x[jnp.asarray(chosen)] for x in (mean_of(prior), 1.0 / prior.precision)))
    return Met(form, jnp.asarray(person), vectors, coefficient, offset, noise, held_cuts, own_cuts, tuple(own_noise))


def _seen_from(cells: Bilinear, side: int, block: Moments, other: Array) -> tuple[Moments, Moments]:
    """Weights of the vectors of one side in the predictors, and what else is in these, the other side integrated out.

    Components are independent, as those of the fit are.
    """
    linear = (cells.row_linear, cells.column_linear)
    size = (cells.rows, cells.columns)[side].mean.shape[1]
    mean, variance = (x[other] for x in block)
    num, k = mean.shape[0], cells.coupling.shape[-1]
    at = jnp.zeros((num, size)).at[:, :k].set(cells.coupling * mean[:, :k])
    spread = jnp.zeros((num, size)).at[:, :k].set(cells.coupling**2 * variance[:, :k])
    if linear[side].shape[-1]:
        at = at + linear[side]
    center, width = cells.offset, jnp.zeros(num)
    if linear[1 - side].shape[-1]:
        center = center + jnp.sum(linear[1 - side] * mean, 1)
        width = jnp.sum(linear[1 - side] ** 2 * variance, 1)
    return Moments(at, spread), Moments(center, width)


def _belongs_to(name: str, elements: np.ndarray, person: np.ndarray, other: np.ndarray, is_common: bool) -> bool:
    """True if each new vector has elements of its own, false if the other side, or all cells together, have them.

    :param elements: that each cell sees, shape ``(num_cells, k)``.
    :param bool is_common: whether all cells see all of them, in the fit as well.
    :raises ModelStructureError: if neither is so.
    """
    if is_common:
        return False

    def num_pairs(*index: np.ndarray) -> int:
        return len(np.unique(np.stack(index), axis=1).T)

    pairs, number = num_pairs(person, *elements.T), np.unique(person).size
    if pairs == number and num_pairs(*elements.T) == number:
        return True
    if num_pairs(other, *elements.T) == np.unique(other).size:
        return False
    raise ModelStructureError(
        f"latent site '{name}' has elements that belong neither to one new vector each nor to the vectors of the other "
        "side: with a cold start its noise or cut points are those of one side, or of all cells.",
        site=name,
    )


def _check_size(name: str, fitted: Array, found: Array) -> None:
    if fitted.shape != found.shape:
        raise ValueError(
            f"'{name}' has {found.size} elements on these ratings and {fitted.size} in the fit, which holds them: give "
            "the sizes of the fit."
        )
