"""Programs are told apart by what is inside their loops, branches and derivative rules as well."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import EP
from numpyro_ext.structure import read_latent_gaussian
from numpyro_ext.structure.program.program import make_program
from tests.tiers import few


def functions(array):
    """By name, functions of a vector that hold the array where a printed jaxpr does not show it."""
    add = jax.jit(lambda z: z + array)
    with_rule = jax.custom_jvp(lambda x: 2.0 * x)
    with_rule.defjvp(lambda primals, tangents: (with_rule(*primals), array * tangents[0]))
    with_reverse_rule = jax.custom_vjp(lambda x: 2.0 * x)
    with_reverse_rule.defvjp(lambda x: (with_reverse_rule(x), {"factor": array}), lambda kept, g: (kept["factor"] * g,))
    with_late_rule = jax.custom_vjp(lambda x: 2.0 * x)
    with_late_rule.defvjp(lambda x: (with_late_rule(x), None), lambda kept, g: (array * g,))

    def repeated(function):
        return lambda x: jax.lax.fori_loop(0, 3, lambda i, z: function(z), x)

    def on_host(x):
        return np.asarray(x) + np.asarray(array)

    return {
        "callback": lambda x: jax.pure_callback(on_host, jax.typeof(x), x),
        "fori_loop": repeated(add),
        "while_loop": lambda x: jax.lax.while_loop(lambda z: z[0] < 9.0, add, x),
        "cond": lambda x: jax.lax.cond(x[0] > 0.0, add, lambda z: z, x),
        "condition": lambda x: jax.lax.while_loop(lambda z: add(z)[0] < 9.0, lambda z: z + 1.0, x),
        "nested": repeated(jax.jit(repeated(add))),
        "jvp": with_rule,
        "jvp in a loop": repeated(with_rule),
        "vjp": with_reverse_rule,
        "late vjp": with_late_rule,
    }


@pytest.mark.parametrize("name", sorted(functions(np.zeros(3))))
@pytest.mark.parametrize("size", [3, 2000], ids=["few", "many"])
def test_programs_with_other_arrays_inside_are_others(name, size):
    one = jnp.ones(size)
    first, again, other = (
        make_program(functions(array)[name], one)[0].fingerprint() for array in (one, one, one.at[size // 2].set(2.0))
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("function", [jax.nn.softplus, jax.scipy.special.ndtri, jax.nn.relu, jax.scipy.special.i0e])
def test_functions_of_jax_are_the_same_at_every_trace(function):
    x = jnp.full(3, 0.3)
    first, again = (make_program(lambda x: function(x) * 2.0, x)[0].fingerprint() for _ in range(2))
    assert first == again


def shifted(offset):
    """Noise around a level and three times an offset, which a function under ``jit`` in a loop holds."""
    add = jax.jit(lambda z: z + offset)

    def model(y):
        level = numpyro.sample("level", dist.Normal(0.0, 10.0))
        mean = jax.lax.fori_loop(0, 3, lambda i, z: add(z), jnp.zeros(3))
        numpyro.sample("y", dist.Normal(level + mean, 1.0), obs=y)

    return model


@pytest.mark.parametrize("offset", few([0.0, 1.0, 2.0], 1))
def test_a_loop_computes_with_the_arrays_of_its_own_model(offset):
    ep = EP(shifted(jnp.full(3, offset)), progress_bar=False)
    ep.run(jax.random.key(0), jnp.array([0.0, 1.0, 2.0]))
    np.testing.assert_allclose(ep.posterior["level"].mean, 3.0 * (1.0 - 3.0 * offset) / 3.01, rtol=1e-10)


def test_rules_of_other_arrays_are_not_merged():
    """Two calls of one body and one input, each with a derivative of its own."""
    first, second = (functions(jnp.full(1, slope))["jvp"] for slope in (1.0, 5.0))
    program, (left, right) = make_program(lambda x: (first(x), second(x)), jnp.ones(1))

    def total(x):
        values = program.evaluate([left, right], {program.inputs[0]: x})
        return jnp.sum(values[0] + values[1])

    np.testing.assert_allclose(jax.grad(total)(jnp.ones(1)), [6.0])


def test_bounds_of_a_hyperparameter_are_told_apart_to_the_last_digit():
    def model(upper, y):
        scale = numpyro.sample("scale", dist.Uniform(0.0, upper))
        level = numpyro.sample("level", dist.Normal(0.0, scale))
        numpyro.sample("y", dist.Normal(level, 1.0), obs=y)

    uppers = 3.0, 3.0, np.nextafter(3.0, 4.0)
    first, again, other = (read_latent_gaussian(model, (jnp.array(upper), 1.0)).structure for upper in uppers)
    assert first == again
    assert first != other
