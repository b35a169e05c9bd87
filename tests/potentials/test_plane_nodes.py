"""Even nodes in the plane: against a dense grid, and where they must not be trusted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import dblquad
from scipy.special import logsumexp

from numpyro_ext.potentials import PairPotential
from numpyro_ext.potentials.integrals.plane_nodes import on_plane_nodes

IS_DOUBLE = jax.config.jax_enable_x64
KINDS = ("counts", "funnel", "mixture", "kink", "spike")
SMOOTH = ("counts", "funnel", "mixture")


def _log_factors(e, kind, y, xp=jnp):
    """Zero-inflated counts; location and log scale; two ridges; a kink; a heavy tail with a narrow peak."""
    a, b = e[..., 0], e[..., 1]
    gate = -xp.log1p(xp.exp(-a)), -xp.log1p(xp.exp(a))
    each = [
        xp.where(y == 0, xp.logaddexp(gate[0], gate[1] - xp.exp(b)), gate[1] + y * b - xp.exp(b)),
        -b - 0.5 * (y - a) ** 2 * xp.exp(-2 * b),
        xp.logaddexp(-5.0 * (a - y) ** 2, -5.0 * (b - y) ** 2),
        -3.0 * xp.abs(a - b - y),
        -1.5 * xp.log1p((a - b - y) ** 2 / 0.0008),
    ]
    return sum(xp.where(kind == k, value, 0.0) for k, value in enumerate(each))


def _cases():
    rows = []
    for kind in range(len(KINDS)):
        for y in (0.0, 2.0):
            for first, second in ((0.1, 0.3), (0.3, 0.3), (0.5, 1.0), (1.0, 0.3), (2.0, 1.0)):
                for mean in ((0.3, 0.1), (1.0, -0.5)):
                    cross = 0.5 * first * second
                    rows.append((kind, y, mean, ((first**2, cross), (cross, second**2))))
    return (np.array(part) for part in zip(*rows, strict=True))


KIND, Y, MEAN, COVARIANCE = _cases()


def _by_grid(kind, y, mean, covariance):
    """Log integral, mean and covariance by a grid that shrinks onto the mass."""
    triangle, low, high = np.linalg.cholesky(covariance), np.full(2, -9.0), np.full(2, 9.0)
    for _ in range(3):
        axes = [np.linspace(a, b, 301) for a, b in zip(low, high, strict=True)]
        z = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
        value = _log_factors(mean + z @ triangle.T, kind, y, np) - 0.5 * np.sum(z**2, axis=1)
        total, step = logsumexp(value), (high - low) / 300
        has_mass = z[value > value.max() - 40.0]
        low, high = has_mass.min(0) - 2 * step, has_mass.max(0) + 2 * step
    weight = np.exp(value - total)
    center = weight @ z
    spread = (z - center).T @ ((z - center) * weight[:, None])
    log_z = total + np.log(step.prod() / (2 * np.pi))
    return log_z, mean + triangle @ center, triangle @ spread @ triangle.T


def _factors(kind, y):
    return PairPotential(_log_factors, (jnp.asarray(kind), jnp.asarray(y)))


@pytest.mark.float32
def test_what_is_trusted_is_right_and_what_hides_is_not_trusted():
    one = jnp.ones(len(Y))
    arguments = [jnp.asarray(x, float) for x in (Y, MEAN, COVARIANCE)]
    moments, is_trusted = jax.jit(lambda y, m, c: on_plane_nodes(_factors(KIND, y), m, c, one))(*arguments)
    is_trusted = np.asarray(is_trusted)
    tolerance = {"kink": 1e-4 if IS_DOUBLE else 1e-3, "spike": 1e-4}
    for i in np.flatnonzero(is_trusted):
        log_z, mean, covariance = _by_grid(KIND[i], Y[i], MEAN[i], COVARIANCE[i])
        deviation = np.sqrt(np.diagonal(covariance))
        limit = tolerance.get(KINDS[KIND[i]], 2e-7) if IS_DOUBLE else 2e-3
        assert abs(moments.log_z[i] - log_z) < limit, (KINDS[KIND[i]], i)
        assert np.all(np.abs(moments.mean[i] - mean) < limit * deviation), (KINDS[KIND[i]], i)
        assert np.all(np.abs(moments.covariance[i] - covariance) < limit * np.outer(deviation, deviation)), i
    is_narrow = COVARIANCE[:, 1, 1] + COVARIANCE[:, 0, 0] < 0.2
    assert np.all(is_trusted[is_narrow & (KIND == 0)])
    # a peak a hundredth as wide as the cavity, away from its middle
    assert not np.any(is_trusted[(KIND == 4) & (COVARIANCE[:, 0, 0] >= 0.25) & (Y == 2.0)])


@pytest.mark.thorough
def test_moments_are_right_whoever_computes_them():
    """Rows that nodes are not trusted for send all of them to nested integrals; by adaptive quadrature of SciPy."""
    rows = [5, int(np.flatnonzero(KIND == 1)[8])]
    factors = _factors(KIND[rows], Y[rows])
    found = jax.jit(lambda f: f.tilted_moments(jnp.asarray(MEAN[rows]), jnp.asarray(COVARIANCE[rows])))(factors)
    for place, i in enumerate(rows):
        triangle = np.linalg.cholesky(COVARIANCE[i])

        def density(second, first, i=i, triangle=triangle):
            eta = MEAN[i] + triangle @ [first, second]
            return np.exp(_log_factors(eta, KIND[i], Y[i], np) - 0.5 * (first**2 + second**2)) / (2 * np.pi)

        mass = dblquad(density, -9.0, 9.0, -9.0, 9.0, epsabs=1e-9)[0]
        np.testing.assert_allclose(found.log_z[place], np.log(mass), rtol=2e-6 if IS_DOUBLE else 1e-3)


@pytest.mark.thorough
def test_derivatives_are_those_of_the_integral():
    rows = np.flatnonzero((KIND == 0) & (COVARIANCE[:, 0, 0] < 0.2))
    mean, covariance, one = jnp.asarray(MEAN[rows]), jnp.asarray(COVARIANCE[rows]), jnp.ones(len(rows))

    def log_z(mean, covariance, scale):
        factors = PairPotential(lambda e, s, y: _log_factors(s * e, 0, y), (scale, jnp.asarray(Y[rows])))
        return on_plane_nodes(factors, mean, covariance, one)[0]

    slopes = jax.jit(jax.grad(lambda *at: jnp.sum(log_z(*at).log_z), argnums=(0, 1, 2)))(mean, covariance, 1.0)
    moments = jax.jit(log_z)(mean, covariance, 1.0)
    # moments are derivatives of the log normaliser
    shift = np.linalg.solve(covariance, np.asarray(moments.mean - mean)[..., None])[..., 0]
    tolerance = 1e-6 if IS_DOUBLE else 1e-2
    np.testing.assert_allclose(slopes[0], shift, rtol=tolerance, atol=tolerance)
    inverse = np.linalg.inv(covariance)
    bend = inverse @ (np.asarray(moments.covariance - covariance) + 0.0) @ inverse
    both = 0.5 * (bend + shift[:, :, None] * shift[:, None])
    found = np.asarray(slopes[1])
    np.testing.assert_allclose(0.5 * (found + found.swapaxes(1, 2)), both, rtol=tolerance, atol=10 * tolerance)
    step = 1e-4 if IS_DOUBLE else 1e-2
    up, down = (jnp.sum(jax.jit(log_z)(mean, covariance, 1.0 + s).log_z) for s in (step, -step))
    np.testing.assert_allclose(slopes[2], (up - down) / (2 * step), rtol=1e-5 if IS_DOUBLE else 2e-2)
