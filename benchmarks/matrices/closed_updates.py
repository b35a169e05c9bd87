"""Binary matrices by closed updates: ``python -m benchmarks.matrices.closed_updates`` writes the table.

Time of sweeps on dense and sparse cells, and what is found again of one held-out item of each transaction on
BMS-WebView-2 and on retail, with the preparation of Houlsby (2014), chapter 5. Some minutes.
"""

from __future__ import annotations

import gzip
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.datasets import data_path
from numpyro_ext.infer import BilinearVG, ranking_quality
from numpyro_ext.models import binary_factorization, paired_symbols

from ..harness import blocks, cpu_seconds, table, write_report

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


def sweep_seconds(model: Callable[..., None], args: tuple[Any, ...], **options: Any) -> tuple[float, float]:
    """CPU seconds of one sweep of a run that goes on, and of the first run with its compilation."""
    kwargs = options.pop("kwargs")

    def run(num_steps: int) -> float:
        engine = BilinearVG(
            model, progress_bar=False, num_restarts=0, num_steps=num_steps, tol=1e-15, num_samples=1, **options
        )
        return cpu_seconds(engine.run, jax.random.key(0), *args, **kwargs)[1]

    first, few, many = run(1), run(10), run(30)
    return (many - few) / 20.0, first


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


def speeds() -> Iterator[Iterable[Any]]:
    """Rows of the table of sweeps."""
    rows, cols, _, _ = transactions("bms-webview-2")
    num_rows = int(rows.max()) + 1
    sizes = {"num_rows": num_rows, "num_cols": _NUM_COLUMNS, "rank": _RANK}
    x = np.zeros((num_rows, _NUM_COLUMNS))
    x[rows, cols] = 1.0
    numpy_seconds = numpy_sweeps(x, _RANK, 3)
    yield f"NumPy, all {x.size} cells as a matrix", f"{numpy_seconds:.3f}", f"{1e6 * numpy_seconds / x.size:.2f}", ""
    ones = (rows, cols, np.ones(rows.size, int))
    everything = (*np.divmod(np.arange(x.size), _NUM_COLUMNS), x.ravel().astype(int))
    jobs: list[tuple[str, Any, tuple[Any, ...], int, dict[str, Any], float]] = [
        ("all cells listed", binary_factorization, everything, x.size, {"bound": "jaakkola"}, 1.0),
        ("all cells listed, full covariances", binary_factorization, everything, x.size,
         {"bound": "jaakkola", "covariance": "full"}, np.nan),
        ("`zeros=\"exact\"`", binary_factorization, ones, x.size,
         {"bound": "jaakkola", "unlisted_cells": "zero", "zeros": "exact"}, 1.0),
        ("`zeros=\"by_row\"`, by the ones", binary_factorization, ones, rows.size,
         {"bound": "jaakkola", "unlisted_cells": "zero"}, 0.05),
    ]  # fmt: skip
    for name, model, args, number, options, target in jobs:
        seconds, first = sweep_seconds(model, args, kwargs=sizes, **options)
        reached = "" if np.isnan(target) else f"≤ {target} of NumPy: {seconds / numpy_seconds:.3f}"
        yield name, f"{seconds:.3f}", f"{1e6 * seconds / number:.2f}", f"first run {first:.1f} s. {reached}"
    with gzip.open(data_path("ml-100k", "ratings.csv.gz"), "rt") as file:
        table = np.loadtxt(file, delimiter=",", skiprows=1, usecols=(0, 1, 2), dtype=int)
    users, items, values = table[:, 0] - 1, table[:, 1] - 1, table[:, 2].astype(float)
    for learns in (False, True):
        kwargs = {"num_rows": 943, "num_cols": 1682, "rank": 10, "learns": learns}
        seconds, first = sweep_seconds(ratings_model, (users, items, values), kwargs=kwargs)
        name = "Normal values, MovieLens-100K, rank 10" + (", noise learned" if learns else "")
        micro = 1e6 * seconds / values.size
        yield name, f"{seconds:.3f}", f"{micro:.2f}", f"first run {first:.1f} s. ≤ 0.5 µs: {micro:.2f}"


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


def rankings() -> Iterator[Iterable[Any]]:
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


def pair_rankings() -> Iterator[Iterable[Any]]:
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
    """Write the table."""
    numpyro.enable_x64()
    jnp.zeros(()).block_until_ready()
    lines = blocks(
        "# Binary matrices by closed updates",
        "CPU seconds of a sweep, compilation apart; rank 20 with biases and an intercept, `float64`.",
        table("cells | CPU s a sweep | µs a cell | target and what was reached", speeds()),
        "One item of each row held out: share found among the first ten, mean rank, bound in thousands.",
        table("data | ranking | recall@10 | mean rank | bound / 1000 | CPU s | reported elsewhere", rankings()),
        "MovieLens-1M, 1,000,209 pairs of 6,040 users and 3,706 films, rank 20, all hyperparameters one.",
        table("ranking | mean rank | hit@10 | bound / 10⁶ | CPU s, the first with compilation", pair_rankings()),
    )
    write_report("binary-matrices", lines)


if __name__ == "__main__":
    main()
