"""Categories of people of unknown types: against sums over the types of all people, and draws."""

import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_ext.distributions import CategoriesByType

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
RNG = np.random.default_rng(2)
SHARES, CHANCES = RNG.dirichlet(np.ones(2)), RNG.dirichlet(np.ones(3), (2, 4))
PERSON, ITEM = np.array([0, 2, 0, 2, 2]), np.array([3, 1, 0, 0, 2])


def answers(**options):
    return CategoriesByType(SHARES, CHANCES, PERSON, ITEM, num_people=3, **options)


@needs_float64
def test_density_sums_over_all_types():
    """Three people, one of whom has no observation; a batch, a compiled call, and a copy."""
    values = np.array([[0, 2, 1, 1, 0], [2, 2, 0, 1, 1]])
    for value, found in zip(values, answers().log_prob(values), strict=True):
        total, of_first = 0.0, np.zeros(2)
        for types in itertools.product(range(2), repeat=3):
            joint = np.prod(SHARES[list(types)]) * np.prod(CHANCES[np.array(types)[PERSON], ITEM, value])
            total += joint
            of_first[types[0]] += joint
        np.testing.assert_allclose(found, np.log(total), rtol=1e-12)
        types = answers().type_probabilities(value)
        np.testing.assert_allclose(types[0], of_first / total, rtol=1e-12)
        np.testing.assert_allclose(types[1], SHARES, rtol=1e-12)
    again = pickle.loads(pickle.dumps(answers()))
    through = jax.jit(lambda d: d.log_prob(values))(again)
    np.testing.assert_allclose(through, answers().log_prob(values), rtol=1e-12)


def test_draws_of_a_person_share_a_type():
    """The joint frequencies of two observations of one person, and of two people."""
    num = 20_000
    drawn = np.asarray(answers().sample(random.key(0), (num,)))
    assert drawn.shape == (num, 5)
    for first, second in ((0, 2), (0, 1)):
        one, other = CHANCES[:, ITEM[first]], CHANCES[:, ITEM[second]]
        if PERSON[first] == PERSON[second]:
            expected = np.einsum("t,ta,tb->ab", SHARES, one, other)
        else:
            expected = np.outer(SHARES @ one, SHARES @ other)
        found = np.zeros((3, 3))
        np.add.at(found, (drawn[:, first], drawn[:, second]), 1.0 / num)
        assert np.all(np.abs(found - expected) < 4.5 * np.sqrt(expected / num))


def test_what_is_no_category():
    plain = answers(validate_args=False)
    for bad in ([0, 1, 3, 0, 0], [0, -1, 0, 0, 0], [0, 0, 0.5, 0, 0]):
        assert plain.log_prob(np.array(bad)) == -jnp.inf
    assert answers(validate_args=True).support(np.array([0, 2, 1, 1, 0]))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((SHARES[None], CHANCES, PERSON, ITEM), r"probs of shape \(num_types,\).*got \(1, 2\)"),
        ((SHARES, CHANCES[:1], PERSON, ITEM), r"got \(2,\) and \(1, 4, 3\)"),
        ((SHARES, CHANCES, PERSON, ITEM[:2]), r"the same shape \(n,\); got \(5,\) and \(2,\)"),
        ((SHARES, CHANCES, PERSON + 1, ITEM), "person in 0, ..., 2; got values from 1 to 3"),
        ((SHARES, CHANCES, PERSON, ITEM + 1), "item in 0, ..., 3; got values from 1 to 4"),
    ],
)
def test_shapes_that_do_not_fit(arguments, words):
    with pytest.raises(ValueError, match=words):
        CategoriesByType(*arguments, num_people=3)
