"""A focus on draws: the field given each of them in closed form, beside dense algebra, draws within draws and INLA."""

import re
from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from scipy.special import ndtri
from scipy.stats import poisson, qmc

from numpyro_ext.design import SequentialDesign, draws_of, expected_information_gain, predictive_entropy, select_batch
from numpyro_ext.infer import EP, INLA, SMC
from tests.compilations import compiled_programs
from tests.tiers import few

X = np.array([0.0, 0.3, 0.7, 1.0, 1.6])
Y = np.array([0.2, 0.9, 0.0, -0.6, 0.0])
SEEN = np.array([True, True, False, True, False])
DRAWS = {"length": np.array([0.2, 0.5, 0.9, 0.5]), "noise": np.array([0.1, 0.3, 0.5, 0.3])}
WEIGHTS = np.array([0.2, 0.3, 0.4, 0.1])
POINTS = [(0.2, 0.2, 0.1), (0.4, 0.5, 0.3), (0.4, 0.9, 0.5)]  # what these come to: a weight, a length, a noise
HYPER = ["length", "noise"]


def curve(x, y=None, seen=True):
    length = numpyro.sample("length", dist.LogNormal(-1.0, 0.5))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    covariance = jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2) + 1e-6 * jnp.eye(x.shape[0])
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(x.shape[0]), covariance))
    with handlers.mask(mask=seen):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def draws_of_curve(**options):
    return draws_of(DRAWS, model=curve, weights=WEIGHTS, args=(X, Y, SEEN), **options)


def field_of(x, length, noise, seen, y):
    """Mean and covariance of the field given what was seen."""
    prior = np.exp(-0.5 * ((x[:, None] - x) / length) ** 2) + 1e-6 * np.eye(len(x))
    gain = np.linalg.solve(prior[np.ix_(seen, seen)] + noise**2 * np.eye(seen.sum()), prior[seen]).T
    return gain @ y[seen], prior - gain @ prior[seen]


def entropy_of(density, step):
    return -np.sum(density * np.log(np.maximum(density, 1e-300))) * step


OUTCOMES = np.linspace(-8.0, 8.0, 16001)
STEP = OUTCOMES[1] - OUTCOMES[0]


def exact_gain(x, candidate, elements, seen, y):
    """By dense algebra; elements are numbers of the field in focus beside the hyperparameters, ``None`` for all."""
    density, conditional = np.zeros_like(OUTCOMES), 0.0
    for weight, length, noise in POINTS:
        mean, covariance = field_of(x, length, noise, seen, y)
        density += weight * np.asarray(
            norm.pdf(OUTCOMES, mean[candidate], np.sqrt(covariance[candidate, candidate] + noise**2))
        )
        left = 0.0
        if elements is not None:
            cross, known = covariance[candidate, elements], covariance[np.ix_(elements, elements)]
            left = covariance[candidate, candidate] - cross @ np.linalg.solve(known, cross)
        conditional += weight * 0.5 * np.log(2.0 * np.pi * np.e * (left + noise**2))
    return entropy_of(density, STEP) - conditional


FOCUSES = [(HYPER, []), ([*HYPER, "f"], None), ({**dict.fromkeys(HYPER), "f": [1, 2]}, [1, 2])]


@pytest.mark.thorough
@pytest.mark.parametrize("focus, elements", few(FOCUSES, 2))
def test_the_field_at_each_draw_is_conditioned_exactly(focus, elements):
    draws = draws_of_curve()
    gain = expected_information_gain(draws, focus=focus)["y"]
    np.testing.assert_array_equal(gain[SEEN], -np.inf)
    exact = [exact_gain(X, k, elements, SEEN, Y) for k in np.flatnonzero(~SEEN)]
    np.testing.assert_allclose(gain[~SEEN], exact, atol=1e-8)
    # at new inputs, of which the draws have no values of the field
    new = np.array([0.5, 2.0])
    x, y, seen = np.append(X, new), np.append(Y, [0.0, 0.0]), np.append(SEEN, [False, False])
    exact = [exact_gain(x, k, elements, seen, y) for k in (5, 6)]
    np.testing.assert_allclose(expected_information_gain(draws, new, focus=focus)["y"], exact, atol=1e-8)


