"""Posteriors at new arguments, against the model fitted with the new observations present and masked."""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
import tinygp
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.contrib.hsgp.approximation import hsgp_squared_exponential
from numpyro.infer import MCMC, NUTS, Predictive

from numpyro_ext.infer import EP, INLA, BilinearVG, LaplaceApproximation, VariationalGaussian
from numpyro_ext.infer.front.answers.model_draws import predictive_draws
from numpyro_ext.infer.gaussian.new_arguments import predict as new_arguments
from tests.compilations import compiled_programs
from tests.monte_carlo import assert_close_deviations, assert_close_means
from tests.tiers import few, thorough

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    import arviz as az

KEY = jax.random.key(0)
N, M = 12, 4
IS_OLD = np.arange(N + M) < N
_generator = np.random.default_rng(0)
GROUP, NEW_GROUP = np.arange(N) % 3, np.array([0, 3, 3, 2])
X, NEW_X = _generator.normal(size=(2, N))[:, :N][0], _generator.normal(size=M)
Y = 0.5 * X + 0.3 * GROUP + 0.2 * _generator.normal(size=N)
COUNTS = _generator.poisson(2.0, size=N) + 1

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")


def joined(*parts: Any) -> np.ndarray:
    return np.concatenate(parts)


def padded(y: np.ndarray, number: int = M) -> np.ndarray:
    return np.append(y, np.zeros(number, y.dtype))


def slopes(group, x, num_groups, y=None, mask=True, *, centred=False):
    """Intercepts and slopes of groups, correlated."""
    corr = numpyro.sample("corr", dist.LKJCholesky(2, 2.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([2]).to_event(1))
    tril = scale[:, None] * corr
    if centred:
        with numpyro.plate("groups", num_groups):
            b = numpyro.sample("b", dist.MultivariateNormal(mean, scale_tril=tril))
    else:
        z = numpyro.sample("z", dist.Normal(0, 1).expand([num_groups, 2]).to_event(2))
        b = numpyro.deterministic("b", mean + z @ tril.T)
    line = numpyro.deterministic("line", b[group, 0] + b[group, 1] * x)
    with numpyro.plate("rows", len(x)), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(line, 0.3), obs=y)


def labelled(label, x, y=None, mask=True):
    """The model recodes labels, so that new ones come between old ones."""
    _, group = np.unique(np.asarray(label), return_inverse=True)
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    a = numpyro.sample("a", dist.Normal(0, scale).expand([int(group.max()) + 1]))
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(a[group] + x, 0.3), obs=y)


def process(x, y=None, mask=True):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    gp = tinygp.GaussianProcess(scale**2 * tinygp.kernels.Matern52(0.8), x, diag=1e-4)
    f = numpyro.sample("f", gp.numpyro_dist())
    numpyro.deterministic("double", 2.0 * f)
    numpyro.deterministic("rate", jnp.exp(f))
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def basis(x, y=None, mask=True, ell=3.0):
    f = hsgp_squared_exponential(x, alpha=1.0, length=0.7, ell=ell, m=10)
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    numpyro.deterministic("f", f)
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def walk(num_steps, y=None, mask=True):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.GaussianRandomWalk(scale, num_steps=num_steps))
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)


def series(y=None, num_steps=N, mask=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1))

    def step(level, now):
        value, is_seen = (now, True) if mask is None else now
        level = numpyro.sample("level", dist.Normal(level, scale))
        with handlers.mask(mask=is_seen):
            numpyro.sample("y", dist.Normal(level, 0.5), obs=value)
        return level, None

    scan(step, numpyro.sample("start", dist.Normal(0, 3)), y if mask is None else (y, mask), length=num_steps)


def forecast(y, num_ahead=0):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.GaussianRandomWalk(scale, num_steps=len(y) + num_ahead))
    numpyro.sample("y", dist.Normal(level[: len(y)], 0.5), obs=y)
    if num_ahead:
        numpyro.sample("ahead", dist.Normal(level[len(y) :], 0.5))


def two(x, z, y=None, counts=None, mask=True, mask_counts=True):
    """Two observed sites of different lengths."""
    a, b = numpyro.sample("a", dist.Normal(0, 1)), numpyro.sample("b", dist.Normal(0, 1))
    rate = numpyro.deterministic("log_rate", a + b * z)
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(b * x, 0.3), obs=y)
    with handlers.mask(mask=mask_counts):
        numpyro.sample("counts", dist.Poisson(jnp.exp(rate)), obs=counts)


def classes(x, y=None, mask=True):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2, 3]).to_event(2))
    logits = numpyro.deterministic("logits", jnp.stack([jnp.ones(len(x)), x], -1) @ b)
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def totals(x, total, y=None, mask=True):
    """New totals may be below every old count."""
    b = numpyro.sample("b", dist.Normal(0, 1))
    line = numpyro.deterministic("line", b * x)
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Binomial(total, logits=line), obs=y)


def panel(x, y=None, mask=True):
    a = numpyro.sample("a", dist.Normal(0, 1).expand([x.shape[1]]))
    walk = numpyro.sample("walk", dist.GaussianRandomWalk(0.5, num_steps=x.shape[0]))
    line = numpyro.deterministic("line", walk[:, None] + a * x)
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(line, 0.3), obs=y)


