"""Forests taken some trees at a time: the same sums, derivatives and moments as taken whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.linalg import wavelet_transform
from numpyro_ext.potentials import Forest, LaplacePotential, wavelet_forest
from numpyro_ext.potentials.trees import chunks
from numpyro_ext.potentials.trees.forest import log_partition
from numpyro_ext.potentials.trees.mixture import TreeParameters, log_probabilities, tilted_moments


def forests():
    rng = np.random.default_rng(0)
    return {
        "image": wavelet_forest(wavelet_transform((16, 8), "haar", 2), per_orientation=True),
        "signal": wavelet_forest(wavelet_transform(32, "haar", 3)),
        "two bases": wavelet_forest(wavelet_transform((8, 8), "haar", 2), False, 2),
        "no trees": Forest.from_parents(np.full(24, -1), rng.integers(0, 3, 24)),
        "irregular": Forest.from_parents([-1, 0, 0, 1, -1, 4]),
    }


def parameters(forest):
    rng = np.random.default_rng(1)
    low, high = rng.gamma(2.0, 0.2, forest.num_groups), rng.gamma(2.0, 2.0, forest.num_groups)
    probabilities = rng.uniform(0.1, 0.9, (forest.num_groups, 3))
    low, high = LaplacePotential(0.0, jnp.asarray(low)), LaplacePotential(0.0, jnp.asarray(high))
    return TreeParameters(low, high, jnp.asarray(probabilities[:, 0]), jnp.asarray(probabilities[:, 1:]))


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("name", forests())
def test_parts_make_the_whole(monkeypatch, name, is_traced):
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
            return chunks.sum_over_trees(log_z, forest, prior, evidence)

        return jax.value_and_grad(total, (0, 1))(prior, evidence), chunks.map_trees(moments, forest, mean)

    whole = jax.value_and_grad(lambda p, e: log_z(forest, p, e), (0, 1))(prior, evidence), moments(forest, mean)
    monkeypatch.setattr(chunks, "LARGEST_WHOLE", 12)
    monkeypatch.setattr(chunks, "LARGEST_CHUNK", 12)
    calls.clear()
    found = jax.jit(both)(forest) if is_traced else jax.jit(lambda: both(forest))()
    assert (max(calls) == forest.num_nodes) == (name == "irregular")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, whole)


def test_sums_of_sums_keep_their_digits():
    forest = wavelet_forest(wavelet_transform((1024, 512), "haar", 5))
    assert forest.num_nodes > 2 * chunks.LARGEST_WHOLE
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
