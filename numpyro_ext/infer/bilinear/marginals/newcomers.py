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
from ....structure.bilinear.noisy.form import Cuts, NoiseSites, NoisyBilinear
from ....structure.errors import ModelStructureError
from ...front.running.progress import warn
from ..algorithms.messages import Moments, as_message, mean_of
from ..algorithms.ratings import cuts as cut_points
from ..algorithms.ratings import iterations, newcomers, noise
from ..algorithms.ratings.cuts import CutState
from ..algorithms.ratings.integrated_noise import integrated
from ..algorithms.ratings.newcomers import Met, NewState
from ..algorithms.ratings.noise import NoiseState
from ..algorithms.ratings.side_hyper import prior_message
from ..algorithms.ratings.variances import GammaMessage, Rule, gamma_of
from .newcomer_groups import first_slots, groups_of, in_order, only, slots_of

_DAMPING, _MOST_STEPS, _TOL = 0.9, 200, 1e-3
_MOST_LATTICES = 3
"""Lattices for the noise, each around what the last one has found."""
_NOT_CONVERGED = (
    "The vectors of newcomers have not converged: the largest change of a mean, in standard deviations, is {:.2g}, the "
    "tolerance {:.2g}."
)


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
    :param float change: the largest of a mean in the last iteration, in its standard deviations and without damping.
    :param int num_at_mode: of them whose noise stands at its mode where :meth:`of_every_rating` integrates over it.
    """

    met: Met
    state: NewState | None
    frequencies: np.ndarray
    side: int
    chosen: np.ndarray
    change: float = np.inf
    num_at_mode: int = 0

    @classmethod
    def of(cls, fitted: Fitted, form: NoisyBilinear, side: int, chosen: np.ndarray) -> Self:
        """Before the first rating; arguments as of :func:`met_by`."""
        met = met_by(fitted, form, side, chosen)
        other, seen = ((f.cells.column_index, f.cells.row_index)[side] for f in (met.form, fitted.form))
        counts = np.zeros(((fitted.form.cells.columns, fitted.form.cells.rows)[side].mean.shape[0], met.num_levels))
        np.add.at(counts, (np.asarray(seen), np.asarray(fitted.form.label)), 1.0)
        return cls(met, None, counts[np.asarray(other)], side, chosen)

    def learned(self, slots: np.ndarray, num_used: int | np.ndarray, *, tol: float, rule: Rule) -> Self:
        """After the ratings in the first slots, from where the vectors are, while all else is held.

        :param slots: numbers of cells, shape ``(num_new, num_slots)``.
        :param num_used: slots with ratings, a number or one for each new vector.
        """
        cells, is_used = jnp.asarray(slots), first_slots(slots, num_used)
        before = newcomers.start(self.met, cells) if self.state is None else self.state
        state, found = newcomers.learned(self.met, before, cells, is_used, jnp.asarray(tol), rule=rule)
        change = float(jnp.max(found))
        if not change < tol:
            warn(_NOT_CONVERGED.format(change, tol))
        return dataclasses.replace(self, state=state, change=change)

    def of_every_rating(self, *, tol: float, rule: Rule) -> tuple[Self, float]:
        """After all ratings of each newcomer, the noise integrated out, with an estimate of their log probability.

        Those with similar numbers of ratings are treated together, so that few slots are empty.
        """
        number = np.bincount(np.asarray(self.met.person), minlength=len(self.chosen))
        groups = groups_of(number)
        parts = [only(self.met, people) for people in groups]
        found = [_integrated(met, tol, rule) for met, _ in parts]
        change = max(part.change for part in found)
        if not change < tol:
            warn(_NOT_CONVERGED.format(change, tol))
        state = in_order([part.state for part in found], groups, [cells for _, cells in parts])
        value, num_at_mode = sum(part.log_evidence for part in found), sum(part.num_at_mode for part in found)
        return dataclasses.replace(self, state=state, change=change, num_at_mode=num_at_mode), value

    def of_all(self, fitted: Fitted) -> Self:
        """The same newcomers after a fit that has seen their ratings, as :func:`with_cells` makes it."""
        met = met_by(fitted, self.met.form, self.side, self.chosen, is_fitted=True)
        chosen = jnp.asarray(self.chosen)
        mean, variance = (x[chosen] for x in (fitted.messages.rows, fitted.messages.columns)[self.side].seen)
        vectors = Moments(mean, variance[:, :, None] * jnp.eye(mean.shape[1], dtype=mean.dtype))
        return dataclasses.replace(self, met=met, state=newcomers.known(met, vectors))

    def in_place_of_priors(self, fitted: Fitted) -> tuple[NoisyBilinear, NoiseState]:
        """The model of their cells with the posterior in the place of the priors, and messages that add nothing.

        :param Fitted fitted: the fit, which says all that is not the newcomers'.
        """
        assert self.state is not None
        form, own = self.met.form, iter(self.state.noise)
        owned = _owned(fitted, form, self.side, np.asarray(self.met.person))
        scales = []
        for scale, start, said, is_own in zip(
            form.scales, fitted.form.scales, fitted.messages.scales, owned.scales, strict=True
        ):
            gamma = gamma_of(start, said, of_groups=True)
            if is_own:
                pairs = zip(scale[1:], next(own), strict=True)
                gamma = GammaMessage(*(owned.put(x, scale.group, y[owned.vector]) for x, y in pairs))
            scales.append(scale._replace(shape=gamma.shape, rate=gamma.rate))
        mean, covariance = self.state.vectors
        seen = [fitted.messages.rows.seen, fitted.messages.columns.seen]
        seen[self.side] = Moments(mean, jnp.diagonal(covariance, axis1=1, axis2=2))
        form = form._replace(scales=tuple(scales))
        messages = noise.init(form, *seen)._replace(sides=fitted.messages.sides)
        if form.cuts is None:
            return form, messages
        elements, parents = cut_points.posterior(fitted.form, fitted.messages.cuts)
        if owned.cuts:
            assert self.state.cuts is not None
            latent = self.state.cuts._replace(mean=self.state.cuts.mean - form.thresholds)
            pairs = zip(_prior_of_cuts(form.cuts, parents), latent, strict=True)
            elements = Moments(*(owned.put(x, form.cuts.element, y[owned.first]) for x, y in pairs))
        if parents is not None:
            cuts = form.cuts._replace(parent_mean=parents.mean, parent_variance=parents.variance)
            form = form._replace(cuts=cuts)
        return form, messages._replace(cuts=messages.cuts._replace(prior=as_message(elements)))

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


class _Found(NamedTuple):
    """Posterior of some newcomers after all their ratings."""

    state: NewState
    log_evidence: float
    change: float
    num_at_mode: int


def _integrated(met: Met, tol: float, rule: Rule) -> _Found:
    """Posterior of newcomers after all their ratings, with their noise integrated out."""
    slots, number = slots_of(np.asarray(met.person), met.prior.mean.shape[0])
    cells, is_used, end = jnp.asarray(slots), first_slots(slots, number), jnp.asarray(tol)
    state, found = newcomers.learned(met, newcomers.start(met, cells), cells, is_used, end, rule=rule)
    change = float(jnp.max(found))
    if not met.own_noise:
        values = newcomers.log_evidence(met, state, cells, is_used)
        return _Found(state._replace(levels=None), float(jnp.sum(values)), change, 0)
    around = state.noise[0]
    for _ in range(_MOST_LATTICES):
        lattice = integrated(met, state, around, cells, is_used, end, rule=rule)
        if not bool(jnp.any(lattice.is_missed)):
            break
        around = lattice.around
    return _Found(lattice.state, float(jnp.sum(lattice.log_evidence)), change, int(jnp.sum(lattice.is_at_mode)))


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
    index = (form.cells.row_index, form.cells.column_index)
    form = form.taken(jnp.asarray(np.flatnonzero(np.isin(np.asarray(index[side]), chosen))))
    own, other = _index(form, side)
    person = np.searchsorted(chosen, own)
    owned = _owned(fitted, form, side, person)
    block = (fitted.messages.rows, fitted.messages.columns)[1 - side].seen
    prior = prior_message(form.sides[side], fitted.messages.sides[side])
    coefficient, offset = _seen_from(form.cells, side, block, jnp.asarray(other))
    noise, own_noise = form.noise, []
    for name, scale, start, said, is_own in zip(
        fitted.sites.scales, form.scales, fitted.form.scales, fitted.messages.scales, owned.scales, strict=True
    ):
        gamma = gamma_of(start, said, of_groups=True)
        if is_own:
            gamma = gamma if is_fitted else GammaMessage(scale.shape, scale.rate)
            own_noise.append(GammaMessage(*(owned.of_vectors(x, scale.group, len(chosen)) for x in gamma)))
        else:
            _check_size(name, gamma.shape, scale.shape)
            noise = noise * (gamma.rate / (gamma.shape + 1.0))[scale.group]
    held_cuts, own_cuts = None, None
    if form.cuts is not None and fitted.sites.cuts is not None:
        elements, parents = cut_points.posterior(fitted.form, fitted.messages.cuts)
        if owned.cuts:
            moments = elements if is_fitted else _prior_of_cuts(form.cuts, parents)
            own_cuts = Moments(*(owned.of_vectors(x, form.cuts.element, len(chosen)) for x in moments))
        else:
            _check_size(fitted.sites.cuts, elements.mean, form.cuts.mean)
            held_cuts = Moments(*(x[form.cuts.element] for x in elements))
    vectors = Moments(*(x[jnp.asarray(chosen)] for x in (mean_of(prior), 1.0 / prior.precision)))
    return Met(form, jnp.asarray(person), vectors, coefficient, offset, noise, held_cuts, own_cuts, tuple(own_noise))


def _index(form: NoisyBilinear, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of a side, and of the other, that cells have."""
    rows, columns = (np.asarray(x) for x in (form.cells.row_index, form.cells.column_index))
    return (rows, columns) if side == 0 else (columns, rows)


