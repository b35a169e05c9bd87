"""Rankings: their density against enumeration, draws against their density, and how engines read them."""

from functools import partial
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import MCMC, NUTS

from numpyro_ext import EP, LaplaceApproximation, VariationalGaussian, models
from numpyro_ext.distributions import PlackettLuce
from numpyro_ext.potentials.families.plackett_luce import PlackettLucePotential, ranking_places
from numpyro_ext.structure import ModelStructureError
from tests.tiers import thorough

UTILITIES = np.array([0.3, -0.7, 1.1, 0.2])
RANKINGS = np.array([[2, 0, 1, 3], [2, 3, -1, -1], [0, 9, 9, 9], [3, 1, 2, 0], [1, 2, 0, 0]])
NUM_RANKED = np.array([4, 2, 1, 4, 3])


def _by_stages(utilities, ranking, num_ranked):
    left, total = list(range(len(utilities))), 0.0
    for item in ranking[:num_ranked]:
        total += utilities[item] - np.log(np.exp(utilities[left]).sum())
        left.remove(item)
    return total


@pytest.mark.parametrize("num_ranked", [None, 0, 1, np.int32(3), jnp.array(4)])
def test_rankings_of_a_length_have_the_mass_of_choices_and_sum_to_one(num_ranked):
    size = 4 if num_ranked is None else int(num_ranked)
    values = np.array([(*r, *[-1] * (4 - size)) for r in permutations(range(4), size)])
    found = np.asarray(jax.jit(PlackettLuce(UTILITIES, num_ranked).log_prob)(values))
    np.testing.assert_allclose(found, [_by_stages(UTILITIES, r, size) for r in values], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(np.exp(found).sum(), 1.0, rtol=1e-12)


def test_draws_have_the_density():
    draws = np.asarray(PlackettLuce(UTILITIES, 2).sample(random.key(0), (20_000,)))
    assert (draws[:, 2:] == -1).all()
    for first, second in permutations(range(4), 2):
        mass = np.exp(_by_stages(UTILITIES, (first, second), 2))
        share = np.mean((draws[:, 0] == first) & (draws[:, 1] == second))
        np.testing.assert_allclose(share, mass, atol=4 * np.sqrt(mass / len(draws)))
    both = PlackettLuce(np.zeros((3, 1, 4)), np.array([1, 4]))
    assert both.batch_shape == (3, 2) and both.sample(random.key(1), (5,)).shape == (5, 3, 2, 4)


@pytest.mark.parametrize("bad", [[0, 0, 1, 2], [0, 1, 2, 4], [0, 1, -1, 3], [0, 1, 2, 2.5]])
def test_what_is_no_ranking_has_no_mass_and_is_refused(bad):
    rankings = PlackettLuce(UTILITIES, validate_args=False)
    assert not rankings.support(np.array(bad)) and np.isnan(rankings.log_prob(np.array(bad)))
    with pytest.raises(ValueError, match="two items or more"):
        PlackettLuce(np.zeros(1))

    def model(given):
        strength = numpyro.sample("strength", dist.Normal(0, 1).expand([4]).to_event(1))
        numpyro.sample("ranking", PlackettLuce(jnp.broadcast_to(strength, (2, 4))), obs=given)

    with pytest.raises(ModelStructureError, match=r"different ones of the items 0, ..., 3.*break ties at random"):
        LaplaceApproximation(model).run(random.key(0), jnp.array([[0, 1, 2, 3], bad]))


def test_derivatives_are_those_of_the_density():
    potential = PlackettLucePotential(ranking_places(RANKINGS, NUM_RANKED, 4))
    value, gradient, hessian = jax.jit(potential.derivatives)(UTILITIES)
    expected = [_by_stages(UTILITIES, r, n) for r, n in zip(RANKINGS, NUM_RANKED, strict=True)]
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    density = potential.log_density
    np.testing.assert_allclose(gradient, jax.jit(jax.jacobian(density))(UTILITIES), atol=1e-12)
    np.testing.assert_allclose(hessian, jax.jit(jax.hessian(density))(UTILITIES), atol=1e-12)


def staged(num_ranked, rankings, num_items):
    """The same model with a categorical site for each place."""
    with numpyro.plate("items", num_items):
        strength = numpyro.sample("strength", dist.Normal(0.0, 1.0))
    for ranking, number in zip(rankings, num_ranked, strict=True):
        left = np.arange(num_items)
        for place, item in enumerate(ranking[:number]):
            if left.size > 1:
                choice = int(np.flatnonzero(left == item)[0])
                numpyro.sample(f"{ranking}{place}", dist.Categorical(logits=strength[left]), obs=choice)
            left = left[left != item]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "engine", [VariationalGaussian, *thorough(LaplaceApproximation, partial(VariationalGaussian, bound="log"))]
)
def test_engines_read_rankings_as_choices_one_after_the_other(engine):
    options = {"progress_bar": False, "tol": 1e-9}
    run = engine(models.plackett_luce, hyper_values={"scale": 1}, **options)
    run.run(random.key(0), list(NUM_RANKED), RANKINGS.tolist(), num_items=4)
    other = engine(staged, **options)
    other.run(random.key(0), NUM_RANKED, RANKINGS, 4)
    np.testing.assert_allclose(run.log_evidence, other.log_evidence, rtol=1e-7)
    for moment in ("mean", "variance"):
        found, expected = (getattr(each.posterior["strength"], moment) for each in (run, other))
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_expectation_propagation_says_what_to_take_in_its_place():
    with pytest.raises(ModelStructureError, match="VariationalGaussian .* as comparisons of two items"):
        EP(models.plackett_luce).run(random.key(0), NUM_RANKED, RANKINGS, num_items=4)


