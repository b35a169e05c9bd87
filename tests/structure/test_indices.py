"""Indices beyond what they point into, and sites without elements."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

from numpyro_ext.infer import EP
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian

GROUP = [0, 1, 2, 1]


def counts(group, num=3):
    scale = numpyro.param("scale", jnp.ones(num))
    with numpyro.plate("groups", num):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
    group = jnp.asarray(group)
    numpyro.sample("y", dist.Poisson(jnp.exp(effect[group] * scale[group])), obs=np.array([1, 0, 2, 1]))


@pytest.mark.parametrize(
    "group, first", [([0, 1, 3, 1], 3), (np.array([0, 1, 2, -4]), -4), (pd.Series([7, 1, 2, 9]), 7)]
)
def test_indices_out_of_range_are_refused(group, first):
    place = list(np.asarray(group)).index(first)
    said = rf"first {first}, at \[{place}\] of them, along an axis of length 3"
    with pytest.raises(ModelStructureError, match=said) as refusal:
        EP(counts, progress_bar=False).run(jax.random.key(0), group)
    assert refusal.value.site == "effect"


@pytest.mark.parametrize(
    "group",
    [
        [0, -2, -1, 1],
        np.array([0, -2, 2, 1]),
        jnp.array([0, 1, -1, 1]),
        pd.Series(pd.Categorical(["a", "b", None, "b"]).codes),
    ],
)
def test_negative_indices_of_arguments_are_refused(group):
    """The last elements are hardly meant; those that a model makes itself are."""
    with pytest.raises(ModelStructureError, match=r"'effect' is indexed by 'group', .* first -[12]: .* length 3"):
        read_latent_gaussian(counts, (group,))

    def in_a_circle(y):
        f = numpyro.sample("f", dist.Normal(0.0, 1.0).expand([4]))
        numpyro.sample("y", dist.Normal(f - f[np.arange(4) - 1], 1.0), obs=y)

    form = read_latent_gaussian(in_a_circle, (np.array([-3, 0, 1, 2]),)).form({})
    np.testing.assert_array_equal(form.design.to_dense(), np.eye(4) - np.roll(np.eye(4), -1, axis=1))


@pytest.mark.parametrize("group", [GROUP, jnp.array(GROUP, jnp.int32), pd.Series(GROUP)])
def test_indices_in_range_are_taken(group):
    expected = read_latent_gaussian(counts, (GROUP,), check=False).form({"scale": jnp.array([1.0, 2.0, 3.0])})
    form = read_latent_gaussian(counts, (group,)).form({"scale": jnp.array([1.0, 2.0, 3.0])})
    np.testing.assert_array_equal(form.design.to_dense(), expected.design.to_dense())


def test_other_arrays_than_the_field_and_other_axes():
    def of_a_parameter():
        level = numpyro.param("level", jnp.zeros(2))
        f = numpyro.sample("f", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Poisson(jnp.exp(f + level[np.array([0, 2])])), obs=np.ones(2))

    def of_two_axes():
        f = numpyro.sample("f", dist.Normal(0.0, 1.0).expand([3, 4]))
        utility = numpyro.deterministic("utility", 2.0 * f)
        numpyro.sample("y", dist.Poisson(jnp.exp(utility[np.array([0, 2]), np.array([4, 3])])), obs=np.ones(2))

    with pytest.raises(
        ModelStructureError, match="'level' is indexed out of range: 1 indices, the first 2, .*length 2"
    ):
        read_latent_gaussian(of_a_parameter)
    with pytest.raises(
        ModelStructureError, match="'utility' is indexed out of range: 1 indices, the first 4.*length 4"
    ):
        read_latent_gaussian(of_two_axes)


@pytest.mark.parametrize("options", [{"mode": "clip"}, {"mode": "fill", "fill_value": 0.0}])
def test_models_that_say_what_happens_out_of_range_are_taken(options):
    def padded():
        f = numpyro.sample("f", dist.Normal(0.0, 1.0).expand([3]))
        eta = f.at[np.array([0, 1, 3])].get(**options)
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=np.ones(3))

    last = np.asarray(read_latent_gaussian(padded).form({}).design.to_dense())[2]
    np.testing.assert_array_equal(last, [0.0, 0.0, 1.0] if options["mode"] == "clip" else np.zeros(3))


@pytest.mark.thorough
def test_sites_without_elements():
    """A factor model of rank 0 is the model without factors."""
    x, y = np.linspace(-1.0, 1.0, 6), np.array([0, 1, 1, 0, 2, 1])

    def model(rank):
        loadings = numpyro.param("loadings", jnp.ones((2, rank)))
        with numpyro.plate("users", 3):
            taste = numpyro.sample("taste", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))
            own = numpyro.sample("own", dist.MultivariateNormal(jnp.zeros(2), 0.5 * jnp.eye(2) + 0.2))
        utility = numpyro.deterministic("utility", taste @ loadings.T + own)
        numpyro.sample("y", dist.Poisson(jnp.exp(0.1 * x + utility.reshape(-1))), obs=y)

    def without():
        with numpyro.plate("users", 3):
            own = numpyro.sample("own", dist.MultivariateNormal(jnp.zeros(2), 0.5 * jnp.eye(2) + 0.2))
        numpyro.sample("y", dist.Poisson(jnp.exp(0.1 * x + own.reshape(-1))), obs=y)

    engine, plain = EP(model, progress_bar=False), EP(without, progress_bar=False)
    engine.run(jax.random.key(0), 0)
    plain.run(jax.random.key(0))
    np.testing.assert_allclose(engine.log_evidence, plain.log_evidence, rtol=1e-12)
    np.testing.assert_allclose(engine.posterior["utility"].mean, plain.posterior["own"].mean, rtol=1e-9)
    assert engine.posterior["taste"].mean.shape == (3, 0)
    assert engine.get_samples()["taste"].shape == (1000, 3, 0)
