"""People of few events, and people who come after training, on simulated chains whose truth is known.

``python -m benchmarks.sequence_new_people`` writes ``results/<date>-sequence-new-people.md``; ``--keys`` says how many
simulations there are.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from jax import random
from numpyro.handlers import substitute
from numpyro.infer import MCMC, NUTS
from scipy.special import softmax

from numpyro_ext.infer import ChunkedFit, ChunkedSVI
from numpyro_ext.models import collaborative_rnn
from numpyro_ext.sequences import EventSequences, EventSplit

from .results_table import write_report

WINDOWS = {0: (0,), 1: (1,), 3: (3, 4), 10: (10, 12), 30: (30, 33), 100: (100, 103, 106)}
"""Events of the history, and the places that are looked at for each."""
WIDTH, RANK = 16, 2
TRAINED, LEFT_OUT, LENGTH = 120, 40, 110


def engine(learning_rate: float, **options: Any) -> ChunkedSVI:
    """Engine of both studies."""
    return ChunkedSVI(
        collaborative_rnn, optim=optax.adam(learning_rate), plate="users", batch_size=20, progress_bar=False, **options
    )


def drawn(chains: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    """Items of each person's chain, shape ``(people, length)``; the first is uniform."""
    items = np.zeros((len(chains), length), int)
    items[:, 0] = rng.integers(chains.shape[-1], size=len(chains))
    for place in range(1, length):
        rows = chains[np.arange(len(chains)), items[:, place - 1]]
        items[:, place] = (rng.random(len(chains))[:, None] > rows.cumsum(-1)).sum(-1).clip(max=chains.shape[-1] - 1)
    return items


def log_of(items: np.ndarray, num_items: int) -> EventSequences:
    lengths = np.full(len(items), items.shape[1])
    return EventSequences(items.ravel(), lengths, np.arange(num_items), np.arange(len(items)))


def few_events(keys: int) -> list[str]:
    """Two groups with chains of their own and ten events a person: free matrices against two numbers a person."""
    rows = []
    alone, apart = engine(0.01, chunk=16), engine(0.01, chunk=16, local="laplace")
    for key in range(keys):
        rng = np.random.default_rng(key)
        chains = rng.dirichlet(np.full(20, 0.1), (2, 20))[np.arange(40) % 2]
        items = drawn(chains, 63, rng)
        split = EventSplit(*(log_of(part, 20) for part in np.split(items, [10, 13], axis=1)))
        true = -np.log(chains[np.arange(40)[:, None], items[:, 12:-1], items[:, 13:]]).mean()
        errors = []
        for trainer, options in ((alone, {"personal": "full"}), (apart, {"personal": "low-rank", "rank": RANK})):
            fit = trainer.run(random.key(key), split, num_epochs=200, patience=10, width=8, **options)
            errors.append(-fit.log_predictive(split, num_draws=16 if trainer is apart else 1).mean())
        rows.append(f"| {key} | {true:.3f} | {errors[0]:.3f} | {errors[1]:.3f} | {errors[1] - errors[0]:+.3f} |")
        print(rows[-1], flush=True)
    return rows


def excess(log_probabilities: np.ndarray, true: np.ndarray) -> float:
    """Nats per event above the truth."""
    return float(np.sum(true * (np.log(true) - log_probabilities)))


def new_people(keys: int) -> tuple[list[str], list[str]]:
    """People who were left out, after some events: pooled network, their mode, their posterior."""
    num_items, gaps, trained = 12, [], []
    pooled_engine, engine_of_people = engine(0.01, chunk=55), engine(0.01, chunk=128, local="laplace")
    nuts: list[str] = []
    for key in range(keys):
        rng = np.random.default_rng(100 + key)
        shared, basis = rng.normal(size=(num_items, num_items)), rng.normal(size=(RANK, num_items, num_items))
        numbers = rng.normal(size=(TRAINED + LEFT_OUT, RANK))
        chains = softmax(1.5 * shared + np.einsum("uk,kij->uij", numbers, basis), axis=-1)
        items = drawn(chains, LENGTH, rng)
        known = items[:TRAINED]
        nothing = log_of(known[:, :0], num_items)
        split = EventSplit(log_of(known[:, :100], num_items), log_of(known[:, 100:], num_items), nothing)
        options = {"width": WIDTH}
        pooled = pooled_engine.run(random.key(key), split, num_epochs=60, patience=5, personal="none", **options)
        fit = engine_of_people.run(
            random.key(key),
            split,
            num_epochs=40,
            patience=5,
            personal="low-rank",
            rank=RANK,
            init_params=pooled.params,
            **options,
        )
        for length, places in WINDOWS.items():
            histories = [(u, items[u, :place]) for u in range(TRAINED, len(items)) for place in places]
            people = fit.fold_in([history for _, history in histories])
            for (user, history), person in zip(histories, people, strict=True):
                if not person.converged:
                    raise RuntimeError("a mode was not found")
                true = chains[user, history[-1]] if length else np.full(num_items, 1 / num_items)
                gaps.append(
                    (
                        length,
                        key * 1000 + user,
                        excess(pooled.next_log_probabilities(history), true),
                        excess(np.asarray(person.predict(jnp.asarray(person.mean)[None]))[0], true),
                        excess(np.log(person.next_probabilities(64)), true),
                    )
                )
        for user in range(LEFT_OUT):
            for place in WINDOWS[100]:
                found = fit.next_log_probabilities(items[user, :place], user=user, num_draws=16)
                trained.append(excess(found, chains[user, items[user, place - 1]]))
        if key == 0:
            nuts = against_nuts(fit, items[TRAINED : TRAINED + 20, :100], num_items)
    table, rows = np.array(gaps), []
    for length in WINDOWS:
        part = table[table[:, 0] == length]
        people_of = np.unique(part[:, 1])
        means = np.array([part[part[:, 1] == one, 2:].mean(0) for one in people_of])
        against = means[:, 2:] - means[:, :2]
        spread = against.std(0) / len(means) ** 0.5
        rows.append(
            f"| {length} | {means[:, 0].mean():.3f} | {means[:, 1].mean():.3f} | {means[:, 2].mean():.3f} | "
            f"{against[:, 0].mean():+.3f} ({spread[0]:.3f}) | {against[:, 1].mean():+.3f} ({spread[1]:.3f}) |"
        )
        print(rows[-1], flush=True)
    rows.append("")
    rows.append(f"People who were trained, after 100 events and more: {np.mean(trained):.3f}.")
    print(rows[-1], flush=True)
    return rows, nuts


