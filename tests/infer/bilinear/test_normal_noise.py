"""Noise variances of Normal cells, one for each row and column, that BilinearVG integrates over."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density
from scipy import stats
from scipy.special import digamma, gammaln

from numpyro_ext.infer import BilinearVG
from numpyro_ext.models import gaussian_factorization
from numpyro_ext.structure import ModelStructureError

KEY = jax.random.key(0)
NUM_ROWS, NUM_COLS, RANK = 14, 9, 2


def cells(num_rows=NUM_ROWS, num_cols=NUM_COLS):
    """Two thirds of a matrix, without any cell of the last row."""
    rng = np.random.default_rng(3)
    rows, cols = np.divmod(np.flatnonzero(rng.random(num_rows * num_cols) < 0.66), num_cols)
    rows, cols = rows[rows < num_rows - 1], cols[rows < num_rows - 1]
    noise = np.exp(0.6 * rng.standard_normal(num_rows))[rows] * np.exp(0.6 * rng.standard_normal(num_cols))[cols]
    u, v = rng.standard_normal((num_rows, RANK)), rng.standard_normal((num_cols, RANK))
    return rows, cols, np.sum(u[rows] * v[cols], 1) + 0.3 + np.sqrt(0.2 * noise) * rng.standard_normal(rows.size)


def by_variances(rows, cols, values=None):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", NUM_ROWS):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([RANK]).to_event(1))
        own = numpyro.sample("row_noise", dist.InverseGamma(3.0, 2.0))
    with numpyro.plate("cols", NUM_COLS):
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([RANK]).to_event(1))
        other = numpyro.sample("col_noise", dist.InverseGamma(4.0, 1.5))
    scale = jnp.sqrt(0.5 * own[rows] * other[cols])
    numpyro.sample("values", dist.Normal((u[rows] * v[cols]).sum(-1) + level, scale), obs=values)


def by_precisions(rows, cols, values=None):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", NUM_ROWS):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([RANK]).to_event(1))
        own = numpyro.sample("row_noise", dist.Gamma(3.0, 2.0))
    with numpyro.plate("cols", NUM_COLS):
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([RANK]).to_event(1))
        other = numpyro.sample("col_noise", dist.Gamma(4.0, 1.5))
    scale = jnp.sqrt(0.5 / (own[rows] * other[cols]))
    numpyro.sample("values", dist.Normal((u[rows] * v[cols]).sum(-1) + level, scale), obs=values)


MODELS = {"variances": by_variances, "precisions": by_precisions}


@cache
def fitted(kind):
    options = {"covariance": "full", "tol": 1e-12, "num_steps": 20_000, "num_restarts": 0, "progress_bar": False}
    engine = BilinearVG(MODELS[kind], **options)
    engine.run(KEY, *cells())
    assert engine.diagnostics.converged and not engine.diagnostics.points
    return engine


class Posterior:
    """Factors of the posterior in NumPy: Gaussian vectors, a Gaussian level, gamma precisions."""

    def __init__(self, engine):
        self.u, self.v = ((np.asarray(engine.posterior[n].mean), blocks(engine, n)) for n in "uv")
        level = engine.posterior["level"]
        self.level = float(level.mean), float(level.variance)
        self.gammas = [gamma_of(engine, name) for name in ("row_noise", "col_noise")]

    def squares(self, rows, cols, values):
        """Expected squares of residuals."""
        (m, s), (w, t) = ((mean[i], spread[i]) for (mean, spread), i in ((self.u, rows), (self.v, cols)))
        variance = np.einsum("ci,cij,cj->c", m, t, m) + np.einsum("ci,cij,cj->c", w, s, w)
        variance += np.einsum("cij,cij->c", s, t) + self.level[1]
        return (values - np.sum(m * w, 1) - self.level[0]) ** 2 + variance


def blocks(engine, name):
    size = engine.posterior[name].mean.size
    whole = np.asarray(engine.posterior[name].covariance()).reshape(size, size)
    return np.stack([whole[k : k + RANK, k : k + RANK] for k in range(0, size, RANK)])


def gamma_of(engine, name):
    """Shape and rate of precisions, from the first two moments of the site."""
    mean, variance = np.asarray(engine.hyper[name].mean), np.asarray(engine.hyper[name].variance)
    if engine.model is by_precisions:
        return mean**2 / variance, mean / variance
    shape = mean**2 / variance + 2.0
    return shape, mean * (shape - 1.0)


PRIORS = (3.0, 2.0), (4.0, 1.5)


@pytest.mark.parametrize("kind", MODELS)
def test_the_end_is_that_of_variational_bayes_in_numpy(kind):
    """One update of every factor by the textbook's formulas changes nothing."""
    engine, (rows, cols, values) = fitted(kind), cells()
    at, index = Posterior(engine), (rows, cols)
    squares = at.squares(rows, cols, values) / 0.5
    precision = [a / b for a, b in at.gammas]
    for own, (shape, rate) in enumerate(at.gammas):
        other = precision[1 - own][index[1 - own]]
        count = np.bincount(index[own], minlength=len(shape))
        np.testing.assert_allclose(shape, PRIORS[own][0] + 0.5 * count, rtol=1e-9)
        total = np.bincount(index[own], squares * other, len(shape))
        np.testing.assert_allclose(rate, PRIORS[own][1] + 0.5 * total, rtol=1e-5)
    weight = precision[0][rows] * precision[1][cols] / 0.5
    for (mean, spread), (other, its), own, across in ((at.u, at.v, rows, cols), (at.v, at.u, cols, rows)):
        second = its + other[:, :, None] * other[:, None, :]
        for k in range(len(mean)):
            here = own == k
            matrix = np.eye(RANK) + np.einsum("c,cij->ij", weight[here], second[across[here]])
            np.testing.assert_allclose(spread[k], np.linalg.inv(matrix), rtol=1e-4, atol=1e-7)
            linear = np.einsum("c,ci->i", (weight * (values - at.level[0]))[here], other[across[here]])
            np.testing.assert_allclose(mean[k], np.linalg.solve(matrix, linear), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_evidence_is_the_bound(kind):
    """By the terms of the bound one by one; expectations of log precisions are digamma functions."""
    engine, (rows, cols, values) = fitted(kind), cells()
    at = Posterior(engine)
    log_precision, precision = zip(*((digamma(a) - np.log(b), a / b) for a, b in at.gammas), strict=True)
    squares, log_weight = at.squares(rows, cols, values) / 0.5, log_precision[0][rows] + log_precision[1][cols]
    weight = precision[0][rows] * precision[1][cols]
    bound = 0.5 * np.sum(log_weight - np.log(0.5 * 2.0 * np.pi) - weight * squares)
    for mean, spread in (at.u, at.v, (np.array([[at.level[0]]]), np.array([[[at.level[1]]]]))):
        size, log_det = mean.shape[1], np.linalg.slogdet(spread)[1]
        bound -= 0.5 * np.sum(np.trace(spread, axis1=1, axis2=2) + np.sum(mean**2, 1) - size - log_det)
    for (a, b), (shape, rate) in zip(at.gammas, PRIORS, strict=True):
        divergence = (a - shape) * digamma(a) - gammaln(a) + gammaln(shape)
        bound -= np.sum(divergence + shape * np.log(b / rate) + a * (rate - b) / b)
    np.testing.assert_allclose(float(engine.log_evidence), bound, rtol=1e-9)
    assert engine.log_evidence.is_lower_bound and engine.log_evidence.hyperparameters == "none"


@pytest.mark.parametrize("kind", MODELS)
def test_draws_have_the_density_of_the_model(kind):
    """The bound is the mean of the log density of NumPyro less that of the draw."""
    engine, data = fitted(kind), cells()
    number = 400
    draws = {n: np.asarray(x) for n, x in engine.get_samples(seed=5, num_samples=number).items()}
    at = Posterior(engine)
    gammas = dict(zip(("row_noise", "col_noise"), at.gammas, strict=True))

    def log_posterior(k):
        total = stats.norm(at.level[0], np.sqrt(at.level[1])).logpdf(draws["level"][k])
        for (mean, spread), name in ((at.u, "u"), (at.v, "v")):
            found = (stats.multivariate_normal(m, s) for m, s in zip(mean, spread, strict=True))
            total += sum(one.logpdf(x) for one, x in zip(found, draws[name][k], strict=True))
        for name, (a, b) in gammas.items():
            one = stats.gamma(a, scale=1.0 / b) if kind == "precisions" else stats.invgamma(a, scale=b)
            total += one.logpdf(draws[name][k]).sum()
        return total

    joint = jax.jit(lambda values: log_density(MODELS[kind], data, {}, values)[0])
    gaps = [float(joint({n: x[k] for n, x in draws.items()})) - log_posterior(k) for k in range(number)]
    error = np.std(gaps) / np.sqrt(number)
    assert abs(np.mean(gaps) - float(engine.log_evidence)) < 4.0 * error < 2.0


@pytest.mark.thorough
def test_predictive_density_averages_over_the_noise():
    engine, (rows, cols, _) = fitted("variances"), cells()
    draws = engine.get_samples(seed=6, num_samples=40_000)
    mean = np.sum(np.asarray(draws["u"])[:, rows[:3]] * np.asarray(draws["v"])[:, cols[:3]], -1)
    mean += np.asarray(draws["level"])[:, None]
    variance = 0.5 * np.asarray(draws["row_noise"])[:, rows[:3]] * np.asarray(draws["col_noise"])[:, cols[:3]]
    new = mean.mean(0) + np.array([0.0, 2.0, 4.0]) * np.sqrt(mean.var(0) + variance.mean(0))
    found = engine.log_predictive(rows[:3], cols[:3], new, num_samples=4000)["values"]
    exact = np.log(stats.norm(mean, np.sqrt(variance)).pdf(new).mean(0))
    np.testing.assert_allclose(found, exact, atol=0.05)
    # The variance at its mean alone would have other tails.
    point = np.log(stats.norm(mean, np.sqrt(variance.mean(0))).pdf(new).mean(0))
    assert abs(point[2] - exact[2]) > 0.15


def test_folded_rows_are_those_of_the_fit():
    engine, (rows, cols, values) = fitted("variances"), cells()
    folded = engine.fold_in(jax.random.key(1), rows, cols, values, side="rows")
    assert folded.diagnostics.converged
    np.testing.assert_allclose(folded.posterior["u"].mean, engine.posterior["u"].mean, atol=2e-4)
    for name in ("row_noise", "col_noise"):
        np.testing.assert_allclose(folded.hyper[name].mean, engine.hyper[name].mean, rtol=1e-4)
        np.testing.assert_allclose(folded.hyper[name].sd, engine.hyper[name].sd, rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.float32
def test_many_rows_of_the_library_model(tmp_path, capsys):
    rows, cols, values = cells(400, 12)
    sizes = {"num_rows": 400, "num_cols": 12, "rank": RANK, "heteroscedastic": True}
    engine = BilinearVG(gaussian_factorization, num_restarts=0, progress_bar=False)
    engine.run(KEY, rows, cols, values, **sizes)
    assert engine.diagnostics.converged and engine.diagnostics.points == ("row_scale",)
    engine.print_summary()
    assert engine.hyper["row_noise"].mean.shape == (400,) and "row_noise[0]" in capsys.readouterr().out
    # The last row has no cell: its noise has the prior, InverseGamma(5, 5).
    np.testing.assert_allclose(engine.hyper["row_noise"].mean[-1], 5.0 / 4.0, rtol=1e-6)
    engine.save(tmp_path / "fit.npz")
    loaded = BilinearVG.load(tmp_path / "fit.npz", gaussian_factorization)
    np.testing.assert_allclose(loaded.hyper["row_noise"].sd, engine.hyper["row_noise"].sd, rtol=1e-6)
    np.testing.assert_array_equal(loaded.get_samples()["row_noise"], engine.get_samples()["row_noise"])


def test_values_that_are_given_stay():
    given = {"row_noise": np.full(NUM_ROWS, 0.7)}
    engine = BilinearVG(by_variances, hyper_values=given, num_restarts=0, progress_bar=False)
    engine.run(KEY, *cells())
    np.testing.assert_allclose(engine.get_samples()["row_noise"], 0.7, rtol=1e-6)
    assert engine.hyper["row_noise"].is_fixed and engine.hyper["col_noise"].sd.min() > 0.0


def crossed(rows, cols, values, *, kind):
    rate = numpyro.sample("rate", dist.HalfNormal(1.0)) if kind == "rate" else 1.0
    with numpyro.plate("rows", 150):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        own = numpyro.sample("own", dist.LogNormal(0.0, 1.0) if kind == "family" else dist.InverseGamma(3.0, rate))
    with numpyro.plate("cols", 5):
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    product = (u[rows] * v[cols]).sum(-1)
    scale = {"pairs": own[rows] * own[(rows + 1) % 150], "mean": own[rows]}.get(kind, jnp.sqrt(own[rows]))
    if kind == "mean":
        product = product + own[rows]
    if kind == "counts":
        return numpyro.sample("y", dist.Poisson(jnp.exp(product) * own[rows]), obs=jnp.round(jnp.abs(values)))
    return numpyro.sample("y", dist.Normal(product, scale), obs=values)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("rate", r"'own' .* is not integrated over: its prior depends on \['rate'\]"),
        ("pairs", "'own' .* not proportional to one of its elements"),
        ("mean", "'own' .* it moves more than variances of cells"),
        ("family", "'own' .* 150 elements .* too many to maximise over"),
        ("counts", "'own' .* 150 elements .* too many to maximise over"),
    ],
)
def test_refusals_say_why(kind, reason):
    rows, cols, values = cells(150, 5)
    with pytest.raises(ModelStructureError, match=reason):
        BilinearVG(crossed, progress_bar=False).run(KEY, rows, cols, values, kind=kind)


