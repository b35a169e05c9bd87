"""Running: order of calls, resuming, interruption, and the ways in which a run can fail."""

import inspect
import signal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.optimize
from numpyro.infer import NUTS

from numpyro_ext import infer
from numpyro_ext.design.outcomes.conditional import Conditioned
from numpyro_ext.infer import EP, INLA, SMC, BilinearVG, LaplaceApproximation, StructuredMeanField, VariationalGaussian
from numpyro_ext.infer.front.engine import BaseEngine
from numpyro_ext.infer.gaussian.fitting import fit as fitting_module
from numpyro_ext.structure import ModelStructureError

KEY = jax.random.key(0)


def test_results_before_a_run_are_refused(counts_case):
    engine = EP(counts_case.model)
    for name in ("posterior", "hyper", "log_evidence", "diagnostics", "guide", "params", "last_state"):
        with pytest.raises(RuntimeError, match=r"run\(\.\.\.\) should be called first"):
            getattr(engine, name)
    for call in (engine.get_samples, engine.get_extra_fields, engine.print_summary, engine.log_predictive):
        with pytest.raises(RuntimeError, match="should be called first"):
            call()


@pytest.mark.parametrize("engine", [EP, INLA, VariationalGaussian, StructuredMeanField, BilinearVG, SMC])
def test_a_run_that_fails_leaves_no_results_of_the_one_before(engine):
    def model(is_broken):
        raise ZeroDivisionError("of this model")

    fitted = engine(model)
    fitted._run = object()  # of other data
    with pytest.raises(ZeroDivisionError):
        fitted.run(KEY, True)
    with pytest.raises(
        RuntimeError, match=r"last run.* failed and has no results. It said: ZeroDivisionError: of this"
    ):
        fitted.log_evidence  # noqa: B018
    assert "should be called first" not in repr(fitted)


def test_an_exposure_of_zero_behind_a_logarithm_is_told_with_its_factor():
    def model(exposure, y):
        level = numpyro.sample("level", dist.Normal(0, 1))
        numpyro.sample("y", dist.Poisson(jnp.exp(jnp.log(exposure) + level)), obs=y)

    for engine, y in ((LaplaceApproximation, [2, 1, 3]), (EP, [2, 0, 3])):
        with pytest.raises(ValueError, match="predictor of factor 1 of site 'y' is -inf .* an exposure of zero"):
            engine(model, progress_bar=False).run(KEY, np.array([1.0, 0.0, 2.0]), np.array(y))


@pytest.mark.thorough
def test_a_factor_that_alone_holds_its_predictor_is_told():
    """An intrinsic autoregression by factors, as single precision has it with the usual width of a thousandth."""

    def model(y):
        level = numpyro.sample("level", dist.Normal(0, 2))
        field = numpyro.sample("field", dist.ImproperUniform(dist.constraints.real, (), (8,)))
        numpyro.factor("neighbours", -0.5 * jnp.sum(jnp.diff(field) ** 2))
        numpyro.factor("sum", dist.Normal(0, 1e-6).log_prob(jnp.sum(field)))
        numpyro.sample("y", dist.Poisson(jnp.exp(level + field)), obs=y)

    with pytest.raises(ValueError, match="factor 0 of site 'sum' alone holds its predictor.* Use LaplaceApproximation"):
        EP(model, progress_bar=False).run(KEY, np.array([3, 0, 8, 2, 1, 5, 2, 4]))


