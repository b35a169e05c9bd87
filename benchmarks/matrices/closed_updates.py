"""Binary matrices by closed updates: ``python -m benchmarks.matrices.closed_updates WORK`` writes the tables.

Time of sweeps on dense and sparse cells, of minibatches, on all devices (``XLA_FLAGS`` may make several) and in batches
of rows; and what is found again of one held-out item of each transaction on BMS-WebView-2 and on retail, with the
preparation of Houlsby (2014), chapter 5. Some minutes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.datasets import data_path
from numpyro_ext.infer import BilinearVG, fit_batches, ranking_quality
from numpyro_ext.models import binary_factorization, paired_symbols

from ..harness import Study, blocks, cpu_seconds, table
from .ratings import read_ratings

_NUM_COLUMNS, _NUM_ROWS, _RANK = 1000, 2000, 20


def transactions(name: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ones of the most frequent columns and some rows with ten or more of them; one of each row is held out.

    :param str name: of the file.
    :param int seed: of the choice of rows and of what is held out.
    :return: rows and columns of the ones that are left, and of those held out.
    """
    found = np.load(data_path("transactions", f"{name}.npz"))
    rows = np.repeat(np.arange(len(found["indptr"]) - 1), np.diff(found["indptr"]))
    _, cols = np.unique(found["indices"], return_inverse=True)
    frequent = np.argsort(-np.bincount(cols), kind="stable")[:_NUM_COLUMNS]
    place = np.full(cols.max() + 1, -1)
    place[frequent] = np.arange(_NUM_COLUMNS)
    rows, cols = rows[place[cols] >= 0], place[cols[place[cols] >= 0]]
    rng = np.random.default_rng(seed)
    long_enough = np.flatnonzero(np.bincount(rows) >= 10)
    chosen = np.sort(rng.choice(long_enough, min(_NUM_ROWS, long_enough.size), replace=False))
    is_chosen = np.isin(rows, chosen)
    rows, cols = np.searchsorted(chosen, rows[is_chosen]), cols[is_chosen]
    is_test = np.zeros(rows.size, bool)
    for row in range(chosen.size):
        is_test[rng.choice(np.flatnonzero(rows == row))] = True
    return rows[~is_test], cols[~is_test], rows[is_test], cols[is_test]


def numpy_sweeps(x: np.ndarray, rank: int, num_sweeps: int, seed: int = 0) -> float:
    """CPU seconds of a sweep of the same updates written with NumPy, all cells in one matrix."""
    rng = np.random.default_rng(seed)
    blocks = [[0.1 * rng.standard_normal((n, rank + 2)), np.full((n, rank + 2), 0.1)] for n in x.shape]
    held = (rank + 1, rank)  # u ends with a one where v has its bias, and the other way round
    for (mean, variance), place in zip(blocks, held, strict=True):
        mean[:, place], variance[:, place] = 1.0, 0.0
    start = time.process_time()
    for _ in range(num_sweeps):
        for side in (0, 1):
            (u, s), (v, t) = blocks[side], blocks[1 - side]
            target = (x if side == 0 else x.T) - 0.5
            square = (u @ v.T) ** 2 + u**2 @ t.T + s @ (v**2 + t).T
            xi = np.sqrt(square)
            weight = np.tanh(xi / 2.0) / (2.0 * xi)
            free = np.setdiff1d(np.arange(rank + 2), held[side])
            fixed = held[side]
            second = (v[:, free, None] * v[:, None, free]).reshape(len(v), -1)
            size = free.size
            precision = (weight @ second).reshape(-1, size, size)
            precision[:, np.arange(size), np.arange(size)] += weight @ t[:, free] + 1.0
            linear = target @ v[:, free] - (weight * v[:, fixed]) @ v[:, free]
            u[:, free] = np.linalg.solve(precision, linear[..., None])[..., 0]
            s[:, free] = 1.0 / precision[:, np.arange(size), np.arange(size)]
    return (time.process_time() - start) / num_sweeps


