"""The engine of structured mean field on NumPyro models: answers against dense algebra, learning, files."""

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import Predictive

from numpyro_ext.design import linear_information_gain
from numpyro_ext.distributions import HiddenMarkovTree
from numpyro_ext.infer import StructuredMeanField
from numpyro_ext.infer.sparse.gaussian_solver import SolverCosts
from numpyro_ext.linalg import from_matrix, select
from numpyro_ext.models import wavelet_denoising
from tests.potentials.tree_cases import CASES, reference_model

ROWS, COLUMNS = 20, 8
RNG = np.random.default_rng(0)
MATRIX = jnp.asarray(RNG.normal(size=(ROWS, COLUMNS)))
DATA = MATRIX @ jnp.asarray(0.7 * RNG.laplace(size=COLUMNS)) + 0.2 * RNG.normal(size=ROWS)


def learning(matrix, data):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.param("noise", 0.5, constraint=dist.constraints.positive)
    s = numpyro.sample("s", dist.Laplace(0.0, scale).expand([COLUMNS]).to_event(1))
    numpyro.deterministic("sums", jnp.cumsum(s) + 1.0)
    numpyro.sample("y", dist.Normal(matrix @ s, noise), obs=data)


GIVEN = {"scale": 0.7, "noise": 0.2}


@pytest.fixture(scope="module")
def learned():
    engine = StructuredMeanField(learning, num_steps=400, tol=1e-7)
    engine.run(jax.random.key(0), MATRIX, DATA)
    return engine


@pytest.fixture(scope="module")
def given():
    engine = StructuredMeanField(learning, hyper_values=GIVEN, num_steps=400, tol=1e-9, num_samples=2000)
    engine.run(jax.random.key(1), MATRIX, DATA)
    return engine


@pytest.fixture(scope="module")
def dense(given):
    """Mean and covariance at the fixed point, iterated in NumPy."""
    matrix, data = np.asarray(MATRIX), np.asarray(DATA)
    weight = np.full(COLUMNS, 1.0)
    for _ in range(2000):
        covariance = np.linalg.inv(matrix.T @ matrix / 0.04 + np.diag(weight))
        mean = covariance @ matrix.T @ data / 0.04
        weight = 1.0 / (0.7 * np.sqrt(np.diag(covariance) + mean**2))
    return mean, covariance


@pytest.mark.thorough
def test_moments_are_those_of_the_fixed_point(given, dense):
    mean, covariance = dense
    assert given.diagnostics.converged and not given.diagnostics.messages
    np.testing.assert_allclose(given.posterior["s"].mean, mean, atol=1e-7)
    np.testing.assert_allclose(given.posterior["s"].variance, np.diag(covariance), rtol=1e-6)
    np.testing.assert_allclose(given.posterior["s"].covariance(), covariance, rtol=1e-6, atol=1e-12)
    lower = np.tril(np.ones((COLUMNS, COLUMNS)))
    np.testing.assert_allclose(given.posterior["sums"].mean, lower @ mean + 1.0, atol=1e-7)
    np.testing.assert_allclose(given.posterior["sums"].variance, np.diag(lower @ covariance @ lower.T), rtol=1e-6)
    assert given.posterior["scale"].mean == given.hyper["scale"].value
    for name, reason in (("y", "observed"), ("none", "no site")):
        with pytest.raises(KeyError, match=reason):
            given.posterior[name]


@pytest.mark.thorough
def test_draws_have_these_moments(given, dense):
    mean, covariance = dense
    draws = given.get_samples()
    assert set(draws) == {"s", "sums", "scale", "noise"} and draws["scale"].shape == (2000,)
    error = np.sqrt(np.diag(covariance) / 2000)
    assert np.all(np.abs(np.mean(draws["s"], axis=0) - mean) < 5 * error)
    np.testing.assert_allclose(np.cov(draws["s"].T), covariance, atol=6 * covariance.max() / np.sqrt(2000))
    np.testing.assert_allclose(draws["sums"], jnp.cumsum(draws["s"], axis=1) + 1.0, rtol=1e-12)
    again = given.get_samples(seed=3)
    assert not np.allclose(again["s"], draws["s"])
    site = given.posterior["sums"].sample(jax.random.key(5), 7)
    assert site.shape == (7, COLUMNS)
    energy = given.get_extra_fields()["potential_energy"]
    log_joint, _ = numpyro.infer.util.log_density(
        learning, (MATRIX, DATA), {}, {name: draws[name][0] for name in ("s", "scale", "noise")}
    )
    np.testing.assert_allclose(-energy[0], log_joint, rtol=1e-9)


