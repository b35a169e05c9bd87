"""Tilted moments of factors of several predictors: against sums over grids that know nothing of where the mass is."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.potentials.families.categorical import (
    MultinomialLogitPotential,
    MultinomialProbitPotential,
    SoftmaxPotential,
)
from tests.tiers import thorough

MEAN = np.array([[0.4, -1.0, 0.3], [2.0, 0.5, -1.5], [-0.2, 0.1, 0.0]])
ROOT = np.array([[1.1, 0.0, 0.0], [-0.4, 0.9, 0.0], [0.5, 0.3, 0.7]])
# The first is as broad as one meets, the last narrow.
COVARIANCE = np.stack([4.0 * ROOT @ ROOT.T, 0.5 * ROOT.T @ ROOT, 0.01 * np.eye(3)])
LABEL = np.array([1, 2, 0])
COUNTS = np.array([[3.0, 0.0, 2.0], [0.0, 40.0, 1.0], [1.0, 0.0, 0.0]])
needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="tolerances of double precision")


def _on_grid(log_density, mean, covariance, power, half_width=9.0, num_nodes=701):
    """Normaliser and moments of all predictors by a sum over standard normal coordinates of the cavity."""
    axes = [np.linspace(-half_width, half_width, num_nodes)] * len(mean)
    z = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(mean))
    eta = mean + z @ np.linalg.cholesky(covariance).T
    values = power * np.asarray(log_density(eta)) - 0.5 * np.sum(z**2, axis=-1)
    weight = np.exp(values - values.max())
    step = axes[0][1] - axes[0][0]
    log_z = values.max() + np.log(weight.sum()) + len(mean) * (np.log(step) - 0.5 * np.log(2 * np.pi))
    weight /= weight.sum()
    center = weight @ eta
    return log_z, center, (weight * (eta - center).T) @ (eta - center)


def _check(found, expected, mean, covariance, tolerance):
    log_z, center, spread = expected
    np.testing.assert_allclose(found.log_z, log_z, atol=tolerance)
    np.testing.assert_allclose(found.mean, center, atol=tolerance * np.sqrt(covariance.max()))
    np.testing.assert_allclose(found.covariance, spread, atol=tolerance * covariance.max())
    # the site times the cavity has these moments
    precision = np.linalg.inv(covariance) + np.asarray(found.site_precision)
    np.testing.assert_allclose(np.linalg.inv(precision), spread, atol=tolerance * covariance.max())
    shift = np.linalg.solve(covariance, mean) + np.asarray(found.site_shift)
    np.testing.assert_allclose(np.linalg.solve(precision, shift), center, atol=tolerance * np.sqrt(covariance.max()))


@needs_float64
@pytest.mark.parametrize(("pinned", "power"), [(1, 0.5), *thorough((-1, 1.0))])
def test_moments_of_two_predictors(pinned, power):
    mean, covariance = MEAN[:, :2], COVARIANCE[:, :2, :2]
    found = jax.jit(lambda p: p.tilted_moments(mean, covariance, power))(SoftmaxPotential(LABEL, 3, pinned=pinned))
    for i in range(len(mean)):
        own = jax.tree.map(lambda x, i=i: x[i], found)
        factor = jax.jit(SoftmaxPotential(LABEL[i], 3, pinned=pinned).log_density)
        _check(own, _on_grid(factor, mean[i], covariance[i], power), mean[i], covariance[i], 2e-8)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "size", "scale", "tolerance"),
    [
        (SoftmaxPotential, 3, 2.0, 1e-8),
        *thorough(
            (SoftmaxPotential, 3, 0.05, 1e-8),
            (SoftmaxPotential, 3, 8.0, 1e-7),
            (SoftmaxPotential, 4, 1.0, 2e-6),
            (SoftmaxPotential, 4, 4.0, 1e-4),
            (SoftmaxPotential, 5, 1.0, 1e-5),
            (SoftmaxPotential, 5, 3.0, 5e-4),
            (SoftmaxPotential, 6, 0.7, 1e-4),
            (SoftmaxPotential, 2, 3.0, 1e-8),
            (MultinomialProbitPotential, 3, 1.0, 1e-7),
            (MultinomialProbitPotential, 2, 3.0, 1e-7),
        ),
    ],
)
@needs_float64
def test_tilted_densities_of_all_categories_make_up_the_cavity(family, size, scale, tolerance):
    number = 20 if size < 4 else 5
    rng = np.random.default_rng(5)
    roots = rng.normal(size=(number, size, size))
    covariance = scale**2 * (roots @ roots.transpose(0, 2, 1) / size + 0.1 * np.eye(size))
    mean = scale * rng.normal(size=(number, size))
    label = np.repeat(np.arange(size)[:, None], number, axis=1)
    found = jax.jit(lambda p: p.tilted_moments(mean, covariance))(family(label, size))
    share = np.exp(found.log_z)
    np.testing.assert_allclose(share.sum(0), 1.0, atol=tolerance)
    np.testing.assert_allclose((share[..., None] * found.mean).sum(0), mean, atol=10 * scale * tolerance)
    away = np.asarray(found.mean) - mean
    second = found.covariance + away[..., :, None] * away[..., None, :]
    total = (share[..., None, None] * second).sum(0)
    np.testing.assert_allclose(total, covariance, atol=100 * scale**2 * tolerance)


@needs_float64
@pytest.mark.thorough
def test_counts_that_say_more_than_the_cavity():
    # three predictors that are seen by their differences alone: what the cavity has besides is left as it is
    found = jax.jit(lambda p: p.tilted_moments(MEAN, COVARIANCE))(MultinomialLogitPotential(COUNTS))
    # coordinates that begin with the differences, and a third that is independent of them under the cavity
    for i in range(3):
        rest = np.linalg.solve(COVARIANCE[i], np.ones(3))
        to_seen = np.stack([[1.0, 0.0, -1.0], [0.0, 1.0, -1.0], rest / rest.sum()])
        mean, covariance = to_seen @ MEAN[i], to_seen @ COVARIANCE[i] @ to_seen.T
        np.testing.assert_allclose(covariance[2, :2], 0.0, atol=1e-14)

        @jax.jit
        def log_density(seen, i=i):
            return MultinomialLogitPotential(COUNTS[i]).log_density(jnp.pad(seen, ((0, 0), (0, 1))))

        log_z, center, spread = _on_grid(log_density, mean[:2], covariance[:2, :2], 1.0, num_nodes=1001)
        center, back = np.append(center, mean[2]), np.linalg.inv(to_seen)
        whole = covariance.copy()
        whole[:2, :2] = spread
        own = jax.tree.map(lambda x, i=i: x[i], found)
        _check(own, (log_z, back @ center, back @ whole @ back.T), MEAN[i], COVARIANCE[i], 2e-8)


@needs_float64
@pytest.mark.thorough
def test_the_normaliser_has_the_derivatives_of_differences():
    potential = SoftmaxPotential(LABEL, 3)
    directions = np.cos(np.arange(9.0)).reshape(3, 3), np.einsum("i,j->ij", [1.0, 0.5, -1.0], [1.0, 0.5, -1.0])

    @jax.jit
    def along(step):
        mean, covariance = MEAN + step * directions[0], COVARIANCE + step * 0.05 * directions[1]
        return potential.tilted_moments(mean, covariance, 1.0 + 0.3 * step).log_z

    _, slope = jax.jvp(along, (0.0,), (1.0,))
    np.testing.assert_allclose(slope, (along(1e-4) - along(-1e-4)) / 2e-4, rtol=1e-5)


@needs_float64
@pytest.mark.thorough
def test_a_known_predictor_and_many_factors():
    """A predictor without variance is a pinned one that is not zero; factors in chunks are those one by one."""
    number = 200
    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, number)
    means, covariance = rng.normal(size=(number, 3)), np.zeros((3, 3))
    covariance[:2, :2] = COVARIANCE[0, :2, :2]
    means[:, 2] = 0.0
    moments = jax.jit(lambda p, m, c: p.tilted_moments(m, c))
    whole = moments(SoftmaxPotential(label, 3), means, covariance)
    pinned = moments(SoftmaxPotential(label, 3, pinned=2), means[:, :2], covariance[:2, :2])
    np.testing.assert_allclose(whole.log_z, pinned.log_z, atol=1e-9)
    np.testing.assert_allclose(whole.mean[:, :2], pinned.mean, atol=1e-7)
    np.testing.assert_allclose(whole.site_precision[:, :2, :2], pinned.site_precision, atol=1e-7)
    some = slice(0, 9)
    alone = moments(SoftmaxPotential(label[some], 3), means[some], covariance)
    np.testing.assert_allclose(alone.log_z, whole.log_z[some], atol=1e-8)


@pytest.mark.float32
@pytest.mark.thorough
def test_single_precision():
    found = SoftmaxPotential(LABEL, 3).tilted_moments(jnp.asarray(MEAN, float), jnp.asarray(COVARIANCE, float))
    for i, (j, k) in itertools.product(range(3), [(0, 1), (1, 2)]):
        assert found.covariance[i, j, k] == found.covariance[i, k, j]
    # by 64 nodes laid for the cavity
    expected = SoftmaxPotential(LABEL, 3).log_normaliser(jnp.asarray(MEAN, float), jnp.asarray(COVARIANCE, float))
    np.testing.assert_allclose(found.log_z, expected, atol=2e-5)
    assert np.all(np.isfinite(found.site_precision))


@pytest.mark.parametrize(("family", "size"), [(SoftmaxPotential, 7), (MultinomialProbitPotential, 5)])
def test_more_categories_have_none(family, size):
    potential = family(np.array([0]), size)
    assert not potential.has_tilted_moments
    with pytest.raises(NotImplementedError, match=f"{size} predictors: no tilted moments"):
        potential.tilted_moments(np.zeros((1, size)), np.eye(size)[None])


@needs_float64
@pytest.mark.thorough
def test_a_cavity_that_is_too_broad_for_the_nodes_is_not_answered():
    found = SoftmaxPotential(LABEL[:1], 3).tilted_moments(np.zeros((1, 3)), 1e6 * np.eye(3)[None])
    assert np.isnan(found.log_z[0])
