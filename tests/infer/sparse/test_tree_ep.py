"""Expectation propagation with a tree as one factor: exact posteriors of reference trees, learning, mixtures."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import integrate, optimize, stats

from benchmarks.baselines.tree_denoising import denoise
from models.images import wavelet_denoising
from numpyro_ext.design import linear_information_gain
from numpyro_ext.distributions import HiddenMarkovTree
from numpyro_ext.infer import EP, cross_validate
from numpyro_ext.infer.sparse.trees import propagation as core
from numpyro_ext.infer.sparse.trees.mixtures import TreeSite
from numpyro_ext.linalg import from_matrix, identity, wavelet_transform
from numpyro_ext.potentials import GaussianPotential, LaplacePotential, wavelet_forest
from numpyro_ext.potentials.trees.draws import _draw_tilted_laplace, _truncated_quantile, tree_draws
from numpyro_ext.potentials.trees.mixture import TreeParameters, tilted_moments
from numpyro_ext.structure import ModelStructureError, Reason, read_latent_gaussian, read_sparse_linear
from numpyro_ext.structure.sparse_linear.form import SparseLinear
from tests.potentials.tree_cases import CASES, reference_model
from tests.tiers import few

CASE = {case["name"]: case for case in CASES}
TREE = CASE["image4x4_forest_laplace"]
NOISE = TREE["sigma2"] ** 0.5
DATA = jnp.asarray(TREE["given"]["y_tilde"])
SIZE = DATA.size


def site(component):
    if isinstance(component, LaplacePotential):
        return dist.Laplace(0.0, component.scale)
    if isinstance(component, GaussianPotential):
        return dist.Normal(0.0, component.scale)
    return dist.StudentT(component.df, 0.0, component.scale)


def prior(case):
    forest, p = reference_model(case)
    return HiddenMarkovTree(forest, site(p.low), site(p.high), p.root_probability, p.transition)


def denoising(data, noise=NOISE, matrix=None):
    s = numpyro.sample("s", prior(TREE))
    mean = s if matrix is None else matrix @ s
    numpyro.deterministic("sums", jnp.cumsum(s) + 1.0)
    numpyro.sample("y", dist.Normal(mean, noise), obs=data)


@pytest.fixture(scope="module")
def exact():
    engine = EP(denoising, num_samples=4000)
    engine.run(jax.random.key(0), DATA)
    return engine


@pytest.mark.thorough
def test_exact_on_the_sixteen_nodes_of_the_reference(exact):
    expected = TREE["exact_denoising"]
    assert exact.diagnostics.converged and exact.diagnostics.num_steps == 1
    assert "posterior: exact" in exact.describe() and not exact.log_evidence.is_lower_bound
    np.testing.assert_allclose(exact.posterior["s"].mean, expected["posterior_mean"], atol=1e-8)
    np.testing.assert_allclose(exact.posterior["s"].variance, expected["posterior_var"], atol=1e-8)
    np.testing.assert_allclose(exact.state_probabilities(), expected["posterior_state1"], atol=1e-8)
    np.testing.assert_allclose(exact.log_evidence, expected["log_Z"], atol=1e-8)


@pytest.mark.thorough
def test_evidence_counts_what_the_operator_cannot_reach(exact):
    """Orthogonal columns of length two in a space of more dimensions: the data split into two independent parts."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(SIZE + 5, SIZE + 5)))[0]
    columns, rest = 2.0 * basis[:, :SIZE], basis[:, SIZE:]
    outside = rng.normal(size=5)
    engine = EP(denoising)
    engine.run(jax.random.key(0), columns @ DATA + rest @ outside, 2.0 * NOISE, columns)
    np.testing.assert_allclose(engine.posterior["s"].mean, exact.posterior["s"].mean, atol=1e-8)
    np.testing.assert_allclose(engine.posterior["s"].variance, exact.posterior["s"].variance, atol=1e-8)
    # Lengths of two take log 2 per coefficient from the density of the data.
    expected = exact.log_evidence - SIZE * np.log(2.0) + dist.Normal(0.0, 2.0 * NOISE).log_prob(outside).sum()
    np.testing.assert_allclose(engine.log_evidence, expected, atol=1e-8)


