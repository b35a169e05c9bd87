"""The bilinear engine on observations other than Poisson counts with exponential rates: expectations by quadrature."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

from numpyro_ext.distributions import OrderedProbit
from numpyro_ext.infer import BilinearVG
from numpyro_ext.infer.bilinear.algorithms import sweeps as bg

needs_float64 = pytest.mark.skipif(not jax.config.jax_enable_x64, reason="checks float64 accuracy")
R, C, K = 7, 5, 2
ROWS, COLS = np.divmod(np.arange(R * C), C)
FACTORS = np.random.default_rng(1).normal(size=(R, K)) @ np.random.default_rng(2).normal(size=(K, C))
NOISY = FACTORS.ravel() + np.random.default_rng(3).logistic(size=R * C)
LIKELIHOODS = {
    "softplus": lambda eta: dist.Poisson(3.0 * jax.nn.softplus(eta)),
    "negative_binomial": lambda eta: dist.NegativeBinomial2(2.0 * jnp.exp(eta), 1.5),
    "logits": lambda eta: dist.Bernoulli(logits=eta),
    "ordered_probit": lambda eta: OrderedProbit(eta, jnp.array([-1.0, 0.5])),
    "normal": lambda eta: dist.Normal(eta, 0.7),
}
DATA = {
    "softplus": np.random.default_rng(4).poisson(3.0 * np.logaddexp(0.0, FACTORS.ravel())),
    "negative_binomial": np.random.default_rng(5).poisson(2.0 * np.exp(FACTORS.ravel())),
    "logits": (NOISY > 0.0).astype(int),
    "ordered_probit": np.digitize(NOISY, [-1.0, 0.5]),
    "normal": NOISY,
}


def model(name, rows, cols, y, num_rows=R, mask=True):
    with numpyro.plate("rows", num_rows):
        w = numpyro.sample("w", dist.Normal(0.0, 0.9).expand([K]).to_event(1))
        bias = numpyro.sample("bias", dist.Normal(0.0, 0.5))
    with numpyro.plate("cols", C):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([K]).to_event(1))
    eta = (w[rows] * z[cols]).sum(-1) + bias[rows]
    with handlers.mask(mask=mask):
        numpyro.sample("y", LIKELIHOODS[name](eta), obs=y)


def fit(name, **options):
    engine = BilinearVG(model, progress_bar=False, **{"tol": 1e-9, "num_samples": 2000, **options})
    engine.run(random.key(0), name, ROWS, COLS, DATA[name])
    return engine


@functools.cache
def full_fit(name):
    """One run for each family of observations."""
    return fit(name, covariance="full")


slow = pytest.mark.slow
NAMES = ["softplus", *(pytest.param(name, marks=slow) for name in ("ordered_probit", "negative_binomial", "logits"))]


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize("name", NAMES)
def test_the_bound_is_that_of_draws(name):
    """NumPyro's log density at draws, less the log density of the draws: four standard errors are about 0.4."""
    engine = full_fit(name)
    trace = engine.diagnostics.objective_trace
    assert engine.diagnostics.converged and np.all(np.diff(trace) >= -1e-9)
    assert engine.log_evidence.is_lower_bound and engine.distance_to_boundary == np.inf
    energy = engine.get_extra_fields()["potential_energy"]
    state = engine.last_state.state
    entropy = sum(
        0.5 * np.sum(np.linalg.slogdet(2.0 * np.pi * np.e * np.asarray(block.covariance))[1])
        for block in (state.rows, state.columns)
    )
    error = np.std(energy) / np.sqrt(len(energy))
    np.testing.assert_allclose(entropy - np.mean(energy), engine.log_evidence, atol=4.0 * error)
    assert error < 0.15
    values = {k: v[0] for k, v in engine.get_samples().items()}
    joint, _ = log_density(model, (name, ROWS, COLS, DATA[name]), {}, values)
    np.testing.assert_allclose(energy[0], -joint, rtol=1e-9)


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize(
    "covariance",
    [
        {"w": "full", "z": "point"},
        *(pytest.param(x, marks=slow) for x in ("diagonal", "point", {"w": "diagonal", "z": "full"})),
    ],
)
def test_families_of_posteriors_are_stationary(covariance):
    """Derivatives of the objective by finite differences vanish at the end of a run."""
    engine = fit("logits", covariance=covariance, tol=1e-13, num_steps=3000)
    assert np.all(np.diff(engine.diagnostics.objective_trace) >= -1e-9)
    form = engine._run.reading.form({})
    blocks = engine._run.blocks
    bound = jax.jit(bg.bound)
    np.testing.assert_allclose(bound(form, *blocks), engine.log_evidence, rtol=1e-10)
    leaves, structure = jax.tree.flatten(blocks)
    rng, step = np.random.default_rng(0), 1e-4
    for number, leaf in enumerate(leaves):
        direction = rng.normal(size=leaf.shape)
        if leaf.ndim == 3:
            direction = direction + direction.swapaxes(-1, -2)
        ends = [
            bound(form, *jax.tree.unflatten(structure, [*leaves[:number], leaf + h * direction, *leaves[number + 1 :]]))
            for h in (-step, step)
        ]
        np.testing.assert_allclose((ends[1] - ends[0]) / (2.0 * step), 0.0, atol=1e-4)
        assert max(ends) < engine.log_evidence