@pytest.mark.slow
def test_means_are_those_of_nuts():
    """Twenty rows and eight columns of one component: mean field is as near as for other cells."""
    rng = np.random.default_rng(0)
    rows, cols = np.divmod(np.flatnonzero(rng.random(160) < 0.8), 8)
    u, v = rng.standard_normal(20), rng.standard_normal(8)
    noise = 0.3 / (rng.gamma(5.0, 0.2, 20)[rows] * rng.gamma(5.0, 0.2, 8)[cols])
    values = u[rows] * v[cols] + np.sqrt(noise) * rng.standard_normal(rows.size)
    sizes = {"num_rows": 20, "num_cols": 8, "rank": 1, "heteroscedastic": True}
    data = rows, cols, values / values.std()
    engine = BilinearVG(gaussian_factorization, tol=1e-9, num_steps=20_000, progress_bar=False)
    engine.run(KEY, *data, **sizes)
    kernel, lengths = NUTS(gaussian_factorization, target_accept_prob=0.95), {"num_warmup": 1000, "num_samples": 4000}
    sampler = MCMC(kernel, **lengths, num_chains=2, chain_method="sequential", progress_bar=False)
    sampler.run(KEY, *data, **sizes)
    exact = {name: np.asarray(x) for name, x in sampler.get_samples().items()}
    found = {name: np.asarray(x) for name, x in engine.get_samples(num_samples=20_000).items()}

    def predictors(draws):
        return np.sum(draws["u"][:, rows] * draws["v"][:, cols], -1) + draws["z"][:, None]

    one, other = predictors(found), predictors(exact)
    gaps = (one.mean(0) - other.mean(0)) / other.std(0)
    assert np.sqrt(np.mean(gaps**2)) < 0.15 and np.abs(gaps).max() < 0.4
    assert 0.85 < np.median(one.std(0) / other.std(0)) < 1.05
    for name in ("row_noise", "column_noise"):
        one, other = np.log(found[name]), np.log(exact[name])
        assert np.sqrt(np.mean((one.mean(0) - other.mean(0)) ** 2)) < 0.05
        assert 0.85 < np.median(one.std(0) / other.std(0)) < 1.05
