"""The distribution of tree-structured coefficients: enumeration, differences, draws, NUTS on an exact posterior."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC, NUTS
from scipy import stats

from numpyro_ext.distributions import HiddenMarkovTree
from numpyro_ext.potentials import Forest
from numpyro_ext.potentials.trees.mixture import tilted_moments

from ..potentials.tree_cases import CASES, enumerate_states, reference_model

PARENTS = [3, -1, 1, -1, 1, 2]
FOREST = Forest.from_parents(PARENTS)
GROUPS = np.asarray(FOREST.groups)
LOW, HIGH = np.array([0.5, 0.2, 0.1]), np.array([3.0, 2.0, 1.0])
ROOT, TRANSITION = 0.3, np.array([[0.1, 0.9], [0.2, 0.7], [0.05, 0.6]])
VALUE = np.array([0.1, -2.0, 0.4, 0.03, 1.5, -0.02])


def tree(**changes):
    arguments = {"low": dist.Laplace(0.0, LOW), "high": dist.StudentT(3.0, 0.1, HIGH), "root_probability": ROOT}
    return HiddenMarkovTree(FOREST, **(arguments | {"transition": TRANSITION} | changes))


def test_log_prob_and_state_probabilities_equal_enumeration():
    low, high = stats.laplace(0.0, LOW[GROUPS]), stats.t(3.0, 0.1, HIGH[GROUPS])
    evidence = np.stack([low.logpdf(VALUE), high.logpdf(VALUE)], -1)
    log_root = np.log([[1.0 - ROOT, ROOT]] * 6)
    log_transition = np.log(np.stack([1.0 - TRANSITION, TRANSITION], -1))[GROUPS]
    expected, marginals, pairs = enumerate_states(PARENTS, evidence, log_root, log_transition)
    np.testing.assert_allclose(tree().log_prob(VALUE), expected, rtol=1e-12)
    np.testing.assert_allclose(tree().state_probabilities(VALUE), marginals, rtol=1e-11)
    np.testing.assert_allclose(tree().pair_probabilities(VALUE), pairs, rtol=1e-11, atol=1e-14)


def test_gradients_equal_finite_differences():
    def log_prob(arguments):
        s, low, high, root, transition = arguments
        return tree(
            low=dist.Normal(0.0, low), high=dist.Laplace(0.0, high), root_probability=root, transition=transition
        ).log_prob(s)

    arguments = [jnp.asarray(x) for x in (VALUE, LOW, HIGH, ROOT, TRANSITION)]
    slopes = jax.grad(log_prob)(arguments)
    compiled = jax.jit(log_prob)
    for i, slope in enumerate(slopes):
        for place in np.ndindex(slope.shape):
            step = 1e-5 * abs(float(arguments[i][place]))
            ends = [
                compiled([x.at[place].add(sign * step) if k == i else x for k, x in enumerate(arguments)])
                for sign in (1.0, -1.0)
            ]
            np.testing.assert_allclose(slope[place], (ends[0] - ends[1]) / (2.0 * step), rtol=1e-6, atol=1e-7)


@pytest.mark.float32
def test_draws_have_the_moments_and_the_dependence_of_the_tree():
    d = tree(high=dist.Normal(0.5, HIGH))
    draws = d.sample(random.key(0), (40000,))
    assert draws.shape == (40000, 6)
    error = np.sqrt(np.asarray(d.variance) / 40000)
    np.testing.assert_array_less(np.abs(draws.mean(0) - d.mean), 4.5 * error)
    np.testing.assert_allclose(draws.var(0), d.variance, rtol=0.1)
    # Magnitudes of a parent and of its child go together as the states do.
    root, child = np.abs(draws[:, 1]), np.abs(draws[:, 4])
    scale = [[LOW[0], LOW[1]], [HIGH[0], HIGH[1]]]
    p_root, p_child = np.array([1.0 - ROOT, ROOT]), np.stack([1.0 - TRANSITION[1], TRANSITION[1]], -1)
    folded = [[LOW[0], LOW[1]], [stats.foldnorm(0.5 / b, scale=b).mean() for b in scale[1]]]
    expected = sum(p_root[a] * p_child[a, b] * folded[a][0] * folded[b][1] for a in (0, 1) for b in (0, 1))
    np.testing.assert_allclose(np.mean(root * child), expected, rtol=0.05)


def test_both_kinds_of_random_keys():
    """ArviZ and ``handlers.seed`` make the older one."""
    for shape in ((), (4,)):
        np.testing.assert_array_equal(tree().sample(random.PRNGKey(3), shape), tree().sample(random.key(3), shape))


def test_batches_of_values_and_of_parameters():
    values = np.random.default_rng(0).normal(size=(2, 3, 6))
    scales = np.stack([LOW, 2.0 * LOW, 3.0 * LOW])
    batch = tree(low=dist.Laplace(0.0, scales))
    assert (batch.batch_shape, batch.event_shape) == ((3,), (6,))

    @jax.jit
    def everything(values, key):
        states = batch.state_probabilities(values), batch.pair_probabilities(values)
        return tree().log_prob(values), batch.log_prob(values), batch.sample(key, (4,)), batch.mean, *states

    one, many, *others = everything(values, random.key(1))
    assert one.shape == many.shape == (2, 3)
    np.testing.assert_allclose(one[1, 2], tree().log_prob(values[1, 2]), rtol=1e-12)
    np.testing.assert_allclose(many[1, 2], tree(low=dist.Laplace(0.0, scales[2])).log_prob(values[1, 2]), rtol=1e-12)
    assert [x.shape for x in others] == [(4, 3, 6), (3, 6), (2, 3, 6), (2, 3, 6, 2, 2)]


def test_is_a_pytree_and_compiles():
    found = jax.jit(lambda d: d.log_prob(VALUE))(tree())
    np.testing.assert_allclose(found, tree().log_prob(VALUE), rtol=1e-12)
    again = jax.tree.map(lambda x: x, tree())
    assert (again.batch_shape, again.event_shape) == ((), (6,))


def test_infinite_variance_of_a_student_component():
    assert np.all(np.isinf(tree(high=dist.StudentT(2.0, 0.0, HIGH)).variance))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"root_probability": 1.5}, "root_probability must hold probabilities"),
        ({"transition": [0.1, -0.2]}, "transition must hold probabilities"),
        ({"transition": 0.5}, "must have 2 entries"),
        ({"transition": np.full((3, 3), 0.5)}, "must have 2 entries"),
        ({"transition": np.full((2, 2), 0.5)}, "3 groups of nodes, but transition has parameters for 2"),
        ({"low": dist.Laplace(0.0, np.ones(4))}, "3 groups of nodes, but low has parameters for 4"),
        ({"root_probability": [0.5, 0.5]}, "3 groups of nodes, but root_probability has parameters for 2"),
        ({"high": dist.Cauchy(0.0, 1.0)}, "high must be a Laplace, Normal or StudentT distribution; got Cauchy"),
    ],
)
def test_bad_input_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tree(**changes)


def test_a_parent_array_instead_of_a_forest_and_a_missing_key_are_refused():
    with pytest.raises(TypeError, match=r"Forest.from_parents\(parents\)"):
        HiddenMarkovTree(np.array(PARENTS), dist.Normal(), dist.Normal())
    with pytest.raises(TypeError, match="random key"):
        tree().sample(None)


@pytest.mark.slow
def test_nuts_agrees_with_the_exact_posterior_of_denoising():
    case = next(case for case in CASES if len(case["parent"]) == 16)
    forest, parameters = reference_model(case)
    data, noise = np.array(case["given"]["y_tilde"]), case["sigma2"]

    def model(y):
        low, high = (dist.Laplace(0.0, part.scale) for part in parameters[:2])
        s = numpyro.sample("s", HiddenMarkovTree(forest, low, high, *parameters[2:]))
        numpyro.sample("y", dist.Normal(s, noise**0.5), obs=y)

    mcmc = MCMC(NUTS(model), num_warmup=1000, num_samples=8000, progress_bar=False)
    mcmc.run(random.key(0), data)
    draws = np.asarray(mcmc.get_samples()["s"])
    exact = tilted_moments(forest, parameters, jnp.asarray(data), noise)
    summary = numpyro.diagnostics.summary({"s": draws[None]})["s"]
    error = np.sqrt(np.asarray(exact.variance) / summary["n_eff"])
    np.testing.assert_array_less(np.abs(draws.mean(0) - exact.mean), 4.5 * error)
    np.testing.assert_allclose(draws.var(0), exact.variance, rtol=0.15)
    np.testing.assert_allclose(exact.mean, case["exact_denoising"]["posterior_mean"], rtol=1e-8)
