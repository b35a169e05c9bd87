"""Exact draws where the field is integrated out by quadrature, against sums over a grid of one's own and NUTS."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density
from scipy import stats
from scipy.special import expit, logsumexp

from numpyro_ext.infer import AdaptiveQuadrature, IndependenceMetropolis, PosteriorReparam, marginalize
from numpyro_ext.infer.exact.reparam import LATENT
from numpyro_ext.infer.exact.rotations import Rotations
from numpyro_ext.infer.exact.sampling import ExactSamples
from numpyro_ext.infer.gaussian.algorithms.nodes.shared_columns import SharedColumns


def items(answers, weights=1.0):
    """Slopes and intercepts with priors, and a quantity computed of them."""
    with numpyro.plate("items", answers.shape[1]):
        slope = numpyro.sample("slope", dist.LogNormal(0.0, 0.5))
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 3.0))
        numpyro.deterministic("difficulty", -intercept / slope)
    with numpyro.plate("people", answers.shape[0]):
        trait = numpyro.sample("trait", dist.Normal(0.0, 1.0))
    with numpyro.handlers.scale(scale=weights):
        numpyro.sample("answers", dist.Bernoulli(logits=slope * trait[:, None] + intercept), obs=answers)


def simulated(num_people, num_items):
    rng = np.random.default_rng(0)
    trait, slope, intercept = rng.normal(size=(num_people, 1)), np.exp(0.3 * rng.normal(size=num_items)), 0.5
    return (rng.random((num_people, num_items)) < expit(slope * trait + intercept)).astype(int)


ANSWERS = simulated(40, 3)
GRID = np.linspace(-9.0, 9.0, 181)


def log_posterior(slope, intercept, answers=ANSWERS, weights=1.0):
    """Log density of items and answers, traits summed out on a grid of one's own."""
    eta = np.multiply.outer(GRID, np.asarray(slope)) + np.asarray(intercept)
    terms = (weights * answers) @ np.log(expit(eta)).T + (weights * (1 - answers)) @ np.log(expit(-eta)).T
    people = logsumexp(terms + stats.norm.logpdf(GRID), axis=1) + np.log(GRID[1] - GRID[0])
    return people.sum() + stats.lognorm.logpdf(slope, 0.5).sum() + stats.norm.logpdf(intercept, 0.0, 3.0).sum()


def fitted(answers=ANSWERS, model=items, **options):
    engine = AdaptiveQuadrature(model, progress_bar=False, **options)
    engine.run(random.key(0), jnp.asarray(answers))
    return engine


@pytest.fixture(scope="module")
def at_optimum():
    with pytest.warns(UserWarning, match="set to a point"):
        return fitted(integrate="none")


WEIGHTS = np.linspace(0.5, 2.0, 40)[:, None]
"""A weight of the answers of each person."""


@pytest.mark.parametrize("weights", [1.0, 0.5, WEIGHTS, WEIGHTS * np.array([1.0, 2.0, 0.3])])
def test_marginal_density_and_its_gradient(weights):
    """With weights too there is one table for all people."""
    marginal, arguments = marginalize(items, AdaptiveQuadrature), (jnp.asarray(ANSWERS), weights)
    generator = np.random.default_rng(1)
    place = {"slope": np.exp(0.3 * generator.normal(size=3)), "intercept": generator.normal(size=3)}
    value, gradient = jax.value_and_grad(lambda p: log_density(marginal, arguments, {}, p)[0])(place)
    assert isinstance(marginal._last.algorithm, SharedColumns)
    np.testing.assert_allclose(value, log_posterior(**place, weights=weights), rtol=1e-10)
    for name in place:
        step = {n: 1e-5 * np.eye(3) if n == name else np.zeros((3, 3)) for n in place}
        up, down = (
            [log_posterior(**{n: place[n] + s * step[n][i] for n in place}, weights=weights) for i in range(3)]
            for s in (1, -1)
        )
        np.testing.assert_allclose(gradient[name], (np.array(up) - down) / 2e-5, rtol=1e-6, atol=1e-6)


def test_too_few_nodes_are_told_of_at_the_draws():
    marginal = marginalize(items, AdaptiveQuadrature, num_nodes=9)
    draws = {"slope": np.full((2, 3), 4.0), "intercept": np.zeros((2, 3))}
    with pytest.warns(UserWarning, match="finer rule than 9 nodes.*at the last draw changes by.*num_nodes"):
        marginal.recover(random.key(0), draws, jnp.asarray(ANSWERS))


def test_density_in_the_coordinates_of_the_items(at_optimum):
    """Traits are no coordinates, and the density is that of the items alone times the volume of the map."""
    reparam = PosteriorReparam(at_optimum)
    assert reparam.coordinates.names == ("slope", "intercept") and reparam.coordinates.size == 6
    found, expected = [], []
    for white in 0.5 * np.random.default_rng(2).normal(size=(3, 6)):
        found.append(log_density(reparam.reparam(), (jnp.asarray(ANSWERS),), {}, {LATENT: jnp.asarray(white)})[0])
        draw = {name: np.asarray(value) for name, value in reparam.transform_sample(jnp.asarray(white)).items()}
        expected.append(log_posterior(**draw) + np.log(draw["slope"]).sum())  # the map is linear in the log of slopes
    np.testing.assert_allclose(np.diff(found), np.diff(expected), rtol=1e-9)


