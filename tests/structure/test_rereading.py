"""What was read of a model serves the data of its next run, unless something that was looked up in the data differs."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import expit
from numpyro import handlers

from numpyro_ext.infer import EP, cross_validate
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from numpyro_ext.structure.model import verification
from numpyro_ext.structure.model.running import inspection
from tests.readings import forget_readings

pytestmark = pytest.mark.usefixtures("no_faults")

LABELS = np.repeat(np.arange(4), 3)
SPARSE = np.kron(np.eye(5), [[1.0], [2.0]])


def intercepts(group, y, mask=True):
    level = numpyro.sample("level", dist.Normal(0, 2))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(level, spread))
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Poisson(jnp.exp(effect[group])), obs=y)


def regression(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(x @ slope, noise), obs=y)


def bounded(x, y, upper):
    scale = numpyro.sample("scale", dist.Uniform(0.0, upper))
    slope = numpyro.sample("slope", dist.Normal(0, scale))
    numpyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)


def saturated(limit, y, mask=True):
    f = numpyro.sample("f", dist.Normal(0, 1).expand([len(y)]).to_event(1))
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Bernoulli(probs=expit(jnp.clip(f, -limit, limit))), obs=y)


def counts(number):
    return np.random.default_rng(number).poisson(2.0 + 4.0 * LABELS)


def real(number, size=10):
    return np.random.default_rng(number).standard_normal(size)


LIMITS = np.full(8, 50.0)
OUTCOMES = np.arange(8) % 3 % 2
SAME = {
    "other observations": (intercepts, (LABELS, counts(0)), (LABELS, counts(1))),
    "another mask": (intercepts, (LABELS, counts(0), LABELS > 0), (LABELS, counts(1), LABELS < 3)),
    "other inputs": (regression, (real(0, (10, 2)), real(1)), (real(2, (10, 2)), real(3))),
    "other numbers at the same places": (regression, (SPARSE, real(1)), (3.0 * SPARSE, real(3))),
    "a link behind other numbers": (saturated, (LIMITS, OUTCOMES), (LIMITS + 1.0, 1 - OUTCOMES)),
    "a link under another mask": (saturated, (LIMITS, OUTCOMES, OUTCOMES > 0), (LIMITS, OUTCOMES, OUTCOMES < 1)),
}
OTHER = {
    "other labels": (intercepts, (LABELS, counts(0)), (LABELS[::-1].copy(), counts(1))),
    "other places of zeros": (regression, (SPARSE, real(1)), (SPARSE[::-1].copy(), real(3))),
    "no zeros": (regression, (SPARSE, real(1)), (SPARSE + 1.0, real(3))),
    "another bound": (bounded, (real(0), real(1), jnp.array(2.0)), (real(0), real(1), jnp.array(3.0))),
    "another link": (saturated, (LIMITS, OUTCOMES), (np.where(np.arange(8) == 5, 2.0, LIMITS), OUTCOMES)),
}


def contents(reading):
    hyper = reading.initial_hyper()
    white = jnp.cos(jnp.arange(reading.num_columns))
    found = reading.form(hyper), reading.maps(hyper), reading.log_prior(hyper), hyper, reading.values(hyper, white)
    shown = reading.describe(), reading.field, tuple(reading.hyper), reading.affine_sites, reading.predictive
    return jax.tree.leaves(found), shown, reading.structure, reading.key


def check_equal(reading, model, args):
    forget_readings()
    anew = read_latent_gaussian(model, args)
    assert anew.plans is not reading.plans
    (leaves, *rest), (expected, *others) = contents(reading), contents(anew)
    assert rest == others
    for x, y in zip(leaves, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    observed = [name for name, site in anew.sites.items() if site.kind == "observed"]
    for name in observed:
        np.testing.assert_array_equal(reading.sites[name].value, anew.sites[name].value)


@pytest.mark.parametrize("case", SAME)
def test_what_was_read_serves_other_data(case):
    model, first, second = SAME[case]
    before = read_latent_gaussian(model, first)
    again = read_latent_gaussian(model, second)
    assert again.plans is before.plans
    check_equal(again, model, second)


@pytest.mark.parametrize("case", OTHER)
def test_what_was_looked_up_in_the_data_is_looked_up_again(case):
    model, first, second = OTHER[case]
    before = read_latent_gaussian(model, first)
    other = read_latent_gaussian(model, second)
    assert other.plans is not before.plans
    check_equal(other, model, second)
    # And the last one serves what is like it.
    assert read_latent_gaussian(model, second).structure == other.structure


def test_what_is_kept_holds_no_data():
    reading = read_latent_gaussian(regression, (real(0, (10, 2)), real(1)), check=False)
    assert not reading._program.data
    kept = reading.structure.value
    assert reading.serves_other_data and kept.model is None
    assert not (kept.args or kept._program.data)
    held = kept.data, kept.sites, [site.init for site in kept.hyper.values()]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct | str | int) for leaf in jax.tree.leaves(held))
    assert not any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(reading.looked_up))


def test_negative_labels_are_refused_where_they_are_the_same_elements():
    read_latent_gaussian(intercepts, (LABELS, counts(0)))
    with pytest.raises(ModelStructureError, match="negative"):
        read_latent_gaussian(intercepts, (np.where(LABELS == 3, -1, LABELS), counts(1)))


@pytest.mark.thorough
def test_answers_are_those_of_a_reading_of_their_own():
    engine = EP(intercepts, integrate="none", progress_bar=False)
    engine.run(jax.random.key(0), LABELS, counts(0))
    engine.run(jax.random.key(1), LABELS, counts(1))
    scores = cross_validate(engine, jax.random.key(0), LABELS, counts(1), num_folds=3)
    forget_readings()
    other = EP(intercepts, integrate="none", progress_bar=False)
    other.run(jax.random.key(1), LABELS, counts(1))
    forget_readings()
    expected = cross_validate(other, jax.random.key(0), LABELS, counts(1), num_folds=3)
    assert float(engine.log_evidence) == float(other.log_evidence)
    np.testing.assert_array_equal(engine.posterior["effect"].mean, other.posterior["effect"].mean)
    np.testing.assert_array_equal(engine.get_samples()["spread"], other.get_samples()["spread"])
    np.testing.assert_array_equal(scores.log_predictive, expected.log_predictive)


def test_other_forms_of_a_covariance_are_not_computed(monkeypatch):
    fn = dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3) + 0.5)
    monkeypatch.setattr(dist.MultivariateNormal, "precision_matrix", property(lambda self: pytest.fail("asked for")))
    inspection._check_arrays("f", fn)


def test_the_density_is_compared_at_all_points_by_one_call(monkeypatch):
    asked = []
    compile_ = verification._compile

    def counted(*args):
        compiled, *others = compile_(*args)
        return lambda *inputs: asked.append(len(inputs[2])) or compiled(*inputs), *others

    monkeypatch.setattr(verification, "_compile", counted)
    read_latent_gaussian(regression, (real(0, (10, 2)), real(1)))
    assert asked == [3]
