"""Exact draws in the coordinates of a fit, against NumPyro's own density and quadrature."""

import dataclasses
import functools
import signal

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.contrib.control_flow import scan
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

from numpyro_ext.infer import EP, IndependenceMetropolis, LaplaceApproximation, PosteriorReparam
from numpyro_ext.infer.exact.agreement import agreement_between
from numpyro_ext.infer.exact.chains import block_of
from numpyro_ext.infer.exact.kernel import log_weight_and_sites
from numpyro_ext.infer.exact.overlap import overlap_of_weights
from numpyro_ext.infer.exact.reparam import LATENT
from numpyro_ext.infer.exact.rotations import Rotations
from numpyro_ext.infer.front.run import FinishedRun
from numpyro_ext.linalg.gaussian.design import DenseDesign
from tests.tiers import few

COUNTS = np.array([0, 2, 7, 1, 1, 4])
GROUP = np.array([0, 0, 1, 1, 2, 2])


def intercepts(counts, group=GROUP):
    """Three groups with a learned scale, masked rows, a scaled likelihood and a quantity computed of the field."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("groups", 3):
        rate = numpyro.sample("rate", dist.Normal(level, scale))
    numpyro.deterministic("first", rate[0] - level)
    with numpyro.handlers.scale(scale=1.5):
        numpyro.sample("counts", dist.Poisson(jnp.exp(rate[group])), obs=counts)


def process(x, y):
    """A Gaussian process with noise, whose sites are known at all hyperparameters."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    kernel = scale**2 * jnp.exp(-0.5 * jnp.square(x[:, None] - x)) + 1e-6 * jnp.eye(x.size)
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(x.size), kernel))
    numpyro.sample("y", dist.Normal(f, noise), obs=y)


