"""Many people who compare a few items each: the same answers as with all unknowns of all people at once."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.infer import EP, INLA, LaplaceApproximation, VariationalGaussian, rank_summary
from numpyro_ext.infer.gaussian.algorithms.posterior import GaussianPosterior, gaussian_prior
from numpyro_ext.linalg.gaussian.spaces.touched_space import TouchedSpace
from numpyro_ext.models import collaborative_preferences
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from numpyro_ext.structure.latent_gaussian import touched as module
from numpyro_ext.structure.latent_gaussian.costs import LayoutCosts
from tests.readings import log_densities, with_layouts
from tests.tiers import few

from .grammar_of_comparisons import random_comparison_model

NUM_USERS, NUM_ITEMS = 9, 12
NEW = np.array([3, 5, 2]), np.array([0, 8, 2]), np.array([9, 1, 3]), np.array([1, 0, 1])
PAIRS_OF = [3, 1, 0, 40, 2, 5, 8, 3, 3]


ALWAYS = {"touched": 0.0, "touched_gain": 0.0, "bucket": 0.0}
"""Takes what rows touch of blocks of any size, in as many buckets as there may be."""
read_touched = partial(read_latent_gaussian, costs=LayoutCosts(**ALWAYS))


def comparisons(seed=0, pairs_of=PAIRS_OF, compared=7):
    """Pairs among the first items: repeats, contradictions, users without any, items that nobody has compared."""
    rng = np.random.default_rng(seed)
    user = np.repeat(np.arange(NUM_USERS), pairs_of)
    first = rng.integers(0, compared, user.size)
    second = (first + rng.integers(1, compared, user.size)) % compared
    return user, first, second, rng.integers(0, 2, user.size)


def options(rank=2):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(NUM_ITEMS, 2))
    kernel = np.exp(-np.sum((x[:, None] - x) ** 2, -1)) + 0.1 * np.eye(NUM_ITEMS)
    return {"num_users": NUM_USERS, "kernel": kernel, "rank": rank}


def given(rank=2):
    rng = np.random.default_rng(2)
    return {"b": rng.normal(size=NUM_ITEMS), "sigma": 0.7} | ({"V": rng.normal(size=(NUM_ITEMS, rank))} if rank else {})


def conditioned(reading, is_touched, hyper, data, precision, shift):
    """Log partition, moments of rows and unknowns, and of all sites, given sites on the rows."""
    form = reading.form(hyper, data)
    posterior = GaussianPosterior(form if is_touched else form._replace(touched=None), precision, shift)
    marginals = posterior.condition().marginals()
    maps = {name: (*posterior.mean_and_variance(m), posterior.covariance(m)) for name, m in reading.maps(hyper).items()}
    return marginals.log_partition, (marginals[:3], posterior.mean, maps)


def check_random_models(seeds):
    for seed in seeds:
        model = random_comparison_model(seed)
        reading = read_touched(model, check=False)
        form, reference = log_densities(reading, jax.random.key(seed), spreads=(0.1, 0.7)).T
        np.testing.assert_allclose(form, reference, rtol=1e-9, atol=1e-8, err_msg=f"{seed}: {model.description}")
        assert isinstance(jax.eval_shape(gaussian_prior, reading.abstract_form), TouchedSpace), model.description
        rng, hyper = np.random.default_rng(seed), reading.initial_hyper()
        size = reading.abstract_form.num_rows
        sites = jnp.asarray(rng.gamma(1.0, size=size) * (rng.random(size) < 0.8)), jnp.asarray(rng.normal(size=size))

        def both(hyper, reading=reading, sites=sites):
            return [
                jax.value_and_grad(partial(conditioned, reading, is_touched), has_aux=True)(hyper, reading.data, *sites)
                for is_touched in (True, False)
            ]

        ours, dense = jax.jit(both)(hyper)
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9, err_msg=f"{seed}: {model.description}"),
            ours,
            dense,
        )


@pytest.mark.first
@pytest.mark.thorough
@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_random_models(seed):
    check_random_models([seed])


@pytest.mark.slow
@pytest.mark.parametrize("share", range(8))
def test_two_hundred_random_models(share):
    check_random_models(range(1000 + 25 * share, 1025 + 25 * share))


def test_what_is_read():
    reading = read_touched(collaborative_preferences, comparisons(), options(), check=False)
    form = reading.abstract_form
    taste, own = form.prior
    assert (
        own.covariance.shape == (1, NUM_ITEMS, NUM_ITEMS)
        and own.count == NUM_USERS
        and own.size == NUM_USERS * NUM_ITEMS
    )
    # a user with 40 pairs among 7 items has 7 quantities, users with fewer pairs than items one for each pair
    assert max(width for _, width in form.touched.shapes) == 7
    assert sum(blocks for blocks, _ in form.touched.shapes) == sum(count > 0 for count in PAIRS_OF)
    assert "8 blocks of which rows touch a part" in reading.describe()


def test_small_models_and_those_without_a_gain_are_read_as_before():
    form = read_latent_gaussian(collaborative_preferences, comparisons(), options(), check=False).abstract_form
    assert form.touched is None and form.prior[1].count == NUM_USERS


def test_many_comparisons_of_all_items_are_read_by_item():
    user, first = np.repeat(np.arange(5), 6000), np.random.default_rng(0).integers(0, 40, 30_000)
    data = user, first, (first + 1) % 40, np.ones(user.size, int)
    kwargs = {"num_users": 5, "kernel": np.eye(40), "rank": 2}
    form = read_latent_gaussian(collaborative_preferences, data, kwargs, check=False).abstract_form
    assert form.touched.shapes == ((5, 40),)  # neither a cube of the pairs nor a matrix of them


def test_one_person_with_most_comparisons_does_not_widen_all_others():
    user = np.repeat(np.arange(41), [5000, *[10] * 40])
    first = np.random.default_rng(0).integers(0, 60, user.size)
    data = user, first, (first + 1 + user) % 60, np.ones(user.size, int)
    kwargs = {"num_users": 41, "kernel": np.eye(60), "rank": 0}
    form = read_latent_gaussian(collaborative_preferences, data, kwargs, check=False).abstract_form
    (most, few), (one, all_items) = form.touched.shapes
    assert most >= 40 and few <= 20 and (one, all_items) == (1, 60)


ENGINES = {
    "ep": EP,
    "variational": VariationalGaussian,
    "jaakkola": VariationalGaussian,
    "laplace": LaplaceApproximation,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ENGINES)
def test_engines_agree_with_all_unknowns_at_once(name):
    link, bound = ("logit", {"bound": name}) if name == "jaakkola" else ("probit", {})
    found = []
    for is_touched in (False, True):
        chosen = with_layouts(ENGINES[name], **ALWAYS) if is_touched else ENGINES[name]
        engine = chosen(collaborative_preferences, hyper_values=given(), progress_bar=False, tol=1e-10, **bound)
        engine.run(jax.random.key(0), *comparisons(), **options(), link=link)
        assert (engine._run.reading.abstract_form.touched is not None) == is_touched
        new = engine.log_predictive(*NEW, **options(), link=link)["won"]
        utility = engine.posterior["utility"]
        found.append((float(engine.log_evidence), utility.mean, utility.variance, new))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-7, atol=1e-8), *found)


def own_scale(user, first, second, won=None, *, kernel):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("users", NUM_USERS):
        own = numpyro.sample("own", dist.MultivariateNormal(jnp.zeros(NUM_ITEMS), kernel))
    f = scale * own
    numpyro.sample("won", dist.Bernoulli(logits=f[user, first] - f[user, second]), obs=won)


@pytest.mark.thorough
def test_hyperparameters_are_integrated_over():
    found = []
    for is_touched in (False, True):
        chosen = with_layouts(INLA, **ALWAYS, large_site=50) if is_touched else INLA
        engine = chosen(own_scale, marginal="gaussian", progress_bar=False)
        engine.run(jax.random.key(0), *comparisons(), kernel=options()["kernel"])
        part = engine.posterior["own"][[3, 7]]
        assert isinstance(part.mean, jax.Array) and part.shape == (2, NUM_ITEMS)
        draws = part.sample(jax.random.key(1), 4000)
        np.testing.assert_allclose(draws.std(0), part.sd, rtol=0.1)
        found.append((float(engine.log_evidence), part.mean, part.sd, part.covariance(), part.quantile(0.1)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *found)


@pytest.mark.thorough
def test_large_sites_are_answered_for_those_asked_for(monkeypatch):
    whole = with_layouts(EP, **ALWAYS)(collaborative_preferences, hyper_values=given(), progress_bar=False)
    whole.run(jax.random.key(0), *comparisons(), **options())
    engine = with_layouts(EP, **ALWAYS, large_site=50)(
        collaborative_preferences, hyper_values=given(), progress_bar=False
    )
    engine.run(jax.random.key(0), *comparisons(), **options())
    assert set(engine.posterior) == {"taste", *given()} and "utility" in engine.posterior
    for index in ([3, 7], 2, (slice(None), 4)):  # also of a user without rows, and of an item that nobody compared
        found, expected = engine.posterior["utility"][index], whole.posterior["utility"][index]
        assert found.shape == expected.shape
        for part in ("mean", "sd"):
            np.testing.assert_allclose(getattr(found, part), getattr(expected, part), atol=1e-10)
        np.testing.assert_allclose(found.covariance(), expected.covariance(), atol=1e-10)
    draws = engine.posterior["utility"][3].sample(jax.random.key(1), 4000)
    np.testing.assert_allclose(np.cov(draws.T), engine.posterior["utility"][3].covariance(), atol=0.15)
    expected_rank = rank_summary(whole, "utility", users=[3, 7]).expected_rank
    monkeypatch.setattr(engine, "get_samples", None)  # which would draw the utilities of all users
    np.testing.assert_allclose(rank_summary(engine, "utility", users=[3, 7]).expected_rank, expected_rank, atol=0.5)
    with pytest.raises(ValueError, match=r"108 elements: ask for some of them.*\['utility'\]\[\[0, 1\]\]"):
        engine.posterior["utility"].mean  # noqa: B018


def means_of_cells(y, num_cells):
    mean = numpyro.param("mean", jnp.zeros(num_cells))
    with numpyro.plate("cells", num_cells):
        f = numpyro.sample("f", dist.Normal(mean, 0.5))
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


@pytest.mark.thorough
@pytest.mark.parametrize("num_cells", few([50, 51], 1))
def test_curvature_is_computed_for_few_numbers(num_cells):
    engine = LaplaceApproximation(means_of_cells, progress_bar=False)
    engine.run(jax.random.key(0), np.arange(num_cells) % 5 + 1, num_cells)
    learning, is_few = engine.diagnostics.hyper, num_cells <= 50
    assert engine.diagnostics.converged and learning.converged
    assert (engine.hyper["mean"].standard_error is not None) == is_few
    assert (learning.num_evaluations > 100) == is_few
    assert ("more than 50 numbers" in " ".join(engine.diagnostics.messages)) != is_few
    assert is_few or engine.last_state.search.probes.size == 2 * num_cells  # no room for what is not found


@pytest.mark.thorough
def test_runs_from_files_answer_the_same(tmp_path):
    engine = with_layouts(EP, **ALWAYS, large_site=50)(
        collaborative_preferences, hyper_values=given(), progress_bar=False
    )
    engine.run(jax.random.key(0), *comparisons(), **options())
    engine.save(tmp_path / "run")
    again = type(engine).load(tmp_path / "run", collaborative_preferences)
    np.testing.assert_array_equal(again.posterior["own"][3].mean, engine.posterior["own"][3].mean)


@pytest.mark.thorough
def test_draws_have_the_moments_of_the_posterior():
    form = read_touched(collaborative_preferences, comparisons(), options(), check=False).form(given())
    rng = np.random.default_rng(0)
    size = form.num_rows
    posterior = GaussianPosterior(form, jnp.asarray(rng.gamma(1.0, size=size)), jnp.asarray(rng.normal(size=size)))
    draws = np.asarray(posterior.sample(jax.random.key(0), 20_000))
    dense = GaussianPosterior(
        form._replace(touched=None), posterior.site_precision, posterior.site_shift, "coefficient"
    )
    covariance = np.asarray(dense.condition()._block_covariance().apply(jnp.eye(form.num_columns)))
    deviation = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(draws.mean(0), dense.mean, atol=5.0 * deviation.max() / np.sqrt(20_000))
    correlation = (np.cov(draws.T) - covariance) / np.outer(deviation, deviation)
    assert np.abs(correlation).max() < 6.0 / np.sqrt(20_000)


def test_other_comparisons_of_the_same_shape_compile_nothing():
    user, first, second, won = comparisons()
    items = np.random.default_rng(3).permutation(NUM_ITEMS)
    keys = [
        read_touched(collaborative_preferences, data, options(), check=False).structure
        for data in ((user, first, second, won), (user, items[first], items[second], 1 - won))
    ]
    assert keys[0] == keys[1]


@pytest.mark.thorough
def test_quantities_that_are_not_those_of_the_rows_are_refused(monkeypatch):
    build = module.TouchedRows.build

    def wrong(self, *args):
        found = build(self, *args)
        return dataclasses.replace(found, rows=found.rows.scale_rows(jnp.arange(found.rows.num_rows) % 7 - 3.0))

    monkeypatch.setattr(module.TouchedRows, "build", wrong)
    with pytest.raises(ModelStructureError, match="misread"):
        read_touched(collaborative_preferences, comparisons(pairs_of=[2, 9, 4, 1, 1, 3, 3, 2, 2]), options())


def in_another_order(user, first, second, order, won=None, *, kernel):
    with numpyro.plate("users", NUM_USERS):
        own = numpyro.sample("own", dist.MultivariateNormal(jnp.zeros(NUM_ITEMS), kernel))
    numpyro.deterministic("ordered", own[order])
    numpyro.sample("won", dist.Bernoulli(logits=own[user, first] - own[user, second]), obs=won)


@pytest.mark.thorough
def test_elements_of_large_sites_are_found_by_indices_of_the_data():
    *compared, won = comparisons()
    order, found = np.random.default_rng(0).permutation(NUM_USERS), []
    for options_of_layout in (ALWAYS, ALWAYS | {"large_site": 50}):
        engine = with_layouts(EP, **options_of_layout)(in_another_order, progress_bar=False)
        engine.run(jax.random.key(0), *compared, order, won, kernel=options()["kernel"])
        found.append([engine.posterior[name][index] for name, index in (("own", order[[3, 7]]), ("ordered", [3, 7]))])
    assert engine._run.reading.large_sites == ("own", "ordered")
    for part in ("mean", "sd"):
        expected, *others = (getattr(answer, part) for answers in found for answer in answers)
        for other in others:
            np.testing.assert_allclose(other, expected, atol=1e-10)
