"""Cost of a step of ``ChunkedSVI`` on a collaborative network: by hand, by number of users, its products alone.

Run as ``python -m benchmarks.bench_sequences``; CPU seconds of this process, medians of repeated steps. With
``memory device`` or ``memory host`` it prints the peak memory of runs over 100,000 users alone, with ``folding`` what
the posterior of someone new costs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax, random
from numpyro.infer import SVI, Trace_ELBO, init_to_mean
from numpyro.infer.autoguide import AutoNormal
from scipy.special import expit

from numpyro_ext.infer import ChunkedFit, ChunkedSVI
from numpyro_ext.infer.stochastic.data import Sequences
from numpyro_ext.infer.stochastic.program import Program, Setting
from numpyro_ext.infer.stochastic.sampled_softmax import log_proposals
from numpyro_ext.models import collaborative_rnn

from .harness import cpu_seconds, peak_bytes, shortest, table

BATCH, CHUNK, WIDTH, ITEMS, REPEATS = 20, 64, 32, 1000, 15
OPTIM = optax.rmsprop(0.0075, decay=0.997)
OPTIONS = {"num_items": ITEMS, "width": WIDTH, "cell": "gru"}


def median_seconds(step: Callable[[], Any]) -> float:
    """CPU seconds of a step, the first two left out."""
    return float(np.median([cpu_seconds(step)[1] for _ in range(REPEATS + 2)][2:]))


def log_of(num_users: int, num_items: int = ITEMS) -> SimpleNamespace:
    """One chunk of events for each user."""
    lengths = np.full(num_users, CHUNK)
    items = np.random.default_rng(0).integers(0, num_items, lengths.sum())
    return SimpleNamespace(items=items, lengths=lengths, starts=np.cumsum(lengths) - lengths, num_items=num_items)


def by_rows(num_users: int, sampled: int | None = None, **changes: Any) -> float:
    """A step of the engine's own program, with other options of the network, on some items where these are sampled."""
    options = OPTIONS | changes
    source = Sequences.of(log_of(num_users, options["num_items"]), CHUNK, None)
    setting = Setting.of({**options, "num_users": num_users}, jnp.zeros(options["width"]), num_users)
    program = Program(collaborative_rnn, None, OPTIM, Trace_ELBO(), "users", CHUNK, sampled)
    proposal = None if sampled is None else log_proposals(source.events.items, source.num_items)
    users, args = source.first(BATCH, setting.carry)
    state: Any = program.init(random.key(0), num_users, users, args, setting)
    rng, key = np.random.default_rng(1), random.key(1)

    def step() -> Any:
        nonlocal state
        rows = jnp.asarray(rng.choice(num_users, BATCH, replace=False))
        state, _, total, good = program.run_chunks(
            state, key, 1.0, rows, 1, source.events, setting, proposal, width=CHUNK
        )
        return total, good

    return median_seconds(step)


def dense(num_users: int) -> float:
    """A step of NumPyro's SVI on whole tables."""
    svi = SVI(collaborative_rnn, lambda *args, **kwargs: None, OPTIM, Trace_ELBO())
    log = log_of(num_users)
    events = jnp.asarray(log.items.reshape(num_users, CHUNK)[:BATCH])
    args = (jnp.arange(BATCH), events, jnp.ones(events.shape, bool), jnp.zeros((BATCH, WIDTH)))
    state = svi.init(random.key(0), *args, num_users=num_users, **OPTIONS)
    update = jax.jit(partial(svi.update, num_users=num_users, **OPTIONS), donate_argnums=0)

    def step() -> Any:
        nonlocal state
        state, loss = update(state, *args)
        return loss

    return median_seconds(step)