@pytest.mark.thorough
def test_counts_that_single_precision_does_not_hold_ask_for_double():
    counts = np.array([1_013_000, 986_000, 1_210_000, 871_000])

    def model(y):
        level, spread = numpyro.sample("level", dist.Normal(10, 5)), numpyro.sample("spread", dist.HalfNormal(1))
        effect = numpyro.sample("effect", dist.Normal(0, spread).expand([4]))
        numpyro.sample("y", dist.Poisson(jnp.exp(level + effect)), obs=y)

    with jax.enable_x64(False):
        engine = EP(model, progress_bar=False)
        with pytest.warns(UserWarning, match=r"did not converge.* single precision.* numpyro.enable_x64\(\)"):
            engine.run(KEY, counts)
    assert any("enable_x64" in message for message in engine.diagnostics.messages)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"damping": 1.0}, "damping"),
        ({"power": 0.0}, "power"),
        ({"schedule": "random"}, "schedule"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_samples": 10.5}, "num_samples"),
        ({"tol": -1.0}, "tol"),
    ],
)
def test_options_are_checked_at_construction(counts_case, options, text):
    with pytest.raises(ValueError, match=text):
        EP(counts_case.model, **options)
    with pytest.raises(TypeError, match="callable"):
        EP("model")


@pytest.mark.parametrize("key", [None, 0, np.arange(3.0), [1, 2], jax.random.split(KEY)])
def test_a_forgotten_key_is_missed_at_once(counts_case, key):
    def model(*args):
        raise AssertionError("the model was run")

    for call in (lambda: EP(model).run(key, counts_case.y), lambda: EP(model).run_many(key, [counts_case.y])):
        with pytest.raises(TypeError, match=r"key comes first, before the arguments of the model.* got"):
            call()


@pytest.mark.thorough
def test_keys_of_the_older_kind_are_keys(counts_case):
    engine = EP(counts_case.model, progress_bar=False)
    engine.run(np.asarray(jax.random.PRNGKey(0)), counts_case.t, counts_case.y, mask=counts_case.mask)
    assert engine.diagnostics.converged


@pytest.mark.thorough
def test_run_returns_nothing_and_forgets_the_run_before(counts_case):
    engine = EP(counts_case.model, progress_bar=False, num_samples=10, hyper_values={"scale": 0.7})
    assert engine.run(KEY, counts_case.t, counts_case.y) is None
    first = engine.get_samples()["f"]
    engine.run(KEY, counts_case.t[:8], counts_case.y[:8])
    assert engine.get_samples()["f"].shape == (10, 8)
    assert engine.posterior["f"].mean.shape == (8,)
    engine.run(KEY, counts_case.t, counts_case.y)
    np.testing.assert_array_equal(engine.get_samples()["f"], first)


@pytest.mark.slow
def test_a_search_in_two_runs_is_the_search_in_one(counts_case, fitted_counts):
    engine = EP(counts_case.model, progress_bar=False, max_hyper_steps=2)
    arguments = (counts_case.t, counts_case.y)
    with pytest.warns(UserWarning, match="hyperparameters did not converge in 2 steps"):
        engine.run(KEY, *arguments, mask=counts_case.mask)
    assert not engine.diagnostics.converged
    longer = EP(counts_case.model, progress_bar=False)
    longer.run(KEY, *arguments, mask=counts_case.mask, init_state=engine.last_state)
    assert longer.diagnostics.converged
    whole = fitted_counts.last_state
    np.testing.assert_array_equal(longer.last_state.values, whole.values)
    jax.tree.map(np.testing.assert_array_equal, longer.last_state.state, whole.state)
    assert float(longer.log_evidence) == float(fitted_counts.log_evidence)


@pytest.mark.thorough
def test_a_fit_in_two_runs_is_the_fit_in_one(counts_case):
    options = {"hyper_values": {"scale": 0.8}, "progress_bar": False, "adapt_damping": False, "tol": 1e-14}
    arguments = (counts_case.t, counts_case.y)
    short = EP(counts_case.model, num_steps=2, **options)
    with pytest.warns(UserWarning, match="did not converge in 2 steps"):
        short.run(KEY, *arguments)
    with pytest.warns(UserWarning, match="did not converge in 4 steps"):
        short.run(KEY, *arguments, init_state=short.last_state)
    with pytest.warns(UserWarning, match="did not converge in 4 steps"):
        long = EP(counts_case.model, num_steps=4, **options)
        long.run(KEY, *arguments)
    np.testing.assert_allclose(short.posterior["f"].mean, long.posterior["f"].mean, rtol=1e-12)
    assert short.diagnostics.num_steps == long.diagnostics.num_steps == 4


