"""Likelihoods of two predictors, both in the field: against integrals over the unknowns and NUTS."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

from numpyro_ext.infer import EP, INLA, LaplaceApproximation, VariationalGaussian, cross_validate
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from tests.tiers import few, thorough

ENGINES = [EP, VariationalGaussian, LaplaceApproximation]
RNG = np.random.default_rng(0)
MANY, N = 150, 30
X, Z = (np.stack([np.ones(MANY), RNG.normal(size=MANY)], axis=1) for _ in range(2))
GROUP = np.arange(N) % 5
ALL_REAL = X @ [1.0, 2.0] + np.exp(Z @ [-0.3, 0.5]) * RNG.normal(size=MANY)
INFLATED = np.where(RNG.uniform(size=MANY) < 1 / (1 + np.exp(-Z @ [-0.5, 1.0])), 0, RNG.poisson(np.exp(X @ [0.8, 0.6])))
SHAPES = np.exp(Z @ [0.8, 0.5])
DISPERSED = RNG.poisson(RNG.gamma(SHAPES, np.exp(X @ [1.2, 0.4]) / SHAPES))
REAL, COUNTS = ALL_REAL[:N], INFLATED[:N]


def _predictors(y):
    b, c = (numpyro.sample(name, dist.Normal(0, 2).expand([2]).to_event(1)) for name in "bc")
    return X[: len(y)] @ b, Z[: len(y)] @ c


def noisy(y, mask=True):
    location, log_scale = _predictors(y)
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(location, jnp.exp(log_scale)), obs=y)


def noisy_in_one_sum(y):
    location, log_scale = _predictors(y)
    numpyro.factor("y", jnp.sum(-0.5 * ((y - location) * jnp.exp(-log_scale)) ** 2 - log_scale))


def noisy_in_two_sums(y):
    location, log_scale = _predictors(y)
    numpyro.factor("y", jnp.sum(-0.5 * ((y - location) * jnp.exp(-log_scale)) ** 2) - jnp.sum(log_scale))


def lifetimes(y):
    """A Weibull density, of which the log shape stands alone and is a sum of two sites."""
    b, c = (numpyro.sample(name, dist.Normal(0, 2).expand([2]).to_event(1)) for name in "bc")
    log_shape = Z[: len(y)] @ c + numpyro.sample("s", dist.Normal(0, 1).expand([5]))[GROUP]
    power = jnp.exp(log_shape) * (jnp.log(jnp.abs(y)) - X[: len(y)] @ b)
    numpyro.factor("y", jnp.sum(log_shape + power - jnp.exp(power)))


def inflated(y):
    log_rate, logits = _predictors(y)
    numpyro.sample("y", dist.ZeroInflatedPoisson(gate=jax.nn.sigmoid(logits), rate=jnp.exp(log_rate)), obs=y)


def inflated_by_logits(y):
    log_rate, logits = _predictors(y)
    numpyro.sample("y", dist.ZeroInflatedDistribution(dist.Poisson(jnp.exp(log_rate)), gate_logits=logits), obs=y)


def inflated_by_hand(y):
    log_rate, logits = _predictors(y)
    count = dist.Poisson(jnp.exp(log_rate)).log_prob(y) + jax.nn.log_sigmoid(-logits)
    numpyro.factor("y", jnp.sum(jnp.where(y == 0, jnp.logaddexp(jax.nn.log_sigmoid(logits), count), count)))


def dispersed(y):
    log_mean, log_shape = _predictors(y)
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(log_mean), jnp.exp(log_shape)), obs=y)


def weighted_backwards(y):
    """Each row has the weight of its mirror image."""
    log_rate, logits = _predictors(y)
    counts = dist.ZeroInflatedDistribution(dist.Poisson(jnp.exp(log_rate)), gate_logits=logits)
    numpyro.factor("y", jnp.sum((counts.log_prob(y)[::-1] * (1.0 + np.arange(len(y))))[::-1]))


def groups(y):
    with numpyro.plate("groups", 5):
        level = numpyro.sample("level", dist.Normal(0, 2))
        log_scale = numpyro.sample("log_scale", dist.Normal(0, 0.5))
    numpyro.sample("y", dist.Normal(level[GROUP], jnp.exp(log_scale)[GROUP]), obs=y)


def crossed(y):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]))
    s = numpyro.sample("s", dist.Normal(0, 0.5).expand([5]))
    numpyro.sample("y", dist.StudentT(4, X[:N] @ b, jnp.exp(s[GROUP])), obs=y)


def scalars(y):
    a, b, c, d = (numpyro.sample(name, dist.Normal(0, 2)) for name in "abcd")
    numpyro.sample("y", dist.Normal(a + b * X[:N, 1], jax.nn.softplus(c + d * Z[:N, 1])), obs=y)


def one_scale(y):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]))
    log_scale = numpyro.sample("log_scale", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(X[:N] @ b, jnp.exp(log_scale)), obs=y)


def two_lines(y, weight=0.5):
    b, c = (numpyro.sample(name, dist.Normal(0, 2).expand([2])) for name in "bc")
    parts = dist.Normal(jnp.stack([X[:N] @ b, X[:N] @ c], axis=-1), 0.5)
    numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(probs=jnp.array([weight, 1 - weight])), parts), obs=y)


def two_units(y):
    inner, outer = (numpyro.sample(name, dist.Normal(0, 1).expand([2])) for name in ("b", "c"))
    weight = numpyro.sample("weight", dist.Normal(0, 1).expand([2]))  # zero where the model is read
    logits = weight[0] * jnp.tanh(X[:N] @ inner) + weight[1] * jnp.tanh(X[:N] @ outer)
    numpyro.sample("y", dist.Bernoulli(logits=logits), obs=(y > 0).astype(int))


def _run(engine, model, *args, **options):
    found = engine(model, progress_bar=False, **options)
    found.run(jax.random.key(0), *args)
    assert found.diagnostics.converged
    return found


@pytest.mark.parametrize(
    ("model", "y", "has_own"),
    few([(inflated, COUNTS, True), (lifetimes, REAL, True), (weighted_backwards, COUNTS, False)], 1),
)
def test_data_belong_to_factors_where_no_other_depends_on_them(model, y, has_own):
    (potential,) = read_latent_gaussian(model, (y,)).abstract_form.potentials
    assert potential.base.has_own_args == has_own


@pytest.mark.parametrize(
    ("model", "y", "field", "label"),
    few(
        [
            (noisy, REAL, "b c", "two predictors, Gaussian in one"),
            (noisy_in_one_sum, REAL, "b c", "two predictors, Gaussian in one"),
            (noisy_in_two_sums, REAL, "b c", "two predictors, Gaussian in one"),
            (lifetimes, REAL, "b c s", "y (30,) (factor of two predictors, by quadrature"),
            (scalars, REAL, "a b c d", "two predictors, Gaussian in one"),
            (groups, REAL, "level log_scale", "y (5,) (factor of two predictors, Gaussian in one"),
            (crossed, REAL, "b s", "y (30,) (factor of two predictors, by quadrature"),
            (inflated, COUNTS, "b c", "two predictors, by quadrature"),
            (inflated_by_hand, COUNTS, "b c", "two predictors, by quadrature"),
            (two_units, REAL, "weight", "y (30,) (bernoulli"),
            (two_lines, REAL, "b c", "mixture of functions of two predictors"),
            # one number for all observations stays a hyperparameter, and the likelihood what it was
            (one_scale, REAL, "b", "(normal)"),
        ],
        4,
    ),
)
def test_both_predictors_are_in_the_field(model, y, field, label):
    reading = read_latent_gaussian(model, (y,))
    assert set(reading.field) == set(field.split())
    assert label in reading.describe()


def test_inner_weights_are_the_field_when_they_are_named():
    reading = read_latent_gaussian(two_units, (REAL,), field=["b", "c"])
    assert "y (30,) (factor of two predictors, by quadrature" in reading.describe()


def test_a_scale_of_the_prior_does_not_separate_two_predictors():
    def model(y):
        scale = jnp.exp(numpyro.sample("log_prior_scale", dist.Normal(0, 1)))
        b = numpyro.sample("b", dist.Normal(0, scale).expand([2]))
        c = numpyro.sample("c", dist.Normal(0, 1).expand([2]))
        numpyro.sample("y", dist.Normal(X[:N] @ b, jnp.exp(X[:N] @ c)), obs=y)

    assert set(read_latent_gaussian(model, (REAL,)).field) == {"b", "c"}


def test_a_field_that_is_named_holds_one_predictor():
    reading = read_latent_gaussian(noisy, (REAL,), field=["b"])
    assert (reading.field, tuple(reading.hyper)) == (("b",), ("c",))
    assert "y (30,) (normal)" in reading.describe()


def _grid_moments(model, y, shapes, centers, spans, num_nodes):
    """Log evidence, means and deviations of all unknowns by a sum over a grid of NumPyro's own density."""
    axes = [m + s * np.linspace(-1.0, 1.0, num_nodes) for m, s in zip(centers, spans, strict=True)]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])[:-1]

    def joint(point):
        parts = zip(shapes.items(), jnp.split(point, ends), strict=True)
        return log_density(model, (y,), {}, {name: part.reshape(shape) for (name, shape), part in parts})[0]

    values = np.asarray(jax.jit(lambda p: jax.lax.map(joint, p, batch_size=4096))(jnp.asarray(points)), float)
    weight = np.exp(values - values.max())
    evidence = values.max() + np.log(weight.sum() * np.prod([axis[1] - axis[0] for axis in axes]))
    weight /= weight.sum()
    mean = weight @ points
    return evidence, mean, np.sqrt(weight @ (points - mean) ** 2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("engine", "nats", "deviations", "ratio"),
    [(EP, 0.1, 0.1, 0.1), *thorough((VariationalGaussian, 0.2, 0.1, 0.2), (LaplaceApproximation, 0.2, 0.7, 0.2))],
)
def test_a_short_regression_of_location_and_scale(engine, nats, deviations, ratio):
    found = _run(engine, noisy, REAL)
    own = found.posterior
    center, spread = (np.concatenate([getattr(own[name], part) for name in "bc"]) for part in ("mean", "sd"))
    evidence, mean, sd = _grid_moments(noisy, REAL, {"b": (2,), "c": (2,)}, center, 6.5 * spread, 35)
    assert abs(found.log_evidence - evidence) < nats
    if engine is VariationalGaussian:
        assert found.is_lower_bound and found.log_evidence < evidence
    assert np.all(np.abs(center - mean) < deviations * sd)
    assert np.all(np.abs(np.log(spread / sd)) < ratio)