TOTALS, PANEL = np.full(N, 20), np.random.default_rng(2).normal(size=(6, 3))
LABELS, NEW_LABELS = np.array(["b", "d", "e"])[GROUP], np.array(["a", "b", "c", "d"])
ALL_X, ALL_GROUPS = joined(X, NEW_X), joined(GROUP, NEW_GROUP)
LONG = np.cumsum(np.random.default_rng(1).normal(size=300)) * 0.3
CASES = {
    "members of groups": (
        LaplaceApproximation, slopes, (GROUP, X, 3, Y), (NEW_GROUP, NEW_X, 4),
        (ALL_GROUPS, ALL_X, 4, padded(Y), IS_OLD), {"line": (N,)},
    ),
    "members, centred": (
        EP, partial(slopes, centred=True), (GROUP, X, 3, Y), (NEW_GROUP, NEW_X, 4),
        (ALL_GROUPS, ALL_X, 4, padded(Y), IS_OLD), {"line": (N,)},
    ),
    "labels": (
        LaplaceApproximation, labelled, (LABELS, X, Y), (NEW_LABELS, NEW_X),
        (joined(LABELS, NEW_LABELS), ALL_X, padded(Y), IS_OLD), {},
    ),
    "process": (EP, process, (X, COUNTS), (NEW_X,), (ALL_X, padded(COUNTS), IS_OLD), {"f": (N,), "double": (N,)}),
    "process, bound": (
        VariationalGaussian, process, (X, COUNTS), (NEW_X,), (ALL_X, padded(COUNTS), IS_OLD),
        {"f": (N,), "double": (N,)},
    ),
    "basis": (LaplaceApproximation, basis, (X, Y), (2 * NEW_X,), (joined(X, 2 * NEW_X), padded(Y), IS_OLD),
              {"f": (N,)}),
    "walk": (LaplaceApproximation, walk, (N, COUNTS), (N + M,), (N + M, padded(COUNTS), IS_OLD), {}),
    "scan": (LaplaceApproximation, series, (Y, N), (None, N + M), (padded(Y), N + M, IS_OLD), {}),
    "state space": (LaplaceApproximation, series, (LONG, 300), (None, 304), (padded(LONG), 304, np.arange(304) < 300),
                    {}),
    "forecast": (LaplaceApproximation, forecast, (Y,), (Y, M), (Y, M), {}),
    "two sites": (
        EP, two, (X, X[:7], Y, COUNTS[:7]), (NEW_X, NEW_X[:2]),
        (ALL_X, joined(X[:7], NEW_X[:2]), padded(Y), padded(COUNTS[:7], 2), IS_OLD, np.arange(9) < 7),
        {"log_rate": (7,)},
    ),
    "totals": (EP, totals, (X, TOTALS, COUNTS), (NEW_X, np.array([3, 1, 9, 2])),
               (ALL_X, joined(TOTALS, [3, 1, 9, 2]), padded(COUNTS), IS_OLD), {"line": (N,)}),
    "panel": (LaplaceApproximation, panel, (PANEL, 2.0 * PANEL), (PANEL[:2],),
              (joined(PANEL, PANEL[:2]), joined(2.0 * PANEL, PANEL[:2]), (np.arange(8) < 6)[:, None]),
              {"line": (6, 0), "walk": (6,)}),
    "classes": (VariationalGaussian, classes, (X, GROUP), (NEW_X,), (ALL_X, padded(GROUP), IS_OLD), {"logits": (N,)}),
}  # fmt: skip


def given(model):
    """Values of the hyperparameters, so that nothing is to be learned."""
    function = getattr(model, "func", model)
    if function is slopes:
        return {"corr": np.array([[1.0, 0.0], [0.6, 0.8]]), "scale": np.array([0.6, 0.4])}
    name = ({basis: "noise"} | dict.fromkeys((two, classes, totals, panel))).get(function, "scale")
    return {} if name is None else {name: 0.6}


def fitted(engine, model, args, **options):
    found = engine(model, progress_bar=False, **{"hyper_values": given(model), **options})
    found.run(KEY, *args)
    return found


FEW = ("members of groups", "process")


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize("case", [*FEW, *thorough(*(case for case in CASES if case not in FEW))])
def test_predictions_are_those_of_the_fit_with_new_observations_masked(case):
    engine, model, old, new, joint, starts = CASES[case]
    found = fitted(engine, model, old, tol=1e-10).predict(KEY, *new)
    whole = fitted(engine, model, joint, tol=1e-10)
    assert set(found.posterior) == set(whole.posterior)
    for name, site in found.posterior.items():
        cut = tuple(slice(n, None) for n in starts.get(name, ()))
        expected = whole.posterior[name]
        np.testing.assert_allclose(site.mean, expected.mean[cut], atol=1e-8, err_msg=name)
        np.testing.assert_allclose(site.sd, expected.sd[cut], atol=1e-8, err_msg=name)
        ends = [end[cut] for end in expected.interval(0.9)]
        np.testing.assert_allclose(site.interval(0.9), ends, atol=1e-8, err_msg=name)


