"""Quadrature over small blocks against sums on long grids and `scipy`'s quadrature, computed without the engine."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from scipy.integrate import quad
from scipy.special import logsumexp
from scipy.stats import norm, poisson

from numpyro_ext.compilation import store
from numpyro_ext.infer import AdaptiveQuadrature, Quadrature
from numpyro_ext.infer.gaussian.algorithms.nodes import column_sums
from numpyro_ext.infer.gaussian.algorithms.nodes.shared_columns import SharedColumns
from numpyro_ext.infer.gaussian.engines import adaptive_quadrature
from numpyro_ext.infer.hyper.space import UnconstrainedSpace
from numpyro_ext.models import item_response
from numpyro_ext.structure import ModelStructureError
from tests.compilations import compiled_programs
from tests.monte_carlo import NUM_ERRORS
from tests.readings import with_fit_costs
from tests.tiers import thorough

_NUM_PEOPLE, _NUM_ITEMS = 12, 4


def two_parameter_logistic(response=None):
    with numpyro.plate("items", _NUM_ITEMS):
        a = numpyro.sample("discrimination", dist.LogNormal(0, 0.5))
        d = numpyro.sample("intercept", dist.Normal(0, 3))
    with numpyro.plate("people", _NUM_PEOPLE if response is None else len(response)):
        trait = numpyro.sample("trait", dist.Normal(0, 1))
    numpyro.sample("response", dist.Bernoulli(logits=a * trait[:, None] + d), obs=response)


def _answers() -> np.ndarray:
    return (np.random.default_rng(0).random((_NUM_PEOPLE, _NUM_ITEMS)) < 0.6).astype(int)


_SLOPE, _INTERCEPT = np.array([0.5, 1.0, 2.5, 1.2]), np.array([0.3, -1.0, 0.5, 2.0])


def _on_a_grid(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nodes of the trait, and log joint density of every person there."""
    grid = np.linspace(-9, 9, 2001)
    logit = _SLOPE * grid[:, None] + _INTERCEPT
    terms = np.where(y[:, None, :] == 1, -np.logaddexp(0, -logit), -np.logaddexp(0, logit)).sum(-1)
    return grid, terms - 0.5 * grid**2 - 0.5 * np.log(2 * np.pi)


@pytest.fixture(scope="module")
def engine() -> AdaptiveQuadrature:
    found = AdaptiveQuadrature(two_parameter_logistic, hyper_values={"discrimination": _SLOPE, "intercept": _INTERCEPT})
    found.run(jax.random.key(0), _answers())
    return found


def test_evidence_and_moments_are_those_of_a_long_grid(engine):
    grid, joint = _on_a_grid(_answers())
    step = grid[1] - grid[0]
    expected = logsumexp(joint, axis=1).sum() + _NUM_PEOPLE * np.log(step)
    assert abs(float(engine.log_evidence) - expected) < 1e-8
    weights = np.exp(joint - logsumexp(joint, axis=1, keepdims=True))
    mean = weights @ grid
    np.testing.assert_allclose(engine.posterior["trait"].mean, mean, atol=1e-8)
    np.testing.assert_allclose(engine.posterior["trait"].variance, weights @ grid**2 - mean**2, atol=1e-8)


def test_sites_that_join_blocks_are_hyperparameters(engine):
    assert engine.hyper.keys() == {"discrimination", "intercept"}


def test_large_blocks_are_refused_by_name():
    def walk(y=None):
        level = numpyro.sample("level", dist.GaussianRandomWalk(1.0, num_steps=6))
        numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)

    with pytest.raises(ModelStructureError, match="'level'.*6 unknowns.*at most 3"):
        AdaptiveQuadrature(walk).run(jax.random.key(0), np.arange(6))


def test_people_with_many_traits_are_not_points_beside_a_smaller_field():
    answers = np.tile(np.eye(5, dtype=int), (4, 1))
    arguments = (answers,), {"family": "2pl", "priors": True, "num_traits": 4}
    with pytest.raises(ModelStructureError, match=r"'trait' \(shape \(20, 4\)\) has 4 unknowns.*field=\['intercept'\]"):
        AdaptiveQuadrature(item_response)._read(jax.random.key(0), *arguments)
    chosen = AdaptiveQuadrature(item_response, field=["intercept"])
    assert chosen._read(jax.random.key(0), *arguments).field == ("intercept",)