@pytest.mark.thorough
def test_new_inputs_need_no_draws_of_the_field_there():
    """Samplers know a process where they have sampled it; given these draws it is known elsewhere, too."""
    new, fields = np.array([0.5, 2.0]), np.zeros((4, 5))
    draws = draws_of({**DRAWS, "f": fields}, model=curve, weights=WEIGHTS, args=(X, Y, SEEN))
    for at in (new, X + 0.1):  # as many as there are draws of the field: they are not of it there
        gain, expected = expected_information_gain(draws, at), expected_information_gain(draws, at, focus=[*HYPER, "f"])
        np.testing.assert_allclose(gain["y"], expected["y"], rtol=1e-12)
    x = np.append(X, new)
    entropies = []
    for candidate in (5, 6):
        density = np.zeros_like(OUTCOMES)
        for weight, length, noise in POINTS:
            mean, covariance = field_of(x, length, noise, np.append(SEEN, [False, False]), np.append(Y, [0.0, 0.0]))
            deviation = np.sqrt(covariance[candidate, candidate] + noise**2)
            density += weight * np.asarray(norm.pdf(OUTCOMES, mean[candidate], deviation))
        entropies.append(entropy_of(density, STEP))
    np.testing.assert_allclose(predictive_entropy(draws, new)["y"], entropies, atol=1e-8)


def labels_of_curve(x, y=None):
    length = numpyro.sample("length", dist.LogNormal(-1.0, 0.5))
    covariance = jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2) + 1e-6 * jnp.eye(x.shape[0])
    f = numpyro.sample("f", dist.MultivariateNormal(0.5 * jnp.ones(x.shape[0]), covariance))
    numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


LABELS = (Y > 0).astype(int)
LENGTHS, FIELDS = np.array([0.2, 0.5, 0.9, 0.5]), np.random.default_rng(0).normal(size=(4, 5))


def binary_entropy(p):
    return -p * np.log(p) - (1.0 - p) * np.log1p(-p)


@pytest.mark.thorough
def test_labels_at_new_inputs_given_draws_of_the_field():
    """By dense algebra and draws by draws quadrature: the field at new inputs given its draw at those of the fit."""
    draws = draws_of({"length": LENGTHS, "f": FIELDS}, model=labels_of_curve, weights=WEIGHTS, args=(X, LABELS))
    nodes, masses = np.polynomial.hermite_e.hermegauss(60)
    masses = masses / masses.sum()
    for new in (np.array([0.5, 2.0]), X + 0.1):
        x = np.append(X, new)
        p = np.zeros((4, len(new), 60))
        for k in range(4):
            prior = np.exp(-0.5 * ((x[:, None] - x) / LENGTHS[k]) ** 2) + 1e-6 * np.eye(len(x))
            gain = np.linalg.solve(prior[:5, :5], prior[:5, 5:]).T
            mean = 0.5 + gain @ (FIELDS[k] - 0.5)
            variance = np.diag(prior[5:, 5:] - gain @ prior[:5, 5:])
            p[k] = 1.0 / (1.0 + np.exp(-(mean[:, None] + np.sqrt(variance)[:, None] * nodes)))
        entropy = binary_entropy(np.einsum("k,kij,j->i", WEIGHTS, p, masses))
        np.testing.assert_allclose(predictive_entropy(draws, new)["y"], entropy, atol=1e-9)
        conditional = np.einsum("k,kij,j->i", WEIGHTS, binary_entropy(p), masses)
        np.testing.assert_allclose(expected_information_gain(draws, new)["y"], entropy - conditional, atol=1e-7)


@pytest.mark.thorough
def test_batches_of_labels_at_new_inputs():
    new = np.array([0.5, 2.0])
    draws = draws_of({"length": LENGTHS, "f": FIELDS}, model=labels_of_curve, weights=WEIGHTS, args=(X, LABELS))
    nodes, masses = np.polynomial.hermite_e.hermegauss(40)
    masses = np.outer(masses, masses).reshape(-1) / masses.sum() ** 2
    z, x = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2), np.append(X, new)
    together, conditional = np.zeros((2, 2)), 0.0
    for k in range(4):
        prior = np.exp(-0.5 * ((x[:, None] - x) / LENGTHS[k]) ** 2) + 1e-6 * np.eye(7)
        gain = np.linalg.solve(prior[:5, :5], prior[:5, 5:]).T
        root = np.linalg.cholesky(prior[5:, 5:] - gain @ prior[:5, 5:])
        p = 1.0 / (1.0 + np.exp(-(0.5 + gain @ (FIELDS[k] - 0.5) + z @ root.T)))
        each = np.stack([1.0 - p, p], -1)
        together += WEIGHTS[k] * np.einsum("q,qi,qj->ij", masses, each[:, 0], each[:, 1])
        conditional += WEIGHTS[k] * masses @ binary_entropy(p).sum(1)
    exact = -np.sum(together * np.log(together)) - conditional
    batch = select_batch(draws, 2, new, num_draws=20_000, rng_key=random.key(1))
    np.testing.assert_allclose(batch.information, exact, atol=4e-3)
    assert {candidate.place for candidate in batch} == {0, 1}


