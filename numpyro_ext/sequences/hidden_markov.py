"""Hidden Markov chains of many sequences, learned by the algorithm of Baum and Welch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike

from ..distributions.hidden_markov import HiddenMarkov
from .events import EventSequences
from .predictor import SequencePredictor, all_events, best_by_validation


class HiddenMarkovFit(NamedTuple):
    """Probabilities of a hidden Markov chain, as :func:`fit_hidden_markov` finds them."""

    initial: np.ndarray
    """Probabilities of the first state, shape ``(states,)``."""
    transition: np.ndarray
    """Probabilities of the next state given a state, shape ``(states, states)``."""
    emission: np.ndarray
    """Probabilities of the items in a state, shape ``(states, items)``."""
    objective: np.ndarray
    """Log likelihood before each iteration and at the end, with the log density of the prior of a pseudo-count."""
    converged: bool
    """True if the objective rose by less than the tolerance per event in the last iteration."""

    def distribution(self, num_steps: int, lengths: ArrayLike | None = None) -> HiddenMarkov:
        """The chain as a distribution of sequences.

        :param int num_steps: length of the longest sequence.
        :param lengths: length of each sequence.
        """
        return HiddenMarkov(self.initial, self.transition, self.emission, num_steps=num_steps, lengths=lengths)


def fit_hidden_markov(
    sequences: EventSequences,
    num_states: int,
    *,
    start: tuple[ArrayLike, ArrayLike, ArrayLike] | None = None,
    pseudo_count: float = 0.0,
    seed: int = 0,
    max_iterations: int = 1000,
    tolerance: float = 1e-8,
) -> HiddenMarkovFit:
    """Maximum likelihood of a hidden Markov chain of many sequences, by the algorithm of Baum and Welch.

    The objective never falls. It has many local maxima; compare several seeds. An iteration takes a time of
    ``events * states**2``: sequences are laid end to end in lanes of about the length of the longest one, so that a
    step of the recursions is a matrix product for all lanes.

    **Example:**

    >>> from numpyro_ext.sequences import EventSequences, fit_hidden_markov
    >>> log = EventSequences.from_lists([list("aabab" * 8 + "ccdcd" * 8), list("ddcdc" * 8 + "babaa" * 8)])
    >>> fit = fit_hidden_markov(log, 2, pseudo_count=0.01)
    >>> print(fit.converged, np.sort(np.diag(fit.transition)).round(2), np.sort(fit.emission[:, 0]).round(2))
    True [0.99 0.99] [0.  0.6]

    **References**

    1. Rabiner, L. R. (1989), A tutorial on hidden Markov models and selected applications in speech recognition,
       *Proceedings of the IEEE* 77, 257-286, equations (40) and (109)-(111).

    :param EventSequences sequences: sequences; empty ones count for nothing.
    :param int num_states: number of hidden states.
    :param start: initial, transition and emission probabilities to begin with; drawn at random by default. What is zero
        stays zero without a pseudo-count.
    :param float pseudo_count: expected count that is added for each probability: the mode of its posterior under
        Dirichlet priors of concentration ``1 + pseudo_count`` is found instead.
    :param int seed: of the random start, which does not depend on the labels of the items.
    :param int max_iterations: greatest number of iterations.
    :param float tolerance: iterations end when the objective rises by less than this per event.
    :return: the probabilities, and the objective of all iterations.
    :raises ValueError: without events, for shapes that do not fit, or a start under which a sequence is impossible.
    """
    if isinstance(num_states, bool) or int(num_states) != num_states or num_states < 1:
        raise ValueError(f"fit_hidden_markov: num_states is an integer from 1; got {num_states!r}.")
    if sequences.items.size == 0:
        raise ValueError("fit_hidden_markov: there are no events.")
    if not 0.0 <= pseudo_count < np.inf:
        raise ValueError(f"fit_hidden_markov: pseudo_count is not negative; got {pseudo_count}.")
    shapes = ((num_states,), (num_states, num_states), (num_states, sequences.num_items))
    if start is None:
        rng = np.random.default_rng(seed)
        shares = np.bincount(sequences.items, minlength=sequences.num_items) + 0.1
        initial = rng.dirichlet(np.full(num_states, 5.0))
        # states that last a little, and items near their frequencies, so that no state begins far from all data
        transition = rng.dirichlet(np.full(num_states, 5.0), size=num_states) + np.eye(num_states)
        emission = np.empty(shapes[2])
        order = _order_of_items(sequences)
        emission[:, order] = shares[order] * rng.gamma(1.0, size=shapes[2])
    else:
        initial, transition, emission = (np.asarray(part, float) for part in start)
    values = [initial, transition, emission]
    for name, part, shape in zip(("initial", "transition", "emission"), values, shapes, strict=True):
        if part.shape != shape or not (part >= 0).all() or not (part.sum(-1) > 0).all():
            raise ValueError(f"fit_hidden_markov: {name} holds probabilities of the shape {shape}; got {part.shape}.")
    initial, transition, emission = (_normalised(part) for part in values)
    lanes = _Lanes.of(sequences)
    objective: list[float] = []
    for iteration in range(max_iterations + 1):
        log_likelihood, *counts = lanes.expected_counts(initial, transition, emission)
        if not np.isfinite(log_likelihood):
            raise ValueError(
                "fit_hidden_markov: a sequence is impossible under the start; give each item a probability."
            )
        if pseudo_count:
            logs = (float(np.sum(np.log(part))) for part in (initial, transition, emission))
            log_likelihood += pseudo_count * sum(logs)
        objective.append(log_likelihood)
        if iteration and objective[-1] - objective[-2] < tolerance * sequences.items.size:
            return HiddenMarkovFit(initial, transition, emission, np.array(objective), True)
        if iteration < max_iterations:
            # a state that is never visited keeps its rows
            initial, transition, emission = (
                np.where(new.sum(-1, keepdims=True) > 0, _normalised(new), old)
                for new, old in zip(
                    (count + pseudo_count for count in counts), (initial, transition, emission), strict=True
                )
            )
    return HiddenMarkovFit(initial, transition, emission, np.array(objective), False)


@dataclass(eq=False)
class HiddenMarkovBaseline(SequencePredictor):
    """Hidden Markov chain of all, of which each person may have initial and transition probabilities of her own.

    Without ``personal`` all that is known of a person is her states so far. With it, her rows have Dirichlet priors
    around those of all, and are the mode of their posterior given her training, found by EM; someone who was not in the
    training has those of her history. Emissions are those of all.

    Iterations of :func:`fit_hidden_markov` end when they raise the objective by less than 1e-5 per event, as
    predictions change little from there on; ``result`` is what they found.

    :param num_states: number of hidden states, or several of which validation chooses one.
    :param float personal: number of moves that the prior of each row of a person counts for; the same rows for everyone
        if ``None``.
    :param float pseudo_count: added to expected counts, so that every item has a probability.
    :param int seed: of the random start.
    """

    num_states: int | Sequence[int] = 8
    personal: float | None = None
    pseudo_count: float = 0.01
    seed: int = 0

    def _fit(self, train: EventSequences, validation: EventSequences | None) -> None:
        if not self.pseudo_count > 0:
            raise ValueError("HiddenMarkovBaseline: pseudo_count is positive, or items of the test may be impossible.")
        if self.personal is not None and not 0.0 < self.personal < np.inf:
            raise ValueError(f"HiddenMarkovBaseline: personal is a positive number of moves; got {self.personal}.")
        chosen = self.num_states
        if isinstance(chosen, Sequence):
            chosen = best_by_validation(lambda states: replace(self, num_states=states), chosen, train, validation)
        everything = all_events(train, validation)
        self.result = fit_hidden_markov(
            everything, chosen, pseudo_count=self.pseudo_count, seed=self.seed, tolerance=1e-5
        )

        if self.personal is not None:
            self.rows = self._own_rows(everything)
            """Initial and transition probabilities of each user, and last those of all."""

    def _own_rows(self, sequences: EventSequences) -> tuple[np.ndarray, np.ndarray]:
        """Posterior modes of the initial and transition probabilities of each user, and last those of all, by EM."""
        assert self.personal is not None
        *pooled, emission = self.result[:3]
        lanes = _Lanes.of(sequences)
        initial, transition = (np.repeat(part[None], sequences.num_users + 1, axis=0) for part in pooled)
        last = -np.inf
        for _ in range(200):
            log_likelihood, *counts, _ = lanes.expected_counts(initial, transition, emission)
            logs = (np.sum(all_ * np.log(own)) for all_, own in zip(pooled, (initial, transition), strict=True))
            objective = log_likelihood + self.personal * float(sum(logs))
            if objective - last < 1e-5 * sequences.items.size:
                break
            last = objective
            initial, transition = (
                _normalised(count + self.personal * part) for count, part in zip(counts, pooled, strict=True)
            )
        return initial, transition

    def _log_probabilities(self, sequences: EventSequences) -> np.ndarray:
        if self.personal is None:
            return _Lanes.of(sequences).log_predictive(*self.result[:3])
        self._check_users(sequences)
        return _Lanes.of(sequences).log_predictive(*self.rows, self.result.emission)

    def _next(self, history: np.ndarray, user: int | None) -> np.ndarray:
        initial, transition, emission = self.result[:3]
        if self.personal is not None and user is not None:
            initial, transition = (part[self._checked_user(user)] for part in self.rows)
        elif self.personal is not None and history.size:
            alone = EventSequences(history, np.array([history.size]), np.arange(self.num_items), np.zeros(1))
            initial, transition = (part[0] for part in self._own_rows(alone))
        state = initial
        for item in history:
            state = state * emission[:, item]
            state = (state / state.sum()) @ transition
        return np.log(state @ emission)


class _Lanes(NamedTuple):
    """Sequences laid end to end in lanes of about equal length, filled up with cells without an event.

    Initial and transition probabilities may have one more axis in front, with those of each user and last of nobody.
    """

    events: np.ndarray
    """Index of the event in each cell, -1 for none, shape ``(steps, lanes)``."""
    items: np.ndarray
    """Its item; the number of items for none."""
    users: np.ndarray
    """Its user; the number of users for none."""
    begins: list[np.ndarray]
    """Lanes in which a sequence begins at each step; cells without an event are sequences of their own."""
    num_items: int

    @staticmethod
    def of(sequences: EventSequences) -> _Lanes:
        order = np.argsort(-sequences.lengths, kind="stable")
        order = order[sequences.lengths[order] > 0]
        longest = max(int(sequences.lengths.max(initial=0)), 1)
        loads = [(0, lane) for lane in range(-(-sequences.items.size // longest) or 1)]
        lane_of, first_step = np.zeros((2, sequences.num_users), np.int64)
        for user in order:  # the longest that is left goes to the emptiest lane
            load, lane = heapq.heappop(loads)
            lane_of[user], first_step[user] = lane, load
            heapq.heappush(loads, (load + int(sequences.lengths[user]), lane))
        steps = max(load for load, _ in loads)
        events = np.full((max(steps, 1), len(loads)), -1)
        users = sequences.users
        events[first_step[users] + sequences.positions, lane_of[users]] = np.arange(sequences.items.size)
        begins = events < 0
        begins[first_step[order], lane_of[order]] = True
        items = np.append(sequences.items, sequences.num_items)[events]
        users = np.append(users, sequences.num_users)[events]
        return _Lanes(events, items, users, [np.flatnonzero(row) for row in begins], sequences.num_items)

    def _forward(
        self, initial: np.ndarray, transition: np.ndarray, emission: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Probabilities of the state given what was seen so far, emissions, and probabilities of each event."""
        size, personal = len(emission), transition.ndim == 3
        seen = np.append(emission.T, np.ones((1, size)), axis=0)[self.items]
        filtered, shares = np.empty_like(seen), np.empty(seen.shape[:2])
        ones, state = np.ones(size), np.zeros(seen.shape[1:])
        with np.errstate(invalid="ignore", divide="ignore"):
            for t, begins in enumerate(self.begins):
                if personal:
                    now = np.matmul(state[:, None, :], transition[self.users[t]])[:, 0]
                else:
                    now = state @ transition
                if begins.size:
                    now[begins] = initial[self.users[t, begins]] if personal else initial
                now *= seen[t]
                shares[t] = now @ ones
                now /= shares[t][:, None]
                filtered[t] = state = now
        return filtered, seen, shares

    def log_predictive(self, initial: np.ndarray, transition: np.ndarray, emission: np.ndarray) -> np.ndarray:
        """Log probability of each event given those of its sequence before it, shape ``(events,)``."""
        *_, shares = self._forward(initial, transition, emission)
        inside = self.events >= 0
        found = np.empty(int(inside.sum()))
        with np.errstate(divide="ignore"):
            found[self.events[inside]] = np.log(shares[inside])
        return found

    def expected_counts(
        self, initial: np.ndarray, transition: np.ndarray, emission: np.ndarray
    ) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
        """Log likelihood, and expected numbers of first states, of moves, and of items in each state."""
        filtered, seen, shares = self._forward(initial, transition, emission)
        with np.errstate(divide="ignore"):
            log_likelihood = float(np.sum(np.log(shares)))
        if not np.isfinite(log_likelihood):
            return log_likelihood, initial, transition, emission
        personal, size = transition.ndim == 3, len(emission)
        pairs, firsts = np.zeros_like(transition), np.zeros_like(initial)
        states = np.empty_like(filtered)
        states[-1] = filtered[-1]
        onward = np.ones(filtered.shape[1:])
        for t in range(len(filtered) - 1, 0, -1):
            # emissions become what the events from here on say of the state before, zero where a sequence begins
            weight = seen[t]
            weight *= onward
            weight /= shares[t][:, None]
            if personal:
                onward = np.matmul(transition[self.users[t]], weight[:, :, None])[:, :, 0]
            else:
                onward = weight @ transition.T
            if self.begins[t].size:
                weight[self.begins[t]] = 0.0
                onward[self.begins[t]] = 1.0
            if personal:  # a user is in one lane
                pairs[self.users[t]] += filtered[t - 1][:, :, None] * weight[:, None, :]
            np.multiply(filtered[t - 1], onward, out=states[t - 1])
        if not personal:
            pairs = filtered[:-1].reshape(-1, size).T @ seen[1:].reshape(-1, size)
        for t, begins in enumerate(self.begins):
            lanes = begins[self.events[t, begins] >= 0]
            if personal:
                firsts[self.users[t, lanes]] = states[t, lanes]
            else:
                firsts += states[t, lanes].sum(0)
        return log_likelihood, firsts, transition * pairs, self._by_item(states)

    def _by_item(self, states: np.ndarray) -> np.ndarray:
        """Sums over the events of each item, shape ``(states, items)``."""
        from scipy.sparse import csr_array

        cells = self.items.size
        table = csr_array((np.ones(cells), (self.items.ravel(), np.arange(cells))), shape=(self.num_items + 1, cells))
        sums: np.ndarray = table @ states.reshape(cells, -1)
        return sums[:-1].T


def _order_of_items(sequences: EventSequences) -> np.ndarray:
    """Items by what the sequences say of them, the most frequent first, and not by their numbers: other labels for
    the same items begin at the same probabilities."""
    items, size = sequences.items, sequences.num_items
    first = np.full(size, items.size)
    np.minimum.at(first, items, np.arange(items.size))
    places = np.bincount(items, weights=sequences.positions, minlength=size)
    return np.lexsort((first, places, -np.bincount(items, minlength=size)))


def _normalised(rows: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        shares: np.ndarray = rows / rows.sum(-1, keepdims=True)
    return shares
