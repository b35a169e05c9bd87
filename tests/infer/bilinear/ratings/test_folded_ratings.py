"""New people and items of a fit of ratings: by quadrature of all that is theirs, and as members of the fit."""

from functools import cache, partial

import jax
import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import gamma, norm

from numpyro_ext.infer import BilinearEP
from numpyro_ext.infer.bilinear.marginals.newcomer_groups import groups_of
from numpyro_ext.models import heteroscedastic_ratings

KEY = jax.random.key(0)
NUM_USERS, NUM_ITEMS, NEW = 30, 12, (3, 7)
LEVELS = {"num_items": NUM_ITEMS, "num_levels": 4}
needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")


def simulated(rank):
    """Ratings of the model, four of five."""
    rng = np.random.default_rng(rank)
    user, item = np.divmod(np.sort(rng.permutation(NUM_USERS * NUM_ITEMS)[: NUM_USERS * NUM_ITEMS * 4 // 5]), NUM_ITEMS)
    value = (2.0 * rng.normal(size=(NUM_USERS, rank))[user] * rng.normal(size=(NUM_ITEMS, rank))[item]).sum(1)
    value += 2.0 * np.exp(0.5 * rng.normal(size=NUM_USERS))[user] * rng.normal(size=user.size)
    return user, item, np.sum(value[:, None] > np.array([-4.0, 0.0, 4.0]), axis=1)


@cache
def fit(rank, without=(), **options):
    user, item, rating = simulated(rank)
    kept = ~np.isin(user, without)
    user = np.unique(user[kept], return_inverse=True)[1]
    model = partial(heteroscedastic_ratings, **options)
    engine = BilinearEP(model, damping=0.9, tol=1e-6, num_samples=50, progress_bar=False)
    engine.run(KEY, user, item[kept], rating[kept], num_users=NUM_USERS - len(without), rank=rank, **LEVELS)
    assert engine.diagnostics.converged
    return engine


def of_new(rank):
    user, item, rating = simulated(rank)
    mine = np.isin(user, NEW)
    return np.searchsorted(NEW, user[mine]), item[mine], rating[mine]


@pytest.fixture(scope="module")
def fitted():
    return fit(2, NEW)


def inverse_gamma(engine, site):
    """Shape and rate, from the moments that the engine tells."""
    mean, variance = (np.asarray(getattr(engine.posterior[site], name)) for name in ("mean", "variance"))
    shape = 2.0 + mean**2 / variance
    return shape, mean * (shape - 1.0)


def exact(engine, item, rating):
    """Weights of tastes and noise on a grid, by what the fit knows of all else, and the log of their sum."""
    shape, rate = inverse_gamma(engine, "variance_of_users")
    center, spread = float(engine.posterior["mean_of_users"].mean[0]), float((rate / shape)[0])
    u = center + np.sqrt(spread) * np.linspace(-5.0, 5.0, 161)
    log_weight = norm.logpdf(u, center, np.sqrt(spread))[:, None] + np.log(u[1] - u[0])
    noise, factor = np.array([10.0]), np.ones(NUM_ITEMS)
    if "row_noise" in engine.posterior:
        log_noise = np.linspace(-1.5, 4.0, 81)
        precision = np.exp(-log_noise)
        prior = gamma.logpdf(precision, 5.0, scale=1.0 / (5.0 * np.sqrt(10.0))) - log_noise
        log_weight = log_weight + prior + np.log(log_noise[1] - log_noise[0])
        noise = np.exp(log_noise)
        shape, rate = inverse_gamma(engine, "column_noise")
        factor = rate / (shape + 1.0)
    node, node_weight = np.polynomial.hermite_e.hermegauss(60)
    traits, cuts = engine.posterior["traits"], engine.posterior["cuts"]
    for i, level in zip(item, rating, strict=True):
        width = u[:, None] ** 2 * float(traits.variance[i, 0]) + noise * factor[i]
        value = (u * float(traits.mean[i, 0]))[:, None, None] + np.sqrt(width)[..., None] * node
        chance = np.ones_like(value)
        for k in range(3):
            side = 1.0 if level > k else -1.0
            chance *= norm.cdf(side * (value - float(cuts.mean[i, k])) / np.sqrt(float(cuts.variance[i, k])))
        log_weight = log_weight + np.log(chance @ node_weight / node_weight.sum())
    total = logsumexp(log_weight)
    return u, np.log(noise), np.exp(log_weight - total), total


@needs_float64
@pytest.mark.thorough
@pytest.mark.parametrize("heteroscedastic", [False, True])
def test_new_people_have_their_posterior_by_quadrature(heteroscedastic):
    """Given independent Gaussians for traits and cut points, and the noise of items at its mode."""
    engine = fit(1, NEW, heteroscedastic=heteroscedastic)
    new = engine.fold_in(KEY, *of_new(1), num_users=2, rank=1, **LEVELS)
    assert new.diagnostics.converged
    user, item, rating = of_new(1)
    total = 0.0
    for number in range(2):
        mine = user == number
        u, log_noise, weight, log_evidence = exact(engine, item[mine], rating[mine])
        total += log_evidence
        mean = np.sum(weight.sum(1) * u)
        sd = np.sqrt(np.sum(weight.sum(1) * (u - mean) ** 2))
        own = new.posterior["tastes"]
        assert abs(float(own.mean[number, 0]) - mean) < (0.1 if heteroscedastic else 0.05) * sd
        np.testing.assert_allclose(np.sqrt(own.variance[number, 0]), sd, rtol=0.1)
        if heteroscedastic:
            drawn = np.log(new.posterior["row_noise"].sample(KEY, 4000)[:, number])
            center = np.sum(weight.sum(0) * log_noise)
            spread = np.sqrt(np.sum(weight.sum(0) * (log_noise - center) ** 2))
            assert abs(drawn.mean() - center) < 0.15 * spread
            np.testing.assert_allclose(drawn.std(), spread, rtol=0.1)
    assert abs(float(new.log_evidence) - total) < (0.15 if heteroscedastic else 0.1)


@needs_float64
@pytest.mark.thorough
def test_a_new_item_has_its_posterior_by_draws_from_its_prior():
    """Its trait, noise and cut points together, weighted by its levels."""
    engine, rng, size = fit(1, NEW, heteroscedastic=True), np.random.default_rng(1), 200_000
    people = rng.permutation(NUM_USERS - len(NEW))[:12]
    tastes, typical = engine.posterior["tastes"], engine.posterior["typical_cuts"]
    mean, variance = (np.asarray(x)[people, 0] for x in (tastes.mean, tastes.variance))
    level = np.digitize(1.5 * mean + 2.0 * rng.normal(size=people.size), [-3.0, 0.0, 3.0])
    sizes = {"num_users": NUM_USERS - len(NEW), "rank": 1, **LEVELS, "num_items": 1}
    new = engine.fold_in(KEY, people, np.zeros(people.size, int), level, side="columns", **sizes)

    (shape, rate), center = inverse_gamma(engine, "variance_of_items"), engine.posterior["mean_of_items"].mean[0]
    trait = center + np.sqrt(rate / shape) * rng.normal(size=size)
    cuts = typical.mean + np.sqrt(np.asarray(typical.variance) + 0.1) * rng.normal(size=(size, 3))
    noise = 5.0 * np.sqrt(10.0) / rng.gamma(5.0, size=size)
    shape, rate = inverse_gamma(engine, "row_noise")
    factor = (rate / (shape + 1.0))[people]
    scale = np.sqrt(trait[:, None] ** 2 * variance + noise[:, None] * factor)
    passed = norm.cdf((cuts[:, None, :] - (trait[:, None] * mean)[..., None]) / scale[..., None])
    passed = np.concatenate([np.zeros_like(passed[..., :1]), passed, np.ones_like(passed[..., :1])], axis=-1)
    each = np.arange(people.size)
    weight = np.prod(np.maximum(passed[:, each, level + 1] - passed[:, each, level], 0.0), axis=1)
    weight /= weight.sum()
    assert 1.0 / np.sum(weight**2) > 0.1 * size

    own = new.posterior["column_noise"].sample(KEY, 20_000)
    for values, found, sd in (
        (trait, new.posterior["traits"].mean[0, 0], new.posterior["traits"].sd[0, 0]),
        (np.log(noise), np.log(own).mean(), np.log(own).std()),
        *zip(cuts.T, new.posterior["cuts"].mean[0], new.posterior["cuts"].sd[0], strict=True),
    ):
        expected = weight @ values
        spread = np.sqrt(weight @ (values - expected) ** 2)
        assert abs(found - expected) < 0.05 * spread
        np.testing.assert_allclose(sd, spread, rtol=0.05)


@pytest.mark.thorough
def test_somebody_without_ratings_has_the_prior(fitted):
    sizes = {"num_users": 3, "rank": 2, **LEVELS}
    new = fitted.fold_in(KEY, *of_new(2), **sizes)
    own, noise = new.posterior["tastes"], np.asarray(new.posterior["row_noise"].mean)
    np.testing.assert_allclose(own.mean[2], new.posterior["mean_of_users"].mean, rtol=1e-5)
    np.testing.assert_allclose(noise[2], 5.0 * np.sqrt(10.0) / 4.0, rtol=1e-5)
    draws = new.get_samples()
    assert draws["tastes"].shape == (50, 3, 2) and draws["row_noise"].shape == (50, 3)
    assert np.max(np.abs(draws["tastes"].mean(0) - own.mean) / np.sqrt(own.variance)) < 5.0 / np.sqrt(50)


@needs_float64
@pytest.mark.thorough
def test_predictions_for_new_people_are_those_of_draws_from_their_prior(fitted):
    """Tastes and noise together, weighted by the ratings, in all cells."""
    rng, size, sizes = np.random.default_rng(0), 100_000, {"num_users": 2, "rank": 2, **LEVELS}
    user, item, rating = of_new(2)
    new = fitted.fold_in(KEY, user, item, rating, **sizes)
    assert not new.diagnostics.messages
    traits, cuts = fitted.posterior["traits"], fitted.posterior["cuts"]
    shape, rate = inverse_gamma(fitted, "variance_of_users")
    tastes = fitted.posterior["mean_of_users"].mean + np.sqrt(rate / shape) * rng.normal(size=(size, 2))
    noise = 5.0 * np.sqrt(10.0) / rng.gamma(5.0, size=size)
    shape, rate = inverse_gamma(fitted, "column_noise")
    width = tastes**2 @ np.asarray(traits.variance).T + noise[:, None] * rate / (shape + 1.0)
    away = np.asarray(cuts.mean) - (tastes @ np.asarray(traits.mean).T)[..., None]
    passed = norm.cdf(away / np.sqrt(width[..., None] + np.asarray(cuts.variance)))
    passed = np.concatenate([np.zeros_like(passed[..., :1]), passed, np.ones_like(passed[..., :1])], axis=-1)
    chance = np.maximum(np.diff(passed, axis=-1), 0.0)
    everybody, every = np.divmod(np.arange(2 * NUM_ITEMS), NUM_ITEMS)
    for person in range(2):
        mine = user == person
        weight = np.prod(chance[:, item[mine], rating[mine]], axis=1)
        weight /= weight.sum()
        assert 1.0 / np.sum(weight**2) > 1000.0
        for level in range(4):
            found = new.log_predictive(everybody, every, np.full(2 * NUM_ITEMS, level), **sizes)["rating"]
            expected = weight @ chance[..., level]
            np.testing.assert_allclose(np.exp(found)[everybody == person], expected, atol=0.05)
            drawn = new.log_predictive(everybody, every, np.full(2 * NUM_ITEMS, level), method="draws", **sizes)
            np.testing.assert_allclose(np.exp(drawn["rating"])[everybody == person], expected, atol=0.12)
        drawn, center = np.log(new.posterior["row_noise"].sample(KEY, 20_000)[:, person]), weight @ np.log(noise)
        spread = np.sqrt(weight @ (np.log(noise) - center) ** 2)
        assert abs(drawn.mean() - center) < 0.1 * spread
        np.testing.assert_allclose(drawn.std(), spread, rtol=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_all_else_is_held(fitted, side):
    """Also where a single rating leaves open whose the noise is; and several at once are as each alone."""
    sizes = {"num_users": NUM_USERS - len(NEW), "rank": 2, **LEVELS}
    new_size, own, vectors = {
        "rows": ("num_users", {"row_noise"}, "tastes"),
        "columns": ("num_items", {"column_noise", "cuts"}, "traits"),
    }[side]
    where = np.array([4, 2, 4, 6]), np.array([0, 0, 1, 1])
    user, item = where[::-1] if side == "rows" else where
    rating = np.array([2, 0, 1, 3])
    together = fitted.fold_in(KEY, user, item, rating, side=side, **sizes | {new_size: 2})
    held = set(fitted.posterior) - own - {vectors}
    for site in held:
        for moment in ("mean", "variance"):
            found, before = (getattr(engine.posterior[site], moment) for engine in (together, fitted))
            np.testing.assert_allclose(found, before, rtol=1e-5, err_msg=site)
    for person in range(2):
        one = where[1] == person
        number = np.zeros(2, int)
        cells = (number, item[one]) if side == "rows" else (user[one], number)
        alone = fitted.fold_in(KEY, *cells, rating[one], side=side, **sizes | {new_size: 1})
        for site in (vectors, *own):
            np.testing.assert_allclose(
                alone.posterior[site].mean[0], together.posterior[site].mean[person], rtol=2e-3, atol=2e-3
            )
    single = (np.zeros(1, int), np.array([4])) if side == "rows" else (np.array([4]), np.zeros(1, int))
    alone = fitted.fold_in(KEY, *single, np.array([2]), side=side, **sizes | {new_size: 1})
    for site in held:
        np.testing.assert_allclose(alone.posterior[site].mean, fitted.posterior[site].mean, rtol=1e-5, err_msg=site)


@needs_float64
@pytest.mark.thorough
def test_people_with_few_and_with_many_ratings_are_folded_in_apart(fitted):
    """Groups, which save empty slots, leave everybody's posterior as it is, and cells in their order."""
    number = np.array([5, 1, 0, 12, 2, 12])
    some = np.arange(number.size)
    many = np.concatenate([number, np.ones(6500, int)])
    assert len(groups_of(number)) == 1 and len(groups_of(many)) > 1

    def folded(number):
        user, item = np.repeat(np.arange(number.size), number), np.concatenate([np.arange(n) for n in number])
        cells = user, item, (item * 7) % 4
        order = np.random.default_rng(0).permutation(user.size)
        sizes = {"num_users": number.size, "rank": 2, **LEVELS}
        engine = fitted.fold_in(KEY, *(part[order] for part in cells), **sizes)
        mine = np.isin(user, some)
        return engine, engine.log_predictive(*(part[mine] for part in cells), **sizes)["rating"]

    (together, expected), (apart, found) = folded(number), folded(many)
    np.testing.assert_allclose(found, expected, atol=2e-3)
    for site in ("tastes", "row_noise"):
        for moment in ("mean", "variance"):
            here, there = (getattr(engine.posterior[site], moment)[some] for engine in (apart, together))
            np.testing.assert_allclose(here, there, rtol=2e-3, atol=2e-3)


@pytest.mark.thorough
def test_what_was_folded_in_does_not_go_on(fitted, tmp_path):
    sizes = {"num_users": 2, "rank": 2, **LEVELS}
    new = fitted.fold_in(KEY, *of_new(2), **sizes)
    with pytest.raises(RuntimeError, match="folded in: save the engine of the fit"):
        new.save(tmp_path / "new.npz")
    with pytest.raises(RuntimeError, match="folded in: further new ones go to the engine of the fit"):
        new.fold_in(KEY, *of_new(2), **sizes)
    with pytest.raises(ValueError, match="'traits'.*make 5 vectors.*That side is held"):
        fitted.fold_in(KEY, np.zeros(2, int), np.arange(2), np.arange(2), **sizes | {"num_items": 5})
    with pytest.raises(ValueError, match="side must be one of 'rows', 'columns'"):
        fitted.fold_in(KEY, *of_new(2), side="users", **sizes)
