"""Pairs of which some are censored: against sums over what the censored ones may be, and draws."""

import itertools
import pickle

import jax
import numpy as np
import pytest
from jax import random

from numpyro_ext.distributions import CensoredPairs

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
RNG = np.random.default_rng(4)
U, V, B, G = RNG.normal(size=(2, 2)), RNG.normal(size=(3, 2)), RNG.normal(size=2), RNG.normal(size=3)
PI, PSI = RNG.dirichlet(np.ones(2)), RNG.dirichlet(np.ones(3))
SELECTED = PI[:, None] * PSI
EMITTED = SELECTED / (1.0 + np.exp(-(U @ V.T + B[:, None] + G)))


def pairs(num_censored=2, **options):
    return CensoredPairs(U, V, B, G, PI, PSI, num_censored, **options)


@needs_float64
def test_density_sums_over_what_is_censored():
    """Each of two censored pairs may be any pair; tables may have several rows, or one count, for a pair."""
    table = np.array([[0, 2, 1], [1, 0, 2], [0, 2, 1]])
    seen = np.prod([EMITTED[i, j] ** count for i, j, count in table])
    censored = (SELECTED - EMITTED).reshape(-1)
    total = sum(seen * censored[first] * censored[second] for first, second in itertools.product(range(6), repeat=2))
    np.testing.assert_allclose(pairs().log_prob(table), np.log(total), rtol=1e-12)
    short = np.array([[0, 2, 2], [1, 0, 2]], np.int32)
    np.testing.assert_allclose(pairs().log_prob(np.stack([short, short])), np.log([total, total]), rtol=1e-12)
    again = pickle.loads(pickle.dumps(pairs(num_pairs=3)))
    assert again.event_shape == (3, 3) and again.log_prob(short) == pairs().log_prob(short)
    through = jax.jit(lambda d: d.log_prob(short))(pairs(1.5))
    np.testing.assert_allclose(through, pairs(1.5).log_prob(short), rtol=1e-12)


def test_draws_are_emitted():
    num = 20_000
    table = np.asarray(pairs(num_pairs=num).sample(random.key(0)))
    assert table.shape == (num, 3) and np.all(table[:, 2] == 1)
    expected = (EMITTED / EMITTED.sum()).reshape(-1)
    found = np.bincount(table[:, 0] * 3 + table[:, 1], minlength=6) / num
    assert np.all(np.abs(found - expected) < 4.5 * np.sqrt(expected / num))


def test_what_is_no_table():
    bad = [[0, 0, -1]], [[0, 0, 0.5]], [[2, 0, 1]], [[0, 3, 1]], [[-1, 0, 1]]
    plain = pairs(validate_args=False)
    assert all(np.isnan(plain.log_prob(np.array(table))) for table in bad)
    assert not pairs().support(np.zeros((4, 2)))
    with pytest.warns(UserWarning, match="Out-of-support"):
        pairs(validate_args=True).log_prob(np.array(bad[2]))
    assert "of shape (n, 3)" in repr(pairs().support)


def test_shapes_and_sizes():
    with pytest.raises(ValueError, match=r"needs vectors u.*got \(2, 2\) and \(3, 1\)"):
        CensoredPairs(U, V[:, :1], B, G, PI, PSI, 2)
    with pytest.raises(ValueError, match=r"needs g of shape \(3,\).*got \(2,\)"):
        CensoredPairs(U, V, B, B, PI, PSI, 2)
    many = np.zeros(4000)
    large = CensoredPairs(*(np.zeros((4000, 1)),) * 2, many, many, many + 1 / 4000, many + 1 / 4000, 2)
    with pytest.raises(ValueError, match="visits all 4000 x 4000 = 16000000 pairs.*BilinearVG"):
        large.log_prob(np.array([[0, 0, 1]]))
