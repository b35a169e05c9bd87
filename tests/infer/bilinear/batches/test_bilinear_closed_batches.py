"""Batches by closed updates, with unlisted zeros and censored pairs, against sweeps and fits to all data at once."""

import json

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from jax import random

from numpyro_ext.infer import BilinearVG, fit_batches, recommend_items
from numpyro_ext.infer.bilinear.algorithms import quadratic
from numpyro_ext.infer.bilinear.algorithms.schedules.visits import (
    Moves,
    SharedSelection,
    start_shared,
    start_visited,
    with_equal_shares,
    with_shares_by_totals,
)
from numpyro_ext.infer.bilinear.algorithms.sweeps import without_cells
from numpyro_ext.infer.bilinear.batches import run as batch_run
from numpyro_ext.infer.bilinear.batches.devices import BatchDevices
from numpyro_ext.infer.bilinear.batches.parts import DividedBatch
from numpyro_ext.infer.bilinear.batches.together import after_silent_step, elsewhere_of, selected_of
from numpyro_ext.models import binary_factorization, paired_symbols
from numpyro_ext.structure import ModelStructureError
from tests.infer.bilinear.bilinear_forms import REFERENCE

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
    """Engine and cells: normal values, outcomes by one of two bounds, or the ones of these, the rest being zeros."""
    rows, cols, x = make_cells()
    options = {"progress_bar": False, "num_samples": 10, **options}
    if kind == "ones":
        is_one = x > 0.3
        options |= {"bound": "jaakkola", "unlisted_cells": "zero"}
        cells = rows[is_one], cols[is_one], np.ones(is_one.sum(), int)
        return BilinearVG(binary_factorization, **options), cells
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
    reading, space, programs, _ = engine._prepare(key, args, kwargs)
    form = programs.form(reading.data, space.fixed)
    state = programs.init_state(reading.data, space.fixed, key)
    options = programs.closed._replace(kind="tiles")
    batch, devices = DividedBatch(form, state.rows, state.columns, options, 1), BatchDevices(None)
    prepared, own = batch.prepare(batch.sizes.rounded())
    shared = start_shared(state.columns, form.columns, state.common, form.common and form.common.prior)
    is_censored = reading.pair_sites is not None
    if is_censored:
        first = SharedSelection.first(form.background.selection.columns)
        shared = shared._replace(selection=first._replace(listed=form.listed_counts()[1]))
    has_shared_tangent = is_censored or (engine.unlisted_cells == "zero" and options.zeros == "shared")
    visited = start_visited(own, shared, has_shared_tangent=has_shared_tangent, form=prepared.form)
    if is_censored:
        visited = with_shares_by_totals([with_equal_shares(visited, shared.selection, len(state.rows.mean))])[0]
    sweep = jax.jit(lambda state: quadratic.sweep(form, state, options, with_gauge=True)[0])
    for _ in range(num):
        elsewhere = elsewhere_of([visited], 0)
        visited, shared = devices.visit(prepared, visited, shared, Moves(True, True), elsewhere, options)
        (visited,), shared = after_silent_step([visited], shared, without_cells(form))
        state = sweep(state)
    found = batch.in_order(visited.own.block), shared.block, shared.common
    expected = state.rows, state.columns, state.common
    if is_censored:
        of_rows = batch.in_order((visited.own.log_shares, visited.own.counts))
        found += (selected_of(visited, of_rows, shared.selection),)
        expected += (state.selected,)
    return found, expected