def test_param_sites_alone_leave_nothing_to_sample():
    def model(answers):
        intercept = numpyro.param("intercept", jnp.zeros(answers.shape[1]))
        with numpyro.plate("people", answers.shape[0]):
            trait = numpyro.sample("trait", dist.Normal(0.0, 1.0))
        numpyro.sample("answers", dist.Bernoulli(logits=trait[:, None] + intercept), obs=answers)

    with pytest.raises(ValueError, match=r"param sites or given \(intercept\).*get_samples"):
        fitted(model=model).sample_exactly(random.key(0))


def _gap(draws, others, size, other_size):
    """Largest gap of means in their own standard errors, from effective sizes."""
    error = np.sqrt(draws.var(0) / size + others.var(0) / other_size)
    return np.max(np.abs(draws.mean(0) - others.mean(0)) / error)


@pytest.fixture(scope="module")
def by_nuts():
    whole = MCMC(NUTS(items), num_warmup=500, num_samples=4000, progress_bar=False)
    whole.run(random.key(1), jnp.asarray(ANSWERS))
    return {name: np.asarray(value) for name, value in whole.get_samples().items()}


@pytest.mark.thorough
@pytest.mark.parametrize("is_free", [True, False])
def test_items_and_people_are_those_of_nuts_on_the_whole_model(is_free, at_optimum, by_nuts):
    """Draws with and without turns that have no kicks are those of NUTS."""
    engine = at_optimum if is_free else fitted()
    reparam = PosteriorReparam(engine)
    kernel = Rotations(reparam, 4, 0.8, enough_free=0.0 if is_free else 2.0)
    options = {"num_warmup": 200, "num_samples": 1000, "num_chains": 4, "progress_bar": False}
    exact = ExactSamples(engine, reparam, kernel, **options)
    exact.run(random.key(2), jnp.asarray(ANSWERS))
    num_steps = np.asarray(exact.get_extra_fields(group_by_chain=True)["num_steps"])[0]
    assert (num_steps == 0).sum() == (950 if is_free else 0)  # one in twenty keeps its kicks
    draws = exact.get_samples(group_by_chain=True)
    assert {name: value.shape[2:] for name, value in draws.items()} == {
        "slope": (3,), "intercept": (3,), "difficulty": (3,), "trait": (40,)
    }  # fmt: skip
    np.testing.assert_allclose(draws["difficulty"], -draws["intercept"] / draws["slope"], rtol=1e-9)
    for name, transform in (("slope", np.log), ("intercept", np.array), ("trait", np.array)):
        ours, other = transform(np.asarray(draws[name])), transform(by_nuts[name])
        for power in (np.array, np.square):
            sizes = effective_sample_size(power(ours)).min(), effective_sample_size(power(other)[None]).min()
            flat = power(ours).reshape(-1, ours.shape[-1])
            assert _gap(flat, power(other), *sizes) < 5.0, name
    assert exact.agreement["trait"].word == "holds"


@pytest.mark.thorough
def test_people_are_drawn_once_and_by_the_model_of_the_run(at_optimum):
    exact = at_optimum.sample_exactly(random.key(3), 400, num_chains=2, num_warmup=50)
    assert "trait" not in exact._states["z"]
    first, again = exact.get_samples()["trait"], exact.get_samples(group_by_chain=True)["trait"]
    np.testing.assert_array_equal(first.reshape(2, 400, 40), again)
    exact.post_warmup_state = exact.last_state
    exact.run(random.key(4), jnp.asarray(ANSWERS))
    assert not np.array_equal(exact.get_samples()["trait"], first)


@pytest.mark.thorough
def test_far_coordinates_keep_their_kicks(at_optimum):
    """With widths of a third, turns without kicks are refused too often."""
    right = PosteriorReparam(at_optimum).coordinates
    vars(at_optimum._run)["_coordinates"] = dataclasses.replace(right, scale=right.scale / 3.0)
    try:
        exact = at_optimum.sample_exactly(random.key(5), 400, num_warmup=100)
    finally:
        vars(at_optimum._run)["_coordinates"] = right
    assert exact.last_state.adaptation.free_accept_prob < 0.7
    assert np.all(np.asarray(exact.get_extra_fields()["num_steps"]) > 0)


@pytest.mark.thorough
@pytest.mark.parametrize("num_items", [8, 20])
def test_many_hyperparameters_have_coordinates_in_all_directions(num_items):
    """Sixty adaptive points are of unequal mass, and 64 in opposite pairs span no more than 32 directions."""
    answers = simulated(300, num_items)
    engine = fitted(answers)
    exact = engine.sample_exactly(random.key(7), 300)
    widths = np.std(np.asarray(exact._states["z"][LATENT]), axis=(0, 1))
    assert widths.shape == (2 * num_items,) and 0.7 < widths.min() and widths.max() < 1.5
    mcmc = MCMC(IndependenceMetropolis(engine), num_warmup=0, num_samples=200, progress_bar=False)
    mcmc.run(random.key(6), jnp.asarray(answers))
    assert mcmc.last_state.mean_accept_prob > 0.5
