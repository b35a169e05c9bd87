"""Directions in which the model is the same are named, and what else is flat is not taken for one of them."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to

from numpyro_ext.infer import EP
from numpyro_ext.infer.front.running.symmetries import known_symmetries, why_no_errors
from numpyro_ext.infer.hyper.curvature import Curvature
from numpyro_ext.infer.hyper.space import UnconstrainedSpace
from numpyro_ext.models import collaborative_preferences


def _site(*shape, support=constraints.real):
    return SimpleNamespace(shape=shape, transform=biject_to(support), init=np.ones(shape), is_param=True)


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
        curvature = Curvature(np.zeros((SPACE.size,) * 2), rising, flat / units, no, no)
        return why_no_errors(SPACE, VALUES, units, curvature)

    assert message(none, turns).startswith("The log evidence knows nothing of rotations of the columns of 'V', under")
    assert "('sigma'), nor along a constant added to 'b'" in message(none, np.array([SHIFT, OTHER]))
    assert "('V')" in message(turns[:1] / np.linalg.norm(turns[0]), none)


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