@needs_float64
@pytest.mark.parametrize("marginal", thorough("gaussian", "simplified-laplace"))
def test_mixtures_over_hyperparameters_are_predicted_point_by_point(marginal):
    """Each component is the masked fit at its point of the design, with the weight that the fit gave it."""
    engine = fitted(INLA, process, (X, COUNTS), marginal=marginal, hyper_values={}, tol=1e-10, grid_step=1.5)
    found = engine.predict(KEY, NEW_X)
    run = engine._finished()
    parts = []
    for _, hyper, _ in run.design_points():
        part = fitted(INLA, process, (ALL_X, padded(COUNTS), IS_OLD), marginal=marginal, hyper_values=hyper, tol=1e-10)
        parts.append(part.posterior["f"].mixture)
    weights = run.exploration.weights
    site = found.posterior["f"]
    assert site.shape == (M,) and len(weights) > 3
    for name in ("means", "variances", "skewnesses"):
        expected = np.concatenate([getattr(part, name)[:, N:] for part in parts])
        np.testing.assert_allclose(getattr(site.mixture, name), expected, atol=1e-8)
    centred = np.asarray(site.mixture.means) - np.asarray(site.mean)
    np.testing.assert_allclose(np.diag(site.covariance()), weights @ (site.mixture.variances + centred**2), rtol=1e-8)
    draws = found.get_samples()
    assert len(np.unique(draws["scale"])) > 2 and draws["f"].shape == draws["y"].shape == (1000, M)


@pytest.fixture(scope="module")
def groups():
    return fitted(LaplaceApproximation, slopes, (GROUP, X, 3, Y), num_samples=4000)


@pytest.mark.thorough
def test_draws_have_the_moments_of_the_posterior_and_observations_their_noise(groups):
    found = groups.predict(KEY, NEW_GROUP, NEW_X, 4)
    draws = found.get_samples()
    assert {name: value.shape[1:] for name, value in draws.items()} == {
        "corr": (2, 2), "scale": (2,), "mean": (2,), "z": (4, 2), "b": (4, 2), "line": (M,), "y": (M,),
    }  # fmt: skip
    assert found["y"] is draws["y"] and list(found) == list(draws) and "y" in found and "no site" not in found
    with pytest.raises(KeyError, match="Draws are of the sites corr"):
        found["no site"]
    for name in set(found.posterior) - set(groups.hyper):
        assert_close_means(draws[name], found.posterior[name].mean)
        assert_close_deviations(draws[name], found.posterior[name].sd)
    noise = np.asarray(draws["y"]) - np.asarray(draws["line"])
    assert_close_means(noise, np.zeros(M))
    assert_close_deviations(noise, np.full(M, 0.3))
    covariance = found.posterior["line"].covariance()
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), found.posterior["line"].sd, rtol=1e-5)
    drawn = found.posterior["line"].sample(KEY, 4000)
    assert drawn.shape == (4000, M)
    assert_close_deviations(drawn, found.posterior["line"].sd)
    with pytest.raises(KeyError, match="'y': it is observed"):
        found.posterior["y"]


AS_TYPED = {
    "lists": (GROUP.tolist(), X.tolist(), 3, Y),
    "jax": (jnp.asarray(GROUP), jnp.asarray(X), 3, jnp.asarray(Y)),
    "small": (GROUP.astype(np.int8), X.astype(np.float32), np.int64(3), Y),
    "pandas": (pd.Series(GROUP), pd.Series(X, index=range(5, 5 + N)), 3, pd.Series(Y)),
}
NEW_AS_TYPED = {
    "lists": (NEW_GROUP.tolist(), NEW_X.tolist(), 4),
    "jax": (jnp.asarray(NEW_GROUP), jnp.asarray(NEW_X), 4, None),
    "small": (NEW_GROUP.astype(np.int32), NEW_X.astype(np.float32), np.int8(4)),
    "pandas": (pd.Series(NEW_GROUP), pd.Series(NEW_X), 4),
}


def as_arrays(group, x, num_groups, y=None):
    slopes(np.asarray(group), np.asarray(x), num_groups, y)


@pytest.mark.parametrize("old", ["lists", *thorough("jax", "small"), "pandas"])
@pytest.mark.parametrize("new", NEW_AS_TYPED)
def test_arguments_are_what_people_type(groups, old, new):
    expected = groups.predict(KEY, NEW_GROUP, NEW_X, 4).posterior["line"]
    model = as_arrays if old == "lists" else slopes
    found = fitted(LaplaceApproximation, model, AS_TYPED[old], hyper_values=given(slopes))
    site = found.predict(KEY, *NEW_AS_TYPED[new]).posterior["line"]
    np.testing.assert_allclose(site.mean, expected.mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(site.sd, expected.sd, rtol=1e-4)


def by_name(data, mask=True):
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.deterministic("line", b * np.asarray(data["x"]))
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(b * np.asarray(data["x"]), 0.3), obs=np.asarray(data["y"]))


@pytest.mark.parametrize("kind", few([dict, pd.DataFrame], 1))
def test_tables_may_leave_out_what_is_observed(kind):
    """The model reads the observations from the table whether they are there or not."""
    engine = fitted(LaplaceApproximation, by_name, (kind({"x": X, "y": Y}),), hyper_values={})
    found = engine.predict(KEY, kind({"x": NEW_X}))
    np.testing.assert_allclose(found.posterior["line"].mean, NEW_X * engine.posterior["b"].mean, rtol=1e-6)
    draws = found.get_samples()
    assert draws["y"].shape == (1000, M)
    assert_close_means(draws["y"], found.posterior["line"].mean)