@pytest.mark.slow
def test_covariance_and_draws_of_sites(exact):
    """The covariance is the slope of the mean, and draws have it."""
    forest, parameters = reference_model(TREE)
    slope = jax.jacfwd(lambda y: tilted_moments(forest, parameters, y, NOISE**2).mean)(DATA)
    covariance = NOISE**2 * slope
    np.testing.assert_allclose(exact.posterior["s"].covariance(), covariance, atol=1e-10)
    lower = np.tril(np.ones((SIZE, SIZE)))
    sums = exact.posterior["sums"]
    np.testing.assert_allclose(sums.mean, lower @ exact.posterior["s"].mean + 1.0, atol=1e-12)
    np.testing.assert_allclose(sums.variance, np.diag(lower @ covariance @ lower.T), rtol=1e-8)
    gain = linear_information_gain(exact, lower[:3], site="s")
    np.testing.assert_allclose(np.expm1(2 * gain), np.diag(lower @ covariance @ lower.T)[:3] / NOISE**2, rtol=1e-8)
    draws = exact.get_samples()
    assert set(draws) == {"s", "sums"} and draws["s"].shape == (4000, SIZE)
    deviation = np.sqrt(np.diag(covariance))
    assert np.all(np.abs(np.mean(draws["s"], axis=0) - exact.posterior["s"].mean) < 4.5 * deviation / np.sqrt(4000))
    scale = np.outer(deviation, deviation)
    assert np.max(np.abs(np.cov(draws["s"].T) - covariance) / scale) < 0.15
    energy = exact.get_extra_fields()["potential_energy"]
    log_joint, _ = numpyro.infer.util.log_density(denoising, (DATA,), {}, {"s": draws["s"][0]})
    np.testing.assert_allclose(-energy[0], log_joint, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["image4x4_forest_laplace", "twentyone_node_gauss_student"])
def test_draws_follow_the_tilted_marginals(name):
    case = CASE[name]
    forest, parameters = reference_model(case)
    y, variance = jnp.asarray(case["given"]["y_tilde"]), case["sigma2"]
    moments = tilted_moments(forest, parameters, y, variance)
    draws, states = tree_draws(jax.random.key(1), forest, parameters, y, variance, 8000)
    p = np.asarray(moments.marginals)
    assert np.all(np.abs(np.mean(states, axis=0) - p) < 5.0 * np.sqrt(p * (1 - p) / 8000) + 1e-12)
    pair = np.mean(states[:, forest.parents] & states, axis=0)[forest.parents >= 0]
    np.testing.assert_allclose(pair, moments.pair_marginals[forest.parents >= 0, 1, 1], atol=0.03)
    assert np.all(np.abs(np.mean(draws, axis=0) - moments.mean) < 5.0 * np.sqrt(moments.variance / 8000))
    if name.startswith("image"):
        node = 1
        group = int(forest.groups[node])
        rates = 1.0 / np.array([parameters.low.scale[group], parameters.high.scale[group]])
        grid = np.linspace(-8.0, 8.0, 200001)
        density = sum(
            weight * f / integrate.trapezoid(f, grid)
            for weight, rate in zip((1 - p[node], p[node]), rates, strict=True)
            for f in [np.exp(-rate * np.abs(grid) - 0.5 * (grid - y[node]) ** 2 / variance)]
        )
        cdf = integrate.cumulative_trapezoid(density, grid, initial=0.0)
        x = np.sort(draws[:, node])
        distance = np.max(np.abs(np.interp(x, grid, cdf) - (np.arange(8000) + 0.5) / 8000))
        assert distance < 1.95 / np.sqrt(8000)


RNG = np.random.default_rng(3)


@pytest.mark.thorough
def test_iteration_equals_the_exact_posterior_for_the_identity():
    forest, parameters = reference_model(TREE)
    form = SparseLinear(identity(SIZE), DATA, jnp.asarray(NOISE**2), forest, parameters)
    state, info = core.solve(form, core.init(form), num_steps=50, tol=1e-10)
    moments = core.gaussian(form, state)
    expected = TREE["exact_denoising"]
    assert info.converged
    np.testing.assert_allclose(moments.mean, expected["posterior_mean"], atol=1e-8)
    np.testing.assert_allclose(moments.variance, expected["posterior_var"], atol=1e-8)
    np.testing.assert_allclose(info.objective, expected["log_Z"], atol=1e-8)


