"""Engines as functions of arguments: other values compile nothing, derivatives are those of fits."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import norm
from numpyro import handlers
from scipy.stats import multivariate_normal

from numpyro_ext.infer import EP, INLA, LaplaceApproximation, VariationalGaussian
from numpyro_ext.structure import ModelStructureError
from tests.infer.front.test_compiled_programs import compiled_programs
from tests.tiers import few, thorough

RNG = np.random.default_rng(0)


def kernel(x, length):
    return jnp.exp(-0.5 * (x[:, None] - x) ** 2 / length**2)


def curve(x, y, seen=True, scale=0.3):
    length = numpyro.sample("length", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", dist.MultivariateNormal(0.5, kernel(x, length) + 1e-6 * jnp.eye(x.shape[0])))
    with handlers.mask(mask=seen):
        numpyro.sample("y", dist.Normal(f, scale), obs=y)


def pairs(x, i, j, won, asked=True):
    length = numpyro.sample("length", dist.LogNormal(0.0, 0.5))
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, kernel(x, length) + 1e-6 * jnp.eye(x.shape[0])))
    with handlers.mask(mask=asked):
        numpyro.sample("won", dist.Bernoulli(probs=norm.cdf(f[i] - f[j])), obs=won)


PAIRS = {
    "x": np.linspace(0.0, 3.0, 5),
    "i": np.array([0, 1, 2, 3]),
    "j": np.array([1, 2, 4, 0]),
    "won": np.array([1, 0, 1, 1]),
    "asked": np.array([True, True, False, True]),
}


def fitted(program, arrays, hyper=None):
    state = program.fit(arrays, program.init(arrays, hyper))
    assert bool(state.converged)
    return state


def test_other_values_are_those_of_a_gaussian_process_and_compile_nothing():
    x, y, seen = np.linspace(0.0, 2.0, 6), RNG.normal(size=6), np.ones(6, bool)
    program = EP(curve).program(x, y, seen, changing=("x", "y", "seen"))
    state = fitted(program, {})
    program.predictors({}, state), program.log_evidence({}, state)
    arrays = {"x": RNG.uniform(-2.0, 2.0, 6), "y": RNG.normal(size=6), "seen": np.array([1, 1, 0, 1, 0, 1], bool)}
    with compiled_programs() as names:
        state = fitted(program, arrays)
        mean, variance = program.predictors(arrays, state)["y"]
        evidence = program.log_evidence(arrays, state)
    assert names == []
    K = np.asarray(kernel(arrays["x"], 1.0)) + 1e-6 * np.eye(6)
    seen = arrays["seen"]
    noisy = K[np.ix_(seen, seen)] + 0.3**2 * np.eye(seen.sum())
    weights = np.linalg.solve(noisy, K[seen]).T
    np.testing.assert_allclose(mean, 0.5 + weights @ (arrays["y"][seen] - 0.5), atol=1e-9)
    np.testing.assert_allclose(variance, np.diag(K - weights @ K[seen]), atol=1e-9)
    expected = multivariate_normal(np.full(seen.sum(), 0.5), noisy).logpdf(arrays["y"][seen])
    np.testing.assert_allclose(evidence, expected, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [EP, *thorough(LaplaceApproximation, VariationalGaussian)])
def test_indices_that_change_are_those_of_a_model_read_anew(kind):
    engine = kind(pairs, progress_bar=False, hyper_values={"length": 0.8})
    program = engine.program(**PAIRS, changing=tuple(PAIRS))
    other = PAIRS | {"i": np.array([4, 3, 0, 0]), "j": np.array([0, 1, 1, 4]), "x": PAIRS["x"][::-1] ** 1.1}
    state = fitted(program, other)
    engine.run(random.key(0), **other)  # in which these indices are a pattern
    mean, variance = program.predictors(other, state)["won"]
    f = engine.posterior["f"]
    np.testing.assert_allclose(mean, (f.mean[other["i"]] - f.mean[other["j"]]), atol=1e-7)
    cov, i, j = f.covariance(), other["i"], other["j"]
    np.testing.assert_allclose(variance, cov[i, i] + cov[j, j] - 2.0 * cov[i, j], atol=1e-7)
    np.testing.assert_allclose(program.log_evidence(other, state), engine.log_evidence, atol=1e-7)


@pytest.mark.parametrize("kind", thorough(EP, LaplaceApproximation, VariationalGaussian))
@pytest.mark.parametrize("family", ["binary", "count"])
def test_derivatives_are_those_of_fits_from_scratch(kind, family):
    def model(x, y, asked):
        length = numpyro.sample("length", dist.LogNormal(0.0, 0.5))
        f = numpyro.sample("f", dist.MultivariateNormal(0.2, kernel(x, length) + 1e-6 * jnp.eye(x.shape[0])))
        with handlers.mask(mask=asked):
            numpyro.sample("y", dist.Bernoulli(logits=f) if family == "binary" else dist.Poisson(jnp.exp(f)), obs=y)

    x, y, asked = np.linspace(0.0, 3.0, 5), np.array([1, 0, 1, 1, 0]), np.array([1, 1, 0, 1, 1], bool)
    program = kind(model, tol=1e-12).program(x, y, asked, changing=("x",))

    def told(inputs):
        x, hyper = inputs
        arrays = {"x": x}
        state = program.fit(arrays, program.init(arrays)._replace(hyper=hyper))
        mean, variance = program.predictors(arrays, state)["y"]
        return jnp.sum(jnp.sin(mean) * jnp.arange(5.0) + variance), program.log_evidence(arrays, state)

    inputs = jnp.asarray(x), program.init().hyper + 0.2
    direction = jnp.asarray(RNG.normal(size=5)), jnp.ones(1)
    step = 1e-5
    ahead, behind = (jax.jit(told)(jax.tree.map(lambda a, d: a + s * d, inputs, direction)) for s in (step, -step))  # noqa: B023
    differences = (np.array(ahead) - np.array(behind)) / (2.0 * step)
    forward = jax.jvp(jax.jit(told), (inputs,), (direction,))[1]
    np.testing.assert_allclose(forward, differences, atol=1e-6)
    backward = jax.jit(jax.jacrev(told))(inputs)
    along = [sum(np.sum(g * d) for g, d in zip(of, direction, strict=True)) for of in backward]
    np.testing.assert_allclose(along, forward, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [EP, *thorough(LaplaceApproximation, VariationalGaussian)])
def test_masked_rows_change_nothing(kind):
    engine = kind(pairs, hyper_values={"length": 0.8}, tol=1e-13)
    program = engine.program(**PAIRS, changing=("i", "j", "won", "asked"))
    other = {name: PAIRS[name] for name in program.changing}
    other |= {"i": np.array([0, 1, 4, 3]), "j": np.array([1, 2, 0, 0]), "won": np.array([1, 0, 0, 1])}
    few = {name: PAIRS[name][PAIRS["asked"]] for name in program.changing}
    without = engine.program(**few, x=PAIRS["x"], changing=("won",))
    found = []
    for of, arrays, kept in ((program, {}, PAIRS["asked"]), (program, other, PAIRS["asked"]), (without, {}, slice(3))):
        state = of.fit(arrays, of.init(arrays))
        by_row = (state.site_precision, state.site_shift, *of.predictors(arrays, state)["won"])
        found.append((*(np.asarray(part)[kept] for part in by_row), of.log_evidence(arrays, state)))
    for one, two, three in zip(*found, strict=True):
        np.testing.assert_allclose(one, two, rtol=0.0, atol=1e-12)
        np.testing.assert_allclose(one, three, rtol=0.0, atol=1e-12)


@pytest.mark.thorough
def test_hyperparameters_are_learned_as_a_run_learns_them():
    engine = EP(pairs, integrate="none", progress_bar=False)
    program = engine.program(**PAIRS, changing=("won",))
    state = program.learn({}, program.init({}, {"length": 2.0}))
    engine.run(random.key(0), **PAIRS)
    assert bool(state.converged)
    np.testing.assert_allclose(program.constrained(state)["length"], engine.hyper["length"].value, rtol=1e-4)
    np.testing.assert_allclose(program.log_evidence({}, state), engine.log_evidence, atol=1e-7)
    again = engine.program(**PAIRS, changing=("won",)).init()
    np.testing.assert_allclose(again.hyper, engine.last_state.values)
    with pytest.raises(TypeError, match="learn has no derivative"):
        jax.grad(lambda h: program.learn({}, state._replace(hyper=h)).site_shift.sum())(state.hyper)


@pytest.mark.thorough
def test_many_data_sets_at_once_are_one_by_one():
    program = EP(curve, hyper_values={"length": 1.0}).program(np.linspace(0.0, 2.0, 6), np.zeros(6), changing="y")
    ys = RNG.normal(size=(3, 6))

    def evidence(y):
        return program.log_evidence({"y": y}, program.fit({"y": y}, program.init({"y": y})))

    np.testing.assert_allclose(jax.vmap(evidence)(ys), [evidence(y) for y in ys], atol=1e-10)


def read_numpy(x, group, y=None):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([len(np.unique(group))]))
    numpyro.sample("y", dist.Normal(a[group] * x, 1.0), obs=y)


def bounded(x, y):
    scale = numpyro.sample("scale", dist.Uniform(0.0, jnp.max(x)))
    a = numpyro.sample("a", dist.Normal(0.0, scale))
    numpyro.sample("y", dist.Normal(a * x, 1.0), obs=y)


def behind_a_link(x, i, y):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([3]))
    numpyro.sample("y", dist.Poisson(jnp.exp(a)[i]), obs=y)


ONES = np.ones(3)
GROUP = np.array([0, 1, 0])


@pytest.mark.parametrize(
    ("model", "given", "changing", "words"),
    [
        (read_numpy, (ONES, GROUP, ONES), ("x", "group"), "needs the values of 'group', .*len\\(np.unique"),
        (bounded, (ONES, ONES), ("x", "y"), r"support of site 'scale' .Uniform. depends on \['x'\]"),
        (behind_a_link, (ONES, GROUP, GROUP), ("i",), "site 'y': .*depends on 3 predictors, through 'a'"),
        (curve, (ONES, ONES), ("z",), r"changing= names 'z', and the arguments of the model are"),
        (curve, (ONES, ONES, True, None), ("scale",), "argument 'scale' is to change, and is None"),
        (curve, (["a", "b"], ONES), ("x",), "argument 'x' is to change"),
    ],
)
def test_what_cannot_change_is_refused_by_name(model, given, changing, words):
    with pytest.raises(ModelStructureError, match=words):
        EP(model).program(*given, changing=changing)


def grouped(x, group, y=None, scale=1.0):
    """A model that takes one array for a length."""
    number = int(group.max()) + 1
    a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([number]))
    numpyro.sample("y", dist.Normal(a[group] * jnp.asarray(x), scale), obs=y)


def with_options(table, y, options=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, options["scale"]))
    numpyro.sample("y", dist.Poisson(jnp.exp(slope * table["x"])), obs=y)


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    few(
        [
            (grouped, (ONES, GROUP, ONES), ["x", "y"]),
            (grouped, ([1.0, 2.0, 3.0], GROUP, ONES), ["x", "y"]),
            (bounded, (ONES, ONES), ["y"]),
            (behind_a_link, (ONES, GROUP, GROUP), ["x", "y"]),
            (with_options, ({"x": ONES}, GROUP, {"scale": 2.0}), ["table", "y"]),
        ],
        2,
    ),
)
def test_by_default_what_changes_are_arrays_whose_values_are_not_needed(model, given, expected):
    program = EP(model).program(*given)
    assert list(program.changing) == expected
    state = program.init({"y": 2 * np.asarray(given[-1 if model is not with_options else 1])})
    assert state.site_shift.shape == (3,)


def test_what_is_wrong_with_a_model_is_said_whatever_changes():
    def twice(y, z):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(a * jnp.arange(3.0), 1.0), obs=y[: int(z[0])])

    with pytest.raises(ModelStructureError, match="no Gaussian latent site"):
        EP(lambda y, z: numpyro.sample("y", dist.Bernoulli(numpyro.sample("p", dist.Beta(1, 1))), obs=y)).program(
            GROUP, ONES
        )
    with pytest.raises(ModelStructureError, match="no argument of the model holds an array of numbers .number"):
        EP(lambda number: behind_a_link(ONES, GROUP, GROUP)).program(3)
    assert list(EP(twice).program(ONES, np.array([3])).changing) == ["y"]


def test_values_that_do_not_fit_are_refused_by_name():
    program = EP(pairs).program(**PAIRS, changing=("i", "won"))
    for arrays, error, words in (
        ({"x": ONES}, ValueError, "'x' is none of the arguments that change, which are"),
        ({"i": np.arange(3)}, ValueError, r"'i' was read as int64\[4\], and is int64\[3\]"),
        ({"i": np.arange(4.0)}, ValueError, r"'i' was read as int64\[4\], and is float64\[4\]"),
        ({"i": np.array([0, 1, 2, 5])}, ModelStructureError, "'f' is indexed out of range: 1 indices, the first 5"),
    ):
        with pytest.raises(error, match=words):
            program.init(arrays)
    with pytest.raises(ValueError, match="INLA integrates over the hyperparameters"):
        INLA(pairs).program(**PAIRS, changing=("won",))


@pytest.mark.thorough
def test_a_branch_that_the_values_decide_is_followed():
    """Other values of an argument take the other branch, and have the evidence of a fit that was read with them."""

    def branches(x, y):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Poisson(jnp.where(x > 100.0, jnp.exp(-2.0 * a), jnp.exp(a))), obs=y)

    program = EP(branches).program(ONES, GROUP, changing=("x",))
    for x in (2.0 * ONES, 200.0 * ONES):
        program.check({"x": x})
        other = EP(branches, progress_bar=False)
        other.run(jax.random.key(0), x, GROUP)
        found = program.log_evidence({"x": x}, program.fit({"x": x}, program.init({"x": x})))
        np.testing.assert_allclose(found, float(other.log_evidence), rtol=1e-6)
    assert abs(found - program.log_evidence({"x": ONES}, program.fit({"x": ONES}, program.init({"x": ONES})))) > 0.1
