"""A sweep over a large count matrix against one iteration of the libraries that people use for such matrices; growth.

``hpfrec``, ``poismf`` and ``implicit`` (all by coordinate ascent or alternating updates on Poisson or squared losses of
non-negative or real factors) are raced where they are installed.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from numpyro_ext.infer.bilinear.algorithms import sweeps as bg
from numpyro_ext.linalg.cholesky import cholesky, cholesky_inverse
from numpyro_ext.potentials import ProbitPotential
from numpyro_ext.structure.bilinear.form import Bilinear, CoupledSide, GaussianSide, order_cells

from .harness import at_most, compile_function, in_own_process
from .harness.compilation import Compiled
from .matrices.bilinear_once import RANK, Counts, make_counts, make_form

NUM_ROWS, NUM_COLUMNS, NUM_CELLS = 2000, 1000, 538_423


@pytest.fixture
def company():
    """Words on other processes, where there are more than a benchmark itself may have left in the load."""
    load = os.getloadavg()[0]
    return f" Other processes were running: load average {load:.1f}." if load > 1.5 * os.cpu_count() else ""


def compile_sweep(data: Counts, rank: int, family: bg.Family, dtype: str = "float64") -> Compiled:
    """A sweep, one step of either side, from the state that two sweeps lead to."""
    form = jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, make_form(data, rank)
    )
    state = jax.jit(bg.init, static_argnums=(2, 3))(form, jax.random.key(0), family, family)
    views = jax.jit(bg.make_views)(form, state.rows, state.columns)
    compiled = compile_function(bg.sweep, form, views, state)
    for _ in range(2):
        compiled = compiled._replace(args=(form, views, compiled.run()[0]))
    return compiled


def _hpfrec(data: Counts) -> Any:
    import pandas as pd
    from hpfrec import HPF

    frame = pd.DataFrame({"UserId": data.rows, "ItemId": data.columns, "Count": data.counts.astype("float32")})

    def run(iterations: int) -> None:
        HPF(
            k=RANK, maxiter=iterations, stop_crit="maxiter", reindex=False, verbose=False, ncores=os.cpu_count(),
            random_seed=1, check_every=None, keep_data=False, produce_dicts=False, full_llk=False,
        ).fit(frame)  # fmt: skip

    return lambda: run(1), lambda: run(11)


def _poismf(data: Counts) -> Any:
    from poismf import PoisMF

    matrix = scipy.sparse.coo_matrix((data.counts.astype(float), (data.rows, data.columns)), data.shape)

    def run(iterations: int) -> None:
        PoisMF(k=RANK, niter=iterations, method="pg", nthreads=os.cpu_count(), random_state=1, reindex=False).fit(
            matrix
        )

    return lambda: run(1), lambda: run(11)


def _implicit(data: Counts) -> Any:
    from implicit.als import AlternatingLeastSquares

    matrix = scipy.sparse.csr_matrix((data.counts.astype("float32"), (data.rows, data.columns)), data.shape)

    def run(iterations: int) -> None:
        AlternatingLeastSquares(
            factors=RANK, iterations=iterations, use_gpu=False, random_state=1, num_threads=os.cpu_count()
        ).fit(matrix, show_progress=False)

    return lambda: run(1), lambda: run(11)


PEERS = {"hpfrec": _hpfrec, "poismf": _poismf, "implicit": _implicit}


@pytest.mark.parametrize("name, dtype", [*((name, "float64") for name in PEERS), ("hpfrec", "float32")])
def test_sweep_against_one_iteration(name, dtype, race, results, company):
    """An iteration of a peer is a tenth of what ten more iterations take, so that its preparations do not count."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed here: {error}")
    data = make_counts(NUM_ROWS, NUM_COLUMNS, NUM_CELLS)
    ours = compile_sweep(data, RANK, "diagonal", dtype)
    one, eleven = PEERS[name](data)
    seconds, short, long = race(ours.run, one, eleven, rounds=9)
    iteration = (long - short) / 10.0
    results.record(
        f"Mean-field sweep, 2000 × 1000, 538,423 cells, rank 10, against {name}",
        dtype=dtype,
        peer=f"{name}, one iteration",
        times=(seconds, iteration),
        target=at_most(1.0) if name == "hpfrec" else None,
        programs=(ours,),
        remark="Single precision in the peers that have it; ours steps both sides, and never lowers the bound."
        + company,
    )


def make_choices(num_users: int, num_items: int, num_cells: int, rank: int, *, are_pairs: bool) -> Bilinear:
    """Probit answers of users, about items or about pairs of them with a Gaussian process across the items."""
    rng = np.random.default_rng(0)
    users, first = rng.integers(num_users, size=num_cells), rng.integers(num_items, size=num_cells)
    won = jnp.asarray(rng.integers(2, size=num_cells))
    items: GaussianSide | CoupledSide = GaussianSide(jnp.zeros((num_items, rank)), jnp.full((num_items, rank), 5.0))
    columns = first
    if are_pairs:
        second = (first + rng.integers(1, num_items, size=num_cells)) % num_items
        places, columns = np.unique(np.stack([first, second], axis=1), axis=0, return_inverse=True)
        distance = np.subtract.outer(np.arange(num_items), np.arange(num_items)) / 10.0
        root = np.linalg.cholesky(np.exp(-0.5 * distance**2) + 0.1 * np.eye(num_items))
        items = CoupledSide(
            jnp.zeros((num_items, rank)),
            jnp.full((num_items, rank), 0.4),
            jnp.asarray(root)[None],
            jnp.zeros(rank, int),
            jnp.asarray(places),
            jnp.broadcast_to(jnp.array([1.0, -1.0]), places.shape),
        )
    none, order = jnp.zeros((1, 0)), jnp.zeros(num_cells, int)
    users_prior = GaussianSide(jnp.zeros((num_users, rank)), jnp.ones((num_users, rank)))
    cells = jnp.asarray(users), jnp.asarray(columns.reshape(-1)), jnp.ones((1, rank)), none, none, jnp.zeros(num_cells)
    potential = ProbitPotential(won)
    return order_cells(
        Bilinear(users_prior, items, *cells, potential, jnp.ones(num_cells), jnp.zeros(()), order, order)
    )


