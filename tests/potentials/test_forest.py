"""Sum-product on forests, against enumeration, the reference cases and the layout of PyWavelets."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.potentials import Forest, sum_product, wavelet_forest
from numpyro_ext.potentials.trees.forest import log_partition

from .tree_cases import CASES, enumerate_states, group_numbers, group_values, random_parents

EPS = float(jnp.finfo(jnp.result_type(float)).eps)


def random_factors(rng, n, spread=2.0):
    p, q = rng.uniform(0.05, 0.95, (2, n, 2))
    transition = np.stack([1.0 - p, p], axis=-1)
    return spread * rng.normal(size=(n, 2)), np.log(np.stack([1.0 - q[:, 0], q[:, 0]], axis=-1)), np.log(transition)


@pytest.mark.float32
@pytest.mark.parametrize(("num_nodes", "num_roots"), [(1, 1), (9, 1), (9, 3), (10, 10)])
def test_sum_product_equals_enumeration(num_nodes, num_roots):
    rng = np.random.default_rng(num_nodes + num_roots)
    parents = random_parents(rng, num_nodes, num_roots)
    factors = random_factors(rng, num_nodes)
    forest = Forest.from_parents(parents)
    found = sum_product(forest, *map(jnp.asarray, factors))
    for value, expected in zip(found, enumerate_states(parents, *factors), strict=True):
        np.testing.assert_allclose(value, expected, rtol=200 * EPS, atol=200 * EPS)
    np.testing.assert_allclose(log_partition(forest, *map(jnp.asarray, factors)), found.log_partition, rtol=10 * EPS)


def test_a_regular_forest_has_the_sums_of_an_irregular_one():
    """Reshaped sums over equal numbers of children, against the enumeration, with isolated nodes among the roots."""
    parents = np.array([-1, -1, 0, 0, 3, 3, 2, 2, -1])
    forest = Forest.from_parents(parents)
    assert [level.num_children for level in forest.levels] == [0, 2, 2]
    factors = random_factors(np.random.default_rng(0), 9)
    for value, expected in zip(sum_product(forest, *factors), enumerate_states(parents, *factors), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_reference_cases(case):
    tree = case["tree"]
    forest = Forest.from_parents(case["parent"], group_numbers(case))
    groups = group_numbers(case)
    theta = group_values(case, case["theta"], [0.5, 0.5])[groups]
    is_scaling = np.array(case["level"]) < 0
    root = np.where(is_scaling, case["theta_root"]["scaling"], case["theta_root"]["root"])
    log_root = np.log(np.stack([1.0 - root, root], -1))
    found = sum_product(forest, tree["log_node_evidence"], log_root, np.log(np.stack([1.0 - theta, theta], -1)))
    np.testing.assert_allclose(found.log_partition, tree["log_partition"], rtol=1e-10)
    np.testing.assert_allclose(found.marginals, tree["marginals_state1"], rtol=1e-9, atol=1e-10)
    for node, pair in tree["pair_marginals"].items():
        np.testing.assert_allclose(found.pair_marginals[int(node)], pair, rtol=1e-9, atol=1e-10)


@pytest.mark.float32
def test_extreme_evidence_and_certain_transitions_stay_finite():
    """A state that is impossible, and log evidences whose exponentials over- and underflow."""
    forest = Forest.from_parents([-1, 0, 0, 1])
    evidence = jnp.array([[0.0, 1e30], [-1e4, 0.0], [1e3, -1e3], [-1e30, -1e30]])
    log_transition = jnp.array([[0.0, -jnp.inf], [-jnp.inf, 0.0]])
    found = sum_product(forest, evidence, jnp.log(jnp.array([0.5, 0.5])), log_transition)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in found)
    np.testing.assert_allclose(found.marginals, 1.0, atol=1e-6)
    copies = sum_product(forest, 0.0 * evidence, jnp.log(jnp.array([0.25, 0.75])), log_transition)
    np.testing.assert_allclose(copies.marginals, 0.75, rtol=10 * EPS)
    np.testing.assert_allclose(copies.pair_marginals[1:], [[[0.25, 0.0], [0.0, 0.75]]] * 3, atol=10 * EPS)


@pytest.mark.thorough
def test_derivatives_through_the_marginals():
    """The slope of a marginal in an evidence is a covariance of states: checked against differences."""
    rng = np.random.default_rng(3)
    forest = Forest.from_parents(random_parents(rng, 7, 2))
    evidence, log_root, log_transition = random_factors(rng, 7)

    def marginal(evidence):
        return sum_product(forest, evidence, log_root, log_transition).marginals[2]

    slope = jax.jit(jax.grad(marginal))(evidence)
    step = 1e-5
    for j, state in ((0, 1), (2, 0), (6, 1)):
        moved = np.zeros((7, 2))
        moved[j, state] = step
        difference = (marginal(evidence + moved) - marginal(evidence - moved)) / (2.0 * step)
        np.testing.assert_allclose(slope[j, state], difference, rtol=1e-7, atol=1e-10)


def test_batches_by_vmap():
    rng = np.random.default_rng(4)
    forest = Forest.from_parents(random_parents(rng, 6, 1))
    evidence, log_root, log_transition = random_factors(rng, 6)
    batch = jnp.asarray(rng.normal(size=(3, 6, 2)))
    found = jax.vmap(lambda e: sum_product(forest, e, log_root, log_transition))(batch)
    one = sum_product(forest, batch[1], log_root, log_transition)
    np.testing.assert_allclose(found.pair_marginals[1], one.pair_marginals, rtol=1e-13)


@pytest.mark.parametrize("shape", [(8,), (8, 16), (4, 4, 8)])
@pytest.mark.parametrize("per_orientation", [False, True])
def test_wavelet_forest_is_that_of_the_mallat_layout(shape, per_orientation):
    """Built again by walking through the slices of the sub-bands."""
    num_levels, num_axes = 2, len(shape)
    forest = wavelet_forest(SimpleNamespace(shape_of_signal=shape, num_levels=num_levels), per_orientation)
    number = np.arange(np.prod(shape)).reshape(shape)
    parents, groups = np.full(number.size, -1), np.zeros(number.size, int)
    orientations = list(np.ndindex(*(2,) * num_axes))[1:]
    group = 1
    for level in range(num_levels, 0, -1):
        for orientation in orientations:
            band = number[
                tuple(
                    slice(s >> level, s >> (level - 1)) if high else slice(0, s >> level)
                    for s, high in zip(shape, orientation, strict=True)
                )
            ]
            groups[band] = group
            group += per_orientation
            if level < num_levels:
                above = number[
                    tuple(
                        slice(s >> (level + 1), s >> level) if high else slice(0, s >> (level + 1))
                        for s, high in zip(shape, orientation, strict=True)
                    )
                ]
                for place in np.ndindex(*band.shape):
                    parents[band[place]] = above[tuple(x // 2 for x in place)]
        group += not per_orientation
    np.testing.assert_array_equal(forest.parents, parents)
    np.testing.assert_array_equal(forest.groups, groups)
    assert forest.num_groups == 1 + num_levels * (len(orientations) if per_orientation else 1)
    assert [level.num_children for level in forest.levels] == [0, 2**num_axes]


def test_wavelet_forest_without_levels_has_isolated_nodes():
    forest = wavelet_forest(SimpleNamespace(shape_of_signal=(3, 5), num_levels=0))
    assert bool(jnp.all(forest.is_root)) and forest.num_groups == 1


@pytest.mark.parametrize(
    ("parents", "groups", "message"),
    [
        ([], None, "at least one node"),
        ([-1, 2, 3, 1], None, "from node 1 the parents lead round in a circle"),
        ([0], None, "round in a circle"),
        ([-1, 0, 5], None, "Node 2 has the parent 5"),
        ([-1, -2], None, "Node 1 has the parent -2"),
        ([[-1, 0]], None, "vector of integers"),
        ([-1.0, 0.0], None, "vector of integers"),
        ([-1, 0], [0], "one group per node"),
        ([-1, 0], [0, -1], "node 1 has the group -1"),
    ],
)
def test_bad_parent_arrays_are_refused(parents, groups, message):
    with pytest.raises(ValueError, match=message):
        Forest.from_parents(np.array(parents), groups)


def test_wrong_shapes_and_traced_parents_are_refused():
    forest = Forest.from_parents([-1, 0])
    with pytest.raises(ValueError, match=r"must be \(2, 2\)"):
        sum_product(forest, jnp.zeros((3, 2)), jnp.zeros(2), jnp.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"log_transition has the shape \(3, 2, 2\)"):
        sum_product(forest, jnp.zeros((2, 2)), jnp.zeros(2), jnp.zeros((3, 2, 2)))
    with pytest.raises(ValueError, match="Make it outside of the model"):
        jax.jit(Forest.from_parents)(jnp.array([-1, 0]))
