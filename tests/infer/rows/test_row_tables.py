"""Tables for variational EM: what is taken, what is missing, and what is refused in words."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from numpyro_ext.infer import VariationalGaussian, table_rows, variational_em
from numpyro_ext.infer.rows.table import checked_rows, runaway_columns
from numpyro_ext.models import factor_analysis
from numpyro_ext.potentials import (
    BinomialLogitPotential,
    BoundedPotential,
    CumulativeLogitPotential,
    GaussianPotential,
    LogitPotential,
    PoissonExpPotential,
    SoftmaxPotential,
)
from numpyro_ext.potentials.bounds.logistic import BohningBound

RNG = np.random.default_rng(1)
BINARY = RNG.integers(0, 2, (12, 4))
HOLES = np.where(RNG.random(BINARY.shape) < 0.2, np.nan, BINARY)
ROWS = table_rows(BINARY, kinds="binary", num_factors=2)
LEARN = ("loadings", "intercept")


def fit(rows, learn=LEARN, **options):
    return variational_em(rows, learn=learn, progress_bar=False, **options)


def changed(bad, row=3, column=1):
    table = BINARY.astype(float)
    table[row, column] = bad
    return table


def assert_same_rows(found, expected):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), found, expected)


# --- what is taken


@pytest.mark.parametrize(
    "make",
    [
        np.ndarray.tolist,
        pd.DataFrame,
        lambda table: pd.DataFrame(table).astype("Int64"),
        lambda table: table.astype(np.float32),
        lambda table: table.astype(bool),
        jnp.asarray,
    ],
    ids=["list", "pandas", "pandas, nullable", "float32", "bool", "jax"],
)
def test_every_way_to_write_a_table(make):
    assert_same_rows(table_rows(make(BINARY), kinds="binary", num_factors=2), ROWS)


def test_cells_that_are_nan_are_missing():
    rows = table_rows(HOLES, kinds="binary", num_factors=2)
    names = [f"column {k}" for k in range(HOLES.shape[1])]
    mask = pd.DataFrame(~np.isnan(HOLES), columns=names)[names[::-1]]
    assert_same_rows(table_rows(pd.DataFrame(HOLES, columns=names), mask, kinds="binary", num_factors=2), rows)
    np.testing.assert_array_equal(rows.observed[0], ~np.isnan(HOLES))
    twice = [f"column {k // 2}" for k in range(HOLES.shape[1])]
    table, mask = (pd.DataFrame(values, columns=twice) for values in (HOLES, ~np.isnan(HOLES)))
    assert_same_rows(table_rows(table, mask, kinds="binary", num_factors=2), rows)
    with pytest.raises(ValueError, match="table and mask have a column twice"):
        table_rows(table, mask.iloc[:, ::-1], kinds="binary", num_factors=2)
    nullable = pd.DataFrame(BINARY).astype("Int64").mask(np.isnan(HOLES))
    assert_same_rows(table_rows(nullable, kinds="binary", num_factors=2), rows)
    masked = table_rows(BINARY, (~np.isnan(HOLES)).astype(int).tolist(), kinds="binary", num_factors=2)
    np.testing.assert_array_equal(masked.observed[0], rows.observed[0])
    with pytest.raises(ValueError, match=r"row \d+, column \d, nan, is NaN where the mask says observed"):
        table_rows(HOLES, np.ones(HOLES.shape), kinds="binary", num_factors=2)


def test_lists_and_integers_in_place_of_arrays():
    """Fields of the rows and of their potentials; single precision stays single."""
    plain = ROWS._replace(
        mean=[0, 0],
        covariance=[[1, 0], [0, 1]],
        intercept=[0] * 4,
        potentials=(LogitPotential(BINARY.tolist()),),
        observed=(np.ones((12, 4)).tolist(),),
        weights=[1] * 12,
    )
    found = checked_rows(plain)
    assert found.mean.dtype == ROWS.mean.dtype and found.observed[0].dtype == bool
    jax.tree.map(np.testing.assert_array_equal, found, ROWS)
    frame = checked_rows(ROWS._replace(potentials=(LogitPotential(pd.DataFrame(BINARY)),)))
    np.testing.assert_array_equal(frame.potentials[0].label, BINARY)
    single = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype.kind == "f" else x, ROWS)
    single = single._replace(potentials=(GaussianPotential(BINARY.astype(np.float64), 1.0),))
    assert {leaf.dtype for leaf in jax.tree.leaves(checked_rows(single)) if leaf.dtype != bool} == {np.dtype("float32")}


@pytest.mark.slow
def test_the_engine_on_the_model_function_has_the_same_bound_at_the_same_parameters():
    """Columns of all kinds with missing cells: predictors, factors and bounds mean the same on both sides."""
    kinds = ["real", "binary", 3, "count", "real"]
    rng = np.random.default_rng(0)
    table = np.column_stack(
        [rng.normal(size=20), rng.integers(0, 2, 20), rng.integers(0, 3, 20), rng.poisson(1.0, 20), rng.normal(size=20)]
    )
    table = np.where(rng.random(table.shape) < 0.15, np.nan, table)
    rows = table_rows(table, kinds=kinds, num_factors=2)
    found = fit(rows, (*LEARN, "noise"), num_steps=3, tol=-1.0, num_expectation_steps=200, expectation_tol=1e-14)
    noise = jnp.stack([found.rows.potentials[0].scale[0], found.rows.potentials[-1].scale[0]])
    hyper = {"loadings": found.rows.loadings, "intercept": found.rows.intercept, "noise": noise}
    model = partial(factor_analysis, num_factors=2, kinds=kinds)
    engine = VariationalGaussian(model, bound={"categorical_3": "tilted"}, hyper_values=hyper, progress_bar=False)
    engine.run(jax.random.key(0), table)
    assert found.objective_trace[-1] == pytest.approx(float(engine.log_evidence), abs=1e-5)
    np.testing.assert_allclose(found.posteriors.mean, engine.posterior["factors"].mean, atol=1e-4)


# --- what is refused


@pytest.mark.parametrize("bad", [7, -1, 0.5, np.inf])
def test_a_cell_out_of_range_is_named(bad):
    with pytest.raises(ValueError, match=rf"row 3, column 1, {bad}, is (outside the range of|no number for) a Logit"):
        table_rows(changed(bad), kinds="binary", num_factors=1)
    with pytest.raises(ValueError, match=rf"row 3, column 1, {bad}, is"):
        fit(ROWS._replace(potentials=(BoundedPotential(LogitPotential(jnp.asarray(changed(bad))), BohningBound()),)))


POTENTIALS = {
    "a category": (SoftmaxPotential(changed(2), 2, pinned=0), r"2, is outside .* whole numbers from 0 to 1"),
    "an ordered category": (CumulativeLogitPotential(changed(4), [-1.0, 0.0, 1.0]), "whole numbers from 0 to 3"),
    "a count": (PoissonExpPotential(changed(-1)), "0, 1, 2 and so on"),
    "half a count": (PoissonExpPotential(changed(0.5)), "0.5, is outside"),
    "more than all trials": (BinomialLogitPotential(changed(9), 5), "from 0 to 5"),
    "NaN": (GaussianPotential(changed(np.nan), 1.0), "nan, is no number.*let table_rows take NaN for it"),
    "no noise": (GaussianPotential(BINARY, [1, 1, 0, 1]), "scale of the columns 0 to 3 .* must be positive"),
    "equal thresholds": (CumulativeLogitPotential(BINARY, [0.5, 0.5]), "thresholds .* must increase strictly"),
    "thresholds out of order": (CumulativeLogitPotential(BINARY, [0.5, -0.5]), "must increase strictly"),
    "another shape": (LogitPotential(BINARY[:, :3]), r"shape \(12, 3\), which does not broadcast to .*\(12, 4\)"),
}


@pytest.mark.parametrize("name", POTENTIALS)
def test_potentials_that_do_not_hold_their_data(name):
    potential, message = POTENTIALS[name]
    with pytest.raises(ValueError, match=message):
        fit(ROWS._replace(potentials=(potential,)))


REPLACED = {
    "no rows": ({"weights": np.zeros(0)}, "there must be rows"),
    "weights of zero": ({"weights": np.zeros(12)}, "not all of them zero"),
    "a negative weight": ({"weights": [-1] + [1] * 11}, "weights must be finite and not negative"),
    "nothing observed": ({"observed": (np.zeros((12, 4)),)}, "No cell is observed"),
    "a mask of other rows": ({"observed": (np.ones((11, 4), bool),)}, r"must have shape \(12, columns\)"),
    "a mask that is none": ({"observed": (np.full((12, 4), 2),)}, "must be booleans"),
    "no mask": ({"observed": ()}, "one mask for each potential"),
    "a covariance that is none": ({"covariance": -np.eye(2)}, "symmetric and positive definite"),
    "too few loadings": ({"loadings": np.ones((3, 2))}, r"loadings must be finite and have shape \(4, 2\)"),
    "loadings of zero": ({"loadings": np.zeros((4, 2))}, "rank 0, and there are 2 latent variables"),
}


@pytest.mark.parametrize("name", REPLACED)
def test_rows_that_do_not_fit_together(name):
    fields, message = REPLACED[name]
    with pytest.raises(ValueError, match=message):
        fit(ROWS._replace(**fields))


def test_loadings_that_are_given_may_have_any_rank():
    rows = ROWS._replace(loadings=jnp.zeros((4, 2)))
    assert not checked_rows(rows).loadings.any()
    with pytest.raises(ValueError, match="stop at a saddle"):
        checked_rows(rows, learns_loadings=True)


@pytest.mark.parametrize(
    "table, options, message",
    [
        ([["a", "b"]], {}, "table must be numbers"),
        (np.zeros((0, 4)), {}, "needs a table with rows and columns"),
        (BINARY, {"mask": np.ones((3, 4))}, r"mask has shape \(3, 4\)"),
        (BINARY, {"num_factors": 5}, "5 latent variables for 4 predictors"),
        (BINARY, {"kinds": ["binary"] * 3}, "one for each of the 4 columns"),
        (BINARY, {"kinds": 1}, "a number of categories .two or more"),
        (BINARY, {"kinds": "ordinal"}, "kinds must be 'real', 'binary', 'count'"),
    ],
)
def test_tables_that_are_none(table, options, message):
    with pytest.raises(ValueError, match=message):
        fit(table_rows(table, **{"kinds": "binary", "num_factors": 1, **options}))


# --- columns that leave the objective without a maximum


def test_a_constant_column_is_named_and_not_reported_as_converged():
    table = BINARY.copy()
    table[:, 1] = 1
    rows = table_rows(table, kinds="binary", num_factors=2)
    with pytest.warns(UserWarning, match="column 1 is 1 in every observed cell, and its predictor runs away"):
        found = fit(rows, num_steps=200, tol=1e-3)
    assert found.num_steps < 200 and not found.converged and found.rows.intercept[1] > 4.0
    # The other columns do converge, and nothing runs away where the intercept is not learned.
    assert fit(ROWS, num_steps=200, tol=1e-3).converged
    assert not runaway_columns(rows, ("loadings",))


def test_other_columns_without_a_maximum():
    def found(cells, kind, learn=LEARN, **options):
        return runaway_columns(table_rows(np.reshape(cells, (-1, 1)), kinds=kind, **options), learn)

    assert not found([0, 1, 2], "count") and not found([2, 2, 2], "count")
    assert "is 0 in every observed cell" in found([0, np.nan, 0], "count")[0]
    assert "never shows the categories [1]" in found([0, 2, np.nan], 3)[0]
    assert not found([0, 2, 1], 3)
    assert found([0, 0, 0], "binary", ("mean", "covariance"))
    assert not found([1, 1], "real") and "noise shrinks to zero" in found([1, 1], "real", (*LEARN, "noise"))[0]
    # A row without weight shows nothing.
    assert found([0, 0, 1], "binary", weights=[1, 1, 0]) and not found([0, 0, 1], "binary")
    ordered = CumulativeLogitPotential(jnp.ones((12, 4)), jnp.array([-1.0, 1.0]))
    assert not runaway_columns(ROWS._replace(potentials=(ordered,)), LEARN)  # the category in the middle