@pytest.mark.thorough
def test_samples_agree_with_the_variational_posterior():
    fixed = handlers.condition(models.plackett_luce, {"scale": jnp.array(1.0)})
    mcmc = MCMC(NUTS(fixed), num_warmup=300, num_samples=2000, progress_bar=False)
    mcmc.run(random.key(0), NUM_RANKED, RANKINGS, num_items=4)
    draws = np.asarray(mcmc.get_samples()["strength"])
    run = VariationalGaussian(models.plackett_luce, hyper_values={"scale": 1}, progress_bar=False)
    run.run(random.key(0), NUM_RANKED, RANKINGS, num_items=4)
    np.testing.assert_allclose(run.posterior["strength"].mean, draws.mean(0), atol=0.1)


@pytest.mark.thorough
def test_rankings_under_a_mask_may_hold_anything():
    def model(kept, num_ranked, rankings):
        strength = numpyro.sample("strength", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        with numpyro.plate("rankings", len(rankings)), handlers.mask(mask=kept):
            numpyro.sample("ranking", PlackettLuce(strength, num_ranked, validate_args=False), obs=rankings)

    found = []
    for kept in (np.arange(5) < 4, np.ones(4, bool)):
        rankings = np.where(np.arange(5)[:, None] < 4, RANKINGS, 2)[: kept.size]
        run = LaplaceApproximation(model, progress_bar=False)
        run.run(random.key(0), kept, NUM_RANKED[: kept.size], rankings)
        found.append(run.log_evidence)
    np.testing.assert_allclose(*found, rtol=1e-10)


def test_only_entrants_compete():
    values = {"scale": 1.0, "strength": UTILITIES}
    entrants, order = np.array([[2, 0, 3], [1, 3, 0]]), np.array([[0, 1, 2], [2, 0, 1]])

    @jax.jit
    def density(values):
        site = handlers.trace(handlers.substitute(models.plackett_luce, values)).get_trace(
            [3, 2], order, num_items=4, entrants=entrants
        )["ranking"]
        return site["fn"].log_prob(site["value"])

    expected = [_by_stages(UTILITIES[e], o, n) for e, o, n in zip(entrants, order, (3, 2), strict=True)]
    np.testing.assert_allclose(density(values), expected, rtol=1e-12)