@pytest.mark.thorough
def test_groups_that_share_both_predictors_are_one_factor_each_and_ep_is_exact():
    # one factor and one prior to each pair of unknowns: nothing is approximated but the shape of the posterior
    found = _run(EP, groups, REAL)
    total = 0.0
    for group in range(5):
        y = REAL[GROUP == group]

        def alone(y):
            level = numpyro.sample("level", dist.Normal(0, 2))
            log_scale = numpyro.sample("log_scale", dist.Normal(0, 0.5))
            numpyro.sample("y", dist.Normal(level, jnp.exp(log_scale)), obs=y)

        shapes = {"level": (), "log_scale": ()}
        evidence, mean, sd = _grid_moments(alone, y, shapes, [0.5, 0.2], [8.0, 3.0], 301)
        own = found.posterior
        np.testing.assert_allclose([own[n].mean[group] for n in ("level", "log_scale")], mean, atol=1e-3)
        np.testing.assert_allclose([own[n].sd[group] for n in ("level", "log_scale")], sd, rtol=1e-3)
        total += evidence
    np.testing.assert_allclose(found.log_evidence, total, atol=1e-3)


@pytest.mark.thorough
def test_extrapolated_sweeps_are_fewer_and_end_where_plain_ones_do():
    plain, found = (_run(EP, noisy, REAL, adapt_damping=adapts) for adapts in (False, True))
    assert plain.diagnostics.converged and found.diagnostics.converged
    assert found.diagnostics.num_steps < plain.diagnostics.num_steps
    # The evidence is that of the end, though no sweep is made for it alone.
    np.testing.assert_allclose(found.log_evidence, plain.log_evidence, rtol=1e-9)
    np.testing.assert_allclose(found.posterior["b"].mean, plain.posterior["b"].mean, rtol=1e-6)


