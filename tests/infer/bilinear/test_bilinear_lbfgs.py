"""L-BFGS on one side, as in the papers: the optima are those of the natural-gradient steps and of the reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.infer import BilinearVG
from numpyro_ext.infer.bilinear.algorithms import sweeps as bg
from numpyro_ext.infer.bilinear.algorithms.cells import Block
from numpyro_ext.infer.bilinear.algorithms.schedules import loop
from numpyro_ext.infer.bilinear.algorithms.steps import lbfgs_side
from numpyro_ext.models import poisson_factorization
from tests.infer.bilinear.bilinear_forms import reference_problem
from tests.tiers import few

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
take_step = jax.jit(lbfgs_side)


def reference_blocks(found, family):
    out = []
    for mean, covariance in ((found["a"], found["A"]), (found["b"], found["B"])):
        spread = {"full": covariance, "diagonal": np.einsum("eii->ei", covariance), "point": None}[family]
        out.append(Block(jnp.asarray(mean), None if spread is None else jnp.asarray(spread)))
    return out


@needs_float64
@pytest.mark.parametrize("method, family", few([("VB", "full"), ("MF", "diagonal")], 1))
def test_the_unique_optimum_of_one_side(method, family):
    form, found = reference_problem()
    expected = found[method]["user_block_optimum"]
    rows, columns = reference_blocks(found, family)
    view = bg.make_views(form, rows, columns).rows
    for start in (rows, Block(-rows.mean, 0.3 * rows.covariance)):
        block, previous = start, jnp.full(5, -jnp.inf)
        for _ in range(6):
            block, _, values, loss = take_step(view, block, columns, form.rows, jnp.ones(5))
            assert np.all(values >= previous - 1e-12) and np.all(loss == 0.0)
            previous = values
        np.testing.assert_allclose(block.mean, expected["a"], atol=1e-9)
        np.testing.assert_allclose(block.covariance, expected["A"], atol=1e-9)


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize("family", ["point", pytest.param("full", marks=pytest.mark.slow)])
def test_both_solvers_end_at_the_same_bound(family):
    """From a start near an optimum, so that there is one to find, and no start is infeasible."""
    form, found = reference_problem()
    state = bg.init(form, jax.random.key(3), family, family)
    near, _ = jax.jit(partial(loop.solve, num_sweeps=5, tol=1e-9))(form, state)
    best, info = jax.jit(partial(loop.solve, num_sweeps=2000, tol=1e-12))(form, near)
    views = bg.make_views(form, near.rows, near.columns)
    sweep = jax.jit(partial(bg.sweep, take_step=lbfgs_side))
    state, objectives = near, []
    for _ in range(300):
        state, found = sweep(form, views, state)
        objectives.append(float(found.objective))
    assert np.all(np.diff(objectives) >= -1e-9)
    np.testing.assert_allclose(objectives[-1], info.objective, rtol=1e-9)
    eta = form.predictor(best.rows.mean, best.columns.mean)
    np.testing.assert_allclose(form.predictor(state.rows.mean, state.columns.mean), eta, atol=1e-4)


@pytest.mark.thorough
def test_the_option():
    """The engine runs by L-BFGS, with a learned scale; devices are refused."""
    rows, cols = np.divmod(np.arange(30), 5)
    generator = np.random.default_rng(0)
    factors = generator.normal(size=6)[rows] * generator.normal(size=5)[cols]
    counts = generator.poisson(2.0 * np.exp(factors))
    options = {"hyper_values": {"row_bias_scale": 0.5, "col_bias_scale": 0.5}, "progress_bar": False, "num_steps": 300}
    engine = BilinearVG(poisson_factorization, solver="lbfgs", **options)
    engine.run(jax.random.key(0), rows, cols, counts, num_rows=6, num_cols=5, rank=1, log_rate=0.7)
    assert engine.diagnostics.converged
    assert np.all(np.diff(engine.diagnostics.objective_trace) >= -1e-4)
    with pytest.raises(ValueError, match="solver must be"):
        BilinearVG(poisson_factorization, solver="newton")
    with pytest.raises(ValueError, match="one device"):
        BilinearVG(poisson_factorization, solver="lbfgs", devices=jax.devices())