def series(y):
    """A walk by scan, with a ``param`` that is held."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    slope = numpyro.param("slope", 0.9)

    def step(state, y):
        state = numpyro.sample("state", dist.Normal(slope * state, scale))
        numpyro.sample("y", dist.Poisson(jnp.exp(state)), obs=y)
        return state, None

    scan(step, 0.0, y)


def crossed(design, answers):
    """Answers of 24 people to six questions, one of which is missing; the design depends on a scale."""
    of_people = numpyro.sample("of_people", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    person = numpyro.sample("person", dist.Normal(level, 1.0).expand([24]).to_event(1))
    question = numpyro.sample("question", dist.Normal(0.0, 1.0).expand([6, 2]).to_event(2))
    eta = of_people * person[:, None] + question[:, 0] + design * question[:, 1]
    with numpyro.handlers.mask(mask=answers >= 0):
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=jnp.maximum(answers, 0))


ANSWERS = np.random.default_rng(0).integers(0, 2, (24, 6))
ANSWERS[2, 3] = -1
MODELS = {
    "crossed": (crossed, (np.linspace(-1.0, 1.0, 144).reshape(24, 6), ANSWERS)),
    "series": (series, (jnp.array([0, 2, 1, 3, 5, 4, 6, 2]),)),
    "process": (process, (jnp.linspace(0.0, 2.0, 5), jnp.sin(jnp.arange(5.0)))),
}


def fitted(model, *args, engine=EP, **options):
    found = engine(model, progress_bar=False, **options)
    found.run(random.key(0), *args)
    return found


@pytest.fixture(scope="module")
def groups():
    return fitted(intercepts, COUNTS, integrate="none")


def _wrong(engine):
    """The same fit with sites that are off: precisions of a third, shifts by two standard deviations."""
    run = engine._run
    right = run.coordinates
    sites = right.sites
    precision = 0.3 * sites.site_precision
    shift = 0.3 * sites.site_shift + 2.0 * jnp.sqrt(precision)
    wrong = dataclasses.replace(right, sites=dataclasses.replace(sites, site_precision=precision, site_shift=shift))
    vars(run)["_coordinates"] = wrong
    return right


@pytest.mark.thorough
@pytest.mark.parametrize("is_wrong", few([False, True], 1))
def test_density_is_that_of_numpyro_times_the_determinant(groups, is_wrong):
    right = _wrong(groups) if is_wrong else None
    try:
        reparam = PosteriorReparam(groups)
    finally:
        if is_wrong:
            vars(groups._run)["_coordinates"] = right
    _check_density(reparam, intercepts, (COUNTS,))
    assert reparam.coordinates.held == {}


@pytest.mark.thorough
def test_a_layout_for_held_sites_changes_no_answer():
    model, args = MODELS["crossed"]
    engine = fitted(model, *args, engine=LaplaceApproximation)
    found, reading = engine._run.coordinates, engine._run.reading
    plain = dataclasses.replace(found, reading=reading)
    assert reading.for_held_sites() is not reading
    assert found.reading.describe() != reading.describe()

    @jax.jit
    def moments(white):
        return [
            (field.mean, field.log_scale, field.log_partition, c.log_ratios(white), field.posterior.map_variance(each))
            for c, field in ((c, c._given(white)[1]) for c in (found, plain))
        ]

    each = DenseDesign(jnp.eye(reading.num_columns))
    new, old = moments(0.3 * random.normal(random.key(2), (found.size,)))
    for place in (0, 1, 2, 4):
        np.testing.assert_allclose(new[place], old[place], rtol=1e-8, atol=1e-10)
    assert new[3]["y"].shape == old[3]["y"].shape == (24, 6)


def walk(y):
    """A walk with a level that all of its steps see: two states."""
    level, scale = numpyro.sample("level", dist.Normal(0, 1)), numpyro.sample("scale", dist.HalfNormal(0.5))
    slope = numpyro.sample("slope", dist.Uniform(0.5, 1.0))

    def step(state, y):
        state = numpyro.sample("state", dist.Normal(slope * state, scale))
        numpyro.sample("y", dist.Poisson(jnp.exp(level + state)), obs=y)
        return state, None

    scan(step, 0.0, y)


def schools(sigma, y):
    """Schools about a common level: one unknown more than there are rows."""
    level, scale = numpyro.sample("level", dist.Normal(0.0, 5.0)), numpyro.sample("scale", dist.HalfNormal(5.0))
    effect = numpyro.sample("effect", dist.Normal(level, scale).expand([len(sigma)]).to_event(1))
    numpyro.sample("y", dist.Normal(effect, sigma).to_event(1), obs=y)


@pytest.mark.thorough
def test_a_fit_in_the_space_of_predictors_may_have_coordinates_with_a_border():
    rng = np.random.default_rng(6)
    args = rng.uniform(5.0, 15.0, 30), rng.normal(5.0, 12.0, 30)
    engine = fitted(schools, *args, engine=LaplaceApproximation, integrate="none")
    found = engine._run.coordinates
    assert found.reading.abstract_form.border is not None and found.sites.is_by_root
    _check_density(PosteriorReparam(engine), schools, args)


@pytest.mark.thorough
def test_a_long_series_has_a_block_for_each_step():
    """Fits take 32 steps together, coordinates one: the same field by another order of the arithmetic."""
    args = (np.random.default_rng(3).poisson(np.exp(0.5 + np.sin(np.arange(259) / 15))),)
    engine = fitted(walk, *args, engine=LaplaceApproximation, integrate="none")
    found, reading = engine._run.coordinates, engine._run.reading
    plain = dataclasses.replace(found, reading=reading)

    @jax.jit
    def moments(white):
        def total(white, coordinates):
            field = coordinates._given(white)[1]
            asked = field.mean, field.log_scale, field.log_partition
            return sum(jnp.sum(jnp.sin(x)) for x in asked), (asked, field.posterior.factor)

        return [jax.value_and_grad(total, has_aux=True)(white, c) for c in (found, plain)]

    white = 0.3 * random.normal(random.key(2), (found.size,))
    ((_, (new, by_step)), new_slope), ((_, (old, by_block)), old_slope) = moments(white)
    assert by_step.shape[0] == 259 > by_block.shape[0]
    for now, before in zip((*new, new_slope), (*old, old_slope), strict=True):
        np.testing.assert_allclose(now, before, rtol=1e-7, atol=1e-9)
    assert np.all(new_slope[:2] != 0.0)
    _check_density(PosteriorReparam(engine), walk, args)


def _check_density(reparam, model, args):
    coordinates = reparam.coordinates
    white = random.normal(random.key(3), (coordinates.size,))
    names = coordinates.names

    @jax.jit
    def everything(white):
        def flat(white):
            values = coordinates.values(white)[0]
            return jnp.concatenate([jnp.ravel(values[name]) for name in names])

        values, log_volume = coordinates.values(white)
        own = log_density(model, args, {}, values)[0]
        found, trace = log_density(reparam.reparam(model), args, {}, {LATENT: white})
        return jax.jacfwd(flat)(white), log_volume, own, found, {n: trace[n]["value"] for n in names}, values

    jacobian, log_volume, own, found, sites, values = everything(white)
    assert jacobian.shape == (coordinates.size, coordinates.size)
    np.testing.assert_allclose(log_volume, np.linalg.slogdet(jacobian)[1], atol=1e-6)
    np.testing.assert_allclose(found, own + log_volume, atol=1e-8)
    for name in names:
        np.testing.assert_allclose(sites[name], values[name])


@pytest.mark.thorough
def test_chains_side_by_side_hand_no_batch_of_large_matrices_to_a_library():
    """Threads of a library wait for each other there, for ever, which no test could end."""
    x = jnp.linspace(0.0, 5.0, 60)
    args = x, jnp.sin(x) + 0.3 * random.normal(random.key(1), x.shape)
    kernel = Rotations(PosteriorReparam(fitted(process, *args, engine=LaplaceApproximation, integrate="none")), 4, 0.8)
    text = str(jax.make_jaxpr(lambda state: kernel.sample(state, args, {}))(kernel.init(random.key(0), 10)))
    assert "f64[60,60] = cholesky" in text
    assert "f64[4,60,60] = cholesky" not in text


@pytest.mark.thorough
def test_the_first_step_of_chains_goes_to_a_draw_of_the_approximation():
    """Outliers have slopes that would kick a chain to where the density of the model is lost to rounding."""

    def outliers(y):
        scale, center = numpyro.sample("scale", dist.HalfNormal(3.0)), numpyro.sample("center", dist.Normal(0.0, 5.0))
        with numpyro.plate("groups", len(y)):
            effect = numpyro.sample("effect", dist.Normal(center, scale))
            numpyro.sample("y", dist.StudentT(2.0, effect, 0.5), obs=y)

    y = np.array([0.1, -0.2, 8.0, 0.3, -7.0, 0.2, 0.5, -0.4])
    engine = EP(outliers, progress_bar=False)
    engine.run(random.key(0), y)
    kernel = Rotations(PosteriorReparam(engine), 50, 0.8)
    state = kernel.sample(kernel.init(random.key(1), 0), (y,), {})
    assert np.all(np.isfinite(state.log_weight)) and np.all(np.abs(state.z[LATENT]) < 6.0)
    assert kernel.sample(state, (y,), {}).num_steps.min() >= 2  # so that kicks would have had an effect


@pytest.mark.thorough
@pytest.mark.parametrize("numbers_ahead", [0, 700])
def test_random_numbers_made_ahead_are_those_of_one_step_after_the_other(groups, numbers_ahead):
    """One transition or some at a time, and draws of every third one."""
    kernel = Rotations(PosteriorReparam(groups), 2, 0.8)
    start = kernel.init(random.key(3), 0)
    block = block_of(kernel, ((COUNTS,), {}), ("z", "num_steps"), 3, numbers_ahead)
    state, kept = block(start, 7)
    step, one = jax.jit(lambda state: kernel.sample(state, (COUNTS,), {})), start
    for number in range(21):
        one = step(one)
        if number % 3 == 2:
            np.testing.assert_allclose(kept["z"][LATENT][number // 3], one.z[LATENT], atol=1e-7)
    assert int(state.i) == 21 and np.ptp(kept["z"][LATENT][:7], axis=0).min() > 0.0
    np.testing.assert_array_equal(kept["z"][LATENT][7:], 0.0)


@pytest.mark.thorough
def test_short_chains_say_what_is_wrong(groups):
    right = _wrong(groups)
    try:
        with pytest.warns(UserWarning, match=r"more draws.*r-hat.*factor farthest.*counts\["):
            exact = groups.sample_exactly(random.key(2), 10, num_chains=1, num_warmup=30)
        with pytest.warns(UserWarning, match="longer warm-up: no transition was accepted"):
            groups.sample_exactly(random.key(2), 4, num_chains=1, num_warmup=0)
    finally:
        vars(groups._run)["_coordinates"] = right
    assert len(exact.messages) == 1
    assert exact.agreement["rate"].word == "unknown"


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_density_of_other_models(name):
    model, args = MODELS[name]
    engine = fitted(model, *args, engine=LaplaceApproximation)
    reparam = PosteriorReparam(engine)
    assert set(reparam.coordinates.held) == ({"slope"} if name == "series" else set())
    # where a fit has one dense factor of a few unknowns, many conditionings have a border
    assert engine._run.reading.abstract_form.border is None
    assert (reparam.coordinates.reading.abstract_form.border is not None) == (name == "crossed")
    _check_density(reparam, numpyro.handlers.substitute(model, data=dict(reparam.coordinates.held)), args)
    # as a chain begins, with numbers
    assert np.isfinite(log_density(reparam.reparam(), args, {}, {LATENT: jnp.zeros(reparam.coordinates.size)})[0])


def test_weights_are_equal_where_the_posterior_is_gaussian():
    def linear(x, y):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ slope, 0.5), obs=y)

    x, y = np.array([[1.0, 0.5], [0.0, 2.0], [1.0, 1.0]]), [1, 2, 0]
    engine = fitted(linear, x, np.array(y))
    weigh = log_weight_and_sites(PosteriorReparam(engine), (x, np.array(y)), {})
    weights = jax.jit(jax.vmap(lambda white: weigh(white)[0]))(random.normal(random.key(0), (8, 2)))
    np.testing.assert_allclose(weights, float(engine.log_evidence), rtol=1e-9)


@pytest.mark.thorough
def test_a_fit_of_another_precision_is_refused():
    """In whichever way x64 was switched after the run, also where the coordinates were asked for before."""

    def rates(counts):
        rate = numpyro.sample("rate", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        numpyro.sample("counts", dist.Poisson(jnp.exp(rate)).to_event(1), obs=counts)

    double = fitted(rates, np.array([3.0, 5.0, 2.0]), engine=LaplaceApproximation)
    PosteriorReparam(double)
    with jax.enable_x64(False):
        for asked in (PosteriorReparam, IndependenceMetropolis, lambda e: e.sample_exactly(random.key(0))):
            with pytest.raises(ValueError, match=r"run in float64.*float32 now.*switch x64 on"):
                asked(double)
        single = fitted(rates, np.array([3.0, 5.0, 2.0], np.float32), engine=LaplaceApproximation)
    with pytest.raises(ValueError, match=r"run in float32.*float64 now.*run it again, or switch x64 off"):
        single.sample_exactly(random.key(0))


@pytest.mark.parametrize("key", [0, None, np.arange(2.0)])
def test_a_forgotten_key_is_missed_at_once(groups, key):
    draw = functools.partial(groups.posterior["rate"].sample, num_samples=3)
    for answer in (groups.overlap, groups.sample_exactly, groups.psis_diagnostic, draw):
        with pytest.raises(TypeError, match=r"key comes first, as in \w+\(jax.random.key\(0\).* got"):
            answer(key)


@pytest.mark.parametrize(
    "option", [{"num_chains": 0}, {"num_samples": 0}, {"num_samples": 2.5}, {"target_accept_prob": 1.5}]
)
def test_options_of_chains_are_checked(groups, option):
    with pytest.raises(ValueError, match=next(iter(option))):
        groups.sample_exactly(random.key(0), **option)


def test_overlap_of_weights_is_the_acceptance_over_all_pairs():
    log_weights = np.asarray(random.normal(random.key(0), (200,)))
    weights = np.exp(log_weights)
    pairs = np.minimum(1.0, weights[None, :] / weights[:, None])  # current, proposed
    found = overlap_of_weights(log_weights + 1000.0)
    np.testing.assert_allclose(found.share, weights / weights.sum() @ pairs.mean(1))
    assert overlap_of_weights(np.full(100, -3.0)) == (1.0, 0.0)
    assert overlap_of_weights(np.where(np.arange(400) % 2, 0.0, -np.inf)).share == 0.5


def test_agreement_is_told_with_its_error():
    exact = {name: (np.zeros(2), np.ones(2)) for name in "abcd"}
    found = {
        "a": (np.array([0.02, -0.05]), np.array([1.0, 0.97])),
        "b": (np.array([0.0, 0.5]), np.ones(2)),
        "c": (np.zeros(2), np.ones(2)),
        "d": (np.zeros(2), np.zeros(2)),  # set to a point
    }
    errors = {name: (np.full(2, 0.02), np.full(2, 0.02)) for name in "abd"} | {"c": (np.full(2, np.nan),) * 2}
    agreement = agreement_between(found, exact, errors)
    assert {name: site.word for name, site in agreement.items()} == {
        "a": "holds",
        "b": "off",
        "c": "unknown",
        "d": "off",
    }
    assert agreement["b"].gap == 0.5
    assert agreement["d"].ratio == 0.0
    assert agreement.word == "off"
    assert "off at b, d" in repr(agreement)
    assert agreement_between({"a": found["a"]}, exact, errors).word == "holds"
    assert "use the exact draws" in agreement.verdict
    wide = {"a": (np.zeros(2), np.array([1.0, 9.0]))}
    assert "far wider than the draws at a" in agreement_between(wide, exact, errors).verdict
    assert agreement_between({"c": found["c"]}, exact, errors).word == "unknown"
    assert agreement_between({"a": found["a"]}, exact, {}).word == agreement_between({}, {}, {}).word == "unknown"


def _one_group(scale, level=None):
    """Three rates of one level, without the scale of the fit unless it is given a prior."""
    level = numpyro.sample("level", level or dist.Normal(0.0, 2.0))
    scale = 1.0 if scale is None else numpyro.sample("scale", scale)
    rate = numpyro.sample("rate", dist.Normal(level, scale).expand([3]))
    numpyro.sample("counts", dist.Poisson(jnp.exp(rate[GROUP])), obs=COUNTS)


@pytest.mark.parametrize(
    ("prior", "level", "message"),
    [
        (None, None, r"'scale'.*not in this model"),
        (dist.Uniform(0.0, 1.0), None, "support of the site 'scale'"),
        (dist.HalfNormal(1.0), dist.HalfNormal(1.0), "support of the site 'level'"),
        (dist.Gamma(2.0, 1.0), dist.Laplace(0.0, 1.0), None),
    ],
)
def test_models_of_other_sites_are_refused(groups, prior, level, message):
    reparam = PosteriorReparam(groups)
    model, white = reparam.reparam(functools.partial(_one_group, prior, level)), jnp.zeros(reparam.coordinates.size)
    if message is None:
        assert np.isfinite(log_density(model, (), {}, {LATENT: white})[0])
        return
    with pytest.raises(ValueError, match=message):
        log_density(model, (), {}, {LATENT: white})


def test_what_has_no_coordinates_is_refused(groups):
    with pytest.raises(RuntimeError, match="run"):
        PosteriorReparam(EP(intercepts))
    with pytest.raises(ValueError, match="jointly Gaussian"):
        _ = FinishedRun.coordinates.fget(None)

    def four(counts):
        numpyro.sample("rate", dist.Normal(0.0, 1.0).expand([4]).to_event(1))

    other = numpyro.handlers.seed(PosteriorReparam(groups).reparam(four), random.key(0))
    with pytest.raises(ValueError, match=r"'rate' has shape \(4,\) here and \(3,\)"):
        other(COUNTS)


def test_discrete_sites_on_which_nothing_depends_are_refused_by_name():
    def missing(counts):
        rate = numpyro.sample("rate", dist.Normal(0.0, 1.0))
        numpyro.sample("counts", dist.Poisson(jnp.exp(rate)).expand([2]).to_event(1), obs=counts)
        numpyro.sample("next", dist.Poisson(jnp.exp(rate)))

    engine = fitted(missing, np.array([3, 5]), engine=LaplaceApproximation)
    with pytest.raises(ValueError, match=r"\['next'\] are discrete"):
        engine.sample_exactly(random.key(0), 10)


@functools.cache
def _by_quadrature(num_nodes=81):
    """Moments of level, scale and the rates of :func:`intercepts` by sums over lattices."""
    scale = np.exp(np.linspace(-5.0, 2.0, num_nodes))
    level = np.linspace(-6.0, 6.0, num_nodes)
    rate = np.linspace(-8.0, 6.0, 601)
    log_prior = -0.5 * scale**2 + np.log(scale)  # per unit of the logarithm
    log_level = -0.125 * level**2
    log_rate = -0.5 * ((rate - level[:, None]) / scale[:, None, None]) ** 2 - np.log(scale)[:, None, None]
    mass, moments = [], []
    for g in range(3):
        counts = COUNTS[GROUP == g]
        log_factor = 1.5 * (counts.sum() * rate - len(counts) * np.exp(rate))
        density = np.exp(log_rate + log_factor)
        # fine lattices resolve small scales: the normal density is normalised on the lattice itself
        norm = np.exp(log_rate).sum(-1)
        mass.append((density.sum(-1)) / norm)
        moments.append([(density * rate**k).sum(-1) / norm for k in (1, 2)])
    tiny = np.finfo(float).tiny  # where the level is far from the data
    log_joint = log_prior[:, None] + log_level + sum(np.log(np.maximum(m, tiny)) for m in mass)
    weight = np.exp(log_joint - log_joint.max())
    weight /= weight.sum()
    out = {
        "scale": (np.sum(weight.sum(1) * scale), np.sum(weight.sum(1) * scale**2)),
        "level": (np.sum(weight.sum(0) * level), np.sum(weight.sum(0) * level**2)),
    }
    rates = [
        [np.sum(weight * m / np.maximum(total, tiny)) for m in pair] for pair, total in zip(moments, mass, strict=True)
    ]
    out["rate"] = tuple(np.array(rates).T)
    return {
        name: (np.asarray(first), np.sqrt(np.asarray(second) - np.asarray(first) ** 2))
        for name, (first, second) in out.items()
    }


def _assert_moments(draws, expected):
    """Means and standard deviations within five Monte Carlo errors; draws of shape ``(chains, draws, ...)``."""
    for name, (mean, sd) in expected.items():
        values = np.asarray(draws[name])
        centred = (values - values.mean((0, 1))) / sd
        error = 1.0 / np.sqrt(effective_sample_size(centred))
        assert np.all(np.abs(values.mean((0, 1)) - mean) / sd < 5.0 * error), name
        squares = centred**2
        error = 0.5 * squares.std((0, 1)) / np.sqrt(effective_sample_size(squares))
        assert np.all(np.abs(values.std((0, 1)) / sd - 1.0) < 5.0 * error), name


@pytest.mark.thorough
@pytest.mark.parametrize("is_wrong", [False, True])
def test_draws_are_exact_whatever_the_fit_was(groups, is_wrong):
    right = _wrong(groups) if is_wrong else groups._run.coordinates
    try:
        exact = groups.sample_exactly(random.key(5), 1000, num_chains=2)
    finally:
        vars(groups._run)["_coordinates"] = right
    _assert_moments(exact.get_samples(group_by_chain=True), _by_quadrature())
    assert set(exact.get_samples()) == {"scale", "level", "rate", "first"}
    # the scale is at its optimum in this fit, which has no spread
    assert exact.agreement["scale"].word == "off"
    assert exact.agreement.word == "off"
    assert exact.messages == ()


@pytest.mark.thorough
def test_acceptance_of_proposals_is_the_overlap(groups, capsys):
    kernel = IndependenceMetropolis(groups)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=4000, num_chains=2, chain_method="vectorized", progress_bar=False)
    mcmc.run(random.key(2), COUNTS)
    weigh = jax.jit(jax.vmap(lambda white: log_weight_and_sites(PosteriorReparam(groups), (COUNTS,), {})(white)[0]))
    weights = np.asarray(weigh(random.normal(random.key(4), (4000, 5))))
    np.testing.assert_allclose(overlap_of_weights(weights).share, mcmc.last_state.mean_accept_prob.mean(), atol=0.03)
    np.testing.assert_allclose(groups.overlap(random.key(6)).share, mcmc.last_state.mean_accept_prob.mean(), atol=0.05)
    assert az.from_numpyro(mcmc).posterior["rate"].shape == (2, 4000, 3)
    groups.print_summary()
    assert "Approximation: EP, hyperparameters drawn about their optimum; overlap with" in capsys.readouterr().out
    weights = np.exp(weights - weights.max())
    # a current state is drawn by weight, a proposal evenly
    ratio = np.minimum(1.0, weights[None, :] / weights[:, None])
    overlap = np.sum(weights / weights.sum() * ratio.mean(1))
    np.testing.assert_allclose(mcmc.last_state.mean_accept_prob.mean(), overlap, atol=0.03)
    _assert_moments(mcmc.get_samples(group_by_chain=True), _by_quadrature())
    mcmc.print_summary()
    assert "rate[2]" in capsys.readouterr().out
    before = mcmc.last_state
    mcmc.post_warmup_state = before
    mcmc.run(mcmc.post_warmup_state.rng_key, COUNTS)
    assert np.all(mcmc.last_state.i == before.i + 4000)


@pytest.mark.thorough
def test_chains_of_proposals_go_on_as_if_they_had_not_stopped(groups):
    """Two halves are the whole, the average is of what follows the warm-up, and chains are alike in any order."""

    def run(num_samples, method="sequential", state=None):
        lengths = {"num_warmup": 30, "num_samples": num_samples, "num_chains": 2}
        mcmc = MCMC(IndependenceMetropolis(groups), **lengths, chain_method=method, progress_bar=False)
        if state is not None:
            mcmc.post_warmup_state = state
        key = random.key(3) if state is None else state.rng_key
        mcmc.run(key, COUNTS, extra_fields=("accept_prob",))
        return mcmc, {name: np.asarray(x) for name, x in mcmc.get_samples(group_by_chain=True).items()}

    whole, draws = run(80)
    half, first = run(40)
    assert np.all(half.last_state.i == 70)
    rest, second = run(40, state=half.last_state)
    for name in draws:
        np.testing.assert_allclose(np.concatenate([first[name], second[name]], axis=1), draws[name], rtol=1e-12)
    np.testing.assert_allclose(rest.last_state.mean_accept_prob, whole.last_state.mean_accept_prob, rtol=1e-12)
    accepted = whole.get_extra_fields(group_by_chain=True)["accept_prob"]
    np.testing.assert_allclose(whole.last_state.mean_accept_prob, accepted.mean(1), rtol=1e-12)
    beside, together = run(80, method="vectorized")
    for name in draws:
        np.testing.assert_allclose(together[name], draws[name], rtol=1e-9)
    assert not np.allclose(draws["rate"][0], draws["rate"][1])


@pytest.mark.thorough
def test_acceptance_is_the_overlap_where_this_is_low():
    """One count far above all others, with which the normal density of the scale is not near."""
    engine = fitted(intercepts, np.array([0, 0, 30, 0, 0, 0]))
    mcmc = MCMC(IndependenceMetropolis(engine), num_warmup=0, num_samples=20_000, progress_bar=False)
    mcmc.run(random.key(2), np.array([0, 0, 30, 0, 0, 0]))
    found = engine.overlap(random.key(6), num_draws=10_000)
    np.testing.assert_allclose(found.share, mcmc.last_state.mean_accept_prob, atol=0.03)
    assert found.share < 0.9


@pytest.mark.thorough
def test_what_was_said_of_the_modes_of_a_fit_stays_with_its_chains():
    """With the other sign of the slope the density is the same, and no chain goes there."""

    def mirrored(y):
        slope = numpyro.sample("slope", dist.Normal(0.0, 3.0))
        shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(slope**2 + shift, 0.3), obs=y)

    with pytest.warns(UserWarning, match="two modes"):
        engine = fitted(mirrored, np.full(3, 4.0))
    exact = engine.sample_exactly(random.key(1), 1000, num_chains=2)
    slope = exact.get_samples()["slope"]
    assert np.all(np.sign(slope) == np.sign(slope[0]))
    assert exact.agreement.word != "off"  # as far as chains know
    assert any("two modes" in message and "none of them has reached" in message for message in exact.messages)


@pytest.mark.thorough
def test_nuts_on_the_reparameterised_model_gives_the_sites(groups):
    reparam = PosteriorReparam(groups)
    mcmc = MCMC(NUTS(reparam.reparam(intercepts)), num_warmup=100, num_samples=100, progress_bar=False)
    mcmc.run(random.key(1), COUNTS)
    found = mcmc.get_samples()
    draws = reparam.transform_sample(found)
    assert set(draws) == {"scale", "level", "rate"}
    for name, values in draws.items():
        np.testing.assert_allclose(values, found[name], rtol=1e-9)
    by_chain = reparam.transform_sample(mcmc.get_samples(group_by_chain=True))
    assert by_chain["rate"].shape == (1, 100, 3)


@pytest.mark.thorough
def test_draws_go_on_in_parts(groups):
    whole = groups.sample_exactly(random.key(4), 800, num_chains=2)
    exact = groups.sample_exactly(random.key(4), 400, num_chains=2)
    first, said = exact.get_samples(), exact.agreement
    exact.post_warmup_state = exact.last_state
    exact.run(exact.last_state.rng_key, COUNTS)
    second = exact.get_samples()
    assert second["rate"].shape == (800, 3)
    last = first["rate"].reshape(2, 400, 3)[:, -1]  # which a chain may keep
    assert not np.isin(second["rate"], np.setdiff1d(first["rate"], last)).any()
    assert not np.isin(second["rate"].reshape(2, 400, 3)[:, 50:], last).any()
    assert exact.agreement["rate"].gap != said["rate"].gap
    exact.warmup(random.key(4), COUNTS)
    exact.run(exact.last_state.rng_key, COUNTS)
    np.testing.assert_array_equal(exact.get_samples()["rate"], first["rate"])
    _check_interrupted_run(whole)


def _check_interrupted_run(exact):
    """Ctrl-C between blocks of a run of the same key and program keeps the draws before it, and a run goes on."""
    whole = exact.get_samples(group_by_chain=True)["rate"]
    programs, at = exact._compiled[1], 300

    def block(state, number):
        if state.i >= at:
            signal.raise_signal(signal.SIGINT)
        return programs[0](state, number)

    exact._compiled = exact._compiled[0], (block, programs[1])
    exact.post_warmup_state = None
    exact.run(random.key(4), COUNTS)
    drawn = exact.get_samples(group_by_chain=True)["rate"]
    number = drawn.shape[1]
    assert 0 < number < 800
    assert exact.num_samples == number
    np.testing.assert_array_equal(drawn, whole[:, :number])
    assert any(f"Interrupted after {number} of 800" in message for message in exact.messages)
    assert az.from_numpyro(exact).posterior["rate"].shape == (2, number, 3)
    exact.post_warmup_state, exact.num_samples, at = exact.last_state, 800 - number, np.inf
    exact.run(exact.last_state.rng_key, COUNTS)
    np.testing.assert_array_equal(exact.get_samples(group_by_chain=True)["rate"], whole[:, number:])
    exact.post_warmup_state, at = None, 100  # before anything is drawn
    with pytest.raises(KeyboardInterrupt):
        exact.run(random.key(4), COUNTS)
