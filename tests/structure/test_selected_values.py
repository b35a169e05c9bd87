"""A few elements of large values, found without the others."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from numpyro_ext.models import collaborative_preferences
from numpyro_ext.structure.latent_gaussian.costs import LayoutCosts
from numpyro_ext.structure.program.program import make_program
from numpyro_ext.structure.program.questions import Questions
from numpyro_ext.structure.program.rows.affine_rows import find_indices
from numpyro_ext.structure.program.rows.costs import RowCosts
from numpyro_ext.structure.program.rows.selected import SelectedDependence
from numpyro_ext.structure.program.rows.selected_values import evaluate_by_elements, selected_values, vanishing

from .test_touched_reading import ALWAYS, NUM_ITEMS, NUM_USERS, comparisons, given, options, read_touched

LEFT, RIGHT = np.random.default_rng(0).normal(size=(2, 6, 6))
WHERE = np.array([[0, 3], [5, 2], [4, 4], [0, 3], [7, 1], [-1, 0]])


def looked_up(table, mode):
    return table.at[WHERE[:, 0], WHERE[:, 1]].get(mode=mode)


FUNCTIONS = {
    "elementwise": lambda x, y: jnp.sin(x) * 2.0 - jnp.where(y > 0.0, y, x),
    "repeated": lambda x, y: x[:1] + y[:, 2:3] * 3.0 + jnp.zeros((6, 6)) + 1.0,
    "turned": lambda x, y: jnp.transpose((x[None] * y[:, None])[:4], (2, 0, 1)),
    "product": lambda x, y: x @ y.T,
    "products": lambda x, y: jnp.einsum("bij,bkj->bik", x.reshape(2, 3, 6), y.reshape(2, 3, 6)),
    "contracted twice": lambda x, y: jnp.einsum("ijk,lkj->il", x.reshape(3, 2, 6), y.reshape(3, 6, 2)),
    "rows": lambda x, y: (x + y)[np.array([3, 0, 3, 5])],
    "columns": lambda x, y: jnp.take(x + y, np.array([3, 0]), axis=1, mode="clip"),
    "pairs, filled": lambda x, y: looked_up(x @ y, "fill"),
    "pairs, clipped": lambda x, y: looked_up(x @ y, "clip"),
    "summed": lambda x, y: lax.cumsum(x @ y, axis=0),
}


ALL_LARGE = RowCosts(large_value=0, least_gain=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elements_and_their_derivatives_are_those_of_the_whole(name):
    program, output = make_program(FUNCTIONS[name], LEFT, RIGHT, num_unknowns=2)
    data = dict(zip(program.constants, program.data, strict=True))
    size = int(np.prod(program.shape(output)))
    index = np.random.default_rng(1).integers(0, size, 9)

    def some(x, y):
        env = dict(zip(program.inputs, (x, y), strict=True)) | data
        return selected_values(program, output, jnp.asarray(index), env, ALL_LARGE)

    def whole(x, y):
        env = dict(zip(program.inputs, (x, y), strict=True)) | data
        return jnp.ravel(evaluate_by_elements(program, [output], env, costs=ALL_LARGE)[0])

    @jax.jit
    def all_of(x, y, weights):
        expected, pull = jax.vjp(lambda x, y: jnp.ravel(FUNCTIONS[name](x, y)), x, y)
        of_whole, of_some = jax.vjp(whole, x, y), jax.vjp(some, x, y)
        weights = jnp.where(jnp.isnan(expected), 0.0, weights)
        of_index = jnp.zeros(size).at[index].add(weights[index])
        theirs = expected, expected[index], pull(weights), pull(of_index)
        return (of_whole[0], of_some[0], of_whole[1](weights), of_some[1](weights[index])), theirs

    ours, theirs = all_of(LEFT, RIGHT, np.cos(np.arange(size)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), ours, theirs)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "summed"])
def test_elements_depend_on_what_derivatives_say(name):
    program, output = make_program(FUNCTIONS[name], LEFT, RIGHT, num_unknowns=2)
    size = int(np.prod(program.shape(output)))
    pattern = SelectedDependence(Questions(program, program.data), dict(zip(program.inputs, (0, 36), strict=True))).at(
        output, np.arange(size)
    )
    slopes = jax.jit(jax.jacobian(lambda x, y: jnp.ravel(FUNCTIONS[name](x, y)), argnums=(0, 1)))(LEFT, RIGHT)
    slopes = np.concatenate([np.reshape(part, (size, -1)) for part in slopes], axis=1)
    for row, columns in zip(slopes, pattern, strict=True):
        assert set(np.flatnonzero(np.nan_to_num(row))) <= set(columns[columns >= 0])
    if name.startswith("pairs"):  # of what was looked up outside, nothing
        assert (pattern[4] < 0).all() == (name == "pairs, filled")


def test_what_is_looked_up_is_not_found_by_numbering_the_array(monkeypatch):
    monkeypatch.setattr(SelectedDependence, "_origin", None)
    program, output = make_program(FUNCTIONS["pairs, clipped"], LEFT, RIGHT, num_unknowns=2)
    pattern = SelectedDependence(Questions(program, program.data), dict(zip(program.inputs, (0, 36), strict=True))).at(
        output, np.arange(6)
    )
    assert pattern.shape == (6, 12)


def numbers_of(form):
    return form.offset, form.design.values, form.design.columns, form.touched.quantities.to_dense()


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 2])
def test_forms_of_large_values_are_those_of_small_ones(rank):
    found = []
    for is_large in (False, True):
        costs = LayoutCosts(**ALWAYS, rows=ALL_LARGE if is_large else RowCosts())
        reading = read_touched(collaborative_preferences, comparisons(), options(rank), check=False, costs=costs)

        def value(hyper, reading=reading):
            form = reading.form(hyper, reading.data)
            return sum(jnp.sum(jnp.sin(1.0 + part)) for part in numbers_of(form) if part.dtype == float)

        hyper = {name: jnp.asarray(number) for name, number in given(rank).items()}
        found.append((numbers_of(reading.form(hyper)), jax.grad(value)(hyper)))
        sizes = [
            eqn.outvars[0].aval.size
            for eqn in jax.make_jaxpr(lambda h, r=reading: numbers_of(r.form(h, r.data)))(hyper).eqns
            if eqn.primitive.name in ("dot_general", "mul", "add", "while", "scan")
        ]
        # The utilities of all users for all items are made only where that is little.
        if rank and is_large:
            assert NUM_USERS * NUM_ITEMS not in sizes
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), *found)


def test_values_that_are_used_twice_are_computed_once():
    def model(x):
        for _ in range(30):
            x = x + jnp.sin(x) * 1e-3
        return x

    program, output = make_program(model, LEFT, num_unknowns=1)

    def some(x):
        return selected_values(program, output, jnp.arange(4), {program.inputs[0]: x}, ALL_LARGE)

    assert len(jax.make_jaxpr(some)(LEFT).eqns) < 200  # of 2^30
    np.testing.assert_allclose(some(LEFT), jnp.ravel(model(LEFT))[:4], rtol=1e-13)


def test_what_vanishes_with_the_unknowns():
    def model(x, weights):
        zero = jnp.zeros(3) + 0.0 * x[:3]
        return zero + x[:3], (x * 2.0) @ weights, x + 1.0, weights * 1.0, jnp.exp(x)

    program, outputs = make_program(model, np.ones(6), np.ones(6), num_unknowns=1)
    zeros = vanishing(program, program.inputs[:1])
    assert [output in zeros for output in outputs] == [True, True, False, False, False]


def test_colours_are_places_in_rows_where_columns_keep_to_one():
    apart, crossed = np.array([[0, 3], [1, 4], [0, 4], [-1, 3]]), np.array([[0, 1], [1, 2], [0, 2]])
    assert find_indices(apart, 5)[1] == (2, True)
    number, is_by_slot = find_indices(crossed, 3)[1]
    assert number >= 3 and not is_by_slot


@pytest.mark.parametrize("seed", range(6))
def test_columns_have_the_first_colour_that_is_free(seed):
    """One after the other, whether they are in one piece or people's own, which are coloured together."""
    rng = np.random.default_rng(seed)
    user, first, second = rng.integers(0, (6, 7, 7), (40, 3)).T
    people = np.stack([user, 6 + 7 * user + first, 6 + 7 * user + second], axis=1)
    pattern, size = (people, 48) if seed % 2 else (rng.integers(-1, 30, (40, 3)), 30)
    expected = np.full(size, -1)
    for column in range(size):
        neighbours = pattern[(pattern == column).any(axis=1)]
        taken = set(expected[neighbours[neighbours >= 0]])
        expected[column] = next(colour for colour in range(size) if colour not in taken)
    indices, (number, is_by_slot) = find_indices(pattern, size)
    np.testing.assert_array_equal(indices.colours, expected)
    assert not is_by_slot and number - 4 <= expected.max() < number and number % 4 == 0


def test_few_blocks_of_few_rows_do_not_make_a_second_kind_of_quantities():
    few = read_touched(
        collaborative_preferences, comparisons(pairs_of=[40, 40, 40, 40, 40, 40, 40, 2, 40]), options(), check=False
    )
    both = read_touched(collaborative_preferences, comparisons(), options(), check=False)
    assert (few._touched._has_elements, few._touched._has_rows) == (True, False)
    assert (both._touched._has_elements, both._touched._has_rows) == (True, True)
