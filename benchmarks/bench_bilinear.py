"""A sweep over a large count matrix against one iteration of the libraries that people use for such matrices.

``hpfrec``, ``poismf`` and ``implicit`` (all by coordinate ascent or alternating updates on Poisson or squared losses of
non-negative or real factors) are raced where they are installed.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from numpyro_ext.infer import bilinear_gaussian as bg
from numpyro_ext.potentials import PoissonExpPotential
from numpyro_ext.structure.bilinear import Bilinear, GaussianSide, order_cells

from .compilation import Compiled, compile_function
from .results_table import Row, at_most

NUM_ROWS, NUM_COLUMNS, NUM_CELLS, RANK = 2000, 1000, 538_423, 10


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
    w, z = rng.normal(size=(num_rows, 2)), rng.normal(size=(num_columns, 2))
    counts = 1 + rng.poisson(np.exp(0.4 * (w[rows] * z[columns]).sum(-1)))
    return Counts(rows, columns, counts, (num_rows, num_columns))


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


def compile_sweep(data: Counts, rank: int, family: bg.Family) -> Compiled:
    """A sweep, one step of either side, from the state that two sweeps lead to."""
    form = make_form(data, rank)
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


@pytest.mark.parametrize("name", PEERS)
def test_sweep_against_one_iteration(name, race, results):
    """An iteration of a peer is a tenth of what ten more iterations take, so that its preparations do not count."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed here: {error}")
    data = make_counts(NUM_ROWS, NUM_COLUMNS, NUM_CELLS)
    ours = compile_sweep(data, RANK, "diagonal")
    one, eleven = PEERS[name](data)
    seconds, short, long = race(ours.run, one, eleven, rounds=3)
    iteration = (long - short) / 10.0
    results.add(
        Row(
            item=f"Mean-field sweep, 2000 × 1000, 538,423 cells, rank 10, against {name}",
            dtype="float64",
            seconds=seconds,
            peer=f"{name}, one iteration",
            peer_seconds=iteration,
            figure="time ratio",
            value=seconds / iteration,
            target=at_most(1.0) if name == "hpfrec" else None,
            compile_seconds=ours.seconds,
            peak_bytes=ours.peak_bytes,
            remark="Single precision in the peers that have it; ours steps both sides, and never lowers the bound.",
        )
    )


GROWTH = {
    "cells": ((make_counts(1000, 500, 50_000), RANK), (make_counts(1000, 500, 200_000), RANK), 4.0),
    "rank": ((make_counts(1000, 500, 100_000), 5), (make_counts(1000, 500, 100_000), 20), 4.0),
}


@pytest.mark.parametrize("what", GROWTH)
def test_growth(what, race, results):
    (few, few_rank), (many, many_rank), factor = GROWTH[what]
    small, large = compile_sweep(few, few_rank, "diagonal"), compile_sweep(many, many_rank, "diagonal")
    seconds, small_seconds = race(large.run, small.run, rounds=5)
    results.add(
        Row(
            item=f"Mean-field sweep, four times the {what}",
            dtype="float64",
            seconds=seconds,
            peer="the small problem",
            peer_seconds=small_seconds,
            figure="exponent",
            value=float(np.log(seconds / small_seconds) / np.log(factor)),
            target=at_most(1.2),
            compile_seconds=large.seconds,
            peak_bytes=large.peak_bytes,
            peer_peak_bytes=small.peak_bytes,
        )
    )