def test_rows_that_are_as_many_as_those_of_the_fit_come_behind_them(groups):
    """Groups that are equal in both calls count rows as well."""
    found = groups.predict(KEY, GROUP, X + 1.0, 3).posterior
    assert found["line"].shape == (N,) and found["b"].shape == (3, 2)
    b = np.asarray(groups.posterior["b"].mean)
    np.testing.assert_allclose(found["line"].mean, b[GROUP, 0] + b[GROUP, 1] * (X + 1.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("new", [(), (GROUP, X, 3), (GROUP, X, 3, Y)], ids=["none", "the same", "with observations"])
def test_without_new_arguments_it_is_the_posterior_of_the_fit(groups, new):
    found = groups.predict(KEY, *new)
    np.testing.assert_array_equal(found.posterior["line"].mean, groups.posterior["line"].mean)
    draws = found.get_samples()["y"]
    assert draws.shape == (4000, N)
    sd = np.sqrt(np.asarray(groups.posterior["line"].variance) + 0.09)
    assert_close_means(draws, groups.posterior["line"].mean)
    assert_close_deviations(draws, sd)


@pytest.mark.thorough
def test_inputs_that_begin_with_those_of_the_fit_are_all_inputs():
    engine = fitted(LaplaceApproximation, process, (X, COUNTS))
    found, behind = engine.predict(KEY, ALL_X), engine.predict(KEY, NEW_X)
    assert found.posterior["f"].shape == (N + M,) and found.get_samples()["y"].shape == (1000, N + M)
    np.testing.assert_allclose(found.posterior["f"].mean[N:], behind.posterior["f"].mean, atol=1e-6)
    np.testing.assert_allclose(found.posterior["f"].mean[:N], engine.posterior["f"].mean, atol=1e-5)


@pytest.mark.parametrize("engine_type", [EP, LaplaceApproximation, VariationalGaussian])
def test_a_field_without_hyperparameters_and_with_gaussian_noise_has_predictions_in_closed_form(engine_type):
    def model(x, y=None):
        covariance = jnp.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-6 * jnp.eye(len(x))
        f = numpyro.sample("f", dist.MultivariateNormal(0.0, covariance))
        numpyro.sample("y", dist.Normal(f, 0.5), obs=y)

    x, new, y = np.linspace(0.0, 3.0, 8), np.array([0.4, 3.5]), np.sin(np.arange(8.0))
    engine = engine_type(model, progress_bar=False)
    engine.run(KEY, x, y)
    found = engine.predict(KEY, new).posterior["f"]
    across = np.exp(-0.5 * (new[:, None] - x) ** 2)
    weights = np.linalg.solve(np.exp(-0.5 * (x[:, None] - x) ** 2) + (0.25 + 1e-6) * np.eye(8), across.T)
    np.testing.assert_allclose(found.mean, weights.T @ y, rtol=1e-8)
    np.testing.assert_allclose(found.variance, 1.0 + 1e-6 - np.sum(across.T * weights, 0), rtol=1e-8)


def by_distances(distances, y=None):
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, jnp.exp(-distances) + 1e-4 * jnp.eye(len(distances))))
    numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


def test_what_cannot_be_told_from_the_calls_is_said(groups):
    def distances(a, b):
        return np.abs(a[:, None] - b)

    engine = fitted(LaplaceApproximation, by_distances, (distances(X, X), Y), hyper_values={})
    with pytest.raises(ValueError, match=r"argument 'distances' is .*two axes.*joint=\{'distances': ...\}"):
        engine.predict(KEY, distances(NEW_X, NEW_X))
    found = engine.predict(KEY, joint={"distances": distances(ALL_X, ALL_X)}).posterior["f"]
    prior = np.exp(-distances(ALL_X, ALL_X)) + 1e-4 * np.eye(N + M)
    gain = prior[:, :N] @ np.linalg.inv(prior[:N, :N] + 0.09 * np.eye(N))
    np.testing.assert_allclose(found.mean, (gain @ Y)[N:], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"joint= names \['distance'\].*\['distances', 'y'\]"):
        engine.predict(KEY, joint={"distance": 1.0})


def test_new_observations_are_scored_by_the_densities_of_the_masked_fit():
    engine = fitted(LaplaceApproximation, by_distances_of, (X, Y), hyper_values={})
    new_y = np.array([0.1, -0.3, 0.2, 0.5])
    found = engine.predict(KEY, NEW_X)
    f = found.posterior["f"]
    expected = dist.Normal(f.mean, jnp.sqrt(f.variance + 0.09)).log_prob(new_y)
    np.testing.assert_allclose(engine.log_predictive(NEW_X, new_y)["y"], expected, rtol=1e-5)
    np.testing.assert_allclose(engine.predict(KEY, NEW_X, new_y).log_predictive()["y"], expected, rtol=1e-5)
    with pytest.raises(ValueError, match="Give the observations that are to be scored"):
        found.log_predictive()