def step_seconds(fit: Callable[[int], Any], few: int, many: int) -> tuple[float, float]:
    """CPU seconds of a step, from fits of few and of many after one that compiles, and of this one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*did not converge")
        first, short, long = (cpu_seconds(fit, number)[1] for number in (few, few, many))
    return (long - short) / (many - few), first


def sweep_seconds(model: Callable[..., None], args: tuple[Any, ...], **options: Any) -> tuple[float, float]:
    """The same of sweeps over some cells; ``kwargs`` among the options are those of the model."""
    kwargs, (few, many) = options.pop("kwargs"), options.pop("steps", (10, 30))
    if options.get("zeros") != "sampled":
        options |= {"num_restarts": 0, "tol": 1e-15}

    def fit(number: int) -> None:
        engine = BilinearVG(model, progress_bar=False, num_steps=number, num_samples=1, **options)
        engine.run(jax.random.key(0), *args, **kwargs)

    return step_seconds(fit, few, many)


def ratings_model(rows: Any, cols: Any, y: Any, num_rows: int, num_cols: int, rank: int, learns: bool) -> None:
    """Normal values with biases."""
    level = numpyro.sample("level", dist.Normal(3.0, 1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0)) if learns else 1.0
    with numpyro.plate("rows", num_rows):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("cols", num_cols):
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))
        g = numpyro.sample("g", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal((u[rows] * v[cols]).sum(-1) + b[rows] + g[cols] + level, noise), obs=y)


Rows = list[tuple[str, ...]]
JAAKKOLA = {"bound": "jaakkola"}
BY_ONES = JAAKKOLA | {"unlisted_cells": "zero"}
RANDOM = ((2000, 1000, 30_000), (2000, 1000, 120_000), (2000, 8000, 30_000))
"""Rows, columns and ones at random places."""


def speeds(draw: int) -> Rows:
    """Rows of the table of sweeps and minibatches."""
    rows, cols, _, _ = transactions("bms-webview-2")
    num_rows = int(rows.max()) + 1
    sizes = {"num_rows": num_rows, "num_cols": _NUM_COLUMNS, "rank": _RANK}
    x = np.zeros((num_rows, _NUM_COLUMNS))
    x[rows, cols] = 1.0
    floor = numpy_sweeps(x, _RANK, 3)
    table_rows = [(f"NumPy, all {x.size} cells as a matrix", f"{floor:.3f}", f"{1e6 * floor / x.size:.2f}", "")]
    ones = (rows, cols, np.ones(rows.size, int))
    everything = (*np.divmod(np.arange(x.size), _NUM_COLUMNS), x.ravel().astype(int))
    sampled = {"zeros": "sampled", "batch_size": 10_000, "steps": (100, 400)}
    jobs: list[tuple[str, Any, tuple[Any, ...], int, dict[str, Any], float | None]] = [
        ("all cells listed", binary_factorization, everything, x.size, JAAKKOLA, floor),
        (
            "the same, full covariances",
            binary_factorization,
            everything,
            x.size,
            JAAKKOLA | {"covariance": "full"},
            None,
        ),
        ('`zeros="exact"`', binary_factorization, ones, x.size, BY_ONES | {"zeros": "exact"}, floor),
        ('`zeros="by_row"`, by the ones', binary_factorization, ones, rows.size, BY_ONES, 0.05 * floor),
        ("minibatches of 10⁴ drawn cells", binary_factorization, ones, 10_000, BY_ONES | sampled, 1.5e-2),
    ]
    jobs = [(*job[:4], job[4] | {"kwargs": sizes}, job[5]) for job in jobs]
    for number_of_rows, number_of_columns, number in RANDOM:
        place = np.random.default_rng(0).choice(number_of_rows * number_of_columns, number, replace=False)
        cells = (*np.divmod(np.sort(place), number_of_columns), np.ones(number, int))
        given = {"num_rows": number_of_rows, "num_cols": number_of_columns, "rank": _RANK}
        name = f"by the ones, {number} at random in {number_of_rows} × {number_of_columns}"
        jobs.append((name, binary_factorization, cells, number, BY_ONES | {"kwargs": given}, None))
    users, items, levels = read_ratings()
    for learns in (False, True):
        given = {"num_rows": 943, "num_cols": 1682, "rank": 10, "learns": learns}
        name = "Normal values, MovieLens-100K, rank 10" + (", noise learned" if learns else "")
        cells = users - 1, items - 1, levels.astype(float)
        jobs.append((name, ratings_model, cells, levels.size, {"kwargs": given}, 0.5e-6 * levels.size))
    for name, model, args, number, options, target in jobs:
        seconds, first = sweep_seconds(model, args, **options)
        reached = "" if target is None else f" ≤ {target:.3f} s: {seconds / target:.2f} of it"
        cells_a_step = f"{seconds:.3f}", f"{1e6 * seconds / number:.2f}"
        table_rows.append((name, *cells_a_step, f"first run {first:.1f} s.{reached}"))
    return table_rows


class Divided(NamedTuple):
    """Ones of a binary matrix, or pairs, as models of closed updates take them."""

    name: str
    engine: Callable[..., BilinearVG]
    arguments: dict[str, np.ndarray]
    """The last axis, or the arguments in turn, begin with the row and the column of a cell."""
    sizes: dict[str, Any]
    num_rows: str
    """Name of the argument."""

    def batches(self, num_batches: int) -> Iterator[dict[str, Any]]:
        """Rows in equal parts, numbered from zero in each, by the names of arguments."""
        edges = np.linspace(0, self.sizes[self.num_rows], num_batches + 1).astype(int)
        table = np.column_stack([*self.arguments.values()])
        for start, end in zip(edges[:-1], edges[1:], strict=True):
            mine = table[(table[:, 0] >= start) & (table[:, 0] < end)] - [start, 0, 0]
            parts = mine.T if len(self.arguments) == 3 else [mine]
            yield dict(zip(self.arguments, parts, strict=True)) | {self.num_rows: end - start}


def ones_and_pairs() -> tuple[Divided, Divided]:
    """Ones, and pairs of which some occur often, of a matrix with twice as many rows as columns."""
    rng, num_rows = np.random.default_rng(0), 2 * _NUM_COLUMNS
    ones = rng.uniform(size=(num_rows, _NUM_COLUMNS)) < 0.02 * rng.gamma(1.0, 1.0, size=(num_rows, 1))
    rows, columns = np.nonzero(ones)
    places = (rng.geometric(p, 400_000) - 1 for p in (0.002, 0.005))
    pairs = np.unique(np.minimum(np.stack([*places], 1), [num_rows - 1, _NUM_COLUMNS - 1]), axis=0)
    pairs = np.column_stack([pairs, np.ones(len(pairs), int)])
    options = {"bound": "jaakkola", "tol": 1e-300, "num_restarts": 0, "progress_bar": False}
    binary = partial(BilinearVG, binary_factorization, unlisted_cells="zero", **options)
    cells = {"rows": rows, "cols": columns, "x": np.ones(len(rows), int)}
    of_ones = {"rank": _RANK, "num_rows": num_rows, "num_cols": _NUM_COLUMNS}
    of_pairs = {"rank": _RANK, "num_users": num_rows, "num_items": _NUM_COLUMNS, "num_censored": float(len(pairs))}
    return (
        Divided(f"{len(rows)} ones", binary, cells, of_ones, "num_rows"),
        Divided(
            f"{len(pairs)} pairs",
            partial(BilinearVG, paired_symbols, **options),
            {"pairs": pairs},
            of_pairs,
            "num_users",
        ),
    )


def divided(draw: int) -> Rows:
    """CPU microseconds of a cell in a sweep, in a sweep on all devices, and in an epoch of four batches."""
    found = []
    for problem in ones_and_pairs():

        def sweeps(number: int, problem: Divided = problem, **options: Any) -> None:
            engine = problem.engine(num_steps=number, **options)
            engine.run(jax.random.key(0), **problem.arguments, **problem.sizes)

        def epochs(number: int, problem: Divided = problem) -> None:
            given = {name: size for name, size in problem.sizes.items() if name != problem.num_rows}
            fit_batches(problem.engine(), jax.random.key(0), problem.batches(4), over="u", num_epochs=number, **given)

        ways = sweeps, partial(sweeps, devices=jax.devices()), epochs
        one, *others = (step_seconds(way, 5, 25)[0] for way in ways)
        number = len(next(iter(problem.arguments.values())))
        times = (f"{1e6 * seconds / number:.2f} ({seconds / one:.2f})" for seconds in others)
        found.append((problem.name, str(len(jax.devices())), f"{1e6 * one / number:.2f}", *times))
    return found


_FITS: tuple[tuple[str, dict[str, Any]], ...] = (
    ('`zeros="exact"`, 20 sweeps', {"zeros": "exact", "num_steps": 20}),
    ('`zeros="exact"`, 100 sweeps', {"zeros": "exact", "num_steps": 100}),
    ('`zeros="by_row"`, 20 sweeps', {"zeros": "by_row", "num_steps": 20}),
    ('`zeros="by_row"`, 100 sweeps', {"zeros": "by_row", "num_steps": 100}),
    ('`zeros="shared"`, 20 sweeps', {"zeros": "shared", "num_steps": 20}),
    ("SIBM, `balanced`, 1000 minibatches of 10⁴", {"zeros": "sampled", "num_steps": 1000, "batch_size": 10_000}),
    ("SIBM, `biased`, 1000 minibatches of 10⁴",
     {"zeros": "sampled", "num_steps": 1000, "batch_size": 10_000, "sampler": "biased"}),
    ('SIBM, `balanced`, 800 of `"auto"`', {"zeros": "sampled", "num_steps": 800}),
)  # fmt: skip


def hits(scores: np.ndarray, listed: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> float:
    """Share of held-out ones among the ten best columns that are not listed."""
    scores = scores.copy()
    scores[listed] = -np.inf
    best = np.argsort(-scores, axis=1, kind="stable")[test[0], :10]
    return float(np.mean(np.any(best == test[1][:, None], axis=1)))


def ease(rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int], ridge: float) -> np.ndarray:
    """Scores of Steck (2019): each column by a linear regression on all others."""
    x = np.zeros(shape)
    x[rows, cols] = 1.0
    inverse = np.linalg.inv(x.T @ x + ridge * np.eye(shape[1]))
    weight = -inverse / np.diag(inverse)
    np.fill_diagonal(weight, 0.0)
    return np.asarray(x @ weight)


def tuned_ease(rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """The same with the ridge that finds most of one more one of each row."""
    order = np.random.default_rng(seed).permutation(rows.size)
    held_out = order[np.unique(rows[order], return_index=True)[1]]
    kept = np.setdiff1d(np.arange(rows.size), held_out)
    listed, test = (rows[kept], cols[kept]), (rows[held_out], cols[held_out])
    found = {ridge: hits(ease(*listed, shape, ridge), listed, test) for ridge in (10.0, 30.0, 100.0, 300.0, 1000.0)}
    return ease(rows, cols, shape, max(found, key=lambda ridge: found[ridge]))


def with_drawn_zeros(
    rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int], seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ones and as many zeros, drawn from all others with equal chances and listed as if they were all there are
    (Paquet and Koenigstein 2013): rows, columns and outcomes."""
    zeros = np.setdiff1d(np.arange(shape[0] * shape[1]), rows * shape[1] + cols)
    drawn = np.divmod(np.random.default_rng(seed).choice(zeros, rows.size, replace=False), shape[1])
    outcomes = np.repeat([1, 0], rows.size)
    return np.concatenate([rows, drawn[0]]), np.concatenate([cols, drawn[1]]), outcomes