@needs_float64
@thorough
@pytest.mark.parametrize(
    "kind, options",
    [
        ("normal", {}),
        ("jaakkola", {"update": "bulk"}),
        ("bohning", {"update": "coordinate"}),
        ("jaakkola", {"covariance": {"rows": "full"}}),
        ("normal", {"covariance": {"rows": "full", "cols": "point"}}),
        ("ones", {"zeros": "by_row", "covariance": "full"}),
        ("ones", {"zeros": "shared"}),
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
        ("ones", 0, {"zeros": "by_row"}),
        ("ones", 0, {"zeros": "shared", "tol": 1e-10}),
        pytest.param("ones", 1, {"zeros": "shared"}, marks=slow),
    ],
)
def test_batches_end_where_all_data_together_end(kind, axis, options):
    """The same bound, intercept and predictions, by batches of rows and by batches of columns."""
    engine, cells = of_kind(kind, **{"tol": 1e-9, **options})
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
    # Rows that are folded in share a tangent of their own.
    folds = [e.fold_in(random.key(2), side=("rows", "columns")[axis], **batches[0], **given) for e in (fitted, engine)]
    first, expected = (np.asarray(found.predictive_mean()["x"]) for found in folds)
    np.testing.assert_allclose(first, expected, atol=5e-3)
    # From where what is shared ended, the vectors of the batches alone have to be found again.
    given |= {"over": over, "num_epochs": 500, "init_state": fitted.last_state}
    again = fit_batches(engine, random.key(3), batches, **given)
    np.testing.assert_allclose(float(again.log_evidence), float(fitted.log_evidence), rtol=1e-7)
    assert again.diagnostics.objective_trace[1] > fitted.diagnostics.objective_trace[1]


def exact_values(rows, cols, x, num_rows):
    with numpyro.plate("rows", num_rows):
        u = numpyro.sample("u", dist.Normal(0.0, 0.9).expand([RANK]).to_event(1))
    with numpyro.plate("cols", NUM_COLS):
        v = numpyro.sample("v", dist.Normal(0.0, 1.1).expand([RANK]).to_event(1))
    numpyro.sample("x", dist.Normal((u[rows] * v[cols]).sum(-1), 0.05), obs=x)


@needs_float64
@thorough
def test_directions_in_which_data_are_silent(monkeypatch):
    """Values without much noise say what products are, and nothing else moves the sizes of both sides."""
    rng = np.random.default_rng(3)
    rows, cols = np.divmod(np.arange(NUM_ROWS * NUM_COLS), NUM_COLS)
    u, v = rng.normal(size=(NUM_ROWS, RANK)), rng.normal(size=(NUM_COLS, RANK))
    x = (u[rows] * v[cols]).sum(-1) + 0.05 * rng.normal(size=rows.size)
    batches = [tuple(batch.values()) for batch in divided((rows, cols, x), EDGES)]
    engine = BilinearVG(exact_values, covariance="full", tol=1e-8, progress_bar=False, num_restarts=0)
    fitted = fit_batches(engine, random.key(1), batches, over="u", num_epochs=100)
    engine.run(random.key(0), rows, cols, x, NUM_ROWS)
    assert fitted.diagnostics.converged
    assert fitted.diagnostics.num_steps < engine.diagnostics.num_steps + 10
    np.testing.assert_allclose(float(fitted.log_evidence), float(engine.log_evidence), rtol=1e-6)
    monkeypatch.setattr(batch_run, "after_silent_step", lambda visited, shared, form: (visited, shared))
    with pytest.warns(UserWarning, match="did not converge"):
        without = fit_batches(engine, random.key(1), batches, over="u", num_epochs=100)
    assert float(without.log_evidence) < float(fitted.log_evidence) - 1.0


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


def interrupted_after(*batches):
    yield from batches
    raise KeyboardInterrupt


@needs_float64
@thorough
def test_a_zero_of_each_row_that_is_listed_or_not():
    """The tangent of a row with one unlisted zero is that of a listed cell, visit by visit."""
    rows, cols = np.divmod(np.arange(NUM_ROWS * NUM_COLS), NUM_COLS)
    x = np.random.default_rng(1).integers(0, 2, rows.size)
    is_last = cols == (5 * rows) % NUM_COLS
    x[is_last] = 0
    options, found = {"over": "u", "num_epochs": 6, "num_cols": NUM_COLS, "rank": RANK}, []
    for kind, is_listed in (("jaakkola", np.ones_like(is_last)), ("ones", ~is_last)):
        engine, _ = of_kind(kind, tol=1e-300)
        batches = divided((rows[is_listed], cols[is_listed], x[is_listed]), EDGES)
        with pytest.warns(UserWarning, match="did not converge"):
            found.append(fit_batches(engine, random.key(4), batches, **options))
    listed, unlisted = found
    np.testing.assert_allclose(unlisted.diagnostics.objective_trace, listed.diagnostics.objective_trace, rtol=1e-10)
    np.testing.assert_allclose(unlisted.posterior["v"].mean, listed.posterior["v"].mean, rtol=1e-8, atol=1e-8)