def against_nuts(fit: ChunkedFit, items: np.ndarray, num_items: int) -> list[str]:
    """Gaussians of some people against NUTS at the same parameters."""
    number = len(items)
    model = substitute(
        collaborative_rnn, data={n: v for n, v in fit.params.items() if not n.startswith("coefficients")}
    )
    kernel = NUTS(model)
    mcmc = MCMC(kernel, num_warmup=300, num_samples=1500, progress_bar=False)
    arguments = (jnp.arange(number), jnp.asarray(items), jnp.ones(items.shape, bool), jnp.zeros((number, WIDTH)))
    mcmc.run(
        random.key(1),
        *arguments,
        num_users=number,
        num_items=num_items,
        width=WIDTH,
        personal="low-rank",
        rank=RANK,
    )
    draws = np.asarray(mcmc.get_samples()["coefficients"])[:, :, 0]
    people = fit.fold_in(list(items))
    means = np.stack([person.mean for person in people])
    spreads = np.sqrt(np.stack([np.diag(person.covariance) for person in people]))
    gap, ratio = np.abs(means - draws.mean(0)) / draws.std(0), np.abs(spreads / draws.std(0) - 1)
    number_of_draws = numpyro.diagnostics.summary({"c": draws}, group_by_chain=False)["c"]["n_eff"].min()
    error = number_of_draws**-0.5
    lines = [
        f"Means differ by {np.median(gap):.3f} standard deviations at the median and {gap.max():.3f} at most, standard",
        f"deviations by {100 * np.median(ratio):.1f} % and {100 * ratio.max():.1f} %. NUTS has {number_of_draws:.0f}",
        f"effective draws or more: its own error is up to {error:.3f} standard deviations, and {71 * error:.1f} % of one.",
    ]
    print("\n".join(lines), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=5)
    keys = parser.parse_args().keys
    few = few_events(keys)
    new, nuts = new_people(keys)
    lines = [
        "# People of few events, and people who come after training",
        "",
        "## Ten events of each person",
        "",
        "Two groups with chains of their own, 40 people, 20 items, 10 events each, 3 to stop by, 50 to be predicted.",
        "Nats per event. Width 8, tanh, Adam 0.01. Wanted: two numbers of a person, integrated out, at least 0.1 below",
        "free matrices.",
        "",
        "| simulation | true chains | free matrices | two numbers, integrated out | difference |",
        "|---|---|---|---|---|",
        *few,
        "",
        "## People who were left out of training",
        "",
        f"Chains that differ by two numbers of a person; {TRAINED} people trained, {LEFT_OUT} left out, 12 items,",
        f"{keys} simulations. Nats per event above the true chain; the network of width {WIDTH} without personal part",
        "(pooled), the mode of a person's numbers given her events, and probabilities averaged over 64 draws of her",
        "Gaussian. Differences have standard errors over people. Wanted: posterior no more than pooled + 0.005 at",
        "every length, no more than the mode at 10 events or fewer, at 100 within 0.02 of people who were trained.",
        "",
        "| events so far | pooled | mode | posterior | posterior less pooled | posterior less mode |",
        "|---|---|---|---|---|---|",
        *new,
        "",
        "## Gaussians against NUTS",
        "",
        "Twenty people who were left out, 100 events each. Wanted: means within 0.1 standard deviations, standard",
        "deviations within 10 %.",
        "",
        *nuts,
    ]
    write_report("sequence-new-people", lines, "sequence_new_people")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
