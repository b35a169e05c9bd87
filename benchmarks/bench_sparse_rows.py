"""Sweeps of expectation propagation that live on structure: crossed effects, and many small independent blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.infer import EP, LaplaceApproximation
from numpyro_ext.linalg.gaussian.design import SparseRows
from numpyro_ext.linalg.gaussian.prior import CovariancePrior, DiagonalPrior
from numpyro_ext.potentials import ProbitPotential, RectifiedLinearPoissonPotential
from numpyro_ext.structure.latent_gaussian.form import Blocks, LatentGaussian

from .harness import at_most, compile_function, compile_sweep, cpu_seconds

NUM_ROWS, NUM_EFFECTS = 10**5, 2000
BLOCK_COUNTS, BLOCK_SIZE = (10**4, 10**5), 5
NUM_GROUPS, GROUP_SIZE, NUM_COEFFICIENTS = 20_000, 5, 10


def crossed_effects() -> LatentGaussian:
    """Persons who answer items: an intercept and two sets of effects, three entries a row."""
    rng = np.random.default_rng(0)
    person = rng.integers(0, NUM_EFFECTS // 2, NUM_ROWS)
    item = rng.integers(NUM_EFFECTS // 2, NUM_EFFECTS, NUM_ROWS)
    effects = rng.normal(size=NUM_EFFECTS)
    y = rng.normal(size=NUM_ROWS) < effects[person] + effects[item]
    columns = np.stack([np.zeros(NUM_ROWS, int), 1 + person, 1 + item], axis=-1)
    return LatentGaussian(
        prior=(DiagonalPrior(jnp.array([25.0])), DiagonalPrior(jnp.ones(NUM_EFFECTS))),
        design=SparseRows(jnp.asarray(columns), jnp.ones((NUM_ROWS, 3)), NUM_EFFECTS + 1),
        offset=jnp.zeros(NUM_ROWS),
        potentials=(ProbitPotential(jnp.asarray(y, float)),),
        observed=(jnp.ones(NUM_ROWS, bool),),
        log_constant=jnp.zeros(()),
        blocks=Blocks(jnp.arange(NUM_ROWS)[None], jnp.arange(NUM_EFFECTS + 1)[None]),
    )


def small_blocks(num_blocks: int) -> LatentGaussian:
    """Independent short series of counts, each with a Gaussian process of its own."""
    rng = np.random.default_rng(0)
    size = num_blocks * BLOCK_SIZE
    t = np.arange(float(BLOCK_SIZE))
    covariance = 4.0 * np.exp(-0.5 * ((t[:, None] - t) / 2.0) ** 2) + 1e-6 * np.eye(BLOCK_SIZE)
    index = jnp.arange(size).reshape(num_blocks, BLOCK_SIZE)
    return LatentGaussian(
        prior=(CovariancePrior(jnp.broadcast_to(covariance, (num_blocks, BLOCK_SIZE, BLOCK_SIZE))),),
        design=SparseRows(jnp.arange(size)[:, None], jnp.ones((size, 1)), size),
        offset=jnp.full((size,), 3.0),
        potentials=(RectifiedLinearPoissonPotential(jnp.asarray(rng.poisson(3.0, size), float)),),
        observed=(jnp.ones(size, bool),),
        log_constant=jnp.zeros(()),
        blocks=Blocks(index, index),
    )


def test_crossed_effects(race, results):
    matrix = jnp.eye(NUM_EFFECTS) + 0.5 / NUM_EFFECTS
    ours, floor = compile_sweep(crossed_effects()), compile_function(jnp.linalg.cholesky, matrix)
    seconds, peer_seconds = race(ours.run, floor.run, rounds=5)
    results.record(
        "EP sweep, crossed effects, 10⁵ rows, 2000 effects",
        peer="Cholesky, 2000 × 2000",
        times=(seconds, peer_seconds),
        programs=(ours, floor),
        remark="A sweep needs the factor and its inverse, which is three times the work of the factor alone.",
    )


def test_small_blocks(race, results):
    few, many = (compile_sweep(small_blocks(num_blocks)) for num_blocks in BLOCK_COUNTS)
    seconds, peer_seconds = race(many.run, few.run, rounds=5)
    growth = seconds / peer_seconds * BLOCK_COUNTS[0] / BLOCK_COUNTS[1]
    results.record(
        "EP sweep, 10⁵ independent blocks of 5",
        peer="the same, 10⁴ blocks",
        times=(seconds, peer_seconds),
        figure="ratio of times per block",
        value=growth,
        target=at_most(1.5),
        programs=(many, few),
        remark="The cost is linear in the number of blocks; the target allows for what caches hold.",
    )


def grouped_counts(x: Any, group: Any, scale: Any = None, y: Any = None) -> None:
    """Random intercepts of many groups, and coefficients that all of them share."""
    if scale is None:
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.0).expand([NUM_COEFFICIENTS]).to_event(1))
    with numpyro.plate("groups", NUM_GROUPS):
        shift = numpyro.sample("shift", dist.Normal(0.0, scale))
    numpyro.sample("y", dist.Poisson(jnp.exp(x @ slopes + shift[group])), obs=y)


def test_groups_with_a_border(results):
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(NUM_GROUPS), GROUP_SIZE)
    x = rng.normal(size=(len(group), NUM_COEFFICIENTS))
    y = rng.poisson(np.exp(0.1 * x.sum(1) + 0.3 * rng.normal(size=NUM_GROUPS)[group]))
    noise = jax.jit(lambda key: jax.random.normal(key, (1000, NUM_GROUPS + NUM_COEFFICIENTS)))
    for name, scale in (("given", 0.3), ("learned", None)):
        fits: dict[str, list[float]] = {"EP": [], "LaplaceApproximation": []}
        draws, floors = [], []
        for kind in (EP, LaplaceApproximation):
            engine = kind(grouped_counts, progress_bar=False)
            for seed in range(3):  # the first compiles
                key = jax.random.key(seed)
                fits[kind.__name__].append(cpu_seconds(engine.run, key, x, group, scale=scale, y=y)[1])
                draws.append(cpu_seconds(engine.get_samples)[1])
                floors.append(cpu_seconds(noise, key)[1])
        item = f"20,000 groups of 5 and 10 common coefficients, scale {name}"
        by_ep, by_laplace = fits.values()
        results.record(
            f"Warm fit by EP, {item}",
            peer="LaplaceApproximation",
            times=(min(by_ep), min(by_laplace)),
            figure="CPU-seconds",
            target=at_most(2.0),
            compile_seconds=by_ep[0] - min(by_ep),
        )
        results.record(
            f"1000 draws, {item}",
            peer="as many normal numbers",
            times=(min(draws), min(floors)),
            figure="ratio of CPU-seconds",
        )
