"""Engines on fields that are flat along a null space: P-splines as they are written, beside sums in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_ext import EP, LaplaceApproximation
from numpyro_ext.distributions import (
    GaussianMarkovRandomField,
    bspline_basis,
    difference_precision,
    kronecker_sum,
    sparse_matmul,
)
from numpyro_ext.infer.gaussian.algorithms.modes import laplace
from numpyro_ext.infer.gaussian.algorithms.propagation import expectation_propagation
from numpyro_ext.structure import read_latent_gaussian
from tests.tiers import few

KNOTS = {"dense rows": 5, "sparse rows": 16}
_NULL = 4


def data_of(knots, num_rows=60):
    """Basis and penalty of a surface with a number of knots along both axes, and values of it."""
    rng = np.random.default_rng(0)
    places = rng.uniform(size=(num_rows, 2))
    basis = bspline_basis(places, knots=(knots, knots), domain=[(0, 1), (0, 1)])
    walk = difference_precision(knots, order=2)
    values = np.sin(4 * places[:, 0]) + 3.0 * places[:, 1] + 0.3 * rng.normal(size=num_rows)
    return basis, kronecker_sum(walk, walk), values


def surface(basis, penalty, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    s = numpyro.sample("s", dist.HalfNormal(1))
    field = GaussianMarkovRandomField(penalty.scale_by(1 / tau**2), null_space=penalty.null_space)
    w = numpyro.sample("w", field)
    numpyro.sample("y", dist.Normal(sparse_matmul(basis, w), s), obs=y)


def expected(basis, penalty, y, tau, s):
    """Log evidence, and means and deviations of the weights, with the generalised determinant of the penalty."""
    precision, matrix = np.asarray(penalty.to_dense()) / tau**2, basis.toarray()
    posterior = precision + matrix.T @ matrix / s**2
    shift = matrix.T @ y / s**2
    mean = np.linalg.solve(posterior, shift)
    log_determinant = np.sum(np.log(np.linalg.eigvalsh(precision)[_NULL:])) - np.linalg.slogdet(posterior)[1]
    log_evidence = 0.5 * (log_determinant + _NULL * np.log(2 * np.pi) + shift @ mean - y @ y / s**2)
    log_evidence -= 0.5 * len(y) * np.log(2 * np.pi * s**2)
    return log_evidence, mean, np.sqrt(np.diag(np.linalg.inv(posterior)))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KNOTS)
@pytest.mark.parametrize("algorithm", [laplace, expectation_propagation])
def test_evidence_and_moments_are_those_of_dense_sums(kind, algorithm):
    data = data_of(KNOTS[kind])
    reading = read_latent_gaussian(surface, data)
    assert (reading.abstract_form.layout is None) == (kind == "dense rows")
    values = {"tau": jnp.asarray(0.7), "s": jnp.asarray(0.4)}

    @jax.jit
    def at(hyper):
        form = reading.form(hyper)
        state = algorithm.solve(form, algorithm.init(form), num_steps=20, tol=1e-8)[0]
        posterior = algorithm.posterior(form, state)
        moments = posterior.moments(reading.maps(hyper))["w"]
        return jax.value_and_grad(lambda h: algorithm.log_evidence(reading.form(h), state))(hyper), moments

    (log_evidence, slopes), (mean, variance) = at(values)
    wanted, wanted_mean, wanted_sd = expected(*data, 0.7, 0.4)
    assert log_evidence == pytest.approx(wanted, abs=1e-8)
    np.testing.assert_allclose(np.ravel(mean), wanted_mean, atol=1e-8)
    np.testing.assert_allclose(np.sqrt(np.ravel(variance)), wanted_sd, rtol=1e-8)
    step = 1e-4
    for name, moves in (("tau", (step, 0.0)), ("s", (0.0, step))):
        up, down = (expected(*data, 0.7 + k * moves[0], 0.4 + k * moves[1])[0] for k in (1, -1))
        assert slopes[name] == pytest.approx((up - down) / (2 * step), abs=1e-4)


def slopes_only(basis, penalty, y=None):
    w = numpyro.sample("w", GaussianMarkovRandomField(penalty, null_space=penalty.null_space))
    level = numpyro.sample("level", dist.Normal(0.0, 10.0))
    numpyro.sample("y", dist.Normal(level + sparse_matmul(basis, w) - jnp.mean(w), 1.0), obs=y)


def rows_of_half(basis, penalty, y=None):
    w = numpyro.sample("w", GaussianMarkovRandomField(penalty, null_space=penalty.null_space))
    numpyro.sample("y", dist.Normal(w[:2], 1.0), obs=y)


@pytest.mark.parametrize("model", few([slopes_only, rows_of_half], 1))
def test_directions_that_observations_do_not_see_are_refused(model):
    basis, penalty, y = data_of(KNOTS["dense rows"])
    with pytest.raises(ValueError, match="site 'w' is flat, and the observations"):
        LaplaceApproximation(model, progress_bar=False).run(
            random.key(0), basis, penalty, y[: 2 if model is rows_of_half else None]
        )


@pytest.mark.thorough
def test_evidences_under_flat_fields_say_so():
    basis, penalty, y = data_of(KNOTS["dense rows"])
    engine = EP(surface, progress_bar=False, num_samples=200)
    engine.run(random.key(0), basis, penalty, y)
    assert engine.diagnostics.converged and engine.log_evidence.flat_sites == ("w",)
    draws = np.asarray(engine.get_samples()["w"])
    site = engine.posterior["w"]
    np.testing.assert_allclose(draws.mean(0), site.mean, atol=5 * np.max(site.sd) / np.sqrt(len(draws)))