@pytest.mark.thorough
def test_batches_with_gaussian_noise_given_draws():
    """Without uncertainty of hyperparameters log determinants by dense algebra; of hyperparameters alone nothing."""
    new = np.array([0.5, 2.0, 2.05])
    draws = draws_of({"length": np.full(3, 0.5), "noise": np.full(3, 0.3)}, model=curve, args=(X, Y, SEEN))
    x, y, seen = np.append(X, new), np.append(Y, np.zeros(3)), np.append(SEEN, np.zeros(3, bool))
    _, covariance = field_of(x, 0.5, 0.3, seen, y)
    batch = select_batch(draws, 2, new, focus=[*HYPER, "f"])
    here = [5 + candidate.place for candidate in batch]
    signal = covariance[np.ix_(here, here)] / 0.09
    np.testing.assert_allclose(batch.information, 0.5 * np.linalg.slogdet(np.eye(2) + signal)[1], rtol=1e-9)
    # two lengths, known noise: whoever sees both outcomes has one bit at most, and one candidate has its score
    draws = draws_of({"length": np.array([0.1, 0.9]), "noise": np.full(2, 0.3)}, model=curve, args=(X, Y, SEEN))
    batch = select_batch(draws, 2, new, focus=HYPER, num_draws=4000)
    alone = expected_information_gain(draws, new, focus=HYPER)["y"]
    np.testing.assert_allclose(batch[0].score, alone.max(), atol=0.01)
    assert batch[0].score < batch.information < np.log(2.0)


@pytest.mark.thorough
def test_the_bias_of_few_draws_of_a_field_is_taken_away():
    generator, new = np.random.default_rng(0), np.array([0.5, 0.15])

    def gains(number, **options):
        drawn = {"length": np.full(number, 0.5), "f": 3.0 * generator.normal(size=(number, 5))}
        draws = draws_of(drawn, model=labels_of_curve, args=(X, LABELS))
        return expected_information_gain(draws, new, **options)["y"]

    exact = gains(20_000)
    for correction in ("none", "delta", "jackknife"):
        found = np.stack([gains(10, bias_correction=correction) for _ in range(100)])
        away, error = found.mean(0) - exact, found.std(0) / np.sqrt(100)
        if correction == "none":
            assert np.all(away < -3.0 * error)
        else:
            assert np.all(np.abs(away) < 3.0 * error)


def intercepts(group, num_groups, y=None):
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    start = numpyro.sample("start", dist.Normal(0.0, 1.0))
    u = numpyro.sample("u", dist.Normal(0.0, spread).expand([num_groups]))
    numpyro.sample("y", dist.Poisson(jnp.exp(start + u[group])), obs=y)


@pytest.mark.thorough
def test_counts_of_new_groups_given_draws_of_the_others():
    generator = np.random.default_rng(0)
    drawn = {
        "spread": np.exp(0.2 * generator.normal(size=30) - 1.0),
        "start": 0.1 * generator.normal(size=30),
        "u": 0.3 * generator.normal(size=(30, 2)),
    }
    draws = draws_of(drawn, model=intercepts, args=(np.array([0, 0, 1]), 2, np.array([1, 2, 0])))
    found = predictive_entropy(draws, np.array([0, 2]), 3)["y"]
    nodes, masses = np.polynomial.hermite_e.hermegauss(40)
    masses, counts = masses / masses.sum(), np.arange(60)[:, None, None]
    rates = np.exp(drawn["start"][:, None] + drawn["spread"][:, None] * nodes)
    expected = np.sum(poisson.pmf(counts, rates) * masses, axis=2).mean(1)
    np.testing.assert_allclose(found[1], -np.sum(expected * np.log(np.maximum(expected, 1e-300))), atol=1e-6)
    known = poisson.pmf(counts[:, :, 0], np.exp(drawn["start"] + drawn["u"][:, 0])).mean(1)
    np.testing.assert_allclose(found[0], -np.sum(known * np.log(np.maximum(known, 1e-300))), atol=1e-6)


