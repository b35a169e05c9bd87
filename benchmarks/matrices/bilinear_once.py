"""Count matrices, and what is measured of them in a process of its own.

``python -m benchmarks.matrices.bilinear_once whole`` fits a large model and prints its time and peak memory;
``python -m benchmarks.matrices.bilinear_once batches`` does so with as many cells in batches;
``python -m benchmarks.matrices.bilinear_once devices`` divides a sweep between all devices and prints what each does.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_ext.infer import BilinearVG, fit_batches
from numpyro_ext.infer.bilinear.algorithms import sweeps as bg
from numpyro_ext.infer.bilinear.algorithms.schedules.devices import Division, OneDevice, SeveralDevices
from numpyro_ext.models import poisson_factorization
from numpyro_ext.potentials import PoissonExpPotential
from numpyro_ext.structure.bilinear.form import Bilinear, GaussianSide, order_cells

from ..harness import peak_bytes

RANK = 10
SCALES = {"row_scale": 0.8, "row_bias_scale": 0.5, "col_bias_scale": 0.5}


class Counts(NamedTuple):
    """Cells of a count matrix, none of them zero."""

    rows: np.ndarray
    columns: np.ndarray
    counts: np.ndarray
    shape: tuple[int, int]


def make_counts(num_rows: int, num_columns: int, num_cells: int) -> Counts:
    """Positive counts with two components of structure, at random cells."""
    rng = np.random.default_rng(0)
    rows, columns = np.divmod(rng.choice(num_rows * num_columns, num_cells, replace=False), num_columns)
    return Counts(rows, columns, _draw(rng, rows, columns, num_rows, num_columns), (num_rows, num_columns))


def make_wide_counts(num_rows: int, num_columns: int, num_cells: int) -> Counts:
    """The same with as many cells in every row, which takes no memory but that of the cells."""
    rng = np.random.default_rng(0)
    rows, number = np.divmod(np.arange(num_cells), num_cells // num_rows)
    columns = (rng.integers(num_columns, size=num_rows)[rows] + 97 * number) % num_columns
    return Counts(rows, columns, _draw(rng, rows, columns, num_rows, num_columns), (num_rows, num_columns))


def _draw(rng: np.random.Generator, rows: np.ndarray, columns: np.ndarray, *shape: int) -> np.ndarray:
    w, z = (rng.normal(size=(n, 2)) for n in shape)
    predictor = sum(0.4 * w[rows, k] * z[columns, k] for k in range(2))
    return 1 + rng.poisson(np.exp(predictor))


def make_form(data: Counts, rank: int) -> Bilinear:
    """Plain factorisation with standard normal rows."""
    sides = [
        GaussianSide(jnp.zeros((n, rank)), jnp.full((n, rank), p)) for n, p in zip(data.shape, (1.0, 5.0), strict=True)
    ]
    none, size = jnp.zeros((1, 0)), len(data.counts)
    form = Bilinear(
        *sides,
        jnp.asarray(data.rows),
        jnp.asarray(data.columns),
        jnp.ones((1, rank)),
        none,
        none,
        jnp.zeros(size),
        PoissonExpPotential(jnp.asarray(data.counts, float), jnp.ones(size)),
        jnp.ones(size),
        jnp.zeros(()),
        jnp.zeros(size, int),
        jnp.zeros(size, int),
    )
    return order_cells(form)


def measured(engine: BilinearVG, fit: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of a fit whose bound never falls, and memory of the process."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*did not converge")
        fitted = fit() or engine
    seconds = time.perf_counter() - start
    assert np.all(np.diff(fitted.diagnostics.objective_trace) > 0.0)
    return {"seconds": seconds, "peak_bytes": peak_bytes()}


def fit_whole(num_cells: int, num_sweeps: int) -> dict[str, Any]:
    """Read a model of a hundred cells in each row and make some sweeps of mean field."""
    data = make_wide_counts(num_cells // 100, num_cells // 1000, num_cells)
    sizes = {"num_rows": data.shape[0], "num_cols": data.shape[1], "rank": RANK}
    options = {"num_steps": num_sweeps, "tol": 1e-300, "progress_bar": False}
    engine = BilinearVG(poisson_factorization, hyper_values=SCALES, **options)
    return measured(engine, lambda: engine.run(jax.random.key(0), data.rows, data.columns, data.counts, **sizes))


def fit_in_batches(num_cells: int, num_batches: int, num_epochs: int) -> dict[str, Any]:
    """Fit as many cells, that come as batches of rows one after the other."""
    num_columns, cells_of_batch = num_cells // 1000, num_cells // num_batches

    def load() -> Iterator[tuple[np.ndarray, ...]]:
        for _ in range(num_batches):
            data = make_wide_counts(cells_of_batch // 100, num_columns, cells_of_batch)
            yield data.rows, data.columns, data.counts

    options = {"num_rows": cells_of_batch // 100, "num_cols": num_columns, "rank": RANK, "num_epochs": num_epochs}
    engine = BilinearVG(poisson_factorization, hyper_values=SCALES, progress_bar=False)
    return measured(engine, lambda: fit_batches(engine, jax.random.key(0), load(), over="w", **options))


def divide_sweep(family: bg.Family) -> dict[str, Any]:
    """One sweep on all devices, against the same on one."""
    data = make_counts(4000, 500, 200_000)
    rank = RANK if family == "diagonal" else 4
    form = make_form(data, rank)
    state = jax.jit(bg.init, static_argnums=(2, 3))(form, jax.random.key(0), family, family)
    objectives, text, prepared = [], "", None
    for devices in (OneDevice(), SeveralDevices(Division(jax.devices(), data.rows, data.columns, data.shape[0]))):
        prepared = devices.put_cells(jax.jit(devices.prepare)(form, state.rows, state.columns))
        sweep = jax.jit(devices.sweep)
        _, now = devices.put(state.objective, state)
        text = sweep.lower(prepared, now).compile().as_text()
        for _ in range(3):
            now, info = sweep(prepared, now)
        objectives.append(float(info.objective))
    assert prepared is not None
    most = max(view.cells.own.size // len(jax.devices()) for view in prepared.views)
    return {
        "num_cells": data.rows.size,
        "most_cells": most,
        "collective_bytes": collective_bytes(text),
        "column_bytes": sum(x.nbytes for x in state.columns),
        "relative_gap": abs(objectives[1] / objectives[0] - 1.0),
    }


def collective_bytes(text: str) -> int:
    """Bytes that the collectives of a compiled program return, on each device."""
    total = 0
    for line in text.splitlines():
        found = re.search(
            r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\(", line
        )
        for kind, dimensions in re.findall(r"\b([a-z]+\d+|pred)\[([\d,]*)\]", found.group(1) if found else ""):
            width = 1 if kind == "pred" else int(re.sub(r"\D", "", kind)) // 8
            total += width * int(np.prod([int(n) for n in dimensions.split(",") if n]))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("whole", "batches", "devices"))
    parser.add_argument("--num-cells", type=int, default=100_000)
    parser.add_argument("--num-sweeps", type=int, default=2)
    parser.add_argument("--num-batches", type=int, default=20)
    parser.add_argument("--num-epochs", type=int, default=2)
    parser.add_argument("--family", choices=("diagonal", "full"), default="diagonal")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if arguments.what == "whole":
        print(json.dumps(fit_whole(arguments.num_cells, arguments.num_sweeps)))
    elif arguments.what == "batches":
        print(json.dumps(fit_in_batches(arguments.num_cells, arguments.num_batches, arguments.num_epochs)))
    else:
        print(json.dumps(divide_sweep(arguments.family)))


if __name__ == "__main__":
    main()
