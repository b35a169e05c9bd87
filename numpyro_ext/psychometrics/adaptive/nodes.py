"""The density of up to three traits on a grid of nodes: an answer adds one row of a table to its logarithm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...compilation.pickles import OnDemand
from .bank import Floats, ItemBank
from .beliefs import At, Ints, negative_entropy

LARGEST_TABLE = 2**26
"""Numbers in the table of a bank on its nodes: 512 MB."""
_REACH = {1: 8.0, 2: 6.0, 3: 6.0}
"""Prior standard deviations to either side of the mean that nodes reach, by number of traits."""
_COARSE = {1: 17, 2: 9, 3: 5}
"""Points along each trait at which the information of the items is looked at, to choose the step."""
_BLOCK = 2**16
"""Numbers that a score takes up at once, which the cache of a processor holds."""
_NEGLIGIBLE = 1e-10
"""Share of the mass below which a node is left out of a score."""
_COARSEST = 1.25
"""Largest step of the nodes, in standard deviations of a posterior, at which sums over them have five digits."""


class NodePosterior(NamedTuple):
    """Weights of draws of the items and of nodes, shape ``(people, draws, nodes)``, and of nodes alone."""

    weights: Floats
    marginal: Floats


def trait_nodes(
    bank: ItemBank, num_items: int, standard_error: float, num_nodes: int | None
) -> tuple[Floats, Floats] | None:
    """Choose the nodes along each trait.

    Steps are one standard deviation of the sharpest posterior that a test can reach; then sums over equal steps have
    eight digits of a Gaussian's moments. Fewer are refused only where ``num_nodes`` does not ask for them.

    :param bank: the items.
    :param int num_items: largest number of items of a test.
    :param float standard_error: at which tests stop; zero if they do not.
    :param int num_nodes: nodes along each trait, in the place of the rule.
    :return: nodes of each trait, shape ``(D, n)``, and their distances; none where the table would be too large.
    """
    number, scale = bank.num_traits, np.sqrt(np.diag(bank.covariance))
    if number > 3:
        return None
    reach = _REACH[number] * scale
    if num_nodes is None:
        coarse = _product(
            [np.linspace(-0.6 * r, 0.6 * r, _COARSE[number]) + m for r, m in zip(reach, bank.mean, strict=True)]
        )
        information = bank.information(coarse)
        size = np.trace(information, axis1=-2, axis2=-1)
        best = np.argsort(-size, axis=1)[:, :num_items]
        most = np.take_along_axis(information, best[..., None, None], 1).sum(1) + np.linalg.inv(bank.covariance)
        sharpest = 1.0 / math.sqrt(np.linalg.eigvalsh(most)[:, -1].max())
        # After the last item a test is a little past its goal.
        step = max(sharpest, 0.5 * standard_error)
        num_nodes = math.ceil(2.0 * float(reach.max()) / step) + 1
        if bank.num_draws * bank.num_items * bank.num_categories * float(num_nodes) ** number > LARGEST_TABLE:
            return None
    axes = np.stack([np.linspace(m - r, m + r, num_nodes) for m, r in zip(bank.mean, reach, strict=True)])
    return axes, axes[:, 1] - axes[:, 0]


def _product(axes: Sequence[Floats]) -> Floats:
    """Points of the product of some axes, shape ``(points, D)``."""
    return np.stack([grid.reshape(-1) for grid in np.meshgrid(*axes, indexing="ij")], -1)


class NodeBeliefs(OnDemand):
    """Densities of the traits on the nodes of a grid, together with draws of the items.

    Draws of the items are weighted by the answers of the person, so that the posterior is that of traits and items
    together. Cost: the table has ``draws * items * categories * nodes`` numbers; a score reads it once.

    :param bank: the items and the prior.
    :param axes: nodes of each trait, shape ``(D, n)``.
    :param steps: their distances, shape ``(D,)``.
    """

    def __init__(self, bank: ItemBank, axes: Floats, steps: Floats) -> None:
        self.bank, self._steps = bank, steps
        self._num_each = axes.shape[1]
        self.points = _product(list(axes))
        away = self.points - bank.mean
        log_prior = -0.5 * np.einsum("qd,qd->q", away, np.linalg.solve(bank.covariance, away.T).T)
        self._log_prior = log_prior - _log_sum(log_prior[None])[0] - math.log(bank.num_draws)
        table = bank.table(self.points)
        self._rows = np.ascontiguousarray(table.transpose(2, 3, 0, 1))
        """Log probabilities of answers, shape ``(items, categories, draws, nodes)``."""
        # The last category is one less the others, so that a score reads less.
        p = np.exp(table[..., :-1]).transpose(1, 0, 2, 3)
        self._p = np.ascontiguousarray(p.reshape(*p.shape[:2], -1))
        """Probabilities of all answers but the last, shape ``(nodes, draws, items * (categories - 1))``."""

    def prior_state(self, num_people: int) -> Floats:
        shape = num_people, self.bank.num_draws, len(self.points)
        return np.broadcast_to(self._log_prior, shape).copy()

    def updated(self, state: Floats, items: Ints, values: Ints) -> Floats:
        if (items >= 0).all():
            return state + self._rows[items, values]
        new = state.copy()
        told = np.flatnonzero(items >= 0)
        new[told] += self._rows[items[told], values[told]]
        return new

    def posterior(self, state: Floats) -> NodePosterior:
        flat = state.reshape(len(state), -1)
        weights = np.exp(state - _log_sum(flat)[:, None, None])
        return NodePosterior(weights, weights.sum(1))

    def moments(self, posterior: NodePosterior) -> tuple[Floats, Floats]:
        mean = posterior.marginal @ self.points
        away = self.points - mean[:, None]
        return mean, np.einsum("nq,nqd,nqe->nde", posterior.marginal, away, away)

    def predictive(self, posterior: NodePosterior, items: Ints | None = None) -> Floats:
        weights = posterior.weights.transpose(0, 2, 1).reshape(len(posterior.weights), -1)
        p = self._p.reshape(weights.shape[1], self.bank.num_items, -1)
        p = p if items is None else p[:, items]
        return self._with_last(weights @ p.reshape(len(p), -1))

    def _with_last(self, most: Floats, total: float | Floats = 1.0) -> Floats:
        """Probabilities with those of the last category, shape ``(..., items, categories)``."""
        most = most.reshape(*most.shape[:-1], -1, self.bank.num_categories - 1)
        last = np.maximum(total - most.sum(-1), 0.0)
        return np.concatenate([most, last[..., None]], -1)

    def expected_information(self, posterior: NodePosterior, focus: Sequence[int] | None) -> Floats:
        everything = focus is None or len(focus) == self.bank.num_traits
        if everything and self.bank.num_draws == 1:
            # The entropies given the trait need no answers.
            marginal = negative_entropy(self.predictive(posterior))
            return np.maximum(posterior.marginal @ self._negative_entropies - marginal, 0.0)
        weights, p = posterior.weights, self._p
        if everything:
            weights = weights.transpose(0, 2, 1)
        else:
            assert focus is not None
            order = self._order(focus)
            number = self._num_each ** len(focus)
            weights = weights[:, :, order].reshape(*weights.shape[:2], number, -1)
            weights = weights.transpose(0, 2, 3, 1).reshape(len(weights), number, -1)
            p = p[order].reshape(number, -1, p.shape[-1])
        # Nuisances are added up within each value in focus: the joint probability of both, p(y, theta).
        total = weights.sum(2)
        marginal = np.zeros((len(weights), p.shape[-1]))
        inside = np.zeros((len(weights), self.bank.num_items))
        there = np.flatnonzero(total.max(0) > _NEGLIGIBLE)
        size = max(1, _BLOCK // marginal.size)
        for start in range(there[0], there[-1] + 1, size):
            nodes = slice(start, min(start + size, there[-1] + 1))
            joint = weights[:, nodes].swapaxes(0, 1) @ p[nodes]
            share = total[:, nodes].T[..., None]
            marginal += joint.sum(0)
            inside += (negative_entropy(self._with_last(joint, share)) - negative_entropy(share)[..., None]).sum(0)
        return np.maximum(inside - negative_entropy(self._with_last(marginal)), 0.0)

    def _order(self, focus: Sequence[int]) -> Ints:
        """Numbers of the nodes with the traits in focus as the slow axes."""
        number = self.bank.num_traits
        grid = np.arange(len(self.points)).reshape((self._num_each,) * number)
        others = [axis for axis in range(number) if axis not in focus]
        return grid.transpose([*focus, *others]).reshape(-1)

    @cached_property
    def _negative_entropies(self) -> Floats:
        return negative_entropy(self._with_last(self._p[:, 0]))

    def fisher_information(self, posterior: NodePosterior, at: At) -> Floats:
        if at == "mean":
            return self.bank.information(self.moments(posterior)[0])
        return np.tensordot(posterior.marginal, self._information, 1)

    @cached_property
    def _information(self) -> Floats:
        return self.bank.information(self.points)

    def votes(self, posterior: NodePosterior) -> Floats:
        number = self.bank.num_categories
        likeliest = np.eye(number)[self._rows.argmax(1)]
        return np.einsum("nsq,psqk->npk", posterior.weights, likeliest)

    def trouble(self, posterior: NodePosterior, covariance: Floats) -> str | None:
        # The step along a direction of the posterior against its standard deviation there.
        values, vectors = np.linalg.eigh(covariance)
        steps = np.sqrt(np.einsum("nde,d->ne", np.square(vectors), np.square(self._steps)))
        coarse = steps > _COARSEST * np.sqrt(np.maximum(values, 0.0))
        if coarse.any():
            return (
                f"The posterior of {int(coarse.any(1).sum())} of {len(values)} people is narrower than the distance of "
                f"the nodes ({float(self._steps.max()):.3g}): give more of them by num_nodes=."
            )
        if self.bank.num_draws > 1:
            shares = posterior.weights.sum(2)
            number = 1.0 / np.square(shares).sum(1)
            if number.min() < min(10.0, 0.5 * self.bank.num_draws):
                return (
                    f"The answers leave {number.min():.1f} effective draws of {self.bank.num_draws} of the items: give "
                    "more by num_draws=."
                )
        return None


def _log_sum(rows: Floats) -> Floats:
    """Logarithm of the sum of exponentials over the last axis."""
    top = rows.max(1)
    return top + np.log(np.exp(rows - top[:, None]).sum(1))
