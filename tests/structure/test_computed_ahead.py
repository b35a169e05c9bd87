"""What does not depend on the argument is computed before a function is compiled, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_ext.structure.program.run_compiled import computed_ahead

GROUP = np.array([0, 2, 1, 2])


@jax.custom_jvp
def _doubled_slope(x):
    return jnp.sin(x)


@_doubled_slope.defjvp
def _(primals, tangents):
    return jnp.sin(primals[0]), 2.0 * jnp.cos(primals[0]) * tangents[0]


def _function(x):
    weight = jnp.zeros(3).at[GROUP].add(jnp.arange(4.0))  # of data alone
    steps = jax.lax.scan(lambda carry, w: (carry + w * x[0], carry), 0.0, weight)[1]
    return {"sum": weight * _doubled_slope(x), "steps": steps, "known": weight, "number": 2.0}


def test_values_and_derivatives_are_those_of_the_function():
    x = jnp.array([0.3, -0.2, 1.0])
    ahead = computed_ahead(_function, jnp.zeros(3))
    found, wanted = jax.jit(ahead)(x), _function(x)
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-14)

    def total(function):
        return lambda x: jnp.sum(function(x)["sum"]) + jnp.sum(jnp.square(function(x)["steps"]))

    np.testing.assert_allclose(jax.grad(total(ahead))(x), jax.grad(total(_function))(x), rtol=1e-13)
    np.testing.assert_allclose(jax.jacfwd(total(ahead))(x), jax.grad(total(_function))(x), rtol=1e-13)
    # twice the cosine by the rule of its own, times the sums of data of each group
    by_rule = jax.grad(lambda x: jnp.sum(ahead(x)["sum"]))(x)
    np.testing.assert_allclose(by_rule, np.array([0.0, 2.0, 4.0]) * 2.0 * np.cos(x), rtol=1e-12)
    rows = jnp.stack([x, 2.0 * x])
    np.testing.assert_allclose(jax.vmap(ahead)(rows)["sum"][1], _function(2.0 * x)["sum"], rtol=1e-14)


def test_a_function_is_made_while_another_one_is_traced():
    x = jnp.array([0.3, -0.2, 1.0])
    found = jax.jit(jax.vmap(lambda x: computed_ahead(_function, jnp.zeros(3))(x)["sum"]))(x[None])
    np.testing.assert_allclose(found[0], _function(x)["sum"], rtol=1e-14)


def test_no_sum_of_data_is_left_unless_too_much_were_kept():
    def text(**options):
        ahead = computed_ahead(_function, jnp.zeros(3), **options)
        return str(jax.make_jaxpr(ahead)(jnp.zeros(3)))

    assert "scatter" not in text()
    assert "scatter" in text(most_numbers=2)
