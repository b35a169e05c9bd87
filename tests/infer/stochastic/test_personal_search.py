"""Searches by slopes alone, side by side, against scipy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from numpyro_ext.infer.stochastic.personal.search import MOST_STEPS, Place, repeated

ENDS = np.array([[1.0, 1.0], [0.5, 0.25], [-1.0, 1.0], [0.0, 0.0], [2.0, 4.0]])
STEEP = 50.0


def valley(numbers, end):
    """Density along a bent valley, which is not finite far from it; for the last person it has no maximum."""
    x, y = numbers
    along = jnp.where(end[0] > 1.5, x, -0.5 * (x - end[0]) ** 2)
    across = jnp.where(jnp.abs(y) < 30.0, -0.5 * STEEP * (y - x**2) ** 2, jnp.nan)
    return along + across


@pytest.fixture(scope="module")
def places():
    """Places that searches from two points each end at, one after the other and three side by side."""
    starts, ends = np.repeat([[-1.0, 2.0], [0.1, -0.3]], 5, axis=0), jnp.tile(ENDS, (2, 1))

    def first(start, end):
        value, gradient = jax.value_and_grad(valley)(start, end)
        return Place.first(start, value, gradient, jnp.diag(jnp.array([1.0, STEEP])))

    def step(place, who):
        return place.stepped(lambda numbers: valley(numbers, ends[who]))

    begun = jax.vmap(first)(starts, ends)
    found = [jax.jit(repeated, static_argnums=(0, 1, 4))(step, lambda p: p.is_end, begun, 9, n) for n in (1, 3)]
    return begun, ends, *found


def test_searches_end_at_the_maximum(places):
    _, ends, alone, beside = places
    for place in range(9):
        if place == 4:
            continue  # it has none
        exact = minimize(lambda x, end: -float(valley(jnp.asarray(x), end)), ENDS[0] / 2, ends[place], tol=1e-12)
        np.testing.assert_allclose(exact.x, [ends[place][0], ends[place][0] ** 2], atol=1e-3)
        for found in (alone, beside):
            np.testing.assert_allclose(found.numbers[place], exact.x, atol=1e-3)
            np.testing.assert_allclose(found.numbers[place], [ends[place][0], ends[place][0] ** 2], atol=1e-5)
            assert found.num_steps[place] < MOST_STEPS


def test_who_does_not_end_keeps_nobody_waiting_and_the_rest_is_not_touched(places):
    begun, _, alone, beside = places
    for found in (alone, beside):
        assert found.num_steps[4] == MOST_STEPS and np.isfinite(found.value).all()
        distances = np.asarray(jax.vmap(lambda place: place.distance)(found))
        assert distances[4] > found.tolerance and (np.delete(distances, [4, 9]) <= found.tolerance).all()
        for part, before in zip(found, begun, strict=True):
            np.testing.assert_array_equal(part[9], before[9])
    np.testing.assert_array_equal(alone.num_steps, beside.num_steps)


def test_a_step_is_the_best_one_within_the_radius():
    gradient, precision = jnp.array([3.0, -2.0]), jnp.array([[2.0, 1.2], [1.2, 1.5]])
    place = Place.first(jnp.zeros(2), jnp.zeros(()), gradient, jnp.eye(2))
    values, vectors = jnp.linalg.eigh(precision)
    place = place._replace(bends=values, axes=vectors, slopes=vectors.T @ gradient)

    def model(step):
        return gradient @ step - 0.5 * step @ precision @ step

    angles = np.linspace(0, 2 * np.pi, 100_001)
    for radius in (0.3, 1.0, 2.0):
        on_circle = radius * np.stack([np.cos(angles), np.sin(angles)])
        best = on_circle[:, np.argmax(gradient @ on_circle - 0.5 * (on_circle * (precision @ on_circle)).sum(0))]
        step = place.axes @ place._replace(radius=jnp.array(radius)).along
        np.testing.assert_allclose(step, best, atol=1e-3)
    inside = place.axes @ place._replace(radius=jnp.array(100.0)).along
    np.testing.assert_allclose(jax.grad(model)(inside), 0.0, atol=1e-9)
