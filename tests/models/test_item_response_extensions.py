"""Models beyond the usual item-response ones against their densities, written out."""

import jax
import numpy as np
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density
from scipy import stats

from numpyro_ext.models import items_between_groups, speed_and_accuracy, students_in_schools

RNG = np.random.default_rng(0)
N, P = 6, 3
A, D = np.array([0.8, 1.3, 0.6]), np.array([0.2, -0.5, 1.0])


def items(a, d):
    return stats.lognorm(0.5).logpdf(a).sum() + stats.norm(0, 3).logpdf(d).sum()


def binary(y, p):
    return np.nansum(np.where(np.isnan(y), np.nan, np.log(np.where(y == 1, p, 1 - p))))


def compare(model, args, options, values, expected):
    found = jax.jit(lambda values: log_density(model, args, options, values)[0])(values)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_times_and_answers_share_correlated_traits():
    cut = np.array([[-0.5, 0.8], [0.0, 1.0], [-1.0, 0.2]])
    b, s, scale = np.array([1.0, 0.5, 2.0]), np.array([0.4, 0.7, 0.3]), 0.6
    factor = np.array([[1.0, 0.0], [0.5, np.sqrt(0.75)]])
    x, y = RNG.normal(size=(N, 2)), RNG.integers(0, 3, (N, P)).astype(float)
    t = np.exp(RNG.normal(size=(N, P)))
    y[0, 1] = t[2, 0] = np.nan
    expected = stats.lognorm(0.5).logpdf(A).sum() + stats.norm(0, 3).logpdf(b).sum() + stats.halfnorm.logpdf(s).sum()
    expected += stats.halfnorm.logpdf(scale) + np.log(0.5)  # LKJ(1) of two traits: uniform over the correlation
    # Cutpoints are a normal number and the logarithm of a gap.
    expected += np.sum(stats.norm(-1, 1).logpdf(cut[:, 0])) + np.sum(
        stats.norm(1, 1).logpdf(np.log(np.diff(cut))) - np.log(np.diff(cut))
    )
    scales = np.array([1.0, scale])
    expected += (
        stats.multivariate_normal([0, 0], (scales[:, None] * factor) @ (scales[:, None] * factor).T).logpdf(x).sum()
    )
    above = stats.logistic.cdf(A[:, None] * x[:, :1, None] - cut)
    p = -np.diff(np.concatenate([np.ones((N, P, 1)), above, np.zeros((N, P, 1))], -1))
    own = np.take_along_axis(p, np.nan_to_num(y).astype(int)[..., None], -1)[..., 0]
    expected += np.log(own)[np.isfinite(y)].sum()
    expected += np.nansum(stats.norm.logpdf(np.log(t), b - x[:, 1:], s) - np.log(t))
    values = {"discrimination": A, "cutpoints": cut, "time_intensity": b, "time_noise": s, "speed_scale": scale,
              "trait_cholesky": factor, "trait": x}  # fmt: skip
    compare(speed_and_accuracy, (y, t), {"num_categories": 3}, values, expected)


def test_items_differ_between_groups_from_those_of_the_first():
    group, delta, mean, scale = np.array([0, 1, 2, 0, 1, 2]), RNG.normal(size=(2, P)), np.array([0.3, -0.6]), 0.4
    x, y = RNG.normal(size=N), RNG.integers(0, 2, (N, P)).astype(float)
    y[1, 1] = np.nan
    expected = items(A, D) + stats.halfnorm(scale=0.5).logpdf(scale) + stats.norm(0, scale).logpdf(delta).sum()
    expected += stats.norm.logpdf(mean).sum() + stats.norm.logpdf(x, np.array([0, *mean])[group]).sum()
    shift = np.concatenate([np.zeros((1, P)), delta])[group]
    expected += binary(y, stats.logistic.cdf(A * x[:, None] + D + shift))
    values = {"discrimination": A, "intercept": D, "difference_scale": scale, "difference": delta, "group_mean": mean,
              "trait": x}  # fmt: skip
    compare(items_between_groups, (y, group), {"num_groups": 3}, values, expected)
    with pytest.raises(ValueError, match="group must lie in 0, ..., 1"), handlers.seed(rng_seed=0):
        items_between_groups(y, group, num_groups=2)


def test_students_have_the_mean_of_their_school():
    school, u, scale = np.array([0, 1, 1, 0, 1, 0]), np.array([0.5, -0.2]), 0.7
    x, y = RNG.normal(size=N), RNG.integers(0, 2, (N, P)).astype(float)
    expected = items(A, D) + stats.halfnorm.logpdf(scale) + stats.norm(0, scale).logpdf(u).sum()
    expected += stats.norm.logpdf(x, u[school]).sum() + binary(y, stats.logistic.cdf(A * x[:, None] + D))
    values = {"discrimination": A, "intercept": D, "school_scale": scale, "school_effect": u, "trait": x}
    compare(students_in_schools, (y, school), {"num_schools": 2}, values, expected)
    with pytest.raises(ValueError, match="needs answers of people to items"), handlers.seed(rng_seed=0):
        students_in_schools(num_schools=2)