def bumpy_labels(x, y=None, num_bumps=0):
    covariance = jnp.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-6 * jnp.eye(x.shape[0])
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(x.shape[0]), covariance))
    shift = numpyro.sample("shift", dist.Laplace(0.0, 1.0))
    steps = numpyro.sample("steps", dist.ImproperUniform(dist.constraints.real, (), (2,)))
    bumps = numpyro.sample("bumps", dist.Laplace(0.0, 1.0).expand([x.shape[0]])) if num_bumps else 0.0
    logits = f + shift + steps[jnp.where(x > 0.5, 1, 0)] + bumps
    numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


@pytest.mark.thorough
def test_coefficients_whose_priors_are_not_gaussian_stay_as_drawn():
    generator = np.random.default_rng(0)
    shift, steps, new = generator.normal(size=4), 9.0 * generator.normal(size=(4, 2)), np.array([0.5, 2.0])
    found = predictive_entropy(
        draws_of({"f": FIELDS, "shift": shift, "steps": steps}, model=bumpy_labels, args=(X, LABELS)), new
    )["y"]
    prior = np.exp(-0.5 * (np.append(X, new)[:, None] - np.append(X, new)) ** 2) + 1e-6 * np.eye(7)
    gain = np.linalg.solve(prior[:5, :5], prior[:5, 5:]).T
    mean = (gain @ FIELDS.T).T + shift[:, None] + steps
    variance = np.diag(prior[5:, 5:] - gain @ prior[:5, 5:])
    nodes, masses = np.polynomial.hermite_e.hermegauss(60)
    p = 1.0 / (1.0 + np.exp(-(mean[..., None] + np.sqrt(variance)[:, None] * nodes)))
    np.testing.assert_allclose(found, binary_entropy((p @ masses).mean(0) / masses.sum()), atol=1e-8)


def test_new_members_whose_field_is_not_known_are_refused():
    drawn, new = {"length": LENGTHS, "f": FIELDS}, np.array([0.5, 2.0])
    bumpy = {"f": FIELDS, "shift": np.zeros(4), "steps": np.zeros((4, 2)), "bumps": FIELDS}
    with_bumps = partial(bumpy_labels, num_bumps=1)
    cases = [
        (draws_of({"f": FIELDS, "length": LENGTHS}, model=labels_of_curve), "give the arguments of the fit"),
        (draws_of({"f": FIELDS}, model=labels_of_curve, args=(X, LABELS)), r"needs draws of \['length'\] as well"),
        (draws_of(bumpy, model=with_bumps, args=(X, LABELS)), "need a fit"),
    ]
    for draws, message in cases:
        with pytest.raises(ValueError, match="new members have no draws yet") as error:
            expected_information_gain(draws, new)
        assert re.search(message, str(error.value))
    with pytest.raises(ValueError, match="draws within draws would be biased"):
        expected_information_gain(draws_of(drawn, model=labels_of_curve, args=(X, LABELS)), new, focus="length")


def test_coefficients_are_the_same_at_new_inputs_whatever_their_prior():
    def scaled(x, y=None):
        weights = numpyro.sample("weights", dist.Normal(0.0, x.std(0)).to_event(1))
        numpyro.sample("y", dist.Normal(x @ weights, 0.3), obs=y)

    x = np.random.default_rng(0).normal(size=(5, 2))
    drawn = {"weights": np.random.default_rng(1).normal(size=(20, 2))}
    found = [
        expected_information_gain(draws_of(drawn, model=scaled, args=args), 2.0 * x)["y"] for args in ((x, Y), None)
    ]
    np.testing.assert_allclose(*found, rtol=1e-12)


def test_against_draws_within_draws():
    """The estimator of which this is the limit: outer draws of what is in focus, inner ones of the rest."""
    candidate, focus = 2, [1, 3]
    outer = ndtri(qmc.Sobol(2, seed=0).random(512))
    inner = ndtri((np.arange(64) + 0.5) / 64)
    outcomes, step = OUTCOMES[::40], 40 * STEP
    density, conditional = np.zeros_like(outcomes), 0.0
    for weight, length, noise in POINTS:
        mean, covariance = field_of(X, length, noise, SEEN, Y)
        known = covariance[np.ix_(focus, focus)]
        rule = np.linalg.solve(known, covariance[focus, candidate])
        spread = np.sqrt(covariance[candidate, candidate] - rule @ covariance[focus, candidate])
        for z in outer:
            eta = mean[candidate] + rule @ (np.linalg.cholesky(known) @ z) + spread * inner
            parts = np.exp(-0.5 * ((outcomes[:, None] - eta) / noise) ** 2) / np.sqrt(2.0 * np.pi) / noise
            inside = parts.mean(1)
            density += weight * inside / len(outer)
            conditional += weight * entropy_of(inside, step) / len(outer)
    gain = expected_information_gain(draws_of_curve(), focus={**dict.fromkeys(HYPER), "f": focus})["y"][candidate]
    np.testing.assert_allclose(gain, entropy_of(density, step) - conditional, atol=2e-3)


