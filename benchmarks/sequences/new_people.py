"""People who were left out of training, folded in after few and many events, on edits of Wikipedia.

``python -m benchmarks.sequences.new_people`` writes ``results/<date>-sequence-new-people.md``; ``--keys`` says how many
divisions of the people are tried. Data are below ``NUMPYRO_EXT_DATA``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array, random
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC, NUTS

from numpyro_ext.datasets import load_wikipedia_edits
from numpyro_ext.infer import ChunkedFit
from numpyro_ext.models import collaborative_rnn
from numpyro_ext.sequences import EventSequences, EventSplit

from ..harness import blocks, table, write_report
from .setup import divided, network

WIDTH, RANK = 32, 4
LENGTHS = (0, 1, 3, 10, 30, 100)
NUM_NEXT = 3
"""Events that are predicted after each length, one after the other."""
NETWORK: dict[str, Any] = {"cell": "gru", "width": WIDTH}
WITH_NUMBERS: dict[str, Any] = {**NETWORK, "personal": "low-rank", "rank": RANK}


def trained(split: EventSplit, key: int) -> tuple[ChunkedFit, ChunkedFit]:
    """Pooled network, and one with numbers of a person that begins at it."""
    options: dict[str, Any] = {"num_epochs": 25, "patience": 2}
    pooled = network().run(random.key(key), split, personal="none", **NETWORK, **options)
    begun = {"init_params": pooled.params}
    return pooled, network(guide_scale=0.1).run(random.key(key), split, **WITH_NUMBERS, **begun, **options)


def parted(split: EventSplit, key: int) -> tuple[EventSplit, list[np.ndarray]]:
    """Split without a fifth of the people, and these people's events of items that the others have."""
    number = split.train.num_users
    is_new = np.random.default_rng(key).permutation(number) < number // 5

    def kept(part: EventSequences) -> EventSequences:
        events = ~is_new[part.users]
        return EventSequences(part.items[events], part.lengths[~is_new], part.item_labels, part.user_labels[~is_new])

    rest = EventSplit(kept(split.train), kept(split.validation), kept(split.test))
    known = np.isin(np.arange(split.train.num_items), rest.train.items)
    whole = split.whole
    return rest, [whole[user][known[whole[user]]] for user in np.flatnonzero(is_new)]


def scores_of(pooled: ChunkedFit, fit: ChunkedFit, events: list[np.ndarray], length: int) -> np.ndarray:
    """Log probability of the events after ``length``: pooled, at the mode, averaged over the posterior."""
    rows = []
    for place in range(length, length + NUM_NEXT):
        own = [one for one in events if len(one) > place]
        for one, person in zip(own, fit.fold_in([one[:place] for one in own]), strict=True):
            mode = np.exp(np.asarray(person.predict(jnp.asarray(person.mode)[None])))[0]
            values = (mode[one[place]], person.next_probabilities()[one[place]])
            rows.append((pooled.next_log_probabilities(one[:place])[one[place]], *np.log(values)))
    return np.array(rows)