@pytest.mark.thorough
@needs_float64
@pytest.mark.parametrize("name", [NAMES[0], *NAMES[2:]])
def test_means_against_draws(name):
    engine = full_fit(name)
    draws = engine.get_samples()
    eta = (draws["w"][:, ROWS] * draws["z"][:, COLS]).sum(-1) + draws["bias"][:, ROWS]
    means = np.asarray(jax.vmap(lambda eta: LIKELIHOODS[name](eta).mean)(eta))
    error = means.std(0) / np.sqrt(len(means))
    assert np.all(np.abs(means.mean(0) - engine.predictive_mean()["y"]) < 5.0 * error)


@pytest.mark.thorough
@needs_float64
def test_probabilities_and_new_rows():
    """Probabilities against draws; rows folded in are those of the fit."""
    engine, y = full_fit("softplus"), DATA["softplus"]
    draws = engine.get_samples()
    eta = (draws["w"][:, ROWS] * draws["z"][:, COLS]).sum(-1) + draws["bias"][:, ROWS]
    probabilities = np.exp(jax.vmap(lambda eta: LIKELIHOODS["softplus"](eta).log_prob(y))(eta)).mean(0)
    found = engine.log_predictive("softplus", ROWS, COLS, y, num_samples=500)["y"]
    np.testing.assert_allclose(np.exp(found), probabilities, atol=0.03)
    chosen = ROWS < 2
    again = engine.fold_in(random.key(1), "softplus", ROWS[chosen], COLS[chosen], y[chosen], num_rows=2)
    np.testing.assert_allclose(again.posterior["w"].mean, engine.posterior["w"].mean[:2], atol=1e-3)
    np.testing.assert_allclose(again.posterior["bias"].sd, engine.posterior["bias"].sd[:2], atol=1e-3)


@pytest.mark.thorough
@needs_float64
def test_normal_values_against_the_closed_form():
    """The expected square of ``y - u @ w - b``, and the divergence of the posterior from the prior, by hand."""
    engine = full_fit("normal")
    assert engine.diagnostics.converged and engine.distance_to_boundary == np.inf
    state, form = engine.last_state.state, engine._run.reading.form({})
    (u, uu), (w, ww) = ((np.asarray(b.mean), np.asarray(b.covariance)) for b in (state.rows, state.columns))
    # The vectors of the rows are weights and bias, that of the columns weights only.
    v = np.concatenate([w, np.ones((C, 1))], axis=-1)[:, : u.shape[1]]
    vv = np.zeros((C, u.shape[1], u.shape[1]))
    vv[:, :K, :K] = ww
    order = np.argsort(np.asarray(form.rows.precision[0]))  # the bias has the largest precision, and comes last
    u, uu = u[:, order], uu[:, order][:, :, order]
    second = np.einsum("rij,cij->rc", uu + u[:, :, None] * u[:, None, :], vv + v[:, :, None] * v[:, None, :])
    mean = u @ v.T
    np.testing.assert_allclose(engine.predictive_mean()["y"], mean.ravel(), rtol=1e-6)
    y = NOISY.reshape(R, C)
    expected = -0.5 * (y**2 - 2.0 * y * mean + second) / 0.49 - 0.5 * np.log(2.0 * np.pi * 0.49)
    priors = np.array([0.9, 0.9, 0.5]) ** 2, np.ones(K)
    divergence = sum(
        0.5 * (np.diagonal(cov, axis1=1, axis2=2) / p + m**2 / p + np.log(p) - 1.0).sum()
        - 0.5 * np.linalg.slogdet(cov)[1].sum()
        for m, cov, p in zip((u, w), (uu, ww), priors, strict=True)
    )
    np.testing.assert_allclose(engine.log_evidence, expected.sum() - divergence, rtol=1e-7)