def test_other_draws_compile_nothing():
    def gain(seed):
        generator = np.random.default_rng(seed)
        drawn = {name: np.exp(0.3 * generator.normal(size=30) - 1.0) for name in HYPER}
        return expected_information_gain(draws_of(drawn, model=curve, args=(X, Y, SEEN)), focus=HYPER)["y"]

    first = gain(0)
    with compiled_programs() as compiled:
        second = gain(1)
    assert not compiled, compiled
    assert np.all(first[~SEEN] > 0.0) and not np.array_equal(first, second)


@pytest.mark.thorough
@pytest.mark.parametrize("focus", [focus for focus, _ in FOCUSES])
def test_points_of_a_lattice_as_draws_are_its_mixture(focus):
    engine = INLA(curve, progress_bar=False)
    engine.run(random.key(0), X, Y, SEEN)
    weights, points = zip(*engine._finished().weighted_points(), strict=True)
    drawn = {name: np.stack([hyper[name] for _, hyper, _ in points]) for name in HYPER}
    draws = draws_of(drawn, model=curve, args=(X, Y, SEEN), weights=weights)
    for new in ((), (np.array([0.5, 2.0]),)):
        found, expected = (expected_information_gain(source, *new, focus=focus)["y"] for source in (draws, engine))
        np.testing.assert_allclose(found, expected, atol=1e-8)


def by_particles():
    smc = SMC(curve, num_particles=2000, progress_bar=False)
    smc.run(random.key(0), X, Y, SEEN)
    return smc


def by_nuts():
    mcmc = MCMC(NUTS(curve), num_warmup=300, num_samples=1500, progress_bar=False)
    mcmc.run(random.key(0), X, Y, SEEN)
    return mcmc


@pytest.mark.slow
@pytest.mark.parametrize("run", [by_particles, by_nuts])
def test_samplers_are_asked_of_a_focus(run):
    engine, source = INLA(curve, integrate="grid", grid_step=0.6, progress_bar=False), run()
    engine.run(random.key(0), X, Y, SEEN)
    for focus, _ in FOCUSES:
        found, expected = (expected_information_gain(s, focus=focus)["y"] for s in (source, engine))
        np.testing.assert_allclose(found[~SEEN], expected[~SEEN], atol=0.03)
    if run is by_particles:
        design = SequentialDesign(source, focus=HYPER)
        place = design.propose()
        assert place in np.flatnonzero(~SEEN)


def two_kinds(x, y, z, seen, asked):
    """Real numbers that are seen, and answers of yes or no of which none has been."""
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    slope = numpyro.sample("slope", dist.Normal(0.0, scale))
    with handlers.mask(mask=seen):
        numpyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)
    with handlers.mask(mask=asked):
        numpyro.sample("z", dist.Bernoulli(probs=norm.cdf(slope * x)), obs=z)


@pytest.mark.thorough
def test_answers_that_have_not_been_seen_may_be_of_any_kind():
    x, y = np.array([1.0, -2.0, 3.0]), np.array([0.8, -1.0, 0.0])
    args = x, y, np.zeros(3, int), np.array([True, True, False]), np.zeros(3, bool)
    scales = np.array([0.5, 2.0])
    draws = draws_of({"scale": scales}, model=two_kinds, args=args)
    gain = expected_information_gain(draws, focus="scale")["z"]
    precision = 1.0 / scales**2 + np.sum(x[:2] ** 2) / 0.25
    mean, variance = (x[:2] @ y[:2]) / 0.25 / precision, 1.0 / precision
    p = np.asarray(norm.cdf(x[:, None] * mean / np.sqrt(1.0 + x[:, None] ** 2 * variance)))

    np.testing.assert_allclose(gain, binary_entropy(p.mean(1)) - binary_entropy(p).mean(1), atol=1e-9)
    both = expected_information_gain(draws, focus=["scale", "slope"])
    assert np.all(both["z"] > gain) and both["y"][2] > 0.0


