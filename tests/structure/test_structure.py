"""Structures of readings: equal ones make equal forms of equal data, and nothing has to be written down for that."""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.compilation.content import ByContent, Structure, content_of, shapes_of
from numpyro_ext.compilation.store import shared
from numpyro_ext.structure import (
    ModelStructureError,
    read_bilinear,
    read_latent_gaussian,
    read_sparse_linear,
)
from tests.gallery import MODELS
from tests.readings import forget_readings
from tests.tiers import few

READERS = {
    "BilinearVG": read_bilinear,
    "StructuredMeanField": read_sparse_linear,
    "LaplaceApproximation": read_latent_gaussian,
}
QUICK = [
    (name, engine)
    for name, published in MODELS.items()
    for engine in READERS
    if engine in published.engines and not (published.refusal or published.is_slow)
]


class Rows(ByContent):
    def __init__(self, numbers):
        self.numbers = np.asarray(numbers)


@dataclass(frozen=True)
class Plan:
    name: str
    build: object = field(default=None, compare=False)


def test_content_is_all_that_is_held():
    same = [
        ([1, 2.0, "a", None], [1, 2.0, "a", None]),
        ({"a": np.arange(3.0)}, {"a": np.arange(3.0)}),
        (Rows([1, 2]), Rows([1, 2])),
        (partial(jnp.sum, axis=0), partial(jnp.sum, axis=0)),
        (Plan("a", 1), Plan("a", 2)),
        (dist.transforms.AffineTransform(0.0, 2.0), dist.transforms.AffineTransform(0.0, 2.0)),
        (dist.transforms.OrderedTransform(), dist.transforms.OrderedTransform()),
        (slice(1, 2), slice(1, 2)),
        (jnp.arange(100.0), jnp.arange(100.0)),
    ]
    for one, other in same:
        assert content_of(one) == content_of(other) and hash(content_of(one)) == hash(content_of(other))
    different = [
        (1, True),
        (0.0, 0),
        ((1,), [1]),
        (np.arange(3.0), np.arange(3)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (Rows([1, 2]), Rows([1, 3])),
        (partial(jnp.sum, axis=0), partial(jnp.sum, axis=1)),
        (Plan("a"), Plan("b")),
        (dist.transforms.AffineTransform(0.0, 2.0), dist.transforms.AffineTransform(0.0, 3.0)),
        (jnp.arange(100.0), jnp.arange(100.0).at[50].set(0.0)),
    ]
    for one, other in different:
        assert content_of(one) != content_of(other), (one, other)


@jax.tree_util.register_pytree_node_class
class Tabulated:
    """A tree that keeps an array beside its leaves, as distributions do."""

    def __init__(self, table):
        self.table = table

    def tree_flatten(self):
        return (), self.table

    @classmethod
    def tree_unflatten(cls, table, leaves):
        return cls(table)


def test_arrays_beside_the_leaves_of_a_tree_are_compared_by_all_their_numbers():
    table = np.zeros(5000)
    one, same, other = (
        jax.tree.structure([Tabulated(np.where(np.arange(5000) == at, 1.0, table))]) for at in (9, 9, 2500)
    )
    assert str(one) == str(other)  # which shows the first and last few
    assert content_of(one) == content_of(same) != content_of(other)


def test_shapes_are_those_that_a_compiled_function_sees():
    tree = {"a": np.zeros((2, 3), np.float32), "b": 1.0, "c": jax.random.key(0)}
    assert shapes_of(tree) == jax.eval_shape(lambda: tree)


class Weights:
    """An extension that keeps something of the data and says nothing of it."""

    def __init__(self, data, weight):
        self.data, self.weight = data, weight

    @property
    def structure(self):
        return Structure(Weights(shapes_of(self.data), self.weight))


def _weighted(weights):
    return lambda data: weights.weight * data


def test_what_an_object_holds_need_not_be_named_to_be_compared():
    data = np.arange(3.0)
    one, same, other = (Weights(data, np.asarray(weight)) for weight in (1.0, 1.0, 2.0))
    assert shared(_weighted, one) is shared(_weighted, same)
    np.testing.assert_array_equal(shared(_weighted, other)(data), 2.0 * data)


def reversed_in_turn(args):
    """The arguments with one array after the other turned around, which keeps labels and counts what they are."""
    leaves, tree = jax.tree.flatten(args)
    for place, leaf in enumerate(leaves):
        if np.ndim(leaf) and len(np.unique(np.asarray(leaf))) > 1:
            yield jax.tree.unflatten(tree, [*leaves[:place], np.asarray(leaf)[::-1].copy(), *leaves[place + 1 :]])


@pytest.mark.parametrize(("name", "engine"), few(QUICK, len(QUICK) // 8))
def test_equal_structures_make_equal_forms_of_equal_data(name, engine):
    published, read = MODELS[name], partial(READERS[engine], check=False)
    args = published.data()
    reading = read(published.model, args)
    forget_readings()
    again = read(published.model, args)
    assert again.structure == reading.structure and hash(again.structure) == hash(reading.structure)
    for others in reversed_in_turn(args):
        forget_readings()
        try:
            other = read(published.model, others)
        except ModelStructureError:
            continue
        if other.structure == reading.structure:
            hyper = other.initial_hyper()
            form, expected = reading.structure.value.form(hyper, other.data), other.form(hyper)
            for x, y in zip(jax.tree.leaves(form), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


def test_models_that_differ_in_one_number_have_other_structures_and_other_observations_the_same():
    def model(y, scale):
        level = numpyro.sample("level", dist.Normal(0.0, scale).expand([3]).to_event(1))
        numpyro.sample("y", dist.Poisson(jnp.exp(level)).to_event(1), obs=y)

    def structure(*args):
        return read_latent_gaussian(model, args, check=False).structure

    counts = jnp.array([1, 2, 3])
    found = structure(counts, 1.25)
    forget_readings()
    assert structure(counts + 1, 1.25) == found
    assert structure(counts, 1.26) != found
