"""Sweeps by the ones of a matrix and minibatches of drawn cells: ``python -m benchmarks.matrices.listed_cells``.

Ones are at random places, and programs are compiled: what is timed are the sweeps and minibatches themselves, on one
core (``taskset -c 0``). A minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

from numpyro_ext.infer import CellSampler
from numpyro_ext.infer.bilinear.algorithms import quadratic
from numpyro_ext.infer.bilinear.algorithms import sweeps as core
from numpyro_ext.infer.bilinear.algorithms.quadratic.draws import Problem, draw_minibatches, first_step
from numpyro_ext.potentials import LogitPotential
from numpyro_ext.structure.bilinear.form import Background, Bilinear, Common, GaussianSide, order_cells

from ..harness import blocks, shortest, table, verdict, write_report

_RANK, _CHUNK, _NUM_CHUNKS = 20, 3334, 3
_SIZES = ((2000, 1000, 30_000), (2000, 1000, 120_000), (2000, 8000, 30_000))
_OPTIONS = quadratic.Options("jaakkola", "tiles", True)


def make_form(num_rows: int, num_columns: int, num_ones: int) -> Bilinear:
    """Ones at random places, with products, biases of both sides and an intercept."""
    place = np.random.default_rng(0).choice(num_rows * num_columns, num_ones, replace=False)
    rows, columns = np.divmod(np.sort(place), num_columns)
    size = _RANK + 1
    rows_prior, columns_prior = (
        GaussianSide(jnp.zeros((num, size)), jnp.ones((num, size))) for num in (num_rows, num_columns)
    )
    bias, order = jnp.zeros((1, size)).at[0, _RANK].set(1.0), jnp.zeros(num_ones, int)
    common = Common(GaussianSide(jnp.zeros((1, 1)), jnp.ones((1, 1, 1))), jnp.ones((num_ones, 1)))
    return order_cells(
        Bilinear(
            rows_prior, columns_prior, jnp.asarray(rows), jnp.asarray(columns),
            jnp.ones((1, _RANK)), bias, bias, jnp.zeros(num_ones),
            LogitPotential(jnp.ones(num_ones, int)), jnp.ones(num_ones), jnp.zeros(()), order, order,
            Background(jnp.ones(())), common,
        )
    )  # fmt: skip


def drawn_cells(form: Bilinear, state: core.State) -> tuple[float, float]:
    """CPU seconds of a drawn cell in a minibatch, and of one gather and one scatter of its two vectors."""
    sampler = CellSampler.of(
        form.row_index, form.column_index, num_rows=len(form.rows.mean), num_cols=len(form.columns.mean)
    )
    key, none, ten = jax.random.key(0), jnp.asarray(0), jnp.asarray(10)
    run = jax.jit(partial(draw_minibatches, num_chunks=_NUM_CHUNKS, chunk=_CHUNK))
    seconds = shortest(run, Problem.of_form(form), first_step(state), sampler, key, none, ten, rounds=5)
    cells = jax.jit(CellSampler.draw, static_argnums=2)(sampler, key, _NUM_CHUNKS * _CHUNK)

    @jax.jit
    def exchange(u: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        return u.at[cells.rows].add(v[cells.columns]), v.at[cells.columns].add(u[cells.rows])

    vectors = (jnp.ones((len(side.mean), _RANK + 2)) for side in (form.rows, form.columns))
    number = _NUM_CHUNKS * _CHUNK
    return seconds / (10 * number), shortest(exchange, *vectors, rounds=15) / number


def main() -> None:
    """Write the table."""
    numpyro.enable_x64()
    sweep = jax.jit(partial(quadratic.sweep, with_gauge=True), static_argnums=2)
    took: list[float] = []
    cells: list[tuple[float, float]] = []

    def rows() -> Iterator[Iterable[Any]]:
        for size in _SIZES:
            form = make_form(*size)
            state = jax.jit(core.init, static_argnums=(2, 3))(form, jax.random.key(0), "diagonal", "diagonal")
            views = jax.jit(quadratic.make_views, static_argnums=1)(form, _OPTIONS)
            took.append(shortest(sweep, form, state, _OPTIONS, views=views, rounds=15))
            if not cells:
                cells.append(drawn_cells(form, state))
            yield f"{size[0]} × {size[1]}", size[2], f"{1e3 * took[-1]:.1f}", f"{1e6 * took[-1] / size[2]:.2f}"

    lines = table("matrix | ones | ms a sweep | µs a one", rows())
    (cell, exchange) = cells[0]
    vectors = sum(_SIZES[2][:2]) / sum(_SIZES[0][:2])
    exponent = np.log(took[1] / took[0]) / np.log(_SIZES[1][2] / _SIZES[0][2])
    lines = blocks(
        "# Listed and drawn cells on one core",
        f'CPU milliseconds of a sweep of `zeros="by_row"`, rank {_RANK} with biases and an intercept, `float64`.',
        lines,
        f"Exponent in the ones: {exponent:.2f} (target: 1.05, {verdict(exponent <= 1.05)}). Eight times the columns "
        f"with as many ones take {took[2] / took[0]:.2f} times as long; there are {vectors:.1f} times as many vectors "
        "to update.",
        f"A cell in a minibatch of {_NUM_CHUNKS * _CHUNK} drawn ones and zeros: {1e6 * cell:.2f} µs (target: 1.5, "
        f"{verdict(cell <= 1.5e-6)}), {cell / exchange:.1f} times a gather and a scatter of its two vectors (target: "
        f"4, {verdict(cell <= 4.0 * exchange)}).",
    )
    write_report("listed-cells", lines)


if __name__ == "__main__":
    main()