def by_nuts(fit: ChunkedFit, histories: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, float]:
    """Gaps of means in standard deviations and of standard deviations, relative, of the posteriors and of the Gaussians
    at their modes, shape ``(2, people, numbers)``, and the largest r-hat of the chains."""
    people = fit.fold_in(histories)
    longest = max(map(len, histories))
    items = jnp.stack([np.pad(one, (0, longest - len(one))) for one in histories])
    mask = jnp.arange(longest) < jnp.array([len(one) for one in histories])[:, None]
    modes = jnp.array([one.mode for one in people])
    roots = jnp.array([np.linalg.cholesky(one.covariance_at_mode) for one in people])
    shared = {name: value for name, value in fit.params.items() if "auto" not in name}
    number = len(histories)
    options = {"num_users": number, "num_items": fit.num_items, **WITH_NUMBERS}

    def potential(whitened: Array) -> Array:
        numbers = modes + jnp.einsum("uij,uj->ui", roots, whitened)
        values = {**shared, "coefficients": numbers[:, None]}
        args = (jnp.arange(number), items, mask, jnp.zeros((number, WIDTH)))
        return -numpyro.infer.util.log_density(collaborative_rnn, args, options, values)[0]

    # all people in one chain, in the coordinates of the Gaussians
    kernel = NUTS(potential_fn=potential, adapt_mass_matrix=False, max_tree_depth=6)
    chain = MCMC(kernel, num_warmup=200, num_samples=800, num_chains=2, chain_method="sequential", progress_bar=False)
    chain.run(random.key(0), init_params=jnp.zeros((2, number, RANK)))
    whitened = np.asarray(chain.get_samples(group_by_chain=True))
    numbers = np.asarray(modes) + np.einsum("uij,csuj->csui", roots, whitened)
    mean, sd = numbers.mean((0, 1)), numbers.std((0, 1))
    found = np.array([[one.mean for one in people], modes])
    spreads = np.array([[np.diag(one.covariance), np.diag(one.covariance_at_mode)] for one in people]) ** 0.5
    return (found - mean) / sd, np.moveaxis(spreads, 1, 0) / sd - 1, float(split_gelman_rubin(numbers).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1)
    keys = parser.parse_args().keys
    split = divided(load_wikipedia_edits())
    scores: dict[int, list[np.ndarray]] = {length: [] for length in LENGTHS}
    for key in range(keys):
        rest, events = parted(split, key)
        pooled, fit = trained(rest, key)
        print(pooled.validation_errors.round(3), fit.validation_errors.round(3), flush=True)
        for length in LENGTHS:
            scores[length].append(scores_of(pooled, fit, events, length))
            print(length, len(scores[length][-1]), -scores[length][-1].mean(0), flush=True)
        if key == 0:
            chosen = [one[:60] for one in events if len(one) >= 10][:20]
            means, sds, r_hat = by_nuts(fit, chosen)
            print(np.abs(means).max((1, 2)), np.abs(sds).max((1, 2)), r_hat, flush=True)

    def row(length: int) -> Iterable[Any]:
        all_scores = np.concatenate(scores[length])
        errors, gains = -all_scores.mean(0), all_scores[:, 2:] - all_scores[:, :2]
        less = (f"{-gain.mean():+.3f} ({gain.std() / len(gain) ** 0.5:.3f})" for gain in gains.T)
        return length, len(all_scores), *(f"{e:.3f}" for e in errors), *less

    def gaps(values: np.ndarray, digits: int, unit: str = "") -> Iterable[Any]:
        size = 100.0 if unit else 1.0
        rms, largest = size * np.sqrt((values**2).mean()), size * np.abs(values).max()
        return f"{rms:.{digits}f}{unit}", f"{largest:.{digits - 1}f}{unit}", int((np.abs(values) <= 0.1).sum())

    ways = zip(("weighted draws", "Gaussian at the mode"), means, sds, strict=True)
    lines = blocks(
        "# People who were left out of training",
        f"Edits of Wikipedia; a fifth of the people is left out, {keys} times. The error in nats per event of the next "
        f"{NUM_NEXT} events of those who have as many, by the pooled network (GRU of width {WIDTH}), and by one with "
        f"{RANK} "
        "numbers of a person, which begins at it and is trained with AutoNormal: at the mode of her numbers "
        "(`fold_in`), and averaged over 64 even draws of her posterior.",
        table(
            "events so far | events predicted | pooled | at the mode | posterior | posterior less pooled (s.e.) | "
            "posterior less mode (s.e.)",
            map(row, LENGTHS),
        ),
        "Wanted: posterior at most 0.005 above pooled at every length, and not above the mode up to ten events.",
        f"The posterior of `fold_in` against NUTS (2 x 800 draws, largest r-hat {r_hat:.3f}), {len(chosen)} people of "
        f"10 to 60 events, {means[0].size} numbers; wanted are means within 0.1 standard deviations, and these within "
        "10 %:",
        table(
            "posterior | means, rms | at most | kept by | sds, rms | at most | kept by",
            ((name, *gaps(of_means, 3), *gaps(of_sds, 1, " %")) for name, of_means, of_sds in ways),
        ),
        "Not measured: people after 100 events against the same people trained.",
    )
    write_report("sequence-new-people", lines)


if __name__ == "__main__":
    main()
