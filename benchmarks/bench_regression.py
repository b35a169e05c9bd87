"""A sweep of expectation propagation on a long regression, in units of a Newton step of statsmodels."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import statsmodels.api as sm

from numpyro_ext.infer.gaussian.algorithms.posterior import gaussian_prior
from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation as ep
from numpyro_ext.linalg.gaussian.design import DenseDesign, SparseRows
from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
from numpyro_ext.linalg.gaussian.spaces.border_space import Border
from numpyro_ext.potentials import LogitPotential, PoissonExpPotential, ProbitPotential
from numpyro_ext.structure.latent_gaussian.form import Blocks, LatentGaussian

from .harness import at_most, compile_function, compile_sweep

NUM_ROWS, NUM_COLUMNS = 10**5, 20
NUM_NEWTON_STEPS = 6
FAMILIES = {
    "logistic": (LogitPotential, sm.families.Binomial()),
    "probit": (ProbitPotential, sm.families.Binomial(sm.families.links.Probit())),
    "Poisson": (PoissonExpPotential, sm.families.Poisson()),
}


def data(family: str) -> tuple[np.ndarray, np.ndarray]:
    """Standardised columns after a column of ones, and responses to moderate coefficients."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((NUM_ROWS, NUM_COLUMNS))
    X[:, 0] = 1.0
    predictor = X @ (0.2 * rng.standard_normal(NUM_COLUMNS))
    y = rng.poisson(np.exp(predictor)) if family == "Poisson" else rng.random(NUM_ROWS) < 1 / (1 + np.exp(-predictor))
    return X, y.astype(float)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_sweep(race, results, family, dtype):
    potential, peer_family = FAMILIES[family]
    X, y = data(family)
    form = LatentGaussian(
        prior=(DiagonalPrior(jnp.full(NUM_COLUMNS, 2.5**2, dtype)),),
        design=DenseDesign(jnp.asarray(X, dtype)),
        offset=jnp.zeros(NUM_ROWS, dtype),
        potentials=(potential(jnp.asarray(y, dtype)),),
        observed=(jnp.ones(NUM_ROWS, bool),),
        log_constant=jnp.zeros((), dtype),
        blocks=Blocks(jnp.arange(NUM_ROWS)[None], jnp.arange(NUM_COLUMNS)[None]),
    )
    solve = jax.jit(functools.partial(ep.solve, num_steps=30, tol=1e-6 if dtype == np.float64 else 1e-4))
    state, info = solve(form, jax.jit(ep.init)(form))
    ours = compile_sweep(form)._replace(args=(form, state))

    def newton(num_steps: int) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Stopping early is what is asked for.
            return sm.GLM(y, X, family=peer_family).fit(maxiter=num_steps, tol=0.0).params

    seconds, one, many = race(ours.run, lambda: newton(1), lambda: newton(NUM_NEWTON_STEPS), rounds=5)
    gap = np.max(np.abs(ep.posterior(form, state).mean - newton(NUM_NEWTON_STEPS)))
    per_step = (many - one) / (NUM_NEWTON_STEPS - 1)
    results.record(
        f"EP sweep, {family} regression, 10⁵ rows, 20 columns",
        dtype=np.dtype(dtype).name,
        peer="Newton step of statsmodels GLM",
        times=(seconds, per_step),
        target=at_most(10),
        programs=(ours,),
        remark=f"Fits of {NUM_NEWTON_STEPS} steps less fits of 1, which take {one:.2g} s with what surrounds them"
        f" (ratio {seconds / one:.2g}). After {int(info.num_steps)} sweeps EP has"
        f" {'converged' if info.converged else 'not converged'}; its mean and the maximum of the likelihood"
        f" differ by {gap:.0e} at most.",
    )


NUM_COMMON, ROWS_PER_GROUP, NUM_SWEEPS = 10, 5, 10


def grouped(num_groups: int) -> LatentGaussian:
    """Counts with an intercept of each group and common coefficients."""
    rng = np.random.default_rng(0)
    num_rows, num_columns = ROWS_PER_GROUP * num_groups, num_groups + NUM_COMMON
    group = np.repeat(np.arange(num_groups), ROWS_PER_GROUP)[:, None]
    x = rng.standard_normal((num_rows, NUM_COMMON))
    columns = np.concatenate([group, np.tile(num_groups + np.arange(NUM_COMMON), (num_rows, 1))], axis=1)
    y = rng.poisson(np.exp(0.3 * rng.standard_normal(num_groups)[group[:, 0]] + 0.1 * x.sum(axis=1)))
    return LatentGaussian(
        prior=(DiagonalPrior(jnp.full(num_groups, 0.09)), DiagonalPrior(jnp.ones(NUM_COMMON))),
        design=SparseRows(
            jnp.asarray(columns), jnp.asarray(np.concatenate([np.ones_like(x[:, :1]), x], 1)), num_columns
        ),
        offset=jnp.zeros(num_rows),
        potentials=(PoissonExpPotential(jnp.asarray(y, float)),),
        observed=(jnp.ones(num_rows, bool),),
        log_constant=jnp.zeros(()),
        blocks=Blocks(jnp.arange(num_rows)[None], jnp.arange(num_columns)[None]),
        border=Border(
            jnp.arange(num_groups)[:, None], num_groups + jnp.arange(NUM_COMMON), jnp.zeros((num_rows, 1), int)
        ),
    )


def test_groups_with_common_coefficients(race, results):
    """The algebra of a sweep: all factorisations, all marginals."""
    num_groups = 20_000

    @jax.jit
    def condition(space, precision):
        """Sweeps in a loop, as a fit makes them: a single call would pay for the memory of its results."""

        def sweep(_, precision):
            marginals = space.condition(precision, precision).marginals()
            return precision + 1e-9 * (marginals.mean + marginals.variance)

        return jax.lax.fori_loop(0, NUM_SWEEPS, sweep, precision)

    runs = []
    for form in (grouped(num_groups), grouped(4 * num_groups)):
        space = jax.jit(gaussian_prior)(form)
        runs.append(compile_function(condition, space, jnp.full(form.num_rows, 0.7)))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS_PER_GROUP * num_groups, NUM_COMMON)))
    weight = jnp.full(len(x), 0.7)
    # one pass over the rows and one Cholesky factorisation of the border, as a regression without groups would take
    floor = compile_function(
        jax.jit(lambda x, weight: jnp.linalg.cholesky((x * weight[:, None]).T @ x + jnp.eye(NUM_COMMON))), x, weight
    )
    seconds, fourfold, floor_seconds = race(runs[0].run, runs[1].run, floor.run, rounds=9)
    seconds, fourfold = seconds / NUM_SWEEPS, fourfold / NUM_SWEEPS
    results.record(
        f"Border: {num_groups} groups of {ROWS_PER_GROUP} rows with {NUM_COMMON} common coefficients",
        peer="one weighted Gram matrix of the common columns and its Cholesky factor",
        times=(seconds, floor_seconds),
        figure="growth exponent to four times the groups",
        value=float(np.log(fourfold / seconds) / np.log(4)),
        target=at_most(1.1),
        programs=(runs[0],),
        remark=f"{seconds / floor_seconds:.2g} times the peer, which knows no groups and makes no marginals.",
    )
