"""Refits that the data call for: bets against predictions are fair, and win where these are wrong."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers

from numpyro_ext.design import SequentialDesign, random_scores
from numpyro_ext.design.outcomes.outlooks import GaussianOutlook
from numpyro_ext.design.prequential import ENOUGH, Bets, log_gains
from numpyro_ext.infer import EP
from numpyro_ext.potentials import GaussianPotential, PoissonExpPotential, ProbitPotential, StudentTPotential
from tests.tiers import thorough

ZERO = jnp.zeros((1, 1))
KINDS = {
    "labels": (ProbitPotential(ZERO), np.arange(2.0)),
    "counts": (PoissonExpPotential(ZERO, jnp.ones((1, 1))), np.arange(60.0)),
    "reals": (GaussianPotential(ZERO, jnp.full((1, 1), 0.5)), np.linspace(-15.0, 15.0, 20001)),
    "tails": (StudentTPotential(ZERO, jnp.full((1, 1), 0.5), jnp.full((1, 1), 4.0)), np.linspace(-150.0, 150.0, 6001)),
}


def outlook_of(potential, mean=(0.8,), variance=(0.7,), weights=(1.0,)):
    columns = [jnp.asarray(part)[:, None] for part in (mean, variance)]
    return GaussianOutlook(
        name="y", shape=(1,), is_candidate=np.ones(1, bool), potential=potential, mean=columns[0], variance=columns[1],
        weights=jnp.asarray(weights), rows=np.arange(1),
    )  # fmt: skip


def gains_of(outlook, outcomes):
    return np.array([log_gains(outlook, 0, value) for value in outcomes])


@pytest.mark.parametrize("kind", ["labels", "counts", "reals", *thorough("tails")])
def test_each_bet_is_fair(kind):
    potential, outcomes = KINDS[kind]
    outlook = outlook_of(potential, (0.3,), (0.2,))
    p = np.exp(outlook.log_predictive(np.zeros(len(outcomes), int), outcomes))
    step = 1.0 if outcomes[1] == 1.0 else outcomes[1] - outcomes[0]
    masses = np.array([outlook.log_power_masses(0, np.array([0.5, 1.0, 2.0]))])[0]
    np.testing.assert_allclose(np.exp(masses[1]), 1.0, atol=1e-4)
    gains = np.array([-0.5, 1.0]) * np.log(p)[:, None] - masses[[0, 2]]
    few = slice(None, None, max(1, len(outcomes) // 40))
    np.testing.assert_allclose(gains_of(outlook, outcomes[few]), gains[few], atol=1e-9)
    np.testing.assert_allclose(step * p @ np.exp(gains), 1.0, atol=2e-3)


def test_gaussian_bets_are_on_another_variance():
    """And in mixtures on powers of the mixture, narrow and far as its parts may be."""
    outlook, y = outlook_of(KINDS["reals"][0]), np.array([-3.0, 0.8, 2.0])
    wider, narrower, predicted = (dist.Normal(0.8, np.sqrt(0.95 * s)).log_prob(y) for s in (2.0, 0.5, 1.0))
    np.testing.assert_allclose(gains_of(outlook, y), np.stack([wider - predicted, narrower - predicted], -1), atol=1e-6)
    mean, deviation, weights = np.array([0.0, 4.0]), np.array([0.2, 2.0]), np.array([0.3, 0.7])
    potential = GaussianPotential(jnp.zeros((2, 1)), jnp.full((2, 1), 0.05))
    mixture = outlook_of(potential, mean, deviation**2 - 0.05**2, weights)
    grid = np.linspace(-20.0, 25.0, 90001)
    density = np.exp(dist.Normal(mean, deviation).log_prob(grid[:, None])) @ weights
    masses = [np.sum(density**power) * (grid[1] - grid[0]) for power in (0.5, 2.0)]
    np.testing.assert_allclose(mixture.log_power_masses(0, np.array([0.5, 2.0])), np.log(masses), atol=1e-4)


def largest_capital(factor, number, size=50):
    """Within streams of fifty outcomes whose standard deviation is so many times what is predicted."""
    outlook = outlook_of(KINDS["reals"][0])
    outcomes = 0.8 + factor * np.sqrt(0.95) * np.random.default_rng(0).normal(size=(number, size))
    log_p = outlook.log_predictive(np.zeros(outcomes.size, int), outcomes.reshape(-1)).reshape(outcomes.shape)
    gains = np.array([-0.5, 1.0]) * log_p[..., None] - outlook.log_power_masses(0, np.array([0.5, 2.0]))
    largest = np.full(number, -np.inf)
    for stream in range(number):
        bets = Bets()
        for gain in gains[stream]:
            bets = bets.after([gain])
            largest[stream] = max(largest[stream], np.logaddexp.reduce(bets.log_capital))
    return np.exp(largest)


def test_false_alarms_are_as_rare_as_the_stake_says():
    share = np.mean(largest_capital(1.0, 1000) >= ENOUGH)
    assert 0.005 < share < 1.0 / ENOUGH
    for factor in (0.5, 2.0):
        assert np.mean(largest_capital(factor, 100) >= ENOUGH) > 0.95


def test_outcomes_told_together_share_the_stake():
    outlook = outlook_of(KINDS["labels"][0])
    gains = list(gains_of(outlook, [0.0, 0.0, 1.0]))
    capital = np.exp(np.array(Bets().after(gains).log_capital))
    np.testing.assert_allclose(capital, 0.5 * np.mean(np.exp(gains), axis=0))


def curve(x, y=None, seen=True):
    length = numpyro.sample("length", dist.LogNormal(0.0, 1.0))
    covariance = jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2) + 1e-6 * jnp.eye(x.shape[0])
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(x.shape[0]), covariance))
    with handlers.mask(mask=seen):
        numpyro.sample("y", dist.Normal(f, 0.1), obs=y)


GRID = np.linspace(0.0, 6.0, 80)
FIRST = np.arange(len(GRID)) % 10 == 0


def stream(values, number, **options):
    """A design on a curve of which a few points are known, and the length scales of its fits."""
    engine = EP(curve, integrate="none", progress_bar=False, **options)
    engine.run(random.key(0), GRID, np.where(FIRST, values, 0.0), FIRST)
    design = SequentialDesign(engine, random_scores, refit_every="evidence")
    lengths = [float(engine.hyper["length"].value)]
    for step in range(number):
        place = design.propose(random.key(step))
        design.observe(place, values[place])
        lengths.append(float(engine.hyper["length"].value))
    return design.history["is_refit"].values, np.array(lengths)


@pytest.mark.thorough
def test_a_stream_from_another_length_scale_is_learned_from():
    noise = 0.1 * np.random.default_rng(0).normal(size=len(GRID))
    # of its fast waves the first points see nothing
    is_refit, lengths = stream(np.sin(0.5 * GRID) + np.sin(2.0 * np.pi * GRID / GRID[10]) + noise, 20)
    assert lengths[0] > 2.0 and 0.1 < lengths[-1] < 0.3
    assert is_refit[:6].any() and not is_refit[6:].any()
    changed = np.flatnonzero(np.diff(lengths))
    np.testing.assert_array_equal(changed, np.flatnonzero(is_refit))


@pytest.mark.slow
def test_a_stream_from_the_model_itself_is_seldom_fitted_again():
    covariance = np.exp(-0.5 * ((GRID[:, None] - GRID) / 0.3) ** 2) + 1e-8 * np.eye(len(GRID))
    root, number = np.linalg.cholesky(covariance), 0
    for seed in range(10):
        generator = np.random.default_rng(seed)
        values = root @ generator.normal(size=len(GRID)) + 0.1 * generator.normal(size=len(GRID))
        number += int(stream(values, 50, hyper_values={"length": 0.3})[0].sum())
    assert number <= 2  # of five hundred observations
