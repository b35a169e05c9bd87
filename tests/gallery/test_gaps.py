"""Gaps of the gallery's page, on densities whose gaps are known."""

import numpy as np
from scipy import stats

from benchmarks.gallery.fits import moments_of_draws, moments_of_quantiles
from benchmarks.gallery.table import gaps_between


def test_gaps_of_normal_and_lognormal_draws():
    rng = np.random.default_rng(0)
    draws = {"f": rng.normal(1.0, 2.0, (2, 20_000, 3)), "scale": np.exp(rng.normal(0.5, 0.3, (2, 20_000)))}
    moments, positive = moments_of_draws(draws, ["f"], ["scale"])
    assert positive == ["scale"]
    exact = {"f": ([1.0 + 0.4] * 3, [2.0 * 1.5] * 3)}
    np.testing.assert_allclose(gaps_between(exact, moments), (0.2, np.log(1.5)), atol=0.02)
    quantiles = np.exp(stats.norm(0.5 + 0.06, 0.3 / 2.0).ppf([0.05, 0.5, 0.95]))[:, None]
    found = gaps_between({"scale": moments_of_quantiles(quantiles, True)}, moments)
    np.testing.assert_allclose(found, (0.2, np.log(2.0)), atol=0.02)


def test_constants_are_no_gaps():
    reference = {"L": ([1.0, 0.5], [0.0, 0.1])}
    np.testing.assert_allclose(gaps_between({"L": ([3.0, 0.6], [0.2, 0.1])}, reference), (1.0, 0.0), atol=1e-12)
    assert gaps_between({"L": ([3.0, 0.6], [0.0, 0.0])}, reference) is None
    assert gaps_between({}, reference) is None