@pytest.mark.thorough
def test_a_state_on_other_data_is_only_a_start(counts_case, fitted_counts):
    engine = EP(counts_case.model, progress_bar=False)
    other = counts_case.y + 1
    engine.run(KEY, counts_case.t, other, mask=counts_case.mask, init_state=fitted_counts.last_state)
    fresh = EP(counts_case.model, progress_bar=False)
    fresh.run(KEY, counts_case.t, other, mask=counts_case.mask)
    assert engine.diagnostics.hyper.num_evaluations > 1
    np.testing.assert_allclose(engine.posterior["f"].mean, fresh.posterior["f"].mean, atol=1e-3)
    assert abs(float(engine.log_evidence) - float(fitted_counts.log_evidence)) > 0.1


def test_a_state_of_another_model_is_refused(counts_case, fitted_line):
    engine = EP(counts_case.model, progress_bar=False)
    with pytest.raises(ValueError, match="another model"):
        engine.run(KEY, counts_case.t, counts_case.y, init_state=fitted_line.last_state)
    with pytest.raises(TypeError, match="last_state"):
        engine.run(KEY, counts_case.t, counts_case.y, init_state=fitted_line)


@pytest.mark.parametrize("hyper_values", [None, pytest.param({"scale": 0.8}, marks=pytest.mark.slow)])
def test_an_interruption_leaves_a_usable_state(counts_case, monkeypatch, hyper_values):
    original, calls = fitting_module.progress_bar, []

    class Interrupting:
        n = 0

        def update(self, amount):
            calls.append(amount)
            if len(calls) == 1:
                raise KeyboardInterrupt

        def close(self):
            pass

    from contextlib import contextmanager

    @contextmanager
    def bar(*args, **kwargs):
        yield Interrupting()

    for module in ("gaussian.fitting.fit", "front.running.chunks"):
        monkeypatch.setattr(f"numpyro_ext.infer.{module}.progress_bar", bar)
    options = {"hyper_values": hyper_values, "progress_bar": False, "num_steps": 1 if hyper_values else 100}
    engine = EP(counts_case.model, tol=1e-13, **options)
    with pytest.warns(UserWarning, match="Interrupted after"):
        engine.run(KEY, counts_case.t, counts_case.y, mask=counts_case.mask)
    assert not engine.diagnostics.converged
    assert bool(jnp.all(jnp.isfinite(engine.posterior["f"].mean)))
    assert bool(jnp.isfinite(float(engine.log_evidence)))
    monkeypatch.setattr(fitting_module, "progress_bar", original)
    resumed = EP(counts_case.model, hyper_values=hyper_values, progress_bar=False)
    resumed.run(KEY, counts_case.t, counts_case.y, mask=counts_case.mask, init_state=engine.last_state)
    assert resumed.diagnostics.converged


@pytest.fixture
def counts_programs(counts_case):
    """The programs of a run just made: those of the shared fit may have made room for others, or taken numbers that
    changed for data."""
    engine = EP(counts_case.model, progress_bar=False)
    engine.run(KEY, counts_case.t, counts_case.y, mask=counts_case.mask)
    return engine._run.programs