@pytest.mark.thorough
def test_zero_inflation_in_three_idioms():
    found = [_run(LaplaceApproximation, model, COUNTS) for model in (inflated, inflated_by_logits, inflated_by_hand)]
    for other in found[1:]:
        np.testing.assert_allclose(other.log_evidence, found[0].log_evidence, rtol=1e-6)
        np.testing.assert_allclose(other.posterior["c"].sd, found[0].posterior["c"].sd, rtol=1e-4)


@pytest.mark.thorough
def test_held_out_observations_are_integrated_over_both_predictors():
    mask = np.arange(N) % 6 > 0
    found = _run(EP, noisy, REAL, mask)
    scores = found.log_predictive()["y"]
    draws = found.get_samples()
    b, c = (np.asarray(draws[name]) for name in ("b", "c"))
    each = np.exp(dist.Normal(b @ X[:N].T, np.exp(c @ Z[:N].T)).log_prob(REAL))[:, ~mask]
    error = each.std(0) / each.mean(0) / np.sqrt(len(each))
    assert np.all(np.abs(scores[~mask] - np.log(each.mean(0))) < 5 * error)
    # missing values may be coded as anything
    again = _run(EP, noisy, np.where(mask, REAL, np.nan), mask)
    np.testing.assert_allclose(again.posterior["c"].mean, found.posterior["c"].mean, rtol=1e-6)