@needs_float64
@slow
def test_the_noise_of_normal_values_is_learned():
    """At the end it solves ``-n / s + S / s^3 - s = 0``, with the expected sum of squares and a half-normal prior."""

    def noisy(y):
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        with numpyro.plate("rows", R):
            w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("cols", C):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(w[ROWS] * z[COLS], noise), obs=y)

    y = FACTORS.ravel() + 0.3 * np.random.default_rng(6).normal(size=R * C)
    engine = BilinearVG(noisy, progress_bar=False, tol=1e-9)
    engine.run(random.key(0), y)
    (u, uu), (w, ww) = ((np.ravel(b.mean), np.ravel(b.covariance)) for b in engine._run.blocks)
    squares = np.sum(y**2 - 2.0 * y * u[ROWS] * w[COLS] + (u**2 + uu)[ROWS] * (w**2 + ww)[COLS])
    noise = engine.hyper["noise"].value
    assert engine.diagnostics.converged
    np.testing.assert_allclose(-y.size / noise + squares / noise**3, noise, rtol=1e-6)


def learning_model(rows, cols, y):
    """A scale in the prior, and thresholds in the likelihood."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    steps = numpyro.sample("steps", dist.Gamma(4.0, 4.0).expand([2]).to_event(1))
    with numpyro.plate("rows", R):
        w = numpyro.sample("w", dist.Normal(0.0, scale))
    with numpyro.plate("cols", C):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.OrderedLogistic(w[rows] * z[cols], jnp.cumsum(steps) - 1.5), obs=y)


@needs_float64
@pytest.mark.slow
def test_thresholds_are_learned():
    """Every sweep raises the objective; its derivatives in the hyperparameters are those of finite differences."""
    engine = BilinearVG(learning_model, progress_bar=False, tol=1e-4, num_steps=100)
    engine.run(random.key(1), ROWS, COLS, DATA["ordered_probit"])
    trace = engine.diagnostics.objective_trace
    assert np.all(np.diff(trace) >= -1e-9)
    run, blocks = engine._run, engine._run.blocks
    held = {name: jnp.asarray(site.init) for name, site in run.reading.hyper.items()}

    @jax.jit
    def bound(hyper):
        return bg.bound(run.reading.form(hyper), *blocks)

    gradient = jax.jit(jax.grad(bound))(held)
    for name, index in (("scale", ()), ("steps", 0), ("steps", 1)):
        ends = [bound({**held, name: held[name].at[index].add(h)}) for h in (-1e-4, 1e-4)]
        rounding = 4.0 * np.finfo(float).eps * abs(ends[0]) / 2e-4
        np.testing.assert_allclose(gradient[name][index], (ends[1] - ends[0]) / 2e-4, rtol=1e-5, atol=rounding)
    best = {name: engine.hyper[name].value for name in held}
    np.testing.assert_allclose(bound(best) + run.reading.log_prior(best), trace[-1], rtol=1e-10)
    assert trace[-1] > bound(held) + run.reading.log_prior(held) + 0.1
    with pytest.raises(ValueError, match="no mean"):
        engine.predictive_mean()


@needs_float64
@slow
def test_wide_posteriors_are_warned_of():
    """Where exposures are small, next to nothing is known of products of factors that vary widely."""

    def wide(y):
        with numpyro.plate("rows", 2):
            w = numpyro.sample("w", dist.Normal(0.0, 4.0))
        with numpyro.plate("cols", 2):
            z = numpyro.sample("z", dist.Normal(0.0, 4.0))
        numpyro.sample("y", dist.Poisson(1e-3 * jax.nn.softplus(w[:, None] * z)), obs=y)

    with pytest.warns(UserWarning, match="narrower priors"):
        BilinearVG(wide, progress_bar=False).run(random.key(0), np.zeros((2, 2), int))


@slow
@pytest.mark.parametrize("name", ["softplus", "ordered_probit"])
def test_against_nuts(name):
    """Predictors, which do not know of rotations: means within a third of a standard deviation on average."""
    sampler = MCMC(NUTS(model), num_warmup=500, num_samples=1500, num_chains=1, progress_bar=False)
    sampler.run(random.key(1), name, ROWS, COLS, DATA[name])

    def predictors(draws):
        return (draws["w"][:, ROWS] * draws["z"][:, COLS]).sum(-1) + draws["bias"][:, ROWS]

    exact, found = predictors(sampler.get_samples()), predictors(full_fit(name).get_samples())
    gap = np.abs(exact.mean(0) - found.mean(0)) / exact.std(0)
    assert np.mean(gap) < 0.35