@pytest.mark.slow
def test_dense_operator_is_close_to_quadrature_over_states():
    """Two Gaussian components make the posterior a mixture of 2^n Gaussians, which is summed."""
    forest, laplace = reference_model(CASE["five_node_laplace"])
    scales = np.array([0.3, 1.5])
    components = [GaussianPotential(0.0, jnp.full(forest.num_groups, s)) for s in scales]
    parameters = laplace._replace(low=components[0], high=components[1])
    matrix = RNG.normal(size=(8, 5))
    y = matrix @ np.array([2.0, 0.1, -1.0, 0.0, 0.5]) + 0.3 * RNG.normal(size=8)
    form = SparseLinear(from_matrix(matrix), jnp.asarray(y), jnp.asarray(0.09), forest, parameters)
    logs, means, seconds = [], [], []
    theta, roots = np.asarray(parameters.transition), np.asarray(parameters.root_probability)
    groups, parents = np.asarray(forest.groups), np.asarray(forest.parents)
    for state in itertools.product((0, 1), repeat=5):
        high = [roots[g] if p < 0 else theta[g, state[p]] for g, p in zip(groups, parents, strict=True)]
        log_prior = np.sum(np.log(np.where(state, high, 1.0 - np.array(high))))
        variance = scales[list(state)] ** 2
        marginal = matrix @ np.diag(variance) @ matrix.T + 0.09 * np.eye(8)
        gain = np.diag(variance) @ matrix.T @ np.linalg.inv(marginal)
        logs.append(log_prior + float(dist.MultivariateNormal(jnp.zeros(8), jnp.asarray(marginal)).log_prob(y)))
        means.append(gain @ y)
        seconds.append(np.diag(np.diag(variance) - gain @ matrix @ np.diag(variance)) + (gain @ y) ** 2)
    log_evidence = np.logaddexp.reduce(logs)
    weights = np.exp(np.array(logs) - log_evidence)
    mean = weights @ np.array(means)
    variance = weights @ np.array(seconds) - mean**2
    state, info = core.solve(form, core.init(form), num_steps=200, tol=1e-10)
    moments = core.gaussian(form, state)
    assert info.converged
    # What is left is the error of EP itself: eight accurate data for five coefficients leave little to approximate.
    assert np.all(np.abs(moments.mean - mean) < 1e-3 * np.sqrt(variance))
    np.testing.assert_allclose(moments.variance, variance, rtol=3e-3)
    np.testing.assert_allclose(info.objective, log_evidence, atol=1e-3)

    def converged_evidence(log_noise):
        moved = form._replace(noise_variance=jnp.exp(log_noise))
        return float(core.solve(moved, state, num_steps=200, tol=1e-11)[1].objective)

    slope = jax.grad(lambda x: core.log_evidence(form._replace(noise_variance=jnp.exp(x)), state))(jnp.log(0.09))
    difference = (converged_evidence(np.log(0.09) + 1e-4) - converged_evidence(np.log(0.09) - 1e-4)) / 2e-4
    np.testing.assert_allclose(slope, difference, rtol=1e-5)


# The engine that users call


def learning(data, kind="laplace"):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.param("noise", 0.5, constraint=dist.constraints.positive)
    component = dist.Laplace(0.0, scale) if kind == "laplace" else dist.StudentT(3.0, 0.0, scale)
    s = numpyro.sample("s", component.expand([40]).to_event(1))
    numpyro.sample("y", dist.Normal(s, noise), obs=data)


COEFFICIENTS = jnp.asarray(0.7 * RNG.laplace(size=40) + 0.2 * RNG.normal(size=40))


@pytest.fixture(scope="module")
def learned():
    engine = EP(learning, hyper_tol=1e-4)
    engine.run(jax.random.key(0), COEFFICIENTS)
    return engine