@pytest.mark.thorough
def test_answers_of_a_run(tmp_path):
    found = _run(LaplaceApproximation, noisy, REAL)
    assert found.psis_diagnostic(jax.random.key(0)) is not None
    found.save(tmp_path / "run")
    kept = LaplaceApproximation.load(tmp_path / "run", noisy)
    np.testing.assert_array_equal(kept.posterior["c"].mean, found.posterior["c"].mean)
    fits = LaplaceApproximation(noisy, progress_bar=False).run_many(jax.random.key(0), [(REAL,), (REAL + 1.0,)])
    np.testing.assert_allclose(fits.mean["c"][0], found.posterior["c"].mean, atol=1e-6)
    scores = cross_validate(LaplaceApproximation(noisy, progress_bar=False), jax.random.key(0), REAL, num_folds=3)
    assert np.all(np.isfinite(scores.log_predictive))


@pytest.mark.parametrize("engine", [EP, *thorough(VariationalGaussian)])
def test_mixtures_of_regressions_have_several_modes(engine):
    with pytest.raises(
        ModelStructureError, match=r"'y' belongs to one of two regressions.*several modes.*field=.*NUTS"
    ):
        engine(two_lines).run(jax.random.key(0), REAL)


def test_products_with_columns_of_zeros_and_ones_are_told_to_be_selections():
    """The same rates are read where a selection is written."""
    x = np.linspace(-1.0, 1.0, len(COUNTS))
    first = np.arange(len(COUNTS)) % 2 == 0

    def rates(is_product):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        one, other = (jnp.exp(a[k] + b[k] * x) for k in range(2))
        rate = first * one + ~first * other if is_product else jnp.where(first, one, other)
        numpyro.sample("y", dist.Poisson(rate), obs=COUNTS)

    with pytest.raises(ModelStructureError, match=r"columns of zeros and ones .* choose by jnp.where\(column == 1"):
        EP(rates, progress_bar=False).run(jax.random.key(0), True)
    assert "poisson, exp link" in read_latent_gaussian(rates, (False,)).describe()


@pytest.mark.thorough
@pytest.mark.parametrize("weight", [0.5, 0.4])
def test_laplace_finds_a_mode_of_a_mixture_and_says_so(weight):
    lines = np.where(RNG.uniform(size=N) < weight, X[:N] @ [1.0, 2.0], X[:N] @ [-1.0, -1.0]) + 0.3 * RNG.normal(size=N)
    engine = LaplaceApproximation(two_lines, progress_bar=False)
    with pytest.warns(UserWarning, match="several modes: this is one of them"):
        engine.run(jax.random.key(0), lines, weight)
    assert engine.diagnostics.converged

    def joint(b, c):
        return log_density(two_lines, (lines, weight), {}, {"b": b, "c": c})[0]

    at = jnp.concatenate([engine.posterior["b"].mean, engine.posterior["c"].mean])
    slope = jax.grad(lambda x: joint(x[:2], x[2:]))(at)
    curvature = jax.hessian(lambda x: joint(x[:2], x[2:]))(at)
    assert np.all(np.linalg.eigvalsh(curvature) < 0)
    assert np.sqrt(-slope @ np.linalg.solve(curvature, slope)) < 1e-4
    own = np.concatenate([engine.posterior["b"].sd, engine.posterior["c"].sd])
    np.testing.assert_allclose(own, np.sqrt(np.diagonal(np.linalg.inv(-curvature))), rtol=1e-4)


def test_options_for_one_predictor_are_refused():
    with pytest.raises(ModelStructureError, match="sequential schedule.*'y' have 2 each"):
        EP(noisy, schedule="sequential").run(jax.random.key(0), REAL)
    with pytest.raises(ModelStructureError, match=r"'y' \(PairPotential\).*marginal='gaussian'.*field="):
        INLA(noisy).run(jax.random.key(0), REAL)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "y"), [(noisy, ALL_REAL), (inflated, INFLATED), (dispersed, DISPERSED)])
def test_regressions_of_both_predictors_against_nuts(model, y):
    mcmc = MCMC(NUTS(model), num_warmup=1000, num_samples=8000, progress_bar=False)
    mcmc.run(jax.random.key(0), y)
    draws = mcmc.get_samples()
    limits = ((EP, 0.15, 0.15), (VariationalGaussian, 0.15, 0.15), (LaplaceApproximation, 0.4, 0.15))
    for engine, deviations, ratio in limits:
        found = _run(engine, model, y)
        for name in ("b", "c"):
            mean, sd = draws[name].mean(0), draws[name].std(0)
            gap = np.abs(found.posterior[name].mean - mean) / sd
            spread = np.abs(np.log(found.posterior[name].sd / sd))
            assert gap.max() < deviations, (engine.__name__, name, gap)
            assert spread.max() < ratio, (engine.__name__, name, spread)
