"""Forests taken some trees at a time: the same sums, derivatives and moments as taken whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.linalg import wavelet_transform
from numpyro_ext.potentials import Forest, LaplacePotential, wavelet_forest
from numpyro_ext.potentials.trees import chunks
from numpyro_ext.potentials.trees.forest import log_partition
from numpyro_ext.potentials.trees.mixture import TreeParameters, log_probabilities, tilted_moments
from tests.tiers import few


def forests():
    rng = np.random.default_rng(0)
    return {
        "image": wavelet_forest(wavelet_transform((16, 8), "haar", 2), per_orientation=True),
        "signal": wavelet_forest(wavelet_transform(32, "haar", 3)),
        "two bases": wavelet_forest(wavelet_transform((8, 8), "haar", 2), False, 2),
        "no trees": Forest.from_parents(np.full(24, -1), rng.integers(0, 3, 24)),
        "irregular": Forest.from_parents([-1, 0, 0, 1, -1, 4]),
    }


SMALL = chunks.ForestCosts(largest_whole=12, largest_part=12)


def parameters(forest):
    rng = np.random.default_rng(1)
    low, high = rng.gamma(2.0, 0.2, forest.num_groups), rng.gamma(2.0, 2.0, forest.num_groups)
    probabilities = rng.uniform(0.1, 0.9, (forest.num_groups, 3))
    low, high = LaplacePotential(0.0, jnp.asarray(low)), LaplacePotential(0.0, jnp.asarray(high))
    return TreeParameters(low, high, jnp.asarray(probabilities[:, 0]), jnp.asarray(probabilities[:, 1:]))


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("name", few(forests(), 2))
def test_parts_make_the_whole(name, is_traced):
    forest = forests()[name]
    prior = parameters(forest)
    rng = np.random.default_rng(2)
    evidence, mean = jnp.asarray(rng.normal(size=(forest.num_nodes, 2))), jnp.asarray(rng.normal(size=forest.num_nodes))
    calls = []

    def log_z(trees, prior, evidence):
        calls.append(trees.num_nodes)
        return log_partition(trees, evidence, *log_probabilities(trees, prior))

    def moments(trees, mean):
        found = tilted_moments(trees, prior, mean, 0.3)
        return found.mean, found.variance, found.marginals, found.pair_marginals

    def both(forest):
        def total(prior, evidence):
            return chunks.sum_over_trees(log_z, forest, prior, evidence, costs=SMALL)

        found = chunks.map_trees(moments, forest, mean, costs=SMALL)
        return jax.value_and_grad(total, (0, 1))(prior, evidence), found

    whole = jax.value_and_grad(lambda p, e: log_z(forest, p, e), (0, 1))(prior, evidence), moments(forest, mean)
    calls.clear()
    found = jax.jit(both)(forest) if is_traced else jax.jit(lambda: both(forest))()
    assert (max(calls) == forest.num_nodes) == (name == "irregular")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, whole)


def test_sums_of_sums_keep_their_digits():
    forest = wavelet_forest(wavelet_transform((1024, 512), "haar", 5))
    assert forest.num_nodes > 2 * chunks.FOREST_COSTS.largest_whole
    terms = np.random.default_rng(0).gamma(0.5, size=forest.num_nodes)

    def by_group(trees, _, x):
        return jnp.zeros((forest.num_groups,), x.dtype).at[trees.groups].add(x)

    single, expected = jnp.asarray(terms, jnp.float32), np.bincount(np.asarray(forest.groups), terms)
    found = jax.jit(lambda x: chunks.sum_over_trees(by_group, forest, (), x))(single)
    slope = jax.jit(
        jax.grad(lambda a: chunks.sum_over_trees(lambda trees, a, x: a[trees.groups] @ x, forest, a, single))
    )(jnp.ones((forest.num_groups,), jnp.float32))
    np.testing.assert_allclose(slope, expected, rtol=3e-5)
    error, at_once = (np.max(np.abs(x / expected - 1.0)) for x in (found, by_group(forest, (), single)))
    assert error < 3e-5 and error < 0.1 * at_once, (error, at_once)


@pytest.mark.thorough
@pytest.mark.parametrize("name", few(["image", "signal", "no trees"], 1))
def test_some_parts_are_whole_trees(name):
    """Whose evidence is that of a forest of these trees alone, and its derivatives as well."""
    forest = forests()[name]
    prior = parameters(forest)
    evidence = jnp.asarray(np.random.default_rng(2).normal(size=(forest.num_nodes, 2)))
    number = chunks.num_parts(forest, SMALL)

    def log_z(prior, limit):
        def of(trees, prior, evidence):
            return log_partition(trees, evidence, *log_probabilities(trees, prior))

        return chunks.sum_over_trees(of, forest, prior, evidence, limit=limit, costs=SMALL)

    def taken(limit):
        def of(trees, _, node):
            return jnp.zeros(forest.num_nodes).at[node].add(1.0)

        return chunks.sum_over_trees(of, forest, (), jnp.arange(forest.num_nodes), limit=limit, costs=SMALL)

    assert number > 1
    before = np.zeros(forest.num_nodes)
    for limit in range(1, number + 1):
        count = np.asarray(jax.jit(taken)(limit))
        nodes = np.flatnonzero(count)
        assert np.all(count[nodes] == 1.0) and nodes.size == limit * forest.num_nodes // number
        assert np.all(count >= before)
        before, rank = count, np.cumsum(count).astype(int) - 1
        parents = np.asarray(forest.parents)[nodes]
        assert np.all(count[parents[parents >= 0]] == 1.0)
        alone = Forest.from_parents(np.where(parents >= 0, rank[parents], -1), np.asarray(forest.groups)[nodes])
        alone = dataclasses.replace(alone, num_groups=forest.num_groups)

        def expected(prior, alone=alone, nodes=nodes):
            return log_partition(alone, evidence[nodes], *log_probabilities(alone, prior))

        found = jax.jit(jax.value_and_grad(log_z))(prior, limit)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12),
            found,
            jax.value_and_grad(expected)(prior),
        )


def test_a_forest_that_is_taken_at_once_is_one_part():
    assert [chunks.num_parts(forest) for forest in forests().values()] == [1] * len(forests())