def by_distances_of(x, y=None):
    by_distances(jnp.abs(x[:, None] - x), y)


# Models that are others on old and new rows together, and arguments that do not go together.


def standardised(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(b * (x - x.mean()) / x.std(), 0.3), obs=y)


def standardised_values(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(b * x, 0.3), obs=None if y is None else y - y.mean())


def domain_of_data(x, y=None):
    basis(x, y, ell=1.5 * np.abs(np.asarray(x)).max())


def kernel_of_data(x, y=None):
    process(x / x.std(), y)


def fixed_size(group, x, y=None):
    slopes(group, x, 3, y)


def scale_of_members(group, num_groups, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.3).expand([num_groups]))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([num_groups]))
    numpyro.sample("y", dist.Normal(b[group], 0.2 + scale[group]), obs=y)


def heavy_members(group, num_groups, y=None):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.StudentT(4.0, 0.0, 1.0).expand([num_groups]))
    numpyro.sample("y", dist.Bernoulli(logits=mean + b[group]), obs=y)


def correlated_noise(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.MultivariateNormal(b * x, jnp.exp(-jnp.abs(x[:, None] - x))), obs=y)


def regression_on_steps_before(num_steps, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1))
    before = jnp.concatenate([jnp.zeros(1), y[:-1]])
    numpyro.deterministic("mean", b * before)
    numpyro.sample("y", dist.Normal(b * before, 0.3), obs=y)


def conditioned(x):
    handlers.condition(basis, data={"y": Y})(x)


REFUSED = {
    "standardised": (LaplaceApproximation, standardised, (X, Y), (NEW_X,),
                     "12 of the 12 predictors of the fit have changed"),
    "values": (LaplaceApproximation, standardised_values, (X, Y), (NEW_X,),
               "belongs to 'y'.*their likelihoods are others"),
    "domain": (LaplaceApproximation, domain_of_data, (X, Y), (3 * NEW_X,), r"differ by up to .* ends of a basis"),
    "kernel": (LaplaceApproximation, kernel_of_data, (X, COUNTS), (3 * NEW_X,), r"as x - x.mean\(\).*outside"),
    "fixed": (LaplaceApproximation, fixed_size, (GROUP, X, Y), (NEW_GROUP, NEW_X),
              "'b' is indexed out of range.*first 3, .*length 3"),
    "negative": (LaplaceApproximation, fixed_size, (GROUP, X, Y), (NEW_GROUP - 5, NEW_X), "'b' is .*first -5, "),
    "number": (LaplaceApproximation, slopes, (GROUP, X, 3, Y), (NEW_GROUP, NEW_X, 3), "New members of a group need a"),
    "cut": (LaplaceApproximation, walk, (N, COUNTS), (4,), "'num_steps' is 12 .* give the total.*num_steps=16"),
    "hyperparameter": (EP, scale_of_members, (GROUP, 3, Y), (NEW_GROUP, 4), r"'scale': \(4,\).* in the fit .*\(3,\)"),
    "heavy": (EP, heavy_members, (GROUP, 3, GROUP > 0), (NEW_GROUP, 4),
              r"prior of site 'b' \(StudentT\) is not Gaussian"),
    "noise": (LaplaceApproximation, correlated_noise, (X, Y), (NEW_X,), "coordinates of the observed site 'y'"),
    "lengths": (LaplaceApproximation, slopes, (GROUP, X, 3, Y), (NEW_GROUP, NEW_X[:3], 4), "'x' .* have 4 new ones"),
    "axes": (LaplaceApproximation, slopes, (GROUP, X, 3, Y), (NEW_GROUP, NEW_X[:, None], 4), "have 1 and 2 axes"),
    "number of rows": (LaplaceApproximation, slopes, (GROUP, X, 3, Y), (0, 0.5, 3), "a number stands for rows only"),
    "missing": (LaplaceApproximation, slopes, (GROUP, X, 3, Y), (NEW_GROUP, NEW_X), "missing a required argument"),
    "nothing": (LaplaceApproximation, slopes, (GROUP, X, 3, Y), (NEW_GROUP[:0], NEW_X[:0], 3),
                "there is nothing to predict"),
    "missing inputs": (LaplaceApproximation, basis, (X, Y), (np.nan * NEW_X,), "not finite.*NaN in the new arguments"),
    "conditioned": (LaplaceApproximation, conditioned, (X,), (NEW_X,), "Observations have to be an argument"),
    "steps before": (LaplaceApproximation, regression_on_steps_before, (N, Y), (N + M,),
                     "'mean' depends on observations"),
}  # fmt: skip


@pytest.mark.parametrize("case", few(REFUSED, 6))
def test_what_cannot_be_predicted_is_refused_with_what_was_found(case):
    engine, model, old, new, message = REFUSED[case]
    options = {}
    like = {domain_of_data: basis, conditioned: basis, kernel_of_data: process, fixed_size: slopes}
    if model in like:
        options["hyper_values"] = given(like[model])
    elif model not in (slopes, walk, basis):
        options["hyper_values"] = {}
    found = fitted(engine, model, old, **options)
    with pytest.raises(ValueError, match="(?s)" + message):
        found.predict(KEY, *new)


