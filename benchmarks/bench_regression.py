"""A sweep of expectation propagation on a long regression, in units of a Newton step of statsmodels."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import statsmodels.api as sm

from numpyro_ext.infer.gaussian.algorithms import expectation_propagation as ep
from numpyro_ext.linalg.gaussian.design import DenseDesign
from numpyro_ext.linalg.gaussian.prior import DiagonalPrior
from numpyro_ext.potentials import LogitPotential, PoissonExpPotential, ProbitPotential
from numpyro_ext.structure.latent_gaussian.form import Blocks, LatentGaussian

from .compilation import compile_sweep
from .results_table import Row, at_most

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
    results.add(
        Row(
            item=f"EP sweep, {family} regression, 10⁵ rows, 20 columns",
            dtype=np.dtype(dtype).name,
            seconds=seconds,
            peer="Newton step of statsmodels GLM",
            peer_seconds=per_step,
            figure="time ratio",
            value=seconds / per_step,
            target=at_most(10),
            compile_seconds=ours.seconds,
            peak_bytes=ours.peak_bytes,
            remark=(
                f"Fits of {NUM_NEWTON_STEPS} steps less fits of 1, which take {one:.2g} s with what surrounds them"
                f" (ratio {seconds / one:.2g}). After {int(info.num_steps)} sweeps EP has"
                f" {'converged' if info.converged else 'not converged'}; its mean and the maximum of the likelihood"
                f" differ by {gap:.0e} at most."
            ),
        )
    )