def test_without_hyperparameters_draws_are_of_no_use():
    def line(x, y, seen):
        weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(x @ weights, 0.3), obs=y)

    args = np.array([[1.0, 0.0], [1.0, 1.0], [0.5, 2.0]]), np.array([0.3, 1.0, 0.0]), np.array([True, True, False])
    engine = EP(line, progress_bar=False)
    engine.run(random.key(0), *args)
    draws = draws_of({"weights": np.zeros((5, 2))}, model=line, args=args)
    for focus in ("weights", {"weights": [1]}):
        found, expected = (expected_information_gain(source, focus=focus)["y"] for source in (draws, engine))
        np.testing.assert_allclose(found, expected, atol=1e-9)


def test_a_chain_that_did_not_move_says_nothing_of_hyperparameters():
    stuck = draws_of({"length": np.full(4, 0.5), "noise": np.full(4, 0.3)}, model=curve, args=(X, Y, SEEN))
    with pytest.raises(ValueError, match=r"All draws of \['length', 'noise'\] are equal"):
        expected_information_gain(stuck, focus=HYPER)


@pytest.mark.thorough
def test_elements_of_a_table_stay_those_of_the_fit_at_new_inputs():
    def two_curves(x, y=None, seen=True):
        covariance = jnp.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-6 * jnp.eye(x.shape[0])
        with numpyro.plate("curves", 2):
            f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(x.shape[0]), covariance))
        with handlers.mask(mask=seen):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    y = np.stack([Y, -Y])
    seen, new = np.stack([SEEN, SEEN]), np.array([0.65])
    engine = EP(two_curves, progress_bar=False)
    engine.run(random.key(0), X, y, seen)
    found = expected_information_gain(engine, new, focus={"f": (1, 2)})["y"]  # of the second curve, at 0.7
    engine.run(random.key(0), np.append(X, new), np.pad(y, ((0, 0), (0, 1))), np.pad(seen, ((0, 0), (0, 1))))
    expected = expected_information_gain(engine, focus={"f": (1, 2)})["y"][:, 5:]
    np.testing.assert_allclose(found, expected, atol=1e-8)
    assert found[1, 0] > 0.1
    assert found[0, 0] < 1e-6  # another curve


def classes(x, y=None, seen=True):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, scale))
    with handlers.mask(mask=seen):
        numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)


def coin(y=None):
    bias = numpyro.sample("bias", dist.Beta(1.0, 1.0))
    numpyro.sample("y", dist.Bernoulli(probs=bias), obs=y)


def test_what_has_no_rule_is_refused():
    labels = draws_of({"scale": np.ones(3)}, model=classes, args=(X, (Y > 0).astype(int), SEEN))
    throws = draws_of({"bias": np.array([0.2, 0.5])}, model=coin, args=(np.array([0, 1]),))
    part = draws_of({"length": DRAWS["length"]}, model=curve, args=(X, Y, SEEN))
    everything = draws_of(DRAWS, model=curve, args=(X, Y, np.ones(5, bool)))
    no_numbers = draws_of({**DRAWS, "noise": np.array([0.1, 0.3, 0.5, 1e-300])}, model=curve, args=(X, Y, SEEN))
    draws = draws_of_curve()
    cases = [
        (lambda: expected_information_gain(labels, focus="scale"), r"seen of \['y'\] is no observation with Gaussian"),
        (lambda: expected_information_gain(throws, focus="bias"), "a model with a Gaussian field. Here the model has"),
        (lambda: expected_information_gain(part, focus="length"), r"needs draws of \['noise'\] as well"),
        (lambda: expected_information_gain(draws_of(DRAWS, model=curve), X, focus=HYPER), "the data that the draws"),
        (lambda: expected_information_gain(draws, focus="length"), r"Of \['noise'\] there are draws"),
        (lambda: expected_information_gain(draws, focus="f"), r"Of \['length', 'noise'\] there are draws"),
        (lambda: expected_information_gain(draws, focus="y"), "which is an observed site"),
        (lambda: expected_information_gain(draws, focus={"length": 0, "noise": None}), "name the whole site"),
        (lambda: expected_information_gain(draws, focus=HYPER, bias_correction="delta"), "outcomes that are counted"),
        (lambda: expected_information_gain(everything, focus=HYPER), "Every observation is in use"),
        (lambda: expected_information_gain(no_numbers, focus=HYPER), "not finite"),
        (lambda: predictive_entropy(draws, focus=HYPER), "focus"),
    ]  # fmt: skip
    for call, message in cases:
        with pytest.raises((ValueError, TypeError, FloatingPointError), match=message):
            call()