def rankings() -> Iterator[tuple[str, ...]]:
    """Rows of the table of rankings."""
    for name, targets in (
        ("bms-webview-2", "SIBM .372 to .398, batch .322; here EASE .526, popularity .121"),
        ("retail", "SIBM .230 to .234, batch .229; here EASE .290, popularity .237"),
    ):
        rows, cols, test_rows, test_cols = transactions(name)
        shape = int(rows.max()) + 1, _NUM_COLUMNS
        popularity = np.tile(np.bincount(cols, minlength=_NUM_COLUMNS).astype(float), (shape[0], 1))
        hit = hits(popularity, (rows, cols), (test_rows, test_cols))
        yield f"{name}, {rows.size} ones", "popularity", f"{hit:.3f}", "", "", "", targets
        scores, seconds = cpu_seconds(tuned_ease, rows, cols, shape)
        hit = hits(scores, (rows, cols), (test_rows, test_cols))
        yield name, "EASE, ridge by validation", f"{hit:.3f}", "", "", f"{seconds:.0f}", ""
        given = {"num_rows": shape[0], "num_cols": _NUM_COLUMNS, "rank": _RANK}
        ones, drawn = (rows, cols, np.ones(rows.size, int)), with_drawn_zeros(rows, cols, shape)
        for words, options in _FITS:
            restarts = {} if options["zeros"] == "sampled" else {"num_restarts": 0}
            engine, seconds = fitted(ones, given, unlisted_cells="zero", **options, **restarts)
            quality = ranking_quality(engine, test_rows, test_cols)
            bound = f"{float(engine.log_evidence) / 1e3:.1f}"
            yield name, words, f"{quality.hits[10]:.3f}", f"{quality.mean_rank:.3f}", bound, f"{seconds:.0f}", ""
        for num_steps in (20, 100):
            engine, seconds = fitted(drawn, given, num_steps=num_steps, num_restarts=0)
            u, v, b, g = (np.asarray(engine.posterior[site].mean) for site in ("u", "v", "b", "g"))
            hit = hits(u @ v.T + b[:, None] + g, (rows, cols), (test_rows, test_cols))
            words = f"as many zeros, drawn and listed (Paq13), {num_steps} sweeps"
            yield name, words, f"{hit:.3f}", "", "", f"{seconds:.0f}", ""


