"""Count matrices, and what is measured of them in a process of its own.

``python -m benchmarks.matrices.bilinear_once whole`` fits a large model and prints its time and peak memory;
``python -m benchmarks.matrices.bilinear_once batches`` does so with as many cells in batches;
``python -m benchmarks.matrices.bilinear_once devices`` divides a sweep between all devices and prints what each does;
``python -m benchmarks.matrices.bilinear_once closed`` times closed updates on one device and on all;
``python -m benchmarks.matrices.bilinear_once beside`` times them in batches, beside sweeps over the same cells.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_ext.infer import BilinearVG, fit_batches
from numpyro_ext.infer.bilinear.algorithms import sweeps as bg
from numpyro_ext.infer.bilinear.algorithms.schedules.devices import Division, OneDevice, SeveralDevices
from numpyro_ext.infer.bilinear.batches.call import Call
from numpyro_ext.infer.bilinear.batches.fit import _iterate as iterate
from numpyro_ext.infer.bilinear.batches.parts import BatchStore
from numpyro_ext.infer.bilinear.batches.run import BatchRun
from numpyro_ext.models import binary_factorization, paired_symbols, poisson_factorization
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


class Closed(NamedTuple):
    """A binary matrix by its ones, or pairs, as models of closed updates take them."""

    name: str
    engine: Callable[..., BilinearVG]
    arguments: tuple[np.ndarray, ...]
    sizes: dict[str, Any]
    num_rows: str
    """Name of the argument."""
    site: str
    """A site of the rows."""

    def batches(self, num_batches: int) -> Iterator[dict[str, Any]]:
        """Rows in equal parts, numbered from zero in each, by the names of arguments."""
        edges = np.linspace(0, self.sizes[self.num_rows], num_batches + 1).astype(int)
        table = np.column_stack(self.arguments)
        for start, end in zip(edges[:-1], edges[1:], strict=True):
            mine = table[(table[:, 0] >= start) & (table[:, 0] < end)] - [start, 0, 0]
            names = ("rows", "cols", "x") if len(self.arguments) == 3 else ("pairs",)
            parts = mine.T if len(self.arguments) == 3 else (mine,)
            yield dict(zip(names, parts, strict=True)) | {self.num_rows: end - start}


def make_closed(num_columns: int = 1000) -> tuple[Closed, Closed]:
    """Ones and pairs of a matrix with twice as many rows."""
    rng = np.random.default_rng(0)
    ones = rng.uniform(size=(2 * num_columns, num_columns)) < 0.02 * rng.gamma(1.0, 1.0, size=(2 * num_columns, 1))
    rows, columns = np.nonzero(ones)
    places = (rng.geometric(p, 400_000) - 1 for p in (0.002, 0.005))
    pairs = np.unique(np.minimum(np.stack([*places], 1), [2 * num_columns - 1, num_columns - 1]), axis=0)
    pairs = np.column_stack([pairs, np.ones(len(pairs), int)])
    sizes = {"rank": 20, "num_rows": 2 * num_columns, "num_cols": num_columns}
    of_pairs = {"rank": 20, "num_users": 2 * num_columns, "num_items": num_columns, "num_censored": float(len(pairs))}
    options = {"bound": "jaakkola", "tol": 1e-300, "num_restarts": 0, "progress_bar": False}
    binary = partial(BilinearVG, binary_factorization, unlisted_cells="zero", **options)
    symbols = partial(BilinearVG, paired_symbols, **options)
    cells = rows, columns, np.ones(len(rows), int)
    return (
        Closed(f"{len(rows)} ones", binary, cells, sizes, "num_rows", "u"),
        Closed(f"{len(pairs)} pairs", symbols, (pairs,), of_pairs, "num_users", "u"),
    )


def _seconds(fit: Callable[[int], Any], few: int, many: int) -> tuple[float, Any]:
    """CPU-seconds of a step, from fits of few and of many steps after one that compiles, and the last of these."""
    took, fitted = [], None
    for number in (few, few, many):
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*did not converge")
            fitted = fit(number)
        took.append(time.process_time() - start)
    return (took[2] - took[1]) / (many - few), fitted


def divide_closed() -> dict[str, Any]:
    """CPU-milliseconds of closed sweeps on one device and on all."""
    found = {}
    for problem in make_closed():
        for devices in (None, jax.devices()):

            def fit(number: int, problem: Closed = problem, devices: Any = devices) -> BilinearVG:
                engine = problem.engine(num_steps=number, devices=devices)
                return engine.run(jax.random.key(0), *problem.arguments, **problem.sizes) or engine

            seconds, engine = _seconds(fit, 5, 25)
            key = f"{problem.name}, {1 if devices is None else len(devices)} devices"
            found[key] = {"ms": 1e3 * seconds, "bound": float(engine.log_evidence)}
    return found


def batches_beside_sweeps(num_batches: int = 4) -> dict[str, Any]:
    """CPU-microseconds and bytes of a cell in a sweep, and in an epoch of batches."""
    found = {}
    for problem in make_closed():
        num_cells = len(problem.arguments[0])

        def sweeps(number: int, problem: Closed = problem) -> BilinearVG:
            engine = problem.engine(num_steps=number)
            return engine.run(jax.random.key(0), *problem.arguments, **problem.sizes) or engine

        stored: list[int] = []

        def epochs(number: int, problem: Closed = problem, stored: list[int] = stored) -> BilinearVG:
            kwargs = {name: size for name, size in problem.sizes.items() if name != problem.num_rows}
            call = Call(problem.engine(), jax.random.key(0), problem.site, number, None, kwargs)
            with tempfile.TemporaryDirectory() as folder:
                fitted = iterate(BatchRun(call, problem.batches(num_batches), None, BatchStore(folder)))
                stored.append(sum(file.stat().st_size for file in Path(folder).iterdir()))
            return fitted

        (sweep, engine), (epoch, fitted) = _seconds(sweeps, 5, 25), _seconds(epochs, 5, 25)
        reading, space, programs = engine._prepare(jax.random.key(0), problem.arguments, problem.sizes)
        held = jax.tree.leaves(programs.prepare(reading.data, space.fixed, space.initial())[0])
        found[problem.name] = {
            "sweep": 1e6 * sweep / num_cells,
            "epoch": 1e6 * epoch / num_cells,
            "ratio": epoch / sweep,
            "bytes held": sum(x.nbytes for x in held) / num_cells,
            "bytes in files": stored[-1] / num_cells,
            "bounds": [float(engine.log_evidence), float(fitted.log_evidence)],
        }
    return found


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
    parser.add_argument("what", choices=("whole", "batches", "devices", "closed", "beside"))
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
    elif arguments.what == "closed":
        print(json.dumps(divide_closed()))
    elif arguments.what == "beside":
        print(json.dumps(batches_beside_sweeps()))
    else:
        print(json.dumps(divide_sweep(arguments.family)))


if __name__ == "__main__":
    main()