def test_draws_that_need_observations_that_there_are_not_are_refused():
    def model(num_steps, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(b * jnp.concatenate([jnp.zeros(1), y[:-1]]), 0.3), obs=y)

    found = fitted(LaplaceApproximation, model, (N, Y), hyper_values={}).predict(KEY, N + M)
    with pytest.raises(ValueError, match="Draws of 'y' depend on observations that are left out"):
        found.get_samples()


def rates(group, x, num_groups, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", num_groups):
        b = numpyro.sample("b", dist.Normal(0, scale))
    line = numpyro.deterministic("line", b[group] + 0.3 * x)
    numpyro.deterministic("rate", jnp.exp(line))
    numpyro.sample("y", dist.Poisson(jnp.exp(line)), obs=y)


def without_conditioning(monkeypatch):
    """Predictions fail that condition on all rows again."""

    def refuse(*args, **options):
        raise AssertionError("the field is known")

    monkeypatch.setattr(new_arguments, "on_all_rows", refuse)


@pytest.mark.thorough
@pytest.mark.float32
def test_new_rows_of_a_known_field_condition_nothing_and_draw_at_the_new_rows_alone(monkeypatch):
    """Moments of the field are those of the fit; draws at new rows are functions of its draws."""
    engine = fitted(EP, rates, (GROUP, X, 3, COUNTS), hyper_values={}, num_samples=500)
    without_conditioning(monkeypatch)
    found = engine.predict(KEY, np.array([2, 0]), np.array([0.5, -1.0]), 3, np.array([1, 2]))
    assert found.posterior["line"].shape == (2,)
    draws = found.get_samples()
    assert draws["y"].shape == draws["rate"].shape == (500, 2)
    b = np.asarray(engine.posterior["b"].mean)
    np.testing.assert_allclose(found.posterior["b"].mean, b)
    np.testing.assert_allclose(found.posterior["line"].mean, [b[2] + 0.15, b[0] - 0.3], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.posterior["line"].sd, engine.posterior["b"].sd[np.array([2, 0])], rtol=1e-4)
    covariance = np.asarray(engine.posterior["b"].covariance())[np.ix_([2, 0], [2, 0])]
    np.testing.assert_allclose(found.posterior["line"].covariance(), covariance, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(draws["rate"][:, 0], np.exp(draws["b"][:, 2] + 0.15), rtol=1e-4)
    assert_close_means(draws["y"], draws["rate"].mean(0))
    # One set of draws of latent sites, in orders of their own; scores are those of the same rows by another way.
    other = engine.predict(jax.random.key(1), np.array([2, 0]), np.array([0.5, -1.0]), 3).get_samples()
    assert not np.array_equal(other["b"], draws["b"])
    np.testing.assert_array_equal(np.sort(other["b"][:, 0]), np.sort(engine.get_samples()["b"][:, 0]))
    scores = engine.log_predictive(np.array([2, 0]), np.array([0.5, -1.0]), 3, np.array([1, 2]))["y"]
    np.testing.assert_allclose(found.log_predictive()["y"], scores, rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.float32
def test_new_members_are_drawn_by_the_model_and_condition_nothing(monkeypatch):
    """Old members have the draws of the fit; new ones their prior at each draw of its scale."""
    engine = fitted(EP, rates, (GROUP, X, 3, COUNTS), hyper_values={}, num_samples=500)
    without_conditioning(monkeypatch)
    draws = engine.predict(KEY, np.array([2, 4]), np.array([0.5, -1.0]), 5).get_samples()
    assert draws["b"].shape == (500, 5) and draws["y"].shape == draws["rate"].shape == (500, 2)
    own = engine.get_samples()
    order, own_order = (np.argsort(part["b"][:, 0]) for part in (draws, own))
    np.testing.assert_array_equal(draws["b"][order, :3], own["b"][own_order])
    np.testing.assert_array_equal(draws["scale"][order], own["scale"][own_order])
    standard = draws["b"][:, 3:] / draws["scale"][:, None]
    assert_close_means(standard, np.zeros(2))
    assert_close_deviations(standard, np.ones(2))
    np.testing.assert_allclose(draws["rate"][:, 1], np.exp(draws["b"][:, 4] - 0.3), rtol=1e-4)
    assert_close_means(draws["y"] - draws["rate"], np.zeros(2))


def crowded(group, num_groups, y=None):
    """The prior of a member depends on how many there are."""
    b = numpyro.sample("b", dist.Normal(0, num_groups**-0.5).expand([num_groups]))
    numpyro.sample("y", dist.Normal(b[group], 0.3), obs=y)


def centred_on_members(group, num_groups, y=None):
    """Old rows see new members."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([num_groups]))
    numpyro.sample("y", dist.Normal((b - 0.5 * b.mean())[group], 0.3), obs=y)


def weighted_by_rows(group, num_groups, y=None):
    """Old rows count less beside new ones."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([num_groups]).to_event(1))
    with handlers.scale(scale=10.0 / len(group)):
        numpyro.sample("y", dist.Normal(b[group], 0.3), obs=y)


@pytest.mark.parametrize("model", few([crowded, centred_on_members, weighted_by_rows], 1))
def test_new_members_that_change_the_fit_are_refused(model):
    engine = fitted(LaplaceApproximation, model, (GROUP, 3, Y), hyper_values={})
    with pytest.raises(ValueError, match="is not the one that was fitted"):
        engine.predict(KEY, NEW_GROUP, 4)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [LaplaceApproximation, EP])
def test_effects_of_rows_are_drawn_anew(engine):
    """The effects of new rows have their prior; their posterior in the conditioned model is the same."""

    def model(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x)):
            effect = numpyro.sample("effect", dist.Normal(0, 0.5))
            numpyro.sample("y", dist.Poisson(jnp.exp(slope * x + effect)), obs=y)

    found = fitted(engine, model, (X, COUNTS), hyper_values={}, num_samples=4000).predict(KEY, NEW_X)
    draws = found.get_samples()
    assert draws["effect"].shape == (4000, M)
    assert_close_means(draws["effect"], np.zeros(M))
    assert_close_deviations(draws["effect"], np.full(M, 0.5))
    for name in ("slope", "effect"):
        assert_close_means(draws[name], found.posterior[name].mean)
        assert_close_deviations(draws[name], found.posterior[name].sd)


@pytest.mark.thorough
def test_labels_that_are_others_among_new_rows_alone_are_drawn_as_on_all(monkeypatch):
    """Without conditioning, but not at the new rows alone, where the model numbers its groups anew."""
    engine = fitted(LaplaceApproximation, labelled, (np.array(list("abc"))[GROUP], X, Y), num_samples=4000)
    without_conditioning(monkeypatch)
    found = engine.predict(KEY, np.array(["c", "b"]), np.array([0.0, 1.0]))
    draws = found.get_samples()
    assert draws["y"].shape == (4000, 2)
    site = engine.posterior["a"]
    assert abs(float(site.mean[2] - site.mean[0])) > 0.3  # as which they would be counted alone
    assert_close_means(draws["y"], site.mean[np.array([2, 1])] + np.array([0.0, 1.0]))


def test_a_model_that_is_another_on_few_rows_alone_is_drawn_as_on_all():
    """Its noise depends on how many rows there are."""

    def model(x, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(b * x, jnp.where(len(x) < 10, 50.0, 0.3)), obs=y)

    engine = fitted(LaplaceApproximation, model, (X, Y), hyper_values={}, num_samples=4000)
    draws = engine.predict(KEY, np.array([0.0, 1.0])).get_samples()["y"]
    assert float(jnp.std(draws[:, 0])) < 0.35


@pytest.mark.thorough
def test_other_posteriors_say_what_they_have_instead():
    def sparse(y=None):
        b = numpyro.sample("b", dist.Laplace(0.0, 1.0).expand([N]).to_event(1))
        numpyro.sample("y", dist.Normal(b, 0.3).to_event(1), obs=y)

    with pytest.raises(RuntimeError, match=r"sparse coefficients .* mask the observations"):
        fitted(EP, sparse, (Y,), hyper_values={}).predict(KEY, NEW_X)

    def product(rows, columns, y=None):
        u = numpyro.sample("u", dist.Normal(0, 1).expand([3, 1]).to_event(2))
        v = numpyro.sample("v", dist.Normal(0, 1).expand([4, 1]).to_event(2))
        numpyro.sample("y", dist.Poisson(jnp.exp((u[rows] * v[columns]).sum(-1))), obs=y)

    bilinear = BilinearVG(product, progress_bar=False)
    bilinear.run(KEY, GROUP, np.arange(N) % 4, COUNTS)
    with pytest.raises(RuntimeError, match="fold_in.*predictive_mean, expected_ranks and log_predictive"):
        bilinear.predict(KEY, GROUP, np.arange(N) % 4)
    assert np.asarray(bilinear.to_arviz(posterior_predictive=True)["posterior_predictive"]["y"]).shape == (4, 250, N)


@pytest.mark.thorough
def test_arviz_has_predictions_and_posterior_predictive_draws(groups):
    found = groups.predict(KEY, NEW_GROUP, NEW_X, 4)
    coords = {"group": ["a", "b", "c"], "member": ["a", "b", "c", "d"], "effect": ["level", "slope"]}
    data = groups.to_arviz(
        posterior_predictive=True,
        predictions=found,
        coords=coords,
        dims={"b": ["group", "effect"]},
        pred_dims={"b": ["member", "effect"]},
    )
    assert data["posterior"]["b"].dims == ("chain", "draw", "group", "effect")
    assert data["predictions"]["b"].dims == ("chain", "draw", "member", "effect")
    drawn = np.asarray(found.get_samples()["y"])
    np.testing.assert_array_equal(np.asarray(data["predictions"]["y"]).reshape(drawn.shape), drawn)
    line = np.asarray(data["posterior"]["line"]).reshape(-1, N)
    drawn = np.asarray(data["posterior_predictive"]["y"]).reshape(-1, N)
    np.testing.assert_array_equal(line, groups.get_samples()["line"])
    assert_close_means(drawn - line, np.zeros(N))
    assert_close_deviations(drawn - line, np.full(N, 0.3))
    assert float(az.summary(data["predictions"]["b"]).iloc[0, 0]) == pytest.approx(
        float(found.posterior["b"].mean[0, 0]), abs=0.05
    )
    alone = found.to_arviz(coords=coords, dims={"b": ["member", "effect"]})
    np.testing.assert_array_equal(alone["predictions"]["b"], data["predictions"]["b"])


@pytest.mark.thorough
def test_a_run_that_was_loaded_predicts(groups, tmp_path):
    draws = groups.get_samples()
    groups.save(tmp_path / "run")
    again = LaplaceApproximation.load(tmp_path / "run", slopes)
    with compiled_programs() as names:  # draws that were made are kept
        assert all(np.array_equal(value, draws[name]) for name, value in again.get_samples().items())
    assert names == []
    found, expected = (engine.predict(KEY, NEW_GROUP, NEW_X, 4) for engine in (again, groups))
    np.testing.assert_allclose(found.posterior["line"].mean, expected.posterior["line"].mean, rtol=1e-12)
    with pytest.raises(TypeError, match="A random key comes first"):
        again.predict(NEW_GROUP, NEW_X, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["members of groups", "process"])
def test_predictions_agree_with_nuts_on_old_and_new_rows_together(kind):
    """A fit that integrates over its hyperparameters, and a sampler of the joint model with the new rows masked."""
    generator = np.random.default_rng(3)
    if kind == "process":
        model, x = process, generator.uniform(-3, 3, size=40)
        y, new = generator.poisson(np.exp(1.0 + np.sin(2 * x))), np.array([-3.5, -1.1, 0.2, 2.9, 4.0])
        old_args, new_args, site, num_new = (x, y), (new,), "f", 5
        joint = (np.append(x, new), padded(y, 5), np.arange(45) < 40)
    else:
        model, group, x = slopes, np.arange(96) % 12, generator.normal(size=96)
        b = np.array([0.3, 0.5]) + generator.normal(size=(12, 2)) @ np.array([[0.7, 0.0], [0.3, 0.4]]).T
        y = b[group, 0] + b[group, 1] * x + 0.3 * generator.normal(size=96)
        new_group, new_x, num_new = np.array([0, 3, 12, 12, 13]), np.array([0.5, -2.0, 0.0, 1.5, -1.0]), 5
        old_args, new_args, site = (group, x, 12, y), (new_group, new_x, 14), "line"
        joint = (np.append(group, new_group), np.append(x, new_x), 14, padded(y, 5), np.arange(101) < 96)
    found = fitted(EP, model, old_args, hyper_values={}, integrate="auto", num_samples=4000).predict(KEY, *new_args)
    mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=2500, progress_bar=False)
    mcmc.run(jax.random.key(1), *joint)
    draws = np.asarray(mcmc.get_samples()[site])[:, -num_new:]
    mean, sd = draws.mean(0), draws.std(0)
    assert np.all(np.abs(found.posterior[site].mean - mean) < 0.1 * sd), (found.posterior[site].mean - mean) / sd
    np.testing.assert_allclose(found.posterior[site].sd, sd, rtol=0.1)
    without = [None if part is joint[-2] else part for part in joint[:-1]]
    drawn = Predictive(model, mcmc.get_samples())(jax.random.key(2), *without)["y"][:, -num_new:]
    own = found.get_samples()["y"]
    np.testing.assert_allclose(own.mean(0), drawn.mean(0), atol=0.15 * float(drawn.std()))
    np.testing.assert_allclose(np.quantile(own, [0.1, 0.9], 0), np.quantile(drawn, [0.1, 0.9], 0), rtol=0.15, atol=1.0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "trials, mean",
    [
        (lambda total: dist.Binomial(total, logits=jnp.zeros(2)), [2.5, 20.0]),
        (lambda total: dist.Binomial(total, probs=0.5).to_event(1).mask(np.array(True)), [2.5, 20.0]),
        (lambda total: dist.BetaBinomial(2.0, 3.0, total), [2.0, 16.0]),
        (lambda total: dist.ZeroInflatedDistribution(dist.Binomial(total, probs=0.5), gate=0.2), [2.0, 16.0]),
    ],
)
def test_numbers_of_trials_may_be_floats_as_columns_of_pandas_are(trials, mean):
    def model(total):
        numpyro.sample("level", dist.Normal(0.0, 1.0))
        numpyro.sample("y", trials(total))

    draws = predictive_draws(model, {"level": jnp.zeros(4000)}, KEY, (jnp.array([5.0, 40.0]),), {})["y"]
    assert draws.dtype == jnp.result_type(int)
    assert_close_means(draws, np.array(mean))


def test_a_number_of_the_new_rows_is_given_as_an_array():
    def counts(x, y=None, exposure=1):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        numpyro.sample("y", dist.Poisson(exposure * jnp.exp(slope * x)), obs=y)

    engine = EP(counts, progress_bar=False)
    engine.run(jax.random.key(0), np.linspace(-1, 1, 6), np.array([0, 1, 1, 2, 1, 3]))
    with pytest.raises(ValueError, match="'exposure' is another number than in the fit.* give an array"):
        engine.predict(jax.random.key(1), np.zeros(2), exposure=100.0)
    draws = engine.predict(jax.random.key(1), np.zeros(2), exposure=np.full(2, 100.0)).get_samples()["y"]
    np.testing.assert_allclose(draws.mean(0), 100.0, rtol=0.02)
