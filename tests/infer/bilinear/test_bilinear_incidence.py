"""Preferences of pairs by BilinearVG, one Gaussian over all items for each component: against the family of all
covariances, NumPyro's own density, draws, and refits."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.flatten_util import ravel_pytree
from jax.scipy.stats import norm
from numpyro import handlers

from numpyro_ext.infer import BilinearEP, BilinearVG, fit_batches
from tests.compilations import compiled_programs
from tests.monte_carlo import assert_close_covariance, assert_close_means

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
USERS, ITEMS, RANK = 6, 5, 2


def kernel(num, length=1.0):
    x = jnp.linspace(0.0, 3.0, num)
    return jnp.exp(-0.5 * (x[:, None] - x) ** 2 / length**2) + 1e-3 * jnp.eye(num)


def preferences(user, first, second, won=None, mask=True, *, users=USERS, rank=RANK, link="probit", scale=1.5):
    with numpyro.plate("users", users):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([rank]).to_event(1))
    with numpyro.plate("components", rank):
        h = numpyro.sample("h", dist.MultivariateNormal(jnp.zeros(ITEMS), scale**2 * kernel(ITEMS)))
    utility = numpyro.sample("utility", dist.MultivariateNormal(jnp.zeros(ITEMS), kernel(ITEMS, 0.5)))
    f = numpyro.deterministic("f", w @ h + utility)
    difference = f[user, first] - f[user, second]
    of_answer = {"probs": norm.cdf(difference)} if link == "probit" else {"logits": difference}
    with handlers.mask(mask=mask):
        numpyro.sample("won", dist.Bernoulli(**of_answer), obs=won)


def make_answers(num=90):
    rng = np.random.default_rng(3)
    user, first = rng.integers(0, USERS, num), rng.integers(0, ITEMS, num)
    second = (first + rng.integers(1, ITEMS, num)) % ITEMS
    f = rng.normal(size=(USERS, 1)) @ np.linspace(-3.0, 3.0, ITEMS)[None] + rng.normal(size=(USERS, 1)) @ rng.normal(
        size=(1, ITEMS)
    )
    return user, first, second, (rng.normal(size=num) < f[user, first] - f[user, second]).astype(int)


USER, FIRST, SECOND, WON = ANSWERS = make_answers()
OPTIONS = {"progress_bar": False, "num_restarts": 0, "num_samples": 2000}


def run(covariance, tol=1e-10, **kwargs):
    engine = BilinearVG(preferences, covariance=covariance, tol=tol, **OPTIONS)
    engine.run(random.key(1), *ANSWERS, **kwargs)
    return engine


@pytest.fixture(scope="module")
def fitted():
    return run({"components": "component"}, tol=1e-8)


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize("link", ["probit", pytest.param("logit", marks=pytest.mark.slow)])
def test_one_component_is_the_same_as_all_covariances(link):
    """Of one vector of users and no shared utility, with given sides, both families are one."""

    def model(won):
        w = numpyro.sample("w", dist.Normal(1.0, 0.5).expand([USERS]).to_event(1))
        h = numpyro.sample("h", dist.MultivariateNormal(jnp.zeros(ITEMS), 4.0 * kernel(ITEMS)))
        g = w[USER] * (h[FIRST] - h[SECOND])
        numpyro.sample("won", dist.Bernoulli(**({"logits": g} if link == "logit" else {"probs": norm.cdf(g)})), obs=won)

    found = []
    for family in ("component", "full"):
        engine = BilinearVG(model, covariance={"h": family}, tol=1e-12, **OPTIONS)
        engine.run(random.key(0), WON)
        found.append(engine)
    one, other = found
    np.testing.assert_allclose(one.log_evidence, other.log_evidence, rtol=1e-9)
    np.testing.assert_allclose(one.posterior["h"].mean, other.posterior["h"].mean, atol=1e-4)
    np.testing.assert_allclose(one.posterior["h"].covariance(), other.posterior["h"].covariance(), atol=1e-4)
    np.testing.assert_allclose(one.posterior["w"].sd, other.posterior["w"].sd, atol=1e-5)


@pytest.mark.thorough
def test_components_against_all_covariances(fitted):
    """Independent components are a narrower family: the bound is below, and predictions are near."""
    assert fitted.diagnostics.converged and fitted.log_evidence.is_lower_bound
    trace = fitted.diagnostics.objective_trace
    assert np.all(np.diff(trace) >= -1e-9 * abs(trace[-1]) if jax.config.jax_enable_x64 else -1e-4 * abs(trace[-1]))
    whole = run({"h": "full", "w": "diagonal"}, tol=1e-8)
    assert whole.log_evidence - 5.0 < fitted.log_evidence < whole.log_evidence + 1e-3
    one, other = (engine.predictive_mean()["won"] for engine in (fitted, whole))
    assert np.max(np.abs(one - other)) < 0.05


@pytest.mark.thorough
@needs_float64
def test_the_bound_against_the_density_of_the_model():
    """One user, two items and a learned scale: the bound is a sum over three dimensions of NumPyro's own density, and
    its derivatives in posterior and scale vanish at the end."""
    first, second, won = np.array([0, 1, 0, 0, 1]), np.array([1, 0, 1, 1, 0]), np.array([1, 0, 1, 1, 1])

    def model(y):
        scale = numpyro.sample("scale", dist.LogNormal(0.5, 0.3))
        w = numpyro.sample("w", dist.Normal(1.5, 1.0).expand([1, 1]).to_event(2))
        h = numpyro.sample("h", dist.MultivariateNormal(jnp.zeros(2), scale**2 * kernel(2, 3.0)))
        numpyro.sample("y", dist.Bernoulli(logits=w[0, 0] * (h[first] - h[second])), obs=y)

    engine = BilinearVG(model, covariance={"h": "component"}, tol=1e-13, **OPTIONS)
    engine.run(random.key(0), won)
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    grid = jnp.stack([x.ravel() for x in jnp.meshgrid(*[jnp.asarray(nodes)] * 3)], axis=1)
    weights = weights / weights.sum()
    mass = jnp.asarray(np.einsum("i,j,k->ijk", weights, weights, weights).ravel())

    def bound(point):
        def log_joint(white):
            values = {
                "scale": jnp.exp(point["scale"]),
                "w": (point["w"] + jnp.exp(point["sd"]) * white[0]).reshape(1, 1),
                "h": point["h"] + jnp.tril(point["factor"]) @ white[1:],
            }
            with handlers.trace() as trace, handlers.substitute(data=values):
                model(won)
            return sum(jnp.sum(s["fn"].log_prob(s["value"])) for s in trace.values() if s["type"] == "sample")

        entropy = point["sd"] + jnp.sum(jnp.log(jnp.diagonal(point["factor"]))) + 1.5 * jnp.log(2.0 * jnp.pi * jnp.e)
        return mass @ jax.vmap(log_joint)(grid) + entropy

    posterior = engine.posterior
    end = {
        "scale": jnp.log(engine.hyper["scale"].value),
        "w": posterior["w"].mean[0, 0],
        "sd": jnp.log(posterior["w"].sd[0, 0]),
        "h": posterior["h"].mean,
        "factor": jnp.linalg.cholesky(posterior["h"].covariance()),
    }
    value_and_slopes = jax.jit(jax.value_and_grad(bound))
    value, slopes = value_and_slopes(end)
    log_prior = dist.LogNormal(0.5, 0.3).log_prob(engine.hyper["scale"].value)
    np.testing.assert_allclose(value - log_prior, engine.log_evidence, rtol=1e-7)
    assert jnp.max(jnp.abs(ravel_pytree(slopes)[0])) < 1e-3 * (1.0 + abs(float(value)))
    beside = jax.tree.map(lambda x: x + 0.05, end)
    assert jnp.max(jnp.abs(ravel_pytree(value_and_slopes(beside)[1])[0])) > 1e-2


@pytest.mark.thorough
def test_draws_marginals_and_predictions(fitted):
    draws, posterior = fitted.get_samples(), fitted.posterior["h"]
    covariance = posterior.covariance().reshape(RANK * ITEMS, -1)
    assert_close_means(draws["h"].reshape(2000, -1), posterior.mean.reshape(-1))
    assert_close_covariance(draws["h"].reshape(2000, -1), covariance)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)).reshape(RANK, ITEMS), posterior.sd, rtol=1e-5)
    f = draws["f"]
    probability = norm.cdf(f[:, USER, FIRST] - f[:, USER, SECOND])
    assert_close_means(probability, fitted.predictive_mean()["won"])
    scores = fitted.log_predictive(*ANSWERS)["won"]
    likelihood = np.where(WON == 1, probability, 1.0 - probability)
    assert_close_means(likelihood, np.exp(scores), other_error=likelihood.std(0) / np.sqrt(500))
    one, other = (fitted.log_predictive(USER[:3], a, b, c) for a, b, c in ((FIRST[:3], SECOND[:3], WON[:3]),) * 2)
    np.testing.assert_array_equal(one["won"], other["won"])
    turned = fitted.log_predictive(USER, SECOND, FIRST, 1 - WON)["won"]
    np.testing.assert_allclose(turned, scores, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_new_users_by_fold_in(fitted):
    chosen = USER < 3
    again = fitted.fold_in(random.key(5), *(x[chosen] for x in ANSWERS), users=3)
    tol = 1e-3 if jax.config.jax_enable_x64 else 2e-2
    np.testing.assert_allclose(again.posterior["w"].mean, fitted.posterior["w"].mean[:3], atol=tol)
    np.testing.assert_allclose(again.posterior["w"].sd, fitted.posterior["w"].sd[:3], atol=tol)
    np.testing.assert_array_equal(again.posterior["h"].mean, fitted.posterior["h"].mean)
    side = "columns" if "h" in fitted.describe().split("columns:")[1].split("\n")[0] else "rows"
    with pytest.raises(ValueError, match="depend on each other"):
        fitted.fold_in(random.key(5), *ANSWERS, side=side)


@pytest.mark.thorough
def test_another_kernel_of_as_many_items_is_refused(fitted):
    few = [x[:4] for x in ANSWERS]
    for call in (
        lambda: fitted.fold_in(random.key(5), *few, scale=0.5),
        lambda: fitted.log_predictive(*few, scale=0.5),
        lambda: fitted.predictive_mean(*few, scale=0.5),
    ):
        with pytest.raises(ValueError, match=r"prior of .*'h'.* is another one on the new arguments.*same kernel"):
            call()


@pytest.mark.thorough
def test_saving_and_going_on(fitted, tmp_path):
    fitted.save(tmp_path / "run.npz")
    loaded = BilinearVG.load(tmp_path / "run.npz", preferences)
    assert loaded.log_evidence == fitted.log_evidence
    np.testing.assert_array_equal(loaded.posterior["h"].mean, fitted.posterior["h"].mean)
    np.testing.assert_array_equal(loaded.get_samples()["h"], fitted.get_samples()["h"])
    held = np.arange(USER.size) % 3 > 0
    short = BilinearVG(preferences, covariance="component", tol=1e-4, **OPTIONS)
    short.run(random.key(0), *ANSWERS, mask=held, init_state=fitted.last_state)
    scores = short.log_predictive()["won"]
    assert np.all(scores[held] == 0.0) and np.all(scores[~held] < 0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [BilinearVG, BilinearEP])
def test_other_pairs_compile_nothing(engine):
    """Neither a fit, nor a new person, nor predictions; a fit to the same answers in another order is the same."""
    options = {"covariance": "component", "num_restarts": 0} if engine is BilinearVG else {}
    order = np.random.default_rng(0).permutation(USER.size)
    shuffled = [x[order] for x in ANSWERS]

    def ask(answers):
        fit = engine(preferences, progress_bar=False, **options)
        fit.run(random.key(1), *answers)
        person = [np.zeros(8, int), *(x[:8] for x in answers[1:])]
        new = fit.fold_in(random.key(2), *person, users=1)
        return fit, new, fit.log_predictive(*(x[:8] for x in answers))["won"]

    first, _, _ = ask(ANSWERS)
    with compiled_programs() as names:
        second, new, scores = ask(shuffled)
    assert names == []
    tol = {"rtol": 1e-4, "atol": 1e-4} if jax.config.jax_enable_x64 else {"rtol": 2e-2, "atol": 2e-2}
    np.testing.assert_allclose(second.log_evidence, first.log_evidence, **tol)
    np.testing.assert_allclose(second.posterior["h"].sd, first.posterior["h"].sd, **tol)
    assert np.all(scores < 0.0) and new.posterior["w"].mean.shape == (1, RANK)


def test_what_is_refused():
    for options, words in (
        ({"solver": "lbfgs"}, "natural gradients"),
        ({"covariance": {"nobody": "component"}}, "plates"),
        ({"covariance": {"h": "component", "utility": "full"}}, "one side"),
    ):
        engine = BilinearVG(preferences, **{"covariance": "component", **OPTIONS, **options})
        with pytest.raises(ValueError, match=words):
            engine.run(random.key(0), *ANSWERS)
    engine = BilinearVG(preferences, covariance="component", **OPTIONS)
    with pytest.raises(ValueError, match="Batches share"):
        fit_batches(engine, random.key(0), [ANSWERS], over="w")
