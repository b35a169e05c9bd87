"""Fits of many data sets: the same as one by one, with nothing lost when one of them goes wrong."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

from numpyro_ext.infer import EP, BilinearVG, LaplaceApproximation
from numpyro_ext.structure import ModelStructureError
from tests.infer.front.test_compiled_programs import compiled_programs
from tests.readings import with_fit_costs
from tests.tiers import thorough

NUM_ROWS = 12


def groups(group, y=None, scale=1):
    sd = numpyro.sample("sd", dist.HalfNormal(scale))
    shift = numpyro.sample("shift", dist.Normal(0, sd).expand([3]))
    numpyro.sample("y", dist.Poisson(jnp.exp(1 + shift[group])), obs=y)


def line(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)


def _datasets(count, seed=0, is_balanced=False):
    """Counts in groups of any size, so that the largest of some data sets takes another power of two."""
    rng = np.random.default_rng(seed)
    shift = np.array([-0.6, 0.0, 0.7])
    balanced = np.arange(NUM_ROWS) % 3
    indices = [rng.permutation(balanced) if is_balanced else rng.integers(0, 3, NUM_ROWS) for _ in range(count)]
    return [(index, rng.poisson(np.exp(1 + shift[index]))) for index in indices]


def _lines(count):
    rng = np.random.default_rng(1)
    return [{"y": rng.integers(0, 2, NUM_ROWS)} for _ in range(count)]


X = np.linspace(-2, 2, NUM_ROWS)


def two_at_a_time(engine):
    return with_fit_costs(engine, most_lanes=2)


def _assert_same(fits, engines):
    for number, engine in enumerate(engines):
        np.testing.assert_allclose(fits.log_evidence[number], float(engine.log_evidence), rtol=1e-9)
        for name, site in engine.posterior.items():
            np.testing.assert_allclose(fits.mean[name][number], site.mean, rtol=1e-6, atol=1e-8)
            np.testing.assert_allclose(fits.sd[name][number], site.sd, rtol=1e-6)
        for name, estimate in engine.hyper.items():
            np.testing.assert_allclose(fits.hyper[name][number], estimate.value, rtol=1e-6)
            np.testing.assert_allclose(fits[number].hyper[name].standard_error, estimate.standard_error, rtol=1e-4)


def _one_by_one(engine, datasets, **kwargs):
    for data in datasets:
        fitted = engine()
        fitted.run(
            jax.random.key(0),
            *(() if isinstance(data, dict) else data),
            **kwargs,
            **dict(data if isinstance(data, dict) else {}),
        )
        yield fitted


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [EP, pytest.param(LaplaceApproximation, marks=pytest.mark.slow)])
def test_hyperparameters_are_learned_as_one_by_one(engine):
    datasets = _datasets(3)
    fits = two_at_a_time(engine)(groups).run_many(jax.random.key(0), datasets)
    assert len(fits) == 3 and fits.converged.all() and not fits.errors
    _assert_same(fits, _one_by_one(lambda: engine(groups), datasets))
    assert fits.get_samples()["shift"].shape == (3, 1000, 3)
    assert [fit.diagnostics.converged for fit in fits[1:]] == [True, True]
    assert fits[-1].get_samples()["sd"].shape == (1000,)
    assert "3 fits of" in repr(fits)


@pytest.mark.thorough
def test_programs_for_many_data_sets_give_the_same():
    """From some number on, points of the hyperparameters are fitted by programs of their own."""
    datasets = _datasets(3, is_balanced=True)
    engine = with_fit_costs(EP, least_often=2)
    fits = engine(groups).run_many(jax.random.key(0), datasets)
    assert fits.converged.all()
    _assert_same(fits, _one_by_one(lambda: EP(groups), datasets))
    assert fits.get_samples()["sd"].shape == (3, 1000)


@pytest.mark.thorough
def test_a_field_without_hyperparameters_and_arguments_that_all_have():
    datasets = _lines(3)
    fits = two_at_a_time(EP)(line).run_many(jax.random.key(0), datasets, x=X)
    _assert_same(fits, _one_by_one(lambda: EP(line), datasets, x=X))
    assert fits.hyper == {}
    assert fits[0].diagnostics.num_steps > 1


@pytest.mark.thorough
def test_other_data_sets_compile_nothing():
    engine = two_at_a_time(EP)(groups)
    engine.run_many(jax.random.key(0), _datasets(3, is_balanced=True)).get_samples()
    with compiled_programs() as names:
        engine.run_many(jax.random.key(1), _datasets(5, seed=3, is_balanced=True)).get_samples()
    assert names == []


def test_single_arguments_and_literals():
    def model(y):
        level = numpyro.sample("level", dist.Normal(0, 2))
        numpyro.sample("y", dist.Normal(level, 1), obs=jnp.asarray(y))

    fits = EP(model).run_many(jax.random.key(0), [[1, 2, 3], [2, 4, 6]])
    np.testing.assert_allclose(fits.mean["level"], np.array([6.0, 12.0]) / (3 + 1 / 4), rtol=1e-6)


def test_data_sets_of_another_structure_are_refused_before_any_is_fitted(monkeypatch):
    monkeypatch.setattr(EP, "_fit", None)
    datasets = _datasets(2)
    short = tuple(array[:-1] for array in datasets[1])
    with pytest.raises(ValueError, match=r"datasets\[2\].*shape of site 'y' is \(11,\) there and \(12,\) here"):
        EP(groups).run_many(jax.random.key(0), [*datasets, short])
    with pytest.raises(ModelStructureError, match=r"datasets\[0\]: .*'y'"):
        EP(groups).run_many(jax.random.key(0), [(datasets[0][0], -datasets[0][1] - 1)])
    with pytest.raises(ValueError, match="no data sets"):
        EP(groups).run_many(jax.random.key(0), [])
    table = pd.DataFrame(np.ones((3, 2)))  # of which a list has the names of the columns
    for names in (table, {"north": datasets[0]}, table.groupby(0)):
        with pytest.raises(TypeError, match=r"would be a list of its names: give .*list\(table.to_numpy\(\)\)"):
            EP(groups).run_many(jax.random.key(0), names)
    with pytest.raises(TypeError, match=r"datasets\[0\] has 'y', which is given for all"):
        EP(groups).run_many(jax.random.key(0), [{"group": datasets[0][0], "y": datasets[0][1]}], y=datasets[0][1])


@pytest.mark.thorough
def test_data_outside_the_support_do_not_end_the_others():
    """The first of the data sets is the one with a negative label: the others are fitted as by themselves."""
    bad, good, other = ((X, data["y"]) for data in _lines(3))
    bad[1][0] = -1
    with pytest.warns(UserWarning, match=r"1 of 3 data sets \(0\): EP could not fit this: datasets\[0\]: .*'y'"):
        fits = EP(line).run_many(jax.random.key(0), [bad, good, other])
    assert list(fits.errors) == [0] and np.isnan(fits.log_evidence[0])
    alone = EP(line, progress_bar=False)
    alone.run(jax.random.key(0), *other)
    np.testing.assert_allclose(fits.log_evidence[2], float(alone.log_evidence), rtol=1e-6)
    with pytest.raises(ModelStructureError, match="'y'"):
        fits[0]


@pytest.mark.thorough
def test_what_cannot_be_fitted_does_not_end_the_others():
    datasets = [(X, data["y"]) for data in _lines(3)]
    datasets[1] = (1e200 * X, datasets[1][1])
    with pytest.warns(UserWarning, match=r"1 of 3 data sets \(1\): EP could not fit this"):
        fits = EP(line).run_many(jax.random.key(0), datasets)
    assert list(fits.errors) == [1]
    np.testing.assert_array_equal(np.isfinite(fits.log_evidence), [True, False, True])
    np.testing.assert_array_equal(np.isfinite(fits.mean["slope"]), [True, False, True])
    with pytest.raises(ValueError, match="finite"):
        fits[1]
    with pytest.raises(ValueError, match="finite"):
        EP(line).run_many(jax.random.key(0), [datasets[1]])


@pytest.mark.thorough
def test_warnings_of_several_data_sets_are_one():
    with pytest.warns(UserWarning) as caught:
        engine = EP(groups, max_hyper_steps=1, hyper_tol=1e-8)
        fits = engine.run_many(jax.random.key(0), _datasets(4, is_balanced=True))
    assert not fits.converged.any()
    assert len(caught) == 1
    assert "4 of 4 data sets (0, 1, 2, 3): EP did not converge" in str(caught[0].message)


@pytest.mark.thorough
def test_interrupted(monkeypatch, python_handles_control_c):
    fit, calls = EP._fit, []

    def interrupted(self, *args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return fit(self, *args, **kwargs)

    monkeypatch.setattr(EP, "_fit", interrupted)
    with pytest.warns(UserWarning, match="Interrupted: 2 of 5 data sets were fitted"):
        fits = two_at_a_time(EP)(groups).run_many(jax.random.key(0), _datasets(5, is_balanced=True))
    assert len(fits) == 2 and fits.converged.all()


@pytest.mark.thorough
def test_engines_that_fit_one_after_the_other():
    def factors(y):
        rows = numpyro.sample("rows", dist.Normal(0, 1).expand([6, 2]).to_event(2))
        columns = numpyro.sample("columns", dist.Normal(0, 1).expand([5, 2]).to_event(2))
        numpyro.sample("y", dist.Poisson(jnp.exp(rows @ columns.T)), obs=y)

    counts = np.random.default_rng(0).poisson(1.0, (2, 6, 5))
    fits = BilinearVG(factors, num_restarts=0, num_steps=500).run_many(jax.random.key(0), list(counts))
    assert fits.log_evidence.shape == (2,)
    assert fits.mean["rows"].shape == (2, 6, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("max_hyper_steps", [1, *thorough(2)])
def test_no_more_steps_are_taken_than_one_by_one(max_hyper_steps):
    datasets = _datasets(2, is_balanced=True)
    options = {
        "integrate": "none",
        "max_hyper_steps": max_hyper_steps,
        "init_values": {"sd": 3.0},
        "progress_bar": False,
    }
    with pytest.warns(UserWarning, match="did not converge"):
        fits = EP(groups, **options).run_many(jax.random.key(0), datasets)
    for k, data in enumerate(datasets):
        with pytest.warns(UserWarning, match="did not converge"):
            engine = EP(groups, **options)
            engine.run(jax.random.key(0), *data)
        alone, together = engine.diagnostics.hyper, fits[k].diagnostics.hyper
        assert alone.num_iterations == together.num_iterations == max_hyper_steps
        assert alone.num_evaluations == together.num_evaluations
        np.testing.assert_allclose(fits[k].log_evidence, float(engine.log_evidence), rtol=1e-9)