def test_common_coefficients_may_be_more_than_groups():
    x, group = np.random.default_rng(0).normal(size=(12, 8)), np.arange(12) % 3

    def model():
        slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([8]).to_event(1))
        with numpyro.plate("groups", 3):
            effect = numpyro.sample("effect", dist.Normal(0, 1))
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ slopes + effect[group])), obs=np.arange(12))

    assert AdaptiveQuadrature(model)._read(jax.random.key(0), (), {}).field == ("effect",)


def latent_regression(answers=None, grades=None, mask=True):
    """Two families of factors, gaps, covariates and a learned spread of the trait."""
    a = numpyro.param("slope", jnp.array([0.7, 1.3, 1.1]), constraint=dist.constraints.positive)
    d = numpyro.param("intercept", jnp.array([0.2, -0.4, 0.0]))
    cutpoints = numpyro.param("cutpoints", jnp.array([[-1.0, 0.3], [-0.2, 1.0]]))
    b = numpyro.param("effect", jnp.array(0.4))
    spread = numpyro.param("spread", jnp.array(1.2), constraint=dist.constraints.positive)
    with numpyro.plate("people", _NUM_PEOPLE):
        trait = numpyro.sample("trait", dist.Normal(b * jnp.linspace(-1, 1, _NUM_PEOPLE), spread))
    with numpyro.handlers.mask(mask=mask):
        numpyro.sample("answers", dist.Bernoulli(logits=a * trait[:, None] + d), obs=answers)
    numpyro.sample("grades", dist.OrderedLogistic(trait[:, None] * jnp.array([1.0, 0.5]), cutpoints), obs=grades)


def weighted_regression(answers=None, grades=None, mask=True):
    """The same with weights that differ between people and, of grades, between columns."""
    weights = np.linspace(0.5, 2.0, 2 * _NUM_PEOPLE).reshape(-1, 2)
    by_site = {"answers": weights[::-1, :1], "grades": weights}

    class Weighted(numpyro.primitives.Messenger):
        def process_message(self, msg):
            if msg["name"] in by_site:
                msg["scale"] = by_site[msg["name"]]

    with Weighted():
        latent_regression(answers, grades, mask)


def two_traits(answers=None, grades=None, mask=True):
    """Two families of factors and gaps; some answers depend on one of two traits alone."""
    a = numpyro.param("slopes", jnp.array([[0.7, 0.0], [1.3, -0.4], [0.6, 1.1]]))
    d = numpyro.param("intercept", jnp.array([0.2, -0.4, 0.0]))
    cutpoints = numpyro.param("cutpoints", jnp.array([[-1.0, 0.3], [-0.2, 1.0]]))
    with numpyro.plate("people", _NUM_PEOPLE):
        traits = numpyro.sample("traits", dist.Normal(jnp.zeros((_NUM_PEOPLE, 2)), jnp.array([1.0, 1.5])).to_event(1))
    with numpyro.handlers.mask(mask=mask):
        numpyro.sample("answers", dist.Bernoulli(logits=traits @ a.T + d), obs=answers)
    numpyro.sample("grades", dist.OrderedLogistic(traits @ jnp.array([[0.0, 1.0], [0.5, 0.5]]), cutpoints), obs=grades)


def correlated_traits(answers=None, grades=None, mask=True):
    """Two traits whose covariance is learned; of answers and grades some depend on one of them alone."""
    factor = numpyro.param("factor", jnp.array([[1.0, 0.0], [0.4, 0.9]]), constraint=dist.constraints.lower_cholesky)
    a = numpyro.param("slopes", jnp.array([[0.7, 0.0], [1.3, -0.4], [0.6, 1.1]]))
    with numpyro.plate("people", _NUM_PEOPLE):
        traits = numpyro.sample("traits", dist.MultivariateNormal(jnp.zeros(2), scale_tril=factor))
    with numpyro.handlers.mask(mask=mask):
        numpyro.sample("answers", dist.Bernoulli(logits=traits @ a.T), obs=answers)
    cutpoints = jnp.array([[-1.0, 0.3], [-0.2, 1.0]])
    numpyro.sample("grades", dist.OrderedLogistic(traits @ jnp.array([[0.0, 1.0], [0.5, 0.5]]), cutpoints), obs=grades)