def _prior_of_cuts(cuts: Cuts, parents: Moments | None) -> Moments:
    """Prior moments of cut points, given what a fit knows of their prior means."""
    prior = Moments(cuts.mean, cuts.variance)
    if cuts.parent is None or parents is None:
        return prior
    return Moments(*(x + y[cuts.parent] for x, y in zip(prior, parents, strict=True)))


class _Owned(NamedTuple):
    """Noise and cut points that new vectors have of their own."""

    scales: tuple[bool, ...]
    cuts: bool
    vector: np.ndarray
    """New vectors with cells."""
    first: np.ndarray
    """First cell of each of these."""

    def of_vectors(self, values: Array, element: Array, num: int) -> Array:
        """Values of the elements of each of so many vectors; without cells they have some, of which nobody hears."""
        own = np.asarray(element)[self.first]
        places = np.zeros((num, *own.shape[1:]), int)
        places[self.vector] = own
        return values[places]

    def put(self, values: Array, element: Array, own: Array) -> Array:
        """Values of all elements, with those of the vectors in their places.

        :param own: of the vectors with cells.
        """
        return values.at[np.asarray(element)[self.first]].set(own)


def _owned(fitted: Fitted, form: NoisyBilinear, side: int, person: np.ndarray) -> _Owned:
    """Ownership of the sites of a fit.

    :param person: new vector of each cell of the form.
    :raises ModelStructureError: see :func:`met_by`.
    """
    before, other = _index(fitted.form, side), _index(form, side)[1]

    def is_own(name: str | None, element: Array, fitted_element: Array, size: int, fitted_size: int) -> bool:
        old, new = (np.asarray(x).reshape(len(x), -1) for x in (fitted_element, element))
        if size == fitted_size == new.shape[1]:
            return False
        # few new cells may leave it open, those of the fit hardly
        may_be_own = _tells(before[0], old) and _tells(person, new) and _tells(new, person)
        may_be_held = _tells(np.append(before[1], other), np.concatenate([old, new]))
        if may_be_own == may_be_held:
            raise ModelStructureError(
                f"latent site '{name}' has elements that belong {'to' if may_be_own else 'neither to'} one new vector "
                f"each {'and' if may_be_own else 'nor'} to the vectors of the other side: new vectors need noise and "
                "cut points of one side, or of all cells.",
                site=name,
            )
        return may_be_own

    scales = tuple(
        is_own(name, scale.group, start.group, scale.shape.size, start.shape.size)
        for name, scale, start in zip(fitted.sites.scales, form.scales, fitted.form.scales, strict=True)
    )
    cuts, old, owns_cuts = form.cuts, fitted.form.cuts, False
    if cuts is not None and old is not None:
        owns_cuts = is_own(fitted.sites.cuts, cuts.element, old.element, cuts.mean.size, old.mean.size)
    return _Owned(scales, owns_cuts, *np.unique(person, return_index=True))


def _tells(one: np.ndarray, other: np.ndarray) -> bool:
    """True if cells with the same number in the first array have the same in the other."""
    one, other = (x.reshape(len(x), -1) for x in (one, other))
    return len(np.unique(np.concatenate([one, other], 1), axis=0)) == len(np.unique(one, axis=0))


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


def _check_size(name: str, fitted: Array, found: Array) -> None:
    if fitted.shape != found.shape:
        raise ValueError(
            f"'{name}' has {found.size} elements on these ratings and {fitted.size} in the fit, which holds them: give "
            "the sizes of the fit."
        )
