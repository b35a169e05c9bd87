"""The utility of the better one of a pair, against its closed form."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy.stats import norm

from numpyro_ext.design import draws_of, expected_best_utility, select
from numpyro_ext.infer import EP

FIRST, SECOND = np.array([0, 1, 2, 0, 3]), np.array([1, 2, 3, 3, 1])


def comparisons(first, second, won=None):
    utility = numpyro.sample("utility", dist.Normal(0.0, 2.0).expand([4]).to_event(1))
    numpyro.sample("won", dist.Bernoulli(logits=utility[first] - utility[second]), obs=won)


def test_the_better_of_two_correlated_utilities():
    engine = EP(comparisons, num_samples=20_000, progress_bar=False)
    engine.run(random.key(0), FIRST, SECOND, np.array([1, 1, 0, 1, 1]))
    mean, covariance = (
        np.asarray(engine.posterior["utility"].mean),
        np.asarray(engine.posterior["utility"].covariance()),
    )
    first, second = np.triu_indices(4, 1)
    # the maximum of two Gaussians (Clark 1961)
    spread = np.sqrt(np.diag(covariance)[first] + np.diag(covariance)[second] - 2.0 * covariance[first, second])
    away = (mean[first] - mean[second]) / spread
    exact = mean[first] * norm.cdf(away) + mean[second] * norm.cdf(-away) + spread * norm.pdf(away)
    found = expected_best_utility(engine, first, second)["utility"]
    error = np.sqrt(np.diag(covariance).max() / 20_000)
    np.testing.assert_allclose(found, exact, atol=4.5 * error)
    best = select({"utility": found}).place
    assert {first[best], second[best]} == set(np.argsort(mean)[-2:])


def test_weights_shapes_and_what_cannot_be_asked():
    utility = jnp.array([[1.0, 2.0, -3.0, 0.0], [1.0, 0.0, -3.0, 4.0]])
    draws = draws_of({"utility": utility}, model=comparisons, weights=[0.25, 0.75])
    found = expected_best_utility(draws, [[0, 0]], [[1, 3]], rng_key=random.key(0))["utility"]
    np.testing.assert_allclose(found, [[0.25 * 2 + 0.75 * 1, 0.25 * 1 + 0.75 * 4]])
    for call, message in (
        (lambda: expected_best_utility(draws, [0], [1], site="taste"), "no draws of a site 'taste'"),
        (lambda: expected_best_utility(draws, [0, 1], [1]), "as many items"),
        (lambda: expected_best_utility(draws, [], []), "as many items"),
        (lambda: expected_best_utility(draws, [0], [4]), "numbers from 0 to 3"),
        (lambda: expected_best_utility(draws, [0.5], [1]), "numbers from 0 to 3"),
        (lambda: expected_best_utility(draws, [2], [2]), "1 pairs are of an item with itself"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