def counts_of_zero(rows, cols, counts, num_rows):
    with numpyro.plate("rows", num_rows):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    with numpyro.plate("cols", 6):
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    rate = jax.nn.softplus((u[rows] * v[cols]).sum(-1) - 0.5)
    numpyro.sample("counts", dist.Poisson(rate), obs=counts)


@needs_float64
@slow
def test_unlisted_zeros_of_counts():
    """By steps, to the bound of a run; batches of columns are refused."""
    table = np.random.default_rng(2).poisson(0.7, (20, 6))
    rows, cols = np.nonzero(table)
    engine = BilinearVG(counts_of_zero, unlisted_cells="zero", tol=1e-8, progress_bar=False)
    batches = []
    for start in (0, 8):
        mine = (rows >= start) & (rows < start + (8 if start == 0 else 12))
        batches.append((rows[mine] - start, cols[mine], table[rows[mine], cols[mine]], 8 if start == 0 else 12))
    fitted = fit_batches(engine, random.key(0), batches, over="u", num_epochs=300)
    engine.run(random.key(0), rows, cols, table[rows, cols], 20)
    assert fitted.diagnostics.converged
    np.testing.assert_allclose(float(fitted.log_evidence), float(engine.log_evidence), rtol=1e-6)
    with pytest.raises(ValueError, match=r"tangent for each row.* take batches over one of \['u'\]\."):
        fit_batches(engine, random.key(0), batches, over="v")


@thorough
def test_options_that_are_not_for_batches():
    given = {"num_cols": NUM_COLS, "rank": RANK}
    for kind, options, words in (
        ("ones", {"zeros": "exact"}, "zeros='exact' visits cells of the whole matrix"),
        ("ones", {"zeros": "sampled"}, "zeros='sampled' visits cells of the whole matrix"),
        ("ones", {"zeros": "by_row"}, r"are of columns: take batches over one of \['u', 'b'\], or zeros='shared'"),
    ):
        engine, cells = of_kind(kind, **options)
        over = "v" if options["zeros"] == "by_row" else "u"
        with pytest.raises(ValueError, match=words):
            fit_batches(engine, random.key(0), divided(cells, EDGES), over=over, **given)
    engine, cells = of_kind("jaakkola")
    with pytest.raises(ValueError, match=r"one vector of .*, and whether all batches share \['z'\] cannot be told"):
        fit_batches(engine, random.key(0), divided(cells, (17, 18, 40)), over="u", **given)


# Censored pairs

KNOWN = json.loads((REFERENCE / "paquet_pairs_A.json").read_text())
TABLE = np.stack([KNOWN["data_coo"][n] for n in "ijc"], axis=1)
PRIOR = {n: KNOWN["hyper"][n] for n in ("tau_u", "tau_v", "tau_b")}
PRIOR |= {"alpha": KNOWN["hyper"]["alpha0"], "beta": KNOWN["hyper"]["beta0"], "rank": 3}
PRIOR |= {"num_censored": KNOWN["D_prime"]}
USERS, ITEMS = {"num_users": 30}, {"num_items": 20}


def pairs_engine(**options):
    return BilinearVG(paired_symbols, bound="jaakkola", progress_bar=False, **options)


def batches_of_pairs(edges=(0, 11, 12, 30), axis=0):
    """Batches of users, or of items."""
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        table = TABLE[(TABLE[:, axis] >= start) & (TABLE[:, axis] < end)].copy()
        table[:, axis] -= start
        yield {"pairs": table, ("num_users", "num_items")[axis]: end - start}


@needs_float64
@thorough
@pytest.mark.parametrize("options", [{}, {"update": "bulk"}, {"selection": "constant", "covariance": "full"}])
def test_visits_of_all_users_are_sweeps(options):
    """Vectors, shares, tangent and Dirichlet distributions."""
    found, expected = visit_and_sweep(pairs_engine(**options), (TABLE,), {**PRIOR, **USERS, **ITEMS})
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


