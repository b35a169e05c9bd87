"""Even nodes in the plane: against a dense grid, and where they must not be trusted."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import dblquad
from scipy.special import logsumexp

from numpyro_ext.potentials import PairPotential
from numpyro_ext.potentials.integrals.several_predictors.line_rules import gauss_hermite, trapezoidal
from numpyro_ext.potentials.integrals.several_predictors.plane_nodes import on_plane_nodes

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


NUM_RANDOM = 40


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


def _by_grid(log_factors, mean, covariance):
    """Log integral, mean and covariance by a grid that shrinks onto the mass."""
    triangle, low, high = np.linalg.cholesky(covariance), np.full(2, -9.0), np.full(2, 9.0)
    for _ in range(3):
        axes = [np.linspace(a, b, 301) for a, b in zip(low, high, strict=True)]
        z = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
        value = log_factors(mean + z @ triangle.T) - 0.5 * np.sum(z**2, axis=1)
        total, step = logsumexp(value), (high - low) / 300
        has_mass = z[value > value.max() - 40.0]
        low, high = has_mass.min(0) - 2 * step, has_mass.max(0) + 2 * step
    weight = np.exp(value - total)
    center = weight @ z
    spread = (z - center).T @ ((z - center) * weight[:, None])
    log_z = total + np.log(step.prod() / (2 * np.pi))
    return log_z, mean + triangle @ center, triangle @ spread @ triangle.T


@cache
def _expected(i):
    """Moments of a case by the grid."""
    return _by_grid(lambda e: _log_factors(e, KIND[i], Y[i], np), MEAN[i], COVARIANCE[i])


def _factors(kind, y, has_own_args=False):
    return PairPotential(_log_factors, (jnp.asarray(kind), jnp.asarray(y)), has_own_args=has_own_args)


def _on_nodes(y, mean, covariance):
    """By nodes around some rows that are chosen, where the first ones do not serve."""
    factors = _factors(KIND, y, has_own_args=True)
    return on_plane_nodes(factors, mean, covariance, jnp.ones(len(y)), partial(factors.chosen, num_factors=len(y)))


@pytest.mark.thorough
@pytest.mark.float32
def test_what_is_trusted_is_right_and_what_hides_is_not_trusted():
    arguments = [jnp.asarray(x, float) for x in (Y, MEAN, COVARIANCE)]
    moments, is_trusted = jax.jit(_on_nodes)(*arguments)
    is_trusted = np.asarray(is_trusted)
    tolerance = {"kink": 1e-4 if IS_DOUBLE else 1e-3, "spike": 1e-4}
    for i in np.flatnonzero(is_trusted):
        log_z, mean, covariance = _expected(i)
        deviation = np.sqrt(np.diagonal(covariance))
        limit = tolerance.get(KINDS[KIND[i]], 2e-7) if IS_DOUBLE else 2e-3
        assert abs(moments.log_z[i] - log_z) < limit, (KINDS[KIND[i]], i)
        assert np.all(np.abs(moments.mean[i] - mean) < limit * deviation), (KINDS[KIND[i]], i)
        assert np.all(np.abs(moments.covariance[i] - covariance) < limit * np.outer(deviation, deviation)), i
    is_narrow = COVARIANCE[:, 1, 1] + COVARIANCE[:, 0, 0] < 0.2
    assert np.all(is_trusted[is_narrow & (KIND == 0)])
    # a peak a hundredth as wide as the cavity, away from its middle
    assert not np.any(is_trusted[(KIND == 4) & (COVARIANCE[:, 0, 0] >= 0.25) & (Y == 2.0)])


def _weibull(e, log_time, xp=jnp):
    """By the logarithms of shape and scale."""
    power = xp.exp(e[..., 0]) * (log_time - e[..., 1])
    return e[..., 0] + power - log_time - xp.exp(power)


@pytest.mark.thorough
def test_skewed_factors_of_shape_and_scale_are_served_by_nodes():
    draws = np.random.default_rng(7)
    mean = np.array([0.5, 1.0]) + 0.3 * draws.normal(size=(NUM_RANDOM, 2))
    y = mean[:, 1] + np.log(draws.exponential(size=NUM_RANDOM)) / np.exp(mean[:, 0])
    deviation = draws.uniform(0.07, 0.3, size=(NUM_RANDOM, 2))
    cross = draws.uniform(-0.6, 0.6, NUM_RANDOM) * deviation.prod(1)
    covariance = np.stack([deviation[:, 0] ** 2, cross, cross, deviation[:, 1] ** 2], -1).reshape(-1, 2, 2)
    one = jnp.ones(NUM_RANDOM)
    compute = jax.jit(lambda y, m, c: on_plane_nodes(PairPotential(_weibull, (y,)), m, c, one))
    moments, is_trusted = compute(*map(jnp.asarray, (y, mean, covariance)))
    assert np.all(is_trusted)
    for i in range(NUM_RANDOM):
        log_z, center, spread = _by_grid(lambda e, i=i: _weibull(e, y[i], np), mean[i], covariance[i])
        deviation = np.sqrt(np.diagonal(spread))
        assert abs(moments.log_z[i] - log_z) < 2e-8, i
        assert np.all(np.abs(moments.mean[i] - center) < 1e-7 * deviation), i
        assert np.all(np.abs(moments.covariance[i] - spread) < 2e-7 * np.outer(deviation, deviation)), i


@pytest.mark.thorough
def test_a_narrow_row_takes_no_trust_from_others():
    """A narrow one is searched for other modes; the tilted densities of the others are as wide as before."""
    log_time, mean = np.full(3, -0.04), np.tile([0.72, 1.08], (3, 1))
    covariance = np.tile(np.diag([0.27, 0.21]) ** 2, (3, 1, 1))
    compute = jax.jit(lambda y, m, c: on_plane_nodes(PairPotential(_weibull, (y,)), m, c, jnp.ones(3))[1])
    assert np.all(compute(log_time, mean, covariance))
    log_time[2], mean[2], covariance[2] = 0.54, (2.47, 0.22), np.diag([0.36, 0.9]) ** 2
    assert np.all(compute(log_time, mean, covariance)[:2])


@pytest.mark.thorough
@pytest.mark.parametrize("has_own_args", [False, True])
def test_moments_are_right_whoever_computes_them(has_own_args):
    """Rows that nodes are not trusted for take nested integrals, alone or with all others; by adaptive quadrature of
    SciPy."""
    rows = [5, int(np.flatnonzero(KIND == 1)[8])]
    factors = _factors(KIND[rows], Y[rows], has_own_args)
    found = jax.jit(lambda f: f.tilted_moments(jnp.asarray(MEAN[rows]), jnp.asarray(COVARIANCE[rows])))(factors)
    for place, i in enumerate(rows):
        triangle = np.linalg.cholesky(COVARIANCE[i])

        def density(second, first, i=i, triangle=triangle):
            eta = MEAN[i] + triangle @ [first, second]
            return np.exp(_log_factors(eta, KIND[i], Y[i], np) - 0.5 * (first**2 + second**2)) / (2 * np.pi)

        mass = dblquad(density, -9.0, 9.0, -9.0, 9.0, epsabs=1e-9)[0]
        np.testing.assert_allclose(found.log_z[place], np.log(mass), rtol=2e-6 if IS_DOUBLE else 1e-3)


@pytest.mark.thorough
def test_rows_that_are_chosen_have_the_moments_and_derivatives_of_all():
    def log_z(mean, covariance, y, has_own_args):
        moments = _factors(KIND, y, has_own_args).tilted_moments(mean, covariance)
        return jnp.sum(jnp.where(KIND < 3, moments.log_z, 0.0)), moments

    compute = jax.jit(jax.grad(log_z, argnums=(0, 1, 2), has_aux=True), static_argnums=3)
    all_rows, chosen = (compute(*(jnp.asarray(x, float) for x in (MEAN, COVARIANCE, Y)), own) for own in (False, True))
    tolerance = 1e-9 if IS_DOUBLE else 1e-3
    for expected, found in zip(jax.tree.leaves(all_rows), jax.tree.leaves(chosen), strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


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


@pytest.mark.thorough
def test_where_modes_are_looked_for_and_columns_of_their_own_change_no_moments():
    rows = np.flatnonzero((KIND < 3) & (COVARIANCE[:, 1, 1] < 0.2))
    kind, y = jnp.asarray(KIND[rows]), jnp.asarray(Y[rows])
    mean, covariance, one = jnp.asarray(MEAN[rows]), jnp.asarray(COVARIANCE[rows]), jnp.ones(len(rows))

    def columns(a, b, kind, y):
        return _log_factors(jnp.stack([a, b], -1), kind, y)

    def moments(near, inner, **options):
        factors = PairPotential(_log_factors, (kind, y), inner=inner, **options)
        return on_plane_nodes(factors, mean, covariance, one, near=near)

    far = mean + 0.8 * jnp.sqrt(jnp.diagonal(covariance, axis1=1, axis2=2)) * jnp.array([1.0, -1.0])
    compute = jax.jit(moments, static_argnames=("inner", "columns"))
    expected, is_trusted = compute(mean, 0)
    assert np.mean(is_trusted) > 0.7
    for near, inner, options in ((far, 0, {}), (mean + 1e9, 0, {}), (far, 1, {"columns": columns})):
        found, also = compute(near, inner, **options)
        both = is_trusted & also
        assert np.sum(both) > 0.9 * np.sum(is_trusted)
        for one_way, other in zip(expected[:3], found[:3], strict=True):
            np.testing.assert_allclose(one_way[both], other[both], rtol=1e-6, atol=3e-7)


@pytest.mark.thorough
@pytest.mark.float32
def test_moments_in_brief_are_right_from_any_guess_or_no_numbers():
    def log_z(y, near, spread):
        factors = _factors(KIND, y, has_own_args=True).in_brief()
        found = factors.tilted_moments_near(jnp.asarray(MEAN), jnp.asarray(COVARIANCE), 1.0, near, spread)
        return jnp.sum(found.log_z), found

    compute = jax.jit(jax.grad(log_z, has_aux=True))
    deviation = np.sqrt(np.diagonal(COVARIANCE, axis1=1, axis2=2))
    guesses = (MEAN, COVARIANCE), (MEAN + deviation * [0.4, -0.4], 0.6 * COVARIANCE), (MEAN + 30.0, 1e-3 * COVARIANCE)
    served = []
    for near, spread in guesses:
        slope, found = compute(*(jnp.asarray(x, float) for x in (Y, near, spread)))
        is_known = np.isfinite(found.log_z)
        # no derivative is told of what is not known; some factors do not depend on their data
        assert np.all(np.isfinite(slope[is_known]))
        assert np.all(np.isnan(slope[~is_known]) | (slope[~is_known] == 0.0))
        assert not np.all(is_known)
        for i in np.flatnonzero(is_known):
            log_z, mean, covariance = _expected(i)
            scale = np.sqrt(np.diagonal(covariance))
            limit = {"kink": 1e-4 if IS_DOUBLE else 1e-3, "spike": 1e-4}.get(KINDS[KIND[i]], 2e-7)
            limit = limit if IS_DOUBLE else max(limit, 2e-3)
            assert abs(found.log_z[i] - log_z) < limit, (KINDS[KIND[i]], i)
            assert np.all(np.abs(found.mean[i] - mean) < limit * scale), (KINDS[KIND[i]], i)
            assert np.all(np.abs(found.covariance[i] - covariance) < limit * np.outer(scale, scale)), i
        served.append(is_known)
    assert np.mean(served[0][KIND < 2]) > 0.7
    assert np.mean(served[1][KIND < 2]) > 0.7
    assert not np.any(served[0][(KIND == 4) & (COVARIANCE[:, 0, 0] >= 0.25) & (Y == 2.0)])


def test_sums_of_rules_on_lines_say_what_they_miss():
    for rule in (gauss_hermite(13), trapezoidal(0.33, 7.26, 0.3)):
        normal = np.exp(-0.5 * (rule.position - 0.3) ** 2 / 1.1) / np.sqrt(2.0 * np.pi * 1.1)
        mass, first, second, *rest = normal @ rule.weight
        np.testing.assert_allclose([mass, first, 1 + np.sqrt(2) * second - first**2], [1.0, 0.3, 1.1], rtol=1e-7)
        assert np.max(np.abs(rest)) < 1e-4
        # half a density, which no nodes of a rule serve
        assert np.max(np.abs((normal * (rule.position > 0.1)) @ rule.weight[:, 3:])) > 1e-2
        position, weight = rule.in_blocks(4)
        assert position.shape[1] == weight.shape[1] == 4
        np.testing.assert_allclose(np.sum(weight, axis=(0, 1)), np.sum(rule.weight, axis=0), atol=1e-9)
