"""Counts, hidden Markov chains and factorisations of many sequences, beside other libraries and floors."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from numpyro_ext.sequences import Bigram, EventSequences
from numpyro_ext.sequences.factorisation import _solve, _table
from numpyro_ext.sequences.hidden_markov import _Lanes

from .harness import at_most, shortest

HAS_PEERS = importlib.util.find_spec("hmmlearn") is not None and importlib.util.find_spec("implicit") is not None


def simulated(num_users: int, num_items: int, num_events: int) -> EventSequences:
    """Sequences of uneven lengths that repeat, or draw a popular item."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(num_users))
    lengths = np.maximum(rng.multinomial(num_events - num_users, shares) + 1, 1)
    popular = np.minimum(rng.pareto(1.0, size=num_events) * 20, num_items - 1).astype(int)
    repeats = rng.random(num_events) < 0.3
    items = popular[np.maximum.accumulate(np.where(repeats, 0, np.arange(num_events)))]
    return EventSequences(items, lengths, np.arange(num_items), np.arange(num_users))


def test_pairs_of_many_events(results):
    log = simulated(954, 48_188, 4_300_000)
    model = Bigram(0.01)
    fitting = shortest(lambda: model.fit(log), rounds=1)
    sort = shortest(lambda: np.sort(log.previous * log.num_items + log.items), rounds=1)
    results.record(
        "2-gram of 4.3 million events, 48,188 items",
        peer="sorting the pairs once",
        times=(fitting, sort),
        figure="CPU-seconds",
        target=at_most(5.0),
    )
    some = simulated(954, 48_188, 100_000)
    scoring = shortest(lambda: model._log_probabilities(some), rounds=1)
    results.record(
        "100,000 scores of this 2-gram",
        peer="fitting it",
        times=(scoring, fitting),
        figure="CPU-seconds",
        target=at_most(2.0),
    )


CASES = {
    "8 states, 46,000 events of 567 people": (567, 922, 45_997, 8),
    "16 states, 1 million events of 10,000 people": (10_000, 1_000, 1_000_000, 16),
}


@pytest.mark.parametrize("name", CASES)
def test_iteration_of_baum_welch(results, name):
    num_users, num_items, num_events, num_states = CASES[name]
    log = simulated(num_users, num_items, num_events)
    rng = np.random.default_rng(1)
    start = [rng.dirichlet(np.ones(n), size=shape) for n, shape in ((num_states, ()), (num_states, num_states))]
    start.append(rng.dirichlet(np.ones(num_items), size=num_states))
    lanes = _Lanes.of(log)
    seconds = shortest(lambda: lanes.expected_counts(*start), rounds=3)
    states = np.ones((num_events, num_states))

    def products():  # one forward, one backward, one for the moves
        return states @ start[1], states @ start[1].T, states.T @ states

    floor = shortest(products, rounds=3)
    options = {"item": f"Baum-Welch, an iteration, {name}", "figure": "CPU-seconds ratio"}
    results.record(peer="its products", times=(seconds, floor), **options)
    if not HAS_PEERS:
        return
    from hmmlearn.hmm import CategoricalHMM

    for method, target in (("log", at_most(0.3)), ("scaling", None)):

        def fit(method=method):
            peer = CategoricalHMM(num_states, n_iter=1, tol=0.0, init_params="", implementation=method)
            peer.n_features = num_items
            peer.startprob_, peer.transmat_, peer.emissionprob_ = start
            peer.fit(log.items[:, None], log.lengths)

        times = seconds, shortest(fit, rounds=2)
        results.record(peer=f"hmmlearn, implementation {method}", times=times, target=target, **options)


def test_sweep_of_a_factorisation(results):
    table, width = _table(simulated(10_000, 5_000, 1_000_000)), 32
    items = np.random.default_rng(0).normal(size=(5_000, width))

    of_items = table.T.tocsr()

    def sweep():
        _solve(of_items, _solve(table, items, 0.05), 0.05)

    seconds = shortest(sweep, rounds=3)
    options = {"item": f"factorisation, a sweep, {table.nnz:,} non-zeros, width {width}", "figure": "CPU-seconds ratio"}
    products = np.ones((table.nnz, width))
    floor = shortest(lambda: [products.T @ products for _ in range(2)], rounds=3)
    results.record(peer="its products, dense", times=(seconds, floor), **options)
    if not HAS_PEERS:
        return
    from implicit.als import AlternatingLeastSquares
    from scipy.sparse import csr_matrix

    for name, use_cg in (("conjugate gradients", True), ("exact", False)):

        def fit(use_cg=use_cg):
            peer = AlternatingLeastSquares(width, iterations=1, use_cg=use_cg, num_threads=1, random_state=0)
            peer.fit(csr_matrix(table), show_progress=False)

        times, peer = (seconds, shortest(fit, rounds=3)), f"implicit, {name}, single precision"
        results.record(peer=peer, times=times, target=at_most(1.5), **options)
