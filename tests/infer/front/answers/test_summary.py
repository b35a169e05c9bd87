"""The summary, posteriors and draws as a person asks for them: names, labels, and what is said of wrong words."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from numpyro_ext.infer.front.answers.arviz import by_chain, num_groups
from numpyro_ext.infer.front.answers.sites import SitePosterior
from numpyro_ext.infer.front.answers.summary import chosen_names, format_summary
from numpyro_ext.infer.front.labels import Labels
from numpyro_ext.infer.front.results import Diagnostics, LogEvidence
from numpyro_ext.infer.gaussian.algorithms.modes.mode_shift import mode_shifts

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    import arviz as az

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
GROUP = np.arange(40) % 8
X = RNG.normal(size=(40, 2))
Y = 0.4 + X @ np.array([0.5, -1.0]) + 0.8 * RNG.normal(size=8)[GROUP] + 0.5 * RNG.normal(size=40)


def groups(group, x, y=None, coords=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1), infer={"event_dims": ["covariate"]})
    noise, spread = (numpyro.sample(name, dist.LogNormal(-0.5, 0.5)) for name in ("noise", "spread"))
    with numpyro.plate("shop", 8):
        effect = numpyro.sample("effect", dist.Normal(0, spread))
    numpyro.sample("y", dist.Normal(x @ beta + effect[group], noise), obs=y)


SHOPS = [f"s{number}" for number in range(8)]
COORDS = {"shop": SHOPS, "covariate": np.array(["price", "age"])}


@pytest.fixture(scope="module")
def fitted():
    engine = EP(groups, progress_bar=False, num_samples=1002, coords=COORDS)
    engine.run(KEY, GROUP, X, Y)
    return engine


def summary_of(engine, capsys, **options):
    engine.print_summary(**options)
    return capsys.readouterr().out


def test_hyperparameters_stand_first_and_long_sites_are_shortened():
    def site(name, size, offset):
        mean, square = offset + np.arange(float(size)), np.full(size, 4.0)
        return SitePosterior(name, (size,), lambda: mean, lambda: square, lambda: None, lambda key, n: None)

    diagnostics = Diagnostics(True, 3, np.zeros(3), 0.0, 0, {}, None, ())
    evidence = LogEvidence(-1.5, hyperparameters="integrated", method="a lattice of 7 points")
    sites = {"effect": site("effect", 300, 0.0)}
    hyper = {"tau": site("tau", 1, 7.0)}
    text = format_summary(sites, hyper, evidence, diagnostics, 0.9, Labels())
    lines = text.split("\n")
    assert "hyperparameter" in lines[1] and lines[2].split() == [
        "tau[0]",
        *(f"{value:.2f}" for value in (7.0, 2.0, 7.0, *scipy.stats.norm(7.0, 2.0).ppf([0.05, 0.95]))),
    ]
    assert len(lines) < 20 and "... 293 more: var_names=['effect']" in text
    assert "effect[4]" in text and "effect[5]" not in text and "effect[298]" in text and "effect[299]" in text
    assert "(integrated over hyperparameters: a lattice of 7 points)" in text
    whole = format_summary(sites, {}, evidence, diagnostics, 0.9, Labels(), shows_all=True)
    assert "effect[150]" in whole and "more" not in whole


def test_names_are_chosen_as_in_arviz():
    known, default = ["tau", "b", "rate"], ["tau", "b"]
    assert chosen_names(None, known, default, {}) == (default, False)
    assert chosen_names("rate", known, default, {}) == (["rate"], True)
    assert chosen_names(["b", "tau"], known, default, {}) == (["b", "tau"], True)
    assert chosen_names(["~b"], known, default, {}) == (["tau"], False)
    with pytest.raises(ValueError, match="names 'taus'; the sites .* are tau, b, rate. Did you mean 'tau'"):
        chosen_names(["taus"], known, default, {})
    with pytest.raises(ValueError, match="'y' .it is observed."):
        chosen_names("y", known, default, {"y": "it is observed"})
    with pytest.raises(ValueError, match="not both"):
        chosen_names(["~b", "tau"], known, default, {})


@pytest.mark.thorough
def test_a_run_is_summed_up_with_its_labels(fitted, capsys):
    text = summary_of(fitted, capsys)
    assert text.index("noise") < text.index("beta[price]") < text.index("effect[s7]")
    assert f"over a lattice of {len(fitted._run.exploration.weights)} points" in repr(fitted.log_evidence)
    assert f": a lattice of {len(fitted._run.exploration.weights)} points)" in text
    noise = fitted.hyper["noise"]
    row = next(line for line in text.split("\n") if line.split()[:1] == ["noise"]).split()
    assert row[1:] == [f"{float(value):.2f}" for value in (noise.mean, noise.sd, *noise.quantile([0.5, 0.05, 0.95]))]
    only = summary_of(fitted, capsys, var_names=["effect"], coords={"shop": np.arange(10, 18)})
    assert "effect[17]" in only and "beta" not in only and "noise" not in only
    assert "effect" not in summary_of(fitted, capsys, var_names="~effect")
    assert "beta[age]" in repr(fitted.posterior["beta"]) and "effect[s3]" in repr(fitted.posterior["effect"])


@pytest.mark.thorough
def test_wrong_words_are_answered_by_the_right_ones(fitted):
    with pytest.raises(TypeError, match="no argument 'n'; .* Did you mean 'num_samples'"):
        fitted.get_samples(n=10)
    with pytest.raises(TypeError, match="no argument 'names'; .* Did you mean 'var_names'"):
        fitted.print_summary(names=["b"])
    with pytest.raises(KeyError, match="no site of this name. .* Did you mean 'noise'"):
        fitted.posterior["noises"]
    with pytest.raises(TypeError, match="no option 'integrat'; .* Did you mean 'integrate'"):
        EP(groups, integrat="none")


@pytest.mark.thorough
def test_there_is_one_posterior(fitted):
    """Draws of hyperparameters have the moments that are reported of them."""
    draws = fitted.get_samples(num_samples=8000)
    for name in ("noise", "spread", "beta"):
        site = fitted.posterior[name]
        assert draws[name].shape == (8000, *site.shape)
        error = 0.01 if name in fitted.hyper else 4 / np.sqrt(8000)
        np.testing.assert_allclose(np.mean(draws[name], axis=0), site.mean, atol=error * float(np.max(site.sd)))
        np.testing.assert_allclose(np.std(draws[name], axis=0), site.sd, rtol=0.04)
    assert fitted.posterior["noise"].mean == fitted.hyper["noise"].mean
    sample = fitted.posterior["spread"].sample(KEY, (3, 500))
    assert sample.shape == (3, 500)
    np.testing.assert_allclose(sample.mean(), fitted.posterior["spread"].mean, atol=0.02 * fitted.hyper["spread"].sd)
    same = fitted.get_samples(num_samples=1002)
    np.testing.assert_array_equal(same["noise"], fitted.get_samples()["noise"])


@pytest.mark.thorough
def test_arviz_sums_up_without_a_warning(fitted, caplog, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = fitted.to_arviz()
        table = az.summary(data, var_names=["noise", "beta"])
    assert caplog.text == "" and capsys.readouterr().err == ""
    posterior = data["posterior"]
    assert posterior["effect"].dims == ("chain", "draw", "shop") and posterior["effect"].shape == (4, 250, 8)
    assert list(posterior["covariate"].values) == ["price", "age"] and posterior.attrs["draws_are_independent"] == 1
    assert np.isfinite(np.asarray(table["r_hat"], float)).all()
    draws = np.asarray(fitted.get_samples()["beta"])[:1000]
    np.testing.assert_array_equal(np.asarray(posterior["beta"]).reshape(1000, 2), draws)
    given = fitted.to_arviz(coords={"shop": list("abcdefgh")}, log_likelihood=False)
    assert list(given["posterior"]["shop"].values) == list("abcdefgh")


def test_independent_draws_are_divided_evenly():
    assert [num_groups(number) for number in (1000, 1002, 1001, 16, 12, 8, 4, 1)] == [4, 2, 1, 4, 2, 2, 1, 1]
    draws = {"a": jnp.arange(12.0), "b": jnp.arange(24.0).reshape(12, 2)}
    grouped = by_chain(draws)
    assert grouped["a"].shape == (2, 6) and grouped["b"].shape == (2, 6, 2)
    np.testing.assert_array_equal(grouped["b"].reshape(12, 2), draws["b"])


def test_labels_that_fit_nothing_are_said_and_left_out():
    labels = Labels.given({"shop": ["a", "b"], "day": [1], "unused": [0]}, {"effect": "shop", "no": ["day"]})
    kept, messages = labels.fitting({"effect": (3,), "rate": (2,)})
    assert not kept.coords and [m.split(",")[0] for m in messages] == [
        "dims names 'no'",
        "coords has 2 labels of 'shop'; site 'effect' has 3 places along it.",
        "coords has labels of 'day'",
        "coords has labels of 'unused'",
    ]
    with pytest.raises(TypeError, match="dims names dimensions by strings, got 3"):
        Labels.given(None, {"effect": [3]})


def quick(y, coords=None):
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([3]))
    numpyro.sample("y", dist.Normal(effect + (0.0 if coords is None else coords), 1.0), obs=y)


def other(y):
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([3]))
    numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


@pytest.mark.thorough
def test_an_argument_of_the_model_goes_before_a_label(tmp_path):
    y = np.array([1.0, 2.0, 3.0])
    engine = EP(quick, progress_bar=False, num_samples=20, dims={"effect": ["letter"]})
    engine.run(KEY, y, coords=1.0)
    np.testing.assert_allclose(engine.posterior["effect"].mean, [0.0, 0.5, 1.0], atol=1e-9)
    labelled = EP(other, progress_bar=False, num_samples=20)
    labelled.run(KEY, y, coords={"letter": list("abc")}, dims={"effect": ["letter"]})
    assert "effect[b]" in repr(labelled.posterior["effect"])
    labelled.save(tmp_path / "run.npz")
    assert "effect[b]" in repr(EP.load(tmp_path / "run.npz", other).posterior["effect"])
    with pytest.warns(UserWarning, match="coords has 2 labels of 'letter'; site 'effect' has 3"):
        labelled.run(KEY, y, coords={"letter": list("ab")}, dims={"effect": ["letter"]})
    assert "effect[2]" in repr(labelled.posterior["effect"])


def exact_moments(log_density):
    """Mean and mode of a density of one number, by a fine sum."""
    grid = np.linspace(-12.0, 6.0, 40_001)
    values = log_density(grid)
    weights = np.exp(values - values.max())
    weights /= weights.sum()
    mean = weights @ grid
    return mean, grid[np.argmax(values)], np.sqrt(weights @ (grid - mean) ** 2)


def test_a_mode_that_is_no_mean_is_told():
    def counts(y):
        level = numpyro.sample("level", dist.Normal(0, 2))
        numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)

    engine = LaplaceApproximation(counts, progress_bar=False)
    engine.run(KEY, np.array([1]))
    mean, mode, _ = exact_moments(lambda x: x - np.exp(x) - x**2 / 8.0)
    sd = 1.0 / np.sqrt(np.exp(mode) + 0.25)
    found = engine._run.programs.marginals(*engine._run.inputs, marginals_fn=mode_shifts)["level"]
    np.testing.assert_allclose(found, (mean - mode) / sd, rtol=0.35)  # of first order
    (message,) = engine.diagnostics.messages
    assert (
        f"the mean of level is about {abs(float(found[0])):.2g} of its posterior standard deviations below" in message
    )
    many = LaplaceApproximation(counts, progress_bar=False)
    many.run(KEY, np.array([50]))
    assert not many.diagnostics.messages


@pytest.mark.thorough
def test_a_mode_that_is_no_mean_is_told_of_factors_of_two_predictors():
    """Against sums over a grid of NumPyro's own density."""
    x, names = np.linspace(-1.0, 1.0, 11), ("a", "b", "c", "d")
    y = np.array([0.5, -0.3, 0.9, 1.4, -0.6, 0.2, 1.9, -1.1, 0.4, 2.2, -0.7])

    def model(y):
        a, b, c, d = (numpyro.sample(name, dist.Normal(0, 1)) for name in names)
        numpyro.sample("y", dist.Normal(a + b * x, jnp.exp(c + d * x)), obs=y)

    engine = LaplaceApproximation(model, progress_bar=False)
    engine.run(KEY, y)
    sites = [engine.posterior[name] for name in names]
    axes = [float(site.mean) + float(site.sd) * np.linspace(-6, 6, 25) for site in sites]
    a, b, c, d = grid = np.meshgrid(*axes, indexing="ij")
    log_p = -0.5 * (a**2 + b**2 + c**2 + d**2)
    for at, value in zip(x, y, strict=True):
        log_p += scipy.stats.norm.logpdf(value, a + b * at, np.exp(c + d * at))
    weights = np.exp(log_p - log_p.max())
    weights /= weights.sum()
    exact = [((weights * g).sum() - float(site.mean)) / float(site.sd) for g, site in zip(grid, sites, strict=True)]
    found = engine._run.programs.marginals(*engine._run.inputs, marginals_fn=mode_shifts)
    assert np.max(np.abs(exact)) > 0.7
    np.testing.assert_allclose([float(found[name][0]) for name in names], exact, atol=0.06)
    assert "the mean of c is about 0.76 of its posterior standard deviations above" in engine.diagnostics.messages[-1]