def fitted(cells: tuple[np.ndarray, ...], given: dict[str, int], **options: Any) -> tuple[BilinearVG, float]:
    """A fit of listed cells, and its CPU seconds."""
    engine = BilinearVG(binary_factorization, bound="jaakkola", progress_bar=False, num_samples=1, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a given number of steps is not convergence
        _, seconds = cpu_seconds(engine.run, jax.random.key(0), *cells, **given)
    return engine, seconds


def pair_rankings() -> Iterator[tuple[str, ...]]:
    """Rows of the table of pairs: one pair of each user of MovieLens-1M held out, and found again among the others."""
    found = np.load(data_path("ml-1m-pairs", "pairs.npz"))
    users, items = (np.unique(found[name], return_inverse=True)[1] for name in ("user", "movie"))
    rng = np.random.default_rng(0)
    order = rng.permutation(users.size)
    held_out = order[np.unique(users[order], return_index=True)[1]]
    kept = np.setdiff1d(np.arange(users.size), held_out)
    pairs = np.column_stack([users[kept], items[kept], np.ones(kept.size, int)])
    test = users[held_out], items[held_out]
    num_users, num_items = int(users.max()) + 1, int(items.max()) + 1
    popularity = np.bincount(items[kept], minlength=num_items).astype(float)
    scores = np.tile(popularity, (num_users, 1))
    scores[users[kept], items[kept]] = np.nan
    own = popularity[test[1]][:, None]
    ranks = ((scores < own).sum(1) + 0.5 * ((scores == own).sum(1) - 1.0)) / np.isfinite(scores).sum(1)
    hit = np.mean((scores > own).sum(1) + 0.5 * ((scores == own).sum(1) - 1.0) < 10)
    yield "popularity", f"{ranks.mean():.3f}", f"{hit:.3f}", "", ""
    for ratio in (1.0, 4.0):
        engine = BilinearVG(
            paired_symbols, bound="jaakkola", num_steps=10, num_restarts=0, progress_bar=False, num_samples=1
        )
        given = {"num_users": num_users, "num_items": num_items, "rank": _RANK, "num_censored": ratio * kept.size}
        _, seconds = cpu_seconds(engine.run, jax.random.key(0), pairs, **given)
        for by in ("joint", "taste"):
            quality = ranking_quality(engine, *test, by=by, ties="half")
            bound = f"{float(engine.log_evidence) / 1e6:.4f}"
            name = f'paired symbols, {ratio:g} censored for each pair, `by="{by}"`, 10 sweeps'
            yield name, f"{quality.mean_rank:.3f}", f"{quality.hits[10]:.3f}", bound, f"{seconds:.0f}"


def main() -> None:
    """Measure what ``WORK`` lacks, and write the tables."""
    experiments: dict[str, Callable[[int], Rows]] = {
        "speeds": speeds,
        "divided": divided,
        "rankings": lambda draw: list(rankings()),
        "pairs": lambda draw: list(pair_rankings()),
    }
    study = Study(__doc__, experiments)
    found = {name: [row for rows in draws for row in rows] for name, draws in study.run().items()}
    lines = blocks(
        "# Binary matrices by closed updates",
        "CPU seconds of a sweep or minibatch, compilation apart; rank 20 with biases and an intercept, `float64`.",
        table("cells | CPU s | µs a cell | target and what was reached", found["speeds"]),
        "CPU microseconds of a cell, and ratios to a sweep on one device.",
        table("data | devices | a sweep | on all devices | an epoch of four batches", found["divided"]),
        "One item of each row held out: share found among the first ten, mean rank, bound in thousands.",
        table("data | ranking | recall@10 | mean rank | bound / 1000 | CPU s | reported elsewhere", found["rankings"]),
        "MovieLens-1M, 1,000,209 pairs of 6,040 users and 3,706 films, rank 20, all hyperparameters one.",
        table("ranking | mean rank | hit@10 | bound / 10⁶ | CPU s, the first with compilation", found["pairs"]),
    )
    study.write("binary-matrices", lines)


if __name__ == "__main__":
    main()
