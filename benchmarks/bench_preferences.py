"""Comparisons of many people: sweeps, gradients and memory of EP where shared tastes are learned."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.datasets import load_best_worst_pairs, simulate_preferences
from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation as ep
from numpyro_ext.linalg.cholesky import cholesky, inverse_lower
from numpyro_ext.models import collaborative_preferences
from numpyro_ext.structure import read_latent_gaussian

from .harness import at_most, cpu_seconds, peak_bytes, shortest


class Preferences(NamedTuple):
    """CPU-seconds of EP on the comparisons of many users, and the memory of the process so far."""

    reading: float
    sweep: float
    gradient: float
    """Gradient of the evidence, at the sites."""
    next_gradient: float
    """With the fit of the field that it needs, from that at parameters a step away."""
    blocks: float
    """Cholesky factors and their inverses, of blocks as those of a sweep."""
    gibibytes: float
    shapes: tuple[tuple[int, int], ...]


def read_preferences(data: Any, rank: int) -> tuple[Any, float]:
    """The model of shared tastes, read, and the CPU-seconds of that."""
    features, (user, winner, loser) = data.item_features, data.pairs.T
    kernel = np.exp(-np.sum((features[:, None] - features) ** 2, -1)) + 0.1 * np.eye(data.num_items)
    args, given = (user, winner, loser, np.ones(user.size, int)), {"num_users": data.num_users, "rank": rank}
    return cpu_seconds(
        lambda: read_latent_gaussian(collaborative_preferences, args, {**given, "kernel": kernel}, check=False)
    )


def time_preferences(data: Any, rank: int) -> Preferences:
    """Read the model of shared tastes and fit the users once."""
    reading, seconds = read_preferences(data, rank)
    hyper, arrays = reading.initial_hyper(), reading.data

    @jax.jit
    def solve(hyper: Any, arrays: Any, state: Any, num_steps: Any) -> Any:
        form = reading.form(hyper, arrays)
        return jax.lax.fori_loop(0, num_steps, lambda _, state: ep.step(form, state)[0], state)

    @jax.jit
    def gradient(hyper: Any, arrays: Any, state: Any) -> Any:
        return jax.value_and_grad(lambda hyper: ep.log_evidence(reading.form(hyper, arrays), state))(hyper)

    @jax.jit
    def evaluate(hyper: Any, arrays: Any, state: Any) -> Any:
        state, _ = ep.solve(reading.form(hyper, arrays), state, tol=1e-4)
        return jax.value_and_grad(lambda hyper: ep.log_evidence(reading.form(hyper, arrays), state))(hyper), state

    state = jax.jit(lambda hyper, arrays: ep.init(reading.form(hyper, arrays)))(hyper, arrays)
    (_, slope), state = evaluate(hyper, arrays, state)
    short, long = (shortest(solve, hyper, arrays, state, count) for count in (1, 11))
    size = max(float(jnp.max(jnp.abs(value))) for value in slope.values())
    moved = {name: jnp.asarray(value) + 0.01 / size * slope[name] for name, value in hyper.items()}
    touched = reading.abstract_form.touched
    assert touched is not None
    whole = [jnp.eye(size) + jnp.full((count, size, size), 0.1) for count, size in touched.shapes]
    return Preferences(
        seconds,
        (long - short) / 10,
        shortest(gradient, hyper, arrays, state),
        shortest(evaluate, moved, arrays, state),
        sum(shortest(jax.jit(lambda matrix: inverse_lower(cholesky(matrix))), matrix) for matrix in whole),
        peak_bytes() / 2**30,
        touched.shapes,
    )


def test_preferences_of_many_users(results):
    found = time_preferences(simulate_preferences(5000, 100, 10), rank=2)
    remark = f"Read in {found.reading:.1f} s; evidence and gradient at the sites {found.gradient:.2f} s."
    results.record(
        "EP sweep, preferences of 5000 users, 10 comparisons each, of 100 items",
        peer="Cholesky factors and their inverses, of the same blocks",
        times=(found.sweep, found.blocks),
        figure="ratio of CPU-seconds",
        target=at_most(4),
        remark=remark,
    )
    results.record(
        "EP with gradient, preferences of 5000 users, 10 comparisons each, of 100 items",
        times=(found.next_gradient, None),
        peer="memory",
        figure="GiB, of the whole process",
        value=found.gibibytes,
        target=at_most(1),
        remark="Covariances written out for each user would take 0.4 GiB a copy.",
    )


def test_preferences_for_films(results):
    try:
        data = load_best_worst_pairs()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    found = time_preferences(data, rank=30)
    results.record(
        f"EP, evidence with its gradient, MovieLens-100K, all {len(data.pairs)} best-worst pairs, rank 30",
        peer="two cores for three seconds",
        times=(found.next_gradient, 6.0),
        figure="ratio of CPU-seconds",
        target=at_most(1),
        remark=f"With the fit from that of parameters nearby; a sweep {found.sweep:.2f} s, the gradient at the "
        f"sites {found.gradient:.2f} s, reading {found.reading:.1f} s, {found.gibibytes:.2f} GiB in all, blocks "
        f"{', '.join(f'{count} of {size}' for count, size in found.shapes)}.",
    )


@pytest.mark.parametrize("what", ["users", "comparisons"])
def test_growth_of_preferences(results, what):
    sizes = [(500, 20), (4000, 20)] if what == "users" else [(200, 500), (200, 4000)]
    times = [time_preferences(simulate_preferences(users, 50, pairs), rank=2).sweep for users, pairs in sizes]
    results.record(
        f"EP sweep, preferences, growth in {what}",
        peer=f"an eighth of the {what}",
        times=(times[1], times[0]),
        figure="exponent",
        value=float(np.log(times[1] / times[0]) / np.log(8.0)),
        target=at_most(1.05 if what == "users" else 1.1),
    )
