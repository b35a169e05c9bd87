"""Known integers go through NumPy as they would through JAX, value by value and dtype by dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.structure.program.equations import apply_equation, apply_to_known
from numpyro_ext.structure.program.known_values import known_result
from numpyro_ext.structure.program.program import make_program

INDEX = np.array([3, -1, 0, 2, -4, 9, -9], np.int32)
TABLE = np.arange(12, dtype=np.int32).reshape(4, 3)


@pytest.mark.parametrize("mode", [None, "fill", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, bool])
def test_gathers(mode, dtype):
    index = np.clip(INDEX, -4, 3) if mode == "promise_in_bounds" else INDEX
    for table in (TABLE.astype(dtype), TABLE[:, 0].astype(dtype)):
        agrees(lambda index, table=table: jnp.asarray(table).at[index].get(mode=mode), index)


@pytest.mark.parametrize(
    "function",
    [
        lambda i: i[:, None] * 5 + jnp.arange(2),
        lambda i: jnp.where(i < 0, i + 4, i).astype(jnp.int8),
        lambda i: jnp.maximum(i, 0)[2:5].reshape(1, 3) == 2,
        lambda i: jnp.squeeze(i[None, :, None], (0, 2)) - jnp.minimum(i, 1) * (i >= 2),
        lambda i: jnp.asarray(TABLE)[i[:2], i[1:3]],
        lambda i: jnp.asarray(TABLE)[:, i[:2]],
        lambda i: i.astype(float) + 0.5,
        lambda i: jax.random.fold_in(jax.random.key(3), i[0]),
    ],
)
def test_other_ways_of_indices(function):
    agrees(function, INDEX)


def agrees(function, index):
    program, _ = make_program(function, index)
    values = dict(zip(program.inputs, [index], strict=True)) | dict(zip(program.constants, program.data, strict=True))
    for eqn in program.equations:
        inputs = [values[a] if isinstance(a, int) else a.value for a in eqn.inputs]
        for number, known, result in zip(
            eqn.outputs, apply_to_known(eqn, inputs), apply_equation(eqn, inputs), strict=True
        ):
            assert known.dtype == result.dtype
            is_key = jnp.issubdtype(result.dtype, jax.dtypes.prng_key)
            np.testing.assert_array_equal(*((jax.random.key_data(x) if is_key else x) for x in (known, result)))
            values[number] = result


def test_what_an_index_goes_through_compiles_nothing():
    program, _ = make_program(lambda index: jnp.asarray(TABLE)[index], INDEX)
    names = {eqn.primitive.name for eqn in program.equations}
    assert names == {"lt", "add", "select_n", "broadcast_in_dim", "gather"}
    values = {program.inputs[0]: INDEX} | dict(zip(program.constants, program.data, strict=True))
    for eqn in program.equations:
        inputs = [values[a] if isinstance(a, int) else a.value for a in eqn.inputs]
        result = known_result(eqn.primitive.name, eqn.params, inputs)
        assert result is not None, eqn
        values[eqn.outputs[0]] = result


def test_parts_of_an_array_are_slices_in_every_version_of_jax():
    """JAX has an operation of its own for them from 0.12 on, by which every part saw all of the array."""

    def parts(x):
        first, second = x
        return first, second

    x = jnp.arange(6.0).reshape(2, 3)
    program, found = make_program(parts, x, num_unknowns=1)
    assert {eqn.primitive.name for eqn in program.equations} <= {"slice", "squeeze"}
    np.testing.assert_array_equal(program.evaluate(found, {program.inputs[0]: x}), x)
