"""Predictions of fits from those at other points of the hyperparameters, against functions that are known."""

import numpy as np
import pytest

from numpyro_ext.infer.hyper.density.known_points import KnownPoints, length_of, predicted, shares

AXIS = 1.25 * np.arange(-2, 3)
LATTICE = np.stack(np.meshgrid(AXIS, AXIS, indexing="ij"), axis=-1).reshape(-1, 2)


@pytest.mark.parametrize("size", [1, 3, 6])
def test_quadratic_functions_are_known_from_as_many_points_as_they_have_coefficients(size):
    draws = np.random.default_rng(size)
    number = (size + 1) * (size + 2) // 2
    known, points = draws.normal(size=(number + 2, size)), draws.normal(size=(5, size))
    matrix, slope = draws.normal(size=(size, size)), draws.normal(size=size)

    def quadratic(at):
        return 3.0 + at @ slope + np.einsum("ni,ij,nj->n", at, matrix, at)

    np.testing.assert_allclose(shares(known, points) @ quadratic(known), quadratic(points), atol=2e-3)


def test_a_smooth_function_is_nearer_than_that_of_the_nearest_point():
    def scale(at):  # of sites, as functions of log variances
        return np.exp(0.4 * at[:, 0]) / (1.0 + 0.3 * np.exp(0.5 * at[:, 1]))

    points = np.random.default_rng(0).uniform(-2.5, 2.5, (40, 2))
    error = shares(LATTICE, points) @ scale(LATTICE) - scale(points)
    nearest = np.argmin(np.sum((points[:, None] - LATTICE) ** 2, axis=-1), axis=1)
    assert np.max(np.abs(error)) < 0.01 * np.max(np.abs(scale(LATTICE)[nearest] - scale(points)))
    # One step beyond the lattice, where the nearest point is off by 40 %.
    beyond = np.array([[3.75, 0.0], [0.0, -3.75]])
    np.testing.assert_allclose(shares(LATTICE, beyond) @ scale(LATTICE), scale(beyond), rtol=0.05)


def test_the_length_is_that_of_what_is_followed():
    slow, fast = LATTICE @ np.array([0.3, -0.2]), LATTICE @ np.array([1.5, 1.0])
    weights = np.exp(-0.5 * np.sum(LATTICE**2, axis=1))
    assert length_of(LATTICE, np.exp(slow), weights) > length_of(LATTICE, np.sin(fast), weights)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_states_keep_their_kinds(dtype):
    square = (LATTICE[:, :1] - 2.0) ** 2 * np.array([1.0, 0.0])
    states = {
        "precision": square.astype(dtype),
        "shift": (LATTICE @ np.array([[2e3], [-1e3]]) + 1e6).astype(dtype),
        "change": np.full(25, np.inf, dtype),
        "is_start": LATTICE[:, 0] > 0.0,
        "number": np.arange(25, dtype=np.int32),
    }
    points = np.array([[1.8, 0.1], [-2.4, 2.4], [3.0, 3.1]])
    batches = [{name: leaf[part] for name, leaf in states.items()} for part in (slice(3), slice(3, 20), slice(20, 25))]
    found = predicted(batches, LATTICE, points)
    assert {name: leaf.dtype for name, leaf in found.items()} == {name: leaf.dtype for name, leaf in states.items()}
    np.testing.assert_allclose(found["precision"][:, 0], (points[:, 0] - 2.0) ** 2, atol=1e-2)
    assert np.all(found["precision"] >= 0.0) and np.all(found["precision"][:, 1] == 0.0)
    np.testing.assert_allclose(found["shift"][:, 0], points @ [2e3, -1e3] + 1e6, rtol=1e-5)
    assert np.all(np.isinf(found["change"]))
    np.testing.assert_array_equal(found["number"], [17, 4, 24])
    np.testing.assert_array_equal(found["is_start"], [True, False, True])


def test_what_did_not_converge_predicts_nothing():
    known = KnownPoints()
    assert known.states_at(LATTICE) is None
    values = LATTICE[:, 0].copy()
    is_good = np.arange(25) % 7 != 0
    values[~is_good] = 1e9
    known.append(LATTICE, values, is_good)
    known.append(LATTICE, values, np.zeros(25, bool))
    assert known.number == is_good.sum()
    np.testing.assert_allclose(known.states_at(LATTICE + 0.1), LATTICE[:, 0] + 0.1, atol=1e-5)


def test_of_many_points_the_nearest_have_a_say():
    known = KnownPoints()
    line = np.linspace(0.0, 30.0, 601)[:, None]
    value = np.where(line < 15.0, np.sin(line), np.nan)
    for part in (slice(100), slice(100, 500), slice(500, 601)):
        known.append(line[part], {"value": value[part]}, np.ones(len(line[part]), bool))
    points = np.array([[1.23], [3.21]])
    np.testing.assert_allclose(known.states_at(points)["value"], np.sin(points), atol=1e-3)
