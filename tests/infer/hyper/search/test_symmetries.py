"""Directions in which the model is the same are named, and what else is flat is not taken for one of them."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform, biject_to

from numpyro_ext.infer import EP
from numpyro_ext.infer.front.running.symmetries import known_symmetries, why_no_errors
from numpyro_ext.infer.hyper.curvature import Curvature, curvature
from numpyro_ext.infer.hyper.space import UnconstrainedSpace
from numpyro_ext.models import collaborative_preferences


class Site(NamedTuple):
    shape: tuple[int, ...]
    transform: Transform
    init: np.ndarray
    is_param: bool = True


def _site(*shape, support=constraints.real):
    return Site(shape, biject_to(support), np.ones(shape) / (3.0 if support is constraints.simplex else 1.0))


SPACE = UnconstrainedSpace({"b": _site(4), "V": _site(4, 3), "sigma": _site(2, support=constraints.positive)})
VALUES = np.random.default_rng(0).standard_normal(SPACE.size)


def _turn(i, j):
    """The move of a small rotation of two columns, by differences."""
    step = 1e-6
    rotation = np.eye(3)
    rotation[[i, i, j, j], [i, j, i, j]] = np.cos(step), -np.sin(step), np.sin(step), np.cos(step)
    out = np.zeros(SPACE.size)
    out[SPACE.slices["V"]] = ((VALUES[SPACE.slices["V"]].reshape(4, 3) @ rotation).reshape(-1) - VALUES[4:16]) / step
    return out


SHIFT = np.r_[np.ones(4), np.zeros(14)]
OTHER = np.r_[np.zeros(16), 1.0, -1.0]


@pytest.mark.parametrize(
    ("directions", "names", "num_left"),
    [
        ([_turn(0, 1), _turn(0, 2), _turn(1, 2)], ["rotations of the columns of 'V'"], 0),
        ([_turn(0, 1), _turn(0, 2)], [], 2),
        ([SHIFT, OTHER], ["a constant added to 'b'"], 1),
        ([_turn(0, 1) + SHIFT, SHIFT, _turn(1, 2) - OTHER, OTHER, _turn(0, 2)],
         ["a constant added to 'b'", "rotations of the columns of 'V'"], 1),
        ([OTHER], [], 1),
    ],
)  # fmt: skip
def test_moves_that_change_nothing_are_named(directions, names, num_left):
    found, left = known_symmetries(SPACE, VALUES, np.array(directions))
    assert found == names and len(left) == num_left
    np.testing.assert_allclose(left @ left.T, np.eye(num_left), atol=1e-12)


def test_messages_by_what_is_flat():
    none = np.zeros((0, SPACE.size))
    turns = np.array([_turn(0, 1), _turn(0, 2), _turn(1, 2)])
    units = np.linspace(0.5, 2.0, SPACE.size)

    def message(rising, flat):
        no = np.zeros(SPACE.size, bool)
        found = Curvature(np.zeros((SPACE.size,) * 2), rising, flat / units, no, no)
        return why_no_errors(SPACE, VALUES, units, found)

    assert message(none, turns).startswith("The log evidence knows nothing of rotations of the columns of 'V', under")
    assert "('sigma'), nor along a constant added to 'b'" in message(none, np.array([SHIFT, OTHER]))
    assert "('V')" in message(turns[:1] / np.linalg.norm(turns[0]), none)


@pytest.mark.parametrize(
    "flat", [[[0, 1, 0, 0]], [[0, 3, 0, 4], [0, 4, 0, -3]], [[1, 1, 0, 0]], [[0, 1, 0, 0.1]], [[1, 1, 1, 0.01]]]
)
def test_axes_in_which_flat_directions_have_no_part_have_errors(flat):
    """The second derivatives are those of what curves, and zero along what is flat."""
    draws = np.random.default_rng(2).normal(size=(4, 9))
    rest = np.eye(4) - np.linalg.pinv(np.array(flat, float)) @ np.array(flat, float)
    matrix = -rest @ draws @ draws.T @ rest
    found = curvature(matrix, tol=float(np.finfo(float).eps))
    assert not found.is_peak and len(found.flat) == len(flat)
    has_error = ~np.any(np.array(flat) != 0, axis=0)
    np.testing.assert_array_equal(found.has_error, has_error)
    expected = np.linalg.pinv(-matrix, rtol=1e-9, hermitian=True)
    np.testing.assert_allclose(np.diag(found.covariance)[has_error], np.diag(expected)[has_error], rtol=1e-6)


def test_errors_of_what_depends_on_an_unknown_element_are_nan():
    """Shares of a whole all depend on each unconstrained number before them; real numbers on their own alone."""
    sites = {"b": _site(3), "shares": _site(3, support=constraints.simplex)}
    space = UnconstrainedSpace(sites)
    unknown = np.zeros(space.size, bool)
    unknown[space.slices["b"].start + 1] = unknown[space.slices["shares"].stop - 1] = True
    covariance = np.diag(np.where(unknown, 0.0, np.arange(1.0, space.size + 1)))
    errors = space.standard_errors(np.zeros(space.size), covariance, ~unknown)
    complete = space.standard_errors(np.zeros(space.size), covariance + np.diag(1.0 * unknown), ~np.zeros_like(unknown))
    np.testing.assert_array_equal(np.isnan(errors["b"][0]), [False, True, False])
    np.testing.assert_array_equal(np.isnan(errors["shares"][0]), [False, True, True])
    np.testing.assert_array_equal(np.isnan(errors["shares"][1]), [False, True])
    for name in sites:
        for found, expected in zip(errors[name], complete[name], strict=True):
            is_known = ~np.isnan(found)
            np.testing.assert_array_equal(np.asarray(found)[is_known], np.asarray(expected)[is_known])


@pytest.mark.thorough
def test_engines_name_what_preferences_do_not_tell():
    rng = np.random.default_rng(1)
    user, first = np.repeat(np.arange(25), 12), rng.integers(4, size=300)
    second = (first + rng.integers(1, 4, size=300)) % 4
    f = rng.standard_normal((25, 2)) @ rng.standard_normal((2, 4)) + 0.8 * rng.standard_normal((25, 4))
    won = (f[user, first] - f[user, second] + rng.standard_normal(300) > 0).astype(int)
    engine = EP(collaborative_preferences, progress_bar=False)
    engine.run(jax.random.key(0), user, first, second, won, num_users=25, kernel=np.eye(4), rank=2)
    assert engine.diagnostics.converged
    assert "rotations of the columns of 'V'" in str(engine.diagnostics)
    assert "a constant added to 'b'" in str(engine.diagnostics)
