"""Matrices of real numbers and of ratings: fits against closed forms and other algorithms, and bad numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer.util import log_density

from benchmarks.baselines.rating_types import RatingTypes, entropy
from numpyro_ext.infer import BilinearEP, BilinearVG, analytic_matrix_factorization
from numpyro_ext.models import gaussian_factorization, heteroscedastic_ratings, rating_types
from numpyro_ext.structure import ModelStructureError

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
KEY = jax.random.key(0)

USER, ITEM = np.divmod(np.arange(12), 4)


@pytest.mark.parametrize(
    "rating, words",
    [
        (1 + np.arange(12) % 5, "2 of 12 are not, the first is 5 at index 4.*1 becomes 0, and 5 becomes 4"),
        (
            0.5 + 0.5 * (np.arange(12) % 4),
            "the first is 0.5 at index 0.*the 4 values .* 0.5 becomes 0, and 2 becomes 3",
        ),
    ],
)
def test_stars_are_told_how_they_become_levels(rating, words):
    with pytest.raises(ValueError, match=words):
        heteroscedastic_ratings(USER, ITEM, rating, num_users=3, num_items=4, rank=1, num_levels=5)


def test_types_of_people_are_found_and_asked_about():
    """Two groups that rate the first of two kinds of items the other way round."""
    rng = np.random.default_rng(0)
    person, item = np.divmod(np.arange(40 * 12), 12)
    group = np.arange(40) % 2
    level = np.where(item < 6, 2 * group[person], rng.integers(0, 3, person.size))
    types = RatingTypes.fitted(person, item, level, num_items=12, num_levels=3, num_types=2, seed=1)
    share = types.shares(person, item, level, 40)
    found = share.argmax(1)
    assert np.all(found == group) or np.all(found == 1 - group)
    np.testing.assert_allclose(np.exp(types.log_prior), 0.5, atol=0.02)

    # one answer of somebody new, by Bayes' rule
    one = types.shares(np.zeros(1, int), np.zeros(1, int), np.zeros(1, int), 1)[0]
    by_hand = np.exp(types.log_prior) * types.chance[0, 0]
    np.testing.assert_allclose(one, by_hand / by_hand.sum(), rtol=1e-12)

    # of somebody unknown, items of the first kind tell most
    nobody = np.tile(np.exp(types.log_prior), (12, 1))
    told = types.information(nobody, np.arange(12))
    assert told[:6].min() > 10.0 * told[6:].max() and told.min() >= 0.0
    joint = nobody[0] * types.chance[0]
    np.testing.assert_allclose(
        told[0], entropy(joint.sum(1)) + entropy(joint.sum(0)) - entropy(joint.ravel()), rtol=1e-9
    )


@needs_float64
@pytest.mark.thorough
def test_values_of_a_complete_matrix_end_at_the_analytic_posterior():
    rng = np.random.default_rng(2)
    y = rng.normal(size=(9, 2)) @ rng.normal(size=(2, 7)) + 0.5 * rng.normal(size=(9, 7))
    given = {"z": 0.0, "row_scale": 0.9, "noise": 0.5}
    engine = BilinearVG(gaussian_factorization, covariance="full", tol=1e-11, hyper_values=given, progress_bar=False)
    engine.run(KEY, *np.divmod(np.arange(63), 7), y.ravel(), num_rows=9, num_cols=7, rank=3)
    best = analytic_matrix_factorization(y, 0.5, (0.9, 1.0), rank=3)
    found = engine.posterior["u"].mean @ engine.posterior["v"].mean.T
    np.testing.assert_allclose(found, best.mean, atol=2e-4)


@needs_float64
@pytest.mark.thorough
def test_noise_of_rows_and_columns_weighs_the_cells():
    """At given noise points are weighted ridge regressions of one side on the other, in turn."""
    rng = np.random.default_rng(4)
    rows, cols = np.divmod(rng.permutation(8 * 6)[:40], 6)
    y = rng.normal(size=40)
    noise = np.exp(rng.normal(size=8)), np.exp(rng.normal(size=6))
    given = {"z": 0.3, "row_scale": 1.2, "row_noise": noise[0], "column_noise": noise[1]}
    engine = BilinearVG(
        gaussian_factorization, covariance="point", tol=1e-12, num_restarts=0, hyper_values=given, progress_bar=False
    )
    engine.run(KEY, rows, cols, y, num_rows=8, num_cols=6, rank=2, heteroscedastic=True)
    weight, residual = np.zeros((8, 6)), np.zeros((8, 6))
    weight[rows, cols], residual[rows, cols] = 1.0 / (noise[0][rows] * noise[1][cols]), y - 0.3

    def ridge(other, weight, residual, precision):
        hessian = np.einsum("rc,ck,cl->rkl", weight, other, other) + precision * np.eye(2)
        return np.linalg.solve(hessian, ((weight * residual) @ other)[..., None])[..., 0]

    v = np.asarray(engine.posterior["v"].mean)
    for _ in range(300):
        u = ridge(v, weight, residual, 1.2**-2)
        v = ridge(u, weight.T, residual.T, 1.0)
    np.testing.assert_allclose(engine.posterior["u"].mean @ engine.posterior["v"].mean.T, u @ v.T, atol=1e-4)
    assert np.max(np.abs(u @ v.T)) > 0.3


@needs_float64
@pytest.mark.slow
def test_noise_of_rows_and_columns_is_learned():
    """Each variance is the mode of its conjugate posterior given all others; one noise for all fits worse."""
    rng = np.random.default_rng(1)
    rows, cols = np.divmod(np.arange(30 * 20), 20)
    scale = np.exp(0.7 * rng.normal(size=30))
    y = (0.7 * rng.normal(size=(30, 1))[rows] * rng.normal(size=(20, 1))[cols]).sum(1)
    y += scale[rows] * rng.normal(size=600)
    sizes = {"num_rows": 30, "num_cols": 20, "rank": 1}
    engine = BilinearVG(gaussian_factorization, tol=1e-10, covariance="diagonal", progress_bar=False)
    engine.run(KEY, rows, cols, y, heteroscedastic=True, **sizes)
    assert engine.diagnostics.converged
    mean, variance = ({n: getattr(engine.posterior[n], what) for n in "uvz"} for what in ("mean", "variance"))
    (u, s), (v, t) = ((mean[n][index, 0], variance[n][index, 0]) for n, index in (("u", rows), ("v", cols)))
    square = (y - u * v - mean["z"]) ** 2 + u**2 * t + s * v**2 + s * t + variance["z"]
    noise = np.asarray(engine.posterior["row_noise"].mean), np.asarray(engine.posterior["column_noise"].mean)
    for own, index, other in ((0, rows, noise[1][cols]), (1, cols, noise[0][rows])):
        rate, shape = 5.0 + 0.5 * np.bincount(index, square / other), 5.0 + 0.5 * np.bincount(index)
        np.testing.assert_allclose(noise[own], rate / (shape + 1.0), rtol=1e-6)
    assert np.corrcoef(np.log(noise[0]), np.log(scale))[0, 1] > 0.8
    plain = BilinearVG(gaussian_factorization, progress_bar=False)
    plain.run(KEY, rows, cols, y, **sizes)
    assert engine.log_evidence > plain.log_evidence + 30.0
    with pytest.raises(ModelStructureError, match="'row_noise'.*150 elements .*too many"):
        engine.run(KEY, rows, cols, y, heteroscedastic=True, **sizes | {"num_rows": 150})


@pytest.mark.thorough
@needs_float64
def test_types_of_users_are_at_a_mode_where_another_algorithm_ends():
    """Expectation maximisation ends where the density of the model has no slope within the simplexes."""
    rng = np.random.default_rng(0)
    person, item = np.divmod(rng.permutation(12 * 6)[:60], 6)
    level = np.where(item < 3, 2 * (person % 2), rng.integers(0, 3, 60))
    sizes = {"num_users": 12, "num_items": 6, "num_levels": 3, "num_types": 2}
    found = RatingTypes.fitted(person, item, level, num_items=6, num_levels=3, num_types=2, seed=1, num_steps=3000)

    def value(types, chances):
        values = {"types": types, "chances": chances}
        return log_density(rating_types, (person, item, level), sizes | {"concentration": 2.0}, values)

    point = jnp.asarray(np.exp(found.log_prior)), jnp.moveaxis(jnp.asarray(found.chance), -1, 0)
    slopes = jax.grad(lambda *x: value(*x)[0], argnums=(0, 1))(*point)
    for place, slope in zip(point, slopes, strict=True):
        within = place * (slope - jnp.sum(place * slope, -1, keepdims=True))
        np.testing.assert_allclose(within, 0.0, atol=1e-7)
    trace = value(*point)[1]
    types = found.shares(person, item, level, 12)
    np.testing.assert_allclose(trace["type_of_user"]["value"], types, rtol=1e-6, atol=1e-12)


def test_types_of_users_are_no_field():
    for engine in (BilinearEP, BilinearVG):
        with pytest.raises(ModelStructureError, match="'types': 'Dirichlet'.*use NUTS"):
            engine(rating_types).run(KEY, USER, ITEM, USER, num_users=3, num_items=4, num_levels=3, num_types=2)