def test_evidence_is_a_bound(given):
    assert given.log_evidence.is_lower_bound
    # Importance sampling from the posterior: its log average exceeds the bound.
    s = given.posterior["s"]
    draws, energy = given.get_samples()["s"], given.get_extra_fields()["potential_energy"]
    log_prior = dist.LogNormal(0.0, 1.0).log_prob(0.7)
    log_q = dist.MultivariateNormal(s.mean, s.covariance()).log_prob(draws)
    log_weights = -energy - log_prior - log_q
    estimate = jax.scipy.special.logsumexp(log_weights) - jnp.log(2000.0)
    assert given.log_evidence < estimate < given.log_evidence + 2.0


def test_information_gain(given, dense):
    _, covariance = dense
    rows = RNG.normal(size=(3, COLUMNS))
    expected = 0.5 * np.log1p(np.einsum("ij,jk,ik->i", rows, covariance, rows) / 0.04)
    np.testing.assert_allclose(linear_information_gain(given, rows), expected, rtol=1e-6)
    np.testing.assert_allclose(linear_information_gain(given, from_matrix(rows)), expected, rtol=1e-6)
    twice = linear_information_gain(given, rows, noise_variance=0.16)
    np.testing.assert_allclose(np.expm1(2 * twice), np.expm1(2 * expected) / 4.0, rtol=1e-6)
    lower = np.tril(np.ones((COLUMNS, COLUMNS)))
    through = linear_information_gain(given, rows, site="sums")
    np.testing.assert_allclose(through, linear_information_gain(given, rows @ lower), rtol=1e-9)
    with pytest.raises(ValueError, match="shape"):
        linear_information_gain(given, np.ones((2, 3)))
    with pytest.raises(ValueError, match="positive"):
        linear_information_gain(given, rows, noise_variance=0.0)
    with pytest.raises(KeyError, match="it is a hyperparameter"):
        linear_information_gain(given, rows, site="scale")
    together = linear_information_gain(given, rows, joint=True)
    dense_rows = np.eye(3) + rows @ covariance @ rows.T / 0.04
    np.testing.assert_allclose(together, 0.5 * np.linalg.slogdet(dense_rows)[1], rtol=1e-6)


@pytest.mark.thorough
def test_learned_hyperparameters_are_a_maximum_of_the_bound(learned):
    trace = learned.diagnostics.objective_trace
    assert learned.diagnostics.converged
    at = {name: float(estimate.value) for name, estimate in learned.hyper.items()}

    def objective(values):
        engine = StructuredMeanField(learning, hyper_values=values, num_steps=400, tol=1e-9)
        engine.run(jax.random.key(0), MATRIX, DATA)
        return float(engine.log_evidence) + float(dist.LogNormal(0.0, 1.0).log_prob(values["scale"]))

    best = objective(at)
    np.testing.assert_allclose(best - float(dist.LogNormal(0.0, 1.0).log_prob(at["scale"])), learned.log_evidence)
    assert trace[-1] > trace[0]
    for name, value in at.items():
        for factor in (0.9, 1.1):
            assert objective({**at, name: factor * value}) < best
        slope = (objective({**at, name: 1.01 * value}) - objective({**at, name: value / 1.01})) / 0.02
        assert abs(slope) < 0.01


@pytest.mark.thorough
def test_parameters_of_a_tree_converge_in_the_defaults():
    """To a maximum of the bound: none does better a little further, with all coefficients refitted."""
    picture = np.kron([[0.0, 1.0], [1.0, 0.5]], np.ones((8, 8)))
    noisy = picture + 0.1 * np.random.default_rng(0).standard_normal(picture.shape)
    engine = StructuredMeanField(wavelet_denoising, progress_bar=False)
    engine.run(jax.random.key(0), noisy, 0.1, wavelet="haar")
    assert engine.diagnostics.converged
    assert np.all(np.diff(engine.diagnostics.objective_trace) >= -1e-9)
    at = {name: np.asarray(estimate.value) for name, estimate in engine.hyper.items()}
    again = StructuredMeanField(wavelet_denoising, hyper_values=at, num_steps=1000, tol=1e-6, progress_bar=False)
    again.run(jax.random.key(0), noisy, 0.1, wavelet="haar")
    best = float(again.log_evidence)
    np.testing.assert_allclose(best, engine.log_evidence, atol=1e-3)
    for name, value in at.items():
        for factor in (0.97, 1.03):
            moved = factor * value if name.endswith("scale") else value**factor
            again.hyper_values = {**at, name: moved}
            again.run(jax.random.key(0), noisy, 0.1, wavelet="haar", init_state=again.last_state)
            assert again.log_evidence < best + 1e-6


