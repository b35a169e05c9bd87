"""Batches by closed updates, against sweeps and against the same model fitted to all data at once."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from jax import random

from numpyro_ext.infer import BilinearVG, fit_batches
from numpyro_ext.infer.bilinear.algorithms import quadratic
from numpyro_ext.infer.bilinear.algorithms.schedules.visits import start_shared, start_visited
from numpyro_ext.infer.bilinear.batches.devices import BatchDevices
from numpyro_ext.infer.bilinear.batches.parts import DividedBatch
from numpyro_ext.models import binary_factorization

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
thorough, slow = pytest.mark.thorough, pytest.mark.slow

NUM_ROWS, NUM_COLS, RANK = 40, 12, 2
# Of unequal numbers of rows, one of them of a single row.
EDGES = (0, 17, 18, 40)


def make_cells():
    """Listed cells with normal values; row 3 and column 2 have none."""
    rng = np.random.default_rng(5)
    listed = rng.random((NUM_ROWS, NUM_COLS)) < 0.5
    listed[3], listed[:, 2] = False, False
    rows, cols = np.nonzero(listed)
    u, v = rng.normal(size=(NUM_ROWS, RANK)), rng.normal(size=(NUM_COLS, RANK))
    return rows, cols, (u[rows] * v[cols]).sum(-1) - 0.3 + 0.5 * rng.normal(size=rows.size)


def normal_values(rows, cols, x, *, num_rows, num_cols, rank):
    level = numpyro.sample("z", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", num_rows):
        u = numpyro.sample("u", dist.Normal(0.0, 0.9).expand([rank]).to_event(1))
    with numpyro.plate("cols", num_cols):
        v = numpyro.sample("v", dist.Normal(0.0, 1.1).expand([rank]).to_event(1))
        bias = numpyro.sample("g", dist.Normal(0.0, 0.5))
    numpyro.sample("x", dist.Normal((u[rows] * v[cols]).sum(-1) + bias[cols] + level, 0.9), obs=x)


def of_kind(kind, **options):
    """Engine and cells."""
    rows, cols, x = make_cells()
    options = {"progress_bar": False, "num_samples": 10, **options}
    if kind == "normal":
        return BilinearVG(normal_values, **options), (rows, cols, x)
    return BilinearVG(binary_factorization, bound=kind, **options), (rows, cols, (x > 0.3).astype(int))


def divided(cells, edges, axis=0):
    """Batches of rows, or of columns."""
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        mine = (cells[axis] >= start) & (cells[axis] < end)
        index = [cells[0][mine], cells[1][mine]]
        index[axis] = index[axis] - start
        yield {"rows": index[0], "cols": index[1], "x": cells[2][mine], ("num_rows", "num_cols")[axis]: end - start}


def visit_and_sweep(engine, args, kwargs, *, num=3):
    """Visits of one batch that is all rows, and sweeps, from the same state."""
    key = random.key(2)
    reading, space, programs = engine._prepare(key, args, kwargs)
    form = programs.form(reading.data, space.fixed)
    state = programs.init_state(reading.data, space.fixed, key)
    options = programs.closed._replace(kind="tiles")
    batch, devices = DividedBatch(form, state.rows, state.columns, options, 1), BatchDevices(None)
    prepared, own = batch.prepare(batch.sizes.rounded())
    shared = start_shared(state.columns, form.columns, state.common, form.common and form.common.prior)
    visited = start_visited(own, shared)
    sweep = jax.jit(lambda state: quadratic.sweep(form, state, options)[0])
    for _ in range(num):
        visited, shared = devices.visit(prepared, visited, shared, True, options)
        state = sweep(state)
    return (batch.in_order(visited.own.block), shared.block, shared.common), (state.rows, state.columns, state.common)


@needs_float64
@pytest.mark.parametrize(
    "kind, options",
    [
        ("normal", {}),
        pytest.param("jaakkola", {"update": "bulk"}, marks=thorough),
        pytest.param("bohning", {"update": "coordinate"}, marks=thorough),
        pytest.param("jaakkola", {"covariance": {"rows": "full"}}, marks=thorough),
        pytest.param("normal", {"covariance": {"rows": "full", "cols": "point"}}, marks=thorough),
    ],
)
def test_visits_of_all_rows_are_sweeps(kind, options):
    engine, cells = of_kind(kind, **options)
    sizes = {"num_rows": NUM_ROWS, "num_cols": NUM_COLS, "rank": RANK}
    for found, expected in zip(*map(jax.tree.leaves, visit_and_sweep(engine, cells, sizes)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


@needs_float64
@thorough
@pytest.mark.parametrize(
    "kind, axis, options",
    [
        ("jaakkola", 0, {}),
        ("normal", 0, {"covariance": "full"}),
        pytest.param("bohning", 0, {"covariance": "full"}, marks=slow),
        pytest.param("jaakkola", 1, {}, marks=slow),
        pytest.param("normal", 1, {"covariance": "full"}, marks=slow),
    ],
)
def test_batches_end_where_all_data_together_end(kind, axis, options):
    """The same bound, intercept and predictions, by batches of rows and by batches of columns."""
    engine, cells = of_kind(kind, tol=1e-9, **options)
    whole = {"num_rows": NUM_ROWS, "num_cols": NUM_COLS, "rank": RANK}
    edges, over, held = ((EDGES, "u", "num_cols"), ((0, 5, 12), "v", "num_rows"))[axis]
    given = {held: whole[held], "rank": RANK}
    batches = list(divided(cells, edges, axis))
    fitted = fit_batches(engine, random.key(1), batches, over=over, num_epochs=500, **given)
    assert fitted.diagnostics.converged and fitted.log_evidence.is_lower_bound
    engine.run(random.key(0), *cells, **whole)
    np.testing.assert_allclose(float(fitted.log_evidence), float(engine.log_evidence), rtol=1e-6)
    np.testing.assert_allclose(fitted.posterior["z"].mean, engine.posterior["z"].mean, atol=3e-3)
    expected = np.asarray(engine.predictive_mean(*cells, **whole)["x"])
    mine = cells[axis] >= edges[-2]
    np.testing.assert_allclose(fitted.predictive_mean()["x"], expected[mine], atol=5e-3)
    first = fitted.fold_in(random.key(2), side=("rows", "columns")[axis], **batches[0], **given)
    np.testing.assert_allclose(first.predictive_mean()["x"], expected[cells[axis] < edges[1]], atol=5e-3)
    # Another start of what is shared, which is where it ended: nothing is left to move.
    again = fit_batches(engine, random.key(3), batches, over=over, init_state=fitted.last_state, **given)
    np.testing.assert_allclose(float(again.log_evidence), float(fitted.log_evidence), rtol=1e-7)
    assert again.diagnostics.num_steps < fitted.diagnostics.num_steps


@needs_float64
@thorough
def test_batches_as_users_have_them(tmp_path):
    """Lists, frames and tuples are the same batches; a checkpoint goes on to the same numbers."""
    engine, cells = of_kind("jaakkola", tol=1e-300)
    batches = [{**b, "rows": b["rows"].tolist(), "cols": b["cols"].tolist()} for b in divided(cells, EDGES)]

    def from_frame(frame, **sizes):
        binary_factorization(frame["rows"].to_numpy(), frame["cols"].to_numpy(), frame["x"].to_numpy(), **sizes)

    frames = [{"frame": pd.DataFrame({n: b[n] for n in ("rows", "cols", "x")}), "num_rows": b["num_rows"]}
              for b in batches]  # fmt: skip
    options = {"over": "u", "num_epochs": 4, "num_cols": NUM_COLS, "rank": RANK}
    of_frames = BilinearVG(from_frame, bound="jaakkola", tol=1e-300, progress_bar=False)
    with pytest.warns(UserWarning, match="did not converge"):
        whole = fit_batches(engine, random.key(0), batches, **options)
        same = fit_batches(of_frames, random.key(0), frames, **options)
        path = tmp_path / "epochs"
        fit_batches(engine, random.key(0), batches, checkpoint=path, **{**options, "num_epochs": 2})
        resumed = fit_batches(engine, random.key(0), iter(batches), checkpoint=path, **options)
    for other in (same, resumed):
        np.testing.assert_array_equal(other.diagnostics.objective_trace, whole.diagnostics.objective_trace)
        np.testing.assert_array_equal(other.posterior["g"].mean, whole.posterior["g"].mean)
    with pytest.warns(UserWarning, match="Interrupted after 0 epochs"):
        cut = fit_batches(engine, random.key(0), interrupted_after(batches[0]), **options)
    assert np.isfinite(float(cut.log_evidence))


def interrupted_after(batch):
    yield batch
    raise KeyboardInterrupt
