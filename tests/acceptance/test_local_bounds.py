r"""What local bounds do to learning: one latent variable with unknown scale (Khan 2012, section 4.6, Fig 4.4).

A binary variable with logit :math:`z \sim N(2, \sigma^2)` is one with the probability that :math:`\sigma = 2` gives.
Each bound of the log partition function gives lower bounds of both probabilities, and the scale that maximises the
expected log of them. With a tight bound that is the true scale; the bounds of Jaakkola and Bohning prefer none.
"""

import numpy as np
import pytest
from scipy import optimize, stats
from scipy.special import expit

from numpyro_ext.potentials.bounds.piecewise import minimax_pieces

MEAN, SCALE = 2.0, 2.0
GRID = np.arange(0.02, 4.01, 0.02)


def probability(label, scale, pieces):
    """Integral of ``exp(label * x - q(x)) N(x | MEAN, scale^2)`` for a piecewise quadratic ``q``."""
    lower, upper, a, b, c = pieces
    precision = 1.0 / scale**2 + 2.0 * a
    shift = MEAN / scale**2 + label - b
    mean, deviation = shift / precision, precision**-0.5
    mass = stats.norm.cdf((upper - mean) / deviation) - stats.norm.cdf((lower - mean) / deviation)
    log_height = 0.5 * shift**2 / precision - 0.5 * MEAN**2 / scale**2 - c
    return float(np.sum(deviation / scale * np.exp(log_height) * mass))


def one_quadratic(a, b, c):
    return tuple(np.array([x]) for x in (-np.inf, np.inf, a, b, c))


def bohning(psi):
    slope = expit(psi)
    return one_quadratic(0.125, slope - 0.25 * psi, np.logaddexp(0, psi) - slope * psi + 0.125 * psi**2)


def jaakkola(xi):
    curvature = np.tanh(0.5 * xi) / (4.0 * xi)
    return one_quadratic(curvature, 0.5, np.logaddexp(0, xi) - 0.5 * xi - curvature * xi**2)


def best_of(family, bounds):
    def best(label, scale):
        found = optimize.minimize_scalar(
            lambda t: -probability(label, scale, family(t)), bounds=bounds, method="bounded", options={"xatol": 1e-9}
        )
        return -found.fun

    return best


def piecewise(kind, num_pieces):
    found = minimax_pieces(kind, num_pieces)
    ends = np.concatenate([[-np.inf], found.breakpoints, [np.inf]])
    pieces = (ends[:-1], ends[1:], found.quadratic, found.linear, found.constant)
    return lambda label, scale: probability(label, scale, pieces)


def objective(bound):
    """Expected log probability at every scale of the grid."""
    z = MEAN + SCALE * np.polynomial.hermite_e.hermegauss(200)[0]
    weights = np.polynomial.hermite_e.hermegauss(200)[1]
    truth = float(weights @ expit(z) / weights.sum())
    assert truth == pytest.approx(0.77520, abs=1e-5)
    return np.array([truth * np.log(bound(1, s)) + (1 - truth) * np.log(bound(0, s)) for s in GRID])


# bound: best scale, value there, and the two probabilities at the true scale
TABLE = {
    "bohning": (best_of(bohning, (-8.0, 12.0)), None, -0.57654, 0.63573, 0.21444),
    "jaakkola": (best_of(jaakkola, (1e-6, 12.0)), None, -0.57653, 0.69885, 0.21872),
    "L3": (piecewise("linear", 3), 0.48, -0.66084, 0.66635, 0.19651),
    "L6": (piecewise("linear", 6), 1.94, -0.56034, 0.75435, 0.21856),
    "L10": (piecewise("linear", 10), 2.00, -0.54204, 0.76821, 0.22271),
    "Q3": (piecewise("quadratic", 3), 1.84, -0.55788, 0.75631, 0.21870),
    "Q5": (piecewise("quadratic", 5), 2.00, -0.53762, 0.77163, 0.22368),
    "Q10": (piecewise("quadratic", 10), 2.00, -0.53360, 0.77468, 0.22464),
    "Q20": (piecewise("quadratic", 20), 2.00, -0.53299, 0.77514, 0.22478),
}


@pytest.mark.parametrize("name", TABLE)
def test_learned_scale(name):
    bound, best_scale, best_value, one, zero = TABLE[name]
    assert bound(1, SCALE) == pytest.approx(one, abs=2e-5)
    assert bound(0, SCALE) == pytest.approx(zero, abs=2e-5)
    values = objective(bound)
    assert values.max() == pytest.approx(best_value, abs=1e-4 if best_scale is None else 1e-5)
    if best_scale is None:
        assert values.argmax() == 0
    else:
        assert GRID[values.argmax()] == pytest.approx(best_scale, abs=0.021)
