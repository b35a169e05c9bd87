"""A model is called once for each reading, and what is made of that call is what calls of its own would have given."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer.util import log_density

from numpyro_ext.infer import EP, LaplaceApproximation, VariationalGaussian
from numpyro_ext.infer.hyper.space import UnconstrainedSpace
from numpyro_ext.structure import ModelStructureError, read_latent_gaussian
from numpyro_ext.structure.model import search
from numpyro_ext.structure.model.running import calling
from numpyro_ext.structure.model.running.calling import record
from numpyro_ext.structure.model.running.execution import ModelCall
from numpyro_ext.structure.model.running.recording import make_or_derive
from tests.compilations import compiled_programs

pytestmark = pytest.mark.usefixtures("no_faults")

KEY = random.key(0)
X = np.linspace(-1.0, 1.0, 8)
RTOL = 1e-8 if jax.config.jax_enable_x64 else 1e-4


class Calls:
    """A model that counts how often it is called, and is another function each time it is made."""

    def __init__(self, model):
        self.model, self.number = model, 0
        functools.update_wrapper(self, model)

    def __call__(self, *args, **kwargs):
        self.number += 1
        return self.model(*args, **kwargs)


def intercepts(group, y, spread=1.0):
    level = numpyro.sample("level", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.LogNormal(0, spread))
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(level, tau))
    numpyro.sample("y", dist.Poisson(jnp.exp(effect[group])), obs=y)


def process(x, y, mask=True):
    length = numpyro.sample("length", dist.LogNormal(0.0, 0.5))
    kernel = jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2) + 1e-3 * jnp.eye(len(x))
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(x)), kernel))
    with handlers.mask(mask=mask):
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def regression(x, y):
    noise = numpyro.param("noise", 1.0, constraint=dist.constraints.positive)
    slope = numpyro.sample("slope", dist.Laplace(0, 1))
    numpyro.deterministic("twice", 2 * slope)
    numpyro.sample("y", dist.Normal(slope * x, noise), obs=y)


def datasets(model):
    rng = np.random.default_rng(3)
    if model is intercepts:
        return [(rng.permutation(12) // 3, rng.poisson(6.0, 12)) for _ in range(3)]
    if model is process:
        return [(X + 0.1 * n, rng.poisson(1.0, 8), rng.uniform(size=8) < 0.8) for n in range(3)]
    return [(X, X + rng.standard_normal(8)) for _ in range(3)]


def answers(engine):
    values = {name: [site.mean, site.sd] for name, site in engine.posterior.items()}
    hyper = {name: estimate.value for name, estimate in engine.hyper.items()}
    return {"evidence": float(engine.log_evidence), **values, **hyper}


def by_calls(monkeypatch, engine, *args, **kwargs):
    """The answers where the model is called for all that is asked of it."""
    with monkeypatch.context() as patch:
        patch.setattr(search, "record", lambda call: None)
        engine.run(KEY, *args, **kwargs)
    return answers(engine)


def check_same(found, wanted, rtol=RTOL):
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "model"), [(EP, intercepts), (LaplaceApproximation, process), (VariationalGaussian, regression)]
)
def test_a_run_calls_the_model_once_and_answers_as_before(make, model, monkeypatch):
    counted = Calls(model)
    engine = make(counted, progress_bar=False, integrate="none")
    numbers, found = [], []
    for args in datasets(model):
        before = counted.number
        engine.run(KEY, *args)
        numbers.append(counted.number - before)
        found.append(answers(engine))
    # The first is called again to see whether it does the same; whether it does is a matter of its operations.
    assert numbers == [2, 1, 1]
    for args, one in zip(datasets(model), found, strict=True):
        # Derivatives are below a tolerance where searches end, whatever the order of sums.
        check_same(one, by_calls(monkeypatch, engine, *args), rtol=1e-3)
    with compiled_programs() as names:
        engine.run(KEY, *args)
    assert not names


OFFSET = 0.0
TABLE = {"scale": 1.0}


class Shifted(dist.Normal):
    """A distribution of a user, which reads a global where it computes its density."""

    def log_prob(self, value, intermediates=None):
        return super().log_prob(value - OFFSET)


def closes_over(y):
    a = numpyro.sample("a", dist.Normal(OFFSET, TABLE["scale"]))
    numpyro.sample("y", dist.Normal(a, 1.0), obs=y)


def has_a_density_of_its_own(y):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("y", Shifted(a, 1.0), obs=y)


def branches(y, kind="normal"):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    likelihood = dist.Normal(a, 1.0) if kind == "normal" and np.sum(y) > 0 else dist.Cauchy(a, 1.0)
    numpyro.sample("y", likelihood, obs=y)


def draws(y):
    shift = random.normal(numpyro.prng_key(), y.shape)
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(a + shift, 1.0), obs=y)


@pytest.mark.thorough
@pytest.mark.parametrize("model", [closes_over, has_a_density_of_its_own])
def test_what_a_model_has_from_outside_may_change(model, monkeypatch):
    engine, y = EP(model, progress_bar=False), np.array([0.3, 1.2, 2.0])
    for offset, scale in [(0.0, 1.0), (0.7, 1.0), (0.7, 3.0), (0.0, 1.0)]:
        monkeypatch.setitem(globals(), "OFFSET", offset)
        monkeypatch.setitem(TABLE, "scale", scale)
        engine.run(KEY, y)
        found = answers(engine)
        check_same(found, by_calls(monkeypatch, engine, y))
        precision = 3 + 1 / (scale**2 if model is closes_over else 1.0)
        prior = offset / scale**2 if model is closes_over else -3 * offset
        np.testing.assert_allclose(found["a"][0], (y.sum() + prior) / precision, rtol=10 * RTOL)


@pytest.mark.thorough
def test_static_arguments_and_branches_on_values_are_those_of_the_call(monkeypatch):
    engine, y = EP(branches, progress_bar=False), np.array([0.3, 1.2, 2.0])
    for data, kind in [(y, "normal"), (-y, "normal"), (y, "cauchy"), (y, "normal"), (-y, "cauchy")]:
        engine.run(KEY, data, kind=kind)
        assert ("cauchy" in engine.describe()) == (kind == "cauchy" or data.sum() < 0)
        check_same(answers(engine), by_calls(monkeypatch, engine, data, kind=kind))


@pytest.mark.thorough
def test_a_model_that_draws_numbers_itself_has_those_of_the_key(monkeypatch):
    engine, y = EP(draws, progress_bar=False), np.array([0.3, 1.2, 2.0])
    found = []
    for seed in (0, 1, 0):
        engine.run(random.key(seed), y)
        found.append(answers(engine))
    check_same(found[0], found[2])
    assert abs(found[0]["evidence"] - found[1]["evidence"]) > 1e-3
    check_same(found[0], by_calls(monkeypatch, engine, y))


def test_hidden_state_is_refused():
    rng = np.random.default_rng(0)

    def model(y):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(a + rng.standard_normal(3), 1.0), obs=y)

    engine = EP(model, progress_bar=False)
    for _ in range(2):
        with pytest.raises(ModelStructureError, match="misread, as it is another one each time.*generator of NumPy"):
            engine.run(KEY, np.array([0.3, 1.2, 2.0]))


def test_hidden_state_is_refused_where_another_model_does_the_same_without():
    rng = np.random.default_rng(0)

    def plain(y):
        a = numpyro.sample("a", dist.Normal(0.0, 1.3))
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y)

    def noisy(y, is_noisy=True):
        a = numpyro.sample("a", dist.Normal(0.0, 1.3))
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y + rng.standard_normal(3) if is_noisy else y)

    y = np.array([0.3, 1.2, 2.0])
    read_latent_gaussian(plain, (y,))
    read_latent_gaussian(noisy, (y, False))
    with pytest.raises(ModelStructureError, match="misread"):
        read_latent_gaussian(noisy, (y,))


def test_priors_keep_the_covariance_that_was_given():
    def model(y):
        f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(2), covariance_matrix=jnp.ones((2, 2))))
        numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    # Its Cholesky factor is nan, of which no covariance could be made.
    with pytest.raises(ModelStructureError, match="not positive definite"):
        EP(model, progress_bar=False).run(KEY, np.array([0.3, 1.2]))


def test_arrays_of_one_param_that_begin_equal_are_told_apart():
    def model(y):
        line = numpyro.param("line", {"level": jnp.zeros(()), "slope": jnp.zeros(())})
        a = numpyro.sample("a", dist.Normal(line["level"], 1.0))
        numpyro.sample("y", dist.Normal(a + line["slope"] * X[:3], 1.0), obs=y)

    y, line = np.array([0.3, 1.2, 2.0]), {"level": jnp.array(0.4), "slope": jnp.array(-0.7)}
    reading = read_latent_gaussian(model, (y,))
    wanted, _ = log_density(model, (y,), {}, {"a": jnp.array(0.9), "line": line})
    found = reading.log_joint({"line": line}, jnp.array([0.9 - 0.4]), reading.data)
    np.testing.assert_allclose(found, wanted, rtol=RTOL)
    with pytest.raises(ModelStructureError, match="'line' is a dict of arrays.*a param of each"):
        LaplaceApproximation(model, progress_bar=False).run(KEY, y)


def test_numbers_that_change_are_data_of_what_was_made_before():
    def model(y, scale):
        a = numpyro.sample("a", dist.Normal(y.mean(), scale))
        numpyro.sample("y", dist.Normal(a, 0.5), obs=y)

    counted, y = Calls(model), np.array([0.3, 1.2, 2.0])
    engine, numbers = EP(counted, progress_bar=False), []
    for scale in (1.0, 2.0, 0.5, np.float32(0.25), 3):
        before = counted.number
        engine.run(KEY, scale * y, scale)
        numbers.append(counted.number - before)
        exact = (scale * y.mean() / scale**2 + 4 * scale * y.sum()) / (1 / scale**2 + 12)
        np.testing.assert_allclose(engine.posterior["a"].mean, exact, rtol=10 * RTOL)
    # The second is the first to have other numbers, the third has them among the data.
    assert numbers[-2:] == [1, 1]


def test_keys_are_split_only_for_who_asks_and_are_the_same(monkeypatch):
    def model(y):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        noise = numpyro.deterministic("noise", random.normal(numpyro.prng_key(), (3,)))
        numpyro.sample("y", dist.Normal(a + noise, scale), obs=y)

    y = np.array([0.3, 1.2, 2.0])
    recorded = record(ModelCall(model, (y,), {}, KEY)).at_central_values({})["noise"]["value"]
    seeded = handlers.substitute(handlers.seed(model, KEY), {"a": jnp.zeros(()), "scale": jnp.ones(())})
    np.testing.assert_allclose(recorded, handlers.trace(seeded).get_trace(y)["noise"]["value"], rtol=1e-6)

    calls = []
    split = random.split
    monkeypatch.setattr(random, "split", lambda *args: calls.append(args) or split(*args))
    assert record(ModelCall(intercepts, datasets(intercepts)[0], {}, KEY)) is not None
    assert not calls


def test_shapes_are_told_without_a_trace(monkeypatch):
    reading = read_latent_gaussian(intercepts, datasets(intercepts)[0])
    monkeypatch.setattr(jax, "eval_shape", None)
    assert {n: s.shape for n, s in reading.latent_shapes().items()} == {"level": (), "effect": (4,), "tau": ()}


def test_the_start_of_a_search_is_computed_once():
    reading = read_latent_gaussian(intercepts, datasets(intercepts)[0])
    space = UnconstrainedSpace(reading.hyper)
    start = space.initial()
    assert space.initial({}) is start
    assert space.initial({"tau": 3.0}) != start
    np.testing.assert_allclose(space.initial(), start)
    assert jax.jit(lambda: UnconstrainedSpace(reading.hyper).initial())() == start


def correlated(matrix, y, scale=1.0):
    """Several matrices that NumPyro would check by their eigenvalues and triangles, at a size of their own."""
    rho = numpyro.sample("rho", dist.LogNormal(0.0, scale))
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(matrix)), rho * matrix))
    with numpyro.plate("people", len(matrix)):
        effect = numpyro.sample("effect", dist.MultivariateNormal(jnp.zeros(5), scale_tril=rho * jnp.eye(5)))
    numpyro.sample("y", dist.Normal(f + effect.sum(-1), 1.0), obs=y)


def test_checks_of_what_is_not_known_yet_compile_nothing():
    arguments = np.eye(13) + 0.2, np.zeros(13)
    get_args = dist.Distribution.get_args
    with numpyro.validation_enabled(), compiled_programs() as before:
        record(ModelCall(correlated, arguments, {}, KEY))
    with numpyro.validation_enabled(), compiled_programs() as names:
        recording = record(ModelCall(correlated, arguments, {}, KEY))
        reading = read_latent_gaussian(correlated, arguments, check=False)
    assert recording is not None and {"rho", "f", "effect", "y"} <= recording.sites.keys()
    checks = {"eigh", "_cho_solve", "iota", "ge", "less", "isclose", "_tril", "tril", "swapaxes"}
    assert not checks & {name.removeprefix("jit_").removeprefix("jit(").removesuffix(")") for name in before + names}
    assert reading.field == ("f", "effect") and dist.Distribution.get_args is get_args


@pytest.mark.parametrize("scale", [-1.0, np.full((), -1.0), jnp.full((), -1.0)], ids=["number", "numpy", "jax"])
def test_checks_of_what_is_known_are_made(scale, caplog):
    with numpyro.validation_enabled(), pytest.raises(ModelStructureError, match="distribution got invalid scale"):
        read_latent_gaussian(correlated, (np.eye(3), np.zeros(3), scale))
    caplog.clear()  # the fault is the model's


def test_a_fault_of_the_recording_is_logged(monkeypatch, caplog):
    def fault(*args):
        raise ZeroDivisionError

    call = ModelCall(intercepts, datasets(intercepts)[0], {}, KEY)
    recording = record(call)
    assert not caplog.records
    monkeypatch.setattr(calling, "take_apart", fault)
    assert record(call) is None
    program, _ = make_or_derive(recording, "asked", lambda sites=None: X if sites is None else sites(fault))
    assert program is not None
    assert [found.exc_info[0] for found in caplog.records] == [ZeroDivisionError] * 2
    caplog.clear()