@pytest.fixture(scope="module", params=[latent_regression, weighted_regression, two_traits, correlated_traits])
def regression(request):
    generator = np.random.default_rng(1)
    grades, mask = generator.integers(0, 3, (_NUM_PEOPLE, 2)), generator.random((_NUM_PEOPLE, 3)) < 0.8
    engine = AdaptiveQuadrature(request.param)
    reading = engine._read(jax.random.key(0), (_answers()[:, :3], grades, mask), {})
    shared, space = engine.algorithm(reading), UnconstrainedSpace(reading.hyper, {})
    assert isinstance(shared, SharedColumns)
    values = space.initial()
    values += 0.1 * np.cos(np.arange(values.size))
    return shared, values, lambda x: reading.form(space.unpack(x))


@pytest.mark.thorough
def test_shared_columns_are_the_lattices_of_each_block(regression):
    shared, values, form_fn = regression

    def fitted(algorithm):
        def fit(x):
            form = form_fn(x)
            state, info, evidence = algorithm.fit(form, num_steps=1, tol=1e-8)
            return evidence, algorithm.posterior(form, state).block_moments()

        return jax.jit(fit)(values)

    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-8), fitted(shared), fitted(Quadrature(81)))


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"largest_chunk": 1}])
def test_information_is_the_hessian_of_the_evidence(regression, options):
    """Also where its derivatives are taken in some directions at a time, here in one."""
    shared, values, form_fn = regression
    shared = dataclasses.replace(shared, **options)

    @jax.jit
    def both(x):
        state = shared.init(form_fn(values))
        hessian = jax.hessian(lambda y: shared.log_evidence(form_fn(y), state))(x)
        return hessian, sum(shared.second_derivatives(form_fn, x, state, is_rough=False))

    expected, found = both(values)
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.thorough
def test_the_gradient_is_that_of_the_evidence(regression):
    """Gradients of complete data as they are expected, against autodiff of the evidence."""
    shared, values, form_fn = regression
    expected = jax.jit(jax.value_and_grad(lambda x: shared.log_evidence(form_fn(x), shared.init(form_fn(values)))))
    value, slope = expected(values)

    @jax.jit
    def held(x):
        state, info, found = shared.solve_and_hold(form_fn(x), shared.init(form_fn(x)), num_steps=1, tol=1e-8)
        return info.objective, jax.grad(lambda y: shared.held_evidence(form_fn(y), state, found))(x)

    found = held(values)
    np.testing.assert_allclose(found[0], value, rtol=1e-13)
    np.testing.assert_allclose(found[1], slope, atol=1e-9)


def test_sums_over_blocks_are_the_same_in_chunks():
    """Thirteen blocks of two families with gaps, of which the last of three chunks has two that are padding."""
    generator, (blocks, nodes) = np.random.default_rng(4), (13, jnp.linspace(-8.0, 8.0, 9))
    tables = tuple(jax.nn.log_softmax(generator.normal(size=shape), axis=0) for shape in ((2, 3, 9), (4, 2, 9)))
    labels = tuple(jnp.asarray(generator.integers(0, len(table), (blocks, table.shape[1]))) for table in tables)
    observed = tuple(jnp.asarray(generator.random(label.shape) < 0.7) for label in labels)
    some = column_sums.Blocks(labels, observed, generator.normal(size=blocks), generator.gamma(2.0, size=blocks))

    def both(**options):
        sums = column_sums.log_sums(tables, some, nodes, jnp.log(2.0), (1, 2), **options)
        return sums, column_sums.expected(tables, some, nodes, jnp.log(2.0), **options)

    whole, in_chunks = both(), both(largest_chunk=5 * nodes.size)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), in_chunks, whole)
    np.testing.assert_allclose(whole[0][:, 0], whole[1][0], rtol=1e-12)
    # every answer is one of the outcomes at one of the nodes
    assert float(sum(jnp.sum(n) for n in whole[1][1].answers)) == pytest.approx(float(sum(map(jnp.sum, observed))))


@pytest.mark.thorough
def test_a_search_whose_evaluations_are_programs_of_their_own_is_the_same():
    def fitted(most):
        kind = with_fit_costs(AdaptiveQuadrature, most_quick_numbers=most, most_small_rows=0)
        engine = kind(two_parameter_logistic)
        engine.run(jax.random.key(0), _answers())
        assert engine._run.programs._evaluates_apart is (most == 0)
        assert engine.diagnostics.converged
        return {name: (value.mean, value.sd) for name, value in engine.hyper.items()}, engine.posterior["trait"].mean

    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), fitted(0), fitted(10**9))