def test_pairs_against_cells(race, results, company):
    """A sweep whose cells touch two items each, less what factorising the components takes, over one of plain cells."""
    num_items, rank = 100, 20
    sweeps = []
    for are_pairs in (True, False):
        form = make_choices(500, num_items, 50_000, rank, are_pairs=are_pairs)
        state = jax.jit(bg.init, static_argnums=(2, 3))(form, jax.random.key(0), "diagonal", "diagonal")
        compiled = compile_function(bg.sweep, form, jax.jit(bg.make_views)(form, state.rows, state.columns), state)
        for _ in range(2):
            compiled = compiled._replace(args=(*compiled.args[:2], compiled.run()[0]))
        sweeps.append(compiled)
    matrices = jnp.eye(num_items) + jnp.ones((rank, num_items, num_items))
    inverse = compile_function(lambda x: cholesky_inverse(cholesky(x)), matrices)
    seconds, plain, cubes = race(sweeps[0].run, sweeps[1].run, inverse.run, rounds=3)
    results.record(
        "BilinearVG by components, 50,000 pairs, 500 users, 100 items, rank 20: a sweep",
        peer="50,000 plain cells of the same rank",
        times=(seconds, plain),
        figure="time ratio, less one inverse of 100² for each component",
        value=(seconds - cubes) / plain,
        target=at_most(2.0),
        programs=(sweeps[0], sweeps[1]),
        remark=f"The inverses take {1e3 * cubes:.1f} ms.{company}",
    )


GROWTH = {
    "cells": [((1000, 500, n), RANK, n) for n in (50_000, 100_000, 200_000)],
    "rows": [((n, 500, 100_000), RANK, n) for n in (1000, 4000, 16_000)],
    "rank": [((1000, 500, 100_000), n, n) for n in (5, 10, 20)],
}


@pytest.mark.parametrize("what", GROWTH)
def test_growth(what, race, results, company):
    """The slope of log time in log size, fitted to three sizes."""
    problems = [compile_sweep(make_counts(*shape), rank, "diagonal") for shape, rank, _ in GROWTH[what]]
    seconds = race(*(p.run for p in problems[::-1]), rounds=7)[::-1]
    sizes = [size for *_, size in GROWTH[what]]
    results.record(
        f"Mean-field sweep, growth in {what}",
        peer=f"{sizes[0]} instead of {sizes[-1]} {what}",
        times=(seconds[-1], seconds[0]),
        figure="exponent",
        value=float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0]),
        target=at_most(1.2),
        programs=(problems[-1], problems[0]),
        remark=company.strip(),
    )


def _run_once(*arguments: str, num_devices: int = 1) -> dict[str, Any]:
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    return in_own_process("matrices.bilinear_once", *arguments, environment={"XLA_FLAGS": flags})


def test_ten_million_cells(results, company):
    """A process of its own reads a model of ten million cells, and makes some sweeps."""
    found = _run_once("whole", "--num-cells", "10000000")
    gibibytes = found["peak_bytes"] / 2**30
    results.record(
        "BilinearVG, 100,000 × 10,000, 10,000,000 cells, rank 10 and biases",
        times=(found["seconds"], None),
        peer="",
        figure="GiB at most",
        value=gibibytes,
        target=at_most(8.0),
        peak_bytes=found["peak_bytes"],
        remark=f"Reading the model, compiling and 2 sweeps. Memory is that of the whole process.{company}",
    )


def test_ten_million_cells_in_batches(results, company):
    """The same number of cells in twenty batches of rows."""
    found = _run_once("batches", "--num-cells", "10000000")
    results.record(
        "fit_batches, 20 times 5,000 × 10,000, 10,000,000 cells, rank 10 and biases",
        times=(found["seconds"], None),
        peer="",
        figure="GiB at most",
        value=found["peak_bytes"] / 2**30,
        target=at_most(8.0),
        peak_bytes=found["peak_bytes"],
        remark=f"Reading, compiling, 2 epochs and the objective. Memory is that of the whole process.{company}",
    )


@pytest.mark.parametrize("family", ["diagonal", "full"])
def test_four_devices(family, results):
    """Rows divided between four host devices: how evenly, and what is sent."""
    found = _run_once("devices", "--family", family, num_devices=4)
    results.record(
        f"Sweep on four devices, {family} covariances, 4000 × 500, 200,000 cells: work of the busiest",
        peer="a fourth of the cells",
        figure="ratio",
        value=found["most_cells"] / (found["num_cells"] / 4),
        target=at_most(1.1),
        remark=f"Collectives in the compiled sweep: {found['collective_bytes']} bytes, which is "
        f"{found['collective_bytes'] / found['column_bytes']:.2f} times the means and covariances of the columns. "
        f"Bound equal to that of one device to {found['relative_gap']:.0e}.",
    )
