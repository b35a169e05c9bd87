"""Skewed normal variables against densities whose moments are known, or summed on a grid."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import digamma, polygamma

from numpyro_ext.infer.hyper.density.design import normal_points
from numpyro_ext.infer.hyper.density.skewed_normal import SkewedNormal, skewed_normal


def test_means_and_deviations_of_skewed_densities():
    """Logarithms of gamma variables, in units in which they curve by one at their mode."""
    shape = np.array([2.0, 5.0, 20.0])
    root = np.sqrt(shape)
    found = skewed_normal(lambda z: root * (1.0 - np.exp(z / root)), 3).places(normal_points(3, 4000).points)
    mean, sd = root * (digamma(shape) - np.log(shape)), root * np.sqrt(polygamma(1, shape))
    assert np.all(np.abs(found.mean(0) - mean) < 0.03 * sd)  # of which the mode is up to 0.48 away
    np.testing.assert_allclose(found.std(0), sd, rtol=0.04)
    third = np.mean((found - found.mean(0)) ** 3, axis=0)  # of a normal density it is none
    np.testing.assert_allclose(third, root**3 * polygamma(2, shape), rtol=0.25)


_STRETCH = 0.4


def _bent(z):
    """Log density of two axes of which the first narrows the second."""
    return -0.5 * z[:, 0] ** 2 - 0.5 * z[:, 1] ** 2 * np.exp(_STRETCH * z[:, 0])


def _slopes(z):
    narrowed = np.exp(_STRETCH * z[:, 0])
    first = -z[:, 0] - 0.5 * _STRETCH * z[:, 1] ** 2 * narrowed
    return np.stack([first, -z[:, 1] * narrowed], axis=1)


def test_an_axis_that_narrows_another_one():
    axis = np.linspace(-7.0, 7.0, 281)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    weights = np.exp(_bent(grid))
    weights /= weights.sum()
    mean = weights @ grid
    sd = np.sqrt(weights @ (grid - mean) ** 2)
    crossed = weights @ ((grid[:, 0] - mean[0]) * grid[:, 1] ** 2)
    density = skewed_normal(_slopes, 2)
    points = density.places(normal_points(2, 4000).points)
    np.testing.assert_allclose(points.mean(0), mean, atol=0.02)
    np.testing.assert_allclose(points.std(0), sd, rtol=0.03)
    found = np.mean((points[:, 0] - points[:, 0].mean()) * points[:, 1] ** 2)
    assert crossed < -0.2 and abs(found - crossed) < 0.2 * abs(crossed)
    # and it has the integral of the density, by importance weights
    design = density.design(np.random.default_rng(0).standard_normal((4000, 2)))
    ratios = np.exp(_bent(design.points) + design.log_volumes)
    exact = np.exp(_bent(grid)).sum() * (axis[1] - axis[0]) ** 2
    error = ratios.std() / np.sqrt(len(ratios))
    assert error < 0.01 * exact and abs(ratios.mean() - exact) < 4.0 * error


def test_log_volumes_are_those_of_the_map():
    generator = np.random.default_rng(1)
    cross = 0.2 * generator.standard_normal((3, 3)) * (1.0 - np.eye(3))
    density = SkewedNormal(np.array([0.3, -0.2, 0.0]), cross, generator.standard_normal(3), np.array([1.2, 0.8, 1.0]))
    normal, step = generator.standard_normal((5, 3)), 1e-5
    moves = step * np.eye(3)
    columns = [(density.places(normal + move) - density.places(normal - move)) / (2.0 * step) for move in moves]
    expected = np.linalg.slogdet(np.stack(columns, axis=-1))[1] + 0.5 * np.sum(normal**2, 1) + 1.5 * np.log(2.0 * np.pi)
    design = density.design(normal)
    np.testing.assert_array_equal(design.points, density.places(normal))
    np.testing.assert_allclose(design.log_volumes, expected, atol=1e-8)


def test_a_normal_density_stays_what_it_is():
    found = skewed_normal(lambda z: -z, 70)
    normal = normal_points(70, 8).points
    np.testing.assert_allclose(found.places(normal), normal, atol=1e-9)


@pytest.mark.parametrize("broken", [np.nan, -np.inf])
def test_what_is_not_finite_tells_nothing(broken):
    """A wall on one side of an axis; and where no gradient is known the density stays normal."""

    def walled(z):
        return np.where(z[:, :1] > 1.0, broken, -z)

    points = skewed_normal(walled, 2).places(normal_points(2, 64).points)
    assert np.isfinite(points).all() and np.all(np.abs(points) < 6.0)
    nothing = skewed_normal(lambda z: np.full_like(z, broken), 2)
    np.testing.assert_allclose(nothing.places(points), points, atol=1e-6)