@pytest.mark.thorough
def test_predictions_show_and_count_their_outcomes():
    def ordered(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        numpyro.sample("y", dist.OrderedLogistic(slope * x, jnp.array([-1.0, 1.0])), obs=y)

    engine = EP(ordered, progress_bar=False, num_samples=4000)
    engine.run(KEY, X[:, 0], (X[:, 0] > 0).astype(int) + (X[:, 0] > 1))
    found = engine.predict(KEY, np.array([0.5, -2.0]))
    assert "y (2,)" in " ".join(repr(found).split()) and "to be observed, OrderedLogistic" in repr(found)
    table = found.probabilities()["y"]
    site, nodes = engine.posterior["slope"], np.polynomial.hermite_e.hermegauss(60)
    slopes = float(site.mean) + float(site.sd) * nodes[0]
    upper = 1.0 / (1.0 + np.exp(np.array([[-1.0], [1.0]])[:, None] - slopes * np.array([0.5, -2.0])[:, None]))
    above = upper @ nodes[1] / nodes[1].sum()
    np.testing.assert_allclose(table, np.stack([1 - above[0], above[0] - above[1], above[1]], axis=-1), atol=1e-6)

    def softmax(x, y=None):
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([2, 3]))
        numpyro.sample("y", dist.Categorical(logits=x @ weights), obs=y)

    engine = VariationalGaussian(softmax, progress_bar=False, num_samples=4000)
    engine.run(KEY, X, GROUP % 3)
    found = engine.predict(KEY, X[:2] + 1.0)
    table, draws = found.probabilities()["y"], np.asarray(found.get_samples()["y"])
    assert table.shape == (2, 3)
    np.testing.assert_allclose(table.sum(-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(table, np.stack([(draws == k).mean(0) for k in range(3)], axis=-1), atol=0.04)

    def line(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)

    engine = EP(line, progress_bar=False)
    engine.run(KEY, X[:, 0], Y)
    with pytest.raises(ValueError, match="Outcomes of 'y' cannot be counted"):
        engine.predict(KEY, X[:3, 0]).probabilities()