@pytest.mark.thorough
def test_learned_values_maximise_the_integrated_likelihood(learned):
    """One-dimensional integrals by quadrature, and a search that knows nothing of trees."""
    grid = np.linspace(-15.0, 15.0, 20001)

    def objective(logs):
        scale, noise = np.exp(logs)
        kernel = np.exp(-np.abs(grid) / scale) / (2.0 * scale)
        noisy = np.exp(-0.5 * ((np.asarray(COEFFICIENTS)[:, None] - grid) / noise) ** 2) / (noise * np.sqrt(2 * np.pi))
        return np.sum(np.log(integrate.trapezoid(noisy * kernel, grid))), -0.5 * logs[0] ** 2 - logs[0]

    best = optimize.minimize(lambda x: -sum(objective(x)), np.log([0.7, 0.3]), method="Nelder-Mead", tol=1e-7)
    assert learned.diagnostics.converged and learned.tree is not None
    assert learned.diagnostics.hyper.num_evaluations < 60
    np.testing.assert_allclose(learned.hyper["scale"].value, np.exp(best.x[0]), rtol=1e-3)
    np.testing.assert_allclose(learned.hyper["noise"].value, np.exp(best.x[1]), rtol=1e-3)
    at = np.log([float(learned.hyper[name].value) for name in ("scale", "noise")])
    np.testing.assert_allclose(learned.log_evidence, objective(at)[0], atol=1e-4)
    step = 1e-3 * np.eye(2)
    curvature = [
        [
            (f(at + a + b) - f(at + a - b) - f(at - a + b) + f(at - a - b)) / 4e-6
            for b in step
        ]
        for a in step
        for f in [lambda x: sum(objective(x))]
    ]  # fmt: skip
    errors = np.sqrt(np.diag(np.linalg.inv(-np.array(curvature))))
    found = [float(learned.hyper[name].unconstrained_standard_error) for name in ("scale", "noise")]
    np.testing.assert_allclose(found, errors, rtol=0.02)