@pytest.mark.thorough
def test_noise_is_not_learned_without_residual_degrees_of_freedom():
    """Its bound would end at a tenth of the noise, and the result be the noisy picture."""
    noisy = np.kron([[0.0, 1.0], [1.0, 0.5]], np.ones((8, 8))) + 0.1 * np.random.default_rng(0).standard_normal(
        (16, 16)
    )
    engine = StructuredMeanField(wavelet_denoising, progress_bar=False)
    with pytest.raises(
        ValueError, match=r"256 observations of 256 .*hyper_values=\{'noise_scale': 0\.\d+\}.*EP"
    ) as error:
        engine.run(jax.random.key(0), noisy, wavelet="haar")
    # What the message tells to give is a robust estimate.
    value = float(str(error.value).split("'noise_scale': ")[1].split("}")[0])
    assert 0.08 < value < 0.12
    with pytest.raises(ValueError, match="'noise' would have to be learned, a noise scale of 8 observations of 8"):
        StructuredMeanField(learning, variances="none").run(jax.random.key(0), MATRIX[:8], DATA[:8])


@pytest.mark.thorough
def test_summary_and_description(learned, capsys):
    learned.print_summary()
    text = capsys.readouterr().out
    assert "Log evidence, at least" in text and "s[7]" in text and "noise" in text
    assert "solver: dense, variances: exact" in learned.describe()


def test_arviz_and_predictive(given):
    data = az.from_numpyro(given)
    assert data["posterior"]["s"].shape[-1] == COLUMNS
    assert given.to_arviz() is not None
    predicted = Predictive(learning, given.get_samples())(jax.random.key(0), MATRIX, None)["y"]
    assert predicted.shape == (2000, ROWS)
    assert np.std(predicted.mean(0) - DATA) < 0.4


@pytest.mark.thorough
def test_save_and_load(learned, tmp_path):
    learned.save(tmp_path / "run.npz")
    loaded = StructuredMeanField.load(tmp_path / "run.npz", learning)
    assert loaded.log_evidence == learned.log_evidence and loaded.num_steps == 400
    np.testing.assert_array_equal(loaded.posterior["s"].mean, learned.posterior["s"].mean)
    np.testing.assert_array_equal(loaded.get_samples()["sums"], learned.get_samples()["sums"])
    loaded.run(jax.random.key(0), MATRIX, DATA, init_state=loaded.last_state)
    assert loaded.diagnostics.num_steps <= learned.diagnostics.num_steps + 10
    with pytest.raises(ValueError, match="another model"):
        loaded.run(jax.random.key(0), MATRIX[:-1], DATA[:-1], init_state=loaded.last_state)


def test_interruption_keeps_what_was_found(monkeypatch):
    engine = StructuredMeanField(learning, num_steps=400, tol=1e-12, progress_bar=False)
    calls, wait = [], jax.block_until_ready

    def interrupt(value):
        calls.append(value)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return wait(value)

    monkeypatch.setattr(jax, "block_until_ready", interrupt)
    with pytest.warns(UserWarning, match="Interrupted after 10 steps"):
        engine.run(jax.random.key(0), MATRIX, DATA)
    assert engine.diagnostics.num_steps == 10 and np.isfinite(engine.log_evidence)


def test_mode(given):
    engine = StructuredMeanField(learning, hyper_values=GIVEN, variances="none", num_steps=2000, tol=1e-8)
    engine.run(jax.random.key(0), MATRIX, DATA)
    mode = engine.posterior["s"].mean
    objective = lambda s: jnp.sum((DATA - MATRIX @ s) ** 2) / 0.08 + jnp.sum(jnp.abs(s)) / 0.7  # noqa: E731
    for shift in jnp.concatenate([jnp.eye(COLUMNS), -jnp.eye(COLUMNS)]):
        assert objective(mode + 1e-3 * shift) > objective(mode)
    for ask in (lambda: engine.log_evidence, lambda: engine.posterior["s"].variance, engine.get_samples):
        with pytest.raises(RuntimeError, match="none"):
            ask()


class WithoutMatrices(StructuredMeanField):
    _costs = SolverCosts(largest_dense_step=1, largest_dense=1)


@pytest.mark.thorough
def test_conjugate_gradients_give_the_same_answers(given, dense):
    mean, covariance = dense
    engine = WithoutMatrices(
        learning, hyper_values=GIVEN, num_steps=100, tol=1e-4, num_variance_samples=500, num_samples=1000
    )
    engine.run(jax.random.key(2), MATRIX, DATA)
    assert "conjugate-gradient, variances: perturb-and-map" in engine.describe()
    assert np.max(np.abs(engine.posterior["s"].mean - mean) / np.sqrt(np.diag(covariance))) < 0.2
    np.testing.assert_allclose(engine.posterior["s"].variance, np.diag(covariance), rtol=5 * np.sqrt(2 / 1000))
    gain = linear_information_gain(engine, jnp.eye(COLUMNS))
    np.testing.assert_allclose(np.expm1(2 * gain) * 0.04, np.diag(covariance), rtol=0.1)
    np.testing.assert_allclose(engine.log_evidence, given.log_evidence, atol=1.0)