@pytest.mark.thorough
def test_a_fit_with_standard_errors_compiles_few_programs():
    """Rough and exact second derivatives are one program, and so are all standard errors."""
    store.clear()  # other tests may have left programs of this structure
    with compiled_programs() as names, pytest.warns(UserWarning, match="set to a point"):
        engine = AdaptiveQuadrature(two_parameter_logistic, integrate="none")
        engine.run(jax.random.key(0), _answers())
        errors = [value.standard_error for value in engine.hyper.values()]
    assert engine.diagnostics.converged and all(np.all(np.asarray(error) > 0) for error in errors)
    for program in ("_search", "_complete_derivatives", "_missing_derivatives", "standard_errors"):
        assert names.count(f"jit({program})") == 1
    assert names.count("jit(change)") <= 1  # which models share, so that it may be there already
    assert len(names) < 40, names


@pytest.mark.thorough
def test_a_random_intercept_is_integrated_as_by_scipy():
    group = np.repeat(np.arange(5), [3, 1, 4, 2, 6])
    x, counts = np.linspace(-1, 1, group.size), np.random.default_rng(2).poisson(3.0, group.size)

    def model(y=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        spread = numpyro.sample("spread", dist.HalfNormal(1))
        effect = numpyro.sample("effect", dist.Normal(0, spread).expand([5]).to_event(1))
        numpyro.sample("y", dist.Poisson(jnp.exp(1.0 + slope * x + effect[group])), obs=y)

    engine = AdaptiveQuadrature(model, hyper_values={"slope": 0.4, "spread": 0.8})
    engine.run(jax.random.key(0), counts)
    total, means = 0.0, []
    for k in range(5):
        own = group == k

        def density(e, power=0, own=own):
            rate = np.exp(1.0 + 0.4 * x[own] + e)
            return e**power * np.exp(poisson.logpmf(counts[own], rate).sum()) * norm.pdf(e, scale=0.8)

        mass, first = (quad(density, -7, 7, args=(power,), epsabs=0, epsrel=1e-12)[0] for power in (0, 1))
        total, means = total + np.log(mass), [*means, first / mass]
    assert abs(float(engine.log_evidence) - total) < 1e-8
    np.testing.assert_allclose(engine.posterior["effect"].mean, means, atol=1e-8)
    assert engine.diagnostics.quadrature_error < 1e-5


def test_a_rule_that_is_too_coarse_is_told():
    engine = AdaptiveQuadrature(
        two_parameter_logistic, hyper_values={"discrimination": 8.0 * _SLOPE, "intercept": _INTERCEPT}, num_nodes=5
    )
    with pytest.warns(UserWarning, match="not exact.*num_nodes"):
        engine.run(jax.random.key(0), _answers())
    assert engine.diagnostics.quadrature_error > 1e-3


@pytest.mark.parametrize(("error", "is_maximum"), [*thorough((0.05, True)), (0.5, False)])
def test_a_maximum_of_nodes_that_do_not_suffice_is_none(monkeypatch, error, is_maximum):
    """The engine has no more nodes to give, as where a slope runs away."""
    monkeypatch.setattr(adaptive_quadrature, "quadrature_error", lambda *_: (error, 0.0, 4000))
    engine = AdaptiveQuadrature(two_parameter_logistic, progress_bar=False)
    with pytest.warns(UserWarning, match="not exact"):
        engine.run(jax.random.key(0), _answers())
    assert engine.diagnostics.converged is is_maximum


def test_draws_are_those_of_the_density(engine):
    grid, joint = _on_a_grid(_answers())
    weights = np.exp(joint - logsumexp(joint, axis=1, keepdims=True))
    draws = np.asarray(engine.posterior["trait"].sample(jax.random.key(1), 20_000))
    below = (draws[:, :, None] < np.array([-1.0, 0.0, 1.0])).mean(0)
    expected = np.stack([weights[:, grid < x].sum(1) for x in (-1.0, 0.0, 1.0)], axis=1)
    error = np.sqrt(expected * (1 - expected) / len(draws))
    assert np.all(np.abs(below - expected) < 4.5 * error + 1e-3)


def test_quantiles_and_scores_are_those_of_the_density(engine):
    y = _answers()
    grid, joint = _on_a_grid(y)
    weights = np.exp(joint - logsumexp(joint, axis=1, keepdims=True))
    middle = [np.interp(0.9, np.cumsum(w) - 0.5 * w, grid) for w in weights]
    np.testing.assert_allclose(engine.posterior["trait"].quantile(0.9), middle, atol=2e-3)
    logit = _SLOPE * grid[:, None] + _INTERCEPT
    likelihood = 1.0 / (1.0 + np.exp(np.where(y[:, None, :] == 1, -logit, logit)))
    without = -np.log(np.einsum("bq,bqg->bg", weights, 1.0 / likelihood))
    np.testing.assert_allclose(engine._run.leave_one_out[0].reshape(y.shape), without, atol=1e-8)


@pytest.mark.thorough
def test_fewer_new_people_than_items_are_folded_in_exactly(engine):
    """New people alone are fewer than items, which must not become the field in their place."""
    y = np.array([[1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1]])
    new = engine.fold_in(jax.random.key(1), y)
    grid, joint = _on_a_grid(y)
    weights = np.exp(joint - logsumexp(joint, axis=1, keepdims=True))
    np.testing.assert_allclose(new.posterior["trait"].mean, weights @ grid, atol=1e-8)
    assert abs(float(new.log_evidence) - logsumexp(joint, axis=1).sum() - len(y) * np.log(grid[1] - grid[0])) < 1e-8


@pytest.mark.thorough
def test_guide_of_given_hyperparameters_has_the_moments_of_the_field(engine):
    guide, params = engine.guide, engine.params
    covariance = params["auto_scale_tril"] @ params["auto_scale_tril"].T
    # hyperparameters that are given are points, and come first
    np.testing.assert_allclose(np.diag(covariance)[-_NUM_PEOPLE:], engine.posterior["trait"].variance, rtol=1e-6)
    assert guide.sample_posterior(jax.random.key(0), params)["trait"].shape == (_NUM_PEOPLE,)


@pytest.mark.thorough
def test_a_loaded_engine_gives_the_same_answers(engine, tmp_path):
    engine.save(tmp_path / "fit")
    loaded = AdaptiveQuadrature.load(tmp_path / "fit", two_parameter_logistic)
    for ask in (lambda e: e.posterior["trait"].quantile([0.1, 0.9]), lambda e: e.get_samples()["trait"]):
        np.testing.assert_array_equal(ask(loaded), ask(engine))


def intercepts(x, group, num_groups, y=None):
    spread = numpyro.sample("spread", dist.LogNormal(0.0, 0.3))
    with numpyro.plate("groups", num_groups):
        effect = numpyro.sample("effect", dist.Normal(0.0, spread))
    logit = numpyro.deterministic("logit", 0.3 + 0.5 * x + effect[group])
    numpyro.sample("y", dist.Bernoulli(logits=logit), obs=y)


_GROUP, _X = np.repeat(np.arange(3), [1, 2, 4]), np.linspace(-1, 1, 7)
_Y, _PROBABILITIES = np.array([1, 1, 1, 0, 0, 0, 0]), np.array([0.01, 0.1, 0.5, 0.9, 0.99])


def _effect_on_a_grid(number: int, spread: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Nodes, masses and log evidence of a group of :func:`intercepts`; of a new one, the prior."""
    grid, own = np.linspace(-14, 14, 4001), number == _GROUP
    logit = 0.3 + 0.5 * _X[own] + grid[:, None]
    joint = np.where(_Y[own] == 1, -np.logaddexp(0, -logit), -np.logaddexp(0, logit)).sum(-1)
    joint = joint + norm.logpdf(grid, scale=spread) + np.log(grid[1] - grid[0])
    return grid, np.exp(joint - logsumexp(joint)), logsumexp(joint)


@pytest.mark.thorough
@pytest.mark.parametrize("num_groups", [3, 4])
def test_predictions_are_those_of_the_density(num_groups):
    engine = AdaptiveQuadrature(intercepts, hyper_values={"spread": 1.5})
    engine.run(jax.random.key(0), _X, _GROUP, 3, _Y)
    new_x, new_group = np.array([0.0, 1.0]), np.array([0, num_groups - 1])
    found = engine.predict(jax.random.key(1), new_x, new_group, num_groups)
    for place, (x, group) in enumerate(zip(new_x, new_group, strict=True)):
        grid, weights, _ = _effect_on_a_grid(group, 1.5)
        logit = 0.3 + 0.5 * x + grid
        probability = weights @ (1.0 / (1.0 + np.exp(-logit)))
        np.testing.assert_allclose(found.probabilities()["y"][place], [1 - probability, probability], atol=1e-8)
        scored = engine.log_predictive(new_x, new_group, num_groups, np.array([1, 1]))["y"][place]
        np.testing.assert_allclose(scored, np.log(probability), atol=1e-8)
        draws = found.posterior["logit"].sample(jax.random.key(2), 4000)[:, place]
        for asked in (found.posterior["logit"].quantile(_PROBABILITIES)[:, place], np.quantile(draws, _PROBABILITIES)):
            below = np.interp(asked, logit, np.cumsum(weights) - 0.5 * weights)
            error = np.sqrt(_PROBABILITIES * (1 - _PROBABILITIES) / 4000)
            assert np.all(np.abs(below - _PROBABILITIES) < 4.5 * error + 1e-3)


@pytest.mark.thorough
def test_quantiles_over_hyperparameters_are_those_of_the_density():
    """Squares have two roots, and the middle of the Gaussian of equal moments is a point without mass."""

    def roots(y=None):
        spread = numpyro.sample("spread", dist.LogNormal(0.0, 0.1))
        with numpyro.plate("groups", 3):
            root = numpyro.sample("root", dist.Normal(0.2, spread))
        numpyro.sample("y", dist.Normal(root**2, 0.5), obs=y)

    y = np.array([2.0, 3.0, 0.5])
    engine = AdaptiveQuadrature(roots)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # two modes of a factor are no fault of nodes
        engine.run(jax.random.key(0), y)
    assert engine.diagnostics.converged and not engine.diagnostics.messages
    grid, spreads = np.linspace(-8, 8, 4001), np.exp(0.1 * np.linspace(-6, 6, 121))
    parts = norm.logpdf(y[:, None, None], grid**2, 0.5) + norm.logpdf(grid, 0.2, spreads[:, None])
    log_mass = norm.logpdf(np.log(spreads) / 0.1) + logsumexp(parts, axis=2).sum(0)
    masses = np.exp(log_mass - logsumexp(log_mass))
    for k in range(3):
        weights = masses @ np.exp(parts[k] - logsumexp(parts[k], axis=1, keepdims=True))
        below = np.cumsum(weights) - 0.5 * weights
        asked = engine.posterior["root"].quantile(_PROBABILITIES)[:, k]
        error = np.sqrt(_PROBABILITIES * (1 - _PROBABILITIES) / 4000)
        assert np.all(np.abs(np.interp(asked, grid, below) - _PROBABILITIES) < 4.5 * error + 3e-3)
        at = engine.posterior["root"].cdf(np.zeros(3))[k]
        assert abs(at - np.interp(0.0, grid, below)) < 0.04


@pytest.mark.thorough
def test_more_than_twenty_parameters_of_items_are_those_of_nuts():
    """Few people, so that the density of the items is skewed; NUTS sees the items alone, people summed out."""
    generator, nodes = np.random.default_rng(3), np.linspace(-7.0, 7.0, 57)
    slope, intercept, trait = (
        np.exp(0.5 * generator.normal(size=11)),
        generator.normal(size=11),
        generator.normal(size=60),
    )
    y = (generator.random((60, 11)) < 1.0 / (1.0 + np.exp(-slope * trait[:, None] - intercept))).astype(int)

    def items(y=None):
        with numpyro.plate("items", 11):
            a = numpyro.sample("discrimination", dist.LogNormal(0, 0.5))
            d = numpyro.sample("intercept", dist.Normal(0, 3))
        return a, d

    def with_people(y):
        a, d = items()
        with numpyro.plate("people", len(y)):
            trait = numpyro.sample("trait", dist.Normal(0, 1))
        numpyro.sample("response", dist.Bernoulli(logits=a * trait[:, None] + d), obs=y)

    def summed(y):
        a, d = items()
        logits = a[:, None] * nodes + d[:, None]
        joint = y @ logits - jnp.sum(jax.nn.softplus(logits), axis=0) - 0.5 * nodes**2
        numpyro.factor("people", jnp.sum(jax.nn.logsumexp(joint, axis=1)))

    sampler = MCMC(
        NUTS(summed), num_warmup=300, num_samples=600, num_chains=4, chain_method="vectorized", progress_bar=False
    )
    sampler.run(jax.random.key(0), y)
    engine = AdaptiveQuadrature(with_people, progress_bar=False)
    engine.run(jax.random.key(0), y)
    draws = engine.get_samples()
    for name, chains in sampler.get_samples(group_by_chain=True).items():
        expected, sd = np.mean(chains, axis=(0, 1)), np.std(chains, axis=(0, 1))
        error = 1.0 / np.sqrt(effective_sample_size(np.asarray(chains)))
        found = engine.hyper[name]
        assert np.all(np.abs(found.mean - expected) < (0.06 + NUM_ERRORS * error) * sd)
        assert np.all(np.abs(found.sd / sd - 1.0) < 0.08 + NUM_ERRORS * error / np.sqrt(2.0))
        # one posterior, one answer: draws are at 256 points
        assert np.all(np.abs(draws[name].mean(0) - found.mean) < NUM_ERRORS / 16.0 * found.sd)
        np.testing.assert_allclose(draws[name].std(0), found.sd, rtol=NUM_ERRORS / np.sqrt(512.0))
        np.testing.assert_allclose(engine.posterior[name].mean, found.mean)
    trait = engine.posterior["trait"]
    assert np.all(np.abs(draws["trait"].mean(0) - trait.mean) < NUM_ERRORS / np.sqrt(1000.0) * trait.sd)


def test_people_are_the_field_also_where_they_are_fewer_than_items():
    people = _answers()[:3]
    engine = AdaptiveQuadrature(two_parameter_logistic)
    assert engine._read(jax.random.key(0), (people,), {}).field == ("trait",)
    chosen = AdaptiveQuadrature(two_parameter_logistic, field=["intercept"])
    assert chosen._read(jax.random.key(0), (people,), {}).field == ("intercept",)


def test_the_choice_of_the_field_is_described(engine):
    assert "over ['trait']; field=['intercept'] integrates" in engine.describe()


@pytest.mark.float32
def test_rounding_of_many_people_is_no_fault_of_the_nodes():
    y = np.tile(_answers(), (400, 1))
    engine = AdaptiveQuadrature(
        two_parameter_logistic, hyper_values={"discrimination": _SLOPE, "intercept": _INTERCEPT}
    )
    engine.run(jax.random.key(0), y)
    grid, joint = _on_a_grid(_answers())
    expected = 400 * (logsumexp(joint, axis=1).sum() + _NUM_PEOPLE * np.log(grid[1] - grid[0]))
    np.testing.assert_allclose(float(engine.log_evidence), expected, rtol=1e-5)
    assert engine._run.algorithm.num_nodes == 73 and not engine.diagnostics.messages


@pytest.mark.thorough
def test_predictors_that_are_constant_stand_beside_the_others_of_their_answer():
    """The first category has predictor zero for all people: a row that sees none of them."""
    rng = np.random.default_rng(0)
    y, slopes, levels = rng.integers(0, 3, (6, 2)), rng.normal(size=(2, 2)), rng.normal(size=(2, 2))

    def nominal(y):
        with numpyro.plate("people", len(y)):
            trait = numpyro.sample("trait", dist.Normal(0, 1))
        logits = trait[:, None, None] * slopes + levels
        logits = jnp.concatenate([jnp.zeros((len(y), 2, 1)), logits], axis=-1)
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)

    engine = AdaptiveQuadrature(nominal)
    engine.run(jax.random.key(0), y)
    grid = np.linspace(-9, 9, 1001)
    logits = np.concatenate([np.zeros((len(grid), 2, 1)), grid[:, None, None] * slopes + levels], axis=-1)
    table = logits - logsumexp(logits, axis=-1, keepdims=True)
    joint = np.stack([table[:, 0, a] + table[:, 1, b] + norm.logpdf(grid) for a, b in y])
    assert abs(float(engine.log_evidence) - (logsumexp(joint, 1) + np.log(grid[1] - grid[0])).sum()) < 1e-8
    weights = np.exp(joint - logsumexp(joint, axis=1, keepdims=True))
    np.testing.assert_allclose(engine.posterior["trait"].mean, weights @ grid, atol=1e-8)