@pytest.mark.usefixtures("python_handles_control_c")
@pytest.mark.parametrize("moment, num_restarts", [("restart", 2), ("first chunk", 0)])
def test_control_c_keeps_what_was_computed(
    counts_case, fitted_counts, counts_programs, monkeypatch, moment, num_restarts
):
    """A real signal, while a chunk is computed: that chunk and all searches before it count."""
    original, first = counts_programs.search, float(fitted_counts.last_state.search.best.objective)
    calls = []

    def interrupted(*args):
        calls.append(int(args[2].num_evaluations))
        # The second search begins anew, at evaluation zero.
        if calls.count(0) == (1 if moment == "first chunk" else 2):
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    engine = EP(counts_case.model, progress_bar=False, num_restarts=num_restarts)
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="Interrupted after"):
        patch.setattr(counts_programs, "search", interrupted)
        engine.run(KEY, counts_case.t, counts_case.y, mask=counts_case.mask)
    assert not engine.diagnostics.converged
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if moment == "restart":
        assert float(engine.last_state.search.best.objective) == pytest.approx(first, abs=1e-9)
    engine.run(KEY, counts_case.t, counts_case.y, mask=counts_case.mask, init_state=engine.last_state)
    assert engine.diagnostics.converged
    np.testing.assert_allclose(engine.hyper["scale"].value, fitted_counts.hyper["scale"].value, rtol=1e-3)