def test_raw_coefficients_as_the_start(given):
    start = {"s": np.linalg.lstsq(np.asarray(MATRIX), np.asarray(DATA))[0]}
    engine = StructuredMeanField(learning, hyper_values=GIVEN, num_steps=400, tol=1e-9, init_values=start)
    engine.run(jax.random.key(0), MATRIX, DATA)
    np.testing.assert_allclose(engine.posterior["s"].mean, given.posterior["s"].mean, atol=1e-7)
    with pytest.raises(ValueError, match="shape"):
        StructuredMeanField(learning, init_values={"s": np.ones(3)}).run(jax.random.key(0), MATRIX, DATA)
    with pytest.raises(ValueError, match="no latent or param site 't'"):
        StructuredMeanField(learning, init_values={"t": 1.0}).run(jax.random.key(0), MATRIX, DATA)


@pytest.mark.thorough
def test_reference_tree_through_the_engine():
    case = next(case for case in CASES if case["name"] == "twentyone_node_laplace")
    forest, prior = reference_model(case)
    expected = case["vb_denoising_fixed_point"]

    def denoising(data):
        low, high = dist.Laplace(0.0, prior.low.scale), dist.Laplace(0.0, prior.high.scale)
        tree = HiddenMarkovTree(forest, low, high, prior.root_probability, prior.transition)
        s = numpyro.sample("s", tree)
        numpyro.sample("y", dist.Normal(s, case["sigma2"] ** 0.5), obs=data)

    engine = StructuredMeanField(denoising, num_steps=1000, tol=1e-10)
    engine.run(jax.random.key(0), jnp.asarray(case["given"]["y_tilde"]))
    np.testing.assert_allclose(engine.log_evidence, expected["bound"], atol=1e-6)
    np.testing.assert_allclose(engine.posterior["s"].mean, expected["mean"], atol=1e-6)
    np.testing.assert_allclose(engine.posterior["s"].variance, expected["z"], atol=1e-6)
    np.testing.assert_allclose(engine.state_probabilities(), expected["delta"], atol=1e-6)
    assert engine.log_evidence < case["exact_denoising"]["log_Z"]


def test_bad_input():
    with pytest.raises(RuntimeError, match="should be called first"):
        StructuredMeanField(learning).get_samples()
    with pytest.raises(ValueError, match="variances must be one of"):
        StructuredMeanField(learning, variances="some")
    with pytest.raises(ValueError, match="num_rounds"):
        StructuredMeanField(learning, num_rounds=0)
    with pytest.raises(ValueError, match=r"not finite.*ask"):
        StructuredMeanField(learning).run(jax.random.key(0), MATRIX, DATA.at[3].set(jnp.nan))

    def scaled(data):
        gain = numpyro.param("gain", 1.0)
        s = numpyro.sample("s", dist.Laplace(0.0, 1.0).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(gain * s, 0.1), obs=data)

    with pytest.raises(ValueError, match="hyper_values"):
        StructuredMeanField(scaled).run(jax.random.key(0), jnp.ones(3))
    engine = StructuredMeanField(scaled, hyper_values={"gain": 2.0})
    engine.run(jax.random.key(0), jnp.ones(3))
    assert "solver: diagonal" in engine.describe()


@pytest.mark.thorough
def test_missing_pixels_by_mask():
    mask = np.array([True, True, False, True])

    def masked(data):
        s = numpyro.sample("s", dist.Laplace(0.0, 0.5).expand([4]).to_event(1))
        with numpyro.handlers.mask(mask=mask):
            numpyro.sample("y", dist.Normal(s, 0.3), obs=data)

    def selected(data):
        s = numpyro.sample("s", dist.Laplace(0.0, 0.5).expand([4]).to_event(1))
        numpyro.sample("y", dist.Normal(select(mask) @ s, 0.3), obs=data)

    data = jnp.array([2.0, 0.1, 0.0, 1.0])
    first, second = StructuredMeanField(masked, tol=1e-8), StructuredMeanField(selected, tol=1e-8)
    first.run(jax.random.key(0), data)
    second.run(jax.random.key(0), data[mask])
    np.testing.assert_allclose(first.posterior["s"].mean, second.posterior["s"].mean, atol=1e-9)
    np.testing.assert_allclose(first.log_evidence, second.log_evidence, rtol=1e-9)
    # The coefficient that is not seen keeps the second moment of the bound's own prior: x = gamma(x) = scale^2.
    np.testing.assert_allclose(first.posterior["s"].variance[2], 0.25, rtol=1e-5)
