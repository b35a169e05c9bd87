"""What sequential Monte Carlo refuses, and what it warns of."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from jax import random

from numpyro_ext.infer import SMC
from numpyro_ext.structure import ModelStructureError
from tests.infer.monte_carlo.levels import Y, level_evidence, level_model, with_param

KEY = random.key(0)


@pytest.mark.thorough
def test_missing_values_are_drawn_and_not_sampled():
    seen = np.arange(40) % 4 > 0

    def model(y, seen):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(level, 1), obs=y, obs_mask=seen)

    smc = SMC(model, num_particles=1000, progress_bar=False)
    smc.run(KEY, Y, seen)
    assert "1 dimensions" in smc.describe()
    assert abs(smc.log_evidence - level_evidence(Y[seen])) < 3.0 * smc.log_evidence.standard_error
    drawn = np.asarray(smc.get_samples()["y_unobserved"])[:, ~seen]
    assert abs(drawn.mean() - Y[seen].sum() / 31) < 4.0 * np.sqrt((1 / 31 + 1 / 10) / 300)


@pytest.mark.thorough
def test_observations_that_depend_on_missing_values_are_warned_of():
    seen = np.arange(10) > 0

    def model(y, seen):
        level = numpyro.sample("level", dist.Normal(0, 1))
        whole = numpyro.sample("x", dist.Normal(level, 1).expand([10]), obs=y, obs_mask=seen)
        numpyro.sample("y", dist.Normal(whole, 1), obs=y)

    with pytest.warns(UserWarning, match="depend on the missing values of x_unobserved, which are not sampled"):
        SMC(model, num_particles=100, progress_bar=False).run(KEY, Y[:10], seen)


def with_discrete(y):
    kind = numpyro.sample("kind", dist.Bernoulli(0.5))
    numpyro.sample("y", dist.Normal(kind, 1), obs=y)


def flat(y):
    level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), ()))
    numpyro.sample("y", dist.Normal(level, 1), obs=y)


def masked(y):
    level = numpyro.sample("level", dist.Normal(0, 1).mask(False))
    numpyro.sample("y", dist.Normal(level, 1), obs=y)


def subsampled(y):
    level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("rows", 40, subsample_size=5):
        numpyro.sample("y", dist.Normal(level, 1), obs=numpyro.subsample(y, 0))


def no_data(y):
    numpyro.sample("level", dist.Normal(0, 1))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (with_param, "site 'scale' is a param statement.*hyper_values"),
        (with_discrete, "site 'kind' is discrete .* sum it out"),
        (flat, "site 'level' has a flat prior"),
        (masked, "site 'level' is masked"),
        (subsampled, "plate 'rows' draws a random subsample"),
        (no_data, "no observed site"),
    ],
)
def test_models_without_an_answer_are_refused(model, words):
    with pytest.raises(ValueError, match=words):
        SMC(model).run(KEY, Y)


@pytest.mark.thorough
def test_data_that_no_particle_explains():
    def uniform(y):
        end = numpyro.sample("end", dist.Uniform(0, 1))
        numpyro.sample("y", dist.Uniform(0, end), obs=y)

    with pytest.raises(ValueError, match=r"site 'y'\[2\] \(value 1.7\) is zero"):
        SMC(uniform, progress_bar=False).run(KEY, np.array([0.2, 0.5, 1.7]))
    # that which some explain is no obstacle
    smc = SMC(uniform, num_particles=2000, progress_bar=False)
    smc.run(KEY, np.array([0.2, 0.5, 0.7]))
    exact = np.log((0.7**-2 - 1.0) / 2.0)
    assert abs(smc.log_evidence - exact) < 3.5 * smc.log_evidence.standard_error < 0.2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_particles": 1}, "num_particles must be an integer of at least 2"),
        ({"num_particles": 10.0}, "num_particles"),
        ({"path": "annealed"}, "path must be one of"),
        ({"kernel": "gibbs"}, "kernel must be one of"),
        ({"ess_threshold": 1.0}, "between 0 and 1"),
        ({"ess_threshold": "half"}, "between 0 and 1"),
        ({"num_moves": 0}, "num_moves"),
        ({"num_particles": 1001, "waste_free": True}, "multiple of 20"),
        ({"num_particles": 1001, "devices": 2 * jax.devices()}, "divided evenly"),
    ],
)
def test_options_outside_their_range(options, words):
    with pytest.raises(ValueError, match=words):
        SMC(level_model, **options)


@pytest.mark.thorough
def test_arguments_of_other_kinds():
    """Literals that people type: what is meant is taken, what is not is refused by name."""
    assert SMC(level_model, num_particles=np.int64(100)).num_particles == 100
    with pytest.raises(TypeError, match="hyper_values are a dictionary"):
        SMC(level_model, hyper_values=[1.0])
    with pytest.raises(TypeError, match=r"jax.devices\(\)"):
        SMC(level_model, devices=2)
    with pytest.raises(TypeError, match=r"jax.devices\(\)"):
        SMC(level_model, devices="cpu")
    smc = SMC(level_model, num_particles=100, progress_bar=False)
    with pytest.raises(TypeError, match="last_state of an earlier run"):
        smc.run(KEY, Y, np.arange(40) < 20, init_state=3)
    smc.run(KEY, Y, np.arange(40) < 20)
    with pytest.raises(ModelStructureError, match="shapes of data and masks"):
        smc.update(Y, np.arange(3) < 2)
    with pytest.raises(ModelStructureError, match="no type of numbers"):
        smc.update(pd.Series(["a"] * 40), np.arange(40) < 20)


@pytest.mark.thorough
def test_columns_of_pandas_are_arrays_to_a_model_that_fails_on_them():
    def line(table, y):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(slope * table["x"].to_numpy(), 1.0), obs=y)

    table = pd.DataFrame({"x": np.linspace(-1, 1, 40)})
    found = []
    for y in (Y, pd.Series(Y)):
        smc = SMC(line, num_particles=100, progress_bar=False)
        smc.run(KEY, table, y)
        found.append(float(smc.log_evidence))
    assert found[0] == found[1]


@pytest.mark.thorough
def test_a_kernel_that_hardly_moves_is_reported():
    def funnel(y):
        log_scale = numpyro.sample("log_scale", dist.Normal(0, 3))
        numpyro.sample("x", dist.Normal(0, jnp.exp(log_scale)).expand([9]).to_event(1))
        numpyro.sample("y", dist.Normal(log_scale, 3), obs=y)

    smc = SMC(funnel, num_particles=200, kernel="random-walk", num_moves=2, progress_bar=False)
    with pytest.warns(UserWarning, match="hardly moves"):
        smc.run(KEY, 0.5)
    assert not smc.diagnostics.converged


@pytest.mark.thorough
def test_particles_too_few_to_judge_the_end_are_reported():
    smc = SMC(level_model, num_particles=2, progress_bar=False)
    with pytest.warns(UserWarning, match="2 particles are too few to judge the end by"):
        smc.run(KEY, Y)
    assert not smc.diagnostics.converged