def by_hand(num_users: int) -> float:
    """The same step without NumPyro: rows gathered, gradients, RMSprop, rows written back."""
    rng = np.random.default_rng(0)
    shapes = {"W_in": (WIDTH, ITEMS), "W_zi": (WIDTH, ITEMS), "W_ri": (WIDTH, ITEMS), "W_out": (ITEMS, WIDTH)}
    personal = {name: (num_users, WIDTH, WIDTH) for name in ("W_h", "W_zh", "W_rh")}
    values = {name: jnp.asarray(rng.normal(size=shape) / WIDTH**0.5) for name, shape in (shapes | personal).items()}
    means = {name: jnp.zeros_like(value) for name, value in values.items()}
    log = log_of(num_users)
    events = jnp.asarray(log.items.reshape(num_users, CHUNK))

    def loss(values: dict[str, Array], items: Array) -> Array:
        def cell(h: Array, taken: list[Array]) -> tuple[Array, Array]:
            z = jax.nn.sigmoid(jnp.einsum("uij,uj->ui", values["W_zh"], h) + taken[1])
            r = jax.nn.sigmoid(jnp.einsum("uij,uj->ui", values["W_rh"], h) + taken[2])
            new = jnp.tanh(jnp.einsum("uij,uj->ui", values["W_h"], r * h) + taken[0])
            return (1 - z) * h + z * new, h

        inputs = [values[name].T[items.T] for name in ("W_in", "W_zi", "W_ri")]
        _, before = lax.scan(cell, jnp.zeros((BATCH, WIDTH)), inputs)
        logs = jax.nn.log_softmax(jnp.swapaxes(before, 0, 1) @ values["W_out"].T)
        return -jnp.take_along_axis(logs, items[..., None], 2).sum()

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(values: dict[str, Array], means: dict[str, Array], users: Array) -> Any:
        own = {name: value[users] if name in personal else value for name, value in values.items()}
        total, grads = jax.value_and_grad(loss)(own, events[users])
        for name, grad in grads.items():
            at = users if name in personal else slice(None)
            mean = 0.997 * means[name][at] + 0.003 * grad**2
            means[name] = means[name].at[at].set(mean)
            values[name] = values[name].at[at].add(-0.0075 * grad * lax.rsqrt(mean + 1e-8))
        return values, means, total

    draws = np.random.default_rng(1)

    def step() -> Any:
        nonlocal values, means
        values, means, total = update(values, means, jnp.asarray(draws.choice(num_users, BATCH, replace=False)))
        return total

    return median_seconds(step)


def products_alone(num_items: int = ITEMS, width: int = WIDTH) -> float:
    """The three products with the item matrix in a step: scores, and their gradients."""
    h, W, G = jnp.ones((BATCH * CHUNK, width)), jnp.ones((num_items, width)), jnp.ones((BATCH * CHUNK, num_items))
    products = jax.jit(lambda h, W, G: ((h @ W.T).max(), G @ W, G.T @ h))
    return median_seconds(lambda: products(h, W, G))


Rows = Iterator[tuple[str, str]]


def many_items() -> Rows:
    """A step with 50,000 items and a shared network of width 128: the products alone, all items, and some."""
    options: dict[str, Any] = {"num_items": 50_000, "width": 128, "personal": "none"}
    yield "50,000 items: the three products", f"{products_alone(50_000, 128):.2f}"
    yield "50,000 items: ChunkedSVI, all", f"{by_rows(1_000, **options):.2f}"
    for number in (500, 2_000):
        yield f"50,000 items: ChunkedSVI, {number:,} drawn", f"{by_rows(1_000, number, **options):.2f}"


def engine_of(*guide: Any, **options: Any) -> ChunkedSVI:
    given = {"optim": OPTIM, "plate": "users", "batch_size": BATCH, "chunk": CHUNK, "progress_bar": False}
    return ChunkedSVI(collaborative_rnn, *guide, **given, **options)


