"""Factors of a location and a scale, in hard corners: against integrals over one dimension."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from numpyro_ext.potentials import PairPotential

IS_DOUBLE = jax.config.jax_enable_x64

CASES = [
    # datum, mean of location and log scale, deviations of both, correlation
    (0.3, (0.0, 0.0), (1.0, 0.3), 0.4),
    (0.3, (0.3, -0.5), (0.05, 0.05), 0.0),
    (2.0, (0.0, -6.0), (1.0, 0.2), 0.3),
    (30.0, (0.0, 1.0), (10.0, 3.0), 0.1),
    (-1.0, (0.0, 0.0), (100.0, 0.5), -0.5),
    (1.0, (0.9, 0.0), (0.3, 1.5), 0.99),
    (5.0, (0.0, 0.0), (1e-3, 1e-3), 0.0),
    (0.5, (0.0, 0.0), (1.0, 0.5), 1.0),  # the predictors are one
]
Y, MEAN, DEVIATION, CORRELATION = (np.array(part, float) for part in zip(*CASES, strict=True))
COVARIANCE = DEVIATION[:, :, None] * DEVIATION[:, None, :]
COVARIANCE[:, 0, 1] *= CORRELATION
COVARIANCE[:, 1, 0] *= CORRELATION


def _normal(eta, y):
    return -0.5 * jnp.square((y - eta[:, 0]) * jnp.exp(-eta[:, 1])) - eta[:, 1] - 0.5 * jnp.log(2 * jnp.pi)


def _over_scales(y, mean, covariance):
    """Log integral, means and covariance: the location is a normal variable given the scale."""
    low, high = (mean[1] + side * 12.0 * np.sqrt(covariance[1, 1]) for side in (-1.0, 1.0))
    slope = covariance[0, 1] / covariance[1, 1]
    rest = covariance[0, 0] - slope * covariance[0, 1]
    for _ in range(2):
        outer = np.linspace(low, high, 40_001)
        center, noise = mean[0] + slope * (outer - mean[1]), np.exp(2 * outer)
        log_weight = -0.5 * (y - center) ** 2 / (rest + noise) - 0.5 * np.log(2 * np.pi * (rest + noise))
        log_weight -= 0.5 * (outer - mean[1]) ** 2 / covariance[1, 1]
        has_mass = outer[log_weight > log_weight.max() - 45.0]
        low, high = has_mass[0], has_mass[-1]
    log_z = logsumexp(log_weight) + np.log(outer[1] - outer[0]) - 0.5 * np.log(2 * np.pi * covariance[1, 1])
    weight = np.exp(log_weight - logsumexp(log_weight))
    location, left = center + rest / (rest + noise) * (y - center), rest * noise / (rest + noise)
    means = np.array([weight @ location, weight @ outer])
    away = np.stack([location, outer]) - means[:, None]
    return log_z, means, (weight * away) @ away.T + np.diag([weight @ left, 0.0])


@pytest.mark.thorough
@pytest.mark.float32
def test_a_location_and_a_scale_in_hard_corners():
    def made(y, mean, covariance):
        return PairPotential(_normal, (y,), is_gaussian=True).tilted_moments(mean, covariance)

    at = [jnp.asarray(x, float) for x in (Y, MEAN, COVARIANCE)]
    slopes, found = jax.jit(jax.grad(lambda *a: (jnp.sum(made(*a).log_z), made(*a)), argnums=(0, 1, 2), has_aux=True))(
        *at
    )
    tolerance = 1e-5 if IS_DOUBLE else 3e-3
    for i, (y, mean, covariance) in enumerate(zip(Y, MEAN, COVARIANCE, strict=True)):
        log_z, means, moments = _over_scales(y, mean, covariance)
        deviation = np.sqrt(np.diagonal(moments))
        np.testing.assert_allclose(found.log_z[i], log_z, rtol=tolerance, atol=tolerance, err_msg=str(i))
        assert np.all(np.abs(found.mean[i] - means) < tolerance * deviation), i
        assert np.all(np.abs(found.covariance[i] - moments) < tolerance * np.outer(deviation, deviation)), i
    if not IS_DOUBLE:
        return
    for i in range(4):  # derivatives of the integral, by differences

        def near(step, of, i=i):
            moved = [np.array(x[i], float) for x in (Y, MEAN, COVARIANCE)]
            moved[of[0]][of[1:]] += step
            if of[0] == 2:
                moved[2][of[1:][::-1]] = moved[2][of[1:]]
            return _over_scales(*moved)[0]

        for of in ((0,), (1, 0), (1, 1), (2, 1, 1)):
            step = 1e-4 * float(np.sqrt(COVARIANCE[i, 1, 1]))
            step *= float(np.sqrt(COVARIANCE[i, 1, 1])) if of[0] == 2 else 1.0
            expected = (near(step, of) - near(-step, of)) / (2 * step)
            np.testing.assert_allclose(slopes[of[0]][(i, *of[1:])], expected, rtol=1e-4, atol=1e-5, err_msg=f"{i} {of}")