@needs_float64
@thorough
@pytest.mark.parametrize(
    "selection, axis", [("learned", 0), pytest.param("constant", 0, marks=slow), pytest.param("learned", 1, marks=slow)]
)
def test_batches_of_pairs_end_where_all_pairs_together_end(selection, axis, tmp_path):
    """The bound, at most that of the known limit; who is selected, what is censored, and what the last user is told."""
    engine = pairs_engine(selection=selection, tol=1e-8, num_steps=2000)
    edges, over, given = ((0, 11, 12, 30), "u", ITEMS) if axis == 0 else ((0, 7, 20), "v", USERS)
    given = {**PRIOR, **given}
    batches = list(batches_of_pairs(edges, axis))
    fitted = fit_batches(engine, random.key(1), batches, over=over, num_epochs=400, **given)
    assert fitted.diagnostics.converged and fitted.log_evidence.is_lower_bound
    engine.run(random.key(0), TABLE, **PRIOR, **USERS, **ITEMS)
    bound = float(fitted.log_evidence)
    np.testing.assert_allclose(bound, float(engine.log_evidence), rtol=1e-5)
    if selection == "learned":
        assert bound <= KNOWN["converged"]["bound"] + 1e-6
    shared, own = ("psi", "pi") if axis == 0 else ("pi", "psi")
    np.testing.assert_allclose(fitted.posterior[shared].mean, engine.posterior[shared].mean, rtol=0.02, atol=1e-4)
    np.testing.assert_allclose(float(fitted.background.tangent), float(engine.background.tangent), rtol=0.02)
    found, expected = ((b.rows, b.columns)[axis] for b in (fitted.background, engine.background))
    np.testing.assert_allclose(found, expected[edges[-2] :], rtol=0.05, atol=1e-4)
    # Of the vectors of the last batch, the probabilities are among these.
    last = np.asarray(engine.posterior[own].mean)[edges[-2] :]
    np.testing.assert_allclose(fitted.posterior[own].mean, last / last.sum(), rtol=0.02, atol=1e-4)
    if axis == 0:
        one, other = (recommend_items(e, [user], k=5).items for e, user in ((fitted, 17), (engine, 29)))
        np.testing.assert_array_equal(one, other)
    fitted.save(tmp_path / "fit")
    again = BilinearVG.load(tmp_path / "fit", paired_symbols)
    np.testing.assert_array_equal(again.posterior[shared].mean, fitted.posterior[shared].mean)


@needs_float64
@thorough
def test_going_on_with_pairs(tmp_path):
    """A checkpoint goes on to the same numbers; the end of a fit is where another begins; what was read is no fit."""
    engine, batches = pairs_engine(tol=1e-300), list(batches_of_pairs())
    options = {"over": "u", "num_epochs": 5, **PRIOR, **ITEMS}
    with pytest.warns(UserWarning, match="did not converge"):
        whole = fit_batches(engine, random.key(0), batches, **options)
        path = tmp_path / "epochs"
        fit_batches(engine, random.key(0), batches, checkpoint=path, **{**options, "num_epochs": 2})
        resumed = fit_batches(engine, random.key(0), iter(batches), checkpoint=path, **options)
        further = fit_batches(engine, random.key(2), batches, init_state=whole.last_state, **options)
    np.testing.assert_array_equal(resumed.diagnostics.objective_trace, whole.diagnostics.objective_trace)
    np.testing.assert_array_equal(resumed.posterior["pi"].mean, whole.posterior["pi"].mean)
    assert float(further.log_evidence) > float(whole.log_evidence)
    with pytest.raises(KeyboardInterrupt):
        fit_batches(engine, random.key(0), interrupted_after(*batches[:2]), **options)


@thorough
def test_pairs_that_are_not_for_batches():
    engine, batches = pairs_engine(), list(batches_of_pairs())
    options = {"over": "u", **PRIOR, **ITEMS}
    other = {**batches[1], "num_censored": 17.0}
    with pytest.raises(ValueError, match="num_censored is 17 in batch 1, counted from zero, and 800 in the first"):
        fit_batches(engine, random.key(0), [batches[0], other], **options)
    other = {**batches[1], "beta": 2.0}
    with pytest.raises(ValueError, match=r"\['v', 'g'\] are selected have another prior in batch 1"):
        fit_batches(engine, random.key(0), [batches[0], other], **options)
    nothing = {"pairs": TABLE[:0], "num_users": 2}
    with pytest.raises(ModelStructureError, match="no pair with a positive count") as raised:
        fit_batches(engine, random.key(0), [batches[0], nothing], **options)
    assert raised.value.__notes__[-1] == "In batch 1, counted from zero."