def epoch(num_users: int, mean_length: int) -> float:
    """An epoch on lengths as uneven as those of the Wikipedia sequences."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(mean_length) - 0.5, 1.0, num_users).astype(int), 5, 1500)
    items = rng.integers(0, ITEMS, lengths.sum())
    log = SimpleNamespace(items=items, lengths=lengths, starts=np.cumsum(lengths) - lengths, num_items=ITEMS)
    engine = engine_of()
    fit = engine.run(random.key(0), log, num_epochs=1, width=WIDTH, cell="gru")
    options = {"num_epochs": 2, "width": WIDTH, "cell": "gru", "init_state": fit.last_state}
    return cpu_seconds(lambda: engine.run(random.key(0), log, **options))[1]


def folding() -> Rows:
    """Costs of the posterior of someone new, and of many at once: 100 events and eight numbers each."""
    log, rank = log_of(20), 8
    engine = engine_of(AutoNormal(collaborative_rnn, init_loc_fn=init_to_mean))
    options = {"width": WIDTH, "cell": "gru", "personal": "low-rank", "rank": rank}
    fit = engine.run(random.key(0), log, num_epochs=1, **options)
    kinds = {"random": np.random.default_rng(2).integers(0, ITEMS, (100, 100)), "drawn": drawn(fit, 100, 100)}
    for kind, histories in kinds.items():
        person = fit.fold_in(histories[0])
        one_pass = shortest(person.predict, person.mode[None], rounds=20)
        yield f"a forward pass, 100 {kind} events", f"{one_pass:.5f}"
        each = float(np.median([cpu_seconds(fit.fold_in, one)[1] for one in histories[:16]]))
        yield "fold_in of one, the median of 16 (in forward passes)", f"{each:.4f} ({each / one_pass:.0f})"
        fit.fold_in(histories[:2])
        people, together = cpu_seconds(fit.fold_in, histories)
        each = together / len(people)
        yield "fold_in of 100 people, for each", f"{each:.4f} ({each / one_pass:.0f})"
        evidence = np.mean([one.log_evidence for one in people])
        yield "(searches that ended, mean evidence)", f"{sum(one.converged for one in people)}, {evidence:.3f}"
    yield "next_probabilities, 64 draws", f"{shortest(person.next_probabilities):.3f}"


def drawn(fit: ChunkedFit, num_people: int, num_events: int) -> np.ndarray:
    """Events that the network of :func:`folding` draws for people of its prior."""
    rng, values = np.random.default_rng(3), {name: np.asarray(value, float) for name, value in fit.params.items()}
    numbers = rng.normal(size=(num_people, len(values["W_out_basis"])))
    W_h, W_z, W_r = (
        values[name] + np.einsum("uk,kij->uij", numbers, values[f"{name}_basis"]) for name in ("W_h", "W_zh", "W_rh")
    )
    h, items = np.zeros((num_people, WIDTH)), np.zeros((num_people, num_events), int)
    for place in range(num_events):
        logits = h @ values["W_out"].T + numbers @ values["W_out_basis"]
        items[:, place] = (logits + rng.gumbel(size=logits.shape)).argmax(1)
        taken = [values[name].T[items[:, place]] for name in ("W_in", "W_zi", "W_ri")]
        z = expit(np.einsum("uij,uj->ui", W_z, h) + taken[1])
        r = expit(np.einsum("uij,uj->ui", W_r, h) + taken[2])
        h = (1 - z) * h + z * np.tanh(np.einsum("uij,uj->ui", W_h, r * h) + taken[0])
    return items


def memory(tables: Any) -> Rows:
    """Peak memory of a run over 100,000 users, of whom 1,000 have events, and of one that goes on from it."""
    log, number = log_of(1_000), 100_000
    lengths = np.pad(log.lengths, (0, number - 1_000))
    log = SimpleNamespace(items=log.items, lengths=lengths, starts=np.cumsum(lengths) - lengths, num_items=ITEMS)
    engine, state = engine_of(tables=tables), None
    for num_epochs in (1, 2):
        given = {"num_epochs": num_epochs, "init_state": state, "width": WIDTH, "cell": "gru"}
        state = engine.run(random.key(0), log, **given).last_state
        yield f"(peak memory so far, tables on the {tables}, GiB)", f"{peak_bytes() / 2**30:.2f}"


def all_costs() -> Rows:
    """All but the memory of many users."""
    _, first = cpu_seconds(engine_of().run, random.key(0), log_of(BATCH), num_epochs=1, width=WIDTH, cell="gru")
    yield "the first batch of the process, with its compilation", f"{first:.1f}"
    yield from folding()
    yield "the three products with the item matrix", f"{products_alone():.4f}"
    for users in (1_000, 10_000, 100_000):
        yield f"by hand, {users:,} users", f"{by_hand(users):.4f}"
        yield f"ChunkedSVI, {users:,} users", f"{by_rows(users):.4f}"
        yield "(peak memory so far, GiB)", f"{peak_bytes() / 2**30:.2f}"
    for users in (1_000, 8_227):
        yield f"NumPyro's SVI, {users:,} users", f"{dense(users):.4f}"
    yield from many_items()
    yield "an epoch: 567 users, 46,000 events", f"{epoch(567, 81):.2f}"


def main() -> None:
    """Print the table, or peak memory."""
    what, *rest = [*sys.argv[1:], "all"]
    rows = {"memory": lambda: memory(rest[0]), "folding": folding, "all": all_costs}
    table("what | CPU-s", rows[what]())


if __name__ == "__main__":
    main()