@pytest.mark.usefixtures("python_handles_control_c")
def test_the_second_control_c_ends_the_run_at_once(counts_case, counts_programs, monkeypatch):
    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    engine = EP(counts_case.model, progress_bar=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(counts_programs, "search", interrupted)
        engine.run(KEY, counts_case.t, counts_case.y, mask=counts_case.mask)


def test_restarts_keep_the_best_and_can_only_help(counts_case, fitted_counts):
    engine = EP(counts_case.model, progress_bar=False, num_restarts=2)
    engine.run(KEY, counts_case.t, counts_case.y, mask=counts_case.mask)
    assert engine.diagnostics.hyper.objective_trace.size > fitted_counts.diagnostics.hyper.objective_trace.size
    best = float(engine.last_state.search.best.objective)
    assert best >= float(fitted_counts.last_state.search.best.objective) - 1e-8


@pytest.mark.thorough
def test_restarts_that_end_elsewhere_are_said():
    def squared(y):
        shift = numpyro.sample("shift", dist.Normal(0, 2))
        f = numpyro.sample("f", dist.Normal(0, 1).expand([8]).to_event(1))
        numpyro.sample("y", dist.Normal(0.1 * f + shift**2, 1), obs=y)

    engine = EP(squared, progress_bar=False, num_restarts=4, integrate="none")
    engine.run(jax.random.key(0), np.full(8, 3.0))
    (said,) = [message for message in engine.diagnostics.messages if "other stationary points" in message]
    value = float(engine.hyper["shift"].value)
    assert f"shift = {-value:.3g} for {value:.3g}" in said
    single = EP(squared, progress_bar=False, integrate="none")
    single.run(jax.random.key(0), np.full(8, 3.0))
    assert not any("other stationary points" in message for message in single.diagnostics.messages)


def test_the_start_of_the_search_can_be_given(counts_case, fitted_counts):
    engine = EP(counts_case.model, progress_bar=False, init_values={"scale": 2.0})
    engine.run(KEY, counts_case.t, counts_case.y, mask=counts_case.mask)
    np.testing.assert_allclose(engine.hyper["scale"].value, fitted_counts.hyper["scale"].value, rtol=1e-3)
    trace = engine.diagnostics.hyper.objective_trace
    assert trace[0] != fitted_counts.diagnostics.hyper.objective_trace[0]


@pytest.mark.parametrize(
    "values, text",
    [
        ({"scales": 1.0}, "no latent or param site 'scales'"),
        ({"scale": -1.0}, "support"),
        ({"scale": [1.0, 2.0]}, "shape"),
    ],
)
def test_given_hyperparameters_are_checked(counts_case, values, text):
    with pytest.raises(ValueError, match=text):
        EP(counts_case.model, hyper_values=values).run(KEY, counts_case.t, counts_case.y)


def test_a_prior_that_is_not_positive_definite_is_named(counts_case):
    def model(t, y):
        covariance = jnp.exp(-0.5 * ((t[:, None] - t) / 0.5) ** 2) - 0.5 * jnp.eye(t.size)
        f = numpyro.sample("latent", dist.MultivariateNormal(0.0, covariance, validate_args=False))
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    with pytest.raises(ValueError, match="latent.*positive definite"):
        EP(model, progress_bar=False).run(KEY, counts_case.t, counts_case.y)


def test_a_prior_that_fails_at_the_starting_values_names_them(counts_case):
    def model(t, y):
        length = numpyro.sample("length", dist.LogNormal(6.0, 0.1))
        covariance = jnp.exp(-0.5 * ((t[:, None] - t) / length) ** 2) - 1e-3 * jnp.eye(t.size)
        f = numpyro.sample("latent", dist.MultivariateNormal(0.0, covariance, validate_args=False))
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    with pytest.raises(ValueError, match="latent.*positive definite"):
        EP(model, progress_bar=False).run(KEY, counts_case.t, counts_case.y)


def test_a_factor_that_loses_its_digits_is_named():
    # One minus a distribution function is zero where the survival function is small.
    times, x = jnp.array([0.5, 20.0, 1.5]), jnp.array([0.0, 0.1, 0.2])

    def model():
        slopes = numpyro.sample("slopes", dist.Normal(0, 3).expand([2]))
        numpyro.factor("survival", jnp.log(1.0 - dist.Exponential(jnp.exp(slopes[0] + slopes[1] * x)).cdf(times)))

    with pytest.raises(ValueError, match=r"factor 1 of site 'survival' is -inf at the predictor 3"):
        VariationalGaussian(model).run(jax.random.key(0))


def test_observations_that_the_model_cannot_make_are_named():
    exposure, counts = jnp.array([1.0, 0.0, 2.0]), jnp.array([1, 3, 0])

    def model():
        level = numpyro.sample("level", dist.Normal(0, 3))
        numpyro.sample("y", dist.Poisson(exposure * jnp.exp(level)), obs=counts)

    with pytest.raises(ValueError, match="Factor 1 of site 'y' has the density zero at every predictor .* exposure"):
        EP(model, progress_bar=False).run(KEY)


def test_laplace_refuses_a_kink(counts_case):
    def model(t, y):
        f = numpyro.sample("f", dist.Normal(2.0, 1.0).expand([t.size]).to_event(1))
        numpyro.sample("y", dist.Poisson(jnp.maximum(f, 0.0)), obs=y)

    with pytest.raises(ModelStructureError, match="'y'.*kink"):
        LaplaceApproximation(model).run(KEY, counts_case.t, counts_case.y)


def test_many_refused_factors_are_an_error(counts_case, fitted_counts):
    reading, diagnostics = fitted_counts._run.reading, fitted_counts.diagnostics
    bad = fitted_counts._run.fit._replace(
        diagnostics=diagnostics._replace(num_skipped=3, skipped={"y": np.array([1, 4, 5])})
    )
    with pytest.raises(RuntimeError, match="3 of 12 factors.*'y'"):
        fitting_module.check_skipped(bad, reading, "EP")


@pytest.mark.thorough
def test_programs_are_not_shared_where_indices_differ():
    """In a deterministic site, and behind a function: both were taken from the first run of the program."""

    def model(index, order, y):
        f = numpyro.sample("f", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        numpyro.deterministic("chosen", f[index])
        numpyro.sample("y", dist.Normal(jnp.exp(f)[order], 1.0), obs=y)

    y, start = jnp.arange(4.0), np.zeros(3)
    for index, order in [([0, 1], [0, 1, 2, 2]), ([2, 0], [0, 1, 1, 2])]:
        engine = LaplaceApproximation(model, progress_bar=False)
        engine.run(jax.random.key(0), jnp.array(index), jnp.array(order), y)
        mode = scipy.optimize.minimize(
            lambda f, order=order: 0.5 * np.sum(f**2) + 0.5 * np.sum((np.exp(f)[order] - np.asarray(y)) ** 2), start
        )
        np.testing.assert_allclose(engine.posterior["f"].mean, mode.x, atol=1e-4)
        np.testing.assert_array_equal(engine.posterior["chosen"].mean, engine.posterior["f"].mean[jnp.array(index)])


def test_programs_are_shared_by_runs_of_the_same_structure(counts_case, counts_programs):
    engine = EP(counts_case.model, progress_bar=False)
    engine.run(KEY, counts_case.t, counts_case.y + 2, mask=counts_case.mask)
    assert engine._run.programs is counts_programs


def test_the_bar_appears_only_when_asked_and_late(counts_case, capfd):
    engine = EP(counts_case.model, hyper_values={"scale": 0.7}, progress_bar=False)
    engine.run(KEY, counts_case.t, counts_case.y)
    assert "EP" not in capfd.readouterr().err
    with fitting_module.progress_bar(3, "shown", delay=0.0) as bar:
        bar.update(3)
    assert "shown" in capfd.readouterr().err


def test_options_of_a_sampler_and_of_no_one_are_refused_with_those_there_are(counts_case):
    with pytest.raises(
        TypeError, match=r"EP, which has neither warm-up nor chains, has no option 'num_warmup'.*num_steps"
    ):
        EP(counts_case.model, num_warmup=500, num_samples=1000)
    with pytest.raises(TypeError, match=r"LaplaceApproximation has no option 'steps'; its options are .*num_steps"):
        LaplaceApproximation(counts_case.model, steps=3)
    with pytest.raises(TypeError, match=r"EP has no option 'space'.*LaplaceApproximation\(model, space='iterative'\)"):
        EP(counts_case.model, space="iterative")
    with pytest.raises(TypeError, match=r"got NUTS: give the model itself, EP\(model\)"):
        EP(NUTS(counts_case.model))
    assert EP(counts_case.model, num_samples=np.int64(7)).num_samples == 7


def public_engines():
    found = [value for name in infer.__all__ if isinstance(value := getattr(infer, name), type)]
    # ChunkedSVI reads no model: it runs NumPyro's SVI.
    return [v for v in found if hasattr(v, "run") and not inspect.isabstract(v) and v is not infer.ChunkedSVI]


def test_every_engine_refuses_a_run_within_a_compiled_function_alike():
    engines, messages = public_engines(), set()
    assert {"EP", "INLA", "BilinearVG", "BilinearEP", "StructuredMeanField", "SMC"} <= {e.__name__ for e in engines}
    for engine in engines:

        def evidence(y, engine=engine):
            run = engine(lambda y: numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y))
            run.run(KEY, y)
            return run.log_evidence

        with pytest.raises(TypeError, match=r"cannot be called within jax.jit.*run_many") as refused:
            jax.jit(evidence)(np.ones(2))
        messages.add(str(refused.value).removeprefix(engine.__name__))
    assert len(messages) == 1


def test_no_engine_has_a_run_of_its_own():
    def below(engine):
        return {engine}.union(*map(below, engine.__subclasses__()))

    engines = [engine for engine in below(BaseEngine) if engine.__module__.startswith("numpyro_ext.")]
    assert Conditioned in engines
    assert [engine for engine in engines if engine.run is not BaseEngine.run] == []


def test_checkpoints_are_refused_where_none_are_written(counts_case, tmp_path):
    with pytest.raises(TypeError, match=r"EP writes no checkpoints: leave checkpoint out.*init_state"):
        EP(counts_case.model).run(KEY, counts_case.t, counts_case.y, checkpoint=tmp_path / "state")


def test_draws_of_a_site_have_any_shape(fitted_counts):
    site = next(iter(fitted_counts.posterior.values()))
    np.testing.assert_array_equal(site.sample(KEY, (2, 3)), site.sample(KEY, 6).reshape((2, 3, *site.shape)))