@pytest.mark.thorough
def test_front_of_a_run_that_was_handed_over(learned, capsys, tmp_path):
    learned.print_summary()
    text = capsys.readouterr().out
    assert "s[39]" in text and "noise" in text and "Log evidence:" in text
    assert "posterior: exact" in learned.describe()
    samples = learned.get_samples()
    assert samples["s"].shape == (1000, 40) and samples["noise"].shape == (1000,)
    lower, upper = learned.posterior["s"].interval(0.8)
    inside = np.mean((samples["s"] >= lower) & (samples["s"] <= upper), axis=0)
    assert np.all(np.abs(inside - 0.8) < 0.08)
    assert jnp.all(learned.state_probabilities() == 0.0)
    for ask in (lambda: learned.guide, lambda: learned.psis_diagnostic(jax.random.key(0)), learned.log_predictive):
        with pytest.raises(RuntimeError, match="Gaussian posterior"):
            ask()
    learned.save(tmp_path / "run.npz")
    loaded = EP.load(tmp_path / "run.npz", learning)
    assert loaded.log_evidence == learned.log_evidence and loaded.hyper_tol == 1e-4
    np.testing.assert_allclose(loaded.posterior["s"].mean, learned.posterior["s"].mean, rtol=1e-10)
    loaded.run(jax.random.key(0), COEFFICIENTS, init_state=loaded.last_state)
    assert loaded.diagnostics.hyper.num_iterations <= 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "read"), few([("learning", read_sparse_linear), ("gaussian_field", read_latent_gaussian)], 1)
)
def test_a_model_is_read_once_whatever_its_form(name, read):
    calls = []

    def model(data):
        calls.append(None)
        globals()[name](data)

    data = COEFFICIENTS if name == "learning" else COEFFICIENTS[:3]
    read(model, (data,))  # the first of its operations may be called again, to see whether it does the same
    before = len(calls)
    read(model, (data,))
    expected = len(calls) - before
    engine = EP(model, max_hyper_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.run(jax.random.key(0), data)
    assert len(calls) == before + 2 * expected
    assert (engine.tree is not None) == (name == "learning")


def test_what_only_a_gaussian_field_can_do_is_refused_for_coefficients():
    def model(data, mask=True):
        s = numpyro.sample("s", dist.Laplace(0.0, 1.0).expand([40]).to_event(1))
        with numpyro.handlers.mask(mask=mask):
            numpyro.sample("y", dist.Normal(s, 0.3), obs=data)

    with pytest.raises(ModelStructureError, match=r"Gaussian field, .* sparse coefficients \['s'\]"):
        cross_validate(EP(model), jax.random.key(0), COEFFICIENTS, num_folds=2)
    engine = EP(gaussian_field)
    engine.run(jax.random.key(0), COEFFICIENTS[:3])
    with pytest.raises(RuntimeError, match="no sparse coefficients"):
        engine.state_probabilities()
    with pytest.raises(RuntimeError, match="no sparse coefficients"):
        engine.members  # noqa: B018


@pytest.mark.thorough
def test_parameters_are_learned_from_several_shifts():
    """Their average log evidence, of members fitted one by one at given parameters, is flat and at a maximum there."""
    rng = np.random.default_rng(5)
    data = rng.laplace(size=(16, 16)) + 0.3 * rng.normal(size=(16, 16))
    options = {"wavelet": "haar", "num_levels": 2, "per_orientation": False, "low": "gaussian"}
    start = {"root_probability": jnp.full(2, 0.5), "transition": jnp.array([[0.1, 0.8]])}
    engine = EP(
        wavelet_denoising,
        num_shifts=3,
        num_learning_shifts=3,
        hyper_values=start,
        hyper_tol=1e-4,
        progress_bar=False,
    )
    engine.run(jax.random.key(2), data, 0.3, **options)
    assert engine.diagnostics.converged
    shifts = [np.zeros(2, int), *(np.asarray(member.arguments["shift"]) for member in engine.members[:2])]
    learned = {name: np.asarray(engine.hyper[name].value) for name in ("low_scale", "high_scale")}

    def average(values):
        each = EP(wavelet_denoising, average_over={"shift": shifts}, hyper_values=start | values, progress_bar=False)
        each.run(jax.random.key(0), data, 0.3, **options)
        return np.mean([float(member.fit.log_evidence) for member in each.members])

    at_learned = average(learned)
    for _ in range(3):
        step = {name: np.exp(0.02 * rng.choice([-1.0, 1.0], value.size)) for name, value in learned.items()}
        up = average({name: value * step[name] for name, value in learned.items()})
        down = average({name: value / step[name] for name, value in learned.items()})
        assert max(up, down) < at_learned
        assert abs(up - down) / 0.04 < 2e-2
    # What is reported of the first basis is its own.
    alone = EP(wavelet_denoising, hyper_values=start | learned, progress_bar=False)
    alone.run(jax.random.key(0), data, 0.3, **options)
    first = engine.tree.learned[0].fit.log_evidence
    assert first == pytest.approx(float(alone.log_evidence), rel=1e-10)


def test_what_is_refused():
    assert EP(gaussian_field).tree is None
    with pytest.raises(ValueError, match="argument 'shift'"):
        EP(learning, num_shifts=4)
    with pytest.raises(ValueError, match="argument 'wavelet'"):
        EP(learning, average_over={"wavelet": ["haar"]})
    with pytest.raises(ValueError, match="no values"):
        EP(wavelet_denoising, average_over={"wavelet": []})
    with pytest.raises(ValueError, match="num_shifts"):
        EP(wavelet_denoising, num_shifts=0)
    with pytest.raises(ValueError, match="num_learning_shifts=4, but num_shifts=2"):
        EP(wavelet_denoising, num_shifts=2, num_learning_shifts=4)
    for option in ("num_shifts", "num_learning_shifts"):
        for wrong in (True, 2.0):
            with pytest.raises(ValueError, match=f"{option} must be an integer of at least 1, got {wrong}"):
                EP(wavelet_denoising, **{"num_shifts": 2, option: wrong})
    with pytest.raises(ModelStructureError, match="num_learning_shifts is for transforms with orthogonal columns"):
        EP(shifted_blur, num_shifts=2, num_learning_shifts=2).run(jax.random.key(0), jnp.ones(8))
    with pytest.raises(ValueError, match="averaged over"):
        EP(wavelet_denoising, average_over={"wavelet": ["haar"]}).run(
            jax.random.key(0), jnp.ones((4, 4)), 0.1, wavelet="db2"
        )
    with pytest.raises(ModelStructureError, match="StructuredMeanField"):
        EP(blurred).run(jax.random.key(0), jnp.ones(3000))
    with pytest.raises(ModelStructureError, match="mask it"):
        EP(learning).run(jax.random.key(0), COEFFICIENTS.at[0].set(jnp.nan))
    with pytest.raises(ModelStructureError, match="no Gaussian latent site.* 'Gamma'.*no site of sparse") as caught:
        EP(rates).run(jax.random.key(0), jnp.ones(3, int))
    assert caught.value.reason is Reason.NO_FIELD


@pytest.mark.thorough
def test_coefficients_of_other_observations_are_latent_gaussian():
    engine = EP(counting, progress_bar=False)
    engine.run(jax.random.key(0), jnp.ones(3, int))
    assert engine.tree is None and engine.diagnostics.converged


def gaussian_field(data):
    s = numpyro.sample("s", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(s, 1.0), obs=data)


def shifted_blur(data, shift=0):
    s = numpyro.sample("s", dist.Laplace(0.0, 1.0).expand([8]).to_event(1))
    mean = numpyro.deterministic("mean", jnp.roll(s + 0.5 * jnp.roll(s, 1), shift, (0,)))
    numpyro.sample("y", dist.Normal(mean, 0.1), obs=data)


def blurred(data):
    s = numpyro.sample("s", dist.Laplace(0.0, 1.0).expand([3000]).to_event(1))
    numpyro.sample("y", dist.Normal(s + jnp.roll(s, 1), 0.1), obs=data)


def rates(data):
    numpyro.sample("y", dist.Poisson(numpyro.sample("rate", dist.Gamma(1.0, 1.0))), obs=data)


def counting(data):
    s = numpyro.sample("s", dist.Laplace(0.0, 1.0).expand([3]).to_event(1))
    numpyro.sample("y", dist.Poisson(jnp.exp(s)), obs=data)


@pytest.fixture(scope="module")
def pooled():
    """One run of four shifts as a mixture and as an average."""
    image = np.zeros((8, 8))
    image[2:6, 3:7] = 1.0
    noisy = image + 0.2 * np.random.default_rng(0).normal(size=image.shape)
    given = {
        "low_scale": jnp.full(7, 0.05),
        "high_scale": jnp.full(7, 1.0),
        "root_probability": jnp.full(4, 0.5),
        "transition": jnp.full((3, 2), 0.5),
    }
    runs = {}
    for pooling in ("mixture", "average"):
        engine = EP(
            wavelet_denoising, num_shifts=4, pooling=pooling, hyper_values=given, num_samples=400, progress_bar=False
        )
        engine.run(jax.random.key(0), noisy, 0.2, num_levels=2, wavelet="haar")
        runs[pooling] = engine
    return runs


@pytest.mark.thorough
def test_an_average_is_as_wrong_as_its_members_less_what_they_differ_by(pooled):
    """The identity of Krogh and Vedelsby (1995) for the members' own means and variances, in sums over the picture."""
    mixture, average = (pooled[name].posterior["image"] for name in ("mixture", "average"))
    members = pooled["mixture"].members
    means = np.array([m.programs.site_mean(m.inputs, name="image") for m in members]).reshape(4, -1)
    within = np.array([m.programs.site_variance(m.inputs, name="image") for m in members]).mean()
    np.testing.assert_allclose(np.mean(mixture.variance), within + means.var(0).mean(), rtol=1e-10)
    np.testing.assert_allclose(np.mean(average.variance), within - means.var(0).mean(), rtol=1e-10)
    np.testing.assert_array_equal(average.mean, mixture.mean)
    np.testing.assert_allclose(average.variance / mixture.variance, average.shrinkage, rtol=1e-10)


@pytest.mark.thorough
def test_draws_and_quantiles_of_an_average_belong_to_its_moments(pooled):
    mixture, average = pooled["mixture"], pooled["average"]
    site, factor = average.posterior["image"], average.posterior["image"].shrinkage ** 0.5
    for of_mixture, of_average in (
        (mixture.get_samples()["image"], average.get_samples()["image"]),
        (mixture.posterior["image"].quantile([0.1, 0.9]), site.quantile([0.1, 0.9])),
        (mixture.posterior["image"].sample(jax.random.key(3), 400), site.sample(jax.random.key(3), 400)),
    ):
        np.testing.assert_allclose(of_average, site.mean + factor * (of_mixture - site.mean), atol=1e-12)
    assert "average of 4 members" in average.describe()
    np.testing.assert_allclose(np.diagonal(site.covariance().reshape(64, 64)), site.variance.reshape(-1), rtol=1e-6)


@pytest.mark.thorough
def test_an_average_of_members_that_contradict_each_other_is_refused(pooled):
    site = TreeSite("image", pooled["average"].tree)
    site.__dict__["_between"] = 2.0 * site._within
    with pytest.raises(FloatingPointError, match="pooling='mixture'"):
        _ = site.variance
    with pytest.raises(ValueError, match="'mixture', 'average' or 'risk'"):
        EP(wavelet_denoising, num_shifts=2, pooling="median")


@pytest.mark.slow
def test_mixture_over_shifts_and_wavelets(tmp_path):
    image = np.zeros((16, 16))
    image[3:11, 5:13] = 1.0
    noisy = image + 0.2 * np.random.default_rng(0).normal(size=image.shape)
    engine = EP(
        wavelet_denoising, num_shifts=3, average_over={"wavelet": ["haar", "db2"]}, num_samples=600, max_hyper_steps=200
    )
    engine.run(jax.random.key(0), noisy, 0.2, num_levels=2)
    members = engine.members
    assert [m.arguments["wavelet"] for m in members] == ["haar"] * 3 + ["db2"] * 3
    assert "mixture of 6 members" in engine.describe()
    found = []
    for member in members:
        transform = wavelet_transform((16, 16), member.arguments["wavelet"], 2)
        forest = wavelet_forest(transform, per_orientation=True)
        values = member.fit.hyper
        is_root = np.arange(forest.num_groups) < 4
        parameters = TreeParameters(
            LaplacePotential(0.0, values["low_scale"]),
            LaplacePotential(0.0, values["high_scale"]),
            jnp.full(7, 0.5).at[:4].set(values["root_probability"]),
            jnp.full((7, 2), 0.5).at[~is_root].set(values["transition"]),
        )
        # Rolling the image by the shift is rolling the data back.
        found.append(denoise(transform, forest, parameters, noisy, 0.04, -member.arguments["shift"][None]))
        np.testing.assert_allclose(member.fit.log_evidence, found[-1].log_evidence[0], rtol=1e-9)
    means = np.array([f.mean for f in found])
    site = engine.posterior["image"]
    np.testing.assert_allclose(site.mean, means.mean(0), atol=1e-9)
    # The covariances of the states are not in the variances of the other route; they are small.
    variance = np.mean([f.variance for f in found], axis=0) + means.var(0)
    assert np.all(np.abs(site.variance / variance - 1.0) < 0.2)
    values = [m.fit.log_evidence for m in members]
    np.testing.assert_allclose(engine.log_evidence, np.logaddexp.reduce(values) - np.log(6.0))
    draws = engine.get_samples()["image"]
    assert draws.shape == (600, 16, 16)
    error = np.abs(draws.mean(0) - site.mean) / np.sqrt(site.variance / 600)
    assert np.max(error) < 5.0
    np.testing.assert_allclose(np.mean(draws.var(0) / site.variance), 1.0, atol=0.05)
    lower, upper = site.interval(0.8)
    assert 0.6 < np.mean((image >= lower) & (image <= upper)) < 0.97
    assert np.mean((site.mean - image) ** 2) < np.mean([np.mean((m - image) ** 2) for m in means])
    assert "wavelet='haar': low_scale" in engine.hyper
    with pytest.raises(KeyError, match="other quantities"):
        engine.posterior["s"]
    engine.save(tmp_path / "mixture.npz")
    again = EP.load(tmp_path / "mixture.npz", wavelet_denoising)
    assert float(again.log_evidence) == float(engine.log_evidence) and again.hyper.keys() == engine.hyper.keys()
    np.testing.assert_array_equal(again.posterior["image"].mean, site.mean)
    np.testing.assert_array_equal(again.get_samples()["image"], draws)
    with pytest.raises(RuntimeError, match="mixture"):
        engine.state_probabilities()


def test_gradients_far_from_zero_in_single_precision():
    """By reverse mode: what a branch that is not taken would give must not reach the other."""

    def log_z(scale):
        return jnp.sum(LaplacePotential(0.0, scale).log_normaliser(jnp.array([21.0, -21.0, 0.0], jnp.float32), 0.01))

    slope = jax.grad(log_z)(jnp.float32(8.0))
    # Of -|y| / scale - log(2 scale), but for the one at zero, where the density is that of the kink.
    np.testing.assert_allclose(slope, 2 * (21.0 / 64.0 - 1.0 / 8.0) - 1.0 / 8.0, atol=2e-3)


@pytest.mark.slow
def test_draws_are_finite_in_single_precision():
    """Uniform numbers of 23 bits are zero now and then; a million draws would show it."""
    for mean in (0.0, 20.0):
        y = jnp.full(2**24, mean, jnp.float32)
        draws = _draw_tilted_laplace(jax.random.key(0), jnp.float32(0.5), y, jnp.float32(0.01))
        assert draws.dtype == jnp.float32 and np.all(np.abs(draws - y) < 2.0)


@pytest.mark.slow
def test_quantiles_of_truncated_normals():
    below = jnp.linspace(-8.0, 120.0, 65)
    for probability in (1e-6, 0.3, 0.999):
        x = _truncated_quantile(below, jnp.full(65, np.log(probability)))
        np.testing.assert_allclose(stats.norm.logsf(x) - stats.norm.logsf(below), np.log(probability), atol=1e-9)
